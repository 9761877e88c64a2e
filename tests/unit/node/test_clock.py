"""Covers `node/reports.py` (protocol J, Figures)."""

import pytest

from farloop.node.reports import TimeAccount


def test_nothing_is_counted_before_the_first_step_or_after_the_last() -> None:
    clock = TimeAccount()
    assert clock.activity is None and clock.compute_share(1000.0) == 1.0
    clock.turn("training", 1000.0)
    clock.turn("farloop", 1009.0)
    clock.turn(None, 1010.0)
    assert clock.compute_share(5000.0) == pytest.approx(0.9)


def test_a_wait_counts_while_it_lasts() -> None:
    """A node that stands still must not look busier and busier."""
    clock = TimeAccount()
    clock.turn("training", 0.0)
    clock.turn("blocked", 10.0)
    assert clock.compute_share(20.0) == pytest.approx(0.5)
    assert clock.seconds("blocked", 40.0) == 30.0
    assert clock.compute_share(40.0) == pytest.approx(0.25)


def test_farloop_s_own_time_waiting_and_evaluation_count_against_the_share() -> None:
    """J."""
    clock = TimeAccount()
    for activity, now in (("training", 0.0), ("farloop", 6.0), ("evaluation", 7.0), ("farloop", 107.0)):
        clock.turn(activity, now)  # type: ignore[arg-type]
    clock.turn("blocked", 108.0)
    clock.turn("training", 110.0)
    assert clock.compute_share(110.0) == pytest.approx(6 / 110)
    assert clock.seconds("evaluation", 110.0) == 100.0


def test_the_first_instant_has_a_share_of_one() -> None:
    clock = TimeAccount()
    clock.turn("farloop", 3.0)
    assert clock.compute_share(3.0) == 1.0
