"""`q4r`, against a second implementation in numpy scalars written from the table of its bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload
from farloop.quant.formats.q4r import Q4R, Q4rCodec
from farloop.quant.registry import codec_named

F = np.float32

one_size = st.floats(-1, 1, width=32)
any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_values = st.sampled_from([-1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 3.0])  # many ties
one_of_them_large = st.sampled_from([0.0, 1e-3, 1.0])
arrays = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(1, 600), elements=elements, fill=elements)
        for elements in (one_size, any_size, few_values, one_of_them_large)
    )
)


def q4r(spelling: str = "") -> Q4rCodec:
    codec = codec_named(f"q4r:{spelling}" if spelling else "q4r")
    assert isinstance(codec, Q4rCodec)
    return codec


def mix(x: int) -> int:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def uniform(seed: int, element: int) -> np.float32:
    word = mix((element // 2 * 0x9E3779B1 + mix(seed)) % 2**32)
    return F(((word >> 16 if element % 2 else word % 2**16) + 0.5) / 2**16)


def bf16(x: np.float32) -> int:
    """Bits of positive x, nearest, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def scale_bits(block: list[np.float32], step: np.float32, *, absolute: bool) -> int:
    absmax = max(abs(v) for v in block)
    if absmax < F(2.0**-100):
        return 0
    if absolute:
        wanted = step
    else:
        exponent = math.frexp(float(absmax))[1] - 1
        total = sum(int(np.rint(v * F(2.0 ** (10 - exponent)))) ** 2 for v in block)
        assert total < 2**31
        wanted = F(np.sqrt(F(total)) * step) * F(2.0 ** (exponent - 14))
    bits = min(bf16(max(wanted, absmax * F(0.144))), 0x7DFF)
    return bits if bits >= 0x0D80 else 0


def oracle(
    x: np.ndarray, *, step: list[float] | float = 1.0, stochastic: bool = True, absolute: bool = False, seed: int = 0
) -> bytes:
    """`step`: one, or one per block."""
    scales, codes = b"", b""
    for number, first in enumerate(range(0, x.size, 256)):
        block = [*x[first : first + 256], *[F(0)] * 256][:256]
        wanted = F(step[number] if isinstance(step, list) else step)
        bits = scale_bits(block, wanted, absolute=absolute)
        s = np.uint32(bits << 16).view(np.float32)
        k = []
        for place, v in enumerate(block):
            ratio = v / s if bits else F(0)
            code = np.floor(ratio + uniform(seed, first + place)) if stochastic else np.rint(ratio)
            k.append(int(min(max(code, -8), 7)) + 8 if bits else 8)
        scales += bits.to_bytes(2, "little")
        for group in range(0, 256, 64):
            codes += bytes(k[group + j] | k[group + j + 32] << 4 for j in range(32))
    return scales + bytes(-len(scales) % 64) + codes


def bytes_of(codec: Q4rCodec, x: np.ndarray, seed: int = 0) -> bytes:
    return bytes(codec.encode(torch.from_numpy(x), flat(x.size), seed=seed).tolist())


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def relative_loss(codec: Q4rCodec, x: Tensor, fragment: Fragment | None = None) -> float:
    fragment = fragment or flat(x.numel())
    error = codec.decode(codec.encode(x, fragment, seed=1), fragment, seed=1).double() - x.double()
    return float(error.square().sum() / x.double().square().sum())


@given(x=arrays, seed=st.integers(0, 2**32 - 1), step=st.sampled_from([0.3, 0.7, 1.0, 1.6, 1e-30, 1e30]))
@settings(deadline=None, max_examples=60)
def test_stochastic_bytes_equal_the_oracle(x: np.ndarray, seed: int, step: float) -> None:
    with np.errstate(all="ignore"):
        assert bytes_of(q4r(f"step={step}"), x, seed) == oracle(x, step=step, seed=seed)


@given(x=arrays, step=st.sampled_from([0.3, 0.7, 1.0, 1.6]))
@settings(deadline=None, max_examples=60)
def test_nearest_bytes_equal_the_oracle(x: np.ndarray, step: float) -> None:
    with np.errstate(all="ignore"):
        assert bytes_of(q4r(f"step={step},rounding=nearest"), x) == oracle(x, step=step, stochastic=False)


@given(x=arrays, seed=st.integers(0, 2**32 - 1), step=st.sampled_from([1e-30, 1e-3, 0.1, 1e30]))
@settings(deadline=None, max_examples=60)
def test_absolute_bytes_equal_the_oracle(x: np.ndarray, seed: int, step: float) -> None:
    with np.errstate(all="ignore"):
        assert bytes_of(q4r(f"step={step},policy=absolute"), x, seed) == oracle(x, step=step, absolute=True, seed=seed)


def test_a_step_that_the_coordinator_shares_out_is_a_relative_one() -> None:
    x = gaussian(600).numpy()
    assert bytes_of(q4r("step=0.7,policy=l-greco"), x, 5) == oracle(x, step=0.7, seed=5)


@given(arrays, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_decoding_does_not_round(x: np.ndarray, seed: int) -> None:
    payload = Q4R.encode(torch.from_numpy(x), flat(x.size), seed=seed)
    num_blocks = -(-x.size // 256)
    scales = payload[: 2 * num_blocks].clone().view(torch.bfloat16).double().view(-1, 1, 1)
    packed = payload[-128 * num_blocks :].view(-1, 4, 32)
    codes = torch.cat((packed & 15, packed >> 4), dim=2).double() - 8
    assert torch.equal(Q4R.decode(payload, flat(x.size)).double(), (scales * codes).view(-1)[: x.size])


THREE = Fragment(
    index=0,
    slot=0,
    numel=1280,
    tensors=(
        TensorSlot(name="a", shape=(256,), offset=0),
        TensorSlot(name="b", shape=(3, 200), offset=256),
        TensorSlot(name="c", shape=(5,), offset=1024),
    ),
)


@pytest.mark.parametrize("options", ["", ",rounding=nearest", ",policy=absolute"])
def test_every_tensor_has_its_own_step(options: str) -> None:
    x = gaussian(1280)
    x[856:1024] = 0.0
    x[1029:] = 0.0
    codec = q4r(f"step=0.5/1/2{options}")
    payload = bytes(codec.encode(x, THREE, seed=9).tolist())
    steps = [0.5, 1.0, 1.0, 1.0, 2.0]
    absolute = codec.policy == "absolute"
    assert payload == oracle(
        x.numpy(), step=steps, stochastic=codec.rounding == "stochastic", absolute=absolute, seed=9
    )


@pytest.mark.parametrize("fragment", [flat(1280), THREE])
def test_as_many_steps_as_tensors_are_wanted(fragment: Fragment) -> None:
    codec = q4r("step=0.5/1")
    with pytest.raises(ValueError, match=rf"2 steps for {len(fragment.tensors)} tensors"):
        codec.encode(torch.zeros(1280), fragment)


def test_gaussian_losses_are_as_published() -> None:
    x = gaussian(1 << 20)
    for step, nearest, stochastic in ((0.7, 4.1e-2, 8.2e-2), (1.0, 8.3e-2, 0.167)):
        assert relative_loss(q4r(f"step={step},rounding=nearest"), x) == pytest.approx(nearest, rel=0.02)
        assert relative_loss(q4r(f"step={step}"), x) == pytest.approx(stochastic, rel=0.02)


@pytest.mark.parametrize(
    ("spelling", "bits"),
    [("step=0.7", 2.71), ("step=1", 2.23), ("step=1.6", 1.73), ("step=1,rounding=nearest", 2.19)],
)
def test_bits_after_sealing_are_as_published(spelling: str, bits: float) -> None:
    """zstd comes within 0.03 of the entropy; the scales are another 0.03."""
    codec, fragment = q4r(spelling), flat(1 << 22)
    header = BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=1)
    blob = pack_blob(header, codec.encode(gaussian(1 << 22), fragment, seed=header.seed))
    assert bits - 0.05 < 8 * len(blob) / fragment.numel <= bits


def test_the_mean_over_seeds_is_what_was_encoded() -> None:
    """Within three standard errors for every step, also of elements far below the step."""
    x = gaussian(2048)
    fragment = flat(2048)
    assert float(x.abs().max()) < 5, "else some would be clipped"
    decoded = torch.stack(
        [Q4R.decode(Q4R.encode(x, fragment, seed=seed), fragment, seed=seed) for seed in range(400)]
    ).double()
    error, spread = decoded.mean(dim=0) - x.double(), decoded.std(dim=0)
    z = (error / (spread / 20))[spread > 0]  # of elements that lie next to a code, all draws may be that
    assert len(z) > 2000
    assert float((z.abs() > 3).double().mean()) < 0.02
    assert abs(float(z.mean())) < 3 / math.sqrt(2048)
    assert float(z.square().mean()) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("spelling", ["step=1", "step=0.01", "step=1e-6,policy=absolute"])
def test_nothing_is_clipped(spelling: str) -> None:
    """One element among 255 zeros is 16 rms: its scale is what the largest code needs, and no less."""
    x = torch.zeros(512)
    x[3], x[300] = 16.0, -16.0
    nearest = q4r(f"rounding=nearest,{spelling}")
    assert nearest.decode(nearest.encode(x, flat(512)), flat(512))[[3, 300]].tolist() == [16.078125, -16.078125]
    codec = q4r(spelling)
    decoded = [codec.decode(codec.encode(x, flat(512), seed=seed), flat(512)) for seed in range(1000)]
    mean = torch.stack(decoded).double().mean(dim=0)
    assert mean[[3, 300]].tolist() == pytest.approx([16.0, -16.0], abs=3 * 2.3 / 2 / 1000**0.5)
    assert int(mean.count_nonzero()) == 2


def test_a_large_step_sends_zeros_most_of_the_time_and_nearest_rounding_nothing() -> None:
    x = gaussian(4096)
    assert (
        not q4r("step=20,rounding=nearest")
        .decode(q4r("step=20,rounding=nearest").encode(x, flat(4096)), flat(4096))
        .any()
    )
    sent = q4r("step=20").decode(q4r("step=20").encode(x, flat(4096), seed=3), flat(4096))
    assert 0.02 < float((sent != 0).float().mean()) < 0.08


def test_blocks_below_2_to_the_minus_100_are_zero() -> None:
    for spelling in ("", "rounding=nearest", "step=1e-20,policy=absolute"):
        codec, x = q4r(spelling), torch.zeros(512)
        x[::2] = 2.0**-99
        x[256:] = 2.0**-101
        payload = codec.encode(x, flat(512), seed=1)
        assert payload[2:4].tolist() == [0, 0]
        assert set(payload[64 + 128 :].tolist()) == {0x88}


def test_an_absolute_step_is_the_scale_of_every_block_and_errors_are_alike() -> None:
    """Reverse water-filling: quiet blocks cost few bits, and every block the same error."""
    codec, x = q4r("step=0.5,policy=absolute,rounding=nearest"), gaussian(1024)
    x[:512] *= 0.05
    payload = codec.encode(x, flat(1024))
    assert payload[:8].view(torch.int16).tolist() == [0x3F00] * 4
    decoded = codec.decode(payload, flat(1024))
    assert not decoded[:512].any()
    assert float((decoded - x).abs().max()) <= 0.25


def test_the_decoder_needs_no_step_and_no_seed() -> None:
    x = gaussian(600)
    payload = q4r("step=0.7").encode(x, flat(600), seed=5)
    assert torch.equal(Q4R.decode(payload, flat(600), seed=77), q4r("step=0.7").decode(payload, flat(600), seed=5))


@pytest.mark.parametrize("bits", [0xBF80, 0x8000, 0x0001, 0x7E00, 0x7F80, 0xFFFF])
def test_scales_that_no_encoder_writes_are_refused(bits: int) -> None:
    payload = Q4R.encode(torch.ones(256), flat(256))
    payload[:2] = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8)
    with pytest.raises(BadPayload, match="out of range"):
        Q4R.validate(payload, flat(256))


def test_traits_follow_from_the_parameters() -> None:
    assert q4r().traits.unbiased and not q4r().traits.deterministic and q4r().traits.entropy_coded
    nearest = q4r("rounding=nearest").traits
    assert nearest.deterministic and not nearest.unbiased
    assert q4r("policy=absolute").traits.contraction == 0.0
    assert q4r("step=2").traits.contraction == 0.0
    assert 0.2 < q4r("step=1").traits.contraction == q4r("step=1.7").traits.contraction
    assert q4r("policy=l-greco").traits.contraction == 0.0, "a tensor may get twice the step"
    assert q4r("policy=l-greco,step=0.8").traits.contraction > 0.2
    worst = q4r("step=1/2.5/1").traits.contraction
    assert worst == 0.0, "the worst of the tensors counts"


def test_the_largest_numbers_stay_finite() -> None:
    top = float(np.finfo(np.float32).max)
    for spelling in ("step=1", "step=1e30", "step=1e30,policy=absolute", "step=7,rounding=nearest"):
        codec = q4r(spelling)
        payload = codec.encode(torch.tensor([top, -top] * 128), flat(256), seed=2)
        codec.validate(payload, flat(256))
        assert torch.isfinite(codec.decode(payload, flat(256))).all()
