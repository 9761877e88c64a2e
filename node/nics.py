"""Which network cards a machine has, of which class and rate, and who says so: from sysfs, labels and the operator.

Needs no privilege and never raises. Classes (Holmes, arXiv 2312.03549, groups by them): InfiniBand; RoCE, whose two
versions do not talk to each other on every fabric; iWARP, which is RDMA of its own kind; plain Ethernet; and virtual
devices, of whose rate the kernel knows nothing, whatever it says (a veth claims 10 Gbit/s always).

An RDMA port and its network device are one card and told once. Visible is not usable: in a container the device files
may be missing, or memory may not be locked.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from farloop.node.labels import Told
from farloop.node.sysfs import Tree
from farloop.wire.inventory import RDMA, TRUST, Fact, Nic, NicKind, Source

_INFINIBAND: Final = "sys/class/infiniband"
_VERBS: Final = "sys/class/infiniband_verbs"
_NET: Final = "sys/class/net"

_GIDS: Final = 32
"""Entries of a port's GID table that are looked at; those in use come first."""

_LOCKED: Final = 64 << 20
"""Bytes of memory that must be lockable for RDMA to be of any use: registered buffers are locked."""

_RANK: Final[Mapping[str, int]] = {source: rank for rank, source in enumerate(TRUST)}

_LOOPBACK, _IPOIB = 772, 32
"""Types of network devices (if_arp.h)."""


@dataclass(slots=True)
class _Draft:
    """A card while facts about it come together."""

    name: str
    netdev: str = ""
    pci: str = ""
    members: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    flow_bits_per_s: float | None = None
    fabric: str = ""
    in_the_way: str = ""
    facts: list[Fact] = field(default_factory=list)

    def say(self, about: str, value: object, source: Source = "sysfs") -> None:
        self.facts.append(Fact(about=about, value=str(value), source=source))

    def finished(self) -> Nic:
        """What the most trusted say, with all that was said."""
        facts = tuple(sorted(self.facts, key=lambda fact: _RANK[fact.source]))
        first = {fact.about: fact.value for fact in reversed(facts)}
        kind = first.get("kind", "virtual")
        rate = float(first["bits_per_s"]) if "bits_per_s" in first else None
        active = first.get("state") == "active"
        why = "" if active else f"its link is {first.get('state', 'unknown')}"
        if active and kind in RDMA:
            why = self.in_the_way
        return Nic(
            name=self.name,
            kind=kind,
            netdev=self.netdev,
            bits_per_s=rate,
            flow_bits_per_s=min(rate, self.flow_bits_per_s) if rate and self.flow_bits_per_s else rate,
            active=active,
            usable=active and not why,
            why=why,
            members=self.members,
            addresses=self.addresses,
            fabric=self.fabric,
            facts=facts,
        )


def look(
    tree: Tree,
    *,
    labels: Mapping[str, Told] | None = None,
    operator: Mapping[str, Told] | None = None,
    memlock_bytes: int | None = None,
) -> tuple[Nic, ...]:
    """All cards, those with RDMA first; loopback, and what only passes on to another card, left out.

    Args:
        labels: what annotations say, by network device or PCI address.
        operator: what the settings say, by card or network device: believed before all others.
        memlock_bytes: how much memory this process may lock; None for without bound.
    """
    ports = list(_ports(tree, memlock_bytes))
    taken = {port.netdev for port in ports if port.netdev}
    plain = [
        draft
        for name in tree.names(_NET)
        if name not in taken and (draft := _netdev(tree, name)) is not None
        if not (draft.pci and tree.number(f"{_NET}/{name}/type") == _IPOIB and any(p.pci == draft.pci for p in ports))
    ]
    bonded = {member for draft in [*ports, *plain] for member in draft.members}
    drafts = [draft for draft in [*ports, *plain] if draft.netdev not in bonded or draft.members]
    for source, told in (("annotation", labels or {}), ("operator", operator or {})):
        for name, what in told.items():
            _tell(drafts, name, what, source)  # type: ignore[arg-type]  # the two are sources
    return tuple(draft.finished() for draft in drafts)


def _tell(drafts: list[_Draft], name: str, told: Told, source: Source) -> None:
    """Add what is said of a card; an operator may name one that the kernel does not show."""
    meant = [draft for draft in drafts if name in (draft.name, draft.netdev, draft.pci, draft.name.partition(":")[0])]
    if not meant and source == "operator":
        meant = [_Draft(name=name, netdev=name)]
        meant[0].say("state", "active", source)
        drafts += meant
    for draft in meant:
        if told.kind is not None:
            draft.say("kind", told.kind, source)
        if told.bits_per_s is not None:
            draft.say("bits_per_s", f"{told.bits_per_s:g}", source)
        for about in ("network", "resource"):
            if value := getattr(told, about):
                draft.say(about, value, source)
        draft.addresses = told.addresses or draft.addresses


# --- cards with RDMA


def _ports(tree: Tree, memlock_bytes: int | None) -> Iterable[_Draft]:
    for device in tree.names(_INFINIBAND):
        for port in tree.names(f"{_INFINIBAND}/{device}/ports"):
            yield _port(tree, device, port, memlock_bytes)


def _port(tree: Tree, device: str, port: str, memlock_bytes: int | None) -> _Draft:
    place = f"{_INFINIBAND}/{device}/ports/{port}"
    draft = _Draft(name=f"{device}:{port}", pci=tree.target(f"{_INFINIBAND}/{device}/device"))
    draft.in_the_way = _unusable(tree, device, memlock_bytes)
    kind = _kind(tree, device, place)
    if kind is not None:
        draft.say("kind", kind)
    state = tree.text(f"{place}/state").rpartition(":")[2].strip().lower()
    draft.say("state", state or "unknown")
    if rate := re.match(r"(\d+(?:\.\d+)?)\s*Gb/sec", said := tree.text(f"{place}/rate")):
        draft.say("bits_per_s", f"{float(rate[1]) * 1e9:g}")
        draft.say("rate", said)
    if kind == "infiniband":
        draft.fabric = ":".join(tree.text(f"{place}/gids/0").split(":")[:4])
        draft.netdev = next((n for n in _of_pci(tree, draft.pci) if tree.number(f"{_NET}/{n}/type") == _IPOIB), "")
    else:
        bound = (tree.text(f"{place}/gid_attrs/ndevs/{index}") for index in _in_use(tree, place))
        draft.netdev = next(filter(None, bound), "") or next(iter(_of_pci(tree, draft.pci)), "")
    if draft.netdev:
        draft.say("netdev", draft.netdev)
        _bond(tree, draft)
    return draft


def _kind(tree: Tree, device: str, place: str) -> NicKind | None:
    """The port's class; None where the kernel does not tell."""
    layer = tree.text(f"{place}/link_layer")
    node_type = tree.text(f"{_INFINIBAND}/{device}/node_type")
    if layer == "InfiniBand":
        return "infiniband"
    if "RNIC" in node_type:
        return "iwarp"
    if layer != "Ethernet":
        return None
    types = {tree.text(f"{place}/gid_attrs/types/{index}") for index in _in_use(tree, place)}
    return "roce-v2" if "RoCE v2" in types else "roce-v1"


def _in_use(tree: Tree, place: str) -> list[str]:
    """Indices of the GID table; reading one that is not in use is an error, and means just that."""
    return [index for index in tree.names(f"{place}/gid_attrs/types") if index.isdecimal()][:_GIDS]


def _unusable(tree: Tree, device: str, memlock_bytes: int | None) -> str:
    """Why this process cannot use the device's RDMA; empty where it can."""
    verbs = [name for name in tree.names(_VERBS) if tree.text(f"{_VERBS}/{name}/ibdev") == device]
    if not verbs or not tree.exists(f"dev/infiniband/{verbs[0]}"):
        return "its device file is not here; hand /dev/infiniband to the container"
    if not tree.may_use(f"dev/infiniband/{verbs[0]}"):
        return f"/dev/infiniband/{verbs[0]} may not be opened"
    if memlock_bytes is not None and memlock_bytes < _LOCKED:
        return f"only {memlock_bytes >> 10} KiB of memory may be locked; raise memlock, or grant IPC_LOCK"
    return ""


def _of_pci(tree: Tree, pci: str) -> list[str]:
    """Network devices of a PCI function."""
    return [name for name in tree.names(_NET) if pci and tree.target(f"{_NET}/{name}/device") == pci]


# --- network devices


def _netdev(tree: Tree, name: str) -> _Draft | None:
    place = f"{_NET}/{name}"
    if tree.number(f"{place}/type") == _LOOPBACK or not tree.exists(f"{place}/operstate"):
        return None
    draft = _Draft(name=name, netdev=name, pci=tree.target(f"{place}/device"))
    is_bond = tree.exists(f"{place}/bonding")
    draft.say("kind", "ethernet" if is_bond or tree.exists(f"{place}/device") else "virtual")
    draft.say("state", _state(tree, name))
    if is_bond:
        _bond(tree, draft)
    elif tree.exists(f"{place}/device") and (speed := _speed(tree, name)) is not None:
        draft.say("bits_per_s", f"{speed:g}")
    return draft


def _bond(tree: Tree, draft: _Draft) -> None:
    """What a bond is made of: together they carry the sum, one connection what one of them does."""
    draft.members = tuple(tree.text(f"{_NET}/{draft.netdev}/bonding/slaves").split())
    speeds = [
        speed
        for member in draft.members
        if _state(tree, member) == "active" and (speed := _speed(tree, member)) is not None
    ]
    if draft.members:
        draft.say("members", ", ".join(draft.members))
    if speeds:
        draft.facts = [fact for fact in draft.facts if fact.about != "bits_per_s"]
        draft.say("bits_per_s", f"{sum(speeds):g}")
        draft.flow_bits_per_s = max(speeds)


def _state(tree: Tree, name: str) -> str:
    state = tree.text(f"{_NET}/{name}/operstate") or "unknown"
    carrier = tree.number(f"{_NET}/{name}/carrier")
    # Virtual devices often say `unknown`, with a carrier all the same.
    return "active" if state == "up" or (state == "unknown" and carrier == 1) else state


def _speed(tree: Tree, name: str) -> float | None:
    """Bits a second; None where the kernel has none: a link that is down, or a virtual card that says −1."""
    megabits = tree.number(f"{_NET}/{name}/speed")
    return megabits * 1e6 if megabits is not None and megabits > 0 else None
