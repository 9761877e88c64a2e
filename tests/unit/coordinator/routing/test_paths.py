"""What paths are allowed, and what one costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import tiny_delays

from farloop.coordinator.routing.chain_search import visits
from farloop.coordinator.routing.paths import (
    PUBLISHED,
    Limits,
    Work,
    chain_s,
    fault_of,
    latency_s,
    path_length,
)


@pytest.mark.parametrize("stages", [(0,), (0, 1, 2, 3), (0, 2, 1, 3), (0, 4), (0, 2, 1, 4, 3), (0, 1, 5, 4)])
def test_allowed_orders(stages: tuple[int, ...]) -> None:
    assert fault_of(stages) == ""


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((), "begins at stage 0"),
        ((1, 2), "begins at stage 0"),
        ((0, 1, 1), "visited twice"),
        ((0, 5), "a jump from stage 0 to 5"),
        ((0, 3, 1), "too far out of order"),  # two behind
        ((0, 2, 1, 4, 3, 6, 5), "too far out of order"),  # three swaps
    ],
)
def test_forbidden_orders(stages: tuple[int, ...], words: str) -> None:
    assert words in fault_of(stages)


@pytest.mark.parametrize(
    ("stages", "skip", "length"), [(6, 1 / 3, 4), (8, 0.25, 6), (4, 0.0, 4), (4, 0.25, 3), (1, 0, 1)]
)
def test_the_length_of_a_path(stages: int, skip: float, length: int) -> None:
    assert path_length(stages, skip) == length


@given(st.integers(1, 9), st.integers(2, 10), st.integers(2, 10))
def test_visits_are_even(chains: int, stages: int, length: int) -> None:
    """P2: every stage but the first is visited as often as any other, up to one."""
    if not stages - 3 <= length <= stages or chains * (length - 1) < stages - 1:
        return
    found = visits(chains, stages, length, PUBLISHED)
    assert all(len(path) == length and not fault_of(path) for path in found)
    counts = [sum(stage in path for path in found) for stage in range(1, stages)]
    assert max(counts) - min(counts) <= 1


def test_too_much_to_skip_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"nearest skip that can be planned is 0\.\d0"):
        visits(9, 10, 2, Limits(max_jump=4))


def test_too_few_paths_for_all_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="5 paths are needed: 15 nodes, or fewer stages"):
        visits(4, 10, 3, PUBLISHED)


def test_the_tiny_latencies() -> None:
    """2·cycle + 7.75; reversing a cycle of symmetric links costs nothing."""
    work = Work(layer_s=(1.0,) * 8, layers=(1,) * 4, slots=(1,) * 8, microbatches=1)
    delays = tiny_delays()
    for nodes, stages, seconds in (
        ((0, 2, 4), (0, 1, 2), 15.75),
        ((0, 4, 2), (0, 2, 1), 15.75),
        ((1, 3, 5), (0, 1, 2), 15.75),
        ((0, 4, 7), (0, 2, 3), 19.75),
        ((0, 2, 4, 7), (0, 1, 2, 3), 22.25),
        ((1, 3, 5, 6), (0, 1, 2, 3), 20.25),
    ):
        assert latency_s(nodes, stages, work, delays) == chain_s(nodes, stages, work, delays) == seconds


def test_rounds_and_flights_of_the_closed_form() -> None:
    """R·latency + (m − 1)·b, or a node that is never idle."""
    work = Work(layer_s=(1.0, 1.0), layers=(1, 1), slots=(3, 3), microbatches=6, gap_s=0.5)
    far = [[0.0, 10.0], [10.0, 0.0]]
    assert chain_s((0, 1), (0, 1), work, far) == 2 * (2 * 2.5 + 0.25 + 40.0) + 2 * 3.0
    near = [[0.0, 0.0], [0.0, 0.0]]
    assert chain_s((0, 1), (0, 1), work, near) == 5.25 + 5 * 3.0
