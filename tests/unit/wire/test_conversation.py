"""A whole conversation of a node and its coordinator, as protocol version 1 had it on the wire (protocol Z).

`golden/conversation-v1.txt` holds every frame of a run of 2 rounds in the order of arrival, one a line: who sent it, on
which lane, its parts in base64, and what it said. A later version must still understand both sides of it, so it is not
recorded anew for a new field; a new version of the protocol gets a file of its own. The daemons of that time made it,
over loopback.
"""

import base64
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from farloop.algo.spec import BlobId, BlobKind, Revision, to_plain
from farloop.wire import events as ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, blob_digest, blob_key
from farloop.wire.frames import Buffer, parse_bulk, parse_control
from farloop.wire.limits import Limits
from farloop.wire.messages import Role
from farloop.wire.reasons import LocalProtocolError
from farloop.wire.session import Session, State

GOLDEN = Path(__file__).parent / "golden" / "conversation-v1.txt"
LIMITS = Limits()
NOW = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of the file."""

    sender: str
    """The role of the end that it came from."""
    lane: int
    parts: tuple[bytes, ...]
    says: dict[str, Any]
    """A message's name and fields; or a chunk's key, offset and size."""

    @classmethod
    def of(cls, line: str) -> "Frame":
        sender, lane, parts, says = line.split(" ", 3)
        decoded = tuple(base64.b64decode(part) for part in parts.split(","))
        return cls(sender=sender, lane=int(lane), parts=decoded, says=json.loads(says))


def conversation() -> list[Frame]:
    """The recorded frames."""
    return [Frame.of(line) for line in GOLDEN.read_text().splitlines()]


def told(lane: int, parts: Sequence[Buffer]) -> dict[str, Any]:
    """What a frame says, in plain values."""
    if lane == 0 or len(parts) == 1:  # a bulk lane begins with a message
        message = msg.decode(parse_control(parts, LIMITS).body)
        return {"message": type(message).__name__, **plain(message)}
    frame = parse_bulk(parts, LIMITS)
    return {"key": frame.key.hex(), "offset": frame.offset, "size": len(frame.chunk)}


def plain(value: object) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(to_plain(value), default=lambda data: data.hex()))


def holds(now: Any, then: Any) -> bool:
    """Whether all that was said then is said now; fields may have come since."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], then[key]) for key in then)
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(holds, now, then))
    return bool(now == then)


def test_it_is_a_whole_conversation() -> None:
    said = {(frame.sender, frame.says.get("message", "chunk")) for frame in conversation()}
    assert said >= {("node", name) for name in ("Hello", "LaneHello", "Ready", "Offer", "Progress", "Evaluation")}
    assert said >= {("node", name) for name in ("Credit", "Heartbeat", "Leave", "chunk")}
    assert said >= {("coordinator", name) for name in ("Welcome", "Start", "Grant", "Stored", "Committed", "Finished")}
    assert said >= {("coordinator", name) for name in ("Offer", "Credit", "Heartbeat", "chunk")}


def test_every_frame_says_what_it_said() -> None:
    """Z."""
    for number, frame in enumerate(conversation()):
        assert holds(told(frame.lane, frame.parts), frame.says), f"frame {number}"


@pytest.mark.parametrize("role", Role)
def test_either_end_can_be_played_by_a_session_of_today(role: Role) -> None:
    """Z: it takes every recorded frame of its peer, and all messages and blobs come out whole."""
    frames = conversation()
    session = Session(role, NOW)
    came, blobs = list[dict[str, Any]](), dict[BlobId, bytearray]()
    for frame in frames:
        if frame.sender == role.value:
            speak(session, frame, frames)
        elif frame.says.get("message") == "LaneHello":
            session.lane_opened(1)
        else:
            session.receive(frame.lane, frame.parts, NOW)
            for event in session.events():
                hear(session, event, came, blobs)
        while session.outgoing(NOW):
            pass
        session.check()
    handled = ("Credit", "Heartbeat", "LaneHello")
    theirs = [f.says for f in frames if f.sender != role.value and f.says.get("message", "Credit") not in handled]
    assert holds(came, theirs)
    kinds = {BlobKind.DELTA} if role is Role.COORDINATOR else {BlobKind.SNAPSHOT, BlobKind.UPDATE}
    assert {blob.kind for blob in blobs} == kinds
    assert {blob_key(blob).hex() for blob in blobs} == {
        frame.says["key"] for frame in frames if frame.sender != role.value and "key" in frame.says
    }
    assert session.state is State.CLOSED


def test_a_recorded_node_is_answered_in_its_own_version() -> None:
    """Z: N−1. What came with a later version is withheld from it."""
    frames = conversation()
    session, (hello, welcome) = Session(Role.COORDINATOR, NOW), (frames[0], frames[1])
    session.receive(hello.lane, hello.parts, NOW)
    heard = [event.message for event in session.events() if isinstance(event, ev.MessageReceived)]
    assert isinstance(heard[0], msg.Hello) and (heard[0].protocol_min, heard[0].protocol_max) == (1, 1)
    recorded = msg.decode(parse_control(welcome.parts, LIMITS).body)
    assert isinstance(recorded, msg.Welcome) and recorded.protocol == 1 and recorded.revisions == ()
    session.send(recorded, NOW)
    revision = Revision(number=1, terms=recorded.spec.terms, windows=(2, 2), round=3)
    with pytest.raises(LocalProtocolError, match="needs version 2"):
        session.send(msg.Revised(revision=revision), NOW)


def test_a_field_of_today_is_passed_over_by_who_does_not_know_it() -> None:
    """Z: N−1. An older node reads today's Welcome, revisions and all, as one of its own time."""
    recorded = msg.decode(parse_control(conversation()[1].parts, LIMITS).body)
    assert isinstance(recorded, msg.Welcome)
    revision = Revision(number=1, terms=recorded.spec.terms, windows=(2, 2), round=3)
    today = dataclasses.replace(recorded, revisions=(revision,))
    number, must_understand, fields = msg.unpack(msg.encode(today))
    then = msg.unpack(msg.encode(recorded))
    assert [number, must_understand, {key: fields[key] for key in then[2]}] == then
    assert fields.keys() - then[2].keys() == {"revisions"}


def speak(session: Session, frame: Frame, frames: Sequence[Frame]) -> None:
    """Say what was said; what sessions say of their own accord is left to them."""
    if "key" in frame.says:
        return
    if frame.lane:
        session.lane_opened(1)
        return
    match msg.decode(parse_control(frame.parts, LIMITS).body):
        case msg.Offer() as offer:
            session.send_blob(offer, BytesSource(sent_bytes(offer.blob, offer.size, offer.digest, frames)))
        case msg.Credit() | msg.Heartbeat():
            pass
        case msg.Committed() as committed:
            session.send(committed, NOW)
            blob = msg.update_id(committed)
            session.push_blob(blob, BytesSource(sent_bytes(blob, committed.size, committed.digest, frames)))
        case message:
            assert message is not None
            if session.state is not State.CLOSED:  # a farewell that crossed the peer's
                session.send(message, NOW)


def sent_bytes(blob: BlobId, size: int, digest: int, frames: Sequence[Frame]) -> bytes:
    """A blob put together from its recorded chunks."""
    data = bytearray(size)
    for frame in frames:
        if frame.says.get("key") == blob_key(blob).hex():
            chunk = parse_bulk(frame.parts, LIMITS)
            data[chunk.offset : chunk.offset + len(chunk.chunk)] = chunk.chunk
    assert blob_digest(data) == digest
    return bytes(data)


def hear(session: Session, event: ev.SessionEvent, came: list[dict[str, Any]], blobs: dict[BlobId, bytearray]) -> None:
    """As a link does: what is announced is taken."""
    match event:
        case ev.MessageReceived(message=message):
            came.append({"message": type(message).__name__, **plain(message)})
            if isinstance(message, msg.Offer):
                session.expect(message.blob, message.size, message.digest, None, NOW)
            elif isinstance(message, msg.Committed):
                session.expect(msg.update_id(message), message.size, message.digest, None, NOW)
        case ev.BlobReceived(blob=blob, data=data):
            blobs[blob] = data
        case ev.BlobCorrupt():
            raise AssertionError(event)
        case _:
            pass
