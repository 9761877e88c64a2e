"""The machines of a run and the links between them, as `farloop status --network` shows them. Pure."""

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from farloop.cli.screen import MARGIN
from farloop.coordinator.routing.inventory import COORDINATOR
from farloop.monitoring.gist import anomaly_lines
from farloop.monitoring.status import LinkStatus, MachineStatus, NicStatus, Status
from farloop.monitoring.units import NOTHING, duration_text, rate_text, size_text

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
