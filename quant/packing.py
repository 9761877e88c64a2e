"""Numbers and bit packing that formats and kernels share: block sizes, bf16 scales, nibbles, bit fields, noise."""

from typing import Final

import torch
from torch import Tensor

from farloop.quant.errors import BadPayload

# --- Numbers that a block format and its kernels share: block sizes, the ends of the range of scales, the hash of
# seeds.
#
# Below formats and kernels: both import it, so that kernels need no format and formats may choose kernels.


CODES_ALIGN: Final = 64
"""The codes start on a multiple of this many bytes: one cache line, and the widest vector load there is."""

Q4_BLOCK: Final = 64
Q8_BLOCK: Final = 256
E3M0_BLOCK: Final = 64
Q4R_BLOCK: Final = 256

Q4R_GROUP: Final = 64
"""Elements whose codes are packed together, as `q4` packs its blocks."""

BF16_LARGEST: Final = 0x7F7F
"""Bits of the largest finite bf16, (2 − 2⁻⁷)·2¹²⁷."""

SMALLEST_SCALE: Final = 0x0D80
"""Bits of 2⁻¹⁰⁰. Smaller scales are written as 0, so that no decoder meets a subnormal product, whatever its code."""

Q4R_LEAST_SCALE: Final = 0.144
"""Of a block's largest magnitude: a little over 1/7, so that the rounding of the scale to bf16 cannot make it less."""

Q4R_SMALLEST_MAGNITUDE: Final = SMALLEST_SCALE << 16
"""Bits of 2⁻¹⁰⁰: blocks in which all is smaller are written as zeros."""


def largest_scale(largest_code: int) -> int:
    """Bits of the largest bf16 scale that a code of magnitude `largest_code`, a power of two, times it is finite."""
    halvings = largest_code.bit_length() - 1
    assert largest_code == 1 << halvings
    return BF16_LARGEST - (halvings << 7)


def mix32(x: int) -> int:
    """A bijection of 32 bits in which every output bit depends on every input bit."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x735A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)


# --- Two 4-bit codes in a byte, "half split": byte j of a block of B holds code j (low) and code j + B/2 (high).
#
# Neighbouring lanes stay neighbours, so that SIMD and GPU kernels unpack with two wide loads and no shuffle.


def pack(codes: Tensor) -> Tensor:
    """codes uint8 [m, B] below 16 → uint8 [m·B/2]."""
    low, high = codes.chunk(2, dim=1)  # [m, B/2] each
    return (low | (high << 4)).view(-1)


def unpack_into(packed: Tensor, out: Tensor) -> None:
    """packed uint8 [m·B/2] → out [m, B] of any number type, 0…15."""
    low, high = out.chunk(2, dim=1)
    packed = packed.view(low.shape)
    low.copy_(packed & 0xF)
    high.copy_(packed >> 4)


# --- Codes of 1 or 2 bits, several in a byte, split as `packing.py` splits two.
#
# With k codes in a byte, byte j of a group of B holds the codes j, j + B/k, j + 2B/k, …, the first in its lowest bits.


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [m, B] below 2^bits → uint8 [m·B·bits/8]."""
    first, *others = codes.chunk(8 // bits, dim=1)  # [m, B·bits/8] each
    packed = first.clone()
    for place, part in enumerate(others, start=1):
        packed |= part << (place * bits)
    return packed.view(-1)


def unpack_bits_into(packed: Tensor, out: Tensor, bits: int) -> None:
    """packed uint8 [m·B·bits/8] → out [m, B] of any number type, each below 2^bits."""
    parts = out.chunk(8 // bits, dim=1)
    packed = packed.view(parts[0].shape)
    for place, part in enumerate(parts):
        part.copy_((packed >> (place * bits)) & ((1 << bits) - 1))


# --- The bf16 numbers inside payloads: rounded on integer bits, so that every device gives the same 16 bits.
#
# Casts are not used: some hardware conversions flush subnormals, and Triton's interpreter truncates.


def to_bf16(x: Tensor, largest: int = BF16_LARGEST) -> Tensor:
    """Finite x fp32 → bf16 bits int16, nearest, ties to even; magnitudes above `largest` become `largest`."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    magnitude = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return (magnitude.clamp_(max=largest) | ((bits >> 16) & 0x8000)).to(torch.int16)


def from_bf16(bits: Tensor) -> Tensor:
    """bf16 bits int16 → fp32, exact."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def to_scale(x: Tensor, largest: int) -> Tensor:
    """Finite x fp32 → the bf16 bits of the scale that is stored for it: int16, 0 if below 2⁻¹⁰⁰."""
    bits = to_bf16(x, largest)
    return torch.where((bits & 0x7FFF) < SMALLEST_SCALE, torch.zeros_like(bits), bits)


def check_scales(scales: Tensor, largest: int, *, signed: bool) -> None:
    """Raise BadPayload unless every scale, bf16 bits int16, is one that `to_scale` can have given."""
    magnitude = scales & 0x7FFF if signed else scales
    # A negative scale where none may be is a negative int16 here, and −0 is one in either case: both fall below.
    good = (scales == 0) | ((magnitude >= SMALLEST_SCALE) & (magnitude <= largest))
    if not bool(good.all()):
        first = int((~good).nonzero()[0])
        raise BadPayload(f"scale {int(scales[first]) & 0xFFFF:#06x} is out of range")


# --- Random bits that are a function of a seed and a place: no generator's state, and the same bits on every device.
#
# A counter is mixed by a 32-bit finaliser of xorshifts and multiplications, with the least biased constants of the
# hash-prospector project; every word serves two elements with 16 bits each.


_MASK = 0xFFFFFFFF
_ODD = 0x9E3779B1  # 2³² ÷ golden ratio: neighbouring counters differ in many bits


def words(seed: int, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """32 random bits for each of the counters first … first + count − 1, int64 [count]."""
    return words_at(seed, torch.arange(first, first + count, dtype=torch.int64, device=device))


def words_at(seed: int, counters: Tensor) -> Tensor:
    """32 random bits for each counter, int64 of any shape."""
    # int64 and a mask, because torch has no logical shift of 32-bit integers; products may wrap, mod 2⁶⁴.
    x = (counters * _ODD + mix32(seed & _MASK)) & _MASK
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
