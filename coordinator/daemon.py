"""The coordinator's shell: turns what the link and the store report into events, and carries out the commands.

One loop. Commands run one after the other in the order the machine gave them, so that a record is durable before
what follows from it is told; commits and inputs (`uploads.py`) run beside them, each ending in exactly one event. The
disk is touched from one storage thread (`storage_queue.py`), the arithmetic runs in one compute thread.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, assert_never

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator import admin, aggregator, commits
from farloop.coordinator.change_terms import handlers
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.downloads import Downloads
from farloop.coordinator.errors import MachineBroken, NoRoom
from farloop.coordinator.net.link_monitor import LinkMonitor
from farloop.coordinator.net.link_table import PROBE_SHARE, QUIET_S
from farloop.coordinator.net.router import OF_THE_PROCESS, SessionRouter
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.observe.metrics import Metrics, TrafficMetrics
from farloop.coordinator.observe.observer import Observer
from farloop.coordinator.observe.straggler_monitor import StragglerMonitor
from farloop.coordinator.storage.copies import Copying
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.storage.store import Store
from farloop.coordinator.uploads import AnchorUploads, DeltaUploads
from farloop.quant.errors import NonFiniteError
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.limits import Limits, Timing
from farloop.wire.reasons import Reason
from farloop.wire.session import State

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FAREWELL_S = 30.0
"""How long a finished run waits for its nodes to say good-bye, those that may yet come back to do so included."""
TICK_S = 0.25
"""How often the status is refreshed."""
DIAL_BACK_S = 2.0
"""How often it is looked for nodes whose declared address was not tried yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """What is local to a coordinator."""

    state_dir: Path
    """Journal, snapshots, metrics.jsonl and the final model."""
    bind: str = "tcp://127.0.0.1:7700"
    """The one port that nodes must reach."""
    key: Path | None = None
    """Secret key file. CURVE is on with it, and required beyond loopback."""
    allow: Path | None = None
    """Folder of the nodes' public keys."""
    http: str = "127.0.0.1:9700"
    """Where /metrics, /healthz, /readyz and /status are served; an empty text serves nothing."""
    http_names: str = ""
    """Public host names under which these pages may be asked for, as run.example.com, with commas between them. IP
    addresses and private names need not be given; * takes any name."""
    floor_share: float | None = None
    """Least share of the live nodes that must have been merged in the last rounds, or the run is held; 0 never holds
    it. Unless given, 0.5 where windows wait for all that are expected, and 0 where there is a quorum."""
    copy_to: str = ""
    """Where the state is copied to, as s3://BUCKET/PREFIX, gs://… or file:///PATH; an empty text copies nothing."""
    copy_every_s: float = 600.0
    """Seconds between two copies."""
    egress_price_per_gb: float = 0.0
    """What 10⁹ bytes that leave a site cost, in whatever currency: for the metrics alone."""
    congestion: str = ""
    """Congestion control of the connections to nodes, as bbr; the system's unless given."""
    probe_bytes: int = 32 << 20
    """Most bytes of one probe, which measures one direction of a link while nobody waits for bytes; 0 measures by what
    has to be sent anyway, alone."""
    probe_share: float = PROBE_SHARE
    """Share of the bytes that a node's link moves for the run that probes of the link may take, beyond one of 64 KiB in
    each direction."""
    probe_quiet_s: float = QUIET_S
    """Seconds for which nobody must have waited for bytes before a link is probed."""
    adapt: str = "drop"
    """What is done about nodes and links that have become slow or silent: "off" nothing; "advise" measures links anew
    and says what else would help; "drop" also lets a window go on without a node that sends nothing for several times
    its usual time; "act" also gives a slow node lighter terms, or leaves it out of a round."""
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)


class Coordinator:
    """One start of the coordinator of one run."""

    def __init__(self, config: CoordinatorConfig, store: Store, adopt: AdoptionSettings | None = None) -> None:
        """`adopt`: the state is an old copy, and what nodes hold comes first.

        Raises KeyFileError, BindError or CopyFailed. To be made on the running loop.
        """
        self.config, self.store = config, store
        self.metrics = Metrics()
        self.machine = CoordinatorMachine(
            store.ledger.copy(),
            now=time.monotonic(),
            liveness_s=config.timing.liveness_s,
            floor_share=config.floor_share,
            drops_silent=config.adapt in ("drop", "act"),
            adopt=adopt,
        )
        self._upkeep = StorageQueue(store, self.machine.alarms)
        self.observer = Observer(store, config.state_dir / "metrics.jsonl", self.metrics, self._upkeep.hold)
        self._copying: Copying | None = None
        if config.copy_to:
            self._copying = Copying(config.copy_to, config.copy_every_s, self._upkeep.cut, self.machine.alarms)
            self.observer.copies = self._copying.status
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._commands: deque[ev.Command] = deque()
        self._work = asyncio.Event()
        self._peers: dict[int, Peer] = {}
        self._sessions: dict[NodeId, Peer] = {}
        self._downloads = Downloads(store, self.machine.ledger, self._in_compute, self._run_commands)
        self._inputs = DeltaUploads(store, self._upkeep, self._in_compute)
        self._anchors = AnchorUploads(store, self._upkeep, self._in_compute)
        self._door = admin.AdminSocket(config.state_dir, handlers(self.machine, store.ledger, self._happened))
        self._done = asyncio.Event()
        self._all_left = asyncio.Event()
        """No session is open, and nobody may yet be back."""
        self._jobs: asyncio.TaskGroup | None = None
        self.link = SessionRouter(
            endpoint=config.bind,
            key=config.key,
            allow=config.allow,
            on_event=self._heard,
            limits=config.limits,
            timing=config.timing,
            congestion=config.congestion,
            turned_away=self.observer.turned_away,
        )
        self._sight = LinkMonitor(
            config.probe_bytes,
            self.link.working_for,
            time.monotonic(),
            quiet_s=config.probe_quiet_s,
            share=config.probe_share,
        )
        self.observer.inventory = self._sight.status
        self._lookout = StragglerMonitor(config.adapt, self.machine, self._sight, self.metrics, self._happened)
        self.observer.watch = self._lookout.status

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the run is finished and its nodes have left, or `stop` is set.

        Raises:
            StorageFailed: the disk failed; start again to recover.
        """
        self._run_commands(self.machine.start())
        await self._door.open()
        try:
            async with asyncio.TaskGroup() as group:
                self._jobs = group
                tasks = [
                    group.create_task(self.link.run(), name="link"),
                    group.create_task(self._execute_all(), name="commands"),
                    group.create_task(self._downloads.run(), name="snapshots"),
                    group.create_task(self._keep_time(), name="deadlines"),
                    group.create_task(self._upkeep.keep_watch(), name="owner"),
                    group.create_task(self._observe(), name="status"),
                    group.create_task(self._dial_back(), name="dial-back"),
                ]
                if self._copying is not None:
                    tasks.append(group.create_task(self._copying.run(), name="copies"))
                await self._until_over(stop)
                if stop.is_set():
                    self.machine.stop()
                await self._say_good_bye(stopping=stop.is_set())
                for task in tasks:
                    task.cancel()
                self._upkeep.give_up()
        finally:
            await self._door.close()
            self.link.close()
            self.observer.refresh(self.machine)
            self.observer.save_status(self.config.state_dir / "status.json")
            self.observer.close()
            if self._copying is not None:
                self._copying.close()
            self._compute.shutdown()
            await self._upkeep.close()

    async def _until_over(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(event.wait()) for event in (stop, self._done)]
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            for waiter in waiters:
                waiter.cancel()
        if not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._all_left.wait()

    async def _say_good_bye(self, *, stopping: bool) -> None:
        reason = Reason.COORDINATOR_STOPPING if stopping else Reason.RUN_FINISHED
        self.observer.says_good_bye(reason)
        for peer in list(self._sessions.values()):
            if peer.session.state is State.OPEN:
                with self.link.working_for(peer) as session:
                    session.send(msg.Leave(reason=reason), time.monotonic())
        await asyncio.sleep(0.3)  # the farewells leave the socket

    # --- events

    def _happened(self, event: ev.Event) -> None:
        """Have the machine take an event.

        An unexpected error in it is a bug of ours. The ledger and the records for the journal change together, so what
        it had decided is true and is carried out. Where its invariants hold all the same, the error goes on to whoever
        caused the event; where they do not, nothing that it says can be relied on any more.

        Raises:
            MachineBroken: stop, and begin again from the journal.
        """
        now = time.monotonic()
        try:
            self.observer.saw(event, self.machine)
            self._lookout.watch.saw(event, self.machine, now)
        except Exception:  # noqa: BLE001 - what watches the run stops nothing in it
            _log.exception("not observed event=%s", type(event).__name__)
        try:
            commands = self.machine.handle(event, now)
        except Exception as error:
            self._run_commands(self.machine.start())
            try:
                self.machine.check()
            except Exception as broken:
                raise MachineBroken(f"{type(event).__name__} broke the machine: {error}") from broken
            raise
        self._run_commands(commands)

    def _run_commands(self, commands: list[ev.Command]) -> None:
        self._commands.extend(commands)
        self._work.set()
        self._see_who_is_left()

    def _see_who_is_left(self) -> None:
        if self._sessions or self.machine.awaited:
            self._all_left.clear()
        else:
            self._all_left.set()

    def _heard(self, peer: Peer, event: wire_ev.SessionEvent) -> None:
        """What a session reports."""
        match event:
            case wire_ev.MessageReceived(message=msg.Hello() as hello):
                self._greet(peer, hello)
            case _ if self._sight.ended(event):
                pass
            case wire_ev.MessageReceived(message=message):
                node = self._node_of(peer)
                if node is None or self._sight.heard(peer, node, message, self.machine.members, time.monotonic()):
                    return
                self._happened(ev.NodeMessage(session=peer.number, node=node, message=message))
            case wire_ev.BlobReceived(blob=BlobId(kind=BlobKind.SNAPSHOT) as blob, data=data):
                self._start(self._keep_anchor(blob, data))
            case wire_ev.BlobCorrupt(blob=blob) | wire_ev.BlobIdle(blob=blob) if blob.kind is BlobKind.SNAPSHOT:
                if failed := self._anchors.expected.ended(blob, spoiled=isinstance(event, wire_ev.BlobCorrupt)):
                    self._happened(failed)
            case wire_ev.BlobReceived(blob=blob, data=data):
                self._lookout.whole(blob, time.monotonic())
                if offer := self._inputs.arrived(blob):
                    self._start(self._keep_input(offer, data))
            case wire_ev.BlobCorrupt(blob=blob):
                if offer := self._inputs.arrived(blob):
                    self._happened(self._inputs.corrupt(offer))
            case wire_ev.BlobIdle(blob=blob):
                if offer := self._inputs.arrived(blob):
                    self._happened(self._inputs.idle(offer))
            case wire_ev.SessionClosed(reason=reason, detail=detail):
                self._parted(peer, reason, detail)
            case wire_ev.BlobSent(blob=blob) | wire_ev.BlobDeclined(blob=blob):
                self._downloads.ended(peer, blob)
            case _:
                assert_never(event)
        if not isinstance(event, wire_ev.MessageReceived):
            while waited := self._inputs.next():
                self._receive(waited)

    def _parted(self, peer: Peer, reason: Reason, detail: str) -> None:
        node = self._node_of(peer)
        self._peers.pop(peer.number, None)
        self._drop_session(peer)
        try:
            self._downloads.gone(peer.number)
            if node is not None:
                self._inputs.parted(node)
            self.observer.parted(node, reason, detail, self.machine)
        finally:  # the machine hears of it, whatever goes wrong here
            if node is not None:
                self._happened(ev.NodeDisconnected(session=peer.number, node=node, reason=reason))

    def _greet(self, peer: Peer, hello: msg.Hello) -> None:
        self._peers[peer.number] = peer
        if peer.owner is not None and hello.node != peer.owner:
            detail = f"the key is that of {peer.owner}, the node calls itself {hello.node}"
            refused = msg.Refused(reason=Reason.WRONG_KEY, detail=detail, retriable=False)
            return self._run_commands([ev.Refuse(session=peer.number, refused=refused)])
        self._happened(ev.NodeHello(session=peer.number, node=hello.node, hello=hello))

    def _node_of(self, peer: Peer) -> NodeId | None:
        return next((node for node, known in self._sessions.items() if known is peer), None)

    def _drop_session(self, peer: Peer) -> None:
        self._sessions = {node: known for node, known in self._sessions.items() if known is not peer}
        self._see_who_is_left()

    # --- commands

    async def _execute_all(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._commands:
                await self._execute(self._commands.popleft())

    async def _execute(self, command: ev.Command) -> None:
        self.observer.carries_out(command)
        match command:
            case ev.Record(record=rec.Adopted() as record):
                await self._upkeep.adopt(record)
            case ev.Record(record=record):
                await self._upkeep.append(record)
            case ev.Accept(session=number, node=node, welcome=welcome):
                if peer := self._peers.get(number):
                    self._sessions[node] = peer
                    self._tell(peer, dataclasses.replace(welcome, lane_token=peer.token))
            case ev.Refuse(session=number, refused=refused):
                if peer := self._peers.pop(number, None):
                    self._tell(peer, refused)
            case ev.CloseSession(session=number, reason=reason):
                if peer := self._peers.pop(number, None):
                    self._drop_session(peer)
                    self.link.closed_by_us(peer, reason)
            case ev.Tell(node=node, message=message):
                if peer := self._sessions.get(node):
                    self._tell(peer, message)
            case ev.Receive(offer=offer):
                self._receive(offer)
            case ev.ReceiveAnchor():
                self._receive_anchor(command)
            case ev.Publish(nodes=nodes, committed=committed):
                self._publish(nodes, committed)
                self._downloads.committed(committed.fragment, committed.version)
            case ev.SendSnapshot(node=node, fragment=fragment):
                if peer := self._sessions.get(node):
                    self._downloads.ask(peer, fragment)
            case ev.OfferSnapshot(session=number):
                if peer := self._peers.get(number):
                    with self.link.working_for(peer) as session:
                        self._downloads.offer(session, number)
                else:
                    self._downloads.gone(number)
            case ev.Commit():
                self._start(self._commit(command))
            case ev.Forget(blob=blob):
                self._inputs.forget([blob])
            case ev.Finish():
                await self._upkeep.export(self.config.state_dir / "model.safetensors")
                self._done.set()
            case _:
                assert_never(command)

    def _tell(self, peer: Peer, message: msg.Message) -> None:
        if peer.session.state in (State.OPENING, State.OPEN):
            with self.link.working_for(peer) as session:
                session.send(message, time.monotonic())

    def _receive(self, offer: msg.Offer) -> None:
        peer = self._sessions.get(offer.blob.node)
        if peer is None or peer.session.state is not State.OPEN:
            return
        with self.link.working_for(peer) as session:
            failed = self._inputs.let_in(session, offer, self.machine.windows.get(offer.blob.fragment))
            if failed is not None:
                return self._happened(failed)
            self._lookout.asked(offer.blob, self._inputs.to_come(offer.blob), time.monotonic())

    async def _keep_input(self, offer: msg.Offer, data: bytearray) -> None:
        peer = self._sessions.get(offer.blob.node)
        try:
            event = await self._inputs.keep(offer, data)
        except OF_THE_PROCESS:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of a session: the delta has its outcome, the session ends
            event = self._inputs.broken(offer, error)
            self._fail(peer, error)
        self._happened_to(peer, event)

    def _happened_to(self, peer: Peer | None, event: ev.Event) -> None:
        """Have the machine take what came of a job for a session; the session may be over by now."""
        try:
            self._happened(event)
        except OF_THE_PROCESS:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of a session
            self._fail(peer, error)

    def _fail(self, peer: Peer | None, error: Exception) -> None:
        """A job for a session went wrong: the session ends, if it is still there."""
        if peer is None:
            return _log.error("a job for a session that is over went wrong", exc_info=error)
        with self.link.working_for(peer):
            raise error

    def _receive_anchor(self, command: ev.ReceiveAnchor) -> None:
        peer, size = self._sessions.get(command.offer.blob.node), self._anchors.size(command.anchor.fragment)
        if peer is None or peer.session.state is not State.OPEN:
            return
        with self.link.working_for(peer) as session:
            if failed := self._anchors.expected.let_in(session, command, size, time.monotonic()):
                self._happened(failed)

    async def _keep_anchor(self, blob: BlobId, data: bytearray) -> None:
        peer, failed = self._sessions.get(blob.node), self._anchors.expected.would_fail(blob)
        try:
            event = await self._anchors.keep(blob, data)
        except OF_THE_PROCESS:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of a session: the anchor has its outcome, the session ends
            event = failed
            self._fail(peer, error)
        if event:
            self._happened_to(peer, event)

    def _publish(self, nodes: tuple[NodeId, ...], committed: msg.Committed) -> None:
        for node in nodes:
            peer = self._sessions.get(node)
            if peer is None or peer.session.state is not State.OPEN:
                continue
            with self.link.working_for(peer) as session:
                session.send(committed, time.monotonic())
                self._downloads.push(session, peer.number, committed)

    async def _commit(self, command: ev.Commit) -> None:
        draft = command.draft
        try:
            reserved = await self._upkeep.reserve(draft.fragment, command.codec_down)
        except NoRoom as error:
            failed = ev.CommitFailed(fragment=draft.fragment, version=draft.version, detail=str(error))
            return self._happened(failed)
        started = time.monotonic()
        try:
            result = await self._in_compute(self._compute_commit, command)
        except NonFiniteError as error:  # finite deltas can add up to more than fp32 holds
            await self._upkeep.release(reserved)
            blame = await self._in_compute(commits.longest, self.store.ledger, draft, self._inputs.addends(draft))
            return self._happened(ev.SumOverflow.of(draft, blame, error))
        computed = time.monotonic()
        record = await self._upkeep.commit(draft, result, reserved)
        self._inputs.forget([addend.blob for addend in record.blobs])
        self.observer.committed(record, result, computed - started, time.monotonic() - computed)
        self._happened(ev.CommitDone(record=record))

    def _compute_commit(self, command: ev.Commit) -> aggregator.Result:
        draft, buffers = command.draft, self.store.buffers[command.draft.fragment]
        addends, apart = self._inputs.addends(draft), self._inputs.apart(draft)
        return commits.compute(self.store.ledger, buffers, draft, addends, apart)

    # --- time and threads

    async def _keep_time(self) -> None:
        before = time.monotonic()
        while True:
            due = self.machine.next_timer()
            await asyncio.sleep(min(0.2, max(0.01, due - before)) if due is not None else 0.2)
            now = time.monotonic()
            if now - before > 1.2:  # this process stood still (protocol C)
                self.machine.clock_jumped(now - before)
                self._lookout.watch.clock_jumped()
            before = now
            if due is not None and due <= now:
                self._run_commands(self.machine.handle_timer(now))

    async def _observe(self) -> None:
        links = TrafficMetrics(self.metrics, self.config.egress_price_per_gb)
        while True:
            self.observer.refresh(self.machine)
            links.look(self._sessions)
            self._sight.look(self._sessions, self.machine.members, time.monotonic())
            self._lookout.look(time.monotonic(), held=bool(self._upkeep.hold))
            await asyncio.sleep(TICK_S)

    async def _dial_back(self) -> None:
        while True:
            await self._sight.dial_back(self.machine.members, dict(self._sessions))
            await asyncio.sleep(DIAL_BACK_S)

    def _start(self, job: Any) -> None:
        assert self._jobs is not None
        self._jobs.create_task(job)

    async def _in_compute(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, partial(call, *args))
