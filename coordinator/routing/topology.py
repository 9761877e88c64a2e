"""Sync topologies and their predicted times: star, shards, relays and rings.

A fluid model with fair sharing: a transfer takes as long as its slowest link, and a link as long as all its bytes take.
The daemons run the star; the others are predicted, to show what they would save.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farloop.coordinator.routing.fabric import Island
from farloop.coordinator.routing.inventory import Hub, Inventory
from farloop.coordinator.routing.sync_plan import Pace, Rate, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Links of a node to the coordinator; rates in bytes/s."""

    up: float
    down: float
    latency_s: float
    payload: float  # bytes it sends in a round; as many come back
    reachable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Workers that are near each other."""

    workers: tuple[int, ...]
    rate: float = math.inf  # bytes/s between two of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    name: str
    up_s: float
    down_s: float
    relays: tuple[int, ...] = ()

    @property
    def round_s(self) -> float:
        """Up, then down, nothing overlapped."""
        return self.up_s + self.down_s

    def overlapped_s(self, fragments: int) -> float:
        """Fragments one after the other over full-duplex links: max(up, down) + (up + down)/F, if that is less."""
        return min(self.round_s, max(self.up_s, self.down_s) + self.round_s / fragments)


def star(workers: Sequence[Worker], hub: Hub) -> Prediction:
    """max(maxᵢ Sᵢ/uᵢ + lᵢ, ΣSᵢ/D + l); the same downwards with the other rates."""
    return sharded(workers, [hub], name="star")


def sharded(workers: Sequence[Worker], hubs: Sequence[Hub], *, name: str = "") -> Prediction:
    """K aggregators, each with the share of the fragments that its rate allows: wₖ = Dₖ/ΣD."""
    total = sum(worker.payload for worker in workers)
    least = min(worker.latency_s for worker in workers)
    up = max(
        max(worker.payload / worker.up + worker.latency_s for worker in workers),
        total / sum(hub.in_bytes_per_s for hub in hubs) + least,
    )
    down = max(
        max(worker.payload / worker.down + worker.latency_s for worker in workers),
        total / sum(hub.out_bytes_per_s for hub in hubs) + least,
    )
    return Prediction(name=name or f"{len(hubs)} aggregators", up_s=up, down_s=down)


def relays(workers: Sequence[Worker], sites: Sequence[Site], hub: Hub) -> Prediction:
    """A relay at each site sums its neighbours' payloads and sends one on, quantised again: gather, then the wide link.

    Sites of one worker, and those where nobody can be dialled, send directly.
    """
    gather = 0.0
    heads, senders = list[int](), list[int]()
    for site in sites:
        head = relay_of(workers, site)
        if head is None or len(site.workers) == 1:
            senders += site.workers
        else:
            heads.append(head)
            senders.append(head)
            gather = max(gather, sum(workers[one].payload for one in site.workers if one != head) / site.rate)
    wide = [workers[one] for one in senders]
    total, latency = sum(worker.payload for worker in wide), max(worker.latency_s for worker in wide)
    up_s = max(total / hub.in_bytes_per_s, *(worker.payload / worker.up for worker in wide)) + latency
    down_s = max(total / hub.out_bytes_per_s, *(worker.payload / worker.down for worker in wide)) + latency
    return Prediction(name="relay per site", up_s=gather + up_s, down_s=gather + down_s, relays=tuple(heads))


def relay_of(workers: Sequence[Worker], site: Site) -> int | None:
    """The member that others can dial with the fastest way out; None where nobody can be dialled. Ties to the first."""
    able = [one for one in site.workers if workers[one].reachable]
    return max(able, key=lambda one: (min(workers[one].up, workers[one].down), -one), default=None)


def ring(payload: float, rates: Sequence[float], latency_s: float, *, name: str = "ring") -> Prediction:
    """2(N − 1)/N · S/min b + 2(N − 1)·l, of the edges in ring order; half of it each way."""
    count = len(rates)
    half = (count - 1) / count * payload / min(rates) + (count - 1) * latency_s if count > 1 else 0.0
    return Prediction(name=name, up_s=half, down_s=half)


def ring_of_relays(workers: Sequence[Worker], sites: Sequence[Site]) -> Prediction | None:
    """Sites gather at their relays, which form a ring; None where a site has no relay."""
    heads = [relay_of(workers, site) for site in sites]
    if any(head is None for head in heads):
        return None
    own = [workers[head] for head in heads if head is not None]
    payload = max(worker.payload for worker in own)
    gather = max(
        sum(workers[one].payload for one in site.workers if one != head) / site.rate
        for site, head in zip(sites, heads, strict=True)
    )
    found = ring(payload, [min(worker.up, worker.down) for worker in own], max(worker.latency_s for worker in own))
    half = gather + found.up_s
    return Prediction(
        name="relays in a ring", up_s=half, down_s=half, relays=tuple(head for head in heads if head is not None)
    )


# --- The sync of a plan: bits, interval and topology

MORE_HUBS = (2, 4)  # numbers of aggregators that are compared with the coordinator alone
_FP32_BITS = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Bits and steps of the nodes, and the predicted seconds of all topologies."""

    rates: Mapping[str, Rate]  # by node
    topologies: tuple[Prediction, ...]  # the star first: it is what runs
    relays: tuple[str, ...]  # nodes that would relay, in the order of their islands
    roots: tuple[str, ...]  # aggregator of each fragment
    payload_bytes: Mapping[str, float]  # bytes per node and round, each way

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
    sites = []
    for island in islands:
        if inside := [node for node in island.nodes if node in place]:
            links = [inventory.link(nodes[u], nodes[v]) for u in inside for v in inside if u != v]
            rate = min((link.bytes_per_s for link in links if link is not None), default=math.inf)
            sites.append(Site(workers=tuple(place[node] for node in inside), rate=rate))
    found = _compared(workers, sites, inventory.hub or Hub())
    tree = next((one for one in found if one.relays), None)
    return Sync(
        rates={nodes[node].name: rate for node, rate in sorted(rates.items())},
        topologies=found,
        relays=tuple(nodes[members[one]].name for one in tree.relays) if tree is not None else (),
        roots=("coordinator",) * wish.fragments,
        payload_bytes={nodes[node].name: payload[node] for node in members},
    )


def _compared(workers: Sequence[Worker], sites: Sequence[Site], hub: Hub) -> tuple[Prediction, ...]:
    """The star, then the others, the fastest first."""
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
