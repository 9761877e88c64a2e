"""The files of a storm's run: the TOML that a person would write for it, and the pace of its nodes."""

import os
from collections.abc import Mapping
from pathlib import Path

from farloop.cli.admin_client import change_terms
from farloop.cli.exit_codes import CommandError
from farloop.cli.toml import dump_toml

PACE = "pace"
"""The file with the seconds of an inner step: see `storm_node.py`."""

RUN: dict[str, object] = {
    "name": "chaos",
    "model": "nano",
    "method": "streaming",
    "h": 3,
    "tau": 1,
    "batch_sequences": 4,
    "sequence_tokens": 32,
    "evaluation_sequences": 8,
    "evaluate_every_rounds": 20,
    "warmup_steps": 5,
}
"""Small and quick: every inner step has a send and a merge."""

DATA: dict[str, object] = {"max_bytes": 500_000}


def coordinator_toml(
    out: Path, run: Mapping[str, object], *, bind: int, http: int, state: Path | None = None, name: str = "run"
) -> Path:
    """Of a run with these settings over the usual ones, on these ports of this machine; `state` is OUT/state."""
    coordinator = {
        "bind": f"tcp://127.0.0.1:{bind}",
        "http": f"127.0.0.1:{http}",
        "state_dir": str(state or out / "state"),
    }
    return _write(out / f"{name}.toml", {"run": {**RUN, **run}, "data": DATA, "coordinator": coordinator})


def node_toml(out: Path, name: str, port: int) -> Path:
    """Of a node that dials this port of this machine."""
    node = {
        "name": name,
        "coordinator": f"tcp://127.0.0.1:{port}",
        "state_dir": str(out / "nodes" / name),
        "threads": 1,
    }
    return _write(out / f"node-{name}.toml", {"node": node, "data": DATA})


def set_pace(out: Path, seconds: float) -> None:
    """From here on an inner step takes this long at least, on every node."""
    new = out / f"{PACE}.tmp"
    new.write_text(f"{seconds:.4f}")
    os.replace(new, out / PACE)


def shorten(state: Path, steps: int) -> str:
    """Give the run of this folder fewer steps; why that cannot be, or nothing."""
    try:
        change_terms([f"steps={steps}"], state, dry_run=False)
    except CommandError as error:
        return str(error)
    return ""


def _write(path: Path, tables: Mapping[str, Mapping[str, object]]) -> Path:
    path.write_text(dump_toml(tables))
    return path
