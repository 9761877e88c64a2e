"""The epoch: which start of the coordinator this is. A higher one fences a lower one (protocol S)."""

import re
from pathlib import Path

from farloop.coordinator.durable import replacing, require_free
from farloop.coordinator.errors import Fenced, StorageFailed

_FILE = "epoch"
_FORMAT = re.compile(rb"farloop-epoch 1 ([1-9][0-9]{0,18})\n")
"""The whole file: its name, its format version, the highest epoch that was ever claimed."""


def claim_epoch(directory: Path, *, seen: int = 0) -> int:
    """Claim the next epoch of the state in `directory`, durably.

    To be called with the journal open, which holds the directory's lock, and before any socket is bound.

    Args:
        seen: the highest epoch known from elsewhere (the journal), so that a lost file cannot turn time back.

    Raises:
        DiskFull: nothing was claimed.
        StorageFailed: the file is not an epoch file, or could not be written.
    """
    path = directory / _FILE
    epoch = max(_read(path), seen) + 1
    require_free(directory, 4096)
    with replacing(path) as temporary:
        try:
            temporary.write_bytes(b"farloop-epoch 1 %d\n" % epoch)
        except OSError as error:
            raise StorageFailed(path, f"write: {error.strerror}") from error
    return epoch


def claimed_epoch(directory: Path) -> int:
    """The highest that was claimed of the state in `directory`; 0 for none. Changes nothing. Raises StorageFailed."""
    return _read(directory / _FILE)


def require_epoch(directory: Path, epoch: int) -> None:
    """Stop a coordinator whose state another has taken over: on some shared disks a lock does not keep both apart.

    A file that is missing says nothing: the journal knows the epoch, too.

    Raises:
        Fenced: a higher epoch was claimed since `epoch` was.
        StorageFailed: the file could not be read, or is not an epoch file.
    """
    path = directory / _FILE
    if (found := _read(path)) > epoch:
        raise Fenced(path, epoch, found)


def _read(path: Path) -> int:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StorageFailed(path, f"read: {error.strerror}") from error
    found = _FORMAT.fullmatch(content)
    if found is None:
        raise StorageFailed(
            path, "not an epoch file of format version 1; restore it, or delete it if the journal is whole"
        )
    return int(found[1])
