"""How the parameters of a spelling are read and written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.quant.codec import BETA, float_text, number, numbers, one_of, whole


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_written_so_that_it_reads_back(value: float) -> None:
    assert float(float_text(value)) == value


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1"), (0.7, "0.7"), (1e30, "1e+30"), (1 / 3, "0.3333333333333333"), (0.0, "0")]
)
def test_short_numbers_are_written_short(value: float, text: str) -> None:
    assert float_text(value) == text


@given(st.floats(0.5, 2.0))
def test_a_number_in_its_range_is_read(value: float) -> None:
    assert number(0.5, 2.0)(repr(value)) == value


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-inf", "0.49", "2.01", "1,2", "1e400", "0x1"])
def test_anything_else_is_told_what_would_be_right(text: str) -> None:
    with pytest.raises(ValueError, match=r"^a number from 0\.5 to 2$"):
        number(0.5, 2.0)(text)


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=20))
def test_several_numbers_stand_between_slashes(values: list[float]) -> None:
    assert numbers(0.001, 1000.0)("/".join(map(float_text, values))) == tuple(values)


@pytest.mark.parametrize("text", ["", "/", "1/", "1//2", "1/nan"])
def test_one_bad_number_of_several_is_enough(text: str) -> None:
    with pytest.raises(ValueError, match="a number from 0 to 9"):
        numbers(0, 9)(text)


@given(st.integers(1, 4096))
def test_a_whole_number_in_its_range_is_read(value: int) -> None:
    assert whole(1, 4096)(str(value)) == value


@pytest.mark.parametrize("text", ["", "0", "4097", "1.0", "-1", "+1", "1e3", "x", "1_0", " 1", "9" * 5000])
def test_what_is_no_whole_number_of_the_range_is_told_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"^a whole number from 1 to 4096$"):
        whole(1, 4096)(text)


def test_a_word_is_one_of_several() -> None:
    read = one_of("stochastic", "nearest")
    assert read("nearest") == "nearest"
    with pytest.raises(ValueError, match=r"^stochastic or nearest$"):
        read("nearer")


def test_error_feedback_keeps_a_share() -> None:
    assert [BETA.read(text) for text in ("0", "0.95", "1")] == [0.0, 0.95, 1.0]
    for text in ("-0.1", "1.1", "nan"):
        with pytest.raises(ValueError, match="a number from 0 to 1"):
            BETA.read(text)
    assert math.copysign(1.0, BETA.read("0")) == 1.0
