"""One bit per element, against exact fractions; and error feedback with it."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from farloop.algo.spec import TILE, Fragment, TensorSlot
from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats.sign import SIGN

TOP = float(np.finfo(np.float32).max)

any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
one_size = st.floats(-1, 1, width=32)
vectors = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(0, 520), elements=elements, fill=elements)
        for elements in (one_size, any_size)
    )
)


def cut(*lengths: int) -> Fragment:
    """Tensors of these lengths, each on the next multiple of 256."""
    tensors, offset = [], 0
    for index, length in enumerate(lengths):
        tensors.append(TensorSlot(name=f"t{index}", shape=(length,), offset=offset))
        offset += -(-length // 256) * 256
    return Fragment(index=0, slot=0, numel=offset, tensors=tuple(tensors))


def gaussian(fragment: Fragment, seed: int = 0) -> Tensor:
    """Zero between tensors."""
    x = torch.zeros(fragment.numel)
    generator = torch.Generator().manual_seed(seed)
    for tensor in fragment.tensors:
        x[tensor.offset :][: tensor.numel] = torch.randn(tensor.numel, generator=generator)
    return x


def oracle(x: np.ndarray, fragment: Fragment) -> bytes:
    """One element after the other, the sum by whole numbers of Python."""
    real = np.zeros(-(-x.size // 256) * 256, dtype=bool)
    for tensor in fragment.tensors:
        real[tensor.offset : tensor.offset + tensor.numel] = True
    scales, codes = b"", b""
    for first in range(0, x.size, 256):
        block = [*x[first : first + 256], *[np.float32(0)] * 256][:256]
        absmax = max(abs(float(v)) for v in block)
        bits, k = 0, [0] * 256
        if absmax >= 2.0**-100:
            e = np.frexp(absmax)[1] - 1
            total = sum(int(abs(Fraction(float(v))) * Fraction(2) ** int(21 - e)) for v in block)
            mean = np.float32(total) / np.float32(max(1, real[first : first + 256].sum()))
            bits = int(np.float32(float(mean) * 2.0 ** float(e - 21)).view(np.uint32))
            bits = min((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0x7F7F)
            bits = bits if bits >= 0x0D80 else 0
            k = [int(v < 0 and bits > 0) for v in block]
        scales += bits.to_bytes(2, "little")
        codes += bytes(sum(k[j + 32 * place] << place for place in range(8)) for j in range(32))
    return scales + bytes(-len(scales) % 64) + codes


@given(vectors)
@settings(deadline=None, max_examples=80)
def test_bytes_equal_the_oracle(x: np.ndarray) -> None:
    payload = SIGN.encode(torch.from_numpy(x), flat(x.size))
    SIGN.validate(payload, flat(x.size))
    assert bytes(payload.tolist()) == oracle(x, flat(x.size))


def test_bytes_of_several_tensors_equal_the_oracle() -> None:
    fragment = cut(300, 1, 256, 513)
    x = gaussian(fragment)
    payload = SIGN.encode(x, fragment)
    SIGN.validate(payload, fragment)
    assert bytes(payload.tolist()) == oracle(x.numpy(), fragment)


def test_the_scale_is_the_mean_magnitude_of_what_is_no_padding() -> None:
    fragment = cut(300, 1)
    x = gaussian(fragment)
    decoded = SIGN.decode(SIGN.encode(x, fragment), fragment)
    for part in (slice(0, 256), slice(256, 300), slice(512, 513)):
        mean = float(x[part].abs().mean())
        assert decoded[part].abs().tolist() == pytest.approx([mean] * (part.stop - part.start), rel=2.0**-8)
        assert torch.equal(decoded[part] < 0, x[part] < 0)
    assert not decoded[300:512].any()
    assert not decoded[513:].any()


def test_zeros_of_either_sign_count_as_positive() -> None:
    x = torch.tensor([2.0, -2.0, 0.0, -0.0])
    assert SIGN.decode(SIGN.encode(x, flat(4)), flat(4)).tolist() == [1.0, -1.0, 1.0, 1.0]


def lost(x: Tensor, fragment: Fragment) -> float:
    """Share of the squared norm."""
    error = SIGN.decode(SIGN.encode(x, fragment), fragment).double() - x.double()
    return float(error.square().sum() / x.double().square().sum())


@given(hnp.arrays(np.float32, st.integers(1, 600), elements=one_size, fill=st.just(np.float32(0))))
@settings(deadline=None, max_examples=100)
def test_no_delta_loses_more_than_declared(x: np.ndarray) -> None:
    x[np.abs(x) < 2.0**-80] = 0
    x[0] = 1.0
    assert lost(torch.from_numpy(x), flat(x.size)) <= 1 - SIGN.traits.contraction


def test_one_element_alone_loses_as_much_as_declared() -> None:
    """The bound is sharp: of a block with one element, 1/256 arrives."""
    for value in (1.0, 1.99, 1.003, -0.37):
        x = torch.zeros(256)
        x[200] = value
        assert lost(x, flat(256)) == pytest.approx(255 / 256, abs=1e-6)
        assert lost(x, flat(256)) <= 1 - SIGN.traits.contraction


def test_small_elements_beside_a_large_one_are_not_rounded_away() -> None:
    x = torch.full((256,), 2.0**-12)
    x[0] = 1.0
    mean = float(x.double().abs().mean())
    assert float(SIGN.decode(SIGN.encode(x, flat(256)), flat(256))[0]) == pytest.approx(mean, rel=2.0**-8)


def test_gaussian_loss_is_as_published() -> None:
    fragment = flat(1 << 20)
    assert lost(gaussian(fragment), fragment) == pytest.approx(1 - 2 / np.pi, rel=0.02)


def test_with_error_feedback_everything_arrives_in_time() -> None:
    """1-bit SGD: the residual stays bounded, so the mean of what arrives tends to a constant delta."""
    fragment = cut(44, 20)
    x = gaussian(fragment)
    residual, out = torch.zeros(fragment.numel), torch.empty(SIGN.payload_bytes(fragment), dtype=torch.uint8)
    arrived, windows, size = torch.zeros(fragment.numel), 400, []
    for _ in range(windows):
        SIGN.encode_feedback_(x, residual, out, fragment)
        arrived += SIGN.decode(out, fragment)
        size.append(float(residual.norm() / x.norm()))
    assert SIGN.beta == 1
    assert 5 < max(size[windows // 2 :]) <= 1.05 * max(size[: windows // 2]) < 12
    assert float((arrived / windows - x).norm() / x.norm()) < 0.03
    assert not residual[44:256].any()


def test_without_error_feedback_it_never_arrives() -> None:
    """The law above can fail."""
    assert lost(gaussian(flat(300)), flat(300)) > 0.3
    assert replace(SIGN, beta=0.0).traits == SIGN.traits


def test_tiles_join_as_if_there_were_none() -> None:
    fragment = cut(TILE - 100, 300)
    x = gaussian(fragment)
    payload = SIGN.encode(x, fragment)
    SIGN.validate(payload, fragment)
    decoded = SIGN.decode(payload, fragment)
    assert not decoded[TILE - 100 : TILE].any()
    assert torch.equal(decoded[TILE:], SIGN.decode(SIGN.encode(x[TILE:], cut(300)), cut(300)))
    acc = torch.ones(fragment.numel)
    SIGN.decode_add_(payload, acc, 0.5, fragment)
    assert torch.equal(acc, 1 + decoded * 0.5)


def test_the_largest_numbers_stay_finite_and_the_smallest_become_zero() -> None:
    top = torch.full((300,), TOP)
    decoded = SIGN.decode(SIGN.encode(top, flat(300)), flat(300))
    assert (decoded == float(torch.finfo(torch.bfloat16).max)).all()
    small = torch.full((300,), -(2.0**-101))
    payload = SIGN.encode(small, flat(300))
    assert not payload.any()
    assert not SIGN.decode(payload, flat(300)).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    x = torch.ones(600)
    x[300], x[599] = bad, bad
    with pytest.raises(NonFiniteError, match="element 300 "):
        SIGN.encode(x, flat(600))


def test_what_no_encoder_writes_is_refused() -> None:
    fragment = cut(300, 100)
    good = SIGN.encode(gaussian(fragment), fragment)
    padding_bit, last_bit, gap, negative = good.clone(), good.clone(), good.clone(), good.clone()
    padding_bit[64 + 32 + 31] |= 0x80  # element 511
    last_bit[-1] |= 0x80
    gap[6], negative[1] = 1, 0xBF
    for payload, match in (
        (good[:-1], "are right"),
        (padding_bit, "padding"),
        (last_bit, "padding"),
        (gap, "between"),
        (negative, "range"),
    ):
        with pytest.raises(BadPayload, match=match):
            SIGN.validate(payload, fragment)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(data: st.DataObject) -> None:
    fragment = cut(70, 5) if data.draw(st.booleans()) else flat(data.draw(st.integers(1, 300)))
    payload = SIGN.encode(gaussian(fragment), fragment)
    if data.draw(st.booleans()):
        size = payload.numel()
        payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        SIGN.validate(payload, fragment)
    except BadPayload:
        return
    assert torch.isfinite(SIGN.decode(payload, fragment)).all()
