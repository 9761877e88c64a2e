"""A read-only view of a state directory, safe while its coordinator runs.

A live journal is read as a prefix. What looks like damage may be a record that was being written, or a segment that was
pruned during the read; a second read then differs. Real damage remains.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.records import Record
from farloop.coordinator.errors import Inconsistent, JournalCorrupt, StateMismatch, StorageError
from farloop.coordinator.storage.files import DISK, Files, state_folder, state_inside
from farloop.coordinator.storage.segment import (
    Attachment,
    Entry,
    Gap,
    Items,
    Segments,
    read_attachment,
    refuse_half_salvaged,
)

_T = TypeVar("_T")

LOOK_AGAIN_S = 0.2  # after which a record that was being written is whole
_LOOKS = 20  # at something that is different every time; a journal that is written this fast has a live coordinator


def journal_folder(directory: Path, files: Files = DISK, how: str = "with --state") -> Path:
    """The folder, if it holds a journal; `how` a command takes it. Raises NoFolder, StateMismatch."""
    state_folder(directory, files, how)
    try:
        found = any(name.startswith("journal-") and name.endswith(".log") for name in files.names(directory))
        refuse_half_salvaged(directory, files)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise StateMismatch(directory, f"cannot be read: {why}; check its permissions") from error
    if not found:
        what = f"holds no journal; give the coordinator's state_dir {how}"
        raise StateMismatch(directory, what + state_inside(directory, files))
    return directory


def steadily(look: Callable[[], _T], pause: Callable[[float], None] = time.sleep) -> _T:
    """Repeat `look` until it returns; raises its StorageError once it is the same twice in a row."""
    before = ""
    for _ in range(_LOOKS):
        try:
            return look()
        except StorageError as error:
            if str(error) == before:
                raise
            before = str(error)
        pause(LOOK_AGAIN_S)
    return look()


def read_journal(directory: Path) -> Items:
    """The journal's records, and gaps where some are missing. Raises StorageError: it is missing, or unreadable."""
    journal_folder(directory)
    found: list[Items] = []

    def look() -> None:
        found.append(Segments(directory).items())
        for item in found[-1]:
            if isinstance(item, Gap):
                raise item.fault

    with suppress(JournalCorrupt):
        steadily(look)
    return found[-1]


def attached(directory: Path, attachment: Attachment, files: Files = DISK) -> bytes | bytearray:
    """A record's bulk bytes. Raises StorageFailed."""
    return read_attachment(directory, attachment, 0, attachment.size, files)


def ledger_of(directory: Path, first: Record) -> Ledger:
    """The ledger after a journal's first record. Raises StateMismatch."""
    match first:
        case rec.RunStarted():
            return Ledger.begin(first)
        case rec.LedgerSaved():
            return Ledger.resume(first)
        case _:
            raise Inconsistent(directory, "its journal does not begin with a run's start")


def with_ledger(directory: Path, items: Items) -> Iterator[tuple[Entry, Ledger | None]]:
    """Every record with the ledger before it; None behind damage, until the next summary. Raises StateMismatch."""
    ledger: Ledger | None = None
    for item in items:
        if isinstance(item, Gap):
            ledger = None
            continue
        if ledger is None and (item.begins_a_journal or item is items[0]):
            ledger = ledger_of(directory, item.record)
        yield item, ledger
        if ledger is not None:
            ledger.apply(item.record)
