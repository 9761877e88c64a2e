"""Random bits from a counter, against Python's integers, and whether they look random."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.quant.packing import mix32, uniform16, words

seeds = st.integers(0, 2**32 - 1)


def mixed(x: int) -> int:
    """A second implementation, with the shift and the product of each round in one line."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def word(seed: int, counter: int) -> int:
    return mixed((counter * 0x9E3779B1 + mixed(seed)) % 2**32)


@given(seeds)
@settings(deadline=None)
def test_the_finaliser_is_that_of_the_table(x: int) -> None:
    assert mix32(x) == mixed(x)


def test_the_finaliser_is_a_bijection() -> None:
    """Undone step by step: an inverse of an odd product, and xorshifts backwards."""
    for x in (0, 1, 0x80000000, 0xFFFFFFFF, 12345, 0xDEADBEEF):
        y = mix32(x)
        y ^= y >> 15 ^ y >> 30
        y = y * pow(0x735A2D97, -1, 2**32) % 2**32
        y ^= y >> 15 ^ y >> 30
        y = y * pow(0x21F0AAAD, -1, 2**32) % 2**32
        assert y ^ y >> 16 == x


@given(seed=seeds, first=st.integers(0, 2**31), count=st.integers(0, 50))
@settings(deadline=None, max_examples=50)
def test_words_are_those_of_their_counters(seed: int, first: int, count: int) -> None:
    assert words(seed, first, count).tolist() == [word(seed, first + i) for i in range(count)]


@given(seed=seeds, start=st.integers(0, 2**27).map(lambda half: 2 * half), numel=st.integers(0, 41))
@settings(deadline=None, max_examples=50)
def test_even_elements_have_the_low_half_of_their_word_and_odd_ones_the_high(seed: int, start: int, numel: int) -> None:
    got = uniform16(seed, start, numel)
    assert got.dtype == torch.float32 and got.shape == (numel,)
    halves = [word(seed, i // 2) >> 16 if i % 2 else word(seed, i // 2) % 2**16 for i in range(start, start + numel)]
    assert got.tolist() == [(half + 0.5) / 2**16 for half in halves]


def test_a_range_has_the_bits_of_its_place_in_the_whole() -> None:
    """A rank that owns some tiles draws what the whole fragment would."""
    whole = uniform16(7, 0, 1000)
    assert torch.equal(torch.cat((uniform16(7, 0, 256), uniform16(7, 256, 744))), whole)


def test_a_range_begins_with_a_pair() -> None:
    with pytest.raises(AssertionError):
        uniform16(0, 1, 4)


@pytest.mark.parametrize("seed", [0, 1, 2, 2**31, 2**32 - 1])
def test_draws_are_uniform_and_neighbours_do_not_know_of_each_other(seed: int) -> None:
    """256 bins by χ², the mean, and correlations at the distances at which a weak mixer shows."""
    n = 1 << 18
    u = uniform16(seed, 0, n).double()
    assert float(u.min()) > 0 and float(u.max()) < 1
    counts = torch.bincount((u * 256).long(), minlength=256).double()
    chi_square = float(((counts - n / 256).square() / (n / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * n)
    centred = u - 0.5
    for distance in (1, 2, 3, 64, 256, 512):
        correlation = float((centred[distance:] * centred[:-distance]).mean()) * 12
        assert abs(correlation) < 5 / math.sqrt(n)


def test_two_seeds_do_not_know_of_each_other() -> None:
    """Not even neighbouring ones, or those that differ in the highest bit: the errors of nodes must average out."""
    n = 1 << 17
    draws = [uniform16(seed, 0, n).double() - 0.5 for seed in (0, 1, 2, 2**31, 2**31 + 1, 2**32 - 1)]
    for one, other in itertools.combinations(draws, 2):
        assert abs(float((one * other).mean()) * 12) < 5 / math.sqrt(n)


def test_flipping_a_bit_of_the_seed_flips_half_of_the_word() -> None:
    flips = [
        (word(seed, counter) ^ word(seed ^ 1 << bit, counter)).bit_count()
        for seed, counter, bit in itertools.product((0, 99, 2**31 + 5), range(20), range(32))
    ]
    assert sum(flips) / len(flips) == pytest.approx(16, abs=0.3)
