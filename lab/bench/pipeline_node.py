"""One process of `bench/pipeline.py`: a stage of a small model, with jobs that take as long as they are told to."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from farloop.monitoring.status import dumps
from farloop.node.model.built_in import build
from farloop.node.settings import ModelConfig
from farloop.pipeline.executor import Executor
from farloop.pipeline.layout import Settings, read_layout
from farloop.pipeline.link import PeerConfig
from farloop.pipeline.messages import Kind, Work
from farloop.pipeline.stage import StageJobs, StagePart

MODEL = ModelConfig(layers=4, dim=32, heads=2, hidden=48, context=64)
"""A job of a stage takes a millisecond or two on one core: short beside the times that are emulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What the process is told."""

    name: str
    layout: str  # its file
    steps: int
    microbatches: int
    credit: int
    delays_s: dict[str, float]  # to each of the others
    job_s: dict[str, float]  # least seconds of a job, by its kind
    learning_rate: float
    out: str  # where it writes a `Told`


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What it tells at its end."""

    seconds: list[float]  # of every step
    losses: list[float]  # of a source, of every step
    weights: str  # a safetensors file of its stage


class PacedJobs(StageJobs):
    """Takes at least so long for a job of each kind."""

    def __init__(self, part: StagePart, job_s: dict[str, float]) -> None:
        super().__init__(part)
        self._job_s = {Kind[name.upper()]: seconds for name, seconds in job_s.items()}

    def do(self, work: Work, given: Tensor | None) -> Tensor | None:
        """As the stage's, and then the rest of its time."""
        due = time.monotonic() + self._job_s.get(work.kind, 0.0)
        result = super().do(work, given)
        time.sleep(max(0.0, due - time.monotonic()))
        return result


def batches(count: int, seed: int) -> Sequence[Tensor]:
    """Microbatches of tokens [4, 33] that can be learnt: each row counts on by a stride of its own."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 256, (count, 4, 1), generator=generator, dtype=torch.int64, device="cpu")
    stride = torch.randint(1, 8, (count, 4, 1), generator=generator, dtype=torch.int64, device="cpu")
    return list((start + stride * torch.arange(33, dtype=torch.int64, device="cpu")) % 256)


def seed_of(step: int, stage: int, names: Sequence[str], name: str) -> int:
    """Of what a node learns in a step; `names` in their order."""
    return 1000 * stage + step * len(names) + names.index(name)


def main(settings_file: str) -> None:
    torch.set_num_threads(1)
    settings = NodeSettings(**json.loads(Path(settings_file).read_text()))
    name, out = settings.name, Path(settings.out)
    layout, addresses = read_layout(Path(settings.layout))
    number = layout.stage_of(name)
    assert number is not None
    part = StagePart(build(MODEL, seed=0), layout.stages[number], source=number == 0)
    executor = Executor(
        layout=layout,
        addresses={other: to for other, to in addresses.items() if other != name},
        jobs=PacedJobs(part, settings.job_s),
        peer=PeerConfig(name=name, bind=addresses[name], delays_s=settings.delays_s),
        settings=Settings(credit=settings.credit),
    )
    executor.start()
    optimizer = torch.optim.AdamW(part.parameters(), lr=settings.learning_rate)
    seconds: list[float] = []
    losses: list[float] = []
    sends = bool(layout.paths_from(name))
    for step in range(settings.steps):
        seed = seed_of(step, number, sorted(addresses), name)
        result = executor.step(batches(settings.microbatches, seed) if sends else ())
        if result is None:
            break
        seconds.append(result.seconds)
        if result.trained.loss is not None:
            losses.append(result.trained.loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    executor.close()
    save_file(dict(part.state_dict()), out.with_suffix(".safetensors"))
    told = Told(seconds=seconds, losses=losses, weights=str(out.with_suffix(".safetensors")))
    out.write_text(dumps(asdict(told)))


if __name__ == "__main__":
    main(sys.argv[1])
