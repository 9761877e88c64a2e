"""Peak memory of a coordinator and a node, one process each on CPUs, and the prediction (`config/memory.py`)."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farloop.config.exit_codes import CommandError
from farloop.config.memory import JOINS, memory_of
from farloop.config.settings import load_run, planned
from farloop.config.sources import dump_toml

PATIENCE_S = 1800.0  # for the whole run: the model is large for CPUs
_POLL_S = 0.1

_RUN: Mapping[str, object] = {
    "name": "memory",
    "nodes": 1,
    "steps": 16,
    "h": 8,
    "tau": 1,
    "batch_sequences": 1,
    "sequence_tokens": 32,
    "evaluation_sequences": 1,
    "evaluate_every_rounds": 1,
    # By default a run this short has none, and long runs have.
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}
"""Two rounds: a join, commits of every fragment, evaluations, and the end, where all fragments commit at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak resident memory of one process."""

    who: str
    parameters: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_bytes / self.predicted_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """Measured, the process itself included."""
        return self.measured_bytes / self.parameters


def measure(model: str, out: Path, environ: Mapping[str, str]) -> tuple[Peak, Peak]:
    """Peaks of the coordinator and of the node of a short run. Files and logs are in `out`; `environ` is theirs.

    Raises CommandError: a process failed, or took too long.
    """
    port = free_port()
    run: dict[str, dict[str, object]] = {
        "run": {**_RUN, "model": model},
        "data": {"max_bytes": 200_000},
        "coordinator": {"state_dir": str(out / "state"), "bind": f"tcp://127.0.0.1:{port}", "http": ""},
    }
    node = {"name": "a", "coordinator": f"tcp://127.0.0.1:{port}", "state_dir": str(out / "a")}
    (out / "run.toml").write_text(dump_toml(run))
    (out / "node.toml").write_text(dump_toml({"node": node, "data": {"max_bytes": 200_000}}))
    spec = planned(load_run(out / "run.toml", flags=[], environ={}), weights=False).spec
    memory = memory_of(spec)
    told = {
        # The node draws the same first weights, and fetches no snapshots.
        "coordinator": sum(memory.coordinator_ram.values()) - memory.coordinator_ram[JOINS],
        "node": sum(memory.node_host.values()) + sum(memory.node_device.values()),
    }
    peaks = _peaks(out, {**environ, "CUDA_VISIBLE_DEVICES": ""})
    parameters = spec.identity.layout.num_parameters
    coordinator, trained = (
        Peak(who=who, parameters=parameters, predicted_bytes=told[who], measured_bytes=peaks[who]) for who in told
    )
    return coordinator, trained


def _peaks(out: Path, environ: Mapping[str, str]) -> dict[str, int]:
    """Run both to the end; the largest resident memory of each."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    peaks: dict[str, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    try:
        for who, file in (("coordinator", "run.toml"), ("node", "node.toml")):
            command = [sys.executable, "-m", "farloop.cli.main", who, str(out / file)]
            with (out / f"{who}.log").open("wb") as log:
                running[who] = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        while len(peaks) < len(running):
            for who in running.keys() - peaks.keys():
                pid, status, used = os.wait4(running[who].pid, os.WNOHANG)
                if not pid:
                    continue
                running[who].returncode = os.waitstatus_to_exitcode(status)
                if running[who].returncode:
                    raise CommandError(f"the {who} ended with {running[who].returncode}: see {out / f'{who}.log'}")
                peaks[who] = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            if time.monotonic() > deadline:
                raise CommandError(f"not finished after {PATIENCE_S:g} s: see the logs in {out}")
            time.sleep(_POLL_S)
    finally:
        for process in running.values():
            if process.returncode is None:
                process.kill()
                process.wait()
    return peaks


def free_port() -> int:
    """Of this machine's loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
