"""The report of a run: one HTML page that needs nothing else, neither scripts nor a network."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from farloop.cli.figures import loss_figure, traffic_figure
from farloop.cli.history import History, read_history
from farloop.cli.page import render_page
from farloop.cli.summary import NodeSummary, Summary, bytes_text, equality_text, summary_rows
from farloop.monitoring.units import count_text, duration_text, factor_text, loss_text, percent_text, plural, size_text

MAX_OCCURRENCES = 200


def write_report(out_dir: Path, summary: Summary, metrics: Path, title: str) -> Path:
    """Write `report.html` into `out_dir` from the run's figures and its `metrics.jsonl`; returns its path."""
    history = read_history(metrics)
    sections = [
        _loss_section(history),
        _traffic_section(history, summary),
        _nodes_section(summary["node_table"]),
        _digests_section(summary),
        _occurrences_section(history),
        _facts_section(summary),
    ]
    page = render_page(
        title=escape(title), lead=_lead(summary), cards=_cards(summary), body="\n".join(filter(None, sections))
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _lead(summary: Summary) -> str:
    return escape(
        f"{count_text(summary['parameters'])} parameters trained on {plural(summary['nodes'], 'node')} with "
        f"{summary['method']} in {duration_text(summary['wall_s'])}, {summary['codec_up']} up and "
        f"{summary['codec_down']} down."
    )


def _cards(summary: Summary) -> str:
    sent = summary["bytes_total"]
    loss_start, loss_end = loss_text(summary["val_loss_start"]), loss_text(summary["val_loss_end"])
    data_parallel = size_text(summary["bytes_data_parallel_fp32"])
    verdict, kind = {True: ("identical", ""), False: ("different", "bad"), None: ("unknown", "")}[
        summary["digests_equal"]
    ]
    cards = (
        _card(
            "fewer bytes", factor_text(summary["reduction"]), f"{size_text(sent)} instead of {data_parallel}", "good"
        ),
        _card("validation loss", loss_end, f"{loss_start} at the start"),
        _card("compute share", percent_text(summary["compute_share"]), "of the time was the training loop's"),
        _card("models at the end", verdict, equality_text(summary).removeprefix("yes, "), kind),
    )
    return "".join(cards)


def _card(label: str, value: str, note: str, kind: str = "") -> str:
    return (
        f'<div class="card {kind}"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def _loss_section(history: History) -> str:
    note = (
        "Cross-entropy in nats per token. A full line is the running mean of a node's training loss, the faint one "
        "behind it every report; validation is the score of the shared model on sequences no node trains on."
    )
    return _figure_section("Loss", loss_figure(history), note)


def _traffic_section(history: History, summary: Summary) -> str:
    note = (
        "All bytes of the connections, summed over nodes, on a logarithmic scale: "
        f"{bytes_text(summary['bytes_by_kind'])}. "
        f"fp32 data parallel would send 8 bytes (a gradient up, the mean down) × {count_text(summary['parameters'])} "
        f"parameters × {summary['merged_steps']:,} inner steps = {size_text(summary['bytes_data_parallel_fp32'])}."
    )
    return _figure_section(
        "Bytes over the links", traffic_figure(history, summary["parameters"], summary["reduction"]), note
    )


def _figure_section(heading: str, svg: str, note: str) -> str:
    if not svg:
        return _section(heading, '<p class="note">The run left no measurements to draw.</p>')
    return _section(heading, f'<figure><div class="plot">{svg}</div><figcaption>{escape(note)}</figcaption></figure>')


_NODE_COLUMNS: tuple[tuple[str, Callable[[NodeSummary], str | None]], ...] = (
    ("device", lambda node: node.get("device")),
    ("link", lambda node: node.get("link")),
    ("ended", lambda node: node.get("reason") or node.get("state")),
    ("inner steps", lambda node: _number(node.get("inner_steps"))),
    ("lost", lambda node: _number(node.get("lost_steps"))),
    ("skipped", lambda node: _number(node.get("skipped_turns") or None)),
    ("tokens/s", lambda node: _number(node.get("tokens_per_s"))),
    ("loss", lambda node: None if node.get("loss") is None else loss_text(node.get("loss"))),
    ("up", lambda node: _size(node.get("bytes_up"))),
    ("down", lambda node: _size(node.get("bytes_down"))),
    ("snapshots, probes", lambda node: _size(node.get("bytes_state"))),
    ("blocked", lambda node: None if "blocked_s" not in node else duration_text(node["blocked_s"])),
    ("compute", lambda node: None if "compute_share" not in node else percent_text(node["compute_share"])),
)
_WORDS = frozenset({"node", "device", "link", "ended"})


def _nodes_section(nodes: Sequence[NodeSummary]) -> str:
    """A row for every node; columns that no node fills are left out."""
    if not nodes:
        return ""
    columns = [(name, read) for name, read in _NODE_COLUMNS if any(read(node) for node in nodes)]
    rows = [[node["name"], *(read(node) or "–" for _, read in columns)] for node in nodes]
    return _section("Nodes", _table(["node", *(name for name, _ in columns)], rows))


def _digests_section(summary: Summary) -> str:
    """Per fragment the coordinator's digest and, where a node told its own, whether it is the same."""
    witnesses = [node for node in summary["node_table"] if node.get("digests")]
    rows = [
        [f"fragment {index}", f"<code>{escape(digest)}</code>", *(_witness(node, index, digest) for node in witnesses)]
        for index, digest in enumerate(summary["digests"])
    ]
    if not rows:
        return ""
    header = ["fragment", "coordinator", *(node["name"] for node in witnesses)]
    note = (
        "A digest covers every bit of a fragment's fp32 weights. All apply the same decoded updates in the same order, "
        f"so the digests must agree. Equal at the end of this run: {equality_text(summary)}."
    )
    body = f'<p class="note">{escape(note)}</p>' + _table(header, rows, words=frozenset(header), markup=True)
    return _section("One model, bit for bit", body)


def _witness(node: NodeSummary, index: int, digest: str) -> str:
    own = node["digests"][index] if index < len(node["digests"]) else "missing"
    return (
        '<span class="yes">✓ equal</span>' if own == digest else f'<span class="no">✗ <code>{escape(own)}</code></span>'
    )


def _occurrences_section(history: History) -> str:
    if not history.occurrences:
        return ""
    shown = history.occurrences[:MAX_OCCURRENCES]
    rows = [[duration_text(occurrence.t), occurrence.text] for occurrence in shown]
    more = len(history.occurrences) - len(shown)
    tail = f'<p class="note">and {more:,} more in metrics.jsonl</p>' if more else ""
    summary = (
        f"<summary>{plural(len(history.occurrences), 'event')}: nodes that came and went, deltas not merged</summary>"
    )
    table = _table(["at", "what"], rows, words=frozenset({"what"}))
    return _section("What happened", f"<details>{summary}{table}{tail}</details>")


def _facts_section(summary: Summary) -> str:
    rows = [f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in summary_rows(summary)]
    origin = [("command", summary["command"]), ("commit", summary.get("commit", "")), ("machine", summary["machine"])]
    for label, value in origin:
        cell = escape(value) if label == "machine" else f"<code>{escape(value)}</code>"
        rows += [f"<tr><th>{label}</th><td>{cell}</td></tr>"] if value else []
    return _section("The run in figures", f'<div class="scroll"><table class="facts">{"".join(rows)}</table></div>')


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>"


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, words: frozenset[str] = _WORDS, markup: bool = False
) -> str:
    """A table whose columns are numbers, right-aligned, unless they are `words`; cells are escaped unless `markup`."""
    classes = ["" if name in words else ' class="number"' for name in header]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(header, classes, strict=True))
    lines = []
    for row in rows:
        cells = (cell if markup else escape(cell) for cell in row)
        lines.append("".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(cells, classes, strict=True)))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _size(value: int | None) -> str | None:
    return None if value is None else size_text(value)
