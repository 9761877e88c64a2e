"""Echoes and probes between two sessions, on a simulated link with a rate and a round trip."""

import dataclasses
import heapq
from collections.abc import Callable

import pytest

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.events import BlobReceived, BlobSent
from farloop.wire.frames import Buffer
from farloop.wire.link_measurement import DIGEST, Noise, Sink
from farloop.wire.messages import Hello, Offer, Role, Welcome
from farloop.wire.meter import Measured, enough, judge
from farloop.wire.reasons import LocalProtocolError
from farloop.wire.session import Session

OpenPair = Callable[..., tuple[Session, Session]]

PROBE = BlobId(kind=BlobKind.PROBE, fragment=0, version=1)
SNAPSHOT = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=1)
UPDATE = BlobId(kind=BlobKind.UPDATE, fragment=0, version=2)
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


def opened(hello: Hello, welcome: Welcome, protocol: int = 3) -> tuple[Session, Session]:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(hello, 0.0)
    for lane, parts in node.outgoing(0.0):
        coordinator.receive(lane, parts, 0.0)
    coordinator.send(dataclasses.replace(welcome, protocol=protocol), 0.0)
    for lane, parts in coordinator.outgoing(0.0):
        node.receive(lane, parts, 0.0)
    for session in (node, coordinator):
        session.events()
        session.lane_opened(1)
    return node, coordinator


def test_echoes_measure_the_round_trip(hello: Hello, welcome: Welcome) -> None:
    node, coordinator = opened(hello, welcome)
    link = Link(node, coordinator, bytes_per_s=1e9, rtt_s=0.08)
    for _ in range(3):
        coordinator.echo(link.now)
        link.run(link.now + 0.5)
    assert len(coordinator.round_trips) == 3
    assert min(coordinator.round_trips) == pytest.approx(0.08, rel=0.01)
    assert node.events() == coordinator.events() == []


def test_an_echo_that_nobody_answers_is_not_said_for_ever(hello: Hello, welcome: Welcome) -> None:
    _, coordinator = opened(hello, welcome)
    for _ in range(100):
        coordinator.echo(0.0)
    assert len(coordinator.outgoing(0.0)) == 10


@pytest.mark.parametrize("protocol", [1, 2])
def test_an_older_peer_hears_no_echo(hello: Hello, welcome: Welcome, protocol: int) -> None:
    node, coordinator = opened(hello, welcome, protocol)
    assert coordinator.protocol == protocol
    with pytest.raises(LocalProtocolError, match=f"needs version 3 of the protocol, the session has {protocol}"):
        coordinator.echo(0.0)
    with pytest.raises(LocalProtocolError):
        node.echo(0.0)


@pytest.mark.parametrize(("bytes_per_s", "rtt_s"), [(1.25e6, 0.02), (12.5e6, 0.1)])
def test_a_probe_measures_the_link_and_ends_when_it_knows_enough(
    hello: Hello, welcome: Welcome, bytes_per_s: float, rtt_s: float
) -> None:
    node, coordinator = opened(hello, welcome)
    link = Link(node, coordinator, bytes_per_s=bytes_per_s, rtt_s=rtt_s)
    budget = 64 << 20
    sink = node.expect(PROBE, budget, DIGEST, Sink(budget), 0.0)
    coordinator.send_blob(Offer(blob=PROBE, size=budget, digest=DIGEST), Noise(budget), background=True)
    ended: list[float] = []

    def look(now: float) -> None:
        burst = node.meter.burst()
        if burst is not None and enough(burst, rtt_s) and not ended:
            node.cancel(PROBE)
            ended.append(now)

    ticks(link, 10.0, look)
    assert ended and ended[0] < 6.0 and sink.received < budget
    (burst,) = node.meter.take()
    found = judge(burst, rtt_s)
    assert isinstance(found, Measured), found
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)
    assert coordinator.background_in_flight == 0


def test_whatever_somebody_waits_for_goes_before_a_probe(hello: Hello, welcome: Welcome) -> None:
    node, coordinator = opened(hello, welcome)
    link = Link(node, coordinator, bytes_per_s=1.25e6, rtt_s=0.02)
    data = bytes(3 << 20)
    node.expect(PROBE, BUDGET, DIGEST, Sink(BUDGET), 0.0)
    coordinator.send_blob(Offer(blob=PROBE, size=BUDGET, digest=DIGEST), Noise(BUDGET), background=True)
    ticks(link, 1.0, lambda now: None)
    node.expect(UPDATE, len(data), blob_digest(data), None, link.now)
    coordinator.push_blob(UPDATE, BytesSource(data))
    began, before = link.now, coordinator.background_in_flight
    ticks(link, began + len(data) / 1.25e6 + before / 1.25e6 + 0.7, lambda now: None)
    assert BlobReceived(blob=UPDATE, data=bytearray(data)) in node.events()
    assert BlobSent(blob=PROBE) not in coordinator.events()


def test_a_snapshot_alone_tells_nothing_of_the_link(open_pair: OpenPair) -> None:
    """It is held back for others on purpose."""
    node, coordinator = open_pair()
    data = bytes(4 << 20)
    link = Link(node, coordinator, bytes_per_s=12.5e6, rtt_s=0.01)
    node.expect(SNAPSHOT, len(data), blob_digest(data), None, 0.0)
    offer = Offer(blob=SNAPSHOT, size=len(data), digest=blob_digest(data))
    coordinator.send_blob(offer, BytesSource(data), background=True)
    ticks(link, 2.0, lambda now: None)
    assert any(isinstance(event, BlobReceived) for event in node.events())
    assert node.meter.take() == [] and not node.meter.busy


def test_every_other_blob_is_a_measurement(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    data = bytes(4 << 20)
    link = Link(node, coordinator, bytes_per_s=2.5e6, rtt_s=0.03)
    node.expect(UPDATE, len(data), blob_digest(data), None, 0.0)
    coordinator.push_blob(UPDATE, BytesSource(data))
    ticks(link, 4.0, lambda now: None)
    (burst,) = node.meter.take()
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
