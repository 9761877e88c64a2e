"""Lightning's Trainer as a node: needs `pip install lightning`.

    python examples/own_loop.py init out/own.safetensors                # the first weights, once
    farloop coordinator examples/own-run.toml
    python examples/lightning_trainer.py tcp://127.0.0.1:7700 a         # and another with the name b
    python examples/lightning_trainer.py tcp://127.0.0.1:7700 b 2       # with two devices

Tried by hand with lightning 2.6.6; it is no part of farloop's own environment.
"""

import logging
import sys
import sysconfig
from pathlib import Path
from typing import Any

import lightning
import torch
from own_loop import CONTEXT, Mixer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from farloop.node import Node, join
from farloop.node.errors import NodeError

BATCH = 32


class FarloopCallback(lightning.Callback):
    """Joins when training begins, and stops the trainer when the run ends. `options` are those of `join`."""

    def __init__(self, coordinator: str | None = None, **options: Any) -> None:
        self.coordinator, self.options = coordinator, options
        self.node: Node | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The run's names are those of the module's `model`: nodes of the run need not use Lightning."""
        self.node = join(self.coordinator, pl_module.model, trainer.optimizers[0], hook=True, **self.options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.node is not None:
            self.node.note(loss=outputs["loss"])
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            logging.info("step %.0f, loss %.3f, rate %.2e", self.node.position, outputs["loss"], rate)
            trainer.should_stop |= not self.node.running

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.node is not None:
            self.node.leave()


class Module(lightning.LightningModule):
    """As any other: farloop is the callback alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Mixer()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = batch.long()
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)  # the run sets the rate


def train(coordinator: str, name: str, devices: int) -> None:
    lightning.seed_everything(sum(name.encode()))  # every node draws its own batches
    text = torch.frombuffer(bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()), dtype=torch.uint8)
    trainer = lightning.Trainer(
        devices=devices,
        max_epochs=-1,  # the run says when it ends
        gradient_clip_val=1.0,
        callbacks=[FarloopCallback(coordinator, name=name)],
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Module(), DataLoader(text.unfold(0, CONTEXT + 1, 1), batch_size=BATCH // devices, shuffle=True))


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    match sys.argv[1:]:
        case [coordinator, name, *devices]:
            try:
                train(coordinator, name, int(*devices) or 1)
            except NodeError as error:
                logging.error(error)
                return error.exit_code
        case _:
            logging.error(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
