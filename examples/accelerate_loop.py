"""A loop of Hugging Face's Accelerate as a node: needs `pip install accelerate`.

    python examples/own_loop.py init out/own.safetensors          # the first weights, once
    farloop coordinator examples/own-run.toml
    python examples/accelerate_loop.py tcp://127.0.0.1:7700 a     # and another with the name b

With several GPUs: accelerate launch, or torchrun --nproc-per-node 8, in place of python.
"""

import logging
import sys
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from own_loop import CONTEXT, Mixer
from torch import nn
from torch.utils.data import DataLoader

from farloop.node import join
from farloop.node.errors import NodeError

BATCH = 16


def train(coordinator: str, name: str) -> None:
    """As Accelerate's own examples; first prepare, then join."""
    torch.manual_seed(sum(name.encode()))  # every node draws its own batches
    text = torch.frombuffer(bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()), dtype=torch.uint8)
    accelerator, module = Accelerator(gradient_accumulation_steps=2), Mixer()
    model, optimizer, batches = accelerator.prepare(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-3),  # the run sets the rate
        DataLoader(text.unfold(0, CONTEXT + 1, 1), batch_size=BATCH, shuffle=True),
    )
    with join(coordinator, accelerator.unwrap_model(model), optimizer, name=name, hook=True) as node:
        while node.running:
            for batch in batches:
                with accelerator.accumulate(model):
                    tokens = batch.long()
                    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    node.note(loss=loss)
                    optimizer.step()  # this exchanges, at every second batch
                    optimizer.zero_grad()
                logging.info("step %.0f, loss %.3f, rate %.2e", node.position, loss, optimizer.param_groups[0]["lr"])
                if not node.running:
                    break


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    match sys.argv[1:]:
        case [coordinator, name]:
            try:
                train(coordinator, name)
            except NodeError as error:
                logging.error(error)
                return error.exit_code
        case _:
            logging.error(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
