"""Plots of the findings of `farloop lab bench routing`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from farloop.lab.bench.routing import Findings
from farloop.plots.style import GOOD, GRID, INK, MUTED, PALE, SERIES, WARN, beside, figure, rows, ticks

if TYPE_CHECKING:
    from farloop.lab.bench.pipeline import Processes


def plot(path: Path, findings: Findings, caption: str, processes: "Processes | None" = None) -> None:
    """Write the figure; `processes` adds a column of what was measured."""
    with figure(path, 18.5, 4.4 if processes is None else 8.2, note=caption) as drawn:
        drawn.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
        modes, planning, slow, *measured = drawn.subplots(1 if processes is None else 2, 3).flat
        if processes is not None:
            _steps(measured[0], processes)
            _losses(measured[1], processes)
            measured[2].set_axis_off()
        _modes(modes, findings)
        _planning(planning, findings)
        _slow(slow, findings)


def _modes(axes: Axes, findings: Findings) -> None:
    hs = [row.h for row in findings.modes]
    inside, across = [row.inside_s for row in findings.modes], [row.across_s for row in findings.modes]
    axes.plot(hs, inside, color=SERIES[0], linewidth=2.2, marker="o", label="A: fragments cross")
    axes.plot(hs, across, color=SERIES[2], linewidth=2.2, marker="o", label="B: activations cross")
    axes.axvline(findings.h_star, color=MUTED, linestyle=":", linewidth=1.2)
    beside(axes, f"H* = {findings.h_star:.2f}", (findings.h_star, max(inside)), (6, -4), color=INK)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks(axes.xaxis, hs, lambda value: f"{value:g}")
    ticks(axes.yaxis, [0.2, 0.5, 1, 2, 5], lambda value: f"{value:g} s")
    axes.set_xlabel("inner steps between syncs, H")
    axes.set_title("communication of a step, two islands of two nodes")
    axes.legend(loc="lower left", labelcolor="linecolor")


def _planning(axes: Axes, findings: Findings) -> None:
    budgets = {20: 1.0, 256: 15.0, 512: 30.0}
    for place, row in enumerate(findings.planning):
        if row.nodes in budgets:
            label = "budget" if place == 0 else None
            axes.bar(place, budgets[row.nodes], width=0.62, color=GRID, label=label)
        axes.bar(place, row.cpu_s, width=0.4, color=SERIES[0], label="measured" if place == 0 else None)
        look = {"ha": "center", "color": SERIES[0], "fontweight": "bold"}
        beside(axes, f"{row.cpu_s:.2g} s", (place, row.cpu_s), (0, 4), **look)
    axes.set_yscale("log")
    axes.set_ylim(0.05, 60)
    ticks(axes.yaxis, [0.1, 1, 10], lambda value: f"{value:g} s")
    axes.set_xticks(range(len(findings.planning)), [f"{row.nodes} nodes" for row in findings.planning], color=INK)
    axes.grid(visible=False, axis="x")
    axes.set_title("seconds of one core to make a plan")
    axes.legend(loc="upper left")


def _pairs(
    axes: Axes, pairs: Sequence[tuple[str, float, float]], other: str, text: Callable[[float], str], reach: float
) -> None:
    """A row per name: what was predicted, and below it the other."""
    for place, (name, predicted, found) in enumerate(pairs):
        for offset, value, colour, label in ((-0.17, predicted, PALE, "predicted"), (0.17, found, SERIES[0], other)):
            axes.barh(place + offset, value, height=0.3, color=colour, label=label if place == 0 else None)
            beside(axes, text(value), (value, place + offset), (5, 0), va="center", color=INK)
        beside(axes, name, (0, place - 0.36), (0, 2), color=INK)
    rows(axes, len(pairs), above=0.65)
    axes.set_xlim(0, reach)
    axes.legend(loc="lower right")


def _slow(axes: Axes, findings: Findings) -> None:
    found = findings.slow_link
    axes.plot(range(len(found.round_s)), found.round_s, color=SERIES[0], linewidth=2.0, marker="o", markersize=4)
    top = max(found.round_s)
    marks = (
        (found.slow_from, "n3's uplink\n8 times slower", WARN),
        (found.found_at, "named", SERIES[3]),
        (found.replanned_at, f"replanned:\n{found.after}", GOOD),
    )
    for place, (number, words, colour) in enumerate(marks):
        axes.axvline(number, color=colour, linestyle=":", linewidth=1.4)
        left = place == 0
        at = (number, (0.32, 0.12, 0.82)[place] * top)
        beside(axes, words, at, (-6 if left else 6, 0), color=colour, va="center", ha="right" if left else "left")
    axes.set_ylim(0, 1.12 * top)
    axes.set_xlabel("round")
    axes.set_title("seconds of a round when a link becomes slow, simulated")


def _steps(axes: Axes, processes: "Processes") -> None:
    pairs = [(name, 1e3 * made.predicted_s, 1e3 * made.measured_s) for name, made in processes.steps.items()]
    reach = 1.25 * max(max(predicted, measured) for _, predicted, measured in pairs)
    _pairs(axes, pairs, "measured", lambda milliseconds: f"{milliseconds:.1f} ms", reach)
    axes.set_xlabel("milliseconds, median")
    axes.set_title("a step of eight processes in four stages")


def _losses(axes: Axes, processes: "Processes") -> None:
    curves = (
        (processes.alone, MUTED, 4.0, "one process"),
        (processes.whole, SERIES[0], 1.6, "four stages"),
        (processes.skipping, SERIES[2], 1.6, f"… {100 * processes.skipping.skipped:.0f} % skipped"),
    )
    for found, colour, width, label in curves:
        axes.plot(range(1, len(found.losses) + 1), found.losses, color=colour, linewidth=width, label=label)
    axes.set_xlabel("step")
    axes.set_title("training loss of a small model, nats per token")
    axes.legend(loc="upper right", labelcolor="linecolor")
