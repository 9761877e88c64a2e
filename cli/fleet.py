"""`farloop doctor --fleet`: every node of a running run, by what its coordinator knows."""

from collections.abc import Iterable

from rich.console import Console, Group
from rich.text import Text

from farloop.cli.findings import DRIFT_S, Finding, congestion_finding, fail, ok, wall_clock, warn
from farloop.cli.options import table
from farloop.cli.status import DEFAULT_URL, fetch
from farloop.monitoring.status import LinkStatus, MachineStatus, NodeStatus, Status
from farloop.monitoring.status_summary import anomaly_lines, cleaned, version_lines
from farloop.monitoring.units import NOTHING, duration_text, plural, rate_text, size_text
from farloop.wire.reasons import Reason

SENT_AGAIN = 0.02  # share of the segments from which on a link loses too much
COORDINATOR = "coordinator"
_IN_ORDER = {Reason.DRAINED.sentence, Reason.RUN_FINISHED.sentence}


def examine_fleet(url: str) -> tuple[Status, list[Finding]]:
    """The status of the coordinator at `url`, and what is to be done. Raises CommandError: there is no answer."""
    status = cleaned(fetch(url or DEFAULT_URL))
    return status, [wall_clock(url), *findings(status)]


def findings(status: Status) -> list[Finding]:
    """Of the run, then of each node, then of links."""
    run, here = status["run"], [node for node in status["nodes"] if node["connected"]]
    found = [_alarm(alarm) for alarm in status["alarms"]]
    if len(here) < run["nodes"] and run["state"] != "finished":
        fix = "start the others: farloop node NODE.toml; farloop doctor NODE.toml says what stops one"
        found.append(warn("nodes", f"{len(here)} of {run['nodes']} are connected", fix))
    fix = "upgrade one at a time, the coordinator first"
    found += [warn("versions", line.removeprefix("versions: "), fix) for line in version_lines(status)]
    machines = _machines(status)
    has_gpu = any(machine["devices"] for machine in machines.values())
    for node in status["nodes"]:
        found += _of_node(node)
        if (machine := machines.get(node["name"])) is not None and node["connected"]:
            found += _of_machine(machine, has_gpu=has_gpu)
            part = node["part"]["parameters"] / run["parameters"] if "part" in node else 1.0
            found += _of_disk(machine, int(part * run.get("node_disk_bytes", 0)))
    found += [finding for link in _links(status) for finding in _of_link(link, machines)]
    fix = "look at that node's log, its devices and its link; farloop explain names the windows that waited"
    found += [warn("slow", line, fix) for line in anomaly_lines(status)]
    if all(finding.level == "ok" for finding in found):
        found.append(ok("fleet", f"{plural(len(here), 'node')}: nothing to do"))
    return found


def _alarm(alarm: str) -> Finding:
    detail, _, fix = alarm.partition("; ")
    return fail("alarm", detail, fix or "the coordinator's log, and docs/monitoring.md#alerts, say what to do")


def _of_node(node: NodeStatus) -> Iterable[Finding]:
    name = node["name"]
    if not node["connected"] and node["reason"] not in _IN_ORDER:
        detail = f"{name} is away: {node['reason'] or 'it has not come back'}"
        fix = f"its log names the cause; start it again, or farloop run forget {name}"
        yield fail("away", detail, fix)
    if node["quarantine"]:
        fix = f"its deltas are measured, not merged: look at the data and the loss of {name} (docs/admission.md)"
        yield fail("quarantine", f"{name}: {node['quarantine']}", fix)
    if node.get("loss_is"):
        fix = "stop it; a lower learning rate, or its data, are the first things to look at"
        yield fail("loss", f"{name}: the loss is {node['loss_is']}", fix)


def _of_machine(machine: MachineStatus, *, has_gpu: bool) -> Iterable[Finding]:
    name = machine["name"]
    if has_gpu and not machine["devices"]:
        yield warn("gpu", f"{name} trains without one, others have them", "run nvidia-smi and farloop doctor there")
    for nic in machine["nics"]:
        if nic["active"] and not nic["usable"]:
            why, _, fix = nic["why"].partition("; ")
            yield warn("card", f"{name}: {nic['name']}: {why}", fix or "let the process open it")
    if machine["reachable"] is False:
        fix = "forward the port, or open it in the firewall"
        yield fail("reachable", f"{name}: the coordinator does not reach {machine['address']}", fix)
    if machine["unread"]:
        fix = "run as a user that may read them; training does without"
        yield warn("sysfs", f"{name}: not readable: {'; '.join(machine['unread'])}", fix)
    if (off_s := machine.get("clock_off_s")) is not None and abs(off_s) > DRIFT_S:
        fix = "set its clock by NTP: signed URLs may fail, and logs cannot be compared; training does not depend on it"
        yield warn("clock", f"{name}: {duration_text(abs(off_s))} {'ahead' if off_s > 0 else 'behind'}", fix)


def _of_disk(machine: MachineStatus, needed: int) -> Iterable[Finding]:
    free, used = machine.get("disk_free_bytes"), machine.get("disk_used_bytes") or 0  # none of an older coordinator
    if free is not None and free + used < needed:
        detail = f"{machine['name']}: {size_text(free)} free, {size_text(max(0, needed - used))} to come"
        fix = "make room, choose another [node] state_dir, or keep less: save_optimizer = false"
        yield fail("disk", detail, fix)


def _of_link(link: LinkStatus, machines: dict[str, MachineStatus]) -> Iterable[Finding]:
    ends = f"{link['from']} → {link['to']}"
    if link["suspect"]:
        yield warn("link", f"{ends} is much slower than a way around it", "a firewall or a route may throttle it")
    if (again := link["retransmit_ratio"]) is not None and again > SENT_AGAIN:
        fix = "look for a full or faulty hop, or limit what is sent: [node] uplink"
        yield warn("link", f"{ends}: {100 * again:.1f} % of the segments are sent again", fix)
    machine = machines.get(link["from"])
    if machine and link["to"] == COORDINATOR and machine["congestion"] and link["rtt_s"] is not None:
        finding = congestion_finding(machine["congestion"], link["rtt_s"], may_choose=True)
        if finding.level != "ok":
            yield warn("congestion", f"{machine['name']}: {finding.detail}", finding.fix)


def print_fleet(status: Status) -> None:
    """A row for each node: its machine, and its link."""
    there = table(
        "node", "state", "farloop", "devices", "disk free", "clock", left=("state",), fold=("node", "devices")
    )
    ways = table("node", "up", "down", "round trip", "sent again", fold=("node",))
    machines, links = _machines(status), {(link["from"], link["to"]): link for link in _links(status)}
    for node in status["nodes"]:
        machine, name = machines.get(node["name"]), node["name"]
        memory, free, off_s = None, None, None
        if machine:
            memory, free, off_s = machine["memory_bytes"], machine.get("disk_free_bytes"), machine.get("clock_off_s")
        there.add_row(
            name,
            Text(node["state"], "" if node["connected"] else "red"),
            (machine and machine["farloop"]) or NOTHING,
            (node["device"] or NOTHING) + (f", {size_text(memory)}" if memory else ""),
            size_text(free) if free is not None else NOTHING,
            f"{off_s:+.1f} s" if off_s is not None else NOTHING,
        )
        up, down = links.get((name, COORDINATOR)), links.get((COORDINATOR, name))
        rtt_s, again = (up["rtt_s"], up["retransmit_ratio"]) if up else (None, None)
        ways.add_row(
            name,
            _rate(up),
            _rate(down),
            f"{1000 * rtt_s:.1f} ms" if rtt_s is not None else NOTHING,
            f"{100 * again:.2f} %" if again is not None else NOTHING,
        )
    Console(highlight=False).print(Group(there, ways) if there.row_count else Text("no node has come yet", "dim"))


def _machines(status: Status) -> dict[str, MachineStatus]:
    return {machine["name"]: machine for machine in status["inventory"]["nodes"]} if "inventory" in status else {}


def _links(status: Status) -> list[LinkStatus]:
    return status["inventory"]["links"] if "inventory" in status else []


def _rate(link: LinkStatus | None) -> str:
    return rate_text(8 * link["bytes_per_s"]) if link and link["bytes_per_s"] else NOTHING
