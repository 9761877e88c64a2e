"""What a storm observes of its run: lost and forked versions, recovery times, and memory.

**Told** is every (fragment, version, digest) that a process outside the coordinator could have learned: from its status
page, from the anchors that nodes hold, and from the journal on disk each time the coordinator is dead.
**Lost** is a told version that the journal never held, that a later journal covering it does not hold, or that a later
status page is behind. `journal_referee.py` parses the journal independently, both while the coordinator appends to it
and whole each time it is dead. Segments are deleted once they are not needed, so they are compared before.
**A fork** is a version of a fragment with two digests. Neither may ever occur.
"""

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from farloop.lab.bench.processes import status_bytes
from farloop.lab.chaos.journal_referee import Journal, Version
from farloop.monitoring.status import NodeStatus, Status


class History:
    """All that was told, compared as it comes."""

    def __init__(self) -> None:
        self.digests: dict[Version, set[str]] = {}
        self.lost: set[Version] = set()
        self.twice: set[Version] = set()  # versions that the journal commits more than once
        self._journaled: set[Version] = set()  # all that the journal ever held
        self.committed = 0  # windows that became a version, by the last journal
        self._shown: list[int] = []

    @property
    def forks(self) -> list[Version]:
        """Versions with more than one digest."""
        return sorted(version for version, digests in self.digests.items() if len(digests) > 1)

    def record(self, fragment: int, version: int, digest: str) -> None:
        self.digests.setdefault((fragment, version), set()).add(digest)

    def on_status(self, status: Status) -> None:
        """A page of the coordinator: later ones must not be behind it."""
        for fragment, (version, digest) in enumerate(zip(status["versions"], status["digests"], strict=True)):
            self.record(fragment, version, digest)
        for fragment, before in enumerate(self._shown):
            self.lost |= {(fragment, version) for version in range(status["versions"][fragment] + 1, before + 1)}
        self._shown = list(status["versions"])

    def on_journal(self, journal: Journal) -> None:
        """The journal while no coordinator lives: all that was told until now must be in it, as far as it goes back."""
        oldest = [min(v for f, v in journal.digests if f == fragment) for fragment in range(len(journal.newest))]
        self.lost |= {
            (fragment, version)
            for fragment, version in self.digests
            if version >= oldest[fragment] and (fragment, version) not in journal.digests
        }
        for (fragment, version), digest in journal.digests.items():
            self.record(fragment, version, digest)
        self._journaled |= journal.digests.keys()
        self.twice |= set(journal.twice)
        for fragment, version in journal.unequal:
            self.record(fragment, version, "another digest in the same journal")
        self.committed = sum(journal.newest)

    def appended(self, anchors: Iterable[tuple[int, int, str]]) -> None:
        """New records of the journal of a coordinator that lives."""
        for fragment, version, digest in anchors:
            self.record(fragment, version, digest)
            self._journaled.add((fragment, version))

    def finish(self) -> None:
        """The last journal was seen: nothing was told that the journal never held."""
        self.lost |= self.digests.keys() - self._journaled


class Book:
    """The lines that one node writes of its anchors, as far as they were read; see `storm_node.py`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.anchors: dict[int, tuple[int, str]] = {}  # version and digest of each fragment, as last told
        self._at = 0

    def read(self) -> list[tuple[int, int, str]]:
        """What is new: fragment, version and digest. A line that a kill cut short is left out."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        found = []
        for line in whole.splitlines():
            with suppress(ValueError, TypeError):
                fragment, version, digest = json.loads(line)
                found.append((int(fragment), int(version), str(digest)))
        for fragment, version, digest in found:
            self.anchors[fragment] = (version, digest)
        return found


# --- Recovery times


@dataclass(slots=True)
class Recoveries:
    """Seconds from a fault, or from its end, to the next commit that is as it should be again.

    What is awaited is forgotten where the same thing is awaited anew before it came: the two cannot be told apart.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)  # by what was awaited
    _awaited: dict[tuple[str, str], tuple[float, list[int], Callable[[list[str]], bool]]] = field(default_factory=dict)
    """By what is awaited and of whom: since when, the versions then, and which merged nodes it takes."""

    def await_commit(
        self,
        what: str,
        target: str,
        since: float,
        versions: Sequence[int],
        due: Callable[[list[str]], bool] = lambda merged: True,
    ) -> None:
        """From `since` on: a version newer than these, of a window whose merged nodes are `due`."""
        self._awaited[what, target] = since, list(versions), due

    def forget(self, target: str) -> None:
        """It was hit again: what is awaited of it will not come, or not for that reason."""
        self._awaited = {key: awaited for key, awaited in self._awaited.items() if key[1] != target}

    def on_status(self, status: Status, now: float) -> None:
        """A page that was fetched at this time."""
        for (what, target), (since, versions, due) in list(self._awaited.items()):
            for window in status["windows"]:
                fragment, merged = window["fragment"], window["merged"]
                if status["versions"][fragment] > versions[fragment] and merged and due(merged):
                    self.seconds.setdefault(what, []).append(now - since)
                    del self._awaited[what, target]
                    break


# --- Memory


class Memory:
    """Resident bytes of processes over time, in a file as they are measured."""

    def __init__(self, path: Path) -> None:
        self.series: dict[str, list[tuple[float, int]]] = {}  # by name: seconds, bytes
        self._file: TextIO = path.open("w", newline="")
        self._lines = csv.writer(self._file)
        self._lines.writerow(["t_s", "name", "pid", "rss_bytes"])

    def sample(self, now: float, processes: Iterable[tuple[str, int]]) -> None:
        """Measure these, by name and id; one that is gone is left out."""
        for name, pid in processes:
            if rss := status_bytes("VmRSS", pid):
                self.series.setdefault(name, []).append((now, rss))
                self._lines.writerow([f"{now:.1f}", name, pid, rss])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


# --- Status page


def trains(node: NodeStatus) -> bool:
    """Whether a node takes part now."""
    return node["connected"] and node["state"] in ("training", "waiting")


def is_expected(status: Status | None, name: str) -> bool:
    """Whether every window waits for this node: else the next commit without it says nothing."""
    windows = status["windows"] if status else []
    return bool(windows) and all(name in window["expected"] for window in windows)


def in_words(status: Status | None) -> str:
    """Where a run stands, in one line."""
    if status is None:
        return "the coordinator has not answered yet"
    run = status["run"]
    here = [node["name"] for node in status["nodes"] if node["connected"]]
    return (
        f"{run['state']}, start {run['epoch']}, position {status['position']:.0f}/{run['steps']}, "
        f"{status['commits']} commits, connected {','.join(here) or 'none'}"
    )
