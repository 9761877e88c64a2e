"""farloop.wire.session over a perfect pipe. Covers protocol Q, R, S, T, V (liveness), C (late timers)."""

from collections.abc import Callable

import pytest

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire.blobs import BytesSource, blob_digest, blob_key
from farloop.wire.events import BlobDeclined, BlobReceived, BlobSent, MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer, BulkFrame, ControlFrame, parse_control, parse_lane_hello
from farloop.wire.limits import INITIAL_CREDIT, Limits, Timing
from farloop.wire.messages import (
    Credit,
    Fetch,
    Finished,
    Heartbeat,
    Hello,
    LaneHello,
    Leave,
    Message,
    Offer,
    Outcome,
    Ready,
    Refused,
    Role,
    Stored,
    Welcome,
    encode,
)
from farloop.wire.reasons import LimitReached, LocalProtocolError, Reason, RemoteProtocolError
from farloop.wire.session import Session, State

OpenPair = Callable[..., tuple[Session, Session]]

DATA = bytes(range(256)) * 5000
DELTA = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1)
UPDATE = BlobId(kind=BlobKind.UPDATE, fragment=0, version=1)
OFFER = Offer(blob=DELTA, size=len(DATA), digest=blob_digest(DATA))
LEAVE = Leave(reason=Reason.DRAINED, detail="done")


def carry(a: Session, b: Session, now: float) -> None:
    """Move frames between the two until both have nothing to say."""
    moved = True
    while moved:
        moved = False
        for source, target in ((a, b), (b, a)):
            for lane, parts in source.outgoing(now):
                target.receive(lane, parts, now)
                moved = True
            source.check()
            target.check()


def messages(session: Session) -> list[Message]:
    return [event.message for event in session.events() if isinstance(event, MessageReceived)]


def test_the_handshake_opens_both_ends(hello: Hello, welcome: Welcome) -> None:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(hello, 0.0)
    carry(node, coordinator, 0.0)
    assert messages(coordinator) == [hello]
    coordinator.send(welcome, 0.0)
    carry(node, coordinator, 0.1)
    assert messages(node) == [welcome]
    assert node.state is coordinator.state is State.OPEN


def test_a_lost_hello_is_sent_again(hello: Hello) -> None:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(hello, 0.0)
    assert len(node.outgoing(0.0)) == 1
    node.handle_timer(2.0)
    carry(node, coordinator, 2.0)
    assert messages(coordinator) == [hello]
    assert coordinator.outgoing(9.0) == [], "nothing but Welcome or Refused may come first"


def test_a_refused_node_hears_why_and_both_ends_close(hello: Hello) -> None:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    refused = Refused(reason=Reason.WRONG_RUN, detail="aa, not bb", retriable=False)
    node.send(hello, 0.0)
    carry(node, coordinator, 0.0)
    coordinator.send(refused, 0.0)
    carry(node, coordinator, 0.0)
    closed = SessionClosed(reason=Reason.WRONG_RUN, detail="aa, not bb")
    assert node.events() == [MessageReceived(message=refused), closed]
    assert coordinator.state is State.CLOSING
    coordinator.handle_timer(5.0)
    assert coordinator.events()[-1] == closed


def test_messages_arrive_in_order_both_ways(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    for fragment in range(300):
        node.send(Fetch(fragment=fragment), 1.0)
    coordinator.send(Finished(), 1.0)
    carry(node, coordinator, 1.0)
    assert messages(coordinator) == [Fetch(fragment=fragment) for fragment in range(300)]
    assert messages(node) == [Finished()]


@pytest.mark.parametrize("role", list(Role))
def test_what_the_session_says_itself_cannot_be_sent(open_pair: OpenPair, role: Role) -> None:
    session = open_pair()[list(Role).index(role)]
    for message in (OFFER, Credit(blob=DELTA, received=0, limit=0), Heartbeat(), LaneHello(lane_token=b"")):
        with pytest.raises(LocalProtocolError, match="itself"):
            session.send(message, 0.0)


def test_illegal_local_use_changes_nothing(open_pair: OpenPair) -> None:
    fresh = Session(Role.NODE, 0.0)
    for call in (
        lambda: fresh.send(Ready(), 0.0),
        lambda: fresh.send_blob(OFFER, BytesSource(DATA)),
        lambda: fresh.push_blob(UPDATE, BytesSource(DATA)),
        lambda: fresh.expect(UPDATE, 1, 0, None, 0.0),
        lambda: fresh.cancel(UPDATE),
        fresh.lane_hello,
        lambda: fresh.lane_opened(0),
        lambda: fresh.lane_closed(1),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    assert fresh.outgoing(0.0) == []

    node, coordinator = open_pair(Limits(max_control_bytes=1000))
    for call in (
        lambda: node.send(Leave(reason=Reason.NONE, detail="x" * 1000), 0.0),
        lambda: node.send_blob(OFFER, BytesSource(DATA[:-1])),
        lambda: node.lane_opened(1),
        coordinator.lane_hello,
    ):
        with pytest.raises(LocalProtocolError):
            call()
    assert node.outgoing(0.0) == []
    assert node.state is State.OPEN


def test_an_offered_blob_arrives_and_is_reported_sent(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    node.send_blob(OFFER, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    assert messages(coordinator) == [OFFER]
    assert node.traffic.sent_blobs[BlobKind.DELTA].frames == 0
    coordinator.expect(DELTA, OFFER.size, OFFER.digest, None, 0.0)
    carry(node, coordinator, 0.1)
    assert coordinator.events() == [BlobReceived(blob=DELTA, data=bytearray(DATA))]
    assert node.events() == [BlobSent(blob=DELTA)]


def test_a_pushed_blob_flows_before_it_is_expected(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    assert INITIAL_CREDIT < coordinator.traffic.sent_blobs[BlobKind.UPDATE].bytes < INITIAL_CREDIT + 1000
    node.expect(UPDATE, len(DATA), blob_digest(DATA), None, 0.0)
    carry(node, coordinator, 0.1)
    assert node.events() == [BlobReceived(blob=UPDATE, data=bytearray(DATA))]
    assert coordinator.events() == [BlobSent(blob=UPDATE)]
    assert node.traffic.stray.frames == 0


def test_both_ends_count_the_same_bytes(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    node.expect(UPDATE, len(DATA), blob_digest(DATA), None, 0.0)
    node.send_blob(OFFER, BytesSource(DATA))
    coordinator.expect(DELTA, OFFER.size, OFFER.digest, None, 0.0)
    carry(node, coordinator, 0.1)
    assert node.traffic.bytes_sent == coordinator.traffic.bytes_received > len(DATA)
    assert coordinator.traffic.bytes_sent == node.traffic.bytes_received > len(DATA)


def test_a_declined_blob_is_given_up(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    node.cancel(UPDATE)
    carry(node, coordinator, 0.0)
    assert coordinator.events() == [BlobDeclined(blob=UPDATE)]


@pytest.mark.parametrize(
    "verdict", [Stored(blob=DELTA), Outcome(blob=DELTA, reason=Reason.LATE, detail="")], ids=["stored", "outcome"]
)
def test_a_verdict_ends_a_transfer(open_pair: OpenPair, verdict: Stored | Outcome) -> None:
    node, coordinator = open_pair()
    node.send_blob(OFFER, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    coordinator.send(verdict, 0.0)
    carry(node, coordinator, 0.0)
    coordinator.expect(DELTA, OFFER.size, OFFER.digest, None, 0.0)
    carry(node, coordinator, 0.0)
    assert messages(node) == [verdict]
    assert node.traffic.sent_blobs[BlobKind.DELTA].frames == 0


def test_control_never_waits_for_bulk(open_pair: OpenPair) -> None:
    _, coordinator = open_pair()
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    coordinator.send(Finished(), 0.0)
    assert [lane for lane, _ in coordinator.outgoing(0.0, max_chunks=0)] == [0]
    assert [lane for lane, _ in coordinator.outgoing(0.0, max_chunks=1)] == [1]
    assert [lane for lane, _ in coordinator.outgoing(0.0)] == [1]


def test_chunks_take_turns_over_the_open_lanes(open_pair: OpenPair) -> None:
    _, coordinator = open_pair(Limits(chunk_bytes=INITIAL_CREDIT // 8))
    coordinator.lane_opened(2)
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    assert [lane for lane, _ in coordinator.outgoing(0.0, max_chunks=4)] == [1, 2, 1, 2]
    coordinator.lane_closed(1)
    assert [lane for lane, _ in coordinator.outgoing(0.0)] == [2] * 8, "what was on lane 1 comes again"
    coordinator.lane_closed(2)
    assert coordinator.outgoing(0.0) == []


def test_a_new_lane_begins_with_the_token_of_the_welcome(open_pair: OpenPair, welcome: Welcome) -> None:
    node, coordinator = open_pair()
    first = node.lane_hello()
    assert parse_lane_hello(first, Limits()) == welcome.lane_token
    for lane in (0, 1):
        with pytest.raises(RemoteProtocolError):
            coordinator.receive(lane, first, 0.0)


def test_an_idle_pair_exchanges_heartbeats_and_stays_open(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    now, frames = 0.0, 0
    while now < 60.0:
        now = min(node.next_timer() or 0.0, coordinator.next_timer() or 0.0)
        for source, target in ((node, coordinator), (coordinator, node)):
            source.handle_timer(now)
            for lane, parts in source.outgoing(now):
                target.receive(lane, parts, now)
                frames += 1
    assert node.state is coordinator.state is State.OPEN
    assert 2 * 58 <= frames <= 2 * 62
    assert node.events() == coordinator.events() == []


def test_a_silent_peer_is_given_up_at_the_time_out(open_pair: OpenPair) -> None:
    node, _ = open_pair(timing=Timing(liveness_s=10.0))
    while node.state is State.OPEN:
        now = node.next_timer()
        assert now is not None
        node.handle_timer(now)
        node.outgoing(now)
    assert now == 10.0
    assert node.events() == [SessionClosed(reason=Reason.SILENT, detail="nothing was heard for 10 s")]
    assert node.next_timer() is None


def test_the_time_in_which_this_process_stood_still_is_not_the_peers_silence(open_pair: OpenPair) -> None:
    node, _ = open_pair(timing=Timing(heartbeat_s=1.0, liveness_s=10.0))
    due = node.next_timer() or 0.0
    node.handle_timer(due + 300.0)
    assert node.state is State.OPEN
    node.outgoing(due + 300.0)
    while node.state is State.OPEN:
        now = node.next_timer() or 0.0
        node.handle_timer(now)
        node.outgoing(now)
    assert now == 310.0, "ten seconds of silence, the stop not counted"


def test_a_leave_is_delivered_acknowledged_and_closes_both_ends(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    node.send(Ready(), 0.0)
    node.send(LEAVE, 0.0)
    carry(node, coordinator, 0.0)
    closed = SessionClosed(reason=Reason.DRAINED, detail="done")
    assert coordinator.events() == [MessageReceived(message=Ready()), MessageReceived(message=LEAVE), closed]
    assert node.events() == [closed]
    assert node.outgoing(9.0) == coordinator.outgoing(9.0) == []


def test_a_leave_that_nobody_acknowledges_lingers_and_then_closes(open_pair: OpenPair) -> None:
    node, _ = open_pair(timing=Timing(linger_s=5.0))
    node.send(LEAVE, 0.5)
    sent = []
    while node.state is not State.CLOSED:
        now = node.next_timer() or 0.0
        sent += node.outgoing(now)
        node.handle_timer(now)
    assert now == 5.5
    assert sent


def test_a_leaving_end_still_acknowledges(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    node.send(LEAVE, 0.0)
    node.outgoing(0.0)
    coordinator.send(Finished(), 0.0)
    for lane, parts in coordinator.outgoing(0.0):
        node.receive(lane, parts, 0.0)
    [(lane, parts)] = node.outgoing(0.25)
    assert (lane, parse_control(parts, Limits()).ack) == (0, 2)


def test_a_closed_session_says_it_once_and_is_deaf(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    coordinator.send(Finished(), 0.0)
    node.close(Reason.CLOSED, "cut")
    node.close(Reason.SILENT, "again")
    carry(node, coordinator, 0.0)
    node.handle_timer(100.0)
    assert node.events() == [SessionClosed(reason=Reason.CLOSED, detail="cut")]
    with pytest.raises(LocalProtocolError):
        node.send(Ready(), 0.0)


def test_a_transfer_goes_on_in_a_second_session_where_the_first_broke(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    node.send_blob(OFFER, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    reassembly = coordinator.expect(DELTA, OFFER.size, OFFER.digest, None, 0.0)
    for lane, parts in coordinator.outgoing(0.0):
        node.receive(lane, parts, 0.0)
    for lane, parts in node.outgoing(0.0, max_chunks=1):
        coordinator.receive(lane, parts, 0.0)
    held = reassembly.received
    assert 0 < held < len(DATA)

    node, coordinator = open_pair()
    node.send_blob(OFFER, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    coordinator.events()
    coordinator.expect(DELTA, OFFER.size, OFFER.digest, reassembly, 0.0)
    carry(node, coordinator, 0.0)
    assert coordinator.events() == [BlobReceived(blob=DELTA, data=bytearray(DATA))]
    assert node.traffic.sent_blobs[BlobKind.DELTA].bytes < len(DATA) - held + 1000


def test_what_overtakes_the_welcome_is_dropped_and_comes_again(hello: Hello, welcome: Welcome) -> None:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(hello, 0.0)
    carry(node, coordinator, 0.0)
    coordinator.send(welcome, 0.0)
    coordinator.send(Finished(), 0.0)
    coordinator.lane_opened(1)
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    for lane, parts in reversed(coordinator.outgoing(0.0)):
        node.receive(lane, parts, 0.0)
    assert messages(node) == [welcome]
    assert node.traffic.stray.frames == 2
    coordinator.handle_timer(2.0)
    carry(node, coordinator, 2.0)
    assert messages(node) == [Finished()]


def test_forbidden_frames_change_nothing(open_pair: OpenPair) -> None:
    node, coordinator = open_pair()
    run, epoch = parse(node.lane_hello())
    reassembly = coordinator.expect(DELTA, len(DATA), 0, None, 0.0)
    coordinator.outgoing(0.0)
    before = observed(coordinator)

    def control(message: Message, seq: int = 1, ack: int = 0, epoch: int = epoch) -> tuple[int, list[object]]:
        return 0, [*ControlFrame(run=run, epoch=epoch, seq=seq, ack=ack, body=encode(message)).parts()]

    def bulk(offset: int, epoch: int = epoch) -> tuple[int, list[object]]:
        frame = BulkFrame(run=run, epoch=epoch, key=blob_key(DELTA), offset=offset, chunk=memoryview(b"x"))
        return 1, [*frame.parts()]

    for lane, parts in [
        control(Ready(), ack=1000),
        control(Ready(), seq=1000),
        control(Ready(), epoch=epoch + 1),
        control(Finished()),
        control(Ready(), seq=0),
        bulk(0, epoch + 1),
        bulk(INITIAL_CREDIT),
        (1, control(Ready())[1]),
        (0, bulk(0)[1]),
        (0, [b""]),
        (0, []),
    ]:
        with pytest.raises(RemoteProtocolError):
            coordinator.receive(lane, parts, 5.0)  # type: ignore[arg-type]
        assert observed(coordinator) == before
    assert reassembly.received == 0


def parse(parts: list[bytes | bytearray | memoryview]) -> tuple[int, int]:
    frame = parse_control(parts, Limits())
    return frame.run, frame.epoch


def observed(session: Session) -> tuple[object, list[SessionEvent], float | None]:
    session.check()
    return repr(session.traffic), session.events(), session.next_timer()


@pytest.mark.parametrize("gives_credit", [False, True])
def test_a_peer_that_takes_none_of_what_is_sent_to_it_ends_its_session(open_pair: OpenPair, gives_credit: bool) -> None:
    """Its heart beats, so that no other time-out sees it."""
    node, coordinator = open_pair(None, Timing(stall_s=60.0))
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    if gives_credit:
        node.expect(UPDATE, len(DATA), blob_digest(DATA), None, 0.0)
    for now in range(100):
        for lane, parts in node.outgoing(float(now)):
            coordinator.receive(lane, parts, float(now))
        for lane, parts in coordinator.outgoing(float(now)):
            if lane == 0:  # the rest is lost
                node.receive(lane, parts, float(now))
        coordinator.handle_timer(float(now))
        if coordinator.state is State.CLOSED:
            break
    assert 60 <= now <= 65
    (end,) = coordinator.events()
    assert isinstance(end, SessionClosed) and end.reason is Reason.TAKES_NOTHING


def test_a_peer_that_takes_little_keeps_its_session(open_pair: OpenPair) -> None:
    """What is waited for is progress, never an end. A receiver acknowledges every 256 KiB: here, once in 200 s."""
    limits = Limits(chunk_bytes=64 << 10)
    node, coordinator = open_pair(limits, Timing(stall_s=210.0, rto_s=2000.0))
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    node.expect(UPDATE, len(DATA), blob_digest(DATA), None, 0.0)
    waiting: list[tuple[int, list[Buffer]]] = []
    for now in range(0, 1500, 5):
        for lane, parts in coordinator.outgoing(float(now)):
            if lane == 0:
                node.receive(lane, parts, float(now))
            else:
                waiting.append((lane, parts))
        if now % 50 == 0 and waiting:
            node.receive(*waiting.pop(0), float(now))
        for lane, parts in node.outgoing(float(now)):
            coordinator.receive(lane, parts, float(now))
        coordinator.handle_timer(float(now))
    assert coordinator.state is State.OPEN
    assert coordinator.events() == [BlobSent(blob=UPDATE)]


def test_what_this_end_holds_back_is_not_the_peers_fault(open_pair: OpenPair) -> None:
    """A snapshot yields to others, for as long as there are others."""
    node, coordinator = open_pair(None, Timing(stall_s=60.0))
    snapshot = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=1)
    offer = Offer(blob=snapshot, size=len(DATA), digest=blob_digest(DATA))
    coordinator.send_blob(offer, BytesSource(DATA), background=True)
    for now in range(300):
        for lane, parts in coordinator.outgoing(float(now), background=False):
            node.receive(lane, parts, float(now))
        for message in messages(node):
            assert message == offer
            node.expect(snapshot, len(DATA), offer.digest, None, float(now))
        for lane, parts in node.outgoing(float(now)):
            coordinator.receive(lane, parts, float(now))
        coordinator.handle_timer(float(now))
    assert coordinator.state is State.OPEN


def test_the_sessions_own_answers_to_a_peer_that_acknowledges_nothing_are_bounded(open_pair: OpenPair) -> None:
    _, coordinator = open_pair(Limits(max_queued_messages=10))
    with pytest.raises(LimitReached, match="20 messages wait"):
        for _ in range(30):
            coordinator.cancel(DELTA)
