"""Results of a run: curves read back from metrics.jsonl, and its status summed up."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from rich import box
from rich.table import Table
from rich.text import Text

from farloop.coordinator.observe.event_log import BYTE_KINDS, Totals, files, parsed
from farloop.monitoring.status import BytesStatus, NodeStatus, Status
from farloop.monitoring.status_summary import data_parallel_bytes, left_with_the_last, merged_steps, reduction
from farloop.monitoring.units import count_text, duration_text, factor_text, loss_text, percent_text, plural, size_text

_log = logging.getLogger(__name__)

# --- metrics.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Sums over all nodes at one moment."""

    t: float  # seconds since the run's start
    bytes_up: int
    bytes_down: int
    bytes_state: int  # of these: snapshots and probes
    inner_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """A line of the report's events: a node that joined, left or changed its state, a delta that was not merged."""

    t: float
    text: str


@dataclass(slots=True, kw_only=True)
class History:
    """Filled by `read_history`; curves are in the order of time."""

    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Per node: (tokens of all nodes so far, its training loss), so that every curve shares one axis."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(tokens of all nodes so far, validation loss)."""
    traffic: list[Traffic] = field(default_factory=list)
    occurrences: list[Occurrence] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are not events: a killed run may end in half a line."""


def read_history(path: Path) -> History:
    """Read a metrics file and its older parts; without one, the history is empty.

    Damaged lines are counted as unreadable. A file that cannot be read is left out, with a warning.
    """
    history, totals = History(), Totals()
    for part in files(path):
        try:
            with part.open(encoding="utf-8", errors="replace") as lines:
                for line in filter(str.strip, lines):
                    _read_line(line, history, totals)
        except OSError as error:
            _log.warning("metrics not read path=%s why=%r note='the report lacks its events'", part, error.strerror)
    return history


def _read_line(line: str, history: History, totals: Totals) -> None:
    try:
        if (event := parsed(line)) is None:
            raise ValueError("no event")
        if read := _READERS.get(event["event"]):  # events of a newer version are no error
            read(event, history, totals)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        history.unreadable += 1


def _progress(event: dict[str, Any], history: History, totals: Totals) -> None:
    node = str(event["node"])
    totals.update(node, event)
    if event["loss"] is not None:
        history.losses.setdefault(node, []).append((totals.all["tokens"], float(event["loss"])))
    history.traffic.append(
        Traffic(
            t=float(event["t"]),
            bytes_up=totals.all["bytes_up"],
            bytes_down=totals.all["bytes_down"],
            bytes_state=totals.all["snapshot"] + totals.all["probe"],
            inner_steps=totals.all["inner_steps"],
        )
    )


def _evaluation(event: dict[str, Any], history: History, totals: Totals) -> None:
    if event["loss"] is not None:
        history.evaluations.append((totals.all["tokens"], float(event["loss"])))


def _commit(event: dict[str, Any], history: History, totals: Totals) -> None:
    for node, reason in event["drops"]:
        text = f"{node}: delta for window {event['version']} of fragment {event['fragment']} dropped: {reason}"
        history.occurrences.append(Occurrence(t=float(event["t"]), text=text))


def _node(event: dict[str, Any], history: History, totals: Totals) -> None:
    reason = f": {event['reason']}" if event.get("reason") else ""
    history.occurrences.append(Occurrence(t=float(event["t"]), text=f"{event['name']} {event['state']}{reason}"))


_READERS = {"progress": _progress, "evaluation": _evaluation, "commit": _commit, "node": _node}


# --- the summary, as `--json` prints it, and as a table on the terminal


class NodeSummary(TypedDict):
    """One node, as the final status has it; unknown fields are left out."""

    name: str
    device: NotRequired[str]
    state: NotRequired[str]
    reason: NotRequired[str]
    inner_steps: NotRequired[int]
    tokens: NotRequired[int]
    loss: NotRequired[float | None]
    tokens_per_s: NotRequired[float]  # of the whole run
    compute_share: NotRequired[float]
    blocked_s: NotRequired[float]
    lost_steps: NotRequired[int]
    skipped_turns: NotRequired[int]
    bytes_up: NotRequired[int]
    bytes_down: NotRequired[int]
    bytes_state: NotRequired[int]
    digests: NotRequired[list[str]]  # digests of its own anchors, in fragment order


class Summary(TypedDict):
    """The figures of a run. Byte counts are sums over nodes."""

    val_loss_start: float | None
    val_loss_end: float | None
    baseline_loss: NotRequired[float]  # validation loss at the end of a data-parallel run of the same settings
    baseline: NotRequired[str]  # in words: that loss and where it was measured, or how to measure it
    tokens: int
    inner_steps: int  # over all starts of all nodes
    merged_steps: int  # of them those that count for `reduction`: not lost, and not done twice
    outer_steps: int
    nodes: int
    method: str
    codec_up: str
    codec_down: str
    bytes_up: int
    bytes_down: int
    bytes_data_parallel_fp32: int
    """Of the merged steps: fp32 gradients up and their mean down, every step of every node."""
    bytes_total: int  # `bytes_up` + `bytes_down`: all bytes of the run, of all kinds
    bytes_by_kind: BytesStatus  # both directions; their sum is `bytes_total`
    bytes_state: int  # of `bytes_total`: snapshots and probes
    reduction: float  # `bytes_data_parallel_fp32` ÷ `bytes_total`
    digests_equal: bool | None
    """Whether every node ended with the coordinator's anchors, bit for bit; None if no node compared."""
    compute_share: float
    """Share of the time that the training loops had for themselves, data loading included: the mean over nodes, each
    since its last start. farloop's own code, waiting and evaluation are the rest."""
    wall_s: float
    digests: list[str]  # the coordinator's anchors, in fragment order
    parameters: int
    h: int
    steps: int
    scored_at: int  # schedule position of `val_loss_end`
    seed: NotRequired[int]  # these four are the demo's
    command: NotRequired[str]
    commit: NotRequired[str]
    machine: NotRequired[str]
    node_table: list[NodeSummary]


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """The figures in words, most important first: label and value."""
    each_way = f"{size_text(summary['bytes_up'])} up, {size_text(summary['bytes_down'])} down"
    length = f"H {summary['h']}, {summary['steps']:,} steps"
    return [
        ("validation loss", f"{loss_text(summary['val_loss_start'])} at step 0 → {loss_text(summary['val_loss_end'])} "
                            f"at step {summary['scored_at']:,}"),
        *([("data parallel's loss", summary["baseline"])] if "baseline" in summary else []),
        ("sent over the links", f"{size_text(summary['bytes_total'])}: {each_way}"),
        ("of these", bytes_text(summary["bytes_by_kind"])),
        ("fp32 data parallel would send", size_text(summary["bytes_data_parallel_fp32"])),
        ("reduction", f"{factor_text(summary['reduction'])} fewer bytes"),
        ("compute share", f"{percent_text(summary['compute_share'])} of the time was the training loop's"),
        ("wall time", duration_text(summary["wall_s"])),
        ("models equal", equality_text(summary)),
        ("trained", f"{count_text(summary['tokens'])} tokens in {plural(summary['inner_steps'], 'inner step')}, "
                    f"{plural(summary['outer_steps'], 'outer step')}, {plural(summary['nodes'], 'node')}"),
        ("method", f"{summary['method']}, {length}, {summary['codec_up']} up, {summary['codec_down']} down"),
        ("model", f"{count_text(summary['parameters'])} parameters"
                  f"{f', seed {seed}' if (seed := summary.get('seed')) is not None else ''}"),
    ]  # fmt: skip


def bytes_text(moved: BytesStatus) -> str:
    """All bytes by kind, in words."""
    counts = cast(dict[str, int], moved)
    return ", ".join(f"{size_text(counts[kind])} of {kind if kind == 'control' else f'{kind}s'}" for kind in BYTE_KINDS)


def equality_text(summary: Summary) -> str:
    """Whether all ended with the same model, in a sentence."""
    if summary["digests_equal"] is None:
        return "not compared"
    if not summary["digests_equal"]:
        return "NO, digests differ"
    fragments = plural(len(summary["digests"]), "fragment")
    return f"yes, bit for bit ({fragments}, coordinator and {plural(summary['nodes'], 'node')})"


def summary_table(summary: Summary) -> Table:
    """The end of a run on a terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in summary_rows(summary):
        table.add_row(label, Text(value, style=_style(label, summary)))
    return table


def _style(label: str, summary: Summary) -> str:
    if label == "models equal":
        return {True: "green", False: "bold red", None: "yellow"}[summary["digests_equal"]]
    return "bold" if label in ("validation loss", "reduction", "compute share") else ""


def summarise(status: Status) -> Summary:
    """The figures of a run, as far as it is. Byte counts are sums over nodes and over their starts."""
    run, totals = status["run"], status["totals"]
    nodes, scores = status["nodes"], status["evaluations"]
    is_over = run["state"] == "finished" and bool(nodes)
    return {
        "val_loss_start": scores[0]["loss"] if scores and scores[0]["position"] == 0 else None,
        "val_loss_end": scores[-1]["loss"] if scores else None,
        "scored_at": int(scores[-1]["position"] if scores else status["position"]),
        "tokens": totals["tokens"],
        "inner_steps": sum(steps["inner_steps"] for steps in totals["nodes"].values()),
        "merged_steps": merged_steps(status),
        "outer_steps": status["outer_steps"],
        "nodes": len(nodes),
        "method": run["method"],
        "codec_up": run["codec_up"],
        "codec_down": run["codec_down"],
        "bytes_up": totals["bytes_up"],
        "bytes_down": totals["bytes_down"],
        "bytes_data_parallel_fp32": data_parallel_bytes(status),
        "bytes_total": totals["bytes_up"] + totals["bytes_down"],
        "bytes_by_kind": totals["bytes_by_kind"],
        "bytes_state": totals["bytes_by_kind"]["snapshot"] + totals["bytes_by_kind"]["probe"],
        "reduction": reduction(status),
        "digests_equal": all(left_with_the_last(node, status) for node in nodes) if is_over else None,
        "compute_share": sum(node["compute_share"] for node in nodes) / max(len(nodes), 1),
        "wall_s": run["started_s"],
        "digests": status["digests"],
        "parameters": run["parameters"],
        "h": run["h"],
        "steps": run["steps"],
        "node_table": [_node_summary(node, run["started_s"]) for node in nodes],
    }


def _node_summary(node: NodeStatus, run_s: float) -> NodeSummary:
    """The status has the speed of the last seconds, in which a node that has finished trained nothing."""
    known = {key: value for key, value in node.items() if key in NodeSummary.__annotations__}
    return cast(NodeSummary, {**known, "tokens_per_s": node["tokens"] / run_s if run_s else 0.0})
