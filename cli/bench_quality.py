"""`farloop bench quality`, carried out: plan, train, compare, draw and write down."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from farloop.bench.comparison import Report, compare, report
from farloop.bench.quality import CPU, Tuned, plan_of, run_all, tune
from farloop.bench.quality_spec import Grid, command_of, picked_of, plan_grid, plan_quality, run_settings
from farloop.bench.quality_tables import markdown, table, tuning_lines, watched
from farloop.bench.training import CURVE_SEQUENCES
from farloop.cli.run_results import machine, source_commit
from farloop.config.run_spec import DataConfig
from farloop.monitoring.units import count_text
from farloop.plots.quality import plot_methods
from farloop.plots.style import plot

if TYPE_CHECKING:
    from rich.console import Console

WITHIN_OF_GRID, WITHIN_OF_PAIRS = 1.0, 0.5
"""%; largest difference that is called none, where nothing else is said."""

_WIDE = 140
"""Columns that the table takes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where it happens."""

    data: DataConfig
    out: Path
    device: str
    jobs: int
    console: "Console"
    within: float | None

    def pairs(self, spelled: Sequence[str], given: Mapping[str, Any], settings: Sequence[str]) -> Report:
        """Variants beside the first one, each with a batch of its own; `given` is what `_PAIRS` of `bench.py` has.

        Raises:
            CommandError: a word or a setting cannot be used.
            RunFailed: a run broke.
        """
        words = [f"{name}={value}" for name, value in given.items() if name != "seeds"]
        base = run_settings([*words, *settings], origin="--set")
        plan = plan_quality(spelled, base, seeds=given["seeds"], data=self.data, out=self.out, device=self.device)
        with watched(plan, self.console) as watch:
            results = run_all(plan, jobs=self.jobs, watch=watch)
        found = report(
            plan,
            compare(results),
            within_percent=WITHIN_OF_PAIRS if self.within is None else self.within,
            command=shlex.join(["farloop", *sys.argv[1:]]),
            machine=machine(),
            commit=source_commit(),
        )
        caption = f"{given['model']}, {given['nodes']} nodes, {given['steps']} steps, H {given['h']}"
        caption += "".join(f", {word}" for word in settings)
        for path in self._figures():
            plot(path, found.variants, results, within_percent=found.within_percent, caption=caption)
        self._write(found)
        return found

    def grid(self, grid: Grid) -> Report:
        """Methods beside data parallel at equal tokens, after their searches. Raises as `pairs`."""
        where: dict[str, Any] = {"data": self.data, "out": self.out, "device": self.device}
        planned = plan_grid(grid, **where)
        plan, tuned = planned.plan, tuple[Tuned, ...]()
        if (searches := plan_of(planned.trials, plan)) is not None:
            self.console.print(f"[dim]tuning: {len(searches.runs)} runs before the {len(plan.runs)} that count[/]")
            with watched(searches, self.console) as watch:
                tuned = tune(searches, planned.trials, jobs=self.jobs, watch=watch)
            plan = plan_grid(grid, **where, picked=picked_of(tuned)).plan
        with watched(plan, self.console) as watch:
            results = run_all(plan, jobs=self.jobs, watch=watch)
        layout = plan.variants[0].specs[0].identity.layout
        found = report(
            plan,
            compare(results, parameters=layout.num_parameters),
            tuned=tuned,
            within_percent=WITHIN_OF_GRID if self.within is None else self.within,
            command=command_of(grid, options=self._options()),
            machine=machine(),
            commit=source_commit(),
        )
        seeds = "1 seed" if grid.seeds == 1 else f"mean ± standard deviation of {grid.seeds} seeds"
        title = f"{len(results)} ways to train {count_text(layout.num_parameters)} parameters on equal tokens"
        caption = f"{grid.steps} steps of {grid.global_batch} sequences; {seeds}"
        caption += f"; curves on {CURVE_SEQUENCES} sequences, the table on all"
        caption += f"; commit {found.commit}" if found.commit else ""
        for path in self._figures():
            plot_methods(path, results, title=title, caption=caption)
        self._write(found)
        return found

    def show(self, found: Report, *, as_json: bool) -> None:
        """On standard output."""
        if as_json:
            typer.echo((self.out / "quality.json").read_text())
            return
        # Not cut where nobody's terminal sets the width.
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, _WIDE)
        self.console.print(table(found))
        for line in tuning_lines(found.tuned):
            self.console.print(line, markup=False, soft_wrap=True)
        self.console.print(f"figure   {self.out / 'quality.svg'}\nfigures  {self.out / 'quality.json'}", soft_wrap=True)
        self.console.print(f"again    {found.command}", markup=False, soft_wrap=True)

    def _options(self) -> list[str]:
        data = DataConfig()
        words = ["--data", str(self.data.path)] if self.data.path else []
        words += ["--data-bytes", str(self.data.max_bytes)] if self.data.max_bytes != data.max_bytes else []
        return words + (["--device", self.device] if self.device != CPU else [])

    def _figures(self) -> tuple[Path, Path]:
        return self.out / "quality.svg", self.out / "quality.png"

    def _write(self, found: Report) -> None:
        (self.out / "quality.json").write_text(json.dumps(dataclasses.asdict(found), indent=1))
        (self.out / "quality.md").write_text(markdown(found))
