"""Covers `node/fragment_state.py` (protocol B, E, H)."""

import dataclasses

import pytest

from farloop.algo.spec import Fragment, TensorSlot, WindowTerms
from farloop.node.fragment_state import FragmentState
from farloop.wire.messages import Committed

FRAGMENT = Fragment(index=0, slot=0, numel=256, tensors=(TensorSlot(name="t", shape=(256,), offset=0),))


def terms(window: int) -> WindowTerms:
    return WindowTerms(fragment=0, window=window, round=window - 1, tau=0, mix=0.0, codec_up="q4", codec_down="q4")


def committed(version: int, *, last: bool = False) -> Committed:
    return Committed(
        fragment=0,
        version=version,
        size=1,
        digest=0,
        anchor_digest=0,
        merged=(),
        drops=(),
        next_window=None if last else terms(version + 1),
        rounds=(),
    )


def state_at(version: int) -> FragmentState:
    state = FragmentState(fragment=FRAGMENT)
    state.advance(version, 0, 0, mixed=True)
    return state


def test_holding_a_version_means_holding_the_terms_of_the_next() -> None:
    """B."""
    state = state_at(3)
    assert state.terms is None
    state.learn_terms(terms(4))
    state.announce(committed(4))
    assert state.terms == terms(4), "those of version 5 are known, but not current yet"
    state.advance(4, 10, 100, mixed=True)
    assert state.terms == terms(5)
    state.check()


def test_terms_and_commits_of_the_past_change_nothing() -> None:
    state = state_at(3)
    before = dataclasses.replace(state)
    state.learn_terms(terms(3))
    state.announce(dataclasses.replace(committed(2), next_window=terms(3)))
    assert state == before


def test_versions_are_ready_in_order_without_a_gap_and_only_with_their_bytes() -> None:
    """E: applied in order."""
    state = state_at(0)
    for version in (1, 2, 4):
        state.announce(committed(version))
    state.arrived = {1, 3, 4}
    assert state.ready_versions() == [1]
    state.arrived.add(2)
    assert state.ready_versions() == [1, 2], "version 3 was not announced"
    state.announce(committed(3))
    assert state.ready_versions() == [1, 2, 3, 4]
    state.lost = True
    assert state.ready_versions() == []


def test_advancing_forgets_what_is_behind() -> None:
    state = state_at(0)
    for version in (1, 2, 3):
        state.announce(committed(version))
    state.arrived = {1, 2, 3}
    state.advance(2, 10, 100, mixed=True)
    assert (set(state.pending), state.arrived, set(state.terms_of)) == ({3}, {3}, {3, 4})
    state.check()


def test_the_next_delta_s_work_begins_at_a_merge_that_mixed_the_anchor_in() -> None:
    """H: with a = 1 it began at the last send, and only the merge is remembered."""
    state = state_at(0)
    state.counted_from, state.tokens_from = 4, 400
    state.advance(1, 7, 700, mixed=False)
    assert (state.merged_at, state.counted_from, state.tokens_from) == (7, 4, 400)
    state.advance(2, 9, 900, mixed=True)
    assert (state.merged_at, state.counted_from, state.tokens_from) == (9, 9, 900)


def test_a_fragment_is_final_once_the_version_without_a_following_window_is_held() -> None:
    state = state_at(0)
    state.announce(committed(1, last=True))
    assert not state.is_final
    state.advance(1, 4, 400, mixed=True)
    assert state.is_final and state.terms is None


def test_check_notices_what_cannot_be() -> None:
    for field, value in (("pending", {3: committed(3)}), ("arrived", {2}), ("terms_of", {1: terms(1)})):
        state = state_at(3)
        setattr(state, field, value)
        with pytest.raises(AssertionError):
            state.check()
