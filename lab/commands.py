"""The commands that measure or break runs. `farloop lab` finds them by the entry-point group `farloop.commands`."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from farloop.cli.options import BREAK, MEASURE, PREDICT, AsJson, Elsewhere
from farloop.monitoring.status import dumps

COMMANDS = {
    "chaos": Elsewhere(
        BREAK,
        "farloop.lab.chaos.command:chaos",
        "Inject faults into a run of real processes on this machine and check that nothing is lost.",
    ),
    "bench": Elsewhere(
        MEASURE, "farloop.lab.bench.command:bench_app", "Measure the cost of a codec, a method or a setting."
    ),
    "codecs": Elsewhere(
        PREDICT,
        "farloop.lab.commands:codecs",
        "List the codecs: guarantees, error, speed on this machine, and parameters.",
    ),
}


def codecs(
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure them on this machine for some seconds.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """List the codecs: guarantees, error, speed on this machine, and parameters.

    Example: farloop lab codecs --no-measure
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
