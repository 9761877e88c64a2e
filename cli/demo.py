"""`farloop demo`: a coordinator and its nodes as processes on this machine, until the run is finished.

It writes the same TOML files, starts the same commands and reads the same pages as a person would.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from safetensors.torch import load_file

from farloop.cli.options import make_output_folder
from farloop.cli.progress import Display, progress_console
from farloop.cli.report import write_report
from farloop.cli.run_results import Summary, summarise, summary_table
from farloop.config.exit_codes import CommandError, ExitCode, write_output
from farloop.config.run_config import RunConfig
from farloop.config.run_spec import Plan, plan_run
from farloop.local.machine import machine, source_commit
from farloop.local.processes import Children, free_port, page, stop_on_signals, write_coordinator, write_node
from farloop.local.relay import Link, Relay, RelayThread
from farloop.monitoring.status import Status, dumps, finished_status
from farloop.monitoring.units import loss_text
from farloop.node.model.built_in import build, from_json
from farloop.node.settings import DataConfig
from farloop.node.trainer import EVALUATION_BATCH
from farloop.quant.registry import warm_for

BASELINE = "data-parallel"
POLL_S = 0.5
PAGE_TIMEOUT_S = 2.0
START_S = 60.0  # time limit for the coordinator's first answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The options of a demo; kept in the run's folder for `--resume`."""

    out: Path
    run: RunConfig
    data: DataConfig
    link: str


def run_demo(
    run: Mapping[str, Any], *, out: Path | None, data: Path | None, link: str, resume: Path | None, as_json: bool
) -> None:
    """Start the processes, show progress, and write the report. `run`: fields of `RunConfig`.

    Raises CommandError: one line.
    """
    console = progress_console(json=as_json)
    try:
        if resume is not None:
            plan = _load(resume)
        else:
            config = RunConfig(name="demo", **run)
            out = out or Path("out") / f"{config.method}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
            plan = DemoPlan(out=out, run=config, data=DataConfig(path=data), link=link)
        planned = plan_run(plan.run, plan.data)
    except ValueError as error:
        raise CommandError(str(error)) from error
    assert planned.evaluation is not None
    # A coordinator refuses settings that ask for more sequences than the text has.
    plan = replace(plan, run=replace(plan.run, evaluation_sequences=len(planned.evaluation)))
    if resume is None:
        if (plan.out / "demo.json").exists():
            raise CommandError(
                f"--out: {plan.out} holds a run already; continue it with --resume {plan.out}, or name another"
            )
        make_output_folder(plan.out)
        kept = {"run": _plain(plan.run), "data": _plain(plan.data), "link": plan.link, "argv": sys.argv[1:]}
        write_output(plan.out / "demo.json", dumps(kept, indent=1))
    for note in planned.notes:
        console.print(f"note: {note}")
    console.print(
        f"run {plan.out}  (stop with Ctrl-C, continue with: farloop demo --resume {plan.out})", soft_wrap=True
    )
    # Compile the kernels once, before all processes would do it at the same time.
    with console.status("compiling kernels (once for this machine and version)"):
        warm_for(planned.spec.terms)
    status = finished_status(plan.out / "state") or _train(plan, console)
    if status is None:
        console.print(f"stopped; continue with: farloop demo --resume {plan.out}", soft_wrap=True)
        raise typer.Exit(130)
    summary = _finish(plan, planned, status)
    report, title = plan.out / "report.html", f"farloop demo: {plan.run.method}"
    write_report(report, summary, plan.out / "state" / "metrics.jsonl", title)
    if as_json:
        typer.echo(dumps(summary))
    else:
        console.print(summary_table(summary))
        console.print(f"report   {report}\nmodel    {plan.out / 'model.safetensors'}", soft_wrap=True)


def _load(folder: Path) -> DemoPlan:
    try:
        kept = json.loads((folder / "demo.json").read_text())
    except OSError as error:
        raise CommandError(f"--resume: {folder} holds no demo run ({error.strerror}: demo.json)") from error
    data = DataConfig(**{**kept["data"], "path": Path(p) if (p := kept["data"].get("path")) else None})
    return DemoPlan(out=folder, run=RunConfig(**kept["run"]), data=data, link=kept["link"])


def _plain(config: RunConfig | DataConfig) -> dict[str, object]:
    """The set fields, ready for JSON and TOML."""
    return {
        name: str(value.resolve()) if isinstance(value, Path) else value
        for name in config.__slots__
        if (value := getattr(config, name)) is not None
    }


def _train(plan: DemoPlan, console: Console) -> Status | None:
    """Run to the end; None if a signal stopped it."""
    bind, http, state = free_port(), free_port(), plan.out / "state"
    link = Link.parse(plan.link) if plan.link else None
    names = [chr(ord("a") + i) if plan.run.nodes <= 26 else f"n{i:03}" for i in range(plan.run.nodes)]
    relays = [Relay(target_host="127.0.0.1", target_port=bind, link=link) for _ in names] if link else []
    with stop_on_signals() as stopped, RelayThread(*relays) as _, Children(plan.out) as children:
        file = write_coordinator(
            plan.out / "run.toml", bind=bind, http=http, state=state, run=_plain(plan.run), data=_plain(plan.data)
        )
        children.start("coordinator", ["coordinator", str(file)], threads=1)
        status = _first_status(http, children)
        for i, name in enumerate(names):
            port = relays[i].port if relays else bind
            threads = max(1, (os.cpu_count() or 1) // len(names))
            file = write_node(plan.out, name, port, threads=threads, data=_plain(plan.data))
            children.start(name, ["node", str(file)], threads=threads)
        with Display(console, link=plan.link) as display:
            while children.running("coordinator") and not stopped:
                status = page(http, PAGE_TIMEOUT_S) or status
                display.update(status)
                children.check()
                time.sleep(POLL_S)
            if not stopped:
                children.check(all_done=True)
                if (end := finished_status(state)) is not None:  # later than any page: with the last bytes and losses
                    display.update(end, last=True)
    return None if stopped else finished_status(state)


def _first_status(http: int, children: Children) -> Status:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        children.check()
        if status := page(http, PAGE_TIMEOUT_S):
            return status
        time.sleep(0.1)
    raise CommandError(f"the coordinator did not answer on port {http} within {START_S:g} s", ExitCode.UNREACHABLE)


def _finish(plan: DemoPlan, planned: Plan, status: Status) -> Summary:
    """Evaluate the initial and the exported model on the same held-out set, and summarise the run."""
    model = build(from_json(planned.spec.identity.model), plan.run.seed)
    evaluation = planned.evaluation
    assert evaluation is not None
    start = evaluation.loss(model, EVALUATION_BATCH)
    exported = plan.out / "model.safetensors"
    with suppress(FileNotFoundError):  # it was moved when the run ended the first time
        (plan.out / "state" / "model.safetensors").replace(exported)
    with torch.no_grad():
        model.load_state_dict(load_file(exported))
    end = evaluation.loss(model, EVALUATION_BATCH)
    summary: Summary = {
        **summarise(status),
        "val_loss_start": start,
        "val_loss_end": end,
        "scored_at": plan.run.steps,
        "seed": planned.spec.identity.seed,
        "command": " ".join(["farloop", *sys.argv[1:]]),
        "machine": machine(),
    }
    if commit := source_commit():
        summary["commit"] = commit
    if plan.run.method != BASELINE:
        _add_baseline(summary, plan)
    write_output(plan.out / "summary.json", dumps(summary, indent=1))
    metrics = plan.out / "metrics.jsonl"
    with suppress(FileExistsError):
        metrics.symlink_to(Path("state") / "metrics.jsonl")
    return summary


def _add_baseline(summary: Summary, plan: DemoPlan) -> None:
    """The loss of data parallel, if the run beside this one that measures it is finished; else how to run it."""
    folder, run = plan.out.with_name(f"{plan.out.name}-{BASELINE}"), plan.run
    kept = folder / "summary.json"
    if kept.is_file():
        theirs, other = json.loads(kept.read_text()), _load(folder)
        same = other.run.method == BASELINE and _same(plan, other)
        if same and theirs["val_loss_start"] == summary["val_loss_start"]:
            loss = float(theirs["val_loss_end"])
            summary["baseline_loss"] = loss
            summary["baseline"] = f"{loss_text(loss)} after the same steps on the same data, measured in {folder}"
            return
        summary["baseline"] = f"not measured: {folder} holds a run of other settings"
        return
    words = ["farloop", "demo", "--method", BASELINE, "--nodes", run.nodes, "--steps", run.steps, "--model", run.model]
    words += ["--seed", run.seed, *(("--data", plan.data.path) if plan.data.path else ()), "--out", folder]
    again = shlex.join(["farloop", "demo", "--resume", str(plan.out)])
    summary["baseline"] = f"not measured; to compare: {shlex.join(map(str, words))} && {again}"


def _same(one: DemoPlan, other: DemoPlan) -> bool:
    """Whether they train one model with the same data, but for the method."""
    own = dict.fromkeys(("method", "codec_up", "codec_down", "h"))
    return _plain(one.run) | own == _plain(other.run) | own and _plain(one.data) == _plain(other.data)
