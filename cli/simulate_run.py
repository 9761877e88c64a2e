"""`farloop simulate run`: its words, its table and its JSON. The simulator is `farloop.sim.flow`."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farloop.cli.exit_codes import CommandError, ended_in_one_line
from farloop.monitoring.units import NOTHING, count_text, duration_text, percent_text, plural, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from farloop.sim.flow_scenario import Case, FlowScenario
    from farloop.sim.flow_table import Row


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO.toml", show_default=False, help="What is played.")
    ] = None,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", show_default=False, help="Play one that comes with farloop.")
    ] = None,
    list_examples: Annotated[bool, typer.Option("--list", help="Name those.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the example's file, to begin one's own with.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, show_default="the scenario's", help="Of everything that is left to chance.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, show_default="the scenario's", help="Seeds that results are means of.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw it: .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")] = False,
) -> None:
    """Play nodes, links and failures on virtual time, and say where the machine-seconds went.

    Goodput is the share of all machine-seconds that ended in a merged delta (of
    data parallel: in a step that was kept). The rest was idle (waiting, joining),
    down (broken, or brought back) or lost (computed, and never merged).

    Sizes and durations only: no loss curve comes out, and a second takes
    thousands of nodes a good step ahead. The same scenario and seed give the
    same numbers.

    Example: farloop simulate run --example failures --plot failures.svg
    """
    with ended_in_one_line():
        from farloop.sim.flow import Stuck
        from farloop.sim.flow_table import run_all

        if list_examples:
            return _list()
        if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
            raise CommandError(f"--plot is a file named .svg, .png or .pdf, not {str(plot)!r}")
        scenario = _scenario(file, example, seed, repeats)
        if show:
            return typer.echo(_example_text(example))
        timeline = plot is not None and scenario.sweep is None
        try:
            with _watched(scenario, quiet=as_json) as watch:
                rows = run_all(scenario, timeline=timeline, watch=watch)
        except Stuck as error:
            raise CommandError(f"{scenario.name} stands still for good: {error}") from error
        if plot is not None:
            from farloop.cli.flow_figure import draw

            draw(plot, scenario, rows)
        if as_json:
            typer.echo(json.dumps(report_json(scenario, rows), indent=1))
        else:
            _show(scenario, rows, plot)


def _scenario(file: Path | None, example: str | None, seed: int | None, repeats: int | None) -> "FlowScenario":
    from farloop.cli.scenario_file import example_names, load_example, load_scenario

    if (file is None) == (example is None):
        raise CommandError(f"either a SCENARIO.toml or --example is wanted, of {', '.join(example_names())}")
    scenario = load_scenario(file) if file else load_example(example or "")
    changes: dict[str, Any] = {"seed": seed, "repeats": repeats}
    return replace(scenario, **{name: value for name, value in changes.items() if value is not None})


def _example_text(example: str | None) -> str:
    from farloop.cli.scenario_file import example_text

    if example is None:
        raise CommandError("--show goes with --example: it prints that file")
    return example_text(example)


def _list() -> None:
    from farloop.cli.scenario_file import example_names, load_example

    names = example_names()
    for name in names:
        typer.echo(f"{name:<{max(map(len, names))}}  {load_example(name).about}")


@contextmanager
def _watched(scenario: "FlowScenario", *, quiet: bool) -> "Iterator[Callable[[Case], None]]":
    """A bar over the cases, on standard error, while they are played."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from farloop.sim.flow_scenario import cases

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(scenario.name, total=len(cases(scenario)))
        begun = False

        def watch(case: "Case") -> None:
            nonlocal begun
            bar.update(task, advance=begun, description=case.variant + (f" {case.value:g}" if case.value else ""))
            begun = True

        yield watch


# --- what is shown


def report_json(scenario: "FlowScenario", rows: "Sequence[Row]") -> dict[str, Any]:
    """For programs."""
    return {
        "name": scenario.name,
        "about": scenario.about,
        "seed": scenario.seed,
        "repeats": scenario.repeats,
        "steps": scenario.steps,
        "hours": scenario.hours,
        "swept": scenario.sweep.key if scenario.sweep else None,
        "rows": [row.figures() for row in rows],
    }


def _show(scenario: "FlowScenario", rows: "Sequence[Row]", plot: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"\n {scenario.name}: {scenario.about}\n" if scenario.about else f"\n {scenario.name}\n")
    console.print(shares_table(scenario, rows))
    console.print(work_table(scenario, rows))
    seeds = plural(scenario.repeats, "seed")
    console.print(f" Means over {seeds} from {scenario.seed}; shares are of all machine-seconds.", style="dim")
    if scenario.steps and any(row.time_to_steps_s is None for row in rows):
        console.print(f" * ended before its {scenario.steps:,} inner steps", style="dim")
    if plot is not None:
        console.print(f" figure  {plot}", soft_wrap=True)


def shares_table(scenario: "FlowScenario", rows: "Sequence[Row]") -> "Table":
    """A row per variant and swept value: where its machine-seconds went."""
    published = any(row.published is not None for row in rows)
    titles = ["goodput", *(["published"] if published else []), "idle", "down", "lost", "stale"]
    cells = []
    for row in rows:
        figures = row.figures()
        beside = [NOTHING if row.published is None else percent_text(row.published)] if published else []
        shares = [percent_text(figures[f"{what}_share"]) for what in ("idle", "down", "lost", "stale")]
        cells.append([percent_text(figures["goodput"]), *beside, *shares])
    return _table(scenario, rows, titles, cells)


def work_table(scenario: "FlowScenario", rows: "Sequence[Row]") -> "Table":
    """A row per variant and swept value: what was done, lost and sent, by all nodes together."""
    titles = ["rounds", *(["in"] if scenario.steps else []), "lost steps", "up", "down", "state"]
    cells = []
    for row in rows:
        figures = row.figures()
        late = "" if figures["time_to_steps_s"] is not None else " *"
        cells.append(
            [
                count_text(figures["outer_steps"]),
                *([duration_text(figures["seconds"]) + late] if scenario.steps else []),
                count_text(figures["lost_steps"]),
                *(size_text(figures[f"bytes_{way}"]) for way in ("up", "down", "state")),
            ]
        )
    return _table(scenario, rows, titles, cells)


def _table(
    scenario: "FlowScenario", rows: "Sequence[Row]", titles: Sequence[str], cells: Sequence[Sequence[str]]
) -> "Table":
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=(0, 1))
    if scenario.sweep:
        found.add_column(scenario.sweep.key, justify="right", no_wrap=True)
    found.add_column("", overflow="fold", min_width=min(12, max(len(row.variant) for row in rows)))
    for title in titles:
        found.add_column(title, justify="right", no_wrap=True)
    before: float | None = None
    for row, line in zip(rows, cells, strict=True):
        begins = row.value != before
        if begins and before is not None:
            found.add_section()
        value = [f"{row.value:,.12g}" if begins else ""] if scenario.sweep and row.value is not None else []
        found.add_row(*value, row.variant, *line)
        before = row.value
    return found
