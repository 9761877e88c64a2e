"""The epoch: which start of the coordinator this is. A higher one fences a lower one (protocol, Fencing)."""

import re
from pathlib import Path

from farloop.coordinator.errors import Fenced, StorageFailed
from farloop.coordinator.storage.files import DISK, Files, Identity, no_room

_FILE = "epoch"
_FORMAT = re.compile(rb"farloop-epoch 1 ([1-9][0-9]{0,18})\n")
"""The whole file: name, format version, highest epoch ever claimed."""


def claim_epoch(directory: Path, *, seen: int = 0, files: Files = DISK) -> int:
    """Claim the next epoch of the state in `directory`, durably.

    To be called with the journal open, which holds the directory's lock, and before any socket is bound.

    Args:
        seen: the highest epoch known from elsewhere (the journal), so that a lost file cannot turn time back.

    Raises:
        NoRoom: nothing was claimed.
        StorageFailed: the file is not an epoch file, or could not be written.
    """
    path = directory / _FILE
    epoch = max(_read(path, files), seen) + 1
    files.require_free(directory, 4096)
    with files.replacing(path) as temporary:
        try:
            files.write_bytes(temporary, b"farloop-epoch 1 %d\n" % epoch)
        except OSError as error:
            raise no_room(path, error.errno) or StorageFailed(path, f"write: {error.strerror}") from error
    return epoch


def claimed_epoch(directory: Path, files: Files = DISK) -> int:
    """The highest epoch claimed in `directory`; 0 for none. Changes nothing. Raises StorageFailed."""
    return _read(directory / _FILE, files)


def require_epoch(directory: Path, epoch: int, files: Files = DISK) -> None:
    """Stop a coordinator whose state another has taken over: on some shared disks a lock does not keep both apart.

    A file that is missing says nothing: the journal knows the epoch, too.

    Raises:
        Fenced: a higher epoch was claimed since `epoch` was.
        NoRoom: no descriptor is left to read it; try again.
        StorageFailed: the file could not be read, or is not an epoch file.
    """
    path = directory / _FILE
    if (found := _read(path, files)) > epoch:
        raise Fenced(path, epoch, found)


class Claim:
    """A claimed epoch, compared with the folder before every write: one `stat` while the file is unchanged."""

    def __init__(self, directory: Path, epoch: int, files: Files = DISK) -> None:
        self._directory, self._epoch, self._files = directory, epoch, files
        self._known: Identity | None = None  # identity of the file that was last read and had no higher epoch

    def require(self) -> None:
        try:
            found = self._files.identity(self._directory / _FILE)
        except OSError as error:
            raise StorageFailed(self._directory / _FILE, f"read: {error.strerror}") from error
        if found is None or found != self._known:
            require_epoch(self._directory, self._epoch, self._files)
            self._known = found


def _read(path: Path, files: Files) -> int:
    try:
        content = files.read_bytes(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise no_room(path, error.errno) or StorageFailed(path, f"read: {error.strerror}") from error
    found = _FORMAT.fullmatch(content)
    if found is None:
        raise StorageFailed(
            path, "not an epoch file of format version 1; restore it, or delete it if the journal is whole"
        )
    return int(found[1])
