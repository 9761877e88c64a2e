"""The plots of methods at equal tokens: the loss at the end against bytes, and its course against tokens and bytes.

SVG, PNG or PDF by the file's name. The style is that of `style.py`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from farloop.lab.bench.comparison import Comparison, difference_text
from farloop.lab.bench.quality import RunResult
from farloop.plots.style import INK, MUTED, beside, figure, log_ticks, ticks

COLORS = ("#2563c9", "#0d8f72", "#d1620a", "#a8328a", "#6247cf", "#b08900", "#0891b2", "#c2262e", "#5b7a1c")
"""Of the variants but the baseline, which is dark; in the second round through them lines are dashed."""

_BEGINNING = 0.1  # share of a run that may be above the plot: there all fall alike


def plot_frontier(path: Path, comparisons: Sequence[Comparison], *, title: str, caption: str) -> None:
    """Write the figure of loss against bytes: the mean difference of each variant from the first, the baseline, with
    its interval and its seeds, at the times fewer bytes that a node of it moves. A single node, which moves none, is a
    level line, and there are others; the front joins the variants that no other beats in both."""
    points = [found for found in comparisons if found.fewer_bytes is not None]
    with figure(path, 8.5, 5.0 + 0.24 * math.ceil(len(comparisons) / 2)) as drawn:
        axes = drawn.subplots()
        front = [(found.fewer_bytes or 0.0, found.mean_percent) for found in frontier(points)]
        axes.plot(*zip(*front, strict=True), color=MUTED, linewidth=1.2, drawstyle="steps-pre", zorder=1)
        for number, found in enumerate(comparisons):
            look = _style(number)
            label = f"{found.label}  {difference_text(found) if number else 'baseline'}"
            if found.fewer_bytes is None:
                axes.axhline(found.mean_percent, label=label, **{**look, "linewidth": 1.2, "linestyle": (0, (4, 3))})
                continue
            times, color = found.fewer_bytes, look["color"]
            seeds = found.differences_percent
            axes.plot([times] * len(seeds), seeds, linestyle="", marker="o", markersize=3, color=color, alpha=0.4)
            if found.low_percent is not None and found.high_percent is not None:
                axes.plot([times, times], [found.low_percent, found.high_percent], color=color, linewidth=2, alpha=0.5)
            edge: dict[str, Any] = {f"marker{'edge' if look['linestyle'] == '-' else 'face'}color": "white"}
            axes.plot([times], [found.mean_percent], linestyle="", marker="o", label=label, color=color, **edge)
        axes.set_xscale("log")
        axes.set_xlim(0.8, 1.6 * max(found.fewer_bytes or 1.0 for found in points))
        log_ticks(axes.xaxis, lambda value: f"{value:g}×")
        ticks(axes.yaxis, None, lambda value: f"{value:+g} %" if value else "0")
        axes.set_xlabel(f"times fewer bytes of a node than {comparisons[0].label}, log scale")
        axes.set_title(f"{title}: difference in validation loss from {comparisons[0].label}", pad=26)
        beside(axes, caption, (0.0, 1.0), (0, 10), xycoords="axes fraction", fontsize=9, color=MUTED)
        drawn.legend(loc="outside lower left", ncols=2, fontsize=9, columnspacing=3.0, labelcolor=INK)


def frontier(points: Sequence[Comparison]) -> list[Comparison]:
    """Those that no other beats in bytes without more loss, the one with the most bytes first (Pareto's front)."""
    front: list[Comparison] = []
    for found in sorted(points, key=lambda one: (-(one.fewer_bytes or 0.0), one.mean_percent)):
        if not front or found.mean_percent < front[-1].mean_percent:
            front.append(found)
    return front[::-1]


# --- courses


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A variant's way: means over its seeds at every point of their curves."""

    label: str
    tokens: tuple[float, ...]
    moved: tuple[float, ...]  # bytes of a node, up and down; nothing where it is alone
    loss: tuple[float, ...]
    spread: tuple[float, ...]  # standard deviation; 0 for a single seed

    @property
    def alone(self) -> bool:
        """A single node, which has no peer to send to."""
        return not self.moved


def course_of(label: str, runs: Sequence[RunResult]) -> Course:
    """Positions are the same in all seeds; where a run lacks a last point, the others' go with it."""
    columns = list(zip(*(zip(run.curve, run.moved, strict=True) for run in runs), strict=False))
    end = runs[0].curve[-1][0]
    losses = [[loss for (_, loss), _ in column] for column in columns]
    alone = runs[0].nodes == 1
    return Course(
        label=label,
        tokens=tuple(runs[0].tokens * column[0][0][0] / end for column in columns),
        moved=() if alone else tuple(statistics.fmean(moved for _, moved in column) for column in columns),
        loss=tuple(statistics.fmean(some) for some in losses),
        spread=tuple(statistics.stdev(some) if len(some) > 1 else 0.0 for some in losses),
    )


def plot_methods(path: Path, results: Mapping[str, Sequence[RunResult]], *, title: str, caption: str) -> None:
    """Write the figure of the runs of every variant; the first one is the baseline."""
    courses = [course_of(label, runs) for label, runs in results.items()]
    looks = [_style(number) for number in range(len(courses))]
    with figure(path, 11.5, 5.2 + 0.24 * math.ceil(len(courses) / 2)) as drawn:
        left, right = drawn.subplots(1, 2, sharey=True)
        bottom, top = _heights(courses)
        for course, look in zip(courses, looks, strict=True):
            _draw(left, course.tokens, course, look)
            if course.alone:
                right.axhline(course.loss[-1], **{**look, "linewidth": 1.2, "linestyle": (0, (4, 3))})
            else:
                _draw(right, course.moved, course, look)
        left.set_ylim(bottom, top)
        _tokens_axis(left, courses)
        _bytes_axis(right, courses, bottom, top)
        handles = [Line2D([], [], marker="o", markersize=5, **look) for look in looks]
        drawn.legend(
            handles, [course.label for course in courses], loc="outside lower left", ncols=2, fontsize=9.5,
            handlelength=2.2, columnspacing=3.0, labelcolor=INK,
        )  # fmt: skip
        head = drawn.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=13, color=INK)  # a line for the caption
        below = left.annotate(
            caption, (0, 0), xycoords=head, va="bottom", fontsize=9, color=MUTED, annotation_clip=False
        )
        below.set_in_layout(False)  # or the axes would begin where the widest text ends


def _style(number: int) -> dict[str, Any]:
    if number == 0:
        return {"color": INK, "linewidth": 2.2, "linestyle": "-"}
    around, place = divmod(number - 1, len(COLORS))
    return {"color": COLORS[place], "linewidth": 1.8, "linestyle": (0, (5, 2)) if around else "-"}


def _draw(axes: Axes, x: Sequence[float], course: Course, look: Mapping[str, Any]) -> None:
    low = [loss - spread for loss, spread in zip(course.loss, course.spread, strict=True)]
    high = [loss + spread for loss, spread in zip(course.loss, course.spread, strict=True)]
    axes.fill_between(x, low, high, color=look["color"], alpha=0.12, linewidth=0)
    axes.plot(x, course.loss, **look)
    axes.plot(x[-1:], course.loss[-1:], linestyle="", marker="o", markersize=6, color=look["color"], clip_on=False)


def _heights(courses: Sequence[Course]) -> tuple[float, float]:
    """Of the picture: without the steep fall of most courses, but with the end of each, and room around."""
    lowest = min(loss - spread for c in courses for loss, spread in zip(c.loss, c.spread, strict=True))
    after_the_fall = [
        next((loss for x, loss in zip(c.tokens, c.loss, strict=True) if x >= _BEGINNING * c.tokens[-1]), c.loss[-1])
        for c in courses
    ]
    highest = max(statistics.median(after_the_fall), *(c.loss[-1] + c.spread[-1] for c in courses))
    room = 0.06 * (highest - lowest) or 0.1
    return lowest - room, highest + room


def _tokens_axis(axes: Axes, courses: Sequence[Course]) -> None:
    axes.set_xlim(0, 1.02 * max(course.tokens[-1] for course in courses))
    ticks(axes.xaxis, MaxNLocator(nbins=6), _short)
    axes.set_xlabel("tokens of all nodes together")
    axes.set_title("validation loss (nats per byte) against tokens")


def _bytes_axis(axes: Axes, courses: Sequence[Course], bottom: float, top: float) -> None:
    axes.set_xscale("log")
    shown = [
        moved
        for course in courses
        for moved, loss in zip(course.moved, course.loss, strict=False)
        if moved > 0 and (bottom <= loss <= top or loss == course.loss[-1])
    ]
    if shown:
        axes.set_xlim(min(shown) / 1.6, max(shown) * 1.6)
    log_ticks(axes.xaxis, lambda value: f"{_short(value)}B")
    axes.set_xlabel("bytes up and down of each node, log scale")
    axes.set_title("against bytes over the link")
    axes.tick_params(axis="y", labelleft=False)
    for course, look in zip(courses, map(_style, range(len(courses))), strict=True):
        if course.alone:
            place = {"xycoords": ("axes fraction", "data"), "va": "top", "fontsize": 8.5, "color": look["color"]}
            beside(axes, "one node, no link", (0.0, course.loss[-1]), (4, -3), **place)


def _short(value: float) -> str:
    """`200 k`, `1.5 M`, `3 G`; the unit may follow at once."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} "
