"""Pipelines inside one process for tests: every node a thread, and real sockets on loopback between them."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from farloop.algo.stages import StageLayout
from farloop.node.model.built_in import GPT, build
from farloop.node.settings import ModelConfig, PipelineConfig
from farloop.pipeline.executor import Executor, Step
from farloop.pipeline.link import PeerConfig
from farloop.pipeline.stage import StageJobs, StagePart

Steps = dict[str, list[Step]]
"""Of each node."""

SMALL = ModelConfig(layers=4, dim=32, heads=2, hidden=48, context=64)
PATIENCE_S = 60.0


def model() -> GPT:
    return build(SMALL, seed=3)


def microbatches(count: int, seed: int, *, sequences: int = 2, tokens: int = 17) -> list[Tensor]:
    """Tokens [B, S] each."""
    generator = torch.Generator().manual_seed(seed)
    # A pattern that can be learnt: counting with a random stride.
    start = torch.randint(0, 256, (count, sequences, 1), generator=generator)
    stride = torch.randint(1, 4, (count, sequences, 1), generator=generator)
    return list((start + stride * torch.arange(tokens)) % 256)


class Nodes:
    """All nodes of a layout. Each runs `train` in a thread of its own."""

    def __init__(
        self,
        layout: StageLayout,
        *,
        config: PipelineConfig | None = None,
        keys: Path | None = None,
        bind: str = "tcp://127.0.0.1:0",
    ) -> None:
        self.layout = layout
        self.names = [name for stage in layout.stages for name in stage.replicas]
        self.executors: dict[str, Executor] = {}
        self.parts: dict[str, StagePart] = {}
        self.errors: list[Exception] = []
        for name in self.names:
            number = layout.stage_of(name)
            assert number is not None
            self.parts[name] = part = StagePart(model(), layout.stages[number], source=number == 0)
            own = {"key": keys / f"{name}.key", "peers": keys} if keys is not None else {}
            self.executors[name] = Executor(
                layout=layout,
                addresses={},
                jobs=StageJobs(part),
                peer=PeerConfig(name=name, bind=bind, **own),
                config=config or PipelineConfig(),
            )
        for executor in self.executors.values():
            executor.start()
        self.addresses = {name: executor.link.endpoint for name, executor in self.executors.items()}
        for name, executor in self.executors.items():
            executor._addresses = {other: to for other, to in self.addresses.items() if other != name}
            executor.link.dial(executor._addresses)

    def train(self, work: Callable[[str, Executor, StagePart], None]) -> None:
        """`work` for every node at once; to the end of all. Raises what a node raised."""

        def one(name: str) -> None:
            try:
                work(name, self.executors[name], self.parts[name])
            except Exception as error:  # noqa: BLE001 - told to the test
                self.errors.append(error)
            finally:
                self.executors[name].close()

        threads = [threading.Thread(target=one, args=(name,), name=name) for name in self.names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} stands still: {self.executors[thread.name].machine.waiting}"
        if self.errors:
            raise self.errors[0]
