"""What `farloop bench quality` shows: a bar while runs are trained, then a table, on the terminal and in Markdown."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from farloop.bench.comparison import Comparison, Report, difference_text
from farloop.bench.quality import QualityPlan, RunFailed, RunResult, Tuned, Watch, settings_text
from farloop.monitoring.units import NOTHING, count_text, factor_text, size_text

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

        def say(line: str) -> None:
            bar.console.print(line, markup=False, soft_wrap=True)

        def finished(spec: "RunSpec", result: RunResult, kept: bool) -> None:
            how = "kept from earlier" if kept else f"{result.cpu_s:.0f} s"
            say(f"{names[result.key]}: loss {result.loss:.4f}  ({how})")

        def failed(spec: "RunSpec", error: RunFailed) -> None:
            say(f"{names[plan.key(spec)]}: broke: {error}")

        yield Watch(finished=finished, failed=failed, progress=lambda done: bar.update(task, completed=done))


_COLUMNS = ("loss", "difference", "", "up a node", "down", "fewer bytes", "syncs", "run")


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


def tuning_lines(tuned: Sequence[Tuned]) -> list[str]:
    """What was tried for every variant, and what was taken."""
    lines = []
    for one in tuned:
        losses = ", ".join(
            f"{settings_text(tried.settings)}: {'broke' if tried.loss is None else f'{tried.loss:.4f}'}"
            for tried in one.tried
        )
        edge = f" (at the edge: {', '.join(one.at_edge)})" if one.at_edge else ""
        lines.append(f"{one.label} takes {settings_text(one.picked)}{edge}, of {losses}; seed {one.seed}")
    return lines


def markdown(found: Report) -> str:
    """To stand in a document: the table, how it was made, and what was tuned."""
    titles = ["variant", *(title or f"in ±{found.within_percent:g} %" for title in _COLUMNS)]
    rows = [titles, ["---"] * len(titles)]
    for number, variant in enumerate(found.variants):
        verdict = "" if number == 0 else _verdict(variant, found.within_percent)
        rows.append([f"`{variant.label}`", *_cells(variant, number, verdict)])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    seeds = f"{len(found.seeds)} {'seed' if len(found.seeds) == 1 else 'seeds'}"
    tokens = count_text(found.variants[0].tokens)
    parts = [
        text,
        f"Mean ± standard deviation over {seeds}; {tokens} tokens in a run of `{found.baseline}`. Difference to it: "
        "mean of pairs of equal seeds ± half of the 95 % interval. Bytes of a node, snapshots apart; syncs are whole "
        "models that a node sent; a run's seconds are of one core.",
        f"`{found.command}`",
        f"{found.machine}; commit {found.commit or 'unknown'}.",
    ]
    if found.tuned:
        parts.append("\n".join(f"* {line}" for line in tuning_lines(found.tuned)))
    return "\n\n".join(parts) + "\n"


def _cells(variant: Comparison, number: int, verdict: str) -> list[str]:
    spread = "" if variant.spread is None else f" ± {variant.spread:.4f}"
    alone = variant.nodes == 1
    return [
        f"{variant.mean_loss:.4f}{spread}",
        "baseline" if number == 0 else difference_text(variant),
        verdict,
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
