"""The plots of a report as SVG text to stand inside an HTML page.

Colours are the page's own: matplotlib draws in placeholder colours, and these become CSS variables, so one drawing
serves light and dark. Text stays text in the page's font.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from farloop.cli.history import History, Traffic
from farloop.monitoring.gist import DATA_PARALLEL_BYTES
from farloop.monitoring.units import count_text, factor_text, size_text

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
