"""Which deltas a window refuses to merge, whose are measured alone for a while, and that a restart judges the same."""

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_runs import plain_hello, plain_offer

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.screening import AGAINST, ENOUGH, MEMORY, STRIKES, WAY_BACK, Screening, rate_of
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B, C, D = NODES = tuple(NodeId(name) for name in "abcd")


def plan(index: int) -> RoundPlan:
    return RoundPlan(index=index, start=10 * index, length=10)


class Story:
    """Windows of fragment 1, closed one after the other, as the ledger would tell of them."""

    def __init__(self, spec: RunSpec, **terms: Any) -> None:
        self.spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
        self.screening, self.version, self.payload = Screening(self.spec), 0, 100

    def offers(self, payloads: dict[NodeId, int], steps: dict[NodeId, int], **norms: float) -> list[msg.Offer]:
        found = []
        for name, norm in norms.items():
            node = NodeId(name)
            blob = BlobId(
                kind=BlobKind.DELTA, fragment=1, version=self.version, node=node, incarnation=1, seq=self.version
            )
            share = Contribution(
                node=node, incarnation=1, base=self.version, steps=steps.get(node, 10), tokens=640, norm_sq=norm**2
            )
            found.append(msg.Offer(blob=blob, size=1, digest=1, window=self.version + 1, contributors=(share,)))
            self.payload += 1
            payload = payloads.get(node, self.payload)
            self.screening.stored(rec.InputStored.of(found[-1], payload))
        return found

    def close(
        self,
        payloads: dict[NodeId, int] | None = None,
        steps: dict[NodeId, int] | None = None,
        cosines: dict[NodeId, float] | None = None,
        **norms: float,
    ) -> dict[NodeId, Reason]:
        """A window with deltas of these lengths; who is refused, and why."""
        offers, cosines = self.offers(payloads or {}, steps or {}, **norms), cosines or {}
        rounds = {self.version: plan(self.version)}
        terms = WindowTerms(
            fragment=1, window=self.version + 1, round=self.version, tau=2, mix=0.5, codec_up="q4", codec_down="q4"
        )
        found = self.screening.verdicts(terms, offers, rounds, NODES)
        refused = tuple(dataclasses.replace(r, cosine=cosines.get(r.blob.node)) for r in found)
        merged = [offer.blob for offer in offers if offer.blob not in {refusal.blob for refusal in refused}]
        self.version += 1
        record = rec.WindowCommitted(
            fragment=1, version=self.version, round=self.version - 1, merged=(), drops=(),
            blobs=tuple(rec.Addend(blob=blob, weight=1.0, cosine=cosines.get(blob.node)) for blob in merged),
            anchor_digest=0, target_digest=0, momentum_digest=None, next_window=None, update_size=0, update_digest=0,
            outer_lr=1.0, outer_momentum=0.0, why="", refused=refused,
        )  # fmt: skip
        self.screening.committed(record, {offer.blob: offer for offer in offers}, rounds)
        self.screening.settle({})
        return {refusal.blob.node: refusal.reason for refusal in refused}

    @property
    def apart(self) -> set[NodeId]:
        return set(self.screening.in_quarantine(NODES))


@pytest.fixture
def story(spec: RunSpec) -> Story:
    """Four nodes whose usual length is 1."""
    told = Story(spec)
    for _ in range(ENOUGH):
        assert told.close(a=1.0, b=1.1, c=0.9, d=1.0) == {}
    return told


# --- lengths


def test_a_delta_far_longer_than_is_usual_is_refused(story: Story) -> None:
    assert story.close(a=1.0, b=7.9, c=0.1, d=1000.0) == {D: Reason.OUTLIER}


def test_in_the_first_window_the_others_are_the_measure(spec: RunSpec) -> None:
    assert Story(spec).close(a=1.0, b=30.0, c=0.1, d=1000.0) == {D: Reason.OUTLIER}


def test_of_two_nobody_knows_which_is_wrong_and_it_is_held_against_neither(spec: RunSpec) -> None:
    story = Story(spec)
    for _ in range(STRIKES):
        assert story.close(a=1.0, d=1000.0) == {D: Reason.OUTLIER}
        story.screening.seen.clear()
    assert story.apart == set()


def test_alone_and_without_a_memory_nothing_can_be_said(spec: RunSpec) -> None:
    assert Story(spec).close(a=1e30) == {}


def test_what_changes_for_all_is_no_reason_to_refuse_any(story: Story) -> None:
    """A re-warm, other data: where two agree it is not they who are wrong."""
    assert story.close(a=40.0, b=50.0, c=45.0, d=60.0) == {}


def test_more_steps_may_be_longer_and_fewer_no_shorter(story: Story) -> None:
    """Longer rounds (protocol A), a joiner's first delta, a flush of one step."""
    hundred = dict.fromkeys(NODES, 100)
    assert story.close(steps=hundred, a=79.0, b=1.0, c=1.0, d=81.0) == {D: Reason.OUTLIER}
    assert story.close(steps=dict.fromkeys(NODES, 1), a=7.0, b=1.0, c=1.0, d=1.0) == {}


def test_a_larger_learning_rate_may_be_longer_and_a_smaller_one_no_shorter(spec: RunSpec) -> None:
    warming = dataclasses.replace(spec.terms.schedule.lr, warmup_steps=1000, minimum=1e-6)
    spec = dataclasses.replace(spec, terms=spec.terms.replace(lr=warming, steps=10_000))
    story = Story(spec)
    assert rate_of(story.spec.terms, plan(40)) > 30 * rate_of(story.spec.terms, plan(0))
    for _ in range(ENOUGH):
        story.close(a=1.0, b=1.0, c=1.0, d=1.0)
    story.version = 40
    assert story.close(a=30.0, b=1.0, c=1.0, d=1.0) == {}


def test_a_delta_that_holds_nothing_is_never_too_long(story: Story) -> None:
    assert story.close(steps={A: 0}, a=1000.0, b=0.0, c=0.0, d=0.0) == {}


@given(lengths=st.lists(st.floats(0.2, 1.5), min_size=4, max_size=80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_lengths_that_differ_by_less_than_the_band_are_never_refused(spec: RunSpec, lengths: list[float]) -> None:
    story = Story(spec)
    assert story.spec.terms.admission.norm_band > 1.5 / 0.2
    for start in range(0, len(lengths) - 3, 4):
        assert story.close(**dict(zip("abcd", lengths[start : start + 4], strict=True))) == {}


def test_a_band_can_be_widened_and_the_screen_switched_off(spec: RunSpec) -> None:
    for terms in ({"norm_band": 1e6}, {"screen": "off"}):
        story = Story(spec, **terms)
        for _ in range(ENOUGH):
            story.close(a=1.0, b=1.0, c=1.0, d=1.0)
        assert story.close(a=1.0, b=1.0, c=1.0, d=1000.0) == {}


def test_a_window_of_which_nothing_was_left_makes_the_band_forget(spec: RunSpec) -> None:
    """A node that is alone, and whose deltas have become longer for good, loses one window and no more."""
    story = Story(spec)
    for _ in range(ENOUGH):
        story.close(a=1.0)
    assert story.close(a=50.0) == {A: Reason.OUTLIER}
    assert story.close(a=50.0) == {}


# --- the same numbers again


def test_a_node_s_own_numbers_once_more_are_refused(story: Story) -> None:
    assert story.close(payloads={D: 7}, a=1.0, b=1.0, c=1.0, d=1.0) == {}
    for _ in range(MEMORY + 2):  # it is not forgotten while it goes on
        assert D in story.close(payloads={D: 7}, a=1.0, b=1.0, c=1.0, d=1.0)


def test_another_node_s_numbers_are_a_copy_where_data_differ(spec: RunSpec) -> None:
    granted = dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, num_samples=1000))
    same = {A: 7, D: 7}
    assert Story(granted).close(payloads=same, a=1.0, b=1.0, c=1.0, d=1.0) == {D: Reason.COPIED}
    later = Story(granted)
    later.close(payloads={A: 7}, a=1.0, b=1.0, c=1.0, d=1.0)
    assert later.close(payloads={D: 7}, a=1.0, b=1.0, c=1.0, d=1.0) == {D: Reason.COPIED}
    assert Story(spec).close(payloads=same, a=1.0, b=1.0, c=1.0, d=1.0) == {}, "they may bring the same samples"


def test_nothing_may_be_sent_by_all_again_and_again(story: Story) -> None:
    for _ in range(3):
        assert story.close(payloads=dict.fromkeys(NODES, 7), a=0.0, b=0.0, c=0.0, d=0.0) == {}


# --- quarantine


def test_after_the_second_refused_delta_a_node_is_apart_until_it_was_good_often_enough(story: Story) -> None:
    for number in range(STRIKES):
        assert story.apart == set(), number
        story.close(a=1.0, b=1.0, c=1.0, d=1000.0)
    assert story.apart == {D} and "too long" in story.screening.in_quarantine(NODES)[D]
    for _ in range(WAY_BACK):
        assert story.close(a=1.0, b=1.0, c=1.0, d=1.0) == {D: Reason.QUARANTINED}
    assert story.apart == set()
    assert story.close(a=1.0, b=1.0, c=1.0, d=1.0) == {}


def test_a_bad_delta_on_the_way_back_begins_it_anew(story: Story) -> None:
    for norm in (*[1000.0] * STRIKES, *[1.0] * (WAY_BACK - 1), 1000.0, *[1.0] * (WAY_BACK - 1)):
        story.close(a=1.0, b=1.0, c=1.0, d=norm)
    assert story.apart == {D}
    assert story.close(a=1.0, b=1.0, c=1.0, d=1.0) == {D: Reason.QUARANTINED}
    assert story.apart == set()


def test_good_deltas_wipe_out_a_strike(story: Story) -> None:
    for norm in (1000.0, *[1.0] * WAY_BACK, 1000.0):
        story.close(a=1.0, b=1.0, c=1.0, d=norm)
    assert story.apart == set()


def test_half_of_the_nodes_are_never_apart(story: Story) -> None:
    for _ in range(STRIKES):
        story.close(payloads={C: 7, D: 8}, a=1.0, b=1.0, c=1.0, d=1.0)
        story.close(payloads={C: 7, D: 8}, a=1.0, b=1.0, c=1.0, d=1.0)
    assert story.apart == set() and all(story.screening.standings[node].why for node in (C, D))


def test_deltas_against_all_others_are_merged_until_there_were_too_many_in_a_row(spec: RunSpec) -> None:
    story = Story(spec, screen="full")
    for _ in range(AGAINST):
        assert story.close(cosines={D: -0.5}, a=1.0, b=1.0, c=1.0, d=1.0) == {}
    assert story.apart == {D}
    for _ in range(WAY_BACK):
        assert story.close(cosines={D: -0.5}, a=1.0, b=1.0, c=1.0, d=1.0) == {D: Reason.QUARANTINED}
    assert story.apart == {D}, "a delta that points against all others is no good one"
    for _ in range(WAY_BACK):
        story.close(cosines={D: 0.5}, a=1.0, b=1.0, c=1.0, d=1.0)
    assert story.apart == set()


def test_a_window_in_which_the_others_do_not_agree_ends_the_row(spec: RunSpec) -> None:
    story = Story(spec, screen="full")
    for _ in range(5):
        for _ in range(2):
            assert story.close(cosines={D: -0.5}, a=1.0, b=1.0, c=1.0, d=1.0) == {}
        assert story.close(a=1.0, b=1.0, c=1.0, d=1.0) == {}
    for _ in range(2):
        story.close(cosines={D: -0.5}, a=1.0, b=1.0, c=1.0, d=1.0)
    story.close(a=1.0, d=1.0)  # too few to say whether there is anybody to be against
    story.close(cosines={D: -0.5}, a=1.0, b=1.0, c=1.0, d=1.0)
    assert story.apart == {D}
    for _ in range(5):
        story.close(a=1.0, b=1.0, c=1.0, d=1.0)
    assert story.apart == {D}, "there, nothing is shown by being against nobody"


def test_two_nodes_that_disagree_are_both_heard(spec: RunSpec) -> None:
    story = Story(spec, screen="full")
    for _ in range(2 * AGAINST):
        assert story.close(cosines={A: -0.9, D: -0.9}, a=1.0, d=1.0) == {}
    assert story.apart == set()


# --- in the machine


class Run:
    """Nodes train, started together; all invariants are checked after every event."""

    def __init__(self, spec: RunSpec, *nodes: NodeId, **terms: Any) -> None:
        terms = {"min_nodes": len(nodes), **terms}
        self.spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
        self.ledger, self.now, self.seq = Ledger.begin(rec.RunStarted(spec=self.spec, epoch=1)), 100.0, 0
        self.begin()
        anchors = tuple(msg.AnchorRef(fragment=f, version=0, digest=100 + f) for f in range(2))
        for session, node in enumerate(nodes):
            hello = plain_hello(node=node, anchors=anchors)
            self.handle(ev.NodeHello(session=session, node=node, hello=hello))
        for session, node in enumerate(nodes):
            self.handle(ev.NodeMessage(session=session, node=node, message=msg.Ready()))

    def begin(self) -> list[ev.Command]:
        self.machine = CoordinatorMachine(self.ledger, now=self.now)
        self.machine.check()
        return self.machine.start()

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def offer(self, node: NodeId, norm: float = 1.0) -> msg.Offer:
        """A delta for the open window of fragment 1."""
        window = self.machine.windows[1].terms.window
        self.seq += 1
        return plain_offer(node, window, seq=self.seq, norm_sq=norm**2, size=100, digest=9)

    def done(self, commands: list[ev.Command]) -> list[ev.Command]:
        """The one commit among these commands is durable."""
        record = dataclasses.replace(commit_in(commands).draft, update_size=50, update_digest=3)
        return self.handle(ev.CommitDone(record=record))


def commit_in(commands: list[ev.Command]) -> ev.Commit:
    (commit,) = (command for command in commands if isinstance(command, ev.Commit))
    return commit


def told(commands: list[ev.Command], node: NodeId) -> list[msg.Message]:
    return [command.message for command in commands if isinstance(command, ev.Tell) and command.node == node]


@pytest.fixture
def run(spec: RunSpec) -> Run:
    return Run(spec, A, B, C)


def stored(run: Run, node: NodeId, norm: float, payload: int = 0) -> list[ev.Command]:
    return run.handle(ev.InputStored(offer=run.offer(node, norm), payload=payload))


def test_who_is_refused_hears_of_it_with_the_commit_and_it_is_in_the_record(run: Run) -> None:
    """E: one outcome, journaled with the window's own."""
    commands = [*stored(run, A, 1.0), *stored(run, B, 1.0), *stored(run, C, 1000.0)]
    commit = commit_in(commands)
    assert [share.node for share in commit.draft.merged] == [A, B]
    assert commit.draft.drops == (msg.Drop(node=C, reason=Reason.OUTLIER),)
    (refusal,) = commit.draft.refused
    assert not any(isinstance(message, msg.Outcome) for message in told(commands, C)), "nothing is true before that"
    after = run.done(commands)
    (outcome,) = (message for message in told(after, C) if isinstance(message, msg.Outcome))
    assert (outcome.blob, outcome.reason) == (refusal.blob, Reason.OUTLIER) and "1e+03" in outcome.detail
    assert ev.Forget(blob=refusal.blob) in after and not run.machine.ledger.inputs


def test_a_restart_before_the_commit_judges_the_same(run: Run) -> None:
    for node, norm in ((A, 1.0), (B, 1.0), (C, 1000.0)):
        commands = stored(run, node, norm)
    commit = commit_in(commands)
    run.ledger = run.machine.ledger.copy()
    run.now += 10.0
    assert commit_in(run.begin()) == commit


def test_what_is_known_of_nodes_is_known_after_a_restart(run: Run) -> None:
    for _ in range(2):
        commands = [*stored(run, A, 1.0, 5), *stored(run, B, 1.0, 6), *stored(run, C, 1000.0, 7)]
        run.done(commands)
    assert set(run.machine.in_quarantine) == {C}
    assert [what for what in run.machine.alarms if what.startswith("quarantine of c")]
    ledger = run.machine.ledger
    assert ledger.copy().screening == ledger.screening != Screening(run.spec)
    run.ledger = ledger.copy()
    run.begin()
    assert set(run.machine.in_quarantine) == {C} and "quarantine of c" in run.machine.alarms


def test_a_sum_that_fp32_does_not_hold_leaves_out_the_longest_delta_and_is_tried_again_at_once(run: Run) -> None:
    """E, O: the same decision would fail for ever."""
    commands = [*stored(run, A, 1.0), *stored(run, B, 1.0), *stored(run, C, 20.0)]
    commit = commit_in(commands)
    longest = commit.draft.blobs[2].blob
    too_much = ev.SumOverflow.of(commit.draft, longest, ValueError("element 0 is not finite"))
    (again,) = run.handle(too_much)
    assert isinstance(again, ev.Commit) and [share.node for share in again.draft.merged] == [A, B]
    assert again.draft.refused[0].reason is Reason.TOO_MUCH and run.machine.next_timer() != run.now + 1.0
    run.done([again])
    assert not run.machine.ledger.inputs


def test_a_window_whose_every_delta_is_refused_ends_and_the_run_goes_on(spec: RunSpec) -> None:
    """E: a version that holds nothing new; who waits for it has its outcome."""
    run = Run(spec, A)
    commands = stored(run, A, 1.0)
    for _ in range(2):
        commit = commit_in(commands)
        if not commit.draft.blobs:
            break
        commands = run.handle(ev.SumOverflow.of(commit.draft, commit.draft.blobs[0].blob, ValueError("too much")))
    assert commit.draft.merged == () == commit.draft.blobs and commit.draft.next_window is not None
    assert commit.draft.drops == (msg.Drop(node=A, reason=Reason.TOO_MUCH),)
    assert commit.draft.why == "0 of 1 deltas that a merge needs, refused: a (too_much)"
    after = run.done(commands)
    assert [c.committed.merged for c in after if isinstance(c, ev.Publish)] == [()]
    assert run.machine.windows[1].expected == {A} == run.machine.windows[1].missing


@pytest.mark.parametrize("reason", [Reason.CORRUPT, Reason.TOO_LARGE])
def test_so_does_one_whose_bytes_were_never_good(spec: RunSpec, reason: Reason) -> None:
    run = Run(spec, A)
    commands = run.handle(ev.InputFailed(offer=run.offer(A), reason=reason, detail="no good"))
    commit = commit_in(commands)
    assert commit.draft.merged == () and commit.draft.drops == (msg.Drop(node=A, reason=reason),)


def test_below_the_floor_for_want_of_good_deltas_nothing_is_merged(spec: RunSpec) -> None:
    """F: who is away may be back; who was refused will send no other."""
    run = Run(spec, A, B, C, floor=3)
    commands = [*stored(run, A, 1.0), *stored(run, B, 1.0), *stored(run, C, 1000.0)]
    commit = commit_in(commands)
    assert commit.draft.blobs == ()
    assert {drop.node: drop.reason for drop in commit.draft.drops} == {
        A: Reason.VOID,
        B: Reason.VOID,
        C: Reason.OUTLIER,
    }
    assert run.done(commands) and not run.machine.ledger.screening.standings.get(A)


def test_a_quorum_is_one_of_good_deltas(spec: RunSpec) -> None:
    run = Run(spec, A, B, C, quorum=2)
    for _ in range(3):
        run.done([*stored(run, A, 1.0), *stored(run, B, 1.0)])
    assert not [c for c in [*stored(run, A, 1.0), *stored(run, C, 1000.0)] if isinstance(c, ev.Commit)]
    commit = commit_in(stored(run, B, 1.0))
    assert [share.node for share in commit.draft.merged] == [A, B]
