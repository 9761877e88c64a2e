"""The four Triton kernels of every block format (encode, decode, weighted sum, outer step), those that sum fp32
numbers, and their launch.

A program takes R rows of 2·H elements as two tiles [R, H], the left and the right halves: 4-bit codes are packed half
split, so no value changes lanes. A format has two device functions that know its bytes:

    WRITE(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how) -> (lo, hi)
        stores scales and codes, returns what they decode to
    READ(payload, codes_start, row, inside_lo, inside_hi, first) -> (lo, hi)

`row` int64 [R] counts from the fragment's start; `absmax` int32 [R] holds the bits of each row's largest magnitude;
`inside_*` [R, H] say which elements the payload has, `first` [R] whether it has the row's first. `how` is for q4r, and
in part for sign and lattice: (a step per block or None, else one for all, the mixed seed, whether steps are scales,
whether rounding is stochastic).

Every product that is added is rounded first: kernels are compiled without contraction. Masks are multiples of 16
where lengths are, and then all fp32 traffic is 128 bits wide.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import triton
from triton import language as tl

from farloop.quant.kernels.gpu.formats import INFINITY, MAGNITUDE, as_float, bits, cast_to_bf16, ratio, uniform

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


_RUNTIME = ["first_row", "first_index", "scale_bytes", "seed", "step", "beta", "lr", "mu"]
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
def _delta(x, local, residual, beta, at, inside):
    """v = x, or cast(x) − local; then fl(v + fl(β·residual)). bf16 comes as int16."""
    v = tl.load(x + at, mask=inside, other=0.0)
    if local is not None:
        other = tl.load(local + at, mask=inside, other=0)
        if local.dtype.element_ty == tl.int16:
            v = cast_to_bf16(v) - (other.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        elif local.dtype.element_ty == tl.float16:
            v = v.to(tl.float16).to(tl.float32) - other.to(tl.float32)
        else:
            v = v - other
    if residual is not None:
        v = v + tl.load(residual + at, mask=inside, other=0.0) * beta
    return v


@triton.jit(do_not_specialize=_RUNTIME)
def encode_kernel(
    x, local, residual, payload, first_bad, steps,
    numel, written, first_row, scale_bytes, codes_start, beta, step, seed,
    WRITE: tl.constexpr, ABSOLUTE: tl.constexpr, STOCHASTIC: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Encode `numel` elements of x; elements from there to `written` count as 0 and are part of the payload too."""
    row, lo_at, hi_at = _rows(R, H)
    lo = _delta(x, local, residual, beta, lo_at, lo_at < numel)
    hi = _delta(x, local, residual, beta, hi_at, hi_at < numel)
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


@triton.jit
def add_kernel(
    payloads, weights, acc, numel, padded, codes_start,
    READ: tl.constexpr, K: tl.constexpr, OVERWRITE: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """acc (+)= Σ w·t over K payloads from first to last: u = fl(w·t), acc = fl(acc + u)."""
    row, lo_at, hi_at = _rows(R, H)
    if OVERWRITE:
        lo = tl.zeros([R, H], tl.float32)
        hi = tl.zeros([R, H], tl.float32)
    else:
        lo = tl.load(acc + lo_at, mask=lo_at < numel, other=0.0)
        hi = tl.load(acc + hi_at, mask=hi_at < numel, other=0.0)
    for k in tl.static_range(K):
        t_lo, t_hi = READ(payloads[k], codes_start, row, lo_at < padded, hi_at < padded, row * (2 * H) < padded)
        lo = lo + t_lo * weights[k]
        hi = hi + t_hi * weights[k]
    tl.store(acc + lo_at, lo, mask=lo_at < numel)
    tl.store(acc + hi_at, hi, mask=hi_at < numel)


@triton.jit
def _nesterov(delta, target, momentum, new_target, new_momentum, lr, mu, at, inside):
    """m' = fl(fl(μ·m) + d), g = fl(fl(fl(μ·m') + d)·ν), t' = fl(t − g): `nesterov_step_` of `algo.outer_optimizers`."""
    d = tl.load(delta + at, mask=inside, other=0.0)
    g = d
    if momentum is not None:
        m = tl.load(momentum + at, mask=inside, other=0.0) * mu + d
        tl.store(new_momentum + at, m, mask=inside)
        g = m * mu + d
    t = tl.load(target + at, mask=inside, other=0.0) - g * lr
    tl.store(new_target + at, t, mask=inside)
    return t


@triton.jit(do_not_specialize=_RUNTIME)
def outer_kernel(
    delta, target, momentum, anchor, payload, new_target, new_momentum, new_anchor, first_bad, steps,
    numel, padded, scale_bytes, codes_start, lr, mu, step, seed,
    WRITE: tl.constexpr, ABSOLUTE: tl.constexpr, STOCHASTIC: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Step the target, encode target − anchor, and move the anchor by what was encoded."""
    row, lo_at, hi_at = _rows(R, H)
    a_lo = tl.load(anchor + lo_at, mask=lo_at < numel, other=0.0)
    a_hi = tl.load(anchor + hi_at, mask=hi_at < numel, other=0.0)
    lo = _nesterov(delta, target, momentum, new_target, new_momentum, lr, mu, lo_at, lo_at < numel) - a_lo
    hi = _nesterov(delta, target, momentum, new_target, new_momentum, lr, mu, hi_at, hi_at < numel) - a_hi
    absmax = _row_absmax(lo, hi)
    _report(lo, hi, absmax, row, first_bad, H)
    _zero_gap(payload, scale_bytes, codes_start)
    decoded_lo, decoded_hi = WRITE(
        payload, codes_start, row, lo, hi, absmax, lo_at < padded, hi_at < padded, row * (2 * H) < padded,
        (steps, step, seed, ABSOLUTE, STOCHASTIC),
    )  # fmt: skip
    tl.store(new_anchor + lo_at, a_lo + decoded_lo, mask=lo_at < numel)
    tl.store(new_anchor + hi_at, a_hi + decoded_hi, mask=hi_at < numel)


@triton.jit
def _thrown(x, s, u):
    """1 with probability |x| ÷ s, twice that for x < 0: int32, 0 where s is 0."""
    chosen = ratio(as_float(bits(x) & MAGNITUDE), s) > u
    return chosen.to(tl.int32) << (x < 0).to(tl.int32)


@triton.jit
def _pair_of_codes(code, R: tl.constexpr):
    """Codes [R, 32] of 2 bits, the second sixteen above the first: int32 [R, 16]."""
    return tl.sum(tl.reshape(code, [R, 2, 16]) << (2 * tl.arange(0, 2)[None, :, None]), 1)


@triton.jit(do_not_specialize=_RUNTIME)
def ternary_kernel(x, scales, codes, numel, seed, R: tl.constexpr):
    """The codes of `ternary`, of groups of 64 with a scale each; what is missing of the last counts as 0."""
    row, lo_at, hi_at = _rows(R, 32)
    inside = row * 64 < numel
    s = tl.load(scales + row, mask=inside, other=0.0)[:, None]
    low = _thrown(tl.load(x + lo_at, mask=lo_at < numel, other=0.0), s, uniform(row, seed, 0))
    high = _thrown(tl.load(x + hi_at, mask=hi_at < numel, other=0.0), s, uniform(row, seed, 32))
    packed = _pair_of_codes(low, R) | (_pair_of_codes(high, R) << 4)
    at = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(codes + at, packed.to(tl.uint8), mask=inside[:, None])


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
