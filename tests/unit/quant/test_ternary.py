"""Three values per tensor by lot, against a second implementation in plain Python."""

import math

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
from farloop.quant.formats.ternary import TERNARY
from farloop.quant.registry import codec_named

UNCLIPPED = codec_named("ternary:clip=0")
TOP = float(np.finfo(np.float32).max)

any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 700), elements=st.one_of(st.floats(-1, 1, width=32), any_size))
clips = st.sampled_from(["ternary", "ternary:clip=0", "ternary:clip=0.5", "ternary:clip=1000"])
seeds = st.integers(0, 2**32 - 1)


def cut(*lengths: int) -> Fragment:
    """Tensors of these lengths, each on the next multiple of 256."""
    tensors, offset = [], 0
    for index, length in enumerate(lengths):
        tensors.append(TensorSlot(name=f"t{index}", shape=(length,), offset=offset))
        offset += -(-length // 256) * 256
    return Fragment(index=0, slot=0, numel=offset, tensors=tuple(tensors))


def filled(fragment: Fragment, seed: int = 0) -> Tensor:
    """Gaussian numbers of another size in each tensor, zeros between them."""
    x = torch.zeros(fragment.numel)
    generator = torch.Generator().manual_seed(seed)
    for index, tensor in enumerate(fragment.tensors):
        x[tensor.offset :][: tensor.numel] = torch.randn(tensor.numel, generator=generator) * 10.0 ** (index - 3)
    return x


def mix(x: int) -> int:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def fixed_tree(x: np.ndarray) -> float:
    """Σ x² in fp64: halves of tiles of 4096 onto each other, then tile after tile."""
    total = 0.0
    for first in range(0, x.size, 4096):
        tile = np.zeros(4096)
        tile[: x[first : first + 4096].size] = x[first : first + 4096].astype(np.float64) ** 2
        while tile.size > 1:
            tile = tile[: tile.size // 2] + tile[tile.size // 2 :]
        total += float(tile[0])
    return total


def oracle(x: np.ndarray, fragment: Fragment, clip: float, seed: int) -> bytes:
    scales, codes = b"", [0] * (-(-x.size // 64) * 64)
    ends = [*(tensor.offset for tensor in fragment.tensors[1:]), fragment.numel]
    for tensor, end in zip(fragment.tensors, ends, strict=True):
        part = x[tensor.offset : end]
        bound = np.abs(part).max(initial=np.float32(0))
        if clip and part.size:
            with np.errstate(over="ignore"):
                bound = min(bound, np.float32(clip * math.sqrt(fixed_tree(part) / tensor.numel)))
        bits = int(bound.view(np.uint32))
        bits = min(-(-bits // 65536), 0x7F7F)
        bits = bits if bits >= 0x0D80 else 0
        scales += bits.to_bytes(2, "little")
        s = np.uint32(bits << 16).view(np.float32)
        for i in range(tensor.offset, end):
            word = mix(((i >> 1) * 0x9E3779B1 + mix(seed)) % 2**32)
            u = np.float32(((word >> 16 if i % 2 else word & 0xFFFF) + 0.5) / 65536)
            if bits and np.abs(x[i]) / s > u:
                codes[i] = 2 if x[i] < 0 else 1
    packed = bytearray()
    for first in range(0, len(codes), 64):
        group = codes[first : first + 64]
        packed += bytes(group[j] | group[j + 16] << 2 | group[j + 32] << 4 | group[j + 48] << 6 for j in range(16))
    return scales + bytes(-len(scales) % 64) + bytes(packed)


@given(vectors, clips, seeds)
@settings(deadline=None, max_examples=40)
def test_bytes_equal_the_oracle(x: np.ndarray, spelling: str, seed: int) -> None:
    codec = codec_named(spelling)
    payload = codec.encode(torch.from_numpy(x), flat(x.size), seed=seed)
    codec.validate(payload, flat(x.size))
    with np.errstate(all="ignore"):
        assert bytes(payload.tolist()) == oracle(x, flat(x.size), getattr(codec, "clip"), seed)  # noqa: B009


def test_every_tensor_has_a_scale_of_its_own() -> None:
    fragment = cut(300, 1, 4500, 256)
    x = filled(fragment)
    payload = TERNARY.encode(x, fragment, seed=3)
    assert bytes(payload.tolist()) == oracle(x.numpy(), fragment, 2.5, 3)
    decoded = TERNARY.decode(payload, fragment)
    for tensor in fragment.tensors:
        part = decoded[tensor.offset :][: tensor.numel]
        assert len(set(part.abs().tolist())) <= 2
        assert 10 * part.abs().max() > x[tensor.offset :][: tensor.numel].abs().max()
    assert not decoded[300:512].any()


@given(vectors, clips, seeds)
@settings(deadline=None, max_examples=40)
def test_every_element_is_zero_or_the_scale_with_its_own_sign(x: np.ndarray, spelling: str, seed: int) -> None:
    codec, fragment = codec_named(spelling), flat(x.size)
    payload = codec.encode(torch.from_numpy(x), fragment, seed=seed)
    s = payload[:2].clone().view(torch.bfloat16).double()
    decoded = codec.decode(payload, fragment).double()
    assert set(decoded.abs().tolist()) <= {0.0, float(s)}
    assert (decoded * torch.from_numpy(x).double() >= 0).all()


@given(vectors.filter(lambda x: x.size > 0), seeds)
@settings(deadline=None, max_examples=40)
def test_without_clipping_no_element_is_above_the_scale(x: np.ndarray, seed: int) -> None:
    payload = UNCLIPPED.encode(torch.from_numpy(x), flat(x.size), seed=seed)
    s = float(payload[:2].clone().view(torch.bfloat16).double())
    largest = float(np.abs(x).max())
    assert s >= min(largest, 2.0**127 * (2 - 2.0**-7)) or largest < 2.0**-100
    assert s <= largest * (1 + 2.0**-7)


def test_without_clipping_the_mean_over_seeds_is_what_was_sent() -> None:
    fragment = cut(200, 60)
    x, draws = filled(fragment), 4000
    total = torch.zeros(fragment.numel, dtype=torch.float64)
    for seed in range(draws):
        total += UNCLIPPED.decode(UNCLIPPED.encode(x, fragment, seed=seed), fragment)
    s = torch.zeros(fragment.numel, dtype=torch.float64)
    for tensor in fragment.tensors:
        s[tensor.offset :][: tensor.numel] = x[tensor.offset :][: tensor.numel].abs().max()
    size = x.double().abs()
    error = total / draws - x.double()
    # |x|·(s − |x|) is the variance; s is rounded by less than 2⁻⁷, and u to a multiple of 2⁻¹⁶.
    standard_error = (size * (s * (1 + 2.0**-7) - size) / draws).sqrt()
    z = error[size > 0] / standard_error[size > 0]
    assert z.abs().max() < 4.5
    assert abs(float(z.mean())) < 3 / math.sqrt(z.numel())
    assert float(z.square().mean()) == pytest.approx(1, abs=0.3)
    assert not error[size == 0].any()


def test_clipping_is_a_bias_and_the_traits_say_so() -> None:
    x = torch.zeros(256)
    x[:100], x[7] = 0.01, 5.0
    means = [
        sum(float(codec.decode(codec.encode(x, flat(256), seed=seed), flat(256))[7]) for seed in range(200)) / 200
        for codec in (TERNARY, UNCLIPPED)
    ]
    assert means[0] < 1
    assert means[1] == 5.0
    assert (TERNARY.traits.unbiased, UNCLIPPED.traits.unbiased) == (False, True)


def test_more_than_there_is_may_be_lost_and_the_traits_say_so() -> None:
    x = torch.full((256,), 0.1)
    x[0] = 1.0
    lost = 0.0
    for seed in range(50):
        lost += float((UNCLIPPED.decode(UNCLIPPED.encode(x, flat(256), seed=seed), flat(256)) - x).square().sum()) / 50
    assert lost > 5 * float(x.square().sum())
    assert UNCLIPPED.traits.contraction == TERNARY.traits.contraction == 0


def test_a_constant_tensor_is_not_clipped() -> None:
    x = torch.full((256,), -0.5)
    assert torch.equal(TERNARY.decode(TERNARY.encode(x, flat(256)), flat(256)), x)


def test_gaussian_loss_is_as_published() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    error = TERNARY.decode(TERNARY.encode(x, flat(x.numel()), seed=9), flat(x.numel())) - x
    assert float(error.double().square().sum() / x.double().square().sum()) == pytest.approx(1.01, rel=0.02)


def test_tiles_join_as_if_there_were_none() -> None:
    """The bytes of a tile follow from its elements, their places and the scale."""
    fragment = cut(TILE - 100, 300)
    x = filled(fragment)
    payload = TERNARY.encode(x, fragment, seed=1)
    TERNARY.validate(payload, fragment)
    decoded = TERNARY.decode(payload, fragment)
    assert not decoded[TILE - 100 : TILE].any()
    assert len(set(decoded[TILE:].abs().tolist())) == 2
    acc = torch.ones(fragment.numel)
    TERNARY.decode_add_(payload, acc, 0.5, fragment)
    assert torch.equal(acc, 1 + decoded * 0.5)


def test_the_largest_numbers_stay_finite_and_the_smallest_become_zero() -> None:
    top = torch.tensor([TOP, -TOP])
    assert torch.isfinite(UNCLIPPED.decode(UNCLIPPED.encode(top, flat(2)), flat(2))).all()
    small = torch.full((70,), 2.0**-101)
    assert not UNCLIPPED.decode(UNCLIPPED.encode(small, flat(70)), flat(70)).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 299, 400, 512, TILE + 700])
def test_what_is_not_finite_is_named(bad: float, where: int) -> None:
    fragment = cut(300, TILE, 400)
    x = filled(fragment)
    x[where], x[TILE + 800] = bad, bad
    with pytest.raises(NonFiniteError, match=f"element {where} "):
        TERNARY.encode(x, fragment)


def test_what_no_encoder_writes_is_refused() -> None:
    fragment = cut(300, 100)
    good = TERNARY.encode(filled(fragment), fragment)
    wrong_length, wrong_code, gap, scale = good[:-1], good.clone(), good.clone(), good.clone()
    wrong_code[70], gap[4], scale[1] = 0xC0, 1, 0x80
    for payload, match in ((wrong_length, "are right"), (wrong_code, "no code"), (gap, "between"), (scale, "range")):
        with pytest.raises(BadPayload, match=match):
            TERNARY.validate(payload, fragment)
    tail = TERNARY.encode(torch.ones(65), flat(65))
    tail[-1] = 1
    with pytest.raises(BadPayload, match="tail"):
        TERNARY.validate(tail, flat(65))


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(data: st.DataObject) -> None:
    fragment = cut(70, 5) if data.draw(st.booleans()) else flat(data.draw(st.integers(1, 130)))
    payload = TERNARY.encode(filled(fragment), fragment)
    if data.draw(st.booleans()):
        size = payload.numel()
        payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        TERNARY.validate(payload, fragment)
    except BadPayload:
        return
    assert torch.isfinite(TERNARY.decode(payload, fragment)).all()
