"""A disk of this machine that refuses, fills up or takes only a part, for tests of what writes to it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farloop.coordinator.errors import DiskFull


def refuse(code: int = errno.EIO) -> Callable[..., Any]:
    """Stands in for a system call: it fails with this error."""

    def call(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


class Disk:
    """A disk with `free` bytes: `allocate` stands in for `os.posix_fallocate`."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.calls = 0

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        if nbytes > self.free:
            refuse(errno.ENOSPC)()
        self.free -= nbytes
        self.calls += 1
        os.ftruncate(fd, offset + nbytes)


def die_at_the_rename(patch: pytest.MonkeyPatch) -> None:
    """The process is killed when the next file is to take its place, with KeyboardInterrupt, and cleans up nothing."""

    def die(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    patch.setattr(os, "replace", die)
    patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)


def refuse_room(*_: object, **__: object) -> Any:
    """Stands in for what writes a file or a record: the disk is full."""
    raise DiskFull(Path("disk"), 10, 5)
