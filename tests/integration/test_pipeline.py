"""Pipelines over real sockets: what they compute is what one process computes, and what dies is gone round."""

from pathlib import Path

import pytest
import torch
from pipeline_layouts import layout_of
from pipeline_nodes import SMALL, Nodes, Steps, microbatches, model

from farloop.node.model.built_in import GPT
from farloop.node.settings import PipelineConfig
from farloop.node.zmq_dealer import new_key_pair
from farloop.pipeline.executor import Executor
from farloop.pipeline.stage import StagePart

pytestmark = pytest.mark.integration

STEPS = 4


def alone(steps: int, count: int, seeds: tuple[int, ...]) -> tuple[GPT, list[float]]:
    """One process on all microbatches of all sources: the mean gradient over them, plain SGD."""
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        batches = [batch for seed in seeds for batch in microbatches(count, 100 * seed + step)]
        total = torch.stack([whole.loss(batch) for batch in batches]).mean()
        optimizer.zero_grad()
        torch.autograd.backward(total)
        optimizer.step()
        losses.append(total.item())
    return whole, losses


def trained(nodes: Nodes, steps: int, count: int, seeds: dict[str, int]) -> Steps:
    """All nodes take so many steps; what each came to."""
    took: Steps = {name: [] for name in nodes.names}

    def work(name: str, executor: Executor, part: StagePart) -> None:
        optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
        for step in range(steps):
            optimizer.zero_grad()
            batches = microbatches(count, 100 * seeds[name] + step) if name in seeds else []
            result = executor.step(batches)
            assert result is not None
            took[name].append(result)
            optimizer.step()

    nodes.train(work)
    return took


def test_a_pipeline_without_skips_is_the_whole_model() -> None:
    """x = 0: losses and weights as in one process, to float tolerance."""
    layout = layout_of(["a", "b", "c", "d"], ["abcd"])
    nodes = Nodes(layout)
    took = trained(nodes, STEPS, 4, {"a": 1})
    whole, losses = alone(STEPS, 4, (1,))
    assert [step.trained.loss for step in took["a"]] == pytest.approx(losses, rel=1e-5)
    ours = {name: p for part in nodes.parts.values() for name, p in part.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-4, atol=1e-6)
    assert ours.keys() == dict(whole.named_parameters()).keys()
    assert SMALL.layers == len(layout.stages)


@pytest.mark.slow
def test_sources_that_share_a_stage_train_it_on_both() -> None:
    """Two sources, one second stage: it takes one step for the mean of both."""
    nodes = Nodes(layout_of(["ab", "c"], ["ac", "bc"], layers=4))
    trained(nodes, 1, 2, {"a": 1, "b": 2})
    whole, _ = alone(1, 2, (1, 2))
    shared = dict(nodes.parts["c"].named_parameters())
    for name, parameter in whole.named_parameters():
        if name in shared:
            torch.testing.assert_close(shared[name], parameter, rtol=1e-4, atol=1e-6)


def test_a_skipped_stage_is_the_identity() -> None:
    """A path of three of four stages is the model without the layers of the fourth."""
    nodes = Nodes(layout_of(["a", "b", "c", "d"], ["abd"]))
    took: Steps = {name: [] for name in nodes.names}

    def work(name: str, executor: Executor, part: StagePart) -> None:
        while (result := executor.step(microbatches(2, 7) if name == "a" else [])) is not None:
            took[name].append(result)
            if name == "a":
                return

    nodes.train(work)
    whole = model()
    del whole.blocks[2]
    losses = torch.stack([whole.loss(batch) for batch in microbatches(2, 7)])
    torch.autograd.backward(losses.mean())
    assert took["a"][0].trained.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    assert took["c"] == [] and all(p.grad is None for p in nodes.parts["c"].parameters())
    grad = dict(nodes.parts["d"].named_parameters())["blocks.3.mlp.down.weight"].grad
    torch.testing.assert_close(grad, whole.blocks[2].mlp.down.weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_with_a_quarter_of_the_stages_left_out_a_model_still_learns() -> None:
    """x = 25 %: two sources with disjoint paths through three of four stages each."""
    nodes = Nodes(layout_of(["ab", "cd", "ef", "gh"], ["ace", "bdh"]))
    took = trained_by_those_that_are_visited(nodes, steps=30)
    for source in "ab":
        losses = [step.trained.loss for step in took[source]]
        assert sum(losses[-5:]) / 5 < losses[0] - 0.3, losses


def test_activations_in_eight_bits_train_as_well(tmp_path: Path) -> None:
    """... over sockets that are encrypted, to known keys alone."""
    for name in "abc":
        public, secret = new_key_pair()
        (tmp_path / f"{name}.pub").write_bytes(public)
        (tmp_path / f"{name}.key").write_bytes(secret)
        (tmp_path / f"{name}.key").chmod(0o600)
    nodes = Nodes(layout_of(["a", "b", "c"], ["abc"]), config=PipelineConfig(codec="q8"), keys=tmp_path)
    took = trained(nodes, STEPS, 2, {"a": 1})
    exact = trained(Nodes(layout_of(["a", "b", "c"], ["abc"])), STEPS, 2, {"a": 1})
    for ours, theirs in zip(took["a"], exact["a"], strict=True):
        assert ours.trained.loss == pytest.approx(theirs.trained.loss, abs=0.02)
    sent, raw = sum(nodes.executors["a"].bytes_by_hop.values()), 4 * 2 * 16 * SMALL.dim * STEPS * 2 * 2
    assert sent < 0.3 * raw


def trained_by_those_that_are_visited(nodes: Nodes, steps: int) -> Steps:
    """AdamW at every node; one that is not visited waits until all have left."""
    took: Steps = {name: [] for name in nodes.names}

    def work(name: str, executor: Executor, part: StagePart) -> None:
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
        for step in range(steps):
            result = executor.step(microbatches(2, 100 * ord(name) + step) if name in "ab" else [])
            if result is None:
                return
            took[name].append(result)
            optimizer.step()
            optimizer.zero_grad()

    nodes.train(work)
    return took


def test_a_new_layout_is_followed_while_training_goes_on() -> None:
    """In two phases, at a step's end: nothing is lost on the way, and from then on the other stage has the work."""
    nodes = Nodes(layout_of(["ab", "cd"], ["ac", "bd"], layers=4))
    crossed = layout_of(["ab", "cd"], ["ad", "bc"], layers=4, epoch=2)
    took: Steps = {name: [] for name in nodes.names}

    def work(name: str, executor: Executor, part: StagePart) -> None:
        for step in range(40):
            if name == "a" and step == 2:
                executor.offer(crossed, nodes.addresses)
            result = executor.step(microbatches(2, step) if name in "ab" else [])
            if result is None:
                return
            took[name].append(result)
            part.zero_grad()

    nodes.train(work)
    assert {executor.machine.epoch for executor in nodes.executors.values()} == {2}
    for source in "ab":
        assert [step.summary.completed for step in took[source]] == [2] * 40
    assert nodes.executors["a"].bytes_by_hop.keys() >= {"c", "d"}
