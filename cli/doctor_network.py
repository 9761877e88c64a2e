"""What `farloop doctor` finds about a machine's network: cards, limits, buffers, and whether others can dial in.

Looks and tries; changes nothing. Buffers are judged by the bandwidth-delay product of the way to the coordinator: its
round trip is measured, its rate is what the coordinator has measured of this node, or else what the card could do.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from farloop.algo.spec import to_plain
from farloop.cli.address import Address
from farloop.cli.findings import Finding
from farloop.coordinator.connections import most_connections
from farloop.monitoring import descriptors
from farloop.monitoring.status import InventoryStatus
from farloop.monitoring.units import rate_text, size_text
from farloop.node.surroundings import Limits
from farloop.wire.inventory import RDMA, Inventory, Nic

FEW_FILES: Final = 4096
"""A coordinator needs some for every node, a journal and its pages; many systems give 1024."""

LONG_S: Final = 0.02
"""From this round trip on the choice of congestion control matters: a lost packet takes that long to be missed."""

TRY_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way to the coordinator, as far as it is known. None: not measured."""

    rtt_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


def machine(told: Inventory) -> list[Finding]:
    """Cards, and what could not be read of them."""
    found = [_card(nic) for nic in told.nics]
    if not told.nics:
        mend = "say it in [node] nics, as eth0=ethernet/10gbit; a container may also be given FARLOOP_LABELS"
        found.append(Finding(level="warn", what="card", detail="no network card is visible here", mend=mend))
    if told.unread:
        mend = "run as a user that may read them, or mount /sys; training does without"
        found.append(Finding(level="warn", what="sysfs", detail=f"not readable: {'; '.join(told.unread)}", mend=mend))
    where = f"{told.site} ({told.site_from} says so)" if told.site else "none named; [node] site names it"
    return [*found, Finding(level="ok", what="site", detail=where, data={"labels": dict(told.labels)})]


def _card(nic: Nic) -> Finding:
    rate = f"{rate_text(nic.bits_per_s)} ({nic.source('bits_per_s')})" if nic.bits_per_s else "rate unknown"
    parts = [nic.kind, rate]
    if nic.netdev and nic.netdev != nic.name:
        parts.append(f"on {nic.netdev}")
    if nic.members:
        parts.append(f"bond of {', '.join(nic.members)}")
    believed = {"kind": nic.kind, "bits_per_s": f"{nic.bits_per_s:g}" if nic.bits_per_s else ""}
    parts += [
        f"{fact.source} says {fact.value}"
        for fact in nic.facts
        if fact.about in believed and fact.value != believed[fact.about]
    ]
    detail, data = f"{nic.name}: {', '.join(parts)}", to_plain(nic)
    if nic.usable or not nic.active:
        return Finding(level="ok", what="card", detail=f"{detail}; {nic.why}" if nic.why else detail, data=data)
    why, _, mend = nic.why.partition("; ")
    mend = mend or "let this process open it, or leave its collectives to TCP"
    return Finding(level="warn", what="card", detail=f"{detail}: {why}", mend=mend, data=data)


def limits(found: Limits, told: Inventory) -> list[Finding]:
    """What the machine allows this process."""
    findings = [_files(found.nofile, found.nofile_hard)]
    if any(nic.kind in RDMA for nic in told.nics):
        locked = "without bound" if found.memlock_bytes is None else size_text(found.memlock_bytes)
        findings.append(Finding(level="ok", what="memlock", detail=f"memory that may be locked: {locked}"))
    return findings


def _files(soft: int, hard: int) -> Finding:
    """Both daemons raise the soft limit to the hard one when they start."""
    connections = most_connections(hard - descriptors.SPARE)
    detail = f"{hard:,} files and connections may be open (soft limit {soft:,}, which a daemon raises)"
    detail += f": a coordinator takes {connections:,} connections"
    if hard < FEW_FILES:
        mend = f"raise the hard limit: ulimit -Hn {FEW_FILES}, or LimitNOFILE={FEW_FILES} in the unit"
        return Finding(level="warn", what="files", detail=detail, mend=mend)
    return Finding(level="ok", what="files", detail=detail)


def way_of(name: str, seen: InventoryStatus | None, rtt_s: float | None, told: Inventory) -> Way:
    """What is known of the way to the coordinator: its own measurements, else the cards' rates."""
    best = max((nic.flow_bits_per_s or 0.0 for nic in told.nics if nic.active), default=0.0) / 8
    rates = {(link["from"], link["to"]): link["bytes_per_s"] for link in (seen or {"links": []})["links"]}
    return Way(
        rtt_s=rtt_s,
        up_bytes_per_s=rates.get((name, "coordinator")) or best or None,
        down_bytes_per_s=rates.get(("coordinator", name)) or best or None,
    )


def buffers(found: Limits, way: Way) -> list[Finding]:
    """Whether one connection can hold what the way holds, each way, and whether a loss would slow it down for long."""
    findings = []
    for key, rate, size in (
        ("tcp_wmem", way.up_bytes_per_s, found.send_bytes),
        ("tcp_rmem", way.down_bytes_per_s, found.receive_bytes),
    ):
        if rate is None or way.rtt_s is None or size is None:
            continue
        product = rate * way.rtt_s
        detail = f"{key}: {size_text(size)}; the way holds {size_text(product)}"
        if size < product:
            most = rate_text(8 * size / way.rtt_s)
            mend = (
                f"one connection gets {most} at most: raise the last number of net.ipv4.{key} to {round(2 * product)}"
            )
            findings.append(Finding(level="warn", what="buffers", detail=detail, mend=mend))
        else:
            findings.append(Finding(level="ok", what="buffers", detail=detail))
    if found.congestion and way.rtt_s is not None:
        findings.append(_congestion(found, way.rtt_s))
    return findings


def _congestion(found: Limits, rtt_s: float) -> Finding:
    if found.congestion == "bbr" or rtt_s < LONG_S:
        return Finding(level="ok", what="congestion", detail=found.congestion)
    detail = f"{found.congestion} over {1000 * rtt_s:.0f} ms: one lost packet in a thousand costs most of the rate"
    mend = (
        'choose bbr: [node] congestion = "bbr"'
        if "bbr" in found.allowed
        else "let an administrator add bbr to net.ipv4.tcp_allowed_congestion_control, then set [node] congestion"
    )
    return Finding(level="warn", what="congestion", detail=detail, mend=mend)


# --- whether others can dial in


def dial_back(address: Address) -> Finding:
    """Listen where the node will, dial the address that it declares, and see whether that leads here."""
    token = secrets.token_bytes(16)
    try:
        server = socket.create_server(("", address.port), family=socket.AF_INET, reuse_port=False)
    except OSError as error:
        return _somebody_listens(address, (error.strerror or str(error)).lower())
    with server:
        threading.Thread(target=_answer, args=(server, token), name="dial-back", daemon=True).start()
        try:
            with socket.create_connection((address.host, address.port), TRY_S) as connection:
                connection.settimeout(TRY_S)
                came = connection.recv(len(token))
        except OSError as error:
            return _not_reached(address, (error.strerror or str(error)).lower())
    if came == token:
        return Finding(level="ok", what="address", detail=f"{address} leads back to this machine")
    mend = "[node] address must name this machine, or a port that is forwarded to it"
    return Finding(level="fail", what="address", detail=f"{address} is somebody else", mend=mend)


def _answer(server: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        server.settimeout(TRY_S)
        connection, _ = server.accept()
        with connection:
            connection.sendall(token)


def _somebody_listens(address: Address, why: str) -> Finding:
    try:
        with socket.create_connection((address.host, address.port), TRY_S):
            detail = f"{address} answers; whether it is this node was not tried: port {address.port} here is taken"
            return Finding(level="ok", what="address", detail=detail)
    except OSError:
        mend = f"free port {address.port}, or choose another in [node] address"
        return Finding(level="fail", what="address", detail=f"{address} is not reached, and {why} here", mend=mend)


def _not_reached(address: Address, why: str) -> Finding:
    mend = (
        "forward the port, or open it in the firewall. Some routers do not let the inside dial their outside: while "
        "the node runs, the coordinator says in farloop status --json whether it reaches it"
    )
    return Finding(level="warn", what="address", detail=f"{address} is not reached from here: {why}", mend=mend)


def as_the_coordinator_sees(name: str, seen: InventoryStatus | None) -> Sequence[Finding]:
    """What a running coordinator says of this node's address and links."""
    machine = next((node for node in (seen or {"nodes": []})["nodes"] if node["name"] == name), None)
    if seen is None or machine is None:
        return []
    findings = []
    if machine["reachable"] is not None:
        reached, mend = machine["reachable"], "forward the port, or open it in the firewall"
        detail = f"the coordinator {'reaches' if reached else 'does not reach'} {machine['address']}"
        level, mend = ("ok", "") if reached else ("fail", mend)
        findings.append(Finding(level=level, what="reachable", detail=detail, mend=mend))  # type: ignore[arg-type]
    for link in seen["links"]:
        if name not in (link["from"], link["to"]) or (rate := link["bytes_per_s"]) is None:
            continue
        rtt = f", round trip {1000 * link['rtt_s']:.1f} ms" if link["rtt_s"] is not None else ""
        detail = f"{link['from']} → {link['to']}: {rate_text(8 * rate)} by {link['measured_by']}{rtt}"
        findings.append(Finding(level="ok", what="link", detail=detail, data=dict(link)))
    return findings
