"""The page at `/`: what it says, and that nothing a node says becomes more than text."""

import base64
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
import statuses
from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring.page import HEIGHT, MOST_NODES, WIDTH, Curve, curve, headers, page, policy
from farloop.monitoring.status import Status

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """A page as a browser without scripts has it: elements with their attributes, and the text that is read."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, str] = {}
        self.parts: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(document)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag = self._open[-1][0] if self._open else ""
        if tag in ("style", "script"):
            self.inline[tag] = data
            return
        for _, name in self._open:
            self.parts[name] = self.parts.get(name, "") + data + "\n"

    @property
    def text(self) -> str:
        return self.parts[""]


def skeleton(document: str) -> list[tuple[str, tuple[str, ...]]]:
    """Elements and names of attributes: all that a text must not change."""
    return [(tag, tuple(attributes)) for tag, attributes in Reader(document).elements]


def test_a_run_that_trains_is_told_in_full() -> None:
    reader = Reader(page(statuses.status()))
    for words in ("fjord-1b", "training", "streaming · q4 up, q4 down · H 30 · 1.24 G parameters in 4 fragments",
                  "step 612", "of 2,000, 30.6%", "2.145", "5.545 at step 0", "16.2 GB up, 16.0 GB down",
                  "737× less than fp32 data parallel", "81 commits, round 20"):  # fmt: skip
        assert words in reader.text, words
    for words in (
        "oslo",
        "8 × H100",
        "38.4 k",
        "97.4%",
        "2.513",
        "waits for fragment 2, window 21",
        "away",
        "2m 13s ago",
    ):
        assert words in reader.parts["nodes"], words
    assert "waits for paris, quito" in reader.parts["windows"] and "closing" in reader.parts["windows"]
    assert "wrong_run" in reader.parts["recent"] and "×12" in reader.parts["recent"]
    assert reader.parts["recent"].index("2m 04s ago") < reader.parts["recent"].index("25m 10s ago")
    assert {attributes["href"] for tag, attributes in reader.elements if tag == "a"} == {"/metrics", "/status"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (statuses.waiting, ["waiting", "begins when its nodes are connected: 1 of 4 so far", "Not scored yet."]),
        (
            statuses.held,
            [
                "held",
                "nothing is committed until the alarm is resolved",
                "make free space on its file system",
            ],
        ),
        (statuses.holding, ["holding", "until you decide", "--rewind", "No node has joined yet."]),
        (statuses.adopting, ["holding", "until the state of the nodes has arrived", "it waits for node oslo"]),
        (statuses.finished, ["finished", "done; the model is model.safetensors", "None is open."]),
        (statuses.diverged, ["nan", "no finite number"]),
    ],
)
def test_why_a_run_stands_is_said_in_words(make: Callable[[], Status], words: list[str]) -> None:
    text = Reader(page(make())).text
    assert [each for each in words if each not in text] == []


def test_before_there_is_a_status_the_page_says_so() -> None:
    assert "The run is being read." in Reader(page(None)).text


def test_nothing_that_a_node_says_is_more_than_text() -> None:
    evil, tame = statuses.hostile(), statuses.hostile()
    document = page(evil)
    assert "<img" not in document and "\x1b" not in document and "\u202e" not in document
    shown = Reader(document)
    assert shown.text.count("<img src=x onerror=alert(1)>?[2J?\"'&") >= 8, "it is shown, as what it is"

    def harmless(told: object) -> object:
        if isinstance(told, dict):
            return {key: harmless(value) for key, value in told.items()}
        if isinstance(told, list):
            return [harmless(value) for value in told]
        return "plain" if told == statuses.HOSTILE else told

    assert skeleton(document) == skeleton(page(harmless(tame)))  # type: ignore[arg-type]


@given(st.text(max_size=60))
def test_no_text_changes_the_shape_of_the_page(text: str) -> None:
    nodes = [statuses.node(f"a{text}", device=text, detail=f"b{text}")]
    told = statuses.status(nodes=nodes, alarms=[text], recent=[], windows=[statuses.window(0, [f"a{text}"], [])])
    plain = statuses.status(
        nodes=[statuses.node("a", detail="b")], alarms=["c"], recent=[], windows=[statuses.window(0, ["a"], [])]
    )
    assert skeleton(page(told)) == skeleton(page(plain))


def test_the_policy_lets_run_what_the_page_holds_and_nothing_else() -> None:
    reader = Reader(page(statuses.status()))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(reader.inline[tag].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy()
    assert policy().startswith("default-src 'none'; ") and "unsafe" not in policy() and "http" not in policy()
    assert ("Content-Security-Policy", policy()) in headers()
    for tag, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)


def test_the_page_loads_nothing() -> None:
    document = page(statuses.status())
    reader = Reader(document)
    sources = {attributes.get(name) for tag, attributes in reader.elements for name in ("src", "href") if tag != "a"}
    assert sources <= {None, "data:,"}
    assert not re.search(r"https?://|@import|url\(", document)


def test_without_scripts_the_page_reloads_itself() -> None:
    head = page(statuses.status()).partition("</head>")[0]
    assert re.search(r'<noscript><meta http-equiv="refresh" content="\d+"></noscript>', head)


def test_what_the_script_brings_up_to_date_has_a_name_of_its_own_in_every_state() -> None:
    def live(status: Status) -> list[str | None]:
        elements = Reader(page(status)).elements
        return [attributes["id"] for _, attributes in elements if "data-live" in attributes]

    names = live(statuses.status())
    assert names == ["head", "cards", "curve", "nodes", "windows", "recent", "foot"]
    assert all(live(make()) == names for make in statuses.ALL)


def test_a_thousand_nodes_are_shown_in_part_and_counted() -> None:
    told = statuses.status(nodes=[statuses.node(f"n{index}") for index in range(1000)])
    document = page(told)
    assert Reader(document).parts["nodes"].count("97.4%") == MOST_NODES
    assert "and 800 more nodes" in document
    assert len(document) < 300_000


# --- the curve

losses = st.one_of(st.none(), st.floats(-1e30, 1e30, allow_nan=False))


def places(drawn: Curve | None) -> list[tuple[float, float]]:
    """Where the line goes through."""
    assert drawn is not None
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", drawn.path)]


@given(st.lists(st.tuples(st.floats(0, 1e9), losses), max_size=30), st.floats(1, 1e9))
def test_a_curve_stays_inside_its_picture(points: list[tuple[float, float | None]], last_step: float) -> None:
    drawn = curve(points, last_step=last_step)
    if sum(loss is not None for _, loss in points) < 2:
        assert drawn is None
        return
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places(drawn))
    assert len(places(drawn)) == sum(loss is not None for _, loss in points)


def test_a_lower_loss_is_lower_a_later_step_further_right_and_a_missing_one_breaks_the_line() -> None:
    drawn = curve([(0, 5.0), (1, 4.0), (2, None), (3, 3.0), (4, 2.0)], last_step=4)
    assert drawn is not None and drawn.path.count("M") == 2
    assert places(drawn) == sorted(places(drawn)) and sorted(y for _, y in places(drawn)) == [
        y for _, y in places(drawn)
    ]


def test_it_says_in_words_what_it_shows() -> None:
    drawn = curve([(0, 5.5), (600, 2.1)], last_step=2000)
    assert drawn is not None and drawn.label == "validation loss from 5.500 to 2.100 at step 600 of 2,000"


def test_the_numbers_beside_it_are_round_and_enclose_the_losses() -> None:
    for lowest, expected in ((1.27, ["0", "2", "4", "6"]), (5.43, None)):
        drawn = curve([(0, 5.43), (9, lowest)], last_step=9)
        assert drawn is not None
        numbers = [number for _, number in drawn.rules]
        assert numbers == expected or float(numbers[0]) <= 5.43 <= float(numbers[-1])
