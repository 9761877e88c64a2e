"""The journal's last segment, which is being written. It knows bytes and room, not records: those are `journal.py`."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from farloop.coordinator.durable import (
    Bytes,
    allocate,
    no_room,
    replacing,
    require_writable,
    sync,
    sync_and_forget,
    truncate,
    write_all,
)
from farloop.coordinator.errors import DiskFull, StorageFailed
from farloop.coordinator.segment import SEGMENT_HEADER_BYTES, Scan, segment_header, segment_path

_ALLOCATION_STEP = 1 << 20
"""Room is taken from the disk in steps, so that small records do not each ask for it; in smaller ones near its end."""


@dataclass(slots=True)
class Tail:
    """An open segment: written bytes up to `end`, zeros with blocks on the disk up to `allocated`."""

    number: int
    path: Path
    fd: int
    salt: int
    start: int
    """Where the records go that follow what the segment was begun with."""
    end: int
    allocated: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written since it was begun."""
        return self.end == self.start

    def allocate(self, room: int) -> None:
        """Have blocks for `room` bytes behind `end`, on a file system that takes them.

        Raises:
            NoRoom: nothing was changed.
        """
        require_writable(self.fd, self.path)
        missing = self.end + room - self.allocated
        if missing > 0:
            self.allocated += _allocate_in_steps(self.fd, self.path, self.allocated, missing)

    def write(self, *parts: Bytes) -> None:
        """Write behind `end`. Durable after `sync`."""
        write_all(self.fd, self.path, parts, self.end)
        self.end += sum(memoryview(part).nbytes for part in parts)

    def sync(self) -> None:
        """Make all that was written durable."""
        sync(self.fd, self.path)

    def finish(self) -> None:
        """Give back the room behind `end`, durably: nothing more will be written."""
        truncate(self.fd, self.path, self.end)
        self.allocated = self.end
        self.sync()

    def close(self) -> None:
        """Close the file as it is."""
        os.close(self.fd)


def create_tail(
    directory: Path,
    number: int,
    *,
    first_sequence: int,
    salt: int,
    room: int,
    opening: Sequence[Bytes] = (),
    before_visible: Callable[[], None] = lambda: None,
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
        with replacing(path) as temporary:
            fd = _create_file(temporary)
            undo.callback(os.close, fd)
            allocated = _allocate_in_steps(fd, temporary, 0, start + room)
            write_all(fd, temporary, parts, 0)
            before_visible()
        undo.pop_all()
    return Tail(number, path, fd, salt, start, start, allocated)


def reopen_tail(path: Path, number: int, found: Scan) -> Tail:
    """Go on with a segment behind its last whole record; what stands there is cut, durably."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StorageFailed(path, f"open: {error.strerror}") from error
    tail = Tail(number, path, fd, found.salt, SEGMENT_HEADER_BYTES, found.end, found.size)
    try:
        tail.finish()
    except BaseException:
        tail.close()
        raise
    return tail


def settle(path: Path) -> None:
    """Before a segment that a dead process wrote is read: make the disk agree with what will be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageFailed(path, f"open: {error.strerror}") from error
    try:
        sync_and_forget(fd, path)
    finally:
        os.close(fd)


def _create_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise no_room(path, error.errno) or StorageFailed(path, f"create: {error.strerror}") from error


def _allocate_in_steps(fd: int, path: Path, offset: int, nbytes: int) -> int:
    """Allocate a step, or as much less of it as there is, but no less than `nbytes`; returns how much."""
    step = max(nbytes, _ALLOCATION_STEP)
    while True:
        try:
            allocate(fd, path, offset, step)
        except DiskFull:
            if step == nbytes:
                raise
            step = max(nbytes, step // 2)
        else:
            return step
