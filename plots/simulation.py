"""Plots of bandwidth, flow and schedule."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from farloop.algo.schedule import learning_rate
from farloop.algo.spec import RoundPlan, Terms
from farloop.monitoring.units import count_text, factor_text, plural
from farloop.plots.style import GOOD, GRID, INK, MUTED, SERIES, STYLE
from farloop.sim.bandwidth import Training, gbit_text, model_lines, model_text, required_gbit_s, short_name, utilization
from farloop.sim.flow.outcome import Outcome
from farloop.sim.flow.scenario import FlowScenario
from farloop.sim.flow.sweep import Row

# --- The plot of `farloop simulate bandwidth`: compute utilisation against bandwidth, a curve per training.
#
# SVG, PNG or PDF by the file's name, in the look of `farloop.plots.style`.


POINTS = 400
"""Of a curve."""

AIM = 0.95
"""The utilisation whose bandwidth is written beside each curve."""

_LOWEST = 0.05
"""Curves begin where the thriftiest has this utilisation."""


def draw_bandwidth(path: Path, trainings: Sequence[Training]) -> None:
    """Write the figure; the first training is the one that the others are compared with."""
    aims = [required_gbit_s(training, [AIM])[AIM] for training in trainings]
    low, high = _range(trainings, aims)
    gbit_s = np.geomspace(low, high, POINTS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 4.5))
        figure.subplots_adjust(left=0.065, right=0.675, top=0.89, bottom=0.24)
        axes = figure.add_subplot()
        for number, training in enumerate(trainings):
            axes.plot(gbit_s, utilization(training, gbit_s), color=_color(number), linewidth=2.4, zorder=3 + number)
        _aims(axes, trainings, aims)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(LogLocator(base=10, numticks=12))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _rate_text(value)))
        axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1.0]))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("bandwidth between sites, each way")
        axes.set_title("share of the time in which the accelerators compute")
        lines = [f"Simulated: {model_text(trainings[0])}", *model_lines(trainings)]
        figure.text(0.01, 0.015, ".\n".join(lines) + ".", color=MUTED, fontsize=8.5, va="bottom", linespacing=1.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _range(trainings: Sequence[Training], aims: Sequence[float]) -> tuple[float, float]:
    """From where nothing is reached to where all is, in Gbit/s."""
    low = min(training.mean_gbit_s for training in trainings) * _LOWEST
    return low, 2.5 * max(aims)


def _aims(axes: Axes, trainings: Sequence[Training], aims: Sequence[float]) -> None:
    """A dot on every curve where it reaches the aim, and beside the plot what that takes."""
    axes.axhline(AIM, color=MUTED, linewidth=1.0, linestyle=(0, (1, 3)), zorder=2)
    axes.annotate(f"{AIM:.0%}", (0, AIM), xycoords=("axes fraction", "data"), xytext=(4, -4), color=MUTED,
                  textcoords="offset points", va="top", fontsize=9)  # fmt: skip
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(f"Gbit/s that {AIM:.0%} takes", (1.0, 1.0), xytext=(22, 12), color=MUTED, fontsize=9, **place)
    for number, (training, aim) in enumerate(zip(trainings, aims, strict=True)):
        color = _color(number)
        axes.plot([aim], [AIM], marker="o", markersize=7, color=color, markeredgecolor="white", zorder=20 + number)
        top = -8 - 50 * number
        axes.annotate(gbit_text(aim), (1.0, 1.0), xytext=(22, top), color=color, fontsize=15, fontweight="bold",
                      va="top", **place)  # fmt: skip
        before = trainings[number - 1] if number else None
        axes.annotate(
            short_name(training, before), (1.0, 1.0), xytext=(76, top), color=color, fontsize=11, va="top", **place
        )
        words = [f"{factor_text(aims[0] / aim)} less"] if number else []
        words.append(_settings(training) if len(trainings) == 1 else _detail(training, before))
        axes.annotate(", ".join(words), (1.0, 1.0), xytext=(76, top - 16), color=MUTED, fontsize=9, va="top", **place)


def _settings(training: Training) -> str:
    return f"H {training.h}, τ {training.overlap}, {training.bits:g} bit"


def _detail(training: Training, before: Training | None) -> str:
    """A word on what a curve adds to the one before."""
    if before is not None and before.method == training.method:
        return "computing meanwhile" if before.overlap < training.overlap else f"instead of {before.bits:g}"
    return {
        "data-parallel": f"every step, {training.bits:g} bit",
        "diloco": f"every {plural(training.h, 'step')}",
        "streaming": f"in {plural(training.fragments, 'fragment')}"
        + (f", τ {training.overlap}" if training.overlap else ""),
    }[training.method]


def _color(number: int) -> str:
    """What is compared with is dark, the others have a colour each."""
    return INK if number == 0 else SERIES[(number - 1) % len(SERIES)]


def _rate_text(gbit_s: float) -> str:
    for size, unit in ((1e3, "Tbit/s"), (1.0, "Gbit/s"), (1e-3, "Mbit/s")):
        if gbit_s >= 0.9995 * size:
            return f"{gbit_s / size:.4g} {unit}"
    return f"{gbit_s * 1e6:.4g} kbit/s"


# --- The plot of `farloop simulate run`: goodput against what was swept, or computing machines over time, and where the
# machine-seconds went.
#
# SVG, PNG or PDF by the file's name, in the look of `farloop.plots.style`.


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


def draw_flow(path: Path, scenario: FlowScenario, rows: Sequence[Row]) -> None:
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
        color, mine = (
            _flow_color(number),
            sorted((r for r in rows if r.variant == name), key=lambda row: row.value or 0.0),
        )
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
        axes.plot(seconds / size, shares, color=_flow_color(number), linewidth=1.6, label=row.variant)
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
        axes.annotate(
            row.variant, (0.0, place - 0.28), xytext=(0, 3), textcoords="offset points", color=_flow_color(place)
        )
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.4, -0.75)
    axes.set_xlim(0, 1)
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=4)


def _flow_color(number: int) -> str:
    return SERIES[number % len(SERIES)]


# --- The plot of `farloop schedule`: H over time, above the learning rate that it follows. SVG, PNG or PDF by the name.


_POINTS = 1000
"""Of the learning rate's curve."""

_MOST_SYNCS = 200
"""More than that would be a grey band."""


def draw_schedule(path: Path, terms: Terms, rounds: Sequence[RoundPlan]) -> None:
    """Write the figure."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 5.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1.0))
        _lengths(above, terms, rounds)
        _rates(below, terms, rounds)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _lengths(axes: Axes, terms: Terms, rounds: Sequence[RoundPlan]) -> None:
    """A step per round; on a logarithmic scale where rounds differ much."""
    lengths = [plan.length for plan in rounds]
    axes.stairs(lengths, [*(plan.start for plan in rounds), terms.steps], color=SERIES[0], linewidth=2.2, baseline=None)
    if max(lengths) > 8 * terms.h:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    else:
        axes.set_ylim(0, 1.15 * max(lengths))
    axes.set_axisbelow(True)
    axes.set_ylabel("H, inner steps of a round")
    alpha = f", α = {terms.h_alpha:g}" if terms.h_alpha else ""
    syncs = f"{len(rounds):,} syncs, {100 * len(rounds) / terms.steps:.3g} % of the steps"
    axes.set_title(f"{terms.h_rule}{alpha}: {syncs}, longest round {max(lengths):,}")
    if terms.h_rule != "constant":
        axes.axhline(terms.h, color=MUTED, linewidth=1.0, linestyle="--")
        axes.annotate(f"h = {terms.h}", (1.0, terms.h), xycoords=("axes fraction", "data"), xytext=(-2, 4),
                      textcoords="offset points", ha="right", va="bottom", color=MUTED)  # fmt: skip


def _rates(axes: Axes, terms: Terms, rounds: Sequence[RoundPlan]) -> None:
    """η as a curve, with a tick at every sync."""
    count = min(_POINTS, terms.steps)
    positions = [index * terms.steps / count for index in range(count + 1)]
    axes.plot(positions, [learning_rate(terms, position) for position in positions], color=INK, linewidth=2.0)
    if len(rounds) <= _MOST_SYNCS:
        ends = [plan.start + plan.length for plan in rounds]
        axes.plot(ends, [0.0] * len(ends), linestyle="", marker="|", markersize=9, color=SERIES[0], clip_on=False)
        axes.annotate("syncs", (0.0, 0.0), xycoords="axes fraction", xytext=(2, 7), textcoords="offset points",
                      color=SERIES[0], fontsize=9)  # fmt: skip
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(0, terms.steps)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("learning rate η")
    axes.set_xlabel(f"inner step ({terms.lr.shape})")
