"""Pipelines over real sockets: what they compute is what one process computes, and what dies is gone round."""

import pytest
import torch
from pipeline_layouts import layout_of
from pipeline_nodes import SMALL, Nodes, Steps, microbatches, model

from farloop.node.model import GPT
from farloop.node.pipeline.executor import Executor
from farloop.node.pipeline.stage import StagePart

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
