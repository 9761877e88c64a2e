"""The journal: append, sync, read back, prune."""

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from farloop.coordinator.decide import records
from farloop.coordinator.decide.records import LedgerSaved, Record
from farloop.coordinator.errors import DiskFull, Fenced, FolderChanged, NoRoom, StorageError, StorageFailed
from farloop.coordinator.storage.files import DISK, Bytes, File, Files, Identity, Lock, disk_errors, no_room
from farloop.coordinator.storage.segment import (
    MAX_BODY_BYTES,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Attachment,
    Entry,
    Scan,
    Segments,
    record_header,
    refuse_half_salvaged,
    scan_segment,
    segment_header,
    segment_numbers,
    segment_path,
)

# --- The epoch: which start of the coordinator this is. A higher one fences a lower one (protocol, Fencing)

_EPOCH_FILE = "epoch"
_MOST_EPOCHS = 1 << 62  # above it, later epochs would not fit into a record or a message
_EPOCH_FORMAT = re.compile(rb"farloop-epoch 1 ([1-9][0-9]{0,18})\n")
"""The whole file: name, format version, highest epoch ever claimed."""


def claim_epoch(directory: Path, *, seen: int = 0, files: Files = DISK) -> int:
    """Claim the next epoch of the state in `directory`, durably.

    To be called with the journal open, which holds the directory's lock, and before any socket is bound. `seen`: the
    highest epoch known from elsewhere (the journal), so that a lost file cannot turn time back.
    Raises NoRoom: nothing was claimed. Raises StorageFailed: the file is no epoch file, or could not be written.
    """
    path = directory / _EPOCH_FILE
    epoch = max(claimed_epoch(directory, files), seen) + 1
    files.require_free(directory, 4096)
    with files.replacing(path) as temporary, disk_errors(path, "write", room=True):
        files.write_bytes(temporary, b"farloop-epoch 1 %d\n" % epoch)
    return epoch


def claimed_epoch(directory: Path, files: Files = DISK) -> int:
    """The highest epoch claimed in `directory`; 0 for none. Changes nothing.
    Raises NoRoom: no descriptor is left to read it; try again. Raises StorageFailed: it cannot be read, or is no
    epoch file."""
    path = directory / _EPOCH_FILE
    try:
        content = files.read_bytes(path)
    except FileNotFoundError:
        return 0
    except IsADirectoryError:
        content = b""
    except OSError as error:
        raise no_room(path, error.errno) or StorageFailed(path, f"read: {error.strerror}") from error
    found = _EPOCH_FORMAT.fullmatch(content)
    if found is None or int(found[1]) > _MOST_EPOCHS:
        raise StorageFailed(
            path, "not an epoch file of format version 1; restore it, or delete it if the journal is whole"
        )
    return int(found[1])


class Claim:
    """A claimed epoch, compared with the folder before every write: one `stat` while the file is unchanged.

    On some shared disks a lock does not keep two coordinators apart. A file that is missing says nothing: the journal
    knows the epoch, too.
    """

    def __init__(self, directory: Path, epoch: int, files: Files = DISK) -> None:
        self._directory, self._path, self._epoch, self._files = directory, directory / _EPOCH_FILE, epoch, files
        self._known: Identity | None = None  # identity of the file that was last read and had no higher epoch

    def require(self) -> None:
        """Raises Fenced: a higher epoch was claimed since; else as `claimed_epoch`."""
        with disk_errors(self._path, "read"):
            identity = self._files.identity(self._path)
        if identity is None or identity != self._known:
            if (found := claimed_epoch(self._directory, self._files)) > self._epoch:
                raise Fenced(self._path, self._epoch, found)
            self._known = identity


# --- The segment that is being written: bytes and room, not records


@dataclass(slots=True)
class Tail:
    """An open segment: written bytes up to `end`, zeros with blocks on the disk up to `allocated`."""

    number: int
    path: Path
    file: File
    salt: int
    start: int  # start of the records after the segment's opening
    end: int
    allocated: int
    size: int = -1  # bytes of the file as this process left it

    def __post_init__(self) -> None:
        self.size = self.file.identity()[2]

    @property
    def is_empty(self) -> bool:
        return self.end == self.start

    def allocate(self, room: int) -> None:
        """Allocate blocks for `room` bytes after `end`. Raises NoRoom: nothing was changed."""
        self.file.require_writable()
        missing = self.end + room - self.allocated
        if missing > 0:
            self.allocated += _allocate_in_steps(self.file, self.allocated, missing)
            self.size = self.file.identity()[2]

    def write(self, *parts: Bytes) -> None:
        """Write behind `end`. Durable after `sync`."""
        self.file.write(parts, self.end)
        self.end += sum(memoryview(part).nbytes for part in parts)
        self.size = max(self.size, self.end)

    def sync(self) -> None:
        self.file.sync()

    def cut(self) -> None:
        self.file.truncate(self.end)
        self.allocated = self.size = self.end

    def finish(self) -> None:
        """Free the room after `end`, and make everything durable."""
        self.cut()
        self.sync()

    def changed(self, files: Files) -> str | None:
        """What another process did to the file; None if nothing. Raises OSError."""
        device, inode, *_ = self.file.identity()
        found = files.identity(self.path)
        if found is None or found[:2] != (device, inode):
            return "was removed or replaced while it was being written"
        return None if found[2] == self.size else f"has {found[2]} bytes, and this coordinator left {self.size}"

    def close(self) -> None:
        self.file.close()


def create_tail(
    directory: Path,
    number: int,
    *,
    first_sequence: int,
    salt: int,
    room: int,
    opening: Sequence[Bytes] = (),
    before_visible: Callable[[], None] = lambda: None,
    files: Files = DISK,
) -> Tail:
    """Begin a segment with blocks for `room` bytes of records. It is there whole, with its opening, or not at all.

    `opening`: the bytes of its first record. `before_visible` is called when only the new name is missing.
    Raises NoRoom: nothing was changed, and `before_visible` was not called. Raises StorageFailed: the disk refused.
    """
    path = segment_path(directory, number)
    parts = [segment_header(number, first_sequence, salt), *opening]
    start = sum(memoryview(part).nbytes for part in parts)
    with ExitStack() as undo:
        with files.replacing(path) as temporary:
            with disk_errors(path, "create", room=True):
                file = files.create(temporary)
            undo.callback(file.close)
            allocated = _allocate_in_steps(file, 0, start + room)
            file.write(parts, 0)
            before_visible()
        undo.pop_all()
    file.path = path
    return Tail(number, path, file, salt, start, start, allocated)


def reopen_tail(path: Path, number: int, found: Scan, files: Files = DISK) -> Tail:
    """Continue a segment after its last whole record. The rest is cut, durably after `finish`."""
    tail = Tail(number, path, _opened(path, files, write=True), found.salt, SEGMENT_HEADER_BYTES, found.end, found.size)
    try:
        tail.cut()
    except BaseException:
        tail.close()
        raise
    return tail


def settle(path: Path, files: Files = DISK) -> None:
    """Before a segment of a dead process is read: make the disk agree with what will be read."""
    with closing(_opened(path, files, write=False)) as file:
        file.sync_and_forget()


def _opened(path: Path, files: Files, *, write: bool) -> File:
    with disk_errors(path, "open"):
        return files.open(path, write=write)


def _allocate_in_steps(file: File, offset: int, nbytes: int) -> int:
    """Allocate a step, or less if there is less room, but at least `nbytes`. Returns how much."""
    step = max(nbytes, file.allocation_step)
    while True:
        try:
            file.allocate(offset, step)
        except DiskFull:
            if step == nbytes:
                raise
            step = max(nbytes, step // 2)
        else:
            return step


# --- The journal
#
# Every decision and every encoded update is written here before anything is sent (protocol, Commit order). One thread
# owns the journal and calls everything but `read`, which any thread may call: the downlink reads these files
# (protocol, Downlink). Appended bytes are visible to `read` at once and durable after the next `sync`.

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20  # a segment that would grow beyond this is finished; one record may be larger
RECORD_ROOM = 64 << 10  # bytes reserved for header and record of an append: about 400 contributors


class Journal:
    """An append-only log of records in one directory, which it holds locked."""

    def __init__(self, directory: Path, files: Files, lock: Lock, *, segment_bytes: int) -> None:
        self._directory, self._files, self._lock = directory, files, lock
        self._open_tail: Tail | None = None
        self._last: tuple[int, Scan] | None = None  # number and content of the last segment found
        self.num_records = 0  # appended since the run began, also those that were pruned: the sequence of the next
        self.durable = 0  # records with a lower sequence than this survive a power cut
        self._reserved_bytes = 0
        self.first_segment = 0  # the oldest; those before it were pruned
        self._summarise: Callable[[], LedgerSaved] | None = None
        self._claim: Claim | None = None
        self._segment_bytes = segment_bytes
        self._failure: StorageError | None = None
        self._closed = False

    @classmethod
    def open(cls, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, files: Files = DISK) -> tuple[Self, Segments]:
        """`look`, then `begin`. Raises JournalCorrupt: there is damage in it."""
        journal, found = cls.look(directory, segment_bytes=segment_bytes, files=files)
        with journal.closed_on_error():
            assert found.entries is not None  # all of them
            journal.begin()
        return journal, found

    @classmethod
    def look(cls, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, files: Files = DISK) -> tuple[Self, Segments]:
        """Lock `directory`, create it if it is missing, and read and verify its journal's last segment.

        Of what is there no byte is changed before `begin`: where locks do not keep two coordinators apart, the epoch is
        claimed between the two. All that is found is durable, also what the last coordinator had not synced before it
        died. Until `begin`, only `close` may be called.

        Raises:
            StateLocked: a coordinator holds the directory.
            StateMismatch: `farloop journal salvage` was interrupted in it.
            JournalCorrupt: damage of the last segment that is not a torn tail; nothing was changed.
            StorageFailed: the disk refused.
        """
        files.make_directory(directory)
        lock = files.lock(directory / "lock")
        journal = cls(directory, files, lock, segment_bytes=segment_bytes)
        with journal.closed_on_error():
            refuse_half_salvaged(directory, files)
            return journal, journal._read()

    @classmethod
    def after(cls, directory: Path, last: Scan, number: int, *, segment_bytes: int, files: Files) -> Self:
        """As `look`, where all up to `last`, which is the end of segment `number`, is known. Raises StateLocked."""
        journal = cls(directory, files, files.lock(directory / "lock"), segment_bytes=segment_bytes)
        journal.first_segment, journal._last = min(segment_numbers(directory, files)), (number, last)
        journal.num_records = journal.durable = last.next_sequence
        return journal

    def look_again(self) -> Segments | None:
        """The segments if the journal changed since it was read; call it with the epoch claimed. Raises as `look`."""
        assert self._open_tail is None
        numbers = segment_numbers(self._directory, self._files)
        if self._last is None:
            return self._read() if numbers else None
        number, found = self._last
        path, trusted = segment_path(self._directory, number), found.next_sequence
        if number != max(numbers, default=None) or scan_segment(path, number, self._files, trusted=trusted) != found:
            return self._read()
        return None

    def begin(self, *, fresh: bool = False) -> None:
        """Delete what a crash left half written, cut the torn tail, and go on behind it; or begin a journal.

        Args:
            fresh: in a segment of its own, beginning with what all records say (`begin_segments_with`). What another
                coordinator that is fenced, and has not noticed yet, still writes into the last one does no harm then.

        Raises NoRoom: there is no room to begin a journal, or a segment. Raises StorageFailed: the disk refused.
        """
        assert self._open_tail is None
        self._files.remove_temporaries(self._directory)
        torn_bytes = 0
        if self._last is not None:
            number, found = self._last
            torn_bytes = found.torn_bytes
            self._open_tail = reopen_tail(segment_path(self._directory, number), number, found, self._files)
            if fresh and not self._tail.is_empty:
                self._rotate(0)
            else:
                self._tail.finish()
        else:
            self._open_tail = create_tail(
                self._directory, 0, first_sequence=0, salt=secrets.randbits(64), room=0, files=self._files
            )
        self._last = None
        _log.info("journal open path=%s records=%d torn_bytes=%d", self._tail.path, self.num_records, torn_bytes)

    def _read(self) -> Segments:
        found = Segments(self._directory, self._files)
        self._last = None
        if found.numbers:
            settle(segment_path(self._directory, found.numbers[-1]), self._files)
            found.require_end()
            self.first_segment, self._last = found.numbers[0], (found.numbers[-1], found.last)
            self.num_records = self.durable = found.last.next_sequence
        return found

    @property
    def _tail(self) -> Tail:
        assert self._open_tail is not None, "begin comes first"
        return self._open_tail

    def begin_segments_with(self, summarise: Callable[[], LedgerSaved]) -> None:
        """From now on every new segment begins with a summary of all records before it, so that those can be pruned.

        It is requested during an `append` or `reserve`, after all earlier records.
        """
        self._summarise = summarise

    def held_by(self, claim: Claim) -> None:
        """From now on every write first checks that this epoch is still the newest."""
        self._claim = claim

    @property
    def segment(self) -> int:
        return self._tail.number

    def roll(self) -> None:
        """Finish the segment and begin the next with a summary, unless this one is empty. Reservations move along.
        Raises as `append`."""
        assert self._summarise is not None
        self.require_ours()
        if not self._tail.is_empty:
            self._rotate(0)

    def prune(self, before_segment: int) -> None:
        """Delete the segments before this one, which begins with what they said. From the oldest on, each durably
        before the next: whatever a crash leaves is a journal without a gap.

        Raises:
            NoRoom: no descriptor is left; what was deleted is.
            Fenced, FolderChanged: nothing was changed.
            StorageFailed: the disk refused; the journal cannot be used any more.
        """
        self.require_ours()
        assert before_segment <= self._tail.number
        while self.first_segment < before_segment:
            path = segment_path(self._directory, self.first_segment)
            if self._files.identity(path) is not None:  # a damaged journal may lack it
                with self._fatal():
                    self._files.delete(path)
            self.first_segment += 1
            _log.info("journal pruned path=%s", path)

    def reserve(self, attachment_bytes: int) -> None:
        """Set room aside for one append of up to `attachment_bytes`, so that a full disk shows before the work. It is
        held until `append(..., reserved=attachment_bytes)` or `release(attachment_bytes)`.
        Raises NoRoom: nothing was changed."""
        room = attachment_bytes + RECORD_ROOM
        self.require_ours()
        self._make_room(room)
        self._reserved_bytes += room

    def release(self, attachment_bytes: int) -> None:
        room = attachment_bytes + RECORD_ROOM
        assert room <= self._reserved_bytes
        self._reserved_bytes -= room

    def append(self, record: Record, attachment: Bytes = b"", *, reserved: int | None = None) -> Entry:
        """Write a record behind the last; it is durable once `sync` has returned. `attachment`: its bulk bytes; not
        kept. `reserved`: what was given to `reserve`, to use that room up.

        Raises:
            NoRoom: nothing was changed; a reservation stays.
            Fenced, FolderChanged: the folder is not this coordinator's any more; nothing was changed.
            StorageFailed: the journal cannot be used any more.
        """
        self.require_ours()
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
        header = record_header(kind, body, attachment, sequence=self.num_records, durable=self.durable, salt=tail.salt)
        with self._fatal():
            tail.write(header, body, attachment)
        entry = Entry(
            sequence=self.num_records,
            record=record,
            attachment=Attachment(segment=tail.number, offset=tail.end - attachment_bytes, size=attachment_bytes),
            offset=tail.end - size,
            digest=int.from_bytes(header[-8:], "little"),
        ).placed()
        self.num_records += 1
        self._reserved_bytes -= held
        return entry

    def sync(self) -> int:
        """Make everything appended so far durable, with one fsync, and return how many records that are.

        Raises:
            NoRoom: no descriptor is left to see whose the folder is: of these records nobody may be told yet. Call it
                again, and append nothing twice.
            Fenced: another coordinator has taken the folder over, and need not have seen these records.
            StorageFailed: what is durable is unknown; the journal cannot be used any more. Exit and recover.
        """
        self._require_usable()
        if self.durable < self.num_records:
            with self._fatal():
                self._tail.sync()
                if self._claim is not None:
                    self._claim.require()
            self.durable = self.num_records
        return self.durable

    def close(self) -> None:
        """Sync, free reserved room, and unlock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._open_tail is not None and self._failure is None:
                self._finish()
        finally:
            if self._open_tail is not None:
                self._open_tail.close()
            self._lock.close()

    def _finish(self) -> None:
        try:
            self.require_ours()
        except (Fenced, FolderChanged, NoRoom) as error:  # everything that nodes were told is durable
            _log.warning("journal left as it is why=%r", str(error))
            return
        self._tail.finish()
        self.durable = self.num_records

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_usable(self) -> None:
        assert not self._closed
        if isinstance(self._failure, StorageFailed):
            raise StorageFailed(self._failure.path, f"given up after: {self._failure.detail}") from self._failure
        if self._failure is not None:
            raise self._failure

    def require_ours(self) -> None:
        """See that nobody else has taken the folder over, or changed what this process alone may change.
        Raises Fenced, FolderChanged: the journal cannot be used any more. Raises NoRoom: that cannot be found out
        now."""
        if not self._closed:
            self._require_usable()
        with self._fatal():
            if self._claim is not None:
                self._claim.require()  # first: it says who
            with disk_errors(self._tail.path, "stat"):
                changed = self._tail.changed(self._files)
            if changed:
                raise FolderChanged(self._tail.path, changed)
            if not self._lock.is_ours():
                raise FolderChanged(self._lock.path, "the lock was removed or replaced; another start is possible")

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """A refusal of the disk in this block is final."""
        try:
            yield
        except (StorageFailed, Fenced, FolderChanged) as failure:
            self._failure = failure
            raise

    def _make_room(self, room: int) -> None:
        """Allocate `room` bytes after the reserved ones, in a new segment if this one is full."""
        if self._tail.is_empty or self._tail.end + room <= self._segment_bytes:
            self._tail.allocate(self._reserved_bytes + room)
        else:
            self._rotate(room)

    def _rotate(self, room: int) -> None:
        """Finish the segment and begin the next, with the reservations. The new one is allocated first, so a full disk
        changes nothing. The old one is whole and durable before the new one exists, so only the last segment can have a
        torn tail."""
        old, salt = self._tail, secrets.randbits(64)
        opening: tuple[Bytes, ...] = ()
        if self._summarise is not None:
            kind, body = records.encode(self._summarise())
            header = record_header(kind, body, b"", sequence=self.num_records, durable=self.durable, salt=salt)
            opening = (header, body)

        def finish_old() -> None:
            self.require_ours()
            old.finish()

        with self._fatal():
            self._open_tail = create_tail(
                self._directory,
                old.number + 1,
                first_sequence=self.num_records,
                salt=salt,
                room=self._reserved_bytes + room,
                opening=opening,
                before_visible=finish_old,
                files=self._files,
            )
        if opening:
            self.num_records += 1
        self.durable = self.num_records
        old.close()
