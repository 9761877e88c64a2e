"""What a node tells of its machine in the handshake: cards, memory, limits, labels. Looked at once, at its start."""

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from farloop.monitoring import descriptors
from farloop.node.labels import Labels, Told, parse_nics, read_labels
from farloop.node.nics import look
from farloop.node.sysfs import Tree
from farloop.wire.inventory import Inventory, Source, trimmed

_SYSTEM: Final = "proc/sys/net"
_CGROUPS: Final = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of this process' own group, in the second and the first version."""

_KIB: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine allows this process. None: without bound, or not told."""

    memory_bytes: int | None
    memlock_bytes: int | None
    nofile: int
    nofile_hard: int
    """As many as this process may have open, if it asks: its soft and its hard limit."""
    receive_bytes: int | None
    """Largest receive buffer that the kernel gives a connection by itself: at most so much is on its way."""
    send_bytes: int | None
    congestion: str
    allowed: tuple[str, ...]
    """Controls of congestion that may be chosen without privileges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What the settings say of the machine, which is believed first."""

    site: str = ""
    address: str = ""
    nics: Mapping[str, Told] = field(default_factory=dict)

    @classmethod
    def of(cls, site: str, address: str, nics: str) -> "Operator":
        """Raises ValueError for cards that cannot be read; one sentence."""
        return cls(site=site, address=address, nics=parse_nics(nics))


def limits(tree: Tree) -> Limits:
    """What this process may have."""
    congestion = tree.text(f"{_SYSTEM}/ipv4/tcp_congestion_control")
    return Limits(
        memory_bytes=_memory(tree),
        memlock_bytes=_bound(resource.RLIMIT_MEMLOCK),
        nofile=descriptors.limit(),
        nofile_hard=descriptors.hard_limit(),
        receive_bytes=_largest(tree, "tcp_rmem"),
        send_bytes=_largest(tree, "tcp_wmem"),
        congestion=congestion,
        allowed=tuple(tree.text(f"{_SYSTEM}/ipv4/tcp_allowed_congestion_control").split()) or (congestion,),
    )


def look_around(
    environ: Mapping[str, str],
    operator: Operator,
    *,
    root: Path = Path("/"),
    devices: int = 0,
    device_bytes: int = 0,
    cpus: int = 0,
    congestion: str = "",
) -> Inventory:
    """All of it, within the bounds of the wire. Never raises.

    Args:
        environ: the process' environment, for the labels of containers.
        operator: what the settings say.
        root: where the machine's files are.
        devices, device_bytes: accelerators, and the memory of all of them.
        cpus: cores that this process may use.
        congestion: the control that its connections have; the kernel's unless given.
    """
    tree = Tree(root)
    labels, allowed = read_labels(tree, environ), limits(tree)
    nics = look(tree, labels=labels.nics, operator=operator.nics, memlock_bytes=allowed.memlock_bytes)
    site, site_from = _site(operator, labels)
    return trimmed(
        Inventory(
            site=site,
            site_from=site_from,
            address=operator.address,
            nics=nics,
            devices=devices,
            memory_bytes=device_bytes or allowed.memory_bytes,
            cpus=cpus,
            memlock_bytes=allowed.memlock_bytes,
            nofile=allowed.nofile,
            congestion=congestion or allowed.congestion,
            labels=labels.told,
            unread=tuple(tree.unread),
        )
    )


def _site(operator: Operator, labels: Labels) -> tuple[str, Source | Literal[""]]:
    if operator.site:
        return operator.site, "operator"
    return (labels.site, "annotation") if labels.site else ("", "")


def _memory(tree: Tree) -> int | None:
    """The machine's memory, or what the container may have of it."""
    lines = (line.split() for line in tree.text("proc/meminfo").splitlines())
    total = next((int(line[1]) * _KIB for line in lines if line[:1] == ["MemTotal:"] and line[1].isdecimal()), None)
    group = next((bound for place in _CGROUPS if (bound := tree.number(place)) is not None), None)
    return min((size for size in (total, group) if size), default=None)


def _bound(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _largest(tree: Tree, name: str) -> int | None:
    """The last of the three sizes: the most that the kernel grows a buffer to."""
    sizes = tree.text(f"{_SYSTEM}/ipv4/{name}").split()
    return int(sizes[-1]) if sizes and sizes[-1].isdecimal() else None
