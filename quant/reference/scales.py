"""The bf16 numbers inside payloads: rounded on integer bits, so that every device gives the same 16 bits.

Casts are not used: some hardware conversions flush subnormals, and Triton's interpreter truncates.
"""

import torch
from torch import Tensor

from farloop.quant.errors import BadPayload
from farloop.quant.packing import BF16_LARGEST, SMALLEST_SCALE


def to_bf16(x: Tensor, largest: int = BF16_LARGEST) -> Tensor:
    """Finite x fp32 → bf16 bits int16, nearest, ties to even; magnitudes above `largest` become `largest`."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    magnitude = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return (magnitude.clamp_(max=largest) | ((bits >> 16) & 0x8000)).to(torch.int16)


def from_bf16(bits: Tensor) -> Tensor:
    """bf16 bits int16 → fp32, exact."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def to_scale(x: Tensor, largest: int) -> Tensor:
    """Finite x fp32 → the bf16 bits of the scale that is stored for it: int16, 0 if below 2⁻¹⁰⁰."""
    bits = to_bf16(x, largest)
    return torch.where((bits & 0x7FFF) < SMALLEST_SCALE, torch.zeros_like(bits), bits)


def check_scales(scales: Tensor, largest: int, *, signed: bool) -> None:
    """Raise BadPayload unless every scale, bf16 bits int16, is one that `to_scale` can have given."""
    magnitude = scales & 0x7FFF if signed else scales
    # A negative scale where none may be is a negative int16 here, and −0 is one in either case: both fall below.
    good = (scales == 0) | ((magnitude >= SMALLEST_SCALE) & (magnitude <= largest))
    if not bool(good.all()):
        first = int((~good).nonzero()[0])
        raise BadPayload(f"scale {int(scales[first]) & 0xFFFF:#06x} is out of range")
