"""Covers `node/send_schedule.py`: a step boundary, seen against the windows that are open (protocol A, D, F)."""

import dataclasses
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from node_story import A, delta
from plain_runs import plain_terms
from stories import StoryText, all_stories, check_story, python

from farloop.algo.schedule import due_step
from farloop.algo.spec import Fragment, RoundPlan, WindowTerms
from farloop.node import fragment_set, send_schedule
from farloop.node.fragment_set import FragmentState, PendingDelta
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


def of_own_steps(steps: int) -> RoundPlan:
    return dataclasses.replace(PLAN, node_steps=((A, steps),))


def due(*, plan: RoundPlan | None = PLAN, **fields: Any) -> list[int]:
    """Steps at which it is due."""
    steps = range(1, 1 + (plan.steps_of(A) if plan else 8))
    return [step for step in steps if at(step=step, plan=plan).is_due(fragment(**fields), TERMS)]


def may(state: FragmentState, start_round: int = 0) -> bool:
    return at(start_round=start_round).may_send(state, TERMS, behind=state.is_behind(TERMS))


def turn(**fields: Any) -> list[tuple[int | None, bool]]:
    """When it is merged after step 100, and whether it is lost: if its turn passed by, or training stood still."""
    passing, standing = fragment(**fields), fragment(**fields)
    passing.pass_by(100, behind=passing.is_behind(TERMS))
    standing.stand_still(100, behind=standing.is_behind(TERMS))
    return [(state.merge_at, state.discard) for state in (passing, standing)]


def took(chooser: OverlapChooser, fragment: int, now: float, *, up: float, commit: float, down: float) -> None:
    """A delta's way and its update's, in seconds."""
    chooser.on_sent(fragment, now)
    chooser.on_stored(fragment, now + up)
    chooser.on_announced(fragment, now + up + commit)
    chooser.on_arrived(fragment, now + up + commit + down)


@all_stories(__file__, "send_schedule")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(fragment_set), vars(send_schedule), globals()), rewrite=rewrite)


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
