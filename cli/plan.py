"""`farloop plan`: its words, what it prints, and its JSON. How to plan, `farloop.coordinator.routing` knows."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farloop.config.exit_codes import CommandError, ended_in_one_line
from farloop.monitoring.units import NOTHING, percent_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from farloop.coordinator.routing.inventory import Inventory
    from farloop.coordinator.routing.plan import Plan

_MOST_ROWS = 24
"""Paths that are printed; JSON has all."""

PLOTS = (".svg", ".png", ".pdf")


def plan(
    inventory: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Nodes, links and model: .toml or .json."),
    ] = None,
    live: Annotated[
        str, typer.Option(metavar="URL", show_default=False, help="Nodes and links as this coordinator sees them.")
    ] = "",
    stages: Annotated[int | None, typer.Option(show_default="the file's", help="Into which the model is cut.")] = None,
    skip: Annotated[
        float | None, typer.Option(show_default="the file's", help="Share of them that a microbatch leaves out.")
    ] = None,
    h: Annotated[
        int | None, typer.Option("--h", show_default="the file's", help="Inner steps between two syncs.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            show_default="the cheapest",
            help="A: fragments cross between islands. B: activations do. C: paths that may skip stages.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(show_default="the file's", help="Of the searches.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw it: .svg, .png or .pdf.")
    ] = None,
    layout: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Write the layout file that [pipeline] layout reads."),
    ] = None,
    epoch: Annotated[
        int | None, typer.Option(show_default="one more than the file has", help="Of the layout that is written.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write it over a layout that is nearly as good, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")] = False,
) -> None:
    """Plan who trains what with whom: islands, stages, paths, bits and H, and what all of it takes.

    Nodes that are close and have the same kind of network card form islands. Either
    pipelines stay inside islands and fragments cross between them, or the pipeline
    does, or microbatches take paths that skip some stages: whatever is predicted to
    be faster, with what lost and by how much. The same inventory gives the same plan.

    With --live the nodes and links are a running coordinator's; what the file does not
    say of parameters, H and bits is its run's, and the line that puts the plan's bits
    and H in place stands at the end. docs/routing.md explains the file and the plan.

    With --layout the plan is written as the nodes of a pipeline read it, and the lines
    that RUN.toml needs are shown. Where the file is there already, nodes keep their
    stages, and only the paths are new: a running pipeline goes over to them. What its
    present paths take is shown, and they stay where less than 10 % of a step is gained;
    --force or --epoch write the plan all the same.

    Example: farloop plan --inventory examples/plans/twelve-sites.toml --plot plan.svg
    """
    with ended_in_one_line():
        from farloop.cli import plan_layout
        from farloop.cli.inventory_file import away, live_inventory, load_inventory
        from farloop.coordinator.routing.plan import make_plan

        if plot is not None and plot.suffix not in PLOTS:
            raise CommandError(f"--plot is a file named {', '.join(PLOTS[:-1])} or {PLOTS[-1]}, not {str(plot)!r}")
        if layout is None and (epoch is not None or force):
            raise CommandError(f"--{'force' if epoch is None else 'epoch'} goes with --layout FILE, which is written")
        now = plan_layout.present(layout) if layout is not None else None
        status: Mapping[str, Any] | None = None
        overrides = {"stages": stages, "skip": skip, "h": h, "mode": mode, "seed": seed}
        if live:
            from farloop.cli.status import fetch

            status = fetch(live)
            given = live_inventory(status, inventory, overrides)
        elif inventory is not None:
            given = load_inventory(inventory, overrides)
        else:
            raise CommandError(
                "--inventory FILE or --live URL is wanted; examples/plans/twelve-sites.toml is one to begin with"
            )
        if layout is not None and now is not None:
            given = plan_layout.kept(given, layout, now)
        began = time.perf_counter()
        try:
            made = make_plan(given)
        except ValueError as error:
            raise CommandError(f"{inventory or live}: {error}") from error
        plan_s = time.perf_counter() - began
        words, why_not = _words(status, given, made)
        gone = away(status) if status is not None else frozenset()
        laid = None
        if layout is not None:
            where = str(inventory or live)
            laid = plan_layout.write(layout, given, made, now=now, epoch=epoch, where=where, force=force, away=gone)
        if plot is not None:
            from farloop.plots.planner import draw

            draw(plot, given, made)
        if as_json:
            found = {**plan_json(given, made, plan_s), "set": words, "away": sorted(gone)}
            if laid is not None:
                found |= laid.json()
            typer.echo(json.dumps(found, indent=1))
        else:
            from rich.console import Console

            show(Console(highlight=False), given, made, plan_s)
            if gone:
                typer.echo(f" away, planned without: {', '.join(sorted(gone))}")
            if plot is not None:
                typer.echo(f" figure  {plot}")
            for text in laid.lines() if laid is not None else ():
                typer.echo(text)
            if words:
                typer.echo(f"\nTo put these rates in place, beside the coordinator's state folder:\n\n{_line(words)}\n")
            elif why_not:
                typer.echo(f" not put in place: {why_not}")


def _line(words: "Mapping[str, str]") -> str:
    return " ".join(["farloop set", *(f"{key}={value}" for key, value in words.items())])


def _words(status: "Mapping[str, Any] | None", inventory: "Inventory", plan: "Plan") -> tuple[dict[str, str], str]:
    """What a running coordinator would be given, and why it cannot be."""
    from farloop.coordinator.routing.sync_plan import NotInPlace, settings

    if status is None or plan.sync is None:
        return {}, ""
    try:
        return settings(status["run"], plan.sync.rates, inventory.wish.h), ""
    except NotInPlace as error:
        return {}, str(error)


def plan_json(inventory: "Inventory", plan: "Plan", plan_s: float) -> dict[str, Any]:
    """For programs. Seconds are predicted, but for `plan_s`, which this plan took to make."""
    sync = plan.sync
    return {
        "name": inventory.name,
        "mode": plan.mode.value,
        "why": plan.why,
        "seed": plan.seed,
        "plan_s": round(plan_s, 4),
        "makespan_s": plan.makespan_s,
        "bound_s": plan.bound_s,
        "islands": [list(island) for island in plan.islands],
        "groups": [
            {"stage": group.stage, "nodes": list(group.nodes), "transport": group.transport.value}
            for group in plan.groups
        ],
        "stages": [
            {"stage": number, "layers": [stage.first, stage.stop], "nodes": list(stage.replicas)}
            for number, stage in enumerate(plan.layout.stages)
        ],
        "paths": [
            {
                "source": path.source,
                "nodes": [hop.node for hop in path.hops],
                "stages": [hop.stage for hop in path.hops],
                "step_s": dict(plan.source_s)[path.source],
            }
            for path in plan.layout.paths
        ],
        "h": plan.h,
        "h_star": None if plan.h_star is None or math.isinf(plan.h_star) else plan.h_star,
        "step_s": plan.step_s,
        "compute_s": plan.compute_s,
        "sync_s": plan.sync_s,
        "round_s": plan.round_s,
        "streamed_round_s": plan.streamed_round_s,
        "compute_share": plan.compute_share,
        "busy_share": plan.busy_share,
        "rates": {} if sync is None else {n: {"bits": rate.bits, "h": rate.h} for n, rate in sync.rates.items()},
        "roots": [] if sync is None else list(sync.roots),
        "relays": [] if sync is None else list(sync.relays),
        "topologies": []
        if sync is None
        else [
            {"name": one.name, "up_s": one.up_s, "down_s": one.down_s, "round_s": one.round_s}
            for one in sync.topologies
        ],
        "alternatives": [
            {"name": one.name, "of": one.of, "seconds": one.seconds, "chosen_s": one.chosen_s, "factor": one.factor}
            for one in plan.alternatives
        ],
        "suspects": [list(ends) for ends in plan.suspects],
        "standby": list(plan.standby),
        "idle": list(plan.idle),
        "notes": list(plan.notes),
    }


# --- for people


def show(console: "Console", inventory: "Inventory", plan: "Plan", plan_s: float) -> None:
    """The plan as text."""
    console.print(f"\n [bold]{inventory.name or 'plan'}[/]  mode {plan.mode.value}: {plan.why}", soft_wrap=True)
    console.print(
        f" {len(inventory.nodes)} nodes, {len(plan.islands)} islands, {len(plan.layout.stages)} stages, "
        f"{len(plan.layout.paths)} paths; planned in {plan_s:.2f} s",
        style="dim",
    )
    console.print(_numbers(plan))
    if len(plan.layout.stages) > 1:
        console.print(_stages(plan))
        console.print(_paths(plan))
        if (more := len(plan.layout.paths) - _MOST_ROWS) > 0:
            console.print(f" … and {more} more: --json has them all\n", style="dim")
    if plan.sync is not None:
        console.print(_rates(plan))
    if plan.alternatives:
        console.print(_lost(plan))
    if plan.suspects:
        ends = ", ".join(f"{source} → {target}" for source, target in plan.suspects[:6])
        more_words = f" and {len(plan.suspects) - 6} more" if len(plan.suspects) > 6 else ""
        console.print(f" not believed, left out until probed again: {ends}{more_words}", soft_wrap=True)
    for words, names in (("standing by", plan.standby), ("without a part", plan.idle)):
        if names:
            console.print(f" {words}: {', '.join(names)}", soft_wrap=True)
    for note in plan.notes:
        console.print(f" {note}", style="dim", soft_wrap=True)


def _or_nothing(value: float | None, text: Callable[[float], str]) -> str:
    return NOTHING if value is None else text(value)


def _numbers(plan: "Plan") -> "Table":
    table = _table()
    for column in ("a step", f"H = {plan.h} steps", "a sync", "a round", "compute share", "… streamed", "H*"):
        table.add_column(column, justify="right", no_wrap=True)
    star = "–" if plan.h_star is None else "∞" if math.isinf(plan.h_star) else f"{plan.h_star:.3g}"
    table.add_row(
        seconds_text(plan.step_s),
        seconds_text(plan.compute_s),
        _or_nothing(plan.sync_s, seconds_text),
        _or_nothing(plan.round_s, seconds_text),
        _or_nothing(plan.compute_share, percent_text),
        _or_nothing(plan.streamed_compute_share, percent_text),
        star,
    )
    return table


def _stages(plan: "Plan") -> "Table":
    table = _table()
    for column in ("stage", "layers", "group speaks", "replicas"):
        table.add_column(column, justify="right" if column == "stage" else "left", no_wrap=column != "replicas")
    for group, stage in zip(plan.groups, plan.layout.stages, strict=True):
        words = list(stage.replicas[:12])
        names = ", ".join(words) + (f", … {len(stage.replicas) - 12} more" if len(stage.replicas) > 12 else "")
        table.add_row(str(group.stage), f"{stage.first}–{stage.stop - 1}", group.transport.value, names)
    return table


def _paths(plan: "Plan") -> "Table":
    table = _table()
    table.add_column("a step", justify="right", no_wrap=True)
    table.add_column("path (stage at node)")
    seconds = dict(plan.source_s)
    for path in sorted(plan.layout.paths, key=lambda path: -seconds[path.source])[:_MOST_ROWS]:
        way = " → ".join(f"[dim]{hop.stage}[/] {hop.node}" for hop in path.hops)
        table.add_row(seconds_text(seconds[path.source]), way)
    return table


def _rates(plan: "Plan") -> "Table":
    assert plan.sync is not None
    table = _table()
    for column in ("bits", "H", "nodes"):
        table.add_column(column, justify="left" if column == "nodes" else "right", no_wrap=column != "nodes")
    alike: dict[tuple[int, int], list[str]] = {}
    for name, rate in plan.sync.rates.items():
        alike.setdefault((rate.bits, rate.h), []).append(name)
    for (bits, h), names in sorted(alike.items(), reverse=True):
        words = ", ".join(names[:8]) + (f", … {len(names) - 8} more" if len(names) > 8 else "")
        table.add_row(str(bits), str(h), words)
    return table


def _lost(plan: "Plan") -> "Table":
    table = _table()
    for column in ("instead", "seconds", "×", "of"):
        table.add_column(column, justify="right" if column in ("seconds", "×") else "left", no_wrap=True)
    for one in plan.alternatives:
        table.add_row(one.name, seconds_text(one.seconds), f"{one.factor:.2f}", one.of)
    return table


def _table() -> "Table":
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=(0, 1))
