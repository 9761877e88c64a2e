"""Pipelines of real processes on one machine: measured steps and losses, compared with predictions.

Every node is a process (`bench/pipeline_node.py`) with its own sockets. Distance is a delay at the sender and a slow
stage is a sleep, so steps measure the pipeline and not this machine's arithmetic, as long as it has the time for eight
processes that mostly wait. `makespan` compares the time of a step with the same machines on virtual time; `losses`
trains with and without skipped stages.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from farloop.algo.stages import Hop, Stage, StageLayout
from farloop.algo.stages import Path as Way
from farloop.lab.bench.pipeline_node import MODEL, NodeSettings, Told, batches, seed_of
from farloop.lab.bench.processes import run_together
from farloop.lab.bench.routing import small_instance
from farloop.local.processes import free_ports
from farloop.monitoring.status import dumps
from farloop.node.model.built_in import GPT, build
from farloop.pipeline.layout import layout_json
from farloop.sim.pipeline import Costs, World

Delays = Mapping[tuple[str, str], float]  # seconds between two nodes, in this order
MICROBATCHES, LEARNING_RATE = 6, 3e-3  # of a step of the model that learns
CHAINS = ("024", "135")  # the best disjoint paths of three of the four stages in it: 15.75 units each

DEALT = ("035", "124")
"""Paths through the same stages, nodes dealt at random, as the planner deals them: 31.75 and 27.75 units."""

FULL = ("0247", "1356")  # through all four stages: 22.25 and 20.25 units
ONE_SOURCE = ("0", "2", "4", "7")  # nodes of four stages
WHOLE = ("0247",)  # one source, nothing left out

ONE_IN_FOUR = ("024", "027", "047")
"""One source; of the other stages each is left out by a third of the microbatches: 25 % of all visits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Makespan:
    """How long a step took."""

    paths: tuple[str, ...]
    predicted_s: float  # by the machines on virtual time
    measured_s: float  # median over the steps, of the slowest source
    steps_s: tuple[float, ...]  # of every step but the first, the slowest source's

    @property
    def error(self) -> float:
        """Measured over predicted, less 1."""
        return self.measured_s / self.predicted_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """How a model learnt."""

    skipped: float  # share of the stages that each microbatch leaves out
    losses: tuple[float, ...]  # of every step, as its microbatches went, nats per token
    full_loss: float  # at the end, of the whole model without skips, on microbatches that no node trained on


def layout_of(replicas: Sequence[str], paths: Sequence[str], layers: int) -> StageLayout:
    """Stages of equally many layers, whose nodes have names of one letter."""
    each = layers // len(replicas)
    stages = tuple(
        Stage(first=i * each, stop=(i + 1) * each, replicas=tuple(names)) for i, names in enumerate(replicas)
    )
    stage_of = {name: number for number, names in enumerate(replicas) for name in names}
    ways = tuple(Way(hops=tuple(Hop(stage=stage_of[name], node=name) for name in path)) for path in paths)
    return StageLayout(epoch=1, stages=stages, paths=ways)


def makespan(paths: Sequence[str], *, unit_s: float, steps: int) -> Makespan:
    """The worked example with delays and jobs of `unit_s`, by these paths, in processes of its own."""
    layout = layout_of(("01", "23", "45", "67"), paths, layers=4)
    delays = {ends: link.latency_s for ends, link in small_instance(unit_s).links.items()}
    costs = Costs(forward_s=unit_s, loss_s=unit_s / 4, backward_s=1.5 * unit_s)
    world = World(layout, steps=3, microbatches=1, costs=costs, delay=lambda u, v: delays.get((u, v), 0.0))
    world.run(1000.0)
    sources = sorted({path.source for path in layout.paths})
    spans = [(world.records[name].began_at, world.records[name].over_at) for name in sources]
    predicted = max(over[-1] - began[-1] for began, over in spans)
    with tempfile.TemporaryDirectory() as folder:
        told = run_nodes(
            layout,
            Path(folder),
            delays=delays,
            steps=steps + 1,
            microbatches=1,
            credit=1,
            job_s={"forward": costs.forward_s, "loss": costs.loss_s, "backward": costs.backward_s},
        )
    slowest = [max(told[name].seconds[step] for name in sources) for step in range(1, steps + 1)]
    return Makespan(
        paths=tuple(paths), predicted_s=predicted, measured_s=statistics.median(slowest), steps_s=tuple(slowest)
    )


def losses(paths: Sequence[str], *, steps: int) -> Losses:
    """A small model of four layers in as many stages, 0, 2, 4 and 7, trained by these paths of one source in turn."""
    layout = layout_of(ONE_SOURCE, paths, MODEL.layers)
    with tempfile.TemporaryDirectory() as folder:
        told = run_nodes(
            layout, Path(folder), steps=steps, microbatches=MICROBATCHES, credit=4, learning_rate=LEARNING_RATE
        )
        whole = build(MODEL, seed=0)
        for node in told.values():
            whole.load_state_dict(load_file(node.weights), strict=False)
    visited = statistics.fmean(len(path.hops) for path in layout.paths) / len(layout.stages)
    return Losses(skipped=1.0 - visited, losses=tuple(told["0"].losses), full_loss=_unseen(whole))


def alone(*, steps: int) -> Losses:
    """The same model, on the same microbatches as `losses`, in this one process without a pipeline."""
    whole = build(MODEL, seed=0)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(steps):
        each = [whole.loss(batch) for batch in batches(MICROBATCHES, seed_of(step, 0, ONE_SOURCE, "0"))]
        mean = torch.stack(each).mean()
        torch.autograd.backward(mean)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(mean.item())
    return Losses(skipped=0.0, losses=tuple(found), full_loss=_unseen(whole))


def _unseen(whole: GPT) -> float:
    """Loss on microbatches that no node trained on."""
    with torch.no_grad():
        return statistics.fmean(whole.loss(batch).item() for batch in batches(16, seed=10_000_000))


def run_nodes(
    layout: StageLayout,
    folder: Path,
    *,
    steps: int,
    microbatches: int,
    credit: int,
    delays: Delays | None = None,
    job_s: Mapping[str, float] | None = None,
    learning_rate: float = 0.0,
) -> dict[str, Told]:
    """What every node of the layout tells at its end, each in a process of its own on loopback.

    Raises CommandError: one of them failed.
    """
    names = [name for stage in layout.stages for name in stage.replicas]
    addresses = {name: f"tcp://127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)}
    (folder / "layout.json").write_text(layout_json(layout, addresses))
    commands = {}
    for name in names:
        settings = NodeSettings(
            name=name,
            layout=str(folder / "layout.json"),
            steps=steps,
            microbatches=microbatches,
            credit=credit,
            delays_s={v: s for (u, v), s in (delays or {}).items() if u == name},
            job_s=dict(job_s or {}),
            learning_rate=learning_rate,
            out=str(folder / f"{name}.json"),
        )
        (folder / f"{name}-settings.json").write_text(dumps(asdict(settings)))
        commands[name] = ["-m", "farloop.lab.bench.pipeline_node", f"{name}-settings.json"]
    run_together(commands, folder)
    return {name: Told(**json.loads((folder / f"{name}.json").read_text())) for name in names}


# --- the experiments of `farloop lab bench routing --processes`

LAST = 10  # steps over whose losses a mean is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Steps of the worked example by some paths; and what a small model learns in four processes, beside one process
    that has all of it."""

    steps: Mapping[str, Makespan]
    whole: Losses  # nothing left out
    skipping: Losses  # a quarter of the visits left out
    alone: Losses  # one process

    @property
    def parity(self) -> float:
        """Largest relative difference of a step's loss between the pipeline without skips and one process."""
        pairs = zip(self.whole.losses, self.alone.losses, strict=True)
        return max(abs(ours - theirs) / theirs for ours, theirs in pairs)

    @property
    def lines(self) -> list[str]:
        kept, left_out = self.whole, self.skipping
        last = {losses: statistics.fmean(losses.losses[-LAST:]) for losses in (kept, left_out, self.alone)}
        return [
            *(
                f"{name}: {1e3 * made.measured_s:.1f} ms measured, {1e3 * made.predicted_s:.1f} predicted "
                f"({100 * made.error:+.0f} %)"
                for name, made in self.steps.items()
            ),
            f"nothing left out: loss {last[kept]:.3f}, whole model {kept.full_loss:.3f}; one process "
            f"{last[self.alone]:.3f} and {self.alone.full_loss:.3f}; no step differs by more than {self.parity:.1e}",
            f"{100 * left_out.skipped:.0f} % left out: loss {last[left_out]:.3f}, whole model "
            f"{left_out.full_loss:.3f}, {100 * (left_out.full_loss / kept.full_loss - 1):+.1f} %",
        ]


STEPS = {
    "full pipelines": FULL,
    "a quarter skipped, paths dealt at random": DEALT,
    "a quarter skipped, paths as planned": CHAINS,
}


def processes(*, steps: int = 40, learning_steps: int = 100) -> Processes:
    """Run all of them: 36 processes, at most eight at a time, some minutes with these numbers.

    Raises CommandError: a process failed.
    """
    return Processes(
        steps={name: makespan(paths, unit_s=0.01, steps=steps) for name, paths in STEPS.items()},
        whole=losses(WHOLE, steps=learning_steps),
        skipping=losses(ONE_IN_FOUR, steps=learning_steps),
        alone=alone(steps=learning_steps),
    )
