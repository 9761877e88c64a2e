"""Covers `node/fragment_set.py`: what is merged when (protocol D, E, F)."""

from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId, WindowTerms
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.node.fragment_set import (
    DueMerge,
    FragmentState,
    PendingDelta,
    merge_command,
    merging_when_going_on,
    merging_when_waiting,
)
from farloop.wire.messages import Committed, Offer, Share
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")


def terms(**changes: Any) -> Terms:
    return plain_terms(**{"h": 8, "tau": 2, "mix": 0.5, "min_nodes": 4} | changes)


LATE = terms(lag=1, tau=0, mix=0.0)
EAGER = terms(lag=1, tau=0, mix=0.0, eager=True)


def window(version: int, *, mix: float = 0.5, gap: float = 1.0) -> WindowTerms:
    return WindowTerms(
        fragment=0, window=version, round=version - 1, tau=2, mix=mix, codec_up="q4", codec_down="q4", gap=gap
    )


def delta(for_window: int, base: int, **fields: Any) -> PendingDelta:
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=base, node=A, incarnation=1, seq=for_window)
    given = {"blob": blob, "terms": window(for_window), "sent_at": 8, "tau": 2, "steps": 8} | fields
    return PendingDelta(**given)


def offer(undecided: PendingDelta) -> Offer:
    return Offer(blob=undecided.blob, size=1, digest=0, window=undecided.terms.window)


def state_at(version: int, *versions: int, merged: tuple[NodeId, ...] = (A, B), **fields: Any) -> FragmentState:
    """The anchor at `version`, and the announced `versions` with their bytes."""
    state = FragmentState(fragment=Fragment(index=0, slot=0, numel=256, tensors=()), version=version, **fields)
    for number in versions:
        state.pending[number] = Committed(
            fragment=0,
            version=number,
            size=1,
            digest=0,
            anchor_digest=0,
            merged=tuple(Share(node=name, weight=1 / len(merged)) for name in merged),
            drops=(),
            next_window=None,
            rounds=(),
        )
        state.arrived.add(number)
        state.terms_of[number] = window(number)
    return state


def when_waiting(state: FragmentState, under: Terms, steps: int, *, training: bool = True) -> DueMerge | None:
    return merging_when_waiting(state, under, steps, training=training)


def test_a_delta_is_merged_at_the_end_of_its_overlap_with_its_own_version() -> None:
    state = state_at(3, 4, sent=[delta(4, 3)])
    assert when_waiting(state, terms(), 9) is None
    assert when_waiting(state, terms(), 10) == DueMerge(versions=[4], mix=0.5)
    assert when_waiting(state, terms(), 9, training=False) == DueMerge(versions=[4], mix=0.5), "at the end at once"
    assert when_waiting(state_at(3, sent=[delta(4, 3)]), terms(), 10) is None, "it waits"


def test_who_was_left_out_takes_the_anchor_and_loses_what_it_did() -> None:
    state = state_at(3, 4, sent=[delta(4, 3)], merged=(B,))
    assert when_waiting(state, terms(), 10) == DueMerge(versions=[4], mix=0.0, loses_steps=True)


def test_who_sent_nothing_merges_what_comes() -> None:
    assert when_waiting(state_at(3, 4), terms(), 5) == DueMerge(versions=[4], mix=0.5, loses_steps=True)
    assert when_waiting(state_at(-1, 0), terms(), 0) == DueMerge(versions=[0], mix=0.0, loses_steps=True)


def test_with_a_lag_the_first_round_ends_with_the_anchor_that_it_began_from() -> None:
    state = state_at(0, sent=[delta(1, 0, tau=0)])
    assert when_waiting(state, LATE, 8) == DueMerge(versions=[], mix=0.0)


def test_with_a_lag_each_send_is_followed_by_the_version_of_the_round_before() -> None:
    state = state_at(3, 4, sent=[delta(5, 3, tau=0)])
    assert when_waiting(state, LATE, 8) == DueMerge(versions=[4], mix=0.0)
    assert when_waiting(state_at(3, sent=[delta(5, 3, tau=0)]), LATE, 8) is None, "it waits"
    early = state_at(3, 4, 5, sent=[delta(5, 3, tau=0)])
    assert when_waiting(early, LATE, 8) == DueMerge(versions=[4], mix=0.0), "its own is for the next round's end"


def test_with_a_lag_training_goes_on_while_the_own_version_is_there_until_the_next_send() -> None:
    state = state_at(4, 5, sent=[delta(5, 3, tau=0, merged=True)])
    assert when_waiting(state, LATE, 12) is None
    assert when_waiting(state, LATE, 12, training=False) == DueMerge(versions=[5], mix=0.5, loses_steps=True)


def test_with_a_lag_a_base_that_no_window_takes_is_left_at_once() -> None:
    state = state_at(4, 5, 6, 7, sent=[delta(5, 3, tau=0, merged=True)])
    merging = when_waiting(state, LATE, 12)
    assert merging is not None and merging.versions == [5, 6, 7] and merging.loses_steps


def test_with_a_lag_work_that_can_still_be_sent_is_not_thrown_away() -> None:
    fresh = state_at(3, 4, counted_from=12)
    assert when_waiting(fresh, LATE, 12) == DueMerge(versions=[4], mix=0.5, loses_steps=True), "there is none"
    assert when_waiting(fresh, LATE, 14) is None
    assert when_waiting(state_at(3, 4, 5, counted_from=12), LATE, 14) is not None, "no window takes it"


def test_an_eager_node_goes_on_once_its_own_delta_is_encoded() -> None:
    fresh = delta(5, 3, tau=0)
    state = state_at(3, 4, sent=[fresh])
    assert when_waiting(state, EAGER, 8) is None
    fresh.offer = offer(fresh)
    assert when_waiting(state, EAGER, 8) == DueMerge(versions=[4], mix=0.0)


@pytest.mark.parametrize(("share", "gap", "expected"), [(None, 1.0, 0.25), (0.5, 1.0, 0.5), (0.5, 2.0, 0.25)])
def test_an_eager_start_holds_the_own_delta_as_the_outer_step_will(
    share: float | None, gap: float, expected: float
) -> None:
    """Its likely weight, times the gain of the step; unknown at first: one of as many as the run waits for."""
    under = terms(method="co2", lag=1, tau=0, mix=0.0, eager=True, outer_lr=1.0, outer_momentum=0.2)
    fresh = delta(5, 3, terms=window(5, gap=gap))
    command = merge_command(state_at(4, sent=[fresh], share=share), under, 0.0)
    assert command == ev.Merge(fragment=0, mix=0.0, own=((fresh.blob, fresh.terms),), factor=expected)
    nesterov = merge_command(state_at(4, sent=[fresh], share=0.5), EAGER, 0.0)
    assert nesterov.factor == pytest.approx(0.5 * 0.7 * 1.9)


def test_what_will_not_be_merged_is_not_in_an_eager_start() -> None:
    state = state_at(4, sent=[delta(5, 3, dropped=Reason.LATE)], share=0.5)
    assert merge_command(state, EAGER, 0.0) == ev.Merge(fragment=0, mix=0.0)
    assert merge_command(state_at(4, sent=[delta(5, 3)], share=0.5), LATE, 0.0) == ev.Merge(fragment=0, mix=0.0)


def test_going_on_merges_once_after_a_send_when_it_is_decided() -> None:
    under = terms(on_late_update="continue")
    assert merging_when_going_on(state_at(3, 4, sent=[delta(4, 3)], merge_at=10), under, 11, training=True) is None
    decided = state_at(3, 4, merge_at=10, owed=4)
    assert merging_when_going_on(decided, under, 9, training=True) is None
    assert merging_when_going_on(decided, under, 10, training=True) == DueMerge(versions=[4], mix=0.5)
    decided.discard = True
    assert merging_when_going_on(decided, under, 10, training=True) == DueMerge(versions=[4], mix=0.0, loses_steps=True)
