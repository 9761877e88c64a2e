"""A 64-bit digest of fp32 numbers that does not depend on order, tiling or device, and the clean-up of their bits.

Equal digests mean equal anchors. It detects errors, not malice.
"""

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from farloop.algo.spec import TILE
from farloop.quant.errors import NonFiniteError
from farloop.quant.kernels.dispatch import fast_digest

_MASK: Final = (1 << 64) - 1

# Only memory and speed depend on these. CPU: the int64 temporaries of a chunk stay in the L2 cache. Accelerator: a
# launch should last longer than it costs.
_CPU_CHUNK: Final = 1 << 15
_ACCELERATOR_CHUNK: Final = 16 * TILE

# Multipliers of splitmix64's finaliser (Stafford's "Mix13", as in Steele, Lea and Flood, OOPSLA 2014), as int64.
_FIRST_MULTIPLIER: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_MULTIPLIER: Final = 0x94D049BB133111EB - (1 << 64)


def digest(x: Tensor, first_index: int = 0) -> int:
    """Σ bits(x_i) · odd(mix(i)) mod 2⁶⁴ over x, fp32 [n], whose first element has the index `first_index`.

    bits is the u32 pattern, mix the finaliser of splitmix64, odd(z) = z | 1. Zeros add nothing, so padding does not
    show. The parts of a fragment add up: see `combine`.
    """
    return _digest(x, first_index)[0]


def finite_digest(x: Tensor, first_index: int = 0) -> int:
    """As `digest`, in the same pass. Raises NonFiniteError: x has a NaN or an infinity."""
    total, finite = _digest(x, first_index)
    if not finite:
        raise NonFiniteError(int(torch.isfinite(x).logical_not_().nonzero()[0]))
    return total


def _digest(x: Tensor, first_index: int) -> tuple[int, bool]:
    assert x.dtype == torch.float32 and x.dim() == 1
    fast = fast_digest(x.device)
    return fast(x.detach().contiguous(), first_index) if fast is not None else digest_by_reference(x, first_index)


def digest_by_reference(x: Tensor, first_index: int) -> tuple[int, bool]:
    """The digest of x, fp32 [n], and whether all of x is finite."""
    chunk = _CPU_CHUNK if x.device.type == "cpu" else _ACCELERATOR_CHUNK
    bits = x.detach().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    finite = torch.ones((), dtype=torch.bool, device=x.device)
    for start in range(0, x.numel(), chunk):
        part = bits[start : start + chunk].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        part.mul_(_odd_mix(first_index + start, part.numel(), x.device))
        total.add_(part.sum())  # int64 sums and products wrap: arithmetic mod 2⁶⁴
        finite.logical_and_(torch.isfinite(x[start : start + chunk]).all())
    return int(total.item()) & _MASK, bool(finite.item())


def combine(parts: Iterable[int]) -> int:
    """The digest of a whole from those of its parts, each taken at its own `first_index`."""
    return sum(parts) & _MASK


def canonicalise_(x: Tensor) -> None:
    """Set every |x| < 2⁻¹²⁶ of x, fp32 [n], to +0, by bit patterns: machines differ in subnormals and −0."""
    assert x.dtype == torch.float32 and x.dim() == 1
    for start in range(0, x.numel(), TILE):
        part = x.detach()[start : start + TILE]
        part.masked_fill_(part.view(torch.int32).bitwise_and(0x7FFFFFFF) < 0x00800000, 0.0)


def _odd_mix(first: int, count: int, device: torch.device) -> Tensor:
    """odd(mix(i)) for i = first … first + count − 1, int64 [count]."""
    z = torch.arange(first, first + count, dtype=torch.int64, device=device)
    _xor_shifted_(z, 30)
    z.mul_(_FIRST_MULTIPLIER)
    _xor_shifted_(z, 27)
    z.mul_(_SECOND_MULTIPLIER)
    _xor_shifted_(z, 31)
    return z.bitwise_or_(1)


def _xor_shifted_(z: Tensor, bits: int) -> None:
    """z ^= z >> bits, with the logical shift that int64 lacks: the copied sign bits are masked away."""
    z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))
