"""The link matrix between clusters, and its islands of fast links."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from farloop.planner.anomalies import UNREACHABLE_S, suspects
from farloop.planner.inventory import Card, CardKind, Inventory, Node

# --- Link matrix in seconds, with checks of its entries
#
# Nodes are indices here, as in all searches of the planner: a plan does not depend on their names.

Seconds = tuple[tuple[float, ...], ...]  # [from][to]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Links of all pairs of nodes; matrices are [from][to]."""

    latency_s: Seconds
    byte_s: Seconds  # seconds per byte: 1/bandwidth
    message_s: Seconds
    """Of one activation message; UNREACHABLE_S where there is no link, and on suspects; 0 on the diagonal."""
    suspects: tuple[tuple[int, int], ...]  # (from, to) of the links that are left out until they are probed again

    def part(self, nodes: Sequence[int]) -> "Fabric":
        def submatrix(matrix: Seconds) -> Seconds:
            return tuple(tuple(matrix[u][v] for v in nodes) for u in nodes)

        place = {node: index for index, node in enumerate(nodes)}
        kept = tuple((place[u], place[v]) for u, v in self.suspects if u in place and v in place)
        return Fabric(
            latency_s=submatrix(self.latency_s),
            byte_s=submatrix(self.byte_s),
            message_s=submatrix(self.message_s),
            suspects=kept,
        )


def fabric_of(inventory: Inventory) -> Fabric:
    """The matrices of an inventory, with suspects left out.

    A link is no faster than the cards of its ends, of the best class that both have: RDMA inside a site alone.
    """
    nodes, model = inventory.nodes, inventory.model
    special = {end for ends in inventory.links for end in ends} & {node.name for node in nodes}
    alike: dict[tuple[str, tuple[Card, ...]], Node] = {}
    ends_of = {n.name: alike.setdefault((n.name if n.name in special else n.site, n.cards), n).name for n in nodes}
    rates = {node.name: node.card_rates() for node in alike.values()}
    cache: dict[tuple[str, str], tuple[float, float, float]] = {}

    def wire(source: Node, target: Node) -> tuple[float, float, float]:
        ends = a, b = ends_of[source.name], ends_of[target.name]
        if (known := cache.get(ends)) is None:
            link = inventory.link(source, target)
            if link is None:
                known = (UNREACHABLE_S, 0.0, UNREACHABLE_S)
            else:
                kinds = [kind for kind in CardKind if source.site == target.site or not kind.is_rdma]
                cards = (min(rates[a][kind], rates[b][kind]) for kind in kinds if kind in rates[a].keys() & rates[b])
                link = replace(link, bytes_per_s=min(link.bytes_per_s, next(cards, math.inf)))
                message = link.seconds(model.activation_bytes) + model.overhead_s
                known = (link.latency_s, 1.0 / link.bytes_per_s, min(UNREACHABLE_S, message))
            cache[ends] = known
        return known

    here = (0.0, 0.0, 0.0)
    wires = [[here if u is v else wire(u, v) for v in nodes] for u in nodes]
    rows = [[message for _, _, message in row] for row in wires]
    found = suspects(rows)
    for u, v in found:
        rows[u][v] = UNREACHABLE_S
    return Fabric(
        latency_s=tuple(tuple(latency for latency, _, _ in row) for row in wires),
        byte_s=tuple(tuple(per_byte for _, per_byte, _ in row) for row in wires),
        message_s=tuple(tuple(row) for row in rows),
        suspects=found,
    )


# --- Islands: nodes that may share a collective group (Holmes' rule): similar cards, short distance
#
# Two nodes are joined when both have the same RDMA fabric, or both Ethernet, and what was measured between them says
# so: a round trip below 1 ms (5 ms for Ethernet) and a bandwidth above the largest gap of all that were measured.

RDMA_RTT_S = 1e-3
ETHERNET_RTT_S = 5e-3

FALLBACK_BYTES_PER_S = 125e6  # 1 Gbit/s, where the bandwidths have no gap
LEAST_GAP = 3.0  # factor between two neighbouring bandwidths that counts as a gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Nodes of one kind that are near each other."""

    nodes: tuple[int, ...]
    fabric: CardKind


def threshold(bandwidths: Sequence[float]) -> float:
    """The lowest bandwidth above the largest gap in the sorted logarithms, in the unit of the input.

    FALLBACK_BYTES_PER_S where no two neighbours differ by LEAST_GAP.
    """
    known = sorted({value for value in bandwidths if 0.0 < value < math.inf})
    gaps = [(above / below, above) for below, above in itertools.pairwise(known)]
    factor, above = max(gaps, default=(1.0, 0.0))
    return above if factor >= LEAST_GAP else FALLBACK_BYTES_PER_S


def islands_of(inventory: Inventory) -> tuple[Island, ...]:
    """Every node in exactly one island; islands in the order of their first node."""
    nodes = inventory.nodes
    links = {(u, v): inventory.link(nodes[u], nodes[v]) for u in range(len(nodes)) for v in range(len(nodes)) if u != v}
    least = threshold([link.bytes_per_s for link in links.values() if link is not None])
    fabrics = [node.fabric for node in nodes]
    joined = []
    for u, fabric in enumerate(fabrics):
        near = RDMA_RTT_S if fabric.is_rdma else ETHERNET_RTT_S
        for v in range(u + 1, len(nodes)):
            there, back = links[u, v], links[v, u]
            if there is None or back is None or fabric is not fabrics[v]:
                continue
            slow = min(there.bytes_per_s, back.bytes_per_s)
            if there.latency_s + back.latency_s < near and slow >= least:
                joined.append((u, v))
    return _components(joined, fabrics)


def _components(joined: Sequence[tuple[int, int]], fabrics: Sequence[CardKind]) -> tuple[Island, ...]:
    count = len(fabrics)
    ends = np.array(joined, dtype=np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(count, count))
    _, labels = connected_components(graph, directed=False)
    members: dict[int, list[int]] = {}
    for node, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(node)
    return tuple(Island(nodes=tuple(several), fabric=fabrics[several[0]]) for several in members.values())
