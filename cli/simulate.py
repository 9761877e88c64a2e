"""`farloop lab simulate bandwidth` and `farloop lab simulate run`; the simulators are in `farloop.sim`."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farloop.cli.options import AsJson, Commands, Plot, check_figure, table
from farloop.config.exit_codes import CommandError
from farloop.monitoring.status import dumps
from farloop.monitoring.units import NOTHING, ascii_number, count_text, duration_text, percent_text, plural, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from farloop.sim.bandwidth import MethodName, ModelName, Training
    from farloop.sim.flow.scenario import Case, FlowScenario
    from farloop.sim.flow.simulator import Row


ALL = "all"

GBIT_S = "0.1,0.3,1,3,10,30,100,300,1000"

H, LAYERS_PER_FRAGMENT = 100, 3  # those of Table 4 of Streaming DiLoCo (arXiv 2501.18512)

LADDER: "Mapping[ModelName, tuple[int, float]]" = {"farloop": (5, 4.25), "published": (1, 4.0)}
"""Overlap and bits that the upper steps of `--method all` add: the paper's longest and `q4`; those of that table."""

_OPTIONS = frozenset({"params", "layers", "step_s", "h", "bits", "layers_per_fragment", "overlap", "lag"})
"""Keys of a training that are options."""

SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A training and what the simulator says of it."""

    training: "Training"
    required_gbit_s: Mapping[float, float]  # by utilisation
    utilization: Mapping[float, float]  # by Gbit/s


def bandwidth(
    params: Annotated[str, typer.Option(help="Parameters of the model, e.g. 1e9, 1B or 350M.")] = "1B",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 24,
    step_s: Annotated[float, typer.Option("--step-s", help="Compute time of one inner step.")] = 0.1,
    method: Annotated[str, typer.Option(help="data-parallel, diloco or streaming; all compares them.")] = "streaming",
    model: Annotated[
        str,
        typer.Option(help="farloop, or published: as in the Streaming DiLoCo paper."),
    ] = "farloop",
    h: Annotated[
        int | None,
        typer.Option(
            "--h", help="Inner steps between two syncs of the same parameters.", show_default=f"{H}; data-parallel: 1"
        ),
    ] = None,
    bits: Annotated[
        float, typer.Option(help="Bits per parameter and sync; farloop lab codecs lists those of codecs.")
    ] = 16.0,
    layers_per_fragment: Annotated[
        int | None,
        typer.Option(
            "--layers-per-fragment", help="Layers per fragment, for streaming.", show_default=str(LAYERS_PER_FRAGMENT)
        ),
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(
            help="Inner steps of training during a transfer (tau).",
            show_default=f"0; with all: {LADDER['farloop'][0]}, published: {LADDER['published'][0]}",
        ),
    ] = None,
    lag: Annotated[int, typer.Option(help="Rounds by which an update may be late: 0, or 1 as in co2.")] = 0,
    gbit_s: Annotated[
        str, typer.Option("--gbit-s", metavar="LIST", help="Bandwidths to simulate, in Gbit/s.")
    ] = GBIT_S,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compute utilisation for a given bandwidth, and the bandwidth for a given utilisation.

    Model farloop: a fragment that is due is uploaded at a step boundary, and its
    update merged --overlap steps after the send, or with --lag 1 in the next round.
    Model published: each layer queues on one link when its backward pass ends, and
    its next forward pass, or the one --overlap steps later, waits for it (with
    --method all, always that of data-parallel).

    All nodes are alike: give the slowest link and step. Latency, encoding, commits
    and traffic within a site are not simulated.

    Example: farloop lab simulate bandwidth --method all --params 10B --layers 48 --step-s 0.8
    """
    from farloop.sim.bandwidth import required_gbit_s, utilization

    check_figure(plot)
    bandwidths = parse_bandwidths(gbit_s)
    try:
        trainings = plan(
            method,
            params=parse_number(params),
            layers=layers,
            step_s=step_s,
            h=h,
            bits=bits,
            layers_per_fragment=layers_per_fragment,
            overlap=overlap,
            lag=lag,
            model=model,
        )
    except ValueError as error:
        key, rest = re.split(r"(?=[ :])", str(error), maxsplit=1)
        raise CommandError(f"--{key.replace('_', '-')}{rest}" if key in _OPTIONS else str(error)) from error
    for note in unused(method, h=h, layers_per_fragment=layers_per_fragment, overlap=overlap):
        typer.echo(f"farloop: {note}", err=True)
    curves = [
        Curve(
            training=training,
            required_gbit_s=required_gbit_s(training),
            utilization=dict(zip(bandwidths, utilization(training, bandwidths).tolist(), strict=True)),
        )
        for training in trainings
    ]
    if plot is not None:
        from farloop.plots.simulation import draw_bandwidth

        draw_bandwidth(plot, trainings)
    if as_json:
        found = [curve_json(curve) for curve in curves]
        typer.echo(dumps({"methods": found} if method == ALL else found[0], indent=1))
    else:
        _show(curves, plot)


def plan(
    method: str,
    *,
    params: float,
    layers: int,
    step_s: float,
    h: int | None,
    bits: float,
    layers_per_fragment: int | None,
    overlap: int | None,
    lag: int = 0,
    model: str = "farloop",
) -> "list[Training]":
    """The trainings to compare; `all` is a ladder in which each step adds one technique.

    Without an overlap, farloop's streaming waits as long as diloco: its ladder starts with an overlap.
    Raises ValueError: the options contradict each other.
    """
    from farloop.sim.bandwidth import METHOD_NAMES, MODEL_NAMES, Training

    known = next((name for name in MODEL_NAMES if name == model), None)
    if known is None:
        raise ValueError(f"there is no model {model!r}; there are {' and '.join(MODEL_NAMES)}")

    def training(name: "MethodName", **more: Any) -> Training:
        period = 1 if name == "data-parallel" else H if h is None else h
        return Training(**{**shared, **more}, method=name, h=period)

    each = min(LAYERS_PER_FRAGMENT, max(1, layers)) if layers_per_fragment is None else layers_per_fragment
    shared: dict[str, Any] = {"params": params, "layers": layers, "step_s": step_s, "bits": bits}
    shared |= {"layers_per_fragment": each, "model": known, "lag": lag}
    if method != ALL:
        name = next((name for name in METHOD_NAMES if name == method), None)
        if name is None:
            raise ValueError(f"there is no method {method!r} here; there are {', '.join(METHOD_NAMES)} and {ALL}")
        return [training(name, overlap=0 if name == "data-parallel" else overlap or 0)]
    few_steps, few_bits = LADDER[known]
    few_steps = 0 if lag else few_steps if overlap is None else overlap
    ladder = [training("data-parallel", model="published", lag=0), training("diloco")]
    if known == "published" or few_steps == 0:
        ladder.append(training("streaming"))
    if few_steps != 0:
        ladder.append(training("streaming", overlap=few_steps))
    if bits > few_bits:
        ladder.append(replace(ladder[-1], bits=few_bits))
    return ladder


def unused(method: str, *, h: int | None, layers_per_fragment: int | None, overlap: int | None) -> Iterator[str]:
    """A sentence for each option that does not apply to the method."""
    if method == "data-parallel" and h not in (None, 1):
        yield f"data-parallel syncs at every step: --h {h} does not apply to it"
    if method == "data-parallel" and overlap:
        yield f"data-parallel waits for its gradients: --overlap {overlap} does not apply to it"
    if method in ("data-parallel", "diloco") and layers_per_fragment is not None:
        yield f"{method} sends the model whole: --layers-per-fragment {layers_per_fragment} does not apply to it"


def parse_number(text: str) -> float:
    """`1e9`, `1B` or `350M` as a number. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?) ?([kKmMbBgGtT]?)", text.strip())
    try:
        return float(match[1]) * SCALES[match[2].lower()] if match else float(ascii_number(text))
    except ValueError:
        raise ValueError(f"--params: {text!r} is no number of parameters, as 1e9, 1B and 350M are") from None


def parse_bandwidths(text: str) -> list[float]:
    """`1,10,100` as numbers above 0, each once. Raises CommandError."""
    words = text.replace(",", " ").split()
    try:
        found = [float(ascii_number(word)) for word in words]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(value) and value > 0 for value in found):
        raise CommandError(f"--gbit-s is a list of numbers above 0, as 1,10,100, not {text!r}")
    return list(dict.fromkeys(found))


def curve_json(curve: Curve) -> dict[str, Any]:
    """For programs; `required_gbit_s` by utilisation, `utilization` by Gbit/s."""
    training = curve.training
    return {
        "method": training.method,
        "model": training.model,
        "params": int(training.params) if training.params.is_integer() else training.params,
        "layers": training.layers,
        "step_s": training.step_s,
        "h": training.h,
        "bits": training.bits,
        "fragments": training.fragments,
        "overlap": training.overlap,
        "lag": training.lag,
        "payload_gbit": training.payload_bits / 1e9,
        "mean_gbit_s": training.mean_gbit_s,
        "required_gbit_s": {f"{target:g}": value for target, value in curve.required_gbit_s.items()},
        "utilization": {f"{gbit_s:.12g}": value for gbit_s, value in curve.utilization.items()},
    }


def _show(curves: Sequence[Curve], plot: Path | None) -> None:
    from rich.console import Console

    from farloop.sim.bandwidth import model_lines, model_text

    console = Console(highlight=False)
    console.print(f"\n {model_text(curves[0].training)}", soft_wrap=True)
    for line in model_lines([curve.training for curve in curves]):
        console.print(f" {line}", soft_wrap=True)
    console.print("\n Gbit/s for a compute utilisation of:")
    console.print(required_table(curves))
    console.print(" Compute utilisation by Gbit/s:")
    console.print(utilization_table(curves))
    if plot is not None:
        console.print(f" figure  {plot}", soft_wrap=True)


def required_table(curves: Sequence[Curve]) -> "Table":
    """A row per training: its settings, and the bandwidth for each utilisation."""
    from farloop.sim.bandwidth import gbit_text

    targets = list(curves[0].required_gbit_s)
    percent = [f"{100 * target:g}%" for target in targets]
    rows = table("method", "H", "τ", "bits", "parts", *percent, left=("method",))
    for name, curve in zip(_names(curves), curves, strict=True):
        training = curve.training
        settings = [str(training.h), str(training.overlap), f"{training.bits:g}", str(training.fragments)]
        rows.add_row(name, *settings, *(gbit_text(curve.required_gbit_s[target]) for target in targets))
    return rows


def utilization_table(curves: Sequence[Curve]) -> "Table":
    """A row per bandwidth, a column per training."""
    rows = table("Gbit/s", *_names(curves))
    for gbit_s in curves[0].utilization:
        rows.add_row(f"{gbit_s:,.12g}", *(percent_text(curve.utilization[gbit_s]) for curve in curves))
    return rows


def _names(curves: Sequence[Curve]) -> list[str]:
    from farloop.sim.bandwidth import short_name

    trainings = [curve.training for curve in curves]
    return [short_name(training, before) for training, before in zip(trainings, [None, *trainings], strict=False)]


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO.toml", show_default=False, help="The scenario.")
    ] = None,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", show_default=False, help="Use a scenario that comes with farloop.")
    ] = None,
    list_examples: Annotated[bool, typer.Option("--list", help="List the examples.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the example's file as a template.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, show_default="the scenario's", help="Seed of all random events.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, show_default="the scenario's", help="Number of seeds to average over."),
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Simulate nodes, links and failures on virtual time, and show how the machine time was spent.

    Goodput is the share of all machine-seconds whose work was merged (data parallel:
    whose step was kept). The rest was idle (waiting, joining), down (failed or
    recovering) or lost (computed but never merged). Nothing is trained: thousands of
    nodes take seconds.

    Example: farloop lab simulate run --example failures --plot failures.svg
    """
    from farloop.config.scenario_file import example_names, example_text, load_example, load_scenario
    from farloop.sim.flow.simulator import Stuck, run_all

    if list_examples:
        names = example_names()
        for name in names:
            typer.echo(f"{name:<{max(map(len, names))}}  {load_example(name).about}")
        return
    check_figure(plot)
    if (file is None) == (example is None):
        raise CommandError(f"give either a SCENARIO.toml or --example, one of {', '.join(example_names())}")
    scenario = load_scenario(file) if file else load_example(example or "")
    given: dict[str, Any] = {"seed": seed, "repeats": repeats}
    try:
        scenario = replace(scenario, **{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise CommandError(str(error)) from error
    if show:
        if example is None:
            raise CommandError("--show goes with --example: it prints that file")
        return typer.echo(example_text(example))
    timeline = plot is not None and scenario.sweep is None
    try:
        with _watched(scenario, quiet=as_json) as watch:
            rows = run_all(scenario, timeline=timeline, watch=watch)
    except Stuck as error:
        raise CommandError(f"{scenario.name} never finishes: {error}") from error
    if plot is not None:
        from farloop.plots.simulation import draw_flow

        draw_flow(plot, scenario, rows)
    if as_json:
        typer.echo(dumps(report_json(scenario, rows), indent=1))
    else:
        _show_outcome(scenario, rows, plot)


@contextmanager
def _watched(scenario: "FlowScenario", *, quiet: bool) -> "Iterator[Callable[[Case], None]]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from farloop.sim.flow.scenario import cases

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(scenario.name, total=len(cases(scenario)))
        begun = False

        def watch(case: "Case") -> None:
            nonlocal begun
            bar.update(task, advance=begun, description=case.variant + (f" {case.value:g}" if case.value else ""))
            begun = True

        yield watch


def report_json(scenario: "FlowScenario", rows: "Sequence[Row]") -> dict[str, Any]:
    return {
        "name": scenario.name,
        "about": scenario.about,
        "seed": scenario.seed,
        "repeats": scenario.repeats,
        "steps": scenario.steps,
        "hours": scenario.hours,
        "swept": scenario.sweep.key if scenario.sweep else None,
        "rows": [row.figures() for row in rows],
    }


def _show_outcome(scenario: "FlowScenario", rows: "Sequence[Row]", plot: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"\n {scenario.name}: {scenario.about}\n" if scenario.about else f"\n {scenario.name}\n")
    console.print(shares_table(scenario, rows))
    console.print(work_table(scenario, rows))
    seeds = plural(scenario.repeats, "seed")
    console.print(f" Means over {seeds} from {scenario.seed}; shares are of all machine-seconds.", style="dim")
    if scenario.steps and any(row.time_to_steps_s is None for row in rows):
        console.print(f" * ended before its {scenario.steps:,} inner steps", style="dim")
    if plot is not None:
        console.print(f" figure  {plot}", soft_wrap=True)


def shares_table(scenario: "FlowScenario", rows: "Sequence[Row]") -> "Table":
    """A row per variant and swept value: shares of the machine time."""
    published = any(row.published is not None for row in rows)
    titles = ["goodput", *(["published"] if published else []), "idle", "down", "lost", "stale"]
    cells = []
    for row in rows:
        figures = row.figures()
        beside = [NOTHING if row.published is None else percent_text(row.published)] if published else []
        shares = [percent_text(figures[f"{what}_share"]) for what in ("idle", "down", "lost", "stale")]
        cells.append([percent_text(figures["goodput"]), *beside, *shares])
    return _outcome_table(scenario, rows, titles, cells)


def work_table(scenario: "FlowScenario", rows: "Sequence[Row]") -> "Table":
    """A row per variant and swept value: steps and bytes of all nodes."""
    titles = ["rounds", *(["in"] if scenario.steps else []), "lost steps", "up", "down", "state"]
    cells = []
    for row in rows:
        figures = row.figures()
        late = "" if figures["time_to_steps_s"] is not None else " *"
        cells.append(
            [
                count_text(figures["outer_steps"]),
                *([duration_text(figures["seconds"]) + late] if scenario.steps else []),
                count_text(figures["lost_steps"]),
                *(size_text(figures[f"bytes_{way}"]) for way in ("up", "down", "state")),
            ]
        )
    return _outcome_table(scenario, rows, titles, cells)


def _outcome_table(
    scenario: "FlowScenario", rows: "Sequence[Row]", titles: Sequence[str], cells: Sequence[Sequence[str]]
) -> "Table":
    swept = [scenario.sweep.key] if scenario.sweep else []
    found = table(*swept, "", *titles, fold=("",))
    found.columns[len(swept)].min_width = min(12, max(len(row.variant) for row in rows))
    before: float | None = None
    for row, line in zip(rows, cells, strict=True):
        begins = row.value != before
        if begins and before is not None:
            found.add_section()
        value = [f"{row.value:,.12g}" if begins else ""] if scenario.sweep and row.value is not None else []
        found.add_row(*value, row.variant, *line)
        before = row.value
    return found


simulate_app = Commands("Predict the cost of a link, a method or failures before a run starts.")
simulate_app.command()(bandwidth)
simulate_app.command()(run)
