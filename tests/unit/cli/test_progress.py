"""Progress of a run: the live view, and lines where there is no terminal."""

import io
import math
from typing import Any

import pytest
import statuses
from rich.console import Console

from farloop.cli.progress import LINE_EVERY_S, Display, Pace, PlainLines, progress_console
from farloop.monitoring.status import Status
from farloop.monitoring.status_summary import view_of


def status(t: float = 30.0, **changes: Any) -> Status:
    """A run of 2,000 steps at 20 a second, of two nodes."""
    run = {"started_s": t, "uptime_s": t + 2, **changes.pop("run", {})}
    nodes = [statuses.node("paris"), statuses.node("tokyo")]
    known = {"nodes": nodes, "position": 20.0 * t, "evaluations": [statuses.score(0)]}
    return statuses.status(run=run, **(known | changes))


def test_the_time_left_follows_the_recent_speed_and_begins_anew_with_another_coordinator() -> None:
    pace = Pace()
    assert pace.update(status(0.0)) == math.inf
    assert pace.update(status(10.0)) == pytest.approx(1800 / 20)
    slow = [status(10.0 + t, position=200.0 + 2 * t) for t in range(1, 100)]
    assert [pace.update(later) for later in slow][-1] == pytest.approx((2000 - 398) / 2, rel=0.05)
    assert pace.update(status(51.0, run={"uptime_s": 1.0})) == math.inf


def test_plain_lines_come_every_ten_seconds_and_with_every_fact() -> None:
    lines = PlainLines()
    first = lines.update(view_of(status(0.0)), math.inf)
    assert [line.split("  ", 1)[1].split(" ")[0] for line in first] == ["run", "node", "node", "validation", "step"]
    assert lines.update(view_of(status(LINE_EVERY_S - 1)), 90.0) == []
    assert len(lines.update(view_of(status(LINE_EVERY_S)), 90.0)) == 1
    changes = {
        "evaluations": [statuses.score(0), {**statuses.score(7, 3.0), "position": 220.0}],
        "nodes": [
            statuses.node("paris", state="waiting"),
            statuses.node("tokyo", connected=False, reason="the connection closed"),
        ],
        "alarms": ["tokyo is away"],
    }
    assert lines.update(view_of(status(11.0, **changes)), 90.0) == [
        "0:00:11  node tokyo is away: the connection closed",
        "0:00:11  validation loss 3.000 at step 220 (first 5.545 at step 0)",
        "0:00:11  ALARM: tokyo is away",
    ]
    assert lines.update(view_of(status(12.0, **changes)), 90.0) == []
    (line,) = lines.update(view_of(status(13.0, **changes)), 90.0, last=True)
    assert line.startswith("0:00:13  step 260/2,000 (13.0%)")


def test_off_a_terminal_the_display_prints_plain_lines_without_control_codes() -> None:
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=False, width=60)) as display:
        display.update(status(100.0))
        display.update(status(110.0))
    assert "\x1b" not in out.getvalue()
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("0:01:50  step 2,000/2,000 (100%), loss 2.513, 2 nodes, 8.20 GB up, 8.00 GB down, ")
    assert last.endswith("less than fp32 data parallel, 0.0s left")


def test_on_a_terminal_the_last_picture_stays() -> None:
    drawn = io.BytesIO()
    file = io.TextIOWrapper(drawn, encoding="utf-8")
    with Display(Console(file=file, force_terminal=True, width=120, height=40), link="50mbit/50ms") as display:
        display.update(status(100.0, run={"state": "finished"}))
    file.flush()
    assert "finished" in drawn.getvalue().decode() and "50mbit/50ms" in drawn.getvalue().decode()
    assert progress_console(json=True).stderr and not progress_console(json=False).stderr
