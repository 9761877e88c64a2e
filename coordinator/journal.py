"""The coordinator's durable log: append, sync, read, recover, prune. What is in it: `records.py`; bytes: `segment.py`.

Protocol O and P: every decision and every encoded update is here before anybody is told of it. One thread owns the
journal and calls everything but `read`, which any thread may call: the downlink is a cursor over these files
(protocol R). Bytes appended are visible to `read` at once and durable after the next `sync`.
"""

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from farloop.coordinator import records
from farloop.coordinator.durable import Bytes, delete, make_directory, remove_temporaries
from farloop.coordinator.errors import StateLocked, StorageFailed
from farloop.coordinator.records import LedgerSaved, Record
from farloop.coordinator.segment import (
    MAX_BODY_BYTES,
    RECORD_HEADER_BYTES,
    Attachment,
    Entry,
    read_attachment,
    read_segments,
    record_header,
    segment_path,
    segment_paths,
)
from farloop.coordinator.tail import Tail, create_tail, reopen_tail, settle

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
"""A segment that would grow past this is finished and the next begun; one record may be larger."""

RECORD_ROOM = 64 << 10
"""Bytes set aside for the header and the record of a reserved append: some 400 contributors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What opening a journal found."""

    entries: tuple[Entry, ...]
    torn_bytes: int
    """Cut from the end: appends that no sync covered when the last coordinator died."""


class Journal:
    """An append-only log of records in one directory, which it holds locked."""

    def __init__(
        self,
        directory: Path,
        lock_fd: int,
        tail: Tail,
        num_records: int,
        *,
        first_segment: int,
        segment_bytes: int,
        draw_salt: Callable[[], int],
    ) -> None:
        """Not to be called: `Journal.open` is the way in."""
        self._directory = directory
        self._lock_fd = lock_fd
        self._tail = tail
        self._num_records = num_records
        self._durable = num_records
        self._reserved_bytes = 0
        self._first_segment = first_segment
        self._summarise: Callable[[], LedgerSaved] | None = None
        self._segment_bytes = segment_bytes
        self._draw_salt = draw_salt
        self._failure: StorageFailed | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        draw_salt: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> tuple[Self, Recovery]:
        """Lock `directory`, create it if it is missing, read and verify all of its journal, and cut a torn tail.

        All that is returned is durable, also what the last coordinator had not synced before it died.

        Raises:
            StateLocked: a coordinator holds the directory.
            JournalCorrupt: damage that is not a torn tail; nothing was changed.
            NoRoom: there is no room to begin a journal.
            StorageFailed: the disk refused.
        """
        make_directory(directory)
        lock_fd = _lock(directory)
        try:
            remove_temporaries(directory)
            paths = segment_paths(directory)
            if paths:
                last = max(paths)
                settle(paths[last])
                scans = read_segments(directory)
                entries = tuple(entry for scan in scans for entry in scan.entries)
                num_records, torn_bytes = scans[-1].next_sequence, scans[-1].torn_bytes
                tail = reopen_tail(paths[last], last, scans[-1])
            else:
                entries, num_records, torn_bytes = (), 0, 0
                tail = create_tail(directory, 0, first_sequence=0, salt=draw_salt(), room=0)
        except BaseException:
            os.close(lock_fd)
            raise
        _log.info("journal open path=%s records=%d torn_bytes=%d", tail.path, len(entries), torn_bytes)
        journal = cls(
            directory,
            lock_fd,
            tail,
            num_records,
            first_segment=min(paths, default=0),
            segment_bytes=segment_bytes,
            draw_salt=draw_salt,
        )
        return journal, Recovery(entries=entries, torn_bytes=torn_bytes)

    @property
    def num_records(self) -> int:
        """Records appended since the run began, also those that were pruned: the sequence of the next."""
        return self._num_records

    @property
    def durable(self) -> int:
        """Records with a lower sequence than this survive a power cut."""
        return self._durable

    def begin_segments_with(self, summarise: Callable[[], LedgerSaved]) -> None:
        """From now on every new segment begins with what all records before it say, so that those can be pruned.

        It is asked for in the middle of an `append` or `reserve`, when the records appended before are all there are.
        """
        self._summarise = summarise

    def prune(self, before_segment: int) -> None:
        """Delete the segments before this one, which begins with what they said.

        From the oldest on, each durably before the next: whatever a crash leaves is a journal without a gap.

        Raises:
            StorageFailed: the disk refused; the journal cannot be used any more.
        """
        self._require_usable()
        assert before_segment <= self._tail.number
        while self._first_segment < before_segment:
            path = segment_path(self._directory, self._first_segment)
            with self._fatal():
                delete(path)
            self._first_segment += 1
            _log.info("journal pruned path=%s", path)

    def reserve(self, attachment_bytes: int) -> None:
        """Set room aside for one append of up to `attachment_bytes`, so that a full disk shows before the work.

        It is held, whatever else is appended, until `append(..., reserved=attachment_bytes)` or
        `release(attachment_bytes)`.

        Raises:
            NoRoom: nothing was changed.
        """
        room = attachment_bytes + RECORD_ROOM
        self._require_usable()
        self._make_room(room)
        self._reserved_bytes += room

    def release(self, attachment_bytes: int) -> None:
        """Give a reservation back."""
        room = attachment_bytes + RECORD_ROOM
        assert room <= self._reserved_bytes
        self._reserved_bytes -= room

    def append(self, record: Record, attachment: Bytes = b"", *, reserved: int | None = None) -> Entry:
        """Write a record behind the last; it is durable once `sync` has returned.

        Args:
            attachment: its bulk bytes; not kept.
            reserved: what was given to `reserve`, to use that room up.

        Raises:
            NoRoom: nothing was changed; a reservation stays.
            StorageFailed: the journal cannot be used any more.
        """
        self._require_usable()
        kind, body = records.encode(record)
        attachment_bytes = memoryview(attachment).nbytes
        assert len(body) <= MAX_BODY_BYTES and attachment_bytes <= MAX_BODY_BYTES
        size = RECORD_HEADER_BYTES + len(body) + attachment_bytes
        held = 0
        if reserved is None:
            self._make_room(size)
        else:
            held = reserved + RECORD_ROOM
            assert held <= self._reserved_bytes
            # The room is in this segment: the record goes here, even if the segment grows past its limit.
            self._tail.allocate(self._reserved_bytes + max(0, size - held))
        tail = self._tail
        header = record_header(
            kind, body, attachment, sequence=self._num_records, durable=self._durable, salt=tail.salt
        )
        with self._fatal():
            tail.write(header, body, attachment)
        entry = Entry(
            sequence=self._num_records,
            record=record,
            attachment=Attachment(segment=tail.number, offset=tail.end - attachment_bytes, size=attachment_bytes),
        )
        self._num_records += 1
        self._reserved_bytes -= held
        return entry

    def sync(self) -> int:
        """Make everything appended so far durable, with one fsync, and return how many records that are.

        Raises:
            StorageFailed: what is durable is unknown; the journal cannot be used any more. Exit and recover.
        """
        self._require_usable()
        if self._durable < self._num_records:
            with self._fatal():
                self._tail.sync()
            self._durable = self._num_records
        return self._durable

    def read(self, attachment: Attachment, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes) of an attachment, durable or not. Any thread may call it.

        Raises:
            StorageFailed: they cannot be read.
        """
        return read_attachment(self._directory, attachment, offset, nbytes)

    def close(self) -> None:
        """Sync, give back the room set aside, and unlock. Does nothing when done before."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._failure is None:
                self._tail.finish()
                self._durable = self._num_records
        finally:
            self._tail.close()
            os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_usable(self) -> None:
        assert not self._closed
        if self._failure is not None:
            raise StorageFailed(self._failure.path, f"given up after: {self._failure.detail}") from self._failure

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """What the disk refuses in here is never tried again."""
        try:
            yield
        except StorageFailed as failure:
            self._failure = failure
            raise

    def _make_room(self, room: int) -> None:
        """Have `room` bytes behind the reserved ones, in the next segment if they are too many for this one."""
        if self._tail.is_empty or self._tail.end + room <= self._segment_bytes:
            self._tail.allocate(self._reserved_bytes + room)
        else:
            self._rotate(room)

    def _rotate(self, room: int) -> None:
        """Finish the segment and begin the next, taking the reservations along.

        The new one has its room before the old one is finished, so that a full disk changes nothing; the old one is
        whole and durable before the new one is there, so that only the last segment ever has a torn tail.
        """
        old, salt = self._tail, self._draw_salt()
        opening: tuple[Bytes, ...] = ()
        if self._summarise is not None:
            kind, body = records.encode(self._summarise())
            header = record_header(kind, body, b"", sequence=self._num_records, durable=self._durable, salt=salt)
            opening = (header, body)
        with self._fatal():
            self._tail = create_tail(
                self._directory,
                old.number + 1,
                first_sequence=self._num_records,
                salt=salt,
                room=self._reserved_bytes + room,
                opening=opening,
                before_visible=old.finish,
            )
        if opening:
            self._num_records += 1
        self._durable = self._num_records
        old.close()


def _lock(directory: Path) -> int:
    """Hold the directory until the descriptor returned is closed, at the latest by the process's death."""
    path = directory / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageFailed(path, f"open: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise StateLocked(path) from error
        raise StorageFailed(path, f"lock: {error.strerror}") from error
    return fd
