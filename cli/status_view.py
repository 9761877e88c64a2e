"""The terminal view of a run, for `farloop status`, `top` and `demo`: from a view model to what rich draws.

Colours are the sixteen of the terminal's own theme, so the view suits light and dark ones.
"""

import io
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farloop.monitoring.status import LinkStatus, MachineStatus, NicStatus, Status, UplinkStatus
from farloop.monitoring.status_summary import EventView, NodeView, RunView, WindowView, anomaly_lines, validation_text
from farloop.monitoring.units import NOTHING, duration_text, plural, rate_text, size_text, thinned
from farloop.planner.inventory import COORDINATOR

SHOWN = 6  # recent events that are shown

MARGIN = (1, 1)

ROWS_AROUND = 6
"""Rows that are not the head, nodes or events: the margin, the header of the nodes, blank ones, the cursor's line."""

RECENT_HEAD_ROWS = 2
MORE_ROWS = 2  # where there are more nodes than fit
NAME_COLUMNS, WIDE_NAME_COLUMNS = 16, 24  # longer names are cut
WIDE = 104  # columns from which the node table has all of its columns
_STYLES = {"good": "green", "wait": "yellow", "bad": "red", "": ""}  # by tone

_EVENT_STYLES = {"refused": "red", "alarm": "bold red", "anchor": "red", "stalled": "red", "delta": "yellow",
                 "dropped": "yellow", "over": "green"}  # fmt: skip
_COLUMNS = ("node", "state", "step", "loss", "tokens/s", "now", "up", "down", "H", "compute")
_WIDE_ONLY = frozenset({"tokens/s", "up", "down", "H"})
_BARS = "▁▂▃▄▅▆▇█"


def draw(
    view: RunView | None,
    *,
    width: int,
    max_nodes: int,
    max_recent: int = SHOWN,
    link: str = "",
    eta_s: float = math.inf,
) -> RenderableType:
    """The whole view; `eta_s` is infinite when unknown, `view` None before the first status."""
    if view is None:
        return Padding(Text("waiting for the coordinator …", style="dim"), MARGIN)
    parts: list[RenderableType] = [head(view, width=width, link=link, eta_s=eta_s)]
    if view.nodes:
        parts += [Text(), _nodes(view, max_nodes, wide=width >= WIDE)]
    if max_recent and view.events:
        parts += [Text(), recent_table(view.events[-max_recent:], wide=width >= WIDE)]
    return Padding(Group(*parts), MARGIN)


def head(view: RunView, *, width: int, link: str = "", eta_s: float = math.inf) -> RenderableType:
    """Run name, progress, stall reason, alarms and totals: all but nodes and events."""
    parts: list[RenderableType] = [_headline(view, link), _progress(view, eta_s), *troubles(view), Text()]
    return Group(*parts, _facts(view, wide=width >= WIDE))


def troubles(view: RunView) -> list[Text]:
    """Why the run does not progress, its alarms, and its notes."""
    told = [Text(view.why, style="bold red" if view.tone == "bad" else "dim")] * bool(view.why)
    told += [Text(f"! {alarm}", style="bold red") for alarm in view.alarms]
    return told + [Text(f"~ {line}", style="yellow") for line in view.notes]


def fitting(view: RunView | None, *, width: int, height: int) -> dict[str, int]:
    """How many nodes and events fit into this height, as arguments of `draw`: nodes come first."""
    if view is None:
        return {"max_nodes": 1, "max_recent": 0}
    inside = Console(width=max(width - 2 * MARGIN[1], 1), file=io.StringIO())
    room = height - ROWS_AROUND - len(inside.render_lines(head(view, width=width)))
    max_nodes = max(room if len(view.nodes) <= room else room - MORE_ROWS, 1)
    left = room - min(len(view.nodes), max_nodes) - RECENT_HEAD_ROWS
    return {"max_nodes": max_nodes, "max_recent": min(SHOWN, max(0, left // (1 if width >= WIDE else 2)))}


def recent_table(events: Sequence[EventView], *, wide: bool) -> RenderableType:
    """Events in their order: age, node, kind and code, and the sentence, which folds on a narrow screen."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True, max_width=16 if wide else 10, overflow="ellipsis")
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for event in events:
        sentence = Text.assemble(
            event.sentence,
            (f" {event.detail}" if wide and event.detail else "", "dim"),
            (f"  {event.times}" if event.times else "", "bold"),
        )
        kind = Text.assemble((f"{event.kind} ", "dim"), (event.code, _EVENT_STYLES.get(event.kind, "cyan")))
        table.add_row(event.age, Text(event.node, style="bold"), kind, sentence)
    return Group(Text("recent events", style="dim"), table)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The values as bars from the lowest to the highest; more than fit are thinned out, first and last kept."""
    finite = thinned([value for value in values if math.isfinite(value)], width)
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_BARS[round((value - low) / span * 7) if span else 0] for value in finite)


def _headline(view: RunView, link: str) -> RenderableType:
    took_part = f"{plural(len(view.nodes), 'node')} took part"
    nodes = took_part if view.state == "finished" else plural(view.live, "node")
    facts = "".join(f" · {fact}" for fact in (*view.facts, nodes, link) if fact)
    left = Text.assemble((view.name, "bold cyan"), facts)
    style = "green" if view.state == "training" else f"bold {_STYLES[view.tone]}"
    right = Text.assemble((view.state, style), (f"  {view.lasted}" if view.lasted else "", "bold"))
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _progress(view: RunView, eta_s: float) -> RenderableType:
    text = Text()
    text.append(f"step {view.position:,.0f} of {view.steps:,}", style="bold")
    text.append(f"   {view.done}")
    if math.isfinite(eta_s) and view.state == "training":
        text.append(f"   {duration_text(eta_s)} left", style="cyan")
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    done = "green" if view.state == "finished" else "cyan"
    grid.add_row(ProgressBar(total=view.steps, completed=view.position, style="bright_black", complete_style=done,
                             finished_style="green"), text)  # fmt: skip
    return grid


def _facts(view: RunView, *, wide: bool) -> RenderableType:
    run = view.status["run"]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_row("validation loss", _validation(view))
    steps = Text.assemble(view.outer_steps, (f"  {view.commits}, {view.tokens} tokens", "dim"))
    grid.add_row("outer steps", steps)
    traffic = Text(f"{view.up} up, {view.down} down")
    if view.fewer:
        traffic.append(f"  {view.fewer} less", style="bold green" if view.reduction > 1 else "")
        traffic.append(" than fp32 data parallel", style="dim")
    grid.add_row("traffic", traffic)
    if (uplink := view.status.get("uplink")) is not None and (uplink["bytes_per_s"] or uplink["held_s"]):
        grid.add_row("uplink", _uplink(uplink))
    if run.get("revision", 0):
        grid.add_row("revision", Text.assemble(f"{run['revision']}", (f"  {'; '.join(run['changed'])}", "dim")))
    if view.windows:
        legend = "   ● delta is in   ○ expected" if wide else ""
        grid.add_row("windows", _windows(view.windows).append(legend, style="dim"))
    return grid


def _validation(view: RunView) -> Text:
    if not view.losses:
        return Text("not scored yet", style="dim")
    first, last = view.losses[0], view.losses[-1]
    begin = f"{validation_text(first)} at step {view.status['evaluations'][0]['position']:,.0f}"
    if len(view.losses) == 1:
        return Text(begin)
    better = first is not None and last is not None and last < first
    return Text.assemble(
        f"{begin} → ",
        (validation_text(last), "bold green" if better else "bold red"),
        (f"  {sparkline([math.nan if loss is None else loss for loss in view.losses])}", "cyan"),
    )


def _uplink(uplink: UplinkStatus) -> Text:
    rate = uplink["bytes_per_s"]
    most = "no limit now" if rate is None else f"at most {rate_text(8 * rate)}"
    quiet = " in quiet hours" if uplink["quiet"] else ""
    return Text.assemble(most + quiet, (f"  transfers have waited {duration_text(uplink['held_s'])} for it", "dim"))


def _windows(windows: Sequence[WindowView], limit: int = 12) -> Text:
    """Per fragment a dot for every expected node: filled when its delta is in."""
    text = Text()
    for window in windows[:limit]:
        text.append("   " if text else "")
        text.append(f"f{window.fragment} ", style="default" if window.arrived else "dim")
        if window.expected > 8:
            text.append(f"{window.arrived}/{window.expected}", style="cyan" if window.arrived else "dim")
        else:
            text.append("●" * window.arrived, style="green" if window.state != "open" else "cyan")
            text.append("○" * len(window.missing), style="dim")
    if len(windows) > limit:
        text.append(f"   and {len(windows) - limit} more", style="dim")
    return text


def _nodes(view: RunView, max_nodes: int, *, wide: bool) -> RenderableType:
    table, widest = _table(), WIDE_NAME_COLUMNS if wide else NAME_COLUMNS
    for column in _COLUMNS:
        if wide or column not in _WIDE_ONLY:
            words = column == "now"
            right = column not in ("node", "state", "now")
            table.add_column(column, justify="right" if right else "left", ratio=1 if words else None, no_wrap=True,
                             overflow="ellipsis", max_width=None if words else widest)  # fmt: skip
    for node in view.nodes[:max_nodes]:
        cells = node_cells(node, view)
        table.add_row(*(cells[str(column.header)] for column in table.columns), style="" if node.connected else "dim")
    hidden = len(view.nodes) - max_nodes
    return Group(table, Text(f"\nand {hidden} more", style="dim")) if hidden > 0 else table


def node_cells(node: NodeView, view: RunView) -> dict[str, Text]:
    told = node.status
    mark = "●" if node.connected else "✓" if node.tone == "good" else "○"
    return {
        "node": Text.assemble((node.name, "bold"), (f" {node.part}" if node.part else "", "dim")),
        "state": Text(f"{mark} {node.state}", style=_STYLES[node.tone]),
        "step": Text(f"{told['inner_steps']:,}"),
        "loss": Text(node.loss, style="" if node.loss_is_finite else "bold red"),
        "tokens/s": Text(node.speed),
        "now": Text(node.now, style="dim"),
        "up": Text.assemble(node.up, (f" {own}" if (own := told.get("codec_up")) else "", "dim")),
        "down": Text(node.down),
        "H": Text.assemble(
            str(told.get("h", view.status["run"]["h"])), (f" τ {told['tau']}" if "tau" in told else "", "dim")
        ),
        "compute": Text(node.compute, style=_STYLES[node.compute_tone]),
        "heard": Text(node.heard),
    }


# --- machines and links: `farloop status --network`

_STALE_S = 1800.0


def draw_network(status: Status) -> RenderableType:
    """Two tables: machines with their network cards, and each direction of each link."""
    seen = status.get("inventory")
    if seen is None or not seen["nodes"]:
        return Padding(Text("nothing is known yet: no node has told of its machine", style="dim"), MARGIN)
    parts: list[RenderableType] = [_machines(seen["nodes"])]
    if seen["links"]:
        parts += [Text(), _links(seen["links"])]
    watch = status.get("watch")
    if watch is not None and watch["adapt"] != "off":
        told = anomaly_lines(status) or [watch["why_not"] or "no node is slower than in its earlier rounds"]
        parts += [Text(), *(Text(line, style="dim") for line in told)]
    return Padding(Group(*parts), MARGIN)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), header_style="dim", border_style="dim")
    table.show_edge = table.pad_edge = False
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _machines(machines: list[MachineStatus]) -> Table:
    table = _table("node", "site", "cards", "memory", "s/step", "dial in", right=("memory", "s/step"))
    for told in machines:
        step_s = told["seconds_per_step"]
        table.add_row(
            Text(told["name"], style="bold"),
            told["site"] or NOTHING,
            Text(", ".join(_card(nic) for nic in told["nics"] if nic["active"]) or NOTHING),
            size_text(told["memory_bytes"]) if told["memory_bytes"] else NOTHING,
            f"{step_s:.3g}" if step_s is not None else NOTHING,
            _reach(told),
            style="" if told["connected"] else "dim",
        )
    return table


def _card(nic: NicStatus) -> str:
    rate = f" {rate_text(8 * nic['bytes_per_s'])}" if nic["bytes_per_s"] else ""
    return f"{nic['name']} {nic['kind']}{rate}{'' if nic['usable'] else ' (not usable)'}"


def _reach(told: MachineStatus) -> Text:
    if not told["address"]:
        return Text("dials out", style="dim")
    if told["reachable"] is None:
        return Text("not tried", style="yellow")
    return Text("reached", style="green") if told["reachable"] else Text("not reached", style="red")


def _links(links: list[LinkStatus]) -> Table:
    table = _table(
        "from", "to", "rate", "round trip", "sent again", "measured", right=("rate", "round trip", "sent again")
    )
    for column in table.columns[:2]:  # names of nodes may be long, and are folded where they have to
        column.min_width = len(COORDINATOR)
    for link in links:
        rate, rtt_s, again = link["bytes_per_s"], link["rtt_s"], link["retransmit_ratio"]
        table.add_row(
            link["from"],
            link["to"],
            Text(rate_text(8 * rate), style="bold") if rate else Text(NOTHING),
            f"{1000 * rtt_s:.1f} ms" if rtt_s is not None else NOTHING,
            f"{100 * again:.2f}%" if again is not None else NOTHING,
            _measured(link),
        )
    return table


def _measured(link: LinkStatus) -> Text:
    age_s = link["age_s"]
    if age_s is None:
        return Text(link["why"] or "not yet", style="dim")
    text = Text(f"by {link['measured_by']}, ")
    text.append(f"{duration_text(age_s)} ago", style="yellow" if age_s > _STALE_S else "")
    return text.append("  doubted: slower than a way round", style="red") if link["suspect"] else text
