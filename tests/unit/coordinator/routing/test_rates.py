"""Bits and steps of a node: the worked example, and that rounds end alike."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farloop.algo.bit_allocation import Candidate, by_multiplier
from farloop.coordinator.routing.sync_plan import Pace, choose, dylu_h, steps_within, utilization

FAST, MIDDLE, SLOW = (
    Pace(step_s=0.5, bytes_per_s=125e6),
    Pace(step_s=0.8, bytes_per_s=25e6),
    Pace(step_s=1.25, bytes_per_s=6.25e6),
)
GOAL = 50.8


def test_the_worked_example() -> None:
    assert [dylu_h(100, pace.step_s, 0.5) for pace in (FAST, MIDDLE, SLOW)] == [100, 62, 40]
    assert steps_within(MIDDLE, GOAL, 100e6, 8) == 58
    assert [steps_within(SLOW, GOAL, 100e6, bits) for bits in (8, 4, 2)] == [27, 34, 37]
    found = choose([FAST, MIDDLE, SLOW], h=100, parameters=100e6, bits=(8, 4, 2))
    assert [(rate.bits, rate.h) for rate in found] == [(8, 100), (8, 58), (4, 34)]


@pytest.mark.parametrize(("sync_s", "share"), [(103, 0.957), (382, 0.857), (469, 0.829)])
def test_utilisation_of_a_published_run(sync_s: float, share: float) -> None:
    """38 minutes between syncs, as reported of INTELLECT-1."""
    assert utilization(1, 2280.0, sync_s) == pytest.approx(share, abs=0.0006)


PACES = st.lists(
    st.builds(Pace, step_s=st.floats(0.2, 2.0), bytes_per_s=st.floats(1e6, 1e9)), min_size=1, max_size=6
)  # fmt: skip


@given(PACES, st.integers(10, 300))
def test_rounds_end_alike(paces: list[Pace], h: int) -> None:
    """|Hᵢ·τᵢ + commᵢ − T*| ≤ τᵢ, but where H was bounded."""
    found = choose(paces, h=h, parameters=50e6, bits=(8, 4, 2))
    fast = min(range(len(paces)), key=lambda one: (paces[one].step_s, -paces[one].bytes_per_s))
    goal = h * paces[fast].step_s + 50e6 / paces[fast].bytes_per_s
    least = max(rate.h for rate in found) / 4
    for pace, rate in zip(paces, found, strict=True):
        if rate.h > least + 1:
            assert abs(rate.round_s - goal) <= pace.step_s * (1 + 1e-6)


@given(PACES, st.integers(10, 300), st.floats(1.0, 10.0))
@example([Pace(step_s=1.0, bytes_per_s=1e6)], 12, 10.0)  # of a link that is too slow for a round whatever the bits
def test_a_faster_link_never_means_fewer_bits(paces: list[Pace], h: int, factor: float) -> None:
    """Against a fast node that stays as it is."""
    anchor = Pace(step_s=0.1, bytes_per_s=1e9)
    slow = paces[0]
    quick = Pace(step_s=slow.step_s, bytes_per_s=slow.bytes_per_s * factor)
    one = choose([anchor, slow], h=h, parameters=50e6, bits=(8, 4, 2))[1]
    other = choose([anchor, quick], h=h, parameters=50e6, bits=(8, 4, 2))[1]
    assert other.bits >= one.bits


@given(PACES, st.integers(10, 300))
def test_twice_the_rate_at_the_same_bits_never_means_fewer_steps(paces: list[Pace], h: int) -> None:
    slow = paces[0]
    twice = Pace(step_s=slow.step_s, bytes_per_s=2 * slow.bytes_per_s)
    assert steps_within(twice, h * 0.5, 50e6, 4) >= steps_within(slow, h * 0.5, 50e6, 4)


@given(PACES, st.integers(1, 300))
def test_nobody_drifts_four_times_as_far_as_another(paces: list[Pace], h: int) -> None:
    steps = [rate.h for rate in choose(paces, h=h, parameters=50e6, bits=(8, 4, 2))]
    assert max(steps) <= 4 * min(steps)


def test_a_transfer_beside_the_training_costs_no_steps() -> None:
    found = choose([FAST, SLOW], h=100, parameters=100e6, bits=(8,), overlap=True)
    assert [rate.h for rate in found] == [100, 40]


def test_the_golden_bits_of_layers() -> None:
    """n = 1, 4, 8 M, variances 9, 1, ¼: 5, 4 and 3 bits, 45 Mbit against 52 of 4 bits everywhere."""
    sizes, variances, bits = (1, 4, 8), (9.0, 1.0, 0.25), (2, 3, 4, 5, 6, 8)
    tables = [
        [Candidate(bits=n * b, error=n * v * 4.0**-b) for b in bits] for n, v in zip(sizes, variances, strict=True)
    ]
    budget = sum(table[2].error for table in tables)
    assert budget == pytest.approx(0.05859, abs=5e-6)
    found = by_multiplier(tables, budget)
    assert [bits[index] for index in found.indices] == [5, 4, 3]
    assert (found.bits, found.error) == (45, pytest.approx(0.05566, abs=5e-6))
