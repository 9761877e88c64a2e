"""Paths: which are allowed, what one costs, what the simulator counts, and those that are planned (P1 to P4)."""

import collections
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import TINY_STAGES, tiny_delays, world
from slow_cases import examples

from farloop.algo.stages import IN_ORDER, PUBLISHED, OrderLimits, order_fault
from farloop.planner.chain_search import Annealing, Chains, step_s, visits
from farloop.planner.exact_chains import lower_bound_s
from farloop.planner.fabric import fabric_of
from farloop.planner.paths import Work, chain_s, latency_s
from farloop.planner.routes import Paths, Task, plan_paths
from farloop.planner.simulator import Route, bounds_s, simulate

TINY = Work(layer_s=(1.0,) * 8, layers=(1,) * 4, slots=(1,) * 8, microbatches=1)

# --- Which paths are allowed, and what one costs


@given(st.integers(1, 9), st.integers(2, 10), st.integers(2, 10))
def test_visits_are_even(chains: int, stages: int, length: int) -> None:
    """P2: every stage but the first is visited as often as any other, up to one."""
    if not stages - 3 <= length <= stages or chains * (length - 1) < stages - 1:
        return
    found = visits(chains, stages, length, PUBLISHED)
    assert all(len(path) == length and not order_fault(path) for path in found)
    counts = [sum(stage in path for path in found) for stage in range(1, stages)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("nodes", "stages", "seconds"),
    [
        ((0, 2, 4), (0, 1, 2), 15.75),
        ((0, 4, 2), (0, 2, 1), 15.75),
        ((1, 3, 5), (0, 1, 2), 15.75),
        ((0, 4, 7), (0, 2, 3), 19.75),
        ((0, 2, 4, 7), (0, 1, 2, 3), 22.25),
        ((1, 3, 5, 6), (0, 1, 2, 3), 20.25),
    ],
)
def test_the_tiny_latencies(nodes: tuple[int, ...], stages: tuple[int, ...], seconds: float) -> None:
    """2·cycle + 7.75; reversing a cycle of symmetric links costs nothing."""
    delays = tiny_delays()
    assert latency_s(nodes, stages, TINY, delays) == chain_s(nodes, stages, TINY, delays) == seconds
    assert simulate([Route(nodes=nodes, stages=stages)], TINY, delays).makespan_s == seconds


def test_the_closed_form_of_a_chain() -> None:
    """R·latency + (m − 1)·b, or a node that is never idle. It leaves out that losses wait behind forwards."""
    work = Work(layer_s=(1.0, 1.0), layers=(1, 1), slots=(3, 3), microbatches=6, gap_s=0.5)
    assert chain_s((0, 1), (0, 1), work, [[0.0, 10.0], [10.0, 0.0]]) == 2 * (2 * 2.5 + 0.25 + 40.0) + 2 * 3.0
    assert chain_s((0, 1), (0, 1), work, [[0.0, 0.0], [0.0, 0.0]]) == 5.25 + 5 * 3.0
    work = Work(layer_s=(0.44,) * 4, layers=(1,) * 4, slots=(3,) * 4, microbatches=6, gap_s=0.13)
    delays = [[0.0 if u == v else 1.0 + 0.2 * (u + v) for v in range(4)] for u in range(4)]
    route = Route(nodes=(0, 1, 2, 3), stages=(0, 1, 2, 3))
    exact = simulate([route], work, delays).makespan_s
    assert chain_s(route.nodes, route.stages, work, delays) == pytest.approx(exact, rel=0.05), "a few percent"


# --- The simulator


def test_two_forwards_collide() -> None:
    """They reach a node at 3.0 and 3.4: it begins at 3.0 and 4.0, the second waits 0.6 s."""
    work = Work(layer_s=(1.0, 1.0, 1.0), layers=(1, 1), slots=(2, 2, 2), microbatches=1)
    delays = [[0.0, 9.0, 2.0], [9.0, 0.0, 2.4], [2.0, 2.4, 0.0]]
    routes = [Route(nodes=(0, 2), stages=(0, 1)), Route(nodes=(1, 2), stages=(0, 1))]
    outcome = simulate(routes, work, delays, keep=True)
    there = [piece for piece in outcome.pieces if piece.node == 2 and piece.kind == "F"]
    assert [piece.start_s for piece in there] == [3.0, 4.0]


def test_a_source_sends_on_when_one_returned_and_its_paths_take_turns() -> None:
    work = Work(layer_s=(1.0, 1.0), layers=(1, 1), slots=(1, 1), microbatches=3)
    outcome = simulate([Route(nodes=(0, 1), stages=(0, 1))], work, [[0.0, 1.0], [1.0, 0.0]])
    assert outcome.makespan_s == 3 * (2 * 2.5 + 0.25 + 4.0)
    work = Work(layer_s=(1.0,) * 3, layers=(1, 1), slots=(2,) * 3, microbatches=4)
    routes = [Route(nodes=(0, 1), stages=(0, 1)), Route(nodes=(0, 2), stages=(0, 1))]
    outcome = simulate(routes, work, [[0.0] * 3] * 3, keep=True)


Step = tuple[list[Route], Work, list[list[float]]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Up to four sources, whose paths in order may share nodes."""
    stages, sources, replicas = draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    nodes = sources + (stages - 1) * replicas
    length = draw(st.integers(2, stages))
    increasing = ((0, *others) for others in itertools.combinations(range(1, stages), length - 1))
    ways = [order for order in increasing if not order_fault(order)]
    routes = []
    for source in range(sources):
        order = draw(st.sampled_from(ways))
        own = [source, *(sources + (s - 1) * replicas + draw(st.integers(0, replicas - 1)) for s in order[1:])]
        routes.append(Route(nodes=tuple(own), stages=order))

    def several(of: st.SearchStrategy[float], count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(of, min_size=count, max_size=count)))

    work = Work(
        layer_s=several(st.floats(0.1, 3.0), nodes),
        layers=several(st.integers(1, 4), stages),  # type: ignore[arg-type]
        slots=several(st.integers(1, 3), nodes),  # type: ignore[arg-type]
        microbatches=draw(st.integers(1, 5)),
        gap_s=draw(st.floats(0.0, 0.5)),
    )
    return routes, work, [list(several(st.floats(0.0, 5.0), nodes)) for _ in range(nodes)]


@settings(max_examples=examples(20))
@given(steps())
def test_a_simulated_step_is_possible_whole_not_below_its_bounds_and_always_the_same(step: Step) -> None:
    """P3, P4: nodes do one thing at a time and keep to their slots; P forwards, one loss, P backwards of each."""
    routes, work, _ = step
    outcome = simulate(*step, keep=True)
    assert outcome.stalled == 0, "no microbatch waits for ever on paths in order"
    assert outcome.makespan_s >= max(bounds_s(*step)) * (1 - 1e-12)
    done = collections.Counter((piece.source, piece.microbatch, piece.kind) for piece in outcome.pieces)
    for route, number in itertools.product(routes, range(work.microbatches)):
        found = [done[route.source, number, kind] for kind in ("F", "L", "B")]
        assert found == [len(route.nodes), 1, len(route.nodes)]
    for node in {piece.node for piece in outcome.pieces}:
        own = sorted((p for p in outcome.pieces if p.node == node), key=lambda piece: piece.start_s)
        for before, after in itertools.pairwise(own):
            assert after.start_s >= before.stop_s + work.gap_s - 1e-9
        kept = 0
        for piece in own:
            kept += piece.kind == "F"
            assert kept <= work.slots[node]
            kept -= piece.kind == "B"
    assert simulate(*step, keep=True) == outcome


# --- Planned paths


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("length", "limits", "makespan_s", "paths"),
    [(3, PUBLISHED, 15.75, [{0, 2, 4}, {1, 3, 5}]), (4, IN_ORDER, 22.25, [{0, 2, 4, 7}, {1, 3, 5, 6}])],
)
def test_the_tiny_optimum(
    seed: int, length: int, limits: OrderLimits, makespan_s: float, paths: list[set[int]]
) -> None:
    """Of cycles, in either direction; of full pipelines nothing in order is faster."""
    found = plan_paths(
        Task(
            work=TINY, message_s=tiny_delays(), stages=4, length=length, limits=limits, stage_of=TINY_STAGES, seed=seed
        )
    )
    assert found.makespan_s == makespan_s
    assert sorted(map(sorted, (route.nodes for route in found.routes))) == [sorted(path) for path in paths]


def task_of(count: int, stages: int, length: int, seed: int, *, pinned: bool = False, slots: int = 3) -> Task:
    return Task(
        work=Work(
            layer_s=(0.1,) * count, layers=(3,) * stages, slots=(slots,) * count, microbatches=4, gap_s=0.1
        ),
        message_s=fabric_of(world(count, stages=stages, skip=0.0)).message_s,
        stages=stages,
        length=length,
        limits=PUBLISHED if length < stages else IN_ORDER,
        stage_of=tuple(node % stages for node in range(count)) if pinned else None,
        seed=seed,
        effort=0.2,
    )  # fmt: skip


def planned(task: Task) -> Paths:
    """P1 and P2 hold of them."""
    found, users = plan_paths(task), collections.Counter[int]()
    for route in found.routes:
        assert len(route.nodes) == task.length and not order_fault(route.stages, task.limits)
        assert all(found.stage_of[node] == stage for node, stage in zip(route.nodes, route.stages, strict=True))
    for source in {route.source for route in found.routes}:
        users.update({node for route in found.routes if route.source == source for node in route.nodes})
    assert all(users[node] <= task.work.slots[node] for node in users)
    assert found.makespan_s >= found.bound_s * (1 - 1e-12)
    assert sum(found.work.layers) == sum(task.work.layers) and min(found.work.layers) >= 1
    assert set(found.stage_of) == set(range(task.stages))
    assert task.stage_of in (None, found.stage_of)
    return found


SEEDS = st.integers(0, 999)


@settings(max_examples=12)
@given(st.integers(2, 6), st.integers(0, 3), SEEDS)
def test_plans_of_chosen_and_of_given_stages_hold_what_they_promise(chains: int, over: int, seed: int) -> None:
    task = task_of(4 * chains + over, 5, 4, seed)
    assert planned(task) == plan_paths(task), "the same from the same seed"
    planned(task_of(4 * min(chains, 5) + over, 4, 4, seed, pinned=True))


@settings(max_examples=8)
@given(SEEDS)
def test_more_sources_than_replicas_share_them(seed: int) -> None:
    """Five sources over three replicas of each stage, as where a published plan is compared with full pipelines."""
    task = replace(task_of(17, 5, 5, seed), stage_of=(0,) * 5 + tuple(1 + node // 3 for node in range(12)))
    assert len(planned(task).routes) == 5


@settings(max_examples=10)
@given(SEEDS)
def test_more_moves_end_no_worse_than_they_began(seed: int) -> None:
    """The best is kept: a search never gives back less than it was given."""
    task = task_of(20, 5, 4, seed)
    start = Chains(nodes=tuple(tuple(range(4 * one, 4 * one + 4)) for one in range(5)), stages=((0, 1, 2, 3),) * 5)
    for moves in (1, 3000):
        found = Annealing(start, task.work, task.message_s, seed=seed, limits=PUBLISHED).run(moves)
        assert step_s(found, task.work, task.message_s) <= step_s(start, task.work, task.message_s)


@settings(max_examples=examples(20))
@given(steps())
def test_no_simulated_step_of_one_source_is_below_the_lower_bound_of_its_chain(step: Step) -> None:
    routes, work, message_s = step
    for route in routes:
        seconds = simulate([route], work, message_s).makespan_s
        assert seconds >= lower_bound_s(route.nodes, route.stages, work, message_s) * (1 - 1e-12)


def fastest_s(task: Task, work: Work) -> float:
    """Of all sets of chains that share no node and visit all of them, by trying each."""
    count, at, best = len(task.message_s), task.stage_of, float("inf")
    ways = list[tuple[float, frozenset[int]]]()
    for nodes in itertools.permutations(range(count), task.length):
        stages = tuple(range(task.length)) if at is None else tuple(at[node] for node in nodes)
        if not order_fault(stages, task.limits):
            found = simulate([Route(nodes=nodes, stages=stages)], work, task.message_s)
            ways.append((found.makespan_s, frozenset(nodes)))
    ways.sort(key=lambda way: way[0])
    for slowest, last in ways:
        below = [own for seconds, own in ways if seconds <= slowest]
        for others in itertools.combinations(set(below) - {last}, count // task.length - 1):
            if len(last.union(*others)) == count:
                return slowest
    return best


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_what_is_called_optimal_is_the_fastest_of_all(data: st.DataObject) -> None:
    """On small instances whose delays have no order, with chosen and with given stages, in order and skipping."""
    stages, pinned = data.draw(st.sampled_from([3, 4])), data.draw(st.booleans())
    count, length = 6, 3
    delay = st.floats(0.0, 2.0)
    rows = [[0.0 if u == v else data.draw(delay) for v in range(count)] for u in range(count)]
    stage_of = (0, 0, 1, 1, 2, 2) if stages == 3 else (0, 0, 1, 2, 2, 3)
    speeds = tuple(data.draw(st.sampled_from([0.1, 0.3])) for _ in range(count)) if pinned else (0.1,) * count
    work = Work(layer_s=speeds, layers=(2,) * stages, slots=(data.draw(st.integers(1, 3)),) * count, microbatches=3)
    task = Task(
        work=work, message_s=rows, stages=stages, length=length, limits=PUBLISHED if length < stages else IN_ORDER,
        stage_of=stage_of if pinned else None, seed=0, effort=0.001, keeps_cut=True,
    )  # fmt: skip
    found = plan_paths(task)
    assert found.optimal and found.makespan_s == pytest.approx(fastest_s(task, found.work))


def test_slow_nodes_share_a_stage_of_fewer_layers_and_memory_is_kept() -> None:
    task = task_of(12, 3, 3, 0)
    slow = replace(task.work, layer_s=tuple(0.4 if node % 3 == 0 else 0.1 for node in range(12)), layers=(8, 8, 8))
    found = plan_paths(replace(task, work=slow))
    homes = {found.stage_of[node] for node in range(0, 12, 3)}
    assert len(homes) == 1 and found.work.layers[homes.pop()] < 8
    small = replace(task.work, max_layers=tuple(2 if node < 4 else 9 for node in range(12)))
    found = plan_paths(replace(task, work=small))
    assert all(found.work.layers[found.stage_of[node]] <= 2 for node in range(4))


def test_what_does_not_fit_is_said() -> None:
    task = task_of(12, 3, 3, 0)
    cut_off = [[0.0 if u == v else 1e6 for v in range(12)] for u in range(12)]
    for wrong, words in (
        (replace(task, work=replace(task.work, max_layers=(2,) * 12)), "no split of the layers fits the memory"),
        (replace(task, message_s=cut_off), "no path of measured links"),
        (replace(task_of(6, 3, 3, 0, slots=1), stage_of=(0, 0, 0, 1, 1, 2)), "give nodes more slots"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_paths(wrong)


# --- Where links are missing


def exists(task: Task) -> bool:
    """Whether all sources have paths of measured links, by trying every choice of nodes."""
    count, far = len(task.message_s), 1e6

    def closes(nodes: tuple[int, ...]) -> bool:
        edges = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
        return all(max(task.message_s[u][v], task.message_s[v][u]) < far for u, v in edges)

    ways = [nodes for nodes in itertools.permutations(range(count), task.length) if closes(nodes)]
    if task.stage_of is None:
        sets = {frozenset(nodes) for nodes in ways}
        wanted = count // task.length
        return any(
            sum(map(len, chosen)) == len(set().union(*chosen)) for chosen in itertools.combinations(sets, wanted)
        )
    at = task.stage_of
    ways = [nodes for nodes in ways if not order_fault([at[node] for node in nodes], task.limits)]
    by_source = [[nodes for nodes in ways if nodes[0] == source] for source in range(count) if at[source] == 0]
    for chosen in itertools.product(*by_source):
        used = collections.Counter(itertools.chain(*chosen))
        if all(used[node] <= task.work.slots[node] for node in used):
            visits_of = collections.Counter(at[node] for nodes in chosen for node in nodes[1:])
            if max(visits_of.values()) <= -(-len(chosen) * (task.length - 1) // (task.stages - 1)):
                return True
    return False


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_a_path_of_measured_links_is_found_where_one_exists(data: st.DataObject) -> None:
    """On small graphs. The annealing, and the choice of the nearest free replicas, missed some."""
    stages = data.draw(st.integers(2, 3))
    pinned = data.draw(st.booleans())
    if pinned:
        counts = [data.draw(st.integers(1, 3)) for _ in range(stages)]
        stage_of = tuple(stage for stage, several in enumerate(counts) for _ in range(several))
        count, slots = len(stage_of), data.draw(st.integers(1, 2))
    else:
        count, stage_of, slots = stages * data.draw(st.integers(1, 2)) + data.draw(st.integers(0, 1)), None, 1
    pairs = list(itertools.combinations(range(count), 2))
    linked = set(data.draw(st.lists(st.sampled_from(pairs), unique=True, min_size=min(len(pairs), 3))))
    rows = [[0.0 if u == v else 0.1 * (1 + (u * v) % 3) if (min(u, v), max(u, v)) in linked else 1e6
             for v in range(count)] for u in range(count)]  # fmt: skip
    work = Work(layer_s=(0.1,) * count, layers=(1,) * stages, slots=(slots,) * count, microbatches=2)
    task = Task(
        work=work, message_s=rows, stages=stages, length=stages, limits=IN_ORDER, stage_of=stage_of, seed=0, effort=0.05
    )
    try:
        plan_paths(task)
    except ValueError as error:
        assert not exists(task), (error, rows, stage_of)
    else:
        assert exists(task)
