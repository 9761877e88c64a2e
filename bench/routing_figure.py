"""The plot of `farloop bench routing`: where the mode turns, time of planning, what relays and a replan are worth."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from farloop.bench.figures import GOOD, GRID, INK, MUTED, SERIES, STYLE
from farloop.bench.routing import Findings

if TYPE_CHECKING:
    from farloop.bench.routing_processes import Processes

_PALE = "#9db7e8"
"""Predicted, beside what was measured."""


def plot(path: Path, findings: Findings, caption: str, processes: "Processes | None" = None) -> None:
    """Write the figure; SVG, PNG or PDF by its name. With `processes` it has a column more, of what was measured."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5 if processes is None else 18.5, 8.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
        (modes, planning, *steps), (relays, slow, *losses) = figure.subplots(2, 2 if processes is None else 3)
        if processes is not None:
            _steps(steps[0], processes)
            _losses(losses[0], processes)
        _modes(modes, findings)
        _planning(planning, findings)
        _relays(relays, findings)
        _slow(slow, findings)
        figure.supxlabel(caption, color=MUTED, fontsize=8.5, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _modes(axes: Axes, findings: Findings) -> None:
    hs = [row.h for row in findings.modes]
    inside, across = [row.inside_s for row in findings.modes], [row.across_s for row in findings.modes]
    axes.plot(hs, inside, color=SERIES[0], linewidth=2.2, marker="o", label="A: fragments cross")
    axes.plot(hs, across, color=SERIES[2], linewidth=2.2, marker="o", label="B: activations cross")
    axes.axvline(findings.h_star, color=MUTED, linestyle=":", linewidth=1.2)
    axes.annotate(f"H* = {findings.h_star:.2f}", (findings.h_star, max(inside)), xytext=(6, -4),
                  textcoords="offset points", color=INK)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(hs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(FixedLocator([0.2, 0.5, 1, 2, 5]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
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
        axes.annotate(f"{row.cpu_s:.2g} s", (place, row.cpu_s), xytext=(0, 4), textcoords="offset points",
                      ha="center", color=SERIES[0], fontweight="bold")  # fmt: skip
    axes.set_yscale("log")
    axes.set_axisbelow(True)
    axes.set_ylim(0.05, 60)
    axes.yaxis.set_major_locator(FixedLocator([0.1, 1, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.set_xticks(range(len(findings.planning)), [f"{row.nodes} nodes" for row in findings.planning], color=INK)
    axes.grid(visible=False, axis="x")
    axes.set_title("seconds of one core to make a plan")
    axes.legend(loc="upper left")


def _relays(axes: Axes, findings: Findings) -> None:
    found = findings.relaying
    rows = (("star", found.star_s, found.star_simulated_s), ("relay per site", found.relay_s, found.relay_simulated_s))
    for place, (name, predicted, simulated) in enumerate(rows):
        for offset, seconds, colour, label in ((-0.17, predicted, _PALE, "predicted"),
                                               (0.17, simulated, SERIES[0], "simulated")):  # fmt: skip
            axes.barh(place + offset, seconds, height=0.3, color=colour, label=label if place == 0 else None)
            axes.annotate(f"{seconds:.1f} s", (seconds, place + offset), xytext=(5, 0), textcoords="offset points",
                          va="center", color=INK)  # fmt: skip
        axes.annotate(name, (0, place - 0.36), xytext=(0, 2), textcoords="offset points", color=INK)
    axes.set_axisbelow(True)
    axes.set_ylim(1.5, -0.65)
    axes.set_xlim(0, 1.2 * found.star_s)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds")
    factor = found.star_simulated_s / found.relay_simulated_s
    axes.set_title(f"a sync of 16 nodes at 4 sites, 100 MB each: {factor:.1f} times")
    axes.legend(loc="lower right")


def _slow(axes: Axes, findings: Findings) -> None:
    found = findings.slow_link
    axes.plot(range(len(found.round_s)), found.round_s, color=SERIES[0], linewidth=2.0, marker="o", markersize=4)
    top = max(found.round_s)
    marks = (
        (found.slow_from, "n3's uplink\n8 times slower", "#b86e00"),
        (found.found_at, "named", SERIES[3]),
        (found.replanned_at, f"replanned:\n{found.after}", GOOD),
    )
    for place, (number, words, colour) in enumerate(marks):
        axes.axvline(number, color=colour, linestyle=":", linewidth=1.4)
        left = place == 0
        axes.annotate(words, (number, (0.32, 0.12, 0.82)[place] * top), xytext=(-6 if left else 6, 0), color=colour,
                      textcoords="offset points", va="center", ha="right" if left else "left")  # fmt: skip
    axes.set_ylim(0, 1.12 * top)
    axes.set_xlabel("round")
    axes.set_title("seconds of a round when a link becomes slow, simulated")


def _steps(axes: Axes, processes: "Processes") -> None:
    for place, step in enumerate(processes.steps):
        both = ((-0.17, step.made.predicted_s, _PALE, "predicted"), (0.17, step.made.measured_s, SERIES[0], "measured"))
        for offset, seconds, colour, label in both:
            axes.barh(place + offset, 1e3 * seconds, height=0.3, color=colour, label=label if place == 0 else None)
            axes.annotate(f"{1e3 * seconds:.1f} ms", (1e3 * seconds, place + offset), xytext=(5, 0), color=INK,
                          textcoords="offset points", va="center")  # fmt: skip
        axes.annotate(step.name, (0, place - 0.36), xytext=(0, 2), textcoords="offset points", color=INK)
    axes.set_axisbelow(True)
    axes.set_ylim(len(processes.steps) - 0.5, -0.65)
    axes.set_xlim(0, 1.25e3 * max(max(step.made.measured_s, step.made.predicted_s) for step in processes.steps))
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds, median")
    axes.set_title("a step of eight processes in four stages")
    axes.legend(loc="lower right")


def _losses(axes: Axes, processes: "Processes") -> None:
    learning = processes.learning
    rows = (
        (learning.alone, MUTED, 4.0, "one process"),
        (learning.whole, SERIES[0], 1.6, "four stages"),
        (learning.skipping, SERIES[2], 1.6, f"… {100 * learning.skipping.skipped:.0f} % left out"),
    )
    for found, colour, width, label in rows:
        axes.plot(range(1, len(found.losses) + 1), found.losses, color=colour, linewidth=width, label=label)
    axes.set_xlabel("step")
    axes.set_title("training loss of a small model, nats per token")
    axes.legend(loc="upper right", labelcolor="linecolor")
