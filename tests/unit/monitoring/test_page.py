"""The page at `/`: what it says, and that nothing a node says becomes more than text."""

import base64
import hashlib
import re
from collections.abc import Callable

import pytest
import statuses
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring.page import HEIGHT, MOST_NODES, WIDTH, Curve, curve, headers, page, policy
from farloop.monitoring.status import Status


def skeleton(document: str) -> list[tuple[str, tuple[str, ...]]]:
    """Elements and names of attributes: all that a text must not change."""
    return [(tag, tuple(attributes)) for tag, attributes in Page(document).elements]


def test_a_run_that_trains_is_told_in_full() -> None:
    """The words themselves are those of all views: test_status_summary.py."""
    reader = Page(page(statuses.status()))
    for part, words in {
        "": ("fjord-1b", "training", "1.24 G parameters in 4 fragments", "step 612", "of 2,000, 30.6%", "2.145",
             "5.545 at step 0", "16.2 GB up, 16.0 GB down", "737× less than fp32 data parallel", "81 commits"),
        "nodes": ("oslo", "8 × H100", "38.4 k", "97.4%", "2.513", "waits for fragment 2, window 21", "2m 13s ago"),
        "windows": ("waits for paris, quito", "closing"),
        "recent": ("wrong_run", "×12"),
    }.items():  # fmt: skip
        assert [each for each in words if each not in reader.parts[part]] == []
    assert reader.parts["recent"].index("2m 04s ago") < reader.parts["recent"].index("25m 10s ago")
    assert {attributes["href"] for tag, attributes in reader.elements if tag == "a"} == {"/metrics", "/status"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (statuses.waiting, ["waiting", "begins when its nodes are connected: 1 of 4 so far", "Not scored yet."]),
        (statuses.held, ["held", "until the alarm is resolved", "make free space on its file system"]),
        (statuses.holding, ["holding", "until you decide", "--rewind", "No node has joined yet."]),
        (statuses.finished, ["finished", "done; the model is model.safetensors", "None is open."]),
        (statuses.diverged, ["nan", "no finite number"]),
        (lambda: None, ["The run is being read."]),
    ],
)
def test_why_a_run_stands_is_said_in_words(make: Callable[[], Status | None], words: list[str]) -> None:
    text = Page(page(make())).text
    assert [each for each in words if each not in text] == []


def test_nothing_that_a_node_says_is_more_than_text() -> None:
    document = page(statuses.hostile())
    assert "<img" not in document and "\x1b" not in document and "\u202e" not in document
    assert Page(document).text.count("<img src=x onerror=alert(1)>?[2J?\"'&") >= 8, "it is shown, as what it is"

    def harmless(told: object) -> object:
        if isinstance(told, dict):
            return {key: harmless(value) for key, value in told.items()}
        if isinstance(told, list):
            return [harmless(value) for value in told]
        return "plain" if told == statuses.HOSTILE else told

    assert skeleton(document) == skeleton(page(harmless(statuses.hostile())))  # type: ignore[arg-type]


def test_the_policy_lets_run_what_the_page_holds_and_nothing_else() -> None:
    document = page(statuses.status())
    reader = Page(document)
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(reader.inline[tag].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy()
    assert policy().startswith("default-src 'none'; ") and "unsafe" not in policy() and "http" not in policy()
    assert ("Content-Security-Policy", policy()) in headers()
    for tag, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        assert tag == "a" or {attributes.get("src"), attributes.get("href")} <= {None, "data:,"}
    assert not re.search(r"https?://|@import|url\(", document), "it loads nothing"


def test_without_scripts_the_page_reloads_itself() -> None:
    head = page(statuses.status()).partition("</head>")[0]
    assert re.search(r'<noscript><meta http-equiv="refresh" content="\d+"></noscript>', head)


def test_what_the_script_brings_up_to_date_has_a_name_of_its_own_in_every_state() -> None:
    for make in statuses.ALL:
        live = [attributes["id"] for _, attributes in Page(page(make())).elements if "data-live" in attributes]
        assert live == ["head", "cards", "curve", "nodes", "windows", "recent", "foot"]


def test_a_thousand_nodes_are_shown_in_part_and_counted() -> None:
    document = page(statuses.status(nodes=[statuses.node(f"n{index}") for index in range(1000)]))
    assert Page(document).parts["nodes"].count("97.4%") == MOST_NODES
    assert "and 800 more nodes" in document and len(document) < 300_000


# --- the curve


def places(drawn: Curve | None) -> list[tuple[float, float]]:
    """Where the line goes through."""
    assert drawn is not None
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", drawn.path)]


LOSSES = st.one_of(st.none(), st.floats(-1e30, 1e30, allow_nan=False))


@given(st.lists(st.tuples(st.floats(0, 1e9), LOSSES), max_size=30), st.floats(1, 1e9))
def test_a_curve_stays_inside_its_picture(points: list[tuple[float, float | None]], last_step: float) -> None:
    drawn = curve(points, last_step=last_step)
    known = sum(loss is not None for _, loss in points)
    if known < 2:
        assert drawn is None
        return
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places(drawn)) and len(places(drawn)) == known


def test_a_lower_loss_is_lower_a_later_step_further_right_and_a_missing_one_breaks_the_line() -> None:
    drawn = curve([(0, 5.0), (1, 4.0), (2, None), (3, 3.0), (4, 2.0)], last_step=4)
    assert drawn is not None and drawn.path.count("M") == 2
    heights = [y for _, y in places(drawn)]
    assert places(drawn) == sorted(places(drawn)) and heights == sorted(heights)


def test_it_says_in_words_what_it_shows_and_its_numbers_are_round_and_enclose_the_losses() -> None:
    drawn = curve([(0, 5.5), (600, 2.1)], last_step=2000)
    assert drawn is not None and drawn.label == "validation loss from 5.500 to 2.100 at step 600 of 2,000"
    steep, flat = curve([(0, 5.43), (9, 1.27)], last_step=9), curve([(0, 5.43), (9, 5.43)], last_step=9)
    assert steep is not None and [number for _, number in steep.rules] == ["0", "2", "4", "6"]
    assert flat is not None and float(flat.rules[0][1]) <= 5.43 <= float(flat.rules[-1][1])
