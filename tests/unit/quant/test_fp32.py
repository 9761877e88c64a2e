"""The identity codec. Invariant A10: the same bits come out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload
from farloop.quant.formats.fp32 import FP32

patterns = st.lists(st.integers(0, 2**32 - 1).filter(lambda bits: bits & 0x7F800000 != 0x7F800000), max_size=70)


def encode(x: torch.Tensor) -> torch.Tensor:
    return FP32.encode(x, flat(x.numel()))


def decode(payload: torch.Tensor, numel: int) -> torch.Tensor:
    return FP32.decode(payload, flat(numel))


@given(patterns)
@settings(deadline=None)
def test_every_bit_comes_back(bits: list[int]) -> None:
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert torch.equal(decode(encode(x), x.numel()).view(torch.int32), x.view(torch.int32))


def test_the_payload_is_the_numbers_little_endian() -> None:
    assert bytes(encode(torch.tensor([1.0, -2.0])).tolist()).hex() == "0000803f" + "000000c0"


@pytest.mark.parametrize("bits", ["0000807f", "000080ff", "0100807f", "ffffffff"])
def test_values_that_are_not_finite_are_refused(bits: str) -> None:
    payload = torch.tensor(list(bytes.fromhex("0000803f" + bits)), dtype=torch.uint8)
    with pytest.raises(BadPayload, match="not finite"):
        FP32.validate(payload, flat(2))
