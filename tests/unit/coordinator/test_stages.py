"""Nodes that hold some stages of the model: everything about a fragment is between those who hold it (protocol G).

Fragments 0 (slot 0) and 1 (slot 1) are of stage 0, fragment 2 (slot 1) is of stage 1; rounds of ten steps.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from coordinator_run import Commands, Run, accepted, outcome, published, refused, snapshots, tell, told
from plain_runs import plain_progress

from farloop.algo.spec import Fragment, Layout, NodeId, RunSpec, TensorSlot
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.closing import ALARM
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A0, B0, A1, B1, C1, W = map(NodeId, ("a0", "b0", "a1", "b1", "c1", "w"))
PARTS = {A0: (0,), B0: (0,), A1: (1,), B1: (1,), C1: (1,), W: None}
REPORT = plain_progress(position=0.0, inner_steps=10, loss=None)


class Staged(Run):
    """Nodes whose names say what they hold; every commit is durable at once."""

    def __init__(self, spec: RunSpec, nodes: Iterable[str], **changes: Any) -> None:
        fragments = tuple(
            Fragment(
                index=i, slot=slot, numel=256, tensors=(TensorSlot(name=f"t{i}", shape=(200,), offset=0),), stage=s
            )
            for i, (slot, s) in enumerate([(0, 0), (1, 0), (1, 1)])
        )
        layout = Layout(slots=2, fragments=fragments)
        identity = dataclasses.replace(spec.identity, layout=layout, anchor_digests=(100, 101, 102))
        spec = dataclasses.replace(spec, identity=identity)
        super().__init__(spec, nodes, at_once=True, **{"steps": 1000, "min_nodes": 2, **changes})

    def greet(self, node: NodeId, **changes: Any) -> Commands:
        return super().greet(node, **{"holds": PARTS[node], "anchors": (), **changes})

    def round(self, *deltas: tuple[int, tuple[NodeId, ...]]) -> None:
        for fragment, nodes in deltas:
            if self.missing(fragment):
                self.commit(fragment, *nodes)


MakeRun = Callable[..., Staged]


@pytest.fixture
def make_run(spec: RunSpec) -> MakeRun:
    return lambda *nodes, **changes: Staged(spec, nodes, **changes)


@pytest.fixture
def run(make_run: MakeRun) -> Staged:
    """Two nodes of each stage."""
    return make_run(A0, B0, A1, B1)


def heard_by(commands: Commands) -> dict[int, tuple[NodeId, ...]]:
    """Who is told of the commit of each fragment."""
    return {publish.committed.fragment: publish.nodes for publish in published(commands)}


# --- coming


def test_a_node_is_given_the_anchors_of_what_it_holds(make_run: MakeRun) -> None:
    run = make_run()
    assert [snapshots(run.greet(node)) for node in (A0, A1, W)] == [[0, 1], [2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("holds", "words"),
    [
        ((), "the node holds no stage of the model"),
        ((2,), "the node holds stage 2, and the run's model has stages 0 to 1"),
    ],
)
def test_a_part_that_the_model_does_not_have_is_refused(make_run: MakeRun, holds: tuple[int, ...], words: str) -> None:
    said = refused(make_run().greet(A1, holds=holds))
    assert said.reason is Reason.WRONG_PART and not said.retriable and said.detail.startswith(words)


def test_a_start_of_a_node_holds_the_same_for_its_life(run: Staged) -> None:
    assert "held stages 1, and now 0" in refused(run.greet(A1, holds=(0,), round=0)).detail
    accepted(run.greet(A1, holds=(0,), incarnation=2))


def test_a_run_begins_when_enough_nodes_hold_every_stage(make_run: MakeRun) -> None:
    run = make_run(A0, B0)
    run.join(A1)
    assert not run.machine.begun
    run.join(W)
    assert run.machine.begun and run.expected(1) == {A0, B0, W} and run.expected(2) == {A1, W}
    assert {name: run.ledger.holds_of(name) for name in (A0, B0, A1, W)} == {A0: (0,), B0: (0,), A1: (1,), W: None}


# --- windows


def test_a_window_expects_those_who_hold_its_fragment_and_tells_them_alone(run: Staged) -> None:
    assert run.expected(1) == {A0, B0} and run.expected(2) == {A1, B1}
    assert heard_by(run.commit(1, A0, B0)) == {1: (A0, B0)}
    assert heard_by(run.commit(2, A1, B1)) == {2: (A1, B1)}


def test_a_delta_of_a_fragment_that_its_node_does_not_hold_has_its_reason(run: Staged) -> None:
    offer = run.offer(A1, 1)
    assert run.say(A1, offer) == [outcome(offer, Reason.NOT_HELD)]
    assert run.say(A1, msg.Fetch(fragment=1)) == [], "nor is it given the anchor"


def test_a_node_that_falls_away_is_missed_by_the_windows_of_its_own_stage_alone(run: Staged) -> None:
    run.store(A1, 2)
    run.leave(B1)
    assert run.ledger.versions == [0, 0, 1] and run.expected(1) == {A0, B0}
    assert not run.machine.windows[1].removed


def test_no_stage_gets_more_than_a_round_ahead_of_another(run: Staged) -> None:
    """The round is the only clock: what a stage needs to go on is told by the commits of its own fragments."""
    for _ in range(3):
        run.commit(2, A1, B1)
    assert run.ledger.versions == [0, 0, 2], "stage 0 has its last slot of round 0 open: round 2 has to wait"
    assert run.ledger.windows[2].round == 2 and not run.missing(2)
    followed = run.commit(1, A0, B0)
    assert run.ledger.versions == [0, 1, 3] and heard_by(followed)[2] == (A1, B1), "now it is closed at once"


def test_a_stage_that_no_node_holds_is_told_and_its_windows_wait(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, min_nodes=1)
    assert not run.alarms
    run.leave(A1)
    assert run.alarms["stage 1"] == "no node that trains holds it: start one; the windows of fragments 2 wait"
    for _ in range(4):
        run.round((1, (A0, B0)), (0, (A0, B0)))
    assert run.ledger.versions == [1, 2, 0], "stage 0 goes on for a round, and then waits as well"
    run.join(B1)
    assert "stage 1" not in run.alarms and run.missing(2) == {B1}, "no boundary would ever have come"
    run.commit(2, B1)
    run.commit(2, B1)
    assert run.ledger.versions[2] == 2 and run.machine.windows[0].state == "open"


def test_live_nodes_of_another_stage_are_not_those_who_are_left_out_of_a_window(run: Staged) -> None:
    """Half of the live nodes hold something else: that is no reason to hold a window (Participation)."""
    for _ in range(6):
        run.round((1, (A0, B0)), (2, (A1, B1)), (0, (A0, B0)))
    assert run.ledger.versions == [6, 6, 6] and not run.machine.guard.holds and not run.machine.guard.left_out()


def test_a_stage_whose_nodes_are_mostly_left_out_is_held_and_another_is_not(run: Staged) -> None:
    """Participation: it is between those who hold the stage. Two of three are refused; when they leave, it goes on."""
    run.join(C1)
    for _ in range(8):
        for fragment, good in ((1, (A0, B0)), (2, (A1,)), (0, (A0, B0))):
            for node in sorted(run.missing(fragment), key=lambda node: node in good):
                if node in good:
                    run.store(node, fragment)
                else:
                    run.spoil(node, fragment)
    guard = run.machine.guard
    assert guard.left_out() == [B1, C1] and guard.holds_stage(1) and not guard.holds_stage(0)
    assert "2 of 3 live nodes" in run.alarms[f"{ALARM} in stage 1"] and ALARM not in run.alarms
    before = run.ledger.versions[2]
    for node in (B1, C1):
        run.leave(node)
    assert run.ledger.versions[2] == before + 1 and not guard.holds
    assert not any(alarm.startswith(ALARM) for alarm in run.alarms)


# --- beginning and end


def test_who_comes_late_starts_in_the_round_of_its_own_stage(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1, W, min_nodes=3)
    run.commit(2, A1, B1, W)
    run.leave(B1)
    run.join(B1)
    assert run.machine.members[B1].stage == "ready"
    run.commit(1, A0, B0, W)
    assert run.machine.members[B1].start_round == run.ledger.round_of_part((1,)) == 1


def test_a_node_is_told_that_the_run_is_over_when_its_own_fragments_are_final(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1, steps=10)
    followed = run.commit(2, A1, B1)
    assert [told(followed, node)[-1:] == [msg.Finished()] for node in (A0, B0, A1, B1)] == [False, False, True, True]
    assert not run.ledger.finished and 2 not in run.ledger.windows
    assert tell(W, msg.Finished()) not in run.greet(W), "there is work for who holds more"
    late = run.greet(A1, incarnation=2)
    assert tell(A1, msg.Finished()) in late and snapshots(late) == [2], "who comes now is given the final anchor"


def test_what_nodes_hold_is_known_after_a_restart(run: Staged) -> None:
    run.commit(1, A0, B0)
    run.restart()
    assert run.machine.members[A1].holds == (1,) and run.expected(2) == {A1, B1}
    assert snapshots(run.greet(A1, round=0)) == [2]


# --- samples, claims, evaluation


def test_samples_go_to_those_who_hold_the_first_stage(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1, num_samples=500)
    assert {node for node, _ in run.ledger.leases.held} == {A0, B0}
    assert accepted(run.greet(A1, round=0)).leases is None, "and there is nothing for the others to keep"


def test_who_holds_a_part_says_how_many_tokens_came_by(make_run: MakeRun) -> None:
    """A source has those of its own samples, but for what was lost on the way; another stage those of all sources."""
    run = make_run(A0, B0, A1, B1, num_samples=500)
    for node, fragment, tokens in ((A0, 1, 320), (A1, 2, 1280)):
        offer = run.offer(node, fragment, tokens=tokens)
        assert run.say(node, offer) == [ev.Receive(offer=offer)]
    (said,) = told(run.say(B0, run.offer(B0, 1, tokens=641)), B0)
    assert isinstance(said, msg.Outcome) and said.reason is Reason.IMPLAUSIBLE
    assert "641 tokens in 10 inner steps" in said.detail
    report = dataclasses.replace(REPORT, tokens=1280)
    assert run.machine.believes(A1, report) and not run.machine.believes(A0, report)


@pytest.mark.parametrize(("nodes", "evaluator"), [((A0, B0, A1, B1), None), ((A0, A1, W), W)])
def test_the_anchors_are_scored_by_a_node_that_has_all_of_them(
    make_run: MakeRun, nodes: tuple[NodeId, ...], evaluator: NodeId | None
) -> None:
    run = make_run(*nodes, evaluation_set="set")
    (publish,) = published(run.commit(2, *sorted(run.expected(2))))
    assert publish.committed.evaluator == evaluator
