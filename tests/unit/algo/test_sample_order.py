"""Which sample of which corpus a position of the stream is (protocol "Data leases")."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow

from farloop.algo.sample_order import BLOCK, arrivals, part_of, permute, quotas, sample_index, source_of, splitmix64
from farloop.algo.terms import LearningRate, Rewarm

keys = st.integers(0, 2**64 - 1)

# --- The permutation of a corpus


@given(n=st.integers(1, 600), key=keys, data_pass=st.integers(0, 10**6))
def test_each_data_pass_visits_every_sample_once(n: int, key: int, data_pass: int) -> None:
    assert sorted(permute(place, n, key) for place in range(n)) == list(range(n))
    assert sorted(sample_index(data_pass * n + i, n, key) for i in range(n)) == list(range(n))


@given(n=st.integers(2**40, 2**63), key=keys, data=st.data())
def test_huge_ranges_need_no_memory_and_keep_distinct_places_distinct(n: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=8, unique=True))
    images = {permute(place, n, key) for place in places}
    assert len(images) == len(places) and all(0 <= image < n for image in images)


def test_the_order_of_a_seed_never_changes() -> None:
    """Journaled leases are positions: another order would make old runs train on other samples."""
    assert [sample_index(i, 10, 0) for i in range(10)] == [2, 0, 8, 1, 9, 7, 4, 5, 6, 3]
    assert [sample_index(i, 10, 0) for i in range(10, 20)] == [3, 2, 6, 0, 8, 9, 5, 4, 1, 7]
    assert [sample_index(i, 1_000_003, 2026) for i in (0, 1, 1_000_002, 1_000_003)] == [861031, 233724, 283080, 767158]


def test_splitmix64_gives_the_published_sequence() -> None:
    """First outputs of splitmix64 seeded with 1234567, as Rosetta Code lists them."""
    outputs = [splitmix64(1234567 + i * 0x9E3779B97F4A7C15) for i in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_what_is_outside_the_stream_or_the_range_is_refused() -> None:
    for position, n in [(0, 0), (3, -1), (-1, 10)]:
        with pytest.raises(ValueError, match="no sample at position"):
            sample_index(position, n, 0)
    for place in (-1, 10):
        with pytest.raises(ValueError, match="outside"):
            permute(place, 10, 0)


# --- The corpus, once re-warms bring new data

seeds, positions = st.integers(0, 2**63 - 1), st.integers(0, 2**60)


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


@given(sample=positions, at=st.floats(0, 1000), seed=seeds, replays=st.lists(st.floats(0, 0.99), max_size=4))
def test_data_that_has_not_come_is_not_drawn_and_the_draw_is_the_same_again(
    sample: int, at: float, seed: int, replays: list[float]
) -> None:
    source = source_of(sample, at, brings(*replays), seed)
    assert source <= min(len(replays), int(at // 100))
    assert source == source_of(sample, at, brings(*replays), seed)
    assert [source_of(sample, begin, brings(0.0), seed) for begin in (99.5, 100)] == [0, 1]


@given(sample=positions, at=st.floats(100, 199), seed=seeds, less=st.floats(0, 0.5), more=st.floats(0, 0.49))
def test_a_larger_replay_keeps_what_a_smaller_has(sample: int, at: float, seed: int, less: float, more: float) -> None:
    replayed = source_of(sample, at, brings(less), seed) == 0
    assert not replayed or source_of(sample, at, brings(less + more), seed) == 0


@pytest.mark.parametrize("replay", [0.05, 0.25, 0.5])
@pytest.mark.parametrize(("seed", "start"), [(0, 0), (0, 2**40), (2**63 - 1, 12345)])
def test_the_share_of_replay_is_what_was_asked_for(replay: float, seed: int, start: int) -> None:
    """Within five standard deviations of 20,000 draws."""
    old, new = shares(replay, at=100, seed=seed, start=start)
    assert abs(old - replay) < 5 * math.sqrt(replay * (1 - replay) / 20_000) and old + new == 1.0


def test_a_second_phase_replays_the_mixture_of_those_before() -> None:
    assert shares(0.25, 0.5, at=250) == pytest.approx([0.125, 0.375, 0.5], abs=0.02)
    assert shares(0.25, 0.5, at=150) == pytest.approx([0.25, 0.75, 0.0], abs=0.02)


def test_the_draw_says_nothing_of_the_place_in_the_corpus() -> None:
    """The permutation has the same seed: were the two linked, a part of the old corpus would never come again."""
    n, replay = 400, 0.25
    replayed = Counter(
        sample_index(i, n, 7) * 4 // n for i in range(40 * n) if source_of(i, 100, brings(replay), seed=7) == 0
    )
    assert all(abs(replayed[quarter] - 10 * n * replay) < 5 * math.sqrt(10 * n * replay) for quarter in range(4))


def test_draws_are_the_same_on_every_machine() -> None:
    drawn = "".join(str(source_of(i, 200, brings(0.25, 0.5), seed=11)) for i in range(32))
    assert drawn == "22222111101112222112102122212112"


# --- Mixtures


@given(weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=8))
def test_quotas_are_the_weights_to_the_nearest_sample(weights: list[float]) -> None:
    counts = quotas(weights)
    assert sum(counts) == BLOCK
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - BLOCK * weight / sum(weights)) < 1
    assert quotas([3, 1]) == (7500, 2500) and quotas([1, 1, 1]) == (3334, 3333, 3333)


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [math.nan, 1], [math.inf, 1]])
def test_a_weight_that_is_none_is_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="a weight is a number above 0, not"):
        quotas(weights)
    with pytest.raises(ValueError, match="a weight of 1 is less than a 10000th of all"):
        quotas([1, 100_000])


@pytest.mark.parametrize("examples", [5, *slow(200)])  # each of them is a whole block of 10,000
def test_every_block_has_the_next_samples_of_each_part_once(examples: int) -> None:
    @settings(max_examples=examples)
    @given(seed=keys, block=st.integers(0, 2**40), weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
    def has_them(seed: int, block: int, weights: list[float]) -> None:
        counts = quotas(weights)
        found = [part_of(block * BLOCK + place, counts, seed) for place in range(BLOCK)]
        for number, count in enumerate(counts):
            places = sorted(place for part, place in found if part == number)
            assert places == list(range(block * count, (block + 1) * count))

    has_them()


def test_parts_are_mixed_within_a_block_and_one_part_is_the_stream_itself() -> None:
    assert [part_of(position, (BLOCK,), 7) for position in (0, 9, 10**12)] == [(0, 0), (0, 9), (0, 10**12)]
    parts = [part_of(position, quotas([3, 1]), 7)[0] for position in range(2000)]
    for start in range(0, 2000, 200):
        assert 0.12 < sum(parts[start : start + 200]) / 200 < 0.4
    other = [part_of(position, quotas([3, 1]), 8)[0] for position in range(2000)]
    assert parts != other
