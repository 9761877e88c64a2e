"""A user's own loop over several ranks, one of which hangs once: `hanging_loop.py HOW tcp://HOST:PORT`.

HOW is `sleeps` (rank 1 never comes to its step), `stops` (SIGSTOP of rank 0 by itself), `fails` (rank 1 cannot build
its model, and its process stays), `fails-in-own-group` (the same, and the process group stays), `differs` (its
model is of another type), `leaves` (rank 1 leaves after 20 steps) or `goes` (it only trains). A file HOW in the
working folder keeps the ranks of the next start from hanging again.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from own_node import WIDTH, Model
from torch import nn

from farloop.algo.spec import RunSpec
from farloop.cli.ranks import end_rank
from farloop.node import join


def main(how: str, coordinator: str) -> None:
    before, pace_s = Path(how), 0.05
    if how == "fails-in-own-group":
        dist.init_process_group("gloo")

    def model(spec: RunSpec) -> nn.Module:
        if how.startswith("fails") and os.environ["RANK"] == "1":
            raise FileNotFoundError("no base.safetensors here")
        return Model(WIDTH).bfloat16() if how == "differs" and os.environ["RANK"] == "1" else Model(WIDTH)

    try:
        node = join(coordinator, model, name="many", hang_timeout_s=3.0)
    except FileNotFoundError:
        time.sleep(3600)
        raise
    with node:
        rank, steps = node.cluster.rank, 0
        while node.running and not (how == "leaves" and rank == 1 and steps == 20):
            x = torch.randn(8, 16)
            loss = nn.functional.mse_loss(node.model(x), 2 * x)
            if steps == 20 and rank == {"sleeps": 1, "stops": 0}.get(how) and not before.exists():
                before.touch()
                if how == "stops":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(3600)
            torch.autograd.backward(loss)
            time.sleep(pace_s)
            node.step(loss=loss.item(), tokens=8)
            steps += 1
    end_rank(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
