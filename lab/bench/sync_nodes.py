"""A node of one of the systems that `bench/sync.py` compares, as a process of its own.

Every round is one synchronisation of the same model. Each node notes when each of its rounds began and ended.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from farloop.lab.bench.sync_trace import Marks
from farloop.monitoring.status import dumps

TENSORS = 25
_PATIENCE_S = 120.0  # of a peer, for one round

Times = list[tuple[float, float]]
"""When each round began and ended, by the monotonic clock."""


def weights(parameters: int) -> list[Tensor]:
    """The first weights, fp32, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    sizes = [parameters * (k + 1) // TENSORS - parameters * k // TENSORS for k in range(TENSORS)]
    return [torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") * 0.02 for size in sizes]


class Optimized:
    """A model whose gradients are fixed, so that a step of its optimizer costs next to nothing. It notes when a round
    begins: after the step of the optimizer, and before anything of the system's."""

    def __init__(self, tensors: Sequence[Tensor], seed: int) -> None:
        self.module = nn.Module()
        self.module.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
        self.parameters = list(self.module.parameters())
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [
            torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            for parameter in self.parameters
        ]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4)
        self.optimizer.register_step_post_hook(self._stepped)
        self.marks, self.times, self.begun = Marks(), Times(), 0.0

    def _stepped(self, *_: object) -> None:
        self.marks.mark("stepped", len(self.times) + 1)
        self.begun = time.monotonic()

    def set_gradients(self) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def end_round(self) -> None:
        self.times.append((self.begun, time.monotonic()))
        self.marks.mark("merged", len(self.times))

    @property
    def end(self) -> str:
        return _end_of([parameter.detach() for parameter in self.parameters])


def _end_of(tensors: Sequence[Tensor]) -> str:
    from farloop.quant.digest import combine, digest

    return f"{combine(digest(part, place << 32) for place, part in enumerate(tensors)):016x}"


def as_farloop(address: str, name: str, *trace: str) -> tuple[Times, str]:
    from farloop.node import join

    tensors = load_file("first.safetensors")
    model = Optimized([tensors[f"weights.{k}"] for k in range(TENSORS)], 1 + int(name.rpartition("-")[2]))
    if trace:
        model.marks.trace_node()
    folder = Path(name)
    with join(address, model.module, model.optimizer, name=name, state_dir=folder, rate="own", clip="own") as node:
        while node.running:
            model.set_gradients()
            node.step()
            model.end_round()
    if trace:
        model.marks.write(Path(f"{name}.marks.json"))
    return model.times, model.end


def as_gloo(address: str, rank: int, nodes: int, parameters: int, rounds: int) -> tuple[Times, str]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=nodes)
    flat, times = torch.cat(weights(parameters)).mul_(rank + 1), Times()
    for _ in range(rounds):
        dist.barrier()
        begun = time.monotonic()
        dist.all_reduce(flat)
        flat.div_(nodes)
        times.append((begun, time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()
    return times, _end_of([flat])


def as_torchft(address: str, rank: int, nodes: int, parameters: int, rounds: int) -> tuple[Times, str]:
    """DiLoCo in fp32 over gloo; one replica group a node. Its first round only copies the weights of one to all."""
    import torch.distributed as dist

    coordination, torchft = importlib.import_module("torchft.coordination"), importlib.import_module("torchft")
    port = int(address.rpartition(":")[2])
    store_port = port + 1 + rank
    lighthouse: Any = None
    if rank == 0:
        bind = f"127.0.0.1:{port}"
        lighthouse = coordination.LighthouseServer(bind=bind, min_replicas=nodes, join_timeout_ms=1000)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    model = Optimized(weights(parameters), 1 + rank)
    patience = timedelta(seconds=_PATIENCE_S)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=patience),
        min_replica_size=nodes,
        use_async_quorum=False,
        load_state_dict=lambda kept: model.module.load_state_dict(kept["model"]),
        state_dict=lambda: {"model": model.module.state_dict()},
        replica_id=f"node_{rank}",
        hostname="127.0.0.1",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store_port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        timeout=patience,
    )
    outer = torch.optim.SGD(model.parameters, lr=0.7, momentum=0.9, nesterov=True)
    local_sgd = importlib.import_module("torchft.local_sgd")
    with local_sgd.DiLoCo(manager, [model.module], model.optimizer, outer, sync_every=1):
        for _ in range(rounds):
            model.set_gradients()
            model.optimizer.step()  # its hooks synchronise
            model.end_round()
    told = model.times, model.end
    time.sleep(1.0)  # the other nodes may still need the servers of this one
    manager.shutdown(wait=False)
    del store, lighthouse
    return told


def as_hivemind(address: str, rank: int, nodes: int, parameters: int, rounds: int) -> tuple[Times, str]:
    """Its averager in fp32 over its DHT, without an optimizer."""
    hivemind, averaging = importlib.import_module("hivemind"), importlib.import_module("hivemind.averaging")
    known = Path("peers.json")
    plain = {"start": True, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_relay": False, "use_auto_relay": False}
    if rank == 0:
        dht = hivemind.DHT(**plain)
        known.with_suffix(".new").write_text(dumps([str(address) for address in dht.get_visible_maddrs()]))
        known.with_suffix(".new").rename(known)
    else:
        while not known.exists():
            time.sleep(0.05)
        dht = hivemind.DHT(initial_peers=json.loads(known.read_text()), **plain)
    first = [part + rank for part in weights(parameters)]
    averager = averaging.DecentralizedAverager(
        first,
        dht,
        start=True,
        prefix="sync",
        target_group_size=nodes,
        min_group_size=nodes,
        min_matchmaking_time=2.0,  # less where the group is full before
        request_timeout=1.0,
        bandwidth=1.0,
    )
    times = Times()
    for _ in range(rounds):
        begun = time.monotonic()
        if averager.step(timeout=_PATIENCE_S) is None:
            raise SystemExit("hivemind did not average within its time")
        times.append((begun, time.monotonic()))
    with averager.get_tensors() as tensors:
        end = _end_of(tensors)
    time.sleep(2.0)
    averager.shutdown()
    dht.shutdown()
    return times, end


PEERS = {"gloo": as_gloo, "torchft": as_torchft, "hivemind": as_hivemind}


def main(words: Sequence[str]) -> None:
    """Be a node: FILE farloop ADDRESS NAME [trace], or FILE SYSTEM ADDRESS RANK NODES PARAMETERS ROUNDS."""
    torch.set_num_threads(1)
    path, system, address, *rest = words
    times, end = as_farloop(address, *rest) if system == "farloop" else PEERS[system](address, *map(int, rest))
    Path(path).write_text(dumps({"rounds": times, "end": end}))
    if system == "torchft":
        sys.stdout.flush()
        os._exit(0)  # its threads outlive its shutdown


if __name__ == "__main__":
    main(sys.argv[1:])
