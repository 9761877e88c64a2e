"""Late deltas: ride along, wait for the next window, or are refused with a reason (protocol C–F, Q).

The run of `conftest.py` as `decoupled` or `async`; only fragment 1 is looked at, whose window 1 is of round 0.
"""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_hello, plain_offer, plain_progress

from farloop.algo.methods import method_named
from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class Run:
    """Nodes a, b and c train, started together. All invariants are checked after every event."""

    def __init__(self, spec: RunSpec, method: str = "decoupled", *, nodes: int = 3, **terms: Any) -> None:
        row = method_named(method)
        choices = {
            "method": method, "on_late_update": "continue", "quorum": row.quorum, "max_staleness": row.max_staleness,
            "max_stale_rounds": row.max_stale_rounds, "min_nodes": nodes, **terms,
        }  # fmt: skip
        identity = dataclasses.replace(spec.identity, evaluation_set="fixed")
        spec = dataclasses.replace(spec, identity=identity, terms=spec.terms.replace(**choices))
        self.ledger, self.now, self.seq = Ledger.begin(rec.RunStarted(spec=spec, epoch=1)), 100.0, 0
        self.begin()
        names = (A, B, C)[:nodes]
        for session, node in enumerate(names, 1):
            self.greet(node, session)
        for session, node in enumerate(names, 1):
            self.handle(ev.NodeMessage(session=session, node=node, message=msg.Ready()))

    def begin(self) -> list[ev.Command]:
        self.machine = CoordinatorMachine(self.ledger, now=self.now, liveness_s=10.0)
        self.machine.check()
        return self.machine.start()

    def restart(self) -> list[ev.Command]:
        """The coordinator dies, and knows what is durable."""
        self.ledger = self.ledger.copy()
        return self.begin()

    def greet(self, node: NodeId, session: int, round_: int | None = None) -> list[ev.Command]:
        anchors = tuple(msg.AnchorRef(fragment=f, version=0, digest=100 + f) for f in range(2))
        hello = plain_hello(node=node, anchors=anchors, round=round_)
        return self.handle(ev.NodeHello(session=session, node=node, hello=hello))

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def delta(self, node: NodeId, window: int | None = None, *, steps: int = 10, incarnation: int = 1) -> msg.Offer:
        """For the open window unless another one is given."""
        window = window or self.window.terms.window
        self.seq += 1
        return plain_offer(node, window, incarnation=incarnation, seq=self.seq, steps=steps, tokens=steps)

    def offer(self, offer: msg.Offer) -> list[ev.Command]:
        node = offer.blob.node
        session = self.machine.members[node].session
        assert session is not None
        return self.handle(ev.NodeMessage(session=session, node=node, message=offer))

    def store(self, node: NodeId, window: int | None = None, *, steps: int = 10) -> list[ev.Command]:
        """A delta is offered, comes and is durable."""
        offer = self.delta(node, window, steps=steps)
        assert self.offer(offer) == [ev.Receive(offer=offer)]
        return self.handle(ev.InputStored(offer=offer))

    def done(self, commands: list[ev.Command]) -> list[ev.Command]:
        """The one commit among these commands is durable."""
        (draft,) = drafts(commands)
        return self.handle(ev.CommitDone(record=dataclasses.replace(draft, anchor_digest=draft.version)))

    def pass_time(self, seconds: float) -> list[ev.Command]:
        self.now += seconds
        commands: list[ev.Command] = []
        while (due := self.machine.next_timer()) is not None and due <= self.now:
            commands += self.machine.handle_timer(self.now)
            self.machine.check()
        return commands

    def hurry(self) -> "Run":
        """The first window closes at its quorum; those that follow wait for nobody."""
        lateness = self.machine.grace.lateness
        lateness.has_quorum(0, -1, opened_at=-1.0, now=-1.0, max_staleness=0)
        lateness.came(0, -1, 0.0)
        return self

    @property
    def window(self) -> Any:
        return self.machine.windows[1]


def drafts(commands: list[ev.Command]) -> list[rec.WindowCommitted]:
    return [command.draft for command in commands if isinstance(command, ev.Commit)]


def merged(commands: list[ev.Command]) -> list[list[NodeId]]:
    return [[share.node for share in draft.merged] for draft in drafts(commands)]


def refused(offer: msg.Offer, reason: Reason) -> ev.Tell:
    return ev.Tell(node=offer.blob.node, message=msg.Outcome(blob=offer.blob, reason=reason, detail=reason.sentence))


# --- late deltas


def test_a_late_delta_rides_along_in_the_window_that_is_open(spec: RunSpec) -> None:
    """D, E: it uses up no window of its own, and weighs by its own tokens and steps."""
    run = Run(spec).hurry()
    run.done(run.store(A))
    commands = run.store(B, 1)
    assert drafts(commands) == [] and run.window.contributors == {B}
    assert merged(run.store(A)) == [[A, B]]


def test_who_is_late_is_not_told_as_dropped(spec: RunSpec) -> None:
    """E: it may still be merged."""
    run = Run(spec).hurry()
    (draft,) = drafts(run.store(A))
    assert draft.drops == ()


def test_one_from_too_old_a_base_is_refused_with_its_reason(spec: RunSpec) -> None:
    """D."""
    run = Run(spec, max_staleness=1).hurry()
    for _ in range(2):
        run.done(run.store(A))
    late = run.delta(B, 1)
    assert run.offer(late) == [refused(late, Reason.LATE)]
    assert run.offer(just := run.delta(B, 2)) == [ev.Receive(offer=just)]


def test_without_staleness_every_late_delta_is_refused(spec: RunSpec) -> None:
    run = Run(spec, max_staleness=0).hurry()
    run.done(run.store(A))
    late = run.delta(B, 1)
    assert run.offer(late) == [refused(late, Reason.LATE)]


def test_one_that_holds_what_was_merged_is_recognised(spec: RunSpec) -> None:
    """E, Q: its sender had not heard of the version that holds its last one."""
    run = Run(spec).hurry()
    run.done(run.store(A))
    again = run.delta(A, 1)
    assert run.offer(again) == [refused(again, Reason.OVERLAP)]


def test_a_delta_that_is_stored_is_not_asked_for_again(spec: RunSpec) -> None:
    """Q: also one that waits for its window."""
    run = Run(spec, "async")
    run.store(A)
    held = run.delta(B)
    run.offer(held)
    run.handle(ev.InputStored(offer=held))
    assert run.offer(held) == [ev.Tell(node=B, message=msg.Stored(blob=held.blob))]


# --- while a window is closing


def test_what_comes_while_a_window_is_closing_begins_the_next(spec: RunSpec) -> None:
    """D."""
    run = Run(spec).hurry()
    closing = run.store(A)
    assert drafts(run.store(B)) == []
    run.done(closing)
    assert run.window.contributors == {B} and run.window.state == "open"


def test_what_the_next_window_could_not_take_either_is_refused(spec: RunSpec) -> None:
    """D, E: kept, it would fall out of the books with the commit, and nobody would be told."""
    run = Run(spec, max_staleness=1).hurry()
    run.done(run.store(A))
    under_way = run.delta(B, 1)
    assert run.offer(under_way) == [ev.Receive(offer=under_way)]
    closing = run.store(A)
    late = run.delta(C, 1)
    assert run.offer(late) == [refused(late, Reason.LATE)]
    commands = run.handle(ev.InputStored(offer=under_way))
    assert ev.Forget(blob=under_way.blob) in commands and refused(under_way, Reason.LATE) in commands
    run.done(closing)


def test_a_second_delta_of_a_node_that_waits_for_the_next_window_is_refused(spec: RunSpec) -> None:
    """H: the first one may be that of its incarnation before."""
    run = Run(spec).hurry()
    run.store(A)
    run.store(B)
    second = run.delta(B)
    assert run.offer(second) == [refused(second, Reason.OVERLAP)]


def test_a_held_delta_that_a_commit_makes_useless_is_let_go(spec: RunSpec) -> None:
    """E, Q: what it held is part of that commit; its bytes lie here for nothing."""
    run = Run(spec).hurry()
    closing = run.store(A)
    odd = run.delta(B)
    run.ledger.apply(
        rec.InputStored(blob=odd.blob, window=odd.window, contributors=odd.contributors, digest=odd.digest)
    )
    (draft,) = drafts(closing)
    shares = (*draft.merged, msg.Share(node=B, weight=0.0))
    assert ev.Forget(blob=odd.blob) in run.handle(ev.CommitDone(record=dataclasses.replace(draft, merged=shares)))


# --- quorum and grace


def test_a_late_delta_does_not_make_a_quorum(spec: RunSpec) -> None:
    """F: it would use up the window of a round that nobody has served yet."""
    run = Run(spec, quorum=2).hurry()
    run.store(A)
    run.done(run.store(B))
    assert drafts(run.store(C, 1)) == []
    assert drafts(run.store(A)) == []
    assert merged(run.store(B)) == [[A, B, C]]


def test_a_delta_without_a_step_does_not_make_a_quorum(spec: RunSpec) -> None:
    """F: a node that stands still, or has come to the end, would race through the windows of all rounds."""
    for method in ("decoupled", "async"):
        run = Run(spec, method).hurry()
        assert drafts(run.store(A, steps=0)) == []
        assert drafts(run.store(B, steps=0)) == []
        assert merged(run.store(C, steps=0)) == [[A, B, C]], "nobody is left to wait for"


def test_a_window_waits_for_the_time_that_deltas_have_been_late_by(spec: RunSpec) -> None:
    """F."""
    run = Run(spec)
    run.now += 10.0
    run.store(A)
    timer = run.machine.next_timer()
    assert timer is not None and timer > 112.0 and run.window.state == "open", "nothing was seen: it waits for all"
    run.now += 1.0
    run.store(B)
    assert run.machine.next_timer() == 112.0, "b was 1 s late: 2 s after the quorum"
    assert drafts(run.pass_time(0.9)) == []
    assert merged(run.pass_time(0.1)) == [[A, B]]


def test_what_one_window_teaches_holds_for_the_others_that_are_open(spec: RunSpec) -> None:
    """F: fragment 1 has waited for long enough when fragment 0 shows how long that is, and no timer was set."""
    run = Run(spec)
    run.now += 10.0
    run.store(A)
    for node in (A, B):
        offer = run.delta(node)
        contribution = dataclasses.replace(offer.contributors[0], base=0)
        body = dataclasses.replace(
            offer, blob=dataclasses.replace(offer.blob, fragment=0), contributors=(contribution,)
        )
        run.now += 3.0 if node == A else 0.5
        run.offer(body)
        commands = run.handle(ev.InputStored(offer=body))
    assert [draft.fragment for draft in drafts(commands)] == [1]


def test_deadlines_move_with_the_clock(spec: RunSpec) -> None:
    """C."""
    run = Run(spec)
    run.now += 10.0
    run.store(A)
    run.now += 1.0
    run.store(B)
    run.machine.clock_jumped(30.0)
    assert run.machine.next_timer() == 142.0


def test_the_last_window_waits_for_everybody(spec: RunSpec) -> None:
    """A, F: the run ends on what all nodes hold."""
    run = Run(spec, steps=10).hurry()
    assert run.window.terms.final
    assert drafts(run.store(A)) == [] and drafts(run.store(B)) == []
    assert merged(run.store(C)) == [[A, B, C]]


def test_a_dead_node_holds_the_last_window_until_it_is_removed(spec: RunSpec) -> None:
    run = Run(spec, steps=10)
    run.store(A)
    run.store(B)
    run.handle(ev.NodeDisconnected(session=3, node=C, reason=Reason.CLOSED))
    assert merged(run.pass_time(2.0)) == [[A, B]]


# --- every delta a step of its own


def test_every_delta_is_a_step_of_its_own_even_if_several_came_at_once(spec: RunSpec) -> None:
    """Two that are averaged count half each."""
    run = Run(spec, "async")
    first = run.store(A)
    assert merged(first) == [[A]]
    run.store(B)
    run.store(C)
    second = run.done(first)
    assert merged(second) == [[B]]
    assert merged(run.done(second)) == [[C]]


def test_one_whose_last_window_it_is_does_not_wait_for_its_turn(spec: RunSpec) -> None:
    """D: better averaged than refused."""
    run = Run(spec, "async", max_staleness=1)
    first = run.store(A)
    run.store(B)
    run.store(C)
    assert merged(run.done(first)) == [[B, C]]


def test_a_round_lasts_until_all_that_are_expected_have_served_it(spec: RunSpec) -> None:
    run = Run(spec, "async")
    rounds = []
    for node in (A, B, A, C, A):
        run.done(run.store(node))
        rounds.append(run.window.terms.round)
    assert rounds == [0, 0, 0, 1, 1]


def test_a_round_does_not_wait_for_whom_it_lost(spec: RunSpec) -> None:
    run = Run(spec, "async")
    run.done(run.store(A))
    run.handle(ev.NodeDisconnected(session=3, node=C, reason=Reason.SILENT))
    run.pass_time(0.0)
    run.done(run.store(B))
    assert run.window.terms.round == 1


def test_a_round_is_evaluated_once_at_its_last_step(spec: RunSpec) -> None:
    """J."""
    run = Run(spec, "async")
    evaluators = []
    for node in (A, B, C):
        commands = run.done(run.store(node))
        evaluators += [c.committed.evaluator for c in commands if isinstance(c, ev.Publish)]
    assert evaluators == [None, None, A]


# --- restarts


def test_after_a_restart_a_stored_late_delta_is_part_of_its_window_and_known(spec: RunSpec) -> None:
    """P, Q."""
    run = Run(spec).hurry()
    run.done(run.store(A))
    late = run.delta(B, 1)
    run.offer(late)
    run.handle(ev.InputStored(offer=late))
    run.restart()
    assert run.window.contributors == {B}
    run.greet(B, 7, round_=0)
    assert run.offer(late) == [ev.Tell(node=B, message=msg.Stored(blob=late.blob))]


def test_after_a_restart_a_delta_that_was_merged_is_recognised(spec: RunSpec) -> None:
    """E, Q: its sender did not hear of the commit."""
    run = Run(spec).hurry()
    mine = run.delta(A)
    run.offer(mine)
    run.done(run.handle(ev.InputStored(offer=mine)))
    run.restart()
    run.greet(A, 7, round_=0)
    assert run.offer(mine) == [refused(mine, Reason.OVERLAP)]


def test_a_restart_between_a_commit_and_the_next_makes_the_same_step(spec: RunSpec) -> None:
    """B21, for deltas that waited: they are in the journal in the order in which they came."""
    run = Run(spec, "async")
    first = run.store(A)
    run.store(B)
    run.store(C)
    assert merged(run.done(first)) == [[B]]
    assert merged(run.restart()) == [[B]]


# --- slow nodes


def progress(*, steps: int, tokens: int, blocked_s: float = 0.0) -> msg.Progress:
    return plain_progress(inner_steps=steps, tokens=tokens, loss=None, tokens_per_s=0.0, blocked_s=blocked_s)


@pytest.mark.parametrize(("method", "steps"), [("decoupled", ((B, 5),)), ("streaming", ())])
def test_slow_nodes_do_fewer_steps_in_the_rounds_that_are_fixed_from_then_on(
    spec: RunSpec, method: str, steps: tuple[tuple[NodeId, int], ...]
) -> None:
    """A, B: node b needs twice as long for a step; node c stood still half of the time and has a quarter of the batch,
    and is not slow."""
    run = Run(spec, method)
    for second in (1, 2):
        run.now += 1.0
        for session, node in enumerate((A, B, C), 1):
            done = second * (4 if node == A else 2)
            tokens = done * (250 if node == C else 1000)
            report = progress(steps=done, tokens=tokens, blocked_s=second * (0.5 if node == C else 0.0))
            run.handle(ev.NodeMessage(session=session, node=node, message=report))
    for _ in range(2):
        run.store(A)
        run.store(B)
        run.done(run.store(C))
    newest = run.ledger.rounds[max(run.ledger.rounds)]
    assert newest.node_steps == steps
    assert newest.index == 3
    assert not run.ledger.rounds[2].node_steps, "it was fixed at the start"
