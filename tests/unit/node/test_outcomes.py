"""Covers `node/fragment_set.py` and `farewell` on a state alone; in the machine's hands: `test_machine*.py`."""

import dataclasses

import pytest
from plain_runs import plain_terms

from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId, TensorSlot, WindowTerms
from farloop.node import events as ev
from farloop.node.fragment_set import FragmentState, PendingDelta, decided, overtaken, settled
from farloop.node.machine import Stage, farewell
from farloop.wire.messages import Committed, Share
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
FRAGMENT = Fragment(index=0, slot=0, numel=256, tensors=(TensorSlot(name="t", shape=(256,), offset=0),))
TERMS = plain_terms(steps=8, h=2, weight_decay=0.1, batch_sequences=4, sequence_tokens=8)


def delta(base: int) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=base, node=A, incarnation=1, seq=base)


def sent(window: int) -> PendingDelta:
    terms = WindowTerms(fragment=0, window=window, round=window - 1, tau=0, mix=0.0, codec_up="q4", codec_down="q4")
    return PendingDelta(blob=delta(window - 1), terms=terms, sent_at=0, tau=0, steps=10)


def commit(version: int, *merged: NodeId) -> Committed:
    return Committed(
        fragment=0, version=version, size=1, digest=0, anchor_digest=0,
        merged=tuple(Share(node=node, weight=0.25) for node in merged), drops=(), next_window=None, rounds=(),
    )  # fmt: skip


@pytest.fixture
def state() -> FragmentState:
    """Version 3 is held, and a delta for window 4 is undecided."""
    return FragmentState(fragment=FRAGMENT, version=3, sent=[sent(4)])


@pytest.mark.parametrize(("lag", "lost"), [(0, 0), (1, 10)])
def test_a_merge_settles_what_was_sent_for_it(state: FragmentState, lag: int, lost: int) -> None:
    """H: with a lag nobody else counts the work that is in no version."""
    of_others = dataclasses.replace(state, pending={4: commit(4, B)}, sent=list(state.sent))
    assert settled(of_others, 4, A, lag) == ([ev.ForgetBlob(blob=delta(3), merged_in=None)], lost)
    state.pending[4] = commit(4, A, B)
    assert settled(state, 3, A, lag) == ([], 0)
    assert settled(state, 4, A, lag) == ([ev.ForgetBlob(blob=delta(3), merged_in=4)], 0)
    assert state.sent == [] and state.share == 0.25


def test_an_announcement_decides_or_leaves_a_way(state: FragmentState) -> None:
    """E: where updates are not waited for."""
    state.pending[4] = commit(4, B)
    assert decided(state, max_staleness=1) == [], "the next window may still take it"
    state.pending[5] = commit(5, A)
    assert decided(state, max_staleness=1) == [ev.ForgetBlob(blob=delta(3), merged_in=5)]
    assert (state.owed, state.sent, decided(state, max_staleness=1)) == (5, [], [])


def test_without_a_way_the_work_is_given_up(state: FragmentState) -> None:
    state.pending[4] = commit(4, B)
    assert decided(state, max_staleness=0) == [ev.ForgetBlob(blob=delta(3))]
    assert state.discard


def test_a_snapshot_takes_what_it_makes_useless_with_it(state: FragmentState) -> None:
    state.arrived = {4, 5, 7}
    updates = [ev.ForgetBlob(blob=BlobId(kind=BlobKind.UPDATE, fragment=0, version=version)) for version in (4, 5)]
    stale = TERMS.replace(max_staleness=2)
    assert overtaken(dataclasses.replace(state, sent=list(state.sent)), 5, stale) == updates
    assert overtaken(state, 5, TERMS) == [ev.ForgetBlob(blob=delta(3)), *updates]
    assert state.sent == []


@pytest.mark.parametrize(
    ("stage", "final", "undecided", "end"),
    [
        ("finishing", 3, False, ("finished", Reason.RUN_FINISHED)),
        ("finishing", 3, True, None),
        ("finishing", 4, False, None),
        ("finishing", None, False, None),
        ("draining", None, False, ("left", Reason.DRAINED)),
        ("draining", None, True, None),
        ("training", 3, False, None),
    ],
)
def test_a_good_bye_waits_for_what_is_undecided(
    state: FragmentState, stage: Stage, final: int | None, undecided: bool, end: tuple[Stage, Reason] | None
) -> None:
    state.final, state.sent = final, state.sent if undecided else []
    assert farewell(stage, [state]) == end
