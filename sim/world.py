"""A whole run in virtual time: one coordinator, its nodes and the network between them.

The machines, sessions, codecs, replicas and the aggregator are the daemons' own; only threads, sockets, files and the
clock are not. Every invariant of every machine and session is checked after every event.
"""

import itertools
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from farloop.algo.spec import NodeId
from farloop.coordinator.bulk_plane import BulkPlane
from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.records import EvaluationTaken
from farloop.coordinator.executor import CoordinatorExecutor
from farloop.coordinator.net.router import SessionRouter
from farloop.coordinator.storage.files import OsFile, OsFiles
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.storage.store import Store
from farloop.node.state_dir import NodeState
from farloop.sim.network import CONNECT_TIMEOUT_S, Connection, Dial, LinkConditions, PhysicalLink, VirtualRouterSocket
from farloop.sim.node import SimulatedNode
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.virtual_time import EventQueue, Process, VirtualClock, VirtualWorker

KNOCK_S = 1.0  # TCP asks again for a connection that is not answered


class Stuck(Exception):
    """Nothing will ever happen again, or nothing that helps; the text tells who waits for what."""


class _UnsyncedFile(OsFile):
    def sync(self) -> None:
        pass


class _UnsyncedFiles(OsFiles):
    """For a state that is not read after the run."""

    file_type = _UnsyncedFile


class SimulatedCoordinator:
    """One start of the coordinator. `on_event` is called with every event that the machine takes, before its commands
    are executed.

    The executor, the session router, the storage queue and the store are the daemon's own. Here they are given a
    virtual clock, virtual workers, files that are not synced and the simulated network.
    """

    def __init__(
        self,
        process: Process,
        store: Store,
        scenario: Scenario,
        rng: random.Random,
        on_event: Callable[[object], None] = lambda what: None,
        adopt: AdoptionSettings | None = None,
    ) -> None:
        self.process, self.store, self.rng = process, store, rng
        self.machine = CoordinatorMachine(
            store.ledger.copy(),
            now=process.now,
            liveness_s=scenario.timing.liveness_s,
            expire_s=scenario.expire_s,
            floor_share=scenario.floor_share,
            drops_silent=scenario.drops_silent,
            adopt=adopt,
        )
        clock, tokens = VirtualClock(process), itertools.count(1)
        self.storage = VirtualWorker(process, lambda: rng.uniform(*scenario.job_s))
        self.socket = VirtualRouterSocket(process, scenario.lane_buffer_s)
        bulk, limits = None, scenario.limits
        if scenario.store is not None:
            objects = scenario.store(process, rng)
            bulk = BulkPlane(objects, lambda method, key: f"{method} {key}", clock, self.machine.alarms)
            limits = replace(limits, early_pool_bytes=0)
        self.router = SessionRouter(
            self.socket,
            clock,
            on_event=lambda peer, event: self.executor.on_session_event(peer, event),
            limits=limits,
            timing=scenario.timing,
            rates=scenario.rates,
            background_share=scenario.background_share,
            uplink=scenario.uplink,
            new_token=lambda: next(tokens).to_bytes(16),
            check=True,
        )
        self.executor = CoordinatorExecutor(
            clock=clock,
            compute=VirtualWorker(process, lambda: rng.uniform(*scenario.job_s)),
            storage=StorageQueue(store, self.storage, clock, self.machine.alarms, _fail),
            store=store,
            machine=self.machine,
            router=self.router,
            fatal=_fail,
            adapt=scenario.adapt,
            bulk=bulk,
            model_path=store.directory / "model.safetensors",
            on_event=on_event,
            check=True,
        )
        self.machine.check()
        self.executor.start()

    @property
    def finished(self) -> bool:
        return self.executor.finished


def _fail(error: Exception) -> None:
    raise error


def _discard(store: Store, folder: Path) -> None:
    store.close()
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class Host:
    """Where a node lives."""

    setup: NodeSetup
    cable: PhysicalLink
    actors: list[SimulatedNode]  # one for each start; the last one lives, or was the last to live
    connections: list[Connection]
    down: bool = True
    weather: LinkConditions | None = None  # for a while, instead of what the scenario says

    @property
    def actor(self) -> SimulatedNode:
        return self.actors[-1]


class World:
    """One play of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.agenda = EventQueue()
        self._rng = random.Random(scenario.seed)
        self.spec, self.first_anchors = scenario.problem.begin(scenario.terms)
        self.coordinator: SimulatedCoordinator | None = None
        self.hosts = {
            setup.name: Host(setup=setup, cable=PhysicalLink(self.agenda), actors=[], connections=[])
            for setup in scenario.nodes
        }
        self._progress: object = None
        self._moved_at = 0.0
        self._begin()
        for setup in scenario.nodes:
            self.agenda.at(setup.joins_at, partial(self.start_node, setup.name))

    def run(self) -> None:
        """Play to the end.
        Raises Stuck: no progress for the scenario's patience. Raises AssertionError: an invariant does not hold."""
        while not self._is_done():
            if not self.agenda.step():
                raise Stuck("nothing is left to happen\n" + self.story())
            self._watch()

    @property
    def anchors(self) -> Sequence[Tensor]:
        """Of every fragment, as the coordinator holds it now; fp32 [numel] each."""
        assert self.coordinator is not None
        return [buffers.anchor for buffers in self.coordinator.store.buffers]

    @property
    def evaluations(self) -> Sequence[EvaluationTaken]:
        """All that the nodes were asked for, in order."""
        assert self.coordinator is not None
        return self.coordinator.store.ledger.evaluations

    def story(self) -> str:
        """Who waits for what."""
        lines = [f"at {self.agenda.now:.3f} s"]
        for name, host in self.hosts.items():
            if host.actors:
                machine = host.actor.machine
                undecided = [(s.fragment.index, u.terms.window) for s in machine.fragments for u in s.sent]
                lines.append(
                    f"node {name}: {'down' if host.down else machine.stage}, waits for {host.actor.waiting}, round "
                    f"{machine.schedule.round} step {machine.schedule.step}, connected {machine.connected}, "
                    f"versions {machine.versions}, undecided {undecided}"
                )
            else:
                lines.append(f"node {name}: not here yet")
        return "\n".join(lines)

    # --- ends and progress

    def _is_done(self) -> bool:
        if self.coordinator is None or not self.coordinator.finished:
            return False
        return all(host.down or host.actor.gone for host in self.hosts.values() if host.actors)

    def _watch(self) -> None:
        """Notice a world that only sends heartbeats to itself."""
        progress = (
            self._written(),
            tuple(
                (
                    len(host.actors),
                    host.actor.machine.inner_steps,
                    host.actor.machine.stage,
                    host.actor.machine.versions,
                )
                for host in self.hosts.values()
                if host.actors
            ),
        )
        if progress != self._progress:
            self._progress, self._moved_at = progress, self.agenda.now
        elif self.agenda.now - self._moved_at > self.scenario.patience_s:
            raise Stuck(f"no progress for {self.scenario.patience_s:g} s\n" + self.story())

    def _written(self) -> object:
        """What changes whenever the coordinator makes something durable."""
        assert self.coordinator is not None
        return self.coordinator.store.ledger.versions

    # --- the daemons

    def _begin(self) -> None:
        """Start the coordinator."""
        process, rng = Process(self.agenda), random.Random(self._rng.random())
        folder = Path(tempfile.mkdtemp(prefix="farloop-simulated-"))
        store = Store.create(folder, self.spec, self.first_anchors, files=_UnsyncedFiles())
        weakref.finalize(self, _discard, store, folder)
        self.coordinator = SimulatedCoordinator(process, store, self.scenario, rng)

    def start_node(self, name: NodeId) -> None:
        host = self.hosts[name]
        process = Process(self.agenda)
        host.down = False
        rng = random.Random(self._rng.random())
        state = replace(host.actor.state) if host.actors else NodeState(None, 0, 0)
        state.incarnation = max((actor.machine.incarnation for actor in host.actors), default=0) + 1
        host.actors.append(self._new_node(host, process, rng, state))

    def _new_node(self, host: Host, process: Process, rng: random.Random, state: NodeState) -> SimulatedNode:
        return SimulatedNode(process, host.setup, self.scenario, self._dialled_from(host, process), rng, state)

    def _dialled_from(self, host: Host, process: Process) -> Dial:
        """Connections after a round trip; none if no process listens, or the cable stays cut for too long."""

        def dial(answer: Callable[[Connection | None], None]) -> None:
            weather = host.weather or host.setup.weather or self.scenario.weather
            gives_up_at = self.agenda.now + CONNECT_TIMEOUT_S

            def connect() -> None:
                if not host.cable.whole and self.agenda.now < gives_up_at:
                    return process.after(KNOCK_S, connect)
                if not host.cable.whole or self.coordinator is None:
                    return answer(None)
                rng = random.Random(self._rng.random())
                connection = Connection(self.agenda, host.cable, weather, rng, process, self.coordinator.process)
                self.coordinator.socket.accept(connection)
                host.connections.append(connection)
                answer(connection)

            process.after(2 * weather.latency_s, connect)

        return dial
