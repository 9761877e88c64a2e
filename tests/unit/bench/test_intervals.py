"""Student's interval against the numbers of printed tables and a sum done by hand."""

import math

import pytest

from farloop.bench.comparison import mean_interval, student_t, student_within


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (10, 2.2281), (30, 2.0423)],
)
def test_the_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(0.95, freedom) == pytest.approx(quantile, abs=5e-5)


def test_many_samples_make_it_the_normal_quantile() -> None:
    assert student_t(0.95, 100_000) == pytest.approx(1.95996, abs=1e-4)


@pytest.mark.parametrize("t", [0.1, 1.0, 3.0])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t: float) -> None:
    assert student_within(t, 1) == pytest.approx(2 / math.pi * math.atan(t))
    assert student_within(t, 2) == pytest.approx(t / math.sqrt(2 + t * t))


def test_the_interval_of_three_numbers_by_hand() -> None:
    """Mean 2, standard deviation 1, error 1/√3."""
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half_width == pytest.approx(4.302653 / math.sqrt(3))
    assert (interval.low, interval.high) == (2.0 - interval.half_width, 2.0 + interval.half_width)


def test_equal_samples_leave_no_doubt_and_a_single_one_leaves_all() -> None:
    assert mean_interval([0.5, 0.5]).half_width == 0.0
    assert mean_interval([0.5]).half_width == math.inf


def test_without_samples_there_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no samples"):
        mean_interval([])


@pytest.mark.parametrize(("confidence", "freedom"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_impossible_questions_are_refused(confidence: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_t(confidence, freedom)
