"""Control variates and sums of disjoint parts in whole runs, on least squares whose nodes differ, or do not."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from simulated_faults import CrashCoordinator, CrashNode, CutLink, Fault, NodeSetup, SpoilAnchor
from simulated_outcome import Outcome
from simulated_runs import simulate
from slow_cases import slow
from torch import Tensor
from toy_problem import Stack, Toy, inner_optimizer

from farloop.algo.spec import NodeId, RunSpec
from farloop.algo.terms import LearningRate, Terms

NODES, H, STEPS, LR = 4, 20, 400, 0.05
NUMEL = Stack(1).flat().numel()
SEEDS = [1, *slow(2, 3)]
TOY = Toy(blocks=1, blocks_per_fragment=1, together=False, inner="sgd", noise=0.0, num_samples=0, seed=0)
"""Of it the model alone is used here."""


class LeastSquares:
    """f_i(θ) = ½ Σ a_i·(θ − m_i)², the gradient with noise. Nodes are steep where others are flat, unless alike."""

    def __init__(self, seed: int, *, alike: bool, noise: float) -> None:
        self.noise, self.seed = noise, seed
        generator = torch.Generator().manual_seed(seed)
        self.curvatures = [0.2 + 2 * torch.rand(NUMEL, generator=generator) ** 2 for _ in range(NODES)]
        self.minima = [torch.randn(NUMEL, generator=generator) for _ in range(NODES)]
        if alike:
            self.curvatures, self.minima = self.curvatures[:1] * NODES, self.minima[:1] * NODES
        self.trained = torch.ones(NODES, NUMEL)

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        return TOY.begin(terms)

    def learner(self, node: NodeId, seed: int) -> "Learner":
        return Learner(self, seed)

    def minimum(self, nodes: Sequence[int]) -> Tensor:
        """Of the sum over these nodes, [NUMEL]."""
        total = torch.stack([self.curvatures[i] for i in nodes]).sum(dim=0)
        return torch.stack([self.curvatures[i] * self.minima[i] for i in nodes]).sum(dim=0) / total


class Learner:
    """One node's part of it."""

    def __init__(self, problem: LeastSquares, number: int) -> None:
        self.module = Stack(1)
        self._problem, self._number = problem, number
        self._noise = torch.Generator().manual_seed(1000 * problem.seed + number)

    def optimizer(self, terms: Terms) -> torch.optim.Optimizer:
        return inner_optimizer(self.module, "sgd", terms)

    def backward(self, samples: Sequence[int], at: float = 0.0) -> float:
        curvature, minimum = self._problem.curvatures[self._number], self._problem.minima[self._number]
        gradient = curvature * (self.module.flat() - minimum)
        gradient += self._problem.noise * torch.randn(NUMEL, generator=self._noise)
        gradient *= self._problem.trained[self._number]
        start = 0
        for parameter in self.module.parameters():
            parameter.grad = gradient[start : start + parameter.numel()].view(parameter.shape).clone()
            start += parameter.numel()
        return 0.0

    def evaluate(self) -> float:
        return 0.0


def play(problem: LeastSquares, *faults: Fault, variates: bool, method: str = "diloco", **choices: Any) -> Outcome:
    """Four nodes whose anchors are plain averages."""
    plain = {"steps": STEPS, "h": H, "codec_up": "q4", "codec_down": "q4", "outer_lr": 1.0, "outer_momentum": 0.0}
    lr = LearningRate(peak=LR, minimum=LR, warmup_steps=0)
    nodes = tuple(NodeSetup(name=NodeId(f"n{i}"), seed=i) for i in range(NODES))
    of_terms = {**plain, "lr": lr, "min_nodes": NODES, "control_variates": variates, **choices}
    return simulate(method, *faults, nodes=nodes, problem=problem, **of_terms)


def weights(outcome: Outcome) -> Tensor:
    """The final anchors in the order of the module's parameters, [NUMEL]."""
    found = {
        slot.name: anchor[slot.offset : slot.offset + slot.numel]
        for fragment, anchor in zip(outcome.layout.fragments, outcome.anchors, strict=True)
        for slot in fragment.tensors
    }
    return torch.cat([found[name] for name, _ in Stack(1).named_parameters()])


@cache
def distance(seed: int, *, variates: bool, alike: bool = False, noise: float = 0.0, **choices: Any) -> float:
    """Of the final anchor from the minimum of all data."""
    problem = LeastSquares(seed, alike=alike, noise=noise)
    outcome = play(problem, variates=variates, **choices)
    return float((weights(outcome) - problem.minimum(range(NODES))).norm())


@pytest.mark.parametrize("seed", SEEDS)
def test_where_data_differ_they_lead_to_the_minimum_of_all(seed: int) -> None:
    """Twenty rounds of twenty steps, deltas and updates in four bits."""
    assert distance(seed, variates=False) > 0.4
    assert distance(seed, variates=True) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noise_is_what_remains(seed: int) -> None:
    """Where nodes are alike there is as much of it."""
    without, with_them = (distance(seed, variates=variates, noise=0.3) for variates in (False, True))
    assert with_them < 0.5 * without
    assert with_them < 1.5 * distance(seed, variates=False, alike=True, noise=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "worst"), [("q4", 1.05), ("fp32", 1.001)])
def test_where_data_are_alike_they_do_no_harm(codec: str, worst: float) -> None:
    """Learned is noise then, and it cancels in the mean; with q4 a little less of the downlink's loss is made good."""
    means = [
        sum(distance(s, variates=v, alike=True, noise=0.3, codec_up=codec, codec_down=codec) for s in range(1, 6))
        for v in (False, True)
    ]
    assert means[1] < worst * means[0]


@pytest.mark.parametrize(
    "choices",
    [
        {"h_rule": "post-local", "h_init": 10, "h_switch": 100},
        *slow(
            {"outer_lr": 0.7},
            {"lr": LearningRate(peak=2 * LR, minimum=LR / 2, warmup_steps=40)},
            {"method": "sparse"},
            {"codec_up": "q4r"},
        ),
    ],
    ids=["unequal-rounds", "outer-lr", "cosine", "sparse", "q4r"],
)
def test_what_else_a_run_may_choose_does_not_matter(choices: dict[str, Any]) -> None:
    """ν is divided out, and so is the learning rate of the steps in a round, however many there are."""
    assert distance(1, variates=False, **choices) > 0.3
    assert distance(1, variates=True, **choices) < 0.1


@pytest.mark.slow
def test_fragments_that_are_waited_for_learn_as_the_whole_model_does() -> None:
    choices = {"method": "streaming", "tau": 0, "mix": 0.0}
    assert distance(1, variates=False, **choices) > 0.4
    assert distance(1, variates=True, **choices) < 0.1


def test_when_a_node_dies_the_others_go_to_the_minimum_of_theirs() -> None:
    """What they had learned with it would lead them elsewhere for the rest of the run."""
    problem = LeastSquares(1, alike=False, noise=0.0)
    outcome = play(problem, CrashNode(node=NodeId("n3"), at=0.5 * STEPS * 0.1), variates=True)
    assert {len(commit.contributors) for commit in outcome.commits} == {3, 4}
    assert float((weights(outcome) - problem.minimum(range(3))).norm()) < 0.05
    assert float((weights(outcome) - problem.minimum(range(4))).norm()) > 0.5


@pytest.mark.parametrize(
    "fault",
    [
        CrashNode(node=NodeId("n1"), at=10.0, down_s=3.0),
        *slow(
            CrashNode(node=NodeId("n1"), at=10.0, down_s=0.3),
            CrashCoordinator(at=10.0, down_s=2.0),
            CutLink(node=NodeId("n1"), at=10.0, for_s=9.0, reset=True),
            SpoilAnchor(node=NodeId("n1"), at=10.0),
        ),
    ],
    ids=["node-back", "node-soon-back", "coordinator", "link", "anchor"],
)
def test_they_go_on_after_a_fault(fault: Fault) -> None:
    problem = LeastSquares(1, alike=False, noise=0.0)
    outcome = play(problem, fault, variates=True)
    assert float((weights(outcome) - problem.minimum(range(NODES))).norm()) < 0.1


# --- SCAFCOM: increments of smoothed gradients

INCREMENTS = {"method": "scafcom", "codec_up": "topk:beta=0"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_codec_that_leaves_most_out_stalls_where_data_differ_unless_increments_are_sent(seed: int) -> None:
    """One element of every tensor is sent: of deltas with error feedback, and as an increment."""
    assert distance(seed, variates=False, codec_up="topk", steps=800) > 2.0
    assert distance(seed, variates=True, **INCREMENTS, steps=800, variates_rate=1.0) < 0.4


def test_without_losses_and_smoothing_increments_are_the_same_as_whole_deltas() -> None:
    exact = {"codec_down": "fp32", "variates_rate": 1.0, "lr": LearningRate(peak=LR, minimum=LR / 4, warmup_steps=40)}
    problem = LeastSquares(1, alike=False, noise=0.3)
    whole, increments = (
        weights(play(problem, variates=True, **exact, **choices))
        for choices in ({"codec_up": "fp32"}, {**INCREMENTS, "codec_up": "fp32"})
    )
    torch.testing.assert_close(whole, increments, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        (CrashNode(node=NodeId("n3"), at=10.0), 3),
        *slow(
            (CrashNode(node=NodeId("n1"), at=10.0, down_s=3.0), 4),
            (CrashCoordinator(at=10.0, down_s=2.0), 4),
            (CutLink(node=NodeId("n1"), at=10.0, for_s=9.0, reset=True), 4),
            (SpoilAnchor(node=NodeId("n1"), at=10.0), 4),
        ),
    ],
    ids=["node-gone", "node-back", "coordinator", "link", "anchor"],
)
def test_the_sum_of_increments_begins_anew_where_other_nodes_made_a_version(fault: Fault, left: int) -> None:
    problem = LeastSquares(1, alike=False, noise=0.0)
    outcome = play(problem, fault, variates=True, **{**INCREMENTS, "codec_up": "q4"})
    assert float((weights(outcome) - problem.minimum(range(left))).norm()) < 0.1


# --- Nodes that train disjoint parts of the weights: merge = sum


@pytest.mark.parametrize("choices", [{"steps": 30}, *slow({"h": 7}, {"method": "streaming", "tau": 0, "mix": 0.0})])
def test_in_a_sum_of_disjoint_parts_each_is_trained_as_by_its_node_alone(choices: dict[str, Any]) -> None:
    """Two rounds, the last of which is short and ends in the run's flush; the mean leaves a quarter of each round."""
    problem = LeastSquares(1, alike=False, noise=0.0)
    owner = torch.arange(NUMEL) % NODES
    problem.trained = torch.stack([owner == i for i in range(NODES)]).float()
    summed, averaged = (
        weights(play(problem, variates=False, codec_up="fp32", codec_down="fp32", merge=merge, **choices))
        for merge in ("sum", None)
    )
    alone = Stack(1).flat()
    minimum, curvature = (torch.stack(each).gather(0, owner[None])[0] for each in (problem.minima, problem.curvatures))
    for _ in range(choices.get("steps", STEPS)):
        alone = alone - LR * curvature * (alone - minimum)
    torch.testing.assert_close(summed, alone, rtol=1e-4, atol=1e-4)
    assert (averaged - alone).norm() > 100 * (summed - alone).norm()
