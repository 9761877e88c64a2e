"""Layers per stage, and DT-FM's cost of groups: worked examples, brute force, and searches that only get better."""

import dataclasses
import itertools
import random
from pathlib import Path

import plan_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import two_islands
from slow_cases import examples
from stories import StoryText, all_stories, check_story, python

from farloop.algo import stages
from farloop.planner import chain_search, inventory, paths, plan
from farloop.planner.fabric import Fabric, fabric_of, islands_of
from farloop.planner.mode import Crossover, across_groups, inside_groups
from farloop.planner.placement import Costs, all_reduce_s, best_order, descend, dp_s, matching_s, min_max_split

# --- Layers per stage


@all_stories(__file__, "placement")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    names = (stages, chain_search, paths, inventory, plan, plan_cases, dataclasses)
    check_story(path, story, python(*map(vars, names), globals()), rewrite=rewrite)


SPEEDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(SPEEDS, st.integers(0, 40), st.integers(0, 4), st.floats(1.0, 10.0))
def test_every_stage_has_a_layer_and_a_faster_one_no_fewer(
    speeds: list[float], more: int, which: int, factor: float
) -> None:
    layers = len(speeds) + more
    counts = min_max_split(layers, speeds)
    assert sum(counts) == layers and min(counts) >= 1
    stage = which % len(speeds)
    faster = [speed * factor if one == stage else speed for one, speed in enumerate(speeds)]
    assert min_max_split(layers, faster)[stage] >= counts[stage]


@given(SPEEDS.filter(lambda speeds: len(speeds) <= 4), st.integers(0, 8))
def test_no_split_is_faster(speeds: list[float], more: int) -> None:
    layers = len(speeds) + more
    every = (split for split in itertools.product(range(1, layers + 1), repeat=len(speeds)) if sum(split) == layers)

    def slowest_s(counts: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    assert slowest_s(min_max_split(layers, speeds)) == pytest.approx(min(map(slowest_s, every)))


# --- Groups


def fabric(count: int, seed: int) -> Fabric:
    rand = random.Random(seed)
    rows = [[0.0 if u == v else rand.uniform(0.1, 9.0) for v in range(count)] for u in range(count)]
    matrix = tuple(map(tuple, rows))
    return Fabric(latency_s=matrix, byte_s=((0.0,) * count,) * count, message_s=matrix, suspects=())


def test_the_worked_example() -> None:
    inventory = two_islands(h=1)
    costs, found = Costs(fabric_of(inventory), 0.4e9), islands_of(inventory)
    assert (across_groups(found, 2), inside_groups(found, 2)) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    across, inside = costs.placed(((0, 1), (2, 3))), costs.placed(((0, 2), (1, 3)))
    assert (across.dp_s, across.pp_s, across.step_s(1)) == pytest.approx((0.322, 0.85, 2.022))
    assert (inside.dp_s, inside.pp_s, inside.step_s(1)) == pytest.approx((6.5, 0.041, 6.582))
    crossover = Crossover(inside=inside, across=across)
    assert crossover.h_star == pytest.approx(3.82, abs=0.005)
    assert not crossover.prefers_inside(3) and crossover.prefers_inside(4)
    assert (across.step_s(8), inside.step_s(8)) == pytest.approx((1.74, 0.894), abs=0.001)


@settings(max_examples=examples(15))
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


@settings(max_examples=examples(12))
@given(st.integers(1, 6), st.integers(0, 10_000))
def test_the_order_is_that_of_brute_force(count: int, seed: int) -> None:
    edges = fabric(count, seed).message_s
    best = min(sum(edges[u][v] for u, v in itertools.pairwise(order)) for order in itertools.permutations(range(count)))
    length, order = best_order(edges)
    assert length == pytest.approx(best) and sorted(order) == list(range(count))


@settings(max_examples=examples(12))
@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_the_order_of_replicas_does_not_matter(seed: int, rand: random.Random) -> None:
    own = fabric(9, seed)
    groups = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    shuffled = tuple(tuple(rand.sample(group, 3)) for group in groups)
    one, other = Costs(own, 1e6).placed(groups), Costs(own, 1e6).placed(shuffled)
    assert (one.dp_s, one.pp_s) == pytest.approx((other.dp_s, other.pp_s))
    assert dp_s(groups, own, 1e6) == pytest.approx(one.dp_s)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(8e6, 2 * 7 * (1e-3 + 1e-3)), (8e3, 2 * 3 * (1e-3 + 8e-6))])
def test_many_bytes_are_reduced_by_a_ring_and_few_by_a_tree(num_bytes: float, seconds: float) -> None:
    """Eight nodes, 1 ms and 1 GB/s between any two: a ring sends an eighth of the bytes 14 times, a tree all 6."""
    same = ((1e-3,) * 8,) * 8
    own = Fabric(latency_s=same, byte_s=((1e-9,) * 8,) * 8, message_s=same, suspects=())
    assert all_reduce_s(range(8), own, num_bytes) == pytest.approx(seconds)
    assert all_reduce_s([3], own, num_bytes) == 0.0


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_more_moves_are_never_worse_and_sizes_stay(seed: int) -> None:
    own, groups = fabric(8, seed), ((0, 1, 2), (3, 4, 5), (6, 7))
    found = [descend(groups, Costs(own, 1e6), h=4, moves=moves, seed=seed) for moves in (0, 10, 40)]
    assert found[0].step_s(4) >= found[1].step_s(4) >= found[2].step_s(4)
    for placed in found:
        assert sorted(map(len, placed.groups)) == [2, 3, 3]
        assert sorted(node for group in placed.groups for node in group) == list(range(8))
