"""What a run looks like in a terminal: status, top and the demo show it."""

import math
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farloop.coordinator.routing.inventory import COORDINATOR
from farloop.monitoring.status import (
    HappeningStatus,
    LinkStatus,
    MachineStatus,
    NicStatus,
    NodeStatus,
    Status,
    WindowStatus,
)
from farloop.monitoring.status_summary import anomaly_lines, ended_well, part_text, reduction, standing, sync_text
from farloop.monitoring.units import (
    NOTHING,
    count_text,
    duration_text,
    factor_text,
    loss_text,
    percent_text,
    plural,
    rate_text,
    size_text,
    speed_text,
)

# --- The last things that happened to nodes, deltas and alarms, as `farloop status` shows them.


SHOWN = 6

_STYLES = {"refused": "red", "alarm": "bold red", "anchor": "red", "stalled": "red", "delta": "yellow",
           "dropped": "yellow", "over": "green"}  # fmt: skip


def recent_table(happenings: Sequence[HappeningStatus], *, wide: bool, most: int = SHOWN) -> RenderableType:
    """The last of them in their order: age, whom it concerns, code, and sentence; on a narrow screen that folds."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True, max_width=16 if wide else 10, overflow="ellipsis")
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for happening in happenings[-most:]:
        sentence = Text(happening["sentence"])
        if happening["detail"]:
            sentence.append(f" ({happening['detail']})" if wide else "", style="dim")
        if happening["count"] > 1:
            sentence.append(f"  ×{happening['count']:,}", style="bold")
        code = happening["code"]
        style = _STYLES.get(happening["kind"], "cyan")
        kind = Text().append(f"{happening['kind']} ", style="dim")
        kind.append(code if code != happening["kind"] else "", style=style)
        age = duration_text(happening["age_s"]) + " ago"
        table.add_row(age, Text(happening["node"] or NOTHING, style="bold"), kind, sentence)
    return Group(Text("lately", style="dim"), table)


# --- The picture of a running run on a terminal: a pure function from a status to what rich draws.
#
# Colours are the sixteen of the terminal's own theme, so the picture suits light and dark ones.


MARGIN = (1, 1)

FIXED_ROWS = 13
"""Rows of the picture that are no nodes, no happenings and no alarms, and the line that the cursor stands in."""

RECENT_HEAD_ROWS = 2
MORE_ROWS = 2
"""Where there are more nodes than fit."""

NAME_COLUMNS, WIDE_NAME_COLUMNS = 16, 24
"""A longer name is cut."""

WIDE = 104
"""Columns from which the node table has all of its columns."""

_STATE_STYLES = {
    "training": "green",
    "finished": "green",
    "evaluating": "cyan",
    "waiting": "yellow",
    "joining": "yellow",
    "ready": "yellow",
    "paused": "yellow",
    "draining": "yellow",
}
_COLUMNS = ("node", "state", "step", "loss", "tokens/s", "now", "up", "down", "H", "compute")
_WIDE_ONLY = frozenset({"tokens/s", "up", "down", "H"})
_RUN_STYLES = {
    "waiting": "yellow",
    "training": "green",
    "held": "bold red",
    "holding": "bold red",
    "finished": "bold green",
}
_BARS = "▁▂▃▄▅▆▇█"


def draw(
    status: Status | None,
    *,
    width: int,
    max_nodes: int,
    max_recent: int = SHOWN,
    link: str = "",
    eta_s: float = math.inf,
) -> RenderableType:
    """The whole picture; `eta_s` is infinite when unknown, `status` None before the first one came."""
    if status is None:
        return Padding(Text("waiting for the coordinator …", style="dim"), MARGIN)
    parts: list[RenderableType] = [head(status, width=width, link=link, eta_s=eta_s)]
    if status["nodes"]:
        parts += [Text(), _nodes(status, max_nodes, wide=width >= WIDE)]
    if max_recent and (recent := status.get("recent")):
        parts += [Text(), recent_table(recent[-max_recent:], wide=width >= WIDE)]
    return Padding(Group(*parts), MARGIN)


def head(status: Status, *, width: int, link: str = "", eta_s: float = math.inf) -> RenderableType:
    """All but nodes and happenings: what the run is, how far it is, why it stands, what is wrong, and its numbers."""
    parts: list[RenderableType] = [_headline(status, link), _progress(status, eta_s), *troubles(status), Text()]
    return Group(*parts, _facts(status, wide=width >= WIDE))


def troubles(status: Status) -> list[Text]:
    """Why the run stands, if it does, and what is wrong."""
    style = "bold red" if status["run"]["state"] in ("held", "holding") else "dim"
    why = standing(status)
    told = [Text(why, style=style)] * bool(why)
    told += [Text(f"! {alarm}", style="bold red") for alarm in status["alarms"]]
    return told + [Text(f"~ {line}", style="yellow") for line in anomaly_lines(status)]


def fitting(status: Status | None, *, width: int, height: int) -> dict[str, int]:
    """How many nodes and happenings a picture of this height has room for, as `draw` takes them: nodes come first."""
    if status is None:
        return {"max_nodes": 1, "max_recent": 0}
    told = sum(1 + cell_len(line.plain) // max(width - 2, 1) for line in troubles(status))
    room = height - FIXED_ROWS - told
    max_nodes = max(room if len(status["nodes"]) <= room else room - MORE_ROWS, 1)
    left = room - min(len(status["nodes"]), max_nodes) - RECENT_HEAD_ROWS
    return {"max_nodes": max_nodes, "max_recent": min(SHOWN, max(0, left // (1 if width >= WIDE else 2)))}


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The values as bars from the lowest to the highest; more than fit are thinned out, first and last kept."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) > width:
        finite = [finite[round(index * (len(finite) - 1) / (width - 1))] for index in range(width)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_BARS[round((value - low) / span * 7) if span else 0] for value in finite)


def _headline(status: Status, link: str) -> RenderableType:
    run = status["run"]
    live = sum(node["connected"] for node in status["nodes"])
    nodes = f"{plural(len(status['nodes']), 'node')} took part" if run["state"] == "finished" else plural(live, "node")
    left = Text()
    left.append(run["name"], style="bold cyan")
    for fact in (run["method"], f"{run['codec_up']} up, {run['codec_down']} down", f"H {run['h']}", nodes, link):
        left.append(f" · {fact}" if fact else "")
    right = Text()
    right.append(run["state"], style=_RUN_STYLES[run["state"]])
    right.append(f"  {duration_text(run['started_s'])}" if run["started_s"] > 0 else "", style="bold")
    return _sides(left, right)


def _progress(status: Status, eta_s: float) -> RenderableType:
    run = status["run"]
    position = min(status["position"], run["steps"])
    text = Text()
    text.append(f"step {position:,.0f} of {run['steps']:,}", style="bold")
    text.append(f"   {percent_text(position / run['steps'])}")
    if math.isfinite(eta_s) and run["state"] == "training":
        text.append(f"   {duration_text(eta_s)} left", style="cyan")
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    done = "green" if run["state"] == "finished" else "cyan"
    grid.add_row(ProgressBar(total=run["steps"], completed=position, style="bright_black", complete_style=done,
                             finished_style="green"), text)  # fmt: skip
    return grid


def _facts(status: Status, *, wide: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_row("validation loss", _validation(status))
    grid.add_row("outer steps", _outer_steps(status))
    grid.add_row("traffic", _traffic(status))
    if status["run"].get("revision", 0):
        grid.add_row("revision", _revision(status))
    if any(window["expected"] for window in status["windows"]):
        legend = "   ● delta is in   ○ expected" if wide else ""
        grid.add_row("windows", _windows(status["windows"]).append(legend, style="dim"))
    return grid


def _validation(status: Status) -> Text:
    losses = [math.nan if (loss := evaluation["loss"]) is None else loss for evaluation in status["evaluations"]]
    if not losses:
        return Text("not scored yet", style="dim")
    if len(losses) == 1:
        return Text(f"{_finite_text(losses[0])} at step {status['evaluations'][0]['position']:,.0f}")
    text = Text(f"{_finite_text(losses[0])} → ")
    text.append(_finite_text(losses[-1]), style="bold green" if losses[-1] < losses[0] else "bold red")
    text.append(f"  {sparkline(losses)}", style="cyan")
    return text


def _finite_text(loss: float) -> str:
    return loss_text(loss) if math.isfinite(loss) else "no finite number"


def _outer_steps(status: Status) -> Text:
    tokens = sum(node["tokens"] for node in status["nodes"])
    text = Text(f"{status['outer_steps']:,}")
    text.append(
        f"  {plural(status['commits'], 'commit')}, round {status['round']:,}, {count_text(tokens)} tokens", style="dim"
    )
    return text


def _revision(status: Status) -> Text:
    run = status["run"]
    return Text(f"{run['revision']}").append(f"  {'; '.join(run['changed'])}", style="dim")


def _traffic(status: Status) -> Text:
    nodes = status["nodes"]
    up, down = sum(node["bytes_up"] for node in nodes), sum(node["bytes_down"] for node in nodes)
    text = Text(f"{size_text(up)} up, {size_text(down)} down")
    factor = reduction(status)
    if factor > 0:
        text.append(f"  {factor_text(factor)} less", style="bold green" if factor > 1 else "")
        text.append(" than fp32 data parallel", style="dim")
    return text


def _windows(windows: Sequence[WindowStatus], limit: int = 12) -> Text:
    """Per fragment a dot for every expected node: filled when its delta is in."""
    text = Text()
    for window in sorted(windows, key=lambda window: window["fragment"])[:limit]:
        expected, arrived = len(window["expected"]), len(window["arrived"])
        text.append("   " if text else "")
        text.append(f"f{window['fragment']} ", style="default" if arrived else "dim")
        if expected > 8:
            text.append(f"{arrived}/{expected}", style="cyan" if arrived else "dim")
        else:
            text.append("●" * arrived, style="green" if window["state"] != "open" else "cyan")
            text.append("○" * (expected - arrived), style="dim")
    if len(windows) > limit:
        text.append(f"   and {len(windows) - limit} more", style="dim")
    return text


def _nodes(status: Status, max_nodes: int, *, wide: bool) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), header_style="dim", border_style="dim")
    table.show_edge = table.pad_edge = False
    shown, widest = status["nodes"][:max_nodes], WIDE_NAME_COLUMNS if wide else NAME_COLUMNS
    for column in _COLUMNS:
        if wide or column not in _WIDE_ONLY:
            words = column == "now"
            right = column not in ("node", "state", "now")
            table.add_column(column, justify="right" if right else "left", ratio=1 if words else None, no_wrap=True,
                             overflow="ellipsis", max_width=None if words else widest)  # fmt: skip
    for node in shown:
        cells = node_cells(node, status)
        row = [cells[str(column.header)] for column in table.columns]
        table.add_row(*row, style="" if node["connected"] else "dim")
    hidden = len(status["nodes"]) - len(shown)
    return Group(table, Text(f"\nand {hidden} more", style="dim")) if hidden else table


def node_cells(node: NodeStatus, status: Status) -> dict[str, Text]:
    """What stands in each column of a node's row."""
    here = node["connected"]
    done = ended_well(node, status)
    style = "green" if done else _STATE_STYLES.get(node["state"], "red") if here else "red"
    mark = "●" if here else "✓" if done else "○"
    return {
        "node": Text.assemble((node["name"], "bold"), (f" {part}" if (part := part_text(node)) else "", "dim")),
        "state": Text(f"{mark} {node['state'] if here else 'finished' if done else 'away'}", style=style),
        "step": Text(f"{node['inner_steps']:,}"),
        "loss": Text(wrong, style="bold red") if (wrong := node.get("loss_is")) else Text(loss_text(node["loss"])),
        "tokens/s": Text(speed_text(node["tokens_per_s"]) if here else NOTHING),
        "now": Text(sync_text(node, status["windows"]), style="dim"),
        "up": Text.assemble(size_text(node["bytes_up"]), (f" {own}" if (own := node.get("codec_up")) else "", "dim")),
        "down": Text(size_text(node["bytes_down"])),
        "H": Text(str(node.get("h", status["run"]["h"]))),
        "compute": _share(node["compute_share"]),
    }


def _share(compute_share: float) -> Text:
    style = "green" if compute_share >= 0.9 else "yellow" if compute_share >= 0.6 else "red"
    return Text(percent_text(compute_share), style=style) if compute_share > 0 else Text(NOTHING)


def _sides(left: Text, right: Text) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


# --- The machines of a run and the links between them, as `farloop status --network` shows them.


_STALE_S = 1800.0


def draw_network(status: Status) -> RenderableType:
    """Two tables: machines with their best cards, and what is known of each direction of each link."""
    seen = status.get("inventory")
    if seen is None or not seen["nodes"]:
        return Padding(Text("nothing is known yet: no node has told of its machine", style="dim"), MARGIN)
    parts: list[RenderableType] = [_machines(seen["nodes"])]
    if seen["links"]:
        parts += [Text(), _links(seen["links"])]
    watch = status.get("watch")
    if watch is not None and watch["adapt"] != "off":
        told = anomaly_lines(status) or [watch["why_not"] or "nobody is slower than in its own rounds before"]
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
