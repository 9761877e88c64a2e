"""Detects the machine: network cards, memory, limits and cloud labels."""

import errno
import json
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from farloop.monitoring import descriptors
from farloop.runtime.version import version_of
from farloop.wire.machine_info import KINDS, RDMA, TRUST, Fact, Inventory, Nic, NicKind, Source, trimmed

# --- Kernel files
#
# Reads small files below a root folder, which tests can build. Needs no privilege and never raises: a file that cannot
# be read is remembered and reported.

LONGEST = 64 << 10  # most bytes of a file that are read: an annotation has kilobytes, a kernel attribute a line
MOST = 512  # most names of a folder that are read

_EMPTY = frozenset({errno.EINVAL, errno.ENODATA, errno.EOPNOTSUPP, errno.ENODEV, errno.ENOENT, errno.ENOTDIR})
"""Errors by which the kernel reports an attribute without a value, such as the speed of a link that is down."""


class SysfsReader:
    """Files below a root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.unread: list[str] = []  # files that exist but could not be read, with the reason

    def path(self, place: str) -> Path:
        return self._root / place

    def text(self, place: str) -> str:
        """A file's stripped text; empty if there is none."""
        try:
            with self.path(place).open("rb") as file:
                return file.read(LONGEST).decode(errors="replace").strip()
        except OSError as error:
            self._missed(place, error)
            return ""

    def number(self, place: str) -> int | None:
        """The whole number in a file; None otherwise."""
        try:
            return int(self.text(place))
        except ValueError:
            return None

    def names(self, place: str) -> list[str]:
        """Names in a folder, in numeric order: `1, 2, 10`. Empty without the folder."""
        try:
            with os.scandir(self.path(place)) as entries:
                found = [entry.name for _, entry in zip(range(MOST), entries, strict=False)]
        except OSError as error:
            self._missed(place, error)
            return []
        return sorted(found, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))

    def target(self, place: str) -> str:
        """Last part of a symbolic link's target; empty if it is none."""
        try:
            return os.readlink(self.path(place)).rstrip("/").rpartition("/")[2]
        except OSError:
            return ""

    def exists(self, place: str) -> bool:
        return os.path.lexists(self.path(place))

    def _missed(self, place: str, error: OSError) -> None:
        if error.errno not in _EMPTY:
            self.unread.append(f"/{place}: {(error.strerror or str(error)).lower()}")


# --- Labels from Kubernetes and Docker
#
#     Kubernetes  a downward-API volume at /etc/podinfo with the files `labels` and `annotations`: `farloop/site`,
#                 `farloop/nic.eth0` and the usual topology labels; Multus' k8s.v1.cni.cncf.io/network-status
#     SR-IOV      PCIDEVICE_<RESOURCE>, the PCI addresses that the device plugin handed out
#     Docker      FARLOOP_LABELS="site=oslo,nic.eth0=roce-v2/100gbit": a container does not see its own labels
#
# Labels are used only where no better source has a value. Nothing here raises, or reads the environment.

POD_INFO: Final = "etc/podinfo"

_NETWORKS: Final = ("k8s.v1.cni.cncf.io/network-status", "k8s.v1.cni.cncf.io/networks-status")
"""The second is the name in older releases of Multus."""

_SITES: Final = ("farloop/site", "site", "topology.kubernetes.io/zone", "topology.kubernetes.io/region")
"""The first that exists names the site."""

_KEPT: Final = re.compile(r"farloop/|topology\.kubernetes\.io/|site$|(pod|node|host|rack|zone|region)$")
"""Labels that are reported."""

_LINE: Final = re.compile(r'([^=\s]+)="((?:[^"\\]|\\.)*)"')
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt])(?:bit|bps|b/s)?", re.IGNORECASE | re.ASCII)
_UNITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSource:
    """Claims about one card."""

    kind: NicKind | None = None
    bits_per_s: float | None = None
    addresses: tuple[str, ...] = ()
    network: str = ""  # Multus' name of the network that it is attached to
    resource: str = ""  # the device plugin's name of what it was handed out as


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels of the machine and of its cards."""

    site: str = ""
    nics: Mapping[str, LabelSource] = field(default_factory=dict)  # by network device, or by PCI address
    told: tuple[tuple[str, str], ...] = ()  # labels, in the order of their names


def read_labels(tree: SysfsReader, environ: Mapping[str, str]) -> Labels:
    """Read all labels; `environ` is the process's environment."""
    labels = _downward(tree.text(f"{POD_INFO}/labels"))
    annotations = _downward(tree.text(f"{POD_INFO}/annotations"))
    everything = {**_pairs(environ.get("FARLOOP_LABELS", "")), **annotations, **labels}
    nics: dict[str, LabelSource] = {}
    for key in _NETWORKS:
        nics |= _networks(annotations.get(key, ""))
    for address, device in _handed_out(environ).items():
        nics[address] = LabelSource(resource=device)
    for key, value in everything.items():
        name = key.removeprefix("farloop/")
        if name.startswith("nic.") and (told := parse_nic(value)) is not None:
            device = name.removeprefix("nic.")
            before = nics.get(device, LabelSource())
            nics[device] = replace(told, addresses=before.addresses, network=before.network)
    site = next((everything[key] for key in _SITES if everything.get(key)), "")
    kept = tuple(sorted((key, value) for key, value in everything.items() if _KEPT.match(key)))
    return Labels(site=site, nics=nics, told=kept)


def parse_nics(text: str) -> dict[str, LabelSource]:
    """`eth0=roce-v2/100gbit, eth1=ethernet` as an operator writes it. Raises ValueError: one sentence."""
    found: dict[str, LabelSource] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = part.partition("=")
        told = parse_nic(value) if separator and name.strip() else None
        if told is None:
            raise ValueError(f"{part!r} is not a network card: expected name=kind/rate, as eth0=roce-v2/100gbit; "
                             f"kinds are {', '.join(KINDS)}")  # fmt: skip
        found[name.strip()] = told
    return found


def parse_nic(text: str) -> LabelSource | None:
    """`roce-v2/100gbit`, `ethernet` or `25gbit`; None for anything else."""
    kind: NicKind | None = None
    bits_per_s: float | None = None
    for part in (part.strip().lower() for part in text.split("/")):
        if part in KINDS:
            kind = KINDS[KINDS.index(part)]
        elif match := _RATE.fullmatch(part):
            bits_per_s = float(match[1]) * _UNITS[match[2].lower()]
        else:
            return None
    return LabelSource(kind=kind, bits_per_s=bits_per_s)


def _pairs(text: str) -> dict[str, str]:
    """`a=1,b=2`; other parts are ignored."""
    pairs = (part.partition("=") for part in text.split(","))
    return {key.strip(): value.strip() for key, separator, value in pairs if separator and key.strip()}


def _downward(text: str) -> dict[str, str]:
    """A file of the downward API: lines of `key="value"`, the value escaped as Go does it, which is as JSON does."""
    found = {}
    for key, value in _LINE.findall(text):
        try:
            found[key] = str(json.loads(f'"{value}"'))
        except ValueError:
            found[key] = value
    return found


def _networks(text: str) -> dict[str, LabelSource]:
    """Networks of the pod by interface, as Multus lists them."""
    try:
        networks = json.loads(text) if text else []
    except ValueError:
        return {}
    found = {}
    for network in networks if isinstance(networks, list) else []:
        if isinstance(network, dict) and (interface := network.get("interface")):
            found[str(interface)] = LabelSource(
                addresses=tuple(map(str, ips)) if isinstance(ips := network.get("ips"), list) else (),
                network=str(network.get("name", "")),
            )
    return found


def _handed_out(environ: Mapping[str, str]) -> dict[str, str]:
    """PCI addresses that a device plugin assigned to this container, with the resource's name."""
    prefix, twin = "PCIDEVICE_", "_INFO"
    return {
        address.strip(): name.removeprefix(prefix).lower()
        for name, value in sorted(environ.items())
        if name.startswith(prefix) and not name.endswith(twin)
        for address in value.split(",")
        if address.strip()
    }


# --- Network cards: class and rate, from sysfs, labels and the operator
#
# Needs no privilege and never raises. Classes (Holmes, arXiv 2312.03549, groups by them): InfiniBand; RoCE, whose two
# versions do not interoperate on every fabric; iWARP; plain Ethernet; and virtual devices, whose rate in sysfs means
# nothing (a veth always claims 10 Gbit/s).
#
# An RDMA port and its network device are one card and are reported once. A visible card may still be unusable: in a
# container the device files may be missing, or memory may not be locked.

_INFINIBAND: Final = "sys/class/infiniband"
_VERBS: Final = "sys/class/infiniband_verbs"
_NET: Final = "sys/class/net"

_GIDS: Final = 32  # entries of a port's GID table that are read; those in use come first

_LOCKED: Final = 64 << 20  # lockable memory that RDMA needs: registered buffers are locked
_LOOPBACK, _IPOIB = 772, 32  # types of network devices (if_arp.h)


@dataclass(slots=True)
class _Draft:
    """A card whose facts are being collected."""

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
        """The card by its most trusted facts, with all facts."""
        facts = tuple(sorted(self.facts, key=lambda fact: TRUST.index(fact.source)))
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


def read_nics(
    tree: SysfsReader,
    *,
    labels: Mapping[str, LabelSource] | None = None,
    operator: Mapping[str, LabelSource] | None = None,
    memlock_bytes: int | None = None,
) -> tuple[Nic, ...]:
    """All cards, those with RDMA first; loopback, and what only passes on to another card, left out.

    Args:
        labels: what annotations say, by network device or PCI address.
        operator: what the settings say, by card or network device: believed before all others.
        memlock_bytes: how much memory this process may lock; None for without bound.
    """
    ports = [
        _port(tree, device, port, memlock_bytes)
        for device in tree.names(_INFINIBAND)
        for port in tree.names(f"{_INFINIBAND}/{device}/ports")
    ]
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
            _add_claims(drafts, name, what, source)  # type: ignore[arg-type]  # the two are sources
    return tuple(draft.finished() for draft in drafts)


def _add_claims(drafts: list[_Draft], name: str, told: LabelSource, source: Source) -> None:
    """Add claims about a card; an operator may name one that the kernel does not show."""
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


# --- Cards with RDMA


def _port(tree: SysfsReader, device: str, port: str, memlock_bytes: int | None) -> _Draft:
    place = f"{_INFINIBAND}/{device}/ports/{port}"
    draft = _Draft(name=f"{device}:{port}", pci=tree.target(f"{_INFINIBAND}/{device}/device"))
    draft.in_the_way = _unusable(tree, device, memlock_bytes)
    kind = _kind(tree, device, place)
    if kind is not None:
        draft.say("kind", kind)
    draft.say("state", tree.text(f"{place}/state").rpartition(":")[2].strip().lower() or "unknown")
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


def _kind(tree: SysfsReader, device: str, place: str) -> NicKind | None:
    """The port's class; None if the kernel does not say."""
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


def _in_use(tree: SysfsReader, place: str) -> list[str]:
    """Indices of the GID table; reading an unused one fails."""
    return [index for index in tree.names(f"{place}/gid_attrs/types") if index.isdecimal()][:_GIDS]


def _unusable(tree: SysfsReader, device: str, memlock_bytes: int | None) -> str:
    """Why this process cannot use the device's RDMA; empty if it can."""
    verbs = [name for name in tree.names(_VERBS) if tree.text(f"{_VERBS}/{name}/ibdev") == device]
    if not verbs or not tree.exists(f"dev/infiniband/{verbs[0]}"):
        return "its device file is not here; hand /dev/infiniband to the container"
    if not os.access(tree.path(f"dev/infiniband/{verbs[0]}"), os.R_OK | os.W_OK):
        return f"/dev/infiniband/{verbs[0]} may not be opened"
    if memlock_bytes is not None and memlock_bytes < _LOCKED:
        return f"only {memlock_bytes >> 10} KiB of memory may be locked; raise memlock, or grant IPC_LOCK"
    return ""


def _of_pci(tree: SysfsReader, pci: str) -> list[str]:
    return [name for name in tree.names(_NET) if pci and tree.target(f"{_NET}/{name}/device") == pci]


# --- Network devices


def _netdev(tree: SysfsReader, name: str) -> _Draft | None:
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


def _bond(tree: SysfsReader, draft: _Draft) -> None:
    """Members of a bond: together they carry the sum of their rates, one connection the rate of one."""
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


def _state(tree: SysfsReader, name: str) -> str:
    state = tree.text(f"{_NET}/{name}/operstate") or "unknown"
    carrier = tree.number(f"{_NET}/{name}/carrier")
    # Virtual devices often say `unknown`, with a carrier all the same.
    return "active" if state == "up" or (state == "unknown" and carrier == 1) else state


def _speed(tree: SysfsReader, name: str) -> float | None:
    """Bits per second; None for a link that is down, or a virtual card that reports −1."""
    megabits = tree.number(f"{_NET}/{name}/speed")
    return megabits * 1e6 if megabits is not None and megabits > 0 else None


# --- The inventory that the handshake carries; built once, at start

_SYSTEM: Final = "proc/sys/net"
_CGROUPS: Final = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Limit of this process's group, in cgroup versions 2 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this process. None: unlimited or unknown."""

    memory_bytes: int | None
    memlock_bytes: int | None
    nofile: int
    nofile_hard: int  # the hard limit
    receive_bytes: int | None  # largest receive buffer that the kernel uses by itself; bounds the bytes in flight
    send_bytes: int | None
    congestion: str
    allowed: tuple[str, ...]  # congestion controls that need no privileges


def limits(tree: SysfsReader) -> Limits:
    congestion = tree.text(f"{_SYSTEM}/ipv4/tcp_congestion_control")
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Limits(
        memory_bytes=_memory(tree),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        nofile=descriptors.limit(),
        nofile_hard=descriptors.hard_limit(),
        receive_bytes=_largest(tree, "tcp_rmem"),
        send_bytes=_largest(tree, "tcp_wmem"),
        congestion=congestion,
        allowed=tuple(tree.text(f"{_SYSTEM}/ipv4/tcp_allowed_congestion_control").split()) or (congestion,),
    )


def read_inventory(
    environ: Mapping[str, str], site: str = "", address: str = "", nics: str = "", *, root: Path = Path("/")
) -> Inventory:
    """All of it, within the bounds of the wire. Raises ValueError for `nics` that cannot be read; one sentence.

    Args:
        environ: the process' environment, for the labels of containers.
        site, address, nics: as the settings have them, which are believed before all others.
        root: where the machine's files are.
    """
    tree = SysfsReader(root)
    labels, allowed = read_labels(tree, environ), limits(tree)
    cards = read_nics(tree, labels=labels.nics, operator=parse_nics(nics), memlock_bytes=allowed.memlock_bytes)
    return trimmed(
        Inventory(
            site=site or labels.site,
            site_from="operator" if site else "annotation" if labels.site else "",
            address=address,
            nics=cards,
            memory_bytes=allowed.memory_bytes,
            memlock_bytes=allowed.memlock_bytes,
            nofile=allowed.nofile,
            congestion=allowed.congestion,
            labels=labels.told,
            unread=tuple(tree.unread),
            farloop=version_of(),
        )
    )


def _memory(tree: SysfsReader) -> int | None:
    """Memory of the machine or of the container."""
    lines = (line.split() for line in tree.text("proc/meminfo").splitlines())
    total = next((int(line[1]) * 1024 for line in lines if line[:1] == ["MemTotal:"] and line[1].isdecimal()), None)
    group = next((bound for place in _CGROUPS if (bound := tree.number(place)) is not None), None)
    return min((size for size in (total, group) if size), default=None)


def _largest(tree: SysfsReader, name: str) -> int | None:
    """The last of three sizes: the most that the kernel uses."""
    sizes = tree.text(f"{_SYSTEM}/ipv4/{name}").split()
    return int(sizes[-1]) if sizes and sizes[-1].isdecimal() else None
