"""A sign and a power of two. Invariant D37."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farloop.quant.codec import flat
from farloop.quant.formats.e3m0 import E3M0

one_size = st.floats(-1, 1, width=32)
any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_values = st.sampled_from([0.0, -0.0, *(sign * 1.5 * 2.0**-j for j in range(-1, 9) for sign in (1, -1)), 1.0, -1.0])
blocks = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(1, 140), elements=elements, fill=elements)
        for elements in (one_size, any_size, few_values)
    )
)


def encode(x: torch.Tensor) -> torch.Tensor:
    return E3M0.encode(x, flat(x.numel()))


def decode(payload: torch.Tensor, numel: int) -> torch.Tensor:
    return E3M0.decode(payload, flat(numel))


def scales_of(payload: torch.Tensor, numel: int) -> torch.Tensor:
    num_blocks = -(-numel // 64)
    return payload[: 2 * num_blocks].clone().view(torch.bfloat16).float().repeat_interleave(64)[:numel]


def oracle(x: np.ndarray) -> bytes:
    """By exact fractions: the nearest of all values, the larger of two."""
    scales, codes = b"", b""
    for first in range(0, x.size, 64):
        block = [*x[first : first + 64], *[np.float32(0)] * 64][:64]
        bits = int(np.float32(max(abs(v) for v in block)).view(np.uint32))
        bits = min((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0x7F7F)
        bits = bits if bits >= 0x0D80 else 0
        s = Fraction(float(np.uint32(bits << 16).view(np.float32)))
        values = [Fraction(0), *(s * Fraction(2) ** (m - 7) for m in range(1, 8))]
        k = []
        for v in block:
            m = min(range(8), key=lambda m: (abs(abs(Fraction(float(v))) - values[m]), -m)) if bits else 0
            k.append(m | (8 if v < 0 and m else 0))
        scales += bits.to_bytes(2, "little")
        codes += bytes(k[j] | k[j + 32] << 4 for j in range(32))
    return scales + bytes(-len(scales) % 64) + codes


@given(blocks)
@settings(deadline=None, max_examples=100)
def test_bytes_equal_the_oracle(x: np.ndarray) -> None:
    assert bytes(encode(torch.from_numpy(x)).tolist()) == oracle(x)


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_values_are_zero_or_a_power_of_two_times_the_scale(x: np.ndarray) -> None:
    payload = encode(torch.from_numpy(x))
    scales = scales_of(payload, x.size).double()
    ratio = (decode(payload, x.size).double() / torch.where(scales == 0, 1.0, scales)).abs()
    assert set(ratio.tolist()) <= {0.0, *(2.0**k for k in range(-6, 1))}


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_encoding_what_was_decoded_changes_nothing(x: np.ndarray) -> None:
    payload = encode(torch.from_numpy(x))
    assert torch.equal(encode(decode(payload, x.size)), payload)


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_the_opposite_decodes_to_the_opposite(x: np.ndarray) -> None:
    one, other = (decode(encode(torch.from_numpy(sign * x)), x.size) for sign in (1, -1))
    assert torch.equal(one, -other)


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_inside_the_range_the_error_is_at_most_a_third(x: np.ndarray) -> None:
    tensor = torch.from_numpy(x)
    payload = encode(tensor)
    scales, decoded = scales_of(payload, x.size).double(), decode(payload, x.size).double()
    size = tensor.double().abs()
    inside = (scales > 0) & (size >= scales * 2.0**-6) & (size <= scales)
    assert ((decoded - tensor.double()).abs() <= size / 3)[inside].all()


def test_codes_are_written_as_the_table_says() -> None:
    x = torch.zeros(64)
    x[:8] = torch.tensor([1.0, -1.0, 0.75, 0.7499, -(2.0**-6), 2.0**-7, 0.99 * 2.0**-7, -(2.0**-9)])
    codes = (encode(x)[64:72] & 15).tolist()
    assert codes == [7, 15, 7, 6, 9, 1, 0, 0]


def test_the_code_that_no_encoder_writes_is_zero() -> None:
    payload = encode(torch.ones(64))
    payload[64:] = 0x88
    E3M0.validate(payload, flat(64))
    assert not decode(payload, 64).any()


def test_gaussian_loss_is_as_published() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).double()
    error = decode(encode(x.float()), x.numel()) - x
    assert float(error.square().sum() / x.square().sum()) == pytest.approx(3.5e-2, rel=0.02)
