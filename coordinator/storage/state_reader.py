"""A read-only view of a state directory, safe while its coordinator runs.

A live journal is read as a prefix. What looks like damage may be a record that was being written, or a segment that was
pruned during the read; a second read then differs. Real damage remains.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.records import Record
from farloop.coordinator.errors import Inconsistent, NoFolder, StateMismatch, StorageError
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.segment import (
    SEGMENT_HEADER_BYTES,
    Attachment,
    Entry,
    Scan,
    read_attachment,
    read_segments,
    refuse_half_salvaged,
)

_T = TypeVar("_T")

LOOK_AGAIN_S = 0.2  # after which a record that was being written is whole
_LOOKS = 20  # at something that is different every time; a journal that is written this fast has a live coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A record and where its header begins."""

    segment: int
    offset: int
    entry: Entry

    @property
    def record(self) -> Record:
        return self.entry.record

    @property
    def attachment(self) -> Attachment:
        return self.entry.attachment

    @property
    def where(self) -> str:
        """As `000003:1048576`: the segment's number and the byte in it."""
        return f"{self.segment:06d}:{self.offset}"


def state_folder(directory: Path, files: Files = DISK) -> Path:
    if not files.is_directory(directory):
        raise NoFolder(directory)
    return directory


def journal_folder(directory: Path, files: Files = DISK) -> Path:
    """The folder, if it holds a journal. Raises NoFolder, StateMismatch."""
    state_folder(directory, files)
    try:
        found = any(name.startswith("journal-") and name.endswith(".log") for name in files.names(directory))
        refuse_half_salvaged(directory, files)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise StateMismatch(directory, f"cannot be read: {why}; check its permissions") from error
    if not found:
        raise StateMismatch(directory, "holds no journal; --state names the coordinator's state_dir")
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


def read_journal(directory: Path) -> list[Scan]:
    """Read the journal. Raises StorageError: it is damaged or missing."""
    journal_folder(directory)
    return steadily(lambda: read_segments(directory))


def placed(scan: Scan) -> Iterator[Placed]:
    offset = SEGMENT_HEADER_BYTES
    for entry in scan.entries:
        yield Placed(segment=entry.attachment.segment, offset=offset, entry=entry)
        offset = entry.attachment.offset + entry.attachment.size


def attached(directory: Path, attachment: Attachment, files: Files = DISK) -> bytes:
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
