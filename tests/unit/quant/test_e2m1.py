"""Eight magnitudes and a sign, against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats.e2m1 import E2M1

MAGNITUDES = [Fraction(m, 2) for m in (0, 1, 2, 3, 4, 6, 8, 12)]
TOP = float(np.finfo(np.float32).max)

one_size = st.floats(-1, 1, width=32)
any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_values = st.sampled_from(
    [sign * v for v in (0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0) for sign in (1, -1)]
)
blocks = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(1, 140), elements=elements, fill=elements)
        for elements in (one_size, any_size, few_values)
    )
)


def encoded(x: np.ndarray) -> Tensor:
    return E2M1.encode(torch.from_numpy(x), flat(x.size))


def decoded(payload: Tensor, numel: int) -> Tensor:
    E2M1.validate(payload, flat(numel))
    return E2M1.decode(payload, flat(numel))


def oracle(x: np.ndarray) -> bytes:
    """By exact fractions: the nearest of all values, the larger of two."""
    scales, codes = b"", b""
    for first in range(0, x.size, 64):
        block = [*x[first : first + 64], *[np.float32(0)] * 64][:64]
        bits = int(np.float32(max(abs(v) for v in block) / np.float32(6)).view(np.uint32))
        bits = min((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0x7E2A)
        bits = bits if bits >= 0x0D80 else 0
        s = Fraction(float(np.uint32(bits << 16).view(np.float32)))
        k = []
        for v in block:
            size = abs(Fraction(float(v)))
            m = min(range(8), key=lambda m: (abs(size - s * MAGNITUDES[m]), -m)) if bits else 0
            k.append(m | (8 if v < 0 and m else 0))
        scales += bits.to_bytes(2, "little")
        codes += bytes(k[j] | k[j + 32] << 4 for j in range(32))
    return scales + bytes(-len(scales) % 64) + codes


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
    codes = torch.cat((packed & 15, packed >> 4), dim=1)
    size = torch.tensor([float(m) for m in MAGNITUDES], dtype=torch.float64)[(codes & 7).long()]
    expected = (torch.where(codes > 7, -size, size) * scales).view(-1)[: x.size]
    assert torch.equal(decoded(payload, x.size).double(), expected)


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_the_opposite_decodes_to_the_opposite(x: np.ndarray) -> None:
    assert torch.equal(decoded(encoded(x), x.size), -decoded(encoded(-x), x.size))


def loss(x: Tensor) -> float:
    error = decoded(E2M1.encode(x, flat(x.numel())), x.numel()).double() - x.double()
    return float(error.square().sum() / x.double().square().sum())


@given(hnp.arrays(np.float32, st.integers(1, 140), elements=st.floats(-1, 1, width=32, allow_subnormal=False)))
@settings(deadline=None, max_examples=100)
def test_no_delta_loses_more_than_declared(x: np.ndarray) -> None:
    x[0] = 1.0
    if x.size > 64:
        x[64:] *= 0.125  # a block of another size
        x[64] = 0.125
    assert loss(torch.from_numpy(x)) <= 1 - E2M1.traits.contraction


def test_the_worst_delta_loses_nearly_what_is_declared() -> None:
    x = torch.full((64,), 0.2499)
    x[17] = 6.0
    assert loss(x) == pytest.approx(0.0985, abs=1e-3)
    assert 0.09 < loss(x) < 1 - E2M1.traits.contraction


def test_gaussian_loss_is_as_published() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert loss(x) == pytest.approx(1.1e-2, rel=0.02)


def test_codes_are_written_as_the_table_says() -> None:
    x = torch.zeros(64)
    x[:9] = torch.tensor([6.0, -6.0, 5.0, 4.999, -3.5, 2.4, 0.25, 0.2499, -0.1])
    assert (E2M1.encode(x, flat(64))[64:73] & 15).tolist() == [7, 15, 7, 6, 14, 4, 1, 0, 0]


def test_fp32_largest_number_stays_finite() -> None:
    x = torch.tensor([TOP, -TOP])
    values = decoded(E2M1.encode(x, flat(2)), 2)
    assert values[0] == -values[1] == 6 * 1.328125 * 2.0**125


def test_the_code_that_no_encoder_writes_is_zero() -> None:
    payload = E2M1.encode(torch.ones(64), flat(64))
    payload[64:] = 0x88
    assert not decoded(payload, 64).any()


@pytest.mark.parametrize("bits", [0x7E2B, 0x7F80, 0x8000, 0xBF80, 0x0D7F, 0x0001])
def test_scales_that_no_encoder_writes_are_refused(bits: int) -> None:
    payload = E2M1.encode(torch.ones(64), flat(64))
    payload[:2] = torch.tensor([bits & 0xFF, bits >> 8])
    with pytest.raises(BadPayload, match="out of range"):
        E2M1.validate(payload, flat(64))


def test_the_largest_scale_times_the_largest_code_is_finite() -> None:
    payload = E2M1.encode(torch.ones(64), flat(64))
    payload[:2] = torch.tensor([0x2A, 0x7E])
    payload[64:] = 0xF7
    assert torch.isfinite(decoded(payload, 64)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    x = torch.ones(130)
    x[70] = bad
    with pytest.raises(NonFiniteError, match="element 70 "):
        E2M1.encode(x, flat(130))
