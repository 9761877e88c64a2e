"""The report page and what it is made of, from a small synthetic run."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from farloop.cli.report import MAX_POINTS, SERIES, loss_figure, traffic_figure, write_report
from farloop.cli.run_results import History, Summary, Traffic, read_history, summary_table
from farloop.monitoring.status import BytesStatus

DIGESTS = ["9f3a1c77d02be481", "03bb5519ee7ac020"]
PARAMETERS = 100_000


def progress(node: str, t: float, steps: int, loss: float | None, sent: int) -> dict[str, Any]:
    return {"event": "progress", "t": t, "node": node, "position": steps, "inner_steps": steps, "tokens": steps * 10,
            "loss": loss, "bytes_up": sent, "bytes_down": sent, "bytes_state": 400_000}  # fmt: skip


def metrics(folder: Path, tail: str = "") -> Path:
    events: list[dict[str, Any]] = [{"event": "evaluation", "t": 0.0, "loss": 5.5, "position": 0, "tokens": 0}]
    for second in range(1, 40):
        events += [
            progress(node, second, second * 5, 5.5 - second * 0.08, second * 9000) for node in ("paris", "tokyo")
        ]
    events += [
        {"event": "node", "t": 12.0, "name": "tokyo", "state": "away", "reason": "the <link> was cut"},
        {"event": "commit", "t": 13.0, "fragment": 1, "version": 4, "round": 4, "merged": ["paris"],
         "drops": [["tokyo", "the window had closed"]], "update_bytes": 100, "norm": 0.1},
        {"event": "evaluation", "t": 39.0, "loss": 2.5, "position": 195, "tokens": 3900},
        {"event": "something of a later version", "t": 39.0},
    ]  # fmt: skip
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return path


def summary(**changes: Any) -> Summary:
    known: dict[str, Any] = {
        "val_loss_start": 5.5, "val_loss_end": 2.5, "tokens": 3900, "inner_steps": 390, "outer_steps": 6, "nodes": 2,
        "method": "streaming", "codec_up": "q4", "codec_down": "q4", "bytes_up": 702_000, "bytes_down": 702_000,
        "bytes_data_parallel_fp32": 312_000_000, "bytes_state": 800_000, "reduction": 222.2, "merged_steps": 390,
        "bytes_total": 2_204_000, "bytes_by_kind": {"delta": 700_000, "update": 700_000, "snapshot": 780_000,
        "probe": 20_000, "control": 4_000}, "digests_equal": True,
        "compute_share": 0.947, "wall_s": 82.0, "digests": DIGESTS, "parameters": PARAMETERS, "h": 30, "steps": 195,
        "seed": 1, "command": "farloop demo --link '50mbit/50ms' && echo", "machine": "2 cores", "node_table": [
            {"name": "paris", "device": "cpu", "inner_steps": 195, "compute_share": 0.95, "digests": DIGESTS},
            {"name": "tokyo", "device": "cpu", "reason": "the <link> was cut", "digests": DIGESTS},
        ],
    }  # fmt: skip
    return cast(Summary, known | changes)


class Page(HTMLParser):
    """Checks that elements nest, and keeps tags, ids and text."""

    VOID = frozenset({"meta", "path", "use", "rect", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    return write_report(folder / "out", summary(), metrics(folder), "three <nodes>").read_text(encoding="utf-8")


def test_the_report_is_one_well_formed_page_with_two_drawings(html: str) -> None:
    page = Page(html)
    assert page.tags.count("svg") == 2
    assert len(page.ids) == len(set(page.ids))
    for words in ("three <nodes>", "222×", "2.20 MB instead of 312 MB", "2.500", "94.7%", "identical", DIGESTS[1],
                  "the <link> was cut", "delta for window 4 of fragment 1 dropped: the window had closed",
                  "farloop demo --link '50mbit/50ms' && echo", "1m 22s"):  # fmt: skip
        assert words in page.text


def test_the_report_loads_nothing(html: str) -> None:
    addresses = set(re.findall(r"https?://[^\s\"'<>)]*", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<script|<link|<img|<iframe|@import|\bsrc=|\bon\w+=", html)
    wanted = set(re.findall(r'href="([^"]*)"', html)) | set(re.findall(r"url\(([^)]*)\)", html))
    assert wanted and wanted <= {f"#{name}" for name in re.findall(r'\bid="([^"]*)"', html)}


def test_the_drawings_take_all_their_colours_from_the_page(html: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    used = set(re.findall(r"var\((--\w+)\)", drawings))
    assert {"--ink", "--muted", "--grid", "--s1", "--good"} <= used
    assert used <= set(re.findall(r"(--\w+):", html))
    assert not re.search(r"#fe[0-9a-f]{2}dc", html)
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= {"#000000"}
    assert "prefers-color-scheme: dark" in html


def test_the_same_run_gives_the_same_bytes(tmp_path: Path, html: str) -> None:
    again = write_report(tmp_path, summary(), metrics(tmp_path), "three <nodes>")
    assert again == tmp_path / "report.html"
    assert again.read_text(encoding="utf-8") == html


def test_a_digest_that_differs_is_shown_beside_the_others(tmp_path: Path) -> None:
    nodes = [{"name": "paris", "digests": [DIGESTS[0], "deadbeefdeadbeef"]}, {"name": "tokyo", "digests": DIGESTS[:1]}]
    page = write_report(tmp_path, summary(node_table=nodes, digests_equal=False), metrics(tmp_path), "x").read_text()
    assert page.count("✓ equal") == 2
    assert "✗ <code>deadbeefdeadbeef</code>" in page
    assert "✗ <code>missing</code>" in page
    assert "different" in page
    assert "identical" not in page


def test_a_run_without_measurements_has_a_report_that_says_so(tmp_path: Path) -> None:
    page = write_report(tmp_path, summary(node_table=[], digests=[], digests_equal=None), tmp_path / "none.jsonl", "x")
    text = Page(page.read_text()).text
    assert text.count("The run left no measurements to draw.") == 2
    assert "not compared" in text


def test_the_parts_that_were_put_aside_are_read_first_and_in_their_order(tmp_path: Path) -> None:
    """Also through a link, as a demo leaves one beside its report."""
    folder = tmp_path / "state"
    folder.mkdir()
    counts = {"metrics-000009.jsonl": 500, "metrics-000010.jsonl": 900, "metrics.jsonl": 1000}
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).write_text(json.dumps(progress("a", number, 10 * number, 3.0, count)) + "\n")
    (folder / "metrics-old.jsonl").write_text("not one of them\n")
    link = tmp_path / "metrics.jsonl"
    link.symlink_to(folder / "metrics.jsonl")
    for path in (folder / "metrics.jsonl", link):
        history = read_history(path)
        assert [moment.bytes_up for moment in history.traffic] == [500, 900, 1000]
        assert history.unreadable == 0


def test_curves_share_the_axis_of_all_tokens_and_a_half_written_last_line_is_skipped(tmp_path: Path) -> None:
    history = read_history(metrics(tmp_path, tail='{"event": "prog'))
    assert (history.unreadable, len(history.traffic)) == (1, 78)
    assert history.losses["paris"][-1][0] == 39 * 50 + 38 * 50
    assert history.losses["tokyo"][-1][0] == 2 * 39 * 50
    assert history.evaluations == [(0, 5.5), (3900, 2.5)]


def test_counters_of_a_restarted_node_continue(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    events = [progress("a", 1, 10, 3.0, 500), progress("a", 2, 20, 3.0, 900), progress("a", 3, 5, None, 100)]
    path.write_text("\n".join(json.dumps(event) for event in events))
    history = read_history(path)
    assert [(moment.bytes_up, moment.inner_steps) for moment in history.traffic] == [(500, 10), (900, 20), (1000, 25)]
    assert len(history.losses["a"]) == 2


def moved(t: int, up: int, down: int) -> Traffic:
    kinds: BytesStatus = {"delta": up, "update": down, "snapshot": 0, "probe": 0, "control": 0}
    return Traffic(t=t, bytes_up=up, bytes_down=down, by_kind=kinds, inner_steps=t)


def test_long_runs_and_many_nodes_stay_small_and_named() -> None:
    losses = {f"n{node}": [(step, 3.0 + step % 7) for step in range(20_000)] for node in range(SERIES + 1)}
    moments = [moved(t, t * 10, t * 9) for t in range(1, 20_000)]
    history = History(losses=losses, traffic=moments)
    loss, traffic = loss_figure(history), traffic_figure(history, PARAMETERS, 50.0)
    assert f"training, {SERIES + 1} nodes" in loss
    assert len(loss) < (SERIES + 1) * 2 * MAX_POINTS * 40
    assert "hours" in traffic
    assert "snapshots" not in traffic
    few = [moved(t, t * 4000, t * 4000) for t in range(1, 9)]
    assert "100× fewer bytes" in traffic_figure(History(traffic=few), PARAMETERS, 100.0)
    assert "fewer bytes" not in traffic_figure(History(traffic=few), 1000, 1.0), "there is no gap to draw"


@pytest.mark.parametrize(
    ("equal", "words"), [(True, "yes, bit for bit (2 fragments"), (False, "NO, digests differ"), (None, "not compared")]
)
def test_the_table_at_the_end_of_a_run_has_the_figures(equal: bool | None, words: str) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(summary(digests_equal=equal)))
    text = console.export_text()
    for figure in ("5.500 → 2.500", "702 kB up, 702 kB down", "312 MB", "222× fewer bytes", "94.7%", "1m 22s", words):
        assert figure in text
