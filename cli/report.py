"""The command report: one HTML file about a run."""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from farloop.cli.run_results import (
    History,
    NodeSummary,
    Summary,
    Traffic,
    bytes_text,
    equality_text,
    read_history,
    summary_rows,
)
from farloop.monitoring.status_summary import DATA_PARALLEL_BYTES
from farloop.monitoring.units import count_text, duration_text, factor_text, loss_text, percent_text, plural, size_text

# --- The plots of a report as SVG text to stand inside an HTML page.
#
# Colours are the page's own: matplotlib draws in placeholder colours, and these become CSS variables, so one drawing
# serves light and dark. Text stays text in the page's font.


_T = TypeVar("_T")

SERIES = 6
"""Node curves with a colour of their own; more nodes than that share one quiet colour."""

MAX_POINTS = 1200
"""Points of a curve: more cannot be told apart at this width."""

_WIDTH_IN, _HEIGHT_IN = 9.6, 4.0

_ROLES = ("ink", "muted", "grid", "good", *(f"s{index}" for index in range(1, SERIES + 1)))
_PLACEHOLDERS = {role: f"#fe{number:02x}dc" for number, role in enumerate(_ROLES)}
_INK, _MUTED, _GRID, _GOOD = (_PLACEHOLDERS[role] for role in _ROLES[:4])
_SERIES = tuple(_PLACEHOLDERS[role] for role in _ROLES[4:])

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "farloop",
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 7,
    "ytick.major.pad": 7,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
}


def loss_figure(history: History) -> str:
    """Training loss of every node and validation loss, against the tokens of all nodes; empty without data."""
    if not history.losses and not history.evaluations:
        return ""
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas()
        _node_losses(axes, history)
        if history.evaluations:
            tokens, losses = zip(*_thinned(history.evaluations), strict=True)
            axes.plot(tokens, losses, color=_INK, linewidth=2.2, marker="o", markersize=4, label="validation", zorder=5)
        axes.set_xlabel("tokens, all nodes together")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(count_text(value))))
        axes.set_xlim(left=0)
        axes.legend(loc="upper right", ncols=2 if len(history.losses) > 4 else 1, labelcolor="linecolor")
        return _svg(figure, "loss", "Training and validation loss against tokens")


def traffic_figure(history: History, parameters: int, reduction: float) -> str:
    """Bytes over the links against time, beside what fp32 data parallel would have sent; empty without data.

    `reduction` is the summary's: it also counts what was sent after the last line of the history.
    """
    moments = [moment for moment in _thinned(history.traffic) if moment.bytes_up + moment.bytes_down > 0]
    if len(moments) < 2:
        return ""
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas()
        scale, unit = _time_unit(moments[-1].t)
        times = [moment.t / scale for moment in moments]
        curves = _traffic_curves(moments, parameters)
        for _, values, color, style, width in curves:
            axes.plot(times, [value or math.nan for value in values], color=color, linewidth=width, linestyle=style)
        _log_bytes(axes, curves)
        axes.set_xlabel(f"time ({unit})")
        axes.set_xlim(times[0], times[-1])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 3, 5, 6, 10]))
        figure.subplots_adjust(right=0.74)
        _end_labels(axes, times[-1], curves)
        _gap(axes, times, moments, curves[0][1], reduction)
        return _svg(figure, "traffic", "Bytes sent against time")


Curve = tuple[str, list[int], str, str, float]
"""Label, values, colour, line style and width."""


def _traffic_curves(moments: Sequence[Traffic], parameters: int) -> list[Curve]:
    data_parallel = [DATA_PARALLEL_BYTES * parameters * moment.inner_steps for moment in moments]
    curves: list[Curve] = [
        ("fp32 data parallel", data_parallel, _MUTED, "--", 2.0),
        # Up and down lie almost on each other: the one below is the wider.
        ("up", [moment.bytes_up for moment in moments], _SERIES[0], "-", 4.5),
        ("down", [moment.bytes_down for moment in moments], _SERIES[2], "-", 1.8),
    ]
    if moments[-1].bytes_state:
        curves.append(("snapshots, probes", [moment.bytes_state for moment in moments], _SERIES[3], "-", 1.8))
    return curves


def _node_losses(axes: Axes, history: History) -> None:
    """Every report as a faint line and its running mean as a full one: single steps are noisy."""
    for index, (node, points) in enumerate(sorted(history.losses.items())):
        crowded = len(history.losses) > SERIES
        color = _MUTED if crowded else _SERIES[index]
        label = (f"training, {len(history.losses)} nodes" if index == 0 else None) if crowded else node
        tokens, losses = zip(*_thinned(points), strict=True)
        axes.plot(tokens, losses, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(tokens, _running_mean(losses), color=color, linewidth=1.5, alpha=0.95, label=label)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a window of about a thirtieth of the curve, narrower at its ends so that it starts where they do."""
    reach = len(values) // 60
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        window = values[index - near : index + near + 1]
        means.append(sum(window) / len(window))
    return means


def _log_bytes(axes: Axes, curves: Sequence[Curve]) -> None:
    positive = [value for _, values, *_ in curves for value in values if value > 0]
    axes.set_yscale("log")
    axes.set_ylim(min(positive) / 2, max(positive) * 2.5)
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(size_text(value))))


def _end_labels(axes: Axes, at: float, curves: Sequence[Curve]) -> None:
    """Name every curve at its end, from the top down, far enough apart to read."""
    low, high = axes.get_ylim()
    span = math.log(high / low)
    above = math.inf
    for label, values, color, *_ in sorted(curves, key=lambda curve: -curve[1][-1]):
        if values[-1] <= 0:
            continue
        place = min(math.log(values[-1] / low) / span, above - 0.072)
        above = place
        axes.annotate(f"{label}  {size_text(values[-1])}", (1.0, place), xycoords="axes fraction", xytext=(10, 0),
                      textcoords="offset points", va="center", color=_INK if color == _MUTED else color,
                      annotation_clip=False)  # fmt: skip


def _gap(
    axes: Axes, times: Sequence[float], moments: Sequence[Traffic], data_parallel: Sequence[int], reduction: float
) -> None:
    """An arrow between what was sent and what data parallel would have sent, with their ratio."""
    index = max(len(times) * 4 // 5, 1) - 1
    sent = moments[index].bytes_up + moments[index].bytes_down
    if data_parallel[index] < 4 * sent:
        return
    top, bottom = data_parallel[index] / 1.25, sent * 1.1
    axes.annotate(
        "",
        (times[index], bottom),
        (times[index], top),
        arrowprops={"arrowstyle": "<->", "color": _GOOD, "linewidth": 1.4},
    )
    axes.annotate(f"{factor_text(reduction)} fewer bytes", (times[index], math.sqrt(top * bottom)),
                  xytext=(-10, 0), textcoords="offset points", ha="right", va="center", color=_GOOD, fontsize=15,
                  fontweight="bold")  # fmt: skip


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN))
    figure.subplots_adjust(left=0.085, right=0.985, top=0.97, bottom=0.14)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element: no prologue or metadata, ids of its own, the page's colours and font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text).replace("url(#", f"url(#{name}-")
    text = re.sub(r"font: (?:(\d+|bold) )?([\d.]+)px [^;\"]+", _font, text)
    for role, placeholder in _PLACEHOLDERS.items():
        text = text.replace(placeholder, f"var(--{role})")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text))
    return text.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1).strip()


def _font(match: re.Match[str]) -> str:
    weight, size_px = match.groups()
    return f"font-size: {size_px}px" + (f"; font-weight: {weight}" if weight else "")


def _thinned(points: list[_T]) -> list[_T]:
    """At most `MAX_POINTS` of them, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]


def _time_unit(seconds: float) -> tuple[float, str]:
    return next(
        ((size, unit) for size, unit in ((3600.0, "hours"), (60.0, "minutes")) if seconds >= 3 * size), (1.0, "seconds")
    )


def _short(number: str) -> str:
    """Tick labels are round: `10.0 MB` is `10 MB`."""
    return number.replace(".00 ", " ").replace(".0 ", " ")


# --- The frame of a report page: its look in light and dark, and nothing of its contents.


def render_page(*, title: str, lead: str, cards: str, body: str) -> str:
    """A whole HTML document; all four are HTML already."""
    return _PAGE.substitute(title=title, lead=lead, cards=cards, body=body, style=_PAGE_STYLE)


_PAGE_STYLE = """
:root {
  color-scheme: light dark;
  --page: #fafaf8; --raised: #ffffff; --ink: #1b1e23; --muted: #646b75; --grid: #e3e4e1;
  --good: #0b7d55; --bad: #b3261e;
  --s1: #2563c9; --s2: #0d8f72; --s3: #b86e00; --s4: #a8328a; --s5: #6247cf; --s6: #c2410c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --raised: #1c1f25; --ink: #e9eaec; --muted: #9aa2ad; --grid: #31353d;
    --good: #4fd1a0; --bad: #ff8a80;
    --s1: #7db0ff; --s2: #4fd1a8; --s3: #f2b457; --s4: #ea8bd0; --s5: #b3a1ff; --s6: #ff9a6b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 3.5rem 1.5rem 4rem; max-width: 64rem;
  background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
h1 { margin: 0; font-size: 2.1rem; line-height: 1.2; letter-spacing: -0.02em; }
h2 { margin: 0 0 0.9rem; font-size: 1.2rem; letter-spacing: -0.01em; }
.lead { margin: 0.5rem 0 2rem; color: var(--muted); font-size: 1.08rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: 0.9rem; }
.card { padding: 1.05rem 1.2rem 1.1rem; background: var(--raised); border: 1px solid var(--grid); border-radius: 10px; }
.card .label { color: var(--muted); font-size: 0.86rem; }
.card .value { margin: 0.1rem 0 0.15rem; font-size: 2.15rem; font-weight: 650;
  line-height: 1.2; letter-spacing: -0.02em; }
.card .note { color: var(--muted); font-size: 0.86rem; line-height: 1.4; }
.card.good .value { color: var(--good); }
.card.bad .value { color: var(--bad); }
section { margin-top: 2.8rem; }
figure { margin: 0; }
.plot { padding: 1rem 0.8rem 0.4rem; background: var(--raised); border: 1px solid var(--grid);
  border-radius: 10px; overflow-x: auto; }
.plot svg { display: block; width: 100%; min-width: 40rem; height: auto; }
figcaption, p.note { margin: 0.7rem 0 0; max-width: 52rem; color: var(--muted); font-size: 0.9rem; }
p.note { margin: 0 0 0.9rem; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.5rem 0.85rem 0.5rem 0; border-bottom: 1px solid var(--grid); text-align: left;
  vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--muted); font-weight: 500; font-size: 0.86rem; white-space: nowrap; }
tbody td:first-child { font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
.facts th { width: 15rem; color: var(--muted); font-weight: 400; }
code { font: 0.9em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.yes { color: var(--good); white-space: nowrap; }
.no { color: var(--bad); }
summary { cursor: pointer; color: var(--muted); margin-bottom: 0.6rem; }
footer { margin-top: 3.5rem; color: var(--muted); font-size: 0.86rem; }
@media print { body { padding: 0; max-width: none; } section { break-inside: avoid; } }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1><p class="lead">$lead</p></header>
<main>
<div class="cards">$cards</div>
$body
</main>
<footer>Written by farloop. This page is complete: it loads nothing.</footer>
</body>
</html>
""")


# --- The report of a run: one HTML page that needs nothing else, neither scripts nor a network.


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
