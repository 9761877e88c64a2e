"""What happened in a run, read back from `metrics.jsonl` as curves over tokens and time."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farloop.coordinator.timeline import files
from farloop.monitoring.status import BytesStatus

_KINDS = ("delta", "update", "snapshot", "probe", "control")
_COUNTERS = ("inner_steps", "lost_steps", "tokens", "bytes_up", "bytes_down", *_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Sums over all nodes at one moment."""

    t: float
    """Seconds since the run's start."""
    bytes_up: int
    bytes_down: int
    by_kind: BytesStatus
    """Bytes of both directions."""
    inner_steps: int

    @property
    def bytes_state(self) -> int:
        """Snapshots and probes."""
        return self.by_kind["snapshot"] + self.by_kind["probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One outer step of one fragment."""

    t: float
    fragment: int
    version: int
    merged: tuple[str, ...]
    drops: tuple[tuple[str, str], ...]
    """Node and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """Something a reader would ask about: a node that came, left or changed, a delta that was not merged."""

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
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per node, over all of its starts: inner steps, and those of them, per fragment, that no commit contains."""
    commits: list[Commit] = field(default_factory=list)
    occurrences: list[Occurrence] = field(default_factory=list)
    unreadable: int = 0
    """Lines that were no event: a run that was stopped may end in half a line."""


def read_history(path: Path) -> History:
    """Read a metrics file and the older parts beside it; one that does not exist is an empty history."""
    history, totals = History(), _Totals()
    for part in files(path):
        with part.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip():
                    _take(line, history, totals)
    return history


def _take(line: str, history: History, totals: "_Totals") -> None:
    try:
        event = json.loads(line)
        _READERS.get(event["event"], _ignore)(event, history, totals)
    except (ValueError, KeyError, TypeError, AttributeError):
        history.unreadable += 1


class _Totals:
    """Counters per node that never go back: a node that starts again counts from 0, the sum goes on."""

    def __init__(self) -> None:
        self._finished: dict[tuple[str, str], int] = {}
        self._latest: dict[tuple[str, str], int] = {}

    def update(self, node: str, event: dict[str, Any]) -> None:
        """All counters of a start began at 0 together: where one has fallen, none of them goes on from before."""
        told = {"lost_steps": 0, **event, **_bytes(event)}
        values = {(node, counter): int(told[counter]) for counter in _COUNTERS}
        restarted = any(value < self._latest.get(key, 0) for key, value in values.items())
        for key, value in values.items():
            if restarted:
                self._finished[key] = self._finished.get(key, 0) + self._latest.get(key, 0)
            self._latest[key] = value

    def sum(self, counter: str, of: str | None = None) -> int:
        """Over all nodes, or of one."""
        both = (self._finished, self._latest)
        found = ((node, value) for counts in both for (node, name), value in counts.items() if name == counter)
        return sum(value for node, value in found if of in (None, node))


def _bytes(event: dict[str, Any]) -> dict[str, int]:
    """All bytes of a report. Older lines have no kinds, and snapshots and probes
    apart from the bytes of both directions."""
    if "bytes_by_kind" in event:
        return {kind: int(event["bytes_by_kind"][kind]) for kind in _KINDS}
    up, down, state = int(event["bytes_up"]), int(event["bytes_down"]), int(event["bytes_state"])
    return {"bytes_down": down + state, "delta": up, "update": down, "snapshot": state, "probe": 0, "control": 0}


def _progress(event: dict[str, Any], history: History, totals: _Totals) -> None:
    node = str(event["node"])
    totals.update(node, event)
    history.steps[node] = (totals.sum("inner_steps", node), totals.sum("lost_steps", node))
    if event["loss"] is not None:
        history.losses.setdefault(node, []).append((totals.sum("tokens"), float(event["loss"])))
    history.traffic.append(
        Traffic(
            t=float(event["t"]),
            bytes_up=totals.sum("bytes_up"),
            bytes_down=totals.sum("bytes_down"),
            by_kind={
                "delta": totals.sum("delta"),
                "update": totals.sum("update"),
                "snapshot": totals.sum("snapshot"),
                "probe": totals.sum("probe"),
                "control": totals.sum("control"),
            },
            inner_steps=totals.sum("inner_steps"),
        )
    )


def _evaluation(event: dict[str, Any], history: History, totals: _Totals) -> None:
    if event["loss"] is not None:
        history.evaluations.append((int(event["tokens"]), float(event["loss"])))


def _commit(event: dict[str, Any], history: History, totals: _Totals) -> None:
    commit = Commit(
        t=float(event["t"]),
        fragment=int(event["fragment"]),
        version=int(event["version"]),
        merged=tuple(event["merged"]),
        drops=tuple((str(node), str(reason)) for node, reason in event["drops"]),
    )
    history.commits.append(commit)
    for node, reason in commit.drops:
        text = f"{node}: delta for window {commit.version} of fragment {commit.fragment} dropped: {reason}"
        history.occurrences.append(Occurrence(t=commit.t, text=text))


def _node(event: dict[str, Any], history: History, totals: _Totals) -> None:
    reason = f": {event['reason']}" if event.get("reason") else ""
    history.occurrences.append(Occurrence(t=float(event["t"]), text=f"{event['name']} {event['state']}{reason}"))


def _ignore(event: dict[str, Any], history: History, totals: _Totals) -> None:
    """Events of a newer version are no error."""


_READERS = {"progress": _progress, "evaluation": _evaluation, "commit": _commit, "node": _node}
