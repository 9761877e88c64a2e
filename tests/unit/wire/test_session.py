"""farloop.wire.session: the numbered control stream (protocol T), who may say what when (S, Z), and whole sessions over
a perfect pipe (Q, R, V; late timers: C)."""

import dataclasses
from pathlib import Path

import pytest
import session_pairs
from plain_runs import PLAIN_HELLO
from session_pairs import WELCOME, carry, delta, messages, offer_of, opened, update
from stories import StoryText, all_stories, check_story, python

import farloop.wire.session
from farloop.algo.spec import BlobId, BlobKind
from farloop.wire import events as wire_events
from farloop.wire import messages as wire_messages
from farloop.wire import reasons
from farloop.wire.blobs import BytesSource, Reassembly, blob_digest, blob_key
from farloop.wire.events import BlobSent, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer, BulkFrame, ControlFrame, parse_control
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import (
    Fetch,
    Finished,
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
from farloop.wire.reasons import Reason, RemoteProtocolError
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


def closes_at(session: Session) -> float:
    """When it gives up a peer that says nothing."""
    while session.state is State.OPEN:
        now = session.next_timer() or 0.0
        session.handle_timer(now)
        session.outgoing(now)
    return now


def expect(session: Session, blob: BlobId) -> Reassembly:
    return session.expect(blob, len(DATA), blob_digest(DATA), None, 0.0)


def ended(verdict: Stored | Outcome) -> tuple[bool, int]:
    """Whether the node hears it, and the chunks that it sent: the coordinator asks for the delta after all."""
    node, coordinator = opened()
    node.send_blob(OFFER, BytesSource(DATA))
    carry(node, coordinator, 0.0)
    coordinator.send(verdict, 0.0)
    carry(node, coordinator, 0.0)
    expect(coordinator, DELTA)
    carry(node, coordinator, 0.0)
    return messages(node) == [verdict], node.traffic.sent_blobs[BlobKind.DELTA].frames


def greets(parts: list[Buffer]) -> Message | None:
    return decode(parse_control(parts, Limits()).body)


DRAINED = SessionClosed(reason=Reason.DRAINED, detail="done")


@all_stories(__file__, "control", "handshake", "sessions")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    names = (wire_messages, wire_events, reasons, farloop.wire.session, session_pairs)
    check_story(path, story, python(*map(vars, names), globals()), rewrite=rewrite)


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
