"""Products of thin matrices, against numpy in fp64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from codec_cases import gaussian as gaussian_of
from codec_cases import lost, uniform
from codec_cases import of_shapes as cut
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from slow_cases import examples
from torch import Tensor

from farloop.algo.spec import TILE, Fragment
from farloop.quant.errors import BadPayload
from farloop.quant.formats.lowrank import LOWRANK

RANK1 = replace(LOWRANK, rank=(1,))


def gaussian(fragment: Fragment, seed: int = 0) -> Tensor:
    return gaussian_of(fragment, seed) * 1e3


def of_matrix(matrix: np.ndarray | Tensor) -> tuple[Tensor, Fragment]:
    """One matrix and the fragment that it fills."""
    fragment = cut(tuple(matrix.shape))
    x = torch.zeros(fragment.numel)
    x[: matrix.shape[0] * matrix.shape[1]] = torch.as_tensor(matrix, dtype=torch.float32).reshape(-1)
    return x, fragment


def factors(payload: Tensor, tall: int, short: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """P and Q of a payload of one matrix, read as the table has it."""
    numbers = payload.clone().view(torch.bfloat16).double().numpy()
    return numbers[: tall * rank].reshape(tall, rank), numbers[tall * rank :].reshape(short, rank)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        ((100,), 100),
        ((), 1),
        ((0,), 0),
        ((64, 32), 4 * 96),
        ((16, 16), 4 * 32),
        ((15, 16), 240),  # 4·31 numbers would be more than half of 240
        ((1, 100_000), 100_000),
        ((32, 4, 16), 4 * 96),
        ((8, 8, 8, 8), 4096),
    ],
)
def test_a_matrix_is_split_where_that_halves_it(shape: tuple[int, ...], numbers: int) -> None:
    assert LOWRANK.payload_bytes(cut(shape)) == 2 * numbers


@pytest.mark.parametrize("shape", [(48, 24), (24, 48), (24, 6, 8)])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_decoding_equals_the_product_of_the_factors(shape: tuple[int, ...], rank: int) -> None:
    codec, fragment = replace(LOWRANK, rank=(rank,)), cut(shape)
    payload = codec.encode(gaussian(fragment), fragment, seed=1)
    p, q = factors(payload, 48, 24, rank)
    product = p @ q.T if shape[0] == 48 else q @ p.T
    decoded = codec.decode(payload, fragment)
    assert np.allclose(decoded[:1152].numpy(), product.reshape(-1), atol=1e-5)
    assert not decoded[1152:].any()


def test_one_step_equals_the_second_implementation() -> None:
    """The step of the paper with one random column more, of which the least is dropped."""
    matrix = gaussian(cut((64, 32)), 3)[:2048].view(64, 32)
    x, fragment = of_matrix(matrix)
    first = LOWRANK.encode(x, fragment, seed=5)
    p1, q1 = factors(first, 64, 32, 4)
    m = matrix.double().numpy()
    second = LOWRANK.encode(x, fragment, seed=6, previous=first)
    p2, q2 = factors(second, 64, 32, 4)
    noise = [uniform(6, i) - 0.5 for i in range(0, 160, 5)]
    basis = np.linalg.qr(m @ np.column_stack((q1 / np.abs(q1).max(axis=0), noise)))[0]
    energy = ((m.T @ basis) ** 2).sum(axis=0)
    kept = basis[:, energy.argsort()[1:]]
    assert np.allclose(np.abs(kept.T @ p2).max(axis=0), 1, atol=1e-2)
    assert np.allclose(p2 @ q2.T, kept @ kept.T @ m, atol=3e-2)
    assert np.allclose(q2, m.T @ p2, rtol=2.0**-8, atol=1e-4)
    assert np.allclose(p1.T @ p1, np.eye(4), atol=1e-2)


@pytest.mark.parametrize("shape", [(80, 40), (40, 80)])
def test_a_matrix_of_low_rank_arrives_at_once(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(side, 3, generator=generator) for side in shape)
    assert lost(LOWRANK, *of_matrix(left @ right.T)) < 2.0**-14
    assert lost(RANK1, *of_matrix(left[:, :1] @ right[:, :1].T)) < 2.0**-14


def test_the_warm_start_finds_the_best_subspace() -> None:
    generator = torch.Generator().manual_seed(2)
    u, v = (torch.linalg.qr(torch.randn(side, 40, generator=generator)).Q for side in (80, 40))
    spectrum = 0.8 ** torch.arange(40.0)
    x, fragment = of_matrix(u * spectrum @ v.T)
    best = float(spectrum[4:].square().sum() / spectrum.square().sum())
    cold = lost(LOWRANK, x, fragment, seed=1)
    previous = None
    for seed in range(20):
        previous = LOWRANK.encode(x, fragment, seed=seed, previous=previous)
    warm = lost(LOWRANK, x, fragment, seed=99, previous=previous)
    assert cold > 1.2 * best
    assert best * 0.999 < warm < best * 1.01


matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(4, 12), st.integers(4, 12)),
    elements=st.floats(-1, 1, width=32),
    fill=st.just(np.float32(0)),
)


@given(matrices, st.integers(0, 100), st.booleans())
@settings(max_examples=examples(25))
def test_never_more_is_lost_than_there_is(matrix: np.ndarray, seed: int, warm: bool) -> None:
    matrix = np.where(np.abs(matrix) < 2.0**-60, 0, matrix)
    matrix[0, 0] = 1.0
    x, fragment = of_matrix(matrix)
    previous = RANK1.encode(gaussian(fragment, seed), fragment, seed=seed) if warm else None
    assert lost(RANK1, x, fragment, seed=seed, previous=previous) <= 1


@pytest.mark.parametrize("rank", [1, 4])
def test_of_what_no_warm_start_can_see_the_promised_share_arrives_on_average(rank: int) -> None:
    """All directions equal, and the last payload blind to all of them: only the random column finds anything."""
    codec, side = replace(LOWRANK, rank=(rank,)), 32
    x, fragment = of_matrix(torch.eye(side))
    blind = torch.zeros(codec.payload_bytes(fragment), dtype=torch.uint8)
    losses = [lost(codec, x, fragment, seed=seed, previous=blind) for seed in range(60)]
    assert sum(losses) / 60 <= 1 - rank / (rank + 1) / side
    assert sum(losses) / 60 <= 1 - codec.traits.contraction


def test_what_is_no_matrix_travels_as_bf16_and_padding_is_zero() -> None:
    fragment = cut((40, 30), (100,), (3, 3), (30, 40))
    x = gaussian(fragment)
    payload = LOWRANK.encode(x, fragment)
    LOWRANK.validate(payload, fragment)
    decoded = LOWRANK.decode(payload, fragment)
    second, third, last = fragment.tensors[1:]
    for tensor in (second, third):
        part = slice(tensor.offset, tensor.offset + tensor.numel)
        assert torch.equal(decoded[part], x[part].bfloat16().float())
    places = torch.arange(fragment.numel)
    for tensor in fragment.tensors:
        places[tensor.offset : tensor.offset + tensor.numel] = -1
    assert not decoded[places[places >= 0]].any()
    p, q = factors(payload[2 * (4 * 70 + 100 + 9) :], 40, 30, 4)
    assert np.allclose(decoded[last.offset :][:1200].numpy(), (q @ p.T).reshape(-1), atol=1e-5)


def test_pieces_of_a_matrix_join_into_it() -> None:
    """A tile ends in the middle of a row."""
    fragment = cut((2000, 1000), (700,), (1000, 300))
    x = gaussian(fragment)
    payload = LOWRANK.encode(x, fragment)
    LOWRANK.validate(payload, fragment)
    decoded = LOWRANK.decode(payload, fragment)
    assert TILE % 1000
    p, q = factors(payload[: 2 * 4 * 3000], 2000, 1000, 4)
    assert np.allclose(decoded[: 2000 * 1000].view(2000, 1000).numpy(), p @ q.T, atol=1e-5)
    p, q = factors(payload[2 * (4 * 3000 + 700) :], 1000, 300, 4)
    last = fragment.tensors[2].offset
    assert np.allclose(decoded[last : last + 300_000].view(1000, 300).numpy(), p @ q.T, atol=1e-5)
    assert torch.equal(torch.cat([tile.clone() for tile in LOWRANK.decoded_tiles(payload, fragment)]), decoded)


@pytest.mark.parametrize("size", [1e30, 1.0, 1e-30])
def test_the_loss_does_not_depend_on_the_size(size: float) -> None:
    x, fragment = of_matrix(gaussian(cut((64, 32)))[:2048].view(64, 32))
    assert lost(LOWRANK, x * size, fragment) == pytest.approx(lost(LOWRANK, x, fragment), rel=1e-2)


def test_another_payload_is_no_start() -> None:
    fragment = cut((64, 32))
    with pytest.raises(ValueError, match="previous has"):
        LOWRANK.encode(gaussian(fragment), fragment, previous=RANK1.encode(gaussian(fragment), fragment))


def test_what_no_encoder_writes_is_refused() -> None:
    fragment = cut((64, 32), (100,))
    good = LOWRANK.encode(gaussian(fragment), fragment)
    q_place, dense_place = 2 * 4 * 64, 2 * 4 * 96
    for place, bits in ((0, 0x3F81), (q_place - 2, 0xBF81), (q_place, 0x7E80), (dense_place, 0x7F80), (-2, 0xFFFF)):
        bad = good.clone()
        bad[place:][:2] = torch.tensor([bits & 0xFF, bits >> 8])
        with pytest.raises(BadPayload, match="a number above"):
            LOWRANK.validate(bad, fragment)
    with pytest.raises(BadPayload, match="are right"):
        LOWRANK.validate(good[:-1], fragment)


@pytest.mark.parametrize("rank", [1, 3, 4, 5])
def test_the_largest_factors_have_a_finite_product(rank: int) -> None:
    codec, fragment = replace(LOWRANK, rank=(rank,)), cut((64, 32))
    payload = torch.zeros(codec.payload_bytes(fragment), dtype=torch.uint8)
    numbers = payload.view(torch.int16)
    numbers[: 64 * rank] = 0x3F80
    numbers[64 * rank :] = 0x7F7F - (math.ceil(math.log2(rank)) << 7)
    codec.validate(payload, fragment)
    assert torch.isfinite(codec.decode(payload, fragment)).all()
