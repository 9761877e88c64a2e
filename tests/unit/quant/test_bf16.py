"""bf16 values."""

import pytest
import torch

from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload
from farloop.quant.formats.bf16 import BF16


def encode(x: torch.Tensor) -> torch.Tensor:
    return BF16.encode(x, flat(x.numel()))


def decode(payload: torch.Tensor, numel: int) -> torch.Tensor:
    return BF16.decode(payload, flat(numel))


def test_a_bf16_number_comes_back_with_its_sign() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-133, -(2.0**127)])
    assert torch.equal(decode(encode(x), x.numel()).view(torch.int32), x.view(torch.int32))


def test_the_payload_is_the_upper_halves_rounded() -> None:
    # 1 + 2⁻⁸ lies midway and goes to the even 1; 1 + 3·2⁻⁸ to the even 1 + 2⁻⁶.
    x = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -3.0])
    assert bytes(encode(x).tolist()).hex() == "803f" + "823f" + "40c0"


def test_gaussian_loss_is_as_published() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).double()
    error = decode(encode(x.float()), x.numel()) - x
    assert float(error.square().sum() / x.square().sum()) == pytest.approx(2.77e-6, rel=0.02)


@pytest.mark.parametrize("bits", ["807f", "80ff", "c07f", "ffff"])
def test_values_that_are_not_finite_are_refused(bits: str) -> None:
    payload = torch.tensor(list(bytes.fromhex("803f" + bits)), dtype=torch.uint8)
    with pytest.raises(BadPayload, match="not finite"):
        BF16.validate(payload, flat(2))
