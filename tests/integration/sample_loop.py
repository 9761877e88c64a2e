"""A user's own loop that notes which granted samples each rank trains on: `sample_loop.py tcp://HOST:PORT`.

Two ranks have different samples. Of four, two and two have the same, as the ranks of a tensor-parallel group. Every
step is a line of `used.txt`: the start of the node, the rank, and the stream positions.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from own_node import WIDTH, Model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from farloop.cli.ranks import end_rank
from farloop.node import join


def main(coordinator: str) -> None:
    data = None
    if int(os.environ["WORLD_SIZE"]) == 4:
        dist.init_process_group("gloo")
        data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    start = os.environ["TORCHELASTIC_RUN_ID"] + os.environ["TORCHELASTIC_RESTART_COUNT"]
    with join(coordinator, Model(WIDTH), name="many", data=data) as node, Path("used.txt").open("a") as used:
        while node.running:
            used.write(f"{start} {node.cluster.rank} {','.join(map(str, node.samples))}\n")
            used.flush()
            x = torch.randn(len(node.samples), 16)
            loss = nn.functional.mse_loss(node.model(x), 2 * x)
            torch.autograd.backward(loss)
            time.sleep(0.05)
            node.step(loss=loss.item())
    end_rank(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
