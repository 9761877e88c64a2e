"""`farloop demo`: a coordinator and its nodes as processes on this machine, until the run is finished.

It writes the same TOML files, starts the same commands and reads the same pages as a person would.
"""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from safetensors.torch import load_file

from farloop.chaos.processes import Children, free_port, stop_on_signals
from farloop.chaos.relay import Link, Relay, RelayThread
from farloop.cli.progress import Display, progress_console
from farloop.cli.report import write_report
from farloop.cli.run_results import Summary, summarise, summary_table
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.config.run_spec import DataConfig, Plan, RunConfig, plan_run
from farloop.config.sources import dump_toml
from farloop.monitoring.status import Status
from farloop.node.model import build, from_json
from farloop.node.trainer import EVALUATION_BATCH
from farloop.quant.registry import warm_for

POLL_S = 0.5
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

    Raises:
        CommandError: one line.
    """
    console = progress_console(json=as_json)
    try:
        if link:
            Link.parse(link)
        if resume is not None:
            plan = _load(resume)
        else:
            config = RunConfig(name="demo", **run)
            plan = DemoPlan(out=out or _new_folder(config.method), run=config, data=DataConfig(path=data), link=link)
        planned = plan_run(plan.run, plan.data)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if resume is None:
        _prepare(plan)
    for note in planned.notes:
        console.print(f"note: {note}")
    console.print(f"run {plan.out}  (stop with Ctrl-C, go on with: farloop demo --resume {plan.out})", soft_wrap=True)
    # Compile the kernels once, before all processes would do it at the same time.
    with console.status("compiling kernels (once for this machine and version)"):
        warm_for(planned.spec.terms)
    status = _final_status(plan) or _train(plan, console)
    if status is None:
        console.print(f"stopped; go on with: farloop demo --resume {plan.out}", soft_wrap=True)
        raise typer.Exit(130)
    summary = _finish(plan, planned, status)
    report = write_report(plan.out, summary, plan.out / "state" / "metrics.jsonl", f"farloop demo: {plan.run.method}")
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        console.print(summary_table(summary))
        console.print(f"report   {report}\nmodel    {plan.out / 'model.safetensors'}", soft_wrap=True)


def _new_folder(method: str) -> Path:
    return Path("out") / f"{method}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _prepare(plan: DemoPlan) -> None:
    if (plan.out / "demo.json").exists():
        raise CommandError(f"--out: {plan.out} holds a run already; go on with --resume {plan.out}, or name another")
    plan.out.mkdir(parents=True, exist_ok=True)
    kept = {"run": _plain(plan.run), "data": _plain(plan.data), "link": plan.link, "argv": sys.argv[1:]}
    (plan.out / "demo.json").write_text(json.dumps(kept, indent=1))


def _load(folder: Path) -> DemoPlan:
    try:
        kept = json.loads((folder / "demo.json").read_text())
    except OSError as error:
        raise CommandError(f"--resume: {folder} holds no demo run ({error.strerror}: demo.json)") from error
    data = DataConfig(**{**kept["data"], "path": Path(p) if (p := kept["data"].get("path")) else None})
    return DemoPlan(out=folder, run=RunConfig(**kept["run"]), data=data, link=kept["link"])


def _plain(config: RunConfig | DataConfig) -> dict[str, object]:
    """The set fields, ready for JSON and TOML."""
    values = {name: getattr(config, name) for name in config.__slots__}
    return {
        name: str(value.resolve()) if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None
    }


def _final_status(plan: DemoPlan) -> Status | None:
    """The last status of a finished run, else None."""
    try:
        status: Status = json.loads((plan.out / "state" / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return status if status["run"]["state"] == "finished" else None


def _train(plan: DemoPlan, console: Console) -> Status | None:
    """Run to the end; None if a signal stopped it."""
    bind, http = free_port(), free_port()
    link = Link.parse(plan.link) if plan.link else None
    names = [chr(ord("a") + i) if plan.run.nodes <= 26 else f"n{i:03}" for i in range(plan.run.nodes)]
    relays = [Relay(target_host="127.0.0.1", target_port=bind, link=link) for _ in names] if link else []
    with stop_on_signals() as stopped, RelayThread(*relays) as _, Children(plan.out) as children:
        children.start("coordinator", ["coordinator", str(_coordinator_toml(plan, bind, http))], threads=1)
        status = _first_status(http, children)
        for i, name in enumerate(names):
            port = relays[i].port if relays else bind
            threads = max(1, (os.cpu_count() or 1) // len(names))
            children.start(name, ["node", str(_node_toml(plan, name, port, threads))], threads=threads)
        with Display(console, link=plan.link) as display:
            while children.running("coordinator") and not stopped:
                status = _poll(http) or status
                display.update(status)
                children.check()
                time.sleep(POLL_S)
        if stopped:
            return None
        children.check(all_done=True)
    return _final_status(plan)


def _coordinator_toml(plan: DemoPlan, bind: int, http: int) -> Path:
    coordinator = {
        "bind": f"tcp://127.0.0.1:{bind}",
        "http": f"127.0.0.1:{http}",
        "state_dir": str((plan.out / "state").resolve()),
    }
    return _write(
        plan.out / "run.toml", {"run": _plain(plan.run), "data": _plain(plan.data), "coordinator": coordinator}
    )


def _node_toml(plan: DemoPlan, name: str, port: int, threads: int) -> Path:
    node = {
        "name": name,
        "coordinator": f"tcp://127.0.0.1:{port}",
        "state_dir": str((plan.out / "nodes" / name).resolve()),
        "threads": threads,
    }
    return _write(plan.out / f"node-{name}.toml", {"node": node, "data": _plain(plan.data)})


def _write(path: Path, tables: Mapping[str, Mapping[str, object]]) -> Path:
    path.write_text(dump_toml(tables))
    return path


def _first_status(http: int, children: Children) -> Status:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        children.check()
        if status := _poll(http):
            return status
        time.sleep(0.1)
    raise CommandError(f"the coordinator did not answer on port {http} within {START_S:g} s", ExitCode.UNREACHABLE)


def _poll(http: int) -> Status | None:
    with suppress(OSError, ValueError), urllib.request.urlopen(f"http://127.0.0.1:{http}/status", timeout=2) as answer:
        status: Status = json.load(answer)
        return status
    return None


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
    summary = summarise(status, plan.out / "state" / "metrics.jsonl", planned.spec, loss_start=start, loss_end=end)
    (plan.out / "summary.json").write_text(json.dumps(summary, indent=1))
    metrics = plan.out / "metrics.jsonl"
    with suppress(FileExistsError):
        metrics.symlink_to(Path("state") / "metrics.jsonl")
    return summary
