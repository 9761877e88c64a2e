"""Paths that are planned: the tiny optimum, P1 to P3, the same plan from the same seed, shared and left-over nodes."""

import collections
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import TINY_STAGES, tiny_delays, world

from farloop.coordinator.routing.chain_search import Chains, anneal, step_s
from farloop.coordinator.routing.fabric import fabric_of
from farloop.coordinator.routing.paths import IN_ORDER, PUBLISHED, Work, fault_of
from farloop.coordinator.routing.routes import Paths, Task, plan_paths, random_paths


def tiny(length: int, **more: object) -> Task:
    work = Work(layer_s=(1.0,) * 8, layers=(1,) * 4, slots=(1,) * 8, microbatches=1)
    task = Task(
        work=work,
        message_s=tiny_delays(),
        stages=4,
        length=length,
        limits=PUBLISHED if length < 4 else IN_ORDER,
        stage_of=TINY_STAGES,
        seed=0,
    )
    return replace(task, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_the_tiny_optimum(seed: int) -> None:
    """0-2-4 and 1-3-5, or the same cycles the other way round."""
    found = plan_paths(tiny(3, seed=seed))
    assert found.makespan_s == 15.75
    assert {frozenset(route.nodes) for route in found.routes} == {frozenset({0, 2, 4}), frozenset({1, 3, 5})}


def test_full_pipelines_of_the_tiny_instance() -> None:
    """22.25 and 20.25 are 0-2-4-7 and 1-3-5-6; nothing in order is faster."""
    found = plan_paths(tiny(4))
    assert found.makespan_s == 22.25
    assert {route.nodes for route in found.routes} == {(0, 2, 4, 7), (1, 3, 5, 6)}


def task_of(count: int, stages: int, length: int, seed: int, *, pinned: bool = False, slots: int = 3) -> Task:
    inventory = world(count, stages=stages, skip=0.0)
    work = Work(
        layer_s=(0.1,) * count, layers=(3,) * stages, slots=(slots,) * count, microbatches=4, gap_s=0.1
    )  # fmt: skip
    return Task(
        work=work,
        message_s=fabric_of(inventory).message_s,
        stages=stages,
        length=length,
        limits=PUBLISHED if length < stages else IN_ORDER,
        stage_of=tuple(node % stages for node in range(count)) if pinned else None,
        seed=seed,
        effort=0.2,
    )


def check(task: Task, found: Paths) -> None:
    """P1 and P2."""
    users = collections.Counter[int]()
    for route in found.routes:
        assert len(route.nodes) == task.length and not fault_of(route.stages, task.limits)
        assert all(found.stage_of[node] == stage for node, stage in zip(route.nodes, route.stages, strict=True))
    for source in {route.source for route in found.routes}:
        users.update({node for route in found.routes if route.source == source for node in route.nodes})
    assert all(users[node] <= task.work.slots[node] for node in users)
    assert found.makespan_s >= found.bound_s * (1 - 1e-12)
    assert sum(found.work.layers) == sum(task.work.layers) and min(found.work.layers) >= 1
    assert set(found.stage_of) == set(range(task.stages))
    if task.stage_of is not None:
        assert found.stage_of == task.stage_of


@settings(max_examples=12)
@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 999))
def test_chosen_stages(chains: int, over: int, seed: int) -> None:
    task = task_of(4 * max(2, chains) + over, 5, 4, seed)
    check(task, plan_paths(task))


@settings(max_examples=12)
@given(st.integers(2, 5), st.integers(0, 3), st.integers(0, 999))
def test_given_stages(replicas: int, over: int, seed: int) -> None:
    task = task_of(4 * replicas + over, 4, 4, seed, pinned=True)
    check(task, plan_paths(task))


@settings(max_examples=8)
@given(st.integers(0, 999))
def test_more_sources_than_replicas_share_them(seed: int) -> None:
    """Five sources over three replicas of each stage, as where a published plan is compared with full pipelines."""
    task = replace(task_of(17, 5, 5, seed), stage_of=(0,) * 5 + tuple(1 + node // 3 for node in range(12)))
    found = plan_paths(task)
    check(task, found)
    assert len(found.routes) == 5


@settings(max_examples=5)
@given(st.integers(0, 999))
def test_the_same_seed_gives_the_same_paths(seed: int) -> None:
    task = task_of(18, 5, 4, seed)
    assert plan_paths(task) == plan_paths(task)


def test_planned_paths_beat_random_ones() -> None:
    task = task_of(20, 5, 4, 0)
    found = plan_paths(task)
    assert random_paths(task, found).makespan_s > 1.2 * found.makespan_s


@settings(max_examples=10)
@given(st.integers(0, 999))
def test_more_moves_end_no_worse_than_they_began(seed: int) -> None:
    """The best is kept: a search never gives back less than it was given."""
    task = task_of(20, 5, 4, seed)
    start = Chains(
        nodes=tuple(tuple(range(4 * one, 4 * one + 4)) for one in range(5)), stages=((0, 1, 2, 3),) * 5
    )  # fmt: skip
    seconds = [
        step_s(anneal(start, task.work, task.message_s, moves=moves, seed=seed, pinned=False, limits=PUBLISHED),
               task.work, task.message_s)
        for moves in (1, 3000)
    ]  # fmt: skip
    assert seconds[1] <= step_s(start, task.work, task.message_s)
    assert seconds[0] <= step_s(start, task.work, task.message_s)


def test_slow_nodes_share_a_stage_of_fewer_layers() -> None:
    task = task_of(12, 3, 3, 0)
    slow = replace(task.work, layer_s=tuple(0.4 if node % 3 == 0 else 0.1 for node in range(12)), layers=(8, 8, 8))
    found = plan_paths(replace(task, work=slow))
    homes = {found.stage_of[node] for node in range(0, 12, 3)}
    assert len(homes) == 1 and found.work.layers[homes.pop()] < 8


def test_memory_is_kept() -> None:
    task = task_of(12, 3, 3, 0)
    small = replace(task.work, max_layers=tuple(2 if node < 4 else 9 for node in range(12)))
    found = plan_paths(replace(task, work=small))
    assert all(found.work.layers[found.stage_of[node]] <= 2 for node in range(4))


def test_what_does_not_fit_is_said() -> None:
    task = task_of(12, 3, 3, 0)
    with pytest.raises(ValueError, match="no split of the layers fits the memory"):
        plan_paths(replace(task, work=replace(task.work, max_layers=(2,) * 12)))
    with pytest.raises(ValueError, match="no path of measured links"):
        plan_paths(replace(task, message_s=[[0.0 if u == v else 1e6 for v in range(12)] for u in range(12)]))
    crowded = task_of(6, 3, 3, 0, slots=1)
    with pytest.raises(ValueError, match="give nodes more slots"):
        plan_paths(replace(crowded, stage_of=(0, 0, 0, 1, 1, 2)))
