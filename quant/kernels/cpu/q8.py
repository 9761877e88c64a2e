"""`q8`, as `reference/q8.py` says."""

import numpy as np

from farloop.quant.kernels.cpu.loops import block_loops
from farloop.quant.kernels.cpu.primitives import (
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
from farloop.quant.packing import Q8_BLOCK, largest_scale

_LARGEST_SCALE = np.int32(largest_scale(128))
_LARGEST_CODE = np.float32(127.0)
_B = np.uint64(Q8_BLOCK)

_SHIFT = np.float32(1.5 * 2**23)
"""Added to k of −127…127 it rounds to the nearest whole number, ties to even, whose lowest byte then is k's."""


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
    scale = to_scale(from_bits(magnitude) / _LARGEST_CODE, _LARGEST_SCALE)
    s = from_scale(scale) if scale != 0 else np.float32(1.0)
    for i in range(_B):
        ratio = min(max(v[i] / s, -_LARGEST_CODE), _LARGEST_CODE)
        codes[at + i] = np.uint8(bits(ratio + _SHIFT))
    store_u16(scales, scale_at, np.uint16(scale))


@inlined
def restore(t: Numbers, scales: Numbers, scale_at: Number, codes: Numbers, at: Number) -> None:
    s = from_scale(np.int32(load_u16(scales, scale_at)))
    for i in range(_B):
        t[i] = np.float32(np.int8(codes[at + i])) * s


Q8 = block_loops("q8", quantise, restore, scale_bytes=2, code_bytes=Q8_BLOCK)
