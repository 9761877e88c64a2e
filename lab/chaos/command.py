"""`farloop lab chaos`: inject faults into a run of real processes on this machine, and report what happened.

Recovery times are measured on the status page, every tenth of a second or as soon as it answers:

    kill_node          from SIGKILL to the survivors' next commit, without the node (where every window waited for it)
    node_back          from the start of its next process to the next commit that merges it
    stop_node          from SIGCONT to the next commit that merges the node
    cut_link           from the heal to the next commit that merges the node
    slow_link          from the end to the next commit that merges the node
    kill_coordinator   from SIGKILL to the next commit, beyond the journal that it left
    stop_coordinator   from SIGCONT to the next commit
    fill_disk          from the first free byte to the next commit
    truncate_file      from the coordinator's next start (it is killed for a copy of its state) to the next commit
    others             from the end of the fault to the next commit

The times include other faults at the same time, the start of a Python process, and the delay of its supervisor (0.5
to 6 s, random). A process that fails again before it recovered is not counted. `recovery_s_mean` and `recovery_s_max`
leave out node_back, for which no other node waits.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.table import Table

from farloop.cli.options import AsJson, check_model, facts, table
from farloop.cli.progress import progress_console
from farloop.config.exit_codes import CommandError, ExitCode, cannot_write, write_output
from farloop.config.run_config import RunConfig
from farloop.lab.chaos.faults import DATA, RUN, Ballast
from farloop.lab.chaos.storm_plan import COORDINATOR, KINDS, OF_STORE, Kind, plan
from farloop.local.processes import stop_on_signals
from farloop.monitoring.status import dumps
from farloop.monitoring.units import NOTHING, duration_text, nearest, size_text
from farloop.node.settings import DataConfig

if TYPE_CHECKING:
    from farloop.lab.chaos.pair_storm import PairOutcome
    from farloop.lab.chaos.storm import Outcome

MOST_NODES: Final = 26


def chaos(
    minutes: Annotated[float, typer.Option(help="Duration of the fault injection.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of the fault schedule.")] = 0,
    nodes: Annotated[int, typer.Option(help="Number of nodes; each is a process.")] = 4,
    faults: Annotated[str, typer.Option(help="Comma-separated kinds of faults.", show_default="all")] = "",
    bulk: Annotated[
        Literal["session", "store"], typer.Option(help="store: deltas and updates go by an object store, which fails.")
    ] = "session",
    standby: Annotated[
        int, typer.Option(metavar="FAULTS", help="Of two coordinators instead, one leading, one standing by: so many.")
    ] = 0,
    model: Annotated[str, typer.Option(help="The built-in model of --standby.")] = "nano",
    parameters: Annotated[
        float, typer.Option(min=0, max=1e11, show_default=False, help="Of --standby, without a built-in model: 100e6.")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option(help="An empty folder.", show_default="out/chaos-TIME")] = None,
    as_json: AsJson = False,
) -> None:
    """Inject faults into a run of real processes on this machine and check that nothing is lost.

    docs/reliability.md describes the faults. If OUT/state is a small file system of
    its own, it is filled as well. Exits with 1 on a finding, as a committed version
    that is lost or forked, or a process that ends unexpectedly.

    With --standby, two coordinators, the connection between them and the store of the
    leader's record fail one after the other; --minutes, --nodes, --faults and --bulk
    do not apply.

    Example: farloop lab chaos --minutes 10 --seed 1
    """
    folder = (out or Path("out") / f"chaos-{datetime.now(UTC):%Y%m%d-%H%M%S}").resolve()
    console = progress_console(json=as_json)
    say = partial(console.print, markup=False, soft_wrap=True)
    outcome: PairOutcome | Outcome
    if standby:
        pair, told = _storm_over_a_pair(standby, seed, model, int(parameters), folder, say)
        outcome, shown = pair, [pair_table(pair.figures())]
    else:
        storm, told = _storm(minutes, seed, nodes, faults, bulk, folder, say)
        outcome, shown = storm, [faults_table(storm), result_table(storm, folder)]
    from farloop.local.machine import origin

    report = origin() | outcome.figures() | told | {"seed": seed}
    write_output(folder / "chaos.json", dumps(report, indent=1))
    if as_json:
        typer.echo(dumps(report))
    else:
        console.print(*shown)
    if not outcome.good:
        raise CommandError(f"{'; '.join(outcome.wrong)} (logs: {folder})", ExitCode.UNEXPECTED)
    if outcome.interrupted:
        say("stopped: every process is ended")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _storm(
    minutes: float, seed: int, nodes: int, wanted: str, bulk: str, folder: Path, say: Callable[[str], None]
) -> tuple["Outcome", dict[str, Any]]:
    """What came of it, and how it was asked for. Raises CommandError."""
    if not 0 < minutes < math.inf:
        raise CommandError(f"--minutes is a number above 0, as 5, not {minutes:g}")
    if not 2 <= nodes <= MOST_NODES:
        raise CommandError(f"--nodes is from 2 to {MOST_NODES}, not {nodes}: one node at least is left alone")
    kinds = _kinds(wanted)
    if bulk == "session":
        if wanted and (of_store := [kind for kind in kinds if kind in OF_STORE]):
            raise CommandError(f"--faults: {', '.join(of_store)} needs --bulk store")
        kinds = [kind for kind in kinds if kind not in OF_STORE]
    from farloop.config.run_spec import plan_run
    from farloop.lab.bench.http_store import ObjectServer
    from farloop.lab.chaos.storm import Storm
    from farloop.quant.registry import warm_for

    _prepare(folder)
    refusal = Ballast(folder / "state").refusal()
    skipped = {"fill_disk": refusal} if refusal and "fill_disk" in kinds else {}
    for kind, why in skipped.items():
        say(f"{kind} is left out: {why}")
    names = [chr(ord("a") + i) for i in range(nodes)]
    seconds = 60.0 * minutes
    faults = plan(seed, seconds=seconds, nodes=names, kinds=[kind for kind in kinds if kind not in skipped])
    say(f"{len(faults)} faults in {duration_text(seconds)}, seed {seed}; logs and numbers: {folder}")
    # Compile the kernels once, before all processes would do it at the same time.
    warm_for(plan_run(RunConfig(**RUN, nodes=nodes), DataConfig(**DATA)).spec.terms)  # type: ignore[arg-type]
    store = ObjectServer() if bulk == "store" else None
    with stop_on_signals() as stopped, store.serving() if store is not None else nullcontext():
        outcome = Storm(
            out=folder, seed=seed, seconds=seconds, nodes=names, faults=faults, store=store, say=say, stopped=stopped
        ).run()
    if outcome.memory:
        draw_memory(folder / "memory.svg", outcome.memory)
    told = {"requests": store.requests, "failed_requests": store.failed} if store is not None else {}
    return outcome, {"minutes": minutes, "nodes": nodes, "skipped": skipped, "bulk": bulk, **told}


def _storm_over_a_pair(
    count: int, seed: int, model: str, parameters: int, folder: Path, say: Callable[[str], None]
) -> tuple["PairOutcome", dict[str, Any]]:
    """As `_storm`, over two coordinators."""
    if count < 1:
        raise CommandError(f"--standby is a number of faults, 1 or more, not {count}")
    check_model(model)
    from farloop.lab.chaos.pair_storm import PairStorm

    _prepare(folder)
    say(f"{count} faults of a leader and its standby, seed {seed}; logs and numbers: {folder}")
    with stop_on_signals() as stopped:
        outcome = PairStorm(
            folder, seed=seed, count=count, model=model, parameters=parameters, say=say, stopped=stopped
        ).run()
    return outcome, {"parameters": parameters} if parameters else {"model": model}


def pair_table(report: dict[str, Any]) -> Table:
    """A row per kind of fault, with the longest time to the next commit, then all of them."""
    shown = table("fault", "times", "next commit, at most", left=("fault",))
    for kind, each in report["by_fault"].items():
        shown.add_row(kind, str(each["count"]), _s(each["max"]))
    every = report["next_commit_s"]
    shown.add_row("all", str(report["faults"]), f"{_s(every['max'])}, median {_s(every['median'])}")
    shown.caption = f"{report['versions']} versions told, {report['lost']} lost, {report['forks']} forks"
    return shown


def _kinds(wanted: str) -> list[Kind]:
    """Kinds from a comma-separated list; an empty one is all. Raises CommandError."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in KINDS:
            raise CommandError(f"--faults: there is no {name!r}; {nearest(name, KINDS)}")
    return [kind for kind in KINDS if kind in names or not names]


def _prepare(folder: Path) -> None:
    """Create an empty folder; it may contain a file system mounted at state. Raises CommandError."""
    state = folder / "state"
    try:
        there = [path for part in (folder, state) if part.is_dir() for path in part.iterdir()]
        if found := [path for path in there if path != state and path.name != "lost+found"]:
            raise CommandError(f"--out: {folder} is not empty ({found[0].name}): chaos needs an empty folder")
        state.mkdir(parents=True, exist_ok=True)
        (folder / "nodes").mkdir()
    except OSError as error:
        raise cannot_write(folder, error) from error


def faults_table(outcome: "Outcome") -> Table:
    """A row per kind of fault: count and recovery times."""
    shown = table("fault", "times", "recovered", "mean", "max", left=("fault",))
    for name, each in outcome.figures()["recovery_s"].items():
        shown.add_row(name, str(each["times"]), str(each["count"]), _s(each["mean"]), _s(each["max"]))
    return shown


def result_table(outcome: "Outcome", folder: Path) -> Table:
    """What must be 0 or equal, and totals."""
    told = outcome.figures()
    shown = facts()
    shown.add_row("windows committed", f"{outcome.committed:,}")
    shown.add_row("faults", str(outcome.faults.total()))
    shown.add_row("lost", str(outcome.lost))
    shown.add_row("forks", str(outcome.forks))
    shown.add_row("holds that the operator released", str(outcome.released))
    shown.add_row("other findings", str(len(outcome.problems)))
    shown.add_row("digests equal", {None: NOTHING, True: "yes", False: "NO"}[outcome.digests_equal])
    shown.add_row("recovery", f"{_s(told['recovery_s_mean'])} mean, {_s(told['recovery_s_max'])} max")
    if COORDINATOR in outcome.memory:
        shown.add_row("coordinator's memory", f"at most {size_text(told['rss_bytes'][COORDINATOR]['max'])}")
    shown.add_row("numbers", str(folder / "chaos.json"))
    return shown


def _s(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.1f} s"


def highest(series: Sequence[tuple[float, int]], stretch_s: float) -> list[tuple[float, int]]:
    """(when, bytes) of the largest in each stretch of time that has any."""
    largest: dict[int, tuple[float, int]] = {}
    for at, size in series:
        number = int(at / stretch_s) if stretch_s > 0.0 else 0
        largest[number] = max(largest.get(number, (at, size)), (at, size), key=lambda one: one[1])
    return [largest[number] for number in sorted(largest)]


_STRETCHES: Final = 80  # of a figure


def draw_memory(path: Path, memory: dict[str, list[tuple[float, int]]]) -> None:
    """Resident memory of every process over time; a new process of a name goes on in its curve.

    Of each stretch the highest: a process that has just been started is small, and many starts would hide the rest.
    """
    from farloop.plots.style import INK, color_of, figure, ticks

    stretch_s = max((series[-1][0] for series in memory.values()), default=0.0) / _STRETCHES
    with figure(path, 9.6, 4.0) as drawn:
        axes = drawn.add_subplot()
        for number, (name, series) in enumerate(sorted(memory.items(), key=lambda item: item[0] != COORDINATOR)):
            times, sizes = zip(*highest(series, stretch_s), strict=True)
            color = INK if name == COORDINATOR else color_of(number - 1)
            axes.plot([t / 60 for t in times], sizes, color=color, linewidth=1.6, label=name)
        axes.set_ylim(0, 1.1 * max(size for series in memory.values() for _, size in series))
        axes.set_xlabel("minutes")
        axes.set_ylabel(f"resident memory, highest of {stretch_s:.0f} s")
        ticks(axes.yaxis, None, size_text)
        axes.legend(loc="lower right", ncols=3, labelcolor="linecolor")
