"""`farloop bench routing`: its words, what it prints, and where its findings go."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farloop.cli.exit_codes import CommandError, ended_in_one_line

if TYPE_CHECKING:
    from rich.console import Console

    from farloop.bench.routing import Findings
    from farloop.bench.routing_processes import Processes


def routing(
    nodes: Annotated[str, typer.Option(metavar="LIST", help="Sizes of plans that are timed.")] = "20,64,256,512",
    out: Annotated[Path, typer.Option(metavar="DIR", help="routing.json, .svg and .png.")] = Path("out/routing"),
    run_processes: Annotated[
        bool, typer.Option("--processes", help="Run pipelines of real processes as well: some minutes more.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")] = False,
) -> None:
    """Measure the planner: what it chooses, how long that takes, and what it is worth in simulations.

    Seconds of planning are measured here. All others are predicted, or come out of
    simulations of microbatches on their paths and of transfers that share links.

    With --processes the paths of one plan are run too, by eight processes with emulated
    distances: steps are measured beside their prediction, and losses beside those of one
    process. Steps are true where the machine has nothing else to do.

    Example: farloop bench routing --nodes 20,256
    """
    with ended_in_one_line():
        from farloop.bench import routing as bench
        from farloop.bench.routing_figure import plot
        from farloop.cli.outcome import source_commit
        from farloop.cli.progress import progress_console

        sizes = _sizes(nodes)
        console = progress_console(json=as_json)
        rows, star = bench.modes()
        timed = []
        for row in bench.planning(sizes):
            console.print(f" {row.nodes} nodes planned in {row.plan_s:.2f} s", style="dim")
            timed.append(row)
        findings = bench.Findings(
            modes=rows,
            h_star=star,
            small=bench.small_paths(),
            planning=tuple(timed),
            relaying=bench.relaying(),
            slow_link=bench.slow_link(),
        )
        found = {"commit": source_commit(), **dataclasses.asdict(findings), "recovered": findings.recovered}
        made = _processes(console) if run_processes else None
        if made is not None:
            found["processes"] = {**dataclasses.asdict(made), "parity": made.learning.parity}
        out.mkdir(parents=True, exist_ok=True)
        (out / "routing.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        what = "Planning measured, all other seconds predicted or simulated."
        if made is not None:
            what = "Planning, and steps and losses of processes, measured; all other seconds predicted or simulated."
        caption = f"farloop bench routing, commit {found['commit']}. {what}"
        for kind in (".svg", ".png"):
            plot(out / f"routing{kind}", findings, caption, made)
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        else:
            for line in [*lines(findings), *(_measured(made) if made is not None else ())]:
                typer.echo(line)
            typer.echo(f" {out}/routing.json, .svg and .png")


def _processes(console: "Console") -> "Processes":
    from farloop.bench.routing_processes import processes

    console.print(
        " pipelines of four and eight processes; a step takes their time only on a machine at rest", style="dim"
    )
    return processes(lambda line: console.print(f" {line}", style="dim", soft_wrap=True))


def _measured(made: "Processes") -> list[str]:
    return [f" steps     {step.line}" for step in made.steps] + [f" learning  {line}" for line in made.learning.lines]


def lines(findings: "Findings") -> list[str]:
    """What was found, a sentence each."""
    small, relays, slow = findings.small, findings.relaying, findings.slow_link
    chosen = ", ".join(f"{row.chosen} at H = {row.h}" for row in findings.modes)
    text = [
        f" modes     {chosen}; H* = {findings.h_star:.2f}",
        f" paths     {', '.join('-'.join(path) for path in small.paths)}: {small.step_ms:.1f} ms; "
        f"full pipelines {small.full_ms:.1f}, random {small.random_ms:.1f}",
    ]
    text += [
        f" planning  {row.nodes} nodes in {row.plan_s:.2f} s ({row.cpu_s:.2f} s of CPU, {row.peak_mb:.0f} MB), "
        f"step {row.step_s:.1f} s, random {row.random_s:.1f} s, again {'the same' if row.same_again else 'ANOTHER'}"
        for row in findings.planning
    ]
    text.append(
        f" relays    star {relays.star_simulated_s:.2f} s ({relays.star_s:.2f} predicted), "
        f"relays {relays.relay_simulated_s:.2f} s ({relays.relay_s:.2f} predicted): "
        f"{relays.star_simulated_s / relays.relay_simulated_s:.1f} times"
    )
    text.append(
        f" slow link from round {slow.slow_from}, named in round {slow.found_at}: {slow.found}; "
        f"{slow.before} → {slow.after}, rounds {findings.recovered:.1f} times as fast as before the new plan; "
        f"paths {slow.path_old_s:.1f} → {slow.path_new_s:.1f} s"
    )
    return text


def _sizes(text: str) -> list[int]:
    words: list[Any] = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) >= 12 for word in words):
        raise CommandError(f"--nodes is a list of numbers of at least 12, as 20,256, not {text!r}")
    return [int(word) for word in words]
