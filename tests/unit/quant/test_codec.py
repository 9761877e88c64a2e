"""Laws that every codec obeys, whatever its structure: of the interface, of error feedback, and of its traits."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_cases import LARGE, MATRICES, MIXED, every_codec, every_spelling, gaussian, of_shapes, on, padded, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from torch import Tensor

from farloop.algo.spec import TILE, Fragment
from farloop.quant.codec import Codec, flat
from farloop.quant.digest import digest
from farloop.quant.errors import BadPayload, NonFiniteError

pytestmark = pytest.mark.usefixtures("one_thread")

VECTORS = [flat(numel) for numel in (0, 1, 63, 64, 65, 255, 256, 257, 4096, 5000)]
FRAGMENTS = [*VECTORS, MIXED, MATRICES]
MALFORMED = r"must be|are right"

Inputs = Callable[[Fragment], Tensor]


def at_odd_address(data: Tensor) -> Tensor:
    """The same bytes, one byte after an aligned address."""
    moved = torch.empty(data.numel() + 1, dtype=torch.uint8)[1:]
    assert moved.data_ptr() % 2 == 1
    return moved.copy_(data)


def payloads_of(codec: Codec, x: Tensor, fragment: Fragment, *, seed: int = 0) -> list[Tensor]:
    """Of a first delta, and, where the codec starts from its last payload, of one after it."""
    first = codec.encode(x, fragment, seed=seed)
    if not codec.traits.warm_start:
        return [first]
    return [first, codec.encode(x, fragment, seed=seed, previous=first)]


# --- sizes


@every_spelling
def test_bytes_on_the_wire_follow_the_declared_bits(codec: Codec) -> None:
    """B25: measured against expected within 1 %."""
    fragment = flat(1 << 20)
    measured = codec.encode(gaussian(fragment), fragment).numel()
    assert measured == codec.payload_bytes(fragment)
    assert measured == pytest.approx(codec.traits.bits_per_element * fragment.numel / 8, rel=0.01)


# --- both ways


@every_spelling
@on(*FRAGMENTS)
def test_what_is_encoded_is_valid_and_decodes_to_finite_numbers(codec: Codec, fragment: Fragment) -> None:
    for size in (1.0, 1e-20, 1e-38, 1e30, 3e38):
        x = padded(fragment, (gaussian(fragment) * 1e3).clamp(-1, 1) * size)
        for payload in payloads_of(codec, x, fragment, seed=5):
            codec.validate(payload, fragment)
            assert torch.isfinite(codec.decode(payload, fragment, seed=5)).all()


@every_codec
@on(*FRAGMENTS, LARGE)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_come_back_as_zeros(codec: Codec, fragment: Fragment, zero: float) -> None:
    for payload in payloads_of(codec, torch.full((fragment.numel,), zero), fragment, seed=7):
        codec.validate(payload, fragment)
        assert not codec.decode(payload, fragment, seed=7).any()


@every_spelling
@on(MIXED, MATRICES, LARGE)
def test_padding_between_tensors_decodes_to_zero(codec: Codec, fragment: Fragment) -> None:
    """Protocol N."""
    for payload in payloads_of(codec, gaussian(fragment), fragment, seed=7):
        decoded = codec.decode(payload, fragment, seed=7)
        assert torch.equal(padded(fragment, decoded.clone()), decoded)


@every_codec
@on(*FRAGMENTS)
def test_every_byte_of_both_buffers_is_written(codec: Codec, fragment: Fragment) -> None:
    x = gaussian(fragment)
    payload = codec.encode(x, fragment, seed=1)
    for poison in (0xA5, 0xFF):
        poisoned = torch.full_like(payload, poison)
        codec.encode_into(x, poisoned, fragment, seed=1)
        assert torch.equal(poisoned, payload)
    out = torch.full((fragment.numel,), torch.nan)
    codec.decode_into(payload, out, fragment, seed=1)
    assert same_bits(out, codec.decode(payload, fragment, seed=1))
    assert torch.isfinite(out).all()


@every_codec
@on(flat(1), flat(65), MIXED, MATRICES)
def test_payloads_may_lie_at_odd_addresses(codec: Codec, fragment: Fragment) -> None:
    x = gaussian(fragment)
    payload = codec.encode(x, fragment, seed=3)
    odd = at_odd_address(payload)
    codec.validate(odd, fragment)
    assert same_bits(codec.decode(odd, fragment, seed=3), codec.decode(payload, fragment, seed=3))
    one, other = torch.ones(fragment.numel), torch.ones(fragment.numel)
    codec.decode_add_(odd, one, 0.3, fragment, seed=3)
    codec.decode_add_(payload, other, 0.3, fragment, seed=3)
    assert same_bits(one, other)
    codec.encode_into(x, odd.fill_(0xA5), fragment, seed=3, previous=payload)
    assert torch.equal(odd, codec.encode(x, fragment, seed=3, previous=payload))


@every_codec
@on(flat(300), MIXED, MATRICES, LARGE)
def test_what_was_given_is_not_changed(codec: Codec, fragment: Fragment) -> None:
    x = gaussian(fragment)
    first = codec.encode(x, fragment, seed=1)
    kept = first.clone()
    codec.encode(x, fragment, seed=2, previous=first)
    codec.validate(first, fragment)
    codec.decode(first, fragment, seed=1)
    codec.decode_add_(first, torch.zeros(fragment.numel), 0.5, fragment, seed=1)
    assert same_bits(x, gaussian(fragment))
    assert torch.equal(first, kept)


@every_codec
def test_the_decoded_tiles_are_what_is_decoded(codec: Codec) -> None:
    fragment = flat(TILE + 65)
    payload = codec.encode(gaussian(fragment), fragment, seed=4)
    tiles = [tile.clone() for tile in codec.decoded_tiles(payload, fragment, seed=4)]
    assert [tile.numel() for tile in tiles] == [TILE, 65]
    assert same_bits(torch.cat(tiles), codec.decode(payload, fragment, seed=4))


# --- what is refused


@every_codec
@given(
    fragment=st.sampled_from([fragment for fragment in FRAGMENTS if fragment.numel]),
    bad=st.sampled_from([0x7FC00000, -1, 0x7F800001, -0x7FFFFF, 0x7F800000, -0x800000]),
    places=st.sets(st.integers(0, 10**6), min_size=1, max_size=3),
)
@settings(max_examples=examples(10))
def test_what_is_not_finite_is_refused_by_index(codec: Codec, fragment: Fragment, bad: int, places: set[int]) -> None:
    real = [slot.offset + i for slot in fragment.tensors for i in range(slot.numel)]
    indices = [real[place % len(real)] for place in places]
    x = gaussian(fragment)
    x.view(torch.int32)[indices] = bad
    assert not torch.isfinite(x).all()
    with pytest.raises(NonFiniteError) as refusal:
        codec.encode(x, fragment)
    assert refusal.value.index == min(indices)


@every_codec
def test_a_nan_is_found_in_a_later_tile(codec: Codec) -> None:
    fragment = flat(TILE + 130)
    x = gaussian(fragment)
    x[TILE + 129] = torch.nan
    with pytest.raises(NonFiniteError, match=f"element {TILE + 129}"):
        codec.encode(x, fragment)


@every_codec
@on(flat(256), MATRICES)
def test_tensors_of_another_form_are_refused(codec: Codec, fragment: Fragment) -> None:
    numel = fragment.numel
    x, out = gaussian(fragment), torch.empty(numel)
    payload = codec.encode(x, fragment)
    for wrong in (
        torch.zeros(2 * numel)[::2],
        torch.zeros(numel // 16, 16),
        torch.zeros(numel, dtype=torch.float64),
        torch.zeros(numel - 1),
        torch.zeros(numel + 1),
    ):
        with pytest.raises(ValueError, match=MALFORMED):
            codec.encode(wrong, fragment)
        with pytest.raises(ValueError, match=MALFORMED):
            codec.decode_into(payload, wrong, fragment)
        with pytest.raises(ValueError, match=MALFORMED):
            codec.decode_add_(payload, wrong, 1.0, fragment)
        with pytest.raises(ValueError, match=MALFORMED):
            codec.encode_feedback_(x, wrong, payload.clone(), fragment)
    for bad in (payload[:-1], torch.cat((payload, payload[:1])), payload.to(torch.int16)):
        with pytest.raises(ValueError, match=MALFORMED):
            codec.encode_into(x, bad, fragment)
        with pytest.raises(ValueError, match=MALFORMED):
            codec.decode_into(bad, out, fragment)
        with pytest.raises(ValueError, match=MALFORMED):
            codec.decode_add_(bad, out, 1.0, fragment)
    for length in (payload.numel() - 1, payload.numel() + 1, 0):
        with pytest.raises(BadPayload, match="are right"):
            codec.validate(torch.zeros(length, dtype=torch.uint8), fragment)


@every_codec
@given(
    fragment=st.sampled_from([flat(1), flat(65), flat(300), MIXED, of_shapes((64, 64), (5,))]),
    seed=st.integers(0, 2**31),
    random=st.booleans(),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(max_examples=examples(20))
def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(
    codec: Codec, fragment: Fragment, seed: int, random: bool, edits: list[tuple[int, int]]
) -> None:
    payload = codec.encode(gaussian(fragment), fragment)
    if random:
        generator = torch.Generator().manual_seed(seed)
        payload = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=generator)
    for place, byte in edits:
        payload[place % payload.numel()] = byte
    try:
        codec.validate(payload, fragment)
    except BadPayload:
        return
    assert torch.isfinite(codec.decode(payload, fragment, seed=seed)).all()


@every_codec
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e39])
def test_a_weight_must_be_finite(codec: Codec, weight: float) -> None:
    acc, fragment = torch.zeros(64), flat(64)
    with pytest.raises(ValueError, match="finite"):
        codec.decode_add_(codec.encode(torch.ones(64), fragment), acc, weight, fragment)
    assert not acc.any()


# --- seeds


@every_spelling
@on(flat(5000), MATRICES, LARGE)
def test_the_seed_decides_what_chance_decides_and_nothing_else_does(codec: Codec, fragment: Fragment) -> None:
    x = gaussian(fragment)
    seeds = (0, 1, 2**31, 2**32 - 1)
    first, again = ([codec.encode(x, fragment, seed=seed) for seed in seeds] for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    numbers = [codec.decode(payload, fragment, seed=seed) for payload, seed in zip(first, seeds, strict=True)]
    if codec.traits.deterministic:
        assert all(torch.equal(payload, first[0]) for payload in first)
        assert all(same_bits(x, numbers[0]) for x in numbers)
    elif len(fragment.tensors) > 1 or not codec.traits.warm_start:  # a vector has no subspace to look for by lot
        assert any(not same_bits(one, two) for one, two in itertools.combinations(numbers, 2))


# --- sums


@every_codec
@on(flat(700), flat(TILE + 65), MIXED, MATRICES)
@pytest.mark.parametrize("weight", [-0.7, -0.0, 1e-30])
def test_the_weighted_sum_rounds_twice(codec: Codec, fragment: Fragment, weight: float) -> None:
    """Protocol M, against IEEE arithmetic done one operation at a time by numpy; signs of zeros count."""
    payload = codec.encode(gaussian(fragment), fragment, seed=2)
    t = codec.decode(payload, fragment, seed=2).numpy()
    acc = gaussian(fragment, 1)
    acc[1::7] = 0.0
    acc[2::7] = -0.0
    expected = acc.numpy() + np.float32(weight) * t
    codec.decode_add_(payload, acc, weight, fragment, seed=2)
    assert same_bits(acc, torch.from_numpy(expected))


@every_codec
@on(flat(0), flat(65), MIXED, MATRICES)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_sum_of_several_is_one_after_the_other(codec: Codec, fragment: Fragment, count: int) -> None:
    """Bit for bit, whatever was in the accumulator."""
    seeds, weights = list(range(10, 10 + count)), [0.3, -0.2, 1 / 7, 0.0, 2.0][:count]
    payloads = [codec.encode(gaussian(fragment, seed), fragment, seed=seed) for seed in seeds]
    expected, total = torch.zeros(fragment.numel), torch.full((fragment.numel,), torch.nan)
    for payload, weight, seed in zip(payloads, weights, seeds, strict=True):
        codec.decode_add_(payload, expected, weight, fragment, seed=seed)
    codec.sum_into(payloads, weights, total, fragment, seeds=seeds)
    assert same_bits(total, expected)


@every_codec
@on(flat(0), flat(65), flat(4096), flat(2 * 4096 + 700), MIXED, MATRICES)
@pytest.mark.parametrize("in_place", [False, True])
def test_an_update_is_applied_as_added_and_gives_the_digest(codec: Codec, fragment: Fragment, in_place: bool) -> None:
    payload = codec.encode(gaussian(fragment), fragment, seed=2)
    base, expected = gaussian(fragment, 1), gaussian(fragment, 1)
    codec.decode_add_(payload, expected, 1.0, fragment, seed=2)
    out = base if in_place else torch.full((fragment.numel,), torch.nan)
    assert codec.apply_into(payload, base, out, fragment, seed=2) == digest(expected)
    assert same_bits(out, expected) and (in_place or same_bits(base, gaussian(fragment, 1)))


@every_codec
def test_a_sum_needs_as_many_weights_as_payloads(codec: Codec) -> None:
    fragment = flat(64)
    payload = codec.encode(torch.ones(64), fragment)
    with pytest.raises(ValueError, match=r"shorter|longer|weights|seeds"):
        codec.sum_into([payload, payload], [1.0], torch.zeros(64), fragment, seeds=[0, 0])


# --- error feedback


@every_codec
@on(flat(700), MIXED, MATRICES)
@pytest.mark.parametrize("beta", [None, 0.9, 0.0])
def test_the_residual_becomes_exactly_what_was_lost(codec: Codec, fragment: Fragment, beta: float | None) -> None:
    """v = fl(x + fl(β·residual)); its payload is v's own; the residual becomes fl(v − decoded)."""
    codec = codec if beta is None else dataclasses.replace(codec, beta=beta)
    x, residual = gaussian(fragment), gaussian(fragment, 1)
    previous = codec.encode(gaussian(fragment, 2), fragment, seed=8)
    v = torch.from_numpy(x.numpy() + np.float32(codec.beta) * residual.numpy())
    out = torch.full_like(previous, 0xA5)
    codec.encode_feedback_(x, residual, out, fragment, seed=9, previous=previous)
    assert torch.equal(out, codec.encode(v, fragment, seed=9, previous=previous))
    assert same_bits(residual, v - codec.decode(out, fragment, seed=9))
    assert same_bits(x, gaussian(fragment))


@every_codec
@on(flat(700), MIXED)
def test_a_number_that_is_none_is_named_with_error_feedback_too(codec: Codec, fragment: Fragment) -> None:
    x, out = gaussian(fragment), torch.empty(codec.payload_bytes(fragment), dtype=torch.uint8)
    x[33] = torch.nan
    with pytest.raises(NonFiniteError, match="element 33 is"):
        codec.encode_feedback_(x, gaussian(fragment, 1), out, fragment)


@every_spelling
def test_a_residual_stays_bounded_where_a_contraction_is_promised(codec: Codec) -> None:
    """Where β = 1: |e| ≤ |delta|·(1 + √(1 − δ))/δ on average; 30 rounds see a residual that doubles."""
    if codec.traits.contraction == 0:
        return
    codec = dataclasses.replace(codec, beta=1.0)
    residual, out = torch.zeros(MATRICES.numel), torch.empty(codec.payload_bytes(MATRICES), dtype=torch.uint8)
    previous, delta = None, 1.0
    for number in range(30):
        x = gaussian(MATRICES, number)
        delta = float(x.norm())
        codec.encode_feedback_(x, residual, out, MATRICES, seed=number, previous=previous)
        previous = out.clone() if codec.traits.warm_start else None
    kept = codec.traits.contraction
    assert float(residual.norm()) <= 1.1 * delta * min(30.0, (1 + math.sqrt(1 - kept)) / kept)


# --- what traits promise


def spikes(fragment: Fragment) -> Tensor:
    x = torch.zeros(fragment.numel)
    for slot in fragment.tensors:
        x[slot.offset + slot.numel // 3 : slot.offset + slot.numel : 97] = 3.0
    return x


def one_large(fragment: Fragment) -> Tensor:
    """And all others just below half a step of an int4 with its scale."""
    x = padded(fragment, torch.full((fragment.numel,), 0.499))
    x[::64] = -8.0
    return padded(fragment, x)


INPUTS: dict[str, Inputs] = {
    "gaussian": gaussian,
    "spikes": spikes,
    "heavy tails": lambda fragment: padded(fragment, gaussian(fragment) * (5e3 * gaussian(fragment, 1)).exp()),
    "constant": lambda fragment: padded(fragment, torch.full((fragment.numel,), 0.7)),
    "alternating": lambda fragment: padded(fragment, torch.tensor([1.0, -1.0]).repeat(fragment.numel // 2 + 1))[
        : fragment.numel
    ],
    "ramp": lambda fragment: padded(fragment, torch.linspace(-1, 1, fragment.numel)),
    "one large": one_large,
    "powers": lambda fragment: padded(fragment, torch.exp2(-(torch.arange(fragment.numel) % 30).float())),
}


@every_spelling
@pytest.mark.parametrize("kind", INPUTS)
@on(flat(1), flat(300), flat(5000), MIXED, MATRICES, LARGE)
def test_the_promised_part_arrives(codec: Codec, kind: str, fragment: Fragment) -> None:
    """E|x − decoded|² ≤ (1 − δ)|x|², with three standard errors where chance is in it."""
    if codec.traits.contraction == 0 or (fragment is LARGE and not codec.traits.sparse):
        return
    x = INPUTS[kind](fragment)
    assert x.any() or fragment.numel == 1
    runs = 1 if codec.traits.deterministic else (4 if fragment is LARGE else 24)
    lost = torch.zeros(runs, dtype=torch.float64)
    for seed in range(runs):
        decoded = codec.decode(codec.encode(x, fragment, seed=seed), fragment, seed=seed)
        lost[seed] = (x.double() - decoded.double()).square().sum()
    slack = 3 * float(lost.std()) / math.sqrt(runs) if runs > 1 else 0.0
    assert float(lost.mean()) <= (1 - codec.traits.contraction) * float(x.double().square().sum()) + slack


@every_spelling
@on(flat(1000), of_shapes((64, 64), (3, 200)))
def test_on_average_over_seeds_what_arrives_is_what_was_sent(codec: Codec, fragment: Fragment) -> None:
    """Along several directions, within three standard errors; small elements apart, for they show dead zones.

    The numbers have no tails: what lies beyond its largest code is clipped by `q4r`.
    """
    if not codec.traits.unbiased:
        return
    x = padded(fragment, torch.rand(fragment.numel, generator=torch.Generator().manual_seed(0)) * 2e-3 - 1e-3)
    small = (x.abs() < 2e-4) & (x != 0)
    directions = torch.stack((x, x.sign(), torch.ones_like(x), x.sign() * small, gaussian(fragment, 9))).double()
    errors = torch.empty(256, len(directions), dtype=torch.float64)
    for seed in range(len(errors)):
        decoded = codec.decode(codec.encode(x, fragment, seed=seed), fragment, seed=seed)
        errors[seed] = directions @ (decoded.double() - x.double())
    standard_error = errors.std(dim=0) / math.sqrt(len(errors))
    assert (errors.mean(dim=0).abs() <= 3 * standard_error).all()
