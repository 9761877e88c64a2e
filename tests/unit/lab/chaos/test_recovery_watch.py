"""What a storm would notice: versions that were told and are gone, versions of two minds, and when a run goes on."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farloop.lab.chaos.journal_referee import Journal
from farloop.lab.chaos.recovery_watch import Book, History, Memory, Recoveries
from farloop.monitoring.status import Status


def digest(fragment: int, version: int) -> str:
    return f"{fragment:08x}{version:08x}"


def status(versions: list[int], merged: str = "ab") -> Status:
    """A page of a run with so many fragments."""
    page: dict[str, Any] = {
        "versions": versions,
        "digests": [digest(*one) for one in enumerate(versions)],
        "windows": [{"fragment": f, "merged": list(merged)} for f in range(len(versions))],
    }
    return page  # type: ignore[return-value]


def journal(*versions: int, first: int = 0, **more: Any) -> Journal:
    """One that goes back to version `first` of every fragment, with the digests of `status`."""
    known = ((f, v) for f, newest in enumerate(versions) for v in range(first, newest + 1))
    return Journal({one: digest(*one) for one in known}, versions, **more)


Step = Callable[[History], object]


def page(*versions: int) -> Step:
    return lambda history: history.on_status(status([*versions]))


def told(fragment: int, version: int, said: str = "") -> Step:
    return lambda history: history.record(fragment, version, said or digest(fragment, version))


def read(*versions: int, **more: Any) -> Step:
    return lambda history: history.on_journal(journal(*versions, **more))


def appended(fragment: int, version: int) -> Step:
    return lambda history: history.appended([(fragment, version, digest(fragment, version))])


@pytest.mark.parametrize(
    ("steps", "lost", "forks"),
    [
        ([page(1, 0), told(0, 2), read(3, 1)], set(), []),
        # Told and beyond the journal; in one journal and not in a later one; the page falls behind.
        ([page(3, 1), told(1, 2, "beef"), read(2, 1)], {(0, 3), (1, 2)}, []),
        ([read(3, 3), read(3, 2)], {(1, 3)}, []),
        ([page(4, 4), page(4, 2)], {(1, 3), (1, 4)}, []),
        # What went with a deleted segment is not lost; what no journal ever held is, at the end.
        ([read(9, 9), read(20, 20, first=5)], set(), []),
        ([read(9, 9, first=5), appended(0, 3), told(0, 3), told(1, 2)], set(), []),
        ([read(9, 9, first=5), appended(0, 3), told(0, 3), told(1, 2), History.finish], {(1, 2)}, []),
        # Two digests of one version are a fork, whoever told them.
        ([page(1, 1), read(1, 1)], set(), []),
        ([page(1, 1), read(1, 1), told(1, 1, "another")], set(), [(1, 1)]),
        ([read(1, twice=((0, 1),), unequal=((0, 1),))], set(), [(0, 1)]),
    ],
)
def test_what_is_lost_and_what_forks(
    steps: list[Step], lost: set[tuple[int, int]], forks: list[tuple[int, int]]
) -> None:
    history = History()
    for step in steps:
        step(history)
    assert (history.lost, history.forks) == (lost, forks)


def test_commits_are_counted_and_a_version_that_is_committed_twice_is_seen() -> None:
    history = History()
    read(3, 1, twice=((0, 1),))(history)
    assert (history.committed, history.twice, history.forks) == (4, {(0, 1)}, [])


def test_lines_of_a_node_are_read_once_and_whole(tmp_path: Path) -> None:
    """A line that a kill cut short is left out."""
    path = tmp_path / "anchors.jsonl"
    book = Book(path)
    assert book.read() == []
    text = ""
    for more, expected in (
        ('\n[0, 1, "aa"]\n[1, 1, "b', [(0, 1, "aa")]),
        ('b"]\n', [(1, 1, "bb")]),
        ("", []),
        ('[0, 2, "c\n[0, 3, "dd"]\n', [(0, 3, "dd")]),
    ):
        path.write_text(text := text + more)
        assert book.read() == expected
    assert book.anchors == {0: (3, "dd"), 1: (1, "bb")}


def test_survivors_have_recovered_with_the_next_commit_without_the_node() -> None:
    found = Recoveries()
    found.await_commit("kill_node", "b", 10.0, [4, 4], lambda merged: "b" not in merged)
    for versions, merged, at_s in (([5, 4], "ab", 11.0), ([5, 5], "a", 12.5), ([6, 6], "a", 14.0)):
        found.on_status(status(versions, merged), at_s)
    assert found.seconds == {"kill_node": [2.5]}


def test_only_a_later_commit_of_known_nodes_counts_and_who_is_hit_again_is_forgotten() -> None:
    found = Recoveries()
    found.await_commit("kill_coordinator", "coordinator", 0.0, [4, 4])
    found.on_status(status([4, 4]), 1.0)
    found.on_status(status([5, 4], merged=""), 2.0)
    assert found.seconds == {}
    found = Recoveries()
    for name in "bc":
        found.await_commit("stop_node", name, 1.0, [0], lambda merged, name=name: name in merged)  # type: ignore[misc]
    found.forget("b")
    found.on_status(status([1], merged="abc"), 3.0)
    assert found.seconds == {"stop_node": [2.0]}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc here")
def test_memory_is_measured_and_written_down(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory.csv")
    memory.sample(1.0, [("me", os.getpid()), ("nobody", 2**22 + 1)])
    memory.close()
    (line,) = (tmp_path / "memory.csv").read_text().splitlines()[1:]
    assert line.startswith(f"1.0,me,{os.getpid()},") and memory.series["me"][0][1] > 1 << 20
    assert list(memory.series) == ["me"]
