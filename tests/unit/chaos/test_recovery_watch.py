"""What a storm would notice: versions that were told and are gone, versions of two minds, and when a run goes on."""

import os
from pathlib import Path
from typing import Any

import pytest

from farloop.chaos.journal_referee import Journal
from farloop.chaos.recovery_watch import Book, History, Memory, Recoveries, resident_bytes
from farloop.monitoring.status import Status


def status(versions: list[int], *, digests: list[str] | None = None, merged: str = "ab") -> Status:
    """A page of a run with so many fragments."""
    page: dict[str, Any] = {
        "versions": versions,
        "digests": digests or [f"{f:08x}{v:08x}" for f, v in enumerate(versions)],
        "windows": [{"fragment": f, "merged": list(merged)} for f in range(len(versions))],
    }
    return page  # type: ignore[return-value]


def journal(*versions: int, first: int = 0) -> Journal:
    """One that goes back to version `first` of every fragment, with the digests of `status`."""
    digests = {(f, v): f"{f:08x}{v:08x}" for f, newest in enumerate(versions) for v in range(first, newest + 1)}
    return Journal(digests, versions)


# --- history


def test_what_was_told_and_is_in_the_journal_is_not_lost() -> None:
    history = History()
    history.saw_status(status([1, 0]))
    history.told(0, 2, f"{0:08x}{2:08x}")
    history.saw_journal(journal(3, 1))
    assert (history.lost, history.forks, history.committed) == (set(), [], 4)


def test_a_version_that_was_told_and_is_beyond_the_journal_is_lost() -> None:
    history = History()
    history.saw_status(status([3, 1]))
    history.told(1, 2, "beef")
    history.saw_journal(journal(2, 1))
    assert history.lost == {(0, 3), (1, 2)}


def test_a_version_that_one_journal_has_and_a_later_one_has_not_is_lost() -> None:
    history = History()
    history.saw_journal(journal(3, 3))
    history.saw_journal(journal(3, 2))
    assert history.lost == {(1, 3)}


def test_what_went_with_a_deleted_segment_is_not_lost() -> None:
    history = History()
    history.saw_journal(journal(9, 9))
    history.saw_journal(journal(20, 20, first=5))
    assert not history.lost


def test_a_status_page_that_falls_behind_has_lost_something() -> None:
    history = History()
    history.saw_status(status([4, 4]))
    history.saw_status(status([4, 2]))
    assert history.lost == {(1, 3), (1, 4)}


def test_two_digests_of_one_version_are_a_fork_whoever_told_them() -> None:
    history = History()
    history.saw_status(status([1, 1]))
    history.saw_journal(journal(1, 1))
    assert history.forks == []
    history.told(1, 1, "another")
    assert history.forks == [(1, 1)]


def test_a_version_that_was_told_and_that_no_journal_ever_held_is_lost() -> None:
    history = History()
    history.saw_journal(journal(9, 9, first=5))
    history.appended([(0, 3, f"{0:08x}{3:08x}")])
    history.told(0, 3, f"{0:08x}{3:08x}")
    history.told(1, 2, f"{1:08x}{2:08x}")
    assert not history.lost
    history.over()
    assert history.lost == {(1, 2)}


def test_a_version_that_is_committed_twice_is_seen() -> None:
    history = History()
    history.saw_journal(Journal({(0, 1): "aa"}, (1,), twice=((0, 1),)))
    assert (history.twice, history.forks) == ({(0, 1)}, [])
    history.saw_journal(Journal({(0, 1): "aa"}, (1,), twice=((0, 1),), unequal=((0, 1),)))
    assert history.forks == [(0, 1)]


# --- what nodes write down


def test_lines_of_a_node_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "anchors.jsonl"
    book = Book(path)
    assert book.read() == []
    path.write_text('\n[0, 1, "aa"]\n[1, 1, "b')
    assert book.read() == [(0, 1, "aa")]
    path.write_text('\n[0, 1, "aa"]\n[1, 1, "bb"]\n')
    assert book.read() == [(1, 1, "bb")]
    assert book.read() == []
    assert book.anchors == {0: (1, "aa"), 1: (1, "bb")}


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "anchors.jsonl"
    path.write_text('\n[0, 1, "aa"]\n[0, 2, "c\n[0, 3, "dd"]\n')
    assert Book(path).read() == [(0, 1, "aa"), (0, 3, "dd")]


# --- how soon


def test_survivors_have_recovered_with_the_next_commit_without_the_node() -> None:
    found = Recoveries()
    found.await_commit("kill_node", "b", 10.0, [4, 4], lambda merged: "b" not in merged)
    found.saw_status(status([5, 4], merged="ab"), 11.0)
    assert found.seconds == {}
    found.saw_status(status([5, 5], merged="a"), 12.5)
    assert found.seconds == {"kill_node": [2.5]}
    found.saw_status(status([6, 6], merged="a"), 14.0)
    assert found.seconds == {"kill_node": [2.5]}


def test_a_commit_from_before_does_not_count_and_neither_does_one_whose_nodes_are_not_known() -> None:
    found = Recoveries()
    found.await_commit("kill_coordinator", "coordinator", 0.0, [4, 4])
    found.saw_status(status([4, 4]), 1.0)
    found.saw_status(status([5, 4], merged=""), 2.0)
    assert found.seconds == {}


def test_what_is_hit_again_before_it_recovered_is_not_counted() -> None:
    found = Recoveries()
    found.await_commit("stop_node", "b", 1.0, [0], lambda merged: "b" in merged)
    found.await_commit("stop_node", "c", 1.0, [0], lambda merged: "c" in merged)
    found.forget("b")
    found.saw_status(status([1], merged="abc"), 3.0)
    assert found.seconds == {"stop_node": [2.0]}


# --- memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc here")
def test_memory_is_measured_and_written_down(tmp_path: Path) -> None:
    path = tmp_path / "memory.csv"
    memory = Memory(path)
    memory.sample(1.0, [("me", os.getpid()), ("nobody", 2**22 + 1)])
    memory.close()
    (line,) = path.read_text().splitlines()[1:]
    assert line.startswith(f"1.0,me,{os.getpid()},")
    assert memory.series["me"][0][1] > 1 << 20
    assert resident_bytes(2**22 + 1) == 0
