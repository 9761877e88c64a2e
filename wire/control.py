"""The control lane's reliable stream: every message in order, exactly once, whatever the pipe does.

Each direction numbers its frames from 0. `ack` on every frame says how many have arrived without a gap; what is not
acknowledged within a time-out is sent again from the first missing one. Heartbeats have no number: they carry an
acknowledgement and a sign of life, and are neither repeated nor acknowledged, or two silent ends would talk for ever.
"""

import math
from collections import deque

from farloop.wire.errors import LimitReached, RemoteProtocolError
from farloop.wire.limits import AHEAD_FRAMES, Limits, Timing
from farloop.wire.messages import Heartbeat, Message, encode
from farloop.wire.traffic import Traffic

HEARTBEAT = encode(Heartbeat())


class ControlStream:
    """Both directions of one end."""

    def __init__(self, limits: Limits, timing: Timing, traffic: Traffic, now: float) -> None:
        self._limits = limits
        self._timing = timing
        self._traffic = traffic
        self.heartbeats = False
        """Off until the session is open: before, no frame but the opening ones may be sent."""

        self._bodies: deque[bytes] = deque()
        """Encoded messages that are not acknowledged; the first has the number `_acked`."""
        self._queued_bytes = 0
        self._acked = 0
        self._cursor = 0
        """Number of the next frame to transmit, for the first time or again."""
        self._highest = 0
        """Number of the first frame that was never transmitted."""
        self._rto_s = timing.rto_s
        self._resend_at: float | None = None
        self._spoke_at = now

        self.received = 0
        """Frames delivered: the number of the next one, and the acknowledgement to send."""
        self._ahead: dict[int, tuple[Message | None, int]] = {}
        """Messages that overtook number `received`, with their bytes."""
        self._ahead_bytes = 0
        self._ack_at: float | None = None

    @property
    def idle(self) -> bool:
        """Whether all that was pushed is acknowledged."""
        return not self._bodies

    def push(self, body: bytes, *, bounded: bool = True) -> None:
        """Queue an encoded message.

        Args:
            body: the message's bytes.
            bounded: False for the session's own Credits: the queue has room for as many again.

        Raises:
            LimitReached: too many messages wait for an acknowledgement.
        """
        share = 1 if bounded else 2
        if len(self._bodies) >= share * self._limits.max_queued_messages:
            raise LimitReached(f"{len(self._bodies)} messages wait for the peer to acknowledge them")
        if self._bodies and self._queued_bytes + len(body) > share * self._limits.max_queued_bytes:
            raise LimitReached(f"{self._queued_bytes} bytes of messages wait for the peer to acknowledge them")
        self._bodies.append(body)
        self._queued_bytes += len(body)

    def admit(self, seq: int, ack: int) -> None:
        """Check the numbers of a frame before anything is changed.

        Raises:
            RemoteProtocolError: no honest peer sends them.
        """
        if ack > self._highest:
            raise RemoteProtocolError(f"{ack} frames acknowledged, {self._highest} were sent")
        if seq >= self.received + AHEAD_FRAMES:
            raise RemoteProtocolError(f"frame {seq} while {self.received} is the next: more than {AHEAD_FRAMES} ahead")

    def acknowledge(self, ack: int, now: float) -> None:
        """The peer has the first `ack` frames."""
        if ack <= self._acked:
            return
        for _ in range(ack - self._acked):
            self._queued_bytes -= len(self._bodies.popleft())
        self._acked = ack
        self._cursor = max(self._cursor, ack)
        self._rto_s = self._timing.rto_s
        self._resend_at = now + self._rto_s if self._cursor > ack else None

    def accept(self, seq: int, message: Message | None, num_bytes: int, now: float) -> list[Message]:
        """Take in an admitted frame; the messages that can now be delivered. None is one unknown here, passed over."""
        if self._ack_at is None:
            self._ack_at = now + self._timing.ack_delay_s
        if seq < self.received or seq in self._ahead:
            self._traffic.control_duplicates += 1
            return []
        if seq > self.received:
            if self._ahead_bytes + num_bytes <= self._limits.max_ahead_bytes:
                self._ahead[seq] = (message, num_bytes)
                self._ahead_bytes += num_bytes
            return []
        ready = [message]
        self.received += 1
        while self.received in self._ahead:
            message, num_bytes = self._ahead.pop(self.received)
            self._ahead_bytes -= num_bytes
            self.received += 1
            ready.append(message)
        return [message for message in ready if message is not None]

    def outgoing(self, now: float) -> list[tuple[int, bytes]]:
        """(number, body) of the frames to transmit now; each must carry `received` as its acknowledgement."""
        frames = []
        for seq in range(self._cursor, min(self._acked + len(self._bodies), self._acked + AHEAD_FRAMES)):
            frames.append((seq, self._bodies[seq - self._acked]))
        if frames:
            self._traffic.control_resends += max(0, min(self._highest, frames[-1][0] + 1) - self._cursor)
            self._cursor = frames[-1][0] + 1
            self._highest = max(self._highest, self._cursor)
            self._resend_at = self._resend_at or now + self._rto_s
        elif self.heartbeats and now >= self._heartbeat_at():
            frames.append((0, HEARTBEAT))
        if frames:
            self._ack_at = None
            self._spoke_at = now
        return frames

    def speak(self) -> None:
        """Let a heartbeat be due now."""
        self._spoke_at = -math.inf

    def next_timer(self) -> float | None:
        """When `handle_timer` and then `outgoing` have something to do."""
        timers = [self._resend_at, self._heartbeat_at() if self.heartbeats else None]
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Go back to the first unacknowledged frame when its time is up."""
        if self._resend_at is not None and now >= self._resend_at:
            self._cursor = self._acked
            self._resend_at = None
            self._rto_s = min(2 * self._rto_s, self._timing.rto_max_s)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._acked <= self._cursor <= self._highest <= self._acked + AHEAD_FRAMES
        assert self._highest <= self._acked + len(self._bodies)
        assert self._queued_bytes == sum(map(len, self._bodies))
        assert self._resend_at is None or self._cursor > self._acked
        assert all(self.received < seq < self.received + AHEAD_FRAMES for seq in self._ahead)
        assert self._ahead_bytes == sum(num_bytes for _, num_bytes in self._ahead.values())
        assert self._ahead_bytes <= self._limits.max_ahead_bytes

    def _heartbeat_at(self) -> float:
        silent_until = self._spoke_at + self._timing.heartbeat_s
        return silent_until if self._ack_at is None else min(silent_until, self._ack_at)
