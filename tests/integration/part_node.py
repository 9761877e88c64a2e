"""A node that has some stages of a model in its memory, and no other layer of it.

    python part_node.py init FILE
    python part_node.py train tcp://HOST:PORT NAME STAGE[,STAGE]
    torchrun --nproc-per-node 2 part_node.py train tcp://HOST:PORT NAME ranks      # of all stages, one on each rank

Every layer learns to double what comes in, by itself: here no layer needs another.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from farloop.node import join
from farloop.node.errors import NodeError

STAGES = {0: ("embed", "layers.0", "layers.1", "head"), 1: ("layers.2", "layers.3")}
STEP_S = 0.03


class Part(nn.Module):
    """These layers, under the names that they have in the whole model."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in names:
            where, _, number = name.partition(".")
            torch.manual_seed(sum(name.encode()))
            layer = nn.Linear(16, 16, bias=False)
            self.layers.add_module(number, layer) if number else self.add_module(where, layer)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        linear = [module for module in self.modules() if isinstance(module, nn.Linear)]
        return torch.stack([nn.functional.mse_loss(layer(x), 2 * x) for layer in linear]).mean()


class Optimizers(torch.optim.Optimizer):
    """One for each part, as torchtitan's OptimizersContainer."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step(closure)


def train_ranks(coordinator: str, name: str) -> None:
    """A pipeline's loop, whose trainer steps a container of optimizers over the parts of its rank."""
    names = STAGES[int(os.environ["RANK"])]
    parts = [Part(names[:1]), Part(names[1:])]
    optimizers = Optimizers(parts)
    with join(coordinator, parts, optimizers, name=name, state_dir=Path(name), hook=True, give_up_s=60.0) as node:
        torch.manual_seed(sum(name.encode()))
        while node.running:
            time.sleep(STEP_S)
            for part in parts:
                torch.autograd.backward(part.loss(torch.randn(8, 16)))
            node.note(tokens=8)
            optimizers.step()
            assert [o.param_groups[0]["lr"] for o in optimizers.optimizers] != [1e-3, 1e-3], "the run's"
            optimizers.zero_grad()


def train(coordinator: str, name: str, stages: tuple[int, ...]) -> None:
    model = Part(part for stage in stages for part in STAGES.get(stage, ()))
    with join(coordinator, model, name=name, state_dir=Path(name), holds=stages, give_up_s=60.0) as node:
        torch.manual_seed(sum(name.encode()))
        while node.running:
            time.sleep(STEP_S)
            module = node.module
            assert isinstance(module, Part) and not node.samples
            loss = module.loss(torch.randn(8, 16))
            torch.autograd.backward(loss)
            node.step(loss=loss.item(), tokens=8)


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("init").add_argument("file")
    trains = commands.add_parser("train")
    trains.add_argument("coordinator")
    trains.add_argument("name")
    trains.add_argument("stages", type=lambda text: () if text == "ranks" else tuple(map(int, text.split(","))))
    given = parser.parse_args()
    if given.command == "init":
        save_file(dict(Part(chain.from_iterable(STAGES.values())).state_dict()), given.file)
        return 0
    try:
        if given.stages:
            train(given.coordinator, given.name, given.stages)
        else:
            train_ranks(given.coordinator, given.name)
    except NodeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
