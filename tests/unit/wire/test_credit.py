"""farloop.wire.transfer. Covers protocol Q (Credit) and T (unacknowledged bytes are bounded by the window)."""

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BytesSource, Reassembly
from farloop.wire.limits import INITIAL_CREDIT, Limits, Timing
from farloop.wire.transfer import Incoming, Outgoing, Pace

BLOB = BlobId(kind=BlobKind.UPDATE, fragment=0, version=1)
TIMING = Timing(rto_s=2.0, window_s=1.0)
LIMITS = Limits(window_bytes=INITIAL_CREDIT, max_window_bytes=4 * INITIAL_CREDIT)
HALF = INITIAL_CREDIT // 2


def outgoing(size: int, limit: int = 0) -> Outgoing:
    return Outgoing(BLOB, BytesSource(bytes(size)), limit, Pace(TIMING))


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


def test_a_receiver_that_holds_a_prefix_is_sent_the_rest_only() -> None:
    out = outgoing(100, limit=10)
    assert chunks(out, 30, 0.0) == [(0, 10)]
    out.credit(50, 100, 0.0)
    assert chunks(out, 30, 0.0) == [(50, 30), (80, 20)]


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
    out = Outgoing(BLOB, BytesSource(bytes(1 << 20)), 0, pace)
    out.credit(0, 1 << 20, 0.0)
    assert out.next_chunk(1 << 19, 1 << 19, 0.0) is not None
    out.credit(1 << 18, 1 << 20, 0.5)
    assert pace.timeout_s(1 << 20) == 32.0, "half a chunk is none"
    out.credit(1 << 19, 1 << 20, 1.0)
    mean = ((64 << 10) + (1 << 20)) / 2
    assert pace.timeout_s(1 << 20) == 2 * (1 << 20) / mean


def test_the_acknowledgement_of_bytes_that_were_sent_twice_measures_nothing() -> None:
    pace = Pace(TIMING)
    out = Outgoing(BLOB, BytesSource(bytes(1 << 20)), 0, pace)
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


def test_credit_is_renewed_at_each_half_window_and_at_the_end() -> None:
    incoming = Incoming(BLOB, Reassembly(2 * INITIAL_CREDIT, 0), LIMITS, TIMING, 0.0)
    first = incoming.first_credit()
    assert (first.received, first.limit) == (0, INITIAL_CREDIT)
    feed(incoming, HALF - 1)
    assert incoming.renewed_credit(60.0) is None
    feed(incoming, 1)
    renewed = incoming.renewed_credit(60.0)
    assert renewed is not None
    assert (renewed.received, renewed.limit) == (HALF, HALF + INITIAL_CREDIT)
    assert incoming.renewed_credit(60.0) is None
    feed(incoming, 3 * HALF - 1)
    assert incoming.renewed_credit(120.0) is not None
    feed(incoming, 1)
    last = incoming.renewed_credit(120.0)
    assert last is not None
    assert last.received == last.limit == 2 * INITIAL_CREDIT


def test_the_window_doubles_up_to_its_bound_while_it_holds_less_than_a_second() -> None:
    incoming = Incoming(BLOB, Reassembly(100 * INITIAL_CREDIT, 0), LIMITS, TIMING, 0.0)
    incoming.first_credit()
    now, windows = 0.0, []
    for _ in range(4):
        now += 0.01
        feed(incoming, 2 * INITIAL_CREDIT)
        credit = incoming.renewed_credit(now)
        assert credit is not None
        windows.append((credit.limit - credit.received) // INITIAL_CREDIT)
    assert windows == [2, 4, 4, 4]


def test_the_window_stays_small_on_a_thin_link() -> None:
    incoming = Incoming(BLOB, Reassembly(100 * INITIAL_CREDIT, 0), LIMITS, TIMING, 0.0)
    incoming.first_credit()
    feed(incoming, HALF)
    credit = incoming.renewed_credit(1.0)
    assert credit is not None
    assert credit.limit - credit.received == INITIAL_CREDIT


def test_a_window_holds_two_chunks_at_least() -> None:
    limits = Limits(chunk_bytes=4 * INITIAL_CREDIT)
    incoming = Incoming(BLOB, Reassembly(100 * INITIAL_CREDIT, 0), limits, TIMING, 0.0)
    assert incoming.first_credit().limit == 8 * INITIAL_CREDIT
