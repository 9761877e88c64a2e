"""`farloop top`: what is on the screen, what its keys do, and that a coordinator that is gone does not take it down.

The screens in golden/ are written anew by `python tests/unit/cli/test_top.py`: look at what changed.
"""

import asyncio
import html
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "cases"))  # for the command above
import statuses
from textual.widgets import DataTable

from farloop.cli import top as command
from farloop.cli.top import DARK, LIGHT, ON_LIGHT, SORTS, Top
from farloop.config.exit_codes import CommandError
from farloop.monitoring.status import NodeStatus, RunStatus, Status
from farloop.monitoring.status_summary import cleaned

SIZES = ((80, 24), (120, 32))
NEVER_S = 3600.0
CELL = 12.2
"""Width of a letter in textual's pictures."""
Then = Callable[[Top, Any], Awaitable[None]]


def golden(size: tuple[int, int]) -> Path:
    return Path(__file__).with_name("golden") / f"top-{size[0]}x{size[1]}.txt"


def text_of(app: Top) -> list[str]:
    """The letters on the screen, row by row, as the picture has them."""
    width, height = app.size
    rows = [[" "] * width for _ in range(height)]
    pattern = r'<text[^>]* x="([\d.]+)"[^>]*clip-path="url\(#[^"]*-line-(\d+)\)"[^>]*>([^<]*)</text>'
    for x, row, letters in re.findall(pattern, app.export_screenshot()):
        for place, letter in enumerate(html.unescape(letters), round(float(x) / CELL)):
            if int(row) < height and place < width:
                rows[int(row)][place] = letter.replace("\xa0", " ")
    return ["".join(row).rstrip() for row in rows]


async def settled(app: Top, pilot: Any) -> None:
    """The footer is put together after the first picture, which a loaded machine may show for a while."""
    await pilot.pause()
    while not app.query("FooterKey"):
        await pilot.pause()
    await pilot.pause()


def test_the_statuses_of_these_tests_have_what_is_always_written() -> None:
    told = statuses.status()
    for shape, values in ((Status, told), (RunStatus, told["run"]), (NodeStatus, told["nodes"][0])):
        assert not shape.__required_keys__ - set(values)


def on_screen(
    told: Status, size: tuple[int, int] = (120, 32), then: Then | None = None, look: Callable[[], Status] | None = None
) -> list[str]:
    """The screen of a run, after `then`."""

    async def show() -> list[str]:
        app = Top(cleaned(told), look or (lambda: cleaned(told)), poll_s=NEVER_S)
        async with app.run_test(size=size) as pilot:
            await settled(app, pilot)
            if then is not None:
                await then(app, pilot)
                await pilot.pause()
            return text_of(app)

    return asyncio.run(show())


def keys(*pressed: str) -> Then:
    async def press(app: Top, pilot: Any) -> None:
        await pilot.press(*pressed)
        await pilot.pause()

    return press


def nodes_of(lines: list[str]) -> list[str]:
    """Names in the order of the table."""
    start = next(index for index, line in enumerate(lines) if line.strip().startswith("node"))
    return [line.split()[0] for line in lines[start + 1 : start + 5]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_screen_is_the_one_that_was_looked_at(size: tuple[int, int]) -> None:
    assert on_screen(statuses.status(), size) == golden(size).read_text().splitlines()


@pytest.mark.parametrize("make", statuses.ALL)
def test_run_nodes_and_keys_are_on_the_smallest_screen_in_every_state(make: Callable[[], Status]) -> None:
    lines = on_screen(make(), (80, 24))
    assert "<img" in lines[0] if make is statuses.hostile else "fjord-1b" in lines[0]
    assert make()["run"]["state"] in lines[0] and "q quit" in lines[-1]
    table = next(index for index, line in enumerate(lines) if line.strip().startswith("node ▲"))
    assert make is not statuses.held or any("! storage:" in line for line in lines[:table]), "alarms come first"


def test_the_newest_event_comes_first_and_the_rest_can_be_scrolled_to() -> None:
    many = [statuses.happening(100.0 - age, "delta", f"n{age}", "late", "came late") for age in range(64)]
    top = "\n".join(on_screen(statuses.status(recent=many)))
    assert "n63" in top and "n0 " not in top
    assert "n0 " in "\n".join(on_screen(statuses.status(recent=many), then=keys("tab", "end")))


@pytest.mark.parametrize(
    ("pressed", "width", "order"),
    [
        ("ss", 120, "n0 n3 n2 n1"),
        ("ssr", 120, "n1 n2 n3 n0"),
        ("sss", 120, "n3 n1 n0 n2"),  # without a loss comes last
        ("s" * len(SORTS) + "sS", 140, "n0 n1 n2 n3"),
    ],
)
def test_keys_sort_by_every_column_and_reverse_the_order(pressed: str, width: int, order: str) -> None:
    nodes = [statuses.node(f"n{i}", inner_steps=(i * 7) % 4, loss=None if i == 2 else 4.0 - i) for i in range(4)]
    assert nodes_of(on_screen(statuses.status(nodes=nodes), (width, 32), keys(*pressed))) == order.split()


@pytest.mark.parametrize(("clicks", "order"), [(1, "paris oslo quito tokyo"), (2, "tokyo quito oslo paris")])
def test_a_click_on_a_column_sorts_by_it_and_another_reverses_the_order(clicks: int, order: str) -> None:
    async def click(app: Top, pilot: Any) -> None:
        for _ in range(clicks):
            row = next(index for index, line in enumerate(text_of(app)) if line.strip().startswith("node"))
            await pilot.click(offset=(text_of(app)[row].index("loss"), row))
            await pilot.pause()

    assert nodes_of(on_screen(statuses.status(), then=click)) == order.split()


def test_the_chosen_node_is_told_in_full_and_stays_chosen_when_the_order_changes() -> None:
    async def choose(app: Top, pilot: Any) -> None:
        await pilot.press("down", "down", "r")
        app.show_status(cleaned(statuses.status()))

    lines = on_screen(statuses.status(), (80, 24), choose)
    assert nodes_of(lines) == ["tokyo", "quito", "paris", "oslo"]
    told = next(index for index, line in enumerate(lines) if "4 × A100" in line)
    assert lines[told].strip().startswith("quito") and lines[told + 2].strip() == "waits for fragment 2, window 21"


def test_a_coordinator_that_is_gone_leaves_the_last_picture_until_it_is_back() -> None:
    def look() -> Status:
        raise CommandError("no coordinator at http://far:9700/status: connection refused")

    async def lose_and_find(app: Top, pilot: Any) -> None:
        for turn in range(2):
            app._ask()
            await app.workers.wait_for_complete()
            await pilot.pause()
            if turn == 0:
                lines = text_of(app)
                assert lines[0].strip().startswith("no answer, this is the last one: no coordinator at http://far:9700")
                assert "fjord-1b" in lines[1] and "oslo" in "".join(lines)
                app._fetch_status = statuses.finished

    lines = on_screen(statuses.status(), then=lose_and_find, look=look)
    assert "fjord-1b" in lines[0] and "finished" in lines[0]


def test_a_pause_asks_no_more_until_it_is_over() -> None:
    asked: list[int] = []

    def look() -> Status:
        asked.append(1)
        return statuses.status()

    async def pause(app: Top, pilot: Any) -> None:
        await pilot.press("p")
        app._ask()
        assert not asked and "paused" in text_of(app)[0]
        await pilot.press("p")
        app._ask()
        await app.workers.wait_for_complete()
        assert asked

    on_screen(statuses.status(), then=pause, look=look)


def test_another_size_gets_other_columns() -> None:
    async def widen(app: Top, pilot: Any) -> None:
        assert len(app.query_one(DataTable).columns) == 6
        await pilot.resize_terminal(130, 30)

    assert "tokens/s" in "".join(on_screen(statuses.status(), (80, 24), widen))


def luminance(colour: Sequence[int]) -> float:
    """Relative, as WCAG 2.1 defines it."""
    shares = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("make", [statuses.status, statuses.held])
def test_every_colour_can_be_read_on_a_light_screen(make: Callable[[], Status]) -> None:
    async def picture() -> tuple[str, tuple[int, int, int]]:
        app = Top(cleaned(make()), statuses.status, is_light=True, poll_s=NEVER_S)
        async with app.run_test(size=(120, 32)) as pilot:
            await pilot.pause()
            header = app.query_one(DataTable).background_colors[1]  # the darkest that these letters stand on
            return app.export_screenshot(), header.rgb

    drawn, darkest = asyncio.run(picture())
    drawn_with = set(re.findall(r"fill: #([0-9a-f]{6})", drawn))
    ours = [ON_LIGHT.ansi_colors[index] for index in range(1, 7)]
    assert any("".join(f"{part:02x}" for part in colour) in drawn_with for colour in ours), "another theme drew it"
    for colour in ours:
        assert (luminance(darkest) + 0.05) / (luminance(colour) + 0.05) > 4.5, colour


def test_events_while_the_screen_closes_are_ignored_and_q_ends_it() -> None:
    async def watched() -> None:
        app = Top(statuses.status(), statuses.status, poll_s=NEVER_S)
        async with app.run_test() as pilot:
            await pilot.pause()
            table = app.query_one(DataTable)
            moved = DataTable.RowHighlighted(table, 0, table.ordered_rows[0].key)
            await table.remove()
            app.on_data_table_row_highlighted(moved)
            app.show_status(statuses.status())
            app.miss("no answer")
            await pilot.press("q")
            await pilot.pause()
            assert not app.is_running

    asyncio.run(watched())


def test_it_begins_as_light_or_dark_as_the_terminal_says_it_is() -> None:
    for told, light in (({}, False), ({"COLORFGBG": "15;0"}, False), ({"COLORFGBG": "0;default;15"}, True)):
        assert command.is_light(told) is light
    assert Top(statuses.status(), statuses.status, is_light=True).theme == LIGHT
    assert Top(statuses.status(), statuses.status).theme == DARK


if __name__ == "__main__":
    for wanted in SIZES:
        golden(wanted).write_text("\n".join(on_screen(statuses.status(), wanted)) + "\n")
