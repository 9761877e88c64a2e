"""Optimizers that train other weights than the average that they are for."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """SGDScheduleFree of schedulefree 1.4: in train mode the weights are 0.9 x + 0.1 z, else x, the mean of all z."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "train_mode": False, "k": 0})
        self.train()

    def _mode(self, train: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self._mode(True, 1 - 0.9)

    def eval(self) -> None:
        self._mode(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "Optimizer was not in train mode when step is called"
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                x = parameter.lerp(z, 1 - 1 / 0.9)
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.copy_(z.lerp(x.lerp_(z, 1 / group["k"]), 0.9))


def schedulefree(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """The package's."""
    optimizer: Any = pytest.importorskip("schedulefree").SGDScheduleFree(parameters, lr=lr)
    optimizer.train()
    return optimizer
