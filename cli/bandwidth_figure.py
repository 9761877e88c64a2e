"""The plot of `farloop simulate bandwidth`: compute utilisation against bandwidth, a curve per training.

SVG, PNG or PDF by the file's name, in the look of `farloop.bench.figures`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, PercentFormatter

from farloop.bench.figures import INK, MUTED, SERIES, STYLE
from farloop.monitoring.units import factor_text, plural
from farloop.sim.bandwidth import (
    Training,
    gbit_text,
    model_lines,
    model_text,
    required_gbit_s,
    short_name,
    utilization,
)

POINTS = 400
"""Of a curve."""

AIM = 0.95
"""The utilisation whose bandwidth is written beside each curve."""

_LOWEST = 0.05
"""Curves begin where the thriftiest has this utilisation."""


def draw(path: Path, trainings: Sequence[Training]) -> None:
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
