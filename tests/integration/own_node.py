"""A user's own model and loop, which can be made to misbehave.

    python own_node.py init FILE
    python own_node.py train tcp://HOST:PORT NAME [--width W] [--poison STEP] [--batch B] [--pace-s S] [--hook]

`--width` builds another model than the run's. `--poison` writes a NaN into a weight before that inner step. `--batch`
is the number of samples, and of tokens, of an inner step. `--pace-s` is the least time that a step takes. `--hook`
steps the optimizer itself, as a trainer does. `--base SEED` adds a frozen layer with random weights. `--normed SHIFT`,
of init too, normalises batches, moves samples by SHIFT, and keeps the module as NAME-sent.safetensors as it was before
its last exchange, and as NAME-end.safetensors, with its loss, at the end.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from farloop.node import join
from farloop.node.errors import NodeError

WIDTH = 64


class Model(nn.Module):
    """Learns to double its input."""

    def __init__(self, width: int, base: int | None = None, *, normed: bool = False) -> None:
        super().__init__()
        if base is not None:
            self.base = nn.Linear(16, 16).requires_grad_(False)
            nn.init.normal_(self.base.weight, generator=torch.Generator().manual_seed(base))
        self.inward = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width) if normed else nn.Identity()
        self.outward = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outward(torch.tanh(self.norm(self.inward(x))))
        return y


def train_by_hook(coordinator: str, name: str) -> None:
    model = Model(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with join(coordinator, model, optimizer, name=name, state_dir=Path(name), hook=True) as node:
        while node.running:
            x = torch.randn(8, 16)
            loss = nn.functional.mse_loss(model(x), 2 * x)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            node.note(loss=loss, tokens=8)
            optimizer.step()
            optimizer.zero_grad()
    torch.autograd.backward(model(torch.ones(1, 16)).sum())
    optimizer.step()  # after the run it is the trainer's own step again


def floats(module: nn.Module) -> dict[str, torch.Tensor]:
    """All but counters, a copy."""
    return {name: t.clone() for name, t in module.state_dict().items() if t.is_floating_point()}


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) + 1.5
    return float(nn.functional.mse_loss(model.eval()(x), 2 * x))


def train(
    coordinator: str,
    name: str,
    width: int,
    poison: int | None,
    batch: int,
    pace_s: float,
    base: int | None,
    normed: float | None,
) -> None:
    module = Model(width, base, normed=normed is not None)
    with join(coordinator, module, name=name, state_dir=Path(name)) as node:
        steps, leads = 0, node.executor is not None
        while node.running:
            due = time.monotonic() + pace_s
            x = torch.randn(batch, 16) + (normed or 0.0)
            loss = nn.functional.mse_loss(node.model(x), 2 * x)
            torch.autograd.backward(loss)
            if steps == poison:
                with torch.no_grad():
                    node.module.get_parameter("outward.bias")[3] = torch.nan
            time.sleep(max(0.0, due - time.monotonic()))
            sent = floats(module)
            node.step(loss=loss.item(), tokens=batch)
            steps += 1
    if normed is not None and leads:
        save_file(sent, f"{name}-sent.safetensors")
        save_file({**floats(module), "loss": torch.tensor(loss_of(module))}, f"{name}-end.safetensors")


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    makes = commands.add_parser("init")
    makes.add_argument("file")
    trains = commands.add_parser("train")
    trains.add_argument("coordinator")
    trains.add_argument("name")
    trains.add_argument("--width", type=int, default=WIDTH)
    trains.add_argument("--poison", type=int)
    trains.add_argument("--batch", type=int, default=8)
    trains.add_argument("--pace-s", type=float, default=0.0)
    trains.add_argument("--base", type=int)
    trains.add_argument("--hook", action="store_true")
    for command in (makes, trains):
        command.add_argument("--normed", type=float)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.command == "init":
        save_file(floats(Model(WIDTH, normed=given.normed is not None)), given.file)
        return 0
    try:
        if given.hook:
            train_by_hook(given.coordinator, given.name)
            return 0
        where = given.coordinator, given.name
        train(*where, given.width, given.poison, given.batch, given.pace_s, given.base, given.normed)
    except NodeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
