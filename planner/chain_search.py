"""Chains of nodes, by simulated annealing from good beginnings."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farloop.algo.stages import OrderLimits, order_fault
from farloop.planner.paths import Numbers, Work, chain_s

# --- Simulated annealing: one chain per source, no node in two chains
#
# Chains that share no node cannot collide, so that a source's time is a closed form of its own chain (paths.chain_s)
# and the step's is the largest of them. A move exchanges two nodes, and only two chains have to be looked at again.
# Budgets are moves, never seconds: the same seed gives the same chains on every machine.


_HOT, _COLD = 0.05, 0.0005
"""Temperatures at the begin and the end, in shares of the median time of a chain at the begin."""

_SPREAD = 0.05  # weight of a second of all other chains relative to the slowest: breaks ties towards short chains
_FOCUS = 0.5  # share of the moves that touch the slowest chain
_INSIDE = 0.15  # share of the moves that exchange two places of one chain
_ALIKE = 0.7  # share of the moves of pinned nodes that exchange two of one stage, which is always allowed
_FRESH = 0.25  # share of the moves that bring in a node that is in no chain, where there is one

_PATIENCE = 0.35
"""Share of all moves without a faster step after which a search ends: it has been cold since, or began at its end."""

_REST = -1  # stands for the number of a chain, for nodes that are in none


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Node-disjoint chains; the first node of each is its source."""

    nodes: tuple[tuple[int, ...], ...]
    stages: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...] = ()  # nodes that are in no chain, and may take a place of one that is


class Annealing:
    def __init__(
        self,
        start: Chains,
        work: Work,
        message_s: Numbers,
        *,
        seed: int,
        limits: OrderLimits,
        stage_of: Sequence[int] | None = None,
        judge: Callable[[Sequence[int], Sequence[int]], float] | None = None,
    ) -> None:
        """`stage_of`: nodes keep their stages, so that an exchange moves both; None: a node takes over the other's
        stage. `judge` gives the seconds of a chain, the closed form where it is None."""
        self._random = random.Random(seed)
        self._limits, self._stage_of = limits, stage_of
        self._rest = list(start.rest)
        self._nodes = [list(chain) for chain in start.nodes]
        self._stages = [list(chain) for chain in start.stages]
        self._allowed: dict[tuple[int, ...], bool] = {}
        self._time = judge or _closed_form(work, message_s)
        self._times = [self._time(n, s) for n, s in zip(self._nodes, self._stages, strict=True)]
        self._where: dict[int, tuple[int, int]] = {}
        self._alike: dict[int, list[int]] = {}
        for chain, (own, at) in enumerate(zip(self._nodes, self._stages, strict=True)):
            for place, (node, stage) in enumerate(zip(own, at, strict=True)):
                self._where[node] = (chain, place)
                self._alike.setdefault(stage, []).append(node)
        for place, node in enumerate(self._rest):
            self._where[node] = (_REST, place)
            if stage_of is not None:
                self._alike.setdefault(stage_of[node], []).append(node)

    def run(self, moves: int, hot: float = _HOT) -> Chains:
        """The best chains found by so many exchanges."""
        rand, nodes, stages, times = self._random.random, self._nodes, self._stages, self._times
        count = len(nodes)
        best, worst = self._taken(), max(times)
        lowest, lowest_sum, last_gain = worst, sum(times), 0
        warm, factor = hot * sorted(times)[count // 2], (_COLD / hot) ** (1.0 / max(1, moves))
        slowest = times.index(worst)
        for move in range(moves):
            if move - max(last_gain, _PATIENCE * moves) > _PATIENCE * moves:
                break
            warm *= factor
            a, i, b, j = self._proposed(slowest)
            if (a == b and i == j) or not self._exchanged(a, i, b, j):
                continue
            alone = b in (a, _REST)
            old_a, old_b = times[a], times[a] if alone else times[b]
            new_a = self._time(nodes[a], stages[a])
            new_b = new_a if alone else self._time(nodes[b], stages[b])
            change = (new_a if new_a > new_b else new_b) - (old_a if old_a > old_b else old_b)
            change += _SPREAD * (new_a + new_b - old_a - old_b)
            if change > 0.0 and rand() >= math.exp(-change / warm):
                self._exchange(a, i, b, j)
                continue
            times[a] = new_a
            if not alone:
                times[b] = new_b
            worst = max(times)
            slowest = times.index(worst)
            if worst <= lowest and (worst < lowest or sum(times) < lowest_sum):
                if worst < lowest:
                    last_gain = move
                lowest, lowest_sum, best = worst, sum(times), self._taken()
        return best

    def _proposed(self, slowest: int) -> tuple[int, int, int, int]:
        """Two places, (chain, place) each; often one of the slowest chain."""
        rand, count, length = self._random.random, len(self._nodes), len(self._nodes[0])
        a = slowest if rand() < _FOCUS else int(rand() * count)
        i = int(rand() * length)
        if self._rest and rand() < _FRESH:
            return a, i, _REST, int(rand() * len(self._rest))
        if self._stage_of is not None and rand() < _ALIKE:
            others = self._alike[self._stages[a][i]]
            b, j = self._where[others[int(rand() * len(others))]]
            return a, i, b, j
        b = a if count == 1 or rand() < _INSIDE else int(rand() * count)
        return a, i, b, int(rand() * length)

    def _taken(self) -> Chains:
        return Chains(
            nodes=tuple(map(tuple, self._nodes)), stages=tuple(map(tuple, self._stages)), rest=tuple(self._rest)
        )

    def _exchange(self, a: int, i: int, b: int, j: int) -> None:
        """Exchange two places, the second perhaps in no chain; twice restores them."""
        nodes, stages = self._nodes, self._stages
        if b == _REST:
            nodes[a][i], self._rest[j] = self._rest[j], nodes[a][i]
            if self._stage_of is not None:
                stages[a][i] = self._stage_of[nodes[a][i]]
                self._where[nodes[a][i]], self._where[self._rest[j]] = (a, i), (_REST, j)
            return
        nodes[a][i], nodes[b][j] = nodes[b][j], nodes[a][i]
        if self._stage_of is not None:
            stages[a][i], stages[b][j] = stages[b][j], stages[a][i]
            self._where[nodes[a][i]], self._where[nodes[b][j]] = (a, i), (b, j)

    def _exchanged(self, a: int, i: int, b: int, j: int) -> bool:
        """Exchange two places where that is allowed; False, and nothing done, where it is not."""
        stages = self._stages
        if self._stage_of is None:
            self._exchange(a, i, b, j)
            return True
        other = self._stage_of[self._rest[j]] if b == _REST else stages[b][j]
        if (i == 0) != (other == 0) or (a == b and i == 0):
            return False  # a source stays at the head of a chain
        alike = stages[a][i] == other
        self._exchange(a, i, b, j)
        if alike or (self._is_allowed(stages[a]) and (b in (a, _REST) or self._is_allowed(stages[b]))):
            return True
        self._exchange(a, i, b, j)
        return False

    def _is_allowed(self, stages: list[int]) -> bool:
        key = tuple(stages)
        if (known := self._allowed.get(key)) is None:
            known = self._allowed[key] = not order_fault(key, self._limits)
        return known


def _closed_form(work: Work, message_s: Numbers) -> Callable[[Sequence[int], Sequence[int]], float]:
    """paths.chain_s, unrolled for the inner loop of a search."""
    count = len(message_s)
    both = [[message_s[u][v] + message_s[v][u] for v in range(count)] for u in range(count)]
    slots, heads = work.slots, range(len(work.layers))
    forwards = [[work.forward_s(node, stage) for stage in heads] for node in range(count)]
    whole, loss, gap, microbatches = 1.0 + work.backward, work.loss, work.gap_s, work.microbatches

    def seconds(nodes: Sequence[int], stages: Sequence[int]) -> float:
        compute = busiest = cycle = 0.0
        flying = microbatches
        before = nodes[-1]
        for node, stage in zip(nodes, stages, strict=True):
            forward = forwards[node][stage]
            compute += forward
            if forward > busiest:
                busiest = forward
            cycle += both[before][node]
            before = node
            if slots[node] < flying:
                flying = slots[node]
        head = forwards[nodes[0]][stages[0]]
        one = compute * whole + head * loss + cycle
        between = whole * busiest + gap
        kept = -(-microbatches // flying) * one + (flying - 1) * between
        full = one + (microbatches - 1) * between
        return kept if kept > full else full

    return seconds


def step_s(chains: Chains, work: Work, message_s: Numbers) -> float:
    return max(chain_s(n, s, work, message_s) for n, s in zip(chains.nodes, chains.stages, strict=True))


# --- Initial chains


def visits(chains: int, stages: int, length: int, limits: OrderLimits) -> tuple[tuple[int, ...], ...]:
    """The stages of each chain in order, every stage but 0 visited as often as any other, up to one.

    What a chain leaves out goes round the stages from chain to chain, one after the other or in wider strides where
    a run of stages is too long to be jumped over.
    Raises ValueError: so much cannot be skipped within the limits, or there are too few chains to visit every stage.
    """
    if stages == 1:
        return ((0,),) * chains
    if chains * (length - 1) < stages - 1:
        needed = -(-(stages - 1) // max(1, length - 1))
        raise ValueError(
            f"{chains} paths of {length} of {stages} stages leave some stage without a node; "
            f"{needed} paths are needed: {needed * length} nodes, or fewer stages"
        )
    if (found := _visits(chains, stages, length, limits)) is not None:
        return found
    nearest = next(longer for longer in range(length, stages + 1) if _visits(chains, stages, longer, limits))
    raise ValueError(
        f"paths of {length} of {stages} stages would jump over more than {limits.max_jump - 1} stages in a row; "
        f"the nearest skip that can be planned is {(stages - nearest) / stages:.2f}"
    )


def _visits(chains: int, stages: int, length: int, limits: OrderLimits) -> tuple[tuple[int, ...], ...] | None:
    others, skipped = stages - 1, stages - length
    for stride in range(1, others + 1):
        if math.gcd(stride, others) > 1:
            continue
        ring = [1 + step * stride % others for step in range(others)]
        found = []
        for chain in range(chains):
            out = {ring[(chain * skipped + step) % others] for step in range(skipped)}
            found.append(tuple(stage for stage in range(stages) if stage not in out))
        if not any(order_fault(path, limits) for path in found):
            return tuple(found)
    return None


def nearby(message_s: Numbers, groups: int, size: int) -> list[list[int]]:
    """`groups` times `size` nodes that are near each other, and what is left over as a last list.

    Each group begins with the free node that is farthest from all others and takes the nearest free ones.
    """
    count = len(message_s)
    both = [[message_s[u][v] + message_s[v][u] for v in range(count)] for u in range(count)]
    free = list(range(count))
    apart = [sum(row) for row in both]
    found = []
    for _ in range(groups):
        head = max(free, key=lambda node: (apart[node], -node))
        group = [head]
        free.remove(head)
        for _ in range(size - 1):
            near = min(free, key=lambda node: (sum(both[node][one] for one in group), node))
            group.append(near)
            free.remove(near)
        found.append(group)
        for node in free:
            apart[node] -= sum(both[node][one] for one in group)
    return [*found, free]


def free_start(message_s: Numbers, stages: int, length: int, limits: OrderLimits) -> Chains:
    """Chains of nearby nodes whose stages are not chosen yet."""
    count = len(message_s) // length
    *groups, rest = nearby(message_s, count, length)
    return Chains(nodes=tuple(map(tuple, groups)), stages=visits(count, stages, length, limits), rest=tuple(rest))


def pinned_start(stage_of: Sequence[int], length: int, limits: OrderLimits) -> Chains | None:
    """Chains of nodes that keep their stages; None where they cannot be disjoint. Each chain takes the stages that have
    the most free nodes; where the limits forbid that, the nearest order that they allow."""
    free: dict[int, list[int]] = {}
    for node, stage in enumerate(stage_of):
        free.setdefault(stage, []).append(node)
    sources = free.pop(0)
    nodes, stages = [], []
    for position, source in enumerate(sources):
        picked = _fullest({stage: len(rest) for stage, rest in free.items()}, length - 1, limits)
        if picked is None:
            return None
        stages.append((0, *picked))
        nodes.append((source, *(free[stage].pop(position % len(free[stage])) for stage in picked)))
    rest = sorted(node for several in free.values() for node in several)
    return Chains(nodes=tuple(nodes), stages=tuple(stages), rest=tuple(rest))


def _fullest(free: dict[int, int], wanted: int, limits: OrderLimits) -> tuple[int, ...] | None:
    """`wanted` stages in order with the most free nodes that a path may visit; None where there is no such path.

    Exact, by the highest stage so far: (sum of free nodes, as few as possible of the emptiest first).
    """
    best: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {(0, 0): ((), ())}
    for stage in sorted(free):
        if not free[stage]:
            continue
        for (taken, last), (score, path) in list(best.items()):
            if taken < wanted and stage - last <= limits.max_jump:
                key, value = (taken + 1, stage), (tuple(sorted((*score, free[stage]))), (*path, stage))
                if key not in best or value > best[key]:
                    best[key] = value
    ends = [value for (taken, _), value in best.items() if taken == wanted]
    return max(ends)[1] if ends else None
