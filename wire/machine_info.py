"""Facts of a node about its machine and its network cards: bounded, typed, each with its source.

The node fills it in, and a coordinator that receives it trims it (`trimmed`). Training does not need it: a node that
reports nothing takes part like any other.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

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

    @property
    def others(self) -> list[Fact]:
        """What others say of its kind and its rate."""
        believed = {"kind": self.kind, "bits_per_s": f"{self.bits_per_s:g}" if self.bits_per_s else ""}
        return [fact for fact in self.facts if fact.value != believed.get(fact.about, fact.value)]


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
    return _within_bounds(dataclasses.replace(inventory, devices=max(0, inventory.devices)))


_MOST_OF: Final = {"nics": MOST_NICS, "facts": MOST_FACTS}  # of a list; of others MOST_LABELS
_ABOVE_ZERO: Final = frozenset({"memory_bytes", "bits_per_s", "flow_bits_per_s"})


_T = TypeVar("_T", bound=Inventory | Nic | Fact)


def _within_bounds(value: _T) -> _T:
    held = {field.name: _bounded(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Fact) and value.source not in TRUST:
        held["source"] = TRUST[-1]
    if isinstance(value, Nic) and value.kind not in KINDS:
        held["kind"] = "virtual"
    return dataclasses.replace(value, **held)


def _bounded(name: str, value: Any) -> Any:
    match value:
        case str():
            return printable(value, LONGEST)
        case tuple():
            return tuple(_bounded("", item) for item in value[: _MOST_OF.get(name, MOST_LABELS)])
        case Nic() | Fact():
            return _within_bounds(value)
        case int() | float() if name in _ABOVE_ZERO:
            return value if math.isfinite(value) and value > 0 else None
    return value


def printable(text: str, longest: int) -> str:
    """At most so many of its characters, those that cannot be shown as question marks."""
    return "".join(character if character.isprintable() else "?" for character in text[:longest])
