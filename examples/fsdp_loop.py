"""A model that is sharded over several GPUs (FSDP2): a node of one host or more, started by torchrun.

    python examples/fsdp_loop.py init out/own.safetensors         # the first weights, once
    farloop coordinator examples/own-run.toml
    torchrun --standalone --nproc-per-node 2 examples/fsdp_loop.py train tcp://127.0.0.1:7700 a
    python examples/fsdp_loop.py train tcp://127.0.0.1:7700 b     # another node may have any number of ranks

Between hosts: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 on each of them.
"""

import logging
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from own_loop import Mixer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from farloop.algo.spec import RunSpec
from farloop.node import join
from farloop.node.errors import NodeError

BATCH, CONTEXT = 32, 64


def sharded(spec: RunSpec) -> nn.Module:
    """The model, cut over the ranks by the loop's own means; farloop takes it as it is."""
    model = Mixer().to("cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_initialized():
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def train(coordinator: str, name: str) -> None:
    """The loop; every rank runs it."""
    text = torch.frombuffer(bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()), dtype=torch.uint8)

    def loss_of(model: nn.Module, starts: list[int], device: torch.device) -> torch.Tensor:
        batch = torch.stack([text[i : i + CONTEXT + 1] for i in starts]).long().to(device)
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        device = next(model.parameters()).device
        return loss_of(model, list(range(0, len(text) - CONTEXT - 1, 4096)), device).item()

    with join(coordinator, sharded, name=name, evaluate=evaluate) as node:
        ranks = node.cluster.size
        torch.manual_seed(sum(name.encode()) + node.cluster.rank)  # every rank draws its own batches
        while node.running:
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH // ranks,)).tolist()
            loss = loss_of(node.model, starts, node.cluster.device)
            loss.backward()
            node.step(loss=loss.item(), tokens=BATCH // ranks * ranks * CONTEXT)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    match sys.argv[1:]:
        case ["init", path]:
            torch.manual_seed(0)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.detach() for name, tensor in Mixer().named_parameters()}, path)
        case ["train", coordinator, name]:
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
