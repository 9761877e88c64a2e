"""bf16 on integer bits, against exact fractions; packed codes; random bits from a counter."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from codec_cases import mix, uniform, word
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from farloop.quant import packing
from farloop.quant.packing import (
    BF16_LARGEST,
    SMALLEST_SCALE,
    from_bf16,
    largest_scale,
    mix32,
    to_bf16,
    to_scale,
    uniform16,
    words,
)


def value(bits: int) -> Fraction:
    """Exact value of a finite bf16."""
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    size = Fraction(mantissa + (128 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 127 - 7)
    return -size if bits >> 15 else size


def rounded(x: float, largest: int = BF16_LARGEST) -> int:
    return int(to_bf16(torch.tensor([x]), largest)) & 0xFFFF


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=examples(100))
def test_rounding_is_to_nearest_and_ties_go_to_even(x: float) -> None:
    got = rounded(x)
    assert got >> 15 == int(np.signbit(np.float32(x)))
    magnitude, wanted = got & 0x7FFF, abs(Fraction(x))
    error = abs(value(magnitude) - wanted)
    for neighbour in (magnitude - 1, magnitude + 1):
        if 0 <= neighbour <= BF16_LARGEST:
            other = abs(value(neighbour) - wanted)
            assert error < other or (error == other and magnitude % 2 == 0)


def test_every_bf16_survives() -> None:
    stored = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    stored = stored[(stored & 0x7FFF) <= BF16_LARGEST]
    assert torch.equal(to_bf16(from_bf16(stored)), stored)
    assert torch.equal(from_bf16(stored).view(torch.int32), stored.view(torch.bfloat16).float().view(torch.int32))


def test_numbers_beyond_the_ends_become_the_largest_and_zero() -> None:
    top, smallest = float(np.finfo(np.float32).max), 2.0**-100
    assert [rounded(top), rounded(-top), rounded(8.0, largest=0x4000)] == [0x7F7F, 0xFF7F, 0x4000]
    scales = to_scale(torch.tensor([smallest, -smallest, smallest * 0.99, -smallest * 0.99, 0.0, -0.0]), BF16_LARGEST)
    assert [int(bits) & 0xFFFF for bits in scales] == [SMALLEST_SCALE, SMALLEST_SCALE | 0x8000, 0, 0, 0, 0]
    assert value(SMALLEST_SCALE) == Fraction(2) ** -100
    assert all(value(largest_scale(code)) * code == value(BF16_LARGEST) for code in (1, 8, 128))


@given(bits=st.sampled_from([1, 2, 4]), groups=st.integers(0, 5), seed=st.integers(0, 99))
def test_codes_are_split_over_their_bytes_and_come_back(bits: int, groups: int, seed: int) -> None:
    per_byte = 8 // bits
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (groups, 64), dtype=torch.uint8, generator=generator)
    bytes_of_group = 64 // per_byte
    expected = [
        sum(int(group[j + place * bytes_of_group]) << place * bits for place in range(per_byte))
        for group in codes
        for j in range(bytes_of_group)
    ]
    packed = packing.pack(codes, bits)
    assert packed.tolist() == expected
    for dtype in (torch.uint8, torch.float32):
        out = torch.full((groups, 64), 99).to(dtype)
        packing.unpack_into(packed, out, bits)
        assert torch.equal(out, codes.to(dtype))


seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds, first=st.integers(0, 2**28).map(lambda half: 2 * half), count=st.integers(0, 41))
@settings(max_examples=examples(20))
def test_random_bits_are_those_of_the_second_implementation(seed: int, first: int, count: int) -> None:
    """Even elements have the low half of their word, odd ones the high half."""
    assert mix32(seed) == mix(seed)
    assert words(seed, first, count).tolist() == [word(seed, first + i) for i in range(count)]
    assert uniform16(seed, first, count).tolist() == [uniform(seed, first + i) for i in range(count)]


def test_a_range_has_the_bits_of_its_place_in_the_whole() -> None:
    whole = uniform16(7, 0, 1000)
    assert torch.equal(torch.cat((uniform16(7, 0, 256), uniform16(7, 256, 744))), whole)
    with pytest.raises(AssertionError):
        uniform16(0, 1, 4)
