"""The summary of a run and its report page, from its final status and its metrics."""

import io
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import statuses
from command_line import error_line, farloop
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from farloop.cli.report import MAX_POINTS, SERIES, loss_figure, traffic_figure, write_report
from farloop.cli.run_results import History, Summary, Traffic, read_history, summarise, summary_table
from farloop.config.exit_codes import ExitCode
from farloop.coordinator.observe.event_log import Totals
from farloop.monitoring.status import Status, dumps
from farloop.monitoring.status_summary import view_of
from farloop.monitoring.units import size_text

DIGESTS = ["9f3a1c77d02be481", "03bb5519ee7ac020"]
PARAMETERS = 1 << 20


def progress(node: str, t: float = 1.0, steps: int = 0, loss: float | None = None, sent: int = 0) -> dict[str, Any]:
    return {"event": "progress", "t": t, "node": node, "position": steps, "inner_steps": steps, "tokens": steps * 10,
            "loss": loss, "lost_steps": 0, "bytes_up": sent, "bytes_down": sent, "bytes_state": 0,
            "bytes_by_kind": {"delta": sent, "update": sent, "snapshot": 0, "probe": 0, "control": 0}}  # fmt: skip


def written(path: Path, events: list[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return path


# --- the summary


def summary_of(events: list[dict[str, Any]], *, h: int = 10, second: list[str] = DIGESTS) -> Summary:
    known = {
        "device": "cpu", "state": "finished", "reason": "", "inner_steps": 0, "tokens": 0, "loss": None,
        "tokens_per_s": 0.0, "blocked_s": 0.0, "lost_steps": 0, "bytes_up": 0, "bytes_down": 0, "bytes_state": 0,
    }  # fmt: skip
    nodes = [
        {**known, "name": "a", "compute_share": 0.9, "digests": DIGESTS},
        {**known, "name": "b", "compute_share": 0.7, "digests": second},
    ]
    run = {
        "fragments": 3, "method": "diloco", "codec_up": "q4", "codec_down": "q4", "parameters": PARAMETERS,
        "started_s": 60.0, "h": h, "steps": 1000, "state": "finished",
    }  # fmt: skip
    totals = Totals(PARAMETERS)
    for event in events:
        totals.update(event["node"], event)
    status = {"run": run, "nodes": nodes, "outer_steps": 3, "commits": 9, "digests": DIGESTS, "position": 1000}
    return summarise(cast(Status, status | {"evaluations": [], "totals": totals.status({})}))


def test_bytes_and_steps_are_sums_over_nodes_and_over_their_starts() -> None:
    kinds = {"probe": 0, "control": 0}
    events = [
        progress(node, steps=steps)
        | {"bytes_up": up, "bytes_down": 2 * up + state, "bytes_state": state}
        | {"bytes_by_kind": {"delta": up, "update": 2 * up, "snapshot": state, **kinds}}
        for node, steps, up, state in (("a", 10, 100, 5), ("b", 20, 300, 6), ("a", 4, 10, 7))
    ]
    came = summary_of(events)
    assert (came["bytes_up"], came["bytes_down"], came["bytes_state"], came["bytes_total"]) == (410, 838, 18, 1248)
    assert came["bytes_by_kind"] == {"delta": 410, "update": 820, "snapshot": 18, "probe": 0, "control": 0}
    assert (came["inner_steps"], came["tokens"]) == (34, 34 * 10)
    assert came["digests_equal"] and came["compute_share"] == pytest.approx(0.8), "the mean of the nodes"
    assert not summary_of(events, second=["ab"])["digests_equal"]


def test_losses_stand_at_the_tokens_of_all_starts_of_all_nodes(tmp_path: Path) -> None:
    scored = {"event": "evaluation", "t": 2.0, "loss": 4.0, "position": 9}
    events = [progress("a", steps=10), progress("b", steps=20), scored, progress("a", steps=4, loss=3.0), scored]
    history = read_history(written(tmp_path / "metrics.jsonl", events))
    assert (history.evaluations, history.losses) == ([(300, 4.0), (340, 4.0)], {"a": [(340, 3.0)]})


def test_the_reduction_is_fp32_data_parallel_over_all_bytes() -> None:
    """Both ways through the star: 8 bytes a parameter for every inner step of every node."""
    kinds = {"delta": 900, "update": 2800, "snapshot": 100_000, "probe": 20_000, "control": 300}
    moved = {"bytes_up": 20_900, "bytes_down": 103_100, "bytes_state": 120_000, "bytes_by_kind": kinds}
    came = summary_of([progress(node, steps=30) | moved for node in "ab"])
    assert came["bytes_by_kind"] == {kind: 2 * count for kind, count in kinds.items()}
    assert came["bytes_total"] == sum(came["bytes_by_kind"].values()) == came["bytes_up"] + came["bytes_down"]
    assert came["bytes_data_parallel_fp32"] == 8 * PARAMETERS * 60
    assert came["reduction"] == 8 * PARAMETERS * 60 / came["bytes_total"]


def test_steps_that_were_lost_or_done_twice_do_not_count_for_the_reduction() -> None:
    """A step that three fragments lost, and those that a node did after the run was wound back."""
    came = summary_of(
        [
            progress("a", steps=90, sent=1) | {"lost_steps": 30},
            progress("b", steps=950, sent=1),
            progress("b", steps=400, sent=1) | {"lost_steps": 4},
        ]
    )
    assert (came["inner_steps"], came["merged_steps"]) == (1440, (90 - 10) + 1000)
    assert came["bytes_data_parallel_fp32"] == 8 * PARAMETERS * came["merged_steps"]


STEPS = st.integers(0, 3000)


@given(
    inner=st.lists(STEPS, min_size=1, max_size=4), lost=STEPS, part=st.none() | st.integers(1, PARAMETERS),
    steps=st.integers(1, 2000), fragments=st.integers(1, 5), moved=st.integers(0, 1 << 40), commits=st.integers(0, 2),
)  # fmt: skip
def test_status_and_summary_have_the_same_figures(
    inner: list[int], lost: int, part: int | None, steps: int, fragments: int, moved: int, commits: int
) -> None:
    """Also where nodes repeat steps, lose some, and hold a part of the model."""
    nodes = [statuses.node(f"n{k}", inner_steps=done, bytes_up=moved, bytes_down=7) for k, done in enumerate(inner)]
    nodes[0]["lost_steps"] = lost
    if part is not None:
        nodes[0]["part"] = {"stages": [0], "fragments": [0], "parameters": part}
    run = {"steps": steps, "fragments": fragments, "parameters": PARAMETERS}
    told = statuses.status(nodes=nodes, commits=commits, run=run)
    came = summarise(told)
    view = view_of(told)
    assert (view.reduction, view.total) == (came["reduction"], size_text(came["bytes_total"]))
    merged = [min(done, steps) for done in inner]
    merged[0] = max(0, min(inner[0] - -(-lost // fragments), steps))
    assert came["merged_steps"] == sum(merged)
    first = PARAMETERS if part is None else part
    assert came["bytes_data_parallel_fp32"] == 8 * (first * merged[0] + PARAMETERS * sum(merged[1:]))


# --- the report


def metrics(folder: Path, tail: str = "") -> Path:
    events = [{"event": "evaluation", "t": 0.0, "loss": 5.5, "position": 0}]
    for second in range(1, 40):
        loss, sent = 5.5 - second * 0.08, second * 9000
        events += [progress(node, second, second * 5, loss, sent) for node in ("paris", "tokyo")]
    events += [
        {"event": "node", "t": 12.0, "name": "tokyo", "state": "away", "reason": "the <link> was cut"},
        {"event": "commit", "t": 13.0, "fragment": 1, "version": 4, "round": 4, "merged": ["paris"],
         "drops": [["tokyo", "the window had closed"]], "update_bytes": 100, "norm": 0.1},
        {"event": "evaluation", "t": 39.0, "loss": 2.5, "position": 195},
        {"event": "something of a later version", "t": 39.0},
    ]  # fmt: skip
    return written(folder / "metrics.jsonl", events, tail)


def summary(**changes: Any) -> Summary:
    known: dict[str, Any] = {
        "val_loss_start": 5.5, "val_loss_end": 2.5, "tokens": 3900, "inner_steps": 390, "outer_steps": 6, "nodes": 2,
        "method": "streaming", "codec_up": "q4", "codec_down": "q4", "bytes_up": 702_000, "bytes_down": 702_000,
        "bytes_data_parallel_fp32": 312_000_000, "bytes_state": 800_000, "reduction": 222.2, "merged_steps": 390,
        "bytes_total": 2_204_000, "bytes_by_kind": {"delta": 700_000, "update": 700_000, "snapshot": 780_000,
        "probe": 20_000, "control": 4_000}, "digests_equal": True,
        "compute_share": 0.947, "wall_s": 82.0, "digests": DIGESTS, "parameters": 100_000, "h": 30, "steps": 195,
        "seed": 1, "command": "farloop demo --link '50mbit/50ms' && echo", "machine": "2 cores", "scored_at": 195,
        "node_table": [
            {"name": "paris", "device": "cpu", "inner_steps": 195, "compute_share": 0.95, "digests": DIGESTS},
            {"name": "tokyo", "device": "cpu", "reason": "the <link> was cut", "digests": DIGESTS},
        ],
    }  # fmt: skip
    return cast(Summary, known | changes)


def page_of(folder: Path, told: Summary) -> str:
    write_report(folder / "report.html", told, metrics(folder), "three <nodes>")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    return page_of(folder, summary())


def test_the_report_is_one_well_formed_page_with_two_drawings_and_same_every_time(html: str, tmp_path: Path) -> None:
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert [tag for tag, _ in page.elements].count("svg") == 2 and len(ids) == len(set(ids))
    for words in ("three <nodes>", "222×", "2.20 MB instead of 312 MB", "2.500", "94.7%", "identical", DIGESTS[1],
                  "the <link> was cut", "delta for window 4 of fragment 1 dropped: the window had closed",
                  "farloop demo --link '50mbit/50ms' && echo", "1m 22s"):  # fmt: skip
        assert words in page.text
    assert page_of(tmp_path, summary()) == html


def test_a_report_has_the_loss_of_data_parallel_where_it_was_measured_and_one_line_of_bytes(tmp_path: Path) -> None:
    told = {"baseline": "2.412 after the same steps, measured in x", "baseline_loss": 2.412}
    unmeasured = {"baseline": "not measured; to compare: farloop demo"}
    pages = [page_of(tmp_path, summary(**more)) for more in (told, unmeasured, {})]
    measured, without, of_data_parallel = (Page(page).text for page in pages)
    assert "5.500 at the start, data parallel 2.412" in measured and told["baseline"] in measured
    assert "data parallel at its end" in pages[0] and "data parallel at its end" not in pages[1]
    assert "data parallel not measured" in without and "to compare: farloop demo" in without
    assert "data parallel's loss" not in of_data_parallel
    assert "up and down" in pages[0] and "702 kB up and 702 kB down" in measured, "drawn apart they covered each other"


def test_the_report_loads_nothing(html: str) -> None:
    addresses = set(re.findall(r"https?://[^\s\"'<>)]*", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<script|<link|<img|<iframe|@import|\bsrc=|\bon\w+=", html)
    wanted = set(re.findall(r'href="([^"]*)"', html)) | set(re.findall(r"url\(([^)]*)\)", html))
    assert wanted and wanted <= {f"#{name}" for name in re.findall(r'\bid="([^"]*)"', html)}


def test_the_drawings_take_all_their_colours_from_the_page(html: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    used = set(re.findall(r"var\((--\w+)\)", drawings))
    assert {"--ink", "--muted", "--grid", "--s1", "--good"} <= used <= set(re.findall(r"(--\w+):", html))
    assert not re.search(r"#fe[0-9a-f]{2}dc", html) and "prefers-color-scheme: dark" in html
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= {"#000000"}


def test_a_report_says_which_digest_differs_and_what_was_not_measured(tmp_path: Path) -> None:
    nodes = [{"name": "paris", "digests": [DIGESTS[0], "deadbeefdeadbeef"]}, {"name": "tokyo", "digests": DIGESTS[:1]}]
    page = page_of(tmp_path, summary(node_table=nodes, digests_equal=False))
    assert page.count("✓ equal") == 2 and "different" in page and "identical" not in page
    assert "✗ <code>deadbeefdeadbeef</code>" in page and "✗ <code>missing</code>" in page
    empty = summary(node_table=[], digests=[], digests_equal=None)
    write_report(tmp_path / "x.html", empty, tmp_path / "none.jsonl", "x")
    text = Page((tmp_path / "x.html").read_text()).text
    assert text.count("The run left no measurements to draw.") == 2 and "not compared" in text


def test_a_report_of_a_state_folder_is_that_of_its_last_status_and_of_a_running_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    assert "there is no such folder" in error_line("report", str(state))
    state.mkdir()
    assert f"no journal; give the coordinator's state_dir as DIR; try {state}" in error_line(
        "report", str(tmp_path), code=ExitCode.STORAGE
    )
    assert error_line("status", "--state", str(tmp_path)).endswith(f"; try {state}")
    (state / "journal-000000000001.log").touch()
    assert "no coordinator runs on" in error_line("report", str(state))
    metrics(state)
    nodes = [statuses.node(name, digests=DIGESTS, state="finished") for name in ("paris", "tokyo")]
    ended = statuses.status(nodes=nodes, digests=DIGESTS, run={"state": "finished", "steps": 1800})
    (state / "status.json").write_text(dumps(ended))
    told = json.loads(farloop("report", str(state), "--json").stdout)
    assert (told["digests_equal"], told["val_loss_end"]) == (True, ended["evaluations"][-1]["loss"])
    farloop("report", str(state))
    page = Page((tmp_path / "report.html").read_text())
    assert "finished" in page.text and "tokyo" in page.text and "machine" not in page.text
    assert [tag for tag, _ in page.elements].count("svg") == 2
    monkeypatch.setattr("farloop.cli.status.asked", lambda folder: statuses.status(nodes=[]))
    farloop("report", str(state), "--out", str(tmp_path / "now.html"))
    assert "training at step" in Page((tmp_path / "now.html").read_text()).text


def test_rotated_metrics_are_read_first_and_in_their_order(tmp_path: Path) -> None:
    """Also through a link, as a demo leaves one beside its report."""
    folder, link = tmp_path / "state", tmp_path / "metrics.jsonl"
    folder.mkdir()
    counts = {"metrics-000009.jsonl": 500, "metrics-000010.jsonl": 900, "metrics.jsonl": 1000}
    for number, (name, count) in enumerate(counts.items()):
        written(folder / name, [progress("a", number, 10 * number, 3.0, count)])
    (folder / "metrics-old.jsonl").write_text("not one of them\n")
    link.symlink_to(folder / "metrics.jsonl")
    for path in (folder / "metrics.jsonl", link):
        history = read_history(path)
        assert [moment.bytes_up for moment in history.traffic] == [500, 900, 1000] and history.unreadable == 0


def test_damaged_metrics_are_left_out_of_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They ended the report in a traceback, after the run was done."""
    path = metrics(tmp_path, tail='\0\xff\n{"event": "progress", "t": NaN}\n' + "[" * 100_000 + "\n[1]\n")
    assert read_history(path).unreadable == 4 and len(read_history(path).traffic) == 78
    path.rename(tmp_path / "metrics-000001.jsonl")
    path.mkdir()
    assert len(read_history(path).traffic) == 78 and "the report lacks its events" in caplog.text
    path.rmdir()
    path.symlink_to(path)
    assert len(read_history(path).traffic) == 78


def test_curves_share_the_axis_of_all_tokens_and_counters_of_a_restarted_node_continue(tmp_path: Path) -> None:
    history = read_history(metrics(tmp_path, tail='{"event": "prog'))
    assert (history.unreadable, len(history.traffic)) == (1, 78), "a half-written last line is skipped"
    assert history.losses["paris"][-1][0] == 39 * 50 + 38 * 50
    assert history.losses["tokyo"][-1][0] == 2 * 39 * 50
    assert history.evaluations == [(0, 5.5), (3900, 2.5)]
    events = [progress("a", 1, 10, 3.0, 500), progress("a", 2, 20, 3.0, 900), progress("a", 3, 5, None, 100)]
    history = read_history(written(tmp_path / "restarted.jsonl", events))
    assert [(moment.bytes_up, moment.inner_steps) for moment in history.traffic] == [(500, 10), (900, 20), (1000, 25)]
    assert len(history.losses["a"]) == 2


def moved(t: int, count: int) -> Traffic:
    return Traffic(t=t, bytes_up=count, bytes_down=count, bytes_state=0, inner_steps=t)


def test_long_runs_and_many_nodes_stay_small_and_named() -> None:
    losses = {f"n{node}": [(step, 3.0 + step % 7) for step in range(20_000)] for node in range(SERIES + 1)}
    history = History(losses=losses, traffic=[moved(t, t * 10) for t in range(1, 20_000)])
    loss, traffic = loss_figure(history), traffic_figure(history, 100_000, 50.0)
    assert f"training, {SERIES + 1} nodes" in loss and len(loss) < (SERIES + 1) * 2 * MAX_POINTS * 40
    assert "hours" in traffic and "snapshots" not in traffic
    few = History(traffic=[moved(t, t * 4000) for t in range(1, 9)])
    assert "100× fewer bytes" in traffic_figure(few, 100_000, 100.0)
    assert "fewer bytes" not in traffic_figure(few, 1000, 1.0), "there is no gap to draw"


def test_the_table_at_the_end_of_a_run_has_the_figures() -> None:
    figures = (
        "5.500 at step 0 → 2.500 at step 195",
        "702 kB up, 702 kB down",
        "312 MB",
        "222× fewer bytes",
        "94.7%",
        "1m 22s",
    )
    for equal, words in (
        (True, "yes, bit for bit (2 fragments"),
        (False, "NO, digests differ"),
        (None, "not compared"),
    ):
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(summary_table(summary(digests_equal=equal)))
        text = console.export_text()
        assert all(figure in text for figure in (*figures, words))
