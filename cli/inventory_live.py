"""What `farloop plan --live` plans with: nodes and links from a running coordinator's status, the model from a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farloop.cli.exit_codes import CommandError
from farloop.cli.inventory_file import Wish, check_beside_nodes, each, inventory_of, tables_of
from farloop.coordinator.routing import inventory as plain
from farloop.coordinator.routing.own_terms import bits_of


def live_inventory(
    status: Mapping[str, Any], file: Path | None, overrides: Mapping[str, Any] | None = None
) -> plain.Inventory:
    """Nodes and links as a coordinator sees them; the model and the plan's wishes from a file where there is one.

    `status["inventory"]` has `nodes` (name, connected, site, nics, reachable, seconds_per_step, …) and `links` (from,
    to, rtt_s, bytes_per_s, provenance, age_s, suspect), an end being a node or `coordinator`.

    Raises:
        CommandError: the coordinator does not say, or says nothing that can be planned with.
    """
    seen = status.get("inventory")
    if not isinstance(seen, dict) or not seen.get("nodes"):
        raise CommandError("this coordinator tells no inventory in its status; give one with --inventory")
    here = [node for node in seen["nodes"] if node["name"] not in away(status)]
    if not here:
        raise CommandError("no node is connected to this coordinator now: there is nobody to plan for")
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
    """Nodes of the run that are not connected now: nothing is planned for them until they are back."""
    nodes = (status.get("inventory") or {}).get("nodes", ())
    return frozenset(node["name"] for node in nodes if not node.get("connected", True))


def _as_it_runs(tables: dict[str, Any], run: Mapping[str, Any]) -> None:
    """What a file does not say is the run's: its parameters, its H, and as many bits as it sends, or fewer."""
    model, plan = tables["model"], tables.setdefault("plan", {})
    if "parameters" in run:
        model.setdefault("parameters", float(run["parameters"]))
    if "h" in run:
        plan.setdefault("h", run["h"])
        own = bits_of(run["codec_up"])
        fewer = [bits for bits in Wish().bits if own is not None and bits <= own]
        plan.setdefault("bits", [*([own] if own not in (None, *fewer) else []), *fewer] or Wish().bits)


def _each(entry: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, what a file says of it) of each node of an entry. Without an address there, the coordinator's holds."""
    entries = each(entry["name"], entry.get("address", ""), entry.get("count", 1))
    return [(name, {**entry, "name": name, **({"address": address} if address else {})}) for name, address in entries]


def _seen_node(node: Mapping[str, Any], given: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What a coordinator says of a node, and what a file says of it besides."""
    step_s, layers = node.get("seconds_per_step"), model["layers"]
    passes = layers * (1.0 + model.get("backward", 1.5)) + model.get("loss", 0.25) * layers
    found: dict[str, Any] = {
        "name": node["name"],
        "site": node.get("site") or "",
        "reachable": bool(node.get("reachable")),
        "address": node.get("address") or "",
        "nics": [
            {
                "kind": nic.get("kind", "virtual"),
                "bytes_per_s": nic.get("bytes_per_s"),
                "active": bool(nic.get("usable", nic.get("active", True))),
                "provenance": nic.get("provenance") or "assumed",
            }
            for nic in node.get("nics", [])
        ],
    }
    if step_s:
        found["layer_s"] = step_s / model.get("microbatches", 1) / passes
    return {**found, **{key: value for key, value in given.items() if key != "count"}}


_Access = Mapping[tuple[str, str], float]
"""(node, "from" or "to") → bytes/s of that end: what it has with the coordinator, else the least it has with a node."""


def _access(links: Sequence[Mapping[str, Any]]) -> _Access:
    """How fast the nodes' own ends are, as far as it was measured."""
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
    """A link as a file has it; None where too little is known of it, or its measurement is doubted.

    Stages that only greet each other know their round trip: there the slower of their two ends is assumed.
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
        "provenance": "assumed" if rate is None else link.get("provenance") or "probe",
        "age_s": float(link.get("age_s") or 0.0),
    }
