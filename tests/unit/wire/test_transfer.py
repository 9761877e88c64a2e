"""farloop.wire.blobs and farloop.wire.transfer: keys and reassembly of blobs, credit, and what an end sends and takes.

Covers protocol Q (credit, and resume on an equal digest), R (pushed updates), T (any lane carries any range,
unacknowledged bytes are bounded by the window) and W (events per blob).
"""

import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_pairs import delta, update

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire.blobs import MAX_ISLANDS, BytesSource, Reassembly, blob_digest, blob_key
from farloop.wire.events import BlobCorrupt, BlobDeclined, BlobIdle, BlobReceived, BlobSent, SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.limits import EARLY_BYTES, EARLY_FRAMES, INITIAL_CREDIT, Limits, Timing
from farloop.wire.messages import Credit
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, RemoteProtocolError
from farloop.wire.traffic import Traffic
from farloop.wire.transfer import Incoming, Outgoing, Pace, Transfers

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


@pytest.mark.parametrize(
    ("pieces", "verifies"),
    [
        ([(0, b"goo"), (0, b"bad"), (3, b"d")], True),  # a duplicate with other bytes does not change the prefix
        ([(0, b"goof")], False),
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

TIMING = Timing(rto_s=2.0, window_s=1.0)
LIMITS = Limits(window_bytes=INITIAL_CREDIT, max_window_bytes=4 * INITIAL_CREDIT)
HALF = INITIAL_CREDIT // 2


def outgoing(size: int, limit: int = 0) -> Outgoing:
    return Outgoing(update(), BytesSource(bytes(size)), limit, Pace(TIMING))


def chunks(out: Outgoing, chunk_bytes: int, now: float) -> list[tuple[int, int]]:
    sent = []
    while (chunk := out.next_chunk(chunk_bytes, out.in_flight, now)) is not None:
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


def test_the_time_out_follows_the_pace_and_the_bytes_in_flight() -> None:
    pace = Pace(TIMING)
    assert pace.timeout_s(1) == 2.0
    assert pace.timeout_s(INITIAL_CREDIT) == 16.0, "nothing is known yet: the slowest link is assumed"
    for _ in range(20):
        pace.measured(num_bytes=INITIAL_CREDIT, seconds=0.5)
    assert pace.timeout_s(INITIAL_CREDIT) == 2.0
    assert 7.9 < pace.timeout_s(8 * INITIAL_CREDIT) < 8.1
    for _ in range(20):
        pace.measured(num_bytes=10, seconds=5.0)
    assert pace.timeout_s(INITIAL_CREDIT) == 16.0, "a small blob's round trip does not make the link slow"


def test_a_chunk_is_timed_from_its_leaving_to_its_acknowledgement() -> None:
    pace = Pace(TIMING)
    out = Outgoing(update(), BytesSource(bytes(1 << 20)), 0, pace)
    out.credit(0, 1 << 20, 0.0)
    assert out.next_chunk(1 << 19, 1 << 19, 0.0) is not None
    out.credit(1 << 18, 1 << 20, 0.5)
    assert pace.timeout_s(1 << 20) == 32.0, "half a chunk is none"
    out.credit(1 << 19, 1 << 20, 1.0)
    mean = ((64 << 10) + (1 << 20)) / 2
    assert pace.timeout_s(1 << 20) == 2 * (1 << 20) / mean


def test_the_acknowledgement_of_bytes_that_were_sent_twice_measures_nothing() -> None:
    pace = Pace(TIMING)
    out = Outgoing(update(), BytesSource(bytes(1 << 20)), 0, pace)
    out.credit(0, 1 << 20, 0.0)
    chunks(out, 1 << 18, 0.0)
    out.rewind()
    chunks(out, 1 << 18, 9.0)
    out.credit(1 << 20, 1 << 20, 9.1)
    assert out.done
    assert pace.timeout_s(1 << 20) == 32.0


def test_before_the_first_credit_nothing_is_sent_twice() -> None:
    out = outgoing(100, limit=10)
    assert chunks(out, 30, 0.0) == [(0, 10)]
    assert out.early_bytes == 10
    out.credit(0, 100, 5.0)
    assert out.early_bytes == 0
    assert out.deadline() == 7.0


def feed(incoming: Incoming, num_bytes: int) -> None:
    reassembly = incoming.reassembly
    reassembly.add(reassembly.received, memoryview(bytes(num_bytes)))


def incoming(size: int, limits: Limits = LIMITS) -> tuple[Incoming, Credit]:
    """A blob to come, and the first credit for it."""
    found = Incoming(update(), Reassembly(size, 0), limits, TIMING, 0.0)
    return found, found.first_credit()


def renewed(coming: Incoming, num_bytes: int, now: float) -> tuple[int, int] | None:
    """(received, limit) of the credit that follows so many bytes; None: there is none yet."""
    reassembly = coming.reassembly
    reassembly.add(reassembly.received, memoryview(bytes(num_bytes)))
    credit = coming.renewed_credit(now)
    return credit and (credit.received, credit.limit)


def test_credit_is_renewed_at_each_half_window_and_at_the_end() -> None:
    coming, first = incoming(2 * INITIAL_CREDIT)
    assert (first.received, first.limit) == (0, INITIAL_CREDIT)
    assert renewed(coming, HALF - 1, 60.0) is None
    assert renewed(coming, 1, 60.0) == (HALF, HALF + INITIAL_CREDIT)
    assert coming.renewed_credit(60.0) is None
    assert renewed(coming, 3 * HALF - 1, 120.0) is not None
    assert renewed(coming, 1, 120.0) == (2 * INITIAL_CREDIT, 2 * INITIAL_CREDIT)


def test_the_window_doubles_up_to_its_bound_while_it_holds_less_than_a_second() -> None:
    coming, _ = incoming(100 * INITIAL_CREDIT)
    windows = []
    for step in range(1, 5):
        received, limit = renewed(coming, 2 * INITIAL_CREDIT, 0.01 * step) or (0, 0)
        windows.append((limit - received) // INITIAL_CREDIT)
    assert windows == [2, 4, 4, 4]
    thin, _ = incoming(100 * INITIAL_CREDIT)
    assert renewed(thin, HALF, 1.0) == (HALF, HALF + INITIAL_CREDIT), "it stays small on a thin link"


def test_a_window_holds_two_chunks_at_least() -> None:
    _, first = incoming(100 * INITIAL_CREDIT, Limits(chunk_bytes=4 * INITIAL_CREDIT))
    assert first.limit == 8 * INITIAL_CREDIT


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
            found.append((chunk[0].version, chunk[1], len(chunk[2])))
        self.transfers.check()
        return found


def test_blobs_take_turns_by_chunk() -> None:
    end = End(chunk_bytes=400)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.begin(update(2), BytesSource(DATA), pushed=True)
    assert end.sent() == [(1, 0, 400), (2, 0, 400), (1, 400, 400), (2, 400, 400), (1, 800, 200), (2, 800, 200)]


def test_an_offered_blob_waits_for_credit_and_ends_when_all_has_arrived() -> None:
    end = End(chunk_bytes=400)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=False)
    assert end.sent() == []
    end.transfers.credited(Credit(blob=update(1), received=0, limit=500), 0.0)
    assert end.sent() == [(1, 0, 400), (1, 400, 100)]
    end.transfers.credited(Credit(blob=update(1), received=500, limit=1000), 0.0)
    assert end.sent() == [(1, 500, 400), (1, 900, 100)]
    assert end.events == []
    end.transfers.credited(Credit(blob=update(1), received=1000, limit=1000), 0.0)
    assert end.events == [BlobSent(blob=update(1))]
    assert end.transfers.next_timer() is None


def test_pushed_blobs_together_send_no_more_ahead_than_a_receiver_keeps() -> None:
    end = End()
    source = BytesSource(bytes(2 * INITIAL_CREDIT))
    for version in range(20):
        end.transfers.begin(update(version), source, pushed=True)
    assert sum(length for _, _, length in end.sent()) == EARLY_BYTES
    end.transfers.credited(Credit(blob=update(0), received=0, limit=2 * INITIAL_CREDIT), 0.0)
    assert sum(length for version, _, length in end.sent() if version == 0) == 3 * INITIAL_CREDIT // 2


def test_a_declined_blob_ends_and_credit_for_an_unknown_one_is_passed_over() -> None:
    end = End()
    end.transfers.credited(Credit(blob=update(1), received=5, limit=10), 0.0)
    assert end.events == []
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.credited(Credit(blob=update(1), received=0, limit=0), 0.0)
    assert end.events == [BlobDeclined(blob=update(1))]
    assert end.sent() == []


def test_a_blob_without_progress_is_rewound() -> None:
    end = End(chunk_bytes=400)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=False)
    end.transfers.credited(Credit(blob=update(1), received=0, limit=1000), 0.0)
    end.sent()
    assert end.transfers.next_timer() == 2.0
    end.transfers.handle_timer(1.9)
    assert end.sent() == []
    end.transfers.handle_timer(2.0)
    assert end.sent() == [(1, 0, 400), (1, 400, 400), (1, 800, 200)]
    assert end.traffic.rewinds == 1


def test_an_expected_blob_arrives_from_chunks_in_any_order() -> None:
    end = End()
    end.transfers.expect(update(1), len(DATA), DIGEST, None, 0.0)
    assert end.credits == [Credit(blob=update(1), received=0, limit=1000)]
    end.accept(frame(update(1), 600, DATA[600:]))
    end.accept(frame(update(1), 0, DATA[:700]))
    assert end.credits[-1] == Credit(blob=update(1), received=1000, limit=1000)
    assert end.events == [BlobReceived(blob=update(1), data=bytearray(DATA))]
    assert end.traffic.received_blobs[BlobKind.UPDATE].frames == 2


def test_a_blob_that_is_not_what_was_announced_is_corrupt_and_forgotten() -> None:
    end = End()
    reassembly = end.transfers.expect(update(1), len(DATA), DIGEST + 1, None, 0.0)
    end.accept(frame(update(1), 0, DATA))
    assert end.events == [BlobCorrupt(blob=update(1))]
    assert reassembly.received == 0


def test_a_chunk_beyond_the_credit_is_a_remote_error() -> None:
    end = End()
    end.transfers.expect(update(1), 10 * INITIAL_CREDIT, 0, None, 0.0)
    end.accept(frame(update(1), INITIAL_CREDIT - 1, b"x"))
    with pytest.raises(RemoteProtocolError):
        end.transfers.admit(frame(update(1), INITIAL_CREDIT, b"x"))


def test_chunks_that_overtake_the_announcement_count() -> None:
    end = End()
    end.accept(frame(update(1), 0, DATA[:400]))
    end.accept(frame(update(2), 0, b"other"))
    end.accept(frame(update(1), 400, DATA[400:800]))
    assert end.traffic.stray.frames == 3
    end.transfers.expect(update(1), len(DATA), DIGEST, None, 0.0)
    end.transfers.check()
    assert end.credits == [Credit(blob=update(1), received=800, limit=1000)]
    assert end.traffic.stray.frames == 1
    assert end.traffic.received_blobs[BlobKind.UPDATE].bytes == 2 * 500
    end.accept(frame(update(1), 800, DATA[800:]))
    assert end.events == [BlobReceived(blob=update(1), data=bytearray(DATA))]


def test_early_chunks_beyond_the_announced_size_are_dropped() -> None:
    end = End()
    end.accept(frame(update(1), 0, DATA + b"more"))
    end.transfers.expect(update(1), len(DATA), DIGEST, None, 0.0)
    assert end.credits[0].received == 0
    end.transfers.check()


def test_early_chunks_are_bounded_in_bytes_and_number() -> None:
    end = End()
    for version in range(EARLY_BYTES // INITIAL_CREDIT + 2):
        end.accept(frame(update(version), 0, bytes(INITIAL_CREDIT)))
    for version in range(EARLY_FRAMES + 2):
        end.accept(frame(update(version), 0, b"x"))
    end.accept(frame(update(5000), INITIAL_CREDIT, b"x"))
    end.transfers.expect(update(5000), INITIAL_CREDIT + 1, 0, None, 0.0)
    end.accept(frame(update(5000), 0, bytes(INITIAL_CREDIT)))
    assert end.credits[-1].received == INITIAL_CREDIT, "nobody may send that far ahead"


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


def test_cancelling_what_is_sent_tells_nobody() -> None:
    end = End()
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.cancel(update(1))
    assert end.sent() == []
    assert end.credits == []


def test_a_background_blob_has_its_turn_when_no_other_has_credit() -> None:
    """R: a joiner's snapshot never delays an update of its own session."""
    end = End(chunk_bytes=400)
    end.transfers.begin(update(9), BytesSource(DATA), pushed=True, background=True)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=False)
    end.transfers.begin(update(2), BytesSource(DATA), pushed=True)
    assert not end.transfers.background_waits
    assert end.sent(4) == [(2, 0, 400), (2, 400, 400), (2, 800, 200), (9, 0, 400)]
    assert end.transfers.background_waits
    end.transfers.credited(Credit(blob=update(1), received=0, limit=400), 0.0)
    assert not end.transfers.background_waits
    assert end.sent() == [(1, 0, 400), (9, 400, 400), (9, 800, 200)]


def test_background_blobs_wait_where_they_are_not_asked_for() -> None:
    end = End(chunk_bytes=400)
    end.transfers.begin(update(9), BytesSource(DATA), pushed=True, background=True)
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
    end = End(max_blobs=1, max_pushed_blobs=1)
    end.transfers.check_room(delta(1))
    end.transfers.begin(delta(1), BytesSource(DATA), pushed=False)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.expect(update(7), 1000, 0, None, 0.0)
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (AlreadyUnderWay, lambda: end.transfers.check_room(delta(1))),
        (LimitReached, lambda: end.transfers.check_room(delta(2))),
        (LimitReached, lambda: end.transfers.check_room(update(2), pushed=True)),
        (AlreadyUnderWay, lambda: end.transfers.expect(update(7), 1000, 0, None, 0.0)),
        (LimitReached, lambda: end.transfers.expect(update(8), 1000, 0, None, 0.0)),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert len(end.credits) == 1


def test_what_is_pushed_leaves_room_for_what_is_offered() -> None:
    """A snapshot is what ends a queue of updates: they must not keep it from being offered."""
    end = End(max_blobs=1, max_pushed_blobs=300)
    for version in range(300):
        end.transfers.begin(update(version), BytesSource(DATA), pushed=True)
    end.transfers.check_room(delta(1))
    assert sum(end.transfers.unacknowledged(BlobKind.UPDATE).values()) == 300 * len(DATA)
