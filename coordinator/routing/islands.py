"""Islands: nodes that may share a collective group, because their cards are alike and they are close (Holmes' rule).

Two nodes are joined when both have the same RDMA fabric, or both Ethernet, and what was measured between them says
so: a round trip below 1 ms (5 ms for Ethernet) and a bandwidth above the largest gap of all that were measured.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from farloop.coordinator.routing.inventory import CardKind, Inventory

RDMA_RTT_S = 1e-3
ETHERNET_RTT_S = 5e-3

FALLBACK_BYTES_PER_S = 125e6
"""1 Gbit/s, where the bandwidths have no gap."""

LEAST_GAP = 3.0
"""Factor between two neighbouring bandwidths that counts as a gap."""


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
