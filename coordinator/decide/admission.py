"""Whether a hello or an offer is accepted, and the reason of every refusal.

A node's claims about its own work decide the weight of its deltas and the length of rounds. They are compared with what
is possible, and never refused because a node is late.
"""

import math
from typing import Final

from farloop.algo.spec import BlobKind, NodeId, to_plain
from farloop.algo.stages import Part, described, fault_of, is_source
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.roster import MOST_MEMBERS, Member
from farloop.coordinator.decide.windows import Window
from farloop.wire.bounds import MOST_TOKENS
from farloop.wire.keys import check_name
from farloop.wire.messages import PROTOCOL_VERSION, Hello, Offer, Progress, Refused
from farloop.wire.reasons import Reason

_FP32_MAX: Final = 2.0**128  # no finite fp32 number is larger


def refusal(hello: Hello, name: NodeId, ledger: Ledger, member: Member | None) -> Refused | None:
    """Why this node may not join, with the two values that disagree; None lets it in. Histories: `rollback.py`."""
    identity = ledger.spec.identity
    fingerprint, layout = identity.fingerprint(), identity.layout.digest()
    try:
        check_name(name)
    except ValueError as error:
        return _refuse(Reason.MALFORMED, str(error))
    if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
        spoken = f"{hello.protocol_min} to {hello.protocol_max}"
        return _refuse(Reason.PROTOCOL_VERSION, f"the node speaks {spoken}, the coordinator {PROTOCOL_VERSION}")
    if hello.fingerprint is not None and hello.fingerprint != fingerprint:
        return _refuse(Reason.WRONG_RUN, f"the node wants run {hello.fingerprint}, this is {fingerprint}")
    if hello.layout is not None and hello.layout != layout:
        return _refuse(Reason.WRONG_LAYOUT, f"the node's layout is {hello.layout}, the run's is {layout}")
    if fault := fault_of(hello.holds, identity.layout):
        return _refuse(Reason.WRONG_PART, f"the node {fault}")
    same = member is not None and hello.incarnation == member.incarnation
    if member and same and hello.process != member.process:
        told = f"another process has joined as start {member.incarnation} of {name}"
        return Refused(reason=Reason.OLD_INCARNATION, detail=told, retriable=True, newest=member.incarnation)
    if member and same and hello.holds != member.holds:
        said = f"stages {described(member.holds)}, and now {described(hello.holds)}"
        return _refuse(Reason.WRONG_PART, f"this start of {name} held {said}: start it anew")
    for ref in (*hello.anchors, *hello.announced):
        if not 0 <= ref.fragment < len(ledger.versions):
            return _refuse(Reason.WRONG_LAYOUT, f"there is no fragment {ref.fragment}")
    if (most := max(len(hello.anchors), len(hello.announced))) > len(ledger.versions):
        told = f"the node names {most} anchors, and the run has {len(ledger.versions)} fragments"
        return _refuse(Reason.WRONG_LAYOUT, told)
    if member and hello.incarnation < member.incarnation:
        newer, here = f"start {member.incarnation} of {name} has joined, this is {hello.incarnation}", member.session
        newest = 0 if here is not None else member.incarnation
        return Refused(reason=Reason.OLD_INCARNATION, detail=newer, retriable=here is not None, newest=newest)
    return None


def frozen_fault(frozen: int, member: Member, ledger: Ledger) -> str | None:
    """Why a node with these frozen weights may not begin: averages over nodes that differ in them mean nothing."""
    first = ledger.frozen.get(member.holds)
    if first is None or first.frozen == frozen:
        return None
    here = f"those here have the digest {frozen:016x}" if frozen else "there are none here"
    return f"{here}, those of {first.node} had {first.frozen:016x}"


def delta_refusal(offer: Offer, member: Member, ledger: Ledger, window: Window | None) -> tuple[Reason, str] | None:
    """Why this delta is refused, as a reason and a sentence; None accepts it. `window`: the fragment's open one."""
    blob = offer.blob
    sender = (member.name, member.incarnation)
    if (
        blob.kind is not BlobKind.DELTA
        or not 0 <= blob.fragment < len(ledger.versions)
        or (blob.node, blob.incarnation) != sender
        or [(c.node, c.incarnation, c.base) for c in offer.contributors] != [(*sender, blob.version)]
    ):
        return Reason.CORRUPT, "the offer does not fit its sender"
    if offer.history != ledger.history:
        return Reason.FOREIGN, Reason.FOREIGN.sentence
    reason = (
        ledger.outcome_reason(blob, offer.window) if member.has(ledger.fragment(blob.fragment)) else Reason.NOT_HELD
    )
    if reason is None and member.stage != "training":
        reason = Reason.NOT_A_PARTICIPANT
    if reason is None and window and window.is_too_late_for(offer):
        reason = Reason.LATE
    came = window.contributors if window else set()
    if reason is None and (member.name in came or ledger.holds_one_of(member.name, blob.fragment)):
        reason = Reason.OVERLAP
    if reason is None and (untrue := work_untrue(offer, ledger)):
        return Reason.IMPLAUSIBLE, untrue
    return None if reason is None else (reason, reason.sentence)


def work_untrue(offer: Offer, ledger: Ledger) -> str | None:
    """What is impossible in the claimed work of a delta, as a sentence; None otherwise."""
    fragment = offer.blob.fragment
    if offer.ahead not in (0, ledger.epoch):
        return f"the delta claims a place of epoch {offer.ahead}, and this is epoch {ledger.epoch}"
    for share in offer.contributors:
        most = steps_at_most(ledger, fragment, share.base, share.node)
        if not 0 <= share.steps <= most:
            return f"the delta claims {share.steps} inner steps, and there were at most {most} since its base"
        if untrue := _tokens_untrue(share.tokens, share.steps, ledger, ledger.holds_of(share.node)):
            return f"the delta claims {untrue}"
        if not 0.0 <= share.norm_sq <= ledger.fragment(fragment).numel * _FP32_MAX**2:
            return f"the delta claims a squared norm of {share.norm_sq:g}"
    return None


def steps_at_most(ledger: Ledger, fragment: int, base: int, node: NodeId) -> int:
    """Most inner steps that a delta of this base can hold: the rounds since the base was made, and the round that the
    node was in when it got the base; after that it jumps to the run's round. The base's round is taken from the last
    slot's windows, which may lag by one round, or by as many updates as may be late if nodes do not wait."""
    kept, plans = [revision.terms for revision in ledger.revisions.kept], ledger.rounds.values()
    behind = (
        max(terms.schedule.max_stale_rounds for terms in kept) if kept[0].schedule.on_late_update == "continue" else 1
    )
    begun = ledger.round_of(fragment, base) - behind
    if kept[0].schedule.mix == 1.0:  # nothing is ever mixed in: the work is that since the last send, however long ago
        begun = 0
    oldest = ledger.rounds[min(ledger.rounds)]
    forgotten = oldest.start if begun < oldest.index else 0
    steps = sum(plan.steps_of(node) for plan in plans if plan.index >= begun)
    return forgotten + steps + max(plan.length for plan in plans)


def progress_untrue(progress: Progress, ledger: Ledger, holds: Part = None) -> str | None:
    """What is impossible in a node's report, as a sentence; None otherwise. `holds`: the node's part of the model."""
    newest = ledger.rounds[max(ledger.rounds)]
    most = newest.start + newest.length + 1  # one may be under way as the run ends
    most += ledger.history * (_longest(ledger) + 1)  # of lost histories, which were fewer than epochs
    if not 0 <= progress.inner_steps <= most:
        return f"it claims {progress.inner_steps} inner steps, and the rounds that are fixed have {most - 1}"
    if untrue := _tokens_untrue(progress.tokens, progress.inner_steps, ledger, holds):
        return f"it claims {untrue}"
    for name in _NEVER_NEGATIVE:
        value = getattr(progress, name)
        if not 0 <= value < math.inf:
            return f"it claims {name} = {value:g}"
    place = last_position(ledger)
    for name in ("position", "round"):
        if getattr(progress, name) > place:
            return f"it claims {name} = {getattr(progress, name):g}, and the run ends at position {place}"
    if progress.compute_share > 1.0:
        return f"it claims compute_share = {progress.compute_share:g}, and 1 is all of its time"
    for way in ("sent", "received"):
        for kind, count in to_plain(getattr(progress, way)).items():
            if count < 0:
                return f"it claims {count} bytes of {kind} {way}"
    return None


def last_position(ledger: Ledger) -> int:
    """Largest schedule position, and bound of round numbers."""
    newest = ledger.rounds[max(ledger.rounds)]
    return max(newest.start + newest.length, _longest(ledger))


def _longest(ledger: Ledger) -> int:
    return max(revision.terms.schedule.steps for revision in ledger.revisions.kept)


def samples_untrue(progress: Progress, member: Member, ledger: Ledger) -> str | None:
    """Whether a node claims more samples than it was granted, as a sentence; None otherwise."""
    if not ledger.spec.identity.num_samples or not is_source(member.holds):
        return None
    most = ledger.leases.most_used(member.name, member.incarnation)
    if progress.sample_watermark <= most:
        return None
    return f"it claims to have used {progress.sample_watermark} samples, and was granted {most}: {most} are counted"


_NEVER_NEGATIVE: Final = (
    "position", "round", "tokens_per_s", "compute_share", "blocked_s", "lost_steps", "skipped_turns",
    "skipped_steps", "tau", "sample_watermark",
)  # fmt: skip


def _tokens_untrue(tokens: int, steps: int, ledger: Ledger, holds: Part) -> str | None:
    """Whether an inner step claims more tokens than the run's batch, if the coordinator grants the samples. A node that
    holds a part of the model reports what passed through it: of any number of sources, or its own, less lost ones."""
    terms = ledger.spec.terms
    if ledger.spec.identity.num_samples:
        granted = steps * terms.inner.batch_sequences * terms.inner.sequence_tokens
        most = granted if is_source(holds) else granted * MOST_MEMBERS
        return None if 0 <= tokens <= most else f"{tokens} tokens in {steps} inner steps, which have {most} at most"
    return None if 0 <= tokens <= steps * MOST_TOKENS else f"{tokens} tokens in {steps} inner steps"


def _refuse(reason: Reason, detail: str) -> Refused:
    return Refused(reason=reason, detail=detail, retriable=False)
