"""farloop.wire.session: the numbered control stream (protocol T), who may say what when (S, Z), and whole sessions over
a perfect pipe (Q, R, V; late timers: C)."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from plain_runs import PLAIN_HELLO
from session_pairs import WELCOME, carry, delta, messages, offer_of, opened, update
from stories import StoryText, all_stories, check_story, python

import farloop.wire.session
from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BytesSource, blob_digest, blob_key
from farloop.wire.events import BlobDeclined, BlobReceived, BlobSent, MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer, BulkFrame, ControlFrame, parse_control
from farloop.wire.limits import AHEAD_FRAMES, Limits, Timing
from farloop.wire.messages import (
    Credit,
    Fetch,
    Finished,
    Heartbeat,
    LaneHello,
    Leave,
    Message,
    Outcome,
    Ready,
    Refused,
    Role,
    Stored,
    Welcome,
    decode,
    encode,
)
from farloop.wire.reasons import LimitReached, LocalProtocolError, Reason, RemoteProtocolError
from farloop.wire.session import ControlStream, Handshake, Session, State, run_tag
from farloop.wire.traffic import Traffic

# --- The control stream


def stream(**limits: int) -> ControlStream:
    timing = Timing(heartbeat_s=1.0, ack_delay_s=0.25, rto_s=2.0, rto_max_s=10.0)
    return ControlStream(Limits(**limits), timing, Traffic(), 0.0)


def pushed(*bodies: bytes, **limits: int) -> ControlStream:
    """A stream that has sent these."""
    control = stream(**limits)
    for body in bodies:
        control.push(body)
    assert control.outgoing(0.0) == list(enumerate(bodies)) and control.outgoing(0.0) == []
    return control


def resent(control: ControlStream) -> float:
    """When all is sent again that is not acknowledged: then, and not a bit before."""
    at = control.next_timer() or 0.0
    control.handle_timer(at - 0.1)
    assert control.outgoing(at - 0.1) == []
    control.handle_timer(at)
    assert control.outgoing(at) == [(0, b"x")]
    control.check()
    return at


def took(control: ControlStream, seq: int, now: float = 0.0) -> list[int]:
    """Fragments of the messages that are delivered with number `seq`, a Fetch of that fragment."""
    delivered = control.accept(seq, Fetch(fragment=seq), 10, now)
    control.check()
    return [message.fragment for message in delivered if isinstance(message, Fetch)]


# --- Who may say what, and when

REFUSED = Refused(reason=Reason.WRONG_RUN, detail="aa, not bb", retriable=False)
LEAVE = Leave(reason=Reason.DRAINED, detail="done")
RUN, EPOCH = run_tag(WELCOME), WELCOME.epoch


def frame(run: int, epoch: int, seq: int, ack: int = 1) -> ControlFrame:
    return ControlFrame(run=run, epoch=epoch, seq=seq, ack=ack, body=b"x")


def greeting(role: Role, *, open: bool = True) -> Handshake:
    """An end that has had Hello, and where it is open Welcome."""
    end = Handshake(role)
    if role is Role.NODE:
        end.check_send(PLAIN_HELLO)
        end.sent(PLAIN_HELLO)
        if open:
            end.delivered(WELCOME)
    else:
        end.delivered(PLAIN_HELLO)
        if open:
            end.check_send(WELCOME)
            end.sent(WELCOME)
    return end


def welcome(epoch: int) -> Welcome:
    return dataclasses.replace(WELCOME, epoch=epoch)


NODE, COORDINATOR = Role.NODE, Role.COORDINATOR


@all_stories(__file__, "control", "handshake")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(farloop.wire.session), globals()), rewrite=rewrite)


def test_what_overtakes_the_welcome_is_not_judged_but_dropped_and_comes_again() -> None:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(PLAIN_HELLO, 0.0)
    carry(node, coordinator, 0.0)
    coordinator.send(WELCOME, 0.0)
    coordinator.send(Finished(), 0.0)
    coordinator.lane_opened(1)
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    for lane, parts in reversed(coordinator.outgoing(0.0)):
        node.receive(lane, parts, 0.0)
    assert messages(node) == [WELCOME] and node.traffic.stray.frames == 5
    coordinator.handle_timer(2.0)
    carry(node, coordinator, 2.0)
    assert messages(node) == [Finished()]


# --- Whole sessions

DATA = bytes(range(256)) * 5000
DELTA, UPDATE = delta(), update()
OFFER = offer_of(DELTA, DATA)


def test_the_handshake_opens_both_ends_though_a_hello_is_lost() -> None:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(PLAIN_HELLO, 0.0)
    assert len(node.outgoing(0.0)) == 1
    node.handle_timer(2.0)
    carry(node, coordinator, 2.0)
    assert messages(coordinator) == [PLAIN_HELLO]
    assert coordinator.outgoing(9.0) == [], "nothing but Welcome or Refused may come first"
    coordinator.send(WELCOME, 2.0)
    carry(node, coordinator, 2.1)
    assert messages(node) == [WELCOME]
    assert node.state is coordinator.state is State.OPEN


def test_a_refused_node_hears_why_and_both_ends_close() -> None:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(PLAIN_HELLO, 0.0)
    carry(node, coordinator, 0.0)
    coordinator.send(REFUSED, 0.0)
    carry(node, coordinator, 0.0)
    closed = SessionClosed(reason=Reason.WRONG_RUN, detail="aa, not bb")
    assert node.events() == [MessageReceived(message=REFUSED), closed]
    assert coordinator.state is State.CLOSING
    coordinator.handle_timer(5.0)
    assert coordinator.events()[-1] == closed


def test_illegal_local_use_changes_nothing() -> None:
    fresh = Session(Role.NODE, 0.0)
    node, coordinator = opened(Limits(max_control_bytes=1200))
    its_own = (OFFER, Credit(blob=DELTA, received=0, limit=0), Heartbeat(), LaneHello(lane_token=b""))
    calls: list[Callable[[], object]] = [
        lambda: fresh.send(Ready(), 0.0),
        lambda: fresh.send_blob(OFFER, BytesSource(DATA)),
        lambda: fresh.push_blob(UPDATE, BytesSource(DATA)),
        lambda: fresh.expect(UPDATE, 1, 0, None, 0.0),
        lambda: fresh.cancel(UPDATE),
        fresh.lane_hello,
        lambda: fresh.lane_opened(0),
        lambda: node.send(Leave(reason=Reason.NONE, detail="x" * 1200), 0.0),
        lambda: node.send_blob(OFFER, BytesSource(DATA[:-1])),
        lambda: node.lane_opened(1),
        coordinator.lane_hello,
        *((lambda end=end, said=said: end.send(said, 0.0)) for end in (node, coordinator) for said in its_own),
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError):
            call()
    assert fresh.outgoing(0.0) == node.outgoing(0.0) == coordinator.outgoing(0.0) == []
    assert node.state is coordinator.state is State.OPEN


def test_a_pushed_blob_flows_before_it_is_expected_and_both_ends_count_the_same_bytes() -> None:
    node, coordinator = opened()
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    assert len(DATA) < coordinator.traffic.sent_blobs[BlobKind.UPDATE].bytes < len(DATA) + 1000
    node.expect(UPDATE, len(DATA), blob_digest(DATA), None, 0.0)
    carry(node, coordinator, 0.1)
    assert node.events() == [BlobReceived(blob=UPDATE, data=bytearray(DATA))]
    assert coordinator.events() == [BlobSent(blob=UPDATE)]
    assert node.traffic.stray.frames == 0
    assert coordinator.traffic.sent.total == node.traffic.received.total > len(DATA)
    assert node.traffic.sent.total == coordinator.traffic.received.total


def test_a_blob_that_is_declined_and_taken_after_all_is_declined_first() -> None:
    node, coordinator = opened()
    for n in range(AHEAD_FRAMES):
        node.send(Fetch(fragment=n), 0.0)
    node.outgoing(0.0)
    node.expect(UPDATE, len(DATA), blob_digest(DATA), None, 0.0)
    node.cancel(UPDATE)
    node.expect(UPDATE, len(DATA), blob_digest(DATA), None, 0.0)
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    node.handle_timer(2.0)
    carry(node, coordinator, 2.0)
    assert BlobDeclined(blob=UPDATE) in coordinator.events()


@pytest.mark.parametrize("verdict", [Stored(blob=DELTA), Outcome(blob=DELTA, reason=Reason.LATE, detail="")])
def test_a_verdict_ends_a_transfer(verdict: Stored | Outcome) -> None:
    node, coordinator = opened()
    node.send_blob(OFFER, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    coordinator.send(verdict, 0.0)
    carry(node, coordinator, 0.0)
    coordinator.expect(DELTA, OFFER.size, OFFER.digest, None, 0.0)
    carry(node, coordinator, 0.0)
    assert messages(node) == [verdict]
    assert node.traffic.sent_blobs[BlobKind.DELTA].frames == 1


def test_control_never_waits_for_bulk() -> None:
    _, coordinator = opened()
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    coordinator.send(Finished(), 0.0)
    assert [lane for lane, _ in coordinator.outgoing(0.0, max_chunks=0)] == [0]
    assert [lane for lane, _ in coordinator.outgoing(0.0, max_chunks=1)] == [1]
    assert {lane for lane, _ in coordinator.outgoing(0.0)} == {1}


def test_chunks_take_turns_over_the_open_lanes() -> None:
    _, coordinator = opened(Limits(chunk_bytes=64 << 10))
    coordinator.lane_opened(2)
    coordinator.push_blob(UPDATE, BytesSource(DATA))
    assert [lane for lane, _ in coordinator.outgoing(0.0, max_chunks=4)] == [1, 2, 1, 2]


def test_a_new_lane_begins_with_the_token_of_the_welcome() -> None:
    node, coordinator = opened()
    first = node.lane_hello()
    assert decode(parse_control(first, Limits()).body) == LaneHello(lane_token=WELCOME.lane_token, number=1)
    assert decode(parse_control(node.lane_hello(7), Limits()).body) == LaneHello(
        lane_token=WELCOME.lane_token, number=7
    )
    assert node.max_lanes == 16
    for lane in (0, 1):
        with pytest.raises(RemoteProtocolError):
            coordinator.receive(lane, first, 0.0)


def closes_at(session: Session) -> float:
    """When it gives up a peer that says nothing."""
    while session.state is State.OPEN:
        now = session.next_timer() or 0.0
        session.handle_timer(now)
        session.outgoing(now)
    return now


def test_a_silent_peer_is_given_up_at_the_time_out() -> None:
    node, _ = opened(timing=Timing(liveness_s=10.0))
    assert closes_at(node) == 10.0
    assert node.events() == [SessionClosed(reason=Reason.SILENT, detail="nothing was heard for 10 s")]
    assert node.next_timer() is None


def test_the_time_in_which_this_process_stood_still_is_not_the_peers_silence() -> None:
    node, _ = opened(timing=Timing(heartbeat_s=1.0, liveness_s=10.0))
    due = node.next_timer() or 0.0
    node.handle_timer(due + 300.0)
    assert node.state is State.OPEN
    node.outgoing(due + 300.0)
    assert closes_at(node) == 310.0, "ten seconds of silence, the stop not counted"


def test_a_leave_is_delivered_acknowledged_and_closes_both_ends() -> None:
    node, coordinator = opened()
    node.send(Ready(), 0.0)
    node.send(LEAVE, 0.0)
    carry(node, coordinator, 0.0)
    closed = SessionClosed(reason=Reason.DRAINED, detail="done")
    assert coordinator.events() == [MessageReceived(message=Ready()), MessageReceived(message=LEAVE), closed]
    assert node.events() == [closed]
    assert node.outgoing(9.0) == coordinator.outgoing(9.0) == []


def test_a_leave_without_an_acknowledgement_lingers_and_then_closes() -> None:
    node, _ = opened(timing=Timing(linger_s=5.0))
    node.send(LEAVE, 0.5)
    sent = []
    while node.state is not State.CLOSED:
        now = node.next_timer() or 0.0
        sent += node.outgoing(now)
        node.handle_timer(now)
    assert now == 5.5
    assert sent


def test_a_leaving_end_still_acknowledges() -> None:
    node, coordinator = opened()
    node.send(LEAVE, 0.0)
    node.outgoing(0.0)
    coordinator.send(Finished(), 0.0)
    for lane, parts in coordinator.outgoing(0.0):
        node.receive(lane, parts, 0.0)
    [(lane, parts)] = node.outgoing(0.25)
    assert (lane, parse_control(parts, Limits()).ack) == (0, 2)


def test_a_closed_session_says_it_once_and_is_deaf() -> None:
    node, coordinator = opened()
    coordinator.send(Finished(), 0.0)
    node.close(Reason.CLOSED, "cut")
    node.close(Reason.SILENT, "again")
    carry(node, coordinator, 0.0)
    node.handle_timer(100.0)
    assert node.events() == [SessionClosed(reason=Reason.CLOSED, detail="cut")]
    with pytest.raises(LocalProtocolError):
        node.send(Ready(), 0.0)


def test_forbidden_frames_change_nothing() -> None:
    node, coordinator = opened()
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
        bulk(len(DATA)),
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
def test_a_peer_that_takes_none_of_what_is_sent_to_it_ends_its_session(gives_credit: bool) -> None:
    """Its heart beats, so that no other time-out sees it."""
    node, coordinator = opened(None, Timing(stall_s=60.0))
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


def test_a_peer_that_takes_little_keeps_its_session() -> None:
    """What is waited for is progress, never an end. A receiver acknowledges every 256 KiB: here, once in 200 s."""
    limits = Limits(chunk_bytes=64 << 10)
    node, coordinator = opened(limits, Timing(stall_s=210.0, rto_s=2000.0))
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


def test_what_this_end_holds_back_is_not_the_peers_fault() -> None:
    """A snapshot yields to others, for as long as there are others."""
    node, coordinator = opened(None, Timing(stall_s=60.0))
    snapshot = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=1)
    offer = offer_of(snapshot, DATA)
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


def test_the_sessions_own_answers_to_a_peer_that_acknowledges_nothing_are_bounded() -> None:
    _, coordinator = opened(Limits(max_queued_messages=10))
    with pytest.raises(LimitReached, match="20 messages wait"):
        for _ in range(30):
            coordinator.cancel(DELTA)
