"""One window: which nodes it waits for, when and why it closes, and what its commit says (protocol D, E, H)."""

import dataclasses
from typing import Any

import pytest
from coordinator_run import A, B, C
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo import schedule
from farloop.algo.methods import METHODS, Method
from farloop.algo.outer_settings import settings_of
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import LearningRate
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.windows import Window
from farloop.wire.messages import Drop, Offer, Share
from farloop.wire.reasons import Reason

NODES = (A, B, C)
TERMS = WindowTerms(fragment=0, window=4, round=4, tau=2, mix=0.5, codec_up="q4", codec_down="q4")


def offer(nodes: str, window: int = 4, *, tokens: int = 100, steps: int = 10, norm_sq: float = 1.0) -> Offer:
    """A delta that holds the work of these nodes."""
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=window - 1, node=NodeId(nodes[0]), incarnation=1, seq=1)
    shares = tuple(
        Contribution(
            node=NodeId(node), incarnation=1, base=window - 1, steps=steps, tokens=tokens if steps else 0,
            norm_sq=norm_sq,
        )
        for node in nodes
    )  # fmt: skip
    return Offer(blob=blob, size=10, digest=1, window=window, contributors=shares)


def late(nodes: str) -> Offer:
    return offer(nodes, 3)


def idle(nodes: str) -> Offer:
    """Without a step in it."""
    return offer(nodes, steps=0)


def window(expected: str, *came: Offer, removed: dict[NodeId, Reason] | None = None, **changes: Any) -> Window:
    """Window 4, with these deltas."""
    return Window(
        **{
            "terms": TERMS,
            "expected": set(map(NodeId, expected)),
            "removed": removed or {},
            "inputs": {arrived.blob: arrived for arrived in came},
            **changes,
        }
    )


def patient(*came: Offer, **changes: Any) -> Window:
    """It takes deltas for windows 2 to 4 of nodes a, b and c."""
    return window("abc", *came, **{"max_staleness": 2, **changes})


def rounds_of(spec: RunSpec, count: int = 4) -> dict[int, RoundPlan]:
    return {plan.index: plan for plan in schedule.first_rounds(spec.terms, count)}


GONE = {B: Reason.SILENT}


@pytest.mark.parametrize(
    ("opened", "quorum", "floor", "why"),
    [
        (window("ab", offer("b")), None, 1, None),
        (window("ab", offer("b"), offer("a")), None, 1, "all 2 expected came"),
        (window("ab", offer("a"), removed=GONE), None, 1, "all 1 expected came, 1 removed"),
        (window("b", offer("b"), removed=GONE), None, 1, "all 1 expected came"),
        (window("a", offer("c")), None, 1, None),
        (window("", offer("c")), None, 1, "all 1 expected came"),  # a node that was not expected counts as well
        (window("abc", offer("b"), offer("c")), 3, 1, None),
        (window("abc", offer("b"), offer("c")), 2, 1, "quorum of 2 reached, without a"),
        (window("abc", offer("b")), 1, 1, "quorum of 1 reached, without a, c"),
        (window("ab", offer("a"), removed=GONE), None, 2, None),
        (window("ab", offer("a")), 1, 2, None),
        (window(""), None, 0, None),
        (window("b", removed=GONE), 0, 0, None),
        (window("a", offer("a"), state="closing"), None, 1, None),
        # F: a late delta rides along, unless every one is a step of its own; one without a step closes nothing
        (patient(late("a"), offer("b")), 1, 1, "quorum of 1 reached, without c"),
        (patient(late("a"), offer("b"), alone=True), 1, 1, "quorum of 1 reached, without c"),
        (patient(late("a")), 1, 1, None),
        (patient(late("a"), alone=True), 1, 1, "quorum of 1 reached, without b, c"),
        (patient(idle("b")), 1, 1, None),
        (patient(idle("b"), alone=True), 1, 1, None),
        (patient(late("a"), offer("b"), offer("c")), 3, 1, "all 3 expected came"),
        (window("ab", idle("b")), 1, 1, "quorum of 1 reached, without a"),
        # a node that stands still would send one after the other, and no other node's would ever be in time
        (window("ab", idle("b"), needs_steps=True), 1, 1, None),
        (window("ab", idle("b"), needs_steps=True, alone=True), 1, 1, None),
    ],
)
def test_when_and_why_a_window_closes(opened: Window, quorum: int | None, floor: int, why: str | None) -> None:
    assert opened.why_close(quorum, floor) == why


def test_patience_holds_a_quorum_and_not_a_window_that_has_all() -> None:
    """F."""
    assert patient(offer("a")).why_close(1, 1, patient=True) is None
    everybody = patient(offer("a"), offer("b"), offer("c"))
    assert everybody.why_close(1, 1, patient=True) == "all 3 expected came"


def test_a_refused_delta_is_no_part_of_it_and_its_node_is_not_awaited() -> None:
    good, bad = offer("a"), offer("b")
    judged = window("ab", good, bad)
    judged.refuse(rec.Refusal(blob=bad.blob, reason=Reason.OUTLIER, detail="too long"))
    assert judged.ordered() == [good] and [share.node for share in judged.shares()] == [A]
    assert (judged.missing, judged.removed) == (set(), {B: Reason.OUTLIER})


def test_a_relayed_blob_counts_for_all_its_contributors() -> None:
    """Windows, weights and reasons work on contributor sets (protocol H)."""
    relayed = window("abc", offer("bc", tokens=100), offer("a", tokens=200))
    assert relayed.contributors == {A, B, C} and not relayed.missing
    assert relayed.shares() == (Share(node=A, weight=0.5), Share(node=B, weight=0.5))


@given(order=st.permutations("abc"), tokens=st.tuples(*[st.integers(0, 1 << 40)] * 3))
def test_the_order_of_arrival_never_shows(spec: RunSpec, order: list[str], tokens: tuple[int, int, int]) -> None:
    """B19: the sum runs over the smallest node ids, in their order."""
    offers = {node: offer(node, tokens=count) for node, count in zip("abc", tokens, strict=True)}
    terms = dataclasses.replace(TERMS, round=2)
    drafts = [
        window("abc", *(offers[node] for node in nodes), terms=terms).draft(spec, rounds_of(spec, 6), "why")
        for nodes in ("abc", order)
    ]
    assert drafts[0] == drafts[1] and [addend.blob.node for addend in drafts[0].blobs] == [A, B, C]


names = st.sets(st.sampled_from("abc"))


@given(expected=names, came=names, gone=names, quorum=st.none() | st.integers(1, 3), floor=st.integers(1, 3))
def test_a_window_closes_when_its_terms_say_so_and_every_node_has_one_fate(
    expected: set[str], came: set[str], gone: set[str], quorum: int | None, floor: int
) -> None:
    removed = {NodeId(node): Reason.SILENT for node in gone & expected}
    opened = window("".join(expected), *(offer(node) for node in sorted(came)), removed=removed)
    opened.check()
    complete = expected - gone <= came or (quorum is not None and len(came) >= quorum)
    assert (opened.why_close(quorum, floor) is not None) == (complete and len(came) >= floor and bool(came))
    if came:
        merged = [share.node for share in opened.shares()]
        dropped = [drop.node for drop in opened.drops()]
        assert sorted(merged + dropped) == sorted(expected | came)
        assert sum(share.weight for share in opened.shares()) == pytest.approx(1.0)


# --- what its commit says


def first_window(spec: RunSpec, fragment: int, *came: Offer, final: bool = False, **changes: Any) -> Window:
    """Window 1 of the fragment, which expects a and b."""
    terms = dataclasses.replace(schedule.first_windows(spec.terms, spec.identity.layout)[fragment], final=final)
    return window("ab", *came, **{"terms": terms, **changes})


def test_the_draft_says_all_that_was_decided(spec: RunSpec) -> None:
    """B, O: the terms of the next window travel with the commit; what the arithmetic finds out is still missing."""
    arrived = offer("a", 1)
    opened = first_window(spec, 1, arrived)
    assert opened.draft(spec, rounds_of(spec), "quorum of 1 reached, without b") == rec.WindowCommitted(
        fragment=1, version=1, round=0, merged=(Share(node=A, weight=1.0),), drops=(Drop(node=B, reason=Reason.LATE),),
        blobs=(rec.Addend(blob=arrived.blob, weight=1.0),), anchor_digest=0, target_digest=0, momentum_digest=None,
        next_window=dataclasses.replace(opened.terms, window=2, round=1), update_size=0, update_digest=0,
        outer_lr=0.6, outer_momentum=0.9, why="quorum of 1 reached, without b",
    )  # fmt: skip


def test_a_flush_is_averaged_without_momentum_for_no_round_is_left_in_which_it_would_pay_off(spec: RunSpec) -> None:
    drafts = [
        first_window(spec, 0, offer("a", 1), final=final).draft(spec, rounds_of(spec), "") for final in (False, True)
    ]
    assert [(draft.outer_lr, draft.outer_momentum) for draft in drafts] == [(0.6, 0.9), (1.0, 0.0)]


def test_what_corrects_a_step_for_its_work_is_settled_with_the_window(spec: RunSpec) -> None:
    """P: a replay has the numbers, and does not ask for the learning rate again."""
    lr = LearningRate(peak=1e-2, minimum=1e-4, warmup_steps=0)
    terms = spec.terms.replace(lr=lr, h_rule="qsr", h_alpha=0.03)
    grown = dataclasses.replace(spec, terms=terms)
    rounds = rounds_of(grown, 40)
    assert rounds[2].length > 10 == rounds[0].length
    opened = first_window(grown, 1, offer("a", 1))
    opened.terms = dataclasses.replace(opened.terms, round=2)
    draft = opened.draft(grown, rounds, "")
    outer = settings_of(terms, spec.identity.layout, opened.terms, rounds)
    assert (draft.outer_lr, draft.outer_momentum, draft.delta_scale) == (outer.lr, outer.momentum, outer.delta_scale)
    assert draft.delta_scale not in (0.0, 1.0)


@pytest.mark.parametrize(
    ("method", "final", "weights", "reach"),
    [
        ({"weights": "tokens"}, False, [0.5, 0.5], 0.0),
        ({"weights": "quality"}, False, [1 / 3, 2 / 3], 0.0),
        ({"outer": "co2"}, False, [0.5, 0.5], 4.0),  # the second would have come to 4 in 10 steps
        ({"outer": "co2"}, True, [0.5, 0.5], 0.0),
    ],
)
def test_contributions_weigh_as_the_method_says_and_their_reach_is_recorded_where_the_optimizer_asks(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], final: bool, weights: Any, reach: float
) -> None:
    """P: a replay has the numbers, not the nodes that told them."""
    own: Method = dataclasses.replace(METHODS[spec.terms.method], **method)
    monkeypatch.setitem(METHODS, spec.terms.method, own)
    came = (offer("a", 1, norm_sq=9.0), offer("b", 1, steps=5, norm_sq=4.0))
    draft = first_window(spec, 0, *came, final=final).draft(spec, rounds_of(spec), "")
    assert [share.weight for share in draft.merged] == [addend.weight for addend in draft.blobs] == weights
    assert (draft.reach, draft.flush) == (reach, final)


def test_the_last_step_is_the_mean_of_what_the_nodes_hold() -> None:
    """A: where one of them comes later than the others, it does not make the model its own."""
    came, final = (offer("a", tokens=300), idle("b")), dataclasses.replace(TERMS, final=True)
    assert [share.weight for share in patient(*came).shares()] == [1.0, 0.0]
    for rule in ("tokens", "quality"):
        assert [share.weight for share in patient(*came, terms=final).shares(rule)] == [0.5, 0.5]
    worked = patient(offer("a", tokens=300), offer("b"), terms=final)
    assert [share.weight for share in worked.shares()] == [0.75, 0.25]


def test_the_last_window_is_followed_by_another_where_a_flush_is_still_to_come(spec: RunSpec) -> None:
    """A: who is part of it by a late delta has worked since."""
    final = dataclasses.replace(TERMS, final=True, round=3)
    for of_b, following in ((late("b"), dataclasses.replace(final, window=5)), (offer("b"), None)):
        last = patient(offer("a"), of_b, terms=final)
        assert last.draft(spec, rounds_of(spec), "").next_window == following


@pytest.mark.parametrize(
    ("served", "removed", "alone", "round_index"),
    [
        ("", {}, True, 0), ("b", {}, True, 0), ("bc", {}, True, 1), ("b", {C: Reason.SILENT}, True, 1),
        ("", {}, False, 1),
    ],
)  # fmt: skip
def test_a_window_stays_in_its_round_until_all_that_are_expected_have_served_it(
    spec: RunSpec, served: str, removed: dict[NodeId, Reason], alone: bool, round_index: int
) -> None:
    opened = patient(offer("a"), alone=alone, removed=removed, terms=first_window(spec, 1).terms)
    after = opened.draft(spec, rounds_of(spec), "", list(map(NodeId, served))).next_window
    assert after is not None and (after.window, after.round) == (2, round_index)


# --- late deltas


def test_a_window_admits_deltas_that_are_late_by_as_much_as_the_terms_allow() -> None:
    """D, E: and, while it closes, only those that the next one would take; the last window has no next one."""
    numbers = range(1, 7)
    assert [number for number in numbers if patient().admits(offer("a", number))] == [2, 3, 4]
    assert [number for number in numbers if window("").admits(offer("a", number))] == [4]
    closing = {"state": "closing"}
    final = {**closing, "terms": dataclasses.replace(TERMS, final=True)}
    for opened, too_late in (
        (patient(), []), (patient(**closing), [2]), (patient(**final), [2, 3, 4]), (window("a", **closing), [2, 3, 4]),
    ):  # fmt: skip
        assert [number for number in (2, 3, 4) if opened.is_too_late_for(offer("a", number))] == too_late


@pytest.mark.parametrize(
    ("held", "alone", "quorum", "final", "begins"),
    [
        ((late("b"), offer("a"), offer("c")), False, 1, False, "bac"),
        # every delta is a step of its own: a quorum of them, in the order they came
        ((late("b"), offer("a"), offer("c")), True, 1, False, "b"),
        ((late("b"), offer("a"), offer("c")), True, 2, False, "ba"),
        ((late("b"), offer("a"), offer("c")), True, None, False, "bac"),
        # those without a step, those that no later window would take, and all in the last window do not wait their turn
        ((late("b"), idle("a"), offer("c")), True, 1, False, "ba"),
        ((late("b"), offer("a", 2), offer("c")), True, 1, False, "ba"),
        ((late("b"), idle("a"), offer("c")), True, 1, True, "bac"),
    ],
)
def test_a_window_begins_with_what_came_meanwhile(
    held: tuple[Offer, ...], alone: bool, quorum: int | None, final: bool, begins: str
) -> None:
    """D."""
    opened = patient(alone=alone, terms=dataclasses.replace(TERMS, final=final))
    elsewhere = dataclasses.replace(offer("a").blob, fragment=1)
    opened.begin_with({elsewhere: offer("a"), **{arrived.blob: arrived for arrived in held}}, quorum)
    assert [blob.node for blob in opened.inputs] == list(begins)


@pytest.mark.parametrize(
    "odd",
    [window("a", offer("a"), removed=GONE), window("ab", offer("ab"), offer("b")), window("a", offer("a", 5))],
    ids=["removed and not expected", "two deltas of one node", "a delta of another window"],
)
def test_what_must_not_be_is_noticed(odd: Window) -> None:
    with pytest.raises(AssertionError):
        odd.check()
