"""Facts of a node about its machine and its network cards: bounded, typed, each with its source.

The node fills it in, and the coordinator trims it before keeping it (`trimmed`). Training does not need it: a node that
reports nothing takes part like any other.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, Literal

Source = Literal["operator", "probe", "sysfs", "annotation"]
"""Who said it: a person in the settings, a measurement, the kernel, or labels and annotations of a container."""

TRUST: Final[tuple[Source, ...]] = ("operator", "probe", "sysfs", "annotation")
"""Where two say different things, the earlier is believed, and both are told."""

NicKind = Literal["infiniband", "roce-v2", "roce-v1", "iwarp", "ethernet", "virtual"]
"""Class of a card. A bond has the class of what it bonds, and `members`. A wide-area link is no class of a card: it is
measured, not looked up."""

KINDS: Final[tuple[NicKind, ...]] = ("infiniband", "roce-v2", "roce-v1", "iwarp", "ethernet", "virtual")
"""The best for collectives first."""

RDMA: Final[frozenset[str]] = frozenset({"infiniband", "roce-v2", "roce-v1", "iwarp"})

MOST_NICS: Final = 32
MOST_FACTS: Final = 24
MOST_LABELS: Final = 32
LONGEST: Final = 128  # characters of a text from outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that one source said about a card."""

    about: str  # `kind`, `bits_per_s`, `state`, `netdev`, … .
    value: str
    source: str  # one of `TRUST`; another one, of a later release, is trusted least


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One card, or one port of one; what is said of it by the most trusted, and all that was said."""

    name: str  # `mlx5_0:1` of a port with RDMA, else its network device
    kind: str = "virtual"  # one of `KINDS`; another one, of a later release, counts as virtual
    netdev: str = ""  # the network device to bind; empty for none
    bits_per_s: float | None = None  # None: unknown, and nothing is made up
    flow_bits_per_s: float | None = None  # the most that one connection gets: of a bond, what one member has
    active: bool = False
    usable: bool = False  # active, and of a card with RDMA: this process may use that
    why: str = ""  # what is in the way, where it is not usable
    members: tuple[str, ...] = ()  # of a bond
    addresses: tuple[str, ...] = ()
    fabric: str = ""
    """Of InfiniBand, the subnet's prefix. The default is everywhere the same: equal is needed and not enough."""
    facts: tuple[Fact, ...] = ()  # the most trusted first

    def source(self, about: str) -> str:
        """Which source is believed in this; empty if none said it."""
        return next((fact.source for fact in self.facts if fact.about == about), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One machine that a node runs on. The default is that of a node which tells nothing."""

    site: str = ""  # label of the place; nodes of one site are thought to be near each other until that is measured
    site_from: str = ""  # who says so
    address: str = ""  # tcp://host:port at which other nodes are said to reach it; empty: it only dials out
    nics: tuple[Nic, ...] = ()
    devices: int = 0  # accelerators that this node trains on
    memory_bytes: int | None = None  # of all of them; without any, what this process may have of the machine's
    cpus: int = 0
    memlock_bytes: int | None = None  # memory that may be locked; None: without bound
    nofile: int = 0  # files and sockets that may be open
    congestion: str = ""  # control of its TCP connections, as `bbr`
    labels: tuple[tuple[str, str], ...] = ()  # what the container's surroundings tell: pod, zone, host
    unread: tuple[str, ...] = ()  # what was there and could not be read
    farloop: str = ""  # version that the node runs; empty if it does not say


NOTHING: Final = Inventory()


def trimmed(inventory: Inventory) -> Inventory:
    """The same within bounds: no longer texts, no more cards, no numbers that are none. Idempotent."""
    return dataclasses.replace(
        inventory,
        site=_text(inventory.site),
        site_from=_text(inventory.site_from),
        address=_text(inventory.address),
        nics=tuple(_trimmed_nic(nic) for nic in inventory.nics[:MOST_NICS]),
        devices=max(0, inventory.devices),
        memory_bytes=inventory.memory_bytes if (inventory.memory_bytes or 0) > 0 else None,
        congestion=_text(inventory.congestion),
        labels=tuple((_text(key), _text(value)) for key, value in inventory.labels[:MOST_LABELS]),
        unread=_texts(inventory.unread),
        farloop=_text(inventory.farloop),
    )


def _trimmed_nic(nic: Nic) -> Nic:
    facts = (
        Fact(
            about=_text(fact.about), value=_text(fact.value), source=fact.source if fact.source in TRUST else TRUST[-1]
        )
        for fact in nic.facts[:MOST_FACTS]
    )
    return dataclasses.replace(
        nic,
        name=_text(nic.name),
        kind=nic.kind if nic.kind in KINDS else "virtual",
        netdev=_text(nic.netdev),
        bits_per_s=_rate(nic.bits_per_s),
        flow_bits_per_s=_rate(nic.flow_bits_per_s),
        why=_text(nic.why),
        members=_texts(nic.members),
        addresses=_texts(nic.addresses),
        fabric=_text(nic.fabric),
        facts=tuple(facts),
    )


def _texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_text(text) for text in texts[:MOST_LABELS])


def printable(text: str, longest: int) -> str:
    """At most so many of its characters, those that cannot be shown as question marks."""
    return "".join(character if character.isprintable() else "?" for character in text[:longest])


def _text(text: str) -> str:
    return printable(text, LONGEST)


def _rate(bits_per_s: float | None) -> float | None:
    return bits_per_s if bits_per_s is not None and math.isfinite(bits_per_s) and bits_per_s > 0 else None
