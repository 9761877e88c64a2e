"""Covers `monitoring/plain_json.py`."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring.plain_json import dumps

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


@given(VALUES)
def test_what_is_written_is_json_and_only_numbers_that_are_none_are_lost(value: object) -> None:
    text = dumps(value)
    json.loads(text, parse_constant=refuse)
    if "NaN" not in repr(value).replace("nan", "NaN") and "inf" not in repr(value):
        assert json.loads(text) == value


def test_a_loss_that_is_no_number_is_null_and_the_rest_stays() -> None:
    status = {"nodes": [{"loss": math.nan, "tokens": 3}, {"loss": 2.5}], "worst": (-math.inf, 1)}
    assert json.loads(dumps(status)) == {"nodes": [{"loss": None, "tokens": 3}, {"loss": 2.5}], "worst": [None, 1]}


def test_what_json_has_no_form_of_is_an_error() -> None:
    with pytest.raises(TypeError):
        dumps({"x": object()})
