"""Every impossible choice of an optimizer is answered with one sentence."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.spec import OuterKind
from farloop.algo.validation import check_inner, check_outer

TERMS = plain_terms(method="diloco", steps=100, h=10, weight_decay=0.1, batch_sequences=4, sequence_tokens=16)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("nesterov", {}),
        ("nesterov", {"outer_momentum": 0.0, "outer_restart": 10}),
        ("sgd", {"outer_momentum": 0.0}),
        ("co2", {"outer_clip": 1.0}),
        ("delayed-nesterov", {"outer_buffer": 4, "outer_spread": 0.25}),
    ],
)
def test_what_is_possible_passes(kind: OuterKind, changes: dict[str, Any]) -> None:
    check_outer(dataclasses.replace(TERMS, **changes), kind)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("nesterov", {"outer_lr": float("nan")}, "outer_lr is nan"),
        ("nesterov", {"weight_decay": -0.1}, "weight_decay is -0.1"),
        ("nesterov", {"outer_momentum": 1.0}, r"outer_momentum is 1.0; it must be in \[0, 1\)"),
        ("sgd", {}, "outer_momentum is 0.9; diloco takes 0 alone"),
        ("nesterov", {"outer_clip": 1.0}, "outer_clip is for the optimizer co2, which diloco has not"),
        ("co2", {"outer_clip": 0.0}, "outer_clip is 0.0; it must be above 0"),
        ("co2", {"outer_clip": -1.0}, "outer_clip is -1.0"),
        ("co2", {"outer_buffer": 4}, "outer_buffer is for the optimizer delayed-nesterov"),
        ("nesterov", {"outer_spread": 0.1}, "outer_spread is for the optimizer delayed-nesterov"),
        ("delayed-nesterov", {"outer_buffer": 0}, "outer_buffer is 0; the least is 1"),
        ("delayed-nesterov", {"outer_buffer": 4, "outer_spread": 0.3}, "with outer_buffer = 4 it is 0 to 0.25"),
        ("nesterov", {"outer_restart": -1}, "outer_restart is -1; the least is 0"),
    ],
)
def test_what_is_not_is_named(kind: OuterKind, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_outer(dataclasses.replace(TERMS, **changes), kind)


def test_an_inner_optimizer_is_one_that_exists_where_there_is_one() -> None:
    check_inner(dataclasses.replace(TERMS, inner_optimizer="muon"), has_inner=True)
    check_inner(TERMS, has_inner=False)
    with pytest.raises(ValueError, match="there is no inner_optimizer 'adam'; there are adamw, muon"):
        check_inner(dataclasses.replace(TERMS, inner_optimizer="adam"), has_inner=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="diloco has no inner optimizer"):
        check_inner(dataclasses.replace(TERMS, inner_optimizer="muon"), has_inner=False)
