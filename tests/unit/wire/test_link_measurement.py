"""What is known of a link: its rate by what arrives, echoes and probes, TCP_INFO, and the bytes on the connections."""

import heapq
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import slow_start
import tcp_infos
from hypothesis import given, settings
from hypothesis import strategies as st
from session_pairs import offer_of, opened, update
from slow_start import SlowStart
from stories import StoryText, all_stories, check_story, python

import farloop.wire.meter
from farloop.algo.spec import BlobId, BlobKind
from farloop.wire import limits, link_measurement, traffic
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.events import BlobReceived, BlobSent
from farloop.wire.frames import Buffer
from farloop.wire.link_measurement import DIGEST, INFO_BYTES, Noise, Sink
from farloop.wire.messages import Offer
from farloop.wire.meter import Insufficient, Measured, Meter, enough, judge
from farloop.wire.session import Session

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


# --- What is told of it


def metered(times: Iterable[float], meter: Meter | None = None, *, held_up: bool = False) -> Meter:
    """A kilobyte came at each of these times, of a burst that ends or is forgotten."""
    meter = meter or Meter()
    for at in times:
        meter.arrived(1000, at)
    if held_up:
        meter.forget()
    else:
        meter.end_burst()
    return meter


def info(
    *, rtt_us: int, least_us: int, retransmits: int = 0, segments: int = 1, rate: int = 0, app_limited: bool = False
) -> bytes:
    """TCP_INFO as the kernel lays it out."""
    data = bytearray(INFO_BYTES)
    data[7] = 1 if app_limited else 0
    for offset, value in ((68, rtt_us), (100, retransmits), (136, segments), (148, least_us)):
        struct.pack_into("=I", data, offset, value)
    struct.pack_into("=Q", data, 160, rate)
    return bytes(data)


@all_stories(__file__, "measurement")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    names = (slow_start, tcp_infos, link_measurement, farloop.wire.meter, traffic, limits)
    check_story(path, story, python(*map(vars, names), globals()), rewrite=rewrite)
