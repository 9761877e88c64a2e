"""The judge: what it counts, whom it lets in, and that no step is shorter than its bounds."""

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import tiny_delays

from farloop.coordinator.routing.paths import Work, chain_s, fault_of
from farloop.coordinator.routing.simulator import Outcome, Route, bounds_s, simulate


def test_two_forwards_collide() -> None:
    """They reach a node at 3.0 and 3.4: it begins at 3.0 and 4.0, the second waits 0.6 s."""
    work = Work(layer_s=(1.0, 1.0, 1.0), layers=(1, 1), slots=(2, 2, 2), microbatches=1)
    delays = [[0.0, 9.0, 2.0], [9.0, 0.0, 2.4], [2.0, 2.4, 0.0]]
    routes = [Route(nodes=(0, 2), stages=(0, 1)), Route(nodes=(1, 2), stages=(0, 1))]
    outcome = simulate(routes, work, delays, keep=True)
    there = [piece for piece in outcome.pieces if piece.node == 2 and piece.kind == "F"]
    assert [piece.start_s for piece in there] == [3.0, 4.0]
    assert [piece.waited_s for piece in there] == pytest.approx([0.0, 0.6])


def test_the_tiny_instance() -> None:
    work = Work(layer_s=(1.0,) * 8, layers=(1,) * 4, slots=(1,) * 8, microbatches=1)
    routes = [Route(nodes=(0, 2, 4), stages=(0, 1, 2)), Route(nodes=(1, 3, 5), stages=(0, 1, 2))]
    assert simulate(routes, work, tiny_delays()).makespan_s == 15.75
    full = [Route(nodes=(0, 2, 4, 7), stages=(0, 1, 2, 3)), Route(nodes=(1, 3, 5, 6), stages=(0, 1, 2, 3))]
    assert simulate(full, work, tiny_delays()).source_s == {0: 22.25, 1: 20.25}


def test_a_source_sends_on_when_one_returned() -> None:
    work = Work(layer_s=(1.0, 1.0), layers=(1, 1), slots=(1, 1), microbatches=3)
    outcome = simulate([Route(nodes=(0, 1), stages=(0, 1))], work, [[0.0, 1.0], [1.0, 0.0]])
    assert outcome.makespan_s == 3 * (2 * 2.5 + 0.25 + 4.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Route], Work, list[list[float]]]:
    """Up to four sources, whose paths in order may share nodes."""
    stages, sources, replicas = draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    nodes = sources + (stages - 1) * replicas
    length = draw(st.integers(2, stages))
    increasing = ((0, *others) for others in itertools.combinations(range(1, stages), length - 1))
    ways = [order for order in increasing if not fault_of(order)]
    seconds = st.floats(0.0, 5.0)
    routes = []
    for source in range(sources):
        order = draw(st.sampled_from(ways))
        own = [source, *(sources + (s - 1) * replicas + draw(st.integers(0, replicas - 1)) for s in order[1:])]
        routes.append(Route(nodes=tuple(own), stages=order))
    work = Work(
        layer_s=tuple(draw(st.lists(st.floats(0.1, 3.0), min_size=nodes, max_size=nodes))),
        layers=tuple(draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))),
        slots=tuple(draw(st.lists(st.integers(1, 3), min_size=nodes, max_size=nodes))),
        microbatches=draw(st.integers(1, 5)),
        gap_s=draw(st.floats(0.0, 0.5)),
    )
    delays = draw(st.lists(st.lists(seconds, min_size=nodes, max_size=nodes), min_size=nodes, max_size=nodes))
    return routes, work, delays


def played(step: tuple[list[Route], Work, list[list[float]]]) -> Outcome:
    return simulate(*step, keep=True)


@settings(max_examples=60)
@given(steps())
def test_every_microbatch_goes_its_whole_way(step: tuple[list[Route], Work, list[list[float]]]) -> None:
    """P4: P forwards, one loss, P backwards each; nobody waits for ever on paths in order."""
    routes, work, _ = step
    outcome = played(step)
    assert outcome.stalled == 0
    done = collections.Counter((piece.source, piece.microbatch, piece.kind) for piece in outcome.pieces)
    for route in routes:
        for number in range(work.microbatches):
            found = [done[route.source, number, kind] for kind in ("F", "L", "B")]
            assert found == [len(route.nodes), 1, len(route.nodes)]


@settings(max_examples=60)
@given(steps())
def test_a_node_does_one_thing_at_a_time_and_keeps_to_its_slots(
    step: tuple[list[Route], Work, list[list[float]]],
) -> None:
    _, work, _ = step
    outcome = played(step)
    for node in {piece.node for piece in outcome.pieces}:
        own = sorted((p for p in outcome.pieces if p.node == node), key=lambda piece: piece.start_s)
        for before, after in itertools.pairwise(own):
            assert after.start_s >= before.stop_s + work.gap_s - 1e-9
        kept = 0
        for piece in own:
            kept += piece.kind == "F"
            assert kept <= work.slots[node]
            kept -= piece.kind == "B"


@settings(max_examples=60)
@given(steps())
def test_no_step_is_shorter_than_its_bounds(step: tuple[list[Route], Work, list[list[float]]]) -> None:
    """P3."""
    assert simulate(*step).makespan_s >= max(bounds_s(*step)) * (1 - 1e-12)


@settings(max_examples=30)
@given(steps())
def test_the_same_step_twice(step: tuple[list[Route], Work, list[list[float]]]) -> None:
    assert played(step) == played(step)


def test_the_closed_form_is_close_to_the_simulator() -> None:
    """Of a chain of its own: it leaves out that losses wait behind forwards; a few percent."""
    work = Work(layer_s=(0.44,) * 4, layers=(1,) * 4, slots=(3,) * 4, microbatches=6, gap_s=0.13)
    delays = [[0.0 if u == v else 1.0 + 0.2 * (u + v) for v in range(4)] for u in range(4)]
    route = Route(nodes=(0, 1, 2, 3), stages=(0, 1, 2, 3))
    exact = simulate([route], work, delays).makespan_s
    assert chain_s(route.nodes, route.stages, work, delays) == pytest.approx(exact, rel=0.05)


def test_paths_of_one_source_take_turns() -> None:
    work = Work(layer_s=(1.0,) * 3, layers=(1, 1), slots=(2,) * 3, microbatches=4)
    routes = [Route(nodes=(0, 1), stages=(0, 1)), Route(nodes=(0, 2), stages=(0, 1))]
    outcome = simulate(routes, work, [[0.0] * 3] * 3, keep=True)
    assert [outcome.busy_s[1], outcome.busy_s[2]] == [5.0, 5.0]
