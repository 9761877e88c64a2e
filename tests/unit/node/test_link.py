"""Covers downloads, uploads, measurement and traffic of `node/link.py`; its sessions: `integration/test_link.py`."""

import dataclasses
from collections.abc import Callable

import pytest
from plain_runs import plain_hello, plain_spec

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.node.link import LOOK_S, Downloads, Probing, Traffic, Uploads, moved_by
from farloop.wire.blobs import BlobSource, Reassembly
from farloop.wire.events import BlobDeclined, BlobReceived, BlobSent, MessageReceived
from farloop.wire.link_measurement import DIGEST, Noise, Sink
from farloop.wire.messages import BytesByKind, Connection, Message, Observed, Offer, Probe, Role, Seen, Welcome
from farloop.wire.reasons import AlreadyUnderWay, LimitReached
from farloop.wire.session import Session, State


class Asked:
    """A session of which only `expect` and `cancel` are used."""

    state = State.OPEN

    def __init__(self, most: int = 256) -> None:
        self.expected: dict[BlobId, Reassembly | None] = {}
        self.most = most

    def cancel(self, blob: BlobId) -> None:
        del self.expected[blob]

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        if blob in self.expected:
            raise AlreadyUnderWay("it is expected already")
        if len(self.expected) >= self.most:
            raise LimitReached("no more at once")
        self.expected[blob] = reassembly
        return reassembly or Reassembly(size, digest)


def update(version: int, fragment: int = 0) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=fragment, version=version)


def snapshot(version: int) -> BlobId:
    return dataclasses.replace(update(version), kind=BlobKind.SNAPSHOT)


def announce(downloads: Downloads, session: Asked, *blobs: BlobId) -> list[bool]:
    return [downloads.announced(session, blob, 8, 1, 0.0) for blob in blobs]  # type: ignore[arg-type]


def end(downloads: Downloads, session: Asked, blob: BlobId) -> None:
    session.expected.pop(blob, None)
    downloads.ended(session, blob, 0.0)  # type: ignore[arg-type]


def test_a_transfer_that_broke_off_goes_on_in_the_next_session() -> None:
    downloads, again = Downloads(), Asked()
    announce(downloads, Asked(), update(1), update(2))
    downloads.session_over()
    announce(downloads, again, update(1), update(2))
    assert all(kept is not None for kept in again.expected.values())


def test_a_blob_announced_twice_in_a_session_comes_once() -> None:
    downloads = Downloads()
    assert announce(downloads, Asked(), update(1)) == [True]
    session = Asked()
    assert announce(downloads, session, update(2), update(2)) == [True, False]


def test_updates_that_a_snapshot_stands_for_are_not_kept() -> None:
    """They were cut off with the last session, and nobody will send their rest."""
    downloads = Downloads()
    announce(downloads, Asked(), update(1), update(2), update(1, fragment=1))
    downloads.session_over()
    announce(downloads, Asked(), snapshot(3))
    assert len(downloads) == 2, "the snapshot, and the other fragment's"


def test_what_this_session_brings_is_kept_whatever_is_announced_after_it() -> None:
    downloads = Downloads()
    announce(downloads, Asked(), update(1), update(2), update(3))
    assert len(downloads) == 3


def test_what_no_session_asks_for_again_goes_with_the_next() -> None:
    downloads = Downloads()
    announce(downloads, Asked(), snapshot(9))
    downloads.session_over()
    announce(downloads, Asked(), update(1, fragment=1))
    downloads.session_over()
    assert len(downloads) == 1


def test_what_is_here_is_not_half_here() -> None:
    downloads, session = Downloads(), Asked()
    announce(downloads, session, update(1), update(2))
    end(downloads, session, update(1))
    downloads.session_over()
    end(downloads, session, update(2))
    assert len(downloads) == 0


def test_a_snapshot_takes_the_place_of_the_updates_that_it_holds_even_of_those_on_their_way() -> None:
    """R: a coordinator has dropped those of a node that is behind, and they would be expected for ever."""
    downloads, session = Downloads(), Asked()
    announce(downloads, session, update(1), update(2), update(3), update(1, fragment=1))
    announce(downloads, session, snapshot(2))
    assert session.expected.keys() == {update(3), update(1, fragment=1), snapshot(2)}
    assert len(downloads) == 3


def test_more_blobs_than_a_session_takes_at_once_all_come_in_the_end() -> None:
    downloads, session = Downloads(), Asked(most=2)
    wanted = [update(1, fragment) for fragment in range(300)]
    assert all(announce(downloads, session, *wanted))
    came = []
    while session.expected:
        blob = next(iter(session.expected))
        came.append(blob)
        end(downloads, session, blob)
    assert came == wanted
    assert len(downloads) == 0


def test_what_waits_and_a_snapshot_holds_is_never_asked_for() -> None:
    downloads, session = Downloads(), Asked(most=2)
    announce(downloads, session, update(1), update(2), update(3), update(4))
    announce(downloads, session, snapshot(3))
    assert session.expected.keys() == {snapshot(3)}
    end(downloads, session, snapshot(3))
    assert session.expected.keys() == {update(4)}


def test_a_thousand_broken_sessions_leave_no_more_than_one_does() -> None:
    downloads = Downloads()
    for version in range(1000):
        announce(downloads, Asked(), *(update(version, fragment) for fragment in range(4)))
        downloads.session_over()
    assert len(downloads) == 4


class Taking:
    """A session that sends so many blobs at once."""

    state = State.OPEN

    def __init__(self, most: int) -> None:
        self.most = most
        self.sending: list[BlobId] = []
        self.offered: list[BlobId] = []

    def send_blob(self, offer: Offer, source: BlobSource) -> None:
        if offer.blob in self.sending:
            raise AlreadyUnderWay("it is being sent")
        if len(self.sending) >= self.most:
            raise LimitReached("no more at once")
        self.sending.append(offer.blob)
        self.offered.append(offer.blob)


def delta(fragment: int, seq: int) -> Offer:
    blob = BlobId(kind=BlobKind.DELTA, fragment=fragment, version=0, node=NodeId("a"), incarnation=1, seq=seq)
    return Offer(blob=blob, size=1, digest=0)


def test_the_257th_delta_is_offered_when_another_has_ended() -> None:
    uploads, session = Uploads(), Taking(256)
    for seq in range(300):
        uploads.offer(session, delta(seq, seq), bytearray(1))  # type: ignore[arg-type]
    assert len(session.offered) == 256 and len(uploads) == 44
    while session.sending:
        session.sending.pop(0)
        uploads.go_on(session)  # type: ignore[arg-type]
    assert [blob.seq for blob in session.offered] == list(range(300))
    assert len(uploads) == 0


def test_a_delta_that_is_offered_twice_is_sent_once() -> None:
    uploads, session = Uploads(), Taking(256)
    for _ in range(2):
        uploads.offer(session, delta(0, 1), bytearray(1))  # type: ignore[arg-type]
    assert len(session.offered) == 1 and len(uploads) == 0


def test_a_newer_delta_of_a_fragment_takes_the_place_of_one_that_waits() -> None:
    uploads, session = Uploads(), Taking(1)
    for offer in (delta(0, 1), delta(1, 2), delta(1, 3)):
        uploads.offer(session, offer, bytearray(1))  # type: ignore[arg-type]
    session.sending.clear()
    uploads.go_on(session)  # type: ignore[arg-type]
    assert [blob.seq for blob in session.offered] == [1, 3]


def test_what_waits_ends_with_its_session() -> None:
    uploads, session = Uploads(), Taking(0)
    uploads.offer(session, delta(0, 1), bytearray(1))  # type: ignore[arg-type]
    uploads.session_over()
    assert len(uploads) == 0


BUDGET = 4 << 20
BLOB = BlobId(kind=BlobKind.PROBE, fragment=0, version=7)
UP = Probe(number=7, upward=True, num_bytes=BUDGET, rtt_s=0.02)
DOWN = dataclasses.replace(UP, upward=False)

Pair = tuple[Session, Session]


def opened(protocol: int = 3) -> Pair:
    """A node's session and a coordinator's."""
    welcome = Welcome(
        protocol=protocol, epoch=3, spec=plain_spec(), lane_token=b"t", versions=(0,), windows=(), rounds=()
    )
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(plain_hello(), 0.0)
    carry(node, coordinator, 0.0)
    coordinator.send(welcome, 0.0)
    carry(node, coordinator, 0.0)
    for session in (node, coordinator):
        session.events()
        session.lane_opened(1)
    return node, coordinator


def carry(
    a: Session, b: Session, now: float, *, step_s: float = 0.0, each: Callable[[float], None] | None = None
) -> float:
    """Everything that both have to say, frame by frame; each takes `step_s`."""
    moved = True
    while moved:
        moved = False
        for source, target in ((a, b), (b, a)):
            for lane, parts in source.outgoing(now, max_chunks=1):
                now += step_s if lane else 0.0
                target.receive(lane, parts, now)
                moved = True
                if each is not None:
                    each(now)
    return now


def messages(session: Session) -> list[Message]:
    return [event.message for event in session.events() if isinstance(event, MessageReceived)]


def test_bytes_that_are_asked_for_go_up_in_the_background() -> None:
    node, coordinator = opened()
    probing = Probing()
    probing.asked(node, UP)
    carry(node, coordinator, 0.0)
    assert messages(coordinator) == [Offer(blob=BLOB, size=BUDGET, digest=DIGEST)]
    sink = coordinator.expect(BLOB, BUDGET, DIGEST, Sink(BUDGET), 0.0)
    carry(node, coordinator, 0.0)
    assert sink.complete and node.background_in_flight == 0
    assert BlobSent(blob=BLOB) in node.events()


def test_a_probe_that_comes_is_reported_with_its_number_and_what_was_seen() -> None:
    node, coordinator = opened()
    probing, reports = Probing(), list[Observed]()
    probing.asked(node, DOWN)
    coordinator.send_blob(Offer(blob=BLOB, size=BUDGET, digest=DIGEST), Noise(BUDGET), background=True)
    carry(node, coordinator, 0.0)
    (offer,) = messages(node)
    assert isinstance(offer, Offer)
    probing.offered(node, offer, 0.0)

    def look(now: float) -> None:
        for event in node.events():
            if isinstance(event, BlobReceived):
                probing.ended(event.blob)
        if (report := probing.look(node)) is not None:
            reports.append(report)

    carry(node, coordinator, 0.0, step_s=0.25, each=look)
    (report,) = reports
    (seen,) = report.links
    assert (seen.peer, seen.probe) == ("", 7)
    (burst,) = seen.bursts
    assert burst.half_bytes / burst.half_s == pytest.approx((256 << 10) / 0.25)
    assert burst.seconds < 4.0  # ended before the budget was used
    assert messages(coordinator) == [] and node.meter.take() == []


def test_a_probe_that_told_nothing_is_reported_all_the_same() -> None:
    node, coordinator = opened()
    probing = Probing()
    probing.asked(node, dataclasses.replace(DOWN, num_bytes=1000))
    coordinator.send_blob(Offer(blob=BLOB, size=1000, digest=DIGEST), Noise(1000), background=True)
    carry(node, coordinator, 0.0)
    (offer,) = messages(node)
    assert isinstance(offer, Offer)
    probing.offered(node, offer, 0.0)
    carry(node, coordinator, 0.0)
    assert probing.look(node) is None
    probing.ended(BLOB)
    assert probing.look(node) == Observed(links=(Seen(probe=7),))
    assert probing.look(node) is None


def test_bytes_that_nobody_asked_for_are_declined() -> None:
    node, coordinator = opened()
    coordinator.send_blob(Offer(blob=BLOB, size=BUDGET, digest=DIGEST), Noise(BUDGET), background=True)
    carry(node, coordinator, 0.0)
    (offer,) = messages(node)
    assert isinstance(offer, Offer)
    Probing().offered(node, offer, 0.0)
    carry(node, coordinator, 0.0)
    assert coordinator.events() == [BlobDeclined(blob=BLOB)]


@pytest.mark.parametrize("probe", [UP, DOWN])
def test_a_probe_that_is_called_off_leaves_nothing(probe: Probe) -> None:
    node, coordinator = opened()
    probing = Probing()
    probing.asked(node, probe)
    carry(node, coordinator, 0.0)
    probing.asked(node, dataclasses.replace(probe, num_bytes=0))
    coordinator.events()
    if probe.upward:
        coordinator.expect(BLOB, BUDGET, DIGEST, Sink(BUDGET), 0.0)
    carry(node, coordinator, 0.0)
    assert not coordinator.meter.busy and probing.look(node) is None
    node.check()


def test_an_older_coordinator_hears_nothing() -> None:
    node, _ = opened(protocol=2)
    probing = Probing()
    told = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=9)
    assert probing.look(node) is None and probing.connection(node, told, 0.0) is None


def test_the_connection_is_told_every_few_seconds() -> None:
    node, _ = opened()
    probing = Probing()
    told = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=9)
    assert probing.is_due(0.0)
    assert probing.connection(node, told, 0.0) == Observed(links=(Seen(bulk=told),))
    assert not probing.is_due(LOOK_S - 0.1) and probing.is_due(LOOK_S)
    assert probing.connection(node, None, LOOK_S) is None


def test_every_byte_of_a_session_is_of_one_kind_and_direction() -> None:
    session = Session(Role.NODE, 0.0)
    traffic = session.traffic
    traffic.sent_control.add(1)
    traffic.sent_blobs[BlobKind.DELTA].add(20)
    traffic.sent_blobs[BlobKind.PROBE].add(5)
    traffic.received_control.add(300)
    traffic.received_blobs[BlobKind.UPDATE].add(4_000)
    traffic.received_blobs[BlobKind.SNAPSHOT].add(50_000)
    traffic.sent_blobs[BlobKind.SNAPSHOT].add(600_000)
    traffic.stray.add(7_000_000)
    moved = moved_by(session)
    assert moved.up == BytesByKind(delta=20, snapshot=600_000, probe=5, control=1)
    assert moved.down == BytesByKind(update=4_000, snapshot=50_000, control=7_000_300)
    assert moved.state == 650_005
    assert (moved.up.total, moved.down.total) == (traffic.bytes_sent, traffic.bytes_received)


def test_the_bytes_of_all_sessions_add_up() -> None:
    first = Traffic(BytesByKind(delta=1, control=2), BytesByKind(update=3))
    second = Traffic(BytesByKind(delta=10, probe=4), BytesByKind(snapshot=5))
    both = Traffic(BytesByKind(delta=11, probe=4, control=2), BytesByKind(update=3, snapshot=5))
    assert first + second == both
