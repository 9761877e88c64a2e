"""Reads small files of the kernel below a root folder, and never raises: what cannot be read is remembered and told.

The root is a parameter, so that a test can build a machine of files. Nothing here needs a privilege.
"""

import errno
import os
from pathlib import Path

LONGEST = 64 << 10
"""Bytes of a file that are looked at: an annotation has kilobytes, an attribute of the kernel a line."""

MOST = 512
"""Names of a folder that are looked at."""

_EMPTY = frozenset({errno.EINVAL, errno.ENODATA, errno.EOPNOTSUPP, errno.ENODEV, errno.ENOENT, errno.ENOTDIR})
"""How the kernel says that an attribute has no value now: the speed of a link that is down, a GID index not in use."""


class Tree:
    """Files below a root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.unread: list[str] = []
        """What is there and could not be read, with the reason."""

    def path(self, place: str) -> Path:
        """Where it is, as a path of this process."""
        return self._root / place

    def text(self, place: str) -> str:
        """A file's text without the space around it; empty where there is none."""
        try:
            with self.path(place).open("rb") as file:
                return file.read(LONGEST).decode(errors="replace").strip()
        except OSError as error:
            self._missed(place, error)
            return ""

    def number(self, place: str) -> int | None:
        """A file that holds a whole number; None where it does not."""
        try:
            return int(self.text(place))
        except ValueError:
            return None

    def names(self, place: str) -> list[str]:
        """What is in a folder, sorted as people count: `1, 2, 10`. Empty where there is none."""
        try:
            with os.scandir(self.path(place)) as entries:
                found = [entry.name for _, entry in zip(range(MOST), entries, strict=False)]
        except OSError as error:
            self._missed(place, error)
            return []
        return sorted(found, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))

    def target(self, place: str) -> str:
        """Last part of what a symbolic link points at; empty where it is none."""
        try:
            return os.readlink(self.path(place)).rstrip("/").rpartition("/")[2]
        except OSError:
            return ""

    def exists(self, place: str) -> bool:
        """Whether something is there."""
        return os.path.lexists(self.path(place))

    def may_use(self, place: str) -> bool:
        """Whether this process may open it for reading and writing."""
        return os.access(self.path(place), os.R_OK | os.W_OK)

    def _missed(self, place: str, error: OSError) -> None:
        if error.errno not in _EMPTY:
            self.unread.append(f"/{place}: {(error.strerror or str(error)).lower()}")
