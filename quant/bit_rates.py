"""Size and error of a codec's setting on given numbers, for choosing settings."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.codec import Codec, flat
from farloop.quant.norm import norm_sq

SAMPLE_ELEMENTS = 1 << 14  # per tensor: enough for its error within a few percent, in a millisecond
_PIECE = 1024  # elements of one piece of a sample: whole blocks of every format


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A point of a codec's rate–distortion curve."""

    bits: int  # of the payload, after the entropy stage if there is one
    error: float  # squared norm of the error


def measure(codec: Codec, x: Tensor) -> Rate:
    """Encode a sample of x, fp32 [n], and scale up; exact if n is at most `SAMPLE_ELEMENTS`.

    Raises:
        NonFiniteError: as encoding.
    """
    sample = _sample(x)
    fragment = flat(sample.numel())
    payload = codec.encode(sample, fragment)
    header = BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0)
    wire_bytes = len(pack_blob(header, payload)) if codec.traits.entropy_coded else payload.numel()
    lost = sample.clone()
    codec.decode_add_(payload, lost, -1.0, fragment)
    scale = x.numel() / sample.numel()
    return Rate(bits=math.ceil(8 * wire_bytes * scale), error=norm_sq(lost) * scale)


def _sample(x: Tensor) -> Tensor:
    """Pieces of x at even distances, fp32, on the CPU."""
    if x.numel() <= SAMPLE_ELEMENTS:
        return x.cpu()
    pieces, wanted = x.numel() // _PIECE, SAMPLE_ELEMENTS // _PIECE
    starts = [index * pieces // wanted * _PIECE for index in range(wanted)]
    return torch.cat([x[start : start + _PIECE] for start in starts]).cpu()
