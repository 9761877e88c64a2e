"""farloop.wire.blobs and farloop.wire.transfer: keys and reassembly of blobs, credit, and what an end sends and takes.

Covers protocol Q (credit, and resume on an equal digest), R (pushed updates), T (any lane carries any range,
unacknowledged bytes are bounded by the window) and W (events per blob).
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_pairs import delta, offer_of, update

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire.blobs import MAX_ISLANDS, BytesSource, Ranges, Reassembly, blob_digest, blob_key
from farloop.wire.events import BlobCorrupt, BlobDeclined, BlobIdle, BlobReceived, SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.lanes import Lane
from farloop.wire.limits import (
    EARLY_BYTES,
    EARLY_FRAMES,
    INITIAL_FLIGHT,
    LEAST_FLIGHT,
    SMALLEST_CHUNK,
    THIN_CHUNK,
    Limits,
    Timing,
)
from farloop.wire.link_measurement import Noise
from farloop.wire.messages import Credit, Offer
from farloop.wire.outgoing import Flight, Outgoing
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, RemoteProtocolError
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


# --- Credit

TIMING = Timing(rto_s=2.0)


LANE = Lane(1)


def outgoing(size: int, limit: int = 0) -> Outgoing:
    return Outgoing(update(), BytesSource(bytes(size)), limit, Flight(TIMING))


def chunks(out: Outgoing, chunk_bytes: int, now: float) -> list[tuple[int, int]]:
    sent = []
    while (chunk := out.next_chunk(chunk_bytes, out.in_flight, now, LANE)) is not None:
        sent.append((chunk[0], len(chunk[1])))
    return sent


def test_nothing_leaves_without_credit_and_no_more_than_it() -> None:
    out = outgoing(100)
    assert chunks(out, 30, 0.0) == []
    out.credit(0, 70, 0.0)
    assert chunks(out, 30, 0.0) == [(0, 30), (30, 30), (60, 10)]
    out.credit(60, 1000, 0.0)
    assert chunks(out, 30, 0.0) == [(70, 30)]
    out.credit(100, 100, 0.0)
    assert out.done


def test_false_claims_of_a_receiver_are_cut_to_the_blob() -> None:
    out = outgoing(100)
    out.credit(60, 10, 0.0)
    assert (out.acked, out.sent, out.limit) == (60, 60, 60)
    out.credit(1000, 2000, 0.0)
    assert (out.acked, out.sent, out.limit) == (100, 100, 100)


def test_without_progress_it_goes_back_to_what_is_acknowledged_ever_more_patiently() -> None:
    out = outgoing(100)
    out.credit(0, 100, 0.0)
    now, waits = 1.0, []
    for _ in range(6):
        assert chunks(out, 50, now) == [(0, 50), (50, 50)]
        assert out.in_flight == 100
        waits.append(out.deadline() - now)
        now = out.deadline()
        out.rewind()
        assert out.in_flight == 0
    assert waits == [2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    chunks(out, 50, now)
    out.credit(10, 100, now)
    assert out.deadline() - now == 2.0


def carried(flight: Flight, num_bytes: int, seconds: float, *, now: float = 0.0) -> None:
    """A blob of one chunk that alone was in flight, and arrived."""
    out = Outgoing(update(), BytesSource(bytes(num_bytes)), num_bytes, flight)
    out.credit(0, num_bytes, now)
    assert chunks(out, num_bytes, now) == [(0, num_bytes)]
    out.credit(num_bytes, num_bytes, now + seconds)


def test_the_time_out_follows_the_rate_and_the_bytes_in_flight() -> None:
    flight = Flight(TIMING)
    assert flight.timeout_s(1) == 2.0
    assert flight.timeout_s(512 << 10) == 16.0, "nothing is known yet: the slowest link is assumed"
    assert flight.timeout_s(1 << 30) == 120.0
    for _ in range(20):
        carried(flight, 512 << 10, 0.5)
    assert flight.timeout_s(512 << 10) == 2.0
    assert 7.9 < flight.timeout_s(4 << 20) < 8.1
    for _ in range(20):
        carried(flight, 10, 5.0)
    assert flight.timeout_s(512 << 10) == 16.0, "a small blob's round trip does not make the link slow"


def test_a_chunk_is_timed_from_its_leaving_to_its_acknowledgement() -> None:
    flight = Flight(TIMING)
    out = Outgoing(update(), BytesSource(bytes(1 << 20)), 0, flight)
    out.credit(0, 1 << 20, 0.0)
    assert out.next_chunk(1 << 19, 0, 0.0, LANE) is not None
    out.credit(1 << 18, 1 << 20, 0.5)
    assert flight.timeout_s(1 << 20) == 32.0, "half a chunk is none"
    out.credit(1 << 19, 1 << 20, 1.0)
    mean = ((64 << 10) + (1 << 19)) / 2
    assert flight.timeout_s(1 << 20) == 2 * (1 << 20) / mean
    assert flight.bytes_per_s == 1 << 19


def test_the_acknowledgement_of_bytes_that_were_sent_twice_measures_nothing() -> None:
    flight = Flight(TIMING)
    out = Outgoing(update(), BytesSource(bytes(1 << 20)), 0, flight)
    out.credit(0, 1 << 20, 0.0)
    chunks(out, 1 << 18, 0.0)
    out.rewind()
    chunks(out, 1 << 18, 9.0)
    out.credit(1 << 20, 1 << 20, 9.1)
    assert out.done
    assert flight.timeout_s(1 << 20) == 32.0 and flight.bytes_per_s == 0.0


def test_bytes_that_an_earlier_session_brought_are_no_sample() -> None:
    flight = Flight(TIMING)
    out = Outgoing(update(), BytesSource(bytes(1 << 20)), 1 << 20, flight)
    assert out.next_chunk(1000, 0, 0.0, LANE) is not None
    out.credit(1 << 19, 1 << 20, 0.1)
    assert flight.bytes_per_s == pytest.approx(10_000)
    assert out.in_flight == 0 and out.next_chunk(1000, 0, 0.2, LANE) == (1 << 19, memoryview(bytes(1000)))


def test_what_has_arrived_beyond_a_gap_is_not_in_flight_and_may_be_sent_again() -> None:
    out = outgoing(100)
    out.credit(0, 100, 0.0)
    chunks(out, 50, 0.0)
    out.credit(0, 100, 1.0, arrived=50)
    assert (out.in_flight, out.unacknowledged) == (50, 100)
    out.credit(0, 100, 1.0, arrived=1000)
    assert (out.in_flight, out.unacknowledged) == (0, 100), "no more than was sent"
    out.rewind()
    assert chunks(out, 50, 3.0) == [(0, 50), (50, 50)]


def test_after_a_time_out_only_what_has_not_arrived_is_sent_again() -> None:
    out = outgoing(100)
    out.credit(0, 100, 0.0)
    assert len(chunks(out, 20, 0.0)) == 5
    out.credit(10, 100, 1.0, arrived=50, islands=[(20, 40), (60, 80)])
    assert (out.in_flight, out.flying) == (50, 60), "of the first chunk, a half"
    out.rewind()
    assert chunks(out, 20, 3.0) == [(10, 10), (40, 20), (80, 20)]
    out.credit(20, 100, 3.1, arrived=60, islands=[(20, 40), (60, 80)])
    out.rewind()
    out.credit(60, 100, 3.2, arrived=80, islands=[(60, 80), (90, 95)])
    assert chunks(out, 50, 4.0) == [(80, 10), (95, 5)], "what came late is not sent again"


def test_what_an_earlier_session_brought_beyond_a_gap_is_not_sent() -> None:
    out = outgoing(100)
    out.credit(30, 100, 0.0, arrived=60, islands=[(40, 50), (80, 100)])
    assert chunks(out, 100, 0.0) == [(30, 10), (50, 30)]


def test_a_receiver_that_told_of_what_it_has_not_gets_all_of_it_after_a_time_out() -> None:
    out = outgoing(100)
    out.credit(0, 50, 0.0)
    out.credit(0, 50, 0.0, islands=[(0, 50), (60, 70), (5, 4), (-3, 7), (90, 1000)])
    assert chunks(out, 100, 0.0) == [] and out.unacknowledged == 50
    out.rewind()
    assert chunks(out, 100, 3.0) == [(0, 50)]
    out.check()


def test_what_was_on_a_lane_that_is_lost_leaves_first_and_nothing_else_is_sent_again() -> None:
    end = End(chunk_bytes=100)
    end.transfers.lanes.opened(2)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    gone = [chunk for _ in range(6) if (chunk := end.transfers.next_chunk(0.0)) is not None]
    assert [lane for lane, *_ in gone] == [1, 2, 1, 2, 1, 2]
    end.transfers.credited(Credit(blob=update(1), received=200, limit=1000, arrived=300, islands=(500, 600)), 0.1)
    end.transfers.lane_lost(2)
    assert end.sent(2) == [(1, 300, 100), (1, 600, 100)], "200 to 300 and 400 to 500 are on the other lane"
    end.transfers.lane_lost(2)
    end.transfers.lane_lost(1)
    assert end.transfers.next_chunk(0.2) is None and end.transfers.lanes.in_flight == 0
    end.transfers.lanes.opened(3)
    assert end.sent(2) == [(1, 200, 100), (1, 300, 100)]
    end.transfers.check()


def test_a_lane_that_takes_nothing_now_gets_nothing() -> None:
    end = End(chunk_bytes=100)
    end.transfers.lanes.opened(2)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    lanes = [chunk[0] for _ in range(4) if (chunk := end.transfers.next_chunk(0.0, full={1})) is not None]
    assert lanes == [2, 2, 2, 2]
    assert end.transfers.next_chunk(0.0, full={1, 2}) is None


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


def test_before_the_first_credit_nothing_is_sent_twice() -> None:
    out = outgoing(100, limit=10)
    assert chunks(out, 30, 0.0) == [(0, 10)]
    assert out.early_bytes == 10
    out.credit(0, 100, 5.0)
    assert out.early_bytes == 0
    assert out.deadline() == 7.0


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


def test_blobs_take_turns_by_chunk() -> None:
    end = End(chunk_bytes=400)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.begin(update(2), BytesSource(DATA), pushed=True)
    assert end.sent() == [(1, 0, 400), (2, 0, 400), (1, 400, 400), (2, 400, 400), (1, 800, 200), (2, 800, 200)]


def test_of_offered_blobs_a_chunk_leaves_before_credit_and_later_what_fills_the_link() -> None:
    """They may be declined: then these bytes were for nothing."""
    end, source = End(), BytesSource(bytes(10 << 20))
    for seq in (1, 2):
        end.transfers.begin(delta(seq), source, pushed=False)
    assert end.sent() == [(0, 0, SMALLEST_CHUNK)]
    end.transfers.credited(Credit(blob=delta(1), received=0, limit=10 << 20), 0.0)
    end.sent()
    end.transfers.credited(Credit(blob=delta(1), received=2 << 20, limit=10 << 20), 1.0)
    assert end.transfers.bytes_per_s == 2 << 20
    end.transfers.cancel(delta(1))
    assert sum(length for _, _, length in end.sent()) == (4 << 20) - SMALLEST_CHUNK, "two round trips"


def test_a_background_blob_waits_for_credit() -> None:
    end = End()
    end.transfers.begin(delta(1), BytesSource(DATA), pushed=False, background=True)
    assert end.sent() == []


def test_blobs_without_credit_together_send_no_more_than_their_receiver_keeps() -> None:
    end = End()
    source = BytesSource(bytes(1 << 20))
    for version in range(20):
        end.transfers.begin(update(version), source, pushed=True)
    assert sum(length for _, _, length in end.sent()) == EARLY_BYTES


def test_a_receiver_tells_what_it_keeps_and_the_sender_keeps_to_it() -> None:
    end = End()
    end.transfers.credited(Credit(blob=update(99), received=0, limit=5, early=6 << 20), 0.0)
    for version in range(20):
        end.transfers.begin(update(version), BytesSource(bytes(1 << 20)), pushed=True)
    assert sum(length for _, _, length in end.sent()) == 6 << 20
    end.transfers.credited(Credit(blob=update(0), received=1 << 20, limit=1 << 20, early=5 << 20), 0.0)
    assert end.sent() == [], "5 MiB are on their way"


def test_no_more_is_in_flight_than_the_window_whatever_credit_allows() -> None:
    end = End()
    end.transfers.begin(update(1), BytesSource(bytes(20 << 20)), pushed=True)
    end.transfers.credited(Credit(blob=update(1), received=0, limit=20 << 20), 0.0)
    assert sum(length for _, _, length in end.sent()) == INITIAL_FLIGHT
    end.transfers.credited(Credit(blob=update(1), received=0, limit=20 << 20, arrived=1 << 20), 1.0)
    assert sum(length for _, _, length in end.sent()) == 1 << 20, "what arrived beyond a gap makes room"


def test_a_declined_blob_ends_and_credit_for_an_unknown_one_is_passed_over() -> None:
    end = End()
    end.transfers.credited(Credit(blob=update(1), received=5, limit=10), 0.0)
    assert end.events == []
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.credited(Credit(blob=update(1), received=0, limit=0), 0.0)
    assert end.events == [BlobDeclined(blob=update(1))]
    assert end.sent() == []


def test_a_blob_that_is_not_what_was_announced_is_corrupt_and_forgotten() -> None:
    end = End()
    reassembly = end.transfers.expect(update(1), len(DATA), DIGEST + 1, None, 0.0)
    end.accept(frame(update(1), 0, DATA))
    assert end.events == [BlobCorrupt(blob=update(1))]
    assert reassembly.received == 0


def test_a_chunk_beyond_the_size_is_a_remote_error() -> None:
    end = End()
    end.transfers.expect(update(1), 1000, 0, None, 0.0)
    end.accept(frame(update(1), 999, b"x"))
    with pytest.raises(RemoteProtocolError):
        end.transfers.admit(frame(update(1), 1000, b"x"))


def test_early_chunks_beyond_the_announced_size_are_dropped() -> None:
    end = End()
    end.accept(frame(update(1), 0, DATA + b"more"))
    end.transfers.expect(update(1), len(DATA), DIGEST, None, 0.0)
    assert end.credits[0].received == 0
    end.transfers.check()


def test_a_transfer_resumes_where_the_last_session_ended() -> None:
    end = End()
    reassembly = end.transfers.expect(delta(1), len(DATA), DIGEST, None, 0.0)
    end.accept(frame(delta(1), 0, DATA[:300]))

    after = End()
    assert after.transfers.expect(delta(1), len(DATA), DIGEST, reassembly, 9.0) is reassembly
    assert after.credits == [Credit(blob=delta(1), received=300, limit=1000)]
    after.accept(frame(delta(1), 300, DATA[300:]))
    assert after.events == [BlobReceived(blob=delta(1), data=bytearray(DATA))]


@pytest.mark.parametrize(("size", "digest"), [(len(DATA), DIGEST + 1), (len(DATA) - 1, DIGEST)])
def test_nothing_is_resumed_when_size_or_digest_differ(size: int, digest: int) -> None:
    held = Reassembly(len(DATA), DIGEST)
    held.add(0, memoryview(DATA)[:300])
    end = End()
    assert end.transfers.expect(delta(1), size, digest, held, 0.0) is not held
    assert end.credits[0].received == 0


def test_a_cancelled_blob_is_declined_and_its_late_chunks_dropped() -> None:
    end = End()
    end.transfers.expect(update(1), len(DATA), DIGEST, None, 0.0)
    end.accept(frame(update(1), 0, DATA[:300]))
    end.transfers.cancel(update(1))
    assert end.credits[-1] == Credit(blob=update(1), received=300, limit=0)
    end.accept(frame(update(1), 0, DATA))
    end.transfers.expect(update(1), len(DATA), DIGEST, None, 0.0)
    assert end.credits[-1].received == 0
    assert end.events == []
    for version in range(2, 2000):  # unseen; they are remembered within a bound
        end.transfers.cancel(update(version))
    assert end.credits[-1] == Credit(blob=update(1999), received=0, limit=0)
    end.transfers.check()


def test_early_chunks_are_bounded_in_bytes_and_number_and_the_newest_are_kept() -> None:
    end, chunk = End(), 1 << 20
    for version in range(6):
        end.accept(frame(update(version), 0, bytes(chunk)))
    for version in range(6):
        end.transfers.expect(update(version), 2 * chunk, 0, None, 0.0)
    assert [credit.received for credit in end.credits] == [0, 0, *[chunk] * 4]
    for version in range(100, 102 + EARLY_FRAMES):
        end.accept(frame(update(version), 0, b"x"))
    for version in (101, 102):
        end.transfers.expect(update(version), 2, 0, None, 0.0)
    assert [credit.received for credit in end.credits[6:]] == [0, 1]


def test_what_a_receiver_keeps_follows_the_rate_at_which_it_receives() -> None:
    end, size = End(early_pool_bytes=10 << 20), 64 << 20
    end.transfers.expect(update(1), size, 0, None, 0.0)
    for n in range(8):
        end.accept(frame(update(1), n << 20, bytes(1 << 20)), 0.1 * n)
    assert end.credits[-1].early == EARLY_BYTES
    for n in range(8, 16):
        end.accept(frame(update(1), n << 20, bytes(1 << 20)), 0.8 + 0.05 * (n - 8))
    assert end.transfers.early_bytes == pytest.approx(5 << 20, rel=0.01)
    assert end.credits[-1].early == end.transfers.early_bytes
    for n in range(16, 32):
        end.accept(frame(update(1), n << 20, bytes(1 << 20)), 1.25 + 0.01 * (n - 16))
    assert end.credits[-1].early == end.transfers.early_bytes == 10 << 20, "its share is the most"


def test_a_credit_reports_256_kib_or_what_has_waited_a_quarter_of_a_second() -> None:
    end = End()
    end.transfers.expect(update(1), 1 << 20, 0, None, 0.0)
    end.credits.clear()
    end.accept(frame(update(1), 0, bytes(200 << 10)), 0.1)
    assert end.credits == [] and end.transfers.next_timer() == 0.25
    end.accept(frame(update(1), 200 << 10, bytes(56 << 10)), 0.2)
    assert [credit.received for credit in end.credits] == [256 << 10] and end.transfers.next_timer() is None
    end.accept(frame(update(1), 300 << 10, bytes(1000)), 0.3)
    end.transfers.handle_timer(0.45)
    assert [(c.received, c.arrived) for c in end.credits[1:]] == [(256 << 10, (256 << 10) + 1000)]
    end.accept(frame(update(1), 256 << 10, bytes(1000)), 0.9)
    assert end.credits[-1].received == (256 << 10) + 1000, "on a thin link each chunk"


def test_many_blobs_at_once_are_reported_in_smaller_pieces() -> None:
    """The windows are the session's: many blobs of less than is worth a Credit could fill them."""
    end = End(early_pool_bytes=64 << 20)
    for version in range(8):
        end.transfers.expect(update(version), 64 << 20, 0, None, 0.0)
    end.accept(frame(update(0), 0, bytes(4 << 20)), 0.0)
    for n in range(1, 8):
        end.accept(frame(update(0), n << 22, bytes(4 << 20)), 0.05 * n)
    assert end.transfers.early_bytes > 16 << 20
    end.credits.clear()
    end.accept(frame(update(1), 0, bytes(256 << 10)), 0.36)
    assert end.credits[-1].received == 256 << 10


def test_cancelling_what_is_sent_tells_no_peer() -> None:
    end = End()
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.cancel(update(1))
    assert end.sent() == []
    assert end.credits == []


def test_a_background_blob_has_its_turn_when_no_other_has_credit() -> None:
    """R: a joiner's snapshot never delays an update of its own session."""
    end = End(chunk_bytes=400)
    end.transfers.begin(update(9), BytesSource(DATA), pushed=False, background=True)
    end.transfers.credited(Credit(blob=update(9), received=0, limit=1000), 0.0)
    end.transfers.begin(update(2), BytesSource(DATA), pushed=True)
    assert not end.transfers.waits(0.0)
    assert end.sent(4) == [(2, 0, 400), (2, 400, 400), (2, 800, 200), (9, 0, 400)]
    assert end.transfers.waits(0.0)
    end.transfers.begin(update(1), BytesSource(DATA[:400]), pushed=True)
    assert not end.transfers.waits(0.0)
    assert end.sent() == [(1, 0, 400), (9, 400, 400), (9, 800, 200)]


def test_background_blobs_wait_where_they_are_not_asked_for() -> None:
    end = End(chunk_bytes=400)
    end.transfers.begin(update(9), BytesSource(DATA), pushed=False, background=True)
    end.transfers.credited(Credit(blob=update(9), received=0, limit=1000), 0.0)
    assert end.transfers.next_chunk(0.0, background=False) is None
    assert end.transfers.live_in_flight == 0
    assert end.sent(1) == [(9, 0, 400)]
    assert end.transfers.live_in_flight == 0
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    assert end.transfers.next_chunk(0.0, background=False) is not None
    assert end.transfers.live_in_flight == 400


def test_an_expected_blob_that_stands_still_is_declined_and_one_that_moves_never() -> None:
    """Time without progress counts, not time in all; what was here already is no progress."""
    end = End(idle_s=30.0)
    end.transfers.expect(delta(1), len(DATA), DIGEST, None, 0.0)
    for i in range(20):
        now = 29.0 * i
        end.accept(frame(delta(1), 10 * i, DATA[10 * i : 10 * i + 10]), now)
        end.transfers.handle_timer(now)
    assert end.events == [] and end.transfers.next_timer() == now + 30.0
    end.accept(frame(delta(1), 0, DATA[:200]), now + 29.0)
    end.transfers.handle_timer(now + 30.0)
    assert end.events == [BlobIdle(blob=delta(1))]
    assert end.credits[-1].limit == 0 and end.transfers.next_timer() is None


def test_blobs_that_share_a_lane_may_each_wait_for_the_others() -> None:
    end = End(idle_s=30.0)
    for seq in (1, 2, 3):
        end.transfers.expect(delta(seq), len(DATA), DIGEST, None, 0.0)
    assert end.transfers.next_timer() == 90.0
    end.transfers.clock_jumped(5.0)
    assert end.transfers.next_timer() == 95.0


@pytest.mark.parametrize("size", [0, 1001])
def test_a_blob_of_no_size_or_beyond_the_limit_is_not_expected(size: int) -> None:
    end = End(max_blob_bytes=1000)
    with pytest.raises(LocalProtocolError):
        end.transfers.expect(update(2), size, 0, None, 0.0)
    assert end.credits == []


def test_a_limit_that_is_reached_is_told_from_a_blob_that_is_under_way() -> None:
    """Whoever takes one for the other drops what it should send, or keeps what it should not."""
    end = End(max_blobs=1)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.expect(update(7), 1000, 0, None, 0.0)
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (AlreadyUnderWay, lambda: end.transfers.queue(update(1), BytesSource(DATA))),
        (AlreadyUnderWay, lambda: end.transfers.expect(update(7), 1000, 0, None, 0.0)),
        (LimitReached, lambda: end.transfers.expect(update(8), 1000, 0, None, 0.0)),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert len(end.credits) == 1


def test_what_is_too_many_at_once_waits_in_order_and_what_is_pushed_leaves_room_for_what_is_offered() -> None:
    """A snapshot is what ends a queue of updates: they must not keep it from being offered."""
    end, announced = End(max_active=2), list[BlobId]()

    def begin_next() -> None:
        end.transfers.begin_next(lambda offer: announced.append(offer.blob))

    for n in range(300):
        end.transfers.queue(update(n), BytesSource(DATA))
    for n in range(4):
        end.transfers.queue(delta(n), BytesSource(DATA), offer_of(delta(n), DATA))
    begin_next()
    assert sum(end.transfers.unacknowledged(BlobKind.UPDATE).values()) == 300 * len(DATA)
    assert len(end.transfers.waiting) == 300 and announced == [delta(0), delta(1)]
    with pytest.raises(AlreadyUnderWay):
        end.transfers.queue(delta(2), BytesSource(DATA), offer_of(delta(2), DATA))
    end.transfers.cancel(delta(2))
    end.transfers.credited(Credit(blob=delta(0), received=0, limit=0), 0.0)
    end.transfers.drop(delta(1))
    begin_next()
    assert announced == [delta(0), delta(1), delta(3)] and end.credits == []


def test_a_blob_that_cannot_be_announced_still_waits() -> None:
    end = End()
    end.transfers.queue(delta(1), BytesSource(DATA), offer_of(delta(1), DATA))

    def full(offer: Offer) -> None:
        raise LimitReached("too many messages")

    with pytest.raises(LimitReached):
        end.transfers.begin_next(full)
    assert end.transfers.waiting == [delta(1)] and end.sent() == []
