"""farloop.wire.transfer. Covers protocol Q (resume on an equal digest), R (pushed updates), T, W (events per blob)."""

import pytest

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire.blobs import BytesSource, Reassembly, blob_digest, blob_key
from farloop.wire.events import BlobCorrupt, BlobDeclined, BlobIdle, BlobReceived, BlobSent, SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.limits import EARLY_BYTES, EARLY_FRAMES, INITIAL_CREDIT, Limits, Timing
from farloop.wire.messages import Credit
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, RemoteProtocolError
from farloop.wire.traffic import Traffic
from farloop.wire.transfer import Transfers

DATA = bytes(range(250)) * 4
DIGEST = blob_digest(DATA)


def update(version: int) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=0, version=version)


def delta(seq: int) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=seq)


def frame(blob: BlobId, offset: int, chunk: bytes) -> BulkFrame:
    return BulkFrame(run=1, epoch=1, key=blob_key(blob), offset=offset, chunk=memoryview(chunk))


class End:
    """Transfers, and what they let out."""

    def __init__(self, **limits: int) -> None:
        self.events: list[SessionEvent] = []
        self.credits: list[Credit] = []
        self.traffic = Traffic()
        self.transfers = Transfers(Limits(**limits), Timing(), self.traffic, self.events.append, self.credits.append)

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


def test_credit_for_an_unknown_blob_is_passed_over() -> None:
    end = End()
    end.transfers.credited(Credit(blob=update(1), received=5, limit=10), 0.0)
    assert end.events == []


def test_a_declined_blob_ends() -> None:
    end = End()
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


def test_what_was_in_flight_is_sent_again_at_once_when_a_lane_is_lost() -> None:
    end = End(chunk_bytes=400)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    assert end.sent(2) == [(1, 0, 400), (1, 400, 400)]
    end.transfers.lane_lost()
    assert end.sent() == [(1, 0, 400), (1, 400, 400), (1, 800, 200)]


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


def test_a_blob_that_came_whole_before_its_announcement_is_received_at_once() -> None:
    end = End()
    end.accept(frame(update(1), 0, DATA))
    end.transfers.expect(update(1), len(DATA), DIGEST, None, 0.0)
    assert end.events == [BlobReceived(blob=update(1), data=bytearray(DATA))]
    assert end.credits == [Credit(blob=update(1), received=1000, limit=1000)]


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


def test_an_announced_blob_can_be_declined_unseen() -> None:
    end = End()
    end.transfers.cancel(update(1))
    assert end.credits == [Credit(blob=update(1), received=0, limit=0)]


def test_cancelling_what_is_sent_tells_nobody() -> None:
    end = End()
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.cancel(update(1))
    assert end.sent() == []
    assert end.credits == []


def test_illegal_requests_change_nothing() -> None:
    end = End(max_blobs=2, max_pushed_blobs=2, max_blob_bytes=1000)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.expect(update(1), 1000, 0, None, 0.0)
    for blob, size in [(update(1), 1000), (update(2), 1001), (update(2), 0)]:
        with pytest.raises(LocalProtocolError):
            end.transfers.expect(blob, size, 0, None, 0.0)
    with pytest.raises(LocalProtocolError):
        end.transfers.check_room(update(1), pushed=True)
    end.transfers.begin(update(2), BytesSource(DATA), pushed=True)
    end.transfers.expect(update(2), 1000, 0, None, 0.0)
    with pytest.raises(LocalProtocolError):
        end.transfers.check_room(update(3), pushed=True)
    with pytest.raises(LocalProtocolError):
        end.transfers.expect(update(3), 1000, 0, None, 0.0)
    assert len(end.credits) == 2


def test_finished_blobs_are_remembered_within_a_bound() -> None:
    end = End()
    for version in range(2000):
        end.transfers.cancel(update(version))
    end.transfers.check()


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
    end = End()
    end.transfers = Transfers(Limits(), Timing(), end.traffic, end.events.append, end.credits.append, 30.0)
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
    end = End()
    end.transfers = Transfers(Limits(), Timing(), end.traffic, end.events.append, end.credits.append, 30.0)
    for seq in (1, 2, 3):
        end.transfers.expect(delta(seq), len(DATA), DIGEST, None, 0.0)
    assert end.transfers.next_timer() == 90.0
    end.transfers.clock_jumped(5.0)
    assert end.transfers.next_timer() == 95.0


def test_a_limit_that_is_reached_is_told_from_a_blob_that_is_under_way() -> None:
    """Whoever takes one for the other drops what it should send, or keeps what it should not."""
    end = End(max_blobs=1, max_pushed_blobs=1)
    end.transfers.check_room(delta(1))
    end.transfers.begin(delta(1), BytesSource(DATA), pushed=False)
    end.transfers.begin(update(1), BytesSource(DATA), pushed=True)
    end.transfers.expect(update(7), 1000, 0, None, 0.0)
    with pytest.raises(AlreadyUnderWay):
        end.transfers.check_room(delta(1))
    with pytest.raises(LimitReached):
        end.transfers.check_room(delta(2))
    with pytest.raises(LimitReached):
        end.transfers.check_room(update(2), pushed=True)
    with pytest.raises(AlreadyUnderWay):
        end.transfers.expect(update(7), 1000, 0, None, 0.0)
    with pytest.raises(LimitReached):
        end.transfers.expect(update(8), 1000, 0, None, 0.0)


def test_what_is_pushed_leaves_room_for_what_is_offered() -> None:
    """A snapshot is what ends a queue of updates: they must not keep it from being offered."""
    end = End(max_blobs=1, max_pushed_blobs=300)
    for version in range(300):
        end.transfers.begin(update(version), BytesSource(DATA), pushed=True)
    end.transfers.check_room(delta(1))
    assert sum(end.transfers.unacknowledged(BlobKind.UPDATE).values()) == 300 * len(DATA)
