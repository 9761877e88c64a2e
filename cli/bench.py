"""`farloop bench …`: the words of the measurements, and what they print. How to measure, `farloop.bench` knows."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from farloop.cli.bench_codecs import codecs
from farloop.cli.bench_routing import routing
from farloop.cli.exit_codes import CommandError, ExitCode, ended_in_one_line

bench_app = typer.Typer(
    help="Measure what a codec, a method or a setting costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench_app.command()(codecs)
bench_app.command()(routing)

_PAIRS: dict[str, Any] = {"seeds": 5, "nodes": 4, "model": "nano", "steps": 600, "h": 30}
"""Where variants are compared with the first of them and an option is not given."""


@bench_app.command()
def quality(
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PAIR",
            show_default=False,
            help="Instead of a grid: UP/DOWN codecs, KEY=VALUE settings of a run, or both, as 'q4/q4 h=15'. "
            "The first is the baseline.",
        ),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="VARIANT",
            show_default="eight methods",
            help="A method, or single, with KEY=VALUE settings of a run, as 'streaming nodes=4 h=30 codec=q4'. "
            "May be repeated.",
        ),
    ] = None,
    grid: Annotated[
        Path | None, typer.Option(metavar="TOML", show_default=False, help="Variants and the next options in a file.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, show_default="3; of pairs 5", help="Runs of each variant; an interval takes two."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, show_default="4 for pairs", help="Of variants that do not say.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(show_default="micro; of pairs nano", help="nano, micro, tiny, small or base.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, show_default="400; of pairs 600", help="Inner steps of each node.")
    ] = None,
    h: Annotated[
        int | None,
        typer.Option("--h", min=1, show_default="30", help="Inner steps between two sends of a fragment."),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, show_default="16", help="Of a grid: sequences of a step, shared by the nodes."),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V,…",
            show_default=False,
            help="Of a grid: try these for every variant first, as outer_lr=0.2,0.4,0.6; may be repeated.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            show_default=False,
            help="Another setting of the run for all variants, as min_lr=1e-5; may be repeated.",
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(min=0.0, show_default="1; of pairs 0.5", help="Largest difference, in %, that is called none."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time, one core each.", show_default="all cores")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text, JSONL or a folder.", show_default="Python's own library")
    ] = None,
    data_bytes: Annotated[
        int | None, typer.Option(min=1, show_default="16000000", help="Of the text that are used at most.")
    ] = None,
    device: Annotated[str, typer.Option(help="Of the nodes: cpu, or cuda, where they train in bfloat16.")] = "cpu",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Finished runs, quality.json, .md, .svg and .png.")] = Path(
        "out/quality"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")] = False,
) -> None:
    """Train methods at equal tokens and say how much validation loss they cost.

    Every variant of a grid trains the same tokens: equal steps, each of them one
    batch that its nodes share. The baseline is data parallel, or single where that is
    among the variants and data parallel is not. Runs of one seed
    begin with the same weights and see the same samples in the same steps; a
    variant's cost is the mean of its paired differences to the baseline. Where
    their 95 % interval lies within the bound, a larger effect is ruled out;
    where it crosses the bound, more --seeds will tell.

    With --tune every variant first looks for its best setting, on another seed:
    in as many runs as any other, those without an outer optimizer for their
    learning rate.

    Nodes and coordinator are the real ones on virtual time, in one process: no
    network, and on a CPU the same numbers whenever it is repeated. Finished runs are kept
    in --out and not done again: stop it, repeat it, add variants or seeds later.
    A change of the code itself it does not notice: then name another --out.

    Example: farloop bench quality --tune outer_lr=0.2,0.4,0.6,0.8,1 --seeds 3

    Example: farloop bench quality fp32/fp32 q4/q4 "q4/q4 h=60" --seeds 5
    """
    given = {"seeds": seeds, "nodes": nodes, "model": model, "steps": steps, "h": h}
    named = {name: value for name, value in given.items() if value is not None}
    with ended_in_one_line():
        from farloop.bench.quality import RunFailed
        from farloop.cli.bench_quality import Bench
        from farloop.cli.bench_words import check_device
        from farloop.cli.progress import progress_console
        from farloop.cli.run import DataConfig

        check_device(device)
        bench = Bench(
            data=DataConfig(path=data) if data_bytes is None else DataConfig(path=data, max_bytes=data_bytes),
            out=out,
            device=device,
            jobs=jobs or os.cpu_count() or 1,
            within=within,
            console=progress_console(json=as_json),
        )
        try:
            if pairs:
                _only_for_grids(variant=variants, grid=grid, global_batch=global_batch, tune=tune)
                found = bench.pairs(pairs, {**_PAIRS, **named}, settings or [])
            else:
                from farloop.cli.bench_grid import asked_for

                lists = {"variants": variants, "tune": tune, "settings": settings}
                found = bench.grid(asked_for(grid, {**named, "global_batch": global_batch}, lists))
        except RunFailed as error:
            raise CommandError(str(error), ExitCode(error.exit_code)) from error
        bench.show(found, as_json=as_json)


def _only_for_grids(**options: object) -> None:
    for name, value in options.items():
        if value:
            flag = name.replace("_", "-")
            raise CommandError(f"--{flag} is for a grid, not for pairs; leave it out, or name every pair by --variant")
