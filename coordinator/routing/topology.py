"""Sync topologies and their predicted times: star, shards, relays and rings.

A fluid model with fair sharing: a transfer takes as long as its slowest link, and a link as long as all its bytes take.
The daemons run the star; the others are predicted, to show what they would save.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farloop.coordinator.routing.fabric import Island
from farloop.coordinator.routing.inventory import Inventory
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
class Hub:
    """An aggregator's rates in bytes/s; `sums` is how fast it decodes and adds."""

    down: float = math.inf  # into it
    up: float = math.inf  # out of it, all receivers together
    sums: float = math.inf


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
    """max(maxᵢ Sᵢ/uᵢ + lᵢ, ΣSᵢ/D + l, ΣSᵢ/R); the same downwards with the other rates."""
    return sharded(workers, [hub], name="star")


def sharded(workers: Sequence[Worker], hubs: Sequence[Hub], *, name: str = "") -> Prediction:
    """K aggregators, each with the share of the fragments that its rate allows: wₖ = Dₖ/ΣD."""
    total = sum(worker.payload for worker in workers)
    least = min(worker.latency_s for worker in workers)
    sums = math.inf if any(math.isinf(hub.sums) for hub in hubs) else sum(hub.sums for hub in hubs)
    up = max(
        max(worker.payload / worker.up + worker.latency_s for worker in workers),
        total / sum(hub.down for hub in hubs) + least,
        total / sums,
    )
    down = max(
        max(worker.payload / worker.down + worker.latency_s for worker in workers),
        total / sum(hub.up for hub in hubs) + least,
    )
    return Prediction(name=name or f"{len(hubs)} aggregators", up_s=up, down_s=down)


def relays(
    workers: Sequence[Worker], sites: Sequence[Site], hub: Hub, *, widened: float = 1.0, chunks: int = 1
) -> Prediction:
    """A relay at each site sums its neighbours' payloads and sends one on: gather, then the wide link.

    `widened` is the size of what a relay sends in payloads: 1 when it quantises again, (q + ⌈log₂ n⌉)/q for exact
    sums. With `chunks` above 1 both parts overlap but for the first chunk. Sites of one worker, and those where nobody
    can be dialled, send directly.
    """
    gather, wide, wide_down, sent, received = 0.0, 0.0, 0.0, 0.0, 0.0
    heads: list[int] = []
    latency = 0.0
    for site in sites:
        head = relay_of(workers, site)
        if head is None or len(site.workers) == 1:
            for one in site.workers:
                worker = workers[one]
                wide = max(wide, worker.payload / worker.up)
                wide_down = max(wide_down, worker.payload / worker.down)
                sent, received = sent + worker.payload, received + worker.payload
                latency = max(latency, worker.latency_s)
            continue
        heads.append(head)
        worker = workers[head]
        own = sum(workers[one].payload for one in site.workers if one != head)
        gather = max(gather, own / site.rate)
        wide = max(wide, widened * worker.payload / worker.up)
        wide_down = max(wide_down, worker.payload / worker.down)
        sent, received = sent + widened * worker.payload, received + worker.payload
        latency = max(latency, worker.latency_s)
    up_wan = max(wide, sent / hub.down) + latency
    down_wan = max(wide_down, received / hub.up) + latency
    name = "relay per site" if widened == 1.0 else "relay per site, exact sums"
    return Prediction(
        name=name, up_s=_in_turn(gather, up_wan, chunks), down_s=_in_turn(gather, down_wan, chunks), relays=tuple(heads)
    )


def _in_turn(first: float, second: float, chunks: int) -> float:
    """Store and forward; with chunks the first one's gathering, then the slower of both."""
    return first + second if chunks == 1 else first / chunks + max(first, second)


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


def _slowest_inside(inventory: Inventory, members: Sequence[int]) -> float:
    links = [
        inventory.link(inventory.nodes[u], inventory.nodes[v]) for u in members for v in members if u != v
    ]  # fmt: skip
    return min((link.bytes_per_s for link in links if link is not None), default=float("inf"))
