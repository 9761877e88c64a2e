"""Covers `node/moments.py` in one process; `tests/cluster/test_comeback.py` covers ranks."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from node_story import at_once
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from farloop.algo.fragments import partition, trainable_tensors
from farloop.node.anchor_files import AnchorFiles, Head
from farloop.node.inner_optimizer import Together
from farloop.node.moments import Moments
from farloop.node.shards import Weights

HEAD = Head(run="run", history=0, fragment=0, version=7, digest=0, size=0)


class Process:
    """One start of a node: a model, its optimizer, and its folder."""

    def __init__(self, folder: Path, make: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 70), nn.Linear(70, 3))
        shapes = [(name, tuple(p.shape)) for name, p in trainable_tensors(self.model)]
        layout = partition(shapes, pattern="whole")
        weights = Weights(layout, dict(trainable_tensors(self.model)))
        self.optimizer, self.files = make(self.model), AnchorFiles(folder, at_once)
        self.moments = Moments(self.optimizer, weights, layout, self.files)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * 2.0
        self.optimizer.step()

    def save(self) -> bool:
        head = self.moments.save(HEAD)
        if head is not None and self.files.ended():
            self.files.finish(HEAD)  # what is found is that of a run with anchors
            self.files.finish(head)
        return head is not None


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.1)


def both(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return Together(Muon(matrices, lr=0.1), AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.1))


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", [adamw, both, momentum])
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


def test_a_state_of_other_shapes_is_not_saved_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = Process(tmp_path, lambda model: Adafactor(model.parameters()))
    process.step()
    with caplog.at_level(logging.WARNING):
        assert not process.save() and not process.save()
    assert [record.getMessage() for record in caplog.records] == [
        "the optimizer's state is not saved: '0.weight: row_var' is no tensor of the parameter's shape and type"
    ]


def test_an_optimizer_without_a_state_writes_nothing(tmp_path: Path) -> None:
    process = Process(tmp_path, lambda model: SGD(model.parameters(), lr=0.1))
    process.step()
    assert not process.save()
