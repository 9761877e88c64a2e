"""The picture of `farloop status` in every state of a run, on every terminal."""

import io
from collections.abc import Callable

import pytest
import statuses
from rich.console import Console

from farloop.cli.status_view import draw, fitting
from farloop.monitoring.status import Status
from farloop.monitoring.status_summary import cleaned


def picture(status: Status | None, width: int, **options: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(draw(status, width=width, **({"max_nodes": 40} | options)))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", statuses.ALL)
def test_no_state_overflows_a_terminal_or_sends_it_an_order(make: Callable[[], Status], width: int) -> None:
    text = picture(cleaned(make()), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text and "\u202e" not in text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (statuses.waiting, ["waiting", "begins when its nodes are there: 1 of 4 so far", "● ready"]),
        (statuses.held, ["held", "nothing is committed until the alarm is mended", "! storage: the run is held"]),
        (statuses.holding, ["holding", "until you decide", "! history: the run is held", "0 nodes"]),
        (statuses.finished, ["2 nodes took", "finished", "done; the model is model.safetensors", "✓ finished"]),
        (statuses.diverged, ["nan", "no finite number"]),
        (lambda: statuses.status(nodes=[]), ["no node is connected, so nothing moves"]),
    ],
)
def test_eighty_columns_are_enough_to_say_why_a_run_stands(make: Callable[[], Status], words: list[str]) -> None:
    text = " ".join(picture(make(), 80).split())
    assert [each for each in words if each not in text] == []


def test_a_run_that_trains_needs_no_explanation_and_windows_that_nobody_is_expected_in_are_left_out() -> None:
    trains = picture(statuses.status(), 80).splitlines()
    assert not trains[3].strip(), "nothing between progress and facts"
    assert "windows" in "".join(trains) and "windows" not in picture(statuses.waiting(), 80)


def test_alarms_stand_above_everything_that_is_less_urgent_and_happenings_below() -> None:
    text = picture(statuses.held(), 80)
    assert text.index("! storage") < text.index("validation loss") < text.index("oslo") < text.index("lately")
    assert "the window had closed before the delta" in text and "10m 40s ago" in text


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [20, 24, 40, 60])
@pytest.mark.parametrize("make", statuses.ALL)
def test_the_living_picture_fits_the_terminal(make: Callable[[], Status], width: int, height: int) -> None:
    """What does not fit is left out: happenings first, then nodes, which are counted."""
    status = cleaned(make())
    lines = picture(status, width, **fitting(status, width=width, height=height)).splitlines()
    assert len(lines) < height
    assert not status["nodes"] or status["nodes"][0]["name"][:4] in "\n".join(lines)


def test_a_high_terminal_shows_all_nodes_and_what_happened() -> None:
    text = picture(statuses.status(), 80, **fitting(statuses.status(), width=80, height=60))
    assert "tokyo" in text and "25m 10s ago" in text


def test_who_has_become_slow_stands_below_the_alarms_with_what_was_done() -> None:
    status = statuses.status()
    status["alarms"] = ["storage: no room"]
    status["watch"] = {"adapt": "advise", "why_not": "", "coordinator": "", "anomalies": [{
        "kind": "link slow", "node": "oslo", "factor": 7.94, "since_round": 41, "reason": "oslo sends long",
        "place": "send side", "action": "fewer bits or a longer H", "done": False, "why": "",
        "advice": {"bits": 2, "h": 43, "round_s": 50.0, "then_s": 18.6},
    }]}  # fmt: skip
    text = " ".join(picture(status, 160).split())
    assert "~ oslo: link slow 7.9 times since round 41 (send side); advised: fewer bits or a longer H, " in text
    assert "2 bits and H 43: rounds 50 s → 18.6 s" in text
    assert text.index("storage: no room") < text.index("~ oslo")
