"""What a storm would notice: versions that were told and are gone, versions of two minds, and when a run goes on."""

import os
from pathlib import Path
from typing import Any

import pytest
from stories import Scripted, StoryText, all_stories, check_story

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


class Told(Scripted):
    """`page 1 0` shows version 1 of fragment 0, `told_of 0 2 beef` says a digest of another, `read 3 1 first=2` is a
    journal from version 2 on, `appended 0 3` a commit in it."""

    def __init__(self) -> None:
        self.history = History()

    def page(self, *versions: int) -> None:
        self.history.on_status(status([*versions]))

    def told_of(self, fragment: int, version: int, said: str = "") -> None:
        self.history.record(fragment, version, said or digest(fragment, version))

    def read(self, *versions: int, twice: tuple[int, int] | None = None, unequal: bool = False, **more: Any) -> None:
        again = {"twice": (twice,)} if twice else {}
        self.history.on_journal(journal(*versions, **again, **({"unequal": (twice,)} if unequal else {}), **more))

    def appended(self, fragment: int, version: int) -> None:
        self.history.appended([(fragment, version, digest(fragment, version))])

    def finish(self) -> None:
        self.history.finish()

    def found(self) -> str:
        history = self.history
        told = f"{history.committed} committed, lost {sorted(history.lost)}, forks {history.forks}"
        return f"{told}, twice {sorted(history.twice)}" if history.twice else told


@all_stories(__file__, "histories")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Told().told, rewrite=rewrite)


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
