"""The commands that measure or break runs. `farloop` finds them by the entry-point group `farloop.commands`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farloop.cli.options import INSPECT, TRAIN, AsJson, Elsewhere
from farloop.monitoring.status import dumps

COMMANDS = {
    "chaos": Elsewhere(
        TRAIN,
        "farloop.lab.commands:chaos",
        "Inject faults into a run of real processes on this machine and check that nothing is lost.",
    ),
    "bench": Elsewhere(
        INSPECT, "farloop.lab.bench.command:bench_app", "Measure the cost of a codec, a method or a setting."
    ),
    "codecs": Elsewhere(
        INSPECT,
        "farloop.lab.commands:codecs",
        "List the codecs: guarantees, error, speed on this machine, and parameters.",
    ),
}


def chaos(
    minutes: Annotated[float, typer.Option(help="Duration of the fault injection.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of the fault schedule.")] = 0,
    nodes: Annotated[int, typer.Option(help="Number of nodes; each is a process.")] = 4,
    faults: Annotated[str, typer.Option(help="Comma-separated kinds of faults.", show_default="all")] = "",
    standby: Annotated[
        int, typer.Option(metavar="FAULTS", help="Of two coordinators instead, one leading, one standing by: so many.")
    ] = 0,
    model: Annotated[str, typer.Option(help="The built-in model of --standby.")] = "nano",
    out: Annotated[Path | None, typer.Option(help="An empty folder.", show_default="out/chaos-TIME")] = None,
    as_json: AsJson = False,
) -> None:
    """Inject faults into a run of real processes on this machine and check that nothing is lost.

    Kills and suspends nodes and the coordinator; cuts and slows links; adds joiners
    on very slow links, silent and lying peers, connection floods, a second
    coordinator on the same folder, and truncated files in a copy of the state. If
    OUT/state is a small file system of its own, it is filled as well. Exits with 1
    if a committed version is lost or forked, if a process ends unexpectedly, or on
    any other finding.

    With --standby, two coordinators, the connection between them and the store of
    the leader's record fail one after the other; --minutes, --nodes and --faults
    do not apply.

    Example: farloop chaos --minutes 10 --seed 1
    """
    from farloop.lab.chaos.command import run_chaos, run_pair

    if standby:
        return run_pair(count=standby, seed=seed, model=model, out=out, as_json=as_json)

    run_chaos(minutes=minutes, seed=seed, nodes=nodes, wanted=faults, out=out, as_json=as_json)


def codecs(
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure them on this machine for some seconds.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """List the codecs: guarantees, error, speed on this machine, and parameters.

    Example: farloop codecs --no-measure
    """
    from farloop.lab.bench.codec_tables import TABLE_COLUMNS, codec_list, codec_list_json
    from farloop.lab.bench.codecs import brief
    from farloop.quant.registry import CODECS

    measured = brief(tuple(CODECS.values())) if measure else None
    if as_json:
        typer.echo(dumps(codec_list_json(measured), indent=1))
    else:
        # Full width in a pipe or file; on a narrow terminal columns wrap.
        width = None if sys.stdout.isatty() else TABLE_COLUMNS
        Console(highlight=False, width=width).print(codec_list(measured))
