"""Who and what is let in, and the sentence for those who are not (protocol E, H, S, U, Z)."""

import dataclasses
from typing import Any

import pytest

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec
from farloop.coordinator import records as rec
from farloop.coordinator.admission import delta_refusal, refusal
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.roster import Member
from farloop.coordinator.windows import Window
from farloop.wire.messages import PROTOCOL_VERSIONS, AnchorRef, Hello, Offer
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
OLDEST, NEWEST = PROTOCOL_VERSIONS


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Epoch 3, nothing committed."""
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=3))


def hello(**changes: Any) -> Hello:
    plain = Hello(
        protocol_min=OLDEST,
        protocol_max=NEWEST,
        node=A,
        incarnation=2,
        fingerprint=None,
        layout=None,
        epoch_seen=3,
        anchors=(),
        round=None,
    )
    return dataclasses.replace(plain, **changes)


def test_a_node_that_leaves_open_what_it_may_is_let_in(ledger: Ledger) -> None:
    assert refusal(hello(), A, ledger, None) is None


def test_a_node_that_agrees_in_everything_is_let_in(ledger: Ledger) -> None:
    identity = ledger.spec.identity
    agreeing = hello(
        fingerprint=identity.fingerprint(),
        layout=identity.layout.digest(),
        anchors=(AnchorRef(fragment=0, version=0, digest=5), AnchorRef(fragment=1, version=0, digest=5)),
        round=0,
    )
    assert refusal(agreeing, A, ledger, Member(name=A, incarnation=2)) is None


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"protocol_min": NEWEST + 1, "protocol_max": NEWEST + 3}, Reason.PROTOCOL_VERSION, "speaks 2 to 4"),
        ({"protocol_min": 0, "protocol_max": OLDEST - 1}, Reason.PROTOCOL_VERSION, "speaks 0 to 0"),
        ({"fingerprint": "0123456789abcdef"}, Reason.WRONG_RUN, "wants run 0123456789abcdef"),
        ({"layout": "0123456789abcdef"}, Reason.WRONG_LAYOUT, "layout is 0123456789abcdef"),
        ({"epoch_seen": 4}, Reason.FENCED, "has seen epoch 4, this is 3"),
        ({"anchors": (AnchorRef(fragment=2, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment 2"),
        ({"anchors": (AnchorRef(fragment=-1, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment -1"),
        (
            {"anchors": (AnchorRef(fragment=1, version=1, digest=0),)},
            Reason.FENCED,
            "holds version 1 of fragment 1, the coordinator only 0",
        ),
        ({"incarnation": 1}, Reason.OLD_INCARNATION, "incarnation 2 of a has joined, this is 1"),
    ],
)
def test_a_refusal_names_the_two_values_that_disagree(
    ledger: Ledger, changes: dict[str, Any], reason: Reason, detail: str
) -> None:
    """S: a node that has seen a newer epoch, or a newer version, proves that this state is old."""
    refused = refusal(hello(**changes), A, ledger, Member(name=A, incarnation=2))
    assert refused is not None
    assert (refused.reason, refused.retriable) == (reason, False)
    assert detail in refused.detail


def test_versions_of_the_protocol_that_overlap_are_enough(ledger: Ledger) -> None:
    """Z: versions N and N − 1 interoperate."""
    assert refusal(hello(protocol_min=OLDEST - 1, protocol_max=OLDEST), A, ledger, None) is None
    assert refusal(hello(protocol_min=NEWEST, protocol_max=NEWEST + 5), A, ledger, None) is None


@pytest.mark.parametrize("incarnation", [2, 3])
def test_the_same_and_a_newer_incarnation_are_let_in(ledger: Ledger, incarnation: int) -> None:
    assert refusal(hello(incarnation=incarnation), A, ledger, Member(name=A, incarnation=2)) is None


def offer(**changes: Any) -> Offer:
    blob = BlobId(kind=BlobKind.DELTA, fragment=1, version=0, node=A, incarnation=2, seq=1)
    contribution = Contribution(node=A, incarnation=2, base=0, steps=10, tokens=10, norm_sq=1.0)
    plain = Offer(blob=blob, size=100, digest=1, window=1, contributors=(contribution,))
    parts = {name: value for name, value in changes.items() if name in ("window", "contributors")}
    rest = {name: value for name, value in changes.items() if name not in parts}
    return dataclasses.replace(plain, blob=dataclasses.replace(blob, **rest), **parts)


def training() -> Member:
    return Member(name=A, incarnation=2, stage="training", start_round=0)


def opened(ledger: Ledger) -> Window:
    return Window(terms=ledger.windows[1], expected={A, B})


def test_a_delta_for_the_open_window_may_come(ledger: Ledger) -> None:
    assert delta_refusal(offer(), training(), ledger, opened(ledger)) is None


CONTRIBUTION = Contribution(node=A, incarnation=2, base=0, steps=10, tokens=10, norm_sq=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": BlobKind.UPDATE},
        {"fragment": 2},
        {"fragment": -1},
        {"node": B},
        {"incarnation": 1},
        {"contributors": ()},
        {"contributors": (dataclasses.replace(CONTRIBUTION, node=B),)},
        {"contributors": (dataclasses.replace(CONTRIBUTION, incarnation=3),)},
        {"contributors": (dataclasses.replace(CONTRIBUTION, base=1),)},
        {"contributors": (CONTRIBUTION, CONTRIBUTION)},
    ],
)
def test_an_offer_that_does_not_fit_its_sender_is_refused(ledger: Ledger, changes: dict[str, Any]) -> None:
    """U: a node speaks for itself alone, whatever its frames claim."""
    window = opened(ledger)
    assert delta_refusal(offer(**changes), training(), ledger, window) == (
        Reason.CORRUPT,
        "the offer does not fit its sender",
    )


def test_a_delta_for_another_window_or_base_is_refused_by_the_ledger(ledger: Ledger) -> None:
    for changes, reason in (({"window": 0}, Reason.LATE), ({"window": 2}, Reason.UNKNOWN_WINDOW)):
        assert delta_refusal(offer(**changes), training(), ledger, opened(ledger)) == (reason, reason.sentence)


@pytest.mark.parametrize("stage", ["joining", "ready", "left"])
def test_who_does_not_train_contributes_nothing(ledger: Ledger, stage: Any) -> None:
    """I: a joiner never dilutes a mean."""
    member = Member(name=A, incarnation=2, stage=stage)
    refused = delta_refusal(offer(), member, ledger, opened(ledger))
    assert refused == (Reason.NOT_A_PARTICIPANT, Reason.NOT_A_PARTICIPANT.sentence)


def test_a_window_that_is_closing_is_closed(ledger: Ledger) -> None:
    window = opened(ledger)
    window.state = "closing"
    assert delta_refusal(offer(), training(), ledger, window) == (Reason.LATE, Reason.LATE.sentence)


def test_a_second_delta_of_a_node_overlaps_the_first(ledger: Ledger) -> None:
    """H: one that intersects an accepted set is refused whole."""
    window, first = opened(ledger), offer(seq=5)
    window.inputs[first.blob] = first
    assert delta_refusal(offer(), training(), ledger, window) == (Reason.OVERLAP, Reason.OVERLAP.sentence)
