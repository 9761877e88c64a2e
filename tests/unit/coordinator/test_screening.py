"""Which deltas a window refuses to merge, whose are measured alone for a while, and that a restart judges the same."""

import dataclasses
from typing import Any

import pytest
from coordinator_run import A, B, C, Commands, D, Run, brief, merged, published, told
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_runs import plain_offer

from farloop.algo.spec import NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.screening import AGAINST, ENOUGH, MEMORY, STRIKES, WAY_BACK, Screening, rate_of
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

NODES = (A, B, C, D)
AGAINST_ALL = {D: -0.5}
"""Cosines in which d points against the others."""


def plan(index: int) -> RoundPlan:
    return RoundPlan(index=index, start=10 * index, length=10)


class Story:
    """Windows of fragment 1, closed one after the other, as the ledger would tell of them."""

    def __init__(self, spec: RunSpec, **terms: Any) -> None:
        self.spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
        self.screening, self.version, self.payload = Screening(self.spec), 0, 100

    def close(
        self,
        nodes: str = "abcd",
        *,
        payloads: dict[NodeId, int] | None = None,
        steps: dict[NodeId, int] | None = None,
        cosines: dict[NodeId, float] | None = None,
        **norms: float,
    ) -> dict[NodeId, Reason]:
        """A window with deltas of these nodes, of length 1 where no other is given; who is refused, and why."""
        cosines, offers = cosines or {}, []
        for node in map(NodeId, nodes):
            offer = plain_offer(
                node, self.version + 1, seq=self.version, steps=(steps or {}).get(node, 10),
                norm_sq=norms.get(node, 1.0) ** 2,
            )  # fmt: skip
            offers.append(offer)
            self.payload += 1
            self.screening.on_stored(rec.InputStored.of(offer, (payloads or {}).get(node, self.payload)))
        rounds = {self.version: plan(self.version)}
        terms = WindowTerms(
            fragment=1, window=self.version + 1, round=self.version, tau=2, mix=0.5, codec_up="q4", codec_down="q4"
        )
        found = self.screening.verdicts(terms, offers, rounds, NODES)
        refused = tuple(dataclasses.replace(r, cosine=cosines.get(r.blob.node)) for r in found)
        taken = [offer.blob for offer in offers if offer.blob not in {refusal.blob for refusal in refused}]
        self.version += 1
        record = rec.WindowCommitted(
            fragment=1, version=self.version, round=self.version - 1, merged=(), drops=(),
            blobs=tuple(rec.Addend(blob=blob, weight=1.0, cosine=cosines.get(blob.node)) for blob in taken),
            anchor_digest=0, target_digest=0, momentum_digest=None, next_window=None, update_size=0, update_digest=0,
            outer_lr=1.0, outer_momentum=0.0, why="", refused=refused,
        )  # fmt: skip
        self.screening.on_committed(record, {offer.blob: offer for offer in offers}, rounds)
        self.screening.settle({})
        return {refusal.blob.node: refusal.reason for refusal in refused}

    def lengths(self, *of_d: float) -> None:
        """Windows in which d's deltas are so long."""
        for length in of_d:
            self.close(d=length)

    @property
    def apart(self) -> set[NodeId]:
        return set(self.screening.in_quarantine(NODES))


@pytest.fixture
def story(spec: RunSpec) -> Story:
    """Four nodes whose usual length is 1."""
    told = Story(spec)
    for _ in range(ENOUGH):
        assert told.close(b=1.1, c=0.9) == {}
    return told


# --- lengths


@pytest.mark.parametrize(
    ("law", "steps", "norms", "refused"),
    [
        ("far longer than is usual", 10, (1.0, 7.9, 0.1, 1000.0), {D}),
        ("where two agree it is not they who are wrong: a re-warm, other data", 10, (40.0, 50.0, 45.0, 60.0), set()),
        ("more steps may be longer", 100, (79.0, 1.0, 1.0, 81.0), {D}),
        ("and fewer no shorter: a flush of one step", 1, (7.0, 1.0, 1.0, 1.0), set()),
    ],
)
def test_a_delta_far_longer_than_is_usual_is_refused(
    story: Story, law: str, steps: int, norms: tuple[float, ...], refused: set[NodeId]
) -> None:
    lengths = dict(zip("abcd", norms, strict=True))
    assert story.close(steps=dict.fromkeys(NODES, steps), **lengths) == dict.fromkeys(refused, Reason.OUTLIER), law


def test_without_a_memory_the_others_are_the_measure(spec: RunSpec) -> None:
    """Alone nothing can be said; of two it is unknown which is wrong, and it is held against neither."""
    assert Story(spec).close(b=30.0, c=0.1, d=1000.0) == {D: Reason.OUTLIER}
    assert Story(spec).close("a", a=1e30) == {}
    story = Story(spec)
    for _ in range(STRIKES):
        assert story.close("ad", d=1000.0) == {D: Reason.OUTLIER}
        story.screening.seen.clear()
    assert story.apart == set()


def test_a_larger_learning_rate_may_be_longer_and_a_smaller_one_no_shorter(spec: RunSpec) -> None:
    warming = dataclasses.replace(spec.terms.schedule.lr, warmup_steps=1000, minimum=1e-6)
    story = Story(spec, lr=warming, steps=10_000)
    assert rate_of(story.spec.terms, plan(40)) > 30 * rate_of(story.spec.terms, plan(0))
    for _ in range(ENOUGH):
        story.close()
    story.version = 40
    assert story.close(a=30.0) == {}


def test_a_delta_that_holds_nothing_is_never_too_long(story: Story) -> None:
    assert story.close(steps={A: 0}, a=1000.0, b=0.0, c=0.0, d=0.0) == {}


@given(lengths=st.lists(st.floats(0.2, 1.5), min_size=4, max_size=80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lengths_that_differ_by_less_than_the_band_are_never_refused(spec: RunSpec, lengths: list[float]) -> None:
    story = Story(spec)
    assert story.spec.terms.admission.norm_band > 1.5 / 0.2
    for start in range(0, len(lengths) - 3, 4):
        assert story.close(**dict(zip("abcd", lengths[start : start + 4], strict=True))) == {}


@pytest.mark.parametrize("terms", [{"norm_band": 1e6}, {"screen": "off"}])
def test_a_band_can_be_widened_and_the_screen_switched_off(spec: RunSpec, terms: dict[str, Any]) -> None:
    story = Story(spec, **terms)
    story.lengths(*[1.0] * ENOUGH)
    assert story.close(d=1000.0) == {}


def test_a_window_of_which_nothing_was_left_makes_the_band_forget(spec: RunSpec) -> None:
    """A node that is alone, and whose deltas have become longer for good, loses one window and no more."""
    story = Story(spec)
    for _ in range(ENOUGH):
        story.close("a")
    assert story.close("a", a=50.0) == {A: Reason.OUTLIER}
    assert story.close("a", a=50.0) == {}


# --- the same numbers again


def test_a_node_s_own_numbers_once_more_are_refused(story: Story) -> None:
    assert story.close(payloads={D: 7}) == {}
    for _ in range(MEMORY + 2):  # it is not forgotten while it goes on
        assert D in story.close(payloads={D: 7})


def test_another_node_s_numbers_are_a_copy_where_data_differ(spec: RunSpec) -> None:
    granted = dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, num_samples=1000))
    assert Story(granted).close(payloads={A: 7, D: 7}) == {D: Reason.COPIED}
    later = Story(granted)
    later.close(payloads={A: 7})
    assert later.close(payloads={D: 7}) == {D: Reason.COPIED}
    assert Story(spec).close(payloads={A: 7, D: 7}) == {}, "they may bring the same samples"


def test_nothing_may_be_sent_by_all_again_and_again(story: Story) -> None:
    for _ in range(3):
        assert story.close(payloads=dict.fromkeys(NODES, 7), a=0.0, b=0.0, c=0.0, d=0.0) == {}


# --- quarantine


def test_after_the_second_refused_delta_a_node_is_apart_until_it_was_good_often_enough(story: Story) -> None:
    for number in range(STRIKES):
        assert story.apart == set(), number
        story.close(d=1000.0)
    assert story.apart == {D} and "too long" in story.screening.in_quarantine(NODES)[D]
    for _ in range(WAY_BACK):
        assert story.close() == {D: Reason.QUARANTINED}
    assert story.apart == set() and story.close() == {}


def test_a_bad_delta_on_the_way_back_begins_it_anew_and_good_ones_wipe_out_a_strike(story: Story) -> None:
    story.lengths(1000.0, *[1.0] * WAY_BACK, 1000.0)
    assert story.apart == set()
    story.lengths(*[1.0] * WAY_BACK, *[1000.0] * STRIKES, *[1.0] * (WAY_BACK - 1), 1000.0, *[1.0] * (WAY_BACK - 1))
    assert story.apart == {D}
    assert story.close() == {D: Reason.QUARANTINED} and story.apart == set()


def test_half_of_the_nodes_are_never_apart(story: Story) -> None:
    for _ in range(2 * STRIKES):
        story.close(payloads={C: 7, D: 8})
    assert story.apart == set() and all(story.screening.standings[node].why for node in (C, D))


def test_deltas_against_all_others_are_merged_until_there_were_too_many_in_a_row(spec: RunSpec) -> None:
    story = Story(spec, screen="full")
    for _ in range(AGAINST):
        assert story.close(cosines=AGAINST_ALL) == {}
    assert story.apart == {D}
    for _ in range(WAY_BACK):
        assert story.close(cosines=AGAINST_ALL) == {D: Reason.QUARANTINED}
    assert story.apart == {D}, "a delta that points against all others is no good one"
    for _ in range(WAY_BACK):
        story.close(cosines={D: 0.5})
    assert story.apart == set()


def test_a_window_in_which_the_others_do_not_agree_ends_the_row(spec: RunSpec) -> None:
    story = Story(spec, screen="full")
    for _ in range(5):
        for cosines in (AGAINST_ALL, AGAINST_ALL, {}):
            assert story.close(cosines=cosines) == {}
    for _ in range(2):
        story.close(cosines=AGAINST_ALL)
    story.close("ad")  # too few to say whether there is any node to be against
    story.close(cosines=AGAINST_ALL)
    assert story.apart == {D}
    for _ in range(5):
        story.close()
    assert story.apart == {D}, "there, nothing is shown by being against no node"


def test_two_nodes_that_disagree_are_both_heard(spec: RunSpec) -> None:
    story = Story(spec, screen="full")
    for _ in range(2 * AGAINST):
        assert story.close("ad", cosines={A: -0.9, D: -0.9}) == {}
    assert story.apart == set()


# --- in the machine


def stored(run: Run, **norms: float) -> Commands:
    """Deltas of these lengths come; what follows the last."""
    commands: Commands = []
    for node, norm in norms.items():
        commands = run.store(NodeId(node), norm_sq=norm**2)
    return commands


@pytest.fixture
def run(spec: RunSpec) -> Run:
    return Run(spec, "abc")


def test_who_is_refused_hears_of_it_with_the_commit_and_it_is_in_the_record(run: Run) -> None:
    """E: one outcome, journaled with the window's own; a restart before the commit judges the same."""
    assert brief(stored(run, a=1.0, b=1.0, c=1000.0)) == "c: stored; commit 1.1 of ab, c OUTLIER"
    commit, (refusal,) = run.pending[1], run.draft().refused
    run.now += 10.0
    assert run.restart() == [commit]
    for node in (A, B, C):
        run.greet(node, round=0)
    after = run.durable()
    (said,) = told(after, C)
    assert isinstance(said, msg.Outcome) and (said.blob, said.reason) == (refusal.blob, Reason.OUTLIER)
    assert "1e+03" in said.detail and ev.Forget(blob=refusal.blob) in after and not run.ledger.inputs


def test_what_is_known_of_nodes_is_known_after_a_restart(run: Run) -> None:
    for _ in range(2):
        for node, norm, payload in ((A, 1.0, 5), (B, 1.0, 6), (C, 1000.0, 7)):
            run.store(node, norm_sq=norm**2, payload=payload)
        run.durable()
    screening = run.ledger.screening
    for _ in range(2):
        assert set(run.machine.in_quarantine) == {C} and "quarantine of c" in run.alarms
        assert run.ledger.screening == screening != Screening(run.spec)
        run.restart()


def test_a_sum_that_fp32_does_not_hold_leaves_out_the_longest_delta_and_is_tried_again_at_once(run: Run) -> None:
    """E, O: the same decision would fail for ever."""
    stored(run, a=1.0, b=1.0, c=20.0)
    why = "element 0 is not finite"
    commands = run.handle(ev.SumOverflow(fragment=1, longest=run.draft().blobs[2].blob, why=why))
    assert brief(commands) == "commit 1.1 of ab, c TOO_MUCH" and run.machine.next_timer() != run.now + 1.0
    assert run.draft().refused[0].reason is Reason.TOO_MUCH
    run.durable()
    assert not run.ledger.inputs


def test_a_window_whose_every_delta_is_refused_ends_and_the_run_goes_on(spec: RunSpec) -> None:
    """E: a version that holds nothing new; who waits for it has its outcome."""
    run = Run(spec, "a")
    run.store(A)
    run.handle(ev.SumOverflow(fragment=1, longest=run.draft().blobs[0].blob, why="too much"))
    draft = run.draft()
    assert brief([run.pending[1]]) == "commit 1.1 of , a TOO_MUCH" and draft.blobs == () and draft.next_window
    assert draft.why == "0 of 1 deltas that a merge needs, refused: a (too_much)"
    assert [publish.committed.merged for publish in published(run.durable())] == [()]
    assert run.expected() == run.missing() == {A}


def test_who_was_too_late_for_a_closing_window_is_not_waited_for_when_it_opens_again(spec: RunSpec) -> None:
    """E: it was told, and offers nothing more for this window."""
    run = Run(spec, "ab", quorum=1)
    run.store(A)
    assert [said.reason for said in told(run.say(B, run.offer(B)), B) if isinstance(said, msg.Outcome)] == [Reason.LATE]
    run.handle(ev.SumOverflow(fragment=1, longest=run.draft().blobs[0].blob, why="too much"))
    assert brief([run.pending[1]]) == "commit 1.1 of , a TOO_MUCH, b LATE" and run.draft().blobs == ()


def test_below_the_floor_for_want_of_good_deltas_nothing_is_merged(spec: RunSpec) -> None:
    """F: who is away may be back; who was refused will send no other."""
    run = Run(spec, "abc", floor=3)
    stored(run, a=1.0, b=1.0, c=1000.0)
    assert brief([run.pending[1]]) == "commit 1.1 of , a VOID, b VOID, c OUTLIER" and run.draft().blobs == ()
    assert run.durable() and not run.ledger.screening.standings.get(A)


def test_a_quorum_is_one_of_good_deltas(spec: RunSpec) -> None:
    run = Run(spec, "abc", quorum=2)
    for _ in range(3):
        run.commit(1, A, B)
    assert not merged(stored(run, a=1.0, c=1000.0))
    assert merged(stored(run, b=1.0)) == ["ab"]


# --- running statistics


def test_deltas_of_statistics_say_how_samples_differ_and_are_not_judged(spec: RunSpec) -> None:
    """Those of one node may be as long as all others together, opposed to them, and the same in every round."""
    layout = spec.identity.layout
    statistics = dataclasses.replace(
        layout.fragments[1], tensors=(dataclasses.replace(layout.fragments[1].tensors[0], name="0.running_mean"),)
    )
    fragments = (layout.fragments[0], statistics, *layout.fragments[2:])
    layout = dataclasses.replace(layout, fragments=fragments)
    identity = dataclasses.replace(spec.identity, layout=layout, num_samples=1000)  # then no two deltas are the same
    told = Story(dataclasses.replace(spec, identity=identity))
    for _ in range(2 * ENOUGH):
        assert told.close(payloads=dict.fromkeys(NODES, 7), cosines=AGAINST_ALL, d=1000.0) == {}
    assert not told.apart and not told.screening.all_seen
    told.screening.standings[D] = rec.Standing(node=D, why="its weights")
    for _ in range(2 * WAY_BACK):
        assert told.close() == {D: Reason.QUARANTINED}, "nor do they end a quarantine"
