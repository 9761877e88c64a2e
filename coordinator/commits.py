"""What a commit is made of, and how many bits each layer gets."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, zeros

from farloop.algo.bit_allocation import Candidate, budget, by_multiplier
from farloop.algo.fragments import view
from farloop.algo.merge_rules import cosines, weights_by
from farloop.algo.methods import method_named
from farloop.algo.outer_settings import PLAIN_AVERAGE, sums_increments, usual
from farloop.algo.spec import BlobId, BlobKind, Fragment, WindowTerms
from farloop.algo.terms import Terms
from farloop.algo.validation import ROBUST_RULES
from farloop.coordinator import aggregator
from farloop.coordinator.aggregator import NO_POOL, Buffers, Pool, Result, Step, Sum
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.records import WindowCommitted
from farloop.quant.bit_rates import candidates, joined, measure
from farloop.quant.blob import Expected, Parsed, pack_anchor, parse_blob, unpack_anchor
from farloop.quant.digest import digest
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.quant.registry import codec_named, spelling_of
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import AnchorRef, Share
from farloop.wire.reasons import Reason

# --- Adaptive bits: a step, k or rank for every tensor of a fragment, chosen by L-GreCo from what was merged last.
#
# `policy=l-greco` of q4r, topk and lowrank asks for it. Tensors lose unequally at an equal step; the choice spends no
# more squared error than α times that of the equal one, and fewer bits. It is published with the terms of the
# fragment's next window, and journaled with them. Nodes with a codec of their own have their own choice where that one
# asks for it, and none otherwise.


def next_codecs(terms: Terms, delta: Tensor, fragment: Fragment) -> dict[str, str]:
    """Codecs for the fragment's next deltas by its merged delta, fp32 [numel], of those that leave a choice."""
    return {codec: chosen for codec in _asked(terms) if (chosen := next_codec(codec, delta, fragment)) is not None}


def leaves_a_choice(terms: Terms) -> bool:
    return any(candidates(codec_named(codec)) for codec in _asked(terms))


def _asked(terms: Terms) -> list[str]:
    return list(dict.fromkeys((terms.codecs.up, *(codec for _, codec in terms.codecs.up_of))))


def as_chosen(terms: Terms, window: WindowTerms) -> dict[str, str]:
    """The codecs chosen for an open window's deltas, by the requested ones in `terms`."""
    own = dict(window.codec_up_of)
    return {terms.codecs.up: window.codec_up} | {codec: own[node] for node, codec in terms.codecs.up_of}


def with_chosen(following: WindowTerms, chosen: Mapping[str, str]) -> WindowTerms:
    own = tuple((node, chosen.get(codec, codec)) for node, codec in following.codec_up_of)
    return replace(following, codec_up=chosen.get(following.codec_up, following.codec_up), codec_up_of=own)


@torch.no_grad()
def next_codec(codec_up: str, delta: Tensor, fragment: Fragment) -> str | None:
    """Codec of the fragment's next deltas by its merged delta, fp32 [numel]; None: as the terms say."""
    codec = codec_named(codec_up)
    if not (found := candidates(codec)):
        return None
    rates = [[measure(candidate, view(delta, tensor)) for candidate in found] for tensor in fragment.tensors]
    tables = [[Candidate(bits=rate.bits, error=rate.error) for rate in of_tensor] for of_tensor in rates]
    choice = by_multiplier(tables, budget(tables, codec.alpha))  # type: ignore[attr-defined]  # those with candidates
    return spelling_of(joined([found[index] for index in choice.indices]))


# --- What a commit is made of, between the ledger that decides and the aggregator that computes.
#
# The daemon, its recovery and the simulator all commit, and repeat a commit, by these same functions.

Delta = bytes | bytearray | Parsed  # an encoded delta, or one that was verified
Inputs = Sequence[tuple[Delta, float]]  # deltas and their weights, in the order of the sum


class WrongAnchor(Exception):
    """A repeated commit gives another anchor than its record says: the bytes are not this run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """Codecs of one commit, by the terms of its windows; the run may have others by now."""

    deltas: tuple[Expected, ...]  # in the order of the sum; each has the codec of the window that it names
    down: str  # of the update
    terms: Terms  # of the window itself


def codecs_of(ledger: Ledger, record: WindowCommitted) -> Codecs:
    """Call it while the record's window is the fragment's open one."""
    terms = ledger.windows[record.fragment]
    assert terms.window == record.version
    return Codecs(
        deltas=_expected(ledger, record, [addend.blob for addend in record.blobs]),
        down=terms.codec_down,
        terms=ledger.terms_of(record.fragment, record.version, record.round),
    )


def _expected(ledger: Ledger, record: WindowCommitted, blobs: Sequence[BlobId]) -> tuple[Expected, ...]:
    """A late delta names the window after its base; with a lag bases are older, and none is late."""
    lag = ledger.spec.terms.schedule.lag
    return tuple(expected(ledger, blob, record.version if lag else blob.version + 1) for blob in blobs)


def expected(ledger: Ledger, blob: BlobId, window: int) -> Expected:
    """What a delta for this window must be."""
    return Expected(
        codecs=(codec_named(ledger.codec_of_deltas(blob.fragment, window, blob.node)),),
        fragment=ledger.fragment(blob.fragment),
        version=window,
        base=blob.version,
        newest_epoch=ledger.epoch,
    )


def spools_inputs(terms: Terms) -> bool:
    """Whether deltas are journaled on arrival. Gradients of data-parallel are sent again instead."""
    return method_named(terms.method).inner


def step_of(ledger: Ledger, record: WindowCommitted, terms: Terms) -> Step:
    """The step of this commit; `terms` are those of its window."""
    return Step(
        fragment=ledger.spec.identity.layout.fragments[record.fragment],
        version=record.version,
        round=ledger.rounds[record.round],
        outer=replace(
            PLAIN_AVERAGE if record.flush and not sums_increments(terms) else usual(terms),
            lr=record.outer_lr,
            momentum=record.outer_momentum,
            delta_scale=record.delta_scale,
        ),
        epoch=ledger.epoch,
        reach=record.reach,
    )


def _rule(record: WindowCommitted, terms: Terms) -> str:
    if terms.outer.merge in ROBUST_RULES:
        steps = sum(addend.weight > 0.0 for addend in record.blobs)
        return terms.outer.merge if steps >= ROBUST_RULES[terms.outer.merge].least else "mean"
    # A run ends on the mean of what the nodes hold, as its last outer step is plain.
    return "mean" if record.flush else method_named(terms.method).merge


def _merged(inputs: Inputs, step: Step, record: WindowCommitted, codecs: Codecs) -> Tensor | Sum:
    rule = _rule(record, codecs.terms)
    if rule in ROBUST_RULES and ROBUST_RULES[rule].weighted:
        rule = "mean"  # the weights are another's to find, or are in the record
    return aggregator.to_merge(inputs, step.fragment, codecs.deltas, rule)


def apart(record: WindowCommitted) -> list[BlobId]:
    """Deltas of nodes in quarantine, which are measured but not merged."""
    return [refusal.blob for refusal in record.refused if refusal.reason is Reason.QUARANTINED]


def _measured(
    ledger: Ledger, draft: WindowCommitted, inputs: Inputs, others: Sequence[Delta], terms: Terms
) -> tuple[tuple[float, ...] | None, tuple[float | None, ...]]:
    """Weights by a robust rule, and cosines: both follow from all pairs of deltas."""
    rule, full = _rule(draft, terms), terms.admission.screen == "full" and spools_inputs(terms)
    weighted = rule in ROBUST_RULES and ROBUST_RULES[rule].weighted
    if not weighted and not full:
        return None, ()
    blobs = [addend.blob for addend in draft.blobs] + (apart(draft) if full else [])
    data = [data for data, _ in inputs] + (list(others) if full else [])
    products = aggregator.products(data, _expected(ledger, draft, blobs))
    weights = tuple(weights_by(rule, products, [weight for _, weight in inputs])) if weighted else None
    return weights, tuple(cosines(products, range(len(inputs)))) if full else ()


def compute(
    ledger: Ledger,
    buffers: Buffers,
    draft: WindowCommitted,
    inputs: Inputs,
    others: Sequence[Delta] = (),
    pool: Pool = NO_POOL,
    in_place: bool = False,
) -> Result:
    """The arithmetic of the draft of an open window: sum, outer step, update. `others` are those of `apart(draft)`;
    new tensors come from the pool; `in_place` as `aggregator.commit` has it.
    Raises NonFiniteError: finite deltas added up to more than fp32 holds."""
    codecs = codecs_of(ledger, draft)
    step = step_of(ledger, draft, codecs.terms)
    if not draft.blobs:  # what the updates before left out of the anchor, and no outer step
        update = aggregator.publish(buffers, step, codecs.down, zeros(1), pool)
        return replace(update, chosen=as_chosen(codecs.terms, ledger.windows[draft.fragment]))
    weights, directions = _measured(ledger, draft, inputs, others, codecs.terms)
    if weights is not None:
        inputs = [(data, weight) for (data, _), weight in zip(inputs, weights, strict=True)]
    delta = _merged(inputs, step, draft, codecs)
    # By the run's terms for the next window: they say how the codec is chosen, those of a window what was chosen.
    following = ledger.terms_of(draft.fragment, draft.version + 1)
    if isinstance(delta, Sum) and leaves_a_choice(following):
        delta = delta.whole(pool)
    result = aggregator.commit(buffers, delta, step, codecs.terms, codecs.down, pool, in_place)
    result = replace(result, weights=weights, cosines=directions)
    if isinstance(delta, Tensor):
        result = replace(result, chosen=next_codecs(following, delta, step.fragment))
        pool.give([delta])
    return result


def longest(ledger: Ledger, draft: WindowCommitted, inputs: Inputs) -> BlobId | None:
    """The delta with the largest norm, which made the sum overflow; None without any."""
    norms = []
    expected = _expected(ledger, draft, [addend.blob for addend in draft.blobs])
    for (data, _), expect in zip(inputs, expected, strict=True):
        header, payload, _ = parse_blob(data, expect)
        norms.append(header.codec.norm_sq(payload, expect.fragment, seed=header.seed))
    return draft.blobs[norms.index(max(norms))].blob if norms else None


def completed(draft: WindowCommitted, result: Result) -> WindowCommitted:
    """The record to be journaled, with the update attached."""
    following = draft.next_window
    if following is not None:
        following = replace(with_chosen(following, result.chosen), gap=result.gap)
    weights = result.weights or [addend.weight for addend in draft.blobs]
    directions = result.cosines or [None] * (len(draft.blobs) + len(apart(draft)))
    cosine_of = dict(zip([*(addend.blob for addend in draft.blobs), *apart(draft)], directions, strict=True))
    return replace(
        draft,
        blobs=tuple(
            replace(addend, weight=weight, cosine=cosine_of[addend.blob])
            for addend, weight in zip(draft.blobs, weights, strict=True)
        ),
        merged=_shares(draft, result),
        refused=tuple(replace(refusal, cosine=cosine_of.get(refusal.blob)) for refusal in draft.refused),
        next_window=following,
        anchor_digest=result.anchor_digest,
        target_digest=result.target_digest,
        momentum_digest=result.outer_digest,
        update_size=len(result.update),
        update_digest=blob_digest(result.update),
    )


def _shares(draft: WindowCommitted, result: Result) -> tuple[Share, ...]:
    """The weights that nodes are told: they sum to 1, and are 0 where a rule left a delta out."""
    if result.weights is None:
        return draft.merged
    told = tuple(replace(share, weight=weight) for share, weight in zip(draft.merged, result.weights, strict=True))
    left_out = any(now.weight == 0.0 < before.weight for now, before in zip(told, draft.merged, strict=True))
    return told if left_out else draft.merged  # a delta that a rule shortened counts whole here


def repeat(
    ledger: Ledger,
    buffers: Buffers,
    record: WindowCommitted,
    update: Callable[[], bytes | bytearray],
    inputs: Inputs | None,
    codecs: Codecs,
    pool: Pool = NO_POOL,
    *,
    expendable: bool = False,
    last: bool = True,
) -> tuple[Buffers, bool]:
    """Repeat one commit after a restart: the anchor from the update, the rest from the inputs.

    `codecs` is the result of `codecs_of` before the record entered the ledger, which is far ahead by now. Without
    inputs (gradients are not stored) the target becomes the anchor, and the optimizer's state stays that of the
    snapshot. Returns the buffers, and whether target and optimizer state match the record. Where the kernels make the
    commit in one pass and all of it matches, `update` is not read. `expendable`: such a commit is written over the
    buffers, and is an error where anything differs; only the `last` of several is compared.
    Raises WrongAnchor: the anchor does not match, or an error.
    """
    wrong = WrongAnchor(f"fragment {record.fragment} does not come out as version {record.version} said")
    step, delta = step_of(ledger, record, codecs.terms), None
    if record.blobs and inputs is not None:
        delta = _merged(inputs, step, record, codecs)
        if aggregator.kernels_of(buffers, delta, step, codecs.terms, codecs.down) is not None:
            with suppress(NonFiniteError):
                # Checksums hold the snapshot and every delta. The last digests hold all that they led to: a commit in
                # between that came out otherwise has changed nothing of what the run goes on from, if these match.
                measured = last or not expendable
                result = aggregator.commit(
                    buffers, delta, step, codecs.terms, codecs.down, pool, expendable=expendable, measured=measured
                )
                found = result.anchor_digest, result.target_digest, result.outer_digest
                if not measured or found == (record.anchor_digest, record.target_digest, record.momentum_digest):
                    return result.buffers, True
            if expendable:
                raise wrong
    anchor = pool.copy(buffers.anchor)
    aggregator.apply_update_(anchor, update(), step, codecs.down)
    if digest(anchor) != record.anchor_digest:
        raise wrong
    if not record.blobs:
        stepped = buffers
    elif delta is None:
        stepped = replace(buffers, target=anchor.clone())
    else:
        stepped = aggregator.advance(buffers, aggregator.whole(delta), step, codecs.terms)
    again = replace(stepped, version=record.version, anchor=anchor)
    return again, (digest(again.target), again.outer_digest()) == (record.target_digest, record.momentum_digest)


def snapshot_blob(buffers: Buffers, fragment: Fragment, epoch: int) -> tuple[BlobId, bytearray, int]:
    """The anchor in fp32 for a node that cannot follow the updates, and the digest of its bytes."""
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment.index, version=buffers.version)
    data = pack_anchor(buffers.anchor, fragment, buffers.version, epoch)
    return blob, data, blob_digest(data)


def fetched_anchor(data: bytes | bytearray, fragment: Fragment, ref: AnchorRef) -> Tensor:
    """The anchor in a snapshot that came up from a node, fp32 [numel].
    Raises BadBlob: it is not one of this fragment and version, or its numbers have another digest."""
    anchor = unpack_anchor(data, fragment, ref.version)
    if (found := digest(anchor)) != ref.digest:
        raise BadBlob(f"its numbers have digest {found:016x}, its node says {ref.digest:016x}")
    return anchor


def adopted(anchor: Tensor, version: int, terms: Terms) -> Buffers:
    """A fragment that continues from an anchor alone: the target is the anchor, the optimizer's state is zero."""
    return replace(Buffers.begin(anchor, terms), version=version)


def parts(
    ledger: Ledger, record: WindowCommitted, inputs: Sequence[bytes | bytearray], codecs: Codecs
) -> tuple[list[Tensor], Tensor]:
    """Each decoded delta of a commit and their merge, fp32 [numel] each, for inspection. Call it as `codecs_of`."""
    step = step_of(ledger, record, codecs.terms)
    alone = [
        aggregator.whole(aggregator.to_merge([(data, 1.0)], step.fragment, [expect]))
        for data, expect in zip(inputs, codecs.deltas, strict=True)
    ]
    weighted = [(data, addend.weight) for data, addend in zip(inputs, record.blobs, strict=True)]
    return alone, aggregator.whole(_merged(weighted, step, record, codecs))
