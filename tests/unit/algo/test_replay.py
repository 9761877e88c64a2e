"""Covers `algo/sample_order.py`: which corpus a sample comes from once re-warms bring new data."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.sample_order import arrivals, sample_index, source_of
from farloop.algo.terms import LearningRate, Rewarm

seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**60)


def brings(*replays: float) -> tuple[Rewarm, ...]:
    """One every hundred positions."""
    return tuple(Rewarm(start=100 * k, peak=1e-3, replay=replay) for k, replay in enumerate(replays, start=1))


def shares(*replays: float, at: float, seed: int = 3, start: int = 0, samples: int = 20_000) -> list[float]:
    found = Counter(source_of(start + i, at, brings(*replays), seed) for i in range(samples))
    return [found[number] / samples for number in range(len(replays) + 1)]


def test_only_a_rewarm_with_a_replay_brings_data() -> None:
    first, second, third = Rewarm(start=5, peak=1.0), Rewarm(start=9, peak=1.0, replay=0.0), *brings(0.1)
    assert arrivals(LearningRate(rewarms=(first, second, third))) == (second, third)
    assert arrivals(LearningRate()) == ()


@given(sample=positions, at=st.floats(0, 99.99), seed=seeds)
def test_before_the_first_of_them_there_is_one_corpus(sample: int, at: float, seed: int) -> None:
    assert source_of(sample, at, brings(0.5, 0.5), seed) == source_of(sample, at, (), seed) == 0


@given(sample=positions, seed=seeds)
def test_the_phase_begins_at_its_very_position(sample: int, seed: int) -> None:
    assert source_of(sample, 100, brings(0.0), seed) == 1
    assert source_of(sample, 99.5, brings(0.0), seed) == 0


@given(sample=positions, at=st.floats(0, 1000), seed=seeds, replays=st.lists(st.floats(0, 0.99), max_size=4))
def test_data_that_has_not_come_is_not_drawn_and_the_draw_is_the_same_again(
    sample: int, at: float, seed: int, replays: list[float]
) -> None:
    source = source_of(sample, at, brings(*replays), seed)
    assert source <= min(len(replays), int(at // 100))
    assert source == source_of(sample, at, brings(*replays), seed)


@given(sample=positions, at=st.floats(100, 199), seed=seeds, less=st.floats(0, 0.5), more=st.floats(0, 0.49))
def test_a_larger_replay_keeps_whatever_a_smaller_one_replays(
    sample: int, at: float, seed: int, less: float, more: float
) -> None:
    replayed = source_of(sample, at, brings(less), seed) == 0
    assert not replayed or source_of(sample, at, brings(less + more), seed) == 0


@pytest.mark.parametrize("replay", [0.05, 0.25, 0.5])
@pytest.mark.parametrize(("seed", "start"), [(0, 0), (0, 2**40), (1, 0), (2**63 - 1, 12345)])
def test_the_share_of_replay_is_what_was_asked_for(replay: float, seed: int, start: int) -> None:
    """Within five standard deviations of 20,000 draws."""
    old, new = shares(replay, at=100, seed=seed, start=start)
    assert abs(old - replay) < 5 * math.sqrt(replay * (1 - replay) / 20_000)
    assert old + new == 1.0


def test_a_second_phase_replays_the_mixture_of_those_before() -> None:
    assert shares(0.25, 0.5, at=250) == pytest.approx([0.125, 0.375, 0.5], abs=0.02)
    assert shares(0.25, 0.5, at=150) == pytest.approx([0.25, 0.75, 0.0], abs=0.02)


def test_seeds_have_draws_of_their_own() -> None:
    draws = [tuple(source_of(i, 100, brings(0.5), seed) for i in range(64)) for seed in range(50)]
    assert len(set(draws)) == 50


def test_the_draw_says_nothing_of_the_place_in_the_corpus() -> None:
    """The permutation has the same seed: were the two linked, a part of the old corpus would never come again."""
    n, replay = 400, 0.25
    replayed = Counter(
        sample_index(i, n, 7) * 4 // n for i in range(40 * n) if source_of(i, 100, brings(replay), seed=7) == 0
    )
    assert all(abs(replayed[quarter] - 10 * n * replay) < 5 * math.sqrt(10 * n * replay) for quarter in range(4))


@given(n=st.integers(1, 300), data_pass=st.integers(0, 10**6), seed=seeds, replay=st.floats(0, 0.99))
def test_no_sample_of_either_corpus_comes_twice_in_a_pass_over_it(
    n: int, data_pass: int, seed: int, replay: float
) -> None:
    stream = range(data_pass * n, (data_pass + 1) * n)
    for wanted in (0, 1):
        taken = [sample_index(i, n, seed) for i in stream if source_of(i, 100, brings(replay), seed) == wanted]
        assert len(set(taken)) == len(taken)


def test_draws_are_the_same_on_every_machine() -> None:
    drawn = "".join(str(source_of(i, 200, brings(0.25, 0.5), seed=11)) for i in range(32))
    assert drawn == "22222111101112222112102122212112"
