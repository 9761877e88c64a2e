"""Events from a session to its application."""

from dataclasses import dataclass

from farloop.algo.spec import BlobId
from farloop.wire.messages import Message
from farloop.wire.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """The next message of the peer, in the order in which it sent them, exactly once.

    Never a Credit, Heartbeat or LaneHello: those are between the sessions.
    """

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobReceived:
    """A blob is whole and has its announced digest. `data` now belongs to the application."""

    blob: BlobId
    data: bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobCorrupt:
    """A blob is whole and does not have its announced digest; its bytes are dropped.

    Every chunk had its checksum, so the sender's own bytes disagree with its announcement.
    """

    blob: BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobIdle:
    """Nothing of an expected blob came for too long, while its sender lived: it is declined. At a coordinator alone."""

    blob: BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSent:
    """The peer's session has all bytes of a blob. Not yet `Stored`: they may be needed again."""

    blob: BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobDeclined:
    """The peer wants no (more) bytes of a blob that this end was sending."""

    blob: BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """The session is over; always its last event, exactly once."""

    reason: Reason
    detail: str


SessionEvent = MessageReceived | BlobReceived | BlobCorrupt | BlobIdle | BlobSent | BlobDeclined | SessionClosed
