"""`farloop plan`: options, text and JSON. The planner is `farloop.planner`."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farloop.cli.options import AsJson, Plot, check_figure, table
from farloop.config.exit_codes import CommandError
from farloop.monitoring.status import dumps
from farloop.monitoring.units import NOTHING, few_of, percent_text, plural, seconds_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from farloop.planner.inventory import Inventory
    from farloop.planner.plan import Plan

_MOST_ROWS = 24  # most paths in the text; JSON has all


def plan(
    inventory: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Nodes, links and model, as .toml or .json.")
    ] = None,
    live: Annotated[
        str, typer.Option(metavar="URL", show_default=False, help="Take nodes and links from this coordinator.")
    ] = "",
    stages: Annotated[int | None, typer.Option(min=1, show_default="the file's", help="Number of stages.")] = None,
    skip: Annotated[
        float | None, typer.Option(min=0, show_default="the file's", help="Share of stages that a microbatch skips.")
    ] = None,
    h: Annotated[
        int | None, typer.Option("--h", min=1, show_default="the file's", help="Inner steps between two syncs.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            show_default="the cheapest",
            help="A: fragments cross between islands. B: activations do. C: paths may skip stages.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(show_default="the file's", help="Seed of the search.")] = None,
    plot: Plot = None,
    layout: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Write the layout file of a pipeline."),
    ] = None,
    epoch: Annotated[
        int | None, typer.Option(show_default="that of the file + 1", help="Epoch of the written layout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write the layout even if it gains little.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run over unequal links: islands, stages, paths, bits and H, with predicted times.

    docs/routing.md explains the inventory and the plan.

    With --live, nodes and links come from a running coordinator, and what the file
    leaves out from its run; the output ends with the farloop run set command that
    applies the planned bits and H.

    With --layout, the plan is written as a layout file for pipeline nodes, and the
    lines for RUN.toml are shown. If the file exists, only paths change, and only if a
    tenth of a step is gained; --force or --epoch writes the plan anyway.

    Example: farloop plan --inventory examples/plans/twelve-sites.toml --plot plan.svg
    """
    from farloop.config.inventory_file import away, live_inventory, load_inventory

    check_figure(plot)
    if layout is None and (epoch is not None or force):
        raise CommandError(f"--{'force' if epoch is None else 'epoch'} goes with --layout FILE, which is written")
    status: Mapping[str, Any] | None = None
    overrides = {"stages": stages, "skip": skip, "h": h, "mode": mode, "seed": seed}
    if live:
        from farloop.cli.status import fetch

        status = fetch(live, "--live")
        given = live_inventory(status, inventory, overrides)
    elif inventory is not None:
        given = load_inventory(inventory, overrides)
    else:
        raise CommandError("give --inventory FILE or --live URL; examples/plans/twelve-sites.toml is one to begin with")
    from farloop.config import layout_file
    from farloop.planner.plan import make_plan

    now = layout_file.present(layout) if layout is not None else None
    if layout is not None and now is not None:
        given = layout_file.kept(given, layout, now)
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
        laid = layout_file.write(layout, given, made, now=now, epoch=epoch, where=where, force=force, away=gone)
    if plot is not None:
        from farloop.plots.plan import draw

        draw(plot, given, made)
    if as_json:
        found = {**plan_json(given, made, plan_s), "set": words, "away": sorted(gone)}
        if laid is not None:
            found |= laid.json()
        typer.echo(dumps(found, indent=1))
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
            line = " ".join(["farloop run set", *(f"{key}={value}" for key, value in words.items())])
            typer.echo(f"\nTo apply these rates, next to the coordinator's state folder:\n\n{line}\n")
        elif why_not:
            typer.echo(f" not put in place: {why_not}")


def _words(status: "Mapping[str, Any] | None", inventory: "Inventory", plan: "Plan") -> tuple[dict[str, str], str]:
    """The settings for a running coordinator, or why there are none."""
    from farloop.planner.sync_plan import NotInPlace, settings

    if status is None or plan.sync is None:
        return {}, ""
    try:
        return settings(status["run"], plan.sync.rates, inventory.wish.h), ""
    except NotInPlace as error:
        return {}, str(error)


def plan_json(inventory: "Inventory", plan: "Plan", plan_s: float) -> dict[str, Any]:
    """The plan as JSON. Seconds are predicted, except `plan_s`, the time of planning."""
    sync = plan.sync
    return {
        "name": inventory.name,
        "mode": plan.mode.value,
        "why": plan.why,
        "seed": plan.seed,
        "plan_s": round(plan_s, 4),
        "makespan_s": plan.step_s,
        "bound_s": plan.bound_s,
        "optimal": plan.optimal,
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
        **_fields(plan, "step_s compute_s sync_s round_s streamed_round_s compute_share"),
        "rates": {} if sync is None else {n: {"bits": rate.bits, "h": rate.h} for n, rate in sync.rates.items()},
        "syncs": [] if sync is None else [_fields(one, "name up_s down_s round_s") for one in sync.predicted],
        "alternatives": [_fields(one, "name of seconds chosen_s factor") for one in plan.alternatives],
        "suspects": [list(ends) for ends in plan.suspects],
        "standby": list(plan.standby),
        "idle": list(plan.idle),
        "notes": list(plan.notes),
    }


def _fields(owner: object, names: str) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names.split()}


def show(console: "Console", inventory: "Inventory", plan: "Plan", plan_s: float) -> None:
    console.print(f"\n [bold]{inventory.name or 'plan'}[/]  mode {plan.mode.value}: {plan.why}", soft_wrap=True)
    counts = {"node": inventory.nodes, "island": plan.islands, "stage": plan.layout.stages, "path": plan.layout.paths}
    told = ", ".join(plural(len(found), thing) for thing, found in counts.items())
    proven = ", proven the fastest" if plan.optimal else ""
    console.print(f" {told}{proven}; planned in {plan_s:.2f} s", style="dim")
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
        ends = few_of([f"{source} → {target}" for source, target in plan.suspects], 6)
        console.print(f" not believed, left out until probed again: {ends}", soft_wrap=True)
    for words, names in (("standing by", plan.standby), ("without a part", plan.idle)):
        if names:
            console.print(f" {words}: {', '.join(names)}", soft_wrap=True)
    for note in plan.notes:
        console.print(f" {note}", style="dim", soft_wrap=True)


def _or_nothing(value: float | None, text: Callable[[float], str]) -> str:
    return NOTHING if value is None else text(value)


def _numbers(plan: "Plan") -> "Table":
    rows = table("step", f"H = {plan.h} steps", "sync", "round", "compute share", "… streamed", "H*")
    star = "–" if plan.h_star is None else "∞" if math.isinf(plan.h_star) else f"{plan.h_star:.3g}"
    rows.add_row(
        seconds_text(plan.step_s),
        seconds_text(plan.compute_s),
        _or_nothing(plan.sync_s, seconds_text),
        _or_nothing(plan.round_s, seconds_text),
        _or_nothing(plan.compute_share, percent_text),
        _or_nothing(plan.streamed_compute_share, percent_text),
        star,
    )
    return rows


def _stages(plan: "Plan") -> "Table":
    rows = table("stage", "layers", "transport", "replicas", left=("layers", "transport"), fold=("replicas",))
    for group, stage in zip(plan.groups, plan.layout.stages, strict=True):
        names = few_of(stage.replicas, 12)
        rows.add_row(str(group.stage), f"{stage.first}–{stage.stop - 1}", group.transport.value, names)
    return rows


def _paths(plan: "Plan") -> "Table":
    rows = table("step", "path (stage at node)", fold=("path (stage at node)",))
    seconds = dict(plan.source_s)
    for path in sorted(plan.layout.paths, key=lambda path: -seconds[path.source])[:_MOST_ROWS]:
        way = " → ".join(f"[dim]{hop.stage}[/] {hop.node}" for hop in path.hops)
        rows.add_row(seconds_text(seconds[path.source]), way)
    return rows


def _rates(plan: "Plan") -> "Table":
    assert plan.sync is not None
    rows = table("bits", "H", "nodes", fold=("nodes",))
    alike: dict[tuple[int, int], list[str]] = {}
    for name, rate in plan.sync.rates.items():
        alike.setdefault((rate.bits, rate.h), []).append(name)
    for (bits, h), names in sorted(alike.items(), reverse=True):
        rows.add_row(str(bits), str(h), few_of(names, 8))
    return rows


def _lost(plan: "Plan") -> "Table":
    rows = table("instead", "seconds", "×", "of", left=("instead", "of"))
    for one in plan.alternatives:
        rows.add_row(one.name, seconds_text(one.seconds), f"{one.factor:.2f}", one.of)
    return rows
