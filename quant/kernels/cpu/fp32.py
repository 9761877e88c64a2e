"""`fp32`, as `reference/fp32.py` says. There are no scales."""

import numpy as np

from farloop.quant.kernels.cpu.loops import BLOCK, block_loops
from farloop.quant.kernels.cpu.primitives import Number, Numbers, bits, from_bits, inlined, load_i32, store_i32

_B = np.uint64(BLOCK)
_FOUR = np.uint64(4)


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
        store_i32(codes, at + _FOUR * i, bits(v[i]))


@inlined
def restore(t: Numbers, scales: Numbers, scale_at: Number, codes: Numbers, at: Number) -> None:
    for i in range(_B):
        t[i] = from_bits(load_i32(codes, at + _FOUR * i))


FP32 = block_loops("fp32", quantise, restore, scale_bytes=0, code_bytes=4 * BLOCK)
