"""The arithmetic of each block format on the CPU, as `formats/` defines it: `write_x` encodes 256 elements of format x.

`loops.py` says what the arguments are. Formats whose blocks are smaller than 256 work on several groups in turn.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np

from farloop.quant.kernels.cpu.loops import BLOCK, BlockLoops, block_loops
from farloop.quant.kernels.cpu.primitives import (
    MAGNITUDE,
    Number,
    Numbers,
    after,
    as_halves,
    bits,
    from_bits,
    from_scale,
    inlined,
    load_i32,
    load_u16,
    mix,
    pack_nearest,
    pack_random,
    random_words,
    store_i32,
    store_u16,
    to_bf16,
    to_scale,
    unpack,
)
from farloop.quant.packing import (
    BF16_LARGEST,
    E2M1_LARGEST_SCALE,
    E2M1_VALUES,
    E3M0_VALUES,
    LATTICE_BLOCK,
    LATTICE_LARGEST_SCALE,
    NF4_VALUES,
    Q4_BLOCK,
    Q4R_BLOCK,
    Q4R_GROUP,
    Q4R_LEAST_SCALE,
    Q4R_SMALLEST_MAGNITUDE,
    Q8_BLOCK,
    SIGN_BLOCK,
    SMALLEST_SCALE,
    TABLE_BLOCK,
    largest_scale,
)

assert BLOCK == Q8_BLOCK == Q4R_BLOCK == SIGN_BLOCK == LATTICE_BLOCK and Q4_BLOCK == TABLE_BLOCK == Q4R_GROUP

_B = np.uint64(BLOCK)
_GROUP = np.uint64(Q4_BLOCK)
_GROUPS = np.uint64(BLOCK // Q4_BLOCK)
_HALF = np.uint64(Q4_BLOCK // 2)  # elements of half a group, and bytes of its codes
_TWO, _FOUR = np.uint64(2), np.uint64(4)

_LARGEST_BF16 = np.int32(BF16_LARGEST)
_LARGEST_SCALE_4, _LARGEST_SCALE_8 = np.int32(largest_scale(8)), np.int32(largest_scale(128))


# --- fp32 and bf16: no scales


@inlined
def write_fp32(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
    for i in range(_B):
        store_i32(codes, _FOUR * i, bits(v[i]))


@inlined
def read_fp32(t: Numbers, scales: Numbers, codes: Numbers) -> None:
    for i in range(_B):
        t[i] = from_bits(load_i32(codes, _FOUR * i))


_SIGN = np.int32(0x8000)


@inlined
def write_bf16(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
    for i in range(_B):
        nearest = to_bf16(v[i])
        nearest = nearest if nearest < _LARGEST_BF16 else _LARGEST_BF16
        store_u16(codes, _TWO * i, np.uint16(nearest | np.int32((bits(v[i]) >> 16) & _SIGN)))


@inlined
def read_bf16(t: Numbers, scales: Numbers, codes: Numbers) -> None:
    for i in range(_B):
        t[i] = from_scale(np.int32(load_u16(codes, _TWO * i)))


# --- q8


_LARGEST_CODE = np.float32(127.0)

_SHIFT = np.float32(1.5 * 2**23)
"""Adding it to k in −127…127 rounds to the nearest whole number, ties to even; the lowest byte is that of k then."""


@inlined
def write_q8(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
    scale = to_scale(from_bits(magnitude) / _LARGEST_CODE, _LARGEST_SCALE_8)
    s = from_scale(scale) if scale != 0 else np.float32(1.0)
    for i in range(_B):
        ratio = min(max(v[i] / s, -_LARGEST_CODE), _LARGEST_CODE)
        codes[i] = np.uint8(bits(ratio + _SHIFT))
    store_u16(scales, np.uint64(0), np.uint16(scale))


@inlined
def read_q8(t: Numbers, scales: Numbers, codes: Numbers) -> None:
    s = from_scale(np.int32(load_u16(scales, np.uint64(0))))
    for i in range(_B):
        t[i] = np.float32(np.int8(codes[i])) * s


# --- q4


_NEGATIVE = np.int32(0x8000)


@inlined
def q4_scale(v: Numbers) -> Number:
    """Of the group v[0 … 63]: int32."""
    # As integers, positive floats keep their order and lie above all negative ones.
    largest, highest = np.int32(0), np.int32(-0x80000000)
    for i in range(_GROUP):
        pattern = bits(v[i])
        magnitude = np.int32(pattern & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
        highest = pattern if pattern > highest else highest
    scale = to_scale(from_bits(largest) * np.float32(0.125), _LARGEST_SCALE_4)
    return np.int32(scale | _NEGATIVE) if highest == largest and scale != 0 else scale


@inlined
def write_q4(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
    for group in range(_GROUPS):
        x = after(v, group * _GROUP)
        scale = q4_scale(x)
        store_u16(scales, _TWO * group, np.uint16(scale))
        s = from_scale(scale) if scale != 0 else np.float32(1.0)
        pack_nearest(x, s, after(codes, group * _HALF))


@inlined
def read_q4(t: Numbers, scales: Numbers, codes: Numbers) -> None:
    for group in range(_GROUPS):
        s = from_scale(np.int32(load_u16(scales, _TWO * group)))
        unpack(after(t, group * _GROUP), s, after(codes, group * _HALF))


# --- Tables of values: e3m0, e2m1, nf4


_INFINITY = np.float32(np.inf)

Numeric = Callable[..., Number]  # a function of numbers, compiled as part of its callers


def _count_of(thresholds: tuple[float, ...]) -> Numeric:
    """(x, s) → how many thresholds, in units of s, x reaches, int32; the products are exact."""
    if not thresholds:

        @inlined
        def none(x: Number, s: Number) -> Number:
            return np.int32(0)

        return none
    others, threshold = _count_of(thresholds[:-1]), np.float32(thresholds[-1])

    @inlined
    def count(x: Number, s: Number) -> Number:
        return np.int32(others(x, s) + np.int32(x >= s * threshold))

    return count


def _choice_of(values: tuple[float, ...]) -> Numeric:
    """Code int32 → one of 2ⁿ values, fp32, by its lowest n bits: a tree of selections, which are vectors."""
    if len(values) == 1:
        value = np.float32(values[0])

        @inlined
        def constant(code: Number) -> Number:
            return value

        return constant
    half = len(values) // 2
    low, high, bit = _choice_of(values[:half]), _choice_of(values[half:]), np.int32(half)

    @inlined
    def choice(code: Number) -> Number:
        return high(code) if code & bit else low(code)

    return choice


def _table(name: str, values: tuple[float, ...], largest: int) -> BlockLoops:
    """As `formats.tables.TableCodec` has the values."""
    thresholds = _count_of(tuple((below + above) / 2 for below, above in pairwise(values)))
    value_of, top, largest_scale = _choice_of(values), np.float32(values[-1]), np.int32(largest)
    has_sign = len(values) == 8

    @inlined
    def code_of(x: Number, s: Number) -> Number:
        if not has_sign:
            return thresholds(x, s)
        m = thresholds(from_bits(np.int32(bits(x) & MAGNITUDE)), s)
        return np.int32(m | 8) if x < 0 and m > 0 else m

    @inlined
    def write(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
        for group in range(_GROUPS):
            x, pairs = after(v, group * _GROUP), after(codes, group * _HALF)
            largest = np.int32(0)
            for i in range(_GROUP):
                size = np.int32(bits(x[i]) & MAGNITUDE)
                largest = size if size > largest else largest
            scale = to_scale(from_bits(largest) / top, largest_scale)
            store_u16(scales, _TWO * group, np.uint16(scale))
            s = from_scale(scale) if scale != 0 else _INFINITY
            for i in range(_HALF):
                pairs[i] = np.uint8(np.int32(code_of(x[i], s) | np.int32(code_of(x[_HALF + i], s) << 4)))

    @inlined
    def number(code: Number, s: Number) -> Number:
        if not has_sign:
            return value_of(code) * s
        return from_bits(np.int32(bits(value_of(code)) | np.int32(np.int32(code & 8) << 28))) * s

    @inlined
    def read(t: Numbers, scales: Numbers, codes: Numbers) -> None:
        for group in range(_GROUPS):
            x, pairs = after(t, group * _GROUP), after(codes, group * _HALF)
            s = from_scale(np.int32(load_u16(scales, _TWO * group)))
            for i in range(_HALF):
                pair = np.int32(pairs[i])
                x[i] = number(np.int32(pair & 15), s)
                x[_HALF + i] = number(np.int32(pair >> 4), s)

    return block_loops(name, write, read, block=TABLE_BLOCK, code_bits=4)


# --- q4r


# Bits of the mode.
STOCHASTIC, ABSOLUTE = 1, 2

_LEAST_SCALE = np.float32(Q4R_LEAST_SCALE)
_SMALLEST_MAGNITUDE = np.int32(Q4R_SMALLEST_MAGNITUDE)
_EIGHT_TWICE = np.uint8(0x88)
_WORDS = np.uint64(BLOCK // 2)


@inlined
def rms_scale(v: Numbers, magnitude: Number, step: Number) -> Number:
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
def write_q4r(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
    noise, element, step, seed, mode = how
    scale = np.int32(0)
    if magnitude >= _SMALLEST_MAGNITUDE:
        wanted = step if mode & ABSOLUTE else rms_scale(v, magnitude, step)
        least = from_bits(magnitude) * _LEAST_SCALE
        scale = to_scale(wanted if wanted > least else least, _LARGEST_SCALE_4)
    s = from_scale(scale)
    if scale == 0:
        for i in range(_WORDS):
            codes[i] = _EIGHT_TWICE
    elif mode & STOCHASTIC:
        random_words(noise, _WORDS, element, seed)
        halves = as_halves(noise)
        for group in range(_GROUPS):
            first = group * _GROUP
            pack_random(after(v, first), s, after(halves, first), after(codes, group * _HALF))
    else:
        for group in range(_GROUPS):
            pack_nearest(after(v, group * _GROUP), s, after(codes, group * _HALF))
    store_u16(scales, np.uint64(0), np.uint16(scale))


@inlined
def read_q4r(t: Numbers, scales: Numbers, codes: Numbers) -> None:
    s = from_scale(np.int32(load_u16(scales, np.uint64(0))))
    for group in range(_GROUPS):
        unpack(after(t, group * _GROUP), s, after(codes, group * _HALF))


# --- sign and lattice: only encoded here. Their decoders must know where a fragment has padding.


_EIGHTH = np.uint64(BLOCK // 8)


@inlined
def read_nothing(t: Numbers, scales: Numbers, codes: Numbers) -> None:
    """For the loops that are never called."""


@inlined
def write_sign(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
    """`step` is the number of elements of the block that are no padding."""
    _, _, elements, _, _ = how
    exponent = np.int32(max(np.int32(magnitude >> 23), np.int32(SMALLEST_SCALE >> 7)) - 127)
    unit = from_bits(np.int32(np.int32(np.int32(21 - exponent) + 127) << 23))
    total = np.int32(0)
    for i in range(_B):
        total = np.int32(total + np.int32(from_bits(np.int32(bits(v[i]) & MAGNITUDE)) * unit))
    back = from_bits(np.int32(np.int32(np.int32(exponent - 21) + 127) << 23))
    scale = to_scale(np.float32(total) / elements * back, _LARGEST_BF16)
    store_u16(scales, np.uint64(0), np.uint16(scale))
    least = np.float32(0.0) if scale != 0 else -_INFINITY
    for i in range(_EIGHTH):
        byte = np.int32(v[i] < least)
        for place in range(1, 8):
            byte = np.int32(byte | np.int32(np.int32(v[np.uint64(place) * _EIGHTH + i] < least) << place))
        codes[i] = np.uint8(byte)


_SEVEN = np.float32(7.0)
_LARGEST_LATTICE_SCALE = np.int32(LATTICE_LARGEST_SCALE)
_HALF_BLOCK = np.uint64(BLOCK // 2)


@inlined
def write_lattice(v: Numbers, magnitude: Number, scales: Numbers, codes: Numbers, how: Numbers) -> None:
    _, _, _, seed, _ = how
    r = np.float32(0.5) - np.float32(np.int32(mix(np.uint32(seed)) >> np.uint32(22))) * np.float32(2.0**-10)
    scale = np.int32(np.int32(bits(from_bits(magnitude) / _SEVEN) + np.int32(0xFFFF)) >> 16)
    scale = scale if scale < _LARGEST_LATTICE_SCALE else _LARGEST_LATTICE_SCALE
    scale = scale if scale >= np.int32(SMALLEST_SCALE) else np.int32(0)
    store_u16(scales, np.uint64(0), np.uint16(scale))
    s, shift = from_scale(scale), r
    if scale == 0:
        s, shift = _INFINITY, np.float32(0.0)
    for i in range(_HALF_BLOCK):
        low = lattice_code(v[i] / s - shift)
        high = lattice_code(v[_HALF_BLOCK + i] / s - shift)
        codes[i] = np.uint8(np.int32(low & 15) | np.int32(high << 4))


@inlined
def lattice_code(ratio: Number) -> Number:
    """clamp(rn(ratio), −8, 7) + 8 in the lowest bits."""
    return bits(min(max(ratio, np.float32(-8.0)), _SEVEN) + np.float32(1.5 * 2**23 + 8))


ENCODERS: Final = {
    "sign": block_loops("sign", write_sign, read_nothing, block=SIGN_BLOCK, code_bits=1),
    "lattice": block_loops("lattice", write_lattice, read_nothing, block=LATTICE_BLOCK, code_bits=4),
}
"""Of which only `encode` without a residual may be called."""

LOOPS: Final = {
    "fp32": block_loops("fp32", write_fp32, read_fp32, block=1, code_bits=32),
    "bf16": block_loops("bf16", write_bf16, read_bf16, block=1, code_bits=16),
    "q8": block_loops("q8", write_q8, read_q8, block=Q8_BLOCK, code_bits=8),
    "q4": block_loops("q4", write_q4, read_q4, block=Q4_BLOCK, code_bits=4),
    "e3m0": _table("e3m0", E3M0_VALUES, BF16_LARGEST),
    "e2m1": _table("e2m1", E2M1_VALUES, E2M1_LARGEST_SCALE),
    "nf4": _table("nf4", NF4_VALUES, BF16_LARGEST),
    "q4r": block_loops("q4r", write_q4r, read_q4r, block=Q4R_BLOCK, code_bits=4),
}
"""By the name of the format."""
