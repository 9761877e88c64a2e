"""What a coordinator costs for each number of nodes: sessions, deltas and commits are real, and nodes have no model.

Several nodes share a process (`coordinator_nodes.py`). A commit lasts from when its window closed, all deltas on disk,
until the last node heard of it, or had its update.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from farloop.lab.bench.processes import WITHOUT_GPU, run_together, write_run
from farloop.lab.bench.sync_trace import Marks, cpu_per_round
from farloop.local.processes import free_port
from farloop.monitoring.status import saved_status
from farloop.monitoring.units import size_text

WARM_UP = 2  # rounds that are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of nodes; seconds of the monotonic clock."""

    nodes: int
    parameters: int
    bulk: str  # "session" or "store": what deltas and updates went by
    standby: bool  # whether a second coordinator had all before it was told
    rounds: int
    round_s_median: float
    gb_per_s: float
    """Of deltas and updates, over all links, 10⁹ bytes."""
    told_s_p50: float  # from the close of a window until the last node heard of its commit
    told_s_p99: float
    held_s_p50: float  # ... until the last node had its update
    held_s_p99: float
    cpu_s_per_commit_and_node: float  # of the coordinator's process
    peak_bytes: int  # resident memory of the coordinator
    mirrored_bytes: int  # to the standby, with its first copy of the state


def measure(
    nodes: int,
    parameters: int,
    codec: str,
    rounds: int,
    processes: int,
    step_s: float,
    store: str,
    out: Path,
    *,
    standby: bool = False,
) -> Row:
    """This number of nodes, whose steps last `step_s` and whose files and logs are in a folder of `out`.

    `store`: URL of the object store that deltas and updates go by; empty: they go by the session.
    `standby`: the nodes begin once a second coordinator is in sync.
    Raises CommandError: a process failed, or took too long.
    """
    bulk = "store" if store else "session"
    out = out / f"{nodes}-{bulk}{'-standby' * standby}"
    out.mkdir(parents=True)
    weights = {"weights": torch.zeros(parameters, dtype=torch.float32, device="cpu")}
    run = {"name": "coordinator", "nodes": nodes, "steps": rounds + WARM_UP, "method": "diloco"}
    pair: dict[str, object] = {}
    if standby:
        mirror = f"tcp://127.0.0.1:{free_port()}"
        pair = {"name": "a", "leads_by": f"file://{out}/record", "mirror": mirror, "peers": mirror}
    port = write_run(out, weights, {**run, "h": 1, "tau": 0, "mix": 0.0}, codec=codec, store=store, **pair)
    address = f"tcp://127.0.0.1:{port}"
    commands = {"coordinator": ["-m", "farloop.lab.bench.sync_trace", "marks.json", "coordinator", "run.toml"]}
    after = {}
    if standby:
        own = {"name": "b", "state_dir": "state-b", **dict.fromkeys(("bind", "mirror"), "tcp://127.0.0.1:0")}
        sets = [word for key, value in own.items() for word in ("--set", f"coordinator.{key}={value}")]
        commands["standby"] = ["-m", "farloop.cli.main", "coordinator", "run.toml", *sets]
        after["standby"] = out / "record/leader/00000002.json"  # a has begun the run
    cuts = [nodes * part // min(processes, nodes) for part in range(min(processes, nodes) + 1)]
    for first, last in pairwise(cuts):
        words = [f"nodes-{first}.json", address, str(first), str(last - first), str(step_s)]
        commands[f"nodes-{first}"] = ["-m", "farloop.lab.bench.coordinator_nodes", *words]
        if standby:
            after[f"nodes-{first}"] = out / "record/leader/00000003.json"  # b is in sync
    peaks = run_together(commands, out, WITHOUT_GPU, after=after)
    status = saved_status(out / "state")
    seen = [node for first in cuts[:-1] for node in json.loads((out / f"nodes-{first}.json").read_text())]
    marks, counted = Marks.read(out / "marks.json"), range(WARM_UP + 1, WARM_UP + rounds + 1)
    closed = {mark.version: mark.at for mark in marks if mark.name == "stored"}
    told, held = (
        [max(node[what][str(version)] for node in seen) - closed[version] for version in counted]
        for what in ("told", "held")
    )
    sent = sum(node["bytes"] for node in seen) / (rounds + WARM_UP)
    closings = [closed[version] for version in counted]
    round_s = statistics.median(later - earlier for earlier, later in pairwise(closings))
    return Row(
        nodes=nodes,
        parameters=parameters,
        bulk=bulk,
        standby=standby,
        rounds=rounds,
        round_s_median=round_s,
        gb_per_s=1e-9 * sent / round_s,
        told_s_p50=statistics.median(told),
        told_s_p99=_percentile(told, 0.99),
        held_s_p50=statistics.median(held),
        held_s_p99=_percentile(held, 0.99),
        cpu_s_per_commit_and_node=cpu_per_round(marks, WARM_UP + 1) / nodes,
        peak_bytes=peaks["coordinator"],
        mirrored_bytes=status["standby"]["bytes"] if status is not None and "standby" in status else 0,
    )


def text(rows: Sequence[Row]) -> str:
    """A table of what `measure` found."""
    lines = [
        f"nodes  bulk     {'round':>8}  {'GB/s':>6}  {'told p50, p99':>16}  {'held p50, p99':>16}  CPU a node  memory"
    ]
    for row in rows:
        told_s, held_s = ((row.told_s_p50, row.told_s_p99), (row.held_s_p50, row.held_s_p99))
        times = "  ".join(f"{1e3 * p50:6.0f}, {1e3 * p99:5.0f} ms" for p50, p99 in (told_s, held_s))
        lines.append(
            f"{row.nodes:5}  {row.bulk:<7}  {row.round_s_median:6.2f} s  {row.gb_per_s:6.3f}  {times}  "
            f"{1e3 * row.cpu_s_per_commit_and_node:7.2f} ms  {size_text(row.peak_bytes)}"
            + (f", {size_text(row.mirrored_bytes)} to a standby" if row.standby else "")
        )
    return "\n".join(lines)


def _percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
