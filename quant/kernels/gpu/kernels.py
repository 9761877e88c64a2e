"""The three Triton kernels of every block format (encode, decode, add), those that sum fp32 numbers, and their launch.

A program takes R rows of 2·H elements as two tiles [R, H], the left and the right halves: 4-bit codes are packed half
split, so no value changes lanes. A format has two device functions that know its bytes:

    WRITE(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how) -> (lo, hi)
        stores scales and codes, returns what they decode to
    READ(payload, codes_start, row, inside_lo, inside_hi, first) -> (lo, hi)

`row` int64 [R] counts from the fragment's start; `absmax` int32 [R] holds the bits of each row's largest magnitude;
`inside_*` [R, H] say which elements the payload has, `first` [R] whether it has the row's first. `how` is for q4r: (a
step per block or None, else one for all, the mixed seed, whether steps are scales, whether rounding is stochastic).

Every product that is added is rounded first: kernels are compiled without contraction. Masks are multiples of 16
where lengths are, and then all fp32 traffic is 128 bits wide.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import triton
from triton import language as tl

from farloop.quant.kernels.gpu.formats import INFINITY, MAGNITUDE, bits

# A product and a sum round separately, as on CPUs. Triton's own default differs between releases.
OPTIONS: Final[Mapping[str, Any]] = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel with its arguments: what a device runs, and what a test compiles without one."""

    kernel: Any  # a `triton.jit` function; Triton has no types
    programs: int
    arguments: Mapping[str, Any]  # by name: tensors, numbers, None, tuples of these, and the constants in capitals
    warps: int = 4  # of a program

    def run(self) -> None:
        """Start it on the current device's stream; it may still be running when this returns."""
        self.kernel[(self.programs,)](**self.arguments, num_warps=self.warps, **OPTIONS)


_RUNTIME = ["first_row", "first_index", "scale_bytes", "seed", "step", "beta", "weight"]
"""Arguments that differ between fragments: no kernel is compiled again for them."""


@triton.jit
def _rows(R: tl.constexpr, H: tl.constexpr):
    """Of this program: rows int64 [R], and the element numbers of the two halves, int64 [R, H]."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    lo = row[:, None] * (2 * H) + tl.arange(0, H)[None, :]
    return row, lo, lo + H


@triton.jit
def _row_absmax(lo, hi):
    """Bits of the largest magnitude of each row, int32 [R]; as integers, since `tl.max` may drop a NaN."""
    return tl.max(tl.maximum(bits(lo) & MAGNITUDE, bits(hi) & MAGNITUDE), 1)


@triton.jit
def _report(lo, hi, absmax, row, first_bad, H: tl.constexpr):
    """first_bad int64 [1] ← the smallest number of an element that is not finite, if that is smaller."""
    column = tl.arange(0, H)[None, :]
    column_lo = tl.where((bits(lo) & MAGNITUDE) >= INFINITY, column, 2 * H)
    column_hi = tl.where((bits(hi) & MAGNITUDE) >= INFINITY, column + H, 2 * H)
    bad = row * (2 * H) + tl.min(tl.minimum(column_lo, column_hi), 1)
    tl.atomic_min(first_bad + tl.zeros_like(row), bad, mask=absmax >= INFINITY, sem="relaxed")


@triton.jit
def _zero_gap(payload, scale_bytes, codes_start):
    """The bytes between scales and codes, fewer than 64, by the first program."""
    at = scale_bytes + tl.arange(0, 64)
    end = tl.where(tl.program_id(0) == 0, codes_start, 0)
    tl.store(payload + at, tl.zeros_like(at).to(tl.uint8), mask=at < end)


@triton.jit
def _fed_back(x, residual, beta, at, inside):
    """fl(x + fl(β·residual)), or x."""
    v = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        v = v + tl.load(residual + at, mask=inside, other=0.0) * beta
    return v


@triton.jit(do_not_specialize=_RUNTIME)
def encode_kernel(
    x, residual, payload, first_bad, steps,
    numel, written, first_row, scale_bytes, codes_start, beta, step, seed,
    WRITE: tl.constexpr, ABSOLUTE: tl.constexpr, STOCHASTIC: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Encode `numel` elements of x; elements from there to `written` count as 0 and are part of the payload too."""
    row, lo_at, hi_at = _rows(R, H)
    lo = _fed_back(x, residual, beta, lo_at, lo_at < numel)
    hi = _fed_back(x, residual, beta, hi_at, hi_at < numel)
    absmax = _row_absmax(lo, hi)
    _report(lo, hi, absmax, row, first_bad, H)
    _zero_gap(payload, scale_bytes, codes_start)
    decoded_lo, decoded_hi = WRITE(
        payload, codes_start, first_row + row, lo, hi, absmax, lo_at < written, hi_at < written,
        row * (2 * H) < written, (steps, step, seed, ABSOLUTE, STOCHASTIC),
    )  # fmt: skip
    if residual is not None:
        tl.store(residual + lo_at, lo - decoded_lo, mask=lo_at < numel)
        tl.store(residual + hi_at, hi - decoded_hi, mask=hi_at < numel)


@triton.jit(do_not_specialize=_RUNTIME)
def decode_kernel(
    payload, out, numel, padded, first_row, codes_start, READ: tl.constexpr, R: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Decode `numel` elements; the payload has `padded` from there on. Not a sum from zero: −0 stays −0."""
    row, lo_at, hi_at = _rows(R, H)
    lo, hi = READ(payload, codes_start, first_row + row, lo_at < padded, hi_at < padded, row * (2 * H) < padded)
    tl.store(out + lo_at, lo, mask=lo_at < numel)
    tl.store(out + hi_at, hi, mask=hi_at < numel)


@triton.jit(do_not_specialize=_RUNTIME)
def add_kernel(
    payload, weight, acc, numel, padded, codes_start, READ: tl.constexpr, R: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """acc = fl(acc + fl(weight · decoded))."""
    row, lo_at, hi_at = _rows(R, H)
    lo, hi = READ(payload, codes_start, row, lo_at < padded, hi_at < padded, row * (2 * H) < padded)
    tl.store(acc + lo_at, tl.load(acc + lo_at, mask=lo_at < numel, other=0.0) + lo * weight, mask=lo_at < numel)
    tl.store(acc + hi_at, tl.load(acc + hi_at, mask=hi_at < numel, other=0.0) + hi * weight, mask=hi_at < numel)


@triton.jit
def tile_sums_kernel(x, sums, numel, TILE: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of squares as `norm.py` defines them, one for each program: halves onto halves, two numbers at a time."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    v = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float64)
    v = v * v
    for _ in tl.static_range(LEVELS):
        v = tl.sum(tl.reshape(v, [2, v.shape[0] // 2]), 0)
    tl.store(sums + tl.program_id(0) + tl.arange(0, 1), v)


@triton.jit(do_not_specialize=_RUNTIME)
def digest_kernel(x, partials, numel, first_index, TILE: tl.constexpr):
    """partials int64 [programs, 2] ← a part of the digest of `digest.py`, and how many numbers are not finite."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    word = bits(tl.load(x + at, mask=at < numel, other=0.0))
    z = (at + first_index).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) | 1
    total = tl.sum(z * word.to(tl.uint32, bitcast=True).to(tl.uint64), 0)
    unusable = tl.sum(((word & MAGNITUDE) >= INFINITY).to(tl.int32), 0)
    tl.store(partials + 2 * tl.program_id(0), total.to(tl.int64, bitcast=True))
    tl.store(partials + 2 * tl.program_id(0) + 1, unusable.to(tl.int64))
