"""The plot of `farloop bench routing`: where the mode turns, time of planning, what relays and a replan are worth."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from farloop.bench.figures import GOOD, GRID, INK, MUTED, SERIES, STYLE
from farloop.bench.routing import Findings


def plot(path: Path, findings: Findings, caption: str) -> None:
    """Write the figure; SVG, PNG or PDF by its name."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 8.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
        (modes, planning), (relays, slow) = figure.subplots(2, 2)
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
        for offset, seconds, colour, label in ((-0.17, predicted, "#9db7e8", "predicted"),
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
