"""Where the time of one synchronisation goes: marks at the borders of its stages, in every process of `bench/sync.py`.

A mark is the time at which a call of a daemon began or ended. The stages of a round lie between the marks that came
last, so that they add up to the round. Only the benchmark's own processes take marks: nothing is measured in a run.
"""

import dataclasses
import functools
import itertools
import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from farloop.monitoring.status import dumps

STAGES = {
    "stepped": "",
    "taken": "node: take the delta",
    "encoded": "node: encode",
    "arrived": "send up",
    "stored": "coordinator: verify, write to disk",
    "computed": "coordinator: sum, outer step, encode",
    "told": "coordinator: write to disk, publish",
    "received": "send down",
    "applied": "node: decode, add, digest",
    "merged": "node: merge",
}
"""Marks in the order of a round, each with the stage that it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One border of a round in one process."""

    name: str
    version: int
    """Of the fragment's anchor after the round."""
    at: float
    """Monotonic seconds; all processes are on one machine."""
    cpu: float
    """Seconds of processor time of the process until then."""


class Marks(list[Mark]):
    def mark(self, name: str, version: int) -> None:
        self.append(Mark(name=name, version=version, at=time.monotonic(), cpu=time.process_time()))

    def after(self, owner: Any, call: str, name: str, version: Callable[..., int | None]) -> None:
        """Mark the end of each `owner.call` for which `version`, given its arguments, is not None."""
        inner = getattr(owner, call)

        @functools.wraps(inner)
        def marked(*args: Any, **kwargs: Any) -> Any:
            told = inner(*args, **kwargs)
            if (of := version(*args, **kwargs)) is not None:
                self.mark(name, of)
            return told

        setattr(owner, call, marked)

    def write(self, path: Path) -> None:
        path.write_text(dumps([dataclasses.asdict(mark) for mark in self]))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(Mark(**fields) for fields in json.loads(path.read_text()))

    def trace_node(self) -> None:
        """Begin to take marks in a process that runs a node."""
        from farloop.node.executor import NodeExecutor

        self.after(NodeExecutor, "_encode", "taken", lambda _, command: command.blob.version + 1)
        self.after(NodeExecutor, "_encoded", "encoded", lambda _, encoded: encoded.offer.blob.version + 1)
        self.after(NodeExecutor, "_deliver", "received", lambda _, event: _update_in(event))
        self.after(NodeExecutor, "_apply", "applied", lambda _, command: command.version)

    def trace_coordinator(self) -> None:
        """Begin to take marks in a process that runs the coordinator."""
        from farloop.coordinator import commits
        from farloop.coordinator.executor import CoordinatorExecutor

        self.after(
            CoordinatorExecutor, "_store_delta", "arrived", lambda _, offer, data, **_how: offer.blob.version + 1
        )
        self.after(CoordinatorExecutor, "_commit", "stored", lambda _, command: command.draft.version)
        self.after(commits, "compute", "computed", lambda ledger, buffers, draft, *rest: draft.version)
        self.after(CoordinatorExecutor, "_publish", "told", lambda _, nodes, committed: committed.version)


def _update_in(event: object) -> int | None:
    from farloop.algo.spec import BlobId, BlobKind
    from farloop.wire.events import BlobReceived

    match event:
        case BlobReceived(blob=BlobId(kind=BlobKind.UPDATE, version=version)):
            return version
        case _:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    s_median: float
    s_mean: float
    """The means of all stages add up to the mean of a round."""
    s_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Where the time of a system's rounds went."""

    stages: list[Stage]
    cpu_s_per_round: dict[str, float]
    """Processor time of each process, by its name."""


def trace_of(marks: Mapping[str, Sequence[Mark]], first: int) -> Trace:
    """The stages of the rounds from version `first` on, from the marks of each process by its name."""
    names = list(STAGES)
    rounds: dict[int, dict[str, float]] = {}
    for mark in (mark for of_process in marks.values() for mark in of_process if mark.version >= first):
        ends = rounds.setdefault(mark.version, {})
        ends[mark.name] = max(mark.at, ends.get(mark.name, mark.at))
    stages = []
    for before, name in itertools.pairwise(names):
        seconds = [ends[name] - ends[before] for ends in rounds.values()]
        mean = statistics.fmean(seconds)
        stages.append(Stage(name=STAGES[name], s_median=statistics.median(seconds), s_mean=mean, s_max=max(seconds)))
    spent = {name: cpu_per_round(of_process, first) for name, of_process in marks.items()}
    return Trace(stages=stages, cpu_s_per_round=spent)


def cpu_per_round(marks: Sequence[Mark], first: int) -> float:
    """From the first mark of the first round to that of the last."""
    begins = {mark.version: mark.cpu for mark in reversed(marks) if mark.version >= first}
    begun, ended = min(begins), max(begins)
    return (begins[ended] - begins[begun]) / max(1, ended - begun)


def main(path: Path, words: Sequence[str]) -> None:
    """FILE WORD...: run `farloop WORD...`, and write its marks to FILE."""
    marks = Marks()
    marks.trace_coordinator()
    sys.argv = ["farloop", *words]
    try:
        runpy.run_module("farloop.cli.main", run_name="__main__", alter_sys=True)
    finally:
        marks.write(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
