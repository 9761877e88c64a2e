"""Covers `node/fragment_set.py` (protocol B, E, H)."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId, TensorSlot, WindowTerms
from farloop.node.fragment_set import FragmentState, PendingDelta
from farloop.wire.messages import Committed, Offer, Share
from farloop.wire.reasons import Reason

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


def test_a_window_whose_terms_did_not_come_runs_under_those_of_the_run() -> None:
    """B: a snapshot may overtake the announcement of its version, and then the link may break."""
    state = FragmentState(fragment=FRAGMENT, version=3)
    state.learn_terms(terms(4))
    run = plain_terms(steps=8, h=2, codec_down="q8", weight_decay=0.1, batch_sequences=4, sequence_tokens=8)
    assert state.terms_for(4, run) == terms(4)
    own = state.terms_for(5, run)
    assert (own.window, own.tau, own.mix, own.codec_up, own.codec_down) == (5, 0, 0.0, "q4", "q8")


def test_bytes_of_no_use_are_told_at_once() -> None:
    def blob(kind: BlobKind, version: int) -> BlobId:
        return BlobId(kind=kind, fragment=0, version=version)

    state = FragmentState(fragment=FRAGMENT, version=3)
    assert state.came(blob(BlobKind.UPDATE, 3)) == blob(BlobKind.UPDATE, 3)
    assert state.came(blob(BlobKind.UPDATE, 4)) is None
    assert state.arrived == {4}
    assert state.came(blob(BlobKind.SNAPSHOT, 4)) is None
    assert state.came(blob(BlobKind.SNAPSHOT, 4)) is None
    assert state.came(blob(BlobKind.SNAPSHOT, 6)) == blob(BlobKind.SNAPSHOT, 4)
    assert state.snapshot == 6


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


# --- a delta under way


def delta(incarnation: int = 1) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=3, node=NodeId("a"), incarnation=incarnation, seq=1)


def sent(*, incarnation: int = 1, **fields: Any) -> FragmentState:
    """At version 3, with a delta for window 4."""
    state = state_at(3)
    state.sent = [PendingDelta(blob=delta(incarnation), terms=terms(4), sent_at=10, tau=0, steps=10, **fields)]
    return state


def announce(state: FragmentState, version: int, *names: str, last: bool = False) -> None:
    shares = tuple(Share(node=NodeId(name), weight=1 / len(names)) for name in names)
    state.announce(dataclasses.replace(committed(version, last=last), merged=shares))


def test_the_overlap_is_over_tau_steps_after_the_send() -> None:
    undecided = PendingDelta(blob=delta(), terms=terms(4), sent_at=10, tau=2, steps=10)
    assert [undecided.is_due(steps) for steps in (11, 12)] == [False, True]


def test_it_is_part_of_the_first_version_that_names_its_node() -> None:
    """E: of its own window, or of a later one."""
    state = sent()
    announce(state, 4, "b")
    assert state.undecided_is_in(state.sent[0]) is None
    announce(state, 5, "a", "b")
    announce(state, 6, "a")
    assert state.undecided_is_in(state.sent[0]) == 5


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"incarnation": 2}, None), ({"incarnation": 2, "stored": True}, 4), ({"dropped": Reason.OVERLAP}, None)],
    ids=["may be the incarnation's before", "known to have come", "refused"],
)
def test_a_share_may_be_another_s(fields: dict[str, Any], found: int | None) -> None:
    state = sent(**fields)
    announce(state, 4, "a")
    assert state.undecided_is_in(state.sent[0]) == found


def test_it_can_be_taken_until_its_base_is_too_old() -> None:
    """D."""
    state = sent()
    for version, can in ((4, True), (5, True), (6, False)):
        announce(state, version, "b")
        assert state.can_be_taken(state.sent[0], 2) is can
    state = sent()
    assert not state.can_be_taken(state.sent[0], 0, 4) and state.can_be_taken(state.sent[0], 0, 3)


def test_after_the_last_version_no_window_takes_it() -> None:
    state = sent()
    announce(state, 4, "b", last=True)
    assert not state.can_be_taken(state.sent[0], 2)


def test_a_refused_one_is_kept_until_its_window_is_over() -> None:
    """E: else it would be made anew for the same window."""
    state = sent(dropped=Reason.CORRUPT)
    assert state.can_be_taken(state.sent[0], 2)
    announce(state, 4, "b")
    assert not state.can_be_taken(state.sent[0], 2)


def test_giving_it_up_costs_the_work_that_is_still_in_the_weights() -> None:
    state = sent()
    state.give_up()
    assert state.undecided is None and state.discard
    replaced = sent()
    replaced.advance(5, 20, 200, mixed=True)  # by a snapshot
    replaced.give_up()
    assert replaced.undecided is None and not replaced.discard


def test_what_may_not_have_come_is_offered_again() -> None:
    """Q: once it is encoded, and while a window can take it."""
    offer = Offer(blob=delta(), size=1, digest=0, window=4)
    assert state_at(3).offer_again(3, 2, restarted=False) == []
    assert sent().offer_again(3, 2, restarted=False) == []
    assert [sent(offer=offer).offer_again(newest, 2, restarted=False) for newest in (3, 5, 6)] == [[offer], [offer], []]


@pytest.mark.parametrize(
    ("reason", "restarted", "again"),
    [
        (Reason.LATE, True, True),
        (Reason.LATE, False, False),
        (Reason.CORRUPT, True, True),
        (Reason.CORRUPT, False, False),
    ],
)
def test_a_refused_one_is_offered_again_only_where_the_window_may_be_open_again(
    reason: Reason, restarted: bool, again: bool
) -> None:
    offer = Offer(blob=delta(), size=1, digest=0, window=4)
    state = sent(offer=offer, dropped=reason)
    assert (state.offer_again(3, 2, restarted=restarted) == [offer]) is again


@pytest.mark.parametrize(("lag", "window"), [(0, 4), (1, 5)])
def test_with_a_lag_the_next_delta_is_for_the_window_that_is_open(lag: int, window: int) -> None:
    """D: version 4 is announced and not here yet; base 3 serves window 5 then, and would come too late for window 4."""
    state = state_at(3)
    state.lag = lag
    state.pending = {4: committed(4)}
    state.terms_of = {4: terms(4), 5: terms(5)}
    assert state.terms is not None and state.terms.window == window
