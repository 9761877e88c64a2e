"""farloop.wire.blobs. Covers protocol Q (resume), T (any lane carries any range), W."""

import random
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire.blobs import MAX_ISLANDS, BytesSource, Reassembly, blob_digest, blob_key


def test_the_key_of_a_blob_is_golden() -> None:
    blob = BlobId(kind=BlobKind.DELTA, fragment=1, version=2, node=NodeId("a"), incarnation=3, seq=4)
    assert blob_key(blob).hex() == "66ebf766c1562c6751b129a851e6566a"


def test_every_field_of_a_blob_id_changes_its_key() -> None:
    base = BlobId(kind=BlobKind.DELTA, fragment=1, version=2, node=NodeId("a"), incarnation=3, seq=4)
    changed = [
        replace(base, kind=BlobKind.UPDATE),
        replace(base, fragment=9),
        replace(base, version=9),
        replace(base, node=NodeId("b")),
        replace(base, incarnation=9),
        replace(base, seq=9),
    ]
    assert len({blob_key(blob) for blob in [base, *changed]}) == len(fields(BlobId)) + 1


def test_a_bytes_source_gives_views_of_its_bytes_and_no_copies() -> None:
    data = bytearray(b"0123456789")
    source = BytesSource(data)
    view = source.read(2, 3)
    data[2] = ord("x")
    assert source.size == 10
    assert bytes(view) == b"x34"
    assert view.readonly


@given(st.binary(min_size=1, max_size=300), st.randoms(use_true_random=False))
def test_any_ranges_in_any_order_with_duplicates_give_the_blob(data: bytes, rng: random.Random) -> None:
    ranges = []
    start = 0
    while start < len(data):
        end = min(len(data), start + rng.randint(1, 40))
        ranges.append((max(0, start - rng.randint(0, 5)), end))
        start = end
    ranges += rng.choices(ranges, k=3)
    rng.shuffle(ranges)

    reassembly = Reassembly(len(data), blob_digest(data))
    arrived = [False] * len(data)
    for start, end in ranges:
        reassembly.add(start, memoryview(data)[start:end])
        reassembly.check()
        arrived[start:end] = [True] * (end - start)
        assert reassembly.received == (arrived.index(False) if False in arrived else len(data))
    assert reassembly.complete
    assert reassembly.verify()
    assert reassembly.data == data


def test_a_duplicate_with_other_bytes_does_not_change_the_prefix() -> None:
    reassembly = Reassembly(4, blob_digest(b"good"))
    reassembly.add(0, memoryview(b"goo"))
    reassembly.add(0, memoryview(b"bad"))
    reassembly.add(3, memoryview(b"d"))
    assert reassembly.verify()


def test_wrong_bytes_fail_the_digest() -> None:
    reassembly = Reassembly(4, blob_digest(b"good"))
    reassembly.add(0, memoryview(b"goof"))
    assert reassembly.complete
    assert not reassembly.verify()


def test_a_cleared_reassembly_starts_again() -> None:
    reassembly = Reassembly(4, blob_digest(b"good"))
    reassembly.add(0, memoryview(b"go"))
    reassembly.add(3, memoryview(b"x"))
    reassembly.clear()
    reassembly.check()
    assert reassembly.received == 0
    reassembly.add(0, memoryview(b"good"))
    assert reassembly.verify()


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 11), (10, 1), (1 << 60, 1)])
def test_a_range_outside_the_blob_is_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="of a blob of 10 bytes"):
        Reassembly(10, 0).add(offset, memoryview(bytes(length)))


def test_ranges_beyond_the_bound_are_dropped_and_may_come_again() -> None:
    data = bytes(range(256)) * 16
    reassembly = Reassembly(len(data), blob_digest(data))
    for start in range(1, len(data), 2):
        reassembly.add(start, memoryview(data)[start : start + 1])
        reassembly.check()
    assert len(data) > 2 * MAX_ISLANDS
    reassembly.add(0, memoryview(data))
    assert reassembly.verify()
