"""The plot of a quality comparison: differences with their intervals, and the loss curves they come from.

SVG, PNG or PDF by the file's name. The colours are those of a run's report in light, on white: these stand alone.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from farloop.bench.comparison import Comparison, difference_text
from farloop.bench.quality import RunResult

INK, MUTED, GRID, GOOD = "#1b1e23", "#646b75", "#e3e4e1", "#0b7d55"
SERIES = ("#2563c9", "#0d8f72", "#b86e00", "#a8328a", "#6247cf", "#c2410c")

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "farloop",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
    "ytick.major.pad": 6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}

_ROW_IN = 0.62
"""Height of a variant."""

_BEGINNING = 0.15
"""Share of a run whose loss is left out of the curves: all fall alike there, from far above."""


def plot(
    path: Path,
    comparisons: Sequence[Comparison],
    results: Mapping[str, Sequence[RunResult]],
    *,
    within_percent: float,
    caption: str,
) -> None:
    """Write the figure of what `compare` found in `results`; the first comparison is the baseline's."""
    with mpl.rc_context(STYLE):
        rows = len(comparisons) - 1
        figure = Figure(figsize=(11.0, 3.6 + _ROW_IN * max(0, rows - 3)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
        _differences(left, comparisons, within_percent)
        _curves(right, results)
        figure.supxlabel(caption, color=MUTED, fontsize=8.5, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=160, metadata=metadata)


def _differences(axes: Axes, comparisons: Sequence[Comparison], within_percent: float) -> None:
    """A row per variant: its seeds as faint dots, their mean with its interval."""
    baseline, *others = comparisons
    axes.axvspan(-within_percent, within_percent, color=GOOD, alpha=0.08, linewidth=0)
    axes.axvline(0.0, color=MUTED, linewidth=1.0)
    for row, comparison in enumerate(others):
        color = _color(row + 1)
        axes.plot(
            comparison.differences_percent,
            [row + 0.16] * len(comparison.differences_percent),
            linestyle="",
            marker="o",
            markersize=4,
            color=color,
            alpha=0.35,
        )
        if comparison.low_percent is not None and comparison.high_percent is not None:
            axes.plot([comparison.low_percent, comparison.high_percent], [row, row], color=color, linewidth=2.4)
        axes.plot([comparison.mean_percent], [row], marker="o", markersize=8, color=color)
        axes.annotate(
            difference_text(comparison),
            (comparison.mean_percent, row),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=color,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
        )
    axes.set_yticks(range(len(others)), [comparison.label for comparison in others], color=INK)
    axes.set_ylim(max(1, len(others)) - 0.45, -0.6)
    reach = max(
        [1.25 * within_percent]
        + [1.1 * abs(x) for c in others for x in (*c.differences_percent, c.low_percent or 0.0, c.high_percent or 0.0)]
    )
    axes.set_xlim(-reach, reach)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    axes.set_xlabel("paired difference in final validation loss, mean and 95 % interval, %")
    axes.set_title(f"cost against {baseline.label}, {len(baseline.losses)} seeds")


def _curves(axes: Axes, results: Mapping[str, Sequence[RunResult]]) -> None:
    """Every run as a faint line, the mean of a variant's as a full one, without the first steep fall."""
    highest = []
    for number, (label, runs) in enumerate(results.items()):
        color = _color(number)
        for run in runs:
            axes.plot(*zip(*run.curve, strict=True), color=color, linewidth=0.7, alpha=0.3)
        means = [
            (column[0][0], statistics.fmean(loss for _, loss in column))
            for column in zip(*(run.curve for run in runs), strict=False)
        ]
        axes.plot(*zip(*means, strict=True), color=color, linewidth=1.8, label=label)
        highest += [loss for position, loss in means if position >= _BEGINNING * means[-1][0]][:1]
    lowest = min(loss for runs in results.values() for run in runs for _, loss in run.curve)
    room = 0.06 * (max(highest) - lowest) or 0.1
    axes.set_ylim(lowest - room, max(highest) + room)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("inner steps of each node")
    axes.set_title("validation loss, nats per byte")
    axes.legend(loc="upper right", labelcolor="linecolor")


def _color(number: int) -> str:
    """The baseline is grey, the variants have a colour each."""
    return MUTED if number == 0 else SERIES[(number - 1) % len(SERIES)]
