"""Paths where nodes have to serve several sources: one source after the other, each around the load of the others.

The planner for uneven counts, such as full pipelines of five sources over three replicas of each stage. A source's
path is found exactly, by dynamic programming over stages in order, at prices that rise with what others ask of a node;
then sources are planned anew, one at a time, as long as the simulator finds the step shorter.

Stages in order are what keeps shared nodes from blocking each other: whoever waits for a slot holds only slots of lower
stages, so that somebody can always go on.
"""

import itertools
import random
from collections.abc import Sequence

from farloop.coordinator.routing.paths import IN_ORDER, Limits, Numbers, Work, fault_of
from farloop.coordinator.routing.simulator import Route, simulate

_NEAR = 6
"""Free replicas of the next stage that a path may go on to: the nearest ones; all of them where there are no more."""


def share(
    stage_of: Sequence[int],
    length: int,
    work: Work,
    message_s: Numbers,
    *,
    limits: Limits,
    rounds: int,
    seed: int,
) -> tuple[Route, ...]:
    """One path for every node of stage 0, of `length` stages in order.

    No node is given more sources than it has slots, and no stage more visits than its share, rounded up.

    Raises:
        ValueError: so many sources do not fit.
    """
    return _Sharing(stage_of, length, work, message_s, limits).run(rounds, random.Random(seed))


class _Sharing:
    def __init__(self, stage_of: Sequence[int], length: int, work: Work, message_s: Numbers, limits: Limits) -> None:
        self._work, self._message_s, self._length = work, message_s, length
        self._both = [[there + message_s[v][u] for v, there in enumerate(row)] for u, row in enumerate(message_s)]
        self._stages = max(stage_of) + 1
        self._replicas = [[node for node, own in enumerate(stage_of) if own == s] for s in range(self._stages)]
        self._sources = self._replicas[0]
        others = max(1, self._stages - 1)
        homes = {node: stage for stage, several in enumerate(self._replicas) for node in several}
        self._cost = [(1.0 + work.backward) * work.forward_s(node, homes[node]) for node in range(len(stage_of))]
        self._near: dict[tuple[int, int], list[int]] = {}
        """(node, stage) → the stage's replicas, nearest first"""
        self._cap = -(-len(self._sources) * (length - 1) // others)
        self._jump = limits.max_jump
        self._paths: dict[int, Route] = {}

    def run(self, rounds: int, rand: random.Random) -> tuple[Route, ...]:
        for source in self._sources:
            self._paths[source] = self._planned(source, 1.0)
        best = self._judged()
        for _ in range(rounds):
            ends = best[1]
            slowest = max(self._sources, key=lambda source: ends[source])
            source = slowest if rand.random() < 0.5 else rand.choice(self._sources)
            kept = dict(self._paths)
            again = {source, rand.choice(self._sources)}
            for one in again:
                del self._paths[one]
            try:
                for one in sorted(again, key=lambda one: (one != source, one)):
                    self._paths[one] = self._planned(one, rand.choice((0.0, 0.3, 1.0, 3.0)))
            except ValueError:
                self._paths = kept
                continue
            found = self._judged()
            if (found[0], sum(found[1].values())) < (best[0], sum(best[1].values())):
                best = found
            else:
                self._paths = kept
        return tuple(self._paths[source] for source in self._sources)

    def _judged(self) -> tuple[float, dict[int, float]]:
        routes = [self._paths[source] for source in self._sources]
        outcome = simulate(routes, self._work, self._message_s)
        return outcome.makespan_s, outcome.source_s

    def _nearest(self, node: int, stage: int) -> list[int]:
        if (known := self._near.get((node, stage))) is None:
            seconds = self._both[node]
            known = self._near[node, stage] = sorted(self._replicas[stage], key=lambda other: (seconds[other], other))
        return known

    def _planned(self, source: int, price: float) -> Route:
        """The cheapest path around the load of all others; what a node does for them is charged `price` times."""
        slots, both = self._work.slots, self._both
        asked = [0] * len(both)
        visits = [0] * self._stages
        for route in self._paths.values():
            for node, stage in zip(route.nodes[1:], route.stages[1:], strict=True):
                asked[node] += 1
                visits[stage] += 1
        reached: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, source): (0.0, (source,))}
        for _ in range(self._length - 1):
            further: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
            for (at, node), (cost, path) in reached.items():
                for stage in range(at + 1, min(self._stages, at + self._jump + 1)):
                    if visits[stage] >= self._cap:
                        continue
                    free = (other for other in self._nearest(node, stage) if asked[other] < slots[other])
                    for other in itertools.islice(free, _NEAR):
                        own = self._cost[other] * (1.0 + price * asked[other])
                        value = (cost + both[node][other] + own, (*path, other))
                        if (stage, other) not in further or value < further[stage, other]:
                            further[stage, other] = value
            reached = further
        if not reached:
            raise ValueError(
                f"{len(self._sources)} sources do not fit: paths of {self._length} stages find no free node; "
                "give nodes more slots, or other stages more nodes"
            )
        _, nodes = min((cost + both[node][source], path) for (_, node), (cost, path) in reached.items())
        home = {node: stage for stage, several in enumerate(self._replicas) for node in several}
        stages = tuple(home[node] for node in nodes)
        assert not fault_of(stages, Limits(max_jump=self._jump, max_swap=0, max_swaps=0, max_swapped=IN_ORDER.max_swap))
        return Route(nodes=nodes, stages=stages)
