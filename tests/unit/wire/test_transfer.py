"""farloop.wire.blobs and farloop.wire.transfer: keys and reassembly of blobs, credit, and what an end sends and takes.

Covers protocol Q (credit, and resume on an equal digest), R (pushed updates), T (any lane carries any range,
unacknowledged bytes are bounded by the window) and W (events per blob).
"""

import random
from collections import deque
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import session_pairs
from hypothesis import given
from hypothesis import strategies as st
from session_pairs import delta, update
from stories import StoryText, all_stories, check_story, python

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire import events, limits
from farloop.wire.blobs import MAX_ISLANDS, BytesSource, Ranges, Reassembly, blob_digest, blob_key
from farloop.wire.events import SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.lanes import Lane
from farloop.wire.limits import (
    EARLY_BYTES,
    INITIAL_FLIGHT,
    LEAST_FLIGHT,
    THIN_CHUNK,
    Limits,
    Timing,
)
from farloop.wire.link_measurement import Noise
from farloop.wire.messages import Credit, Offer
from farloop.wire.outgoing import Flight, Outgoing
from farloop.wire.reasons import LimitReached
from farloop.wire.traffic import Traffic
from farloop.wire.transfer import Transfers

# --- Blobs

BLOB = BlobId(kind=BlobKind.DELTA, fragment=1, version=2, node=NodeId("a"), incarnation=3, seq=4)
OTHER = {"kind": BlobKind.UPDATE, "fragment": 9, "version": 9, "node": NodeId("b"), "incarnation": 9, "seq": 9}


def test_every_field_of_a_blob_id_changes_its_key() -> None:
    assert blob_key(BLOB).hex() == "66ebf766c1562c6751b129a851e6566a", "and it never changes"
    assert OTHER.keys() == {field.name for field in fields(BlobId)}
    changed = [replace(BLOB, **{name: value}) for name, value in OTHER.items()]  # type: ignore[arg-type]
    assert len({blob_key(blob) for blob in [BLOB, *changed]}) == len(OTHER) + 1


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


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 30)), max_size=40))
def test_ranges_are_a_set_of_bytes(steps: list[tuple[bool, int, int]]) -> None:
    ranges, there = Ranges(), set[int]()
    for adds, start, length in steps:
        span = range(start, start + length)
        if adds:
            low, high = ranges.add(start, start + length)
            there |= set(span)
            assert low <= start and high >= start + length and there >= set(range(low, high))
        else:
            ranges.remove(start, start + length)
            there -= set(span)
        ranges.check()
        assert {n for low, high in ranges for n in range(low, high)} == there


@pytest.mark.parametrize(
    ("pieces", "verifies"),
    [
        ([(0, b"goo"), (0, b"bad"), (3, b"d")], True),  # a duplicate with other bytes does not change the prefix
        ([(0, b"goof")], False),
        ([(2, b"xx"), (2, b"od"), (0, b"go")], True),  # of what is beyond a gap the last bytes count
        ([(0, b"go"), (3, b"x"), None, (0, b"good")], True),  # cleared, it starts again
    ],
)
def test_a_blob_is_held_against_its_digest(pieces: list[tuple[int, bytes] | None], verifies: bool) -> None:
    reassembly = Reassembly(4, blob_digest(b"good"))
    for piece in pieces:
        if piece is None:
            reassembly.clear()
            assert reassembly.received == 0
        else:
            reassembly.add(piece[0], memoryview(piece[1]))
        reassembly.check()
    assert reassembly.complete and reassembly.verify() == verifies


def test_ranges_beyond_the_bound_are_dropped_and_may_come_again() -> None:
    data = bytes(range(256)) * 16
    reassembly = Reassembly(len(data), blob_digest(data))
    for start in range(1, len(data), 2):
        reassembly.add(start, memoryview(data)[start : start + 1])
        reassembly.check()
    assert len(data) > 2 * MAX_ISLANDS
    reassembly.add(0, memoryview(data))
    assert reassembly.verify()


# --- Credit

TIMING = Timing(rto_s=2.0)


LANE = Lane(1)


def outgoing(size: int, limit: int = 0, flight: Flight | None = None) -> Outgoing:
    return Outgoing(update(), BytesSource(bytes(size)), limit, flight or Flight(TIMING))


def chunks(out: Outgoing, chunk_bytes: int, now: float = 0.0) -> list[tuple[int, int]]:
    """(offset, length) of the next ones."""
    sent = []
    while (chunk := out.next_chunk(chunk_bytes, out.in_flight, now, LANE)) is not None:
        sent.append((chunk[0], len(chunk[1])))
    return sent


def goes_back(out: Outgoing, now: float) -> list[float]:
    """Seconds of each of six waits for progress, in which nothing is acknowledged."""
    waits = []
    for _ in range(6):
        assert chunks(out, 50, now) == [(0, 50), (50, 50)] and out.in_flight == 100
        waits.append(out.deadline() - now)
        now = out.deadline()
        out.rewind()
        assert out.in_flight == 0
    return waits


def carried(flight: Flight, num_bytes: int, seconds: float, *, now: float = 0.0) -> None:
    """A blob of one chunk that alone was in flight, and arrived."""
    out = Outgoing(update(), BytesSource(bytes(num_bytes)), num_bytes, flight)
    out.credit(0, num_bytes, now)
    assert chunks(out, num_bytes, now) == [(0, num_bytes)]
    out.credit(num_bytes, num_bytes, now + seconds)


# --- The flight window


def saturate(flight: Flight, bytes_per_s: float, rtt_s: float, seconds: float, now: float = 0.0) -> None:
    """Send without end over an ideal link."""
    out, end, free_at = Outgoing(update(), Noise(1 << 40), 1 << 40, flight), now + seconds, now
    out.credit(0, 1 << 40, now)
    credits: deque[tuple[float, int]] = deque()
    while now < end:
        while out.in_flight + THIN_CHUNK <= flight.window(EARLY_BYTES, now):
            assert out.next_chunk(THIN_CHUNK, out.in_flight, now, LANE) is not None
            free_at = max(free_at, now) + THIN_CHUNK / bytes_per_s
            credits.append((free_at + rtt_s, out.sent))
        now, received = credits.popleft()
        out.credit(received, 1 << 40, now)


def test_the_window_grows_from_its_least_to_twice_the_product_of_rate_and_round_trip() -> None:
    """Though it limits the samples that it is reckoned from."""
    flight = Flight(TIMING)
    assert flight.window(EARLY_BYTES, 0.0) == INITIAL_FLIGHT, "nothing is known yet"
    saturate(flight, 1e6, 0.1, 5.0)
    assert flight.window(EARLY_BYTES, 0.0) <= LEAST_FLIGHT
    saturate(flight, 125e6, 0.1, 2.0, now=5.0)
    assert flight.window(EARLY_BYTES, 0.0) == pytest.approx(25e6, rel=0.05)


def test_the_window_falls_back_after_the_link_has_become_slow() -> None:
    flight = Flight(TIMING)
    saturate(flight, 125e6, 0.1, 2.0)
    saturate(flight, 1.25e6, 0.1, 100.0, now=2.0)
    assert flight.window(EARLY_BYTES, 0.0) < LEAST_FLIGHT / 2


def test_a_link_that_is_never_idle_does_not_double_its_window_each_minute() -> None:
    """The window's own queue makes every round trip longer."""
    flight = Flight(TIMING)
    saturate(flight, 10e6, 0.1, 130.0)
    assert flight.window(EARLY_BYTES, 0.0) <= 2.2 * 10e6 * 0.1


def test_a_round_trip_that_has_become_longer_is_noticed() -> None:
    flight = Flight(TIMING)
    saturate(flight, 2.5e6, 0.05, 10.0)
    saturate(flight, 2.5e6, 0.5, 100.0, now=10.0)
    assert flight.window(EARLY_BYTES, 0.0) == pytest.approx(2 * 2.5e6 * 0.5, rel=0.2)


def test_small_blobs_now_and_then_do_not_make_the_link_slow() -> None:
    flight = Flight(TIMING)
    saturate(flight, 25e6, 0.1, 2.0)
    known = flight.window(EARLY_BYTES, 0.0)
    for n in range(20):
        now = 10.0 + n
        out = Outgoing(update(), BytesSource(bytes(1000)), 1000, flight)
        out.credit(0, 1000, now)
        chunks(out, 1000, now)
        flight.ran_dry(now)
        out.credit(1000, 1000, now + 0.1)
    assert flight.window(EARLY_BYTES, 0.0) == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize(("bytes_per_s", "window"), [(500e3, 500e3), (125e3, 2 * THIN_CHUNK), (12e3, 2 * THIN_CHUNK)])
def test_on_a_thin_link_the_window_holds_a_second_and_no_less_than_two_chunks(bytes_per_s: float, window: int) -> None:
    flight = Flight(TIMING)
    saturate(flight, bytes_per_s, 0.05, 2000.0)
    assert flight.window(EARLY_BYTES, 0.0) <= 1.3 * window


def test_a_receiver_that_keeps_much_reports_in_larger_pieces_and_the_window_holds_several() -> None:
    """On a fast link of hardly any round trip the product is less than a receiver reports at a time."""
    flight = Flight(TIMING)
    saturate(flight, 1e9, 1e-4, 0.1)
    assert flight.window(256 << 20, 0.0) == 64 << 20 > 2 * flight.product


# --- What an end sends and takes

DATA = bytes(range(250)) * 4
DIGEST = blob_digest(DATA)


def frame(blob: BlobId, offset: int, chunk: bytes) -> BulkFrame:
    return BulkFrame(run=1, epoch=1, key=blob_key(blob), offset=offset, chunk=memoryview(chunk))


class End:
    """Transfers, and what they let out."""

    def __init__(self, *, idle_s: float | None = None, **limits: int) -> None:
        self.events: list[SessionEvent] = []
        self.credits: list[Credit] = []
        self.traffic = Traffic()
        told = (self.events.append, self.credits.append)
        self.transfers = Transfers(Limits(**limits), Timing(), self.traffic, *told, idle_s)
        self.transfers.lanes.opened(1)

    def accept(self, chunk: BulkFrame, now: float = 0.0) -> None:
        self.transfers.admit(chunk)
        self.transfers.accept(chunk, len(chunk.chunk) + 100, now)
        self.transfers.check()

    def sent(self, num_chunks: int = 1000) -> list[tuple[int, int, int]]:
        """(version, offset, length) of the next chunks."""
        found = []
        for _ in range(num_chunks):
            chunk = self.transfers.next_chunk(0.0)
            if chunk is None:
                break
            _, blob, offset, view = chunk
            found.append((blob.version, offset, len(view)))
        self.transfers.check()
        return found

    def sent_bytes(self) -> int:
        return sum(length for _, _, length in self.sent())

    def lanes_of(self, num_chunks: int, **options: Any) -> list[int]:
        return [chunk[0] for _ in range(num_chunks) if (chunk := self.transfers.next_chunk(0.0, **options)) is not None]

    def push(self, version: int, size: int = 0, *, data: bytes = b"", background: bool = False) -> None:
        source = BytesSource(bytes(size) or data or DATA)
        self.transfers.begin(update(version), source, pushed=not background, background=background)

    def offer(self, seq: int, size: int = 1000, *, background: bool = False) -> None:
        self.transfers.begin(delta(seq), BytesSource(bytes(size)), pushed=False, background=background)

    def credit(self, blob: BlobId, received: int, limit: int, *, now: float = 0.0, **more: Any) -> None:
        self.transfers.credited(Credit(blob=blob, received=received, limit=limit, **more), now)

    def expect(self, blob: BlobId) -> Reassembly:
        return self.transfers.expect(blob, len(DATA), DIGEST, None, 0.0)

    def mebibytes(self, first: int, stop: int, *, since: float, every: float) -> None:
        """Of update 1, one after the other."""
        for n in range(first, stop):
            self.accept(frame(update(1), n << 20, bytes(1 << 20)), since + every * (n - first))


def full(offer: Offer) -> None:
    raise LimitReached("too many messages")


@all_stories(__file__, "outgoing", "transfers")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(session_pairs), vars(limits), vars(events), globals()), rewrite=rewrite)
