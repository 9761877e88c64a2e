"""Covers `node/model/moments.py` in one process; `tests/cluster/test_comeback.py` covers ranks."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import Previous, Process, ScheduleFree, schedulefree
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.testing._internal.two_tensor import TwoTensor

from farloop.node.model.inner_optimizer import Muon, Together


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.1)


def both(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return Together(
        Muon(matrices, lr=0.1, weight_decay=0.1), AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.1)
    )


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def holding(model: nn.Module) -> Optimizer:
    """As ZeroRedundancyOptimizer and Lookahead hold another one, and have no state themselves."""

    class Holding(Optimizer):
        def __init__(self) -> None:
            self.optim = AdamW(model.parameters(), lr=0.1)
            super().__init__(self.optim.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.optim.step()

    return Holding()


def counting(model: nn.Module) -> Optimizer:
    """Its groups count, each for itself, and step by that."""

    class Counting(SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["k"], group["most"] = group["k"] + 1, max(group["most"], group["k"] * group["momentum"])
                group["momentum"] = 0.5 + group["most"] / 10.0
            super().step()

    groups = [{"params": [parameter], "momentum": 0.1 * i} for i, parameter in enumerate(model.parameters())]
    counted = Counting(groups, lr=0.1, momentum=0.5)
    for group in counted.param_groups:
        group |= {"k": 0, "most": torch.tensor(-1.0)}
    return counted


@pytest.mark.parametrize("make", [adamw, both, momentum, holding, counting])
def test_a_step_after_a_restart_is_the_step_without_it(tmp_path: Path, make: Callable[[nn.Module], Optimizer]) -> None:
    first = Process(tmp_path, make)
    first.step()
    first.step()
    (tmp_path / "0-7.anchor").write_bytes(bytes(4096))
    assert first.save()
    second = Process(tmp_path, make)
    second.model.load_state_dict(first.model.state_dict())
    second.files.find()
    assert second.moments.load(0)
    first.step()
    second.step()
    for name, weights in first.model.state_dict().items():
        assert torch.equal(weights, second.model.state_dict()[name]), name


def test_a_file_with_muon_is_no_longer_than_with_adamw_alone(tmp_path: Path) -> None:
    """No parameter has Muon's momentum and AdamW's moments, so they share rows: two, as `config check` predicts."""
    sizes = []
    for make in (adamw, both):
        (folder := tmp_path / make.__name__).mkdir()
        process = Process(folder, make)
        process.step()
        (folder / "0-7.anchor").write_bytes(bytes(4096))
        assert process.save()
        sizes.append((folder / "0-7.optimizer").stat().st_size)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", [ScheduleFree, schedulefree, Previous])
def test_copies_of_the_weights_come_back_beside_the_anchor(tmp_path: Path, kind: Callable[..., Optimizer]) -> None:
    """A node goes on from an anchor that lies 2 from where its weights were: its steps are the same, 2 further on."""
    first, second = (Process(tmp_path, lambda model: kind(model.parameters(), lr=0.1)) for _ in range(2))
    for _ in range(3):
        first.step()
    (tmp_path / "0-7.anchor").write_bytes(bytes(4096))
    assert first.save()
    first.merges.show()
    second.files.find()
    assert second.moments.load(0)
    with torch.no_grad(), second.merges.merge(0):
        for weights, anchor in zip(second.model.parameters(), first.model.parameters(), strict=True):
            weights.copy_(anchor + 2.0)
    for process in (first, second):
        process.merges.resume()
        for _ in range(2):
            for parameter in process.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            process.optimizer.step()
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(one + 2.0, other, rtol=0, atol=1e-5)


def test_a_damaged_file_leaves_the_state_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Process(tmp_path, adamw)
    first.step()
    (tmp_path / "0-7.anchor").write_bytes(bytes(4096))
    first.save()
    path = tmp_path / "0-7.optimizer"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    second = Process(tmp_path, adamw)
    second.files.find()
    assert not second.moments.load(0) and "optimizer on disk is damaged fragment=0" in caplog.text
    assert not any(second.optimizer.state.values())


class EightBit(TwoTensor):
    """As torchao's state of 8 bits: a tensor of the parameter's shape and type that is made of others."""


def eight_bit(model: nn.Module) -> Optimizer:
    class AdamW8bit(SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in model.parameters():
                self.state[parameter] = {"exp_avg": EightBit(parameter.detach().clone(), parameter.detach().clone())}

    return AdamW8bit(model.parameters(), lr=0.1)


def slow(model: nn.Module) -> Optimizer:
    class Lookahead(Optimizer):
        def __init__(self) -> None:
            self.optimizer = AdamW(model.parameters(), lr=0.1)
            super().__init__(self.optimizer.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()
            for parameter in model.parameters():
                self.state[parameter]["slow_buffer"] = parameter.detach().clone()

    return Lookahead()


def sharing(model: nn.Module) -> Optimizer:
    class ZeroRedundancyOptimizer(Optimizer):
        def __init__(self) -> None:
            self.optim = AdamW([*model.parameters()][:2], lr=0.1)
            super().__init__(model.parameters(), {})

        def step(self, closure: Any = None) -> None:
            self.optim.step()

    return ZeroRedundancyOptimizer()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda model: Adafactor(model.parameters()),
            "'0.weight: row_var' is no plain tensor of the parameter's shape and type",
        ),
        (eight_bit, "'0.weight: exp_avg' is no plain tensor of the parameter's shape and type"),
        (slow, "Lookahead keeps a part of it, beside the optimizer that it holds"),
        (sharing, "ZeroRedundancyOptimizer keeps it on several ranks"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[nn.Module], Optimizer], why: str
) -> None:
    process = Process(tmp_path, make)
    process.step()
    with caplog.at_level(logging.WARNING):
        assert not process.save() and not process.save()
    assert [record.getMessage() for record in caplog.records] == [f"the optimizer's state is not saved: {why}"]


def test_an_optimizer_without_a_state_writes_nothing(tmp_path: Path) -> None:
    process = Process(tmp_path, lambda model: SGD(model.parameters(), lr=0.1))
    process.step()
    assert not process.save()
