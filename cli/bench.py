"""The command bench."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farloop.config.exit_codes import CommandError, ExitCode, ended_in_one_line

if TYPE_CHECKING:
    from rich.console import Console

    from farloop.bench.codecs import CodecReport, Plan, Watch
    from farloop.bench.routing import Findings
    from farloop.bench.routing_processes import Processes


# --- `farloop bench codecs`: its words, its progress, and where its findings go.


_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

QUICK_ELEMENTS = 16 << 20


def codecs(
    codec: Annotated[
        list[str] | None,
        typer.Option(show_default="all", help="A codec as runs spell it, as q4r:step=0.7; may be repeated."),
    ] = None,
    threads: Annotated[str, typer.Option(help="Of the CPU, as 1,2.", show_default="1, 2, 4, … all cores")] = "",
    device: Annotated[
        list[str] | None, typer.Option(help="cpu or cuda; may be repeated.", show_default="what there is")
    ] = None,
    elements: Annotated[
        str, typer.Option(help="Of a vector that is timed, as 64Mi.", show_default="64Mi; on a GPU 256Mi")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="A sixth of the time: fewer repetitions, smaller vectors, a shorter run.")
    ] = False,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Measure how fast they are.")] = True,
    quality: Annotated[bool, typer.Option("--quality/--no-quality", help="Measure what they lose.")] = True,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure other people's codecs too, where installed.")
    ] = True,
    out: Annotated[Path, typer.Option(metavar="DIR", help="codecs.json and the plots.")] = Path("out/codecs"),
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")] = False,
) -> None:
    """Measure every codec on this machine: how fast it is, and what it loses.

    Speed is GB/s of fp32, and its share of a plain copy's, which is timed again before every single
    repetition, so that whatever else the machine does hits both. add: decode into a sum. sum8: eight
    payloads at once. fused: add the residual, encode, renew the residual. outer: Nesterov step,
    encode, apply. First calls, which may compile, do not count.

    Quality is the squared error of one encoding, of random matrices and of outer gradients of a short
    DiLoCo run, which is trained once and kept in --out. Bits are those of the blob, after its entropy
    stage.

    bitsandbytes, hivemind, pi-quant (pypiquant) and torchao are measured too where they are
    installed; nothing needs them. Leave the machine alone meanwhile: the numbers are a quiet
    machine's or nobody's.

    Example: farloop bench codecs --codec q4 --codec q4r:step=0.7 --quick
    """
    with ended_in_one_line():
        from farloop.bench.codecs import run
        from farloop.cli.progress import progress_console
        from farloop.cli.run_results import source_commit

        console = progress_console(json=as_json)
        plan = plan_codecs(
            codec or [],
            threads,
            device or [],
            elements,
            quick=quick,
            speed=speed,
            quality=quality,
            peers=peers,
            out=out,
        )
        with _watched(console) as watch:
            report = run(plan, watch=watch, commit=source_commit())
        files = write_report(report, out)
        if as_json:
            typer.echo(json.dumps(report.plain(), indent=1))
        else:
            _show(report, files, console)


def plan_codecs(
    spelled: Sequence[str],
    threads: str,
    devices: Sequence[str],
    elements: str,
    *,
    quick: bool,
    speed: bool,
    quality: bool,
    peers: bool,
    out: Path,
) -> "Plan":
    """What is asked for. Raises CommandError for a word that cannot be used."""
    from farloop.bench.codec_peers import PEERS
    from farloop.bench.codec_quality import DISTRIBUTIONS
    from farloop.bench.codec_speed import QUICK, STEADY
    from farloop.bench.codecs import LONG, MEMORY_ELEMENTS, SHORT, Plan, places
    from farloop.bench.quality_spec import check_device
    from farloop.quant.registry import CODECS, codec_named

    if not (speed or quality):
        raise CommandError("without speed and quality nothing is left to measure")
    for name in devices:
        check_device(name)
    try:
        chosen = tuple(codec_named(name) for name in spelled)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return Plan(
        codecs=chosen or tuple(CODECS.values()),
        places=places(parse_threads(threads), devices) if speed else (),
        elements=parse_count(elements) if elements else (QUICK_ELEMENTS if quick else None),
        pace=QUICK if quick else STEADY,
        samples=tuple(DISTRIBUTIONS) if quality else (),
        outer=(SHORT if quick else LONG) if quality else None,
        memory=MEMORY_ELEMENTS // (4 if quick else 1) if speed else None,
        folder=out,
        peers=PEERS if peers else (),
    )


def parse_threads(text: str) -> tuple[int, ...]:
    """`1,2` as (1, 2); nothing for nothing. Raises CommandError."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise CommandError(f"--threads is a list of whole numbers above 0, as 1,2, not {text!r}")
    return tuple(int(word) for word in words)


def parse_count(text: str) -> int:
    """`64Mi`, `1e6` or `4096` as a whole number above 0. Raises CommandError."""
    number = text.rstrip("kKMGi")
    try:
        count = float(number) * _UNITS.get(text[len(number) :], 1 if number == text else 0)
    except ValueError:
        count = 0.0
    if not 1 <= count < 1 << 40 or count != int(count):
        raise CommandError(f"--elements is a number of elements, as 64Mi or 1e6, not {text!r}")
    return int(count)


def write_report(report: "CodecReport", out: Path) -> list[Path]:
    """codecs.json and the plots of what was measured, each as SVG and PNG."""
    from farloop.plots.codecs import plot_quality, plot_speed

    out.mkdir(parents=True, exist_ok=True)
    files = [out / "codecs.json"]
    files[0].write_text(json.dumps(report.plain(), indent=1))
    for wanted, plot, name in ((report.quality, plot_quality, "quality"), (report.speed, plot_speed, "speed")):
        for kind in ("svg", "png") if wanted else ():
            files.append(out / f"codecs-{name}.{kind}")
            plot(files[-1], report)
    return files


@contextmanager
def _watched(console: "Console") -> Iterator["Watch"]:
    """A bar for the stage that runs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from farloop.bench.codecs import Watch

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn when something happened, not by a thread of its own: that would run beside what is timed.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("")
        title = ""

        def stage(name: str, parts: int) -> None:
            nonlocal title
            title = name
            bar.reset(task, description=name, total=parts)

        def part(name: str) -> None:
            bar.update(task, description=f"{title}: {name}" if name else title, advance=1, refresh=True)

        yield Watch(stage=stage, part=part)


def _show(report: "CodecReport", files: Sequence[Path], console: "Console") -> None:
    from farloop.bench.codec_tables import report_tables

    for table in report_tables(report):
        console.print(table)
    console.print("\n".join(["", *map(str, files)]), markup=False, soft_wrap=True)


# --- `farloop bench routing`: its words, what it prints, and where its findings go.


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
        from farloop.cli.progress import progress_console
        from farloop.cli.run_results import source_commit
        from farloop.plots.planner import plot

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


# --- `farloop bench …`: the words of the measurements, and what they print. How to measure, `farloop.bench` knows.


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
        from farloop.bench.quality_spec import check_device
        from farloop.cli.bench_quality import Bench
        from farloop.cli.progress import progress_console
        from farloop.config.run_spec import DataConfig

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
                from farloop.bench.quality_spec import asked_for

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
