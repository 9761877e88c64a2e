"""The command table: `farloop COMMAND`. A command parses its options here or in its own module.

A module of the table is imported when its command is called, and heavy ones inside the commands, so that `--help` and
wrong usage are answered at once.
"""

import dataclasses
import gc
import math
import os
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from rich.console import Console

from farloop.cli.interrupts import install_handlers, interrupt, on_signals
from farloop.cli.options import (
    BREAK,
    CONFIGURE,
    INSPECT,
    MEASURE,
    PREDICT,
    STATE,
    TRAIN,
    AsJson,
    Commands,
    Elsewhere,
    Level,
    LogJson,
    PagesUrl,
    SetFlags,
    StateFolder,
    TextData,
    check_links,
    check_model,
    usage_in_one_line,
)
from farloop.cli.ranks import end_rank, lets_others_report, rank_of
from farloop.config.exit_codes import EPILOG, CommandError, ExitCode
from farloop.config.logs import LogLevel, print_anywhere, set_up
from farloop.monitoring.status import dumps
from farloop.node.parent import end_with_torchrun
from farloop.runtime.version import version_of

DEMO_STEPS = 2000  # some minutes on two cores; enough outer steps to end below data parallel

PAGES = "http://127.0.0.1:9700"

ELSEWHERE = {
    "export": Elsewhere(
        TRAIN,
        "farloop.cli.export:export",
        "Write the newest global model as a folder: of Hugging Face where the model is one, else of safetensors files.",
    ),
    "run": Elsewhere(TRAIN, "farloop.cli.set:run_app", "Change a live run, or let it go on, through its coordinator."),
    "plan": Elsewhere(
        INSPECT,
        "farloop.cli.plan:plan",
        "Plan a run over unequal links: islands, stages, paths, bits and H, with predicted times.",
    ),
    "journal": Elsewhere(
        INSPECT,
        "farloop.cli.journal:journal_app",
        "Read a coordinator's state folder, running or not; only salvage --write changes it.",
    ),
    "keys": Elsewhere(
        CONFIGURE, "farloop.cli.keys:keys_app", "Create keys for encrypted links and manage the allow list."
    ),
    "data": Elsewhere(
        CONFIGURE,
        "farloop.cli.data:data_app",
        "Build token files from texts, JSONL, Parquet and Hugging Face datasets, and check them.",
    ),
}
"""Commands of modules that are imported when the command is called."""

LAB = {
    "schedule": Elsewhere(
        PREDICT,
        "farloop.cli.schedule:schedule",
        "Show the rounds of a run before it starts: H over time, number of syncs, share of steps with a sync.",
    ),
    "simulate": Elsewhere(
        PREDICT,
        "farloop.cli.simulate:simulate_app",
        "Predict the cost of a link, a method or failures before a run starts.",
    ),
    "eval": Elsewhere(
        MEASURE,
        "farloop.cli.export:evaluate",
        "Loss of the newest global model on text that no node trains on: the validation part of --data.",
    ),
}
"""Those of `farloop lab`, beside the ones that installed packages add."""


class _Commands(UserDict[str, Any]):
    """Commands by name. One from elsewhere is made when it is asked for, and those of other packages, if the group has
    any, are looked for when a name is not one of farloop's own, or all are listed."""

    def __init__(self, known: dict[str, Any], *, is_complete: bool) -> None:
        super().__init__(known)
        self._is_complete = is_complete

    def listed(self, name: str) -> Any:
        """A command that is as the table says and imports nothing, for `--help`."""
        entry = self.data[name]
        alone = isinstance(entry, Elsewhere)
        return typer.core.TyperCommand(name, help=entry.summary, rich_help_panel=entry.section) if alone else entry

    def _complete(self) -> None:
        """Add the commands of installed packages, whose entry points in the group `farloop.commands` are tables as
        `ELSEWHERE`."""
        if not self._is_complete:
            from importlib.metadata import entry_points

            self._is_complete = True
            for point in entry_points(group="farloop.commands"):
                self.data.update(point.load())

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            self._complete()
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        self._complete()
        return iter(self.data)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if isinstance(found := self.data[name], Elsewhere):
            found = self.data[name] = found.load(name)
        return found


class _Group(typer.core.TyperGroup):
    """The commands of this module and those from elsewhere."""

    elsewhere: Mapping[str, Elsewhere] = ELSEWHERE
    is_complete = True  # whether no other package can add commands

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = self._table = _Commands({**self.commands, **self.elsewhere}, is_complete=self.is_complete)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes what the table says, so nothing is imported."""
        self.commands = {name: self._table.listed(name) for name in self._table}
        super().format_help(ctx, formatter)
        self.commands = self._table


class _Lab(_Group):
    elsewhere = LAB
    is_complete = False


class FrontDoor(_Group):
    """`farloop`. Wrong usage of any command is one line."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        with usage_in_one_line():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        with usage_in_one_line():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            for group in ("lab", "run"):
                if args[0] in self._table[group].commands:
                    ctx.fail(f"{args[0]} is in a group: farloop {group} {args[0]}")
        group, word, *_ = [*args, "", ""]
        if group in ("lab", "run") and word and word not in self._table[group].commands:
            if word in self.commands:
                ctx.fail(f"{word} is in no group: farloop {word}")
            if group == "run" and word.endswith(".toml"):
                ctx.fail(f"run changes a live run; to start one: farloop coordinator {word}")
        return super().resolve_command(ctx, args)


app = Commands(
    "Train one model on GPU clusters that are far apart and connected by slow links.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=FrontDoor,
)
config_app = Commands("Check or show a RUN.toml or NODE.toml.")
app.add_typer(config_app, name="config", rich_help_panel=CONFIGURE)
lab_app = Commands("Compare methods, predict costs, measure, and inject faults: no run needs these.", cls=_Lab)
app.add_typer(lab_app, name="lab", rich_help_panel=INSPECT)

RunToml = Annotated[
    Path, typer.Argument(metavar="RUN.toml", show_default=False, help="The training run and its coordinator.")
]
NodeToml = Annotated[Path, typer.Argument(metavar="NODE.toml", show_default=False, help="This node.")]
AnyToml = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A RUN.toml or NODE.toml.")]


@app.command(rich_help_panel=TRAIN)
def demo(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="Number of nodes; each is a process.")] = 2,
    steps: Annotated[int, typer.Option(help="Inner steps of each node.")] = DEMO_STEPS,
    method: Annotated[str, typer.Option(help="One of `farloop lab methods`.")] = "streaming",
    codec: Annotated[
        str | None,
        typer.Option(
            help="Codec in both directions, e.g. q4 or q4r:step=0.7; see farloop lab codecs.",
            show_default="the method's: q4r",
        ),
    ] = None,
    codec_up: Annotated[
        str | None, typer.Option(help="Codec from the nodes to the coordinator.", show_default="--codec")
    ] = None,
    codec_down: Annotated[
        str | None, typer.Option(help="Codec from the coordinator to the nodes.", show_default="--codec")
    ] = None,
    h: Annotated[
        int | None,
        typer.Option("--h", help="Inner steps between two sends of a fragment.", show_default="the method's: 15"),
    ] = None,
    model: Annotated[str, typer.Option(help="nano, micro, tiny, small, medium or base.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the sample order.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="out/METHOD-TIME")] = None,
    data: TextData = None,
    link: Annotated[str, typer.Option(help="Emulated bandwidth and RTT of each node's link, e.g. 50mbit/50ms.")] = "",
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this folder with its original options.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT on this machine with real processes and sockets, then write a report.

    Example: farloop demo --nodes 2 --link 50mbit/50ms
    """
    run = {"nodes": nodes, "steps": steps, "method": method, "h": h, "model": model, "seed": seed}
    run |= {"codec_up": codec_up or codec, "codec_down": codec_down or codec}
    if resume is None:
        _check_demo(run, data, link)
    else:
        _only_resume(context)
        if not (resume / "demo.json").is_file():
            raise CommandError(f"--resume: {resume} holds no demo run: there is no demo.json")
    from farloop.cli.demo import run_demo

    run_demo(run, out=out, data=data, link=link, resume=resume, as_json=as_json)


def _check_demo(run: dict[str, Any], data: Path | None, link: str) -> None:
    """Refuse a run that cannot start, before torch is loaded. Raises CommandError."""
    from farloop.algo.methods import method_named
    from farloop.config.run_config import RunConfig, terms_of
    from farloop.config.settings import RUN_SCHEMA

    check_model(run["model"])
    check_links(link)
    if data is not None and not data.exists():
        raise CommandError(f"no file or folder {data}")
    for key in ("nodes", "steps", "h", "seed"):
        for rule in RUN_SCHEMA["run"][key].rules if run[key] is not None else ():
            try:
                rule(run[key])
            except ValueError as error:
                raise CommandError(f"--{key}: {error}") from error
    try:
        terms_of(RunConfig(**run), method_named(run["method"]))
    except ValueError as error:
        raise CommandError(str(error)) from error


def _only_resume(context: typer.Context) -> None:
    """Refuse options that a resumed run would ignore."""
    beside = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in ("resume", "as_json")
        and parameter.name is not None
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if beside:
        raise CommandError(f"--resume keeps the options of the run; leave out {', '.join(beside)}")


@app.command(rich_help_panel=TRAIN)
def coordinator(
    file: RunToml,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default=False, help="Journal, snapshots and the final model.")
    ] = None,
    rewind: Annotated[
        bool, typer.Option("--rewind", help="Accept an old copy of the state: everything newer is lost.")
    ] = False,
    adopt_from_nodes: Annotated[
        bool,
        typer.Option(
            "--adopt-from-nodes", help="The state is an old copy: continue from the newest versions that nodes hold."
        ),
    ] = False,
    adopt_patience: Annotated[
        float | None, typer.Option(metavar="SECONDS", show_default="300", help="How long to wait for absent nodes.")
    ] = None,
    adopt_newest: Annotated[
        bool, typer.Option("--adopt-newest", help="Also accept a version that only one node reports.")
    ] = False,
    copy_to: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="Copy the state to s3://, gs://, az:// or file:///."),
    ] = None,
    copy_every: Annotated[
        float | None, typer.Option(metavar="SECONDS", show_default="600", help="Interval between copies.")
    ] = None,
    restore: Annotated[
        str | None, typer.Option(metavar="URL", show_default=False, help="Restore the newest copy from this URL first.")
    ] = None,
    force_lead: Annotated[
        bool,
        typer.Option(
            "--force-lead",
            help="Lead although the record of [coordinator] leads_by names another. Without leads_by: lead a folder "
            "that had a record, from now on without one.",
        ),
    ] = False,
    flags: SetFlags = None,
    log_level: Level = LogLevel.INFO,
    log_json: LogJson = False,
) -> None:
    """Start a run, or continue the one in its state folder. With [coordinator] leads_by, stand by while another leads.

    SIGTERM or Ctrl-C notifies the nodes and stops; a second signal stops at once. The same command continues the run.

    Example: farloop coordinator run.toml --set run.steps=2000
    """
    from farloop.config.settings import check_at_once, load_run
    from farloop.coordinator.settings import check_url

    set_up(log_level, json_lines=log_json)
    own = {
        "--state": ("state_dir", state),
        "--copy-to": ("copy_to", copy_to),
        "--copy-every": ("copy_every_s", copy_every),
    }
    given = {name: f"coordinator.{key}={value}" for name, (key, value) in own.items() if value is not None}
    adopt = adoption(adopt_patience, wanted=adopt_from_nodes, rewind=rewind, newest=adopt_newest)
    settings = load_run(file, flags=flags or [], environ=os.environ, options=given)
    try:
        if restore is not None:
            check_url(restore)
    except ValueError as error:
        raise CommandError(f"--restore {restore!r}: {error}") from None
    check_at_once(settings)
    from farloop.cli.daemons import run_coordinator

    code = run_coordinator(
        settings,
        rewind=rewind,
        adopt_patience_s=adopt,
        adopt_newest=adopt_newest,
        restore_from=restore or "",
        force_lead=force_lead,
    )
    raise typer.Exit(code)


def adoption(patience_s: float | None, *, wanted: bool, rewind: bool, newest: bool = False) -> float | None:
    """How long adoption from nodes waits for absent ones, in seconds; None without adoption.

    Raises CommandError: the flags contradict each other.
    """
    if wanted and rewind:
        raise CommandError("--adopt-from-nodes continues from the nodes, --rewind from the folder: give one of them")
    if newest and not wanted:
        raise CommandError("--adopt-newest needs --adopt-from-nodes: give both")
    if patience_s is not None and not wanted:
        raise CommandError("--adopt-patience needs --adopt-from-nodes: give both")
    if not wanted:
        return None
    from farloop.coordinator.decide.adoption import PATIENCE_S

    if patience_s is not None and not 0 < patience_s < math.inf:
        raise CommandError(f"--adopt-patience {patience_s:g}: expected more than 0 seconds, as {PATIENCE_S:g}")
    return PATIENCE_S if patience_s is None else patience_s


@app.command(rich_help_panel=TRAIN)
def node(
    file: NodeToml,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", show_default=False, help="Ranks on this host, one per device.")
    ] = None,
    flags: SetFlags = None,
    log_level: Level = LogLevel.INFO,
    log_json: LogJson = False,
) -> None:
    """Train on this machine as a node of a run.

    SIGTERM or Ctrl-C finishes the current work and leaves; a second signal stops at once. The same command rejoins.

    Example: farloop node node.toml --nproc 8
    """
    from farloop.config.settings import check_at_once, load_node

    given = {"--nproc": f"node.nproc={nproc}"} if nproc is not None else {}
    settings = load_node(file, flags=flags or [], environ=os.environ, options=given)
    check_at_once(settings)
    from farloop.cli.daemons import run_node

    rank = rank_of(os.environ)
    set_up(log_level, json_lines=log_json, rank=rank or 0)
    if rank is not None:
        with lets_others_report(rank):
            code = run_node(settings)
    elif settings.node.nproc == 1 and not settings.node.rendezvous:
        code = run_node(settings)
    else:
        from farloop.cli.agent import launch

        logs = ["--log-level", log_level.value, *(["--log-json"] if log_json else [])]
        by_key = {flag.partition("=")[0].strip(): flag for flag in [*(flags or []), *given.values()]}
        sets = [f"--set={flag}" for flag in by_key.values()]
        code = launch(["node", str(file), *sets, *logs], settings.node)
    raise typer.Exit(code)


@lab_app.command(rich_help_panel=BREAK)
def throttle(
    link: Annotated[str, typer.Argument(metavar="RATE/RTT", show_default=False, help="E.g. 50mbit/50ms.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT", show_default=False, help="The coordinator.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address that nodes connect to instead.")
    ] = "127.0.0.1:7701",
    log_level: Level = LogLevel.INFO,
    log_json: LogJson = False,
) -> None:
    """Emulate a slow link: a TCP proxy with a given bandwidth and RTT.

    Example: farloop lab throttle 50mbit/50ms --to 127.0.0.1:7700
    """
    from farloop.local import relay as relays

    set_up(log_level, json_lines=log_json)
    relays.throttle(link, listen=listen, to=to)


@app.command(rich_help_panel=INSPECT)
def explain(
    window: Annotated[str, typer.Argument(metavar="WINDOW", help="f0:812, or 812 for all fragments.")],
    state: StateFolder = STATE,
    as_json: AsJson = False,
) -> None:
    """Explain why a window closed: expected nodes, arrivals, weights, and which nodes are missing and why.

    Example: farloop explain f0:812
    """
    from farloop.cli.explain import explain_window

    explain_window(state, window, Console(highlight=False), as_json=as_json)


@app.command(rich_help_panel=INSPECT)
def status(
    url: PagesUrl = PAGES,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends, over restarts.")] = False,
    network: Annotated[bool, typer.Option("--network", help="Show machines and measured links instead.")] = False,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Ask the coordinator of this folder, pages or not."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run: loss, traffic, nodes, windows.

    Example: farloop status --watch
    """
    from farloop.cli import status as pages

    if watch and (as_json or network):
        raise CommandError("--watch shows the run, and goes with neither --json nor --network: leave one of them out")
    if state is not None and url != PAGES:
        raise CommandError("--url and --state each name a coordinator: give one of them")
    if watch:
        return pages.watch(url, state, Console(highlight=False))
    found = pages.fetch(url) if state is None else pages.saved(state)
    if as_json:
        typer.echo(dumps(found))
    else:
        (pages.show_network if network else pages.show)(found, Console(highlight=False))


@app.command(rich_help_panel=INSPECT)
def report(
    state: Annotated[
        Path, typer.Argument(metavar="DIR", show_default="state", help="The coordinator's state_dir.")
    ] = STATE,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="report.html beside DIR", help="The page to write.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run as one HTML page: losses, bytes, nodes and events. --json prints the figures instead.

    Reads a coordinator's state folder, also while it runs.

    Example: farloop report state --out run.html
    """
    from farloop.cli.run_results import summarise
    from farloop.cli.status import saved
    from farloop.coordinator.storage.state_reader import journal_folder

    status = saved(journal_folder(state, how="as DIR"))
    summary = summarise(status)
    if as_json:
        return typer.echo(dumps(summary))
    from farloop.cli.report import write_report

    run, at = status["run"], "" if status["run"]["state"] == "finished" else f" at step {status['position']:,.0f}"
    out = out or state.resolve().with_name("report.html")
    write_report(out, summary, state / "metrics.jsonl", f"{run['name']}: {run['state']}{at}")
    typer.echo(f"report {out}")


@app.command(rich_help_panel=INSPECT)
def top(
    url: PagesUrl = PAGES,
    light: Annotated[
        bool | None, typer.Option("--light/--dark", help="Colours. Default: from COLORFGBG, else dark.")
    ] = None,
) -> None:
    """Full-screen view of a run: nodes to sort and inspect, and recent events.

    The keys are listed in the bottom line.

    Example: farloop top --url http://coordinator:9700
    """
    from farloop.cli.top import top as show_top

    show_top(url, light=light)


@lab_app.command(rich_help_panel=PREDICT)
def methods(
    where: Annotated[
        str | None,
        typer.Option("--for", metavar="RATE,SIZE,…", show_default=False, help="Which one suits, e.g. '200mbit, 1b'."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the training methods and their defaults; docs/methods.md has equations and advice.

    With --for: which method and H suit the rate of the slowest node's link, the
    parameters, the nodes (2) and the time of an inner step (1 s). Of the methods that
    let a node compute 95 % of the time, the one with the least loss is marked.

    Example: farloop lab methods --for "200mbit, 1b, 4 nodes, 0.5s"
    """
    from farloop.cli import methods as known

    console = Console(highlight=False)
    if where is None:
        return typer.echo(dumps(known.methods_json())) if as_json else console.print(known.methods_table())
    given = known.situation(where)
    found = known.choices(given)
    if as_json:
        told = {"recommended": dataclasses.asdict(known.recommended(found))}
        return typer.echo(dumps(told | {"choices": [dataclasses.asdict(one) for one in found]}, indent=1))
    console.print(known.choices_table(found))
    for line in known.advice(given, found):
        console.print(f" {line}", markup=False, soft_wrap=True)


@app.command(rich_help_panel=CONFIGURE)
def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", show_default=False, help="A RUN.toml or NODE.toml.")
    ] = None,
    flags: SetFlags = None,
    url: Annotated[str, typer.Option(help="The coordinator's HTTP pages, for --fleet and to compare clocks.")] = "",
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Check all nodes of the running coordinator instead of this machine.")
    ] = False,
    store: Annotated[
        str, typer.Option(help="A URL that farloop doctor RUN.toml printed, to try the object store from here.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check this machine before a daemon starts: ports, keys, disk, data, devices.

    With --fleet: versions, clocks, disks, devices, links and states of all nodes, as the coordinator at --url
    has them. Exits with 2 if a check fails; with 5 if no coordinator answers --fleet.

    Example: farloop doctor node.toml
    """
    from farloop.cli.findings import print_findings

    if fleet:
        if file is not None or flags or store:
            raise CommandError("--fleet checks the nodes of a running coordinator: leave out FILE, --set and --store")
        from farloop.cli.fleet import examine_fleet, print_fleet

        status, findings = examine_fleet(url)
        if not as_json:
            print_fleet(status)
    else:
        from farloop.cli.doctor import examine

        findings = examine(file, flags=flags or [], environ=os.environ, url=url, store=store)
    print_findings(findings, as_json=as_json)
    failed = any(finding.level == "fail" for finding in findings)
    raise typer.Exit(ExitCode.USAGE if failed else ExitCode.DONE)


@config_app.command("check")
def check_config(
    file: AnyToml,
    flags: SetFlags = None,
    ranks: Annotated[int, typer.Option(help="Processes of a node, for its memory.", min=1, max=65536)] = 1,
    shard: Annotated[bool, typer.Option("--shard", help="The node shards the model over them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Validate a file and show the resulting run or node, without starting anything.

    Of a run also the memory, without activations, and the disk of the coordinator and
    a node; a model hf:FOLDER needs no weights for that.

    Example: farloop config check run.toml --set run.method=diloco
    """
    from farloop.config.settings import check_at_once, load

    settings = load(file, flags=flags or [], environ=os.environ)
    check_at_once(settings)
    from farloop.cli.check import check

    lines, memory = check(settings, ranks=ranks, shard=shard)
    if as_json:
        told = {"memory": memory.plain()} if memory is not None else {}
        typer.echo(dumps({"file": str(file), "lines": lines, **told}, indent=1))
        return
    typer.echo(f"{file} is good")
    for label, value in lines:
        typer.echo(f"  {label:<12} {value}")


@config_app.command("show")
def show_config(file: AnyToml, flags: SetFlags = None, as_json: AsJson = False) -> None:
    """Print every setting with its meaning and source, as a TOML file.

    Example: farloop config show run.toml > all.toml
    """
    from farloop.config.settings import json_text, load, toml_text

    settings = load(file, flags=flags or [], environ=os.environ).settings
    typer.echo((json_text if as_json else toml_text)(settings))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farloop {version_of()}")
        raise typer.Exit


@app.callback()
def front_door(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model on GPU clusters that are far apart and connected by slow links."""


def main() -> None:
    install_handlers()
    # Read when torch is loaded. New memory in pages of 2 MiB costs a quarter of that in pages of 4 KiB, and the buffers
    # of a commit are new each time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    print_anywhere()
    end_with_torchrun(os.environ)  # a rank; torch, which takes seconds to load, is not loaded yet
    on_signals(interrupt)
    try:
        app(prog_name="farloop")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else ExitCode.DONE
        if rank_of(os.environ) is not None:
            end_rank(code)
        sys.stdout.flush()
        on_signals(lambda *_: os._exit(code))  # it stands
        gc.freeze()  # the interpreter's last collections would take a second for the modules of torch
        raise


if __name__ == "__main__":
    main()
