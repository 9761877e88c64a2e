"""Nodes that hold some stages of the model: everything about a fragment is between those who hold it (protocol G).

Fragments 0 (slot 0) and 1 (slot 1) are of stage 0, fragment 2 (slot 1) is of stage 1; rounds of ten steps.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from plain_runs import plain_hello, plain_offer, plain_progress

from farloop.algo.spec import Fragment, Layout, NodeId, RunSpec, TensorSlot
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import ALARM
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A0, B0, A1, B1, C1, W = map(NodeId, ("a0", "b0", "a1", "b1", "c1", "w"))
PARTS = {A0: (0,), B0: (0,), A1: (1,), B1: (1,), C1: (1,), W: None}
REPORT = plain_progress(position=0.0, inner_steps=10, tokens=0, loss=None, tokens_per_s=0.0, compute_share=0.0)


class Run:
    """A machine, and nodes whose names say what they hold."""

    def __init__(self, spec: RunSpec, *, num_samples: int = 0, evaluation_set: str = "none", **terms: Any) -> None:
        fragments = tuple(
            Fragment(
                index=i, slot=slot, numel=256, tensors=(TensorSlot(name=f"t{i}", shape=(200,), offset=0),), stage=s
            )
            for i, (slot, s) in enumerate([(0, 0), (1, 0), (1, 1)])
        )
        identity = dataclasses.replace(
            spec.identity,
            layout=Layout(slots=2, fragments=fragments),
            anchor_digests=(100, 101, 102),
            num_samples=num_samples,
            evaluation_set=evaluation_set,
        )
        terms = {"steps": 1000, "min_nodes": 2, **terms}
        self.spec = RunSpec(identity=identity, terms=spec.terms.replace(**terms))
        self.ledger = Ledger.begin(rec.RunStarted(spec=self.spec, epoch=1))
        self.now, self.seq = 100.0, 0
        self.sessions: dict[NodeId, int] = {}
        self.begin()

    def begin(self) -> None:
        self.machine = CoordinatorMachine(self.ledger, now=self.now, liveness_s=10.0)
        self.machine.check()

    def restart(self) -> None:
        self.ledger = self.ledger.copy()
        self.begin()

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def greet(self, node: NodeId, **changes: Any) -> list[ev.Command]:
        self.sessions[node] = session = len(self.sessions) + 1
        hello = dataclasses.replace(plain_hello(node=node, holds=PARTS[node]), **changes)
        return self.handle(ev.NodeHello(session=session, node=node, hello=hello))

    def say(self, node: NodeId, message: msg.Message) -> list[ev.Command]:
        return self.handle(ev.NodeMessage(session=self.sessions[node], node=node, message=message))

    def join(self, *nodes: NodeId) -> list[ev.Command]:
        for node in nodes:
            self.greet(node)
        return [command for node in nodes for command in self.say(node, msg.Ready())]

    def leave(self, node: NodeId) -> list[ev.Command]:
        return self.say(node, msg.Leave(reason=Reason.DRAINED))

    def offer(self, node: NodeId, fragment: int, *, tokens: int = 640) -> msg.Offer:
        window = self.machine.windows[fragment].terms.window
        self.seq += 1
        return plain_offer(node, window, fragment=fragment, seq=self.seq, tokens=tokens)

    def store(self, node: NodeId, fragment: int) -> list[ev.Command]:
        offer = self.offer(node, fragment)
        assert self.say(node, offer) == [ev.Receive(offer=offer)]
        return self.handle(ev.InputStored(offer=offer))

    def commit(self, fragment: int, *nodes: NodeId) -> list[ev.Command]:
        """Deltas of these nodes come, and every window that closes is committed. Returns what follows."""
        commands = [command for node in nodes for command in self.store(node, fragment)]
        return self.carry_on(commands)

    def carry_on(self, commands: Sequence[ev.Command]) -> list[ev.Command]:
        followed: list[ev.Command] = []
        for command in commands:
            if isinstance(command, ev.Commit):
                record = dataclasses.replace(command.draft, update_size=50, update_digest=3)
                followed += self.carry_on(self.handle(ev.CommitDone(record=record)))
            else:
                followed.append(command)
        return followed

    def expected(self, fragment: int) -> set[NodeId]:
        return self.machine.windows[fragment].expected

    def alarm(self, stage: int) -> str:
        return self.machine.alarms.get(f"stage {stage}", "")


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(spec: RunSpec) -> MakeRun:
    def make(*nodes: NodeId, **changes: Any) -> Run:
        run = Run(spec, **changes)
        run.join(*nodes)
        return run

    return make


def snapshots(commands: Sequence[ev.Command]) -> list[int]:
    return [command.fragment for command in commands if isinstance(command, ev.SendSnapshot)]


def heard_by(commands: Sequence[ev.Command]) -> dict[int, tuple[NodeId, ...]]:
    """Who is told of the commit of each fragment."""
    return {c.committed.fragment: c.nodes for c in commands if isinstance(c, ev.Publish)}


def refused(commands: Sequence[ev.Command]) -> msg.Refused:
    command = commands[-1]
    assert isinstance(command, ev.Refuse)
    return command.refused


# --- coming


def test_a_node_is_given_the_anchors_of_what_it_holds(make_run: MakeRun) -> None:
    run = make_run()
    assert snapshots(run.greet(A0)) == [0, 1]
    assert snapshots(run.greet(A1)) == [2]
    assert snapshots(run.greet(W)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("holds", "words"),
    [
        ((), "the node holds no stage of the model"),
        ((2,), "the node holds stage 2, and the run's model has stages 0 to 1"),
    ],
)
def test_a_part_that_the_model_does_not_have_is_refused_with_a_sentence(
    make_run: MakeRun, holds: tuple[int, ...], words: str
) -> None:
    said = refused(make_run().greet(A1, holds=holds))
    assert said.reason is Reason.WRONG_PART and not said.retriable and said.detail.startswith(words)


def test_a_start_of_a_node_holds_the_same_for_its_life(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1)
    assert "held stages 1, and now 0" in refused(run.greet(A1, holds=(0,), round=0)).detail
    accepted, *_ = run.greet(A1, holds=(0,), incarnation=2)
    assert isinstance(accepted, ev.CloseSession), "a new start may hold something else"


def test_a_run_begins_when_enough_nodes_hold_every_stage(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1)
    assert not run.machine.begun
    run.join(W)
    assert run.machine.begun and run.expected(1) == {A0, B0, W} and run.expected(2) == {A1, W}
    assert {name: run.ledger.holds_of(name) for name in (A0, B0, A1, W)} == {A0: (0,), B0: (0,), A1: (1,), W: None}


# --- windows


def test_a_window_expects_those_who_hold_its_fragment_and_tells_them_alone(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1)
    assert run.expected(1) == {A0, B0} and run.expected(2) == {A1, B1}
    assert heard_by(run.commit(1, A0, B0)) == {1: (A0, B0)}
    assert heard_by(run.commit(2, A1, B1)) == {2: (A1, B1)}


def test_a_delta_of_a_fragment_that_its_node_does_not_hold_has_its_reason(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1)
    offer = run.offer(A1, 1)
    outcome = msg.Outcome(blob=offer.blob, reason=Reason.NOT_HELD, detail=Reason.NOT_HELD.sentence)
    assert run.say(A1, offer) == [ev.Tell(node=A1, message=outcome)]
    assert run.say(A1, msg.Fetch(fragment=1)) == [], "nor is it given the anchor"


def test_a_node_that_falls_away_is_missed_by_the_windows_of_its_own_stage_alone(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1)
    run.store(A1, 2)
    run.carry_on(run.leave(B1))
    assert run.ledger.versions == [0, 0, 1] and run.expected(1) == {A0, B0}
    assert not run.machine.windows[1].removed


def test_no_stage_gets_more_than_a_round_ahead_of_another(make_run: MakeRun) -> None:
    """The round is the only clock: what a stage needs to go on is told by the commits of its own fragments."""
    run = make_run(A0, B0, A1, B1)
    for _ in range(3):
        run.commit(2, A1, B1)
    assert run.ledger.versions == [0, 0, 2], "stage 0 has its last slot of round 0 open: round 2 has to wait"
    assert run.ledger.windows[2].round == 2 and not run.machine.windows[2].missing
    followed = run.commit(1, A0, B0)
    assert run.ledger.versions == [0, 1, 3] and heard_by(followed)[2] == (A1, B1), "now it is closed at once"


def test_a_stage_that_nobody_holds_is_told_and_its_windows_wait(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, min_nodes=1)
    assert not run.alarm(0) and not run.alarm(1)
    run.leave(A1)
    assert run.alarm(1) == "no node that trains holds it: the windows of fragments 2 wait for one"
    for _ in range(4):
        for fragment in (1, 0):
            if run.machine.windows[fragment].missing:
                run.commit(fragment, A0, B0)
    assert run.ledger.versions == [1, 2, 0], "stage 0 goes on for a round, and then waits as well"
    run.join(B1)
    assert not run.alarm(1) and run.machine.windows[2].missing == {B1}, "no boundary would ever have come"
    run.commit(2, B1)
    run.commit(2, B1)
    assert run.ledger.versions[2] == 2 and run.machine.windows[0].state == "open"


def test_live_nodes_of_another_stage_are_not_those_who_are_left_out_of_a_window(make_run: MakeRun) -> None:
    """Half of the live nodes hold something else: that is no reason to hold a window (Participation)."""
    run = make_run(A0, B0, A1, B1)
    for _ in range(6):
        for fragment, nodes in ((1, (A0, B0)), (2, (A1, B1)), (0, (A0, B0))):
            run.commit(fragment, *nodes)
    assert run.ledger.versions == [6, 6, 6] and not run.machine.guard.holds and not run.machine.guard.left_out()


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
    over = [ev.Tell(node=node, message=msg.Finished()) for node in (A1, B1)]
    followed = run.commit(2, A1, B1)
    assert [command for command in followed if isinstance(command, ev.Tell) and command in over] == over
    assert not run.ledger.finished and 2 not in run.ledger.windows
    assert ev.Tell(node=W, message=msg.Finished()) not in run.greet(W), "there is work for who holds more"
    late = run.greet(A1, incarnation=2)
    assert over[0] in late and snapshots(late) == [2], "who comes now is given the final anchor"


def test_what_nodes_hold_is_known_after_a_restart(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1)
    run.restart()
    assert run.machine.members[A1].holds == (1,) and run.expected(2) == {A1, B1}
    accepted, *caught_up = run.greet(A1, round=0)
    assert isinstance(accepted, ev.Accept) and snapshots(caught_up) == [2]


# --- samples, claims, evaluation


def test_samples_go_to_those_who_hold_the_first_stage(make_run: MakeRun) -> None:
    run = make_run(num_samples=500)
    commands = run.join(A0, B0, A1, B1)
    starts = {c.node: c.message for c in commands if isinstance(c, ev.Tell) and isinstance(c.message, msg.Start)}
    assert starts.keys() == {A0, B0, A1, B1}
    assert {node for node, start in starts.items() if start.lease} == {A0, B0}
    greeted, *_ = [c for c in run.greet(A1, round=0) if isinstance(c, ev.Accept)]
    assert greeted.welcome.leases is None, "and there is nothing for the others to keep"


def test_who_holds_a_part_says_how_many_tokens_came_by(make_run: MakeRun) -> None:
    """A source has those of its own samples, but for what was lost on the way; another stage those of all sources."""
    run = make_run(A0, B0, A1, B1, num_samples=500)
    assert run.say(A0, offer := run.offer(A0, 1, tokens=320)) == [ev.Receive(offer=offer)]
    assert run.say(A1, offer := run.offer(A1, 2, tokens=1280)) == [ev.Receive(offer=offer)]
    (told,) = run.say(B0, run.offer(B0, 1, tokens=641))
    assert isinstance(told, ev.Tell) and isinstance(told.message, msg.Outcome)
    assert told.message.reason is Reason.IMPLAUSIBLE and "641 tokens in 10 inner steps" in told.message.detail
    assert run.machine.believes(A1, dataclasses.replace(REPORT, tokens=1280))
    assert not run.machine.believes(A0, dataclasses.replace(REPORT, tokens=1280))


def test_the_anchors_are_scored_by_a_node_that_has_all_of_them(make_run: MakeRun) -> None:
    run = make_run(A0, B0, A1, B1, evaluation_set="set")
    assert [c.committed.evaluator for c in run.commit(2, A1, B1) if isinstance(c, ev.Publish)] == [None]
    run = make_run(A0, A1, W, evaluation_set="set")
    assert [c.committed.evaluator for c in run.commit(2, A1, W) if isinstance(c, ev.Publish)] == [W]


def test_a_stage_whose_nodes_are_mostly_left_out_is_held_and_another_is_not(make_run: MakeRun) -> None:
    """Participation: it is between those who hold the stage. Two of three are refused; when they leave, it goes on."""
    run = make_run(A0, B0, A1, B1, min_nodes=2)
    run.join(C1)
    for _ in range(8):
        for fragment, good in ((1, (A0, B0)), (2, (A1,)), (0, (A0, B0))):
            for node in sorted(run.machine.windows[fragment].missing, key=lambda node: node in good):
                stored, offer = ev.InputStored, run.offer(node, fragment)
                failed = ev.InputFailed(offer=offer, reason=Reason.CORRUPT, detail="again")
                run.carry_on(run.handle(stored(offer=offer) if node in good else failed))
    assert run.machine.guard.left_out() == [B1, C1]
    assert run.machine.guard.holds_stage(1) and not run.machine.guard.holds_stage(0)
    assert "2 of 3 live nodes" in run.machine.alarms[f"{ALARM} in stage 1"] and ALARM not in run.machine.alarms
    before = run.ledger.versions[2]
    for node in (B1, C1):
        run.carry_on(run.leave(node))
    assert run.ledger.versions[2] == before + 1 and not run.machine.guard.holds
    assert not any(alarm.startswith(ALARM) for alarm in run.machine.alarms)
