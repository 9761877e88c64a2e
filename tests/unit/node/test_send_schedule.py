"""Covers `node/send_schedule.py`: a step boundary, seen against the windows that are open (protocol A, D, F)."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_terms

from farloop.algo.schedule import due_step
from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId, RoundPlan, WindowTerms
from farloop.node.fragment_set import FragmentSet, FragmentState, PendingDelta
from farloop.node.send_schedule import SendSchedule
from farloop.wire.messages import Committed

A = NodeId("a")
TERMS = plain_terms(
    method="decoupled", h=8, tau=2, mix=0.5, on_late_update="continue", max_staleness=2, max_stale_rounds=3
)
PLAN = RoundPlan(index=5, start=40, length=8)


def window(number: int, round_: int = 5, *, final: bool = False, fragment: int = 0) -> WindowTerms:
    return WindowTerms(
        fragment=fragment, window=number, round=round_, tau=2, mix=0.5, codec_up="q4", codec_down="q4", final=final
    )


def at(
    *,
    slots: int = 2,
    start_round: int = 0,
    round: int = 5,
    step: int = 4,
    plan: RoundPlan | None = PLAN,
    following: RoundPlan | None = None,
) -> SendSchedule:
    """Two slots; four of the eight steps of round 5 are done, unless told otherwise."""
    schedule = SendSchedule(A, slots)
    schedule.start_round, schedule.round, schedule.step = start_round, round, step
    schedule.plans = {index: each for index, each in ((round, plan), (round + 1, following)) if each is not None}
    return schedule


def may_send(schedule: SendSchedule, state: FragmentState) -> bool:
    return schedule.may_send(state, TERMS, behind=state.is_behind(TERMS))


def fragment(*, slot: int = 0, version: int = 6, **fields: Any) -> FragmentState:
    """At version 6; window 7 is of round 5."""
    state = FragmentState(fragment=Fragment(index=0, slot=slot, numel=256, tensors=()), version=version, **fields)
    state.terms_of = {version + 1: window(version + 1)}
    return state


def pending(version: int) -> Committed:
    return Committed(
        fragment=0, version=version, size=1, digest=0, anchor_digest=0, merged=(), drops=(), next_window=None, rounds=()
    )


def undecided(sent_at: int = 0) -> PendingDelta:
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=6, node=A, incarnation=1, seq=1)
    return PendingDelta(blob=blob, terms=window(7), sent_at=sent_at, tau=2, steps=8)


@pytest.mark.parametrize(("slot", "due"), [(0, 4), (1, 8)])
def test_a_slot_has_one_due_step_in_a_round(slot: int, due: int) -> None:
    assert [step for step in range(1, 9) if at(step=step).is_due(fragment(slot=slot), TERMS)] == [due]


def test_with_fewer_steps_in_the_round_it_is_due_earlier() -> None:
    slow = dataclasses.replace(PLAN, node_steps=((A, 2),))
    assert [step for step in (1, 2) if at(step=step, plan=slow).is_due(fragment(), TERMS)] == [1]


@pytest.mark.parametrize(
    ("where", "of_round", "is_due"),
    [({}, 5, True), ({}, 3, True), ({}, 6, False), ({"plan": None}, 5, False)],
    ids=["this round's", "one that was not served", "the next round's", "no plan"],
)
def test_a_window_is_served_in_its_round_or_later(where: dict[str, Any], of_round: int, is_due: bool) -> None:
    state = fragment()
    state.terms_of[7] = window(7, of_round)
    assert at(**where).is_due(state, TERMS) is is_due


def test_a_final_window_is_due_at_the_end_of_the_run_s_last_round() -> None:
    state, last = fragment(), dataclasses.replace(PLAN, start=32)
    state.terms_of[7] = window(7, final=True)
    assert at(step=8, plan=last).is_due(state, TERMS)
    assert not at(step=4, plan=last).is_due(state, TERMS)
    assert not at(step=8, plan=dataclasses.replace(PLAN, start=24)).is_due(state, TERMS)


def test_a_delta_may_be_sent_from_a_base_that_a_window_can_take() -> None:
    state = fragment()
    assert may_send(at(), state)
    state.pending = {7: pending(7), 8: pending(8)}
    assert may_send(at(), state) and not state.is_behind(TERMS)
    state.pending[9] = pending(9)
    assert not may_send(at(), state) and state.is_behind(TERMS)


@pytest.mark.parametrize(
    "fields",
    [{"sent": [undecided()]}, {"lost": True}, {"owed": 7}, {"discard": True}],
    ids=["one is undecided", "no anchor", "the last one's version is not merged", "the last one was dropped"],
)
def test_nothing_is_sent_before_the_last_delta_is_settled(fields: dict[str, Any]) -> None:
    assert not may_send(at(), fragment(**fields))


def test_nothing_is_sent_before_a_full_period() -> None:
    """A, I: the last slot has one at the end of the first round, the others a round later."""
    assert not may_send(at(start_round=5), fragment())
    assert may_send(at(start_round=5), fragment(slot=1))
    assert may_send(at(start_round=4), fragment())
    joined = fragment()
    joined.terms_of[7] = window(7, final=True)
    assert may_send(at(start_round=5), joined), "a flush is exempt"


def test_a_turn_that_passes_by_is_for_merging() -> None:
    state = fragment()
    state.pass_by(100, behind=state.is_behind(TERMS))
    assert (state.merge_at, state.discard) == (100, False)
    behind = fragment(pending={9: pending(9)})
    behind.pass_by(100, behind=behind.is_behind(TERMS))
    assert (behind.merge_at, behind.discard) == (100, True)


@pytest.mark.parametrize("fields", [{"merge_at": 7}, {"sent": [undecided()], "merge_at": None}])
def test_a_merge_that_has_its_time_already_keeps_it(fields: dict[str, Any]) -> None:
    state = fragment(pending={9: pending(9)}, **fields)
    state.pass_by(100, behind=state.is_behind(TERMS))
    assert (state.merge_at, state.discard) == (fields["merge_at"], False)


def test_where_training_stands_still_what_is_there_is_merged_now() -> None:
    overlapping, idle, behind = fragment(merge_at=103), fragment(), fragment(pending={9: pending(9)})
    for state in (overlapping, idle, behind):
        state.stand_still(100, behind=state.is_behind(TERMS))
    assert [state.merge_at for state in (overlapping, idle, behind)] == [100, None, 100]
    assert [state.discard for state in (overlapping, idle, behind)] == [False, False, True]


@pytest.mark.parametrize(("steps", "overlap"), [(8, 7), (4, 3), (2, 1), (1, 0)])
def test_the_overlap_shrinks_with_the_steps_of_the_round_and_never_fills_it(steps: int, overlap: int) -> None:
    plan = dataclasses.replace(PLAN, node_steps=((A, steps),))
    assert at(plan=plan).overlap(7) == overlap < steps
    assert at(plan=None).overlap(7) == 7


@given(steps=st.tuples(*3 * [st.integers(1, 40)]), slots=st.integers(1, 5), slot=st.integers(0, 4), own=st.booleans())
def test_the_next_turn_comes_after_the_merge_whatever_steps_a_node_has_from_round_to_round(
    steps: tuple[int, int, int], slots: int, slot: int, own: bool
) -> None:
    """D, where all slots may be undecided at once: its steps of this round and of the next, of as many of the run."""
    length = max(*steps, slots)
    now, then = (dataclasses.replace(PLAN, length=length, node_steps=((A, max(slots, s)),)) for s in steps[:2])
    here, terms = at(plan=now, following=then, slots=slots), TERMS.replace(h=length)
    most = length - 1
    overlap = here.own_overlap(most, terms, terms) if own else here.overlap(most)
    slot = min(slot, slots - 1)
    sent, due = (due_step(slot, slots, plan.steps_of(A)) for plan in (now, then))
    assert 0 <= overlap < now.steps_of(A) - sent + due


def test_an_undecided_delta_holds_training_up_some_rounds_after_its_send() -> None:
    """F."""
    state = fragment(sent=[undecided()], sent_round=1)
    assert [at(round=round_).holds_up(state, TERMS, 100) for round_ in (1, 4, 5)] == [False, False, True]


def test_so_does_a_decided_one_whose_update_is_not_there_once_it_is_due() -> None:
    state = fragment(owed=7, merge_at=100, sent_round=1)
    assert [at().holds_up(state, TERMS, steps) for steps in (99, 100)] == [False, True]
    assert not at(round=4).holds_up(state, TERMS, 100)
    assert not at().holds_up(fragment(owed=6, sent_round=1), TERMS, 100)


def test_where_updates_are_waited_for_it_is_held_up_at_the_end_of_the_overlap() -> None:
    """F."""
    terms = TERMS.replace(on_late_update="wait")
    waiting = at(round=1)
    assert [waiting.holds_up(fragment(sent=[undecided(sent_at=90)]), terms, now) for now in (91, 92)] == [False, True]
    assert not waiting.holds_up(fragment(), terms, 100)


def test_a_window_s_turn_is_over_once_its_due_step_has_passed() -> None:
    assert [at(step=step).is_over(fragment()) for step in (3, 4, 5)] == [False, True, True]
    state = fragment()
    for of_round, is_over in ((4, True), (6, False)):
        state.terms_of[7] = window(7, of_round)
        assert at(step=0, plan=None).is_over(state) is is_over
    state.terms_of[7] = window(7, final=True)
    assert not at(step=8).is_over(state)


def test_the_newest_round_is_that_of_the_last_slot_s_newest_window() -> None:
    """A: it is what a node that is behind jumps to."""
    first, last = fragment(slot=0), fragment(slot=1)
    last.fragment = dataclasses.replace(last.fragment, index=1)
    first.terms_of = {7: window(7, 9)}
    last.terms_of = {7: window(7, 5), 8: window(8, 7)}
    assert FragmentSet([first, last]).newest_round(2) == 7
    assert FragmentSet([first]).newest_round(2) == 0
