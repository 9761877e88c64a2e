"""`farloop lab schedule`: the rounds of a run before it starts, as a table, as JSON or as a figure.

The rounds come from the function that the coordinator plans with. The model is not read: `farloop config check` says
whether rounds are long enough for its fragments.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farloop.cli.options import AsJson, Plot, SetFlags, check_figure, table
from farloop.config.exit_codes import CommandError
from farloop.monitoring.status import dumps

if TYPE_CHECKING:
    from rich.table import Table

    from farloop.algo.spec import RoundPlan
    from farloop.algo.terms import Terms
    from farloop.config.run_config import RunConfig

ROWS = 16  # most rows of the table; of more rounds, evenly spaced ones are shown
MOST_ROUNDS = 1_000_000  # all of them are in memory at once
_BAR = 24  # characters of the longest bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The rounds of a run, and η at the first step of each."""

    terms: "Terms"
    rounds: "tuple[RoundPlan, ...]"
    learning_rates: tuple[float, ...]

    @property
    def comm_percent(self) -> float:
        """Syncs in a hundred inner steps: the traffic beside that of a sync at every step."""
        return 100 * len(self.rounds) / self.terms.schedule.steps

    @property
    def longest_round(self) -> int:
        """Inner steps of it: as many are lost with a node that dies at its end."""
        return max(plan.length for plan in self.rounds)

    def plain(self) -> dict[str, Any]:
        """As `--json` gives it; `rounds` are lengths, in order."""
        terms = self.terms
        return {
            "steps": terms.schedule.steps,
            "syncs": len(self.rounds),
            "comm_percent": self.comm_percent,
            "longest_round": self.longest_round,
            "rounds": [plan.length for plan in self.rounds],
            "starts": [plan.start for plan in self.rounds],
            "learning_rates": list(self.learning_rates),
            "schedule": terms.schedule.lr.shape,
            "rule": terms.schedule.h_rule,
            "alpha": terms.schedule.h_alpha or None,
            "h_base": terms.schedule.h,
            "h_init": terms.schedule.h_init,
            "h_max": terms.schedule.h_max,
        }


def schedule(
    file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", show_default=False, help="The run; --set overrides it.")
    ] = None,
    flags: SetFlags = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Show the rounds of a run before it starts: H over time, number of syncs, share of steps with a sync.

    H(s) = max(h, ⌊(h_alpha/η)^power⌋), with η at the first step of round s (QSR:
    arXiv 2310.14423). A re-warm (--set run.rewarms=600:1e-3) starts a new, short
    round.

    Example: farloop lab schedule --set run.steps=2000 --set run.h_rule=qsr --set run.h_alpha=0.011
    """
    check_figure(plot)
    shown, notes = preview(config_of(file, flags or []))
    if plot is not None:
        from farloop.plots.simulation import draw_schedule

        draw_schedule(plot, shown.terms, shown.rounds)
    if as_json:
        typer.echo(dumps(shown.plain(), indent=1))
    else:
        _show(shown, notes, plot)


def config_of(file: Path | None, flags: Iterable[str]) -> "RunConfig":
    """The table `[run]` of a file, or one of defaults, with `run.key=value` on top. Raises CommandError."""
    from farloop.config.run_config import RunConfig
    from farloop.config.settings import load_run, run_settings
    from farloop.config.sources import read_flags

    if file is not None:
        return load_run(file, flags=flags, environ=os.environ).run
    words = [flag.removeprefix("run.") for flag in flags]
    settings = run_settings(words, origin="--set")
    read_flags([f"run.{word}" for word in words], ["run"])  # refuses a key that is set twice
    return RunConfig(**{"method": "diloco", **settings})


def preview(config: "RunConfig") -> tuple[Preview, list[str]]:
    """The rounds that the coordinator will plan, and what else a person should know of. Raises CommandError."""
    from farloop.algo.methods import method_named
    from farloop.algo.schedule import first_rounds, initial_h, learning_rate
    from farloop.algo.spec import Fragment, Layout
    from farloop.algo.validation import check
    from farloop.config.run_config import terms_of
    from farloop.config.settings import in_keys

    if config.bytes_goal is not None:
        raise CommandError("bytes_goal: h follows from the model; `farloop config check RUN.toml` shows it: give run.h")
    one_slot = Layout(slots=1, fragments=(Fragment(index=0, slot=0, numel=256, tensors=()),))
    try:
        terms, notes = terms_of(config, method_named(config.method))
        check(terms, one_slot)
    except ValueError as error:
        raise CommandError(in_keys(str(error))) from error
    least = min(terms.schedule.h, initial_h(terms))
    if (rounds_at_most := terms.schedule.steps // least) > MOST_ROUNDS:
        raise CommandError(
            f"steps = {terms.schedule.steps} with rounds of {least} can have {rounds_at_most:,} rounds; "
            f"the most is {MOST_ROUNDS:,}"
        )
    rounds = first_rounds(terms, terms.schedule.steps)
    rates = tuple(learning_rate(terms, plan.start) for plan in rounds)
    return Preview(terms=terms, rounds=rounds, learning_rates=rates), [*notes, *_correction(terms, rounds)]


def _correction(terms: "Terms", rounds: "tuple[RoundPlan, ...]") -> list[str]:
    """How far the outer step is corrected, where it is."""
    from farloop.algo.outer_settings import is_corrected
    from farloop.algo.schedule import work_ratio

    if not is_corrected(terms):
        return []
    work = [work_ratio(terms, plan.start, plan.start + plan.length) for plan in rounds]
    return [
        f"outer lr {terms.outer.lr:g} and momentum {terms.outer.momentum:g} are corrected for the work of a round, "
        f"worth {min(work):.2g} to {max(work):.2g} of one with {terms.schedule.h} steps"
    ]


def _show(shown: Preview, notes: Iterable[str], plot: Path | None) -> None:
    from rich.console import Console

    from farloop.monitoring.units import plural

    console, terms = Console(highlight=False), shown.terms
    console.print(_table(shown))
    constant = -(-terms.schedule.steps // terms.schedule.h)
    against = "" if terms.schedule.h_rule == "constant" else f", {constant:,} with H = {terms.schedule.h} throughout"
    longest = 100 * shown.longest_round / terms.schedule.steps
    lines: Mapping[str, str] = {
        "syncs": f"{len(shown.rounds):,} in {plural(terms.schedule.steps, 'step')}{against}",
        "comm": f"{shown.comm_percent:.3g} % of the steps",
        "longest": f"{plural(shown.longest_round, 'step')}, {longest:.3g} % of the run",
    }
    for label, value in [*lines.items(), *(("note", note) for note in notes)]:
        console.print(f"{label:<8} {value}", markup=False, soft_wrap=True)
    if plot is not None:
        console.print(f"{'figure':<8} {plot}", markup=False, soft_wrap=True)


def _table(shown: Preview) -> "Table":
    """A row per round, or `ROWS` of them at even distances in time."""
    rows = table("round", "from step", "learning rate", "H", "", left=("",))
    for index in _chosen(shown.rounds):
        plan = shown.rounds[index]
        bar = "█" * max(1, round(_BAR * plan.length / shown.longest_round))
        rows.add_row(
            f"{index:,}", f"{plan.start:,}", f"{shown.learning_rates[index]:.3g}", f"{plan.length:,}", f"[cyan]{bar}[/]"
        )
    return rows


def _chosen(rounds: "tuple[RoundPlan, ...]") -> list[int]:
    if len(rounds) <= ROWS:
        return list(range(len(rounds)))
    starts = [plan.start for plan in rounds]
    return sorted({bisect_right(starts, row * starts[-1] / (ROWS - 1)) - 1 for row in range(ROWS)})
