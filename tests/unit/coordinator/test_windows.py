"""One window: whom it waits for, when and why it closes, and what its commit says (protocol D, E, H)."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo import schedule
from farloop.algo.methods import METHODS, Method
from farloop.algo.outer_settings import settings_of
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec, WindowTerms
from farloop.algo.terms import LearningRate
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.windows import Window
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


def test_a_refused_delta_is_no_part_of_it_and_its_node_is_not_awaited() -> None:
    good, bad = offer(A), offer(B)
    judged = window(A, B, came=(good, bad))
    judged.refuse(rec.Refusal(blob=bad.blob, reason=Reason.OUTLIER, detail="too long"))
    assert judged.ordered() == [good]
    assert [share.node for share in judged.shares()] == [A]
    assert (judged.missing, judged.removed) == (set(), {B: Reason.OUTLIER})


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
    assert settings == [(spec.terms.outer.lr, spec.terms.outer.momentum), (1.0, 0.0)]
    assert spec.terms.outer.momentum > 0


def test_what_corrects_a_step_for_its_work_is_settled_with_the_window(spec: RunSpec) -> None:
    """P: a replay has the numbers, and does not ask for the learning rate again."""
    lr = LearningRate(peak=1e-2, minimum=1e-4, warmup_steps=0)
    terms = spec.terms.replace(lr=lr, h_rule="qsr", h_alpha=0.03)
    rounds = {plan.index: plan for plan in schedule.first_rounds(terms, 40)}
    assert rounds[2].length > 10 == rounds[0].length
    window_terms = dataclasses.replace(schedule.first_windows(terms, spec.identity.layout)[1], round=2)
    opened = Window(terms=window_terms, expected={A})
    opened.inputs[offer(A, window=1).blob] = offer(A, window=1)
    draft = opened.draft(dataclasses.replace(spec, terms=terms), rounds, "")
    settings = settings_of(terms, spec.identity.layout, window_terms, rounds)
    assert (draft.outer_lr, draft.outer_momentum, draft.delta_scale) == (
        settings.lr,
        settings.momentum,
        settings.delta_scale,
    )
    assert draft.delta_scale not in (0.0, 1.0)


def drafted(
    spec: RunSpec, method: Method, monkeypatch: pytest.MonkeyPatch, *, final: bool = False
) -> rec.WindowCommitted:
    """The draft of a window with a delta of 10 steps and one of 5, where `method` is what the run has."""
    monkeypatch.setitem(METHODS, spec.terms.method, method)
    rounds = {plan.index: plan for plan in schedule.first_rounds(spec.terms, 4)}
    first = schedule.first_windows(spec.terms, spec.identity.layout)[0]
    opened = Window(terms=dataclasses.replace(first, final=final), expected={A, B})
    for node, steps, norm_sq in ((A, 10, 9.0), (B, 5, 4.0)):
        arrived = offer(node, window=1)
        contribution = dataclasses.replace(arrived.contributors[0], steps=steps, norm_sq=norm_sq)
        opened.inputs[arrived.blob] = dataclasses.replace(arrived, contributors=(contribution,))
    return opened.draft(spec, rounds, "")


def test_contributions_weigh_as_the_method_says(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = METHODS[spec.terms.method]
    by_tokens = drafted(spec, dataclasses.replace(streaming, weights="tokens"), monkeypatch)
    assert [share.weight for share in by_tokens.merged] == [0.5, 0.5]
    by_quality = drafted(spec, dataclasses.replace(streaming, weights="quality"), monkeypatch)
    assert [share.weight for share in by_quality.merged] == [1 / 3, 2 / 3]
    assert [addend.weight for addend in by_quality.blobs] == [1 / 3, 2 / 3]


def test_how_far_the_nodes_came_is_recorded_where_the_optimizer_asks(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P: a replay has the numbers, not the nodes that told them. The second would have come to 4 in 10 steps."""
    streaming = METHODS[spec.terms.method]
    assert drafted(spec, streaming, monkeypatch).reach == 0.0
    co2 = dataclasses.replace(streaming, outer="co2")
    assert drafted(spec, co2, monkeypatch).reach == 4.0
    assert [drafted(spec, co2, monkeypatch, final=final).flush for final in (False, True)] == [False, True]


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


def patient(*came: Offer, alone: bool = False, max_staleness: int = 2) -> Window:
    """Window 4, which takes deltas for windows 2 to 4 of nodes a, b and c."""
    opened = window(A, B, C, came=came)
    opened.max_staleness, opened.alone = max_staleness, alone
    return opened


def idle(arrived: Offer) -> Offer:
    """The same delta without a step in it."""
    contributors = tuple(dataclasses.replace(c, steps=0, tokens=0) for c in arrived.contributors)
    return dataclasses.replace(arrived, contributors=contributors)


def test_a_window_admits_deltas_that_are_late_by_as_much_as_the_terms_allow() -> None:
    """D."""
    assert [number for number in range(1, 7) if patient().admits(offer(A, window=number))] == [2, 3, 4]
    assert [number for number in range(1, 7) if window().admits(offer(A, window=number))] == [4]


def test_while_it_closes_it_is_too_late_for_what_the_next_one_would_not_take() -> None:
    """D, E: the last window has no next one."""
    closing = patient()
    assert not any(closing.is_too_late_for(offer(A, window=number)) for number in (2, 3, 4))
    closing.state = "closing"
    assert [closing.is_too_late_for(offer(A, window=number)) for number in (2, 3, 4)] == [True, False, False]
    closing.terms = dataclasses.replace(TERMS, final=True)
    assert closing.is_too_late_for(offer(A, window=4))
    plain = window(A)
    plain.state = "closing"
    assert plain.is_too_late_for(offer(A)), "nothing late is taken at all"


@pytest.mark.parametrize("alone", [False, True])
def test_what_counts_for_a_quorum(alone: bool) -> None:
    """F: a late delta rides along, unless every one is a step of its own; one without a step closes nothing."""
    late, timely = offer(A, window=3), offer(B)
    assert patient(late, alone=alone).toward_quorum == (1 if alone else 0)
    assert patient(late, timely, alone=alone).why_close(1, 1) == "quorum of 1 reached, without c"
    assert patient(idle(timely), alone=alone).why_close(1, 1) is None
    assert patient(late, timely, offer(C), alone=alone).why_close(3, 1) == "all 3 expected came"
    assert window(A, B, came=(idle(timely),)).why_close(1, 1) == "quorum of 1 reached, without a"


@pytest.mark.parametrize("alone", [False, True])
def test_without_staleness_a_delta_without_a_step_makes_no_quorum_where_nodes_go_on(alone: bool) -> None:
    """F: a node that stands still would send one after the other, and nobody else's would ever be in time."""
    opened = window(A, B, came=(idle(offer(B)),))
    opened.alone, opened.needs_steps = alone, True
    assert opened.toward_quorum == 0 and opened.why_close(1, 1) is None
    opened.inputs[offer(A).blob] = offer(A)
    assert opened.toward_quorum == 1


def test_patience_holds_a_quorum_and_not_a_window_that_has_all() -> None:
    """F."""
    assert patient(offer(A)).why_close(1, 1, patient=True) is None
    everybody = patient(offer(A), offer(B), offer(C))
    assert everybody.why_close(1, 1, patient=True) == "all 3 expected came"


def test_only_who_was_removed_is_told_as_dropped_where_late_deltas_are_taken() -> None:
    """E."""
    opened = patient(offer(A))
    opened.removed = {B: Reason.CLOSED}
    assert opened.drops() == (Drop(node=B, reason=Reason.CLOSED),)
    opened.inputs[offer(B).blob] = offer(B)
    assert opened.drops() == ()


def begun(*held: Offer, alone: bool, quorum: int | None = 1, final: bool = False) -> list[NodeId]:
    """Whose deltas a window begins with."""
    opened = Window(terms=dataclasses.replace(TERMS, final=final), max_staleness=2, alone=alone)
    elsewhere = dataclasses.replace(offer(A).blob, fragment=1)
    opened.begin_with({elsewhere: offer(A), **{arrived.blob: arrived for arrived in held}}, quorum)
    return [blob.node for blob in opened.inputs]


def test_a_window_begins_with_what_came_meanwhile() -> None:
    """D: all of it, or, where every delta is a step of its own, a quorum of it in the order it came."""
    held = offer(B, window=3), offer(A), offer(C)
    assert begun(*held, alone=False) == [B, A, C]
    assert begun(*held, alone=True) == [B]
    assert begun(*held, alone=True, quorum=2) == [B, A]
    assert begun(*held, alone=True, quorum=None) == [B, A, C]


def test_some_do_not_wait_for_their_turn() -> None:
    """D: those without a step, those that no later window would take, and all in the run's last window."""
    held = offer(B, window=3), idle(offer(A)), offer(C)
    assert begun(*held, alone=True) == [B, A]
    assert begun(offer(B, window=3), offer(A, window=2), offer(C), alone=True) == [B, A]
    assert begun(*held, alone=True, final=True) == [B, A, C]


def test_the_last_step_is_the_mean_of_what_the_nodes_hold() -> None:
    """A: where one of them comes later than the others, it does not make the model its own."""
    came = offer(A, tokens=300), idle(offer(B))
    last = patient(*came)
    assert [share.weight for share in last.shares()] == [1.0, 0.0]
    last.terms = dataclasses.replace(TERMS, final=True)
    assert [share.weight for share in last.shares()] == [0.5, 0.5]
    assert [share.weight for share in last.shares("quality")] == [0.5, 0.5]
    last.inputs = {arrived.blob: arrived for arrived in (offer(A, tokens=300), offer(B))}
    assert [share.weight for share in last.shares()] == [0.75, 0.25]


def test_the_last_window_is_followed_by_another_where_a_flush_is_still_to_come(spec: RunSpec) -> None:
    """A: who is part of it by a late delta has worked since."""
    rounds = {plan.index: plan for plan in schedule.first_rounds(spec.terms, 4)}
    last = patient(offer(A), offer(B, window=3))
    last.terms = dataclasses.replace(TERMS, final=True, round=3)
    assert last.draft(spec, rounds, "").next_window == dataclasses.replace(last.terms, window=5)
    last.inputs = {arrived.blob: arrived for arrived in (offer(A), offer(B))}
    assert last.draft(spec, rounds, "").next_window is None


def test_a_window_stays_in_its_round_until_all_that_are_expected_have_served_it(spec: RunSpec) -> None:
    rounds = {plan.index: plan for plan in schedule.first_rounds(spec.terms, 4)}
    opened = patient(offer(A), alone=True)
    opened.terms = schedule.first_windows(spec.terms, spec.identity.layout)[1]

    def following(*served: NodeId) -> int:
        after = opened.draft(spec, rounds, "", served).next_window
        assert after is not None and after.window == 2
        return after.round

    assert [following(), following(B), following(B, C)] == [0, 0, 1]
    opened.removed = {C: Reason.SILENT}
    assert following(B) == 1
    opened.removed, opened.alone = {}, False
    assert following() == 1


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
