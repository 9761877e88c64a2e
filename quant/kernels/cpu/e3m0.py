"""`e3m0`, as `reference/e3m0.py` says."""

import numpy as np

from farloop.quant.kernels.cpu import loops
from farloop.quant.kernels.cpu.loops import block_loops
from farloop.quant.kernels.cpu.primitives import (
    MAGNITUDE,
    Number,
    Numbers,
    bits,
    from_bits,
    from_scale,
    inlined,
    load_u16,
    store_u16,
    to_scale,
)
from farloop.quant.packing import BF16_LARGEST, E3M0_BLOCK

_LARGEST_SCALE = np.int32(BF16_LARGEST)
_GROUPS = np.uint64(loops.BLOCK // E3M0_BLOCK)
_B = np.uint64(E3M0_BLOCK)
_HALF = np.uint64(E3M0_BLOCK // 2)
_TWO = np.uint64(2)
_INFINITY = np.float32(np.inf)
_T1, _T2, _T3, _T4, _T5, _T6, _T7 = (np.float32(t) for t in (2.0**-7, *(1.5 * 2.0**-j for j in range(6, 0, -1))))
"""Where the codes begin, in units of the scale; products with one are exact."""


@inlined
def code_of(x: Number, s: Number) -> Number:
    """How many thresholds x reaches, and 8 if it is negative and reaches one; int32."""
    size = from_bits(np.int32(bits(x) & MAGNITUDE))
    m = np.int32(size >= s * _T1)
    m = np.int32(m + np.int32(size >= s * _T2))
    m = np.int32(m + np.int32(size >= s * _T3))
    m = np.int32(m + np.int32(size >= s * _T4))
    m = np.int32(m + np.int32(size >= s * _T5))
    m = np.int32(m + np.int32(size >= s * _T6))
    m = np.int32(m + np.int32(size >= s * _T7))
    return np.int32(m | 8) if x < 0 and m > 0 else m


@inlined
def quantise(
    v: Numbers,
    magnitude: Number,
    scales: Numbers,
    scale_at: Number,
    codes: Numbers,
    at: Number,
    noise: Numbers,
    element: Number,
    step: Number,
    seed: Number,
    mode: Number,
) -> None:
    for group in range(_GROUPS):
        first, codes_at = group * _B, at + group * _HALF
        largest = np.int32(0)
        for i in range(_B):
            size = np.int32(bits(v[first + i]) & MAGNITUDE)
            largest = size if size > largest else largest
        scale = to_scale(from_bits(largest), _LARGEST_SCALE)
        store_u16(scales, scale_at + _TWO * group, np.uint16(scale))
        s = from_scale(scale) if scale != 0 else _INFINITY
        for i in range(_HALF):
            low, high = code_of(v[first + i], s), code_of(v[first + _HALF + i], s)
            codes[codes_at + i] = np.uint8(np.int32(low | np.int32(high << 4)))


@inlined
def value_of(code: Number, s: Number) -> Number:
    """±2^(m−7)·s: the power of two is made of its bits."""
    m = np.int32(code & 7)
    power = np.int32(np.int32(m + 120) << 23) if m != 0 else np.int32(0)
    return from_bits(np.int32(power | np.int32(np.int32(code & 8) << 28))) * s


@inlined
def restore(t: Numbers, scales: Numbers, scale_at: Number, codes: Numbers, at: Number) -> None:
    for group in range(_GROUPS):
        first, codes_at = group * _B, at + group * _HALF
        s = from_scale(np.int32(load_u16(scales, scale_at + _TWO * group)))
        for i in range(_HALF):
            pair = np.int32(codes[codes_at + i])
            t[first + i] = value_of(np.int32(pair & 15), s)
            t[first + _HALF + i] = value_of(np.int32(pair >> 4), s)


E3M0 = block_loops("e3m0", quantise, restore, scale_bytes=2 * loops.BLOCK // E3M0_BLOCK, code_bytes=loops.BLOCK // 2)
