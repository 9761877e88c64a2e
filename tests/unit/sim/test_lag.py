"""Updates that come a round late (protocol D): the whole machinery goes where the method's equations go."""

import dataclasses
from typing import Any

import pytest
import torch
from faulty_world import run
from simulated_faults import TWO_NODES, CutLink, NodeSetup, Scenario
from simulated_outcome import NodeOutcome, Outcome
from simulated_runs import simulate
from torch import Tensor, nn
from toy_problem import Stack, Toy, terms_of

from farloop.algo.outer_optimizers import OuterSettings, staleness_gap, step_, step_gain
from farloop.algo.spec import NodeId
from farloop.sim.network import LinkConditions

H, ROUNDS = 4, 6
SEEDS = (1, 2)


def scenario(method: str = "co2", **choices: Any) -> Scenario:
    terms = terms_of(
        method,
        **{"steps": H * ROUNDS, "h": H, "tau": 0, "mix": 0.0, "lag": 1, "codec_up": "fp32", "codec_down": "fp32"}
        | {"outer_lr": 0.8, "outer_momentum": 0.3}
        | choices,
    )
    nodes = tuple(NodeSetup(name=NodeId(name), seed=seed) for name, seed in zip("ab", SEEDS, strict=True))
    return Scenario(terms=terms, nodes=nodes, blocks=1, inner="sgd", seed=3)


def co2_by_hand(world: Scenario, *, eager: bool) -> tuple[list[list[Tensor]], Tensor]:
    """The starts of every round by node, and the end: x_{t+1} = x_t − α·m_t, m_t ← clip(β·m + Δ_{t−1}/Λ, φ)."""
    terms = world.terms
    settings = OuterSettings(kind="co2", lr=terms.outer.lr, momentum=terms.outer.momentum, clip=terms.outer.clip)
    problem = world.trains()
    assert isinstance(problem, Toy)
    learners = [problem.learner(node.name, node.seed) for node in world.nodes]
    optimizers = [learner.optimizer(terms) for learner in learners]
    target = Stack(world.blocks).flat()
    momentum, gap, late, starts = torch.zeros_like(target), 1.0, [], [target.clone() for _ in learners]
    seen: list[list[Tensor]] = []
    for number in range(ROUNDS):
        seen.append([start.clone() for start in starts])
        fresh: list[Tensor] = []
        for learner, optimizer, start in zip(learners, optimizers, starts, strict=True):
            nn.utils.vector_to_parameters(start.clone(), learner.module.parameters())
            for step in range(number * H, (number + 1) * H):
                learner.backward([step], float(step))
                optimizer.step()
            fresh.append(start - learner.module.flat())
        if late:
            reach = max(float(delta.norm()) for delta in late)
            merged = torch.stack(late).mean(dim=0)
            gap = 1.0 if eager else staleness_gap(settings.lr * float(momentum.norm()), reach)
            size = None if settings.clip is None else settings.clip * float(merged.square().mean().sqrt()) / gap
            clipped = dataclasses.replace(settings, kind="co2", clip=size)
            step_(target, {"momentum": momentum}, merged, clipped, version=1, gap=gap)
        ahead = step_gain(settings, gap) / len(learners) if eager else 0.0
        starts, late = [target - ahead * delta for delta in fresh], fresh
    return seen, target - torch.stack(late).mean(dim=0)


@pytest.mark.parametrize("clip", [None, 1.2])
@pytest.mark.parametrize("eager", [False, True])
def test_co2_goes_where_its_equations_go(eager: bool, clip: float | None) -> None:
    """A13 in the whole machinery: the result of round t − 1 is applied at the end of round t."""
    world = scenario(eager=eager, outer_clip=clip)
    starts, end = co2_by_hand(world, eager=eager)
    outcome = run(world)
    outcome.check()
    ends = [outcome.nodes[node.name][-1].diary.weights for node in world.nodes]
    for number, start in enumerate(starts):
        for weights, expected in zip(ends, start, strict=True):
            torch.testing.assert_close(weights[number * H], expected, rtol=1e-5, atol=1e-5)
    for weights in ends:
        torch.testing.assert_close(weights[-1], end, rtol=1e-5, atol=1e-5)


def test_a_delta_is_two_versions_behind_its_own() -> None:
    outcome = run(scenario())
    sends = outcome.nodes[NodeId("a")][0].diary.sends
    assert [(send.window, send.base, send.steps) for send in sends] == [
        (1, 0, 4), (2, 0, 4), (3, 1, 4), (4, 2, 4), (5, 3, 4), (6, 4, 4)
    ]  # fmt: skip


def far(world: Scenario, latency_s: float) -> Scenario:
    return dataclasses.replace(world, weather=LinkConditions(latency_s=latency_s))


def test_a_round_of_latency_is_hidden() -> None:
    """A step takes 0.1 s and a round 0.4 s: an update that takes 0.3 s costs nothing, and twice a round does."""
    seconds = [run(far(scenario(), latency_s)).seconds for latency_s in (0.001, 0.07, 0.4)]
    in_time = run(far(scenario("diloco", lag=0), 0.07)).seconds
    assert seconds[1] - seconds[0] < 0.5 * (in_time - seconds[0]) and seconds[2] > seconds[0] + 1.0


@pytest.mark.parametrize("eager", [False, True])
def test_fragments_can_be_a_round_late_too(eager: bool) -> None:
    outcome = run(scenario("streaming", h=H, eager=eager, codec_up="q4", codec_down="q4"))
    outcome.check()
    assert outcome.nodes[NodeId("a")][0].lost_steps == 0
    for fragment in outcome.layout.fragments:
        merged = [commit.contributors for commit in outcome.of(fragment.index)]
        assert merged == [(NodeId("a"), NodeId("b"))] * len(merged)


@pytest.mark.parametrize("method", ["co2", "streaming"])
def test_a_cut_link_costs_time_and_no_work(method: str) -> None:
    world = dataclasses.replace(
        scenario(method, eager=True), faults=(CutLink(node=NodeId("b"), at=0.9, for_s=0.5, reset=True),)
    )
    through, smooth = run(world), run(dataclasses.replace(world, faults=()))
    through.check()
    assert by_fragment(through) == by_fragment(smooth) and through.seconds > smooth.seconds
    assert all(starts[-1].lost_steps == 0 for starts in through.nodes.values())


def by_fragment(outcome: Outcome) -> list[list[tuple[int, tuple[NodeId, ...], int]]]:
    return [
        [(commit.version, commit.contributors, commit.anchor_digest) for commit in outcome.of(fragment.index)]
        for fragment in outcome.layout.fragments
    ]


def test_what_a_lossy_codec_left_is_sent_with_the_next_delta() -> None:
    """Error feedback needs the outcome of a delta before the next one is encoded: with a lag it is just in time."""
    errors = []
    for beta in (0, 1):
        world = scenario(codec_up=f"topk:k=8,beta={beta}", outer_momentum=0.0, steps=60)
        outcome = run(world)
        outcome.check()
        exact = run(dataclasses.replace(world, terms=world.terms.replace(codec_up="fp32")))
        errors.append(float((outcome.anchors[0] - exact.anchors[0]).norm()))
    assert errors[1] < 0.5 * errors[0]


A, B = NodeId("a"), NodeId("b")
PERIOD, STEPS = 8, 40
REGULAR = STEPS - PERIOD
"""Sends of the last round are flushes, merged when they can be."""


def with_overlaps(method: str, own: dict[NodeId, int], **choices: object) -> Outcome:
    nodes = tuple(dataclasses.replace(setup, tau=own.get(setup.name)) for setup in TWO_NODES)
    outcome = simulate(method, h=PERIOD, steps=STEPS, **choices, nodes=nodes)
    return outcome


def overlaps(start: NodeOutcome) -> set[int]:
    """Inner steps between a send and the merge that follows it."""
    found = set()
    for number, send in enumerate(start.diary.sends):
        if send.inner_step < REGULAR:
            merged = [m for m in start.diary.merges if m.fragment == send.fragment and m.sends > number]
            found.add(merged[0].inner_step - send.inner_step)
    return found


@pytest.mark.parametrize(("method", "tau"), [("streaming", 0), ("streaming", 5), ("streaming", 7), ("diloco", 3)])
def test_a_node_merges_after_its_own_overlap_and_the_others_after_the_run_s(method: str, tau: int) -> None:
    """D: exactly τ inner steps after the send, and the same anchors everywhere."""
    outcome = with_overlaps(method, {B: tau}, tau=1)
    (ours,), (other,) = outcome.nodes[B], outcome.nodes[A]
    assert (overlaps(other), overlaps(ours)) == ({1}, {tau})
    assert all(commit.contributors == (A, B) for commit in outcome.commits)
    for start in (ours, other):
        assert (start.stage, start.inner_steps, start.lost_steps) == ("finished", STEPS, 0)
        assert start.anchor_digests == outcome.anchor_digests


def test_where_updates_are_not_waited_for_a_node_has_its_own_overlap_too() -> None:
    outcome = with_overlaps("decoupled", {B: 5}, quorum=2)
    """The other one merges when its delta is decided, which is after its τ."""
    assert overlaps(outcome.nodes[B][0]) == {5}
    assert max(overlaps(outcome.nodes[A][0])) < 5


@pytest.mark.parametrize("method", ["streaming", "decoupled"])
def test_an_own_overlap_that_is_the_run_s_changes_nothing(method: str) -> None:
    assert with_overlaps(method, {B: 1}).tape == with_overlaps(method, {}).tape
