"""A window has a deadline that is learnt from what its nodes usually take: no node holds the run (protocol, Deadlines).

The run of `conftest.py`, two fragments whose windows are due in turn. Time goes on in ticks; honest nodes send their
delta so many seconds after the last commit, liars say and do what they like.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from plain_runs import plain_hello, plain_offer, plain_progress

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import SILENT
from farloop.coordinator.decide.deadlines import ALARM, FIRST_S, FLOOR_S, MULTIPLE, UNKNOWN_S
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.run_state import ALARM as STORAGE
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
REPORT = plain_progress(position=0.0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0, compute_share=0.0)


class World:
    """Nodes with a pace in seconds a window; one without a pace is a liar."""

    def __init__(self, spec: RunSpec, paces: dict[NodeId, float | None], *, drops: bool = True, **terms: Any) -> None:
        terms = {"steps": 10**6, "min_nodes": len(paces), **terms}
        spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
        self.ledger, self.now, self.drops = Ledger.begin(rec.RunStarted(spec=spec, epoch=1)), 0.0, drops
        self.paces, self.seq, self.steps = dict(paces), 0, 0
        self.sessions: dict[NodeId, int] = {}
        self.incarnations = dict.fromkeys(paces, 1)
        self.liar: Callable[[World], None] = lambda world: None
        self.reports = True
        self.commits: list[tuple[float, rec.WindowCommitted]] = []
        self.freed_at = 0.0
        self.alarms: list[tuple[float, str, str]] = []
        """When an alarm began, of what, and what it said."""
        self.begin()
        for node in paces:
            self.greet(node)
        for node in paces:
            self.say(node, msg.Ready())

    def begin(self) -> None:
        self.machine = CoordinatorMachine(self.ledger, now=self.now, drops_silent=self.drops)
        self.run_commands(self.machine.start())

    def greet(self, node: NodeId, round_: int | None = None) -> None:
        self.sessions[node] = len(self.sessions) + 100 * self.incarnations[node]
        refs = tuple(
            msg.AnchorRef(fragment=f, version=v, digest=self.ledger.anchor_digest(f, v))
            for f, v in enumerate(self.ledger.versions)
        )
        hello = plain_hello(node=node, anchors=refs, round=round_, incarnation=self.incarnations[node])
        self.handle(ev.NodeHello(session=self.sessions[node], node=node, hello=hello))

    def say(self, node: NodeId, message: msg.Message) -> None:
        self.handle(ev.NodeMessage(session=self.sessions[node], node=node, message=message))

    def report(self, node: NodeId, **changes: Any) -> None:
        self.say(node, dataclasses.replace(REPORT, **changes))

    def handle(self, event: ev.Event) -> None:
        self.run_commands(self.machine.handle(event, self.now))

    def run_commands(self, commands: list[ev.Command]) -> None:
        self.machine.check()
        for command in commands:
            if isinstance(command, ev.Commit):
                record = dataclasses.replace(command.draft, anchor_digest=command.draft.version)
                self.commits.append((self.now, record))
                self.freed_at = self.now
                self.handle(ev.CommitDone(record=record))

    def offer(self, node: NodeId, fragment: int) -> msg.Offer:
        window = self.machine.windows[fragment].terms.window
        self.seq += 1
        return plain_offer(node, window, fragment=fragment, incarnation=self.incarnations[node], seq=self.seq)

    @property
    def head(self) -> int:
        """The fragment whose window is due first."""
        windows = self.machine.windows
        return min(windows, key=lambda f: (windows[f].terms.round, -f) if f else (windows[f].terms.round - 0.5, 0))

    def deliver(self, node: NodeId, fragment: int) -> None:
        window = self.machine.windows[fragment]
        if window.state == "open" and node not in window.contributors and self.machine.members[node].session:
            self.handle(ev.InputStored(offer=self.offer(node, fragment)))

    def tick(self, seconds: float = 0.5) -> None:
        self.now += seconds
        while (due := self.machine.next_timer()) is not None and due <= self.now:
            self.run_commands(self.machine.handle_timer(self.now))
        self.steps += 1
        for node, pace in self.paces.items():
            if pace is None or self.machine.members[node].session is None:
                continue
            if self.reports:
                fixed = 10 * (self.ledger.current_round + 1)
                state = "training" if self.steps < fixed else "waiting"
                self.report(node, state=state, inner_steps=min(self.steps, fixed))
            if self.now - self.freed_at >= pace:
                self.deliver(node, self.head)
        self.liar(self)
        for what, why in self.machine.alarms.items():
            if not self.alarms or what not in {name for _, name, _ in self.alarms}:
                self.alarms.append((self.now, what, why))

    def run(self, seconds: float, tick_s: float = 0.5) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick(tick_s)

    def until(self, condition: Callable[[], bool], at_most_s: float) -> float:
        """Seconds until then."""
        began = self.now
        while not condition():
            self.tick()
            assert self.now - began <= at_most_s, self.machine.alarms
        return self.now - began

    def committed_since(self, then: float) -> list[rec.WindowCommitted]:
        return [record for at, record in self.commits if at > then]

    def dropped(self, node: NodeId) -> list[Reason]:
        return [drop.reason for _, record in self.commits for drop in record.drops if drop.node == node]


def alternating(world: World) -> None:
    """5, 6, 5, 6, …"""
    world.report(B, inner_steps=5 + world.steps % 2)


def pausing(world: World) -> None:
    world.report(B, state="paused", inner_steps=5)


def waiting(world: World) -> None:
    world.report(B, state="waiting", inner_steps=5)


def offering(world: World) -> None:
    """A new delta each time; none of them ever comes."""
    waiting(world)
    world.say(B, world.offer(B, world.head))


LIARS = {"alternating": alternating, "pausing": pausing, "waiting": waiting, "offering": offering}


@pytest.mark.parametrize("lie", LIARS)
def test_a_node_that_falls_silent_does_not_hold_the_run(spec: RunSpec, lie: str) -> None:
    """F: whatever it reports. Before it had a deadline, nothing was committed any more."""
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    assert len(world.commits) > 20
    world.paces[B], world.liar, fell = None, LIARS[lie], world.now
    world.until(lambda: len(world.committed_since(fell)) >= 20, 2 * FLOOR_S + 20 * 2.5 + 5.0)
    assert not world.dropped(A) and world.dropped(B)
    then = world.now
    world.run(200.0)
    assert len(world.committed_since(then)) > 80, "as quick as without it"


def test_before_a_node_is_dropped_an_alarm_says_what_it_owes(spec: RunSpec) -> None:
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    world.paces[B], world.liar, fell = None, offering, world.now
    world.until(lambda: ALARM in world.machine.alarms, FLOOR_S)
    assert not world.dropped(B)
    said = world.machine.alarms[ALARM]
    assert said.startswith("nothing was committed for ") and "; a window usually takes 4.0s: b owes its delta" in said
    assert said.endswith("and offered the delta without sending it") and "a owes" not in said
    world.until(lambda: bool(world.committed_since(fell + 5.0)), FLOOR_S)
    assert ALARM not in world.machine.alarms, "it is over with the next commit"


def test_one_that_misses_again_is_not_expected_for_a_while_and_an_alarm_says_so(spec: RunSpec) -> None:
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    world.paces[B], world.liar = None, waiting
    world.until(lambda: f"{SILENT}b" in world.machine.alarms, 2 * FLOOR_S + 10.0)
    assert "no window waits for it" in world.machine.alarms[f"{SILENT}b"]
    assert set(world.dropped(B)) == {Reason.LATE}
    world.run(20.0)
    assert all(B not in window.expected for window in world.machine.windows.values())
    world.deliver(B, world.head)
    assert f"{SILENT}b" not in world.machine.alarms
    world.paces[B], world.liar = 2.0, lambda _: None
    world.run(10.0)
    assert all(B in window.expected for window in world.machine.windows.values()), "its delta came in time"


def test_a_liar_costs_less_and_less_whatever_it_does(spec: RunSpec) -> None:
    """It comes as another start again and again, or sends a good delta now and then."""
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    world.paces[B] = None

    def lie(one: World) -> None:
        if one.steps % 600 == 0:
            one.incarnations[B] += 1
            one.greet(B)
            one.say(B, msg.Ready())
        elif one.steps % 40:
            alternating(one)

    world.liar = lie
    world.run(600.0)
    then = world.now
    world.run(1800.0)
    assert len(world.committed_since(then)) > 0.6 * 1800.0 / 2.0


def test_a_node_that_is_slow_at_its_usual_pace_is_never_dropped(spec: RunSpec) -> None:
    """Fifty times slower than the other one; and later four times as slow as that."""
    world = World(spec, {A: 1.0, B: 50.0})
    world.run(1500.0, 1.0)
    world.paces[B] = 200.0
    world.run(2000.0, 2.0)
    assert not world.dropped(B) and not world.dropped(A) and len(world.commits) > 35


def test_a_link_that_became_very_slow_for_good_is_waited_for_in_the_end(spec: RunSpec) -> None:
    """A deadline that only its own rounds could teach would never be met again."""
    world = World(spec, {A: 10.0, B: 10.0})
    world.run(300.0)
    world.paces[B] = 150.0
    world.run(4000.0, 2.0)
    assert world.dropped(B)
    then = world.now
    world.run(2000.0, 2.0)
    assert [record for record in world.committed_since(then) if not record.drops]
    assert all(not record.drops for record in world.committed_since(then + 1000.0))


def test_a_round_of_more_steps_has_a_longer_deadline(spec: RunSpec) -> None:
    """B: QSR; rounds grow to a hundred times the length."""
    world = World(spec, {A: 10.0, B: 10.0})
    world.run(300.0)
    window = world.machine.windows[world.head]
    deadlines = world.machine._closing.node_deadlines
    assert deadlines.allowed_s(window, B) == MULTIPLE * 20.0
    rounds = world.ledger.rounds
    index = window.terms.round
    world.ledger.rounds[index] = dataclasses.replace(rounds[index], length=1000)
    assert deadlines.allowed_s(window, B) == 100 * MULTIPLE * 20.0


def test_where_nothing_was_learnt_yet_a_window_has_long(spec: RunSpec) -> None:
    """The first step compiles, and of links nothing is known."""
    world = World(spec, {A: 2.0, B: None})
    world.reports = False
    deadlines = world.machine._closing.node_deadlines
    window = world.machine.windows[world.head]
    assert deadlines.allowed_s(window, B) == UNKNOWN_S
    world.reports = True
    world.run(5.0)
    assert FIRST_S <= deadlines.allowed_s(window, B) < 1.1 * FIRST_S
    large = dataclasses.replace(spec.identity.layout.fragments[1], numel=125_000_000)
    layout = dataclasses.replace(spec.identity.layout, fragments=(spec.identity.layout.fragments[0], large))
    thin = World(dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, layout=layout)), {A: 2.0})
    thin.run(1.5)
    assert thin.machine._closing.node_deadlines.allowed_s(thin.machine.windows[1], A) > 10_000.0


def test_a_liar_from_the_beginning_holds_the_first_window_alone(spec: RunSpec) -> None:
    world = World(spec, {A: 2.0, B: None})
    world.liar = waiting
    world.until(lambda: len(world.commits) >= 20, FIRST_S + 90.0)


def test_who_waits_for_a_window_is_not_blamed_for_the_next_one(spec: RunSpec) -> None:
    """A node that stands still until one fragment is committed cannot send the other."""
    world = World(spec, {A: 25.0, B: 25.0, C: 25.0})
    world.run(1000.0, 1.0)
    world.paces[C] = None
    world.run(2000.0, 2.0)
    assert not world.dropped(A) and not world.dropped(B) and world.dropped(C)


def test_while_nothing_can_be_committed_nobody_misses_a_deadline(spec: RunSpec) -> None:
    """O: a full disk does not take the deltas that came."""
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    world.paces[B], world.liar = None, waiting
    world.machine.alarms[STORAGE] = "the disk is full"
    world.run(300.0)
    assert not world.dropped(B) and ALARM not in world.machine.alarms
    del world.machine.alarms[STORAGE]
    world.run(2 * FLOOR_S + 5.0)
    assert world.dropped(B)


def test_a_stop_of_this_process_moves_deadlines(spec: RunSpec) -> None:
    """C."""
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    world.paces[B], world.liar = None, alternating
    world.run(10.0)
    world.machine.clock_jumped(500.0)
    world.now += 500.0
    world.freed_at += 500.0
    world.tick()
    assert not world.dropped(B) and ALARM not in world.machine.alarms


def test_a_restart_learns_anew_and_is_patient(spec: RunSpec) -> None:
    """C, P: nothing of it is in the journal."""
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    world.ledger = world.ledger.copy()
    world.begin()
    for node in (A, B):
        world.greet(node, round_=0)
    world.paces[B], world.liar = None, alternating
    count = len(world.commits)
    world.run(FLOOR_S + 10.0)
    assert len(world.commits) <= count + 1
    world.run(FIRST_S + 60.0)
    assert len(world.commits) > count + 5


def test_where_nobody_is_to_be_dropped_the_alarm_is_all(spec: RunSpec) -> None:
    """`adapt` = off or advise."""
    world = World(spec, {A: 2.0, B: 2.0}, drops=False)
    world.run(60.0)
    world.paces[B], world.liar, fell = None, waiting, world.now
    world.run(500.0)
    assert len(world.committed_since(fell)) <= 1 and ALARM in world.machine.alarms
    world.paces[B], world.liar = 2.0, lambda _: None
    world.run(20.0)
    assert ALARM not in world.machine.alarms


def test_a_node_that_pauses_leaves_the_windows_at_once_and_comes_back(spec: RunSpec) -> None:
    """D: its operator's wish holds nobody, and is no fault."""
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    world.paces[B], world.liar, then = None, pausing, world.now
    world.run(60.0)
    assert len(world.committed_since(then)) > 25 and not world.machine.alarms
    world.paces[B], world.liar = 2.0, lambda _: None
    world.run(10.0)
    assert all(B in window.expected for window in world.machine.windows.values())


def test_a_run_that_nobody_is_connected_to_says_who_is_missing(spec: RunSpec) -> None:
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    for node in (A, B):
        world.handle(ev.NodeDisconnected(session=world.sessions[node], node=node, reason=Reason.CLOSED))
    world.run(FLOOR_S)
    world.handle(ev.InputFailed(offer=world.offer(A, 0), reason=Reason.CORRUPT, detail=""))
    assert "a owes" in world.machine.alarms[ALARM] and "it is not connected" in world.machine.alarms[ALARM]
