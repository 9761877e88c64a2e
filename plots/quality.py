"""The plot of methods at equal tokens: validation loss against tokens, and against the bytes that a node moved.

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

from farloop.bench.comparison import Comparison, difference_text
from farloop.bench.quality import RunResult
from farloop.plots.style import GOOD, INK, MUTED, beside, color_of, figure, log_ticks, rows, ticks

COLORS = ("#2563c9", "#0d8f72", "#d1620a", "#a8328a", "#6247cf", "#b08900", "#0891b2", "#c2262e", "#5b7a1c")
"""Of the variants but the baseline, which is dark; in the second round through them lines are dashed."""

_BEGINNING = 0.1  # share of a run that may be above the plot: there all fall alike
_ROW_IN = 0.62  # height of a variant


def plot_differences(path: Path, comparisons: Sequence[Comparison], *, within_percent: float, caption: str) -> None:
    """Write the figure of what `compare` found: a row per variant but the first, the baseline: its seeds as faint dots,
    their mean with its interval."""
    baseline, *others = comparisons
    with figure(path, 6.5, 3.6 + _ROW_IN * max(0, len(others) - 3), note=caption) as drawn:
        axes = drawn.subplots()
        axes.axvspan(-within_percent, within_percent, color=GOOD, alpha=0.08, linewidth=0)
        axes.axvline(0.0, color=MUTED, linewidth=1.0)
        for row, found in enumerate(others):
            color, seeds = color_of(row), found.differences_percent
            axes.plot(seeds, [row + 0.16] * len(seeds), linestyle="", marker="o", markersize=4, color=color, alpha=0.35)
            if found.low_percent is not None and found.high_percent is not None:
                axes.plot([found.low_percent, found.high_percent], [row, row], color=color, linewidth=2.4)
            axes.plot([found.mean_percent], [row], marker="o", markersize=8, color=color)
            back = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
            beside(axes, difference_text(found), (found.mean_percent, row), (0, 9), ha="center", color=color, bbox=back)
        rows(axes, len(others), [found.label for found in others], above=0.6)
        ends = [x for c in others for x in (*c.differences_percent, c.low_percent or 0.0, c.high_percent or 0.0)]
        reach = max([1.25 * within_percent, *(1.1 * abs(x) for x in ends)])
        axes.set_xlim(-reach, reach)
        ticks(axes.xaxis, None, lambda value: f"{value:+g}" if value else "0")
        axes.set_xlabel("paired difference in final validation loss, mean and 95 % interval, %")
        axes.set_title(f"cost against {baseline.label}, {len(baseline.losses)} seeds")


# --- methods at equal tokens


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
        """A single node, which has nobody to send to."""
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
    looks = [_look(number) for number in range(len(courses))]
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


def _look(number: int) -> dict[str, Any]:
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
    for course, look in zip(courses, map(_look, range(len(courses))), strict=True):
        if course.alone:
            place = {"xycoords": ("axes fraction", "data"), "va": "top", "fontsize": 8.5, "color": look["color"]}
            beside(axes, "one node, no link", (0.0, course.loss[-1]), (4, -3), **place)


def _short(value: float) -> str:
    """`200 k`, `1.5 M`, `3 G`; the unit may follow at once."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} "
