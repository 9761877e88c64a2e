"""The input of `farloop plan`: INVENTORY.toml or .json, or the status of a running coordinator.

docs/routing.md describes every key. Every error is one line with its place and the nearest valid value.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from farloop.config.exit_codes import CommandError
from farloop.config.sources import ConfigError, load_tables, parsed, validated
from farloop.monitoring.addresses import parse_tcp
from farloop.monitoring.units import LEAST_0
from farloop.planner import inventory as plain
from farloop.planner.sync_plan import bits_of

_MBIT, _GBIT = 125e3, 125e6  # Bytes/s


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Card(_Table):
    kind: plain.CardKind
    bytes_per_s: float | None = None
    gbit_s: float | None = None
    efficiency: float = 1.0


class _Node(_Table):
    name: str
    count: int = 1
    site: str = ""
    nics: list[_Card] = []
    layer_s: float = 0.0
    max_layers: int | None = None
    memory_bytes: float | None = None
    slots: int = 1
    stage: int | None = None
    address: str = ""


class _Link(_Table):
    between: list[str] | None = None
    source: str | None = Field(default=None, alias="from")
    target: str | None = Field(default=None, alias="to")
    latency_ms: float | None = None
    latency_s: float | None = None
    bytes_per_s: float | None = None
    mbit_s: float | None = None
    gbit_s: float | None = None
    assumed: bool = False


class _Hub(_Table):
    in_bytes_per_s: float | None = None
    out_bytes_per_s: float | None = None
    in_mbit_s: float | None = None
    out_mbit_s: float | None = None


class _File(_Table):
    name: str = ""
    about: str = ""
    plan: plain.PlanRequest = plain.PlanRequest()
    model: plain.Model
    coordinator: _Hub | None = None
    nodes: list[_Node]
    links: list[_Link] = []
    delay_s: list[list[float]] | None = None


def load_inventory(path: Path, overrides: Mapping[str, Any] | None = None) -> plain.Inventory:
    """The inventory in a file; `overrides` replace keys of its [plan]. Raises ConfigError."""
    return inventory_of(tables_of(path), str(path), overrides)


def inventory_of(tables: Mapping[str, Any], where: str, overrides: Mapping[str, Any] | None = None) -> plain.Inventory:
    """Tables as a file has them → the planner's input. Raises ConfigError."""
    named = {key: value for key, value in (overrides or {}).items() if value is not None}
    plan = tables.get("plan", {})
    if named and isinstance(plan, dict):
        tables = {**tables, "plan": {**plan, **named}}
    file = validated(_File, tables, where)
    with _in_place(where, ConfigError):
        return _made(file)


def each(name: str, address: str, count: int) -> list[tuple[str, str]]:
    """(name, address) of each node of an entry that stands for `count` of them."""
    names = [name] if count == 1 else [f"{name}-{one}" for one in range(count)]
    return [(each_name, address.replace("{n}", str(one))) for one, each_name in enumerate(names)]


def check_beside_nodes(tables: Mapping[str, Any], where: str) -> None:
    """Whether tables are sound that need no nodes of their own, for those come from elsewhere. Raises ConfigError."""
    file = validated(_File, {"nodes": [], **tables}, where)
    with _in_place(where, ConfigError):
        for number, node in enumerate(file.nodes):
            _nodes(node, number, file.model)


def _made(file: _File) -> plain.Inventory:
    model = file.model
    nodes = tuple(one for number, node in enumerate(file.nodes) for one in _nodes(node, number, model))
    links: dict[tuple[str, str], plain.Link] = {}
    places = {plain.COORDINATOR} | {name for node in nodes for name in (node.name, node.site)}
    for number, link in enumerate(file.links):
        with _in_place(f"links[{number}]"):
            found = _wire(link)
            links |= {ends: found for ends in _ends(link) if _all_known(ends, places)}
    if file.delay_s is not None:
        if links:
            raise ValueError("delay_s and links are both given; give one of them")
        links = _matrix(file.delay_s, [node.name for node in nodes])
    hub = file.coordinator
    return plain.Inventory(
        nodes=nodes,
        links=links,
        model=model,
        hub=None
        if hub is None
        else plain.Hub(
            in_bytes_per_s=_rate({"in_bytes_per_s": hub.in_bytes_per_s, "in_mbit_s": hub.in_mbit_s}),
            out_bytes_per_s=_rate({"out_bytes_per_s": hub.out_bytes_per_s, "out_mbit_s": hub.out_mbit_s}),
        ),
        wish=file.plan,
        name=file.name,
        about=file.about,
    )


def _nodes(node: _Node, number: int, model: plain.Model) -> list[plain.Node]:
    where = f"nodes[{number}]"
    if node.count < 1:
        raise ValueError(f"{where}: count: expected 1 or more, got {node.count}")
    if node.count > plain.MOST_NODES:
        raise ValueError(f"{where}: count: expected at most {plain.MOST_NODES}, got {node.count}")
    max_layers = node.max_layers
    if node.memory_bytes is not None:
        if max_layers is not None:
            raise ValueError(f"{where}: memory_bytes and max_layers are both given; give one of them")
        if not model.layer_bytes:
            raise ValueError(f"{where}: memory_bytes needs [model] layer_bytes, the memory of one layer")
        max_layers = int(node.memory_bytes // model.layer_bytes)
        if max_layers < 1:
            raise ValueError(f"{where}: memory_bytes is {node.memory_bytes:g}; one layer takes {model.layer_bytes:g}")
    cards = []
    for place, card in enumerate(node.nics):
        with _in_place(f"{where}.nics[{place}]"):
            rate = _rate({"bytes_per_s": card.bytes_per_s, "gbit_s": card.gbit_s}, none=None)
            cards.append(plain.Card(kind=card.kind, bytes_per_s=rate, efficiency=card.efficiency))
    if node.address and node.count > 1 and "{n}" not in node.address:
        raise ValueError(
            f"{where}: address is one for {node.count} nodes; {{n}} in it stands for the number of each node"
        )
    entries = each(node.name, node.address, node.count)
    with _in_place(f"{where}.address"):
        for address in filter(None, (address for _, address in entries)):
            parse_tcp(address)
    with _in_place(where):
        return [
            plain.Node(
                name=name,
                site=node.site or node.name,
                cards=tuple(cards),
                layer_s=node.layer_s,
                max_layers=max_layers,
                slots=node.slots,
                stage=node.stage,
                address=address,
            )
            for name, address in entries
        ]


@contextmanager
def _in_place(where: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """A ValueError of the block gets the place, and may become another kind."""
    try:
        yield
    except ValueError as error:
        raise kind(f"{where}: {error}") from None


def _wire(link: _Link) -> plain.Link:
    if (link.latency_ms is None) == (link.latency_s is None):
        raise ValueError("expected one of latency_ms and latency_s, of one way")
    with _in_place("latency_ms"):
        LEAST_0(link.latency_ms or 0.0)
    return plain.Link(
        latency_s=link.latency_s if link.latency_s is not None else (link.latency_ms or 0.0) / 1e3,
        bytes_per_s=_rate({"bytes_per_s": link.bytes_per_s, "mbit_s": link.mbit_s, "gbit_s": link.gbit_s}),
        assumed=link.assumed,
    )


def _ends(link: _Link) -> list[tuple[str, str]]:
    if link.between is not None and link.source is None and link.target is None:
        if len(link.between) != 2:
            raise ValueError(f"between has {len(link.between)} ends; expected two")
        a, b = link.between
        return [(a, b), (b, a)]
    if link.between is not None or link.source is None or link.target is None:
        raise ValueError("expected between = [A, B] for both ways, or from and to for one")
    return [(link.source, link.target)]


def _all_known(ends: tuple[str, str], places: set[str]) -> bool:
    """Whether both ends are there. A link of places without a node is left out: tables of sites are often longer.
    Raises ValueError: an end that is nearly the name of a place."""
    for end in ends:
        if end not in places:
            if close := difflib.get_close_matches(end, sorted(places), n=1, cutoff=0.75):
                raise ValueError(f"there is no node and no site {end!r}; did you mean {close[0]}?")
            return False
    return True


def _rate(given: Mapping[str, float | None], none: Any = math.inf) -> Any:
    """Bytes/s of the one that is given; `none` where none is."""
    named = {key: value for key, value in given.items() if value is not None}
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are both given; give one of them")
    for key, value in named.items():
        if math.isnan(value) or value <= 0.0:
            raise ValueError(f"{key} is {value}; expected a number above 0")
        return value * (_GBIT if key.endswith("gbit_s") else _MBIT if key.endswith("mbit_s") else 1.0)
    return none


def _matrix(delay_s: list[list[float]], names: list[str]) -> dict[tuple[str, str], plain.Link]:
    """Seconds per activation message, [from][to] in the order of the nodes, as published instances have."""
    if len(delay_s) != len(names) or any(len(row) != len(names) for row in delay_s):
        raise ValueError(f"delay_s has {len(delay_s)} rows; there are {len(names)} nodes: as many rows and columns")
    links = {}
    for source, row in zip(names, delay_s, strict=True):
        for target, seconds in zip(names, row, strict=True):
            if source != target:
                with _in_place(f"delay_s from {source} to {target}"):
                    links[source, target] = plain.Link(latency_s=seconds)
    return links


def tables_of(path: Path) -> dict[str, Any]:
    """The tables of a file, unchecked. Raises ConfigError."""
    if path.suffix != ".json":
        return load_tables(path)[1]
    try:
        found = parsed(json.loads, path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or 'no such file').lower()}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected an object with model, nodes and links")
    return found


def live_inventory(
    status: Mapping[str, Any], file: Path | None, overrides: Mapping[str, Any] | None = None
) -> plain.Inventory:
    """Nodes and links as a coordinator sees them; the model and the plan's wishes from a file where there is one.

    `status["inventory"]` has `nodes` (name, connected, site, nics, seconds_per_step, …) and `links` (from, to, rtt_s,
    bytes_per_s, suspect), an end being a node or `coordinator`.
    Raises CommandError: the coordinator does not say, or says nothing that can be planned with.
    """
    seen = status.get("inventory")
    if not isinstance(seen, dict):
        raise CommandError("the status of this coordinator has no inventory; plan with --inventory FILE alone")
    if not seen.get("nodes"):
        raise CommandError("no node has joined this coordinator yet, so there is nothing to plan")
    here = [node for node in seen["nodes"] if node["name"] not in away(status)]
    if not here:
        raise CommandError("no node is connected to this coordinator, so there is nothing to plan")
    tables: dict[str, Any] = tables_of(file) if file is not None else {}
    where = str(file) if file is not None else "the coordinator's inventory"
    tables.setdefault("model", {"layers": 1})
    check_beside_nodes(tables, where)
    _as_it_runs(tables, status.get("run", {}))
    given = {name: node for entry in tables.get("nodes", []) for name, node in _each(entry)}
    tables["nodes"] = [_seen_node(node, given.get(node["name"], {}), tables["model"]) for node in here]
    names = {node["name"] for node in tables["nodes"]} | {plain.COORDINATOR}
    told = [link for link in seen.get("links", []) if {link["from"], link["to"]} <= names]
    access = _access(told)
    links = [_seen_link(link, access) for link in told]
    tables["links"] = [*tables.get("links", []), *(link for link in links if link is not None)]
    return inventory_of(tables, where, overrides)


def away(status: Mapping[str, Any]) -> frozenset[str]:
    """Nodes of the run that are not connected; the plan leaves them out."""
    nodes = (status.get("inventory") or {}).get("nodes", ())
    return frozenset(node["name"] for node in nodes if not node.get("connected", True))


def _as_it_runs(tables: dict[str, Any], run: Mapping[str, Any]) -> None:
    """Fill in what the file leaves out from the run: parameters, H, and its bits or fewer."""
    model, plan = tables["model"], tables.setdefault("plan", {})
    if "parameters" in run:
        model.setdefault("parameters", float(run["parameters"]))
    if "h" in run:
        plan.setdefault("h", run["h"])
        own = bits_of(run["codec_up"])
        fewer = [bits for bits in plain.PlanRequest().bits if own is not None and bits <= own]
        plan.setdefault("bits", [*([own] if own not in (None, *fewer) else []), *fewer] or plain.PlanRequest().bits)


def _each(entry: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, entry) of each node of an entry. Without an address, the coordinator's is kept."""
    entries = each(entry["name"], entry.get("address", ""), entry.get("count", 1))
    return [(name, {**entry, "name": name, **({"address": address} if address else {})}) for name, address in entries]


def _seen_node(node: Mapping[str, Any], given: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A node from the coordinator's status, overridden by the file."""
    step_s, layers = node.get("seconds_per_step"), model["layers"]
    passes = layers * (1.0 + model.get("backward", 1.5)) + model.get("loss", 0.25) * layers
    found: dict[str, Any] = {
        "name": node["name"],
        "site": node.get("site") or "",
        "address": node.get("address") or "",
        "nics": [
            {
                "kind": nic.get("kind", "virtual"),
                "bytes_per_s": nic.get("bytes_per_s"),
            }
            for nic in node.get("nics", [])
            if nic.get("usable", nic.get("active", True))
        ],
    }
    if step_s:
        found["layer_s"] = step_s / model.get("microbatches", 1) / passes
    return {**found, **{key: value for key, value in given.items() if key != "count"}}


_Access = Mapping[tuple[str, str], float]
"""(node, "from" or "to") → bytes/s of that end: to the coordinator, else the slowest to a node."""


def _access(links: Sequence[Mapping[str, Any]]) -> _Access:
    """Measured speed of each end of the nodes."""
    with_nodes: dict[tuple[str, str], float] = {}
    with_hub: dict[tuple[str, str], float] = {}
    for link in links:
        rate = link.get("bytes_per_s")
        if rate is None or link.get("suspect"):
            continue
        for end, other in (("from", "to"), ("to", "from")):
            ours = link[end], end
            if link[other] == plain.COORDINATOR:
                with_hub[ours] = rate
            else:
                with_nodes[ours] = min(rate, with_nodes.get(ours, rate))
    return {**with_nodes, **with_hub}


def _seen_link(link: Mapping[str, Any], access: _Access) -> dict[str, Any] | None:
    """A link in the form of a file; None if it is unmeasured or suspect.

    If only the round trip is known, the slower of the two ends is assumed.
    """
    if link.get("suspect") or link.get("rtt_s") is None:
        return None
    rate, ends = link.get("bytes_per_s"), ((link["from"], "from"), (link["to"], "to"))
    if rate is None and (plain.COORDINATOR in (link["from"], link["to"]) or not access.keys() >= set(ends)):
        return None
    return {
        "from": link["from"],
        "to": link["to"],
        "latency_s": link["rtt_s"] / 2.0,
        "bytes_per_s": float(min(access[end] for end in ends) if rate is None else rate),
        "assumed": rate is None,
    }
