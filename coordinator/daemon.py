"""The coordinator's process: its ports, its tasks, the admin socket, copies of the state, and its end.

What the run does is decided by the machine and carried out by the executor (`executor.py`), on one loop. The journal is
written in one storage thread, snapshots in another, and the arithmetic runs in one compute thread.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from farloop.algo.spec import NodeId
from farloop.coordinator import admin
from farloop.coordinator.bulk_plane import BulkPlane
from farloop.coordinator.change_terms import Requests
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.records import AllowedKey
from farloop.coordinator.executor import STATUS_S, CoordinatorExecutor
from farloop.coordinator.net.link_monitor import LinkMonitor
from farloop.coordinator.net.router import SessionRouter
from farloop.coordinator.net.zmq_router import ZmqRouter
from farloop.coordinator.observe.metrics import Metrics, TrafficMetrics
from farloop.coordinator.observe.observer import Observer
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.storage.copies import Copying, StateCopy
from farloop.coordinator.storage.mirror import Mirror
from farloop.coordinator.storage.objects import Sign
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.storage.store import Store
from farloop.monitoring.status import STATUS_FILE
from farloop.runtime.http_objects import HttpObjects
from farloop.runtime.system import LoopClock, ThreadWorker
from farloop.wire.keys import fingerprint
from farloop.wire.limits import LAST_CALL_S
from farloop.wire.reasons import Reason

_log = logging.getLogger(__name__)

FAREWELL_S = 30.0  # how long a finished run waits for its nodes to say good-bye, including those that are expected back
GOODBYE_S = 0.3  # for the farewells to leave the socket
DIAL_BACK_S = 2.0  # between two looks for nodes whose declared address was not tried yet


class Coordinator:
    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        adopt: AdoptionSettings | None = None,
        mirror: Mirror | None = None,
        bulk: Sign | None = None,
    ) -> None:
        """`adopt`: the state is an old copy; continue from what nodes hold. `mirror`: what the store's files are
        mirrored by. `bulk` signs URLs of the object store that deltas and updates go by. Raises KeyFileError, BindError
        or CopyFailed. Make it on the running loop."""
        self.config, self.store = config, store
        self.metrics = Metrics()
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        clock = LoopClock(self._fail)
        self._compute = ThreadWorker("compute", clock.post)
        self.machine = CoordinatorMachine(
            store.ledger.copy(),
            now=clock.now(),
            liveness_s=config.timing.liveness_s,
            floor_share=config.min_participation,
            drops_silent=config.mitigation in ("drop", "act"),
            adopt=adopt,
        )
        disk, snapshots = ThreadWorker("storage", clock.post), ThreadWorker("snapshots", clock.post)
        storage = StorageQueue(store, disk, clock, self.machine.alarms, self._fail, beside=snapshots)
        self.observer = Observer(store, config.state_dir / "metrics.jsonl", self.metrics, storage.hold)
        self._mirror = mirror
        if mirror is not None:
            self.observer.standbys, self.observer.standby_alarms = mirror.status, mirror.alarms
            mirror.nodes_silent_s = lambda: self._nodes_silent_s(clock.now())
        self._copying: Copying | None = None
        if config.copy_to:
            self._copying = Copying(config.copy_to, config.copy_every_s, self._cut, self.machine.alarms)
            self.observer.copies = self._copying.status
            self.metrics.copy_interval.set(config.copy_every_s)
        self._bulk: BulkPlane | None = None
        limits = config.limits
        if bulk is not None:
            objects = HttpObjects(clock.post, lambda: config.uplink.rate(clock.minute_of_day()))
            self._bulk = BulkPlane(objects, bulk, clock, self.machine.alarms, self.metrics.count_objects)
            limits = dataclasses.replace(limits, early_pool_bytes=0)  # nodes send no byte before they are asked to
        self._socket = ZmqRouter(
            endpoint=config.bind,
            key=config.key,
            allow=config.allow,
            max_frame_bytes=config.limits.max_frame_bytes,
            congestion=config.congestion,
            turned_away=self.observer.turned_away,
            allowed=self._keys_allowed,
        )
        self.link = SessionRouter(
            self._socket,
            clock,
            on_event=lambda peer, event: self.executor.on_session_event(peer, event),
            limits=limits,
            timing=config.timing,
            uplink=config.uplink,
            turned_away=self.observer.turned_away,
        )
        self._links = LinkMonitor(
            config.probe_bytes,
            self.link.working_for,
            clock.now(),
            quiet_s=config.probe_idle_s,
            share=config.probe_share,
        )
        self.executor = CoordinatorExecutor(
            clock=clock,
            compute=self._compute,
            storage=storage,
            store=store,
            machine=self.machine,
            router=self.link,
            observer=self.observer,
            fatal=self._fail,
            adapt=config.mitigation,
            links=self._links,
            metrics=self.metrics,
            bulk=self._bulk,
            model_path=config.state_dir / "model.safetensors",
            changed=self._moved,
        )
        self.observer.inventory, self.observer.link_alarms = self._links.status, self._links.alarms
        self.observer.uplink = self.link.uplink
        self.observer.watch = self.executor.stragglers.status
        requests = Requests(self.machine, store.ledger, self.executor.happened, config.state_dir)
        self._door = admin.AdminSocket(config.state_dir, {**requests.handlers, "status": self._status})

    def _keys_allowed(self, keys: Mapping[NodeId, Sequence[bytes]]) -> None:
        held = (AllowedKey(node=node, fingerprint=fingerprint(key)) for node, owned in keys.items() for key in owned)
        self.executor.happened(ev.KeysAllowed(keys=frozenset(held), time_s=datetime.now(UTC).timestamp()))

    def _nodes_silent_s(self, now: float) -> float:
        """Since any node was heard of; 0 while none is connected. Any thread."""
        return min((now - peer.session.heard_at for peer in tuple(self.executor.sessions.values())), default=0.0)

    async def _status(self, request: admin.Request) -> admin.Answer:
        self.observer.refresh(self.machine)
        answer: admin.Answer = json.loads(self.observer.status_json)
        return answer

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the run is finished and its nodes have left, or `stop` is set.

        Raises StorageFailed: the disk failed; start again to recover.
        """
        executor = self.executor
        self._started_at = asyncio.get_running_loop().time()
        await self._door.open()
        try:
            executor.start()
            executor.storage.verify_older()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._socket.run(), name="socket"),
                    group.create_task(self._count_traffic(), name="traffic"),
                    group.create_task(self._dial_back(), name="dial-back"),
                ]
                if self._copying is not None:
                    tasks.append(group.create_task(self._copying.run(), name="copies"))
                await self._first(stop.wait(), self._until_told())
                if not executor.finished:
                    self.machine.stop()
                reason = Reason.RUN_FINISHED if executor.finished else Reason.COORDINATOR_STOPPING
                self.observer.says_good_bye(reason)
                executor.say_goodbye(reason)
                await asyncio.sleep(GOODBYE_S)
                if self._copying is not None:
                    await self._copying.last(self._first(stop.wait(), self._until(lambda: False)))
                for task in tasks:
                    task.cancel()
            self._raise_error()
        finally:
            executor.stop()
            await self._door.close()
            self.link.close()
            self.observer.refresh(self.machine)
            self.observer.save_status(self.config.state_dir / STATUS_FILE)
            self.observer.close()
            if self._copying is not None:
                self._copying.close()
            if self._bulk is not None:
                self._bulk.close()
            self._compute.close()
            if self._mirror is not None:
                self._mirror.close()  # nothing is told any more, so nothing waits for a standby
            executor.storage.close()

    async def _until_told(self) -> None:
        """Wait until the run is finished and its nodes know. A node that is away dials again within `LAST_CALL_S`. One
        that no earlier start of this coordinator had told of the end is not known here: after a restart every node has
        as long to come, whether it is known or not."""
        await self._until(lambda: self.executor.finished)
        serves = self.config.after_end == "serve"
        _log.info("run finished note='%s'", "serving until stopped" if serves else "serving until all nodes know")
        if self._copying is not None:
            await self._first(self._copying.copy(), self._until(lambda: False))
        await self._until(lambda: not serves)
        restarted, now = self.store.ledger.epoch > 1, asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_CALL_S):
                await asyncio.sleep(self._started_at + LAST_CALL_S - now if restarted else 0.0)
                await self._until(lambda: self.executor.idle and self.machine.all_left)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._until(lambda: self.executor.idle)

    async def _first(self, *ends: Coroutine[Any, Any, object]) -> None:
        """Wait until one of them has ended. Raises what ends the process."""
        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(end) for end in ends]
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            for waiter in waiters:
                waiter.cancel()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition of the executor. Raises what ends the process."""
        while not condition():
            self._raise_error()
            self._changed.clear()
            await self._changed.wait()

    def _moved(self) -> None:
        """Wake `_until`, which every command would otherwise: it cannot be over while a session is open."""
        if self.executor.finished or not self.executor.sessions:
            self._changed.set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _cut(self) -> StateCopy:
        cut: asyncio.Future[StateCopy] = asyncio.get_running_loop().create_future()

        def taken(copy: StateCopy) -> None:
            if not cut.done():
                cut.set_result(copy)

        self.executor.storage.cut(taken)
        return await cut

    async def _count_traffic(self) -> None:
        traffic = TrafficMetrics(self.metrics, self.config.egress_price_per_gb, self.config.egress_currency)
        while True:
            traffic.update(self.executor.sessions)
            await asyncio.sleep(STATUS_S)

    async def _dial_back(self) -> None:
        while True:
            await self._links.dial_back(self.machine.members, dict(self.executor.sessions))
            await asyncio.sleep(DIAL_BACK_S)
