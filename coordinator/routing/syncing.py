"""The sync of a plan: who sends what to the coordinator, at how many bits, how often, and over which topology."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farloop.coordinator.routing.inventory import Inventory
from farloop.coordinator.routing.islands import Island
from farloop.coordinator.routing.rates import Pace, Rate, choose
from farloop.coordinator.routing.topology import (
    Hub,
    Prediction,
    Site,
    Worker,
    fragment_roots,
    relays,
    ring,
    ring_of_relays,
    sharded,
    star,
)

MORE_HUBS = (2, 4)
"""So many aggregators like the coordinator are compared with it."""

_FP32_BITS = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """What nodes are told, and the predicted seconds of all ways to do it."""

    rates: Mapping[str, Rate]
    """By node."""
    topologies: tuple[Prediction, ...]
    """The star first: it is what runs."""
    relays: tuple[str, ...]
    """Nodes that would relay, in the order of their islands."""
    roots: tuple[str, ...]
    """Who aggregates each fragment."""
    payload_bytes: Mapping[str, float]
    """Of a node and round, each way."""

    @property
    def star(self) -> Prediction:
        return self.topologies[0]


def plan_sync(
    inventory: Inventory,
    islands: Sequence[Island],
    share: Mapping[int, float],
    pipelines: Sequence[tuple[Sequence[int], float]],
) -> Sync | None:
    """The sync of nodes that hold `share` (≤ 1) of the parameters each; None without links to the coordinator.

    `pipelines` are (nodes, seconds of a step): nodes that step together do the same number of steps at the same bits,
    those of the slowest link among them.
    """
    nodes, model, wish = inventory.nodes, inventory.model, inventory.wish
    members = sorted(share)
    ups = {node: inventory.uplink(nodes[node]) for node in members}
    downs = {node: inventory.downlink(nodes[node]) for node in members}
    if not members or model.parameter_bytes == 0.0 or None in ups.values() or None in downs.values():
        return None
    up = {node: link.bytes_per_s for node, link in ups.items() if link is not None}
    down = {node: link.bytes_per_s for node, link in downs.items() if link is not None}
    paces = [
        Pace(step_s=max(step_s, 1e-9), bytes_per_s=min(up[node] / share[node] for node in several))
        for several, step_s in pipelines
    ]
    parameters = model.parameter_bytes / 4.0
    chosen = choose(paces, h=wish.h, parameters=parameters, bits=wish.bits)
    rates = {node: rate for (several, _), rate in zip(pipelines, chosen, strict=True) for node in several}
    payload = {
        node: share[node] * model.parameter_bytes * (rates[node].bits if node in rates else max(wish.bits)) / _FP32_BITS
        for node in members
    }
    place = {node: index for index, node in enumerate(members)}
    workers = [
        Worker(
            up=up[node],
            down=down[node],
            latency_s=link.latency_s,
            payload=payload[node],
            reachable=nodes[node].reachable,
        )
        for node in members
        if (link := ups[node]) is not None
    ]
    sites = [
        Site(
            workers=tuple(place[node] for node in island.nodes if node in place),
            rate=_slowest_inside(inventory, [node for node in island.nodes if node in place]),
        )
        for island in islands
        if any(node in place for node in island.nodes)
    ]
    own = inventory.hub
    hub = Hub(down=own.in_bytes_per_s, up=own.out_bytes_per_s) if own is not None else Hub()
    found = _compared(workers, sites, hub)
    tree = next((one for one in found if one.relays), None)
    return Sync(
        rates={nodes[node].name: rate for node, rate in sorted(rates.items())},
        topologies=found,
        relays=tuple(nodes[members[one]].name for one in tree.relays) if tree is not None else (),
        roots=tuple("coordinator" for _ in fragment_roots(wish.fragments, [1.0])),
        payload_bytes={nodes[node].name: payload[node] for node in members},
    )


def _compared(workers: Sequence[Worker], sites: Sequence[Site], hub: Hub) -> tuple[Prediction, ...]:
    """The star, then what it is compared with, the fastest first."""
    others = [sharded(workers, [hub] * count) for count in MORE_HUBS] if hub != Hub() else []
    tree = relays(workers, sites, hub)
    if tree.relays:
        others.append(tree)
    rates = [min(worker.up, worker.down) for worker in workers]
    latency_s = max(worker.latency_s for worker in workers)
    if len(workers) > 1 and all(worker.reachable for worker in workers):
        others.append(ring(max(worker.payload for worker in workers), rates, latency_s, name=f"ring of {len(workers)}"))
    if len(sites) > 1 and (heads := ring_of_relays(workers, sites)) is not None:
        others.append(heads)
    return (star(workers, hub), *sorted(others, key=lambda one: one.round_s))


def _slowest_inside(inventory: Inventory, members: Sequence[int]) -> float:
    links = [
        inventory.link(inventory.nodes[u], inventory.nodes[v]) for u in members for v in members if u != v
    ]  # fmt: skip
    return min((link.bytes_per_s for link in links if link is not None), default=float("inf"))
