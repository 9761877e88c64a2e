"""Who and what is let in, and the sentence for those who are not (protocol E, H, S, U, Z)."""

import dataclasses
import math
from typing import Any

import pytest
from coordinator_run import A, B, C
from plain_runs import plain_hello, plain_offer, plain_progress

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobKind, Contribution, RoundPlan, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.admission import delta_refusal, progress_untrue, refusal, steps_at_most
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.decide.windows import Window
from farloop.wire.messages import AnchorRef, BytesByKind, Committed, Hello, Offer, Refused
from farloop.wire.reasons import Reason

TRAINING = Member(name=A, incarnation=2, stage="training", start_round=0)
CONTRIBUTION = Contribution(node=A, incarnation=2, base=0, steps=10, tokens=10, norm_sq=1.0)


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Epoch 3, nothing committed."""
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=3, rounds=opening_rounds(spec)))


def hello(**changes: Any) -> Hello:
    return plain_hello(**{"incarnation": 2, "epoch_seen": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"protocol_min": 2, "protocol_max": 4}, Reason.PROTOCOL_VERSION, "speaks 2 to 4, the coordinator 1"),
        ({"protocol_min": 0, "protocol_max": 0}, Reason.PROTOCOL_VERSION, "speaks 0 to 0, the coordinator 1"),
        ({"fingerprint": "0123456789abcdef"}, Reason.WRONG_RUN, "wants run 0123456789abcdef"),
        ({"layout": "0123456789abcdef"}, Reason.WRONG_LAYOUT, "layout is 0123456789abcdef"),
        ({"anchors": (AnchorRef(fragment=2, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment 2"),
        ({"anchors": (AnchorRef(fragment=-1, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment -1"),
        ({"announced": (AnchorRef(fragment=2, version=0, digest=0),)}, Reason.WRONG_LAYOUT, "no fragment 2"),
        ({"incarnation": 1}, Reason.OLD_INCARNATION, "start 2 of a has joined, this is 1"),
    ],
)
def test_a_refusal_names_both_values(ledger: Ledger, changes: dict[str, Any], reason: Reason, detail: str) -> None:
    refused = refusal(hello(**changes), A, ledger, Member(name=A, incarnation=2))
    assert refused is not None and (refused.reason, refused.retriable) == (reason, False)
    assert detail in refused.detail
    assert refused.newest == (2 if reason is Reason.OLD_INCARNATION else 0)


def test_another_process_with_the_number_of_a_start_is_told_to_go_on_behind_it(ledger: Ledger) -> None:
    refused = refusal(hello(process=8, holds=(0,)), A, ledger, Member(name=A, incarnation=2, process=7))
    assert refused == Refused(
        reason=Reason.OLD_INCARNATION, detail="another process has joined as start 2 of a", retriable=True, newest=2
    )


def test_an_older_start_waits_while_a_newer_one_is_connected(ledger: Ledger) -> None:
    refused = refusal(hello(incarnation=1), A, ledger, Member(name=A, incarnation=2, session=1))
    assert refused is not None and (refused.reason, refused.retriable, refused.newest) == (
        Reason.OLD_INCARNATION,
        True,
        0,
    )


# --- deltas


def offer(window: int = 1, contributors: tuple[Contribution, ...] = (CONTRIBUTION,), **changes: Any) -> Offer:
    """From version 0 of fragment 1, but for these fields of its blob."""
    plain = plain_offer(A, incarnation=2, contributors=contributors)
    return dataclasses.replace(plain, window=window, blob=dataclasses.replace(plain.blob, **changes))


def why_not(ledger: Ledger, said: Offer, member: Member = TRAINING, **window: Any) -> tuple[Reason, str] | None:
    """Why it is refused by a window that expects a and b."""
    return delta_refusal(said, member, ledger, Window(**{"terms": ledger.windows[1], "expected": {A, B}, **window}))


NOT_ITS_SENDERS = "the offer does not fit its sender"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        # U: a node speaks for itself alone, whatever its frames claim
        ({"kind": BlobKind.UPDATE}, Reason.CORRUPT),
        ({"fragment": 2}, Reason.CORRUPT),
        ({"fragment": -1}, Reason.CORRUPT),
        ({"node": B}, Reason.CORRUPT),
        ({"incarnation": 1}, Reason.CORRUPT),
        ({"contributors": ()}, Reason.CORRUPT),
        ({"contributors": (dataclasses.replace(CONTRIBUTION, node=B),)}, Reason.CORRUPT),
        ({"contributors": (dataclasses.replace(CONTRIBUTION, incarnation=3),)}, Reason.CORRUPT),
        ({"contributors": (dataclasses.replace(CONTRIBUTION, base=1),)}, Reason.CORRUPT),
        ({"contributors": (CONTRIBUTION, CONTRIBUTION)}, Reason.CORRUPT),
        ({"window": 0}, Reason.LATE),
        ({"window": 2}, Reason.UNKNOWN_WINDOW),
    ],
)
def test_an_offer_fits_its_sender_and_the_open_window(
    ledger: Ledger, changes: dict[str, Any], reason: Reason | None
) -> None:
    detail = NOT_ITS_SENDERS if reason is Reason.CORRUPT else reason and reason.sentence
    assert why_not(ledger, offer(**changes)) == (reason and (reason, detail))


@pytest.mark.parametrize("stage", ["joining", "ready", "left"])
def test_who_does_not_train_contributes_nothing(ledger: Ledger, stage: Any) -> None:
    """I: a joiner never dilutes a mean."""
    member = Member(name=A, incarnation=2, stage=stage)
    assert why_not(ledger, offer(), member) == (Reason.NOT_A_PARTICIPANT, Reason.NOT_A_PARTICIPANT.sentence)


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
    refused = why_not(ledger, offer(contributors=(dataclasses.replace(CONTRIBUTION, **claim),)))
    assert refused is not None and refused[0] is Reason.IMPLAUSIBLE and untrue in refused[1]


@pytest.mark.parametrize(("tokens", "fits"), [(640, True), (639, True), (0, True), (641, False), (6400, False)])
def test_where_samples_are_granted_a_step_has_a_batch_at_most(spec: RunSpec, tokens: int, fits: bool) -> None:
    """Fewer where sequences are padded."""
    identity = dataclasses.replace(spec.identity, num_samples=1000)
    spec = dataclasses.replace(spec, identity=identity)
    ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=3, rounds=opening_rounds(spec)))
    refused = why_not(ledger, offer(contributors=(dataclasses.replace(CONTRIBUTION, tokens=tokens),)))
    assert refused is None if fits else refused is not None and refused[0] is Reason.IMPLAUSIBLE


@pytest.mark.parametrize(
    ("terms", "of_a", "of_c"),
    [
        ({}, [70, 70, 60, 50], 10 + 4 * 6 + 10),
        # F: a node may be rounds ahead of what it knows to be merged
        ({"on_late_update": "continue", "max_stale_rounds": 2}, [70, 70, 70, 60], 54),
        # H: with a = 1, where nothing is ever mixed in, the work counts from the last send
        ({"mix": 1.0}, [70, 70, 70, 70], 54),
    ],
)
def test_a_delta_holds_no_more_steps_than_the_rounds_since_its_base_and_one_that_was_begun(
    spec: RunSpec, terms: dict[str, Any], of_a: list[int], of_c: int
) -> None:
    """A: rounds 0 to 5 of ten steps are fixed; c does six of them from round 2 on. Window n is of round n."""
    spec = dataclasses.replace(spec, terms=spec.terms.replace(steps=1000, **terms))
    ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=3, rounds=opening_rounds(spec)))
    ledger.rounds = {
        i: RoundPlan(index=i, start=10 * i, length=10, node_steps=((C, 6),) if i >= 2 else ()) for i in range(6)
    }
    for version in range(3):
        window = dataclasses.replace(ledger.windows[1], window=version + 1, round=version + 1)
        ledger.commits[1, version] = Committed(
            fragment=1, version=version, size=0, digest=0, anchor_digest=0, merged=(), drops=(), rounds=(),
            next_window=window,
        )  # fmt: skip
    assert [steps_at_most(ledger, 1, base, A) for base in range(4)] == of_a
    assert steps_at_most(ledger, 1, 2, C) == of_c


# --- reports

REPORT = plain_progress(inner_steps=10, tokens=10, loss=None)


@pytest.mark.parametrize(
    ("claim", "untrue"),
    [
        ({}, None),
        ({"loss": math.nan}, None),  # training may well diverge
        ({"inner_steps": -1, "tokens": 0}, "-1 inner steps"),
        ({"inner_steps": 22}, "22 inner steps, and the rounds that are fixed have 20"),
        ({"tokens": -1}, "-1 tokens in 10 inner steps"),
        ({"tokens": 1 << 60}, "tokens in 10 inner steps"),
        ({"blocked_s": -1.0}, "blocked_s = -1"),
        ({"blocked_s": math.nan}, "blocked_s = nan"),
        ({"tokens_per_s": math.inf}, "tokens_per_s = inf"),
        ({"position": -5.0}, "position = -5"),
        ({"sample_watermark": -1}, "sample_watermark = -1"),
        ({"sent": BytesByKind(delta=-1)}, "-1 bytes of delta sent"),
        ({"received": BytesByKind(probe=-1)}, "-1 bytes of probe received"),
    ],
)
def test_a_report_says_nothing_that_cannot_be_true(ledger: Ledger, claim: dict[str, Any], untrue: str | None) -> None:
    """A: by it rounds are dealt out."""
    told = progress_untrue(dataclasses.replace(REPORT, **claim), ledger)
    assert told is None if untrue is None else told is not None and untrue in told
