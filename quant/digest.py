"""A 64-bit digest of fp32 numbers that does not depend on order, tiling or device, and the clean-up of their bits.

Equal digests mean equal anchors. It detects errors, not malice.
"""

from collections.abc import Iterable, Sequence
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
_ACCELERATOR_CHUNK: Final = 4 * TILE

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
    chunk = _chunk(x.device)
    bits = x.detach().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    finite = torch.ones((), dtype=torch.bool, device=x.device)
    for start in range(0, x.numel(), chunk):
        part, first = bits[start : start + chunk], first_index + start
        total.add_(_weighted(part, torch.arange(first, first + part.numel(), device=x.device, dtype=torch.int64)))
        finite.logical_and_(torch.isfinite(x[start : start + chunk]).all())
    found, is_finite = torch.stack([total, finite.to(torch.int64)]).tolist()  # one wait for a device
    return found & _MASK, bool(is_finite)


def box_digest(box: Tensor, offset: Sequence[int], shape: Sequence[int]) -> int:
    """What a box of a tensor adds to the digest of the whole, flat: those of boxes that make it up `combine` to it.

    Args:
        box: its numbers, of any floating type and strides; they count as fp32.
        offset: of the box in the tensor, in every dimension.
        shape: of the tensor.
    """
    run, behind = 1, 1  # elements side by side in both, and those of the tensor behind the dimensions seen so far
    rows = torch.zeros(1, dtype=torch.int64, device=box.device)  # first index of every run
    for extent, first, size in zip(reversed(box.shape), reversed(offset), reversed(shape), strict=True):
        if run == behind:
            run, rows = run * extent, rows + first * behind
        else:
            starts = (torch.arange(extent, device=box.device, dtype=torch.int64) + first) * behind
            rows = (starts.unsqueeze(1) + rows).view(-1)
        behind *= size
    values = box.detach().reshape(len(rows), run)
    if len(rows) == 1:
        return combine(digest(values[0, at : at + TILE].float(), int(rows) + at) for at in range(0, run, TILE))
    total = torch.zeros((), dtype=torch.int64, device=box.device)
    count, places = max(1, _chunk(box.device) // max(1, run)), torch.arange(run, device=box.device, dtype=torch.int64)
    for row in range(0, len(rows), count):
        part = values[row : row + count].float()
        total.add_(_weighted(part.view(torch.int32), rows[row : row + count].unsqueeze(1) + places))
    return int(total.item()) & _MASK


def combine(parts: Iterable[int]) -> int:
    """The digest of a whole from those of its parts, each taken at its own `first_index`."""
    return sum(parts) & _MASK


def canonicalise_(x: Tensor) -> None:
    """Set every |x| < 2⁻¹²⁶ of x, fp32 [n], to +0, by bit patterns: machines differ in subnormals and −0."""
    assert x.dtype == torch.float32 and x.dim() == 1
    for start in range(0, x.numel(), TILE):
        part = x.detach()[start : start + TILE]
        part.masked_fill_(part.view(torch.int32).bitwise_and(0x7FFFFFFF) < 0x00800000, 0.0)


def _chunk(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _ACCELERATOR_CHUNK


def _weighted(bits: Tensor, z: Tensor) -> Tensor:
    """Σ bits · odd(mix(z)) of int32 bits and int64 indices of one shape, which are overwritten; an int64 scalar."""
    _xor_shifted_(z, 30)
    z.mul_(_FIRST_MULTIPLIER)
    _xor_shifted_(z, 27)
    z.mul_(_SECOND_MULTIPLIER)
    _xor_shifted_(z, 31)
    z.bitwise_or_(1).mul_(bits.to(torch.int64).bitwise_and_(0xFFFFFFFF))
    return z.sum()  # int64 sums and products wrap: arithmetic mod 2⁶⁴


def _xor_shifted_(z: Tensor, bits: int) -> None:
    """z ^= z >> bits, with the logical shift that int64 lacks: the copied sign bits are masked away."""
    z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))
