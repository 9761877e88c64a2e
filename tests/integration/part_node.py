"""A node that has some stages of a model in its memory, and no other layer of it.

    python part_node.py init FILE
    python part_node.py train tcp://HOST:PORT NAME STAGE[,STAGE]

Every layer learns to double what comes in, by itself: here no layer needs another.
"""

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from farloop.node import join
from farloop.node.errors import NodeError

STAGES = {0: ("embed", "layers.0", "layers.1", "head"), 1: ("layers.2", "layers.3")}
STEP_S = 0.03


class Part(nn.Module):
    """The layers of these stages, under the names that they have in the whole model."""

    def __init__(self, stages: Collection[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in (name for stage in sorted(stages) if stage in STAGES for name in STAGES[stage]):
            where, _, number = name.partition(".")
            torch.manual_seed(sum(name.encode()))
            layer = nn.Linear(16, 16, bias=False)
            self.layers.add_module(number, layer) if number else self.add_module(where, layer)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        linear = [module for module in self.modules() if isinstance(module, nn.Linear)]
        return torch.stack([nn.functional.mse_loss(layer(x), 2 * x) for layer in linear]).mean()


def train(coordinator: str, name: str, stages: tuple[int, ...]) -> None:
    with join(coordinator, Part(stages), name=name, state_dir=Path(name), holds=stages, timeout_s=60.0) as node:
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
    trains.add_argument("stages", type=lambda text: tuple(map(int, text.split(","))))
    given = parser.parse_args()
    if given.command == "init":
        save_file(dict(Part(STAGES).state_dict()), given.file)
        return 0
    try:
        train(given.coordinator, given.name, given.stages)
    except NodeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
