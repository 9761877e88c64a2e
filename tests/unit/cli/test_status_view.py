"""The terminal view of a run: in every state, on every terminal.

The views in golden/ are written anew by `python tests/unit/cli/test_status_view.py`: look at what changed.
"""

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "cases"))  # for the command above
import statuses
from rich.console import Console, RenderableType
from statuses import LINK, MACHINE

from farloop.cli.status_view import draw, draw_network, fitting, sparkline
from farloop.monitoring.status import InventoryStatus, LinkStatus, MachineStatus, Status
from farloop.monitoring.status_summary import cleaned, view_of

GOLDEN = Path(__file__).with_name("golden")


def text_of(drawn: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(drawn)
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def picture(status: Status | None, width: int = 120, **options: Any) -> str:
    view = None if status is None else view_of(status)
    return text_of(draw(view, width=width, **({"max_nodes": 40} | options)), width)


def troubled() -> Status:
    """With alarms, a slow link and changed terms."""
    changed = ["h 30 → 60 from round 9 on", "codec_up q4 → q8 from windows f0:8, f1:7 on"]
    status = statuses.held()
    status["run"] |= {"revision": 2, "changed": changed}  # type: ignore[typeddict-item]
    status["watch"] = {"adapt": "advise", "why_not": "", "coordinator": "", "anomalies": [{
        "kind": "link slow", "node": "oslo", "factor": 7.94, "since_round": 41, "reason": "oslo sends long",
        "place": "send side", "action": "fewer bits or a longer H", "done": False, "why": "",
        "advice": {"bits": 2, "h": 43, "round_s": 50.0, "then_s": 18.6},
    }]}  # fmt: skip
    return status


# --- machines and links


def unsteady(source: str, target: str, why: str = "not steady: 1830 Mbit/s, then 715") -> LinkStatus:
    return cast(LinkStatus, {**LINK, "from": source, "to": target, "bytes_per_s": None, "age_s": None, "why": why})


def network(inventory: InventoryStatus | None, width: int = 120) -> str:
    status: Status = statuses.status()
    if inventory is not None:
        status["inventory"] = inventory
    return text_of(draw_network(cleaned(status)), width)


def some_machines() -> InventoryStatus:
    """One that dials out, and one each that others reach, do not reach and did not try to."""
    declared = [
        cast(MachineStatus, {**MACHINE, "name": name, "address": f"tcp://10.0.0.{n}:7800", "reachable": reachable})
        for n, (name, reachable) in enumerate({"paris": True, "quito": False, "tokyo": None}.items())
    ]
    declared[0]["memory_bytes"] = None
    links = [LINK, unsteady("coordinator", "oslo"), unsteady("oslo", "paris", "over before slow start")]
    return {"nodes": [MACHINE, *declared], "links": [*links, {**LINK, "to": "quito", "suspect": True}]}


VIEWS: dict[str, Callable[[], str]] = {
    "status-80": lambda: picture(statuses.status(), 80, link="50mbit/50ms", eta_s=82.0),
    "status-120": lambda: picture(statuses.status(), 120),
    "troubled-120": lambda: picture(troubled(), 120),
    "network-120": lambda: network(some_machines()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_the_one_that_was_looked_at(name: str) -> None:
    assert VIEWS[name]() == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [20, 24, 40, 60, None])
@pytest.mark.parametrize("make", statuses.ALL)
def test_every_state_fits_every_terminal_and_sends_it_no_controls(
    make: Callable[[], Status], width: int, height: int | None
) -> None:
    """What does not fit is left out: events first, then nodes, which are counted."""
    status = cleaned(make())
    text = picture(status, width, **(fitting(view_of(status), width=width, height=height) if height else {}))
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) < (height or math.inf)
    assert "\x1b" not in text and "\u202e" not in text
    assert not status["nodes"] or status["nodes"][0]["name"][:4] in text


@pytest.mark.parametrize("height", [24, 26, 28, 32])
@pytest.mark.parametrize("width", [80, 120])
def test_warnings_and_changed_terms_that_fold_leave_less_room_for_nodes(width: int, height: int) -> None:
    options = fitting(view_of(troubled()), width=width, height=height)
    assert len(picture(troubled(), width, **options).splitlines()) < height


def test_what_is_not_there_is_left_out_and_what_does_not_fit_is_counted() -> None:
    assert "waiting for the coordinator" in picture(None)
    assert "windows" not in picture(statuses.waiting(), 80) and "revision" not in picture(statuses.status())
    limited = statuses.status() | {"uplink": {"bytes_per_s": 250_000.0, "quiet": True, "held_s": 42.0}}
    assert "at most 2 Mbit/s in quiet hours  transfers have waited 42s for it" in picture(cast(Status, limited))
    assert "uplink" not in picture(statuses.status())
    text = picture(statuses.status(nodes=[statuses.node(f"n{index}") for index in range(12)]), max_nodes=5)
    assert "n4" in text and "n5" not in text and "and 7 more" in text
    assert "nothing is known yet" in network(None)


def test_a_wide_status_shows_the_overlap_that_a_node_chose() -> None:
    told = statuses.status()
    told["nodes"][0]["tau"] = 7
    assert "30 τ 7" in picture(told, 120) and "τ" not in picture(statuses.status(), 120)


def test_a_sparkline_keeps_both_ends_and_skips_what_is_not_a_number() -> None:
    assert sparkline([8.0, math.nan, 4.5, 1.0]) == "█▅▁"
    assert (sparkline([3.0, 3.0]), sparkline([3.0])) == ("▁▁", "")
    long = sparkline([float(value) for value in range(1000)], width=10)
    assert (len(long), long[0], long[-1]) == (10, "▁", "█")


@pytest.mark.parametrize("width", [80, 120])
def test_machines_and_links_fit_a_terminal(width: int) -> None:
    nodes = [cast(MachineStatus, {**MACHINE, "name": f"node-with-a-long-name-{index}"}) for index in range(9)]
    text = network({"nodes": nodes, "links": some_machines()["links"] * 3}, width)
    assert all(len(line) <= width for line in text.splitlines()) and "doubted" in text and "coordinator" in text


if __name__ == "__main__":
    for name, made in VIEWS.items():
        (GOLDEN / f"{name}.txt").write_text(made())
