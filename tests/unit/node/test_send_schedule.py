"""Covers `node/send_schedule.py`: a step boundary, seen against the windows that are open (protocol A, D, F)."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_story import A, delta
from plain_runs import plain_terms

from farloop.algo.schedule import due_step
from farloop.algo.spec import Fragment, RoundPlan, WindowTerms
from farloop.node.fragment_set import FragmentSet, FragmentState, PendingDelta
from farloop.node.send_schedule import OverlapChooser, SendSchedule
from farloop.wire.messages import Committed

TERMS = plain_terms(
    method="decoupled", h=8, tau=2, mix=0.5, on_late_update="continue", max_staleness=2, max_stale_rounds=3
)
PLAN = RoundPlan(index=5, start=40, length=8)


def window(number: int, round_: int = 5, *, final: bool = False) -> WindowTerms:
    return WindowTerms(
        fragment=0, window=number, round=round_, tau=2, mix=0.5, codec_up="q4", codec_down="q4", final=final
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


def fragment(
    *, slot: int = 0, version: int = 6, of_round: int = 5, final: bool = False, **fields: Any
) -> FragmentState:
    """At version 6; window 7 is of round 5."""
    state = FragmentState(fragment=Fragment(index=slot, slot=slot, numel=256, tensors=()), version=6, **fields)
    state.terms_of = {7: window(7, of_round, final=final)}
    return state


def pending(*versions: int) -> dict[int, Committed]:
    commits = [
        Committed(
            fragment=0, version=version, size=1, digest=0, anchor_digest=0, merged=(), drops=(), next_window=None,
            rounds=(),
        )
        for version in versions
    ]  # fmt: skip
    return {committed.version: committed for committed in commits}


def undecided(sent_at: int = 0) -> PendingDelta:
    return PendingDelta(blob=delta(7, 1), terms=window(7), sent_at=sent_at, tau=2, steps=8)


@pytest.mark.parametrize(
    ("where", "due"),
    [
        ({}, [4]),
        ({"slot": 1}, [8]),
        ({"plan": dataclasses.replace(PLAN, node_steps=((A, 2),))}, [1]),  # fewer steps in the round: earlier
        ({"plan": None}, []),
        ({"of_round": 3}, [4]),  # a window that was not served
        ({"of_round": 6}, []),  # the next round's
        ({"final": True, "plan": dataclasses.replace(PLAN, start=24)}, []),
        ({"final": True, "plan": dataclasses.replace(PLAN, start=32)}, [8]),  # the end of the run's last round
    ],
)
def test_a_slot_has_one_due_step_in_a_round_of_its_window_or_later(where: dict[str, Any], due: list[int]) -> None:
    fields = {"plan": PLAN, **where}
    plan = fields.pop("plan")
    steps = range(1, 1 + (plan.steps_of(A) if plan else 8))
    assert [step for step in steps if at(step=step, plan=plan).is_due(fragment(**fields), TERMS)] == due


@pytest.mark.parametrize(
    ("start_round", "state", "may"),
    [
        (0, fragment(), True),
        (0, fragment(pending=pending(7, 8)), True),
        (0, fragment(pending=pending(7, 8, 9)), False),  # the base is too old
        (0, fragment(sent=[undecided()]), False),
        (0, fragment(lost=True), False),
        (0, fragment(owed=7), False),  # the last delta's version is not merged
        (0, fragment(discard=True), False),  # the last delta was dropped
        # A, I: the last slot has a full period at the end of the first round, the others a round later.
        (5, fragment(), False),
        (5, fragment(slot=1), True),
        (4, fragment(), True),
        (5, fragment(final=True), True),  # a flush is exempt
    ],
)
def test_a_delta_is_sent_from_a_base_that_a_window_can_take_once_the_last_is_settled_and_a_period_is_full(
    start_round: int, state: FragmentState, may: bool
) -> None:
    assert at(start_round=start_round).may_send(state, TERMS, behind=state.is_behind(TERMS)) is may


@pytest.mark.parametrize(
    ("fields", "passed_by", "stood_still"),
    [
        ({}, (100, False), (None, False)),
        ({"pending": pending(9)}, (100, True), (100, True)),  # too old a base: what was done is lost
        ({"merge_at": 103}, (103, False), (100, False)),
        ({"merge_at": 7, "pending": pending(9)}, (7, False), (7, False)),
        ({"sent": [undecided()], "pending": pending(9)}, (None, False), (None, False)),
    ],
)
def test_a_turn_that_passes_by_is_for_merging_and_where_training_stands_still_what_is_there_is_merged_now(
    fields: dict[str, Any], passed_by: tuple[int | None, bool], stood_still: tuple[int | None, bool]
) -> None:
    passing, standing = fragment(**fields), fragment(**fields)
    passing.pass_by(100, behind=passing.is_behind(TERMS))
    standing.stand_still(100, behind=standing.is_behind(TERMS))
    assert (passing.merge_at, passing.discard) == passed_by
    assert (standing.merge_at, standing.discard) == stood_still


@pytest.mark.parametrize(("steps", "overlap"), [(8, 7), (4, 3), (2, 1), (1, 0)])
def test_the_overlap_shrinks_with_the_steps_of_the_round_and_never_fills_it(steps: int, overlap: int) -> None:
    assert at(plan=dataclasses.replace(PLAN, node_steps=((A, steps),))).overlap(7) == overlap < steps
    assert at(plan=None).overlap(7) == 7


@given(steps=st.tuples(*3 * [st.integers(1, 40)]), slots=st.integers(1, 5), slot=st.integers(0, 4), own=st.booleans())
def test_the_next_turn_comes_after_the_merge_whatever_steps_a_node_has_from_round_to_round(
    steps: tuple[int, int, int], slots: int, slot: int, own: bool
) -> None:
    """D, where all slots may be undecided at once: its steps of this round and of the next, of as many of the run."""
    length = max(*steps, slots)
    now, then = (dataclasses.replace(PLAN, length=length, node_steps=((A, max(slots, s)),)) for s in steps[:2])
    here, terms = at(plan=now, following=then, slots=slots), TERMS.replace(h=length)
    overlap = here.own_overlap(length - 1, terms, terms) if own else here.overlap(length - 1)
    sent, due = (due_step(min(slot, slots - 1), slots, plan.steps_of(A)) for plan in (now, then))
    assert 0 <= overlap < now.steps_of(A) - sent + due


@pytest.mark.parametrize(
    ("state", "round_", "steps", "held"),
    [
        (fragment(sent=[undecided()], sent_round=1), 4, 100, False),
        (fragment(sent=[undecided()], sent_round=1), 5, 100, True),
        (fragment(owed=7, merge_at=100, sent_round=1), 5, 99, False),
        (fragment(owed=7, merge_at=100, sent_round=1), 5, 100, True),  # decided, and its update is not there
        (fragment(owed=7, merge_at=100, sent_round=1), 4, 100, False),
        (fragment(owed=6, sent_round=1), 5, 100, False),
    ],
)
def test_where_updates_are_not_waited_for_a_delta_holds_training_up_some_rounds_after_its_send(
    state: FragmentState, round_: int, steps: int, held: bool
) -> None:
    assert at(round=round_).holds_up(state, TERMS, steps) is held


def test_where_updates_are_waited_for_it_is_held_up_at_the_end_of_the_overlap() -> None:
    waiting, terms = at(round=1), TERMS.replace(on_late_update="wait")
    assert [waiting.holds_up(fragment(sent=[undecided(sent_at=90)]), terms, now) for now in (91, 92)] == [False, True]
    assert not waiting.holds_up(fragment(), terms, 100)


def test_a_window_s_turn_is_over_once_its_due_step_has_passed() -> None:
    assert [at(step=step).is_past_due(fragment()) for step in (3, 4, 5)] == [False, True, True]
    assert [at(step=0, plan=None).is_past_due(fragment(of_round=of_round)) for of_round in (4, 6)] == [True, False]
    assert not at(step=8).is_past_due(fragment(final=True))


def test_the_newest_round_is_that_of_the_last_slot_s_newest_window() -> None:
    """A: it is what a node that is behind jumps to."""
    first, last = fragment(slot=0, of_round=9), fragment(slot=1)
    last.terms_of[8] = window(8, 7)
    assert FragmentSet([first, last]).newest_round(2) == 7
    assert FragmentSet([first]).newest_round(2) == 0


# --- the overlap that a link needs


def test_the_overlap_covers_both_ways_and_the_least_commit() -> None:
    """What other nodes hold up is not this node's to wait for, and what is two rounds old no longer counts."""
    chooser = OverlapChooser(slots=2)
    assert chooser.choose(1.0) is None, "nothing is known"

    def turn(fragment: int, now: float, up: float, commit: float, down: float) -> None:
        chooser.on_sent(fragment, now)
        chooser.on_stored(fragment, now + up)
        chooser.on_announced(fragment, now + up + commit)
        chooser.on_arrived(fragment, now + up + commit + down)

    turn(0, 100.0, up=3.0, commit=20.0, down=2.0)
    assert chooser.choose(1.0) == 26
    turn(1, 200.0, up=1.0, commit=0.5, down=4.0)
    assert chooser.choose(1.0) == 9 and chooser.choose(0.1) == 76 and chooser.choose(0.0) is None
    for now in (300.0, 400.0, 500.0, 600.0):
        turn(0, now, up=0.1, commit=0.1, down=0.1)
    assert chooser.choose(1.0) == 2
    chooser.on_sent(0, 700.0)
    chooser.on_disconnect()
    chooser.on_stored(0, 800.0)
    chooser.on_arrived(1, 900.0)
    assert chooser.choose(1.0) == 2, "an outage says nothing of the link"
