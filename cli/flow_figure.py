"""The plot of `farloop simulate run`: goodput against what was swept, or computing machines over time, and where the
machine-seconds went.

SVG, PNG or PDF by the file's name, in the look of `farloop.bench.figures`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from farloop.bench.figures import GOOD, GRID, INK, MUTED, SERIES, STYLE
from farloop.monitoring.units import count_text, plural
from farloop.sim.flow_outcome import Outcome
from farloop.sim.flow_scenario import FlowScenario
from farloop.sim.flow_table import Row

_PARTS: Final = (("useful", GOOD), ("lost", "#b86e00"), ("idle", GRID), ("down", "#8a8f98"))
"""Where machine-seconds go, in the order of the bars."""

_BINS: Final = 72
"""Points of a timeline."""


_WORDS: Final = {
    "count": "machines",
    "machines": "machines of a node",
    "crashes_per_hour": "crashes of a machine in an hour",
    "repair_s": "seconds of a repair",
}
"""What swept keys are called below the axis."""


def draw(path: Path, scenario: FlowScenario, rows: Sequence[Row]) -> None:
    """Write the figure."""
    last = [row for row in rows if row.value == rows[-1].value]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
        if scenario.sweep:
            _curves(left, scenario, rows)
        else:
            _timelines(left, rows)
        _bars(right, last)
        where = f" at {rows[-1].value:,.12g} {_words(scenario.sweep.key)}" if scenario.sweep else ""
        right.set_title(f"where machine-seconds go{where}")
        seeds = plural(scenario.repeats, "seed")
        note = f"Simulated, {seeds}: {scenario.about or scenario.name}."
        if any(row.published is not None for row in rows):
            note += " Circles: as published."
        figure.supxlabel(note, color=MUTED, fontsize=8.5, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _curves(axes: Axes, scenario: FlowScenario, rows: Sequence[Row]) -> None:
    """Goodput against the swept value: means as lines, the seeds' range as a band."""
    assert scenario.sweep is not None
    names = list(dict.fromkeys(row.variant for row in rows))
    values = sorted(scenario.sweep.values)
    log = values[0] > 0 and values[-1] / values[0] > 10
    if log:
        axes.set_xscale("log")
    for number, name in enumerate(names):
        color, mine = _color(number), sorted((r for r in rows if r.variant == name), key=lambda row: row.value or 0.0)
        x = [row.value or 0.0 for row in mine]
        means = [row.mean(lambda o: o.goodput) for row in mine]
        axes.fill_between(
            x, [min(r.goodputs) for r in mine], [max(r.goodputs) for r in mine], color=color, alpha=0.12, linewidth=0
        )
        axes.plot(x, means, color=color, linewidth=2.2, marker="o", markersize=4, label=name, zorder=3)
        for row in mine:
            if row.published is not None:
                axes.plot(
                    [row.value or 0.0],
                    [row.published],
                    marker="o",
                    markersize=9,
                    color=color,
                    fillstyle="none",
                    zorder=4,
                )
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value) if value >= 1 else f"{value:g}"))
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(_words(scenario.sweep.key))
    axes.set_title("goodput: machine-seconds that ended in a merge")
    axes.legend(loc="lower left", labelcolor="linecolor")


def _words(key: str) -> str:
    return _WORDS.get(key, key)


def _timelines(axes: Axes, rows: Sequence[Row]) -> None:
    """Share of the machines that compute, over time; of the first seed. The bars beside it name the colours."""
    longest = max(row.outcomes[0].seconds for row in rows)
    unit, size = ("minutes", 60.0) if longest < 3 * 3600 else ("hours", 3600.0)
    for number, row in enumerate(rows):
        seconds, shares = timeline(row.outcomes[0])
        axes.plot(seconds / size, shares, color=_color(number), linewidth=1.6, label=row.variant)
    axes.set_xlim(0, longest / size)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(unit)
    axes.set_title("share of the machines that compute")


def timeline(outcome: Outcome) -> tuple["np.ndarray[tuple[int], np.dtype[np.float64]]", ...]:
    """(middles of the bins in seconds, mean share of the busiest moment's machines that compute in each)."""
    edges = np.linspace(0.0, outcome.seconds, _BINS + 1)
    at = np.array([second for second, _ in outcome.timeline] + [outcome.seconds])
    working = np.array([machines for _, machines in outcome.timeline])
    done = np.concatenate([[0.0], np.cumsum(working * np.diff(at))])  # machine-seconds until each change
    mean = np.diff(np.interp(edges, at, done)) / np.diff(edges)
    return (edges[1:] + edges[:-1]) / 2, mean / max(float(working.max()), 1.0)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar per variant, cut into useful, lost, idle and down."""
    for place, row in enumerate(rows):
        begin = 0.0
        parts = (
            row.mean(lambda o: o.goodput),
            row.mean(lambda o: o.share(o.lost_s)),
            row.mean(lambda o: o.share(o.idle_s)),
            row.mean(lambda o: o.share(o.down_s)),
        )
        for (name, color), share in zip(_PARTS, parts, strict=True):
            label = name if place == 0 else None
            axes.barh(place, share, left=begin, height=0.56, color=color, label=label)
            begin += share
        axes.annotate(
            f"{100 * parts[0]:.1f} %",
            (1.0, place - 0.28),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=INK,
        )
        axes.annotate(row.variant, (0.0, place - 0.28), xytext=(0, 3), textcoords="offset points", color=_color(place))
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.4, -0.75)
    axes.set_xlim(0, 1)
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=4)


def _color(number: int) -> str:
    return SERIES[number % len(SERIES)]
