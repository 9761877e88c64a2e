"""The journal as its owner sees it: append, sync, reserve, rotate, recover, lock (protocol O, P, R, S)."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.decide import records
from farloop.coordinator.decide.records import EpochClaimed, InputStored, LedgerSaved, Record
from farloop.coordinator.errors import DiskFull, JournalCorrupt, NoRoom, ReadOnly, StorageFailed
from farloop.coordinator.storage.files import Files, OsFile
from farloop.coordinator.storage.journal import RECORD_ROOM, Journal
from farloop.coordinator.storage.segment import SEGMENT_HEADER_BYTES, Scan, read_segments, segment_path, segment_paths

RECORDS = json.loads((Path(__file__).parent / "golden" / "records-v1.json").read_text())
SUMMARY = cast(LedgerSaved, records.decode(RECORDS["LedgerSaved"][0], bytes.fromhex(RECORDS["LedgerSaved"][1])))

STORED = InputStored(
    blob=BlobId(kind=BlobKind.DELTA, fragment=0, version=3, node=NodeId("oslo"), incarnation=1, seq=4),
    window=4,
    contributors=(),
    digest=5,
)


def epochs(count: int) -> list[Record]:
    return [EpochClaimed(epoch=epoch) for epoch in range(count)]


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


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened, _ = Journal.open(tmp_path, segment_bytes=4096)
    yield opened
    opened.close()


def test_a_new_directory_is_made_and_holds_an_empty_journal(tmp_path: Path) -> None:
    journal, found = Journal.open(tmp_path / "new" / "state")
    with journal:
        assert (found.entries, found.torn_bytes, journal.num_records, journal.durable) == ((), 0, 0, 0)


def test_one_sync_covers_all_appends_before_it(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for record in epochs(3):
        journal.append(record)
    assert (journal.durable, synced) == (0, [])
    assert journal.sync() == journal.durable == 3
    assert journal.sync() == 3
    assert len(synced) == 1


def test_attachments_of_any_buffer_type_are_read_back_in_parts(journal: Journal) -> None:
    content = bytes(range(256)) * 4
    for attachment in (content, bytearray(content), memoryview(content), memoryview(content).cast("I")):
        entry = journal.append(STORED, attachment)
        assert entry.attachment.size == 1024
        assert journal.read(entry.attachment, 0, 1024) == content
        assert journal.read(entry.attachment, 1000, 24) == content[1000:]
        assert journal.read(entry.attachment, 1024, 0) == b""


def test_a_thread_reads_while_the_owner_rotates(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, segment_bytes=1000)
    entry = journal.append(STORED, b"bulk" * 100)
    wrong: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            data = journal.read(entry.attachment, 4, 8)
            if data != b"bulkbulk":
                wrong.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with journal:
        for _ in range(20):
            journal.append(STORED, bytes(600))
        done.set()
        reader.join()
    assert not wrong and len(segment_paths(tmp_path)) == 21


def test_the_last_record_torn_at_any_byte_is_cut_and_the_journal_goes_on(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    with journal:
        journal.append(EpochClaimed(epoch=1))
        start = journal._tail.end
        journal.append(STORED, b"delta")
    path = segment_path(tmp_path, 0)
    whole = path.read_bytes()
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        journal, found = Journal.open(tmp_path)
        assert [entry.record for entry in found.entries] == [EpochClaimed(epoch=1)]
        assert found.torn_bytes == len(whole[start:cut].rstrip(b"\0"))
        journal.append(EpochClaimed(epoch=2))
        journal.close()
        assert reopened(tmp_path) == [EpochClaimed(epoch=1), EpochClaimed(epoch=2)]


def test_a_flip_in_the_middle_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    with journal:
        for record in epochs(3):
            journal.append(record)
            journal.sync()
        end = journal._tail.end
    path = segment_path(tmp_path, 0)
    whole = path.read_bytes()
    for at in range(SEGMENT_HEADER_BYTES, end - (end - SEGMENT_HEADER_BYTES) // 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        before = path.read_bytes()
        with pytest.raises(JournalCorrupt):
            Journal.open(tmp_path)
        assert path.read_bytes() == before


def test_a_flip_in_the_last_record_is_cut(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    with journal:
        for record in epochs(2):
            journal.append(record)
            journal.sync()
    data = bytearray(segment_path(tmp_path, 0).read_bytes())
    data[-1] ^= 1
    segment_path(tmp_path, 0).write_bytes(data)
    assert reopened(tmp_path) == epochs(1)


def test_what_a_dead_coordinator_had_not_synced_is_durable_once_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart acts on what it reads: it must not read what only the page cache holds."""
    journal, _ = Journal.open(tmp_path)
    journal.append(EpochClaimed(epoch=1))
    crash(journal)
    order: list[str] = []

    def note_settle(path: Path, files: Files) -> None:
        order.append(f"settle {path.name}")

    def note_read(directory: Path, files: Files) -> list[Scan]:
        order.append("read")
        return read_segments(directory, files)

    monkeypatch.setattr("farloop.coordinator.storage.journal.settle", note_settle)
    monkeypatch.setattr("farloop.coordinator.storage.segment.read_segments", note_read)
    assert reopened(tmp_path) == [EpochClaimed(epoch=1)]
    assert order == ["settle journal-000000.log", "read"]


def test_a_record_that_was_cut_does_not_rise_again(tmp_path: Path) -> None:
    """It lies where the next but one will be, with the right salt and sequence."""
    journal, _ = Journal.open(tmp_path)
    start = journal._tail.end
    for record in epochs(2):
        journal.append(record)
    crash(journal)
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    journal, found = Journal.open(tmp_path)
    assert found.entries == ()
    journal.append(EpochClaimed(epoch=7))
    crash(journal)
    assert reopened(tmp_path) == [EpochClaimed(epoch=7)]


def test_small_records_take_room_from_the_disk_in_large_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(free=8 << 20)
    monkeypatch.setattr(os, "posix_fallocate", disk.allocate)
    journal, _ = Journal.open(tmp_path)
    with journal:
        for _ in range(25):
            journal.append(STORED, bytes(100_000))
    assert disk.calls == 3


def test_a_crash_in_a_rotation_leaves_a_whole_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    journal, _ = Journal.open(tmp_path, segment_bytes=1000)
    journal.append(STORED, bytes(800))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # the dead do not clean up
        with pytest.raises(KeyboardInterrupt):
            journal.append(STORED, bytes(800))
    crash(journal)
    assert list(tmp_path.glob("*.tmp"))
    assert reopened(tmp_path) == [STORED]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failed_sync_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path)
    journal.append(EpochClaimed(epoch=1))
    tries: list[int] = []

    def refuse(fd: int) -> None:
        tries.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    uses: list[Callable[[], object]] = [
        journal.sync,
        journal.sync,
        lambda: journal.append(EpochClaimed(epoch=2)),
        lambda: journal.reserve(1),
    ]
    for use in uses:
        with pytest.raises(StorageFailed, match="Input/output error"):
            use()
    journal.close()
    assert len(tries) == 1
    assert journal.durable == 0


def test_after_a_failed_write_nothing_more_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path)
    journal.append(EpochClaimed(epoch=1))
    pwritev = os.pwritev
    calls = 0

    def write_half(fd: int, views: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, "Input/output error")
        return pwritev(fd, [bytes(views[0])[:20]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write_half)
        with pytest.raises(StorageFailed, match="write: Input/output error"):
            journal.append(EpochClaimed(epoch=2))
    with pytest.raises(StorageFailed, match="given up"):
        journal.append(EpochClaimed(epoch=2))
    journal.close()
    journal, found = Journal.open(tmp_path)
    journal.close()
    assert [entry.record for entry in found.entries] == [EpochClaimed(epoch=1)]
    assert 0 < found.torn_bytes <= 20


class Disk:
    """A disk with `free` bytes, to stand in for `os.posix_fallocate`."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.calls = 0

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        if nbytes > self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.free -= nbytes
        self.calls += 1
        os.ftruncate(fd, offset + nbytes)


def test_a_full_disk_shows_at_the_reservation_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(tmp_path)
    with journal:
        journal.append(EpochClaimed(epoch=1))
        disk = Disk(free=4 << 20)
        monkeypatch.setattr(os, "posix_fallocate", disk.allocate)
        before = written(tmp_path)
        with pytest.raises(DiskFull):
            journal.reserve(8 << 20)
        assert written(tmp_path) == before
        journal.reserve(2 << 20)
        journal.append(EpochClaimed(epoch=2))
        journal.release(2 << 20)
    assert reopened(tmp_path) == [EpochClaimed(epoch=1), EpochClaimed(epoch=2)]


def test_small_records_take_what_little_room_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken in steps: a hole that is smaller than a step is no full disk."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", Disk(free=300_000).allocate)
        journal, _ = Journal.open(tmp_path)
        with pytest.raises(DiskFull):
            while True:
                journal.append(STORED, bytes(10_000))
        assert 28 <= journal.num_records <= 29
    with journal:
        journal.append(STORED, bytes(10_000))
        appended = journal.num_records
    assert reopened(tmp_path) == [STORED] * appended


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_the_disk_does_not_take_changes_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    journal, _ = Journal.open(tmp_path, segment_bytes=4 << 20)
    with journal:
        journal.append(STORED, bytes(1 << 20))
        before = written(tmp_path)
        for call, nbytes in (("posix_fallocate", 2 << 20), ("open", 3 << 20)):  # this segment grows; the next begins
            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                with pytest.raises(NoRoom):
                    journal.append(STORED, bytes(nbytes))
            assert written(tmp_path) == before
            journal.append(STORED, bytes(nbytes))
            before = written(tmp_path)
    assert reopened(tmp_path) == [STORED] * 3


def test_a_read_only_disk_is_seen_before_a_write_into_room_that_it_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(tmp_path)
    with journal:
        journal.append(EpochClaimed(epoch=1))
        journal.reserve(1000)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_flag=os.ST_RDONLY))
            for reserved in (None, 1000):
                with pytest.raises(ReadOnly):
                    journal.append(EpochClaimed(epoch=2), reserved=reserved)
        journal.append(EpochClaimed(epoch=2), reserved=1000)
    assert reopened(tmp_path) == [EpochClaimed(epoch=1), EpochClaimed(epoch=2)]


def test_a_reservation_is_kept_from_other_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path)
    with journal:
        disk = Disk(free=2 << 20)
        monkeypatch.setattr(os, "posix_fallocate", disk.allocate)
        journal.reserve(2 << 20)
        with pytest.raises(DiskFull):
            while True:
                journal.append(STORED, bytes(100_000))
        appended = journal.num_records
        assert journal.append(STORED, bytes(2 << 20), reserved=2 << 20).sequence == appended
    assert reopened(tmp_path) == [STORED] * (appended + 1)


def test_a_rotation_takes_the_reservations_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path, segment_bytes=100_000)
    with journal:
        journal.reserve(3 << 20)
        for _ in range(3):
            journal.append(STORED, bytes(60_000))
        assert len(segment_paths(tmp_path)) == 3
        monkeypatch.setattr(os, "posix_fallocate", Disk(free=0).allocate)
        assert journal.append(STORED, bytes(3 << 20), reserved=3 << 20).attachment.segment == 2
    assert reopened(tmp_path) == [STORED] * 4


def test_a_full_disk_at_a_rotation_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path, segment_bytes=1000)
    with journal:
        journal.append(STORED, bytes(700))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", Disk(free=0).allocate)
            with pytest.raises(DiskFull):
                journal.append(STORED, bytes(700))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-000000.log", "lock"]
        journal.append(STORED, bytes(700))
    assert reopened(tmp_path) == [STORED] * 2


def test_a_second_process_finds_the_directory_locked(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from farloop.coordinator.errors import StateLocked\n"
        "from farloop.coordinator.storage.journal import Journal\n"
        "try:\n    Journal.open(pathlib.Path(sys.argv[1]))[0].close()\n"
        "except StateLocked:\n    sys.exit(7)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    journal, _ = Journal.open(tmp_path)
    with journal:
        assert subprocess.run(command, check=False).returncode == 7
    assert subprocess.run(command, check=False).returncode == 0


def test_a_journal_that_cannot_be_read_leaves_the_directory_unlocked(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).write_bytes(b"garbage")
    for _ in range(2):
        with pytest.raises(JournalCorrupt):
            Journal.open(tmp_path)


def summarised(directory: Path, count: int) -> Journal:
    """`count` records in as many segments, each but the first of which begins with a summary."""
    journal, _ = Journal.open(directory, segment_bytes=1000)
    journal.begin_segments_with(lambda: SUMMARY)
    for number in range(count):
        journal.append(STORED, bytes([number]) * 900)
    return journal


def test_a_new_segment_begins_with_a_summary_if_there_is_one(tmp_path: Path) -> None:
    """P: asked for when all records before it are appended, and durable with the segment."""
    journal, _ = Journal.open(tmp_path, segment_bytes=1000)
    appended: list[int] = []
    asked: list[int] = []

    def summarise() -> LedgerSaved:
        asked.append(len(appended))
        return SUMMARY

    journal.begin_segments_with(summarise)
    for _ in range(3):
        appended.append(journal.append(STORED, bytes(900)).sequence)
    assert (asked, appended, journal.num_records, journal.durable) == ([1, 2], [0, 2, 4], 5, 4)
    journal.close()
    assert reopened(tmp_path) == [STORED, SUMMARY, STORED, SUMMARY, STORED]


def test_a_summary_larger_than_a_segment_is_followed_by_a_record_all_the_same(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, segment_bytes=100)
    journal.begin_segments_with(lambda: SUMMARY)
    with journal:
        places = [journal.append(EpochClaimed(epoch=epoch)).attachment.segment for epoch in range(3)]
    assert places == [0, 1, 2]


def test_segments_go_from_the_oldest_on_each_durably_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may undo a deletion that no sync of the directory followed; it must not tear a hole."""
    order: list[str] = []
    unlink = Path.unlink

    def note_unlink(path: Path, missing_ok: bool = False) -> None:
        order.append(path.name)
        unlink(path, missing_ok=missing_ok)

    def note_sync(self: OsFile) -> None:
        order.append("sync")
        assert self.path == tmp_path

    with summarised(tmp_path, 4) as journal:
        monkeypatch.setattr(Path, "unlink", note_unlink)
        monkeypatch.setattr(OsFile, "sync", note_sync)
        journal.prune(3)
        monkeypatch.undo()
    names = [f"journal-00000{number}.log" for number in range(3)]
    assert order == [names[0], "sync", names[1], "sync", names[2], "sync"]


def test_a_crash_between_two_deletions_leaves_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink
    whole = tmp_path / "whole"
    summarised(whole, 5).close()
    for deleted in range(4):
        place = tmp_path / str(deleted)
        shutil.copytree(whole, place)
        left = deleted

        def die(path: Path, missing_ok: bool = False) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            unlink(path, missing_ok=missing_ok)

        journal, _ = Journal.open(place, segment_bytes=1000)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", die)
            with pytest.raises(KeyboardInterrupt):
                journal.prune(4)
        crash(journal)
        journal, found = Journal.open(place)
        assert len(found.entries) == 9 - (2 * deleted - (deleted > 0))
        journal.prune(4)
        journal.close()
        assert list(segment_paths(place)) == [4] and reopened(place) == [SUMMARY, STORED]


def test_a_segment_that_cannot_be_deleted_is_the_disks_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    journal = summarised(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(StorageFailed, match="delete: Read-only file system"):
            journal.prune(2)
    with pytest.raises(StorageFailed, match="given up"):
        journal.append(EpochClaimed(epoch=1))
    journal.close()


def test_the_segment_in_use_is_never_pruned(tmp_path: Path) -> None:
    with summarised(tmp_path, 2) as journal, pytest.raises(AssertionError):
        journal.prune(2)


def test_segments_without_a_summary_cannot_stand_alone(tmp_path: Path) -> None:
    """Whoever prunes by hand is told."""
    journal, _ = Journal.open(tmp_path, segment_bytes=1000)
    with journal:
        for _ in range(3):
            journal.append(STORED, bytes(900))
    segment_path(tmp_path, 0).unlink()
    with pytest.raises(JournalCorrupt, match=r"journal-000000\.log.*missing"):
        Journal.open(tmp_path)


def test_a_full_disk_at_a_rotation_with_a_summary_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = summarised(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", Disk(free=0).allocate)
        with pytest.raises(DiskFull):
            journal.append(STORED, bytes(900))
    assert journal.num_records == 1
    assert journal.append(STORED, bytes(900)).sequence == 2
    journal.close()
    assert reopened(tmp_path) == [STORED, SUMMARY, STORED]


@settings(max_examples=60, stateful_step_count=30)
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
        journal, found = Journal.open(Path(self.place.name), segment_bytes=2000)
        content = [(entry.record, journal.read(entry.attachment, 0, entry.attachment.size)) for entry in found.entries]
        assert content == self.expected
        assert journal.num_records == self.pruned + len(self.expected)
        self.reserved = []
        journal.begin_segments_with(self.summarise)
        return journal

    def summarise(self) -> LedgerSaved:
        self.expected.append((SUMMARY, b""))
        return SUMMARY

    @rule(size=st.integers(0, 3000), byte=st.integers(0, 255))
    def append(self, size: int, byte: int) -> None:
        attachment = bytes([byte]) * size
        self.journal.append(STORED, attachment)
        self.expected.append((STORED, attachment))

    @rule(size=st.integers(0, 3000))
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
        scans = read_segments(Path(self.place.name))
        count = data.draw(st.integers(0, len(scans) - 1))
        self.journal.prune(self.journal._first_segment + count)
        gone = sum(len(found.entries) for found in scans[:count])
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
