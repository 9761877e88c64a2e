"""Every variant compared with the baseline in pairs of equal seeds, with Student's interval of the mean."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from scipy.special import stdtrit

from farloop.lab.bench.quality import QualityPlan, RunResult, Watch
from farloop.lab.bench.quality_spec import MUON
from farloop.monitoring.units import NOTHING, factor_text, size_text

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
    to_muon_percent: float | None  # mean difference to Muon data parallel, if that was trained too
    bytes_up: int  # per node
    bytes_down: int
    fewer_bytes: float | None
    """Bytes up and down of a node of the baseline ÷ those of a node of this; None for a single node, which has
    no peer to send to. Where the baseline is one, data parallel's in fp32 stand in."""
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
    baseline: str
    seeds: tuple[int, ...]
    confidence: float
    variants: tuple[Comparison, ...]  # the baseline first
    within_percent: float  # largest difference that is called none
    command: str  # repeats it


def compare(results: Mapping[str, Sequence[RunResult]], *, parameters: int = 0) -> tuple[Comparison, ...]:
    """Every variant against the first one, pair by pair of equal seeds.

    `parameters` of the model: bytes are compared with those of data parallel in fp32, 8 a parameter and step, where
    the baseline is a single node, which sends none.
    """
    baseline = next(iter(results.values()))
    steps = baseline[0].inner_steps // baseline[0].nodes
    moved = _moved(baseline) if baseline[0].nodes > 1 else 8.0 * parameters * steps
    muon = next((runs for label, runs in results.items() if label.split()[0] == MUON), None)
    return tuple(_against(baseline, muon, moved, label, runs) for label, runs in results.items())


def _differences(baseline: Sequence[RunResult], runs: Sequence[RunResult]) -> tuple[float, ...]:
    """In percent, of each seed."""
    pairs = list(zip(baseline, runs, strict=True))
    assert all(base.seed == run.seed for base, run in pairs), "pairs have equal seeds"
    return tuple(100.0 * (run.loss - base.loss) / base.loss for base, run in pairs)


def _against(
    baseline: Sequence[RunResult], muon: Sequence[RunResult] | None, moved: float, label: str, runs: Sequence[RunResult]
) -> Comparison:
    differences, losses = _differences(baseline, runs), tuple(run.loss for run in runs)
    mean, alone = statistics.fmean(differences), len(runs) == 1
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
        to_muon_percent=None if muon is None else statistics.fmean(_differences(muon, runs)),
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
) -> Report:
    """The comparison of a plan's results, with how they came about."""
    return Report(
        baseline=plan.variants[0].label,
        seeds=plan.seeds,
        confidence=CONFIDENCE,
        variants=compare(results, parameters=parameters),
        within_percent=within_percent,
        command=command,
    )


def difference_text(comparison: Comparison) -> str:
    """`+0.12 ± 0.20 %`."""
    if comparison.high_percent is None:
        return f"{comparison.mean_percent:+.2f} %"
    return f"{comparison.mean_percent:+.2f} ± {comparison.high_percent - comparison.mean_percent:.2f} %"


# --- What `farloop lab bench quality` shows: a bar while runs are trained, then a table


if TYPE_CHECKING:
    from rich.console import Console

    from farloop.algo.spec import RunSpec


@contextmanager
def watched(plan: QualityPlan, console: "Console") -> Iterator[Watch]:
    """A bar over the inner steps of all runs, and a line for each one that is finished."""
    runs = plan.runs
    names = {
        plan.key(spec): f"{variant.label}, seed {spec.identity.seed}"
        for variant in plan.variants
        for spec in variant.specs
    }
    total = sum(spec.terms.schedule.steps * spec.terms.admission.min_nodes for spec in runs.values())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"inner steps of {len(runs)} runs", total=total)

        def finished(spec: "RunSpec", result: RunResult, kept: bool) -> None:
            how = "kept from earlier" if kept else f"{result.cpu_s:.0f} s"
            line = f"{names[result.key]}: loss {result.loss:.4f}  ({how})"
            bar.console.print(line, markup=False, soft_wrap=True)

        yield Watch(finished=finished, progress=lambda done: bar.update(task, completed=done))


_COLUMNS = ("loss", "difference", "", "to Muon", "up a node", "down", "fewer bytes", "syncs", "run")


def table(found: Report) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=(0, 1))
    shown.add_column("variant", overflow="fold")
    for title in _COLUMNS:
        shown.add_column(title or f"in ±{found.within_percent:g} %", justify="right", no_wrap=True)
    for number, variant in enumerate(found.variants):
        verdict = "" if number == 0 else _verdict(variant, found.within_percent)
        color = {"yes": "green", "no": "red", "open": "yellow"}.get(verdict)
        shown.add_row(variant.label, *_cells(variant, number, f"[{color}]{verdict}[/]" if color else verdict))
    return shown


def _cells(variant: Comparison, number: int, verdict: str) -> list[str]:
    spread = "" if variant.spread is None else f" ± {variant.spread:.4f}"
    alone = variant.nodes == 1
    return [
        f"{variant.mean_loss:.4f}{spread}",
        "baseline" if number == 0 else difference_text(variant),
        verdict,
        NOTHING if variant.to_muon_percent is None else f"{variant.to_muon_percent:+.2f} %",
        NOTHING if alone else size_text(variant.bytes_up),
        NOTHING if alone else size_text(variant.bytes_down),
        NOTHING if variant.fewer_bytes is None else factor_text(variant.fewer_bytes),
        NOTHING if alone else f"{variant.syncs:.4g}",
        f"{variant.cpu_s:.0f} s",
    ]


def _verdict(variant: Comparison, within: float) -> str:
    if variant.within(within):
        return "yes"
    if variant.low_percent is None or variant.high_percent is None:
        return "one seed does not tell"
    outside = variant.low_percent > within or variant.high_percent < -within
    return "no" if outside else "open"
