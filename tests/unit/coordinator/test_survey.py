"""Covers `coordinator/decide/adoption.py`: what nodes hold, against each other and against an old copy (protocol S)."""

import dataclasses

import pytest
from plain_runs import plain_hello

from farloop.algo import schedule
from farloop.algo.spec import NodeId, Revision, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import NodeClaim, Unknown, revisions_since, rounds_since, survey, terms_after
from farloop.coordinator.decide.ledger import Ledger
from farloop.wire.messages import AnchorRef, Held

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
EMPTY = Held(anchors=(), windows=(), final=(), rounds=(), revisions=())


def ref(fragment: int, version: int, digest: int | None = None) -> AnchorRef:
    """Version 0 is that of the spec."""
    usual = 100 + fragment if version == 0 else 1000 * fragment + version
    return AnchorRef(fragment=fragment, version=version, digest=usual if digest is None else digest)


def claim(
    *anchors: AnchorRef, told: tuple[AnchorRef, ...] = (), history: int = 0, held: Held | None = None
) -> NodeClaim:
    hello = plain_hello(anchors=anchors, announced=told, history=history, protocol_max=4)
    return NodeClaim(hello=hello, heard_at=0.0, session=1, held=held)


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Both fragments at version 0."""
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=1))


def test_the_newest_that_anybody_holds_is_wanted_and_what_nobody_holds_is_lost(ledger: Ledger) -> None:
    found = survey({A: claim(ref(0, 3), ref(1, 0)), B: claim(ref(0, 2), ref(1, 2), told=(ref(0, 4),))}, ledger)
    assert found.wanted == {0: ref(0, 3), 1: ref(1, 2)} and not found.fault
    assert found.lost == (ref(0, 4),)
    assert found.holders(ref(0, 3)) == [A] and found.holders(ref(1, 2)) == [B]


def test_what_the_copy_has_is_not_wanted(ledger: Ledger) -> None:
    found = survey({A: claim(ref(0, 0), ref(1, 0))}, ledger)
    assert (found.wanted, found.lost, found.fault) == ({}, (), "")


def test_two_digests_of_one_version_are_named_with_their_nodes(ledger: Ledger) -> None:
    found = survey({A: claim(ref(0, 3)), B: claim(ref(0, 3, digest=7))}, ledger)
    assert "version 3 of fragment 0" in found.fault and "node a" in found.fault and "node b" in found.fault
    assert "--rewind" in found.fault
    told = survey({A: claim(ref(0, 3)), B: claim(ref(0, 2), told=(ref(0, 3, digest=7),))}, ledger)
    assert "node a" in told.fault and "node b" in told.fault, "who was told of it, has not it"
    assert "for this state" in survey({A: claim(ref(0, 0, digest=7))}, ledger).fault


def test_bytes_that_were_not_what_they_said_are_not_held(ledger: Ledger) -> None:
    spoiled = claim(ref(0, 3), ref(1, 0))
    spoiled.spoiled.add((0, 3))
    found = survey({A: spoiled, B: claim(ref(0, 2), ref(1, 0))}, ledger)
    assert found.wanted == {0: ref(0, 2)} and found.lost == (ref(0, 3),)


def test_what_a_node_says_in_the_session_counts_more_than_its_greeting(ledger: Ledger) -> None:
    """It may have merged on the way."""
    later = dataclasses.replace(EMPTY, anchors=(ref(0, 4), ref(1, 0)))
    assert survey({A: claim(ref(0, 3), ref(1, 0), held=later)}, ledger).wanted == {0: ref(0, 4)}


def test_of_several_histories_the_newest_counts(ledger: Ledger) -> None:
    found = survey({A: claim(ref(0, 9), ref(1, 9)), B: claim(ref(0, 1, 5), ref(1, 1, 6), history=4)}, ledger)
    assert found.wanted == {0: ref(0, 1, 5), 1: ref(1, 1, 6)} and set(found.claims) == {B}


@pytest.mark.parametrize(
    ("anchors", "fault"),
    [
        ((ref(0, 2, 5),), "no node holds fragment 1 of history 4"),
        ((ref(0, 2, 5), ref(1, 0, 6)), "fragment 1 is at version 0"),
    ],
)
def test_a_history_that_does_not_reach_beyond_the_copy_is_not_adopted(
    ledger: Ledger, anchors: tuple[AnchorRef, ...], fault: str
) -> None:
    assert fault in survey({B: claim(*anchors, history=4)}, ledger).fault


def test_terms_come_from_whoever_knows_them() -> None:
    window = WindowTerms(fragment=0, window=4, round=3, tau=2, mix=0.5, codec_up="q4", codec_down="q4")
    knows, ended = dataclasses.replace(EMPTY, windows=(window,)), dataclasses.replace(EMPTY, final=(0,))
    assert terms_after(ref(0, 3), [EMPTY, knows]) == window
    assert terms_after(ref(0, 3), [ended]) is None
    with pytest.raises(Unknown, match="fragment 0 goes on after version 3"):
        terms_after(ref(0, 3), [EMPTY])


def test_rounds_that_everybody_forgot_follow_from_the_rule(ledger: Ledger, spec: RunSpec) -> None:
    """The copy knows rounds 0 and 1; a node knows round 3, and round 2 is what leads there."""
    second, third = schedule.first_rounds(spec.terms, count=4)[2:]
    window = WindowTerms(fragment=0, window=4, round=3, tau=2, mix=0.5, codec_up="q4", codec_down="q4")
    dealt = dataclasses.replace(third, node_steps=((A, 5),))
    told = dataclasses.replace(EMPTY, rounds=(dealt,))
    assert rounds_since(ledger, [told], (), [window]) == (second, dealt)
    assert rounds_since(ledger, [told], (), []) == (), "nothing stands there: they are fixed anew"
    elsewhere = dataclasses.replace(EMPTY, rounds=(RoundPlan(index=3, start=33, length=10),))
    with pytest.raises(Unknown, match="round 3"):
        rounds_since(ledger, [elsewhere], (), [window])
    with pytest.raises(Unknown, match="round 4"):
        rounds_since(ledger, [told], (), [dataclasses.replace(window, round=1 << 10)])


def test_terms_that_were_changed_since_are_taken_over_in_order(ledger: Ledger, spec: RunSpec) -> None:
    first, second = (Revision(number=n, terms=spec.terms, windows=(n, n), round=n) for n in (1, 2))
    begun = ledger.revisions.newest
    told = [dataclasses.replace(EMPTY, revisions=revisions) for revisions in ((begun, second), (begun, first))]
    assert revisions_since(ledger, told) == (first, second)
    other = dataclasses.replace(first, round=9)
    with pytest.raises(Unknown, match="two revisions 1"):
        revisions_since(ledger, [*told, dataclasses.replace(EMPTY, revisions=(other,))])


def test_codecs_of_other_nodes_than_the_terms_name_are_not_taken_over(ledger: Ledger, spec: RunSpec) -> None:
    """Which codec was chosen for whom would not be known at the commit."""
    window = WindowTerms(fragment=0, window=4, round=1, tau=2, mix=0.5, codec_up="q4", codec_down="q4")
    own = spec.terms.replace(codec_up_of=((A, "q8"),))
    revision = Revision(number=1, terms=own, windows=(4, 4), round=2)
    theirs = dataclasses.replace(window, codec_up_of=((A, "q8"),))
    assert rounds_since(ledger, [], [revision], [theirs]) == rounds_since(ledger, [], (), [window]) == ()
    for revisions, told in (([revision], window), ([], theirs)):
        with pytest.raises(Unknown, match="window 4 of fragment 0"):
            rounds_since(ledger, [], revisions, [told])


def test_rounds_without_end_are_not_looked_for(ledger: Ledger, spec: RunSpec) -> None:
    endless = Revision(number=1, terms=spec.terms.replace(steps=1 << 59), windows=(4, 4), round=2)
    window = WindowTerms(fragment=0, window=4, round=1 << 50, tau=2, mix=0.5, codec_up="q4", codec_down="q4")
    with pytest.raises(Unknown, match="this state is at round 1"):
        rounds_since(ledger, [], [endless], [window])
