"""Encodes deltas into blobs. The executor submits this work to its compute worker, so training goes on meanwhile."""

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId
from farloop.node import events as ev
from farloop.node.errors import NonFiniteDelta
from farloop.node.model.replica import Replica
from farloop.node.model.shards import Collected
from farloop.quant.blob import HEADER_BYTES, BlobHeader, as_tensor, blob_bytes, seal
from farloop.quant.codec import Codec
from farloop.quant.errors import NonFiniteError
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.norm import norm_sq
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import Offer

SMALLEST_NORM_SQ: Final = 1e-300  # stands for the squared norm of a delta that is zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A delta that is ready to be offered."""

    offer: Offer
    data: bytearray
    codec: str
    residual_ratio: float | None
    """|residual| ÷ |delta|, where there is one: above about 1, a dense codec loses more than it should."""
    payload: Tensor | None  # uint8, where the codec starts from its last payload
    at_once: bool  # it can be offered right away: no residual on disk has to be disposed of before


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A blob whose payload is written, and its header not yet."""

    command: ev.Encode
    header: BlobHeader
    data: bytearray
    collected: Collected | None = None  # of a sharded model: the payload, on its way from the ranks
    residual_ratio: float | None = None  # as that of `Encoded`

    @property
    def payload(self) -> Tensor:
        """uint8, a view of the blob."""
        return as_tensor(self.data)[HEADER_BYTES:]


def pack_at_once(
    replica: Replica, command: ev.Encode, epoch: int, inner_step: int, residual: Tensor | None = None
) -> Packed | None:
    """Take and encode the delta in the training thread: in one pass, as fast as taking it alone, or every rank its part
    of a sharded model.

    None if the codec has no such path here, or adds a residual to a whole model. Raises NonFiniteDelta.
    """
    codec = codec_named(command.codec)
    if replica.weights.sharded:
        packed = _empty(replica, command, codec, epoch)
        index, seed = command.blob.fragment, packed.header.seed
        collected, (lost, taken) = replica.encode(index, command.codec, seed, residual, inner_step)
        ratio = None if residual is None else _ratio(lost, taken)
        return dataclasses.replace(packed, collected=collected, residual_ratio=ratio)
    if codec.beta or not isinstance(codec, BlockCodec):
        return None
    packed = _empty(replica, command, codec, epoch)
    try:
        return packed if replica.pack(command.blob.fragment, codec, packed.payload, packed.header.seed) else None
    except NonFiniteError as error:
        raise NonFiniteDelta(packed.header.fragment.tensor_at(error.index), inner_step) from error


def encode_delta(
    replica: Replica,
    command: ev.Encode,
    delta: Tensor,
    epoch: int,
    inner_step: int,
    residual: Tensor | None = None,
    previous: Tensor | None = None,
) -> Encoded:
    """The blob and offer of a taken delta; its buffer returns to the replica.

    `residual`, fp32 [numel], is added with the codec's β, and becomes what this encoding lost. `previous` is the last
    payload. Raises NonFiniteDelta.
    """
    codec, fragment = codec_named(command.codec), replica.layout.fragments[command.blob.fragment]
    packed, ratio = _empty(replica, command, codec, epoch), None
    seed, device = packed.header.seed, delta.device
    # All operands on one device: kernels take no others.
    payload = packed.payload if device.type == "cpu" else torch.empty_like(packed.payload, device=device)
    previous = None if previous is None else previous.to(device)
    try:
        if residual is None:
            codec.encode_into(delta, payload, fragment, seed=seed, previous=previous)
        else:
            lost = residual.to(device)
            codec.encode_feedback_(delta, lost, payload, fragment, seed=seed, previous=previous)
            if lost is not residual:
                residual.copy_(lost)
            ratio = _ratio(norm_sq(residual), norm_sq(delta))
        if device.type != "cpu":
            packed.payload.copy_(payload)
    except NonFiniteError as error:
        raise NonFiniteDelta(fragment.tensor_at(error.index), inner_step) from error
    finally:
        replica.give_back(delta)
    return finish(dataclasses.replace(packed, residual_ratio=ratio))


def finish(packed: Packed) -> Encoded:
    command, header, payload = packed.command, packed.header, packed.payload
    if packed.collected is not None:
        packed.collected.into(payload)
    contribution = Contribution(
        node=command.blob.node,
        incarnation=command.blob.incarnation,
        base=command.blob.version,
        steps=command.steps,
        tokens=command.tokens,
        norm_sq=header.codec.norm_sq(payload, header.fragment, seed=header.seed) if command.measure else 0.0,
    )
    data = seal(header, packed.data)
    offer = Offer(
        blob=command.blob,
        size=len(data),
        digest=blob_digest(data),
        window=command.window,
        contributors=(contribution,),
        consumed=command.consumed,
        history=command.history,
    )
    kept = payload.clone() if header.codec.traits.warm_start else None
    return Encoded(
        offer=offer,
        data=data,
        codec=command.codec,
        residual_ratio=packed.residual_ratio,
        payload=kept,
        at_once=not header.codec.beta,
    )


def encode_anchor(replica: Replica, index: int, node: NodeId, epoch: int) -> tuple[Offer, bytearray]:
    version = replica.versions[index]
    data = replica.anchor_blob(index, epoch)
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=index, version=version, node=node)
    return Offer(blob=blob, size=len(data), digest=blob_digest(data)), data


def _empty(replica: Replica, command: ev.Encode, codec: Codec, epoch: int) -> Packed:
    blob, fragment = command.blob, replica.layout.fragments[command.blob.fragment]
    header = BlobHeader(
        codec=codec,
        fragment=fragment,
        version=command.window,
        base=blob.version,
        epoch=epoch,
        # Different random numbers for every delta of every node: their errors average out.
        salt=zlib.crc32(f"{blob.node}/{blob.incarnation}/{blob.seq}".encode()),
    )
    return Packed(command=command, header=header, data=bytearray(blob_bytes(codec, fragment)))


def _ratio(lost: float, taken: float) -> float:
    return math.sqrt(lost / max(taken, SMALLEST_NORM_SQ))
