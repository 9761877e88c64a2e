"""The journal's last segment, which is being written. It knows bytes and room, not records: those are `journal.py`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from farloop.coordinator.durable import Bytes, no_room
from farloop.coordinator.errors import DiskFull, StorageFailed
from farloop.coordinator.files import DISK, File, Files
from farloop.coordinator.segment import SEGMENT_HEADER_BYTES, Scan, segment_header, segment_path

_ALLOCATION_STEP = 1 << 20
"""Room is taken from the disk in steps, so that small records do not each ask for it; in smaller ones near its end."""


@dataclass(slots=True)
class Tail:
    """An open segment: written bytes up to `end`, zeros with blocks on the disk up to `allocated`."""

    number: int
    path: Path
    file: File
    salt: int
    start: int
    """Where the records go that follow what the segment was begun with."""
    end: int
    allocated: int
    size: int = -1
    """Bytes of the file as this process left it."""

    def __post_init__(self) -> None:
        self.size = self.file.identity()[2]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written since it was begun."""
        return self.end == self.start

    def allocate(self, room: int) -> None:
        """Have blocks for `room` bytes behind `end`, on a file system that takes them.

        Raises:
            NoRoom: nothing was changed.
        """
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
        """Make all that was written durable."""
        self.file.sync()

    def cut(self) -> None:
        """Give back the room behind `end`."""
        self.file.truncate(self.end)
        self.allocated = self.size = self.end

    def finish(self) -> None:
        """Give back the room behind `end`, and make all that was written durable."""
        self.cut()
        self.sync()

    def changed(self, files: Files) -> str | None:
        """What somebody else did to the file; None if it is as this process left it. Raises OSError."""
        device, inode, *_ = self.file.identity()
        found = files.identity(self.path)
        if found is None or found[:2] != (device, inode):
            return "was removed or replaced while it was being written"
        return None if found[2] == self.size else f"has {found[2]} bytes, and this coordinator left {self.size}"

    def close(self) -> None:
        """Close the file as it is."""
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

    Args:
        opening: the bytes of its first record.
        before_visible: called when only the new name is missing.

    Raises:
        NoRoom: nothing was changed, and `before_visible` was not called.
        StorageFailed: the disk refused.
    """
    path = segment_path(directory, number)
    parts = [segment_header(number, first_sequence, salt), *opening]
    start = sum(memoryview(part).nbytes for part in parts)
    with ExitStack() as undo:
        with files.replacing(path) as temporary:
            try:
                file = files.create(temporary)
            except OSError as error:
                raise no_room(path, error.errno) or StorageFailed(path, f"create: {error.strerror}") from error
            undo.callback(file.close)
            allocated = _allocate_in_steps(file, 0, start + room)
            file.write(parts, 0)
            before_visible()
        undo.pop_all()
    file.path = path
    return Tail(number, path, file, salt, start, start, allocated)


def reopen_tail(path: Path, number: int, found: Scan, files: Files = DISK) -> Tail:
    """Go on with a segment behind its last whole record. What stands there is cut, durably after `finish` alone."""
    tail = Tail(number, path, _opened(path, files, write=True), found.salt, SEGMENT_HEADER_BYTES, found.end, found.size)
    try:
        tail.cut()
    except BaseException:
        tail.close()
        raise
    return tail


def settle(path: Path, files: Files = DISK) -> None:
    """Before a segment that a dead process wrote is read: make the disk agree with what will be read."""
    file = _opened(path, files, write=False)
    try:
        file.sync_and_forget()
    finally:
        file.close()


def _opened(path: Path, files: Files, *, write: bool) -> File:
    try:
        return files.open(path, write=write)
    except OSError as error:
        raise StorageFailed(path, f"open: {error.strerror}") from error


def _allocate_in_steps(file: File, offset: int, nbytes: int) -> int:
    """Allocate a step, or as much less of it as there is, but no less than `nbytes`; returns how much."""
    step = max(nbytes, _ALLOCATION_STEP)
    while True:
        try:
            file.allocate(offset, step)
        except DiskFull:
            if step == nbytes:
                raise
            step = max(nbytes, step // 2)
        else:
            return step
