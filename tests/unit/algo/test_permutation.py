"""Covers `algo/sample_order.py` (protocol "Data leases")."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.sample_order import permute, sample_index, splitmix64

keys = st.integers(0, 2**64 - 1)


@given(n=st.integers(1, 600), key=keys)
def test_every_key_permutes_every_range(n: int, key: int) -> None:
    assert sorted(permute(place, n, key) for place in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 255, 256, 257, 4095, 4096, 4097])
def test_ranges_around_powers_of_two_are_permuted(n: int) -> None:
    assert {permute(place, n, 11) for place in range(n)} == set(range(n))


@given(n=st.integers(2**40, 2**63), key=keys, data=st.data())
def test_huge_ranges_need_no_memory_and_keep_distinct_places_distinct(n: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=8, unique=True))
    images = {permute(place, n, key) for place in places}
    assert len(images) == len(places)
    assert all(0 <= image < n for image in images)


@given(n=st.integers(1, 200), first_pass=st.integers(0, 10**6), seed=keys)
def test_each_data_pass_visits_every_sample_once(n: int, first_pass: int, seed: int) -> None:
    start = first_pass * n
    assert sorted(sample_index(start + i, n, seed) for i in range(n)) == list(range(n))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    orders = {
        tuple(sample_index(data_pass * n + i, n, seed) for i in range(n)) for data_pass in range(5) for seed in range(5)
    }
    assert len(orders) == 25
    # A random permutation has one fixed point on average; two orders agree at about one place.
    first, *others = sorted(orders)
    assert all(sum(a == b for a, b in zip(first, other, strict=True)) < 10 for other in others)


def test_images_of_a_place_spread_evenly_over_the_keys() -> None:
    n, num_keys = 10, 20_000
    for place in (0, 1, 9):
        counts = [0] * n
        for key in range(num_keys):
            counts[permute(place, n, splitmix64(key))] += 1
        chi_square = sum((count - num_keys / n) ** 2 / (num_keys / n) for count in counts)
        assert chi_square < 27.9  # 0.999 quantile at 9 degrees of freedom


def test_neighbours_in_the_stream_are_not_neighbours_in_the_corpus() -> None:
    n = 5000
    order = [sample_index(i, n, 3) for i in range(n)]
    steps = [(b - a) % n for a, b in pairwise(order)]
    assert steps.count(1) < 10
    assert len(set(steps)) > 0.6 * n  # 1 − 1/e of all differences, were they independent


def test_the_order_of_a_seed_never_changes() -> None:
    """Journaled leases are positions: another order would make old runs train on other samples."""
    assert [sample_index(i, 10, 0) for i in range(10)] == [2, 0, 8, 1, 9, 7, 4, 5, 6, 3]
    assert [sample_index(i, 10, 0) for i in range(10, 20)] == [3, 2, 6, 0, 8, 9, 5, 4, 1, 7]
    assert [sample_index(i, 1_000_003, 2026) for i in (0, 1, 1_000_002, 1_000_003)] == [861031, 233724, 283080, 767158]
    assert [permute(place, 16, 0) for place in range(16)] == [2, 0, 8, 1, 9, 15, 14, 11, 13, 12, 7, 5, 3, 6, 4, 10]


def test_splitmix64_gives_the_published_sequence() -> None:
    """First outputs of splitmix64 seeded with 1234567, as Rosetta Code lists them."""
    golden_ratio = 0x9E3779B97F4A7C15
    outputs = [splitmix64(1234567 + i * golden_ratio) for i in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(("position", "n"), [(0, 0), (3, -1), (-1, 10)])
def test_a_position_outside_the_stream_is_refused(position: int, n: int) -> None:
    with pytest.raises(ValueError, match="no sample at position"):
        sample_index(position, n, 0)


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_outside_the_range_is_refused(place: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        permute(place, 10, 0)
