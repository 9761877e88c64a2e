"""Numbers as people read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring.units import (
    count_text,
    duration_text,
    factor_text,
    loss_text,
    percent_text,
    plural,
    size_text,
    speed_text,
    thinned,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (834, "834 B"), (999, "999 B"), (1200, "1.20 kB"), (12_345_678, "12.3 MB"), (999_996, "1.00 MB"),
     (2_900_000_000, "2.90 GB"), (99_960_000, "100 MB"), (4.2e15, "4,200 TB")],
)  # fmt: skip
def test_bytes_have_three_digits_and_a_decimal_unit(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (1240, "1,240"), (9_994, "9,994"), (12_400, "12.4 k"), (3_100_000, "3.10 M")]
)
def test_counts_are_exact_while_short(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (0.42, "0.4s"), (9.96, "10s"), (42, "42s"), (59.6, "1m 00s"), (82, "1m 22s"), (7500, "2h 05m"),
     (273_600, "3d 04h"),
     (float("inf"), "–"), (-1, "0.0s")],
)  # fmt: skip
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0%"), (0.974, "97.4%"), (0.9999, "99.9%"), (1, "100%"), (0.005, "0.5%")]
)
def test_a_share_below_one_never_reads_as_a_hundred(share: float, text: str) -> None:
    assert percent_text(share) == text


@pytest.mark.parametrize(
    ("factor", "text"), [(226.4, "226×"), (12.4, "12.4×"), (1.03, "1.03×"), (1234, "1,234×"), (float("inf"), "–")]
)
def test_factors_have_three_digits(factor: float, text: str) -> None:
    assert factor_text(factor) == text


def test_missing_numbers_are_a_dash() -> None:
    assert loss_text(None) == "–"
    assert speed_text(0) == "–"
    assert loss_text(2.21349) == "2.213"


def test_one_thing_has_no_s() -> None:
    assert (plural(1, "node"), plural(3, "node"), plural(0, "node")) == ("1 node", "3 nodes", "0 nodes")


@given(st.floats(0, 1e15))
def test_a_size_reads_back_within_half_a_percent(num_bytes: float) -> None:
    match = re.fullmatch(r"([\d,.]+) (B|kB|MB|GB|TB)", size_text(num_bytes))
    assert match is not None
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[match[2]]
    assert float(match[1].replace(",", "")) * scale == pytest.approx(num_bytes, rel=0.0051, abs=0.5)


@given(st.floats(0, 1e7), st.floats(0, 8e6))
def test_a_size_never_needs_more_than_seven_columns(first: float, second: float) -> None:
    assert len(size_text(first * 1e6)) <= 7
    assert len(duration_text(second)) <= 7


@given(st.lists(st.integers(), min_size=1), st.integers(2, 20))
def test_a_long_curve_is_thinned_out_with_both_ends_kept(points: list[int], most: int) -> None:
    kept = thinned(points, most)
    assert len(kept) == min(len(points), most) and (kept[0], kept[-1]) == (points[0], points[-1])
