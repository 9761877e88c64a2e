"""The sync of a plan: bits and steps of a node, lighter terms, seconds, and when a new plan is worth the switch."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farloop.planner.inventory import Hub
from farloop.planner.plan import Prediction, Worker, star
from farloop.planner.sync_plan import Pace, choose, dylu_h, lighter, steps_within

# --- Bits and steps: rounds end alike

FAST, MIDDLE, SLOW = (
    Pace(step_s=0.5, bytes_per_s=125e6),
    Pace(step_s=0.8, bytes_per_s=25e6),
    Pace(step_s=1.25, bytes_per_s=6.25e6),
)


def test_the_worked_example_of_rates() -> None:
    assert [dylu_h(100, pace.step_s, 0.5) for pace in (FAST, MIDDLE, SLOW)] == [100, 62, 40]
    assert steps_within(MIDDLE, 50.8, 100e6, 8) == 58
    assert [steps_within(SLOW, 50.8, 100e6, bits) for bits in (8, 4, 2)] == [27, 34, 37]
    found = choose([FAST, MIDDLE, SLOW], h=100, parameters=100e6, bits=(8, 4, 2))
    assert [(rate.bits, rate.h) for rate in found] == [(8, 100), (8, 58), (4, 34)]
    beside = choose([FAST, SLOW], h=100, parameters=100e6, bits=(8,), overlap=True)
    assert [rate.h for rate in beside] == [100, 40], "a transfer beside the training costs no steps"


PACE = st.builds(Pace, step_s=st.floats(0.2, 2.0), bytes_per_s=st.floats(1e6, 1e9))
PACES = st.lists(PACE, min_size=1, max_size=6)


@given(PACES, st.integers(1, 300))
def test_rounds_end_alike_and_no_node_drifts_four_times_as_far_as_another(paces: list[Pace], h: int) -> None:
    """|Hᵢ·τᵢ + commᵢ − T*| ≤ τᵢ, but where H was bounded."""
    found = choose(paces, h=h, parameters=50e6, bits=(8, 4, 2))
    assert max(rate.h for rate in found) <= 4 * min(rate.h for rate in found)
    fast = min(range(len(paces)), key=lambda one: (paces[one].step_s, -paces[one].bytes_per_s))
    goal = h * paces[fast].step_s + 50e6 / paces[fast].bytes_per_s
    least = max(rate.h for rate in found) / 4
    for pace, rate in zip(paces, found, strict=True):
        if h >= 10 and rate.h > least + 1:
            assert abs(rate.round_s - goal) <= pace.step_s * (1 + 1e-6)


@given(PACE, st.integers(10, 300), st.floats(1.0, 10.0))
@example(Pace(step_s=1.0, bytes_per_s=1e6), 12, 10.0)  # of a link that is too slow for a round whatever the bits
def test_a_faster_link_never_means_fewer_bits_nor_fewer_steps(slow: Pace, h: int, factor: float) -> None:
    """Against a fast node that stays as it is."""
    anchor, quick = Pace(step_s=0.1, bytes_per_s=1e9), Pace(step_s=slow.step_s, bytes_per_s=slow.bytes_per_s * factor)
    one, other = (choose([anchor, pace], h=h, parameters=50e6, bits=(8, 4, 2))[1] for pace in (slow, quick))
    assert other.bits >= one.bits
    assert steps_within(quick, h * 0.5, 50e6, 4) >= steps_within(slow, h * 0.5, 50e6, 4)


# --- Lighter terms for a node that has become slow, where rounds gain enough by them

USUAL = Pace(step_s=0.2, bytes_per_s=20e6)


def paces(slow: Pace) -> dict[str, Pace]:
    return {**{f"n{number}": USUAL for number in range(7)}, "n7": slow}


def test_a_link_that_is_eight_times_slower_is_sent_fewer_bits() -> None:
    slow = Pace(step_s=0.2, bytes_per_s=2.5e6)
    advice = lighter("n7", paces(slow), h=50, parameters=100e6, bits=8)
    assert advice is not None and (advice.node, advice.bits) == ("n7", 2) and 1 <= advice.h < 50
    assert advice.round_s == pytest.approx(50 * 0.2 + 40.0)
    assert advice.then_s == pytest.approx(advice.h * 0.2 + 10.0)
    assert "n7 at 2 bits" in advice.reason


def test_a_node_that_computes_slowly_does_fewer_steps() -> None:
    advice = lighter("n7", paces(Pace(step_s=0.6, bytes_per_s=20e6)), h=50, parameters=100e6, bits=4)
    assert advice is not None and advice.h < 50 and advice.then_s < 0.5 * advice.round_s


@pytest.mark.parametrize(
    ("node", "known", "overlap"),
    [
        ("n7", paces(Pace(step_s=0.21, bytes_per_s=18e6)), False),  # it gains little
        ("n7", paces(Pace(step_s=0.2, bytes_per_s=10e6)), True),  # it trains meanwhile
        ("nobody", paces(USUAL), False),  # it was never measured
        ("n0", {"n0": USUAL}, False),  # nor was any other node
    ],
)
def test_what_gains_nothing_is_not_worth_other_terms(node: str, known: dict[str, Pace], overlap: bool) -> None:
    assert lighter(node, known, h=50, parameters=100e6, bits=4, overlap=overlap) is None


# --- Predicted seconds of a sync


def test_the_worked_example_of_a_star() -> None:
    workers = [Worker(up=25e6, down=25e6, latency_s=0.04, payload=100e6)] * 16
    found = star(workers, Hub(in_bytes_per_s=125e6, out_bytes_per_s=125e6))
    assert (found.up_s, found.round_s) == pytest.approx((12.84, 25.68))
    both_ways = Prediction(name="", up_s=10.0, down_s=6.0)
    assert (both_ways.overlapped_s(8), both_ways.overlapped_s(1)) == (12.0, 16.0)
