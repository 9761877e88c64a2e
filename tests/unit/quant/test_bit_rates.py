"""What a setting would cost, estimated from a sample."""

import pytest
import torch
from torch import Tensor

from farloop.quant.bit_rates import SAMPLE_ELEMENTS, measure
from farloop.quant.blob import HEADER_BYTES, BlobHeader, pack_blob
from farloop.quant.codec import flat
from farloop.quant.errors import NonFiniteError
from farloop.quant.registry import codec_named


def gaussian(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3


@pytest.mark.parametrize("spelling", ["q4", "q4r:step=0.7", "ternary"])
def test_of_a_small_tensor_it_is_the_blob_itself(spelling: str) -> None:
    codec, x = codec_named(spelling), gaussian(5000)
    fragment = flat(x.numel())
    payload = codec.encode(x, fragment)
    rate = measure(codec, x)
    assert rate.error == pytest.approx(float((x - codec.decode(payload, fragment)).double().square().sum()), rel=1e-9)
    blob = pack_blob(BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0), payload)
    assert rate.bits >= 8 * (len(blob) - HEADER_BYTES)  # its own header is counted where it is compressed
    assert rate.bits <= 8 * len(blob)


@pytest.mark.parametrize("spelling", ["q4", "q4r:step=0.7"])
def test_of_a_large_one_a_sample_is_enough(spelling: str) -> None:
    x = gaussian(20 * SAMPLE_ELEMENTS + 77)
    x[: x.numel() // 2] *= 10.0  # a sample from one end would be wrong by far
    codec, fragment = codec_named(spelling), flat(x.numel())
    payload = codec.encode(x, fragment)
    error = float((x - codec.decode(payload, fragment)).double().square().sum())
    size = 8 * len(pack_blob(BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0), payload))
    rate = measure(codec, x)
    assert rate.error == pytest.approx(error, rel=0.05)
    assert rate.bits == pytest.approx(size, rel=0.02)


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(NonFiniteError):
        measure(codec_named("q4"), torch.tensor([1.0, torch.nan]))
