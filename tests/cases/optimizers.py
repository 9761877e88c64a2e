"""Optimizers that keep copies of the weights, a model whose weights are merged, and one whose optimizer is saved."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from node_story import at_once
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from farloop.algo.fragments import partition, trainable_tensors
from farloop.node.model.anchor_files import AnchorFiles, Head
from farloop.node.model.merges import Merges
from farloop.node.model.moments import Moments
from farloop.node.model.shards import Weights

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

HEAD = Head(run="run", history=0, fragment=0, version=7, digest=0, size=0)


class Masters(SGD):
    """Steps copies of its own, in no place that anyone looks at, and writes them into the weights."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, **options)
        self._elsewhere = SimpleNamespace(masters={})

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        masters: dict[nn.Parameter, Tensor] = self._elsewhere.masters
        return masters

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.masters.setdefault(parameter, parameter.detach().float().clone())
                master.sub_(parameter.grad.float(), alpha=group["lr"])
                parameter.copy_(master)


class Inside(Masters):
    """As masters, but in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.masters[parameter] = self.state[parameter].setdefault("master", parameter.detach().float().clone())
        super().step()


class Listed(Masters):
    """As masters, flat, in a list of lists that it begins with, in the order of its groups."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        groups = [{"params": [parameter]} for parameter in reversed([*parameters])]
        super().__init__(groups, **options)
        self.lists = [[p.detach().float().flatten().clone() for p in group["params"]] for group in groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, (flat,) in zip(self.param_groups, self.lists, strict=True):
            self.masters[group["params"][0]] = flat.view_as(group["params"][0])
        super().step()


class Slow(SGD):
    """As Lookahead: every `k` steps it goes half the way back to where it was, which it has made a copy of; and with
    each step a part of that way. `where` it has it: in the state, an attribute, or elsewhere."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, k: int, drawn: float = 0.0, where: str = "", **options: Any
    ) -> None:
        super().__init__(parameters, **options)
        self.kept = defaultdict[nn.Parameter, dict[str, Tensor]](dict)
        self.k, self.drawn, self.where, self.count = k, drawn, where, 0
        self._elsewhere = SimpleNamespace(kept=defaultdict(dict))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        kept = {"": self.kept, "state": self.state, "elsewhere": self._elsewhere.kept}[self.where]
        weights = self.param_groups[0]["params"]
        for weight in weights if not self.count else ():
            kept[weight]["slow_buffer"] = weight.detach().clone()
        super().step()
        self.count += 1
        for weight in weights:
            weight.lerp_(kept[weight]["slow_buffer"], self.drawn)
            if self.count % self.k == 0:
                kept[weight]["slow_buffer"] = weight.lerp_(kept[weight]["slow_buffer"], 0.5).clone()


class Previous(SGD):
    """Its momentum is measured from the weights of the step before, which it has made a copy of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            before = self.state[parameter].setdefault("before", parameter.detach().clone())
            now = parameter.detach().clone()
            parameter.add_(now - before, alpha=0.5).sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
            before.copy_(now)


class Pulled(SGD):
    """As AccSGD: the weights are drawn to a copy that goes by longer steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            far = self.state[parameter].setdefault("momentum_buffer", parameter.detach().clone())
            far.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] * 2)
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"]).lerp_(far, 0.25)


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


class Node:
    """A model that is trained and merged without a run: the gradient's and the merge's numbers are the test's."""

    def __init__(self, make: Make, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6)).to(dtype).to(device)
        shapes = [(name, tuple(p.shape)) for name, p in trainable_tensors(self.model)]
        self.optimizer = make(list(self.model.parameters()))
        parameters = dict(trainable_tensors(self.model))
        self.layout = partition(shapes, pattern="whole")
        self.merges = Merges(self.optimizer, parameters, self.layout, **options)

    def step(self, gradient: Callable[[Tensor], Tensor]) -> None:
        for parameter in self.model.parameters():
            parameter.grad = gradient(parameter.detach())
        self.merges.before_step()
        self.optimizer.step()
        self.merges.after_step()

    @torch.no_grad()
    def merge(self, change: Callable[[Tensor], Tensor]) -> None:
        with self.merges.merge(0):
            for parameter in self.model.parameters():
                parameter.add_(change(parameter))
        self.merges.resume()


def noise(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda like: torch.randn_like(like) * scale


def alike(move: float) -> Callable[[Tensor], Tensor]:
    return lambda like: torch.full_like(like, move)


class Process:
    """One start of a node: a model, its optimizer, and its folder."""

    def __init__(self, folder: Path, make: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 1024), nn.Linear(1024, 3))
        shapes = [(name, tuple(p.shape)) for name, p in trainable_tensors(self.model)]
        layout = partition(shapes, pattern="whole")
        weights = Weights(layout, dict(trainable_tensors(self.model)))
        self.optimizer, self.files = make(self.model), AnchorFiles(folder, at_once)
        self.merges = Merges(self.optimizer, weights.parameters, layout)
        self.moments = Moments(self.optimizer, weights, layout, self.files, self.merges)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * 2.0
        self.merges.before_step()
        self.optimizer.step()
        self.merges.after_step()

    def save(self) -> bool:
        head = self.moments.save(HEAD)
        self.merges.resume()
        if head is not None and self.files.finish_save():
            self.files.finish(HEAD)  # what is found is that of a run with anchors
            self.files.finish(head)
        return head is not None
