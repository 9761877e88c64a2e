"""The front door: `farloop COMMAND`. Each command reads its words here and is at home elsewhere.

Heavy modules are imported inside the commands, so that `farloop --help` answers at once.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farloop.cli.bench import bench_app
from farloop.cli.journal_commands import explain, journal_app
from farloop.cli.keys_commands import keys_app
from farloop.cli.plan import plan
from farloop.cli.ranks import end_rank, follows_rank_0, launch, rank_of
from farloop.cli.schedule import schedule
from farloop.cli.set import release, set_terms
from farloop.cli.simulate import simulate_app
from farloop.config.exit_codes import EPILOG, CommandError, ExitCode, ended_in_one_line
from farloop.config.logs import LogLevel, set_up

_LOOK: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}

DEMO_STEPS = 2000
"""About three minutes on two cores; within 3 % of data parallel, which takes some sixty outer steps."""

app = typer.Typer(
    help="Train one model on GPU clusters that are far apart and joined by thin links.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    **_LOOK,
)
config_app = typer.Typer(help="Check or show a RUN.toml or NODE.toml.", **_LOOK)
app.command(rich_help_panel="Look")(schedule)
app.command(rich_help_panel="Look")(plan)
app.command(rich_help_panel="Look")(explain)
app.add_typer(journal_app, name="journal", rich_help_panel="Look")
app.add_typer(bench_app, name="bench", rich_help_panel="Look")
app.add_typer(simulate_app, name="simulate", rich_help_panel="Look")
app.add_typer(config_app, name="config", rich_help_panel="Set up")
app.add_typer(keys_app, name="keys", rich_help_panel="Set up")

RunToml = Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False, help="What is trained, and how.")]
NodeToml = Annotated[Path, typer.Argument(metavar="NODE.toml", show_default=False, help="Who takes part, and where.")]
AnyToml = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A RUN.toml or NODE.toml.")]
SetFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        show_default=False,
        help="Override a setting, as FARLOOP_SECTION__KEY=VALUE does; may be repeated.",
    ),
]
Level = Annotated[LogLevel, typer.Option(help="Least important log line that is written.", envvar="FARLOOP_LOG_LEVEL")]
LogJson = Annotated[bool, typer.Option("--log-json", help="One JSON object a line.", envvar="FARLOOP_LOG_JSON")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]


# --- training


@app.command(rich_help_panel="Train")
def demo(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="Nodes to start, each a process of its own.")] = 2,
    steps: Annotated[int, typer.Option(help="Inner steps of each node.")] = DEMO_STEPS,
    method: Annotated[str, typer.Option(help="One of `farloop methods`.")] = "streaming",
    codec: Annotated[
        str | None,
        typer.Option(
            help="Codec both ways, as q4 or q4r:step=0.7; farloop codecs lists them.", show_default="the method's: q4"
        ),
    ] = None,
    codec_up: Annotated[
        str | None, typer.Option(help="From the nodes to the coordinator alone.", show_default="--codec")
    ] = None,
    codec_down: Annotated[str | None, typer.Option(help="... and back.", show_default="--codec")] = None,
    h: Annotated[
        int | None,
        typer.Option("--h", help="Inner steps between two sends of a fragment.", show_default="the method's: 30"),
    ] = None,
    model: Annotated[str, typer.Option(help="nano, tiny, small or base.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the samples.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of this run.", show_default="out/METHOD-TIME")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text, JSONL or a folder.", show_default="Python's own library")
    ] = None,
    link: Annotated[str, typer.Option(help="Rate and round trip of each node's link, as 50mbit/50ms.")] = "",
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was begun.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Train a small GPT right here: a coordinator and its nodes over real sockets, then a report.

    Example: farloop demo --nodes 2 --link 50mbit/50ms
    """
    with ended_in_one_line():
        from farloop.cli.demo import run_demo

        if resume is not None:
            _only_resume(context)
        run_demo(
            nodes=nodes,
            steps=steps,
            method=method,
            codec_up=codec_up or codec,
            codec_down=codec_down or codec,
            h=h,
            model=model,
            seed=seed,
            out=out,
            data=data,
            link=link,
            resume=resume,
            as_json=as_json,
        )


def _only_resume(context: typer.Context) -> None:
    """A run goes on as it was begun: an option that would say otherwise is refused, not ignored."""
    beside = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in ("resume", "as_json")
        and parameter.name is not None
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if beside:
        raise CommandError(f"--resume goes on as the run was begun; leave out {', '.join(beside)}")


@app.command(rich_help_panel="Train")
def coordinator(
    file: RunToml,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default=False, help="Journal, snapshots and the final model.")
    ] = None,
    rewind: Annotated[
        bool, typer.Option("--rewind", help="Take an old copy of the state for the truth: what came after it is lost.")
    ] = False,
    adopt_from_nodes: Annotated[
        bool,
        typer.Option("--adopt-from-nodes", help="The state is an old copy: go on from the newest that nodes hold."),
    ] = False,
    adopt_patience: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", show_default="300", help="How long that waits for nodes that are away."),
    ] = None,
    adopt_newest: Annotated[
        bool,
        typer.Option("--adopt-newest", help="Also take a version that only one node knows: you believe that node."),
    ] = False,
    copy_to: Annotated[
        str, typer.Option(metavar="URL", show_default=False, help="Copy the state there: s3://, gs:// or file:///.")
    ] = "",
    copy_every: Annotated[
        float | None, typer.Option(metavar="SECONDS", show_default="600", help="Between two copies.")
    ] = None,
    restore: Annotated[
        str, typer.Option(metavar="URL", show_default=False, help="Begin with the newest copy there.")
    ] = "",
    flags: SetFlags = None,
    log_level: Level = LogLevel.INFO,
    log_json: LogJson = False,
) -> None:
    """Begin a run, or go on with the one in its state folder.

    SIGTERM or Ctrl-C says good-bye to the nodes and stops; a second one stops at once. The same command goes on.

    Example: farloop coordinator run.toml --set run.steps=2000
    """
    with ended_in_one_line():
        from farloop.cli.daemons import adoption, run_coordinator
        from farloop.config.settings import load_run

        set_up(log_level, json_lines=log_json)
        own = {"state_dir": state, "copy_to": copy_to, "copy_every_s": copy_every}
        given = [*(flags or []), *(f"coordinator.{key}={value}" for key, value in own.items() if value)]
        adopt = adoption(adopt_patience, wanted=adopt_from_nodes, rewind=rewind, newest=adopt_newest)
        settings = load_run(file, flags=given, environ=os.environ)
        code = run_coordinator(
            settings, rewind=rewind, adopt_patience_s=adopt, adopt_newest=adopt_newest, restore_from=restore
        )
    raise typer.Exit(code)


@app.command(rich_help_panel="Train")
def node(
    file: NodeToml,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", show_default=False, help="Ranks on this host, one per device.")
    ] = None,
    flags: SetFlags = None,
    log_level: Level = LogLevel.INFO,
    log_json: LogJson = False,
) -> None:
    """Take part in a run with this machine.

    SIGTERM or Ctrl-C finishes what was begun and leaves; a second one stops at once. The same command takes part again.

    Example: farloop node node.toml --nproc 8
    """
    with ended_in_one_line():
        from farloop.cli.daemons import run_node
        from farloop.config.settings import load_node

        given = [*(flags or []), *([f"node.nproc={nproc}"] if nproc is not None else [])]
        settings = load_node(file, flags=given, environ=os.environ)
        rank = rank_of(os.environ)
        set_up(log_level, json_lines=log_json, rank=rank or 0)
        if rank is not None or settings.node.nproc == 1:
            with follows_rank_0(rank or 0):
                code = run_node(settings)
        else:
            logs = ["--log-level", log_level.value, *(["--log-json"] if log_json else [])]
            sets = [word for flag in given for word in ("--set", flag)]
            code = launch(["node", str(file), *sets, *logs], nproc=settings.node.nproc, threads=settings.node.threads)
    raise typer.Exit(code)


@app.command(rich_help_panel="Train")
def chaos(
    minutes: Annotated[float, typer.Option(help="How long things go wrong.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of what goes wrong, and when.")] = 0,
    nodes: Annotated[int, typer.Option(help="Nodes to start, each a process of its own.")] = 4,
    faults: Annotated[
        str, typer.Option(help="Kinds of faults, with commas between them.", show_default="all of them")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="An empty folder.", show_default="out/chaos-TIME")] = None,
    as_json: AsJson = False,
) -> None:
    """Break a run of real processes right here, again and again, and see whether anything is lost.

    Nodes and the coordinator are killed and stopped, links cut and slowed. Joiners
    come behind a very thin link, peers say nothing or lie, connections flood the
    port, a second coordinator starts on the folder, and files of a copy of it are
    truncated. Where OUT/state is a small file system of its own, it is filled as
    well. Ends with 1 where a committed version is lost or forked, a process ends
    that nobody killed, or anything else is found.

    Example: farloop chaos --minutes 10 --seed 1
    """
    with ended_in_one_line():
        from farloop.cli.chaos import run_chaos

        run_chaos(minutes=minutes, seed=seed, nodes=nodes, wanted=faults, out=out, as_json=as_json)


app.command("set", rich_help_panel="Train")(set_terms)
app.command(rich_help_panel="Train")(release)


@app.command(rich_help_panel="Train")
def throttle(
    link: Annotated[str, typer.Argument(metavar="RATE/RTT", show_default=False, help="As 50mbit/50ms.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT", show_default=False, help="The coordinator.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where nodes dial instead.")] = "127.0.0.1:7701",
    log_level: Level = LogLevel.INFO,
    log_json: LogJson = False,
) -> None:
    """Stand for a thin link: what passes gets this rate in each direction, and this round trip.

    Example: farloop throttle 50mbit/50ms --to 127.0.0.1:7700
    """
    with ended_in_one_line():
        from farloop.chaos import relay as relays

        set_up(log_level, json_lines=log_json)
        relays.throttle(link, listen=listen, to=to)


# --- looking


@app.command(rich_help_panel="Look")
def status(
    url: Annotated[str, typer.Option(help="Where the coordinator serves its pages.")] = "http://127.0.0.1:9700",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking until the coordinator ends.")] = False,
    network: Annotated[bool, typer.Option("--network", help="Machines and links instead: what was measured.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a run goes: loss, traffic, nodes, windows.

    Example: farloop status --watch
    """
    with ended_in_one_line():
        from farloop.cli import status as pages

        if as_json:
            typer.echo(json.dumps(pages.fetch(url)))
        elif network:
            pages.show_network(url, Console(highlight=False))
        else:
            (pages.watch if watch else pages.show)(url, Console(highlight=False))


@app.command(rich_help_panel="Look")
def top(
    url: Annotated[str, typer.Option(help="Where the coordinator serves its pages.")] = "http://127.0.0.1:9700",
    light: Annotated[
        bool | None, typer.Option("--light/--dark", help="Colours; else as the terminal says in COLORFGBG, or dark.")
    ] = None,
) -> None:
    """Watch a run on the whole terminal: sort its nodes, walk through them, see what happened lately.

    Needs textual: pip install 'farloop[top]'. The keys are at the foot.

    Example: farloop top --url http://coordinator:9700
    """
    with ended_in_one_line():
        from farloop.cli.top import top as show_top

        show_top(url, light=light)


@app.command(rich_help_panel="Look")
def methods(as_json: AsJson = False) -> None:
    """List the training methods and their defaults; docs/methods.md has the equations, and when to take which."""
    from farloop.cli.methods import methods_json, methods_table

    if as_json:
        typer.echo(json.dumps(methods_json()))
    else:
        Console(highlight=False).print(methods_table())


@app.command(rich_help_panel="Look")
def codecs(
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Some seconds of measuring on this machine.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """List the codecs: what they promise, what they lose, how fast they are here, and their parameters.

    Example: farloop codecs --no-measure
    """
    with ended_in_one_line():
        from farloop.bench.codec_tables import TABLE_COLUMNS, codec_list, codec_list_json
        from farloop.bench.codecs import brief
        from farloop.quant.registry import CODECS

        measured = brief(tuple(CODECS.values())) if measure else None
        if as_json:
            typer.echo(json.dumps(codec_list_json(measured), indent=1))
        else:
            # Into a pipe or a file at its full width; on a narrow screen it folds.
            width = None if sys.stdout.isatty() else TABLE_COLUMNS
            Console(highlight=False, width=width).print(codec_list(measured))


# --- setting up


@app.command(rich_help_panel="Set up")
def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", show_default=False, help="A RUN.toml or NODE.toml.")
    ] = None,
    flags: SetFlags = None,
    url: Annotated[str, typer.Option(help="The coordinator's pages, to compare clocks with.")] = "",
    as_json: AsJson = False,
) -> None:
    """Find what would stop a daemon before it is started: ports, keys, disk, data, devices.

    Ends with 0 when nothing fails (warnings are allowed), else with 2.

    Example: farloop doctor node.toml
    """
    with ended_in_one_line():
        from farloop.cli.doctor import examine, print_findings

        findings = examine(file, flags=flags or [], environ=os.environ, url=url)
        print_findings(findings, as_json=as_json)
        failed = any(finding.level == "fail" for finding in findings)
    raise typer.Exit(ExitCode.USAGE if failed else ExitCode.DONE)


@config_app.command("check")
def check_config(file: AnyToml, flags: SetFlags = None) -> None:
    """Say whether a file is good, and what it comes to: nothing is started.

    Example: farloop config check run.toml --set run.method=diloco
    """
    with ended_in_one_line():
        from farloop.cli.check import check

        lines = check(file, flags=flags or [], environ=os.environ)
        typer.echo(f"{file} is good")
        for label, value in lines:
            typer.echo(f"  {label:<12} {value}")


@config_app.command("show")
def show_config(file: AnyToml, flags: SetFlags = None, as_json: AsJson = False) -> None:
    """Print every setting, what it means and where it came from; the output is a TOML file itself.

    Example: farloop config show run.toml > all.toml
    """
    with ended_in_one_line():
        from farloop.config.settings import json_text, load, toml_text

        settings = load(file, flags=flags or [], environ=os.environ).settings
        typer.echo((json_text if as_json else toml_text)(settings))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farloop {importlib.metadata.version('farloop')}")
        raise typer.Exit


@app.callback()
def front_door(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model on GPU clusters that are far apart and joined by thin links."""


def main() -> None:
    """The console script."""
    try:
        app(prog_name="farloop")
    except SystemExit as end:
        if rank_of(os.environ) is None:
            raise
        end_rank(end.code if isinstance(end.code, int) else ExitCode.DONE)


if __name__ == "__main__":
    main()
