"""The arithmetic of a commit: sum the deltas, step the target, encode the update, and apply what was encoded.

A pure job (protocol O): buffers and blobs in, new buffers and one blob out; nothing is changed in place, so that a
commit that cannot be made durable leaves no trace. The decoded update is canonical: it is what every anchor gets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo import schedule
from farloop.algo.digest import canonicalise_, combine, digest
from farloop.algo.fragments import flatten_into
from farloop.algo.methods import method_named
from farloop.algo.outer import AdamWSettings, AdamWState, OuterSettings, adamw_step_, outer_step_
from farloop.algo.spec import Fragment, RoundPlan, Terms
from farloop.quant.blob import HEADER_BYTES, BlobHeader, Expected, as_tensor, blob_bytes, pack_blob_into, parse_blob
from farloop.quant.norm import norm_sq
from farloop.quant.registry import codec_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """A fragment on the coordinator at one version, fp32 [numel] each."""

    version: int
    anchor: Tensor
    target: Tensor
    outer: dict[str, Tensor]
    """State of the outer optimizer by name; empty without momentum."""

    @classmethod
    def begin(cls, anchor: Tensor, terms: Terms) -> "Buffers":
        """Version 0: the target is the anchor, the optimizer's state is zero."""
        if method_named(terms.method).outer == "adamw":
            outer = AdamWState.zeros_like(anchor).tensors()
        elif terms.outer_momentum:
            outer = {"momentum": torch.zeros_like(anchor)}
        else:
            outer = {}
        return cls(version=0, anchor=anchor, target=anchor.clone(), outer=outer)

    def outer_digest(self) -> int | None:
        """Digest over the optimizer's state; None without one."""
        if not self.outer:
            return None
        numel = self.anchor.numel()
        return combine(digest(self.outer[name], i * numel) for i, name in enumerate(sorted(self.outer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a window's outer step runs under."""

    fragment: Fragment
    version: int
    """The version that the commit will have."""
    round: RoundPlan
    outer: OuterSettings
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A commit before it is durable."""

    buffers: Buffers
    update: bytearray
    """The encoded update, header included."""
    anchor_digest: int
    target_digest: int
    outer_digest: int | None
    delta_norm: float
    """Norm of the merged delta."""


@torch.no_grad()
def first_anchor(fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """The anchor of version 0 from named tensors, canonical (protocol M), fp32 [numel]."""
    flat = torch.empty(fragment.numel)
    flatten_into(fragment, tensors, flat)
    canonicalise_(flat)
    return flat


@torch.no_grad()
def merge(
    inputs: Sequence[tuple[bytearray | memoryview | bytes, float]], step: Step, codec_up: str, base: int
) -> Tensor:
    """Σ weight · decoded delta in the given order, fp32 [numel] (protocol M)."""
    codec, numel = codec_named(codec_up), step.fragment.numel
    expect = Expected(
        codecs=(codec,),
        fragment=step.fragment.index,
        numel=numel,
        version=step.version,
        base=base,
        newest_epoch=step.epoch,
    )
    total = torch.zeros(numel)
    for blob, weight in inputs:
        codec.decode_add_(parse_blob(blob, expect)[1], total, weight)
    return total


@torch.no_grad()
def advance(buffers: Buffers, delta: Tensor, step: Step, terms: Terms) -> Buffers:
    """The outer step: new target and optimizer state; the anchor stays."""
    target = buffers.target.clone()
    outer = {name: tensor.clone() for name, tensor in buffers.outer.items()}
    if method_named(terms.method).outer == "adamw":
        adamw_step_(
            target,
            AdamWState(**outer),
            delta,
            fragment=step.fragment,
            step=step.version,
            lr=schedule.learning_rate(terms, step.round.start),
            grad_norm=norm_sq(delta) ** 0.5,
            settings=AdamWSettings(clip=terms.clip, weight_decay=terms.weight_decay),
        )
    else:
        outer_step_(target, outer.get("momentum"), delta, step.outer)
    return Buffers(version=buffers.version, anchor=buffers.anchor, target=target, outer=outer)


@torch.no_grad()
def publish(stepped: Buffers, step: Step, codec_down: str, delta: Tensor) -> Result:
    """Encode target − anchor, and give the anchor what the nodes will decode."""
    codec, numel = codec_named(codec_down), step.fragment.numel
    update = bytearray(blob_bytes(codec, numel))
    codec.encode_into(stepped.target - stepped.anchor, as_tensor(update)[HEADER_BYTES:])
    header = BlobHeader(
        codec=codec,
        fragment=step.fragment.index,
        numel=numel,
        version=step.version,
        base=step.version - 1,
        epoch=step.epoch,
    )
    pack_blob_into(header, update)
    anchor = stepped.anchor.clone()
    apply_update_(anchor, update, step, codec_down)
    buffers = Buffers(version=step.version, anchor=anchor, target=stepped.target, outer=stepped.outer)
    return Result(
        buffers=buffers,
        update=update,
        anchor_digest=digest(anchor),
        target_digest=digest(buffers.target),
        outer_digest=buffers.outer_digest(),
        delta_norm=norm_sq(delta) ** 0.5,
    )


@torch.no_grad()
def apply_update_(anchor: Tensor, update: bytes | bytearray | memoryview, step: Step, codec_down: str) -> None:
    """anchor += decoded update: the one line that makes all anchors equal."""
    codec = codec_named(codec_down)
    expect = Expected(
        codecs=(codec,),
        fragment=step.fragment.index,
        numel=step.fragment.numel,
        version=step.version,
        base=step.version - 1,
        newest_epoch=step.epoch,
    )
    codec.decode_add_(parse_blob(update, expect)[1], anchor, 1.0)
