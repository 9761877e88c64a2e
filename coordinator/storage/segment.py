"""The bytes of a journal's segments: writing, reading, and reading damaged ones as far as possible."""

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from farloop.coordinator.decide import records
from farloop.coordinator.decide.records import LedgerSaved, Record, RunStarted
from farloop.coordinator.errors import JournalCorrupt, StateMismatch, StorageFailed
from farloop.coordinator.storage.files import DISK, Bytes, Files, disk_errors
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
    digest: int = 0  # of that object's bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record in its place in the journal. Two are equal by the digest of their bytes: a record with NaN
    in it is not equal to itself."""

    sequence: int
    record: Record = field(compare=False)
    attachment: Attachment
    offset: int  # of its header in the segment
    digest: int  # of its header, which has that of record and attachment

    @property
    def begins_a_journal(self) -> bool:
        """Whether a journal can begin with this record: nothing before it is needed."""
        return isinstance(self.record, RunStarted | LedgerSaved)

    @property
    def end(self) -> int:
        return self.attachment.offset + self.attachment.size

    def placed(self) -> "Entry":
        """With the key of the bytes that are not attached to it. A blob has no less than a header."""
        match self.record:
            case records.InputStored(digest=digest) | records.WindowCommitted(update_digest=digest) if (
                not self.attachment.size
            ):
                key = records.object_key(self.record)
                return replace(self, attachment=replace(self.attachment, key=key, digest=digest))
            case _:
                return self

    @property
    def where(self) -> str:
        """As `000003:1048576`: the segment's number and the byte in it."""
        return f"{self.attachment.segment:06d}:{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A place where records are missing."""

    fault: JournalCorrupt  # position and content


Items = Sequence[Entry | Gap]  # a journal's content, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a segment holds: its whole records, and gaps where some are missing."""

    path: Path
    salt: int  # 0 where the header is damaged
    first_sequence: int
    items: tuple[Entry | Gap, ...]
    next_sequence: int
    end: int  # end of the last whole record
    torn_bytes: int  # bytes of torn records after it, without preallocated zeros
    size: int  # bytes of the file

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(item for item in self.items if isinstance(item, Entry))

    @property
    def fault(self) -> JournalCorrupt | None:
        return next((item.fault for item in self.items if isinstance(item, Gap)), None)


class RecordHeader(NamedTuple):
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
    return {int(match[1]) for name in files.names(directory) if (match := _NAME.fullmatch(name))}


class Segments:
    """The segments of the journal in a folder, each read and verified once, when it is first asked for. Changes
    nothing; of a journal in use it shows a prefix."""

    def __init__(self, directory: Path, files: Files = DISK) -> None:
        self.directory, self.files = directory, files
        self.numbers = sorted(segment_numbers(directory, files))
        self._scans: dict[int, Scan] = {}

    def scan(self, number: int, *, trusting: bool = False) -> Scan:
        """A segment that is there. `trusting`: what is attached to its records is not read, unless it is the last.
        Raises StorageFailed: the disk refused a read."""
        if number not in self._scans:
            path, until = segment_path(self.directory, number), begin_of(self.directory, number + 1, self.files)
            if trusting and until is not None:
                return scan_segment(path, number, self.files, until=until, trusted=until)
            self._scans[number] = scan_segment(path, number, self.files, until=until)
        return self._scans[number]

    @property
    def last(self) -> Scan:
        return self.scan(self.numbers[-1])

    @property
    def all_numbers(self) -> range:
        """Also of those between them that are missing."""
        return range(self.numbers[0], self.numbers[-1] + 1) if self.numbers else range(0)

    def items_of(self, number: int, *, trusting: bool = False) -> Items:
        """Of a segment, or of one that is missing; `trusting` as `scan` has it."""
        if number not in self.numbers:
            return (_missing(self.directory, number),)
        items = self.scan(number, trusting=trusting).items
        if number == self.numbers[0] and number > 0 and not begins_a_journal(items):
            return (_missing(self.directory, number - 1), *items)  # it was not pruned
        return items

    @property
    def hold_anything(self) -> bool:
        """Whether there is a record, or damage."""
        return bool(self.numbers and (self.last.items or self.items()))

    def items(self) -> tuple[Entry | Gap, ...]:
        return tuple(item for number in self.all_numbers for item in self.items_of(number))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All records. Raises JournalCorrupt: some are missing."""
        entries = list[Entry]()
        for item in self.items():
            if isinstance(item, Gap):
                raise item.fault
            entries.append(item)
        return tuple(entries)

    def require_end(self) -> None:
        """Raises JournalCorrupt: the last segment is damaged, behind which a start goes on."""
        if self.numbers and (fault := self.last.fault) is not None:
            raise fault


def begins_a_journal(items: Items) -> bool:
    return bool(items) and (isinstance(items[0], Gap) or items[0].begins_a_journal)


def _missing(directory: Path, number: int) -> Gap:
    return Gap(fault=JournalCorrupt(segment_path(directory, number), 0, "this segment of the journal is missing"))


def read_attachment(
    directory: Path, attachment: Attachment, offset: int, nbytes: int, files: Files = DISK
) -> bytes | bytearray:
    """Bytes [offset, offset + nbytes) of an attachment. Opens the file anew, so it depends on no other reader's state.
    Raises NoRoom: no descriptor is left to read them by; try again. Raises StorageFailed: they cannot be read."""
    if attachment.key:
        stored = read_object(directory, attachment.key, attachment.digest, files)
        return stored if nbytes == attachment.size else stored[offset : offset + nbytes]
    assert offset >= 0 and nbytes >= 0 and offset + nbytes <= attachment.size
    path = segment_path(directory, attachment.segment)
    start, data = attachment.offset + offset, bytearray(nbytes)
    with disk_errors(path, "read", room=True), closing(files.open(path)) as file:
        if (there := file.read_into(start, memoryview(data))) < nbytes:
            raise StorageFailed(path, f"ends at byte {start + there}, before the attachment does")
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


def scan_segment(path: Path, number: int, files: Files = DISK, *, until: int | None = None, trusted: int = 0) -> Scan:
    """Read and verify the segment at `path`, which must be the `number`-th.

    It has a gap where the header is wrong, where a record is damaged of which a later one says that it was durable, or
    a whole record is not one that this code knows. Behind a gap it goes on with the next header of a record, whose
    digest is seeded with the segment's salt, so that no bytes of a node can pass for one.

    `until`: the first record of the segment that follows; None where none does. What stands behind the last record
    before that is not looked at: a coordinator that was fenced may have written there. `trusted`: as `read_records` has
    it.
    Raises StorageFailed: the disk refused a read.
    """
    items, torn_bytes, doubted = list[Entry | Gap](), 0, -1
    salt = sequence = first_sequence = 0
    end = offset = SEGMENT_HEADER_BYTES
    with disk_errors(path, "read"), closing(files.open(path)) as opened:
        file, size = opened.reader(), opened.identity()[2]
        try:
            salt, first_sequence = read_segment_header(file, path, number)
        except JournalCorrupt as error:
            return Scan(
                path=path, salt=0, first_sequence=0, items=(Gap(fault=error),), next_sequence=0, end=0,
                torn_bytes=0, size=size,
            )  # fmt: skip
        sequence = first_sequence
        if number == 0 and sequence > 0:
            detail = f"it goes on at record {sequence}, not 0: some are missing"
            items.append(Gap(fault=JournalCorrupt(path, 16, detail)))
        while True:
            fault: JournalCorrupt | None = None
            file.seek(offset)
            try:
                for entry in read_records(
                    file, path, number, sequence, until, salt, size, offset=offset, trusted=trusted
                ):
                    items.append(entry)
                    end = offset = entry.end
                    sequence = entry.sequence + 1
            except JournalCorrupt as error:
                fault = error
            if sequence == until:
                break
            ahead = _look_ahead(file, offset, sequence, until, salt)
            if until is None and fault is None:
                if ahead.proof is None:
                    torn_bytes = ahead.used - offset
                    break
                if offset != doubted:  # it may have been half written when it was read, and is whole by now
                    doubted, size = offset, opened.identity()[2]
                    continue
            if fault is None:
                by = ahead.proof
                proof = "segments follow" if by is None else f"was durable when record {by} was written"
                fault = JournalCorrupt(path, offset, f"record {sequence} is damaged, and {proof}")
            items.append(Gap(fault=fault))
            if ahead.following is None:
                break
            offset, sequence = ahead.following
    return Scan(
        path=path, salt=salt, first_sequence=first_sequence, items=tuple(items), next_sequence=sequence, end=end,
        torn_bytes=torn_bytes, size=size,
    )  # fmt: skip


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
    trusted: int = 0,
) -> Iterator[Entry]:
    """Whole records from the file's position on, which is `offset`, up to the first that is not, or to record `until`.

    `size` is the file's. Of records before `trusted` what is attached is not read: if they are damaged, only their
    headers tell.
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
        if attachment.size and sequence < trusted:
            file.seek(attachment.offset + attachment.size)
        elif _body_digest(file, body, attachment.size, salt) != header.body_digest:
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


class _Ahead(NamedTuple):
    """What stands behind the place of a record that is not whole."""

    following: tuple[int, int] | None  # offset and sequence of the next record's header
    proof: int | None  # a record that says that the missing one was durable
    used: int  # end of the bytes that are not zero


def _look_ahead(file: BinaryIO, offset: int, sequence: int, until: int | None, salt: int) -> _Ahead:
    """Look from the place of record `sequence` on; no further than the next one where segments follow, or the proof.

    Headers are searched at every offset: the lengths of a damaged record are useless. A header alone is proof: its body
    may be torn, and hashing bodies here would take quadratic time on a hostile attachment.
    """
    file.seek(offset)
    overlap, start, used = b"", offset, offset
    following: tuple[int, int] | None = None
    while piece := file.read(_PIECE_BYTES):
        data = overlap + piece
        for at, header in headers_in(data, 0, salt):
            if header.sequence > sequence and (until is None or header.sequence < until):
                following = following or (start + at, header.sequence)
            if following and until is not None:
                return _Ahead(following, None, used)
            if until is None and header.durable > sequence:
                return _Ahead(following, header.sequence, used)
        if stripped := data.rstrip(b"\0"):
            used = start + len(stripped)
        overlap = data[-(RECORD_HEADER_BYTES - 1) :]
        start += len(data) - len(overlap)
    return _Ahead(following, None, used)


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


def begin_of(directory: Path, number: int, files: Files = DISK) -> int | None:
    """Sequence of a segment's first record; None where there is no such segment, or it is unreadable."""
    if files.identity(path := segment_path(directory, number)) is None:
        return None
    with suppress(JournalCorrupt), disk_errors(path, "read"), closing(files.open(path)) as opened:
        return read_segment_header(opened.reader(), path, number)[1]
    return None
