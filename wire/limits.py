"""Limits of what a session holds and sends (`Limits`), and its intervals (`Timing`): local settings, never sent."""

import math
from dataclasses import dataclass, fields
from typing import Final

EARLY_BYTES = 4 << 20
"""Bytes of all blobs without a Credit that may be sent, until the receiver tells another number: what it keeps of
chunks whose blob it does not expect yet. Part of the protocol."""

EARLY_FRAMES = 4096  # ... and as many frames: more than an honest sender makes of a whole pool

EARLY_S = 0.25
"""A receiver keeps so many seconds of the highest rate that it has seen: the round trip of a first Credit."""

AHEAD_FRAMES = 256
"""Control frames in flight: numbers from the first unacknowledged one. Part of the protocol, both ends know it."""

BAD_FRAMES = 8
"""Frames in a row that break the protocol before a link ends the session: one that is damaged is sent again."""

THIN_CHUNK = 64 << 10  # of a link that carries less than `LEAST_FLIGHT` in a second: control waits behind it
SMALLEST_CHUNK = 256 << 10  # of other links: below this, headers and events cost more than they give
SHARED_CHUNK = 128 << 10  # ... where several lanes share a blob: the last chunk of each ends it
CHUNK_S = 0.004  # ... and at least, in time: what it costs the two daemons, some 0.1 ms each, is little beside that
LARGEST_CHUNK = 4 << 20  # above this, a lane is held too long by one blob

BACKOFF_S = (0.1, 5.0)
"""First and longest pause of a node between two attempts to connect; the second to tenth double, each is jittered by a
half."""

LAST_CALL_S = 1.5 * BACKOFF_S[1] + 5.0
"""So long a coordinator serves after the run's end: the longest pause of a node that dials, and 5 s to connect."""

INITIAL_FLIGHT = 4 << 20  # bytes in flight before the link is known
LEAST_FLIGHT = 1 << 20  # ... and at least, once it is, where the link carries them in a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on memory and message sizes, in bytes unless a name says otherwise."""

    max_control_bytes: int = 1 << 20  # body of a control frame, either way
    chunk_bytes: int | None = None  # size of the chunks this end sends; None: by the link (protocol, Flow control)
    max_chunk_bytes: int = LARGEST_CHUNK  # largest chunk this end accepts
    max_blob_bytes: int = 2 << 30  # largest blob; the largest fragment (256 Mi elements) is 1 GiB in fp32
    early_pool_bytes: int = 1 << 30
    """What all sessions of a coordinator, in equal shares, or a node keep of blobs that are not expected yet."""
    max_lanes: int = 16  # bulk lanes of a session
    max_blobs: int = 256  # blobs expected at once
    max_active: int = 64  # blobs offered at once, and blobs pushed at once; the others wait for one of them to end
    max_ahead_bytes: int = 4 << 20  # control frames kept that overtook one still missing
    max_queued_messages: int = 4096
    """Messages accepted from the application and not yet acknowledged; twice as many with the session's own."""
    max_queued_bytes: int = 16 << 20  # ... and their bytes. One message is always accepted.

    @property
    def max_frame_bytes(self) -> int:
        """Largest part of a frame: a body or a chunk, or the header beside it, with room to spare."""
        return max(self.max_control_bytes, self.max_chunk_bytes) + 4096

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None and not 0 < self.chunk_bytes <= self.max_chunk_bytes:
            raise ValueError(f"chunk_bytes must be from 1 to max_chunk_bytes ({self.max_chunk_bytes})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Intervals in seconds of monotonic time. Raises ValueError unless each is finite and above 0."""

    heartbeat_s: float = 1.0  # longest silence on the control lane of this end
    liveness_s: float = 10.0  # silence of the peer after which it is given up (protocol, Liveness)
    ack_delay_s: float = 0.25  # how long an acknowledgement waits for a frame to ride on
    rto_s: float = 2.0
    """First time-out after which unacknowledged control frames are sent again, and the shortest for chunks."""
    rto_max_s: float = 10.0  # largest time-out for control frames; it doubles while nothing helps
    linger_s: float = 5.0  # how long a Leave or Refused of this end may wait for its acknowledgement
    credit_delay_s: float = 0.25  # how long a Credit waits for more bytes to report
    blob_idle_s: float = 30.0
    """A coordinator gives up a blob that is no further after this, times the blobs that share the session, though its
    sender's heart beats: time without progress, never time in all, so that a slow link is as good as a fast one."""
    stall_s: float = 300.0
    """A coordinator ends the session of a peer that takes nothing for this long, though its heart beats: it grants no
    credit for blobs that were announced to it, and acknowledges no byte of those that were sent."""
    jump_s: float = 1.0  # a timer that fires this late tells of a stop of our own process, not of the peer's silence

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0.0 < (seconds := getattr(self, field.name)) < math.inf:
                raise ValueError(f"{field.name} is {seconds:g}: expected seconds above 0, as {field.default:g}")


MOST_LANES: Final = 16


def check_lanes(lanes: int) -> None:
    if not 0 <= lanes <= MOST_LANES:
        raise ValueError(f"{lanes} is not from 0 to {MOST_LANES}; the nearest is {min(max(lanes, 0), MOST_LANES)}")
