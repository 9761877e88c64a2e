"""A sharded model of two ranks, one of which is killed in the middle of its work: `struck_loop.py POINT RANK tcp://…`.

POINT is `encode` (a part of a delta is encoded, and no other rank has heard of it) or `merge` (a part of the weights is
merged). The rank kills itself there at the third fragment; a file of the working folder keeps the next start from that.
Each inner step is a line of the file `steps`.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from own_node import WIDTH, Model
from torch import nn
from torch.distributed.fsdp import fully_shard

from farloop.algo.spec import RunSpec
from farloop.cli.ranks import end_rank
from farloop.node import join
from farloop.node.model.shards import Shards
from farloop.quant.formats.blocks import BlockCodec

HIT = 3


def strike_at(point: str) -> None:
    struck, hits = Path("struck"), 0

    def strike() -> None:
        nonlocal hits
        hits += 1
        if hits == HIT and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    encode_run, spread = BlockCodec.encode_run, Shards.spread

    def encoded(*args: Any, **named: Any) -> None:
        encode_run(*args, **named)
        strike()

    def merged(*args: Any, **named: Any) -> Iterator[Any]:
        pieces = spread(*args, **named)
        yield next(pieces)
        strike()
        yield from pieces

    if point == "encode":
        setattr(BlockCodec, "encode_run", encoded)  # noqa: B010
    else:
        setattr(Shards, "spread", merged)  # noqa: B010


def sharded(spec: RunSpec) -> nn.Module:
    return fully_shard(Model(WIDTH))


def main(point: str, rank: str, coordinator: str) -> None:
    if os.environ["RANK"] == rank:
        strike_at(point)
    with join(coordinator, sharded, name="many") as node, Path("steps").open("a") as steps:
        while node.running:
            x = torch.randn(8, 16)
            loss = nn.functional.mse_loss(node.model(x), 2 * x)
            torch.autograd.backward(loss)
            if node.cluster.leads:
                print(node.position, file=steps, flush=True)
            node.step(loss=loss.item(), tokens=8)
    end_rank(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
