"""Layers per stage: published splits, and that no split is faster than the min-max rule's."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.coordinator.routing.placement import floor_split, min_max_split, offsets, slowest_s


@pytest.mark.parametrize(
    ("layers", "speeds", "exact", "floor"),
    [
        (30, (197, 160), (17, 13), (16, 14)),  # floor: as shipped with Holmes' code
        (48, (197, 160), (27, 21), (26, 22)),
        (24, (4, 2, 1, 1), (12, 6, 3, 3), (12, 6, 3, 3)),
        (12, (1, 0.6, 0.25), (7, 4, 1), (6, 3, 3)),
        (7, (5, 1, 1), (5, 1, 1), (5, 1, 1)),
    ],
)
def test_published_splits(
    layers: int, speeds: tuple[float, ...], exact: tuple[int, ...], floor: tuple[int, ...]
) -> None:
    assert min_max_split(layers, speeds) == exact
    assert floor_split(layers, speeds) == floor


def test_the_slowest_stage_of_the_golden_splits() -> None:
    assert slowest_s((17, 13), (197, 160)) == pytest.approx(0.0863, abs=5e-5)
    assert slowest_s((16, 14), (197, 160)) == pytest.approx(0.0875, abs=5e-5)
    assert slowest_s((7, 4, 1), (1, 0.6, 0.25)) == 7.0


SPEEDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(SPEEDS, st.integers(0, 20))
def test_layers_sum_up_and_every_stage_has_one(speeds: list[float], more: int) -> None:
    layers = len(speeds) + more
    counts = min_max_split(layers, speeds)
    assert sum(counts) == layers and min(counts) >= 1
    assert offsets(counts) == tuple(itertools.accumulate((0, *counts[:-1])))


@given(SPEEDS.filter(lambda speeds: len(speeds) <= 4), st.integers(0, 8))
def test_no_split_is_faster(speeds: list[float], more: int) -> None:
    layers, stages = len(speeds) + more, len(speeds)
    every = (
        split for split in itertools.product(range(1, layers + 1), repeat=stages) if sum(split) == layers
    )  # fmt: skip
    best = min(slowest_s(split, speeds) for split in every)
    assert slowest_s(min_max_split(layers, speeds), speeds) == pytest.approx(best)


@given(SPEEDS, st.integers(0, 40))
def test_never_slower_than_the_floor_rule(speeds: list[float], more: int) -> None:
    layers = len(speeds) + more
    floor = floor_split(layers, speeds)
    assert sum(floor) == layers
    if min(floor) >= 1:
        assert slowest_s(min_max_split(layers, speeds), speeds) <= slowest_s(floor, speeds) * (1 + 1e-12)


@given(SPEEDS, st.integers(0, 20), st.integers(0, 4), st.floats(1.0, 10.0))
def test_a_faster_stage_never_gets_fewer_layers(speeds: list[float], more: int, which: int, factor: float) -> None:
    stage, layers = which % len(speeds), len(speeds) + more
    faster = [speed * factor if one == stage else speed for one, speed in enumerate(speeds)]
    assert min_max_split(layers, faster)[stage] >= min_max_split(layers, speeds)[stage]


def test_memory_caps_are_kept() -> None:
    assert min_max_split(12, (4.0, 1.0, 1.0), (5, None, 4)) == (5, 4, 3)


@pytest.mark.parametrize(
    ("layers", "speeds", "caps", "words"),
    [
        (2, (1.0, 1.0, 1.0), None, "2 layers cannot be cut into 3 stages"),
        (4, (1.0, 0.0), None, "speed 0"),
        (4, (1.0, math.nan), None, "speed nan"),
        (9, (1.0, 1.0), (4, 4), "hold 8 layers at most"),
    ],
)
def test_what_cannot_be_split_is_said(
    layers: int, speeds: tuple[float, ...], caps: tuple[int, ...] | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        min_max_split(layers, speeds, caps)
