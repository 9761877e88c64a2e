"""Lighter terms for a node that has become slow, where rounds gain enough by them."""

import pytest

from farloop.coordinator.routing.sync_plan import Pace, lighter

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


def test_what_gains_little_is_not_worth_other_terms() -> None:
    assert lighter("n7", paces(Pace(step_s=0.21, bytes_per_s=18e6)), h=50, parameters=100e6, bits=4) is None
    hidden = Pace(step_s=0.2, bytes_per_s=10e6)
    assert lighter("n7", paces(hidden), h=50, parameters=100e6, bits=4, overlap=True) is None, "it trains meanwhile"


def test_who_was_never_measured_is_given_nothing() -> None:
    assert lighter("nobody", paces(USUAL), h=50, parameters=100e6, bits=4) is None
    assert lighter("n0", {"n0": USUAL}, h=50, parameters=100e6, bits=4) is None
