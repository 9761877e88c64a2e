"""A node of few parameters, that can say what it is told."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from farloop.node import join
from farloop.node.model.replica import Replica

Told = Callable[[int, int, str], None]
"""Fragment, version and digest of an anchor that the node holds."""


def model() -> nn.Sequential:
    """The same weights every time; two layers are two fragments."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))


def train(
    address: str, name: str, folder: Path, told: Told, over: threading.Event, pace: Callable[[], float] = float
) -> None:
    """To the run's end, or until it is over. Raises what `join` and `step` raise.

    `pace` is asked for the seconds before each step.
    """
    with join(address, model(), name=name, state_dir=folder, give_up_s=90.0) as node:
        assert node.executor is not None and node.executor.replica is not None
        replica = node.executor.replica
        draw = torch.Generator().manual_seed(sum(name.encode()))
        while node.running and not over.is_set():
            time.sleep(pace())
            x = torch.randn(4, 16, generator=draw)
            torch.autograd.backward(nn.functional.mse_loss(node.model(x), 2 * x))
            node.step(tokens=4)
            _tell(replica, told)
    _tell(replica, told)  # also what came while it left


def _tell(replica: Replica, told: Told) -> None:
    for fragment, (version, digest) in enumerate(zip(replica.versions.values(), replica.digests.values(), strict=True)):
        if version >= 0:
            told(fragment, version, f"{digest:016x}")
