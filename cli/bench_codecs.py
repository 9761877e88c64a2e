"""`farloop bench codecs`: its words, its progress, and where its findings go."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farloop.cli.exit_codes import CommandError, ended_in_one_line

if TYPE_CHECKING:
    from rich.console import Console

    from farloop.bench.codecs import Plan, Report, Watch

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
        from farloop.cli.outcome import source_commit
        from farloop.cli.progress import progress_console

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
    from farloop.cli.bench_words import check_device
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


def write_report(report: "Report", out: Path) -> list[Path]:
    """codecs.json and the plots of what was measured, each as SVG and PNG."""
    from farloop.bench.codec_plots import plot_quality, plot_speed

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


def _show(report: "Report", files: Sequence[Path], console: "Console") -> None:
    from farloop.cli.codec_tables import report_tables

    for table in report_tables(report):
        console.print(table)
    console.print("\n".join(["", *map(str, files)]), markup=False, soft_wrap=True)
