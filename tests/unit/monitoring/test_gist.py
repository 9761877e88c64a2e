"""What a status comes to."""

import math
from collections.abc import Callable

import pytest
import statuses
from hypothesis import given
from hypothesis import strategies as st

from farloop.config.logs import pairs_of
from farloop.monitoring.status import Status
from farloop.monitoring.status_summary import (
    cleaned,
    ended_well,
    finite_or_none,
    named,
    not_finite,
    printable,
    standing,
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (statuses.status, ""),
        (statuses.waiting, "begins when its nodes are there: 1 of 4 so far"),
        (lambda: statuses.status(nodes=[], run={"state": "waiting"}), "0 of 4 so far; start one: farloop node"),
        (lambda: statuses.status(nodes=[]), "no node is connected, so nothing moves"),
        (statuses.held, "until the alarm is mended"),
        (statuses.holding, "until you decide"),
        (statuses.finished, "model.safetensors in the coordinator's state folder"),
    ],
)
def test_a_run_that_does_not_move_says_why_and_one_that_does_says_nothing(
    make: Callable[[], Status], words: str
) -> None:
    told = standing(make())
    assert words in told and bool(told) == bool(words)


def test_a_coordinator_of_before_that_does_not_say_how_many_nodes_it_waits_for_is_understood() -> None:
    told = statuses.waiting()
    del told["run"]["nodes"]  # type: ignore[misc]
    assert standing(told).endswith("1 so far")


def test_only_a_node_that_left_a_finished_run_has_ended_well() -> None:
    over, under_way = statuses.finished(), statuses.status()
    assert all(ended_well(node, over) for node in over["nodes"])
    assert not any(ended_well(node, under_way) for node in under_way["nodes"])
    lost = statuses.node("lost", state="training", connected=False)
    assert not ended_well(lost, over)


@pytest.mark.parametrize(
    ("value", "kept", "word"),
    [(2.5, 2.5, ""), (None, None, ""), (math.nan, None, "nan"), (math.inf, None, "inf"), (-math.inf, None, "-inf")],
)
def test_a_loss_that_is_no_number_is_null_and_a_word(value: float | None, kept: float | None, word: str) -> None:
    assert (finite_or_none(value), not_finite(value)) == (kept, word)


@given(st.text())
def test_what_may_go_to_a_terminal_has_no_control_characters(told: str) -> None:
    shown = printable(told)
    assert shown.isprintable() and len(shown) == len(told)


@given(st.text(max_size=40))
def test_a_name_in_a_log_line_is_one_field_and_no_more(name: str) -> None:
    assert pairs_of(f"node name={named(name)} state=ready") == {"event": "node", "name": name, "state": "ready"}


def test_an_ordinary_name_is_not_quoted() -> None:
    assert named("oslo-2.site_a") == "oslo-2.site_a"


def test_everything_in_a_status_is_cleaned_and_nothing_else_changed() -> None:
    told = cleaned(statuses.hostile())
    assert "\x1b" not in str(told) and told["nodes"][0]["name"].startswith("<img")
    assert cleaned(statuses.status()) == statuses.status()
