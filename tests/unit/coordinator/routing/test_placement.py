"""DT-FM's cost: the worked example, matchings and orders against brute force, and a search that only gets better."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import two_islands

from farloop.coordinator.routing.fabric import Fabric, fabric_of, islands_of
from farloop.coordinator.routing.mode import Crossover, across_groups, inside_groups
from farloop.coordinator.routing.placement import Costs, best_order, descend, dp_s, matching_s


def fabric(count: int, seed: int) -> Fabric:
    rand = random.Random(seed)
    rows = [[0.0 if u == v else rand.uniform(0.1, 9.0) for v in range(count)] for u in range(count)]
    matrix = tuple(map(tuple, rows))
    return Fabric(latency_s=matrix, byte_s=((0.0,) * count,) * count, message_s=matrix, suspects=())


def test_the_worked_example() -> None:
    inventory = two_islands(h=1)
    costs = Costs(fabric_of(inventory), 0.4e9)
    across, inside = costs.placed(((0, 1), (2, 3))), costs.placed(((0, 2), (1, 3)))
    assert (across.dp_s, across.pp_s, across.step_s(1)) == pytest.approx((0.322, 0.85, 2.022))
    assert (inside.dp_s, inside.pp_s, inside.step_s(1)) == pytest.approx((6.5, 0.041, 6.582))
    crossover = Crossover(inside=inside, across=across)
    assert crossover.h_star == pytest.approx(3.82, abs=0.005)
    assert not crossover.prefers_inside(3) and crossover.prefers_inside(4)
    assert (across.step_s(8), inside.step_s(8)) == pytest.approx((1.74, 0.894), abs=0.001)


def test_the_two_layouts_of_the_worked_example() -> None:
    found = islands_of(two_islands(h=1))
    assert inside_groups(found, 2) == ((0, 2), (1, 3))
    assert across_groups(found, 2) == ((0, 1), (2, 3))


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10_000))
def test_the_matching_is_that_of_brute_force(left: int, right: int, seed: int) -> None:
    seconds = fabric(left + right, seed).message_s
    a, b = list(range(left)), list(range(left, left + right))
    few, many = (a, b) if left <= right else (b, a)
    best = min(
        max(0.5 * (seconds[u][v] + seconds[v][u]) for u, v in zip(few, others, strict=True))
        for others in itertools.permutations(many, len(few))
    )
    assert matching_s(a, b, seconds) == pytest.approx(best)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 10_000))
def test_the_order_is_that_of_brute_force(count: int, seed: int) -> None:
    edges = fabric(count, seed).message_s
    best = min(sum(edges[u][v] for u, v in itertools.pairwise(order)) for order in itertools.permutations(range(count)))
    length, order = best_order(edges)
    assert length == pytest.approx(best) and sorted(order) == list(range(count))


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_the_order_of_replicas_does_not_matter(seed: int, rand: random.Random) -> None:
    own = fabric(9, seed)
    groups = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    shuffled = tuple(tuple(rand.sample(group, 3)) for group in groups)
    one, other = Costs(own, 1e6).placed(groups), Costs(own, 1e6).placed(shuffled)
    assert (one.dp_s, one.pp_s) == pytest.approx((other.dp_s, other.pp_s))
    assert dp_s(groups, own, 1e6) == pytest.approx(one.dp_s)


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_more_moves_are_never_worse_and_sizes_stay(seed: int) -> None:
    own, groups = fabric(8, seed), ((0, 1, 2), (3, 4, 5), (6, 7))
    found = [descend(groups, Costs(own, 1e6), h=4, moves=moves, seed=seed) for moves in (0, 10, 40)]
    assert found[0].step_s(4) >= found[1].step_s(4) >= found[2].step_s(4)
    for placed in found:
        assert sorted(map(len, placed.groups)) == [2, 3, 3]
        assert sorted(node for group in placed.groups for node in group) == list(range(8))
