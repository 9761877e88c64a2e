"""From nodes and stages to layers, replicas and paths."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from farloop.algo.stages import IN_ORDER, OrderLimits, order_fault
from farloop.planner.anomalies import UNREACHABLE_S
from farloop.planner.chain_search import Annealing, Chains, free_start, pinned_start, step_s, visits
from farloop.planner.exact_chains import best_chains
from farloop.planner.paths import Numbers, Work, chain_s
from farloop.planner.placement import min_max_split
from farloop.planner.simulator import Route, bounds_s, simulate, simulated_s

# --- Paths of several sources over shared nodes, one source after the other
#
# For uneven counts, such as full pipelines of five sources over three replicas of each stage. A source's path is found
# exactly, by dynamic programming over stages in order, at prices that rise with a node's load; then sources are planned
# again, one at a time, while the simulated step gets shorter.
#
# Paths visit stages in order, so shared nodes cannot block each other: a microbatch that waits for a slot holds only
# slots of lower stages.

_NEAR = 6  # nearest free replicas of the next stage that a path considers


class _Sharing:
    """One path for every node of stage 0, of `length` stages in order.

    No node is given more sources than it has slots, and no stage more visits than its share, rounded up. `run` raises
    ValueError: so many sources do not fit.
    """

    def __init__(
        self, stage_of: Sequence[int], length: int, work: Work, message_s: Numbers, limits: OrderLimits
    ) -> None:
        self._work, self._message_s, self._length = work, message_s, length
        self._both = [[there + message_s[v][u] for v, there in enumerate(row)] for u, row in enumerate(message_s)]
        self._stage_of, self._stages = stage_of, max(stage_of) + 1
        self._replicas = [[node for node, own in enumerate(stage_of) if own == s] for s in range(self._stages)]
        self._sources = self._replicas[0]
        others = max(1, self._stages - 1)
        self._cost = [(1.0 + work.backward) * work.forward_s(node, stage) for node, stage in enumerate(stage_of)]
        self._near: dict[tuple[int, int], list[int]] = {}  # (node, stage) → the stage's replicas, nearest first
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
        outcome = simulate([self._paths[source] for source in self._sources], self._work, self._message_s)
        return outcome.makespan_s, outcome.source_s

    def _nearest(self, node: int, stage: int) -> list[int]:
        if (known := self._near.get((node, stage))) is None:
            seconds = self._both[node]
            known = self._near[node, stage] = sorted(self._replicas[stage], key=lambda other: (seconds[other], other))
        return known

    def _planned(self, source: int, price: float) -> Route:
        """The cheapest path given the load of all others; each of their visits to a node raises its price."""
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
        stages = tuple(self._stage_of[node] for node in nodes)
        assert not order_fault(
            stages, OrderLimits(max_jump=self._jump, max_swap=0, max_swaps=0, max_swapped=IN_ORDER.max_swap)
        )
        return Route(nodes=nodes, stages=stages)


# --- From nodes and a number of stages to layers, replicas and paths
#
# Chains are annealed by their closed form, and layers dealt anew by the speed of the replicas found. From there an
# exact search proves the fastest chains in simulation, or, where that would take too long, the slowest chains are
# polished with the simulator as the judge. Where counts do not allow chains of their own, paths are shared.

_MOVES_PER_NODE = 2000
_POLISH_PER_NODE = 60
_SHARING_PIECES = 40_000  # pieces of work that the search for shared paths may simulate, about a tenth of a second

_HOT, _WARM, _NEARLY_COLD = 0.05, 0.01, 0.001
"""Where the first search, those after layers were dealt anew, and the polish begin (chain_search.Annealing)."""

_POLISH_PIECES = 150_000  # pieces of work that a polish may simulate, about a third of a second
_WORTH = 1e-9  # a plan is better when it is faster by this share: rounding decides nothing

_TRIES = 100_000  # choices of nodes that an exact search may try: some tenths of a second
_PLACES = 400  # places of all paths for which there is an exact search

SPARE_COST = 0.02  # a spare node gets work if that lengthens the step by at most this share; else it stands by


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    routes: tuple[Route, ...]  # several of one source are used in turn
    stage_of: tuple[int, ...]  # [num_nodes]
    work: Work
    makespan_s: float
    bound_s: float  # no step along these paths is shorter
    optimal: bool = False  # proven: with these layers, no paths that share no node are faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    work: Work  # its layers per stage are only where the search begins
    message_s: Numbers
    stages: int
    length: int  # stages that a microbatch visits
    limits: OrderLimits
    stage_of: tuple[int, ...] | None  # of nodes that say their stage; None: the search chooses
    seed: int
    effort: float = 1.0
    left_out: tuple[int, ...] = ()
    """Nodes that no chain includes at first; they may share a place later. Only if stages are chosen."""
    keeps_cut: bool = False  # whether the layers per stage stay as they are


def plan_paths(task: Task) -> Paths:
    """The best paths found, and the layers that go with them.

    Where the fast searches find no path, an exact one decides whether there is any, as far as `_TRIES` choices reach.
    Raises ValueError: nothing fits: memory, links, skips or slots."""
    found: list[Paths] = []
    fault = (
        "the search found no path of measured links that joins the stages; give links between more sites, or fewer "
        "stages"
    )
    try:
        found.append(_planned(task, by_speed=False))
    except ValueError as error:
        if task.stage_of is None:
            raise
        fault = str(error)
    if task.stage_of is None and (len(set(task.work.layer_s)) > 1 or len(set(task.work.max_layers or ())) > 1):
        found.append(_planned(task, by_speed=True))
    joined = [paths for paths in found if all(_is_linked(task, route.nodes) for route in paths.routes)]
    best = min(joined, key=lambda paths: paths.makespan_s) if joined else _exact(task, fault)
    _check(task, best)
    return best


def _is_linked(task: Task, nodes: Sequence[int]) -> bool:
    """Whether the cycle through these nodes has a measured link at every step, in both directions."""
    edges = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
    return all(max(task.message_s[u][v], task.message_s[v][u]) < UNREACHABLE_S for u, v in edges)


def _exact(task: Task, fault: str) -> Paths:
    """Paths by an exact search, where the fast searches found none: paths that share no node, else paths in order that
    share nodes. Raises ValueError: `fault`, and whether the search was complete."""
    stage_of, count = task.stage_of, len(task.message_s)
    search = _LinkSearch(task)
    if (nodes := search.run((1,) * count, task.limits)) is not None:
        if stage_of is None:
            stages = visits(len(nodes), task.stages, task.length, task.limits)
        else:
            stages = tuple(tuple(stage_of[node] for node in own) for own in nodes)
        rest = tuple(sorted(set(range(count)) - {node for own in nodes for node in own}))
        chains = Chains(nodes=nodes, stages=stages, rest=rest)
        return _finished(task, chains, _resplit(task, chains))
    if stage_of is not None and (nodes := search.run(task.work.slots, IN_ORDER)) is not None:
        routes = [Route(nodes=own, stages=tuple(stage_of[node] for node in own)) for own in nodes]
        return _judged(routes, stage_of, _shared_work(task), task.message_s)
    raise ValueError(f"{fault}; the search was not complete" if search.tries > _TRIES else fault)


class _LinkSearch:
    """Backtracking over the nodes of all paths, one place after the other."""

    def __init__(self, task: Task) -> None:
        self._task, self.tries = task, 0
        count = len(task.message_s)
        self._near = [[v for v in range(count) if v != u and _is_linked(task, (u, v))] for u in range(count)]
        others = max(1, task.stages - 1)
        stage_of = task.stage_of
        self._sources = None if stage_of is None else [node for node in range(count) if stage_of[node] == 0]
        paths = (count - len(task.left_out)) // task.length if self._sources is None else len(self._sources)
        self._paths, self._cap = paths, -(-paths * (task.length - 1) // others)

    def run(self, room: Sequence[int], limits: OrderLimits) -> tuple[tuple[int, ...], ...] | None:
        """The nodes of every path; None if there are none, or if the search ended after `_TRIES` choices.

        `room`: paths that may visit each node.
        """
        self.tries = 0
        self._room, self._limits = list(room), limits
        self._visits = [0] * self._task.stages
        found: list[list[int]] = []
        if self._paths * self._task.length <= _PLACES and self._extended(found):
            return tuple(map(tuple, found))
        self.tries = self.tries or _TRIES + 1
        return None

    def _extended(self, found: list[list[int]]) -> bool:
        """Whether the paths can be completed; if so, `found` has them."""
        task = self._task
        if found and len(found[-1]) == task.length and not _is_linked(task, found[-1]):
            return False
        if len(found) == self._paths and len(found[-1]) == task.length:
            return True
        starts = not found or len(found[-1]) == task.length
        for node in self._heads(found) if starts else self._next(found[-1]):
            self.tries += 1
            if self.tries > _TRIES:
                return False
            stage = 0 if task.stage_of is None else task.stage_of[node]
            self._room[node] -= 1
            self._visits[stage] += 1
            if starts:
                found.append([node])
            else:
                found[-1].append(node)
            if self._extended(found):
                return True
            if starts:
                found.pop()
            else:
                found[-1].pop()
            self._room[node] += 1
            self._visits[stage] -= 1
        return False

    def _heads(self, found: list[list[int]]) -> Sequence[int]:
        if self._sources is not None:
            return self._sources[len(found) : len(found) + 1] if self._room[self._sources[len(found)]] else ()
        # Stages are dealt later, so paths can be exchanged and turned: each begins with its lowest node.
        after = found[-1][0] if found else -1
        return [node for node in range(after + 1, len(self._room)) if self._room[node]]

    def _next(self, path: list[int]) -> list[int]:
        stage_of = self._task.stage_of
        free = [node for node in self._near[path[-1]] if self._room[node]]
        if stage_of is None:
            return [node for node in free if node > path[0]]
        at = [stage_of[node] for node in path]
        return [
            node
            for node in free
            if self._visits[stage_of[node]] < self._cap and not order_fault((*at, stage_of[node]), self._limits)
        ]


def _check(task: Task, paths: Paths) -> None:
    """Raise ValueError if the best paths need too much memory."""
    for route in paths.routes:
        if paths.work.max_layers is not None and any(
            paths.work.layers[stage] > paths.work.max_layers[node]
            for node, stage in zip(route.nodes, route.stages, strict=True)
        ):
            raise ValueError(
                "no split of the layers fits the memory of the nodes; give more stages, or larger max_layers"
            )


def _planned(task: Task, *, by_speed: bool) -> Paths:
    chains = _start(task, by_speed=by_speed)
    if chains is None:
        return _shared(task)
    moves = max(1, int(_MOVES_PER_NODE * len(task.message_s) * task.effort))
    work = _resplit(task, chains) if by_speed or task.stage_of is not None else task.work
    best: tuple[float, Chains, Work] | None = None
    for turn in range(3):
        search = Annealing(
            chains, work, task.message_s, seed=task.seed + turn, limits=task.limits, stage_of=task.stage_of
        )
        chains = search.run(moves, _HOT) if turn == 0 else search.run(moves // 4, _WARM)
        again = _resplit(task, chains)
        for one in (work, again):
            seconds = step_s(chains, one, task.message_s)
            if best is None or seconds < best[0] * (1.0 - _WORTH):
                best = seconds, chains, one
        if again == work:
            break
        work = again
    assert best is not None
    _, chains, work = best
    return _finished(task, chains, work)


def _finished(task: Task, chains: Chains, work: Work) -> Paths:
    chains, optimal = best_chains(chains, work, task.message_s, limits=task.limits, stage_of=task.stage_of)
    if not optimal:
        chains = _polished(task, chains, work)
    return replace(_with_rest(task, _in_order(task, chains, work), work), optimal=optimal)


def _start(task: Task, *, by_speed: bool) -> Chains | None:
    """The first chains; None if nodes must be shared."""
    if task.stage_of is not None:
        return pinned_start(task.stage_of, task.length, task.limits)
    kept = [node for node in range(len(task.message_s)) if node not in set(task.left_out)]
    found = free_start([[task.message_s[u][v] for v in kept] for u in kept], task.stages, task.length, task.limits)
    chains = Chains(
        nodes=tuple(tuple(kept[node] for node in own) for own in found.nodes),
        stages=found.stages,
        rest=(*(kept[node] for node in found.rest), *task.left_out),
    )
    if not by_speed:
        return chains
    # Alike nodes in one stage, so that it can be given as many layers as suit them: slow ones early, fast ones late.
    used = sorted({node for chain in chains.nodes for node in chain}, key=lambda node: (-task.work.layer_s[node], node))
    places = sorted(
        (stage, chain, place) for chain, path in enumerate(chains.stages) for place, stage in enumerate(path)
    )
    nodes = [list(chain) for chain in chains.nodes]
    for node, (_, chain, place) in zip(used, places, strict=True):
        nodes[chain][place] = node
    return replace(chains, nodes=tuple(map(tuple, nodes)))


def _resplit(task: Task, chains: Chains) -> Work:
    """The work with layers divided by each stage's slowest replica, as far as memory allows."""
    work = task.work
    if task.keeps_cut:
        return work
    slowest, caps = [0.0] * task.stages, [sum(work.layers)] * task.stages
    placed = [(node, stage) for own, at in zip(chains.nodes, chains.stages, strict=True)
              for node, stage in zip(own, at, strict=True)]  # fmt: skip
    if task.stage_of is not None:
        placed += [(node, task.stage_of[node]) for node in chains.rest]
    for node, stage in placed:
        slowest[stage] = max(slowest[stage], work.layer_s[node])
        if work.max_layers is not None:
            caps[stage] = min(caps[stage], work.max_layers[node])
    return _dealt(work, slowest, caps)


def _dealt(work: Work, slowest: Sequence[float], caps: Sequence[int]) -> Work:
    if sum(caps) < sum(work.layers):
        return work
    known = [seconds for seconds in slowest if seconds > 0.0]
    least = min(known, default=1.0)
    speeds = [1.0 / (seconds if seconds > 0.0 else least) for seconds in slowest]
    return replace(work, layers=min_max_split(sum(work.layers), speeds, caps))


def _polished(task: Task, chains: Chains, work: Work) -> Chains:
    """A last descent that judges by simulation."""

    def judge(nodes: Sequence[int], stages: Sequence[int]) -> float:
        return simulated_s(nodes, stages, work, task.message_s)

    pieces = work.microbatches * (2 * task.length + 1)
    moves = min(_POLISH_PER_NODE * len(task.message_s), _POLISH_PIECES // (2 * pieces))
    search = Annealing(
        chains, work, task.message_s, seed=task.seed, limits=task.limits, stage_of=task.stage_of, judge=judge
    )
    return search.run(max(1, int(moves * task.effort)), _NEARLY_COLD)


def _in_order(task: Task, chains: Chains, work: Work) -> Chains:
    """Order each chain by stages if that costs nothing in simulation: a reversed cycle is as long."""
    nodes, stages = [], []
    for own, at in zip(chains.nodes, chains.stages, strict=True):
        hops = sorted(zip(at, own, strict=True))
        plain = tuple(node for _, node in hops), tuple(stage for stage, _ in hops)
        now = simulated_s(own, at, work, task.message_s)
        worse = order_fault(plain[1], task.limits) or simulated_s(*plain, work, task.message_s) > now * (1.0 + _WORTH)
        nodes.append(own if worse else plain[0])
        stages.append(at if worse else plain[1])
    return replace(chains, nodes=tuple(nodes), stages=tuple(stages))


def _with_rest(task: Task, chains: Chains, work: Work) -> Paths:
    """Routes of the chains, with spare nodes added. A spare node replaces a chain's node for every second microbatch of
    its source. A chosen stage is the one with the fewest replicas; with a given stage the path may change to visit as
    many stages as possible."""
    stage_of = [-1] * len(task.message_s)
    for own, at in zip(chains.nodes, chains.stages, strict=True):
        for node, stage in zip(own, at, strict=True):
            stage_of[node] = stage
    routes = [Route(nodes=own, stages=at) for own, at in zip(chains.nodes, chains.stages, strict=True)]
    seconds = simulate(routes, work, task.message_s).makespan_s
    for node in chains.rest:
        ways = _ways_with(task, routes[: len(chains.nodes)], node)
        if task.stage_of is not None:
            stage_of[node] = task.stage_of[node]
        if not ways:
            stage_of[node] = max(stage_of[node], 0)
            continue
        scored = [
            (stage_of.count(stage), chain_s(route.nodes, route.stages, work, task.message_s), index)
            for index, (stage, route) in enumerate(ways)
        ]
        *_, index = min(scored)
        stage_of[node], route = ways[index]
        if sum(one.source == route.source for one in routes) >= work.microbatches:
            continue  # its source has no microbatch left for another way
        if (found := simulate([*routes, route], work, task.message_s).makespan_s) <= seconds * (1.0 + SPARE_COST):
            routes, seconds = [*routes, route], found
    return _judged(routes, stage_of, work, task.message_s)


def _ways_with(task: Task, routes: Sequence[Route], node: int) -> list[tuple[int, Route]]:
    """(stage of the node, route with it in place of another) for every allowed place."""
    found = []
    for route in routes:
        for place in range(1, len(route.nodes)):
            stage = route.stages[place] if task.stage_of is None else task.stage_of[node]
            hops = [*zip(route.nodes, route.stages, strict=True)]
            hops[place] = (node, stage)
            if stage != route.stages[place]:
                hops.sort(key=lambda hop: hop[1])
            stages = tuple(stage for _, stage in hops)
            if stage > 0 and not order_fault(stages, task.limits):
                found.append((stage, Route(nodes=tuple(node for node, _ in hops), stages=stages)))
    return found


def _shared(task: Task) -> Paths:
    assert task.stage_of is not None
    work = _shared_work(task)
    pieces = task.stage_of.count(0) * work.microbatches * (2 * task.length + 1)
    rounds = min(200, int(_SHARING_PIECES * task.effort / pieces))
    sharing = _Sharing(task.stage_of, task.length, work, task.message_s, task.limits)
    return _judged(sharing.run(rounds, random.Random(task.seed)), task.stage_of, work, task.message_s)


def _shared_work(task: Task) -> Work:
    """The work with layers divided by each stage's slowest node."""
    assert task.stage_of is not None
    work = task.work
    slowest = [max(work.layer_s[n] for n, own in enumerate(task.stage_of) if own == s) for s in range(task.stages)]
    holds = work.max_layers or [sum(work.layers)] * len(task.stage_of)
    caps = [min(holds[n] for n, own in enumerate(task.stage_of) if own == s) for s in range(task.stages)]
    return work if task.keeps_cut else _dealt(work, slowest, caps)


def random_paths(task: Task, paths: Paths) -> Paths:
    """Paths with nodes of the same stages chosen at random: the baseline of a plan."""
    rand = random.Random(task.seed)
    order: dict[int, list[int]] = {}
    for route in paths.routes:
        for node, stage in zip(route.nodes[1:], route.stages[1:], strict=True):
            order.setdefault(stage, []).append(node)
    for several in order.values():
        rand.shuffle(several)
    routes = [
        Route(nodes=(route.source, *(order[stage].pop() for stage in route.stages[1:])), stages=route.stages)
        for route in paths.routes
    ]
    return _judged(routes, paths.stage_of, paths.work, task.message_s)


def _judged(routes: Sequence[Route], stage_of: Sequence[int], work: Work, message_s: Numbers) -> Paths:
    outcome = simulate(routes, work, message_s)
    assert outcome.stalled == 0, "microbatches wait for each other's slots"
    return Paths(
        routes=tuple(routes),
        stage_of=tuple(stage_of),
        work=work,
        makespan_s=outcome.makespan_s,
        bound_s=max(bounds_s(routes, work, message_s)),
    )
