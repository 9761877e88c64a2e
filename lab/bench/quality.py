"""Whole simulated runs of the built-in model: compared in pairs, tuned with equal budgets, and cached.

Every variant is trained once per seed. Runs of one seed start from the same weights and see the same samples in the
same steps, so their difference comes from the variant, and from noise that training amplifies. The machines, sessions
and codecs are the daemons' own, in one process on virtual time.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

FORMAT = 2  # Of the kept files; part of a run's key. Goes up, too, when a default of `Terms` or `LearningRate` changes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came out of one run."""

    key: str
    seed: int
    nodes: int
    loss: float  # nats per byte of the final anchors on the evaluation set, the flush included
    curve: tuple[tuple[float, float], ...]
    """(schedule position, loss) of the evaluations on the way and at the end, on a small part of that set."""
    bytes_up: int  # of all frames from one node to the coordinator, mean over nodes; snapshots apart
    bytes_down: int
    moved: tuple[int, ...]  # up and down together, by each point of the curve
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

    Raises:
        NodeError: the corpus is not the run's, or its numbers broke.
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
        loss, glance = problem.losses(world.anchors)
    ends = [host.actor for host in world.hosts.values()]
    moves = [end.link.moved for end in ends]
    position = float(spec.terms.schedule.steps)
    curve = [(taken.position, taken.loss) for taken in world.evaluations if taken.position < position]
    curve.append((position, glance))
    up, down = (
        statistics.fmean(column)
        for column in zip(*((m.up.total - m.up.state, m.down.total - m.down.state) for m in moves), strict=True)
    )
    sizes = [fragment.numel for fragment in world.spec.identity.layout.fragments]

    def models_sent(by: float) -> float:
        sent = [sizes[fragment] for end in ends for position, fragment in end.sent if position <= by]
        return sum(sent) / (sum(sizes) * len(ends))

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
            curve = tuple((x, _number(y)) for x, y in fields["curve"])
            moved = tuple(fields["moved"])
            result = RunResult(**{**fields, "loss": _number(fields["loss"]), "curve": curve, "moved": moved})
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


def _number(value: float | None) -> float:
    """A loss from JSON, which has null for one that is not finite."""
    return math.nan if value is None else value


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
    failed: Callable[[RunSpec, RunFailed], None] = lambda spec, error: None
    """A run broke, and the others go on."""
    progress: Callable[[int], None] = lambda inner_steps: None
    """Inner steps done so far, over all runs, with those that were kept."""


def run_all(plan: QualityPlan, *, jobs: int, watch: Watch | None = None) -> dict[str, tuple[RunResult, ...]]:
    """The results of every variant by its label, in the order of the seeds; `jobs` runs at a time, each on one core.

    Raises:
        RunFailed: a run broke; what was finished is kept.
        CorpusError: there is no text.
    """
    results = run_each(plan, jobs=jobs, watch=watch)
    return {variant.label: tuple(results[plan.key(spec)] for spec in variant.specs) for variant in plan.variants}


def run_each(
    plan: QualityPlan, *, jobs: int, watch: Watch | None = None, broken_is_none: bool = False
) -> dict[str, RunResult]:
    """The results by their keys. With `broken_is_none`, a run that breaks has none; else it is raised, as above."""
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
        for spec, came in _pooled(plan, missing, jobs, lambda done: watch.progress(before + done)):
            if isinstance(came, RunFailed):
                if not broken_is_none:
                    raise came
                watch.failed(spec, came)
            else:
                results[came.key] = came
                watch.finished(spec, came, False)
    return results


def _pooled(
    plan: QualityPlan, runs: Mapping[str, RunSpec], jobs: int, progress: Callable[[int], None]
) -> Iterator[tuple[RunSpec, "RunResult | RunFailed"]]:
    """Run in processes of their own; yields in the order in which they end, or break."""
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
                error = future.exception()
                yield waiting.pop(future), error if isinstance(error, RunFailed) else future.result()
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
        sentence = f"{what}, seed {spec.identity.seed}: {error}"
        raise RunFailed(sentence, error.exit_code) from None
    Kept(plan.folder).put(spec, result)
    return result


@lru_cache(maxsize=1)
def _corpus(data: Path | None, max_bytes: int) -> Corpus:
    return load_corpus(data, max_bytes=max_bytes)


# --- tuning
#
# A tuned method beats an untuned one, whatever their merits. So every variant gets the same number of runs on a seed of
# their own: methods with an outer optimizer search for its learning rate, data parallel and a single node for their
# inner one.

SEED_OFFSET = 1000  # from the first seed to that of the tuning, which no run that counts may have
RATE = "lr"  # the knob that every variant has: the peak of the inner learning rate

REACH = 4.0
"""Where no learning rates are given but a variant has only that to tune, they lie between 1/4 and 4 of the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting and what to try for it."""

    name: str
    values: tuple[float, ...]  # in rising order


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One point of a variant's search."""

    settings: Mapping[str, float]
    spec: RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What it came to."""

    settings: Mapping[str, float]
    loss: float | None  # None where the run broke


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A variant's search."""

    label: str
    seed: int
    tried: tuple[Tried, ...]
    picked: Mapping[str, float]
    at_edge: tuple[str, ...]
    """Knobs whose best value was the first or the last that was tried: a better one may lie beyond."""


def settings_to_try(
    knobs: Sequence[Knob], *, without: Collection[str] = (), rate: float | None
) -> tuple[dict[str, float], ...]:
    """The points of one variant's search: as many for every variant, the product of all knobs' values.

    `without`: knobs that the variant does not have. In their place it tries more learning rates, spread evenly by ratio
    over the range of those given, or around `rate`, its default. `rate` is None where the variant's learning rate is
    not to be tuned; its points are then fewer.
    """
    own = {knob.name: knob.values for knob in knobs if knob.name not in without}
    missing = math.prod(len(knob.values) for knob in knobs if knob.name in without)
    if missing > 1 and rate is not None:
        given = own.get(RATE, (rate / REACH, rate * REACH))
        count = missing * (len(given) if RATE in own else 1)
        own[RATE] = evenly_by_ratio(given[0], given[-1], count)
    return tuple(dict(zip(own, point, strict=True)) for point in itertools.product(*own.values())) if own else ()


def evenly_by_ratio(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` numbers from low to high, each as many times the one before, of three digits."""
    if count == 1:
        return (float(f"{math.sqrt(low * high):.3g}"),)
    return tuple(float(f"{low * (high / low) ** (k / (count - 1)):.3g}") for k in range(count))


def plan_of(trials: Mapping[str, Sequence[Trial]], plan: QualityPlan) -> QualityPlan | None:
    """The runs of all searches; None where there is nothing to try. All else is as in `plan`."""
    variants = tuple(
        Variant(label=f"{label}, {settings_text(trial.settings)}", specs=(trial.spec,))
        for label, some in trials.items()
        for trial in some
    )
    if not variants:
        return None
    return dataclasses.replace(plan, variants=variants)


def tune(
    plan: QualityPlan, trials: Mapping[str, Sequence[Trial]], *, jobs: int, watch: Watch | None = None
) -> tuple[Tuned, ...]:
    """Run all points of `plan_of(trials, …)` and take every variant's best, by the validation loss at the run's end.

    Raises:
        RunFailed: of a variant every point broke.
    """
    results = run_each(plan, jobs=jobs, watch=watch, broken_is_none=True)
    losses = {key: result.loss for key, result in results.items()}
    return tuple(
        best_of(
            label,
            some[0].spec.identity.seed,
            [Tried(settings=trial.settings, loss=losses.get(plan.key(trial.spec))) for trial in some],
        )
        for label, some in trials.items()
    )


def best_of(label: str, seed: int, tried: Sequence[Tried]) -> Tuned:
    """Raises RunFailed where every point broke."""
    finished = [(one.loss, number) for number, one in enumerate(tried) if one.loss is not None]
    if not finished:
        raise RunFailed(f"{label}: not one of the {len(tried)} settings that were tried could be trained", 4)
    picked = tried[min(finished)[1]].settings
    at_edge = []
    for name, value in picked.items():
        values = sorted({one.settings[name] for one in tried})
        if len(values) > 1 and value in (values[0], values[-1]):
            at_edge.append(name)
    return Tuned(label=label, seed=seed, tried=tuple(tried), picked=picked, at_edge=tuple(at_edge))


def settings_text(settings: Mapping[str, float]) -> str:
    """`outer_lr=0.4 lr=0.004`."""
    return " ".join(f"{name}={value:g}" for name, value in settings.items())
