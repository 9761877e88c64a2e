"""int4 blocks of 64, against a second implementation in numpy scalars written from the README's table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farloop.quant.codec import flat
from farloop.quant.formats.q4 import Q4

TOP = float(np.finfo(np.float32).max)
one_size = st.floats(-1, 1, width=32)
any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_values = st.sampled_from([-1.0, -0.9375, -0.5, -0.0, 0.0, 0.0625, 0.1875, 0.5, 1.0])  # many ties
blocks = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(1, 140), elements=elements, fill=elements)
        for elements in (one_size, any_size, few_values)
    )
)


def encode(x: torch.Tensor) -> torch.Tensor:
    return Q4.encode(x, flat(x.numel()))


def decode(payload: torch.Tensor, numel: int) -> torch.Tensor:
    return Q4.decode(payload, flat(numel))


def bf16(x: np.float32) -> int:
    """Bits of positive x, nearest, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def oracle(x: np.ndarray) -> bytes:
    scales, codes = b"", b""
    for first in range(0, x.size, 64):
        block = [*x[first : first + 64], *[np.float32(0)] * 64][:64]
        absmax = max(abs(v) for v in block)
        bits = min(bf16(absmax / np.float32(8)), 0x7DFF)
        bits = bits if bits >= 0x0D80 else 0
        if bits and absmax in block:
            bits |= 0x8000
        s = np.uint32(bits << 16).view(np.float32)
        k = [int(np.rint(np.clip(v / s, -8, 7))) + 8 if bits else 8 for v in block]
        scales += bits.to_bytes(2, "little")
        codes += bytes(k[j] | k[j + 32] << 4 for j in range(32))
    return scales + bytes(-len(scales) % 64) + codes


def code_of(payload: torch.Tensor, index: int) -> int:
    """Code of an element of a payload of one block."""
    byte = int(payload[64 + index % 32])
    return (byte >> 4 if index >= 32 else byte & 15) - 8


@given(blocks)
@settings(deadline=None, max_examples=100)
def test_bytes_equal_the_oracle(x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        assert bytes(encode(torch.from_numpy(x)).tolist()) == oracle(x)


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_decoding_does_not_round(x: np.ndarray) -> None:
    payload = encode(torch.from_numpy(x))
    num_blocks = -(-x.size // 64)
    scales = payload[: 2 * num_blocks].clone().view(torch.bfloat16).double().unsqueeze(1)
    packed = payload[-32 * num_blocks :].view(-1, 32)
    codes = torch.cat((packed & 15, packed >> 4), dim=1).double() - 8
    assert torch.equal(decode(payload, x.size).double(), (scales * codes).view(-1)[: x.size])


def test_gaussian_loss_is_as_published() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).double()
    error = decode(encode(x.float()), x.numel()) - x
    assert float(error.square().sum() / x.square().sum()) == pytest.approx(9.1e-3, rel=0.02)


@pytest.mark.parametrize("largest", [-3.0, 3.0])
def test_the_element_of_largest_magnitude_gets_the_code_minus_8(largest: float) -> None:
    x = torch.linspace(-1.0, 1.0, 64)
    x[40] = largest
    payload = encode(x)
    assert code_of(payload, 40) == -8
    assert decode(payload, 64)[40] == largest


def test_of_two_largest_the_positive_one_gets_the_code_minus_8() -> None:
    x = torch.zeros(64)
    x[3], x[50] = -1.0, 1.0
    payload = encode(x)
    assert (code_of(payload, 50), code_of(payload, 3)) == (-8, 7)


def test_halves_go_to_the_even_code() -> None:
    x = torch.zeros(64)
    x[:5] = torch.tensor([-8.0, 0.5, 1.5, 2.5, 6.5])  # the scale is 1
    payload = encode(x)
    assert [code_of(payload, index) for index in range(5)] == [-8, 0, 2, 2, 6]


def test_codes_are_chosen_with_the_rounded_scale() -> None:
    """s = 1 + 2⁻⁸ + 2⁻²⁰ is stored as 1 + 2⁻⁷: 3.52 ÷ s is above a half, ÷ the stored one below."""
    x = torch.zeros(64)
    x[0], x[1] = -8.0 * (1 + 2.0**-8 + 2.0**-20), 3.52
    assert code_of(encode(x), 1) == 3


def test_blocks_are_too_small_below_2_to_the_minus_97() -> None:
    x = torch.zeros(128)
    x[0], x[64] = 2.0**-97, 2.0**-98
    decoded = decode(encode(x), 128)
    assert decoded[0] == 2.0**-97
    assert not decoded[64:].any()


def test_fp32_largest_number_stays_finite() -> None:
    decoded = decode(encode(torch.tensor([TOP, -TOP])), 2)
    assert decoded[0] == float(torch.finfo(torch.bfloat16).max)
    assert decoded[1] == -7 / 8 * decoded[0]
