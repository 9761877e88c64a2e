"""Size and error of a codec's setting on given numbers, for choosing settings."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.codec import L_GRECO_SHARES, Codec, flat
from farloop.quant.formats.lowrank import MOST_RANK, LowrankCodec
from farloop.quant.formats.q4r import L_GRECO_FACTORS, Q4rCodec
from farloop.quant.formats.topk import CHUNK, SIDE, TopkCodec
from farloop.quant.norm import norm_sq

SAMPLE_ELEMENTS = 1 << 14  # per tensor: enough for its error within a few percent, in a millisecond
_PIECE = 1024  # elements of one piece of a sample: whole blocks of every format


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A point of a codec's rate–distortion curve."""

    bits: int  # of the payload, after the entropy stage if there is one
    error: float  # squared norm of the error


def candidates(codec: Codec) -> list[Codec]:
    """What a tensor may get of a codec with the policy l-greco; the equal choice first. Empty for any other codec."""
    match codec:
        case Q4rCodec(policy="l-greco"):
            plain = replace(codec, policy="relative", alpha=1.0)
            # Four digits: the spelling travels with every commit.
            steps = (float(f"{codec.step[0] * factor:.4g}") for factor in L_GRECO_FACTORS)
            return [replace(plain, step=(step,)) for step in steps]
        case TopkCodec(policy="l-greco"):
            equal = replace(codec, policy="equal", alpha=1.0)
            return [replace(equal, k=(k,)) for k in _multiples(codec.k[0], CHUNK)]
        case LowrankCodec(policy="l-greco"):
            same = replace(codec, policy="equal", alpha=1.0)
            return [replace(same, rank=(rank,)) for rank in _multiples(codec.rank[0], MOST_RANK)]
    return []


def joined(codecs: Sequence[Codec]) -> Codec:
    """One codec of the candidates that were chosen for a fragment's tensors, in their order."""
    name = {"q4r": "step", "topk": "k", "lowrank": "rank"}[codecs[0].name]
    numbers: dict[str, Any] = {name: tuple(number for codec in codecs for number in getattr(codec, name))}
    return replace(codecs[0], **numbers)


def _multiples(number: int, most: int) -> Iterable[int]:
    return dict.fromkeys(min(max(1, round(share * number)), most) for share in L_GRECO_SHARES)


def measure(codec: Codec, x: Tensor) -> Rate:
    """Encode a sample of x, fp32 of any shape, and scale up; exact if it has at most `SAMPLE_ELEMENTS`, and where
    elements depend on each other, as in a matrix of low rank. Raises NonFiniteError: as encoding."""
    sample = _sample_of(codec, x)
    fragment = flat(sample.numel())
    fragment = replace(fragment, tensors=(replace(fragment.tensors[0], shape=tuple(sample.shape)),))
    sample = sample.reshape(-1)
    payload = codec.encode(sample, fragment)
    header = BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0)
    wire_bytes = len(pack_blob(header, payload)) if codec.traits.entropy_coded else payload.numel()
    lost = sample.clone()
    codec.decode_add_(payload, lost, -1.0, fragment)
    scale = x.numel() / sample.numel()
    return Rate(bits=math.ceil(8 * wire_bytes * scale), error=norm_sq(lost) * scale)


def _sample_of(codec: Codec, x: Tensor) -> Tensor:
    if isinstance(codec, LowrankCodec):
        return x.cpu()
    if isinstance(codec, TopkCodec) and x.dim() == 2:  # bands of its squares
        bands = x.shape[0] // SIDE
        wanted = max(1, min(bands, SAMPLE_ELEMENTS // (SIDE * x.shape[1])))
        starts = [index * bands // wanted * SIDE for index in range(wanted)]
        return torch.cat([x[start : start + SIDE] for start in starts]).cpu() if wanted < bands else x.cpu()
    return _sample(x.reshape(-1))


def _sample(x: Tensor) -> Tensor:
    """Pieces of x [n] at even distances, fp32, on the CPU."""
    if x.numel() <= SAMPLE_ELEMENTS:
        return x.cpu()
    pieces, wanted = x.numel() // _PIECE, SAMPLE_ELEMENTS // _PIECE
    starts = [index * pieces // wanted * _PIECE for index in range(wanted)]
    return torch.cat([x[start : start + _PIECE] for start in starts]).cpu()
