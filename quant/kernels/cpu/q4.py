"""`q4`, as `reference/q4.py` says."""

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
    pack_nearest,
    store_u16,
    to_scale,
    unpack,
)
from farloop.quant.packing import Q4_BLOCK, largest_scale

_LARGEST_SCALE = np.int32(largest_scale(8))
_NEGATIVE = np.int32(0x8000)
_GROUPS = np.uint64(loops.BLOCK // Q4_BLOCK)
_B = np.uint64(Q4_BLOCK)
_CODE_BYTES = np.uint64(Q4_BLOCK // 2)
_TWO = np.uint64(2)


@inlined
def scale_of(v: Numbers, first: Number) -> Number:
    """Of the block v[first … first + 63]: int32."""
    # As integers, positive floats have their own order and lie above all negative ones.
    largest, highest = np.int32(0), np.int32(-0x80000000)
    for i in range(_B):
        pattern = bits(v[first + i])
        magnitude = np.int32(pattern & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
        highest = pattern if pattern > highest else highest
    scale = to_scale(from_bits(largest) * np.float32(0.125), _LARGEST_SCALE)
    return np.int32(scale | _NEGATIVE) if highest == largest and scale != 0 else scale


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
        scale = scale_of(v, group * _B)
        store_u16(scales, scale_at + _TWO * group, np.uint16(scale))
        s = from_scale(scale) if scale != 0 else np.float32(1.0)
        pack_nearest(v, group * _B, s, codes, at + group * _CODE_BYTES)


@inlined
def restore(t: Numbers, scales: Numbers, scale_at: Number, codes: Numbers, at: Number) -> None:
    for group in range(_GROUPS):
        s = from_scale(np.int32(load_u16(scales, scale_at + _TWO * group)))
        unpack(t, group * _B, s, codes, at + group * _CODE_BYTES)


Q4 = block_loops("q4", quantise, restore, scale_bytes=2 * loops.BLOCK // Q4_BLOCK, code_bytes=loops.BLOCK // 2)
