"""Terms that change under a node: at the boundary, whatever the order in which it hears of things (protocol B, Z)."""

import dataclasses

from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.spec import BlobId, BlobKind, Fragment, Identity, Layout, NodeId, Revision, RunSpec
from farloop.algo.terms import LearningRate, Terms
from farloop.node import events as ev
from farloop.node.machine import NodeMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A = NodeId("a")
OLD = plain_terms(method="decoupled", steps=40, h=4, tau=3, lr=LearningRate(peak=1.0, minimum=0.0, warmup_steps=0))
OLD = OLD.replace(on_late_update="continue", max_staleness=4, max_stale_rounds=8, quorum=1)
LOW = dataclasses.replace(OLD.schedule.lr, peak=0.5)


def spec(terms: Terms, revision: int = 0) -> RunSpec:
    identity = Identity(
        name="story",
        model="own",
        layout=Layout(slots=1, fragments=(Fragment(index=0, slot=0, numel=256, tensors=()),)),
        anchor_digests=(0,),
        data="own",
        num_samples=0,
        evaluation_set="none",
        seed=0,
    )
    return RunSpec(identity=identity, terms=terms, revision=revision)


ROUNDS = {plan.index: plan for plan in schedule.first_rounds(OLD, 20)}


def welcome(*revisions: Revision, known: range = range(20)) -> msg.Welcome:
    newest = revisions[-1] if revisions else Revision(number=0, terms=OLD, windows=(0,), round=0)
    window = schedule.first_windows(OLD, spec(OLD).identity.layout)[0]
    if known.start:
        window = dataclasses.replace(window, window=known.start + 1, round=known.start)
    return msg.Welcome(
        protocol=2,
        epoch=1,
        spec=spec(newest.terms, newest.number),
        lane_token=b"",
        versions=(known.start,),
        windows=(window,),
        rounds=tuple(plan for plan in ROUNDS.values() if plan.index in known),
        revisions=revisions,
    )


def new(**changes: object) -> Revision:
    return Revision(number=1, terms=OLD.replace(**changes), windows=(3,), round=2)  # type: ignore[arg-type]


def hear(machine: NodeMachine, message: msg.Message) -> list[ev.Command]:
    return machine.handle(ev.Received(message=message))


def begun(*revisions: Revision, known: range = range(20), tau: int | None = None) -> NodeMachine:
    machine = NodeMachine(name=A, incarnation=1, tau=tau)
    hear(machine, welcome(*revisions, known=known))
    machine.handle(ev.BlobArrived(blob=BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=0)))
    hear(machine, msg.Start(round=ROUNDS[known.start], lease=None))
    assert machine.running
    return machine


def rates(machine: NodeMachine, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(machine.lr)
        machine.handle(ev.StepDone(tokens=1))
        machine.check()
    return seen


def expected(*terms: Terms) -> list[float]:
    """Of the steps of four-step rounds under these terms, one after the other."""
    return [schedule.learning_rate(own, 4 * index + step) for index, own in enumerate(terms) for step in range(4)]


def test_a_new_learning_rate_begins_with_its_round() -> None:
    machine, revision = begun(), new(lr=LOW)
    first = rates(machine, 2)
    hear(machine, msg.Revised(revision=revision))
    assert first + rates(machine, 10) == expected(OLD, OLD, revision.terms)
    assert machine.spec is not None and (machine.spec.revision, machine.spec.terms) == (1, revision.terms)


def test_who_comes_later_begins_each_round_under_its_own_terms() -> None:
    revision = new(lr=LOW)
    old = Revision(number=0, terms=OLD, windows=(0,), round=0)
    assert rates(begun(old, revision), 12) == expected(OLD, OLD, revision.terms)


def test_what_is_said_twice_counts_once() -> None:
    machine, revision = begun(), new(lr=LOW)
    for _ in range(2):
        hear(machine, msg.Revised(revision=revision))
    assert machine.revisions is not None and [r.number for r in machine.revisions.kept] == [0, 1]
    hear(machine, welcome(Revision(number=0, terms=OLD, windows=(0,), round=0), revision))
    hear(machine, msg.Revised(revision=revision))
    assert machine.revisions.kept[-1] == revision


def test_a_longer_run_does_not_end_where_it_would_have() -> None:
    machine = begun(known=range(3))
    longer = new(steps=48)
    hear(machine, msg.Revised(revision=longer))
    machine.schedule.plans |= {9: ROUNDS[9]}
    machine.schedule.round, machine.schedule.step = 9, 3
    machine.handle(ev.StepDone(tokens=1))
    assert machine.running, "position 40 was the end"


def test_an_own_overlap_is_no_longer_than_the_new_rounds_have_room_for() -> None:
    machine, shorter = begun(tau=3), new(h=2, tau=1)
    hear(machine, msg.Revised(revision=shorter))
    commands = [command for _ in range(4) for command in machine.handle(ev.StepDone(tokens=1))]
    assert any(isinstance(command, ev.Encode) for command in commands)
    assert machine.fragments[0].sent[-1].tau == 3, "this round and the next are as long as they were"
    machine = begun(tau=3)
    hear(machine, msg.Revised(revision=dataclasses.replace(shorter, round=1)))
    for _ in range(4):
        machine.handle(ev.StepDone(tokens=1))
    assert machine.fragments[0].sent[-1].tau == 1


def test_how_old_a_base_may_be_is_as_the_open_window_says() -> None:
    """The fragment is at version 0; the change begins with window 3, which opens with version 2."""
    machine = begun()
    hear(machine, msg.Revised(revision=new(max_staleness=1)))
    state = machine.fragments[0]
    assert [machine.terms_at(state, version).admission.max_staleness for version in (0, 1, 2, 3)] == [4, 4, 1, 1]
    assert machine.terms_of(0, 2).admission.max_staleness == 4 and machine.terms_of(0, 3).admission.max_staleness == 1


def test_a_node_whose_next_round_is_long_over_goes_on_with_the_runs() -> None:
    """A: its plan was told while it was away, and nobody tells it any more."""
    machine = begun(known=range(2))
    rates(machine, 8)
    assert machine.waiting == "the plan of round 2"
    machine.handle(ev.Disconnected(reason=Reason.CLOSED))
    hear(machine, welcome(known=range(5, 8)))
    assert (machine.schedule.round, machine.schedule.step, machine.position) == (5, 0, 20.0)
    assert machine.schedule.skipped_positions == 12 and machine.waiting is None
