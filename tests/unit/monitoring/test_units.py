"""Numbers as people and as programs read them."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring import units
from farloop.monitoring.status import dumps, finite_or_none, not_finite
from farloop.monitoring.units import (
    count_text,
    duration_text,
    factor_text,
    loss_text,
    percent_text,
    rate_text,
    size_text,
    speed_text,
    thinned,
)

TEXTS: dict[Callable[..., str], dict[float | None, str]] = {
    size_text: {0: "0 B", 834: "834 B", 999: "999 B", 1200: "1.20 kB", 12_345_678: "12.3 MB", 999_996: "1.00 MB",
                2_900_000_000: "2.90 GB", 99_960_000: "100 MB", 4.2e15: "4,200 TB"},
    count_text: {0: "0", 1240: "1,240", 9_994: "9,994", 12_400: "12.4 k", 3_100_000: "3.10 M"},
    duration_text: {0: "0.0s", 0.42: "0.4s", 9.96: "10s", 42: "42s", 59.6: "1m 00s", 82: "1m 22s", 7500: "2h 05m",
                    273_600: "3d 04h", math.inf: "–", -1: "0.0s"},
    percent_text: {0: "0%", 0.974: "97.4%", 0.9999: "99.9%", 1: "100%", 0.005: "0.5%"},
    factor_text: {226.4: "226×", 12.4: "12.4×", 1.03: "1.03×", 1234: "1,234×", math.inf: "–"},
    rate_text: {2e8: "200 Mbit/s", 25e9: "25 Gbit/s", 64e3: "64 kbit/s", 1e12: "1 Tbit/s", 999.9e6: "1 Gbit/s"},
    loss_text: {None: "–", 2.21349: "2.213"},
    speed_text: {0: "–"},
}  # fmt: skip


@pytest.mark.parametrize("write", TEXTS, ids=lambda write: write.__name__)
def test_a_number_has_three_digits_and_a_unit(write: Callable[..., str]) -> None:
    assert {number: write(number) for number in TEXTS[write]} == TEXTS[write]


@given(st.floats(0, 1e15), st.floats(0, 8e6))
def test_a_size_reads_back_within_half_a_percent_and_texts_are_short(num_bytes: float, seconds: float) -> None:
    match = re.fullmatch(r"([\d,.]+) (B|kB|MB|GB|TB)", size_text(num_bytes))
    assert match is not None
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[match[2]]
    assert float(match[1].replace(",", "")) * scale == pytest.approx(num_bytes, rel=0.0051, abs=0.5)
    assert len(size_text(num_bytes / 100)) <= 7 and len(duration_text(seconds)) <= 7


@given(st.lists(st.integers(), min_size=1), st.integers(2, 20))
def test_a_long_curve_is_thinned_out_with_both_ends_kept(points: list[int], most: int) -> None:
    kept = thinned(points, most)
    assert len(kept) == min(len(points), most) and (kept[0], kept[-1]) == (points[0], points[-1])


def test_rules_of_fields_are_read_once_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Pair(units.Checked):
        left: units.Count
        right: units.Positive

    Pair(1, 1.0)
    monkeypatch.delattr(units, "get_type_hints")
    with pytest.raises(ValueError, match=r"^right: expected a number above 0, got 0\.0$"):
        Pair(1, 0.0)


# --- JSON that every reader takes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(VALUES)
def test_the_document_is_json_and_loses_only_numbers_that_are_not_finite(value: object) -> None:
    text = dumps(value)
    json.loads(text, parse_constant=pytest.fail)
    if "nan" not in repr(value).lower() and "inf" not in repr(value):
        assert json.loads(text) == value


def test_numbers_that_are_not_finite_are_null_and_the_rest_stays() -> None:
    status = {"nodes": [{"loss": math.nan, "tokens": 3}, {"loss": 2.5}], "worst": (-math.inf, 1)}
    assert json.loads(dumps(status)) == {"nodes": [{"loss": None, "tokens": 3}, {"loss": 2.5}], "worst": [None, 1]}
    with pytest.raises(TypeError):
        dumps({"x": object()})
    words = {2.5: (2.5, ""), None: (None, ""), math.inf: (None, "inf"), -math.inf: (None, "-inf")}
    assert {value: (finite_or_none(value), not_finite(value)) for value in words} == words
    assert (finite_or_none(math.nan), not_finite(math.nan)) == (None, "nan")
