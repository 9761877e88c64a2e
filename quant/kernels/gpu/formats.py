"""The arithmetic of each block format on a GPU, as `formats/` defines it, and how its programs divide a fragment.

`kernels.py` says what `write_x` and `read_x` take and return. Nothing here depends on how a compiler or an interpreter
casts: rounding to bf16 is integer arithmetic, rounding to an integer an exact addition. Kernels are compiled without
contraction (`kernels.py`) and without fast-math.
"""

import struct
from dataclasses import dataclass
from typing import Any, Final

import triton
from triton import language as tl

from farloop.quant import packing

# --- Numbers as bits, bf16, scales


INFINITY = tl.constexpr(0x7F800000)  # magnitude bits from here on are not a finite number

MAGNITUDE = tl.constexpr(0x7FFFFFFF)

# Triton kernels take global constants only as constexpr.
_BF16_LARGEST = tl.constexpr(packing.BF16_LARGEST)
_SMALLEST_SCALE = tl.constexpr(packing.SMALLEST_SCALE)
_LARGEST_SCALE_4 = tl.constexpr(packing.largest_scale(8))
_LARGEST_SCALE_8 = tl.constexpr(packing.largest_scale(128))

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
    return tl.where((pattern & 0x7FFF) < _SMALLEST_SCALE, 0, pattern)


@triton.jit
def ratio(x, s):
    """x [R, H] ÷ s [R, 1], correctly rounded; 0 or −0 where s is 0."""
    return tl.div_rn(x, tl.where(s == 0, float("inf"), s) + tl.zeros_like(x))


@triton.jit
def nearest(x):
    """|x| ≤ 2²² → (the nearest integer, ties to even, as fp32, never −0; the same in int32)."""
    shifted = x + _SHIFTER
    return shifted - _SHIFTER, bits(shifted) - _SHIFTER_BITS


@triton.jit
def small_integer(k, ZERO: tl.constexpr):
    """k int32 in 0…255 → k − ZERO in fp32. Conversions run at an eighth of the speed of this."""
    return as_float(k | 0x4B000000) - (8388608.0 + ZERO)


# --- Scales, and codes in rows of 256 elements or of 64 codes of 4 bits


@triton.jit
def store_scales(payload, block, scales, inside):
    """Write bf16 bits, int32 [R], as the scales of blocks [R]."""
    tl.store(payload.to(tl.pointer_type(tl.int16)) + block, scales.to(tl.int16), mask=inside)


@triton.jit
def load_scales(payload, block, inside):
    """Scales of blocks [R], fp32 [R, 1]."""
    return from_bf16(tl.load(payload.to(tl.pointer_type(tl.int16)) + block, mask=inside, other=0).to(tl.int32))[:, None]


@triton.jit
def columns(row, START: tl.constexpr):
    """Numbers of columns START … START + 127 of the rows of 256, int64 [R, 128]."""
    return row[:, None] * 256 + (START + tl.arange(0, 128)[None, :])


@triton.jit
def store_pairs(payload, codes_start, row, low, high, inside):
    """Write codes int32 0…15 of columns 0–31 and 32–63, both [R, 32], of rows [R]."""
    at = codes_start + row[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(payload + at, (low | (high << 4)).to(tl.uint8), mask=inside)


@triton.jit
def load_pairs(payload, codes_start, row, inside):
    """The bytes of rows [R], int32 [R, 32]; 0 where not inside."""
    at = codes_start + row[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.load(payload + at, mask=inside, other=0).to(tl.int32)


@triton.jit
def products(packed, s):
    """Codes k + 8 in bytes int32 [R, 32], scales s fp32 [R, 1] → k·s of both halves, exact.

    The high half stays in place, as 16·k, and takes a sixteenth of the scale: a sum of many payloads is limited by
    instructions, not by memory.
    """
    return small_integer(packed & 15, 8) * s, small_integer(packed & 240, 128) * (s * 0.0625)


# --- fp32 and bf16: rows of 256, no scales


@triton.jit
def write_fp32(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    codes = (payload + codes_start).to(tl.pointer_type(tl.float32))
    tl.store(codes + columns(row, 0), lo, mask=inside_lo)
    tl.store(codes + columns(row, 128), hi, mask=inside_hi)
    return lo, hi


@triton.jit
def read_fp32(payload, codes_start, row, inside_lo, inside_hi, first):
    codes = (payload + codes_start).to(tl.pointer_type(tl.float32))
    lo = tl.load(codes + columns(row, 0), mask=inside_lo, other=0.0)
    return lo, tl.load(codes + columns(row, 128), mask=inside_hi, other=0.0)


@triton.jit
def write_bf16(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    codes = (payload + codes_start).to(tl.pointer_type(tl.int16))
    lower = to_bf16(lo, _BF16_LARGEST)
    upper = to_bf16(hi, _BF16_LARGEST)
    tl.store(codes + columns(row, 0), lower.to(tl.int16), mask=inside_lo)
    tl.store(codes + columns(row, 128), upper.to(tl.int16), mask=inside_hi)
    return from_bf16(lower), from_bf16(upper)


@triton.jit
def read_bf16(payload, codes_start, row, inside_lo, inside_hi, first):
    codes = (payload + codes_start).to(tl.pointer_type(tl.int16))
    lower = tl.load(codes + columns(row, 0), mask=inside_lo, other=0).to(tl.int32)
    upper = tl.load(codes + columns(row, 128), mask=inside_hi, other=0).to(tl.int32)
    return from_bf16(lower), from_bf16(upper)


# --- q8: one row is one block of 256


@triton.jit
def write_q8(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    a = as_float(absmax)
    scales = to_scale(tl.div_rn(a, tl.full(a.shape, 127.0, tl.float32)), _LARGEST_SCALE_8)
    s = from_bf16(scales)[:, None]
    k_lo, code_lo = nearest(tl.minimum(tl.maximum(ratio(lo, s), -127.0), 127.0))
    k_hi, code_hi = nearest(tl.minimum(tl.maximum(ratio(hi, s), -127.0), 127.0))
    store_scales(payload, row, scales, first)
    tl.store(payload + (codes_start + columns(row, 0)), code_lo.to(tl.uint8), mask=inside_lo)
    tl.store(payload + (codes_start + columns(row, 128)), code_hi.to(tl.uint8), mask=inside_hi)
    return k_lo * s, k_hi * s


@triton.jit
def read_q8(payload, codes_start, row, inside_lo, inside_hi, first):
    s = load_scales(payload, row, first)
    low = tl.load(payload + (codes_start + columns(row, 0)), mask=inside_lo, other=0).to(tl.int32)
    high = tl.load(payload + (codes_start + columns(row, 128)), mask=inside_hi, other=0).to(tl.int32)
    # Two's complement with an inverted sign bit is the code + 128.
    return small_integer(low ^ 128, 128) * s, small_integer(high ^ 128, 128) * s


# --- q4: one row is one block of 64


@triton.jit
def write_q4(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    # As integers, positive floats keep their order and lie above all negative ones.
    positive = tl.max(tl.maximum(bits(lo), bits(hi)), 1) == absmax
    a = as_float(absmax)
    scales = to_scale(tl.where(positive, -a, a) * 0.125, _LARGEST_SCALE_4)
    s = from_bf16(scales)[:, None]
    k_lo, code_lo = nearest(tl.minimum(tl.maximum(ratio(lo, s), -8.0), 7.0))
    k_hi, code_hi = nearest(tl.minimum(tl.maximum(ratio(hi, s), -8.0), 7.0))
    store_scales(payload, row, scales, first)
    store_pairs(payload, codes_start, row, code_lo + 8, code_hi + 8, inside_lo)
    return k_lo * s, k_hi * s


@triton.jit
def read_q4(payload, codes_start, row, inside_lo, inside_hi, first):
    return products(load_pairs(payload, codes_start, row, inside_lo), load_scales(payload, row, first))


# --- Tables of values, e3m0, e2m1 and nf4: one row is one block of 64


_E3M0, _E2M1, _NF4 = (tl.constexpr(v) for v in (packing.E3M0_VALUES, packing.E2M1_VALUES, packing.NF4_VALUES))
_NF4_BITS = tuple(int.from_bytes(struct.pack(">f", value)[:2], "big") for value in packing.NF4_VALUES)  # of bf16
_NF4_DIGITS = tl.constexpr(tuple(sum((b >> 4 * k & 15) << 4 * i for i, b in enumerate(_NF4_BITS)) for k in range(4)))
"""Digit k, of 4 bits, of value i as bf16 is at bit 4·i of word k."""

_E2M1_LARGEST = tl.constexpr(packing.E2M1_LARGEST_SCALE)


@triton.jit
def _table_code(x, s, VALUES: tl.constexpr, COUNT: tl.constexpr):
    """How many midpoints of the values x reaches; of 8 values, |x| does, and x < 0 adds 8. Products are exact."""
    reach = tl.where(s == 0, float("inf"), s)
    compared = as_float(bits(x) & MAGNITUDE) if COUNT == 8 else x
    m = tl.zeros(x.shape, tl.int32)
    for j in tl.static_range(COUNT - 1):
        m += (compared >= reach * ((VALUES[j] + VALUES[j + 1]) / 2)).to(tl.int32)
    if COUNT == 8:
        m = tl.where(m > 0, m | ((bits(x) >> 28) & 8), 0)
    return m


@triton.jit
def _table_value(code, s, VALUES: tl.constexpr, COUNT: tl.constexpr):
    """The value of a code, times s, exact."""
    if COUNT == 8:
        # A sign, an exponent, and for e2m1 a bit of a fraction, as fp32 has them: a subnormal number there too.
        FRACTION: tl.constexpr = VALUES[COUNT - 1] == 6.0
        v = as_float(((code & 7) << (23 - FRACTION)) | ((code & 8) << 28)) * (2.0**126 if FRACTION else 2.0**120)
    else:
        # The upper half of fp32, a digit of 4 bits from each word: a few instructions, where 16 comparisons are many.
        at = ((code & 15) << 2).to(tl.uint64)
        pattern = tl.zeros(code.shape, tl.int32)
        for k in tl.static_range(4):
            digit = (tl.full(code.shape, _NF4_DIGITS[k], tl.uint64) >> at).to(tl.int32) & 15
            pattern |= digit << (16 + 4 * k)
        v = as_float(pattern)
    return v * s


@triton.jit
def _write_table(
    payload, codes_start, row, lo, hi, absmax, inside, first,
    VALUES: tl.constexpr, COUNT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    a = as_float(absmax)
    scales = to_scale(tl.div_rn(a, tl.full(a.shape, VALUES[COUNT - 1], tl.float32)), LARGEST)
    s = from_bf16(scales)[:, None]
    low = _table_code(lo, s, VALUES, COUNT)
    high = _table_code(hi, s, VALUES, COUNT)
    store_scales(payload, row, scales, first)
    store_pairs(payload, codes_start, row, low, high, inside)
    return _table_value(low, s, VALUES, COUNT), _table_value(high, s, VALUES, COUNT)


@triton.jit
def _read_table(payload, codes_start, row, inside, first, VALUES: tl.constexpr, COUNT: tl.constexpr):
    s = load_scales(payload, row, first)
    packed = load_pairs(payload, codes_start, row, inside)
    return _table_value(packed & 15, s, VALUES, COUNT), _table_value(packed >> 4, s, VALUES, COUNT)


@triton.jit
def write_e3m0(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    return _write_table(payload, codes_start, row, lo, hi, absmax, inside_lo, first, _E3M0, 8, _BF16_LARGEST)


@triton.jit
def read_e3m0(payload, codes_start, row, inside_lo, inside_hi, first):
    return _read_table(payload, codes_start, row, inside_lo, first, _E3M0, 8)


@triton.jit
def write_e2m1(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    return _write_table(payload, codes_start, row, lo, hi, absmax, inside_lo, first, _E2M1, 8, _E2M1_LARGEST)


@triton.jit
def read_e2m1(payload, codes_start, row, inside_lo, inside_hi, first):
    return _read_table(payload, codes_start, row, inside_lo, first, _E2M1, 8)


@triton.jit
def write_nf4(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    return _write_table(payload, codes_start, row, lo, hi, absmax, inside_lo, first, _NF4, 16, _BF16_LARGEST)


@triton.jit
def read_nf4(payload, codes_start, row, inside_lo, inside_hi, first):
    return _read_table(payload, codes_start, row, inside_lo, first, _NF4, 16)


# --- q4r: one row is one of the four groups of 64 in a block of 256, so four rows share a scale


_LEAST_SCALE = tl.constexpr(packing.Q4R_LEAST_SCALE)
_SMALLEST_MAGNITUDE = tl.constexpr(packing.Q4R_SMALLEST_MAGNITUDE)


@triton.jit
def _to_rows(of_block, R: tl.constexpr):
    """[R/4] → [R]: each block's value for each of its rows."""
    return tl.reshape(tl.broadcast_to(of_block[:, None], [R // 4, 4]), [R])


@triton.jit
def _q4r_scales(lo, hi, absmax, step, ABSOLUTE: tl.constexpr):
    """Stored scales of the rows' blocks, bf16 bits in int32 [R]."""
    R: tl.constexpr = lo.shape[0]
    absmax = _to_rows(tl.max(tl.reshape(absmax, [R // 4, 4]), 1), R)
    if ABSOLUTE:
        wanted = step + tl.zeros([R], tl.float32)
    else:
        # Magnitudes below 2⁻¹⁰⁰ are written as zeros; raised to 2⁻¹⁰⁰, no exponent leaves its 8 bits.
        exponent = tl.maximum(absmax, _SMALLEST_MAGNITUDE) >> 23  # biased: e + 127
        up = as_float((264 - exponent) << 23)[:, None]  # 2^(10−e)
        _, i_lo = nearest(lo * up)
        _, i_hi = nearest(hi * up)
        of_row = tl.sum(i_lo * i_lo + i_hi * i_hi, 1)
        total = _to_rows(tl.sum(tl.reshape(of_row, [R // 4, 4]), 1), R)
        root = tl.sqrt_rn(total.to(tl.float32)) * step
        wanted = root * as_float((exponent - 14) << 23)
    scales = to_scale(tl.maximum(wanted, as_float(absmax) * _LEAST_SCALE), _LARGEST_SCALE_4)
    return tl.where(absmax < _SMALLEST_MAGNITUDE, 0, scales)


@triton.jit
def uniform(row, seed, START: tl.constexpr):
    """(r + ½)·2⁻¹⁶ for columns START … START + 31 of the rows, fp32 [R, 32]: a word for every two elements."""
    pair = row.to(tl.uint32)[:, None] * 32 + (START // 2 + tl.arange(0, 16)[None, :]).to(tl.uint32)
    h = pair * 0x9E3779B1 + seed.to(tl.uint32, bitcast=True)
    h ^= h >> 16
    h *= 0x21F0AAAD
    h ^= h >> 15
    h *= 0x735A2D97
    h ^= h >> 15
    r = tl.interleave(h & 0xFFFF, h >> 16).to(tl.int32)
    return (small_integer(r, 0) + 0.5) * 0.0000152587890625


@triton.jit
def _q4r_codes(x, s, row, seed, START: tl.constexpr, STOCHASTIC: tl.constexpr):
    """k = clamp(round(x ÷ s), −8, 7): as fp32 and int32 [R, 32]."""
    q = ratio(x, s)
    if STOCHASTIC:
        q = tl.minimum(tl.maximum(q + uniform(row, seed, START), -8.0), 7.0)
        k = tl.floor(q)
        return k, bits(k + _SHIFTER) - _SHIFTER_BITS
    return nearest(tl.minimum(tl.maximum(q, -8.0), 7.0))


@triton.jit
def write_q4r(payload, codes_start, row, lo, hi, absmax, inside_lo, inside_hi, first, how):
    steps, step, seed, ABSOLUTE, STOCHASTIC = how
    if steps is not None:
        step = tl.load(steps + row // 4, mask=first, other=0.0)
    scales = _q4r_scales(lo, hi, absmax, step, ABSOLUTE)
    s = from_bf16(scales)[:, None]
    k_lo, code_lo = _q4r_codes(lo, s, row, seed, 0, STOCHASTIC)
    k_hi, code_hi = _q4r_codes(hi, s, row, seed, 32, STOCHASTIC)
    store_scales(payload, row // 4, scales, first)  # four times the same number
    store_pairs(payload, codes_start, row, code_lo + 8, code_hi + 8, inside_lo)
    return k_lo * s, k_hi * s


@triton.jit
def read_q4r(payload, codes_start, row, inside_lo, inside_hi, first):
    return products(load_pairs(payload, codes_start, row, inside_lo), load_scales(payload, row // 4, first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Device functions of one format, and the shape of its programs."""

    write: Any
    read: Any
    row: int  # elements of a row of a program: 2·H of `kernels.py`
    rows: int  # rows of a program
    warps: int = 4  # of a program that encodes one operand

    def count(self, numel: int) -> int:
        """Of programs for so many elements."""
        return -(-numel // (self.row * self.rows))


# 2048 elements for 128 threads: 16 registers a thread hold one fp32 operand, and there are up to four. Where there is
# one, and arithmetic, half the threads are faster on an H200: reductions over a row cross fewer lanes.
FORMATS: Final = {
    "fp32": Programs(write=write_fp32, read=read_fp32, row=256, rows=8),
    "bf16": Programs(write=write_bf16, read=read_bf16, row=256, rows=8),
    "q8": Programs(write=write_q8, read=read_q8, row=256, rows=8, warps=2),
    "q4": Programs(write=write_q4, read=read_q4, row=64, rows=32, warps=2),
    "e3m0": Programs(write=write_e3m0, read=read_e3m0, row=64, rows=32, warps=2),
    "e2m1": Programs(write=write_e2m1, read=read_e2m1, row=64, rows=32, warps=2),
    "nf4": Programs(write=write_nf4, read=read_nf4, row=64, rows=32, warps=2),
    "q4r": Programs(write=write_q4r, read=read_q4r, row=64, rows=32, warps=2),
}
"""By the name of the format."""
