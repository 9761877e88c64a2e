"""JSON that every reader takes."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring.status import dumps, finite_or_none, not_finite

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


@given(VALUES)
def test_the_document_is_json_and_loses_only_numbers_that_are_not_finite(value: object) -> None:
    text = dumps(value)
    json.loads(text, parse_constant=refuse)
    if "nan" not in repr(value).lower() and "inf" not in repr(value):
        assert json.loads(text) == value


def test_numbers_that_are_not_finite_are_null_and_the_rest_stays() -> None:
    status = {"nodes": [{"loss": math.nan, "tokens": 3}, {"loss": 2.5}], "worst": (-math.inf, 1)}
    assert json.loads(dumps(status)) == {"nodes": [{"loss": None, "tokens": 3}, {"loss": 2.5}], "worst": [None, 1]}
    with pytest.raises(TypeError):
        dumps({"x": object()})


@pytest.mark.parametrize(
    ("value", "kept", "word"),
    [(2.5, 2.5, ""), (None, None, ""), (math.nan, None, "nan"), (math.inf, None, "inf"), (-math.inf, None, "-inf")],
)
def test_a_diverged_loss_is_null_and_a_word(value: float | None, kept: float | None, word: str) -> None:
    assert (finite_or_none(value), not_finite(value)) == (kept, word)
