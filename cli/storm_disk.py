"""A full disk, for real: a file that takes all that is left of a small file system. Never of one that others need."""

import os
from pathlib import Path

SMALL_BYTES = 4 << 30
"""A file system of its own that is larger than this is not filled."""

STEP_BYTES = 64 << 20
"""Taken at a time, without writing them, until the last few."""


class Ballast:
    """Fills the file system of a folder, if that is one of its own and small."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "ballast"

    @property
    def lies(self) -> bool:
        """Whether the disk is full of it now."""
        return self._path.exists()

    def refusal(self) -> str:
        """Why it must not be filled; empty where it may."""
        mend = f"mount one of at most {SMALL_BYTES >> 30} GiB at {self._folder}, as: mount -t tmpfs -o size=1g tmpfs …"
        if not os.path.ismount(self._folder):
            return f"the state is on a file system that other things are on; {mend}"
        stat = os.statvfs(self._folder)
        if stat.f_blocks * stat.f_frsize > SMALL_BYTES:
            return f"the state's file system is too large to fill; {mend}"
        return ""

    def fill(self) -> None:
        """Until not a byte is free."""
        with self._path.open("ab", buffering=0) as file:
            while True:
                size = os.fstat(file.fileno()).st_size
                try:
                    os.posix_fallocate(file.fileno(), size, STEP_BYTES)
                except OSError:
                    break
            for size in (1 << 20, 4096, 1):
                while True:
                    try:
                        file.write(bytes(size))
                    except OSError:
                        break

    def remove(self) -> None:
        """There is room again."""
        self._path.unlink(missing_ok=True)
