"""Which nodes replicate which stage (Holmes)."""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from farloop.planner.fabric import Fabric
from farloop.planner.inventory import CardKind

# --- Layers of each stage: the exact min-max rule


def min_max_split(layers: int, speeds: Sequence[float], caps: Sequence[int | None] | None = None) -> tuple[int, ...]:
    """Layers per stage so that the slowest stage, max nᵢ/sᵢ, is as fast as it can be.

    Every stage gets one; each further one goes to the stage that is then the least slow, (nᵢ + 1)/sᵢ, ties to the
    first. That is exact: a stage is only given a layer when no other would take less time with it. `speeds` are layers
    per second, measured; `caps` is what the memory of a stage holds.
    Raises ValueError: fewer layers than stages, a speed that is not above 0, or caps that do not hold all layers.
    """
    _check(layers, speeds)
    room = [layers if cap is None else cap for cap in (caps or [None] * len(speeds))]
    if len(room) != len(speeds):
        raise ValueError(f"there are {len(speeds)} speeds and {len(room)} caps; expected one of each per stage")
    if min(room) < 1 or sum(room) < layers:
        raise ValueError(f"the stages hold {sum(room)} layers at most; {layers} have to fit, and one in each")
    counts = [1] * len(speeds)
    heap = [(2 / speed, stage) for stage, speed in enumerate(speeds) if room[stage] > 1]
    heapq.heapify(heap)
    for _ in range(layers - len(speeds)):
        _, stage = heapq.heappop(heap)
        counts[stage] += 1
        if counts[stage] < room[stage]:
            heapq.heappush(heap, ((counts[stage] + 1) / speeds[stage], stage))
    return tuple(counts)


def _check(layers: int, speeds: Sequence[float]) -> None:
    if not speeds or layers < len(speeds):
        raise ValueError(
            f"{layers} layers cannot be cut into {len(speeds)} stages; from 1 to {layers} stages are possible"
        )
    for speed in speeds:
        if not (math.isfinite(speed) and speed > 0.0):
            raise ValueError(f"a stage has speed {speed}; expected a number above 0")


class Transport(StrEnum):
    INFINIBAND = "infiniband"
    ROCE = "roce"
    SOCKET = "socket"


def transport(kinds: Sequence[CardKind]) -> Transport:
    """RDMA when all ranks of a group have the same RDMA fabric, sockets otherwise."""
    match list({kind.fabric for kind in kinds}):
        case [CardKind.INFINIBAND]:
            return Transport.INFINIBAND
        case [CardKind.ROCE_V2 | CardKind.ROCE_V1]:
            return Transport.ROCE
        case _:
            return Transport.SOCKET


def blocks(order: Sequence[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Logical ranks cut into stages of consecutive ones; where they do not divide, the first stages get one more."""
    size, more = divmod(len(order), stages)
    found, first = [], 0
    for stage in range(stages):
        last = first + size + (stage < more)
        found.append(tuple(order[first:last]))
        first = last
    return tuple(found)


# --- Replicas of each stage, judged as in DT-FM (arXiv 2206.01288): data parallel plus twice the pipeline
#
# The cost of a step is DP/H + 2·PP. DP is the slowest node of the slowest stage that exchanges gradients with all other
# replicas; PP is the cheapest order of the stages, where two stages are joined by the perfect matching of their
# replicas whose slowest pair is the fastest. Both are bottlenecks: the slowest sets the pace.

Groups = tuple[tuple[int, ...], ...]  # [stage][replica] → node
MAX_NODES = 64  # above, a search by this cost takes too long; constructive plans and chains are used instead
MAX_ORDERED = 12  # stages whose best order is found exactly, in O(S²·2ˢ); with more they stay as they are numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    groups: Groups  # in the order in which a microbatch visits them
    dp_s: float
    pp_s: float

    def step_s(self, h: int) -> float:
        """Communication of a step when replicas agree every `h` steps."""
        return self.dp_s / h + 2.0 * self.pp_s


def dp_s(groups: Groups, fabric: Fabric, gradient_bytes: float) -> float:
    """Of the slowest stage; `gradient_bytes` are a stage's."""
    return max(exchange_s(group, fabric, gradient_bytes) for group in groups)


def exchange_s(group: Sequence[int], fabric: Fabric, num_bytes: float) -> float:
    """max over replicas i of Σⱼ 2·(αᵢⱼ + S/(r·βᵢⱼ)); on equal links a ring's 2(r − 1)·α + 2(r − 1)/r·S/β."""
    return max(
        sum(2.0 * (fabric.latency_s[i][j] + num_bytes / len(group) * fabric.byte_s[i][j]) for j in group if j != i)
        for i in group
    )


def all_reduce_s(group: Sequence[int], fabric: Fabric, num_bytes: float) -> float:
    """The smaller of `exchange_s` and a binomial tree there and back, 2·⌈log₂ r⌉·(α + S/β) of the slowest link.

    Both after Thakur, Rabenseifner and Gropp (2005); a tree takes fewer messages, a ring fewer bytes.
    """
    links = [fabric.latency_s[i][j] + num_bytes * fabric.byte_s[i][j] for i in group for j in group if i != j]
    tree = 2.0 * (len(group) - 1).bit_length() * max(links, default=0.0)
    return min(exchange_s(group, fabric, num_bytes), tree)


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

    def placed(self, groups: Groups) -> Placed:
        """With the stages in their cheapest order."""
        pp, order = best_order([[0.0 if a is b else self._pair_s(a, b) for b in groups] for a in groups])
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
    lowest, rand = best.step_s(h), random.Random(seed)
    for _ in range(moves if len(start) > 1 else 0):
        lists = [list(group) for group in best.groups]
        a, b = rand.sample(range(len(lists)), 2)
        i, j = int(rand.random() * len(lists[a])), int(rand.random() * len(lists[b]))
        lists[a][i], lists[b][j] = lists[b][j], lists[a][i]
        found = costs.placed(tuple(map(tuple, lists)))
        if (now := found.step_s(h)) < lowest:
            best, lowest = found, now
    return best
