"""Which nodes replicate which stage, judged as DT-FM does (arXiv 2206.01288): data parallel plus twice the pipeline.

The cost of a step is DP/H + 2·PP. DP is the slowest node of the slowest stage that exchanges gradients with all other
replicas; PP is the cheapest order of the stages, where two stages are joined by the perfect matching of their replicas
whose slowest pair is the fastest. Both are bottlenecks: the slowest sets the pace.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from farloop.coordinator.routing.fabric import Fabric

Groups = tuple[tuple[int, ...], ...]
"""[stage][replica] → node"""

MAX_NODES = 64
"""Above, a search by this cost takes too long; constructive plans and chains are used instead."""

MAX_ORDERED = 12
"""Stages whose best order is found exactly, in O(S²·2ˢ); with more they stay as they are numbered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A placement and its cost."""

    groups: Groups
    """In the order in which a microbatch visits them."""
    dp_s: float
    pp_s: float

    def step_s(self, h: int) -> float:
        """Communication of a step when replicas agree every `h` steps."""
        return self.dp_s / h + 2.0 * self.pp_s


def dp_s(groups: Groups, fabric: Fabric, gradient_bytes: float) -> float:
    """max over stages, max over replicas i, of Σⱼ 2·(αᵢⱼ + bytes/(r·βᵢⱼ)); `gradient_bytes` are a stage's."""
    return max(_group_dp_s(group, fabric, gradient_bytes) for group in groups)


def _group_dp_s(group: Sequence[int], fabric: Fabric, gradient_bytes: float) -> float:
    share = gradient_bytes / len(group)
    return max(
        sum(2.0 * (fabric.latency_s[i][j] + share * fabric.byte_s[i][j]) for j in group if j != i) for i in group
    )


def matching_s(left: Sequence[int], right: Sequence[int], message_s: Sequence[Sequence[float]]) -> float:
    """The slowest pair of the matching of two stages whose slowest pair is the fastest; all of the smaller have one."""
    if len(left) > len(right):
        left, right = right, left
    cost = np.array([[0.5 * (message_s[u][v] + message_s[v][u]) for v in right] for u in left])
    values = np.unique(cost)
    low = int(np.searchsorted(values, max(cost.min(axis=1).max(), 0.0)))
    high = len(values) - 1
    while low < high:
        middle = (low + high) // 2
        graph = csr_array(cost <= values[middle])
        if bool((maximum_bipartite_matching(graph, perm_type="column") >= 0).all()):
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def best_order(edge_s: Sequence[Sequence[float]]) -> tuple[float, tuple[int, ...]]:
    """(length, order) of the cheapest way through all stages, exactly; the first by lexicographic order of ties."""
    count = len(edge_s)
    if count > MAX_ORDERED:
        return sum(edge_s[a][a + 1] for a in range(count - 1)), tuple(range(count))
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(1 << s, s): (0.0, (s,)) for s in range(count)}
    for _ in range(count - 1):
        longer: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (seen, last), (length, path) in best.items():
            for stage in range(count):
                if not seen >> stage & 1:
                    key, value = (seen | 1 << stage, stage), (length + edge_s[last][stage], (*path, stage))
                    if key not in longer or value < longer[key]:
                        longer[key] = value
        best = longer
    return min(best.values())


class Costs:
    """The cost of placements, with the matchings of pairs of stages remembered."""

    def __init__(self, fabric: Fabric, gradient_bytes: float) -> None:
        self._fabric, self._gradient_bytes = fabric, gradient_bytes
        self._pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def placed(self, groups: Groups, *, ordered: bool = False) -> Placed:
        """`ordered` keeps the order of the stages, else the cheapest is taken."""
        if ordered:
            pp = sum(self._pair_s(a, b) for a, b in itertools.pairwise(groups))
            order = tuple(range(len(groups)))
        else:
            edges = [[0.0 if a is b else self._pair_s(a, b) for b in groups] for a in groups]
            pp, order = best_order(edges)
        found = tuple(groups[stage] for stage in order)
        return Placed(groups=found, dp_s=dp_s(found, self._fabric, self._gradient_bytes), pp_s=pp)

    def _pair_s(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        a, b = sorted((tuple(sorted(one)), tuple(sorted(other))))
        if (known := self._pairs.get((a, b))) is None:
            known = self._pairs[a, b] = matching_s(a, b, self._fabric.message_s)
        return known


def descend(start: Groups, costs: Costs, *, h: int, moves: int, seed: int) -> Placed:
    """The best placement found by exchanging nodes of two stages, `moves` of them tried; sizes of stages stay."""
    best = costs.placed(start)
    lowest = best.step_s(h)
    for groups in _exchanges(best.groups, moves, seed):
        found = costs.placed(groups(best.groups))
        if (now := found.step_s(h)) < lowest:
            best, lowest = found, now
    return best


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Of two places of two stages."""

    a: int
    i: float
    b: int
    j: float

    def __call__(self, groups: Groups) -> Groups:
        lists = [list(group) for group in groups]
        i, j = int(self.i * len(lists[self.a])), int(self.j * len(lists[self.b]))
        lists[self.a][i], lists[self.b][j] = lists[self.b][j], lists[self.a][i]
        return tuple(map(tuple, lists))


def _exchanges(groups: Groups, moves: int, seed: int) -> Iterator[_Exchange]:
    rand = random.Random(seed)
    if len(groups) < 2:
        return
    for _ in range(moves):
        a, b = rand.sample(range(len(groups)), 2)
        yield _Exchange(a, rand.random(), b, rand.random())
