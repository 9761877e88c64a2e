"""Plot of a plan of `farloop plan`.

A map of stages and sites with the routes of the microbatches, a step over time, and the alternatives. Without
pipelines between nodes, the map shows each node's sync with the coordinator: rate, bits and steps.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

from farloop.monitoring.units import seconds_text
from farloop.planner.inventory import Inventory
from farloop.planner.plan import Plan
from farloop.plots.style import GOOD, GRID, INK, MUTED, SERIES, WARN, beside, figure, rows

_LINES: Final = (*SERIES, "#0e7490", "#7c5800", "#be185d", "#4d7c0f")
"""As many paths have a colour of their own; of more, only the slowest have."""

_MOST_COLOURED = 10
_MOST_LABELS = 64  # nodes that are named

_KINDS: Final = (("F", "forward", SERIES[0]), ("L", "loss", SERIES[2]), ("B", "backward", SERIES[1]))


def draw(path: Path, inventory: Inventory, plan: Plan) -> None:
    piped = len(plan.layout.stages) > 1
    sites = _rows(inventory, plan)
    height = min(13.0, max(6.4, 2.2 + 0.46 * len(sites))) if piped else min(12.0, max(5.2, 1.8 + 0.3 * len(sites)))
    with figure(path, 14.5, height, font_size=9.5) as drawn:
        drawn.get_layout_engine().set(w_pad=0.14, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        halves: Any = drawn.subfigures(1, 2, width_ratios=(1.45, 1.0))
        left, right = halves
        _title(drawn, inventory, plan)
        (_ways if piped else _star)(left.subplots(), inventory, plan, sites)
        if piped:
            upper, lower = right.subplots(2, 1, height_ratios=(1.1, 1.0))
            _step(upper, plan)
            _lost(lower, plan)
        else:
            _lost(right.subplots(), plan)


def _title(drawn: Figure, inventory: Inventory, plan: Plan) -> None:
    drawn.suptitle(
        f"{inventory.name or 'A plan'}  ·  mode {plan.mode.value}, {plan.why}",
        x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK,
    )  # fmt: skip
    words = [
        f"{len(inventory.nodes)} nodes, {len(plan.islands)} islands",
        f"a step {seconds_text(plan.step_s)}",
        _h_words(plan) + ("" if plan.sync_s is None else f", then a sync of {seconds_text(plan.sync_s)}"),
        f"{100 * plan.compute_share:.0f} % of a round computes" if plan.round_s and plan.compute_share else "",
    ]
    if plan.suspects:
        words.append(f"{len(plan.suspects)} suspect links not used")
    drawn.supxlabel("   ·   ".join(word for word in words if word), color=MUTED, fontsize=9.5, x=0.012, ha="left")


def _h_words(plan: Plan) -> str:
    if plan.sync is None or not plan.sync.rates:
        return f"H = {plan.h}"
    steps = [rate.h for rate in plan.sync.rates.values()]
    return f"H = {min(steps)}" if min(steps) == max(steps) else f"H = {min(steps)} to {max(steps)}"


def _rows(inventory: Inventory, plan: Plan) -> list[str]:
    """The sites from top to bottom, near ones beside each other: from the first, always to the nearest left."""
    first = {node.site: node for node in reversed(inventory.nodes)}
    left = list(dict.fromkeys(node.site for node in inventory.nodes))
    found = [left.pop(0)]

    def far(site: str) -> float:
        link = inventory.link(first[found[-1]], first[site])
        return link.seconds(max(1.0, inventory.model.activation_bytes)) if link is not None else float("inf")

    while left:
        near = min(left, key=lambda site: (far(site), left.index(site)))
        left.remove(near)
        found.append(near)
    return found


def _ways(axes: Axes, inventory: Inventory, plan: Plan, sites: Sequence[str]) -> None:
    """Stages from left to right, sites from top to bottom; a line is the way of a source's microbatches."""
    site = {node.name: node.site for node in inventory.nodes}
    place = _places(plan, site, sites)
    for row in range(len(sites)):
        axes.axhspan(row - 0.5, row + 0.5, color=GRID, alpha=0.45 if row % 2 == 0 else 0.0, linewidth=0, zorder=0)
    seconds = dict(plan.source_s)
    order = sorted(plan.layout.paths, key=lambda path: -seconds[path.source])
    sources = list(dict.fromkeys(path.source for path in order))
    for number, path in reversed(list(enumerate(order))):
        rank = sources.index(path.source)
        own = rank < _MOST_COLOURED
        colour = _LINES[rank % len(_LINES)] if own else "#b9bec6"
        for begin, end in itertools.pairwise(place[hop.node] for hop in path.hops):
            _bend(axes, begin, end, colour, 3.0 if own else 0.9, 0.9 if own else 0.5, zorder=2 + 0.001 * number)
    few = len(inventory.nodes) <= _MOST_LABELS
    colours = {hop.node: _LINES[sources.index(path.source) % len(_LINES)] for path in reversed(order)
               for hop in path.hops if sources.index(path.source) < _MOST_COLOURED}  # fmt: skip
    for name, (x, y) in place.items():
        source = name in seconds
        colour = colours.get(name, "#9aa1ab")
        axes.plot(
            [x], [y], marker="s" if source else "o", markersize=(9.5 if source else 8.5) if few else 3.2,
            markerfacecolor=colour if source else "white", markeredgecolor=colour,
            markeredgewidth=2.4 if few else 0.9, zorder=4,
        )  # fmt: skip
        if few:
            back = {"facecolor": "white", "alpha": 0.72, "linewidth": 0, "pad": 0.6}
            beside(axes, name, (x, y), (0, -8), ha="center", va="top", fontsize=7.5, color=INK, zorder=5, bbox=back)
    stages = plan.layout.stages
    axes.set_xticks(
        range(len(stages)),
        [f"stage {number}\nlayers {stage.first}–{stage.stop - 1}" for number, stage in enumerate(stages)],
        color=INK,
    )
    axes.xaxis.tick_top()
    rows(axes, len(sites), sites, above=0.55)
    axes.set_xlim(-0.6, len(stages) - 0.4)
    axes.grid(visible=False)
    axes.tick_params(axis="both", length=0)
    shown = sources[:_MOST_COLOURED]
    handles = [
        mpl.lines.Line2D([], [], color=_LINES[number], linewidth=3, label=f"{name}  {seconds_text(seconds[name])}")
        for number, name in enumerate(shown)
    ]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.015),
        ncols=min(5, len(handles)),
        title=f"sources (squares) and their step time{'' if len(sources) <= len(shown) else ', the slowest'}",
        title_fontsize=8.5,
        fontsize=8.5,
        handlelength=1.4,
    )


def _places(plan: Plan, site: dict[str, str], sites: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Where each node stands; several of one site and stage beside each other."""
    found: dict[str, tuple[float, float]] = {}
    for number, stage in enumerate(plan.layout.stages):
        for row, name in enumerate(sites):
            here = [node for node in stage.replicas if site[node] == name]
            wide = min(0.26, 0.8 / max(1, len(here)))
            for index, node in enumerate(here):
                offset = index - (len(here) - 1) / 2
                found[node] = (number + wide * offset, row + 0.16 * (index % 2) * (len(here) > 2))
    return found


def _bend(
    axes: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    width: float,
    alpha: float,
    zorder: float,
) -> None:
    """A curve that begins and ends level."""
    (x0, y0), (x1, y1) = begin, end
    reach = 0.5 * (x1 - x0)
    curve = Curve(
        [(x0, y0), (x0 + reach, y0), (x1 - reach, y1), (x1, y1)],
        [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
    )
    axes.add_patch(
        PathPatch(
            curve, facecolor="none", edgecolor=colour, linewidth=width, alpha=alpha, zorder=zorder, capstyle="round"
        )
    )


def _star(axes: Axes, inventory: Inventory, plan: Plan, sites: Sequence[str]) -> None:
    """Sites and nodes to the left, the coordinator to the right; a line is as thick as its link is fast."""
    order = [node for site in sites for node in inventory.nodes if node.site == site]
    ups = {node.name: inventory.uplink(node) for node in order}
    rates = {name: link.bytes_per_s for name, link in ups.items() if link is not None}
    fastest = max(rates.values(), default=1.0)
    hub = (1.0, (len(order) - 1) / 2)
    for index, node in enumerate(order):
        colour = _LINES[sites.index(node.site) % len(_LINES)]
        rate = rates.get(node.name, 0.0)
        if rate:
            _bend(axes, (0.0, float(index)), hub, colour, 0.6 + 3.0 * (rate / fastest) ** 0.5, 0.75, zorder=2)
        axes.plot([0.0], [index], marker="o", markersize=8, color=colour, zorder=4)
        words = node.name
        if plan.sync is not None and node.name in plan.sync.rates:
            own = plan.sync.rates[node.name]
            words += f"   {own.bits} bit, H = {own.h}"
        beside(axes, words, (0.0, index), (-12, 0), ha="right", va="center", color=INK, fontsize=8.5)
    axes.plot([hub[0]], [hub[1]], marker="s", markersize=17, color=INK, zorder=4)
    size = f"\n{8 * inventory.hub.in_bytes_per_s / 1e9:g} Gbit/s in" if inventory.hub is not None else ""
    beside(axes, f"coordinator{size}", hub, (0, 16), ha="center", va="bottom")
    for site in sites:
        own_rates = {rates[node.name] for node in order if node.site == site and node.name in rates}
        if own_rates:
            at = [index for index, node in enumerate(order) if node.site == site]
            axes.annotate(
                f"{site}: {8 * min(own_rates) / 1e6:g} Mbit/s each", (0.2, sum(at) / len(at)), fontsize=8.5,
                color=_LINES[sites.index(site) % len(_LINES)], va="center",
                bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.5}, zorder=5,
            )  # fmt: skip
    axes.set_xlim(-0.55, 1.12)
    axes.set_ylim(len(order) - 0.4, -0.8)
    axes.set_axis_off()
    axes.set_title("sync of each node with the coordinator: bits, and inner steps between syncs")


def _step(axes: Axes, plan: Plan) -> None:
    """A step of the slowest source: what each node of its path does when."""
    slowest = max(plan.source_s, key=lambda one: one[1])[0]
    nodes = list(dict.fromkeys((beat.stage, beat.node) for beat in sorted(plan.beats, key=lambda beat: beat.start_s)))
    shown = nodes[:12]
    for kind, label, colour in _KINDS:
        for row, (_, name) in enumerate(shown):
            bars = [(beat.start_s, beat.stop_s - beat.start_s) for beat in plan.beats
                    if beat.node == name and beat.kind == kind]  # fmt: skip
            if bars:
                axes.broken_barh(bars, (row - 0.33, 0.66), facecolors=colour, edgecolor="white", linewidth=0.5)
        axes.plot([], [], color=colour, linewidth=6, label=label)
    rows(axes, len(shown), [f"{name}  · {stage}" for stage, name in shown], above=0.6)
    axes.set_xlim(0, plan.step_s or 1.0)
    axes.set_xlabel("seconds")
    axes.set_title(f"a step of the slowest source, {slowest}: its path, node · stage")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def _lost(axes: Axes, plan: Plan) -> None:
    """The alternatives, as multiples of the chosen plan."""
    found = plan.alternatives
    if not found:
        axes.set_axis_off()
        axes.text(0.0, 0.9, "No alternative was planned.", color=MUTED, transform=axes.transAxes)
        return
    bars: list[tuple[str, float, float, str]] = []
    for of in dict.fromkeys(one.of for one in found):
        alike = [one for one in found if one.of == of]
        chosen = "the star, which runs" if "star" in of else f"this plan: {of}"
        bars.append((chosen, 1.0, alike[0].chosen_s, GOOD))
        bars += [(one.name, one.factor, one.seconds, WARN if one.factor > 1 else SERIES[0]) for one in alike]
    for row, (name, factor, seconds, colour) in enumerate(bars):
        axes.barh(row, factor, height=0.4, color=colour, alpha=0.85)
        beside(axes, name, (0.0, row - 0.24), (0, 2), va="bottom", color=INK)
        text = f"{seconds_text(seconds)}   × {factor:.2f}"
        beside(axes, text, (factor, row), (5, 0), va="center", color=colour, fontweight="bold")
    axes.axvline(1.0, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.38 * max(factor for _, factor, _, _ in bars))
    rows(axes, len(bars), above=0.75)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.set_title("this plan and its alternatives, predicted")
