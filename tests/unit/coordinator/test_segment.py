"""Journal segments: what is a torn tail, what is corruption, and the bytes of format version 1 (protocol P).

`python tests/unit/coordinator/test_segment.py` writes the golden segment anew: only with a new format version.
"""

import json
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.decide import records
from farloop.coordinator.decide.records import EpochClaimed, InputStored, Record, SnapshotTaken
from farloop.coordinator.errors import JournalCorrupt, StorageFailed
from farloop.coordinator.storage.segment import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Attachment,
    Scan,
    read_attachment,
    read_segments,
    record_header,
    scan_segment,
    segment_header,
    segment_path,
    segment_paths,
)

RECORDS = json.loads((Path(__file__).parent / "golden" / "records-v1.json").read_text())
SUMMARY = records.decode(RECORDS["LedgerSaved"][0], bytes.fromhex(RECORDS["LedgerSaved"][1]))
GOLDEN = Path(__file__).parent / "golden" / "segment-v1.hex"
SALT = 0x5A17_0123_4567_89AB

STORED = InputStored(
    blob=BlobId(kind=BlobKind.DELTA, fragment=0, version=3, node=NodeId("oslo"), incarnation=1, seq=4),
    window=4,
    contributors=(),
    digest=5,
)


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


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def scanned(directory: Path, data: bytes, *, number: int = 0, first: int = 0) -> Scan:
    path = segment_path(directory, number)
    path.write_bytes(data)
    return scan_segment(path, number, first)


@contextmanager
def directory() -> Iterator[Path]:
    """A temporary directory per example; hypothesis would share `tmp_path` among them."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_whole_segment_gives_its_records_and_their_attachments(tmp_path: Path) -> None:
    data = build(THREE)
    found = scanned(tmp_path, data)
    assert [entry.record for entry in found.entries] == [item.record for item in THREE]
    assert [entry.sequence for entry in found.entries] == [0, 1, 2]
    places = [entry.attachment for entry in found.entries]
    assert [data[place.offset : place.offset + place.size] for place in places] == [b"", b"an encoded delta", b""]
    assert (found.end, found.size, found.torn_bytes, found.salt) == (len(data), len(data), 0, SALT)


def test_room_set_aside_is_not_a_torn_tail(tmp_path: Path) -> None:
    data = build(THREE)
    found = scanned(tmp_path, data + bytes(100_000))
    assert (len(found.entries), found.end, found.torn_bytes) == (3, len(data), 0)


@pytest.mark.parametrize("room", [0, 5000])
def test_the_last_record_cut_at_any_byte_is_a_torn_tail(tmp_path: Path, room: int) -> None:
    items = (*THREE[:2], Item(record=STORED, attachment=b"delta", durable=2))
    data = build(items)
    start = starts(items)[2]
    for cut in range(start, len(data)):
        found = scanned(tmp_path, data[:cut] + bytes(room))
        assert (len(found.entries), found.end) == (2, start)
        assert found.torn_bytes == len(data[start:cut].rstrip(b"\0"))


def test_any_bit_of_the_last_record_may_be_torn(tmp_path: Path) -> None:
    data = build(THREE)
    start = starts(THREE)[2]
    for at in range(start, len(data)):
        found = scanned(tmp_path, flipped(data, at))
        assert (len(found.entries), found.end, found.torn_bytes) == (2, start, len(data) - start)


def test_a_flip_in_a_record_that_a_later_one_knew_durable_is_corruption(tmp_path: Path) -> None:
    data = build(THREE)
    first, second, third, _ = starts(THREE)
    for at in range(first, third):
        with pytest.raises(JournalCorrupt) as caught:
            scanned(tmp_path, flipped(data, at))
        assert caught.value.offset == (first if at < second else second)
        assert caught.value.path == segment_path(tmp_path, 0)


def test_a_torn_record_before_a_whole_one_is_a_torn_tail_if_neither_was_synced(tmp_path: Path) -> None:
    """The disk may write unsynced pages in any order."""
    items = [Item(record=item.record, attachment=item.attachment, durable=1) for item in THREE]
    items[0] = THREE[0]
    data = build(items)
    start = starts(items)[1]
    found = scanned(tmp_path, flipped(data, start + 60))
    assert (len(found.entries), found.end, found.torn_bytes) == (1, start, len(data) - start)


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


def test_a_delta_that_looks_like_a_record_proves_nothing(tmp_path: Path) -> None:
    """A node does not know the salt; with it, the same bytes would be a proof."""
    for salt, believed in ((SALT + 1, False), (SALT, True)):
        forged = build([Item(record=EpochClaimed(epoch=9), durable=99)], first=99, salt=salt)[SEGMENT_HEADER_BYTES:]
        items = (THREE[0], Item(record=STORED, attachment=forged))
        torn = flipped(build(items), starts(items)[1] + 60)
        if believed:
            with pytest.raises(JournalCorrupt):
                scanned(tmp_path, torn)
        else:
            assert len(scanned(tmp_path, torn).entries) == 1


@pytest.mark.parametrize("bytes_of", ["record", "attachment"])
def test_a_record_longer_than_its_file_is_torn_and_no_room_is_made_for_it(tmp_path: Path, bytes_of: str) -> None:
    kind, body = records.encode(EpochClaimed(epoch=2))
    header = bytearray(record_header(kind, body, b"", sequence=0, durable=0, salt=SALT))
    at = 8 if bytes_of == "record" else 12
    header[at : at + 4] = b"\xff\xff\xff\xff"
    header[40:48] = xxhash.xxh3_64_intdigest(bytes(header[:40]), seed=SALT).to_bytes(8, "little")
    data = segment_header(0, 0, SALT) + header + body
    tracemalloc.start()
    try:
        found = scanned(tmp_path, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not found.entries and found.torn_bytes == len(header) + len(body)
    assert peak < 8 << 20


def test_a_whole_record_of_an_unknown_kind_is_never_cut(tmp_path: Path) -> None:
    header = record_header(99, b"\x80", b"", sequence=3, durable=0, salt=SALT)
    with pytest.raises(JournalCorrupt, match="kind 99 is unknown"):
        scanned(tmp_path, build(THREE) + header + b"\x80")


def test_a_whole_record_in_the_wrong_place_is_corruption(tmp_path: Path) -> None:
    data = build(THREE)
    second, third = starts(THREE)[1:3]
    with pytest.raises(JournalCorrupt, match="record 2 is in the place of 1"):
        scanned(tmp_path, data[:second] + data[third:])


@pytest.mark.parametrize("length", range(SEGMENT_HEADER_BYTES))
def test_a_segment_without_a_whole_header_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(JournalCorrupt):
        scanned(tmp_path, build(THREE)[:length])


def test_any_flip_in_the_header_is_refused(tmp_path: Path) -> None:
    for at in range(SEGMENT_HEADER_BYTES):
        with pytest.raises(JournalCorrupt):
            scanned(tmp_path, flipped(build(THREE), at))


def test_another_format_version_is_named(tmp_path: Path) -> None:
    data = bytearray(build(THREE))
    data[8] = 2
    with pytest.raises(JournalCorrupt, match="format version 2 is unknown"):
        scanned(tmp_path, bytes(data))


def test_a_segment_under_another_name_or_behind_a_gap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalCorrupt, match="under the name of segment 1"):
        scanned(tmp_path, build(THREE), number=1)
    with pytest.raises(JournalCorrupt, match="goes on at record 0, not 5"):
        scanned(tmp_path, build(THREE), first=5)


def test_segments_follow_each_other(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).write_bytes(build(THREE))
    segment_path(tmp_path, 1).write_bytes(build(THREE[:1], number=1, first=3))
    assert [len(found.entries) for found in read_segments(tmp_path)] == [3, 1]


@pytest.mark.parametrize("tail", [b"\0", b"x", build(THREE)[-10:], build([*THREE, *THREE])[len(build(THREE)) :]])
def test_what_a_fenced_coordinator_wrote_behind_the_end_of_a_segment_is_no_damage(tmp_path: Path, tail: bytes) -> None:
    """S: the segment that follows says where this one ends."""
    segment_path(tmp_path, 0).write_bytes(build(THREE)[:-1] + build(THREE)[-1:] + tail[:-1])
    segment_path(tmp_path, 1).write_bytes(build((), number=1, first=3))
    assert [len(found.entries) for found in read_segments(tmp_path)] == [3, 0]


def test_a_record_that_is_damaged_before_the_next_segment_is_refused(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).write_bytes(build(THREE)[:-1] + b"\xff")
    segment_path(tmp_path, 1).write_bytes(build((), number=1, first=3))
    with pytest.raises(JournalCorrupt, match="record 2 is damaged, and segments follow"):
        read_segments(tmp_path)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(build((), number=1, first=3))
    with pytest.raises(JournalCorrupt, match=r"journal-000000\.log.*missing"):
        read_segments(tmp_path)


def test_a_journal_whose_oldest_segments_were_pruned_goes_on_at_its_own_sequence(tmp_path: Path) -> None:
    first = [Item(record=SUMMARY), *THREE[:2]]
    segment_path(tmp_path, 4).write_bytes(build(first, number=4, first=90))
    segment_path(tmp_path, 5).write_bytes(build(THREE, number=5, first=93))
    scans = read_segments(tmp_path)
    assert [entry.sequence for found in scans for entry in found.entries] == list(range(90, 96))
    assert [found.next_sequence for found in scans] == [93, 96]


def test_a_gap_is_named_also_where_the_rest_begins_with_a_summary(tmp_path: Path) -> None:
    segment_path(tmp_path, 4).write_bytes(build([Item(record=SUMMARY)], number=4, first=90))
    segment_path(tmp_path, 6).write_bytes(build([Item(record=SUMMARY)], number=6, first=93))
    with pytest.raises(JournalCorrupt, match=r"journal-000005\.log.*missing"):
        read_segments(tmp_path)


def test_files_of_other_names_are_not_segments(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).write_bytes(build(THREE))
    for name in ("journal-1.log", "journal-000001.log.tmp", "xjournal-000001.log", "metrics.jsonl"):
        (tmp_path / name).write_bytes(b"")
    assert segment_paths(tmp_path) == {0: segment_path(tmp_path, 0)}


def test_an_attachment_is_read_in_any_part(tmp_path: Path) -> None:
    place = scanned(tmp_path, build(THREE)).entries[1].attachment
    for offset in range(place.size + 1):
        for nbytes in range(place.size - offset + 1):
            expected = b"an encoded delta"[offset : offset + nbytes]
            assert read_attachment(tmp_path, place, offset, nbytes) == expected


def test_an_attachment_behind_the_end_of_its_file_is_a_failure(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).write_bytes(b"short")
    with pytest.raises(StorageFailed, match="ends at byte 5"):
        read_attachment(tmp_path, Attachment(segment=0, offset=2, size=10), 0, 10)
    with pytest.raises(StorageFailed, match="No such file"):
        read_attachment(tmp_path, Attachment(segment=7, offset=0, size=1), 0, 1)


@given(data=st.binary(max_size=400), headed=st.booleans())
def test_garbage_is_a_torn_tail_or_journal_corrupt(data: bytes, headed: bool) -> None:
    with directory() as place:
        try:
            found = scanned(place, build(()) + data if headed else data)
        except JournalCorrupt:
            assert not headed
        else:
            assert headed and found.entries == () and found.torn_bytes == len(data.rstrip(b"\0"))


@given(
    at=st.integers(0, len(build(THREE)) - 1),
    replaced=st.binary(max_size=60),
    removed=st.integers(0, 60),
)
def test_a_mutated_segment_gives_a_prefix_or_journal_corrupt(at: int, replaced: bytes, removed: int) -> None:
    data = build(THREE)
    with directory() as place:
        try:
            found = scanned(place, data[:at] + replaced + data[at + removed :])
        except JournalCorrupt:
            return
        assert [entry.record for entry in found.entries] == [item.record for item in THREE][: len(found.entries)]


@settings(max_examples=200)
@given(data=st.data())
def test_a_power_cut_loses_nothing_that_was_synced(data: st.DataObject) -> None:
    """Unsynced parts of the file may be old (zeros) or missing; what is found is a prefix with all durable records."""
    steps = data.draw(st.lists(st.one_of(st.just("sync"), st.integers(0, 90)), max_size=12))
    items: list[Item] = []
    durable = 0
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
    with directory() as place:
        found = scanned(place, bytes(damaged))
    assert durable <= len(found.entries) <= len(items)
    assert found.end == starts(items)[len(found.entries)]


def test_the_bytes_are_those_of_format_version_1() -> None:
    assert _current() == GOLDEN.read_text()


def test_the_golden_segment_is_still_understood(tmp_path: Path) -> None:
    found = scanned(tmp_path, bytes.fromhex(GOLDEN.read_text()))
    assert [entry.record for entry in found.entries] == [item.record for item in THREE]


def _current() -> str:
    data = build(THREE)
    return "".join(data[at : at + 32].hex() + "\n" for at in range(0, len(data), 32))


if __name__ == "__main__":
    GOLDEN.write_text(_current())
