"""The journal as its owner sees it: append, sync, reserve, rotate, recover, lock (protocol O, P, R, S).

What a crash leaves at any call: `test_power_loss.py`. Damage: `test_segment.py`, `test_salvage.py`.
"""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from disk_faults import Disk, refuse
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples
from stored_runs import STORED, SUMMARY, segment_paths

from farloop.coordinator.decide.records import EpochClaimed, LedgerSaved, Record
from farloop.coordinator.errors import DiskFull, JournalCorrupt, NoRoom, ReadOnly, StorageFailed
from farloop.coordinator.storage.journal import RECORD_ROOM, Journal
from farloop.coordinator.storage.segment import Segments, segment_path
from farloop.coordinator.storage.state_reader import attached

ONE, TWO = EpochClaimed(epoch=1), EpochClaimed(epoch=2)


def opened(directory: Path, segment_bytes: int = 256 << 20) -> Journal:
    return Journal.open(directory, segment_bytes=segment_bytes)[0]


def reopened(directory: Path) -> list[Record]:
    journal, found = Journal.open(directory)
    journal.close()
    return [entry.record for entry in found.entries]


def crash(journal: Journal) -> None:
    """What the death of the process does: descriptors close, nothing else happens."""
    journal._tail.close()
    journal._lock.close()


def written(directory: Path) -> bytes:
    """The last segment without the room set aside."""
    paths = segment_paths(directory)
    return paths[max(paths)].read_bytes().rstrip(b"\0")


def test_one_sync_covers_all_appends_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, synced = opened(tmp_path), list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    for _ in range(3):
        journal.append(ONE)
    assert (journal.durable, synced) == (0, [])
    assert journal.sync() == journal.durable == journal.sync() == 3 and len(synced) == 1
    journal.close()


def test_a_record_that_was_cut_does_not_rise_again(tmp_path: Path) -> None:
    """It lies where the next but one will be, with the right salt and sequence."""
    journal = opened(tmp_path)
    start = journal._tail.end
    journal.append(ONE)
    journal.append(ONE)
    crash(journal)
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    journal, found = Journal.open(tmp_path)
    assert found.entries == ()
    journal.append(TWO)
    crash(journal)
    assert reopened(tmp_path) == [TWO]


def test_a_failed_sync_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, tries = opened(tmp_path), list[int]()
    journal.append(ONE)

    def fsync(fd: int) -> None:
        tries.append(fd)
        refuse()()

    monkeypatch.setattr(os, "fsync", fsync)
    uses: list[Callable[[], object]] = [
        journal.sync, journal.sync, lambda: journal.append(TWO), lambda: journal.reserve(1)
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(StorageFailed, match="Input/output error"):
            use()
    journal.close()
    assert (len(tries), journal.durable) == (1, 0)


def test_after_a_failed_write_nothing_more_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    journal.append(ONE)
    pwritev, calls = os.pwritev, list[int]()

    def write_half(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(fd)
        return pwritev(fd, [bytes(views[0])[:20]], offset) if len(calls) == 1 else refuse()()

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write_half)
        with pytest.raises(StorageFailed, match="write: Input/output error"):
            journal.append(TWO)
    with pytest.raises(StorageFailed, match="given up"):
        journal.append(TWO)
    journal.close()
    journal, found = Journal.open(tmp_path)
    journal.close()
    assert [entry.record for entry in found.entries] == [ONE] and 0 < found.last.torn_bytes <= 20


# --- Room on the disk


def test_room_is_taken_in_large_steps_while_there_is_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole that is smaller than a step is no full disk."""
    disk = Disk(free=8 << 20)
    monkeypatch.setattr(os, "posix_fallocate", disk.allocate)
    with opened(tmp_path / "large") as journal:
        for _ in range(25):
            journal.append(STORED, bytes(100_000))
    assert disk.calls == 3
    monkeypatch.setattr(os, "posix_fallocate", Disk(free=300_000).allocate)
    journal = opened(tmp_path / "small")
    with pytest.raises(DiskFull):
        while True:
            journal.append(STORED, bytes(10_000))
    monkeypatch.undo()
    assert 28 <= journal.num_records <= 29
    journal.append(STORED, bytes(10_000))
    journal.close()
    assert reopened(tmp_path / "small") == [STORED] * journal.num_records


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_the_disk_does_not_take_changes_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with opened(tmp_path, 4 << 20) as journal:
        journal.append(STORED, bytes(1 << 20))
        for call, nbytes in (("posix_fallocate", 2 << 20), ("open", 3 << 20)):  # this segment grows; the next begins
            before = written(tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse(code))
                for use in (lambda size: journal.append(STORED, bytes(size)), journal.reserve):
                    with pytest.raises(NoRoom):
                        use(nbytes)
            assert written(tmp_path) == before
            journal.append(STORED, bytes(nbytes))
    assert reopened(tmp_path) == [STORED] * 3


def test_a_read_only_disk_is_seen_before_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as journal:
        journal.append(ONE)
        journal.reserve(1000)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_flag=os.ST_RDONLY))
            for reserved in (None, 1000):
                with pytest.raises(ReadOnly):
                    journal.append(TWO, reserved=reserved)
        journal.append(TWO, reserved=1000)
    assert reopened(tmp_path) == [ONE, TWO]


@pytest.mark.parametrize("summary", [False, True])
def test_a_full_disk_at_a_rotation_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: bool) -> None:
    with opened(tmp_path, 1000) as journal:
        if summary:
            journal.begin_segments_with(lambda: SUMMARY)
        journal.append(STORED, bytes(900))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
            with pytest.raises(DiskFull):
                journal.append(STORED, bytes(900))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-000000.log", "lock"]
        assert journal.append(STORED, bytes(900)).sequence == 1 + summary
    assert reopened(tmp_path) == [STORED, *[SUMMARY] * summary, STORED]


# --- The directory, and segments


def test_a_journal_that_cannot_be_read_leaves_the_directory_unlocked(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).write_bytes(b"garbage")
    for _ in range(2):
        with pytest.raises(JournalCorrupt):
            Journal.open(tmp_path)


def test_a_summary_larger_than_a_segment_is_followed_by_a_record_all_the_same(tmp_path: Path) -> None:
    with opened(tmp_path, 100) as journal:
        journal.begin_segments_with(lambda: SUMMARY)
        assert [journal.append(ONE).attachment.segment for _ in range(3)] == [0, 1, 2]


@settings(max_examples=examples(20), stateful_step_count=30)
class Model(RuleBasedStateMachine):
    """Any sequence of calls, clean ends and kills leaves what was appended and not pruned, in order and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.expected: list[tuple[Record, bytes]] = []
        self.pruned = 0
        self.reserved: list[int] = []
        self.journal = self.open()

    def open(self) -> Journal:
        directory = Path(self.place.name)
        journal, found = Journal.open(directory, segment_bytes=2000)
        assert [(entry.record, attached(directory, entry.attachment)) for entry in found.entries] == self.expected
        assert journal.num_records == self.pruned + len(self.expected)
        self.reserved = []
        journal.begin_segments_with(self.summarise)
        return journal

    def summarise(self) -> LedgerSaved:
        self.expected.append((SUMMARY, b""))
        return SUMMARY

    @rule(size=st.integers(1, 3000), byte=st.integers(0, 255))
    def append(self, size: int, byte: int) -> None:
        attachment = bytes([byte]) * size
        self.journal.append(STORED, attachment)
        self.expected.append((STORED, attachment))

    @rule(size=st.integers(1, 3000))  # a delta without bytes in the journal is an object's
    def reserve(self, size: int) -> None:
        self.journal.reserve(size)
        self.reserved.append(size)

    @precondition(lambda self: self.reserved)
    @rule(used=st.booleans())
    def settle_reservation(self, used: bool) -> None:
        size = self.reserved.pop()
        if used:
            self.journal.append(STORED, bytes(size), reserved=size)
            self.expected.append((STORED, bytes(size)))
        else:
            self.journal.release(size)

    @rule()
    def sync(self) -> None:
        assert self.journal.sync() == self.pruned + len(self.expected)

    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        segments = Segments(Path(self.place.name))
        sizes = [len(segments.scan(number).entries) for number in segments.numbers]
        count = data.draw(st.integers(0, len(sizes) - 1))
        self.journal.prune(self.journal.first_segment + count)
        gone = sum(sizes[:count])
        self.expected = self.expected[gone:]
        self.pruned += gone

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        if cleanly:
            self.journal.close()
        else:
            crash(self.journal)
        self.journal = self.open()

    @invariant()
    def reservations_have_their_room(self) -> None:
        tail = self.journal._tail
        assert self.journal._reserved_bytes == sum(size + RECORD_ROOM for size in self.reserved)
        assert tail.end + self.journal._reserved_bytes <= tail.allocated <= tail.path.stat().st_size

    def teardown(self) -> None:
        self.journal.close()
        self.place.cleanup()


TestModel = Model.TestCase
