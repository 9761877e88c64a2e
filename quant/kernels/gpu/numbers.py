"""Device functions on numbers that all formats share: rounding on integer bits, division, scales.

Nothing here depends on how a compiler or an interpreter casts: rounding to bf16 is integer arithmetic, rounding to an
integer an exact addition. Kernels are compiled without contraction (`kernels.py`), and never with fast-math.
"""

import triton
from triton import language as tl

INFINITY = tl.constexpr(0x7F800000)
"""Magnitude bits from here on are not a finite number."""

MAGNITUDE = tl.constexpr(0x7FFFFFFF)

SMALLEST_SCALE = tl.constexpr(0x0D80)
"""As `reference/scales.py`: bf16 bits of 2⁻¹⁰⁰."""

_SHIFTER = tl.constexpr(12582912.0)
"""1.5·2²³: adding it to |x| ≤ 2²² leaves x, rounded to nearest, ties to even, in the lower bits."""

_SHIFTER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def bits(x):
    """fp32 → int32, the same bits."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(pattern):
    """int32 → fp32, the same bits."""
    return pattern.to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x, LARGEST: tl.constexpr):
    """Finite x fp32 → bf16 bits in int32, nearest, ties to even; magnitudes above LARGEST become it."""
    magnitude = bits(x) & MAGNITUDE
    magnitude = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return tl.minimum(magnitude, LARGEST) | ((bits(x) >> 16) & 0x8000)


@triton.jit
def from_bf16(pattern):
    """bf16 bits in int32 → fp32, exact. Bits above the lower 16 are dropped."""
    return as_float(pattern << 16)


@triton.jit
def to_scale(x, LARGEST: tl.constexpr):
    """x fp32 [R] → the bf16 bits that are stored for it, in int32 [R]: 0 below 2⁻¹⁰⁰."""
    pattern = to_bf16(x, LARGEST)
    return tl.where((pattern & 0x7FFF) < SMALLEST_SCALE, 0, pattern)


@triton.jit
def cast_to_bf16(x):
    """x fp32 → the nearest bf16 as fp32, as torch casts: infinite beyond the largest, and NaN stays NaN."""
    pattern = bits(x)
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) & -65536
    # A NaN of many ones would be carried over the sign and come out as a zero.
    return tl.where((pattern & MAGNITUDE) >= INFINITY, x, as_float(rounded))


@triton.jit
def ratio(x, s):
    """x [R, H] ÷ s [R, 1], correctly rounded; x itself where s is 0."""
    return tl.div_rn(x, tl.where(s == 0, 1.0, s) + tl.zeros_like(x))


@triton.jit
def nearest(x):
    """|x| ≤ 2²² → (the nearest integer, ties to even, as fp32, never −0; the same in int32)."""
    shifted = x + _SHIFTER
    return shifted - _SHIFTER, bits(shifted) - _SHIFTER_BITS


@triton.jit
def small_integer(k, ZERO: tl.constexpr):
    """k int32 in 0…255 → k − ZERO in fp32. Conversions run at an eighth of the speed of this."""
    return as_float(k | 0x4B000000) - (8388608.0 + ZERO)
