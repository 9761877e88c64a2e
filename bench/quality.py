"""Does a codec, a method or a setting cost quality? Whole runs of the built-in model, several at a time, kept.

Every variant is trained once per seed; runs of one seed begin with the same weights and see the same samples in the
same steps, so that their difference is the variant's doing and chance that training amplifies. What the differences
say is in `comparison.py`.

The machines, sessions and codecs are the daemons' own, in one process on virtual time (`farloop.sim`).
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from farloop.algo.spec import RunSpec
from farloop.bench.trial import CPU, Kept, RunResult, run_key, run_one
from farloop.node.corpus import Corpus, load_corpus
from farloop.node.errors import NodeError

POLL_S = 0.5
"""Between two looks at how far the runs are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train."""

    label: str
    """As a person spelled it."""
    specs: tuple[RunSpec, ...]
    """One per seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityPlan:
    """Which runs are compared."""

    variants: tuple[Variant, ...]
    """The first one is the baseline."""
    folder: Path
    """Keeps finished runs; what lies there is not repeated."""
    data: Path | None = None
    """The corpus, as `load_corpus` takes it."""
    max_bytes: int = 16_000_000
    device: str = CPU
    """Of all nodes of all runs: cpu or cuda."""

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
        """By which a run of this plan is kept."""
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
    """Who wants to know how it goes."""

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

_steps: Any = None
"""The array of `_pooled`."""


def _begin_worker(steps: Any) -> None:
    global _steps
    _steps = steps


def _work(plan: QualityPlan, spec: RunSpec, place: int) -> RunResult:
    parent = multiprocessing.parent_process()

    def stepped() -> None:
        _steps[place] += 1
        if parent is not None and not parent.is_alive():
            raise SystemExit("nobody waits for this run any more")

    try:
        result = run_one(spec, _corpus(plan.data, plan.max_bytes), stepped, device=plan.device)
    except NodeError as error:
        terms = spec.terms
        what = f"{terms.method}, {terms.min_nodes} nodes, {terms.codec_up}/{terms.codec_down}"
        sentence = f"{what}, seed {spec.identity.seed}: {error}"
        raise RunFailed(sentence, error.exit_code) from None
    Kept(plan.folder).put(spec, result)
    return result


@lru_cache(maxsize=1)
def _corpus(data: Path | None, max_bytes: int) -> Corpus:
    return load_corpus(data, max_bytes=max_bytes)
