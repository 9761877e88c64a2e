"""What the surroundings of a container tell: Kubernetes through files and variables, Docker through one variable.

    Kubernetes  a downward-API volume at /etc/podinfo with the files `labels` and `annotations`: `farloop/site`,
                `farloop/nic.eth0` and the usual topology labels; Multus' k8s.v1.cni.cncf.io/network-status
    SR-IOV      PCIDEVICE_<RESOURCE>, the PCI addresses that the device plugin handed out
    Docker      FARLOOP_LABELS="site=oslo,nic.eth0=roce-v2/100gbit": a container does not see its own labels

All of it is an annotation: believed where nobody better says anything. Nothing here raises, or reads the environment.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from farloop.node.sysfs import Tree
from farloop.wire.inventory import KINDS, NicKind

POD_INFO: Final = "etc/podinfo"

_NETWORKS: Final = ("k8s.v1.cni.cncf.io/network-status", "k8s.v1.cni.cncf.io/networks-status")
"""The second is how older releases of Multus called it."""

_SITES: Final = ("farloop/site", "site", "topology.kubernetes.io/zone", "topology.kubernetes.io/region")
"""The first that is there names the site."""

_KEPT: Final = re.compile(r"farloop/|topology\.kubernetes\.io/|site$|(pod|node|host|rack|zone|region)$")
"""Labels that are worth telling."""

_LINE: Final = re.compile(r'([^=\s]+)="((?:[^"\\]|\\.)*)"')
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt])(?:bit|bps|b/s)?", re.IGNORECASE)
_UNITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is said of one card."""

    kind: NicKind | None = None
    bits_per_s: float | None = None
    addresses: tuple[str, ...] = ()
    network: str = ""
    """Multus' name of the network that it is attached to."""
    resource: str = ""
    """The device plugin's name of what it was handed out as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """All of it."""

    site: str = ""
    nics: Mapping[str, Told] = field(default_factory=dict)
    """By network device, or by PCI address."""
    told: tuple[tuple[str, str], ...] = ()
    """Labels, in the order of their names."""


def read_labels(tree: Tree, environ: Mapping[str, str]) -> Labels:
    """What is there; `environ` is that of the process, as the command line hands it in."""
    labels = _downward(tree.text(f"{POD_INFO}/labels"))
    annotations = _downward(tree.text(f"{POD_INFO}/annotations"))
    everything = {**_pairs(environ.get("FARLOOP_LABELS", "")), **annotations, **labels}
    nics: dict[str, Told] = {}
    for key in _NETWORKS:
        nics |= _networks(annotations.get(key, ""))
    for address, resource in _handed_out(environ).items():
        nics[address] = Told(resource=resource)
    for key, value in everything.items():
        name = key.removeprefix("farloop/")
        if name.startswith("nic.") and (told := parse_nic(value)) is not None:
            device = name.removeprefix("nic.")
            before = nics.get(device, Told())
            nics[device] = Told(
                kind=told.kind, bits_per_s=told.bits_per_s, addresses=before.addresses, network=before.network
            )
    site = next((everything[key] for key in _SITES if everything.get(key)), "")
    kept = tuple(sorted((key, value) for key, value in everything.items() if _KEPT.match(key)))
    return Labels(site=site, nics=nics, told=kept)


def parse_nics(text: str) -> dict[str, Told]:
    """`eth0=roce-v2/100gbit, eth1=ethernet` as an operator writes it.

    Raises:
        ValueError: one sentence.
    """
    found: dict[str, Told] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = part.partition("=")
        told = parse_nic(value) if separator and name.strip() else None
        if told is None:
            raise ValueError(f"{part!r} is no card: name=kind/rate is wanted, as eth0=roce-v2/100gbit; kinds are "
                             f"{', '.join(KINDS)}")  # fmt: skip
        found[name.strip()] = told
    return found


def parse_nic(text: str) -> Told | None:
    """`roce-v2/100gbit`, `ethernet` or `25gbit`; None where it is none of these."""
    kind: NicKind | None = None
    bits_per_s: float | None = None
    for part in (part.strip().lower() for part in text.split("/")):
        if part in KINDS:
            kind = KINDS[KINDS.index(part)]
        elif match := _RATE.fullmatch(part):
            bits_per_s = float(match[1]) * _UNITS[match[2].lower()]
        else:
            return None
    return Told(kind=kind, bits_per_s=bits_per_s)


def _pairs(text: str) -> dict[str, str]:
    """`a=1,b=2`; what is not of that form is left out."""
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


def _networks(text: str) -> dict[str, Told]:
    """Multus' account of the networks that the pod is attached to, by interface."""
    try:
        networks = json.loads(text) if text else []
    except ValueError:
        return {}
    found = {}
    for network in networks if isinstance(networks, list) else []:
        if isinstance(network, dict) and (interface := network.get("interface")):
            found[str(interface)] = Told(addresses=_strings(network.get("ips")), network=str(network.get("name", "")))
    return found


def _strings(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()


def _handed_out(environ: Mapping[str, str]) -> dict[str, str]:
    """PCI addresses that a device plugin handed to this container, with the resource's name."""
    prefix, twin = "PCIDEVICE_", "_INFO"
    return {
        address.strip(): name.removeprefix(prefix).lower()
        for name, value in sorted(environ.items())
        if name.startswith(prefix) and not name.endswith(twin)
        for address in value.split(",")
        if address.strip()
    }
