"""`q4r`, as `reference/q4r.py` says."""

import numpy as np

from farloop.quant.kernels.cpu.loops import block_loops
from farloop.quant.kernels.cpu.primitives import (
    Number,
    Numbers,
    as_halves,
    fill,
    from_bits,
    from_scale,
    inlined,
    load_u16,
    pack_nearest,
    pack_random,
    random_words,
    store_u16,
    to_scale,
    unpack,
)
from farloop.quant.packing import Q4R_BLOCK, Q4R_GROUP, Q4R_LEAST_SCALE, Q4R_SMALLEST_MAGNITUDE, largest_scale

# Bits of the mode.
STOCHASTIC, ABSOLUTE = 1, 2

_LARGEST_SCALE = np.int32(largest_scale(8))
_LEAST_SCALE = np.float32(Q4R_LEAST_SCALE)
_SMALLEST_MAGNITUDE = np.int32(Q4R_SMALLEST_MAGNITUDE)
_EIGHT_TWICE = np.uint8(0x88)
_B = np.uint64(Q4R_BLOCK)
_WORDS = np.uint64(Q4R_BLOCK // 2)
_GROUP = np.uint64(Q4R_GROUP)
_GROUPS = np.uint64(Q4R_BLOCK // Q4R_GROUP)
_GROUP_BYTES = np.uint64(Q4R_GROUP // 2)
_BLOCK_BYTES = np.uint64(Q4R_BLOCK // 2)


@inlined
def scale_of_rms(v: Numbers, magnitude: Number, step: Number) -> Number:
    """step · rms before it is stored, from a sum of squares of whole numbers, which is exact."""
    exponent = np.int32(np.int32(magnitude >> 23) - 127)  # 2^e ≤ largest magnitude < 2^(e+1)
    unit = from_bits(np.int32(np.int32(np.int32(10 - exponent) + 127) << 23))
    total = np.int32(0)
    for i in range(_B):
        m = np.int32(np.rint(v[i] * unit))
        total = np.int32(total + np.int32(m * m))
    root = np.sqrt(np.float32(total)) * step
    return root * from_bits(np.int32(np.int32(np.int32(exponent - 14) + 127) << 23))


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
    scale = np.int32(0)
    if magnitude >= _SMALLEST_MAGNITUDE:
        wanted = step if mode & ABSOLUTE else scale_of_rms(v, magnitude, step)
        least = from_bits(magnitude) * _LEAST_SCALE
        scale = to_scale(wanted if wanted > least else least, _LARGEST_SCALE)
    s = from_scale(scale)
    if scale == 0:
        fill(codes, at, _BLOCK_BYTES, _EIGHT_TWICE)
    elif mode & STOCHASTIC:
        random_words(noise, _WORDS, element, seed)
        halves = as_halves(noise)
        for group in range(_GROUPS):
            pack_random(v, group * _GROUP, s, halves, codes, at + group * _GROUP_BYTES)
    else:
        for group in range(_GROUPS):
            pack_nearest(v, group * _GROUP, s, codes, at + group * _GROUP_BYTES)
    store_u16(scales, scale_at, np.uint16(scale))


@inlined
def restore(t: Numbers, scales: Numbers, scale_at: Number, codes: Numbers, at: Number) -> None:
    s = from_scale(np.int32(load_u16(scales, scale_at)))
    for group in range(_GROUPS):
        unpack(t, group * _GROUP, s, codes, at + group * _GROUP_BYTES)


Q4R = block_loops("q4r", quantise, restore, scale_bytes=2, code_bytes=Q4R_BLOCK // 2)
