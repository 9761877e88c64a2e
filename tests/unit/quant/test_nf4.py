"""Quantiles of a Gaussian, against their definition and exact fractions."""

from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats.nf4 import NF4, VALUES

TOP = float(np.finfo(np.float32).max)
EXACT = [Fraction(value) for value in VALUES]
MIDWAY = [float(low + high) / 2 for low, high in pairwise(EXACT)]

one_size = st.floats(-1, 1, width=32)
any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_values = st.sampled_from([*VALUES, *MIDWAY, -0.0])
blocks = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(1, 140), elements=elements, fill=elements)
        for elements in (one_size, any_size, few_values)
    )
)


def bf16(x: np.float32) -> int:
    """Bits of x ≥ 0, nearest, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def encoded(x: np.ndarray) -> Tensor:
    return NF4.encode(torch.from_numpy(x), flat(x.size))


def decoded(payload: Tensor, numel: int) -> Tensor:
    NF4.validate(payload, flat(numel))
    return NF4.decode(payload, flat(numel))


def oracle(x: np.ndarray) -> bytes:
    """By exact fractions: the nearest of all values, the higher of two."""
    scales, codes = b"", b""
    for first in range(0, x.size, 64):
        block = [*x[first : first + 64], *[np.float32(0)] * 64][:64]
        bits = min(bf16(max(abs(v) for v in block)), 0x7F7F)
        bits = bits if bits >= 0x0D80 else 0
        s = Fraction(float(np.uint32(bits << 16).view(np.float32)))
        k = [min(range(16), key=lambda i: (abs(Fraction(float(v)) - s * EXACT[i]), -i)) if bits else 7 for v in block]
        scales += bits.to_bytes(2, "little")
        codes += bytes(k[j] | k[j + 32] << 4 for j in range(32))
    return scales + bytes(-len(scales) % 64) + codes


def test_values_are_the_quantiles_of_the_definition_rounded_to_bf16() -> None:
    top = 0.9677083
    quantile = NormalDist().inv_cdf
    below = [quantile(top + (0.5 - top) * i / 7) for i in range(7)]
    above = [quantile(top + (0.5 - top) * i / 8) for i in range(8)]
    exact = [*(-q / above[0] for q in below), 0.0, *(q / above[0] for q in reversed(above))]
    rounded = [np.uint32(bf16(np.float32(abs(q))) << 16).view(np.float32) * np.sign(q) for q in exact]
    assert [float(q) for q in rounded] == list(VALUES)


@given(blocks)
@settings(deadline=None, max_examples=100)
def test_bytes_equal_the_oracle(x: np.ndarray) -> None:
    assert bytes(encoded(x).tolist()) == oracle(x)


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_decoding_does_not_round(x: np.ndarray) -> None:
    payload = encoded(x)
    num_blocks = -(-x.size // 64)
    scales = payload[: 2 * num_blocks].clone().view(torch.bfloat16).double().unsqueeze(1)
    packed = payload[-32 * num_blocks :].view(-1, 32)
    codes = torch.cat((packed & 15, packed >> 4), dim=1).long()
    expected = (torch.tensor(VALUES, dtype=torch.float64)[codes] * scales).view(-1)[: x.size]
    assert torch.equal(decoded(payload, x.size).double(), expected)


def loss(x: Tensor) -> float:
    error = decoded(NF4.encode(x, flat(x.numel())), x.numel()).double() - x.double()
    return float(error.square().sum() / x.double().square().sum())


@given(hnp.arrays(np.float32, st.integers(1, 140), elements=st.floats(-1, 1, width=32, allow_subnormal=False)))
@settings(deadline=None, max_examples=100)
def test_no_delta_loses_more_than_declared(x: np.ndarray) -> None:
    x[0] = 1.0
    if x.size > 64:
        x[64:] *= 0.125  # a block of another size
        x[64] = 0.125
    assert loss(torch.from_numpy(x)) <= 1 - NF4.traits.contraction


def test_the_worst_delta_loses_nearly_what_is_declared() -> None:
    x = torch.full((64,), -0.0454)
    x[17] = 1.0
    assert 0.11 < loss(x) < 1 - NF4.traits.contraction


def test_gaussian_loss_is_as_published() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert loss(x) == pytest.approx(8.5e-3, rel=0.02)


def test_ties_go_up() -> None:
    x = torch.zeros(64)
    x[0] = 1.0
    x[1:16] = torch.tensor(MIDWAY)
    codes = NF4.encode(x, flat(64))[64:80] & 15
    assert codes.tolist() == [15, *range(1, 16)]


def test_zeros_and_blocks_too_small_have_the_code_7() -> None:
    x = torch.zeros(128)
    x[64:] = -(2.0**-101)
    payload = NF4.encode(x, flat(128))
    assert set(payload[64:].tolist()) == {0x77}
    assert not decoded(payload, 128).any()


def test_fp32_largest_number_stays_finite() -> None:
    values = decoded(NF4.encode(torch.tensor([TOP, -TOP]), flat(2)), 2)
    assert values[0] == -values[1] == float(torch.finfo(torch.bfloat16).max)


@pytest.mark.parametrize("bits", [0x7F80, 0x7FFF, 0x8000, 0xBF80, 0x0D7F, 0x0001])
def test_scales_that_no_encoder_writes_are_refused(bits: int) -> None:
    payload = NF4.encode(torch.ones(64), flat(64))
    payload[:2] = torch.tensor([bits & 0xFF, bits >> 8])
    with pytest.raises(BadPayload, match="out of range"):
        NF4.validate(payload, flat(64))


def test_padding_of_the_last_block_must_be_zero() -> None:
    payload = NF4.encode(torch.ones(65), flat(65))
    payload[-1] = 0x70
    with pytest.raises(BadPayload, match="tail"):
        NF4.validate(payload, flat(65))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    x = torch.ones(130)
    x[70] = bad
    with pytest.raises(NonFiniteError, match="element 70 "):
        NF4.encode(x, flat(130))
