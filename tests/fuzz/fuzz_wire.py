"""The doors of the wire: a frame of either lane, a message, and a session that is sent any sequence of frames."""

import base64
import contextlib
from functools import cache, partial
from pathlib import Path
from random import Random

import xxhash
from fuzz_mutator import edited, join, packed_edit, shuffled, split
from fuzz_target import Target

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire import events as ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.frames import BULK_HEADER_BYTES, CONTROL_HEADER_BYTES, parse_bulk, parse_control
from farloop.wire.limits import Limits
from farloop.wire.messages import Role
from farloop.wire.reasons import LocalProtocolError, RemoteProtocolError
from farloop.wire.session import Session, State, run_tag

LIMITS = Limits()
MOST_ASKED_FOR = 1 << 20
"""Bytes of a blob that the session's owner lets come: a coordinator knows how large a delta is before it says yes."""

_GOLDEN = Path(__file__).parents[1] / "unit" / "wire" / "golden"
_TICKS_S = (0.0, 0.05, 0.6, 3.0)


def sealed(frame: bytes, header_bytes: int) -> bytes:
    """The frame with the length and the checksum of its bytes."""
    if len(frame) < header_bytes:
        return frame
    made = bytearray(frame)
    made[20:24] = (len(made) - header_bytes).to_bytes(4, "little")
    digest = xxhash.xxh3_64(bytes(made[: header_bytes - 8]))
    digest.update(bytes(made[header_bytes:]))
    made[header_bytes - 8 : header_bytes] = digest.intdigest().to_bytes(8, "little")
    return bytes(made)


def as_parts(lane: int, frame: bytes) -> list[bytes]:
    """A frame as its socket gives it: header and chunk apart on a bulk lane."""
    return [frame[:BULK_HEADER_BYTES], frame[BULK_HEADER_BYTES:]] if lane else [frame]


@cache
def conversation() -> tuple[tuple[str, int, tuple[bytes, ...]], ...]:
    """(sender, lane, parts) of every frame of a recorded conversation."""
    lines = (line.split(" ", 3) for line in (_GOLDEN / "conversation-v1.txt").read_text().splitlines())
    return tuple(
        (sender, int(lane), tuple(base64.b64decode(part) for part in parts.split(",")))
        for sender, lane, parts, _ in lines
    )


@cache
def control_frames() -> list[bytes]:
    """One of every message, and those of the conversation."""
    golden = [bytes.fromhex(line.split()[1]) for line in (_GOLDEN / "frames-v1.txt").read_text().splitlines()]
    said = [parts[0] for _, _, parts in conversation() if len(parts) == 1]
    return [*(frame for frame in golden if frame[5] == 1), *said]


def bulk_frames() -> list[bytes]:
    return [b"".join(parts) for _, _, parts in conversation() if len(parts) == 2]


def bodies() -> list[bytes]:
    return [frame[CONTROL_HEADER_BYTES:] for frame in control_frames()]


def check_control(data: bytes) -> None:
    check_message(bytes(parse_control([data], LIMITS).body))


def check_bulk(data: bytes) -> None:
    frame = parse_bulk(as_parts(1, data), LIMITS)
    assert 0 < len(frame.chunk) <= LIMITS.max_chunk_bytes and frame.end <= LIMITS.max_blob_bytes


def check_message(data: bytes) -> None:
    """What was believed can be said again, and means the same. A frame brings no more bytes than this."""
    message = msg.decode(data[: LIMITS.max_control_bytes])
    if message is not None:
        assert repr(msg.decode(msg.encode(message))) == repr(message)


# --- a session


@cache
def first(sender: str) -> msg.Message:
    """What an end says first."""
    body = next(parts[0] for who, _, parts in conversation() if who == sender)[CONTROL_HEADER_BYTES:]
    message = msg.decode(body)
    assert message is not None
    return message


def opened(role: Role) -> Session:
    """An end that has said its opening word, or, as the coordinator, will; and what it has to send."""
    session = Session(role, 0.0, limits=LIMITS)
    if role is Role.NODE:
        session.send(first("node"), 0.0)
    return session


def offers_of(role: Role) -> list[tuple[BlobId, bytes]]:
    kind = BlobKind.DELTA if role is Role.NODE else BlobKind.UPDATE
    node = NodeId("a") if role is Role.NODE else NodeId("")
    return [(BlobId(kind=kind, fragment=0, version=v, node=node), bytes(200_000 * v + 1)) for v in range(3)]


def speak(session: Session, role: Role) -> None:
    """Offer, and push, what there is."""
    for blob, data in offers_of(role):
        with contextlib.suppress(LocalProtocolError):
            session.send_blob(msg.Offer(blob=blob, size=len(data), digest=blob_digest(data)), BytesSource(data))
    with contextlib.suppress(LocalProtocolError):
        session.push_blob(BlobId(kind=BlobKind.UPDATE, fragment=1, version=9), BytesSource(bytes(700_000)))
    with contextlib.suppress(LocalProtocolError):
        session.lane_opened(1)


def owner_hears(session: Session, role: Role, event: ev.SessionEvent, now: float) -> None:
    """What links and daemons do with what a session reports."""
    announced: tuple[BlobId, int, int] | None = None
    match event:
        case ev.MessageReceived(message=msg.Hello()) if role is Role.COORDINATOR:
            with contextlib.suppress(LocalProtocolError):
                session.send(first("coordinator"), now)
                speak(session, role)
        case ev.MessageReceived(message=msg.Welcome()):
            speak(session, role)
        case ev.MessageReceived(message=msg.Offer(blob=blob, size=size, digest=digest)):
            announced = blob, size, digest
        case ev.MessageReceived(message=msg.Committed() as committed):
            announced = msg.update_id(committed), committed.size, committed.digest
        case ev.BlobReceived(data=data):
            assert len(data) <= MOST_ASKED_FOR
        case _:
            pass
    if announced and announced[1] <= MOST_ASKED_FOR and session.state is State.OPEN:
        with contextlib.suppress(LocalProtocolError):
            session.expect(*announced, None, now)


def check_session(role: Role, data: bytes) -> str:
    """Any frames, on any lane, at any time: refused one by one, and every invariant holds after each."""
    session, now, saw = opened(role), 0.0, set[str]()
    for kind, frame in split(data):
        lane = kind & 1
        now += _TICKS_S[kind >> 1 & 3]
        session.handle_timer(now)
        with contextlib.suppress(RemoteProtocolError):
            session.receive(lane, as_parts(lane, frame), now)
        for event in session.events():
            saw.add(type(event.message if isinstance(event, ev.MessageReceived) else event).__name__)
            owner_hears(session, role, event, now)
        turns = 0
        while session.outgoing(now):
            turns += 1
            assert turns < 1000, "it never stops talking"
        session.check()
    return " ".join(sorted(saw))


def seal_session(data: bytes) -> bytes:
    """Every frame of the sequence sealed, in the run and the epoch of the session unless it opens one."""
    welcome = first("coordinator")
    assert isinstance(welcome, msg.Welcome)
    tag = run_tag(welcome).to_bytes(8, "little") + welcome.epoch.to_bytes(4, "little")
    items = []
    for kind, frame in split(data):
        opening = not kind & 1 and frame[8:20] == bytes(12)
        made = frame[:8] + (frame[8:20] if opening else tag) + frame[20:]
        items.append((kind, sealed(made, BULK_HEADER_BYTES if kind & 1 else CONTROL_HEADER_BYTES)))
    return join(items)


def edited_frame(chance: Random, frame: bytes) -> bytes:
    """Its numbers, its message, or anything."""
    match chance.randrange(4):
        case 0:
            return edited(chance, frame)
        case 1:
            head = edited(chance, frame[24:CONTROL_HEADER_BYTES])[:16]
            return frame[:24] + head.ljust(16, b"\0") + frame[40:]
        case _:
            return frame[:CONTROL_HEADER_BYTES] + packed_edit(chance, frame[CONTROL_HEADER_BYTES:])


def spoken_to(role: Role) -> list[bytes]:
    """What the other end said, in three lengths."""
    said = [
        (int(bool(lane and len(parts) == 2)), b"".join(parts))
        for sender, lane, parts in conversation()
        if sender != role.value and not (lane and len(parts) == 1)
    ]
    return [join(said[:end]) for end in (2, 8, len(said))]


_REFUSES = (RemoteProtocolError,)

TARGETS = (
    Target(
        name="frame-control",
        run=check_control,
        allowed=_REFUSES,
        seeds=control_frames,
        mutate=edited_frame,
        seal=partial(sealed, header_bytes=CONTROL_HEADER_BYTES),
    ),
    Target(
        name="frame-bulk",
        run=check_bulk,
        allowed=_REFUSES,
        seeds=bulk_frames,
        seal=partial(sealed, header_bytes=BULK_HEADER_BYTES),
    ),
    Target(name="message", run=check_message, allowed=_REFUSES, seeds=bodies, mutate=packed_edit),
    *(
        Target(
            name=f"session-{role.value}",
            run=partial(check_session, role),
            allowed=(),
            seeds=partial(spoken_to, role),
            mutate=shuffled(edited_frame),
            seal=seal_session,
        )
        for role in Role
    ),
)
