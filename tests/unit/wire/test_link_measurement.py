"""What is known of a link: its rate by what arrives, echoes and probes, TCP_INFO, and the bytes on the connections."""

import heapq
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_pairs import offer_of, opened, update
from slow_start import SlowStart
from tcp_infos import resent

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.events import BlobReceived, BlobSent
from farloop.wire.frames import Buffer
from farloop.wire.limits import Limits
from farloop.wire.link_measurement import DIGEST, INFO_BYTES, Noise, Sink, lacks_large, large_lost, parse
from farloop.wire.messages import Connection, Offer
from farloop.wire.meter import Average, Burst, Insufficient, Measured, Meter, burst_of, enough, judge
from farloop.wire.session import Session
from farloop.wire.traffic import Traffic, wire_bytes

# --- What is believed of a link's rate, and what is not

MBIT = 1e6 / 8
PROBE_BYTES = 32 << 20


def measured(link: SlowStart, budget: int) -> Measured | Insufficient:
    """As a receiver does it: until it knows enough, or the budget is used."""
    meter, burst = Meter(), None
    for at, num_bytes in link.arrivals(budget):
        meter.arrived(num_bytes, at)
        burst = meter.burst()
        if burst is not None and enough(burst, link.rtt_s):
            break
    return Insufficient(why="nothing") if burst is None else judge(burst, link.rtt_s)


@pytest.mark.parametrize("rtt_ms", [1, 5, 20, 100, 300])
@pytest.mark.parametrize("mbit", [10, 100, 1000, 10_000])
def test_a_probe_finds_the_rate_within_a_tenth_from_a_millisecond_to_300(mbit: int, rtt_ms: int) -> None:
    link = SlowStart(bytes_per_s=mbit * MBIT, rtt_s=rtt_ms / 1e3, jitter=0.3)
    found = measured(link, max(PROBE_BYTES, int(12 * link.bdp_bytes)))
    assert isinstance(found, Measured), found
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.1)


@given(
    mbit=st.floats(10, 10_000), rtt_s=st.floats(0.001, 0.3), budget=st.integers(1 << 18, 64 << 20), seed=st.integers(0)
)
def test_with_any_budget_it_is_right_or_silent(mbit: float, rtt_s: float, budget: int, seed: int) -> None:
    link = SlowStart(bytes_per_s=mbit * MBIT, rtt_s=rtt_s)
    found = measured(link, budget)
    if isinstance(found, Measured):
        assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.1)


@settings(max_examples=25)  # tens of thousands of arrivals each
@given(mbit=st.floats(10, 10_000), rtt_s=st.floats(0.001, 0.3), share=st.floats(0.01, 1.0), bucket=st.floats(0, 1))
def test_less_than_one_delay_product_is_never_believed(mbit: float, rtt_s: float, share: float, bucket: float) -> None:
    link = SlowStart(
        bytes_per_s=mbit * MBIT, rtt_s=rtt_s, chunk_bytes=16 << 10, bucket_bytes=bucket * mbit * MBIT * rtt_s
    )
    assert isinstance(measured(link, max(1, int(share * link.bdp_bytes))), Insufficient)


def test_a_burst_that_a_bucket_let_through_is_not_the_links_rate() -> None:
    """A megabyte that comes at ten times the rate, all within one round trip."""
    link = SlowStart(bytes_per_s=100 * MBIT, rtt_s=0.1, chunk_bytes=64 << 10, bucket_bytes=1 << 20)
    points = [(n * 0.005, n * (64 << 10)) for n in range(16)]
    burst = burst_of(points)
    assert burst is not None and burst.half_bytes / burst.half_s > 1.04 * link.bytes_per_s
    assert isinstance(judge(burst, link.rtt_s), Insufficient)


def test_a_probe_that_is_cut_short_in_slow_start_says_why() -> None:
    found = measured(SlowStart(bytes_per_s=200 * MBIT, rtt_s=0.1), 4 << 20)
    assert isinstance(found, Insufficient)
    assert "slow start" in found.why or "not steady" in found.why


def test_a_probe_uses_no_more_time_and_bytes_than_it_needs() -> None:
    link = SlowStart(bytes_per_s=10 * MBIT, rtt_s=0.02)
    meter, used = Meter(), 0
    for at, num_bytes in link.arrivals(PROBE_BYTES):
        meter.arrived(num_bytes, at)
        used += num_bytes
        if (burst := meter.burst()) and enough(burst, link.rtt_s):
            break
    assert used < 4 << 20


def test_a_probe_that_never_gets_steady_ends_all_the_same() -> None:
    at, meter = 0.0, Meter()
    for index in range(10_000):
        at += 0.001 * 1.5 ** (index % 24)
        meter.arrived(1000, at)
        if (burst := meter.burst()) and enough(burst, 0.01):
            break
    assert at < 10.0


def test_a_rate_that_changes_on_the_way_is_not_steady() -> None:
    at, points = 0.0, [(0.0, 0)]
    for index in range(64):
        at += 0.01 if index < 48 else 0.02
        points.append((at, (index + 1) * (256 << 10)))
    burst = burst_of(points)
    assert burst is not None
    assert judge(burst, 0.01) == Insufficient(why="not steady: 210 Mbit/s, then 105")


def test_arrivals_that_come_all_at_once_are_not_timed() -> None:
    points = [(0.0, 0), *((1.0, (index + 1) * 1000) for index in range(8))]
    burst = burst_of(points)
    assert burst is not None and isinstance(judge(burst, 0.001), Insufficient)
    assert burst_of([(0.0, 0), (1.0, 5)]) is None
    meter = Meter()
    for at, _ in points:
        meter.arrived(1000, at)
    meter.end_burst()
    assert meter.pop_bursts() == [], "a busy time of infinite rate is not reported"


def test_a_long_transfer_is_remembered_in_bounded_memory() -> None:
    meter = Meter()
    for index in range(100_000):
        meter.arrived(1000, index * 0.001)
    assert len(meter._points) <= 513
    burst = meter.burst()
    assert burst is not None
    assert burst.half_bytes / burst.half_s == pytest.approx(1e6, rel=0.01)


def test_busy_times_are_apart_and_what_was_held_up_is_forgotten() -> None:
    meter = Meter()
    for begin in (0.0, 100.0, 200.0):
        for index in range(16):
            meter.arrived(1000, begin + index)
        if begin == 100.0:
            meter.forget()
        else:
            meter.end_burst()
    bursts = meter.pop_bursts()
    assert [burst.seconds for burst in bursts] == [15.0, 15.0]
    assert all(isinstance(judge(burst, 0.1), Measured) for burst in bursts)
    assert meter.pop_bursts() == []


def test_the_average_moves_slowly_and_jumps_where_three_in_a_row_agree() -> None:
    average = Average()
    assert [average.add(value) for value in (100.0, 120.0)] == [False, False]
    assert average.value == pytest.approx(106.0)
    assert [average.add(value) for value in (50.0, 106.0, 30.0)] == [False, False, False]
    fresh = Average()
    fresh.add(100.0)
    assert [fresh.add(value) for value in (20.0, 22.0, 21.0)] == [False, False, True]
    assert fresh.value == 21.0


def test_one_that_is_too_high_and_one_too_low_are_no_change() -> None:
    average = Average()
    average.add(100.0)
    assert not any(average.add(value) for value in (300.0, 10.0, 300.0, 10.0))


def test_a_burst_says_how_it_went() -> None:
    burst = burst_of([(float(n), 10 * n) for n in range(9)])
    in_all = {"num_bytes": 80, "seconds": 8.0, "third_bytes_per_s": 10.0, "fourth_bytes_per_s": 10.0}
    assert burst == Burst(half_bytes=40, half_s=4.0, half_chunks=4, **in_all)  # type: ignore[arg-type]


# --- Echoes and probes between two sessions, on a simulated link with a rate and a round trip

PROBE = BlobId(kind=BlobKind.PROBE, fragment=0, version=1)
SNAPSHOT = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=1)
UPDATE = update(2)
BUDGET = 8 << 20


class Link:
    """Carries what two sessions say: each direction has a rate, and half a round trip to cross."""

    def __init__(self, a: Session, b: Session, *, bytes_per_s: float, rtt_s: float) -> None:
        self._ends, self._bytes_per_s, self._rtt_s = (a, b), bytes_per_s, rtt_s
        self._free_at = [0.0, 0.0]
        self._flying: list[tuple[float, int, int, int, list[Buffer]]] = []
        self._sent = 0
        self.now = 0.0

    def run(self, until: float, each: Callable[[float], None] = lambda now: None) -> None:
        """Let time pass; `each` is called after everything that arrives."""
        self._transmit()
        while self._flying and self._flying[0][0] <= until:
            self.now, _, to, lane, parts = heapq.heappop(self._flying)
            self._ends[to].receive(lane, parts, self.now)
            each(self.now)
            self._transmit()
        self.now = until
        for end in self._ends:
            end.handle_timer(until)
            end.check()

    def _transmit(self) -> None:
        for sender, end in enumerate(self._ends):
            while self._free_at[sender] <= self.now + 0.001:
                if not (frames := end.outgoing(self.now, max_chunks=1)):
                    break
                for lane, parts in frames:
                    size = sum(len(part) for part in parts)
                    begins = max(self.now, self._free_at[sender])
                    self._free_at[sender] = begins + size / self._bytes_per_s
                    self._sent += 1
                    arrives = self._free_at[sender] + self._rtt_s / 2
                    heapq.heappush(self._flying, (arrives, self._sent, 1 - sender, lane, parts))


def ticks(link: Link, until: float, each: Callable[[float], None]) -> None:
    """Time in small steps, for a sender that waits for its link to be free."""
    while link.now < until:
        link.run(min(until, link.now + 0.005), each)


def test_echoes_measure_the_round_trip() -> None:
    node, coordinator = opened()
    link = Link(node, coordinator, bytes_per_s=1e9, rtt_s=0.08)
    for _ in range(3):
        coordinator.echo(link.now)
        link.run(link.now + 0.5)
    assert len(coordinator.round_trips) == 3
    assert min(coordinator.round_trips) == pytest.approx(0.08, rel=0.01)
    assert node.events() == coordinator.events() == []


def test_an_echo_without_an_answer_is_not_repeated_for_ever() -> None:
    _, coordinator = opened()
    for _ in range(100):
        coordinator.echo(0.0)
    assert len(coordinator.outgoing(0.0)) == 10


@pytest.mark.parametrize(("bytes_per_s", "rtt_s"), [(1.25e6, 0.02), (12.5e6, 0.1)])
def test_a_probe_measures_the_link_and_ends_when_it_knows_enough(bytes_per_s: float, rtt_s: float) -> None:
    node, coordinator = opened()
    link = Link(node, coordinator, bytes_per_s=bytes_per_s, rtt_s=rtt_s)
    budget = 64 << 20
    sink = node.expect(PROBE, budget, DIGEST, Sink(budget), 0.0)
    coordinator.send_blob(Offer(blob=PROBE, size=budget, digest=DIGEST), Noise(budget), background=True)
    ended: list[float] = []

    def look(now: float) -> None:
        burst = node.transfers.meter.burst()
        if burst is not None and enough(burst, rtt_s) and not ended:
            node.cancel(PROBE)
            ended.append(now)

    ticks(link, 10.0, look)
    assert ended and ended[0] < 6.0 and sink.received < budget
    (burst,) = node.transfers.meter.pop_bursts()
    found = judge(burst, rtt_s)
    assert isinstance(found, Measured), found
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)
    assert coordinator.transfers.background_in_flight == 0


def test_whatever_is_waited_for_goes_before_a_probe() -> None:
    node, coordinator = opened()
    link = Link(node, coordinator, bytes_per_s=1.25e6, rtt_s=0.02)
    data = bytes(3 << 20)
    node.expect(PROBE, BUDGET, DIGEST, Sink(BUDGET), 0.0)
    coordinator.send_blob(Offer(blob=PROBE, size=BUDGET, digest=DIGEST), Noise(BUDGET), background=True)
    ticks(link, 1.0, lambda now: None)
    node.expect(UPDATE, len(data), blob_digest(data), None, link.now)
    coordinator.push_blob(UPDATE, BytesSource(data))
    began, before = link.now, coordinator.transfers.background_in_flight
    ticks(link, began + len(data) / 1.25e6 + before / 1.25e6 + 0.7, lambda now: None)
    assert BlobReceived(blob=UPDATE, data=bytearray(data)) in node.events()
    assert BlobSent(blob=PROBE) not in coordinator.events()


def test_a_snapshot_alone_tells_nothing_of_the_link() -> None:
    """It is held back for others on purpose."""
    node, coordinator = opened()
    data = bytes(4 << 20)
    link = Link(node, coordinator, bytes_per_s=12.5e6, rtt_s=0.01)
    node.expect(SNAPSHOT, len(data), blob_digest(data), None, 0.0)
    coordinator.send_blob(offer_of(SNAPSHOT, data), BytesSource(data), background=True)
    ticks(link, 2.0, lambda now: None)
    assert any(isinstance(event, BlobReceived) for event in node.events())
    assert node.transfers.meter.pop_bursts() == [] and not node.transfers.meter.busy


def test_every_other_blob_is_a_measurement() -> None:
    node, coordinator = opened()
    data = bytes(4 << 20)
    link = Link(node, coordinator, bytes_per_s=2.5e6, rtt_s=0.03)
    node.expect(UPDATE, len(data), blob_digest(data), None, 0.0)
    coordinator.push_blob(UPDATE, BytesSource(data))
    ticks(link, 4.0, lambda now: None)
    (burst,) = node.transfers.meter.pop_bursts()
    found = judge(burst, 0.03)
    assert isinstance(found, Measured) and found.bytes_per_s == pytest.approx(2.5e6, rel=0.1)


def test_noise_is_the_same_wherever_it_is_read_and_no_two_chunks_in_a_row_are() -> None:
    noise = Noise(1 << 40)
    assert noise.size == 1 << 40
    assert noise.read(5, 100) == noise.read(5 + (1 << 20), 100)
    assert noise.read(0, 4 << 20)[100:200] == noise.read(100, 100)
    assert noise.read(0, 1 << 18) != noise.read(1 << 18, 1 << 18)


def test_a_sink_counts_in_order_and_keeps_nothing() -> None:
    sink = Sink(100)
    sink.add(50, memoryview(bytes(50)))
    assert sink.received == 0
    sink.add(0, memoryview(bytes(60)))
    sink.add(50, memoryview(bytes(50)))
    sink.check()
    assert sink.complete and sink.verify() and not sink.data


# --- TCP_INFO from bytes that are laid out as the kernel does it


def info(*, rtt_us: int, least_us: int, retransmits: int, segments: int, rate: int, app_limited: bool) -> bytes:
    data = bytearray(INFO_BYTES)
    data[7] = 1 if app_limited else 0
    for offset, value in ((68, rtt_us), (100, retransmits), (136, segments), (148, least_us)):
        struct.pack_into("=I", data, offset, value)
    struct.pack_into("=Q", data, 160, rate)
    return bytes(data)


def test_a_connection_is_read() -> None:
    told = parse(
        info(rtt_us=25_000, least_us=20_000, retransmits=7, segments=1000, rate=12_500_000, app_limited=False), "bbr"
    )
    assert told == Connection(
        rtt_s=0.025,
        least_rtt_s=0.02,
        retransmits=7,
        segments=1000,
        delivered_bytes_per_s=12_500_000.0,
        congestion="bbr",
    )


def test_a_rate_that_the_sender_limited_itself_tells_nothing_of_the_link() -> None:
    told = parse(info(rtt_us=1, least_us=1, retransmits=0, segments=1, rate=99, app_limited=True))
    assert told is not None and told.delivered_bytes_per_s == 0.0


def test_a_round_trip_that_was_not_measured_yet_is_none() -> None:
    assert parse(info(rtt_us=0, least_us=0, retransmits=0, segments=1, rate=0, app_limited=True)) is None
    told = parse(info(rtt_us=30_000, least_us=2**32 - 1, retransmits=0, segments=1, rate=0, app_limited=True))
    assert told is not None and told.least_rtt_s == told.rtt_s == 0.03


def test_an_older_kernel_that_tells_less_tells_nothing() -> None:
    assert parse(bytes(104)) is None and parse(b"") is None


@pytest.mark.parametrize(
    ("what", "info", "before", "silent_s", "lost"),
    [
        ("full segments, three times, nothing acknowledged since the greeting", resent(3), b"", 0.0, True),
        ("the peer was heard meanwhile", resent(3), b"", 1.3, True),
        ("the peer was heard before the first of them: the link is cut", resent(3), b"", 1.5, False),
        ("twice: packets are lost at times", resent(2), b"", 0.0, False),
        ("all was acknowledged", resent(3, acked=5_808 - 2_896 + 1), b"", 0.0, False),
        ("small packets are lost too", resent(3, sent=3_900), b"", 0.0, False),
        ("large ones passed before, and the link was away until now", resent(4, acked=10**6), b"", 0.0, False),
        ("large ones passed before, and it is sent again", resent(4, acked=10**6), resent(3, acked=10**6), 0.0, True),
        ("large ones passed before, no try since", resent(4, acked=10**6), resent(4, acked=10**6), 0.0, False),
        ("a kernel that tells less", resent(3, num_bytes=192), b"", 0.0, False),
        ("no connection", b"", b"", 0.0, False),
    ],
)
def test_large_packets_that_are_lost_while_small_ones_pass_are_told_from_other_losses(
    what: str, info: bytes, before: bytes, silent_s: float, lost: bool
) -> None:
    assert large_lost(info, before, silent_s) is lost, what


def test_a_new_connection_on_which_a_later_segment_came_lacks_a_large_one() -> None:
    gap = bytearray(INFO_BYTES)
    gap[224] = 1
    assert lacks_large(bytes(gap)) and not lacks_large(bytes(INFO_BYTES)) and not lacks_large(gap[:192])


# --- Bytes on the connections


@pytest.mark.parametrize(
    ("curve", "sizes", "num_bytes"),
    [
        *((False, sizes, n) for sizes, n in [((0,), 2), ((255,), 257), ((256,), 265), ((56, 1000), 58 + 1009)]),
        *((True, sizes, n) for sizes, n in [((10,), 45), ((222,), 257), ((223,), 265), ((56, 10**5), 91 + 100042)]),
    ],
)
def test_wire_bytes_include_zeromqs_framing_and_curves(curve: bool, sizes: tuple[int, ...], num_bytes: int) -> None:
    assert wire_bytes([bytes(size) for size in sizes], curve=curve) == num_bytes


@pytest.mark.parametrize(("curve", "sent", "received"), [(False, 107, 107), (True, 567, 301)])
def test_the_greetings_of_a_connection_are_control(curve: bool, sent: int, received: int) -> None:
    """As counted on a connection between a DEALER and a ROUTER of libzmq 4.3.5."""
    traffic = Traffic(curve=curve)
    traffic.connected()
    assert (traffic.sent.control, traffic.received.control) == (sent, received)
    assert (traffic.sent.total, traffic.received.total) == (sent, received)


def test_all_classes_are_summed_and_a_stray_frame_that_finds_its_blob_is_counted_once() -> None:
    traffic = Traffic()
    traffic.sent_control.add(10)
    traffic.sent_blobs[BlobKind.DELTA].add(100)
    traffic.received_control.add(1)
    traffic.received_blobs[BlobKind.SNAPSHOT].add(20)
    traffic.stray.add(300)
    traffic.stray.add(50)
    assert (traffic.sent.total, traffic.received.total) == (110, 371)
    traffic.adopt(BlobKind.UPDATE, 300)
    assert (traffic.stray.frames, traffic.stray.bytes) == (1, 50)
    assert (traffic.received_blobs[BlobKind.UPDATE].bytes, traffic.received.total) == (300, 371)


@pytest.mark.parametrize("limits", [{"chunk_bytes": 0}, {"chunk_bytes": 5 << 20}])
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Limits(**limits)
