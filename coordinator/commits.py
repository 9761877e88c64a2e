"""What a commit is made of, between the ledger that decides and the aggregator that computes. Pure.

The daemon, its recovery and the simulator all commit, and repeat a commit, by these same functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from farloop.algo.correction import usual
from farloop.algo.digest import digest
from farloop.algo.methods import method_named
from farloop.algo.outer_settings import PLAIN_AVERAGE
from farloop.algo.spec import BlobId, BlobKind, Fragment, Terms
from farloop.coordinator import aggregator, bits
from farloop.coordinator.aggregator import Buffers, Result, Step
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.records import WindowCommitted
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest

Inputs = Sequence[tuple[bytes | bytearray, float]]
"""Encoded deltas and their weights, in the order of the sum."""


class WrongAnchor(Exception):
    """A repeated commit does not give the anchor that its record announced: the bytes are not those of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """How the bytes of one commit are encoded: by the terms of its windows. The run may have others by now."""

    up: tuple[str, ...]
    """Of the deltas, in the order of the sum: each as the window says that it names."""
    down: str
    """Of the update."""


def codecs_of(ledger: Ledger, record: WindowCommitted) -> Codecs:
    """To be asked while the record's window is the fragment's open one."""
    terms = ledger.windows[record.fragment]
    assert terms.window == record.version
    up = tuple(ledger.codec_of_deltas(record.fragment, window) for _, window in _named(ledger, record))
    return Codecs(up=up, down=terms.codec_down)


def _named(ledger: Ledger, record: WindowCommitted) -> list[tuple[int, int]]:
    """Base and window of each delta. A late one names the window after its base; with a lag bases are older, and none
    is late."""
    bases = [addend.blob.version for addend in record.blobs]
    return [(base, record.version if ledger.spec.terms.lag else base + 1) for base in bases]


def spools_inputs(terms: Terms) -> bool:
    """Whether deltas are journaled on arrival. Gradients of data-parallel are sent again instead (protocol K)."""
    return method_named(terms.method).inner


def step_of(ledger: Ledger, record: WindowCommitted) -> Step:
    """What the arithmetic of this commit needs to know."""
    return Step(
        fragment=ledger.spec.identity.layout.fragments[record.fragment],
        version=record.version,
        round=ledger.rounds[record.round],
        outer=replace(
            PLAIN_AVERAGE if record.flush else usual(ledger.spec.terms),
            lr=record.outer_lr,
            momentum=record.outer_momentum,
            delta_scale=record.delta_scale,
        ),
        epoch=ledger.epoch,
        reach=record.reach,
    )


def _merged(ledger: Ledger, inputs: Inputs, step: Step, record: WindowCommitted, codecs_up: Sequence[str]) -> Tensor:
    # A run ends on the mean of what the nodes hold, as its last outer step is plain.
    rule = "mean" if record.flush else method_named(ledger.spec.terms.method).merge
    return aggregator.merge(inputs, step, codecs_up, _named(ledger, record), rule)


def compute(ledger: Ledger, buffers: Buffers, draft: WindowCommitted, inputs: Inputs) -> Result:
    """The arithmetic of the draft of an open window: sum, outer step, update.

    Raises:
        NonFiniteError: finite deltas added up to more than fp32 holds.
    """
    step, terms, codecs = step_of(ledger, draft), ledger.spec.terms, codecs_of(ledger, draft)
    delta = _merged(ledger, inputs, step, draft, codecs.up)
    result = aggregator.commit(buffers, delta, step, terms, codecs.down)
    # By the run's terms: they say how the codec is chosen, those of a window what was chosen.
    codec_up = bits.next_codec(terms.codec_up, delta, step.fragment)
    return replace(result, codec_up=codec_up)


def completed(draft: WindowCommitted, result: Result) -> WindowCommitted:
    """The record to be journaled, with the update attached."""
    following = draft.next_window
    if following is not None:
        following = replace(following, codec_up=result.codec_up or following.codec_up, gap=result.gap)
    return replace(
        draft,
        next_window=following,
        anchor_digest=result.anchor_digest,
        target_digest=result.target_digest,
        momentum_digest=result.outer_digest,
        update_size=len(result.update),
        update_digest=blob_digest(result.update),
    )


def repeat(
    ledger: Ledger, buffers: Buffers, record: WindowCommitted, update: bytes, inputs: Inputs | None, codecs: Codecs
) -> tuple[Buffers, bool]:
    """One commit again after a restart: the anchor from the update, the rest from the inputs (protocol P).

    `codecs` is what `codecs_of` said before the record was taken into the ledger, which is far ahead of it by now.

    Without inputs (gradients are not spooled) the target is taken from the anchor, and the optimizer's state stays as
    the snapshot had it. Returns the buffers, and whether target and optimizer state came out as recorded.

    Raises:
        WrongAnchor: the anchor did not.
    """
    step, terms = step_of(ledger, record), ledger.spec.terms
    anchor = buffers.anchor.clone()
    aggregator.apply_update_(anchor, update, step, codecs.down)
    if digest(anchor) != record.anchor_digest:
        raise WrongAnchor(f"fragment {record.fragment} does not come out as version {record.version} said")
    if inputs is None:
        stepped = replace(buffers, target=anchor.clone())
    else:
        delta = _merged(ledger, inputs, step, record, codecs.up)
        stepped = aggregator.advance(buffers, delta, step, terms)
    again = replace(stepped, version=record.version, anchor=anchor)
    return again, (digest(again.target), again.outer_digest()) == (record.target_digest, record.momentum_digest)


def snapshot_blob(buffers: Buffers, fragment: Fragment, epoch: int) -> tuple[BlobId, bytearray, int]:
    """The anchor in fp32 for a node that cannot follow the updates, and the digest of its bytes."""
    codec = codec_named("fp32")
    header = BlobHeader(
        codec=codec,
        fragment=fragment,
        version=buffers.version,
        base=buffers.version,
        epoch=epoch,
    )
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment.index, version=buffers.version)
    data = pack_blob(header, codec.encode(buffers.anchor, fragment))
    return blob, data, blob_digest(data)


def parts(
    ledger: Ledger, record: WindowCommitted, inputs: Sequence[bytes | bytearray], codecs: Codecs
) -> tuple[list[Tensor], Tensor]:
    """Each delta of a commit, decoded, and what they were merged into, fp32 [numel] each. For who looks back at it.

    To be asked as `codecs_of` is.
    """
    step, named = step_of(ledger, record), _named(ledger, record)
    alone = [
        aggregator.merge([(data, 1.0)], step, [codec], [name])
        for data, codec, name in zip(inputs, codecs.up, named, strict=True)
    ]
    weighted = [(data, addend.weight) for data, addend in zip(inputs, record.blobs, strict=True)]
    return alone, _merged(ledger, weighted, step, record, codecs.up)
