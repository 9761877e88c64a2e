"""A node of farloop, or of gloo, which `bench/sync.py` compares, as a process of its own.

Every round is one synchronisation of the same model. Each node notes when each of its rounds began and ended.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from farloop.lab.bench.sync_trace import Marks
from farloop.monitoring.status import dumps

TENSORS = 25

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


def main(words: Sequence[str]) -> None:
    """Be a node: FILE farloop ADDRESS NAME [trace], or FILE gloo ADDRESS RANK NODES PARAMETERS ROUNDS."""
    torch.set_num_threads(1)
    path, system, address, *rest = words
    times, end = as_farloop(address, *rest) if system == "farloop" else as_gloo(address, *map(int, rest))
    Path(path).write_text(dumps({"rounds": times, "end": end}))


if __name__ == "__main__":
    main(sys.argv[1:])
