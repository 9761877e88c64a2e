"""Paired differences and their intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farloop.bench.quality import QualityPlan, RunResult, Tuned

# --- What a handful of paired differences says about their true mean: Student's interval. Standard library alone.


CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the true mean lies, if the samples are independent and about normal."""

    mean: float
    half_width: float
    """Infinite where there is a single sample."""

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def mean_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """mean ± t · s / √n. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples, no mean")
    mean, count = statistics.fmean(samples), len(samples)
    if count == 1:
        return Interval(mean=mean, half_width=math.inf)
    spread = statistics.stdev(samples) / math.sqrt(count)
    return Interval(mean=mean, half_width=student_t(confidence, count - 1) * spread)


def student_t(confidence: float, freedom: int) -> float:
    """The t that |T| stays below with probability `confidence`, by bisection.

    Raises ValueError unless 0 < confidence < 1 and freedom >= 1.
    """
    if not 0.0 < confidence < 1.0 or freedom < 1:
        raise ValueError(f"no quantile for a confidence of {confidence} and {freedom} degrees of freedom")
    low, high = 0.0, 1.0
    while student_within(high, freedom) < confidence:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if student_within(middle, freedom) < confidence else (low, middle)
    return high


def student_within(t: float, freedom: int) -> float:
    """P(|T| < t) for a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cos_sq = math.cos(angle) ** 2
    odd = freedom % 2
    term = total = 1.0 if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos_sq * (k - 1) / k
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return math.sin(angle) * total


# --- What finished runs come to: every variant beside the baseline, pair by pair of equal seeds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One variant beside the baseline."""

    label: str
    nodes: int
    losses: tuple[float, ...]
    """Per seed."""
    mean_loss: float
    spread: float | None
    """Standard deviation over the seeds; None where there is a single one."""
    differences_percent: tuple[float, ...]
    """Per seed: 100 · (loss − baseline's) / baseline's; above 0 is worse."""
    mean_percent: float
    low_percent: float | None
    """Of the interval of the mean; None where there is a single seed."""
    high_percent: float | None
    bytes_up: int
    """Per node."""
    bytes_down: int
    fewer_bytes: float | None
    """Bytes up and down of a node of the baseline ÷ those of a node of this; None for a single node, which has nobody
    to send to. Where the baseline is one, data parallel's in fp32 stand in."""
    syncs: float
    """Whole models that a node sent."""
    tokens: int
    """Of all nodes."""
    cpu_s: float
    """Seconds of one core, mean of a run."""

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
    variants: tuple[Comparison, ...]
    """The baseline first."""
    within_percent: float
    """Largest difference that is called none."""
    tuned: tuple[Tuned, ...]
    """What was tried before, and taken."""
    command: str
    """Repeats it."""
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
    interval = mean_interval(differences)
    alone = len(pairs) == 1
    return Comparison(
        label=label,
        nodes=runs[0].nodes,
        losses=losses,
        mean_loss=statistics.fmean(losses),
        spread=None if alone else statistics.stdev(losses),
        differences_percent=differences,
        mean_percent=interval.mean,
        low_percent=None if alone else interval.low,
        high_percent=None if alone else interval.high,
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
    comparisons: tuple[Comparison, ...],
    *,
    within_percent: float,
    tuned: tuple[Tuned, ...] = (),
    command: str,
    machine: str,
    commit: str | None,
) -> Report:
    """The comparisons, how they came about, and what they were made on and with."""
    return Report(
        baseline=plan.variants[0].label,
        seeds=plan.seeds,
        confidence=CONFIDENCE,
        variants=comparisons,
        within_percent=within_percent,
        tuned=tuned,
        command=command,
        machine=machine,
        commit=commit,
    )


def difference_text(comparison: Comparison) -> str:
    """`+0.12 ± 0.20 %`."""
    if comparison.high_percent is None:
        return f"{comparison.mean_percent:+.2f} %"
    return f"{comparison.mean_percent:+.2f} ± {comparison.high_percent - comparison.mean_percent:.2f} %"
