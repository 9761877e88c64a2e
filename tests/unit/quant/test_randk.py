"""Elements drawn by lot, against a second implementation in plain Python, and the laws of chance."""

import dataclasses
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.codec import Codec, flat
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats.randk import RANDK

TOP = float(np.finfo(np.float32).max)
any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
FRACTIONS = [1 / 256, 1 / 16, 0.1, 0.5, 1.0]


def fragment_of(*shapes: tuple[int, ...]) -> Fragment:
    tensors, offset = [], 0
    for index, shape in enumerate(shapes):
        tensors.append(TensorSlot(name=str(index), shape=shape, offset=offset))
        offset += -(-tensors[-1].numel // 256) * 256
    return Fragment(index=0, slot=0, numel=offset, tensors=tuple(tensors))


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ x >> 15


def word(seed: int, counter: int) -> int:
    return mix((counter * 0x9E3779B1 + mix(seed)) % 2**32)


def drawn(fragment: Fragment, fraction: float, seed: int) -> list[tuple[list[int], int]]:
    """The elements of each block that are sent, and how many there are in the block."""
    blocks = []
    for tensor in fragment.tensors:
        for first in range(0, tensor.numel, 256):
            block = range(tensor.offset + first, tensor.offset + min(first + 256, tensor.numel))
            by_lot = sorted(block, key=lambda i: (word(seed, i), i))
            blocks.append((sorted(by_lot[: math.ceil(len(block) * fraction)]), len(block)))
    return blocks


def oracle(x: np.ndarray, fragment: Fragment, fraction: float, seed: int) -> bytes:
    payload = b""
    for elements, n in drawn(fragment, fraction, seed):
        for i in elements:
            y = x[i] * np.float32(n / len(elements))
            bits = struct.unpack("<I", struct.pack("<f", y))[0]
            up = (bits & 0x7FFFFFFF) + word(seed ^ 0x5851F42D, len(payload) // 2) % 65536
            payload += struct.pack("<H", min(up >> 16, 0x7F7F) | bits >> 16 & 0x8000)
    return payload


@given(data=st.data(), fraction=st.sampled_from(FRACTIONS), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_bytes_and_numbers_equal_the_oracle(data: st.DataObject, fraction: float, seed: int) -> None:
    shapes = st.sampled_from([(), (1,), (255,), (256,), (257,), (30, 20), (2, 3, 4)])
    fragment = fragment_of(*data.draw(st.lists(shapes, min_size=0, max_size=3)))
    x = data.draw(hnp.arrays(np.float32, fragment.numel, elements=any_size, fill=any_size))
    codec = dataclasses.replace(RANDK, fraction=fraction)
    payload = codec.encode(torch.from_numpy(x), fragment, seed=seed)
    with np.errstate(over="ignore"):
        expected = oracle(x, fragment, fraction, seed)
    assert bytes(payload.tolist()) == expected
    codec.validate(payload, fragment)
    decoded = torch.zeros(fragment.numel)
    places = [i for elements, _ in drawn(fragment, fraction, seed) for i in elements]
    decoded[places] = payload.clone().view(torch.bfloat16).float()
    got = codec.decode(payload, fragment, seed=seed)
    assert torch.equal(got.view(torch.int32), decoded.view(torch.int32))


def test_pieces_do_not_show() -> None:
    """Blocks are drawn 2¹⁸ elements at a time; those of the second piece stand alone as they stand there."""
    numel = (1 << 18) + 700
    x = gaussian(numel)
    payload = RANDK.encode(x, flat(numel), seed=9)
    decoded = RANDK.decode(payload, flat(numel), seed=9)
    sent = decoded.nonzero().view(-1)
    assert sent.numel() == payload.numel() // 2 == (numel // 256) * 16 + math.ceil(188 / 16)
    torch.testing.assert_close(decoded[sent][:-12], 16 * x[sent][:-12], rtol=2**-7, atol=0)
    torch.testing.assert_close(decoded[sent][-12:], 188 / 12 * x[sent][-12:], rtol=2**-7, atol=0)


def test_the_mean_over_seeds_is_what_was_encoded() -> None:
    """Within 3 standard errors as a whole, within 5 everywhere; the blocks are whole, short and very short."""
    fragment, seeds = fragment_of((512,), (100,), (3,)), 1500
    x = gaussian(fragment.numel) + 1e-3
    x[612:768] = 0
    x[771:] = 0
    mean, squares = torch.zeros(x.numel(), dtype=torch.float64), torch.zeros(x.numel(), dtype=torch.float64)
    for seed in range(seeds):
        decoded = RANDK.decode(RANDK.encode(x, fragment, seed=seed), fragment, seed=seed).double()
        mean += decoded / seeds
        squares += decoded.square() / seeds
    spread = ((squares - mean.square()) / seeds).sqrt()
    real = x != 0
    z = (mean - x.double())[real] / spread[real]
    assert float(z.abs().max()) < 5
    assert float(z.square().mean()) == pytest.approx(1, abs=0.3)
    total = (mean - x.double()).dot(x.double()) / spread.mul(x.double()).norm()
    assert abs(float(total)) < 3
    assert not mean[~real].any()


def test_every_element_is_drawn_equally_often() -> None:
    counts = torch.zeros(256)
    for seed in range(4000):
        counts[RANDK.decode(RANDK.encode(torch.ones(256), flat(256), seed=seed), flat(256), seed=seed) != 0] += 1
    chi_square = float((counts - 250).square().sum() / (250 * 15 / 16))
    assert 256 - 4 * math.sqrt(512) < chi_square < 256 + 4 * math.sqrt(512)


def test_rounding_is_unbiased_by_itself() -> None:
    codec, x, seeds = dataclasses.replace(RANDK, fraction=1.0), gaussian(256) * 1000, 2000
    step = torch.exp2(x.abs().log2().floor() - 7).double()
    mean = torch.zeros(256, dtype=torch.float64)
    for seed in range(seeds):
        decoded = codec.decode(codec.encode(x, flat(256), seed=seed), flat(256), seed=seed)
        assert ((decoded - x).abs() < step).all()
        mean += decoded.double() / seeds
    assert float(((mean - x.double()) / step).abs().max()) < 5 * 0.5 / math.sqrt(seeds)


@pytest.mark.parametrize("fraction", FRACTIONS[:4])
def test_the_loss_is_d_over_k_minus_1(fraction: float) -> None:
    """MASHA's variance factor of Rand-k."""
    codec, x = dataclasses.replace(RANDK, fraction=fraction), gaussian(1 << 18)
    decoded = codec.decode(codec.encode(x, flat(1 << 18), seed=1), flat(1 << 18), seed=1)
    loss = float((x - decoded).square().sum() / x.square().sum())
    assert loss == pytest.approx(256 / math.ceil(256 * fraction) - 1, rel=0.15 if fraction < 0.01 else 0.03)


def test_the_seed_decides_the_places() -> None:
    x = gaussian(4096)
    payload = RANDK.encode(x, flat(4096), seed=1)
    places = [RANDK.decode(payload, flat(4096), seed=seed) != 0 for seed in (1, 1, 2)]
    assert torch.equal(places[0], places[1])
    assert int((places[0] & places[2]).sum()) < 40  # 256 drawn, 16 by chance in both


def test_numbers_beyond_bf16_become_its_largest() -> None:
    decoded = RANDK.decode(RANDK.encode(torch.full((256,), -TOP), flat(256), seed=3), flat(256), seed=3)
    assert float(decoded.min()) == -float(torch.finfo(torch.bfloat16).max)
    assert int(decoded.count_nonzero()) == 16


@pytest.mark.parametrize("weight", [0.3, -0.3, 0.0, -0.0])
def test_the_scatter_equals_the_arithmetic_of_every_codec(weight: float) -> None:
    """To the sign of zero."""
    fragment = fragment_of((300,), (100,))
    acc = gaussian(fragment.numel, 1)
    acc[::3] = -0.0
    expected, payload = acc.clone(), RANDK.encode(gaussian(fragment.numel), fragment, seed=5)
    Codec.decode_add_(RANDK, payload, expected, weight, fragment, seed=5)
    RANDK.decode_add_(payload, acc, weight, fragment, seed=5)
    assert torch.equal(acc.view(torch.int32), expected.view(torch.int32))


def test_a_bad_element_is_named_even_if_it_is_not_drawn() -> None:
    x = gaussian(256)
    x[20:] = torch.inf
    for seed in range(20):
        with pytest.raises(NonFiniteError, match="element 20 "):
            RANDK.encode(x, flat(256), seed=seed)


@given(payload=st.binary(min_size=32, max_size=32))
@settings(deadline=None, max_examples=60)
def test_hostile_bytes_are_refused_exactly_if_a_number_is_not_finite(payload: bytes) -> None:
    data = torch.tensor(list(payload), dtype=torch.uint8)
    if torch.isfinite(data.clone().view(torch.bfloat16)).all():
        RANDK.validate(data, flat(256))
        assert torch.isfinite(RANDK.decode(data, flat(256))).all()
    else:
        with pytest.raises(BadPayload, match="not finite"):
            RANDK.validate(data, flat(256))
    with pytest.raises(BadPayload, match="are right"):
        RANDK.validate(data[:-2], flat(256))
