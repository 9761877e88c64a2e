"""int8 blocks of 256, against a second implementation in numpy scalars written from the README's table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload
from farloop.quant.formats.q8 import Q8

TOP = float(np.finfo(np.float32).max)
one_size = st.floats(-1, 1, width=32)
any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(1, 300), elements=elements, fill=elements)
        for elements in (one_size, any_size)
    )
)


def encode(x: torch.Tensor) -> torch.Tensor:
    return Q8.encode(x, flat(x.numel()))


def decode(payload: torch.Tensor, numel: int) -> torch.Tensor:
    return Q8.decode(payload, flat(numel))


def bf16(x: np.float32) -> int:
    """Bits of positive x, nearest, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def oracle(x: np.ndarray) -> bytes:
    scales, codes = b"", b""
    for first in range(0, x.size, 256):
        block = [*x[first : first + 256], *[np.float32(0)] * 256][:256]
        bits = min(bf16(np.float32(max(abs(v) for v in block) / np.float32(127))), 0x7BFF)
        bits = bits if bits >= 0x0D80 else 0
        s = np.uint32(bits << 16).view(np.float32)
        scales += bits.to_bytes(2, "little")
        for v in block:
            k = int(np.rint(np.clip(v / s, -127, 127))) if bits else 0
            codes += (k & 0xFF).to_bytes(1, "little")
    return scales + bytes(-len(scales) % 64) + codes


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_bytes_equal_the_oracle(x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        assert bytes(encode(torch.from_numpy(x)).tolist()) == oracle(x)


@given(blocks)
@settings(deadline=None, max_examples=60)
def test_decoding_does_not_round(x: np.ndarray) -> None:
    payload = encode(torch.from_numpy(x))
    num_blocks = -(-x.size // 256)
    scales = payload[: 2 * num_blocks].clone().view(torch.bfloat16).double().repeat_interleave(256)
    codes = payload[-256 * num_blocks :].view(torch.int8).double()
    assert torch.equal(decode(payload, x.size).double(), (scales * codes)[: x.size])


def test_gaussian_loss_is_as_published() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).double()
    error = decode(encode(x.float()), x.numel()) - x
    assert float(error.square().sum() / x.square().sum()) == pytest.approx(4.9e-5, rel=0.02)


def test_the_scale_is_a_quotient_not_a_product_with_the_reciprocal() -> None:
    """One of the few numbers where the two differ after the rounding to bf16: 3f81 and 3f80."""
    payload = encode(torch.tensor([float.fromhex("0x1.fdfc02p+6")]))
    assert payload[:2].tolist() == [0x81, 0x3F]


def test_fp32_largest_number_stays_finite() -> None:
    decoded = decode(encode(torch.tensor([TOP, -TOP])), 2)
    assert decoded[0] == -decoded[1]
    assert 0.98 * TOP < decoded[0] <= TOP


def test_the_code_that_no_encoder_writes_decodes_to_a_finite_number() -> None:
    payload = encode(torch.full((256,), TOP))
    payload[64:] = 0x80
    Q8.validate(payload, flat(256))
    assert torch.isfinite(decode(payload, 256)).all()


def test_negative_scales_are_refused() -> None:
    payload = encode(torch.ones(256))
    payload[1] |= 0x80
    with pytest.raises(BadPayload, match="out of range"):
        Q8.validate(payload, flat(256))
