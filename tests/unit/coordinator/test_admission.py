"""Who and what is let in, and the sentence for those who are not (protocol E, H, S, U, Z)."""

import dataclasses
import math
from typing import Any

import pytest
from plain_runs import plain_progress

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RoundPlan, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.admission import delta_refusal, progress_untrue, refusal, steps_at_most
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.decide.windows import Window
from farloop.wire.messages import PROTOCOL_VERSIONS, AnchorRef, BytesByKind, Committed, Hello, Offer
from farloop.wire.reasons import Reason

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
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
        ({"protocol_min": NEWEST + 1, "protocol_max": NEWEST + 3}, Reason.PROTOCOL_VERSION, "speaks 5 to 7"),
        ({"protocol_min": 0, "protocol_max": OLDEST - 1}, Reason.PROTOCOL_VERSION, "speaks 0 to 0"),
        ({"fingerprint": "0123456789abcdef"}, Reason.WRONG_RUN, "wants run 0123456789abcdef"),
        ({"layout": "0123456789abcdef"}, Reason.WRONG_LAYOUT, "layout is 0123456789abcdef"),
        ({"anchors": (AnchorRef(fragment=2, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment 2"),
        ({"anchors": (AnchorRef(fragment=-1, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment -1"),
        ({"announced": (AnchorRef(fragment=2, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment 2"),
        ({"incarnation": 1}, Reason.OLD_INCARNATION, "incarnation 2 of a has joined, this is 1"),
    ],
)
def test_a_refusal_names_the_two_values_that_disagree(
    ledger: Ledger, changes: dict[str, Any], reason: Reason, detail: str
) -> None:
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


# --- what is claimed


@pytest.mark.parametrize(
    ("claim", "untrue"),
    [
        ({"steps": -1, "tokens": -1}, "-1 inner steps"),
        ({"steps": 31}, "31 inner steps, and there were at most 30 since its base"),
        ({"steps": 0}, "10 tokens in 0 inner steps"),
        ({"tokens": -1}, "-1 tokens in 10 inner steps"),
        ({"tokens": (10 << 32) + 1}, "tokens in 10 inner steps"),
        ({"norm_sq": -1.0}, "a squared norm of -1"),
        ({"norm_sq": math.nan}, "a squared norm of nan"),
        ({"norm_sq": math.inf}, "a squared norm of inf"),
        ({"norm_sq": 1e90}, "a squared norm of 1e+90"),
    ],
)
def test_a_delta_says_nothing_that_cannot_be_true(ledger: Ledger, claim: dict[str, Any], untrue: str) -> None:
    """H: by it deltas are weighed, and outer steps are damped."""
    share = dataclasses.replace(CONTRIBUTION, **claim)
    refused = delta_refusal(offer(contributors=(share,)), training(), ledger, opened(ledger))
    assert refused is not None
    assert refused[0] is Reason.IMPLAUSIBLE and untrue in refused[1]


def test_where_samples_are_granted_a_step_has_the_tokens_of_the_batch_at_most(spec: RunSpec) -> None:
    """Fewer where sequences are padded."""
    identity = dataclasses.replace(spec.identity, num_samples=1000)
    ledger = Ledger.begin(rec.RunStarted(spec=dataclasses.replace(spec, identity=identity), epoch=3))
    for tokens, reason in ((640, None), (639, None), (0, None), (641, Reason.IMPLAUSIBLE), (6400, Reason.IMPLAUSIBLE)):
        share = dataclasses.replace(CONTRIBUTION, tokens=tokens)
        refused = delta_refusal(offer(contributors=(share,)), training(), ledger, opened(ledger))
        assert (refused and refused[0]) is reason


def test_a_delta_holds_no_more_steps_than_the_rounds_since_its_base_and_one_that_was_begun(spec: RunSpec) -> None:
    """A: rounds 0 to 5 of ten steps are fixed; c does six of them from round 2 on."""
    ledger = lasting(spec, rounds_of_versions=(1, 2, 3))
    assert [steps_at_most(ledger, 1, base, A) for base in (0, 1, 2, 3)] == [70, 70, 60, 50]
    assert steps_at_most(ledger, 1, 2, C) == 10 + 4 * 6 + 10


def test_a_delta_may_hold_more_where_updates_are_not_waited_for(spec: RunSpec) -> None:
    """F: a node may be rounds ahead of what it knows to be merged."""
    ledger = lasting(spec, rounds_of_versions=(1, 2, 3), on_late_update="continue", max_stale_rounds=2)
    assert [steps_at_most(ledger, 1, base, A) for base in (0, 1, 2, 3)] == [70, 70, 70, 60]


def test_a_delta_may_hold_all_that_was_done_where_nothing_is_ever_mixed_in(spec: RunSpec) -> None:
    """H: with a = 1 the work counts from the last send."""
    assert steps_at_most(lasting(spec, rounds_of_versions=(1, 2, 3), mix=1.0), 1, 3, A) == 70


def lasting(spec: RunSpec, rounds_of_versions: tuple[int, ...], **terms: Any) -> Ledger:
    """A ledger whose fragment 1 was committed by windows of these rounds."""
    terms = {"steps": 1000, **terms}
    spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
    ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=3))
    slow = ((C, 6),)
    ledger.rounds = {
        i: RoundPlan(index=i, start=10 * i, length=10, node_steps=slow if i >= 2 else ()) for i in range(6)
    }
    for version, round_index in enumerate(rounds_of_versions, 1):
        window = dataclasses.replace(ledger.windows[1], window=version, round=round_index)
        ledger.commits[1, version - 1] = Committed(
            fragment=1, version=version - 1, size=0, digest=0, anchor_digest=0, merged=(), drops=(), rounds=(),
            next_window=window,
        )  # fmt: skip
    return ledger


REPORT = plain_progress(inner_steps=10, tokens=10, loss=None)


@pytest.mark.parametrize(
    ("claim", "untrue"),
    [
        ({"inner_steps": -1, "tokens": 0}, "-1 inner steps"),
        ({"inner_steps": 22}, "22 inner steps, and the rounds that are fixed have 20"),
        ({"tokens": -1}, "-1 tokens in 10 inner steps"),
        ({"tokens": 1 << 60}, "tokens in 10 inner steps"),
        ({"blocked_s": -1.0}, "blocked_s = -1"),
        ({"blocked_s": math.nan}, "blocked_s = nan"),
        ({"tokens_per_s": math.inf}, "tokens_per_s = inf"),
        ({"position": -5.0}, "position = -5"),
        ({"sample_watermark": -1}, "sample_watermark = -1"),
        ({"bytes_up": -1}, "bytes_up = -1"),
        ({"sent": BytesByKind(), "received": BytesByKind(probe=-1)}, "-1 bytes of probe received"),
    ],
)
def test_a_report_says_nothing_that_cannot_be_true(ledger: Ledger, claim: dict[str, Any], untrue: str) -> None:
    """A: by it rounds are dealt out."""
    assert progress_untrue(REPORT, ledger) is None
    assert progress_untrue(dataclasses.replace(REPORT, loss=math.nan), ledger) is None, "training may well diverge"
    told = progress_untrue(dataclasses.replace(REPORT, **claim), ledger)
    assert told is not None and untrue in told
