"""The report of a run: one HTML file that needs neither scripts nor a network."""

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
from farloop.config.exit_codes import write_output
from farloop.monitoring.page import template
from farloop.monitoring.status_summary import DATA_PARALLEL_BYTES, cleaned
from farloop.monitoring.units import (
    NOTHING,
    count_text,
    duration_text,
    factor_text,
    loss_text,
    percent_text,
    size_text,
    thinned,
)
from farloop.plots.style import beside, log_ticks, style, ticks

MAX_OCCURRENCES = 200


def write_report(path: Path, summary: Summary, metrics: Path, title: str) -> None:
    """Write the page from the run's figures and its `metrics.jsonl`.

    Raises CommandError: it cannot be written.
    """
    history = read_history(metrics)
    page = template("farloop.cli", "report.html").render(
        title=title,
        summary=cleaned(summary),
        loss=loss_figure(history, summary.get("baseline_loss")),
        traffic=traffic_figure(history, summary["parameters"], summary["reduction"]),
        node_table=_node_table(cleaned(summary)["node_table"]),
        occurrences=cleaned([(duration_text(one.t), one.text) for one in history.occurrences]),
        most_occurrences=MAX_OCCURRENCES,
        equality=equality_text(summary),
        bytes=bytes_text(summary["bytes_by_kind"]),
        rows=summary_rows(summary),
    )
    write_output(path, page + "\n")


_NODE_COLUMNS: tuple[tuple[str, Callable[[NodeSummary], str | None]], ...] = (
    ("device", lambda node: node.get("device")),
    ("ended", lambda node: node.get("reason") or node.get("state")),
    ("inner steps", lambda node: _text(node.get("inner_steps"), "{:,.0f}".format)),
    ("lost", lambda node: _text(node.get("lost_steps"), "{:,.0f}".format)),
    ("skipped", lambda node: _text(node.get("skipped_turns") or None, "{:,.0f}".format)),
    ("tokens/s", lambda node: _text(node.get("tokens_per_s"), "{:,.0f}".format)),
    ("loss", lambda node: _text(node.get("loss"), loss_text)),
    ("up", lambda node: _text(node.get("bytes_up"), size_text)),
    ("down", lambda node: _text(node.get("bytes_down"), size_text)),
    ("snapshots, probes", lambda node: _text(node.get("bytes_state"), size_text)),
    ("blocked", lambda node: _text(node.get("blocked_s"), duration_text)),
    ("compute", lambda node: _text(node.get("compute_share"), percent_text)),
)


def _text(value: float | None, text_of: Callable[[float], str]) -> str | None:
    return None if value is None else text_of(value)


def _node_table(nodes: Sequence[NodeSummary]) -> tuple[list[str], list[list[str]]]:
    """Column names and a row for every node; columns that no node fills are left out."""
    columns = [(name, read) for name, read in _NODE_COLUMNS if any(read(node) for node in nodes)]
    rows = [[node["name"], *(read(node) or NOTHING for _, read in columns)] for node in nodes]
    return ["node", *(name for name, _ in columns)], rows


# --- the plots, as SVG inside the page
#
# Matplotlib draws in placeholder colours that become CSS variables of the page, so that one drawing serves light and
# dark. Text stays text in the page's font.

SERIES = 6  # nodes with a colour of their own; more nodes than that share a muted one
MAX_POINTS = 1200  # points of a curve: more cannot be told apart at this width

_WIDTH_IN, _HEIGHT_IN = 9.6, 4.0

_ROLES = ("ink", "muted", "grid", "good", *(f"s{index}" for index in range(1, SERIES + 1)))
_PLACEHOLDERS = {role: f"#fe{number:02x}dc" for number, role in enumerate(_ROLES)}
_INK, _MUTED, _GRID, _GOOD = (_PLACEHOLDERS[role] for role in _ROLES[:4])
_SERIES = tuple(_PLACEHOLDERS[role] for role in _ROLES[4:])
_STYLE = style(ink=_INK, muted=_MUTED, grid=_GRID, font_size=11) | {"axes.grid.axis": "y"}


def loss_figure(history: History, baseline: float | None = None) -> Markup:
    """Training loss of every node and validation loss, against the tokens of all nodes; empty without data.

    `baseline`: the validation loss at the end of a data-parallel run.
    """
    if not history.losses and not history.evaluations:
        return Markup()
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas()
        _node_losses(axes, history)
        if history.evaluations:
            tokens, losses = zip(*thinned(history.evaluations, MAX_POINTS), strict=True)
            axes.plot(tokens, losses, color=_INK, linewidth=2.2, marker="o", markersize=4, label="validation", zorder=5)
        if baseline is not None:
            axes.axhline(baseline, color=_MUTED, linewidth=1.5, linestyle="--", label="data parallel at its end")
        axes.set_xlabel("tokens, all nodes together")
        ticks(axes.xaxis, None, lambda value: _short(count_text(value)))
        axes.set_xlim(left=0)
        axes.legend(loc="upper right", ncols=2 if len(history.losses) > 4 else 1, labelcolor="linecolor")
        return _svg(figure, "loss", "Training and validation loss against tokens")


def traffic_figure(history: History, parameters: int, reduction: float) -> Markup:
    """Bytes over the links against time, compared with what fp32 data parallel would have sent; empty without data.

    `reduction` is the summary's: it also counts what was sent after the last line of the history.
    """
    moments = [moment for moment in thinned(history.traffic, MAX_POINTS) if moment.bytes_up + moment.bytes_down > 0]
    if len(moments) < 2:
        return Markup()
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas()
        units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
        scale, unit = next((one for one in units if moments[-1].t >= 3 * one[0]), units[-1])
        times = [moment.t / scale for moment in moments]
        curves = _traffic_curves(moments, parameters)
        for _, values, color, style, width in curves:
            axes.plot(times, [value or math.nan for value in values], color=color, linewidth=width, linestyle=style)
        positive = [value for _, values, *_ in curves for value in values if value > 0]
        axes.set_yscale("log")
        axes.set_ylim(min(positive) / 2, max(positive) * 2.5)
        log_ticks(axes.yaxis, lambda value: _short(size_text(value)))
        axes.set_xlabel(f"time ({unit})")
        axes.set_xlim(times[0], times[-1])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 3, 5, 6, 10]))
        figure.subplots_adjust(right=0.74)
        _end_labels(axes, times[-1], curves)
        _gap(axes, times, moments, curves[0][1], reduction)
        return _svg(figure, "traffic", "Bytes sent against time")


Curve = tuple[str, list[int], str, str, float]  # label, values, colour, line style and width


def _traffic_curves(moments: Sequence[Traffic], parameters: int) -> list[Curve]:
    data_parallel = [DATA_PARALLEL_BYTES * parameters * moment.inner_steps for moment in moments]
    curves: list[Curve] = [
        ("fp32 data parallel", data_parallel, _MUTED, "--", 2.0),
        ("up and down", [moment.bytes_up + moment.bytes_down for moment in moments], _SERIES[0], "-", 2.2),
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
        tokens, losses = zip(*thinned(points, MAX_POINTS), strict=True)
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
        look = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}
        text = f"{label}  {size_text(values[-1])}"
        beside(axes, text, (1.0, place), (10, 0), color=_INK if color == _MUTED else color, **look)


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
    look = {"ha": "right", "va": "center", "color": _GOOD, "fontsize": 15, "fontweight": "bold"}
    beside(axes, f"{factor_text(reduction)} fewer bytes", (times[index], math.sqrt(top * bottom)), (-10, 0), **look)


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN))
    figure.subplots_adjust(left=0.085, right=0.985, top=0.97, bottom=0.14)
    return figure, figure.add_subplot()


def _svg(figure: Figure, name: str, description: str) -> Markup:
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
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1).strip())


def _font(match: re.Match[str]) -> str:
    weight, size_px = match.groups()
    return f"font-size: {size_px}px" + (f"; font-weight: {weight}" if weight else "")


def _short(number: str) -> str:
    """Tick labels are round: `10.0 MB` is `10 MB`."""
    return number.replace(".00 ", " ").replace(".0 ", " ")
