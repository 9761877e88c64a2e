"""One run from a spec to its result, and the folder that keeps results, so that nothing is run twice."""

import dataclasses
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from farloop.algo.spec import NodeId, RunSpec, to_plain
from farloop.bench.builtin import BuiltIn, OnStep
from farloop.node.corpus import Corpus
from farloop.sim.network import Weather
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.world import World
from farloop.wire.limits import Limits

FAST_LINK = Weather(latency_s=0.001, bytes_per_s=1e9)
"""Time is not what is measured: a link on which no node ever waits."""

CPU = "cpu"

FORMAT = 2
"""Of the kept files; part of a run's key. Goes up, too, when a default of `Terms` or `LearningRate` changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came out of one run."""

    key: str
    seed: int
    nodes: int
    loss: float
    """Nats per byte of the final anchors on the evaluation set, the flush included."""
    curve: tuple[tuple[float, float], ...]
    """(schedule position, loss) of the evaluations on the way and at the end, on a small part of that set."""
    bytes_up: int
    """Of all frames from one node to the coordinator, mean over nodes; snapshots apart."""
    bytes_down: int
    moved: tuple[int, ...]
    """Up and down together, by each point of the curve."""
    syncs: float
    """Whole models that a node sent, mean over nodes: a fragment counts as the share of the model that it is."""
    inner_steps: int
    """Of all nodes."""
    tokens: int
    """Of all nodes."""
    cpu_s: float
    """Seconds of one core that the run took, if nothing else ran in its process."""


def run_key(spec: RunSpec, device: str = CPU) -> str:
    """16 hex digits over all that decides the result: the run's settings but for its name, torch's version, the device.

    Terms that are as they always were are left out. So an option that farloop learns later, whose default means "as
    before", leaves the keys of earlier runs as they are, and hours of kept results stay good.
    """
    settings = to_plain(spec)
    del settings["identity"]["name"]
    settings["terms"] = _chosen(spec.terms)
    made_by = [FORMAT, torch.__version__, *([] if device == CPU else [device])]
    content = json.dumps([*made_by, settings], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _chosen(value: Any) -> Any:
    """A plain value; of dataclasses, however deep, the fields that differ from their defaults, or have none."""
    if isinstance(value, tuple):
        return [_chosen(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    chosen = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
    return {field.name: _chosen(getattr(value, field.name)) for field in chosen}


def run_one(spec: RunSpec, corpus: Corpus, on_step: OnStep = lambda: None, *, device: str = CPU) -> RunResult:
    """Train the spec's model with `min_nodes` nodes on virtual time.

    On a CPU equal specs give equal losses, bit for bit; on a GPU nearly equal ones, for sums there have no fixed order.
    All nodes share the one `device`; the coordinator computes on the CPU, as the daemon does.

    Raises:
        NodeError: the corpus is not the run's, or its numbers broke.
    """
    began = time.process_time()
    problem = BuiltIn(spec, corpus, on_step, device=torch.device(device))
    width = len(str(spec.terms.min_nodes))
    scenario = Scenario(
        terms=spec.terms,
        nodes=tuple(
            NodeSetup(name=NodeId(f"n{number:0{width}}"), seed=number) for number in range(spec.terms.min_nodes)
        ),
        problem=problem,
        weather=FAST_LINK,
        limits=Limits(),
        frugal=True,
    )
    with _one_thread():
        outcome = World(scenario).run()
        loss, glance = problem.losses(outcome.anchors)
    outcome.check()
    ends = [starts[-1] for starts in outcome.nodes.values()]
    position = float(spec.terms.steps)
    curve = [(taken.position, taken.loss) for taken in outcome.evaluations if taken.position < position]
    curve.append((position, glance))
    up, down = (
        statistics.fmean(column)
        for column in zip(*((end.moved.up.exchanged, end.moved.down.exchanged) for end in ends), strict=True)
    )
    sends = [send for end in ends for send in end.diary.sends]
    sizes = [fragment.numel for fragment in outcome.layout.fragments]

    def models_sent(by: float) -> float:
        return sum(sizes[send.fragment] for send in sends if send.position <= by) / (sum(sizes) * len(ends))

    syncs = models_sent(math.inf)
    return RunResult(
        key=run_key(spec, device),
        seed=spec.identity.seed,
        nodes=len(ends),
        loss=loss,
        curve=tuple(curve),
        bytes_up=round(up),
        bytes_down=round(down),
        moved=(*(round((up + down) * models_sent(at) / syncs) for at, _ in curve[:-1]), round(up + down)),
        syncs=syncs,
        inner_steps=sum(end.inner_steps for end in ends),
        tokens=sum(end.tokens for end in ends),
        cpu_s=time.process_time() - began,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The grouping of sums follows the number of threads, and with it the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder with one JSON file per finished run, named by its key."""

    folder: Path

    def get(self, key: str) -> RunResult | None:
        """The result of an earlier run; a file that cannot be read counts as none."""
        try:
            fields: dict[str, Any] = json.loads(self._path(key).read_text())["result"]
            curve = tuple((x, y) for x, y in fields["curve"])
            result = RunResult(**{**fields, "curve": curve, "moved": tuple(fields["moved"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result if result.key == key else None

    def put(self, spec: RunSpec, result: RunResult) -> None:
        """Keep a result, and beside it the settings it came from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"result": dataclasses.asdict(result), "torch": torch.__version__, "terms": to_plain(spec.terms)}, indent=1
        )
        path = self._path(result.key)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        unfinished.replace(path)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
