"""`farloop lab bench`: options, progress and output of the measurements in `farloop.lab.bench`."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from farloop.cli.options import (
    AsJson,
    Commands,
    TextData,
    check_codecs,
    check_links,
    check_model,
    make_output_folder,
)
from farloop.config.exit_codes import CommandError, ExitCode, write_output
from farloop.monitoring.status import dumps
from farloop.monitoring.units import count_text

bench_app = Commands("Measure the cost of a codec, a method or a setting.")

NewFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Empty folder for settings, state and logs.", show_default="out/COMMAND-TIME"),
]

Seeds = Annotated[int | None, typer.Option(min=1, show_default="3", help="Runs per variant; an interval needs two.")]

Bulk = Annotated[
    Literal["session", "store"], typer.Option(help="store: also by an object store on this machine, in the same run.")
]

Jobs = Annotated[int | None, typer.Option(min=1, help="Concurrent runs, one core each.", show_default="all cores")]

NodesDevice = Annotated[str, typer.Option(help="Device of the nodes: cpu, or cuda (trains in bfloat16).")]

KeptRuns = Annotated[Path, typer.Option(metavar="DIR", help="Folder for finished runs, quality.json and the figures.")]

_WIDE = 140  # columns of the quality table in a file or pipe


@bench_app.command()
def codecs(
    codec: Annotated[
        list[str] | None, typer.Option(show_default="all", help="A codec, e.g. q4r:step=0.7; repeatable.")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A number of CPU threads; repeatable.", show_default="1, 2, 4, … all cores"),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="cpu or cuda; repeatable.", show_default="all available")
    ] = None,
    elements: Annotated[
        float | None,
        typer.Option(min=1, max=1e12, help="Elements of a timed vector, e.g. 64e6.", show_default="64 Mi; GPU: 256 Mi"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions, smaller vectors: a sixth of the time.")
    ] = False,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Measure the speed.")] = True,
    quality: Annotated[bool, typer.Option("--quality/--no-quality", help="Measure the error.")] = True,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for codecs.json and the plot.")] = Path("out/codecs"),
    as_json: AsJson = False,
) -> None:
    """Measure the speed and the error of codecs on this machine.

    Speed, on an idle machine, is in GB/s of fp32 and relative to a plain copy. add: decode into a
    sum. sum8: decode eight payloads at once. fused: add the residual, encode, update the residual.
    outer: Nesterov step, encode, apply.

    Quality is the squared error of one encoding, of random matrices and of outer gradients from a
    short DiLoCo run, which is kept in --out.

    Example: farloop lab bench codecs --codec q4 --codec q4r:step=0.7 --quick
    """
    check_codecs(codec or [])
    if not (speed or quality):
        raise CommandError("without speed and quality nothing is left to measure")
    from farloop.cli.progress import progress_console
    from farloop.lab.bench.codec_quality import DISTRIBUTIONS
    from farloop.lab.bench.codec_speed import QUICK, STEADY
    from farloop.lab.bench.codec_tables import report_tables
    from farloop.lab.bench.codecs import LONG, QUICK_ELEMENTS, SHORT, Plan, places, run
    from farloop.lab.bench.quality_spec import check_device
    from farloop.lab.plots.codecs import plot_quality
    from farloop.local.machine import origin
    from farloop.quant.registry import CODECS, codec_named

    for name in device or []:
        check_device(name)
    make_output_folder(out)
    console = progress_console(json=as_json)
    plan = Plan(
        codecs=tuple(map(codec_named, codec or CODECS)),
        places=places(threads, device) if speed else (),
        elements=int(elements) if elements else QUICK_ELEMENTS if quick else None,
        pace=QUICK if quick else STEADY,
        samples=tuple(DISTRIBUTIONS) if quality else (),
        outer=(SHORT if quick else LONG) if quality else None,
        folder=out,
    )
    report = run(plan, lambda what: typer.echo(what, err=True))
    files, found = [out / "codecs.json"], dumps({**origin(), **dataclasses.asdict(report)}, indent=1)
    write_output(files[0], found)
    for kind in ("svg", "png") if quality else ():
        files.append(out / f"codecs-quality.{kind}")
        plot_quality(files[-1], report)
    if as_json:
        return typer.echo(found)
    for table in report_tables(report):
        console.print(table)
    console.print("\n".join(["", *map(str, files)]), markup=False, soft_wrap=True)


@bench_app.command()
def memory(
    model: Annotated[str, typer.Option(help="A built-in model, or hf:FOLDER.")] = "base",
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="Measure what farloop adds to each of so many ranks of a loop; repeatable."),
    ] = None,
    bulk: Bulk = "session",
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the peak memory of a coordinator and of a node, and compare it with the prediction.

    Two processes train 16 steps on CPUs. The prediction is that of `farloop config check`. The
    model base takes some minutes and 5 GB of memory. With --ranks a loop trains the model, sharded
    over that many processes, without farloop and then with it.

    Example: farloop lab bench memory --ranks 1 --ranks 2
    """
    check_model(model)
    from farloop.lab.bench.memory import measure, measure_ranks, text
    from farloop.lab.bench.processes import stores

    if ranks and bulk == "store":
        raise CommandError("--bulk store is measured of a coordinator and a node: leave out --ranks")
    out = _empty_folder(out, "memory").resolve()
    if ranks:
        rows = [row for count in ranks for row in measure_ranks(model, count, out / str(count))]
    else:
        with stores(bulk) as urls:
            rows = [row for url in urls for row in measure(model, out / ("store" if url else "session"), url)]
    _print_result({"rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]}, text(rows), as_json)


@bench_app.command()
def gpu(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run the script on a CPU, with a tiny model.")] = False,
    parts: Annotated[str, typer.Option(metavar="PART,…", help="Only these parts.")] = "",
    model: Annotated[str, typer.Option(help="Of the loops: quarter (0.24 G parameters) or billion.")] = "quarter",
    budget: Annotated[float, typer.Option(min=20, metavar="SECONDS", help="For all parts together.")] = 465,
    out: NewFolder = None,
) -> None:
    """Measure on a CUDA device: kernels against the reference, copies, codecs, a loop with a node.

    Each part has a time limit and prints JSON lines, which gpu.json has as well; if one fails, the
    command exits with 1.

    Example: farloop lab bench gpu --parts codecs,loop-device
    """
    from farloop.lab.bench.gpu import MODELS, PARTS, measure, require_cuda

    if not dry_run:
        require_cuda()
    chosen = [_one_of("--parts", part, PARTS) for part in parts.split(",")] if parts else [*PARTS]
    model, out = "nano" if dry_run else _one_of("--model", model, MODELS), _empty_folder(out, "gpu")
    if not measure(chosen, model, out.resolve(), budget, typer.echo, dry=dry_run):
        raise typer.Exit(ExitCode.UNEXPECTED)


@bench_app.command()
def loop(
    model: Annotated[str, typer.Option(help="A built-in model: nano, micro, tiny, small, medium or base.")] = "small",
    h: Annotated[int, typer.Option(min=3, help="Inner steps between two exchanges of a fragment.")] = 30,
    turns: Annotated[int, typer.Option(min=1, help="Rounds without farloop, and as many with it, in turns.")] = 5,
    link: Annotated[str, typer.Option(metavar="RATE/RTT", help="Emulate the link to the coordinator.")] = "",
    bulk: Bulk = "session",
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a node costs its training loop on a CPU, while it exchanges with a coordinator.

    The training thread ran, was ready but no core was free, or slept, mostly for Python's
    interpreter lock. Needs Linux, and a core for the coordinator and the link.

    Example: farloop lab bench loop --h 5 --link 50mbit/50ms
    """
    check_model(model)
    check_links(link)
    from farloop.lab.bench.loop import measure, text
    from farloop.node.settings import PRESETS

    out = _empty_folder(out, "loop").resolve()
    rows = measure(PRESETS[model], h, turns, out, link, bulk, lambda what: typer.echo(what, err=True))
    _print_result({"rows": [dataclasses.asdict(row) for row in rows]}, text(rows), as_json)


@bench_app.command()
def sync(
    parameters: Annotated[float, typer.Option(min=25, max=1e11, help="Of the model, e.g. 25e6.")] = 25e6,
    nodes: Annotated[int, typer.Option(min=2, max=256, help="Nodes, one process each.")] = 2,
    codec: Annotated[
        list[str] | None, typer.Option(show_default="q4", help="Codec of both directions; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each system, after two that do not count.")] = 12,
    link: Annotated[
        list[str] | None,
        typer.Option(metavar="RATE/RTT", help="Emulate each node's link to the coordinator; repeatable."),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Also say where the time of a round goes.")] = False,
    bulk: Bulk = "session",
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure how long one synchronisation of a model takes, and gloo's all-reduce in fp32 beside it.

    Nothing is trained, and only the ratios tell something: use an idle machine with two cores or
    more. With --link, farloop's time is compared with that of its bytes at the link's rate.

    Example: farloop lab bench sync --parameters 25e6 --codec q4 --codec fp32 --link 100mbit/50ms
    """
    codecs = codec or ["q4"]
    check_codecs(codecs)
    check_links(*(link or []))
    from farloop.lab.bench.sync import Measured, measure, text

    if trace and rounds < 2:
        raise CommandError("--trace needs --rounds 2 or more: processor time is counted from one round to the next")
    out = _empty_folder(out, "sync")
    what = Measured(parameters=int(parameters), nodes=nodes, rounds=rounds)
    rows = measure(what, codecs, out.resolve(), links=["", *(link or [])], trace=trace, bulk=bulk)
    gloo_s = rows[0].s_per_round_median
    found = [{**dataclasses.asdict(row), "to_gloo": row.s_per_round_median / gloo_s} for row in rows]
    _print_result({"rows": found}, text(rows), as_json)


@bench_app.command()
def coordinator(
    nodes: Annotated[
        list[int] | None,
        typer.Option(min=1, max=512, show_default="2, 8, 32, 128", help="A number of nodes; repeatable."),
    ] = None,
    parameters: Annotated[float, typer.Option(min=256, max=1e11, help="Of the model, e.g. 1e6.")] = 1e6,
    codec: Annotated[str, typer.Option(help="Codec of both directions.")] = "q4",
    rounds: Annotated[
        int, typer.Option(min=2, help="Rounds of each number of nodes, after two that do not count.")
    ] = 8,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes of nodes.", show_default="all cores")] = None,
    step_s: Annotated[float, typer.Option("--step", metavar="S", min=0, max=3600, help="Seconds of a step.")] = 0.0,
    bulk: Bulk = "session",
    standby: Annotated[
        bool, typer.Option("--standby", help="Compare with a run that has a standby, in turns.")
    ] = False,
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a coordinator costs for each number of nodes.

    Nodes without a model, on the same machine, offer a made-up delta in every round. Shown are the
    bytes a second, the time from the close of a window until the last node heard of its commit and
    until the last had its update, and the coordinator's processor time, which tells most, and peak
    memory. The difference of two --step is what a second costs.

    Example: farloop lab bench coordinator --nodes 16 --nodes 64 --parameters 25e6
    """
    check_codecs([codec])
    from farloop.lab.bench.coordinator import measure, text
    from farloop.lab.bench.processes import stores

    out, processes = _empty_folder(out, "coordinator").resolve(), processes or os.cpu_count() or 1
    counts = dict.fromkeys(nodes or (2, 8, 32, 128))
    with stores(bulk) as urls:
        rows = [
            measure(n, int(parameters), codec, rounds, processes, step_s, url, out, standby=on)
            for n in counts
            for url in urls
            for on in ([False, True] if standby else [False])
        ]
    _print_result({"rows": [dataclasses.asdict(row) for row in rows]}, text(rows), as_json)


@bench_app.command()
def recovery(
    parameters: Annotated[float, typer.Option(min=1024, max=1e11, help="Of the model, e.g. 1e9.")] = 1e8,
    rounds: Annotated[int, typer.Option(min=1, max=60, help="Commits of each fragment before the kill.")] = 8,
    codec: Annotated[str, typer.Option(help="Codec of both directions.")] = "q4",
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure how long a coordinator takes to start after it was killed.

    A process recovers the state of a killed run without a model, first with nothing of it in the
    page cache, then again: seconds, bytes read, peak memory, and the time for 7 B parameters at the
    same rates. A state takes 12 bytes a parameter, twice on disk.

    Example: farloop lab bench recovery --parameters 25e6 --rounds 20
    """
    check_codecs([codec])
    from farloop.lab.bench.recovery import measure, text

    starts = measure(int(parameters), rounds, codec, _empty_folder(out, "recovery").resolve())
    found = [{**dataclasses.asdict(start), "large_s": start.large_s} for start in starts]
    _print_result({"starts": found}, text(starts), as_json)


def _one_of(option: str, name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise CommandError(f"{option} {name!r}: there are {', '.join(known)}")
    return name


def _empty_folder(out: Path | None, command: str) -> Path:
    """That of `--out`, or a new one. Raises CommandError: it is not empty, or no file can be written there."""
    out = out or Path("out") / f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if out.is_dir() and any(out.iterdir()):
        raise CommandError(f"--out: {out} is not empty; name another folder")
    make_output_folder(out)
    return out


def _print_result(found: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Print the text; or as JSON what was found, and what it is from."""
    from farloop.local.machine import origin

    typer.echo(dumps({**origin(), **found}, indent=1) if as_json else text)


@bench_app.command()
def quality(
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="VARIANT",
            show_default="nine variants",
            help="A method, single or muon-data-parallel, with KEY=VALUE settings of a run, "
            "e.g. 'streaming nodes=4 h=30 codec=q4'; repeatable.",
        ),
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option(metavar="TOML", show_default=False, help="A file with variants and the options below."),
    ] = None,
    seeds: Seeds = None,
    model: Annotated[
        str | None, typer.Option(show_default="micro", help="nano, micro, tiny, small, medium or base.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, show_default="400", help="Inner steps of each node.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, show_default="16", help="Sequences per step, shared by the nodes.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            show_default=False,
            help="A setting for all variants, e.g. nodes=4 or min_lr=1e-5; repeatable.",
        ),
    ] = None,
    within: Annotated[float, typer.Option(min=0.0, help="Largest difference, in %, that counts as equal.")] = 1.0,
    jobs: Jobs = None,
    data: TextData = None,
    data_bytes: Annotated[
        int | None, typer.Option(min=1, show_default="16000000", help="Most bytes of the text to use.")
    ] = None,
    device: NodesDevice = "cpu",
    out: KeptRuns = Path("out/quality"),
    as_json: AsJson = False,
) -> None:
    """Compare the validation loss of methods or settings at equal tokens.

    Every variant takes the same steps, each with one batch shared by its nodes. The
    baseline is data-parallel if it is among the variants, else single, else the
    first. Runs of one seed have the same first weights and samples; the cost of a
    variant is the mean of its paired differences from the baseline, with its 95 %
    interval.

    The daemons' code runs on virtual time in one process. Finished runs are kept in
    --out and reused; after a change of the code use another --out.

    Example: farloop lab bench quality --variant "diloco codec=fp32" --variant "diloco codec=q4"
    """
    check_model(model or "micro")
    from farloop.cli.progress import progress_console
    from farloop.lab.bench.comparison import report, table, watched
    from farloop.lab.bench.quality import CPU, RunFailed, run_all
    from farloop.lab.bench.quality_spec import asked_for, check_device, command_of, plan_grid
    from farloop.lab.plots.quality import plot_frontier
    from farloop.local.machine import origin
    from farloop.node.settings import DataConfig

    check_device(device)
    flags = {"seeds": seeds, "model": model, "steps": steps, "global_batch": global_batch}
    asked = asked_for(grid, flags, {"variants": variants, "settings": settings})
    text = DataConfig(path=data) if data_bytes is None else DataConfig(path=data, max_bytes=data_bytes)
    console, jobs = progress_console(json=as_json), jobs or os.cpu_count() or 1
    plan = plan_grid(asked, data=text, out=out, device=device)
    make_output_folder(out)
    try:
        with watched(plan, console) as watch:
            results = run_all(plan, jobs=jobs, watch=watch)
    except RunFailed as error:
        raise CommandError(str(error), ExitCode(error.exit_code)) from error
    words = ["--data", str(data)] if data else []
    words += ["--data-bytes", str(data_bytes)] if data_bytes else []
    words += ["--device", device] if device != CPU else []
    parameters = plan.variants[0].specs[0].identity.layout.num_parameters
    command = command_of(asked, options=words)
    found = report(plan, results, parameters=parameters, within_percent=within, command=command)
    write_output(out / "quality.json", dumps({**origin(), **dataclasses.asdict(found)}, indent=1))
    files = [out / "quality.json"]
    if any(variant.fewer_bytes is not None for variant in found.variants):
        over = "1 seed" if asked.seeds == 1 else f"mean and its 95 % interval of {asked.seeds} seeds"
        made_of = f"{asked.steps} steps of {asked.global_batch} sequences"
        for figure in (out / "frontier.svg", out / "frontier.png"):
            plot_frontier(
                figure,
                found.variants,
                title=f"{count_text(parameters)} parameters",
                caption=f"{made_of}; {over}; commit {origin()['commit']}",
            )
            files.append(figure)
    if as_json:
        return typer.echo(files[0].read_text())
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(table(found))
    console.print(f"files    {', '.join(map(str, files))}", soft_wrap=True)
    console.print(f"again    {found.command}", markup=False, soft_wrap=True)


@bench_app.command()
def frontier(
    data: TextData = None,
    seeds: Seeds = None,
    model: Annotated[str, typer.Option(help="nano, micro, tiny, small, medium or base.")] = "nano",
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each node.")] = 2160,
    jobs: Jobs = None,
    device: NodesDevice = "cpu",
    out: KeptRuns = Path("out/frontier"),
    as_json: AsJson = False,
) -> None:
    """Draw the loss of eleven variants against the bytes that they move.

    The variants differ in method, H, codec and number of nodes, and are compared as
    by `bench quality`: difference from data parallel over how many times fewer bytes.

    Example: farloop lab bench frontier --data my-text --seeds 1
    """
    from farloop.lab.bench.quality_spec import FRONTIER

    quality(
        list(FRONTIER), seeds=seeds, model=model, steps=steps, jobs=jobs, data=data, device=device, out=out,
        as_json=as_json,
    )  # fmt: skip


if __name__ == "__main__":  # from a tree that is not installed
    bench_app(prog_name="farloop lab bench")
