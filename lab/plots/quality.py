"""The plot of methods at equal tokens: the loss at the end against bytes.

SVG, PNG or PDF by the file's name. The style is that of `style.py`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farloop.lab.bench.comparison import Comparison, difference_text
from farloop.plots.style import INK, MUTED, beside, figure, log_ticks, ticks

COLORS = ("#2563c9", "#0d8f72", "#d1620a", "#a8328a", "#6247cf", "#b08900", "#0891b2", "#c2262e", "#5b7a1c")
"""Of the variants but the baseline, which is dark; in the second round through them lines are dashed."""


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


def _style(number: int) -> dict[str, Any]:
    if number == 0:
        return {"color": INK, "linewidth": 2.2, "linestyle": "-"}
    around, place = divmod(number - 1, len(COLORS))
    return {"color": COLORS[place], "linewidth": 1.8, "linestyle": (0, (5, 2)) if around else "-"}
