"""The best node-disjoint chains, and whether that is proven.

Every chain whose lower bound is below the slowest chain of the best known solution is listed, and an exact cover of all
nodes is looked for among them. The chains of a cover are simulated: it becomes the best known solution, or one of its
chains is too slow. Where there is no cover, the best known solution is optimal, as far as chains share no node and the
layers of the stages stay. arXiv 2502.19913 plans the same paths by conflict-based search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from farloop.algo.stages import OrderLimits, order_fault
from farloop.planner.chain_search import Chains
from farloop.planner.paths import Numbers, Work, latency_s
from farloop.planner.simulator import simulated_s

_LISTED = 300_000  # nodes that may be tried at the end of a chain: about half a second
_PIECES = 150_000  # pieces of work that may be simulated: about a third of a second
_CHOSEN = 300_000  # chains that the search for a cover may look at: about a second

Way = tuple[float, tuple[int, ...], tuple[int, ...]]
"""(lower bound, nodes, stages) of a chain."""


class _TooMany(Exception):
    """The search would take too long."""


@dataclass(slots=True)
class _Set:
    nodes: int
    """A bit for each node."""
    ways: list[Way] = field(default_factory=list)
    seconds: float = 0.0
    """Of the fastest: a lower bound until it is simulated."""
    is_simulated: bool = False


def lower_bound_s(nodes: Sequence[int], stages: Sequence[int], work: Work, message_s: Numbers) -> float:
    """No simulated step of one source along this chain is shorter.

    A source with k slots sends one of M microbatches after the other ⌈M/k⌉ times; and a node begins no sooner than the
    first microbatch reaches it, then does all M of them, and the last one still has its way back.
    """
    count = work.microbatches
    forwards = [work.forward_s(node, stage) for node, stage in zip(nodes, stages, strict=True)]
    there = back = 0.0
    bound = -(-count // work.slots[nodes[0]]) * latency_s(nodes, stages, work, message_s)
    for place, node in enumerate(nodes):
        if place:
            there += forwards[place - 1] + message_s[nodes[place - 1]][node]
            back += message_s[node][nodes[place - 1]] + work.backward * forwards[place - 1]
        kinds, loss = (2, 0.0) if place else (3, work.loss)
        own = forwards[place] * (1.0 + work.backward + loss)
        bound = max(bound, there + back + count * own + (kinds * count - 1) * work.gap_s)
    return bound


def best_chains(
    start: Chains, work: Work, message_s: Numbers, *, limits: OrderLimits, stage_of: Sequence[int] | None
) -> tuple[Chains, bool]:
    """Chains that are no slower than those of `start` in simulation, and whether they are proven to be the fastest.

    `stage_of` as in `Annealing`; without it the search is for nodes and stages that are all alike.
    """
    found = _Search(start, work, message_s, limits, stage_of)
    if not found.is_possible:
        return start, False
    try:
        found.run()
    except _TooMany:
        return found.best, False
    return found.best, True


class _Search:
    def __init__(
        self, start: Chains, work: Work, message_s: Numbers, limits: OrderLimits, stage_of: Sequence[int] | None
    ) -> None:
        self._work, self._message_s, self._limits, self._stage_of = work, message_s, limits, stage_of
        self._length = len(start.nodes[0])
        self.best = start
        alike = len(set(work.layer_s)) == len(set(work.layers)) == len(set(work.slots)) == 1
        whole = self._length == len(work.layers) and stage_of is not None
        self.is_possible = (alike or stage_of is not None) and (not start.rest or whole)
        """Nodes in no chain are left over only by full pipelines: else a search could leave out a stage."""
        used = start.nodes if not start.rest else [own[:1] for own in start.nodes]
        self._goal = sum(1 << node for own in used for node in own)
        self._listed, self._pieces, self._chosen = _LISTED, _PIECES, _CHOSEN
        self._dead: set[int] = set()

    def run(self) -> None:
        """Make `best` the optimum. Raises _TooMany."""
        below = max(self._simulated(n, s) for n, s in zip(self.best.nodes, self.best.stages, strict=True))
        sets = dict[int, _Set]()
        for way in self._ways(below):
            mask = sum(1 << node for node in way[1])
            sets.setdefault(mask, _Set(mask)).ways.append(way)
        for one in sets.values():
            one.seconds = min(one.ways)[0]
        left = sorted(sets.values(), key=lambda one: (one.seconds, one.nodes))
        while (cover := self._cover(0, left)) is not None:
            for one in cover:
                if not one.is_simulated:
                    self._simulate(one)
            if (slowest := max(one.seconds for one in cover)) < below:
                below = slowest
                self._set_best(cover)
            left = [one for one in left if one.seconds < below]

    def _ways(self, below: float) -> Iterator[Way]:
        """Every chain whose lower bound is less."""
        work, stage_of, count = self._work, self._stage_of, len(self._message_s)
        both = [[there + self._message_s[v][u] for v, there in enumerate(row)] for u, row in enumerate(self._message_s)]
        stages = [0] * count if stage_of is None else stage_of
        near = [
            [sorted((v for v in range(count) if v != u and stages[v] == stage), key=both[u].__getitem__)
             for stage in range(max(stages) + 1)]
            for u in range(count)
        ]  # fmt: skip
        """[node][stage], nearest first"""
        allowed = dict[tuple[int, ...], list[int]]()
        whole = 1.0 + work.backward
        least = whole * min(work.forward_s(node, stages[node]) for node in range(count))

        def following(order: tuple[int, ...]) -> list[int]:
            if stage_of is None:
                return [0]
            if (known := allowed.get(order)) is None:
                ways = range(1, max(stages) + 1)
                known = allowed[order] = [stage for stage in ways if not order_fault((*order, stage), self._limits)]
            return known

        def longer(path: tuple[int, ...], order: tuple[int, ...], seconds: float, rounds: int) -> Iterator[Way]:
            if len(path) == self._length:
                if stage_of:
                    bound = lower_bound_s(path, order, work, self._message_s)
                elif path[1:2] > path[-1:]:
                    return  # the same cycle of alike nodes goes the other way
                else:  # of this cycle, wherever it begins
                    bound = rounds * (seconds + both[path[-1]][path[0]])
                if bound < below:
                    yield bound, path, order if stage_of else self.best.stages[0]
                return
            rest = (self._length - len(path)) * least
            for stage in following(order):
                for node in near[path[-1]][stage]:
                    self._listed -= 1
                    if self._listed < 0:
                        raise _TooMany
                    if rounds * (seconds + both[path[-1]][node] + rest) >= below:
                        break  # all others are farther
                    if node in path or (node < path[0] and stage_of is None):
                        continue
                    further = seconds + both[path[-1]][node] + work.forward_s(node, stage) * whole
                    yield from longer((*path, node), (*order, stage), further, rounds)

        for head in range(count):
            if stage_of is None or stage_of[head] == 0:
                rounds = -(-work.microbatches // work.slots[head])
                yield from longer((head,), (0,), work.forward_s(head, 0) * (whole + work.loss), rounds)

    def _simulated(self, nodes: tuple[int, ...], stages: tuple[int, ...]) -> float:
        self._pieces -= self._work.microbatches * (2 * len(nodes) + 1)
        if self._pieces < 0:
            raise _TooMany
        return simulated_s(nodes, stages, self._work, self._message_s)

    def _simulate(self, one: _Set) -> None:
        best: Way | None = None
        ways = one.ways if self._stage_of else list(self._turned(one.ways))
        for bound, nodes, stages in sorted(ways):
            if best is not None and bound >= best[0]:
                break
            seconds = self._simulated(nodes, stages)
            if best is None or seconds < best[0]:
                best = seconds, nodes, stages
        assert best is not None
        one.ways, one.seconds, one.is_simulated = [best], best[0], True

    def _turned(self, ways: Sequence[Way]) -> Iterator[Way]:
        """The same cycles of alike nodes, begun anywhere and in both directions."""
        for _, nodes, stages in ways:
            for cycle in (nodes, nodes[::-1]):
                for k in range(len(cycle)):
                    turned = cycle[k:] + cycle[:k]
                    yield lower_bound_s(turned, stages, self._work, self._message_s), turned, stages

    def _cover(self, used: int, left: Sequence[_Set]) -> list[_Set] | None:
        """Disjoint sets that have every node of the goal; None where there are none."""
        if not (wanted := self._goal & ~used):
            return []
        if used in self._dead:
            return None  # and stays so: from one search to the next, sets are only lost
        self._chosen -= len(left)
        if self._chosen < 0:
            raise _TooMany
        having = {1 << bit: 0 for bit in range(wanted.bit_length()) if wanted >> bit & 1}
        for one in left:
            rest = one.nodes & wanted
            while rest:
                low = rest & -rest
                having[low] += 1
                rest ^= low
        node = min(having, key=having.__getitem__)
        for one in left:
            if one.nodes & node:
                others = [other for other in left if not other.nodes & one.nodes]
                if (found := self._cover(used | one.nodes, others)) is not None:
                    return [one, *found]
        self._dead.add(used)
        return None

    def _set_best(self, cover: Sequence[_Set]) -> None:
        chains = sorted((one.ways[0][1:] for one in cover), key=lambda chain: chain[0][0])
        nodes, stages = tuple(own for own, _ in chains), tuple(at for _, at in chains)
        if self._stage_of is None:
            stages = self.best.stages
        taken = {node for own in nodes for node in own}
        rest = tuple(node for node in range(len(self._message_s)) if node not in taken)
        self.best = replace(self.best, nodes=nodes, stages=stages, rest=rest)
