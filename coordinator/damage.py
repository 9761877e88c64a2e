"""A journal that is damaged, read as far as it can be: whole records, and the places where some are missing.

Only read when `segment.read_segments` refuses it. Behind a damaged record the next whole one is found by its header,
whose digest is seeded with the segment's salt, so that no bytes of a node can pass for one.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farloop.coordinator.errors import JournalCorrupt, StateMismatch, StorageFailed
from farloop.coordinator.files import DISK, Files
from farloop.coordinator.segment import (
    SEGMENT_HEADER_BYTES,
    Entry,
    Scan,
    first_sequence_of,
    headers_in,
    read_records,
    read_segment_header,
    read_segments,
    scan,
    segment_numbers,
    segment_path,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A place where records are missing."""

    fault: JournalCorrupt
    """Where, and what is there."""


UNFINISHED = "salvage-unfinished"
"""A file that is there while `salvage.py` replaces the folder's content: until it is gone, no start may go on."""


def refuse_half_salvaged(directory: Path, files: Files = DISK) -> None:
    """Raises StateMismatch: the folder's content was being replaced when that was interrupted."""
    if files.identity(directory / UNFINISHED) is not None:
        raise StateMismatch(
            directory,
            "a salvage of this folder was interrupted; finish it: farloop journal salvage "
            f"{directory} --write. Nothing is lost by that: it goes on where it stopped",
        )


def read_damaged(directory: Path, files: Files = DISK) -> list[Entry | Gap]:
    """All whole records in their order, with a gap wherever some are missing between them. Changes nothing.

    Raises:
        StorageFailed: the disk refused a read.
    """
    items: list[Entry | Gap] = []
    numbers = segment_numbers(directory, files)
    for number in range(min(numbers), max(numbers) + 1) if numbers else ():
        path = segment_path(directory, number)
        if number in numbers:
            items += _segment(path, number, _begin_of(directory, number + 1, numbers, files), files)
        else:
            items.append(Gap(fault=JournalCorrupt(path, 0, "this segment of the journal is missing")))
    first = next(iter(items), None)
    if isinstance(first, Entry) and first.attachment.segment > 0 and not first.begins_a_journal:
        missing = segment_path(directory, first.attachment.segment - 1)
        items.insert(0, Gap(fault=JournalCorrupt(missing, 0, "this segment of the journal is missing")))
    return items


def read_all(directory: Path, files: Files = DISK) -> tuple[Scan, tuple[Entry | Gap, ...]]:
    """The last segment, which has to be whole for a start to go on behind it, and all that the journal holds.

    Raises:
        JournalCorrupt: the last segment is damaged in a way that is not a torn tail.
        StorageFailed: the disk refused a read.
    """
    try:
        scans = read_segments(directory, files)
    except JournalCorrupt:
        last = max(segment_numbers(directory, files))
        return scan(segment_path(directory, last), last, None, files), tuple(read_damaged(directory, files))
    return scans[-1], tuple(entry for scanned in scans for entry in scanned.entries)


def _begin_of(directory: Path, number: int, numbers: set[int], files: Files) -> int | None:
    """The first record of a segment; None where it is missing or does not say."""
    if number not in numbers:
        return None
    try:
        return first_sequence_of(segment_path(directory, number), number, files)
    except JournalCorrupt:
        return None


def _segment(path: Path, number: int, until: int | None, files: Files) -> Iterator[Entry | Gap]:
    """The whole records of a segment up to that one, which begins the next."""
    try:
        data = files.read_bytes(path)
    except OSError as error:
        raise StorageFailed(path, f"read: {error.strerror}") from error
    file = io.BytesIO(data)
    try:
        salt, sequence = read_segment_header(file, path, number)
    except JournalCorrupt as error:
        yield Gap(fault=error)
        return
    offset = SEGMENT_HEADER_BYTES
    while sequence != until:
        file.seek(offset)
        fault: JournalCorrupt | None = None
        try:
            for entry in read_records(file, path, number, sequence, until, salt, len(data), offset=offset):
                yield entry
                offset, sequence = entry.attachment.offset + entry.attachment.size, sequence + 1
        except JournalCorrupt as error:
            fault = error
        if sequence == until:
            return
        later = [(at, header) for at, header in headers_in(data, offset + 1, salt) if header.sequence > sequence]
        if until is None and not any(header.durable > sequence for _, header in later):
            return  # a torn tail: nobody was told of it
        yield Gap(fault=fault or JournalCorrupt(path, offset, f"record {sequence} is damaged"))
        if not later:
            return
        offset, sequence = later[0][0], later[0][1].sequence
