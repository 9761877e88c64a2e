"""One window: whom it waits for, when and why it closes, and what its commit says (protocol D, E, H)."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo import schedule
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec, WindowTerms
from farloop.coordinator import records as rec
from farloop.coordinator.windows import Window
from farloop.wire.messages import Drop, Offer, Share
from farloop.wire.reasons import Reason

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
NODES = (A, B, C)
TERMS = WindowTerms(fragment=0, window=4, round=4, tau=2, mix=0.5, codec_up="q4", codec_down="q4")


def offer(*nodes: NodeId, tokens: int = 100, window: int = 4) -> Offer:
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=window - 1, node=min(nodes), incarnation=1, seq=1)
    contributors = tuple(
        Contribution(node=node, incarnation=1, base=window - 1, steps=10, tokens=tokens, norm_sq=1.0) for node in nodes
    )
    return Offer(blob=blob, size=10, digest=1, window=window, contributors=contributors)


def window(*expected: NodeId, came: tuple[Offer, ...] = (), **removed: Reason) -> Window:
    opened = Window(terms=TERMS, expected=set(expected), removed={NodeId(n): why for n, why in removed.items()})
    opened.inputs = {arrived.blob: arrived for arrived in came}
    return opened


def test_it_waits_for_all_that_are_expected() -> None:
    assert window(A, B, came=(offer(B),)).missing == {A}
    assert window(A, B, came=(offer(B),)).why_close(None, 1) is None
    assert window(A, B, came=(offer(B), offer(A))).why_close(None, 1) == "all 2 expected came"


def test_it_does_not_wait_for_whom_it_removed() -> None:
    assert window(A, B, came=(offer(A),), b=Reason.SILENT).why_close(None, 1) == "all 1 expected came, 1 removed"


def test_a_removed_node_whose_delta_came_after_all_is_not_told_as_removed() -> None:
    assert window(A, came=(offer(A),), a=Reason.CLOSED).why_close(None, 1) == "all 1 expected came"


def test_a_delta_of_a_node_that_was_not_expected_counts_as_well() -> None:
    assert window(A, came=(offer(C),)).missing == {A}
    assert window(came=(offer(C),)).why_close(None, 1) == "all 1 expected came"


def test_a_quorum_closes_it_and_the_reason_names_who_is_missing() -> None:
    two_of_three = window(A, B, C, came=(offer(B), offer(C)))
    assert two_of_three.why_close(3, 1) is None
    assert two_of_three.why_close(2, 1) == "quorum of 2 reached, without a"
    assert window(A, B, C, came=(offer(B),)).why_close(1, 1) == "quorum of 1 reached, without a, c"


def test_below_the_floor_it_is_held() -> None:
    assert window(A, B, came=(offer(A),), b=Reason.SILENT).why_close(None, 2) is None
    assert window(A, B, came=(offer(A),)).why_close(1, 2) is None


def test_it_never_closes_with_nothing_in_it() -> None:
    assert window().why_close(None, 0) is None
    assert window(A, a=Reason.SILENT).why_close(0, 0) is None


def test_it_closes_once() -> None:
    closing = window(A, came=(offer(A),))
    closing.state = "closing"
    assert closing.why_close(None, 1) is None


def test_a_relayed_blob_counts_for_all_its_contributors() -> None:
    """Windows, weights and reasons work on contributor sets (protocol H)."""
    relayed = window(A, B, C, came=(offer(B, C, tokens=100), offer(A, tokens=200)))
    assert relayed.contributors == {A, B, C} and not relayed.missing
    assert relayed.shares() == (Share(node=A, weight=0.5), Share(node=B, weight=0.5))


@given(order=st.permutations(NODES), tokens=st.tuples(*[st.integers(0, 1 << 40)] * 3))
def test_the_order_of_arrival_never_shows(spec: RunSpec, order: list[NodeId], tokens: tuple[int, int, int]) -> None:
    """B19: the sum runs over the smallest node ids, in their order."""
    offers = {node: offer(node, tokens=count) for node, count in zip(NODES, tokens, strict=True)}
    rounds = {plan.index: plan for plan in schedule.first_rounds(spec.terms, 6)}
    terms = dataclasses.replace(TERMS, round=2)

    def draft(nodes: tuple[NodeId, ...]) -> rec.WindowCommitted:
        opened = window(*NODES, came=tuple(offers[node] for node in nodes))
        opened.terms = terms
        return opened.draft(spec, rounds, "why")

    assert draft(tuple(order)) == draft(NODES)
    assert [addend.blob.node for addend in draft(tuple(order)).blobs] == [A, B, C]


names = st.sets(st.sampled_from(NODES))


@given(expected=names, came=names, gone=names, quorum=st.none() | st.integers(1, 3), floor=st.integers(1, 3))
def test_a_window_closes_when_its_terms_say_so_and_every_node_has_one_fate(
    expected: set[NodeId], came: set[NodeId], gone: set[NodeId], quorum: int | None, floor: int
) -> None:
    removed = {str(node): Reason.SILENT for node in gone & expected}
    opened = window(*expected, came=tuple(offer(node) for node in sorted(came)), **removed)
    opened.check()
    complete = expected - gone <= came or (quorum is not None and len(came) >= quorum)
    assert (opened.why_close(quorum, floor) is not None) == (complete and len(came) >= floor and bool(came))
    if came:
        merged = [share.node for share in opened.shares()]
        dropped = [drop.node for drop in opened.drops()]
        assert sorted(merged + dropped) == sorted(expected | came)
        assert sum(share.weight for share in opened.shares()) == pytest.approx(1.0)


def test_whoever_is_not_merged_is_dropped_with_a_reason() -> None:
    """E: `Committed` lists contributors and drops."""
    opened = window(A, B, C, came=(offer(A),), c=Reason.SILENT)
    assert opened.drops() == (Drop(node=B, reason=Reason.LATE), Drop(node=C, reason=Reason.SILENT))


def test_a_flush_is_averaged_without_momentum_for_no_round_is_left_in_which_it_would_pay_off(spec: RunSpec) -> None:
    rounds = {plan.index: plan for plan in schedule.first_rounds(spec.terms, 4)}
    first = schedule.first_windows(spec.terms, spec.identity.layout)[0]
    regular, flush = (
        Window(terms=terms, expected={A}, inputs={o.blob: o})
        for terms in (first, dataclasses.replace(first, final=True))
        for o in [offer(A, window=1)]
    )
    settings = [(d.outer_lr, d.outer_momentum) for d in (w.draft(spec, rounds, "") for w in (regular, flush))]
    assert settings == [(spec.terms.outer_lr, spec.terms.outer_momentum), (1.0, 0.0)]
    assert spec.terms.outer_momentum > 0


def test_the_draft_says_all_that_was_decided(spec: RunSpec) -> None:
    """B, O: the terms of the next window travel with the commit; what the arithmetic finds out is still missing."""
    rounds = {plan.index: plan for plan in schedule.first_rounds(spec.terms, 4)}
    opened = Window(terms=schedule.first_windows(spec.terms, spec.identity.layout)[1], expected={A, B})
    first = BlobId(kind=BlobKind.DELTA, fragment=1, version=0, node=A, incarnation=1, seq=1)
    contribution = Contribution(node=A, incarnation=1, base=0, steps=10, tokens=10, norm_sq=1.0)
    opened.inputs = {first: Offer(blob=first, size=1, digest=1, window=1, contributors=(contribution,))}
    assert opened.draft(spec, rounds, "quorum of 1 reached, without b") == rec.WindowCommitted(
        fragment=1,
        version=1,
        round=0,
        merged=(Share(node=A, weight=1.0),),
        drops=(Drop(node=B, reason=Reason.LATE),),
        blobs=(rec.Addend(blob=first, weight=1.0),),
        anchor_digest=0,
        target_digest=0,
        momentum_digest=None,
        next_window=dataclasses.replace(opened.terms, window=2, round=1),
        update_size=0,
        update_digest=0,
        outer_lr=0.6,
        outer_momentum=0.9,
        why="quorum of 1 reached, without b",
    )


@pytest.mark.parametrize(
    "odd",
    [
        window(A, came=(offer(A),), b=Reason.LATE),
        window(A, B, came=(offer(A, B), offer(B))),
        window(A, came=(offer(A, window=5),)),
    ],
    ids=["removed and not expected", "two deltas of one node", "a delta of another window"],
)
def test_what_must_not_be_is_noticed(odd: Window) -> None:
    with pytest.raises(AssertionError):
        odd.check()
