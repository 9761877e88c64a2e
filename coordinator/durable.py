"""Writes, syncs and room set aside, on open files of this machine; `files.py` is the port over them. No formats."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from farloop.coordinator.errors import DiskFull, NoDescriptor, NoRoom, ReadOnly, StorageFailed

TEMPORARY_SUFFIX = ".tmp"
"""Of a file that has not taken its place yet: whoever finds one at a start may delete it."""

Bytes = bytes | bytearray | memoryview

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def sync(fd: int, path: Path) -> None:
    """Make the bytes and the length of an open file durable.

    Raises:
        StorageFailed: the kernel may have dropped the dirty pages and called them clean, so that a second try would
            succeed and prove nothing. Exit and recover.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        raise StorageFailed(path, f"sync: {error.strerror}") from error


def sync_and_forget(fd: int, path: Path) -> None:
    """`sync`, then drop the cached pages, so that the next read shows what the disk holds.

    After a failed sync the cache may hold clean pages that the disk never got; a process that starts over must not
    believe them.
    """
    sync(fd, path)
    forget(fd)


def forget(fd: int) -> None:
    """Drop the cached pages that the disk has, too, so that the next read shows what it holds. Only Linux can."""
    if sys.platform == "linux":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def truncate(fd: int, path: Path, length: int) -> None:
    """Cut an open file, or give back what was allocated behind `length`; durable after the next `sync`."""
    try:
        os.ftruncate(fd, length)
    except OSError as error:
        raise StorageFailed(path, f"truncate: {error.strerror}") from error


def write_all(fd: int, path: Path, parts: Sequence[Bytes], offset: int) -> None:
    """Write the parts one after the other at `offset`, however often the kernel stops short.

    Raises:
        StorageFailed: some of the bytes may be there.
    """
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        try:
            written = os.pwritev(fd, views, offset)
        except OSError as error:
            raise StorageFailed(path, f"write: {error.strerror}") from error
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def no_room(path: Path, code: int | None, nbytes: int = 0) -> NoRoom | None:
    """What an error number says of the disk, if it says that nothing more goes onto it; the parent of `path` exists.

    A process without a free descriptor writes no new file either: that ends, too, and is no fault of the disk.
    """
    if code == errno.EROFS:
        return ReadOnly(path)
    if code in NO_DESCRIPTOR:
        return NoDescriptor(path)
    if code in _NO_ROOM:
        stat = os.statvfs(path.parent)
        return DiskFull(path, nbytes, stat.f_bavail * stat.f_frsize)
    return None


def require_writable(fd: int, path: Path) -> None:
    """See that the file system of an open file takes writes now: blocks that it gave before are no promise of that.

    Raises:
        ReadOnly: it does not.
    """
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        raise ReadOnly(path)


def require_free(path: Path, nbytes: int) -> None:
    """A promise of nothing: `nbytes` are free now on the file system of `path`, which must exist.

    Raises:
        NoRoom: they are not.
    """
    stat = os.statvfs(path)
    if stat.f_flag & os.ST_RDONLY:
        raise ReadOnly(path)
    free = stat.f_bavail * stat.f_frsize
    if nbytes > free:
        raise DiskFull(path, nbytes, free)


def allocate(fd: int, path: Path, offset: int, nbytes: int) -> None:
    """Give [offset, offset + nbytes) blocks on the disk; `offset` is the file's length. The bytes read as zeros.

    Where the file system cannot allocate ahead, only `require_free` is asked.

    Raises:
        NoRoom: the file is as it was.
    """
    if sys.platform != "linux":
        require_free(path, nbytes)
        return
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno in _CANNOT_ALLOCATE:
            require_free(path, nbytes)
        elif refused := no_room(path, error.errno, nbytes):
            if isinstance(refused, DiskFull):
                truncate(fd, path, offset)  # gives back the part that was there
            raise refused from error
        else:
            raise StorageFailed(path, f"allocate: {error.strerror}") from error
