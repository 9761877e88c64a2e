"""Whole simulated runs of the built-in model, to be compared in pairs, and cached.

Every variant is trained once per seed. Runs of one seed start from the same weights and see the same samples in the
same steps, so their difference comes from the variant, and from noise that training amplifies. The machines, sessions
and codecs are the daemons' own, in one process on virtual time.
"""

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from farloop.algo.spec import NodeId, RunSpec, to_plain
from farloop.algo.terms import Terms, field_of
from farloop.config.exit_codes import writing
from farloop.lab.bench.training import BuiltIn, OnStep, cpu_threads
from farloop.monitoring.status import dumps
from farloop.node.data.corpus import Corpus, load_corpus
from farloop.node.errors import NodeError
from farloop.sim.network import LinkConditions
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.world import World

# --- one run, and the folder of finished runs


FAST_LINK = LinkConditions(latency_s=0.001, bytes_per_s=1e9)
"""Time is not what is measured: a link on which no node ever waits."""

CPU = "cpu"

FORMAT = 3  # Of the kept files; part of a run's key. Goes up, too, when a default of `Terms` or `LearningRate` changes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    key: str
    seed: int
    nodes: int
    loss: float  # nats per byte of the final anchors on the evaluation set, the flush included
    bytes_up: int  # of all frames from one node to the coordinator, mean over nodes; snapshots apart
    bytes_down: int
    syncs: float
    """Whole models that a node sent, mean over nodes: a fragment counts as the share of the model that it is."""
    inner_steps: int  # of all nodes
    tokens: int  # of all nodes
    cpu_s: float  # seconds of one core that the run took, if nothing else ran in its process


def run_key(spec: RunSpec, device: str = CPU) -> str:
    """16 hex digits over all that decides the result: the run's settings but for its name, torch's version, the device.

    Terms that are as they always were are left out. So an option that farloop learns later, whose default means "as
    before", leaves the keys of earlier runs as they are, and hours of kept results stay good.
    """
    settings = to_plain(spec)
    del settings["identity"]["name"]
    settings["terms"] = _chosen(spec.terms)
    made_by = [FORMAT, torch.__version__, *([] if device == CPU else [device])]
    content = dumps([*made_by, settings], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _chosen(value: Any) -> Any:
    """A plain value; of dataclasses, however deep, the fields that differ from their defaults, or have none."""
    if isinstance(value, tuple):
        return [_chosen(item) for item in value]
    if isinstance(value, Terms):
        return {name: _chosen(held) for name, held in value.flat().items() if held != field_of(name).default}
    if not dataclasses.is_dataclass(value):
        return value
    chosen = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
    return {field.name: _chosen(getattr(value, field.name)) for field in chosen}


def run_one(spec: RunSpec, corpus: Corpus, on_step: OnStep = lambda: None, *, device: str = CPU) -> RunResult:
    """Train the spec's model with `min_nodes` nodes on virtual time.

    On a CPU equal specs give equal losses, bit for bit; on a GPU nearly equal ones, for sums there have no fixed order.
    All nodes share the one `device`; the coordinator computes on the CPU, as the daemon does.
    Raises NodeError: the corpus is not the run's, or its numbers broke.
    """
    began = time.process_time()
    problem = BuiltIn(spec, corpus, on_step, device=torch.device(device))
    width = len(str(spec.terms.admission.min_nodes))
    scenario = Scenario(
        terms=spec.terms,
        nodes=tuple(
            NodeSetup(name=NodeId(f"n{number:0{width}}"), seed=number)
            for number in range(spec.terms.admission.min_nodes)
        ),
        problem=problem,
        weather=FAST_LINK,
    )
    with cpu_threads(1):  # the grouping of sums follows the number of threads, and with it the last bits
        world = World(scenario)
        world.run()
        loss = problem.loss(world.anchors)
    ends = [host.actor for host in world.hosts.values()]
    moves = [end.link.moved for end in ends]
    up, down = (
        statistics.fmean(column)
        for column in zip(*((m.up.total - m.up.state, m.down.total - m.down.state) for m in moves), strict=True)
    )
    sizes = [fragment.numel for fragment in world.spec.identity.layout.fragments]
    return RunResult(
        key=run_key(spec, device),
        seed=spec.identity.seed,
        nodes=len(ends),
        loss=loss,
        bytes_up=round(up),
        bytes_down=round(down),
        syncs=sum(sizes[fragment] for end in ends for _, fragment in end.sent) / (sum(sizes) * len(ends)),
        inner_steps=sum(end.machine.inner_steps for end in ends),
        tokens=sum(end.machine.tokens for end in ends),
        cpu_s=time.process_time() - began,
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder with one JSON file per finished run, named by its key."""

    folder: Path

    def get(self, key: str) -> RunResult | None:
        """The result of an earlier run; a file that cannot be read counts as none."""
        try:
            fields: dict[str, Any] = json.loads(self._path(key).read_text())["result"]
            loss = math.nan if fields["loss"] is None else fields["loss"]  # JSON has null for one that is not finite
            result = RunResult(**{**fields, "loss": loss})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result if result.key == key else None

    def put(self, spec: RunSpec, result: RunResult) -> None:
        """Keep a result. Raises CommandError: it cannot be written."""
        text = dumps(
            {"result": dataclasses.asdict(result), "torch": torch.__version__, "terms": to_plain(spec.terms)}, indent=1
        )
        path = self._path(result.key)
        unfinished = path.with_suffix(f".{os.getpid()}")
        with writing(path):
            unfinished.write_text(text)
            unfinished.replace(path)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


# --- all runs of a plan

POLL_S = 0.5  # between two looks at how far the runs are


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train."""

    label: str  # as a person spelled it
    specs: tuple[RunSpec, ...]  # one per seed


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityPlan:
    """Which runs are compared."""

    variants: tuple[Variant, ...]  # the first one is the baseline
    folder: Path  # keeps finished runs; what lies there is not repeated
    data: Path | None = None  # the corpus, as `load_corpus` takes it
    max_bytes: int = 16_000_000
    device: str = CPU  # of all nodes of all runs: cpu or cuda

    def __post_init__(self) -> None:
        labels = [variant.label for variant in self.variants]
        if len(set(labels)) < len(labels):
            raise ValueError(f"a variant is named twice: {', '.join(labels)}")
        seeds = {tuple(spec.identity.seed for spec in variant.specs) for variant in self.variants}
        if len(seeds) != 1 or not all(seeds):
            raise ValueError("runs are compared in pairs: every variant needs the same seeds, at least one")

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(spec.identity.seed for spec in self.variants[0].specs)

    @property
    def runs(self) -> dict[str, RunSpec]:
        """Every different run by its key, all variants of one seed before the next seed."""
        columns = zip(*(variant.specs for variant in self.variants), strict=True)
        return {self.key(spec): spec for column in columns for spec in column}

    def key(self, spec: RunSpec) -> str:
        return run_key(spec, self.device)


class RunFailed(Exception):
    """A run that cannot be finished, in one sentence; `exit_code` as its NodeError has it."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence, exit_code)  # both, for so it is made anew on its way between processes
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks for progress."""

    finished: Callable[[RunSpec, RunResult, bool], None] = lambda spec, result, kept: None
    """A run is there; True for one that was kept from earlier."""
    progress: Callable[[int], None] = lambda inner_steps: None
    """Inner steps done so far, over all runs, with those that were kept."""


def run_all(plan: QualityPlan, *, jobs: int, watch: Watch | None = None) -> dict[str, tuple[RunResult, ...]]:
    """The results of every variant by its label, in the order of the seeds; `jobs` runs at a time, each on one core.

    Raises:
        RunFailed: a run broke; what was finished is kept.
        CorpusError: there is no text.
    """
    watch = watch or Watch()
    kept, runs = Kept(plan.folder), plan.runs
    results: dict[str, RunResult] = {}
    for key, spec in runs.items():
        if (result := kept.get(key)) is not None:
            results[key] = result
            watch.finished(spec, result, True)
    missing = {key: spec for key, spec in runs.items() if key not in results}
    if missing:
        before = sum(result.inner_steps for result in results.values())
        for spec, result in _pooled(plan, missing, jobs, lambda done: watch.progress(before + done)):
            results[result.key] = result
            watch.finished(spec, result, False)
    return {variant.label: tuple(results[plan.key(spec)] for spec in variant.specs) for variant in plan.variants}


def _pooled(
    plan: QualityPlan, runs: Mapping[str, RunSpec], jobs: int, progress: Callable[[int], None]
) -> Iterator[tuple[RunSpec, RunResult]]:
    """Run in processes of their own; yields in the order in which they end. Raises RunFailed."""
    # A forked child of a process with torch's threads may hang in them.
    context = multiprocessing.get_context("spawn")
    steps = context.Array("q", len(runs), lock=False)  # [run], each written by one process
    pool = ProcessPoolExecutor(min(jobs, len(runs)), mp_context=context, initializer=_begin_worker, initargs=(steps,))
    try:
        waiting: dict[Future[RunResult], RunSpec] = {
            pool.submit(_work, plan, spec, place): spec for place, spec in enumerate(runs.values())
        }
        while waiting:
            ended, _ = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
            progress(sum(steps))
            for future in ended:
                yield waiting.pop(future), future.result()
    finally:
        pool.shutdown(cancel_futures=True)


# --- in a worker process

_steps: Any = None  # the array of `_pooled`


def _begin_worker(steps: Any) -> None:
    global _steps
    _steps = steps


def _work(plan: QualityPlan, spec: RunSpec, place: int) -> RunResult:
    parent = multiprocessing.parent_process()

    def stepped() -> None:
        _steps[place] += 1
        if parent is not None and not parent.is_alive():
            raise SystemExit("no process waits for this run any more")

    try:
        result = run_one(spec, _corpus(plan.data, plan.max_bytes), stepped, device=plan.device)
    except NodeError as error:
        terms = spec.terms
        what = f"{terms.method}, {terms.admission.min_nodes} nodes, {terms.codecs.up}/{terms.codecs.down}"
        raise RunFailed(f"{what}, seed {spec.identity.seed}: {error}", error.exit_code) from None
    Kept(plan.folder).put(spec, result)
    return result


@lru_cache(maxsize=1)
def _corpus(data: Path | None, max_bytes: int) -> Corpus:
    return load_corpus(data, max_bytes=max_bytes)
