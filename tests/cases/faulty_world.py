"""A whole run in virtual time in which things go wrong.

`run(scenario)` plays it to its end and says what came out, with a tape of all that the machines were told and did.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

import simulated_faults as sc
from forged_deltas import SharedForgeries
from noted_node import NotedNode
from simulated_outcome import NodeOutcome, Outcome, commit_of
from state_disk import FOLDER, MortalCoordinator, StateDisk

from farloop.algo.spec import NodeId
from farloop.coordinator.change_terms import untrue
from farloop.coordinator.decide import adoption, rollback
from farloop.coordinator.decide import events as coordinator_ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.errors import NoRoom, StateLocked
from farloop.coordinator.storage.journal import claimed_epoch
from farloop.coordinator.storage.store import Store
from farloop.node.state_dir import NodeState
from farloop.quant.digest import digest
from farloop.sim import world
from farloop.sim.network import HOSTILE_LINK, Side
from farloop.sim.virtual_time import PowerCut, Process
from farloop.sim.world import Host
from farloop.wire.messages import Progress

ADOPTS_AFTER_S, GIVES_UP_S = 20.0, 45.0
"""How patient a coordinator that goes on from what nodes hold is with those that are away, and a person with it."""

_LOOKS_S = 0.2  # seconds between two looks at whether a leaving node has stopped
TAIL = 40  # last things that a stuck world tells


class World(world.World):
    """One play of one scenario."""

    scenario: sc.Scenario
    coordinator: MortalCoordinator | None

    def __init__(self, scenario: sc.Scenario) -> None:
        self.tape: list[tuple[float, str, object]] = []  # (when, who, what): every event and command of every machine
        self._board = SharedForgeries()
        self._lost: list[rec.WindowCommitted] = []  # commits that a restored copy of the state did not have
        self._coordinator_events = 0
        self._commits: dict[sc.RestoreCopy, int] = {}  # that were made under the eyes of each of these faults
        self._down_s = 0.0  # how long a coordinator stays away that dies in its recovery
        super().__init__(replace(scenario, problem=scenario.trains()))
        for fault in scenario.faults:
            self._enter(fault)

    def run(self) -> Outcome:  # type: ignore[override]
        """Play to the end. Raises as in `farloop.sim.world`."""
        super().run()
        return self._outcome()

    def story(self) -> str:
        """Who waits for what, and the last things that happened."""
        lines = [super().story()]
        if self.coordinator is None:
            lines.append("coordinator: down")
        else:
            coordinator = self.coordinator.machine
            lines.append(
                f"coordinator: versions {coordinator.ledger.versions}, round {coordinator.ledger.current_round}"
            )
            for fragment, window in sorted(coordinator.windows.items()):
                lines.append(
                    f"  fragment {fragment} window {window.terms.window} of round {window.terms.round}: "
                    f"{window.state}, came {sorted(window.contributors)}, waits for {sorted(window.missing)}, "
                    f"removed {window.removed}"
                )
            for member in coordinator.members.values():
                lines.append(
                    f"  member {member.name}: {member.stage} since round {member.start_round}, session "
                    f"{member.session}, absent {member.absent}, gone at {member.gone_at}"
                )
            lines += [f"  alarm {key}: {detail}" for key, detail in coordinator.alarms.items()]
        told = [entry for entry in self.tape if not _is_report(entry[2])]
        lines += [f"{when:9.3f} {who:>11} {str(what)[:200]}" for when, who, what in told[-TAIL:]]
        return "\n".join(lines)

    def _written(self) -> object:
        return self.disk.writes

    def _begin(self) -> None:
        """Start the coordinator, on a disk of its own, and enter the faults."""
        faults = self.scenario.faults
        copies = max((fault.commits_ago for fault in faults if isinstance(fault, sc.RestoreCopy)), default=0)
        self.disk = StateDisk(self.spec, self.first_anchors, random.Random(self.scenario.seed), copies=copies)
        self._start_coordinator()

    # --- the coordinator's life

    def _start_coordinator(self, *, rewind: bool = False, adopt_after_s: float | None = None) -> None:
        process, rng = Process(self.agenda), random.Random(self._rng.random())
        again = partial(self._start_coordinator, rewind=rewind, adopt_after_s=adopt_after_s)
        try:
            store = self.disk.open(rewind=rewind)
            adopt = None
            if adopt_after_s is not None:
                adopt = AdoptionSettings(untrue=untrue, patience_s=adopt_after_s, fetched=store.fetched, newest=True)
            self.coordinator = MortalCoordinator(process, store, self.scenario, rng, self._on_coordinator_event, adopt)
        except PowerCut:  # in the middle of its recovery
            self.agenda.after(self._down_s, again)
        except NoRoom:
            self.agenda.after(RETRY_S, again)

    def _on_coordinator_event(self, what: object) -> None:
        self.tape.append((self.agenda.now, "coordinator", what))
        if not isinstance(what, coordinator_ev.Event):
            return
        self._coordinator_events += 1
        for fault in self.scenario.faults:
            if isinstance(fault, sc.CrashCoordinator) and fault.at_event == self._coordinator_events:
                self.crash_coordinator(fault.down_s)
            if isinstance(fault, sc.RestoreCopy) and isinstance(what, coordinator_ev.CommitDone):
                self._count_commit(fault)

    def _count_commit(self, fault: sc.RestoreCopy) -> None:
        self._commits[fault] = self._commits.get(fault, 0) + 1
        if self._commits[fault] == fault.after_commits:
            self.agenda.after(fault.later_s, lambda: self._restore_copy(fault))

    def _restore_copy(self, fault: sc.RestoreCopy) -> None:
        ended = any(actor.machine.ended for host in self.hosts.values() for actor in host.actors)
        if self.coordinator is None or self.coordinator.finished or ended:
            return
        self.crash_coordinator(fault.down_s)
        self._lost += self.disk.restore(fault.commits_ago)
        self.tape.append((self.agenda.now, "coordinator", f"restored without {fault.commits_ago} commits"))
        self.agenda.after(fault.down_s + fault.decides_s, lambda: self._look_after(fault))

    def _look_after(self, fault: sc.RestoreCopy, adopting_since: float | None = None) -> None:
        """A person looks at the alarms every now and then. Where the run is held, it goes on from what nodes hold, if
        that is what the person wants and it can be; else it is wound back."""
        coordinator, now = self.coordinator, self.agenda.now
        alarms = coordinator.machine.alarms if coordinator is not None else {}
        if any(alarm.startswith(rollback.ALARM) for alarm in alarms):
            if fault.adopts and adopting_since is None:
                adopting_since = now
            patience_s = None if adopting_since is None or now - adopting_since > GIVES_UP_S else ADOPTS_AFTER_S
            self.crash_coordinator(fault.down_s, rewind=patience_s is None, adopt_after_s=patience_s)
        elif adoption.ALARM in alarms and adopting_since is not None and now - adopting_since > GIVES_UP_S:
            self.crash_coordinator(fault.down_s, rewind=True)
        if coordinator is None or not coordinator.finished:
            self.agenda.after(fault.decides_s, lambda: self._look_after(fault, adopting_since))

    def crash_coordinator(self, down_s: float, *, rewind: bool = False, adopt_after_s: float | None = None) -> None:
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is None:
            return
        coordinator.crash()
        self.disk.power_cut()
        self.tape.append((self.agenda.now, "coordinator", "crashed"))
        for host in self.hosts.values():
            for connection in host.connections:
                connection.close(Side.COORDINATOR)
            host.connections.clear()
        self.agenda.after(down_s, lambda: self._start_coordinator(rewind=rewind, adopt_after_s=adopt_after_s))

    # --- a node's life

    def _new_node(self, host: Host, process: Process, rng: random.Random, state: NodeState) -> NotedNode:
        dial = self._dialled_from(host, process)
        tell = partial(self._on_node_event, host.setup.name)
        return NotedNode(process, host.setup, self.scenario, dial, rng, state, tell, self._board)

    def _on_node_event(self, name: NodeId, what: object) -> None:
        self.tape.append((self.agenda.now, name, what))

    def crash_node(self, name: NodeId, down_s: float | None = None) -> None:
        host = self.hosts[name]
        if host.down or not host.actors:
            return
        host.down = True
        host.actor.process.kill()
        self.tape.append((self.agenda.now, name, "crashed"))
        for connection in host.connections:
            connection.close(Side.NODE)
        host.connections.clear()
        if down_s is not None:
            self.agenda.after(down_s, partial(self.start_node, name))

    # --- faults

    def _enter(self, fault: sc.Fault) -> None:
        agenda = self.agenda
        match fault:
            case sc.CrashNode(node=node, at=at, down_s=down_s):
                agenda.at(at, lambda: self.crash_node(node, down_s))
            case sc.CrashCoordinator(at=at, down_s=down_s):
                if at is not None:
                    agenda.at(at, lambda: self.crash_coordinator(down_s))
            case sc.RestoreCopy():
                pass  # see `_on_coordinator_event`
            case sc.CutLink(node=node, at=at, for_s=for_s, reset=reset):
                agenda.at(at, lambda: self._cut(node, reset=reset))
                agenda.at(at + for_s, lambda: self.hosts[node].cable.mend())
            case sc.PauseNode(node=node, at=at, for_s=for_s):
                agenda.at(at, lambda: self._pause(self._process_of(node), for_s))
            case sc.PauseCoordinator(at=at, for_s=for_s):
                agenda.at(at, lambda: self._pause(self.coordinator.process if self.coordinator else None, for_s))
            case sc.FillDisk(at=at, for_s=for_s):
                agenda.at(at, lambda: self.disk.set_space(full=True))
                agenda.at(at + for_s, lambda: self.disk.set_space(full=False))
            case sc.DrainNode(node=node, at=at):
                agenda.at(at, lambda: self.actor(node, NotedNode.drain))
            case sc.ChangeTerms(at=at, given=given):
                agenda.at(at, lambda: self._change_terms(dict(given)))
            case sc.SpoilAnchor(node=node, at=at, fragment=fragment):
                agenda.at(at, lambda: self.actor(node, lambda actor: actor.spoil(fragment)))
            case sc.CrashAtWrite():
                self.disk.at_write.append(self._crash_at_write(fault))
            case sc.ReadOnlyDisk(at=at, for_s=for_s):
                agenda.at(at, lambda: self.disk.set_space(read_only=True))
                agenda.at(at + for_s, lambda: self.disk.set_space(read_only=False))
            case sc.LowDisk(at=at, for_s=for_s, room=room):
                agenda.at(at, lambda: self.disk.set_room(room))
                agenda.at(at + for_s, lambda: self.disk.set_room(None))
            case sc.ClockJump(at=at):
                agenda.at(at, lambda: self._jump_clock(fault.node, fault.by_s))
            case sc.OneWayCut(node=node, at=at, for_s=for_s, to=to):
                cable, side = self.hosts[node].cable, Side.NODE if to == "node" else Side.COORDINATOR
                agenda.at(at, lambda: cable.blocked.add(side))
                agenda.at(at + for_s, cable.mend)
            case sc.BadLinkPeriod(at=at, for_s=for_s):
                agenda.at(at, lambda: self._start_squall(fault))
            case sc.Rejoin(at=at):
                agenda.at(at, lambda: self._leave_and_return(fault))
            case sc.SlowLink(at=at, for_s=for_s):
                agenda.at(at, lambda: self._slow_link(fault.node, fault.factor))
                agenda.at(at + for_s, lambda: self._slow_link(fault.node, 1.0))
            case sc.SlowNode(at=at, for_s=for_s):
                usual = self.hosts[fault.node].setup
                agenda.at(at, lambda: self.actor(fault.node, lambda actor: actor.slow_down(fault.factor, usual)))
                agenda.at(at + for_s, lambda: self.actor(fault.node, lambda actor: actor.slow_down(1.0, usual)))
            case sc.SecondCoordinator(at=at):
                agenda.at(at, self._start_second_coordinator)
            case _:
                assert_never(fault)

    def _crash_at_write(self, fault: sc.CrashAtWrite) -> Callable[[int, bool], None]:
        def look(write: int, durable: bool) -> None:
            if (write, durable) == (fault.write, fault.durable):
                if self.coordinator is None:
                    self._down_s = fault.down_s
                    self.disk.power_cut()
                self.crash_coordinator(fault.down_s)
                raise PowerCut

        return look

    def _jump_clock(self, node: NodeId | None, by_s: float) -> None:
        if node is None:
            process = self.coordinator.process if self.coordinator else None
        else:
            process = None if self.hosts[node].down else self.hosts[node].actor.process
        if process is not None:
            process.ahead_s += by_s

    def _slow_link(self, node: NodeId, factor: float) -> None:
        """Change the rate of the node's open connections, and of its next ones."""
        host = self.hosts[node]
        usual = host.setup.weather or self.scenario.weather
        slow = replace(usual, bytes_per_s=usual.bytes_per_s / factor)
        host.weather = None if factor == 1.0 else slow
        for connection in host.connections:
            connection.change(slow)

    def _start_squall(self, fault: sc.BadLinkPeriod) -> None:
        host = self.hosts[fault.node]
        host.weather = replace(HOSTILE_LINK, duplication=0.3, reordering=0.3)

        def reset() -> None:
            for connection in host.connections:
                connection.reset()
            host.connections.clear()

        def calm() -> None:
            host.weather = None
            reset()  # open connections would keep the squall's weather

        for number in range(fault.resets):
            self.agenda.after(number * fault.for_s / fault.resets, reset)
        self.agenda.after(fault.for_s, calm)

    def _leave_and_return(self, fault: sc.Rejoin) -> None:
        """Stop the node, and start it again as soon as it has stopped."""
        host = self.hosts[fault.node]
        if self.coordinator is not None and self.coordinator.finished:
            return
        if host.down or not host.actors:
            return self.agenda.after(_LOOKS_S, lambda: self._leave_and_return(fault))
        if fault.gently:
            self.actor(fault.node, NotedNode.drain)
        else:
            self.crash_node(fault.node)
        leaving = host.actor

        def look() -> None:
            if host.actor is not leaving:
                return  # started again by another fault
            if not (host.down or leaving.gone):
                return self.agenda.after(_LOOKS_S, look)
            if self.coordinator is not None and self.coordinator.finished:
                return
            leaving.process.kill()
            self.start_node(fault.node)
            if fault.times > 1:
                again = replace(fault, times=fault.times - 1)
                self.agenda.after(fault.stays_s, lambda: self._leave_and_return(again))

        self.agenda.after(_LOOKS_S, look)

    def _start_second_coordinator(self) -> None:
        if self.coordinator is None:
            return
        files = self.disk.files
        before = claimed_epoch(FOLDER, files), self.disk.writes
        try:
            Store.recover(FOLDER, files=files)
        except StateLocked:
            assert before == (claimed_epoch(FOLDER, files), self.disk.writes), "who is refused changes nothing"
        else:
            raise AssertionError("two coordinators have one state")

    def _change_terms(self, given: dict[str, str]) -> None:
        if (coordinator := self.coordinator) is not None:
            told = lambda: self.tape.append((self.agenda.now, "operator", coordinator.change_terms(given)))  # noqa: E731
            coordinator.process.deliver(told)

    def actor(self, node: NodeId, action: Callable[[NotedNode], None]) -> None:
        host = self.hosts[node]
        if not host.down:
            action(host.actor)

    def _process_of(self, node: NodeId) -> Process | None:
        host = self.hosts[node]
        return None if host.down else host.actor.process

    def _pause(self, process: Process | None, for_s: float) -> None:
        if process is not None:
            process.stop()
            self.agenda.after(for_s, process.resume)

    def _cut(self, node: NodeId, *, reset: bool) -> None:
        host = self.hosts[node]
        host.cable.cut = True
        self.tape.append((self.agenda.now, node, "link cut"))
        if reset:
            for connection in host.connections:
                connection.reset()
            host.connections.clear()

    # --- what came out

    def _outcome(self) -> Outcome:
        assert self.coordinator is not None
        store = self.coordinator.store
        records = self.disk.records()
        again = self.disk.reopened() if self.scenario.faults else None
        return Outcome(
            layout=self.spec.identity.layout,
            commits=tuple(commit_of(record) for record in records if isinstance(record, rec.WindowCommitted)),
            lost=tuple(commit_of(record) for record in self._lost),
            versions=tuple(store.ledger.versions),
            anchors=tuple(buffers.anchor for buffers in store.buffers),
            anchor_digests=tuple(digest(buffers.anchor) for buffers in store.buffers),
            target_digests=tuple(digest(buffers.target) for buffers in store.buffers),
            recovered=None if again is None else tuple((digest(b.anchor), digest(b.target)) for b in again.buffers),
            nodes={
                name: tuple(NodeOutcome.of(actor, alive=actor.process.alive) for actor in host.actors)
                for name, host in self.hosts.items()
            },
            liars=frozenset(setup.name for setup in self.scenario.nodes if setup.deceit is not None),
            alarms=self.disk.alarms,
            evaluations=tuple(store.ledger.evaluations),
            records=tuple(records),
            tape=tuple(self.tape),
            seconds=self.agenda.now,
        )


def _is_report(what: object) -> bool:
    """A node's report of every second: it changes nothing."""
    return isinstance(what, coordinator_ev.NodeMessage) and isinstance(what.message, Progress)


def run(scenario: sc.Scenario) -> Outcome:
    """Play a scenario to its end. Raises as `World.run`."""
    return World(scenario).run()
