"""Every variant compared with the baseline in pairs of equal seeds, with Student's interval of the mean."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from farloop.bench.machine import machine, source_commit
from farloop.bench.quality import QualityPlan, RunResult, Tuned

CONFIDENCE = 0.95


def half_width(samples: Sequence[float]) -> float:
    """Of the confidence interval of the mean, if the samples are independent and about normal: t · s / √n."""
    count = len(samples)
    t = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    return t * statistics.stdev(samples) / math.sqrt(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One variant beside the baseline."""

    label: str
    nodes: int
    losses: tuple[float, ...]  # per seed
    mean_loss: float
    spread: float | None  # standard deviation over the seeds; None where there is a single one
    differences_percent: tuple[float, ...]  # per seed: 100 · (loss − baseline's) / baseline's; above 0 is worse
    mean_percent: float
    low_percent: float | None  # of the interval of the mean; None where there is a single seed
    high_percent: float | None
    bytes_up: int  # per node
    bytes_down: int
    fewer_bytes: float | None
    """Bytes up and down of a node of the baseline ÷ those of a node of this; None for a single node, which has nobody
    to send to. Where the baseline is one, data parallel's in fp32 stand in."""
    syncs: float  # whole models that a node sent
    tokens: int  # of all nodes
    cpu_s: float  # seconds of one core, mean of a run

    def within(self, percent: float) -> bool:
        """Whether the whole interval lies inside ± `percent`."""
        if self.low_percent is None or self.high_percent is None:
            return False
        return -percent <= self.low_percent and self.high_percent <= percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is written down."""

    baseline: str
    seeds: tuple[int, ...]
    confidence: float
    variants: tuple[Comparison, ...]  # the baseline first
    within_percent: float  # largest difference that is called none
    tuned: tuple[Tuned, ...]  # what was tried before, and taken
    command: str  # repeats it
    machine: str
    commit: str | None


def compare(results: Mapping[str, Sequence[RunResult]], *, parameters: int = 0) -> tuple[Comparison, ...]:
    """Every variant against the first one, pair by pair of equal seeds.

    `parameters` of the model: bytes are compared with those of data parallel in fp32, 8 a parameter and step, where
    the baseline is a single node, which sends none.
    """
    baseline = next(iter(results.values()))
    steps = baseline[0].inner_steps // baseline[0].nodes
    moved = _moved(baseline) if baseline[0].nodes > 1 else 8.0 * parameters * steps
    return tuple(_against(baseline, moved, label, runs) for label, runs in results.items())


def _against(baseline: Sequence[RunResult], moved: float, label: str, runs: Sequence[RunResult]) -> Comparison:
    pairs = list(zip(baseline, runs, strict=True))
    assert all(base.seed == run.seed for base, run in pairs), "pairs have equal seeds"
    differences = tuple(100.0 * (run.loss - base.loss) / base.loss for base, run in pairs)
    losses = tuple(run.loss for run in runs)
    mean, alone = statistics.fmean(differences), len(pairs) == 1
    reach = None if alone else half_width(differences)
    return Comparison(
        label=label,
        nodes=runs[0].nodes,
        losses=losses,
        mean_loss=statistics.fmean(losses),
        spread=None if alone else statistics.stdev(losses),
        differences_percent=differences,
        mean_percent=mean,
        low_percent=None if reach is None else mean - reach,
        high_percent=None if reach is None else mean + reach,
        bytes_up=round(statistics.fmean(run.bytes_up for run in runs)),
        bytes_down=round(statistics.fmean(run.bytes_down for run in runs)),
        fewer_bytes=None if runs[0].nodes == 1 or not moved else moved / _moved(runs),
        syncs=statistics.fmean(run.syncs for run in runs),
        tokens=round(statistics.fmean(run.tokens for run in runs)),
        cpu_s=statistics.fmean(run.cpu_s for run in runs),
    )


def _moved(runs: Sequence[RunResult]) -> float:
    return statistics.fmean(run.bytes_up + run.bytes_down for run in runs)


def report(
    plan: QualityPlan,
    results: Mapping[str, Sequence[RunResult]],
    *,
    command: str,
    within_percent: float,
    parameters: int = 0,
    tuned: tuple[Tuned, ...] = (),
) -> Report:
    """The comparison of a plan's results, with how they came about."""
    return Report(
        baseline=plan.variants[0].label,
        seeds=plan.seeds,
        confidence=CONFIDENCE,
        variants=compare(results, parameters=parameters),
        within_percent=within_percent,
        tuned=tuned,
        command=command,
        machine=machine(),
        commit=source_commit(),
    )


def difference_text(comparison: Comparison) -> str:
    """`+0.12 ± 0.20 %`."""
    if comparison.high_percent is None:
        return f"{comparison.mean_percent:+.2f} %"
    return f"{comparison.mean_percent:+.2f} ± {comparison.high_percent - comparison.mean_percent:.2f} %"
