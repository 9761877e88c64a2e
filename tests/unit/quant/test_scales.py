"""bf16 on integer bits, against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.quant.errors import BadPayload
from farloop.quant.packing import (
    BF16_LARGEST,
    SMALLEST_SCALE,
    check_scales,
    from_bf16,
    largest_scale,
    to_bf16,
    to_scale,
)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def value(bits: int) -> Fraction:
    """Exact value of a finite bf16."""
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    size = Fraction(mantissa + (128 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 127 - 7)
    return -size if bits >> 15 else size


def rounded(x: float, largest: int = BF16_LARGEST) -> int:
    tensor = to_bf16(torch.tensor([x]), largest)
    assert tensor.dtype == torch.int16
    return int(tensor) & 0xFFFF


@given(finite)
@settings(deadline=None, max_examples=300)
def test_rounding_is_to_nearest_and_ties_go_to_even(x: float) -> None:
    got = rounded(x)
    assert got >> 15 == int(np.signbit(np.float32(x)))
    magnitude, wanted = got & 0x7FFF, abs(Fraction(x))
    error = abs(value(magnitude) - wanted)
    for neighbour in (magnitude - 1, magnitude + 1):
        if 0 <= neighbour <= BF16_LARGEST:
            other = abs(value(neighbour) - wanted)
            assert error < other or (error == other and magnitude % 2 == 0)


@given(st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7FFF <= BF16_LARGEST))
@settings(deadline=None)
def test_every_bf16_survives(bits: int) -> None:
    stored = torch.tensor([bits], dtype=torch.int32).to(torch.int16)
    assert Fraction(from_bf16(stored).item()) == value(bits)
    assert torch.equal(to_bf16(from_bf16(stored)), stored)


def test_numbers_above_the_largest_become_it() -> None:
    top = float(np.finfo(np.float32).max)
    assert rounded(top) == 0x7F7F
    assert rounded(-top) == 0xFF7F
    assert rounded(8.0, largest=0x4000) == 0x4000


def test_scales_below_the_smallest_become_zero_without_a_sign() -> None:
    smallest = 2.0**-100
    scales = to_scale(torch.tensor([smallest, -smallest, smallest * 0.99, -smallest * 0.99, 0.0, -0.0]), BF16_LARGEST)
    assert [int(bits) & 0xFFFF for bits in scales] == [SMALLEST_SCALE, SMALLEST_SCALE | 0x8000, 0, 0, 0, 0]


def test_the_smallest_scale_is_two_to_the_minus_100() -> None:
    assert value(SMALLEST_SCALE) == Fraction(2) ** -100


@pytest.mark.parametrize("code", [1, 8, 128])
def test_the_largest_scale_times_its_code_is_the_largest_bf16(code: int) -> None:
    assert value(largest_scale(code)) * code == value(BF16_LARGEST)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [0x8000, 0x0001, SMALLEST_SCALE - 1, 0x7DFF + 1, 0x7F80, 0x7FC0, 0xFF80, 0xFFFF])
def test_scales_that_no_encoder_writes_are_refused(bits: int, signed: bool) -> None:
    scales = torch.tensor([0, SMALLEST_SCALE, bits], dtype=torch.int32).to(torch.int16)
    with pytest.raises(BadPayload, match=f"{bits:#06x} is out of range"):
        check_scales(scales, 0x7DFF, signed=signed)


def test_negative_scales_are_refused_only_where_none_may_be() -> None:
    scales = torch.tensor([0, 0x7DFF, 0xBF80, SMALLEST_SCALE | 0x8000], dtype=torch.int32).to(torch.int16)
    check_scales(scales, 0x7DFF, signed=True)
    with pytest.raises(BadPayload, match="0xbf80"):
        check_scales(scales, 0x7DFF, signed=False)
