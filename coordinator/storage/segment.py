"""The bytes of a journal segment: writing, reading, and reading a damaged one as far as possible."""

import io
import re
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from farloop.coordinator.decide import records
from farloop.coordinator.decide.records import LedgerSaved, Record
from farloop.coordinator.errors import JournalCorrupt, StateMismatch, StorageFailed
from farloop.coordinator.storage.files import DISK, Bytes, Files, no_room
from farloop.coordinator.storage.objects import read_object

# --- Segments and records
#
# A segment is one header and then records without gaps, little-endian. What follows the last record is room set aside:
# zeros. The oldest segments may be gone, if the first that is left begins with what they said (`LedgerSaved`). A
# record's digests are seeded with the segment's salt, a random number that never leaves the state directory, so that no
# node can send a delta whose bytes would pass for a record.
#
# Which damage is a torn tail? Records that were appended but never synced may be lost in any part and any order when
# the power fails, and no node was told of them: they are cut. A synced record must not be cut. So every header says how
# many records were durable when it was written: a damaged record with that proof after it is corruption, without proof
# a torn tail.

FORMAT_VERSION = 1

#   bytes  type  field
#   0–7    8s    magic "farloopJ"
#   8–11   u32   format version
#   12–15  u32   number of the segment, also in its name
#   16–23  u64   sequence of its first record
#   24–31  u64   salt
#   32–39  u64   xxh3-64 of bytes 0–31
_SEGMENT = struct.Struct("<8sIIQQ")
_DIGEST = struct.Struct("<Q")
_SEGMENT_MAGIC = b"farloopJ"
SEGMENT_HEADER_BYTES = _SEGMENT.size + _DIGEST.size

#   bytes  type  field
#   0–3    4s    magic 89 "FLR"
#   4      u8    kind (`records.KINDS`)
#   5–7    3x    zero
#   8–11   u32   bytes of the record
#   12–15  u32   bytes of the attachment
#   16–23  u64   sequence: records before this one in the journal
#   24–31  u64   durable: records that were durable when this one was written, at most the sequence
#   32–39  u64   xxh3-64, seeded with the salt, of the record and the attachment
#   40–47  u64   xxh3-64, seeded with the salt, of bytes 0–39
#   48–          record, then attachment
_RECORD = struct.Struct("<4sB3xIIQQQ")
_RECORD_MAGIC = b"\x89FLR"
RECORD_HEADER_BYTES = _RECORD.size + _DIGEST.size

MAX_BODY_BYTES = (1 << 32) - 1  # most bytes of a record or attachment: four times the largest fragment in fp32
_NAME = re.compile(r"journal-([0-9]{6,})\.log")

_PIECE_BYTES = 1 << 20  # bytes read and hashed at a time, so that no attachment is in memory as a whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Where a record's bulk bytes are: [offset, offset + size) of a segment."""

    segment: int
    offset: int
    size: int
    key: str = ""
    """Of the object that has them instead (`objects.py`); then the segment has none, and `size` may be unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record in its place in the journal. Two are equal by the digest of their bytes: a record with NaN in it is not
    equal to itself."""

    sequence: int
    record: Record = field(compare=False)
    attachment: Attachment
    offset: int  # of its header in the segment
    digest: int  # of its header, which has that of record and attachment

    @property
    def begins_a_journal(self) -> bool:
        """Whether a journal can begin with this record: nothing before it is needed."""
        return isinstance(self.record, LedgerSaved)

    def placed(self) -> "Entry":
        """With the key of the bytes that are not attached to it. A blob has no less than a header."""
        match self.record:
            case records.InputStored() | records.WindowCommitted() as record if not self.attachment.size:
                return replace(self, attachment=replace(self.attachment, key=records.object_key(record)))
            case _:
                return self

    @property
    def where(self) -> str:
        """As `000003:1048576`: the segment's number and the byte in it."""
        return f"{self.attachment.segment:06d}:{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a segment holds."""

    path: Path
    salt: int
    first_sequence: int
    entries: tuple[Entry, ...]
    end: int  # end of the last whole record
    torn_bytes: int  # bytes of torn records after it, without preallocated zeros
    size: int  # bytes of the file

    @property
    def next_sequence(self) -> int:
        return self.first_sequence + len(self.entries)

    @property
    def begins_a_journal(self) -> bool:
        return bool(self.entries) and self.entries[0].begins_a_journal


class RecordHeader(NamedTuple):
    """The header of a record."""

    kind: int
    record_bytes: int
    attachment_bytes: int
    sequence: int
    durable: int
    body_digest: int
    digest: int  # of all these


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"journal-{number:06d}.log"


def segment_numbers(directory: Path, files: Files = DISK) -> set[int]:
    """Numbers of the existing segments."""
    return {int(match[1]) for name in files.names(directory) if (match := _NAME.fullmatch(name))}


def segment_paths(directory: Path, files: Files = DISK) -> dict[int, Path]:
    """The segments of the journal in `directory`, by number, in order.
    Raises JournalCorrupt: one between them is missing."""
    numbers = segment_numbers(directory, files)
    expected = range(min(numbers), max(numbers) + 1) if numbers else range(0)
    paths = {number: segment_path(directory, number) for number in expected}
    for number, path in paths.items():
        if number not in numbers:
            raise JournalCorrupt(path, 0, "this segment of the journal is missing")
    return paths


def read_segments(directory: Path, files: Files = DISK) -> list[Scan]:
    """Read and verify a whole journal. Changes nothing; of a journal in use it shows a prefix.

    Raises:
        JournalCorrupt: a segment is missing, or damaged in a way that is not a torn tail of the last.
        StorageFailed: the disk refused a read.
    """
    scans: list[Scan] = []
    for found in segments_of(directory, files):
        if isinstance(found, JournalCorrupt):
            raise found
        scans.append(found)
    return scans


def segments_of(directory: Path, files: Files = DISK) -> Iterator[Scan | JournalCorrupt]:
    """Every segment in order, and before it what is wrong with it or missing. Raises StorageFailed."""
    try:
        paths = segment_paths(directory, files)
    except JournalCorrupt as error:
        yield error
        return
    following: int | None = None
    for number, path in paths.items():
        until = begin_of(directory, number + 1, files)
        try:
            found = scan_segment(path, number, following, files, until=until)
        except JournalCorrupt as error:
            yield error
            following = None
            continue
        following = found.next_sequence
        if number == min(paths) and number > 0 and not found.begins_a_journal:
            yield JournalCorrupt(segment_path(directory, number - 1), 0, "this segment of the journal is missing")
        if (fault := _cut_short(found, until)) is not None:
            yield fault
        yield found


def read_attachment(directory: Path, attachment: Attachment, offset: int, nbytes: int, files: Files = DISK) -> bytes:
    """Bytes [offset, offset + nbytes) of an attachment. Opens the file anew, so it depends on no other reader's state.

    Raises:
        NoRoom: no descriptor is left to read them by; try again.
        StorageFailed: they cannot be read.
    """
    if attachment.key:
        data = read_object(directory, attachment.key, files)
        return data if nbytes == attachment.size else data[offset : offset + nbytes]
    assert offset >= 0 and nbytes >= 0 and offset + nbytes <= attachment.size
    path = segment_path(directory, attachment.segment)
    start = attachment.offset + offset
    data = b""
    try:
        with closing(files.open(path)) as file:
            while len(data) < nbytes:
                piece = file.read(start + len(data), nbytes - len(data))
                if not piece:
                    raise StorageFailed(path, f"ends at byte {start + len(data)}, before the attachment does")
                data += piece
    except OSError as error:
        raise no_room(path, error.errno) or StorageFailed(path, f"read: {error.strerror}") from error
    return data


def segment_header(number: int, first_sequence: int, salt: int) -> bytes:
    fields = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, number, first_sequence, salt)
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


def record_header(kind: int, body: bytes, attachment: Bytes, *, sequence: int, durable: int, salt: int) -> bytes:
    hasher = xxhash.xxh3_64(body, seed=salt)
    hasher.update(attachment)
    fields = _RECORD.pack(
        _RECORD_MAGIC, kind, len(body), memoryview(attachment).nbytes, sequence, durable, hasher.intdigest()
    )
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields, seed=salt))


def scan_segment(
    path: Path, number: int, first_sequence: int | None, files: Files = DISK, *, until: int | None = None
) -> Scan:
    """Read and verify the segment at `path`, which must be the `number`-th.

    Args:
        first_sequence: where it must go on; None for the first of a journal, which segment 0 begins with record 0.
        until: the first record of the segment that follows; None where none does. What stands behind the last record
            before that is not looked at: a coordinator that was fenced may have written there.

    Raises:
        JournalCorrupt: its header is wrong; a record is damaged of which a later one says that it was durable; or a
            whole record is not one that this code knows.
        StorageFailed: the disk refused a read.
    """
    try:
        with closing(files.open(path)) as opened:
            file, size = opened.reader(), opened.identity()[2]
            salt, found_sequence = read_segment_header(file, path, number)
            if first_sequence is None and number == 0:
                first_sequence = 0
            if first_sequence not in (None, found_sequence):
                detail = f"it goes on at record {found_sequence}, not {first_sequence}: some are missing"
                raise JournalCorrupt(path, 16, detail)
            entries = tuple(read_records(file, path, number, found_sequence, until, salt, size))
            end = SEGMENT_HEADER_BYTES
            if entries:
                end = entries[-1].attachment.offset + entries[-1].attachment.size
            torn_bytes = 0
            if until is None:
                torn_bytes = _measure_tail(file, path, end, found_sequence + len(entries), salt)
    except OSError as error:
        raise StorageFailed(path, f"read: {error.strerror}") from error
    return Scan(
        path=path, salt=salt, first_sequence=found_sequence, entries=entries, end=end, torn_bytes=torn_bytes, size=size
    )


def read_segment_header(file: BinaryIO, path: Path, number: int) -> tuple[int, int]:
    """Salt, and sequence of the first record."""
    data = file.read(SEGMENT_HEADER_BYTES)
    if len(data) < SEGMENT_HEADER_BYTES or not data.startswith(_SEGMENT_MAGIC):
        raise JournalCorrupt(path, 0, "not a segment of a journal")
    _, version, found_number, first_sequence, salt = _SEGMENT.unpack_from(data)
    if version != FORMAT_VERSION:
        raise JournalCorrupt(path, 8, f"format version {version} is unknown here; this farloop knows {FORMAT_VERSION}")
    if _DIGEST.unpack_from(data, _SEGMENT.size)[0] != xxhash.xxh3_64_intdigest(data[: _SEGMENT.size]):
        raise JournalCorrupt(path, 0, "the segment's header does not match its digest")
    if found_number != number:
        raise JournalCorrupt(path, 12, f"segment {found_number} under the name of segment {number}")
    assert isinstance(salt, int) and isinstance(first_sequence, int)
    return salt, first_sequence


def read_records(
    file: BinaryIO,
    path: Path,
    number: int,
    first_sequence: int,
    until: int | None,
    salt: int,
    size: int,
    *,
    offset: int = SEGMENT_HEADER_BYTES,
) -> Iterator[Entry]:
    """Whole records from the file's position on, which is `offset`, up to the first that is not, or to record `until`.

    `size` is the file's.
    Raises JournalCorrupt: a whole record is out of its turn, or not one that this code knows.
    """
    sequence = first_sequence
    while sequence != until and (header := _parse_record_header(file.read(RECORD_HEADER_BYTES), salt)) is not None:
        if header.sequence != sequence:
            raise JournalCorrupt(path, offset, f"record {header.sequence} is in the place of {sequence}")
        attachment = Attachment(
            segment=number, offset=offset + RECORD_HEADER_BYTES + header.record_bytes, size=header.attachment_bytes
        )
        if attachment.offset + attachment.size > size:
            return  # before room is made for what is not there
        body = file.read(header.record_bytes)
        if _body_digest(file, body, attachment.size, salt) != header.body_digest:
            return
        try:
            record = records.decode(header.kind, body)
        except ValueError as error:
            raise JournalCorrupt(path, offset, str(error)) from error
        entry = Entry(sequence=sequence, record=record, attachment=attachment, offset=offset, digest=header.digest)
        yield entry.placed()
        offset, sequence = attachment.offset + attachment.size, sequence + 1


def _parse_record_header(data: bytes, salt: int) -> RecordHeader | None:
    """Parse a record header of this segment; None if `data` does not begin with one."""
    if len(data) < RECORD_HEADER_BYTES or not data.startswith(_RECORD_MAGIC):
        return None
    (digest,) = _DIGEST.unpack_from(data, _RECORD.size)
    if digest != xxhash.xxh3_64_intdigest(data[: _RECORD.size], seed=salt):
        return None
    return RecordHeader._make((*_RECORD.unpack_from(data)[1:], digest))


def headers_in(data: bytes, start: int, salt: int) -> Iterator[tuple[int, RecordHeader]]:
    """Every record header in `data` from `start` on, with its offset; its record need not be whole."""
    at = data.find(_RECORD_MAGIC, start)
    while at >= 0:
        header = _parse_record_header(data[at : at + RECORD_HEADER_BYTES], salt)
        if header is not None:
            yield at, header
        at = data.find(_RECORD_MAGIC, at + 1)


def _body_digest(file: BinaryIO, body: bytes, attachment_bytes: int, salt: int) -> int:
    hasher = xxhash.xxh3_64(body, seed=salt)
    while attachment_bytes > 0 and (piece := file.read(min(attachment_bytes, _PIECE_BYTES))):
        hasher.update(piece)
        attachment_bytes -= len(piece)
    return int(hasher.intdigest())


def _measure_tail(file: BinaryIO, path: Path, end: int, sequence: int, salt: int) -> int:
    """Bytes of a torn tail that begins at `end`, the place of record `sequence`.

    Headers are searched at every offset, because the lengths of a damaged record are useless. A header alone is proof:
    its body may be torn, and hashing bodies here would take quadratic time on a hostile attachment.
    """
    file.seek(end)
    overlap, start, used = b"", end, end
    while piece := file.read(_PIECE_BYTES):
        data = overlap + piece
        for _, header in headers_in(data, 0, salt):
            if header.durable > sequence:
                detail = f"record {sequence} is damaged, and was durable when record {header.sequence} was written"
                raise JournalCorrupt(path, end, detail)
        if stripped := data.rstrip(b"\0"):
            used = start + len(stripped)
        overlap = data[-(RECORD_HEADER_BYTES - 1) :]
        start += len(data) - len(overlap)
    return used - end


# --- Reading a damaged journal: whole records, and the places where some are missing
#
# Only read when `segment.read_segments` refuses it. Behind a damaged record the next whole one is found by its header,
# whose digest is seeded with the segment's salt, so that no bytes of a node can pass for one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A place where records are missing."""

    fault: JournalCorrupt  # position and content


UNFINISHED = "salvage-unfinished"
"""This file exists while `salvage.py` replaces the folder's content: no start may use the folder."""


def refuse_half_salvaged(directory: Path, files: Files = DISK) -> None:
    """Raises StateMismatch: a salvage of the folder was interrupted."""
    if files.identity(directory / UNFINISHED) is not None:
        raise StateMismatch(
            directory,
            "a salvage of this folder was interrupted; finish it: farloop journal salvage "
            f"{directory} --write. Nothing is lost by that: it goes on where it stopped",
        )


def read_damaged(directory: Path, files: Files = DISK) -> list[Entry | Gap]:
    """All whole records in their order, with a gap wherever some are missing between them. Changes nothing.
    Raises StorageFailed: the disk refused a read."""
    items: list[Entry | Gap] = []
    numbers = segment_numbers(directory, files)
    for number in range(min(numbers), max(numbers) + 1) if numbers else ():
        path = segment_path(directory, number)
        if number in numbers:
            items += _segment(path, number, begin_of(directory, number + 1, files), files)
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
        return scan_segment(segment_path(directory, last), last, None, files), tuple(read_damaged(directory, files))
    return scans[-1], tuple(entry for scanned in scans for entry in scanned.entries)


def check_closed(directory: Path, number: int, files: Files = DISK) -> JournalCorrupt | None:
    """Read and verify one segment that another follows: what is wrong with it. Raises StorageFailed."""
    path, until = segment_path(directory, number), begin_of(directory, number + 1, files)
    try:
        found = scan_segment(path, number, None, files, until=until)
    except JournalCorrupt as error:
        return error
    return _cut_short(found, until)


def _cut_short(found: Scan, until: int | None) -> JournalCorrupt | None:
    if until is None or found.next_sequence >= until:
        return None
    return JournalCorrupt(found.path, found.end, f"record {found.next_sequence} is damaged, and segments follow")


def begin_of(directory: Path, number: int, files: Files = DISK) -> int | None:
    """Sequence of a segment's first record; None where there is no such segment, or it is unreadable."""
    if files.identity(path := segment_path(directory, number)) is None:
        return None
    try:
        with closing(files.open(path)) as opened:
            return read_segment_header(opened.reader(), path, number)[1]
    except JournalCorrupt:
        return None
    except OSError as error:
        raise StorageFailed(path, f"read: {error.strerror}") from error


def _segment(path: Path, number: int, until: int | None, files: Files) -> Iterator[Entry | Gap]:
    """Whole records of a segment, up to record `until`, which begins the next."""
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
            return  # a torn tail: no node was told of it
        yield Gap(fault=fault or JournalCorrupt(path, offset, f"record {sequence} is damaged"))
        if not later:
            return
        offset, sequence = later[0][0], later[0][1].sequence
