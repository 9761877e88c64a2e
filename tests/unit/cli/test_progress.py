"""The live display: what a status looks like on a terminal and as plain lines."""

import io
import math
from typing import Any, cast

import pytest
from rich.console import Console

from farloop.cli.progress import LINE_EVERY_S, Display, Pace, PlainLines, progress_console
from farloop.cli.status_view import draw, sparkline
from farloop.monitoring.status import NodeStatus, Status, WindowState, WindowStatus
from farloop.monitoring.status_summary import reduction, sync_text


def node(name: str, **changes: Any) -> NodeStatus:
    known: dict[str, Any] = {
        "name": name, "state": "training", "connected": True, "incarnation": 1, "device": "cpu", "position": 600.0,
        "round": 20, "inner_steps": 600, "tokens": 614_400, "loss": 2.5, "tokens_per_s": 8400.0, "compute_share": 0.974,
        "blocked_s": 1.0, "lost_steps": 0, "bytes_up": 4_100_000, "bytes_down": 4_000_000, "bytes_state": 3_250_000,
        "detail": "", "reason": "", "last_heard_s": 0.2,
    }  # fmt: skip
    return cast(NodeStatus, known | changes)


def window(fragment: int, arrived: list[str], state: WindowState = "open") -> WindowStatus:
    both = ["paris", "tokyo"]
    return WindowStatus(
        fragment=fragment, window=21, round=20, state=state, expected=both, arrived=arrived, merged=both
    )


def status(t: float = 30.0, *, nodes: list[NodeStatus] | None = None, **changes: Any) -> Status:
    """A run of 2,000 steps that does 20 a second."""
    run_changes = changes.pop("run", {})
    known: dict[str, Any] = {
        "run": {
            "name": "demo", "fingerprint": "ab12", "method": "streaming", "codec_up": "q4", "codec_down": "q8",
            "steps": 2000, "h": 30, "tau": 5, "mix": 0.5, "fragments": 2, "parameters": 812_544, "state": "training",
            "epoch": 1, "revision": 0, "changed": [], "started_s": t, "uptime_s": t + 2, **run_changes,
        },
        "position": 20.0 * t, "round": 20, "versions": [20, 20], "outer_steps": 20, "commits": 40,
        "nodes": [node("paris"), node("tokyo")] if nodes is None else nodes,
        "windows": [window(0, ["paris"]), window(1, [])],
        "evaluations": [{"loss": 5.545, "position": 0.0, "outer_steps": 0, "seconds": 0.0}], "alarms": [],
    }  # fmt: skip
    return cast(Status, known | changes)


def picture(value: Status | None, width: int = 120, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(draw(value, width=width, **({"max_nodes": 20} | options)))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_picture_says_everything_that_matters_and_never_overflows(width: int) -> None:
    scored = [{"loss": loss, "position": 0.0, "outer_steps": 0, "seconds": 0.0} for loss in (5.545, 3.0, 2.213)]
    text = picture(status(evaluations=scored), width, link="50mbit/50ms", eta_s=82.0)
    for words in ("demo", "streaming", "q4 up, q8 down", "H 30", "2 nodes", "step 600 of 2,000", "30.0%", "1m 22s left",
                  "5.545 → 2.213", "█▃▁", "8.20 MB up, 8.00 MB down", "f0 ●○", "f1 ○○", "paris", "97.4%"):  # fmt: skip
        assert words in text
    assert all(len(line) <= width for line in text.splitlines())


def test_the_picture_before_the_first_status_says_whom_it_waits_for() -> None:
    assert "waiting for the coordinator" in picture(None)


def test_a_node_that_is_away_shows_why_and_alarms_stand_below() -> None:
    gone = node("tokyo", connected=False, reason="the connection closed")
    text = picture(status(nodes=[node("paris"), gone], alarms=["tokyo is away"]))
    assert "○ away" in text
    assert "the connection closed" in text
    assert "! tokyo is away" in text
    assert "1 node " in text


def test_terms_that_changed_while_the_run_went_on_are_said() -> None:
    changed = ["h 30 → 60 from round 9 on", "codec_up q4 → q8 from windows f0:8, f1:7 on"]
    text = picture(status(run={"revision": 2, "changed": changed}))
    assert "revision         2  h 30 → 60 from round 9 on; codec_up q4 → q8 from windows f0:8, f1:7 on" in text
    assert "revision" not in picture(status())


def test_nodes_that_do_not_fit_are_counted() -> None:
    text = picture(status(nodes=[node(f"n{index}") for index in range(12)]), max_nodes=5)
    assert "n4" in text
    assert "n5" not in text
    assert "and 7 more" in text


def test_nothing_is_claimed_before_bytes_were_sent() -> None:
    fresh = status(0.0, nodes=[node("paris", inner_steps=0, bytes_up=0, bytes_down=0, loss=None, tokens_per_s=0.0)])
    assert reduction(fresh) == 0
    assert "data parallel" not in picture(fresh)


def test_the_reduction_is_data_parallel_bytes_over_sent_bytes() -> None:
    sent = 2 * (4_100_000 + 4_000_000)
    assert reduction(status()) == pytest.approx(8 * 812_544 * 1200 / sent)


@pytest.mark.parametrize(
    ("changes", "windows", "words"),
    [
        ({"detail": "waits for window 4 of fragment 2"}, [], "waits for window 4 of fragment 2"),
        ({"state": "joining", "detail": "the first snapshot"}, [], "waits for the first snapshot"),
        ({}, [window(0, ["paris"]), window(1, ["paris", "tokyo"], "final")], "f0 sent, 1 to come"),
        ({}, [window(0, ["tokyo", "paris"], "closing")], "f0 closing"),
        ({}, [window(0, ["tokyo"])], ""),
        ({"connected": False, "last_heard_s": 42.0}, [], "not heard for 42s"),
    ],
)
def test_a_node_says_what_it_exchanges_now(changes: dict[str, Any], windows: list[WindowStatus], words: str) -> None:
    assert sync_text(node("paris", **changes), windows) == words


def test_a_sparkline_keeps_both_ends_and_skips_what_is_not_a_number() -> None:
    assert sparkline([8.0, math.nan, 4.5, 1.0]) == "█▅▁"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([3.0]) == ""
    long = sparkline([float(value) for value in range(1000)], width=10)
    assert (len(long), long[0], long[-1]) == (10, "▁", "█")


def test_the_time_left_follows_the_recent_speed() -> None:
    pace = Pace()
    assert pace.update(status(0.0)) == math.inf
    assert pace.update(status(10.0)) == pytest.approx(1800 / 20)
    slow = [status(10.0 + t, position=200.0 + 2 * t) for t in range(1, 100)]
    assert [pace.update(later) for later in slow][-1] == pytest.approx((2000 - 398) / 2, rel=0.05)


def test_a_restarted_coordinator_starts_the_reckoning_anew() -> None:
    pace = Pace()
    pace.update(status(0.0))
    pace.update(status(50.0))
    assert pace.update(status(51.0, run={"uptime_s": 1.0})) == math.inf


def test_plain_lines_come_every_ten_seconds_and_with_every_fact() -> None:
    lines = PlainLines()
    first = lines.update(status(0.0), math.inf)
    assert [line.split("  ", 1)[1].split(" ")[0] for line in first] == ["run", "node", "node", "validation", "step"]
    assert lines.update(status(LINE_EVERY_S - 1), 90.0) == []
    assert len(lines.update(status(LINE_EVERY_S), 90.0)) == 1

    scores = [*status()["evaluations"], {"loss": 3.0, "position": 220.0, "outer_steps": 7, "seconds": 11.0}]
    away = [node("paris", state="waiting"), node("tokyo", connected=False, reason="the connection closed")]
    news = lines.update(status(11.0, nodes=away, evaluations=scores, alarms=["tokyo is away"]), 90.0)
    assert news == [
        "0:00:11  node tokyo is away: the connection closed",
        "0:00:11  validation loss 3.000 at step 220 (first 5.545)",
        "0:00:11  ALARM: tokyo is away",
    ]
    assert lines.update(status(12.0, nodes=away, evaluations=scores, alarms=["tokyo is away"]), 90.0) == []


def test_off_a_terminal_the_display_prints_plain_lines_without_control_codes() -> None:
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=False, width=60)) as display:
        display.update(status(100.0))
        display.update(status(110.0))
    text = out.getvalue()
    assert "\x1b" not in text
    last = text.splitlines()[-1]
    assert last.startswith("0:01:50  step 2,000/2,000 (100%), loss 2.500, 2 nodes, 8.20 MB up, 8.00 MB down, ")
    assert last.endswith("less than fp32 data parallel, 0.0s left")


def test_on_a_terminal_the_last_picture_stays() -> None:
    out = io.StringIO()
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), force_terminal=True, width=120, height=40)
    with Display(console, link="50mbit/50ms") as display:
        display.update(status(100.0, run={"state": "finished"}))
    console.file.flush()
    out = console.file.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "finished" in out
    assert "50mbit/50ms" in out


def test_progress_goes_to_standard_error_when_standard_output_is_json() -> None:
    assert progress_console(json=True).stderr
    assert not progress_console(json=False).stderr
