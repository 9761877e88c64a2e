"""The links between nodes as a matrix of seconds, and which of its entries nobody should believe.

Nodes are indices here, as in all searches of this room: a plan does not depend on their names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farloop.coordinator.routing.inventory import Inventory, Node

UNREACHABLE_S = 1e6
"""Stands for no link in sums and differences: eleven days, more than any plan takes."""

SUSPECT_FACTOR = 3.0
"""A link that is slower by this factor than a way over a third node is not believed (one published table has a link
that is 1024 times slower than its neighbours, a slip of units)."""

Seconds = tuple[tuple[float, ...], ...]
"""[from][to]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What is known of every pair of nodes; all matrices are [from][to]."""

    latency_s: Seconds
    byte_s: Seconds
    """Seconds per byte: 1/bandwidth."""
    message_s: Seconds
    """Of one activation message; UNREACHABLE_S where there is no link, and on suspects; 0 on the diagonal."""
    suspects: tuple[tuple[int, int], ...]
    """(from, to) of the links that are left out until they are probed again."""

    def part(self, nodes: Sequence[int]) -> "Fabric":
        """The rows and columns of some nodes."""

        def cut(matrix: Seconds) -> Seconds:
            return tuple(tuple(matrix[u][v] for v in nodes) for u in nodes)

        place = {node: index for index, node in enumerate(nodes)}
        kept = tuple((place[u], place[v]) for u, v in self.suspects if u in place and v in place)
        return Fabric(
            latency_s=cut(self.latency_s), byte_s=cut(self.byte_s), message_s=cut(self.message_s), suspects=kept
        )


def fabric_of(inventory: Inventory) -> Fabric:
    """The matrices of an inventory, with suspects left out."""
    nodes, model = inventory.nodes, inventory.model
    special = {end for ends in inventory.links for end in ends} & {node.name for node in nodes}
    cache: dict[tuple[str, str], tuple[float, float, float]] = {}

    def wire(source: Node, target: Node) -> tuple[float, float, float]:
        ends = (
            source.name if source.name in special else source.site,
            target.name if target.name in special else target.site,
        )
        if (known := cache.get(ends)) is None:
            link = inventory.link(source, target)
            if link is None:
                known = (UNREACHABLE_S, 0.0, UNREACHABLE_S)
            else:
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


def suspects(seconds: Sequence[Sequence[float]]) -> tuple[tuple[int, int], ...]:
    """Links that take more than SUSPECT_FACTOR times the best way over a third node, in order."""
    direct: NDArray[np.float64] = np.array(seconds, dtype=np.float64).reshape(len(seconds), len(seconds))
    over = direct.copy()
    np.fill_diagonal(over, np.inf)
    found: list[tuple[int, int]] = []
    for u, row in enumerate(over):
        around = (row[:, None] + over).min(axis=0)  # [to]
        slow = (row < UNREACHABLE_S) & (row > SUSPECT_FACTOR * around)
        found += [(u, int(v)) for v in np.flatnonzero(slow)]
    return tuple(found)
