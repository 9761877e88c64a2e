"""Ray Train's workers as a node: needs `pip install "ray[train]"`.

    python examples/own_loop.py init out/own.safetensors            # the first weights, once
    farloop coordinator examples/own-run.toml
    python examples/ray_train.py tcp://127.0.0.1:7700 a 2           # two workers; and another with the name b

Tried by hand with ray 2.60.0 on CPUs; it is no part of farloop's own environment.
"""

import logging
import sys
import sysconfig
from pathlib import Path

import torch
from own_loop import BATCH, CONTEXT, Mixer
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from farloop.node import join


def train(settings: dict[str, str]) -> None:
    """In every worker: Ray has made the process group, farloop averages gradients over it."""
    text = torch.frombuffer(bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()), dtype=torch.uint8)
    with join(settings["coordinator"], Mixer(), name=settings["name"], state_dir=settings["state_dir"]) as node:
        torch.manual_seed(sum(settings["name"].encode()) + node.cluster.rank)  # every worker draws its own batches
        while node.running:
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
            batch = torch.stack([text[i : i + CONTEXT + 1] for i in starts]).long().to(node.cluster.device)
            loss = nn.functional.cross_entropy(node.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            torch.autograd.backward(loss)
            node.step(loss=loss.item(), tokens=BATCH * CONTEXT * node.cluster.size)


def main() -> int:
    match sys.argv[1:]:
        case [coordinator, name, workers]:
            folder = str(Path(".farloop", name).resolve())
            TorchTrainer(
                train,
                train_loop_config={"coordinator": coordinator, "name": name, "state_dir": folder},
                scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=torch.cuda.is_available()),
                run_config=RunConfig(name=name, failure_config=FailureConfig(max_failures=-1)),  # rejoins after a loss
            ).fit()
        case _:
            logging.error(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
