"""Plots of `farloop lab simulate bandwidth`, `farloop lab simulate run` and `farloop lab schedule`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from farloop.algo.schedule import learning_rate
from farloop.algo.spec import RoundPlan
from farloop.algo.terms import Terms
from farloop.monitoring.units import count_text, factor_text, plural
from farloop.plots.style import (
    GOOD,
    GRID,
    INK,
    MUTED,
    SERIES,
    WARN,
    beside,
    color_of,
    figure,
    log_ticks,
    rows,
    shares,
    ticks,
)
from farloop.sim.bandwidth import Training, gbit_text, model_lines, model_text, required_gbit_s, short_name, utilization
from farloop.sim.flow.outcome import Outcome
from farloop.sim.flow.scenario import FlowScenario
from farloop.sim.flow.simulator import Row

# --- compute utilisation against bandwidth, a curve per training

POINTS = 400  # of a curve
AIM = 0.95  # the utilisation whose bandwidth is written beside each curve
_LOWEST = 0.05  # curves begin where the thriftiest has this utilisation


def draw_bandwidth(path: Path, trainings: Sequence[Training]) -> None:
    """Write the figure; the first training is the one that the others are compared with."""
    aims = [required_gbit_s(training, [AIM])[AIM] for training in trainings]
    low, high = _LOWEST * min(training.mean_gbit_s for training in trainings), 2.5 * max(aims)
    gbit_s = np.geomspace(low, high, POINTS)
    with figure(path, 10.4, 4.5) as drawn:
        drawn.set_layout_engine(None)
        drawn.subplots_adjust(left=0.065, right=0.675, top=0.89, bottom=0.24)
        axes = drawn.add_subplot()
        for number, training in enumerate(trainings):
            axes.plot(gbit_s, utilization(training, gbit_s), color=_color(number), linewidth=2.4, zorder=3 + number)
        _aims(axes, trainings, aims)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(0, 1.02)
        log_ticks(axes.xaxis, _rate_text)
        ticks(axes.yaxis, [0, 0.25, 0.5, 0.75, 1.0])
        shares(axes.yaxis)
        axes.set_xlabel("bandwidth between sites, each way")
        axes.set_title("share of the time in which the accelerators compute")
        lines = [f"Simulated: {model_text(trainings[0])}", *model_lines(trainings)]
        drawn.text(0.01, 0.015, ".\n".join(lines) + ".", color=MUTED, fontsize=8.5, va="bottom", linespacing=1.5)


def _aims(axes: Axes, trainings: Sequence[Training], aims: Sequence[float]) -> None:
    """A dot on every curve where it reaches the aim, and beside the plot what that takes."""
    axes.axhline(AIM, color=MUTED, linewidth=1.0, linestyle=(0, (1, 3)), zorder=2)
    line: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "color": MUTED, "va": "top", "fontsize": 9}
    beside(axes, f"{AIM:.0%}", (0, AIM), (4, -4), **line)
    place: dict[str, Any] = {"xycoords": "axes fraction", "annotation_clip": False}
    beside(axes, f"Gbit/s for {AIM:.0%}", (1.0, 1.0), (22, 12), color=MUTED, fontsize=9, **place)
    for number, (training, aim) in enumerate(zip(trainings, aims, strict=True)):
        color = _color(number)
        axes.plot([aim], [AIM], marker="o", markersize=7, color=color, markeredgecolor="white", zorder=20 + number)
        top = -8 - 50 * number
        look = place | {"va": "top"}
        beside(axes, gbit_text(aim), (1.0, 1.0), (22, top), color=color, fontsize=15, fontweight="bold", **look)
        before = trainings[number - 1] if number else None
        beside(axes, short_name(training, before), (1.0, 1.0), (76, top), color=color, fontsize=11, **look)
        words = [f"{factor_text(aims[0] / aim)} less"] if number else []
        alone = f"H {training.h}, τ {training.overlap}, {training.bits:g} bit"
        words.append(alone if len(trainings) == 1 else _detail(training, before))
        beside(axes, ", ".join(words), (1.0, 1.0), (76, top - 16), color=MUTED, fontsize=9, **look)


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
    return INK if number == 0 else color_of(number - 1)


def _rate_text(gbit_s: float) -> str:
    for size, unit in ((1e3, "Tbit/s"), (1.0, "Gbit/s"), (1e-3, "Mbit/s")):
        if gbit_s >= 0.9995 * size:
            return f"{gbit_s / size:.4g} {unit}"
    return f"{gbit_s * 1e6:.4g} kbit/s"


# --- goodput against what was swept, or computing machines over time, and where the machine-seconds went

_PARTS: Final = (("useful", GOOD), ("lost", WARN), ("idle", GRID), ("down", "#8a8f98"))
"""Where machine-seconds go, in the order of the bars."""

_BINS: Final = 72  # points of a timeline


_WORDS: Final = {
    "count": "machines",
    "machines": "machines of a node",
    "crashes_per_hour": "crashes per machine and hour",
    "repair_s": "seconds of a repair",
}
"""What swept keys are called below the axis."""


def draw_flow(path: Path, scenario: FlowScenario, found: Sequence[Row]) -> None:
    last = [row for row in found if row.value == found[-1].value]
    note = f"Simulated, {plural(scenario.repeats, 'seed')}: {scenario.about or scenario.name}."
    if any(row.published is not None for row in found):
        note += " Circles: as published."
    with figure(path, 11.0, 4.2, note=note) as drawn:
        left, right = drawn.subplots(1, 2, width_ratios=(1.15, 1.0))
        if scenario.sweep:
            _curves(left, scenario, found)
        else:
            _timelines(left, found)
        _bars(right, last)
        where = f" at {found[-1].value:,.12g} {_words(scenario.sweep.key)}" if scenario.sweep else ""
        right.set_title(f"machine-seconds by activity{where}")


def _curves(axes: Axes, scenario: FlowScenario, found: Sequence[Row]) -> None:
    """Goodput against the swept value: means as lines, the seeds' range as a band."""
    assert scenario.sweep is not None
    values = sorted(scenario.sweep.values)
    if values[0] > 0 and values[-1] / values[0] > 10:
        axes.set_xscale("log")
    for number, name in enumerate(dict.fromkeys(row.variant for row in found)):
        color = color_of(number)
        mine = sorted((row for row in found if row.variant == name), key=lambda row: row.value or 0.0)
        x = [row.value or 0.0 for row in mine]
        low, high = [min(row.goodputs) for row in mine], [max(row.goodputs) for row in mine]
        axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
        means = [row.mean(lambda o: o.goodput) for row in mine]
        axes.plot(x, means, color=color, linewidth=2.2, marker="o", markersize=4, label=name, zorder=3)
        published = [(row.value or 0.0, row.published) for row in mine if row.published is not None]
        look: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 9, "fillstyle": "none", "zorder": 4}
        axes.plot([at for at, _ in published], [share for _, share in published], color=color, **look)
    ticks(axes.xaxis, values, lambda value: count_text(value) if value >= 1 else f"{value:g}")
    axes.set_ylim(0, 1.03)
    shares(axes.yaxis)
    axes.set_xlabel(_words(scenario.sweep.key))
    axes.set_title("goodput: machine-seconds that ended in a merge")
    axes.legend(loc="lower left", labelcolor="linecolor")


def _words(key: str) -> str:
    return _WORDS.get(key, key)


def _timelines(axes: Axes, found: Sequence[Row]) -> None:
    """Share of the machines that compute, over time; of the first seed. The bars beside it name the colours."""
    longest = max(row.outcomes[0].seconds for row in found)
    unit, size = ("minutes", 60.0) if longest < 3 * 3600 else ("hours", 3600.0)
    for number, row in enumerate(found):
        seconds, working = timeline(row.outcomes[0])
        axes.plot(seconds / size, working, color=color_of(number), linewidth=1.6, label=row.variant)
    axes.set_xlim(0, longest / size)
    axes.set_ylim(0, 1.03)
    shares(axes.yaxis)
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


def _bars(axes: Axes, found: Sequence[Row]) -> None:
    """A bar per variant, cut into useful, lost, idle and down."""
    for place, row in enumerate(found):
        begin = 0.0
        parts = (
            row.mean(lambda o: o.goodput),
            row.mean(lambda o: o.share(o.lost_s)),
            row.mean(lambda o: o.share(o.idle_s)),
            row.mean(lambda o: o.share(o.down_s)),
        )
        for (name, color), share in zip(_PARTS, parts, strict=True):
            axes.barh(place, share, left=begin, height=0.56, color=color, label=None if place else name)
            begin += share
        beside(axes, f"{100 * parts[0]:.1f} %", (1.0, place - 0.28), (0, 3), ha="right", color=INK)
        beside(axes, row.variant, (0.0, place - 0.28), (0, 3), color=color_of(place))
    rows(axes, len(found), above=0.75)
    axes.set_xlim(0, 1)
    axes.grid(visible=False)
    shares(axes.xaxis)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=4)


# --- H over the steps of a run, above the learning rate that it follows

_POINTS = 1000  # of the learning rate's curve
_MOST_SYNCS = 200  # more than that would be a grey band


def draw_schedule(path: Path, terms: Terms, rounds: Sequence[RoundPlan]) -> None:
    with figure(path, 8.6, 5.2) as drawn:
        above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(1.5, 1.0))
        _lengths(above, terms, rounds)
        _rates(below, terms, rounds)


def _lengths(axes: Axes, terms: Terms, rounds: Sequence[RoundPlan]) -> None:
    """A step per round; on a logarithmic scale where rounds differ much."""
    lengths = [plan.length for plan in rounds]
    axes.stairs(
        lengths, [*(plan.start for plan in rounds), terms.schedule.steps], color=SERIES[0], linewidth=2.2, baseline=None
    )
    if max(lengths) > 8 * terms.schedule.h:
        axes.set_yscale("log")
        ticks(axes.yaxis, None, lambda value: f"{value:,.0f}")
    else:
        axes.set_ylim(0, 1.15 * max(lengths))
    axes.set_ylabel("H, inner steps of a round")
    alpha = f", α = {terms.schedule.h_alpha:g}" if terms.schedule.h_alpha else ""
    syncs = f"{len(rounds):,} syncs, {100 * len(rounds) / terms.schedule.steps:.3g} % of the steps"
    axes.set_title(f"{terms.schedule.h_rule}{alpha}: {syncs}, longest round {max(lengths):,}")
    if terms.schedule.h_rule != "constant":
        axes.axhline(terms.schedule.h, color=MUTED, linewidth=1.0, linestyle="--")
        look: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "color": MUTED}
        beside(axes, f"h = {terms.schedule.h}", (1.0, terms.schedule.h), (-2, 4), **look)


def _rates(axes: Axes, terms: Terms, rounds: Sequence[RoundPlan]) -> None:
    """η as a curve, with a tick at every sync."""
    count = min(_POINTS, terms.schedule.steps)
    positions = [index * terms.schedule.steps / count for index in range(count + 1)]
    axes.plot(positions, [learning_rate(terms, position) for position in positions], color=INK, linewidth=2.0)
    if len(rounds) <= _MOST_SYNCS:
        ends = [plan.start + plan.length for plan in rounds]
        axes.plot(ends, [0.0] * len(ends), linestyle="", marker="|", markersize=9, color=SERIES[0], clip_on=False)
        beside(axes, "syncs", (0.0, 0.0), (2, 7), xycoords="axes fraction", color=SERIES[0], fontsize=9)
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(0, terms.schedule.steps)
    ticks(axes.xaxis, MaxNLocator(nbins=8, integer=True), lambda value: f"{value:,.0f}")
    axes.set_ylabel("learning rate η")
    axes.set_xlabel(f"inner step ({terms.schedule.lr.shape})")
