"""What formats and kernels share: payload layouts, bf16 scales, bit packing, counter-based random numbers.

This module lies below formats and kernels, so that kernels need no format. Compiled kernels contain its constants: a
change here recompiles them.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Final

import torch
from torch import Tensor

from farloop.quant.errors import BadPayload

CODES_ALIGN: Final = 64
"""The codes start on a multiple of this many bytes: one cache line, and the widest vector load there is."""

Q4_BLOCK: Final = 64
Q8_BLOCK: Final = 256
TABLE_BLOCK: Final = 64  # of e3m0, e2m1 and nf4
Q4R_BLOCK: Final = 256
SIGN_BLOCK: Final = 256
LATTICE_BLOCK: Final = 256

Q4R_GROUP: Final = 64  # elements whose codes are packed together, as `q4` packs its blocks
BF16_LARGEST: Final = 0x7F7F  # bits of the largest finite bf16, (2 − 2⁻⁷)·2¹²⁷

LATTICE_LARGEST_SCALE: Final = 0x7DF0
"""Bits of 1.875·2¹²⁴: 8.5 times it is finite, and beyond 7 times it, the largest 18 % of fp32's range, codes clip."""

SMALLEST_SCALE: Final = 0x0D80
"""Bits of 2⁻¹⁰⁰. Smaller scales are written as 0, so that no decoder meets a subnormal product, whatever its code."""

E3M0_VALUES: Final = (0.0, *(2.0**power for power in range(-6, 1)))
E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4_VALUES: Final = (
    *(-1.0, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.0908203125),
    *(0.0, 0.07958984375, 0.1611328125, 0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1.0),
)
E2M1_LARGEST_SCALE: Final = 0x7E2A  # bits of the largest bf16 of which 6 times is finite, 1.328125·2¹²⁵

Q4R_LEAST_SCALE: Final = 0.144
"""Of a block's largest magnitude: a little over 1/7, so that the rounding of the scale to bf16 cannot make it less."""

Q4R_SMALLEST_MAGNITUDE: Final = SMALLEST_SCALE << 16
"""Bits of 2⁻¹⁰⁰: blocks whose magnitudes are all smaller are written as zeros."""


def largest_scale(largest_code: int) -> int:
    """Bits of the largest bf16 scale whose product with `largest_code`, a power of two, is finite."""
    halvings = largest_code.bit_length() - 1
    assert largest_code == 1 << halvings
    return BF16_LARGEST - (halvings << 7)


# --- Layout of a payload of blocks


def aligned(num_bytes: int) -> int:
    """The next multiple of `CODES_ALIGN`: where codes start after so many bytes of scales."""
    return -(-num_bytes // CODES_ALIGN) * CODES_ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`[scales bf16 × num_blocks][zeros up to a multiple of 64][codes]`, little-endian."""

    block: int  # Elements that share a scale: a power of two up to 256. 1: there are no scales.
    code_bits: int

    @property
    def has_scales(self) -> bool:
        return self.block > 1

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def padded(self, numel: int) -> int:
        """Elements up to the end of the last block."""
        return self.num_blocks(numel) * self.block

    def scale_bytes(self, numel: int) -> int:
        return 2 * self.num_blocks(numel) if self.has_scales else 0

    def code_bytes(self, numel: int) -> int:
        """Codes are written for whole blocks."""
        return self.padded(numel) * self.code_bits // 8

    def codes_start(self, numel: int) -> int:
        return aligned(self.scale_bytes(numel))

    def payload_bytes(self, numel: int) -> int:
        return self.codes_start(numel) + self.code_bytes(numel)

    def gap(self, numel: int) -> slice:
        """The zero bytes between scales and codes."""
        return slice(self.scale_bytes(numel), self.codes_start(numel))

    def parts(self, numel: int, start: int, length: int) -> tuple[slice, slice]:
        """Scales and codes of the blocks of the elements [start, start + length); `start` is a block's first."""
        codes, end = self.codes_start(numel), start + length
        return (
            slice(self.scale_bytes(start), self.scale_bytes(end)),
            slice(codes + self.code_bytes(start), codes + self.code_bytes(end)),
        )


# --- Codes of 1, 2 or 4 bits, several in a byte
#
# With k codes in a byte, byte j of a group of B holds the codes j, j + B/k, j + 2B/k, …, the first in its lowest bits.
# Neighbouring lanes stay neighbours, so SIMD and GPU kernels unpack with wide loads and no shuffle.


def pack(codes: Tensor, bits: int = 4) -> Tensor:
    """codes uint8 [m, B] below 2^bits → uint8 [m·B·bits/8]."""
    parts = codes.chunk(8 // bits, dim=1)  # [m, B·bits/8] each
    return reduce(or_, (part << (place * bits) if place else part for place, part in enumerate(parts))).reshape(-1)


def unpack_into(packed: Tensor, out: Tensor, bits: int = 4) -> None:
    """packed uint8 [m·B·bits/8] → out [m, B] of any number type, each below 2^bits."""
    parts = out.chunk(8 // bits, dim=1)
    packed = packed.view(parts[0].shape)
    for place, part in enumerate(parts):
        part.copy_((packed >> (place * bits)) & ((1 << bits) - 1))


# --- bf16 numbers in payloads
#
# Rounding works on integer bits, so every device gives the same 16 bits. Casts are not used: some hardware conversions
# flush subnormals, and Triton's interpreter truncates.


def to_bf16(x: Tensor, largest: int = BF16_LARGEST) -> Tensor:
    """Finite x fp32 → bf16 bits int16, nearest, ties to even; magnitudes above `largest` become `largest`."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    magnitude = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return (magnitude.clamp_(max=largest) | ((bits >> 16) & 0x8000)).to(torch.int16)


def from_bf16(bits: Tensor) -> Tensor:
    """bf16 bits int16 → fp32, exact."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def bf16_bits(data: Tensor) -> Tensor:
    """Bytes → bf16 bits int16. It copies: received bytes may start at an odd address, which no wider view may."""
    return data.clone().view(torch.int16)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, fp32, made of its bits; exponents out of range, of blocks that become zeros, are clamped."""
    return ((exponent + 127).clamp(1, 254) << 23).view(torch.float32)


def to_scale(x: Tensor, largest: int) -> Tensor:
    """Finite x fp32 → the bf16 bits of the scale that is stored for it: int16, 0 if below 2⁻¹⁰⁰."""
    bits = to_bf16(x, largest)
    return torch.where((bits & 0x7FFF) < SMALLEST_SCALE, torch.zeros_like(bits), bits)


def check_scales(scales: Tensor, largest: int, *, signed: bool = False) -> None:
    """Raise BadPayload unless `to_scale` can have given every scale, bf16 bits int16."""
    magnitude = scales & 0x7FFF if signed else scales
    # A negative scale where none is allowed is a negative int16 here, and −0 always is: both are below the smallest.
    good = (scales == 0) | ((magnitude >= SMALLEST_SCALE) & (magnitude <= largest))
    if not bool(good.all()):
        first = int((~good).nonzero()[0])
        raise BadPayload(f"scale {int(scales[first]) & 0xFFFF:#06x} is out of range")


# --- Random bits as a function of a seed and a place
#
# There is no generator state, and every device gives the same bits. A 32-bit finaliser of xorshifts and multiplications
# mixes a counter; its constants are the least biased of the hash-prospector project. Each word serves two elements with
# 16 bits each.


_MASK = 0xFFFFFFFF
_ODD = 0x9E3779B1  # 2³² ÷ golden ratio: neighbouring counters differ in many bits


def mix32(x: int) -> int:
    """A bijection of 32 bits in which every output bit depends on every input bit."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & _MASK
    x ^= x >> 15
    x = x * 0x735A2D97 & _MASK
    return x ^ (x >> 15)


def mixed_seed(seed: int, start: int = 0) -> int:
    """What is added to i·0x9E3779B1 for the words of the elements from `start` on, an even one, if i counts from 0."""
    return (mix32(seed & _MASK) + start // 2 * _ODD) & _MASK


def words(seed: int, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """32 random bits for each of the counters first … first + count − 1, int64 [count]."""
    return words_at(seed, torch.arange(first, first + count, dtype=torch.int64, device=device))


def words_at(seed: int, counters: Tensor) -> Tensor:
    """32 random bits for each counter, int64 of any shape."""
    # int64 and a mask, because torch has no logical shift of 32-bit integers; products may wrap, mod 2⁶⁴.
    x = (counters * _ODD + mixed_seed(seed)) & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def uniform16(seed: int, start: int, numel: int, device: torch.device | None = None) -> Tensor:
    """(r + ½)·2⁻¹⁶ for the elements [start, start + numel), r their 16 random bits: fp32 [numel], exact.

    `start` is even. Even elements take the low half of the word of their pair, odd ones the high half.
    """
    assert start % 2 == 0
    pairs = words(seed, start // 2, (numel + 1) // 2, device)
    halves = torch.stack(((pairs & 0xFFFF).to(torch.float32), (pairs >> 16).to(torch.float32)), dim=1)
    return halves.view(-1)[:numel].add_(0.5).mul_(2.0**-16)
