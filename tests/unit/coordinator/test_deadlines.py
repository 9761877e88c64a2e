"""A window has a deadline that is learnt from what its nodes usually take: no node holds the run (protocol, Deadlines).

The run of `conftest.py`, two fragments whose windows are due in turn. Time goes on in ticks; honest nodes send their
delta so many seconds after the last commit, liars say and do what they like.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from coordinator_run import A, B, C, Commands, Run, brief
from plain_runs import plain_progress

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import SILENT
from farloop.coordinator.decide.deadlines import ALARM, FIRST_S, FLOOR_S, MULTIPLE, UNKNOWN_S
from farloop.coordinator.decide.run_state import ALARM as STORAGE
from farloop.wire.reasons import Reason

REPORT = plain_progress(position=0.0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0, compute_share=0.0)


class World(Run):
    """Nodes with a pace in seconds a window; one without a pace is a liar. Every commit is durable at once."""

    def __init__(self, spec: RunSpec, paces: dict[NodeId, float | None], *, drops: bool = True, floor: int = 1) -> None:
        self.paces, self.ticks, self.freed_at = dict(paces), 0, 0.0
        self.lie: Callable[[World], Any] = honest
        self.reports = True
        self.commits: list[tuple[float, rec.WindowCommitted]] = []
        super().__init__(spec, paces, now=0.0, at_once=True, machine={"drops_silent": drops}, steps=10**6, floor=floor)

    def durable(self, fragment: int = 1, **changes: Any) -> Commands:
        self.commits.append((self.now, self.draft(fragment)))
        self.freed_at = self.now
        return super().durable(fragment, **changes)

    def report(self, node: NodeId, **changes: Any) -> None:
        self.say(node, dataclasses.replace(REPORT, **changes))

    @property
    def head(self) -> int:
        """The fragment whose window is due first."""
        windows = self.machine.windows
        return min(windows, key=lambda f: (windows[f].terms.round, -f) if f else (windows[f].terms.round - 0.5, 0))

    def deliver(self, node: NodeId, **changes: Any) -> None:
        window = self.machine.windows[self.head]
        if window.state == "open" and node not in window.contributors:
            self.store(node, self.head, **changes)

    def tick(self, seconds: float = 1.0) -> None:
        self.pass_time(seconds)
        self.ticks += 1
        for node, pace in self.paces.items():
            if pace is None or self.machine.members[node].session is None:
                continue
            if self.reports:
                fixed = 10 * (self.ledger.current_round + 1)
                self.report(
                    node, state="training" if self.ticks < fixed else "waiting", inner_steps=min(self.ticks, fixed)
                )
            if self.now - self.freed_at >= pace:
                self.deliver(node)
        self.lie(self)

    def run(self, seconds: float, tick_s: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick(tick_s)

    def until(self, condition: Callable[[], bool], at_most_s: float) -> None:
        began = self.now
        while not condition():
            self.tick()
            assert self.now - began <= at_most_s, self.alarms

    def committed_since(self, then: float) -> list[rec.WindowCommitted]:
        return [record for at, record in self.commits if at > then]

    def dropped(self, node: NodeId) -> list[Reason]:
        return [drop.reason for _, record in self.commits for drop in record.drops if drop.node == node]

    def falls(self, lie: "Callable[[World], Any]") -> float:
        """b sends no delta any more, and does this in each tick; when."""
        self.paces[B], self.lie = None, lie
        return self.now

    def recovers(self) -> None:
        """b is honest again."""
        self.paces[B], self.lie = 2.0, honest

    def b_is_expected(self) -> set[bool]:
        return {B in window.expected for window in self.machine.windows.values()}

    def allowed_s(self, node: NodeId) -> float:
        """How long the first window may wait for it."""
        window, deadlines = self.machine.windows[self.head], self.machine.deadlines
        return deadlines._allowed_s(window, node, partial(deadlines._first_s, window))


def honest(world: World) -> None:
    """Nothing more than its pace says."""


def alternating(world: World) -> None:
    """5, 6, 5, 6, …"""
    world.report(B, inner_steps=5 + world.ticks % 2)


def waiting(world: World) -> None:
    world.report(B, state="waiting", inner_steps=5)


def offering(world: World) -> None:
    """A new delta each time; none of them ever comes."""
    waiting(world)
    world.say(B, world.offer(B, world.head))


@pytest.fixture
def world(spec: RunSpec) -> World:
    """Nodes a and b have trained for a minute, at two seconds a window."""
    world = World(spec, {A: 2.0, B: 2.0})
    world.run(60.0)
    assert len(world.commits) > 20
    return world


@pytest.mark.parametrize("lie", [alternating, waiting, offering])
def test_a_node_that_falls_silent_does_not_hold_the_run(world: World, lie: Callable[[World], None]) -> None:
    """F: whatever it reports. Before it had a deadline, nothing was committed any more."""
    fell = world.falls(lie)
    world.until(lambda: len(world.committed_since(fell)) >= 20, 2 * FLOOR_S + 20 * 2.5 + 5.0)
    assert not world.dropped(A) and world.dropped(B)
    then = world.now
    world.run(200.0)
    assert len(world.committed_since(then)) > 80, "as quick as without it"


@pytest.mark.parametrize(("lie", "late"), [(waiting, Reason.LATE), (honest, Reason.STALLED)])
def test_a_delta_that_fails_once_it_is_not_waited_for_ends_its_window(
    spec: RunSpec, lie: Callable[[World], None], late: Reason
) -> None:
    """The node sends no other one: a window that needs it would be held for good."""
    world = World(spec, {A: 2.0, B: 2.0}, floor=2)
    world.run(60.0)
    world.falls(lie)
    head, offer = world.head, world.offer(B, world.head)
    world.say(B, offer)
    world.reports = late is Reason.LATE
    world.until(lambda: world.machine.windows[head].removed == {B: late}, 2 * FIRST_S)
    idle = ev.InputFailed(offer=offer, reason=Reason.IDLE, detail="")
    assert brief(world.handle(idle)[:3]) == f"dropped {head} of b IDLE; forget {head} of b; b: IDLE"
    (_, record) = world.commits[-1]
    assert record.version == offer.window and not record.merged and record.drops[-1].reason is Reason.IDLE


def test_before_a_node_is_dropped_an_alarm_says_what_it_owes(world: World) -> None:
    fell = world.falls(offering)
    world.until(lambda: ALARM in world.alarms, FLOOR_S)
    assert not world.dropped(B)
    said = world.alarms[ALARM]
    assert said.startswith("nothing was committed for ") and "; a window usually takes 4.0s: b owes its delta" in said
    assert said.endswith("and offered the delta without sending it") and "a owes" not in said
    world.until(lambda: bool(world.committed_since(fell + 5.0)), FLOOR_S)
    assert ALARM not in world.alarms, "it is over with the next commit"


def test_one_that_misses_again_is_not_expected_for_a_while_and_an_alarm_says_so(world: World) -> None:
    world.falls(waiting)
    world.until(lambda: f"{SILENT}b" in world.alarms, 2 * FLOOR_S + 10.0)
    assert "no window waits for it" in world.alarms[f"{SILENT}b"]
    assert set(world.dropped(B)) == {Reason.LATE}
    world.run(20.0)
    assert world.b_is_expected() == {False}
    world.deliver(B)
    assert f"{SILENT}b" not in world.alarms
    world.recovers()
    world.run(10.0)
    assert world.b_is_expected() == {True}, "its delta came in time"


def test_a_liar_costs_less_and_less_whatever_it_does(world: World) -> None:
    """It comes as another start again and again, or sends a good delta now and then."""

    def lie(one: World) -> None:
        if one.ticks % 300 == 0:
            one.join(B, incarnation=one.incarnations[B] + 1)
        elif one.ticks % 20:
            alternating(one)

    world.falls(lie)
    world.run(600.0)
    then = world.now
    world.run(900.0)
    assert len(world.committed_since(then)) > 0.6 * 900.0 / 2.0


def test_a_node_that_is_slow_at_its_usual_pace_is_never_dropped(spec: RunSpec) -> None:
    """Fifty times slower than the other one; and later four times as slow as that."""
    world = World(spec, {A: 1.0, B: 50.0})
    world.run(1500.0, 2.0)
    world.paces[B] = 200.0
    world.run(2000.0, 4.0)
    assert not world.dropped(B) and not world.dropped(A) and len(world.commits) > 35


def test_a_link_that_became_very_slow_for_good_is_waited_for_in_the_end(spec: RunSpec) -> None:
    """A deadline that only its own rounds could teach would never be met again."""
    world = World(spec, {A: 10.0, B: 10.0})
    world.run(300.0)
    world.paces[B] = 150.0
    world.run(4000.0, 5.0)
    assert world.dropped(B)
    then = world.now
    world.run(2000.0, 5.0)
    assert [record for record in world.committed_since(then) if not record.drops]
    assert all(not record.drops for record in world.committed_since(then + 1000.0))


def test_a_round_of_more_steps_has_a_longer_deadline(spec: RunSpec) -> None:
    """B: QSR; rounds grow to a hundred times the length."""
    world = World(spec, {A: 10.0, B: 10.0})
    world.run(300.0)
    assert world.allowed_s(B) == MULTIPLE * 20.0
    rounds, index = world.ledger.rounds, world.machine.windows[world.head].terms.round
    rounds[index] = dataclasses.replace(rounds[index], length=1000)
    assert world.allowed_s(B) == 100 * MULTIPLE * 20.0


def test_where_nothing_was_learnt_yet_a_window_has_long(spec: RunSpec) -> None:
    """The first step compiles, and of links nothing is known."""
    world = World(spec, {A: 2.0, B: None})
    assert world.allowed_s(B) == UNKNOWN_S
    world.run(5.0)
    assert FIRST_S <= world.allowed_s(B) < 1.1 * FIRST_S
    first, second = spec.identity.layout.fragments
    large = dataclasses.replace(spec.identity.layout, fragments=(first, dataclasses.replace(second, numel=125_000_000)))
    thin = World(dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, layout=large)), {A: 2.0})
    thin.run(1.5, 0.5)
    assert thin.head == 1 and thin.allowed_s(A) > 10_000.0


def test_a_delta_without_a_step_teaches_nothing_of_its_node(spec: RunSpec) -> None:
    """Else who stood still, and sends one at once, would have no time for a whole round afterwards."""
    world = World(spec, {A: 10.0, B: None})
    world.lie = lambda world: world.deliver(B, steps=0, tokens=0)
    world.run(300.0)
    assert len(world.commits) > 10 and world.allowed_s(A) == MULTIPLE * 20.0 < FIRST_S <= world.allowed_s(B)


def test_a_liar_from_the_beginning_holds_the_first_window_alone(spec: RunSpec) -> None:
    world = World(spec, {A: 2.0, B: None})
    world.lie = waiting
    world.until(lambda: len(world.commits) >= 20, FIRST_S + 90.0)


def test_who_waits_for_a_window_is_not_blamed_for_the_next_one(spec: RunSpec) -> None:
    """A node that stands still until one fragment is committed cannot send the other."""
    world = World(spec, {A: 25.0, B: 25.0, C: 25.0})
    world.run(1000.0, 5.0)
    world.paces[C] = None
    world.run(2000.0, 5.0)
    assert not world.dropped(A) and not world.dropped(B) and world.dropped(C)


def test_while_nothing_can_be_committed_no_node_misses_a_deadline(world: World) -> None:
    """O: a full disk does not take the deltas that came."""
    world.falls(waiting)
    world.alarms[STORAGE] = "the disk is full"
    world.run(300.0)
    assert not world.dropped(B) and ALARM not in world.alarms
    del world.alarms[STORAGE]
    world.run(2 * FLOOR_S + 5.0)
    assert world.dropped(B)


def test_a_stop_of_this_process_moves_deadlines(world: World) -> None:
    """C."""
    world.falls(alternating)
    world.run(10.0)
    world.machine.clock_jumped(500.0)
    world.now += 500.0
    world.freed_at += 500.0
    world.tick()
    assert not world.dropped(B) and ALARM not in world.alarms


def test_a_restart_learns_anew_and_is_patient(world: World) -> None:
    """C, P: nothing of it is in the journal."""
    world.play("restart; a returns; b returns")
    world.falls(alternating)
    count = len(world.commits)
    world.run(FLOOR_S + 10.0)
    assert len(world.commits) <= count + 1
    world.run(FIRST_S + 60.0)
    assert len(world.commits) > count + 5


def test_where_no_node_is_to_be_dropped_the_alarm_is_all(spec: RunSpec) -> None:
    """`adapt` = off or advise."""
    world = World(spec, {A: 2.0, B: 2.0}, drops=False)
    world.run(60.0)
    fell = world.falls(waiting)
    world.run(500.0, 2.0)
    assert len(world.committed_since(fell)) <= 1 and ALARM in world.alarms
    world.recovers()
    world.run(20.0)
    assert ALARM not in world.alarms


def test_a_run_that_no_node_is_connected_to_says_who_is_missing(world: World) -> None:
    for node in (A, B):
        world.part(node)
    world.run(FLOOR_S)
    world.part(A)  # anything that happens
    assert "a owes" in world.alarms[ALARM] and "it is not connected" in world.alarms[ALARM]
