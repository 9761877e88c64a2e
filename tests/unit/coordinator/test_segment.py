"""Journal segments: what is a torn tail, what is corruption, and the bytes of format version 1 (protocol P).

`PYTHONPATH=tests/cases python tests/unit/coordinator/test_segment.py` writes the golden segment anew: only with a new
format version.
"""

import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from stored_runs import GOLDEN, STORED, SUMMARY
from virtual_files import VirtualFiles

from farloop.coordinator.decide import records
from farloop.coordinator.decide.records import EpochClaimed, Record, SnapshotTaken
from farloop.coordinator.errors import JournalCorrupt, StorageFailed
from farloop.coordinator.storage import segment
from farloop.coordinator.storage.segment import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Attachment,
    Scan,
    Segments,
    read_attachment,
    record_header,
    scan_segment,
    segment_header,
    segment_path,
)

SALT = 0x5A17_0123_4567_89AB


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A record to be written, and how many were durable then."""

    record: Record
    attachment: bytes = b""
    durable: int = 0


THREE = (
    Item(record=EpochClaimed(epoch=2)),
    Item(record=STORED, attachment=b"an encoded delta", durable=1),
    Item(record=SnapshotTaken(fragment=0, version=8), durable=2),
)


def build(items: Sequence[Item], *, number: int = 0, first: int = 0, salt: int = SALT) -> bytes:
    data = segment_header(number, first, salt)
    for sequence, item in enumerate(items, first):
        kind, body = records.encode(item.record)
        header = record_header(kind, body, item.attachment, sequence=sequence, durable=item.durable, salt=salt)
        data += header + body + item.attachment
    return data


def starts(items: Sequence[Item]) -> list[int]:
    """Where each record begins, and where the last ends."""
    return [len(build(items[:count])) for count in range(len(items) + 1)]


WHOLE = build(THREE)
FIRST, SECOND, THIRD, END = starts(THREE)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def scanned(directory: Path, data: bytes, *, number: int = 0) -> Scan:
    path = segment_path(directory, number)
    path.write_bytes(data)
    found = scan_segment(path, number)
    if found.fault is not None:
        raise found.fault
    return found


def test_of_trusted_records_what_is_attached_is_not_read(tmp_path: Path) -> None:
    """They are found as by a whole read. Those from the first on that is not trusted are verified."""
    items = [Item(record=STORED, attachment=bytes(1 << 20)) for _ in range(3)]
    files, path = VirtualFiles(), segment_path(tmp_path, 0)
    files.make_directory(tmp_path)
    files.write_bytes(path, build(items))
    for trusted in range(4):
        files.bytes_read.clear()
        assert scan_segment(path, 0, files, trusted=trusted) == scan_segment(path, 0, files)
        assert files.bytes_read[path] - len(build(items)) < (3 - trusted << 20) + (1 << 19)


@pytest.mark.parametrize("room", [0, 5000])
def test_the_last_record_cut_at_any_byte_is_a_torn_tail(tmp_path: Path, room: int) -> None:
    data = build((*THREE[:2], Item(record=STORED, attachment=b"delta", durable=2)))
    for cut in range(THIRD, len(data)):
        found = scanned(tmp_path, data[:cut] + bytes(room))
        assert (len(found.entries), found.end, found.torn_bytes) == (2, THIRD, len(data[THIRD:cut].rstrip(b"\0")))


def test_a_flip_in_the_last_record_is_a_torn_tail_and_in_a_durable_one_corruption(tmp_path: Path) -> None:
    for at in range(THIRD, END):
        found = scanned(tmp_path, flipped(WHOLE, at))
        assert (len(found.entries), found.end, found.torn_bytes) == (2, THIRD, END - THIRD)
    for at in range(FIRST, THIRD):
        with pytest.raises(JournalCorrupt) as caught:
            scanned(tmp_path, flipped(WHOLE, at))
        assert caught.value.offset == (FIRST if at < SECOND else SECOND)
        assert caught.value.path == segment_path(tmp_path, 0)


def test_the_proof_of_durability_is_found_across_pieces(tmp_path: Path) -> None:
    """The search reads 1 MiB at a time; the header that proves it may lie across two of them."""
    damaged = len(build([Item(record=STORED)])) - SEGMENT_HEADER_BYTES
    for inside in range(RECORD_HEADER_BYTES + 1):
        items = [
            Item(record=EpochClaimed(epoch=1)),
            Item(record=STORED, attachment=bytes((1 << 20) - damaged - inside)),
            Item(record=EpochClaimed(epoch=2), durable=2),
        ]
        assert starts(items)[2] - starts(items)[1] + inside == 1 << 20
        with pytest.raises(JournalCorrupt):
            scanned(tmp_path, flipped(build(items), starts(items)[1]))


@pytest.mark.parametrize("read", [flipped(WHOLE, SECOND + 60), WHOLE[: SECOND + 60]])
def test_a_record_that_was_half_written_when_it_was_read_and_whole_at_its_proof_is_no_damage(
    read: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator, or the mirror of one, writes on while a standby or a command reads."""
    path, look_ahead = segment_path(tmp_path, 0), segment._look_ahead

    def write_on(*args: Any) -> Any:
        path.write_bytes(WHOLE)
        return look_ahead(*args)

    monkeypatch.setattr(segment, "_look_ahead", write_on)
    found = scanned(tmp_path, read)
    assert [entry.record for entry in found.entries] == [item.record for item in THREE]


def test_a_delta_that_looks_like_a_record_proves_nothing(tmp_path: Path) -> None:
    """A node does not know the salt; with it, the same bytes would be a proof."""

    def torn(salt: int) -> bytes:
        forged = build([Item(record=EpochClaimed(epoch=9), durable=99)], first=99, salt=salt)[SEGMENT_HEADER_BYTES:]
        return flipped(build((THREE[0], Item(record=STORED, attachment=forged))), SECOND + 60)

    assert len(scanned(tmp_path, torn(SALT + 1)).entries) == 1
    with pytest.raises(JournalCorrupt):
        scanned(tmp_path, torn(SALT))


@pytest.mark.parametrize("at", [8, 12], ids=["record", "attachment"])
def test_a_record_longer_than_its_file_is_torn_and_no_room_is_made_for_it(tmp_path: Path, at: int) -> None:
    kind, body = records.encode(EpochClaimed(epoch=2))
    header = bytearray(record_header(kind, body, b"", sequence=0, durable=0, salt=SALT))
    header[at : at + 4] = b"\xff\xff\xff\xff"
    header[40:48] = xxhash.xxh3_64_intdigest(bytes(header[:40]), seed=SALT).to_bytes(8, "little")
    tracemalloc.start()
    try:
        found = scanned(tmp_path, segment_header(0, 0, SALT) + header + body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not found.entries and found.torn_bytes == len(header) + len(body)
    assert peak < 8 << 20


UNKNOWN = record_header(99, b"\x80", b"", sequence=3, durable=0, salt=SALT) + b"\x80"


@pytest.mark.parametrize(
    ("data", "place", "words"),
    [
        (WHOLE + UNKNOWN, {}, "kind 99 is unknown"),
        (WHOLE[:SECOND] + WHOLE[THIRD:], {}, "record 2 is in the place of 1"),
        (WHOLE[:8] + b"\2" + WHOLE[9:], {}, "format version 2 is unknown"),
        (WHOLE, {"number": 1}, "under the name of segment 1"),
        (build(THREE, first=5), {}, "goes on at record 5, not 0"),
    ],
)
def test_what_is_whole_and_wrong_is_never_cut(tmp_path: Path, data: bytes, place: dict[str, int], words: str) -> None:
    with pytest.raises(JournalCorrupt, match=words):
        scanned(tmp_path, data, **place)


def test_a_header_that_is_cut_or_flipped_anywhere_is_refused(tmp_path: Path) -> None:
    for at in range(SEGMENT_HEADER_BYTES):
        for damaged in (WHOLE[:at], flipped(WHOLE, at)):
            with pytest.raises(JournalCorrupt):
                scanned(tmp_path, damaged)


def laid_out(directory: Path, segments: dict[int, bytes]) -> list[Scan]:
    for number, data in segments.items():
        segment_path(directory, number).write_bytes(data)
    segments = Segments(directory)
    assert segments.entries is not None
    return [segments.scan(number) for number in segments.numbers]


@pytest.mark.parametrize("tail", [b"\0", b"x", WHOLE[-10:], build([*THREE, *THREE])[END:]])
def test_what_a_fenced_coordinator_wrote_behind_the_end_of_a_segment_is_no_damage(tmp_path: Path, tail: bytes) -> None:
    """S: the segment that follows says where this one ends."""
    scans = laid_out(tmp_path, {0: WHOLE + tail[:-1], 1: build((), number=1, first=3)})
    assert [len(found.entries) for found in scans] == [3, 0]


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ({0: WHOLE[:-1] + b"\xff", 1: build((), number=1, first=3)}, "record 2 is damaged, and segments follow"),
        ({1: build((), number=1, first=3)}, r"journal-000000\.log.*missing"),
        ({n: build([Item(record=SUMMARY)], number=n, first=86 + n) for n in (4, 6)}, r"journal-000005\.log.*missing"),
    ],
)
def test_damage_before_a_segment_and_a_gap_are_named(tmp_path: Path, segments: dict[int, bytes], words: str) -> None:
    with pytest.raises(JournalCorrupt, match=words):
        laid_out(tmp_path, segments)


def test_an_attachment_behind_the_end_of_its_file_is_a_failure(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).write_bytes(b"short")
    for number, words in ((0, "ends at byte 5"), (7, "No such file")):
        with pytest.raises(StorageFailed, match=words):
            read_attachment(tmp_path, Attachment(segment=number, offset=2, size=10), 0, 10)


@given(at=st.integers(0, END - 1), replaced=st.binary(max_size=400), removed=st.integers(0, END))
def test_a_mutated_segment_gives_a_prefix_or_journal_corrupt(at: int, replaced: bytes, removed: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        try:
            found = scanned(Path(place), WHOLE[:at] + replaced + WHOLE[at + removed :])
        except JournalCorrupt:
            return
    assert [entry.record for entry in found.entries] == [item.record for item in THREE][: len(found.entries)]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_power_cut_loses_nothing_that_was_synced(data: st.DataObject) -> None:
    """Unsynced parts of the file may be old (zeros) or missing; what is found is a prefix with all durable records."""
    steps = data.draw(st.lists(st.one_of(st.just("sync"), st.integers(0, 90)), max_size=12))
    items, durable = list[Item](), 0
    for step in steps:
        if isinstance(step, int):
            items.append(Item(record=STORED, attachment=b"\x89FLR" * step, durable=durable))
        else:
            durable = len(items)
    whole = build(items)
    durable_end = starts(items)[durable]
    damaged = bytearray(whole[: data.draw(st.integers(durable_end, len(whole)))])
    page = 32
    for start in range(durable_end // page * page, len(damaged), page):
        if data.draw(st.booleans()):
            lost = slice(max(start, durable_end), min(start + page, len(damaged)))
            damaged[lost] = bytes(lost.stop - lost.start)
    with tempfile.TemporaryDirectory() as place:
        found = scanned(Path(place), bytes(damaged))
    assert durable <= len(found.entries) <= len(items)
    assert found.end == starts(items)[len(found.entries)]


def test_the_bytes_are_those_of_format_version_1() -> None:
    """And so the golden segment is still understood: it is `WHOLE`."""
    assert _current() == (GOLDEN / "segment-v1.hex").read_text()


def _current() -> str:
    return "".join(WHOLE[at : at + 32].hex() + "\n" for at in range(0, len(WHOLE), 32))


if __name__ == "__main__":
    (GOLDEN / "segment-v1.hex").write_text(_current())
