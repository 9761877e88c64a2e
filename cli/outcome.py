"""What a run came to: the final status and metrics.jsonl added up to a summary (protocol, Figures)."""

import math
import platform
import subprocess
import sys
from pathlib import Path

import torch

from farloop.algo.spec import RunSpec
from farloop.cli.history import History, read_history
from farloop.cli.summary import NodeSummary, Summary
from farloop.monitoring.gist import left_with_the_last
from farloop.monitoring.status import NodeStatus, Status


def summarise(status: Status, metrics: Path, spec: RunSpec, *, loss_start: float, loss_end: float) -> Summary:
    """The figures of a finished run. Byte counts are sums over nodes and over their starts."""
    run, terms = status["run"], spec.terms
    history = read_history(metrics)
    last = history.traffic[-1]
    total = last.bytes_up + last.bytes_down
    merged = merged_steps(history, fragments=run["fragments"], steps=run["steps"])
    data_parallel = 8 * run["parameters"] * merged
    nodes = status["nodes"]
    summary: Summary = {
        "val_loss_start": loss_start,
        "val_loss_end": loss_end,
        "tokens": last.inner_steps * terms.batch_sequences * terms.sequence_tokens,
        "inner_steps": last.inner_steps,
        "merged_steps": merged,
        "outer_steps": status["outer_steps"],
        "nodes": len(nodes),
        "method": run["method"],
        "codec_up": run["codec_up"],
        "codec_down": run["codec_down"],
        "bytes_up": last.bytes_up,
        "bytes_down": last.bytes_down,
        "bytes_data_parallel_fp32": data_parallel,
        "bytes_total": total,
        "bytes_by_kind": last.by_kind,
        "bytes_state": last.bytes_state,
        "reduction": data_parallel / total,
        "digests_equal": all(left_with_the_last(node, status) for node in nodes),
        "compute_share": sum(node["compute_share"] for node in nodes) / len(nodes),
        "wall_s": run["started_s"],
        "digests": status["digests"],
        "parameters": run["parameters"],
        "h": run["h"],
        "steps": run["steps"],
        "seed": spec.identity.seed,
        "command": " ".join(["farloop", *sys.argv[1:]]),
        "machine": machine(),
        "node_table": [_node(node) for node in nodes],
    }
    if commit := source_commit():
        summary["commit"] = commit
    return summary


def merged_steps(history: History, *, fragments: int, steps: int) -> int:
    """Inner steps that data parallel would have needed: without what nodes report as lost, and what a node did beyond
    the run's `steps` as a part of the run was repeated. A killed node reports no loss: up to a round stays counted."""
    return sum(min(inner - math.ceil(lost / fragments), steps) for inner, lost in history.steps.values())


def machine() -> str:
    """This machine in a line: processor, cores, Python and torch."""
    model = platform.processor() or platform.machine()
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = torch.get_num_threads()
    return f"{model}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}"


def source_commit() -> str | None:
    """The commit of the source tree this runs from; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _node(node: NodeStatus) -> NodeSummary:
    return {
        "name": node["name"],
        "device": node["device"],
        "state": node["state"],
        "reason": node["reason"],
        "inner_steps": node["inner_steps"],
        "tokens": node["tokens"],
        "loss": node["loss"],
        "tokens_per_s": node["tokens_per_s"],
        "compute_share": node["compute_share"],
        "blocked_s": node["blocked_s"],
        "lost_steps": node["lost_steps"],
        "skipped_turns": node.get("skipped_turns", 0),
        "bytes_up": node["bytes_up"],
        "bytes_down": node["bytes_down"],
        "bytes_state": node["bytes_state"],
        "digests": node.get("digests", []),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
