"""`bf16`, as `reference/bf16.py` says. There are no scales."""

import numpy as np

from farloop.quant.kernels.cpu.loops import BLOCK, block_loops
from farloop.quant.kernels.cpu.primitives import (
    Number,
    Numbers,
    bits,
    from_scale,
    inlined,
    load_u16,
    store_u16,
    to_bf16,
)
from farloop.quant.packing import BF16_LARGEST

_LARGEST = np.int32(BF16_LARGEST)
_SIGN = np.int32(0x8000)
_B = np.uint64(BLOCK)
_TWO = np.uint64(2)


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
    for i in range(_B):
        nearest = to_bf16(v[i])
        nearest = nearest if nearest < _LARGEST else _LARGEST
        store_u16(codes, at + _TWO * i, np.uint16(nearest | np.int32((bits(v[i]) >> 16) & _SIGN)))


@inlined
def restore(t: Numbers, scales: Numbers, scale_at: Number, codes: Numbers, at: Number) -> None:
    for i in range(_B):
        t[i] = from_scale(np.int32(load_u16(codes, at + _TWO * i)))


BF16 = block_loops("bf16", quantise, restore, scale_bytes=0, code_bytes=2 * BLOCK)
