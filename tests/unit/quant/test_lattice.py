"""A grid moved at random, against a second implementation by exact fractions."""

import math
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
from farloop.quant.formats.lattice import LATTICE, shift_of

TOP = float(np.finfo(np.float32).max)
REACH = 7 * 1.875 * 2.0**124

any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
one_size = st.floats(-1, 1, width=32)
few_values = st.sampled_from([*(k / 2 for k in range(-14, 15)), -0.0])
vectors = st.one_of(
    *(
        hnp.arrays(np.float32, st.integers(0, 520), elements=elements, fill=elements)
        for elements in (one_size, any_size, few_values)
    )
)
seeds = st.integers(0, 2**32 - 1)


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


def mix(x: int) -> int:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def j_of(seed: int) -> int:
    return mix(seed) >> 22


def seeds_of_every_shift() -> list[int]:
    """One seed for each of the 1024 shifts."""
    found: dict[int, int] = {}
    seed = 0
    while len(found) < 1024:
        found.setdefault(j_of(seed), seed)
        seed += 1
    return [found[j] for j in range(1024)]


def scales_of(payload: Tensor, numel: int) -> Tensor:
    num_blocks = -(-numel // 256)
    return payload[: 2 * num_blocks].clone().view(torch.bfloat16).double().repeat_interleave(256)[:numel]


def oracle(x: np.ndarray, seed: int) -> tuple[bytes, list[Fraction]]:
    """The payload, and what it decodes to."""
    scales, codes, values = b"", b"", []
    r = Fraction(512 - j_of(seed), 1024)
    for first in range(0, x.size, 256):
        block = [*x[first : first + 256], *[np.float32(0)] * 256][:256]
        absmax = np.float32(max(abs(v) for v in block))
        bits = min(-(-int((absmax / np.float32(7)).view(np.uint32)) // 65536), 0x7DF0)
        bits = bits if bits >= 0x0D80 else 0
        s = np.uint32(bits << 16).view(np.float32)
        k = [min(7, max(-8, int(np.rint(v / s - np.float32(float(r)))))) if bits else 0 for v in block]
        values += [(v + r) * Fraction(float(s)) for v in k[: x.size - first]]
        scales += bits.to_bytes(2, "little")
        codes += bytes(k[j] + 8 | (k[j + 128] + 8) << 4 for j in range(128))
    return scales + bytes(-len(scales) % 64) + codes, values


@given(vectors, seeds)
@settings(deadline=None, max_examples=80)
def test_bytes_and_values_equal_the_oracle(x: np.ndarray, seed: int) -> None:
    """Decoding is exact: the values are fractions."""
    payload = LATTICE.encode(torch.from_numpy(x), flat(x.size), seed=seed)
    LATTICE.validate(payload, flat(x.size))
    expected, values = oracle(x, seed)
    assert bytes(payload.tolist()) == expected
    assert [Fraction(v) for v in LATTICE.decode(payload, flat(x.size), seed=seed).tolist()] == values


@given(vectors, seeds)
@settings(deadline=None, max_examples=80)
def test_the_nearest_point_of_the_moved_grid_is_taken_and_nothing_clips(x: np.ndarray, seed: int) -> None:
    tensor = torch.from_numpy(x)
    tensor = tensor.clamp(-REACH, REACH)
    payload = LATTICE.encode(tensor, flat(x.size), seed=seed)
    scales = scales_of(payload, x.size)
    error = (LATTICE.decode(payload, flat(x.size), seed=seed).double() - tensor.double()).abs()
    # Half a step, and what rounds in fl(x ÷ s) and in taking r away from it.
    assert (error[scales > 0] <= (scales * (0.5 + 2.0**-20))[scales > 0]).all()


@given(st.floats(2.0**-90, REACH, width=32))
@settings(deadline=None, max_examples=300)
def test_seven_scales_reach_the_largest_element(largest: float) -> None:
    """And no further than the rounding of a bf16."""
    near_ties = [float(np.float32(7 * m / 64) * np.float32(1 + e * 2.0**-23)) for m in (65, 127) for e in (0, 1)]
    for a in (largest, *near_ties):
        payload = LATTICE.encode(torch.tensor([a]), flat(1))
        s = float(scales_of(payload, 1)[0])
        assert a <= 7 * s <= a * (1 + 2.0**-6)


@pytest.mark.parametrize("seed", [0, 1, 77, 2**32 - 1])
def test_the_shift_is_a_multiple_of_1_over_1024_of_half_a_step_at_most(seed: int) -> None:
    assert shift_of(seed) == (512 - j_of(seed)) / 1024
    assert -0.5 < shift_of(seed) <= 0.5


def test_all_shifts_occur_equally_often() -> None:
    counts = np.bincount([j_of(seed) for seed in range(1 << 16)], minlength=1024)
    assert float(((counts - 64) ** 2 / 64).sum()) == pytest.approx(1023, abs=5 * math.sqrt(2 * 1023))


def test_over_all_shifts_the_mean_is_what_was_sent() -> None:
    """Exactly the promise: within a 2048th of a step, whatever the element."""
    x = torch.cat((gaussian(flat(250)), torch.tensor([0.0, 1e-6, 3.0, -3.0, 0.5, -0.25])))
    s = float(scales_of(LATTICE.encode(x, flat(256)), 1)[0])
    total, squares = torch.zeros(256, dtype=torch.float64), 0.0
    for seed in seeds_of_every_shift():
        error = LATTICE.decode(LATTICE.encode(x, flat(256), seed=seed), flat(256), seed=seed).double() - x.double()
        total += error
        squares += float(error.square().sum())
    assert (total / 1024).abs().max() <= s / 2048 * (1 + 1e-3)
    assert squares / 1024 == pytest.approx(256 * s * s / 12, rel=1e-3)


def test_over_random_seeds_the_mean_is_within_three_standard_errors() -> None:
    """Of one element; the others move with it."""
    x, draws = gaussian(flat(256)), 3000
    generator = np.random.default_rng(5)
    total = torch.zeros(256, dtype=torch.float64)
    for seed in generator.integers(0, 2**32, draws).tolist():
        total += LATTICE.decode(LATTICE.encode(x, flat(256), seed=seed), flat(256), seed=seed).double() - x.double()
    s = float(scales_of(LATTICE.encode(x, flat(256)), 1)[0])
    z = total / draws / (s / math.sqrt(12 * draws))
    assert abs(float(z[0])) < 3
    assert float((z.abs() < 3).double().mean()) > 0.97


@given(hnp.arrays(np.float32, st.integers(1, 300), elements=one_size, fill=st.just(np.float32(0))))
@settings(deadline=None, max_examples=25)
def test_no_delta_loses_more_than_declared_on_average(x: np.ndarray) -> None:
    x[np.abs(x) < 2.0**-80] = 0
    x[0] = 1.0
    tensor, fragment = torch.from_numpy(x), flat(x.size)
    lost = 0.0
    for seed in seeds_of_every_shift()[::16]:
        error = LATTICE.decode(LATTICE.encode(tensor, fragment, seed=seed), fragment, seed=seed) - tensor
        lost += float(error.double().square().sum()) / 64
    assert lost <= (1 - LATTICE.traits.contraction) * float(tensor.double().square().sum())


def test_one_element_alone_loses_nearly_what_is_declared() -> None:
    x = torch.zeros(256)
    x[9] = 7 * (1 + 2.0**-9)  # the scale is rounded up by nearly a bf16 step
    losses = []
    for seed in seeds_of_every_shift()[::4]:
        error = LATTICE.decode(LATTICE.encode(x, flat(256), seed=seed), flat(256), seed=seed) - x
        losses.append(float(error.square().sum() / x.square().sum()))
    assert 0.44 < sum(losses) / len(losses) < 1 - LATTICE.traits.contraction
    assert max(losses) > 1  # of one seed alone there is no such promise


def test_gaussian_loss_is_as_published() -> None:
    fragment = flat(1 << 20)
    x = gaussian(fragment)
    losses = []
    for seed in seeds_of_every_shift()[128::256]:
        error = LATTICE.decode(LATTICE.encode(x, fragment, seed=seed), fragment, seed=seed) - x
        losses.append(float(error.double().square().sum() / x.double().square().sum()))
    assert sum(losses) / 4 == pytest.approx(1.6e-2, rel=0.02)


def test_padding_decodes_to_zero_although_zeros_do_not() -> None:
    fragment = cut(300, 1, 256)
    x = gaussian(fragment)
    x[:10] = 0.0
    decoded = LATTICE.decode(LATTICE.encode(x, fragment, seed=4), fragment, seed=4)
    assert decoded[:10].all()
    assert not decoded[300:512].any()
    assert not decoded[513:768].any()
    assert torch.equal(decoded[:300], LATTICE.decode(LATTICE.encode(x[:300], flat(300), seed=4), flat(300), seed=4))


def test_the_seed_of_the_sender_is_needed() -> None:
    payload = LATTICE.encode(gaussian(flat(300)), flat(300), seed=1)
    assert not torch.equal(LATTICE.decode(payload, flat(300), seed=1), LATTICE.decode(payload, flat(300), seed=2))


def test_tiles_join_as_if_there_were_none() -> None:
    fragment = cut(TILE - 100, 300)
    x = gaussian(fragment)
    payload = LATTICE.encode(x, fragment, seed=3)
    LATTICE.validate(payload, fragment)
    decoded = LATTICE.decode(payload, fragment, seed=3)
    assert not decoded[TILE - 100 : TILE].any()
    assert torch.equal(decoded[TILE:], LATTICE.decode(LATTICE.encode(x[TILE:], cut(300), seed=3), cut(300), seed=3))
    acc = torch.ones(fragment.numel)
    LATTICE.decode_add_(payload, acc, 0.5, fragment, seed=3)
    assert torch.equal(acc, 1 + decoded * 0.5)


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_the_largest_numbers_stay_finite_and_the_smallest_become_zero(seed: int) -> None:
    top = torch.tensor([TOP, -TOP] * 150)
    assert torch.isfinite(LATTICE.decode(LATTICE.encode(top, flat(300), seed=seed), flat(300), seed=seed)).all()
    small = torch.full((300,), -(2.0**-101))
    payload = LATTICE.encode(small, flat(300), seed=seed)
    LATTICE.validate(payload, flat(300))
    assert not LATTICE.decode(payload, flat(300), seed=seed).any()


def test_every_code_of_the_largest_scale_is_finite_under_every_shift() -> None:
    payload = LATTICE.encode(torch.ones(256), flat(256))
    payload[:2] = torch.tensor([0xF0, 0x7D])
    for code in (0x00, 0xFF):
        payload[64:] = code
        LATTICE.validate(payload, flat(256))
        for seed in seeds_of_every_shift()[::1023]:
            assert torch.isfinite(LATTICE.decode(payload, flat(256), seed=seed)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    x = torch.ones(600)
    x[300], x[599] = bad, bad
    with pytest.raises(NonFiniteError, match="element 300 "):
        LATTICE.encode(x, flat(600))


def test_what_no_encoder_writes_is_refused() -> None:
    fragment = cut(300, 100)
    good = LATTICE.encode(gaussian(fragment), fragment)
    padding, gap, negative, large = good.clone(), good.clone(), good.clone(), good.clone()
    padding[-1] = 0x78
    gap[6], negative[1] = 1, 0xBF
    large[:2] = torch.tensor([0xF1, 0x7D])
    for payload, match in (
        (good[:-1], "are right"),
        (padding, "padding"),
        (gap, "between"),
        (negative, "range"),
        (large, "range"),
    ):
        with pytest.raises(BadPayload, match=match):
            LATTICE.validate(payload, fragment)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(data: st.DataObject) -> None:
    fragment = cut(70, 5) if data.draw(st.booleans()) else flat(data.draw(st.integers(1, 300)))
    payload = LATTICE.encode(gaussian(fragment), fragment)
    if data.draw(st.booleans()):
        size = payload.numel()
        payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        LATTICE.validate(payload, fragment)
    except BadPayload:
        return
    assert torch.isfinite(LATTICE.decode(payload, fragment, seed=data.draw(seeds))).all()
