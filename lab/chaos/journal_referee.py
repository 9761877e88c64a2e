"""An independent journal reader. It shares no code with the coordinator, so one bug cannot hide another.

It follows the documented format only. A journal is the files `journal-NNNNNN.log`, in order; each is a segment of one
header and then records without gaps, little-endian:

    segment   0–7 "farloopJ"   8–11 u32 format version, 1   12–15 u32 number   16–23 u64 sequence of the first record
              24–31 u64 salt   32–39 xxh3-64 of bytes 0–31
    record    0–3 89 "FLR"   4 u8 kind   8–11 u32 bytes of the body   12–15 u32 bytes of the attachment
              16–23 u64 sequence   24–31 u64 records that were durable when this one was written
              32–39 xxh3-64, seeded with the salt, of body and attachment
              40–47 xxh3-64, seeded with the salt, of bytes 0–39   48– body, then attachment

A body is a msgpack map. Only records that name a version of the model are decoded.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
import xxhash

Version = tuple[int, int]  # a fragment, and one of its versions
Anchors = list[tuple[int, int, str]]  # fragment, version and digest of the anchor

_NAME: Final = re.compile(r"journal-([0-9]{6,})\.log")
_SEGMENT: Final = struct.Struct("<8sIIQQQ")
_RECORD: Final = struct.Struct("<4sB3xIIQQQQ")
_SEGMENT_MAGIC: Final = b"farloopJ"
_RECORD_MAGIC: Final = b"\x89FLR"
_RUN_STARTED, _WINDOW_COMMITTED, _LEDGER_SAVED, _ADOPTED = 1, 9, 13, 22
_PIECE_BYTES: Final = 1 << 20


class Unreadable(Exception):
    """The journal is damaged, or part of it is missing."""


@dataclass(frozen=True, slots=True)
class Journal:
    """What a whole journal says of the run's versions."""

    digests: Mapping[Version, str]  # of the anchors
    newest: tuple[int, ...]  # version of each fragment; empty where no run has begun
    twice: tuple[Version, ...] = ()  # versions that more than one record commits
    unequal: tuple[Version, ...] = ()  # versions that two records give different digests


@dataclass(slots=True)
class _Place:
    """How far one segment has been read."""

    salt: int
    sequence: int  # of the next record
    offset: int  # of the next record


def read_journal(folder: Path) -> Journal:
    """Read and check all of a folder's journal. Raises Unreadable: damage, but for a torn end of the last segment."""
    paths = _segments(folder)
    digests: dict[Version, str] = {}
    committed: set[Version] = set()
    twice: set[Version] = set()
    unequal: set[Version] = set()
    place: _Place | None = None
    for number, path in enumerate(paths, start=_number(paths[0]) if paths else 0):
        if _number(path) != number:
            raise Unreadable(f"segment {number} is missing")
        with path.open("rb") as file:
            began = _begin(file, path)
            if place is not None and began.sequence != place.sequence:
                raise Unreadable(f"{path.name} begins with record {began.sequence}, not {place.sequence}")
            place, first = began, True
            until = None if path is paths[-1] else _first(paths[paths.index(path) + 1])
            for kind, anchors in _records(file, place, until):
                if first and number > 0 and path is paths[0] and kind != _LEDGER_SAVED:
                    raise Unreadable(f"{path.name} is the oldest segment, and does not begin with a saved ledger")
                first = False
                for fragment, version, digest in anchors:
                    at = (fragment, version)
                    if digests.setdefault(at, digest) != digest:
                        unequal.add(at)
                    if kind == _WINDOW_COMMITTED:
                        (twice if at in committed else committed).add(at)
            if until is not None and place.sequence != until:
                raise Unreadable(f"{path.name} is damaged at byte {place.offset}, and segments follow")
            if until is None:
                _check_tail(file, path, place)
    highest: dict[int, int] = {}
    for fragment, version in digests:
        highest[fragment] = max(version, highest.get(fragment, 0))
    return Journal(digests, tuple(highest[f] for f in sorted(highest)), tuple(sorted(twice)), tuple(sorted(unequal)))


@dataclass(slots=True)
class Tail:
    """Reads a journal that a coordinator appends to: each record once, as soon as it is there."""

    folder: Path
    _places: dict[str, _Place] = field(default_factory=dict)

    def read(self) -> Anchors:
        """Anchors of the records that are new. What is not whole yet comes with a later call."""
        anchors: Anchors = []
        for path in _segments(self.folder):
            try:
                with path.open("rb") as file:
                    place = self._places.get(path.name) or _begin(file, path)
                    self._places[path.name] = place
                    for _, found in _records(file, place):
                        anchors += found
            except (Unreadable, OSError):
                continue  # being written, or just deleted; `read_journal` judges
        return anchors


def _segments(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _begin(file: BinaryIO, path: Path) -> _Place:
    data = file.read(_SEGMENT.size)
    if len(data) < _SEGMENT.size:
        raise Unreadable(f"{path.name} is cut within its header")
    magic, version, number, sequence, salt, digest = _SEGMENT.unpack(data)
    if magic != _SEGMENT_MAGIC or version != 1 or digest != xxhash.xxh3_64_intdigest(data[:32]):
        raise Unreadable(f"the header of {path.name} is damaged")
    if number != _number(path):
        raise Unreadable(f"{path.name} holds segment {number}")
    return _Place(salt=salt, sequence=sequence, offset=_SEGMENT.size)


def _first(path: Path) -> int:
    """The first record of a segment. What stands behind the last one before it, in the segment before, does not count:
    a coordinator that another has replaced may have written there."""
    with path.open("rb") as file:
        return _begin(file, path).sequence


def _records(file: BinaryIO, place: _Place, until: int | None = None) -> Iterator[tuple[int, Anchors]]:
    """Kind and anchors of whole records from a place on, which moves along, up to that one."""
    size = os.fstat(file.fileno()).st_size
    while place.sequence != until:
        file.seek(place.offset)
        head = _header(file.read(_RECORD.size), place.salt)
        if head is None:
            return
        kind, body_bytes, attachment_bytes, sequence, _, digest = head
        end = place.offset + _RECORD.size + body_bytes + attachment_bytes
        if end > size:
            return
        body = file.read(body_bytes)
        hasher = xxhash.xxh3_64(body, seed=place.salt)
        while attachment_bytes > 0 and (piece := file.read(min(attachment_bytes, _PIECE_BYTES))):
            hasher.update(piece)
            attachment_bytes -= len(piece)
        if hasher.intdigest() != digest:
            return
        if sequence != place.sequence:
            raise Unreadable(f"record {sequence} is in the place of {place.sequence}")
        place.offset, place.sequence = end, sequence + 1
        yield kind, _anchors(kind, body)


def _header(data: bytes, salt: int) -> tuple[int, int, int, int, int, int] | None:
    """Kind, bytes of the body, of the attachment, sequence, durable, digest; None where there is no whole header."""
    if len(data) < _RECORD.size:
        return None
    magic, kind, body_bytes, attachment_bytes, sequence, durable, digest, own = _RECORD.unpack(data)
    if magic != _RECORD_MAGIC or own != xxhash.xxh3_64_intdigest(data[:40], seed=salt):
        return None
    return kind, body_bytes, attachment_bytes, sequence, durable, digest


def _check_tail(file: BinaryIO, path: Path, place: _Place) -> None:
    """A record that was durable must be whole: a later header proves that it was."""
    file.seek(place.offset)
    rest = file.read()
    at = rest.find(_RECORD_MAGIC)
    while at >= 0:
        head = _header(rest[at : at + _RECORD.size], place.salt)
        if head is not None and head[4] > place.sequence:
            raise Unreadable(f"{path.name} is damaged at byte {place.offset}: record {place.sequence} was durable")
        at = rest.find(_RECORD_MAGIC, at + 1)


def _anchors(kind: int, body: bytes) -> Anchors:
    """The versions that a record names."""
    if kind not in (_RUN_STARTED, _WINDOW_COMMITTED, _LEDGER_SAVED, _ADOPTED):
        return []
    says: dict[str, Any] = msgpack.unpackb(body, raw=False, strict_map_key=False)
    if kind == _RUN_STARTED:
        first = says["spec"]["identity"]["anchor_digests"]
        return [(fragment, 0, _text(digest)) for fragment, digest in enumerate(first)]
    if kind == _WINDOW_COMMITTED:
        return [(says["fragment"], says["version"], _text(says["anchor_digest"]))]
    if kind == _ADOPTED:
        return [(one["fragment"], one["version"], _text(one["digest"])) for one in says["anchors"]]
    return [(one["fragment"], one["version"], _text(one["anchor_digest"])) for one in says["commits"]]


def _text(digest: int) -> str:
    return f"{digest:016x}"
