"""Numbers that a block format and its kernels share: block sizes, the ends of the range of scales, the hash of seeds.

Below formats and kernels: both import it, so that kernels need no format and formats may choose kernels.
"""

from typing import Final

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
