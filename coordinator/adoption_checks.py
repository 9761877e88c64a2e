"""Checks what nodes report besides their anchors, in an adoption (protocol, Adoption).

Anchors are compared with a digest. Terms, rounds and revisions have none: impossible ones would end the coordinator
windows later, or every later start.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from farloop.algo import validation
from farloop.algo.revisions import LEARNING_RATE_STAYS, STAY, changes
from farloop.algo.spec import Revision, RoundPlan, WindowTerms
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import MOST, AdoptionSettings
from farloop.coordinator.decide.ledger import Ledger
from farloop.quant.codec_checks import check_codecs, check_downlink
from farloop.quant.errors import CodecError
from farloop.quant.registry import codec_named
from farloop.wire.messages import Held


def adoption_of(patience_s: float, fetched: Mapping[int, rec.AnchorFetched], *, newest: bool) -> AdoptionSettings:
    """Adoption settings for a coordinator's start, with the anchors that an earlier start fetched."""
    return AdoptionSettings(untrue=untrue, patience_s=patience_s, fetched=fetched, newest=newest)


def untrue(held: Held, ledger: Ledger) -> str | None:
    """What is impossible in an answer, as a sentence; None otherwise."""
    faults = itertools.chain(
        (fault for terms in held.windows for fault in _of_window(terms, ledger)),
        (fault for plan in held.rounds for fault in _of_round(plan)),
        (fault for one in held.revisions if one.number > ledger.spec.revision for fault in _of_revision(one, ledger)),
    )
    return next(faults, None)


def _of_window(terms: WindowTerms, ledger: Ledger) -> Iterator[str]:
    window = f"window {terms.window} of fragment {terms.fragment}"
    if not 0 <= terms.fragment < len(ledger.versions):
        yield f"there is no fragment {terms.fragment}"
    names = [node for node, _ in terms.codec_up_of]
    if (
        not all(0 <= number < MOST for number in (terms.window, terms.round, terms.tau))
        or not (0.0 <= terms.mix <= 1.0 and math.isfinite(terms.gap))
        or names != sorted(set(names))
    ):
        yield f"{window} runs under no such terms"
    try:
        for codec in (terms.codec_up, *(codec for _, codec in terms.codec_up_of)):
            codec_named(codec)
        check_downlink(codec_named(terms.codec_down))
    except CodecError as error:
        yield f"{window}: {error}"


def _of_round(plan: RoundPlan) -> Iterator[str]:
    if not (0 <= plan.index < MOST and 0 <= plan.start < MOST and 1 <= plan.length < MOST):
        yield f"round {plan.index} has {plan.length} steps from position {plan.start} on"
    for node, steps in plan.node_steps:
        if not 1 <= steps <= plan.length:
            yield f"{node} does {steps} of {plan.length} steps in round {plan.index}"


def _of_revision(revision: Revision, ledger: Ledger) -> Iterator[str]:
    name, layout = f"revision {revision.number}", ledger.spec.identity.layout
    firsts = (revision.number, revision.round, *revision.windows)
    if len(revision.windows) != len(layout.fragments) or not all(0 <= first < MOST for first in firsts):
        yield f"{name} does not say from where on it holds"
    for change in changes(ledger.spec.terms, revision.terms):
        if change.key in STAY or change.key.removeprefix("lr.") in LEARNING_RATE_STAYS:
            yield f"{name} changes {change.key}, which stays"
    try:
        validation.check(revision.terms, layout)
        check_codecs(revision.terms)
    except ValueError as error:
        yield f"{name}: {error}"
