"""One session, sans-I/O: handshake, ordered control stream, lanes and blobs."""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import Enum

from farloop.algo.spec import BlobId
from farloop.wire.blobs import BlobSource, Reassembly, blob_key
from farloop.wire.events import MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer, BulkFrame, ControlFrame, lane_hello, parse_bulk, parse_control
from farloop.wire.limits import AHEAD_FRAMES, Limits, Timing
from farloop.wire.messages import (
    SENT_BY,
    Credit,
    Echo,
    Echoed,
    Heartbeat,
    Hello,
    LaneHello,
    Leave,
    Message,
    Offer,
    Outcome,
    Progress,
    Refused,
    Role,
    Stored,
    Welcome,
    decode,
    encode,
)
from farloop.wire.outgoing import LinkKnown
from farloop.wire.reasons import LimitReached, LocalProtocolError, Reason, RemoteProtocolError
from farloop.wire.traffic import Count, Traffic
from farloop.wire.transfer import Transfers
from farloop.wire.uplink import Uplink

# --- Handshake: which end may send what, and every change of a session's state
#
#     NODE         OPENING ── Welcome delivered ──► OPEN ── Leave sent ──► CLOSING ── acknowledged ──► CLOSED
#     COORDINATOR  OPENING ── Welcome sent ───────► OPEN ── Leave sent ──► CLOSING ── acknowledged ──► CLOSED
#                  OPENING ── Refused sent ───────► CLOSING
#
# From every state, the peer's Leave or Refused, its silence, and `Session.close` lead to CLOSED.


MAX_EPOCH = (1 << 32) - 1  # the epoch's field in a frame


class State(Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_OPENINGS: tuple[type[Message], ...] = (Hello, Welcome, Refused)
"""What stands first, and only first, in either direction."""

_PEER = {Role.NODE: Role.COORDINATOR, Role.COORDINATOR: Role.NODE}


class Handshake:
    """The state of one end, and the run and epoch that all of its frames must carry once they are known."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = State.OPENING
        self.run = 0  # the run's fingerprint as a number; 0, like `epoch`, until the session is open
        self.epoch = 0
        self.lane_token = b""
        self.max_lanes = 1  # bulk lanes that the coordinator takes
        self.farewell: Leave | Refused | None = None  # the message with which this end leaves
        self._greeted = False  # whether Hello was sent (node) or delivered (coordinator)

    def check_open(self) -> None:
        if self.state is not State.OPEN:
            raise LocalProtocolError(f"the session is {self.state.value}")

    def check_send(self, message: Message) -> None:
        """Check that this end may say `message` now.
        Raises LocalProtocolError: another role says it, or it has another place in the session."""
        name = type(message).__name__
        if type(message) not in SENT_BY[self.role]:
            raise LocalProtocolError(f"a {self.role.value} does not send {name}")
        if not isinstance(message, _OPENINGS):
            self.check_open()
        elif self.state is not State.OPENING or self._greeted == isinstance(message, Hello):
            raise LocalProtocolError(f"{name} has its place at the beginning, once")
        if isinstance(message, Welcome) and not 0 < message.epoch <= MAX_EPOCH:
            raise LocalProtocolError(f"epoch {message.epoch}")

    def sent(self, message: Message) -> None:
        self.delivered(message)
        if isinstance(message, Leave | Refused):
            self.state = State.CLOSING
            self.farewell = message

    def delivered(self, message: Message) -> None:
        """The peer's next message is `message`; and whoever says it opens the session by it, too."""
        if isinstance(message, Hello):
            self._greeted = True
        elif isinstance(message, Welcome):
            self.state, self.run, self.epoch = State.OPEN, run_tag(message), message.epoch
            self.lane_token, self.max_lanes = message.lane_token, max(1, message.lanes)

    def admit(self, frame: ControlFrame, message: Message | None) -> bool:
        """Check that the peer may say `message`, in this frame. False for a frame that overtook Welcome: not wrong, but
        not yet to be judged; it will be sent again. None is a message unknown here, which may be passed over.
        Raises RemoteProtocolError: it may not."""
        if message is not None and type(message) not in SENT_BY[_PEER[self.role]]:
            raise RemoteProtocolError(f"a {_PEER[self.role].value} does not send {type(message).__name__}")
        opens = isinstance(message, _OPENINGS)
        if (opens or isinstance(message, Heartbeat)) != (frame.seq == 0):
            raise RemoteProtocolError(f"frame {frame.seq} holds {type(message).__name__}")
        if opens:
            self._check_opening(frame, message)
        elif self.role is Role.NODE and self.state is State.OPENING:
            return False
        else:
            self.check_run(frame.run, frame.epoch)
        return True

    def check_run(self, run: int, epoch: int) -> None:
        """Raise RemoteProtocolError unless a frame is of the open session's run and epoch (protocol, Fencing)."""
        if (run, epoch) != (self.run, self.epoch) or epoch == 0:
            raise RemoteProtocolError(f"run {run:016x} epoch {epoch}, here {self.run:016x} epoch {self.epoch}")

    def _check_opening(self, frame: ControlFrame, message: Message | None) -> None:
        name = type(message).__name__
        expected = (run_tag(message), message.epoch) if isinstance(message, Welcome) else (0, 0)
        if (frame.run, frame.epoch) != expected:
            raise RemoteProtocolError(f"{name} in a frame of run {frame.run:016x} epoch {frame.epoch}")
        if isinstance(message, Welcome):
            if self.state is not State.OPENING:
                self.check_run(frame.run, frame.epoch)
            elif frame.epoch == 0:
                raise RemoteProtocolError("epochs begin at 1")
        if not isinstance(message, Hello) and frame.ack == 0:
            raise RemoteProtocolError(f"{name} answers no Hello")


def run_tag(welcome: Welcome) -> int:
    """The run's fingerprint as the number that frames carry."""
    return int(welcome.spec.identity.fingerprint(), 16)


# --- Control stream: every message in order, exactly once
#
# Each direction numbers its frames from 0. `ack` on every frame says how many have arrived without a gap; what is not
# acknowledged within a time-out is sent again from the first missing one. Heartbeats have no number: they carry an
# acknowledgement and a sign of life, and are neither repeated nor acknowledged, or two silent ends would talk for ever.


HEARTBEAT = encode(Heartbeat())


class ControlStream:
    """Both directions of one end."""

    def __init__(self, limits: Limits, timing: Timing, traffic: Traffic, now: float) -> None:
        self._limits = limits
        self._timing = timing
        self._traffic = traffic
        self.heartbeats = False  # off until the session is open: before, no frame but the opening ones may be sent

        self._bodies: deque[bytes] = deque()
        """Encoded messages that were transmitted and are not acknowledged; the first has the number `_acked`."""
        self._waiting: dict[object, bytes] = {}  # ... that were never transmitted, in order, by what they are newest of
        self._pushed = 0  # number of messages so far
        self._queued_bytes = 0
        self._acked = 0
        self._cursor = 0  # number of the next frame to transmit, for the first time or again
        self._rto_s = timing.rto_s
        self._resend_at: float | None = None
        self._spoke_at = now

        self.received = 0  # frames delivered: the number of the next one, and the acknowledgement to send
        self._ahead: dict[int, tuple[Message | None, int]] = {}
        """Messages that overtook number `received`, with their bytes."""
        self._ahead_bytes = 0
        self._ack_told = 0  # `received` when this end last spoke
        self._ack_at: float | None = None

    @property
    def idle(self) -> bool:
        """Whether all that was pushed is acknowledged."""
        return not self._bodies and not self._waiting

    @property
    def _highest(self) -> int:
        """Number of the first frame that was never transmitted."""
        return self._acked + len(self._bodies)

    def push(self, body: bytes, *, newest_of: object = None, bounded: bool = True) -> None:
        """Queue an encoded message.

        Args:
            newest_of: what only the newest message of is kept, as long as it waits to be transmitted; None: none of it.
            bounded: False for the session's own Credits: the queue has room for as many again, and a newer one has the
                place of the one before, for it must not wait behind ever more messages.

        Raises LimitReached: too many messages wait for an acknowledgement.
        """
        share, num_queued = 1 if bounded else 2, len(self._bodies) + len(self._waiting)
        if num_queued >= share * self._limits.max_queued_messages:
            raise LimitReached(f"{num_queued} messages wait for the peer to acknowledge them")
        if num_queued and self._queued_bytes + len(body) > share * self._limits.max_queued_bytes:
            raise LimitReached(f"{self._queued_bytes} bytes of messages wait for the peer to acknowledge them")
        self._pushed += 1
        key = self._pushed if newest_of is None else newest_of
        self._queued_bytes += len(body) - len(self._waiting.get(key, b""))
        if bounded:
            self._waiting.pop(key, None)
        self._waiting[key] = body

    def withdraw(self, newest_of: object) -> None:
        """Drop what waits of this to be transmitted."""
        self._queued_bytes -= len(self._waiting.pop(newest_of, b""))

    def admit(self, seq: int, ack: int) -> None:
        """Check the numbers of a frame before anything is changed.
        Raises RemoteProtocolError: no honest peer sends them."""
        if ack > self._highest:
            raise RemoteProtocolError(f"{ack} frames acknowledged, {self._highest} were sent")
        if seq >= self.received + AHEAD_FRAMES:
            raise RemoteProtocolError(f"frame {seq} while {self.received} is the next: more than {AHEAD_FRAMES} ahead")

    def acknowledge(self, ack: int, now: float) -> None:
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
        if self.received - self._ack_told >= AHEAD_FRAMES // 4:  # the peer sends many: it must not come to wait
            self._ack_at = now
        return [message for message in ready if message is not None]

    def outgoing(self, now: float) -> list[tuple[int, bytes]]:
        """(number, body) of the frames to transmit now; each must carry `received` as its acknowledgement."""
        self._traffic.control_resends += self._highest - self._cursor
        while self._waiting and len(self._bodies) < AHEAD_FRAMES:
            self._bodies.append(self._waiting.pop(next(iter(self._waiting))))
        frames = [(seq, self._bodies[seq - self._acked]) for seq in range(self._cursor, self._highest)]
        if frames:
            self._cursor = self._highest
            self._resend_at = self._resend_at or now + self._rto_s
        elif self.heartbeats and now >= self._heartbeat_at():
            frames.append((0, HEARTBEAT))
        if frames:
            self._ack_at = None
            self._ack_told = self.received
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
        assert self._acked <= self._cursor <= self._highest <= self._acked + AHEAD_FRAMES
        assert self._queued_bytes == sum(map(len, self._bodies)) + sum(map(len, self._waiting.values()))
        assert self._resend_at is None or self._cursor > self._acked
        assert all(self.received < seq < self.received + AHEAD_FRAMES for seq in self._ahead)
        assert self._ahead_bytes == sum(num_bytes for _, num_bytes in self._ahead.values())
        assert self._ahead_bytes <= self._limits.max_ahead_bytes

    def _heartbeat_at(self) -> float:
        silent_until = self._spoke_at + self._timing.heartbeat_s
        return silent_until if self._ack_at is None else min(silent_until, self._ack_at)


# --- Session: one control lane and any number of bulk lanes
#
# A link owns the sockets and turns the crank: it hands in what arrives (`receive`), what its application asks (`send`,
# `send_blob`, …) and the passing of time (`handle_timer`); then it drains `events()`, transmits `outgoing(now)` until
# that is empty or a socket is full, and sleeps until a socket is readable or `next_timer()` has come. All readable
# frames go in before a due timer does (protocol, Monotonic clocks).


ROUND_TRIPS = 10  # echoes that a round trip is known by: one alone may have waited behind something


class Session:
    """One end of a link. `now` is monotonic seconds; nothing here blocks or reads a clock.

    Args:
        now: the time of its start; silence is counted from here.
        share: the most bytes that it keeps of blobs that are not expected yet; the whole pool of `limits` if None.
        known: what an earlier session saw of the link.
        uplink: what this end may send, over all of its sessions.
    """

    def __init__(
        self,
        role: Role,
        now: float,
        *,
        limits: Limits | None = None,
        timing: Timing | None = None,
        share: Callable[[], int] | None = None,
        known: LinkKnown | None = None,
        uplink: Uplink | None = None,
    ) -> None:
        self.traffic = Traffic()
        self._limits = limits or Limits()
        self._timing = timing or Timing()
        self._uplink = uplink
        self._handshake = Handshake(role)
        self._control = ControlStream(self._limits, self._timing, self.traffic, now)
        self._events: list[SessionEvent] = []
        patient = role is Role.NODE  # for ever
        self.transfers = Transfers(
            self._limits,
            self._timing,
            self.traffic,
            self._events.append,
            self._say,
            idle_s=None if patient else self._timing.blob_idle_s,
            stall_s=None if patient else self._timing.stall_s,
            share=share,
            known=known,
            uplink=uplink,
            now=now,
        )
        self._lanes = self.transfers.lanes  # bulk lanes that can be sent on
        self.heard_at = now  # when a frame of the peer last arrived
        self._closes_at: float | None = None  # when this end stops waiting for the acknowledgement of its farewell
        self._last_ack_due = False  # whether the peer's Leave is still to be acknowledged
        self._echoes: dict[int, float] = {}  # number → when it was said
        self.round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        """The last ones, in seconds, through both daemons and whatever is between them."""

    @property
    def state(self) -> State:
        return self._handshake.state

    def send(self, message: Message, now: float) -> None:
        """Queue a message: Hello first (node), Welcome or Refused first, in answer to Hello (coordinator).

        A node must then wait for Welcome. Nothing may follow a Leave or Refused. Offers go through `send_blob`.
        Raises LimitReached: too many wait. Raises LocalProtocolError: not in this state or from this end, or too large.
        """
        if isinstance(message, Offer | Credit | Heartbeat | LaneHello):
            raise LocalProtocolError(f"{type(message).__name__} is sent by the session itself")
        self._queue(message)
        if self._handshake.farewell is not None:
            self._closes_at = now + self._timing.linger_s

    def echo(self, now: float) -> None:
        """Measure the round trip once more; `round_trips` will tell. Not while the peer owes many answers.
        Raises LocalProtocolError: not a coordinator, or the session has no echoes."""
        if len(self._echoes) < ROUND_TRIPS:
            number = max(self._echoes, default=0) + 1
            self._queue(Echo(number=number))
            self._echoes[number] = now

    def blob_waits(self, now: float) -> bool | None:
        """Whether `outgoing` would have a chunk, but for the uplink's limit; see `Transfers.waits`."""
        return self.transfers.waits(now) if self.state is State.OPEN and len(self._lanes) > 0 else None

    def send_blob(self, offer: Offer, source: BlobSource, *, background: bool = False) -> None:
        """Send the Offer, and the bytes as the session's windows and the peer's Credit allow: those of a `background`
        blob when no other has any, and `outgoing` is asked for them. Any number may be given: what is too many at once
        waits in order. Ends in BlobSent, in BlobDeclined, or with the peer's Stored or Outcome, which are delivered as
        messages.

        Raises:
            AlreadyUnderWay: being sent already, or waiting.
            LimitReached: the peer leaves too many messages unacknowledged.
            LocalProtocolError: not open, or `source` has another size than offered.
        """
        if source.size != offer.size:
            raise LocalProtocolError(f"{offer.size} bytes offered, {source.size} at hand")
        self._handshake.check_open()
        self.transfers.queue(offer.blob, source, offer, background=background)
        self._begin_blobs()

    def push_blob(self, blob: BlobId, source: BlobSource) -> None:
        """Send a blob whose size and digest the application itself announces (Committed).

        Bytes leave at once, within the early window, and go on with the peer's Credit. Any number may be given: what is
        too many at once waits in order. Ends in BlobSent or BlobDeclined.
        Raises AlreadyUnderWay, LocalProtocolError: as `send_blob`.
        """
        self._handshake.check_open()
        self.transfers.queue(blob, source)
        self._begin_blobs()

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        """Allow the peer to send an announced blob. Ends in BlobReceived or BlobCorrupt.

        A `reassembly` of an earlier session is continued if size and digest are equal (protocol, Acknowledgements),
        else a new one is begun. Keep the one returned to resume after this session. Raises as `Transfers.expect`, and
        LocalProtocolError: not open.
        """
        self._handshake.check_open()
        return self.transfers.expect(blob, size, digest, reassembly, now)

    def cancel(self, blob: BlobId) -> None:
        """Stop sending `blob`; or, if it is not being sent, stop or refuse to receive it: the peer gets BlobDeclined.
        Raises LocalProtocolError: not open."""
        self._handshake.check_open()
        self.transfers.cancel(blob)
        self._begin_blobs()

    def speak(self) -> None:
        """Have something to send now, if only a heartbeat: some links notice a broken connection by that alone."""
        self._control.speak()

    def last_word(self, reason: Reason, detail: str, now: float) -> list[tuple[int, list[Buffer]]]:
        """A coordinator's farewell before `close`, with all that is to be transmitted before it; nothing after an end.
        Raises LocalProtocolError: it cannot be said any more, or not yet."""
        match self.state:
            case State.OPENING:
                self.send(Refused(reason=reason, detail=detail, retriable=True), now)
            case State.OPEN:
                self.send(Leave(reason=reason, detail=detail), now)
        return self.outgoing(now, max_chunks=0)

    def close(self, reason: Reason, detail: str) -> None:
        """End here and now without a word to the peer, as when the connection is lost."""
        if self.state is not State.CLOSED:
            self._handshake.state = State.CLOSED
            self._events.append(SessionClosed(reason=reason, detail=detail))

    def lane_opened(self, lane: int) -> None:
        """Bulk lane `lane` ≥ 1 can be sent on: its LaneHello was sent (node) or accepted (coordinator)."""
        if lane < 1 or lane in self._lanes:
            raise LocalProtocolError(f"lane {lane} cannot be opened")
        self._lanes.opened(lane)

    def lane_lost(self, lane: int) -> None:
        """The connection of a bulk lane is gone: what was on its way there is sent again, on the other lanes. Whether
        the session can do without it is for the link to say."""
        self.transfers.lane_lost(lane)

    @property
    def max_lanes(self) -> int:
        """Bulk lanes that the session may have; 1 before it is open."""
        return min(self._handshake.max_lanes, self._limits.max_lanes)

    def lane_hello(self, number: int = 1) -> list[Buffer]:
        """The frame with which a node begins bulk lane `number`, or begins it again.
        Raises LocalProtocolError: not a node, or not open."""
        self._handshake.check_open()
        if self._handshake.role is not Role.NODE:
            raise LocalProtocolError("nodes open lanes")
        parts = lane_hello(self._handshake.run, self._handshake.epoch, self._handshake.lane_token, number)
        self._sent(parts, self.traffic.sent_control)
        return parts

    def receive(self, lane: int, parts: Sequence[Buffer], now: float) -> None:
        """Take in what a lane brought. Chunks are copied, but early ones are kept: do not reuse their memory.
        Raises RemoteProtocolError: the frame is damaged or forbidden. Nothing was changed: count it and go on, and
        `close` with MALFORMED if they keep coming."""
        if self.state is State.CLOSED:
            return
        if lane == 0:
            frame = parse_control(parts, self._limits)
            return self._receive_control(frame, decode(frame.body), self.traffic.wire_bytes(parts), now)
        chunk, num_bytes = parse_bulk(parts, self._limits), self.traffic.wire_bytes(parts)
        if self.state is State.OPENING:
            self.traffic.stray.add(num_bytes)
        else:
            self._handshake.check_run(chunk.run, chunk.epoch)
            self.transfers.admit(chunk)
            self.heard_at = now
            self.transfers.accept(chunk, num_bytes, now)

    def events(self) -> list[SessionEvent]:
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    def outgoing(
        self, now: float, *, max_chunks: int = 8, background: bool = True, full: Collection[int] = ()
    ) -> list[tuple[int, list[Buffer]]]:
        """(lane, parts) to transmit now: every control frame that is due, and at most `max_chunks` bulk frames, none of
        them on the lanes that are `full`.

        Call until it returns nothing. With `max_chunks=0`, while the bulk sockets are full, control still flows. With
        `background=False` blobs of that class wait, for a link that has other things to carry.
        """
        if self.state is State.CLOSED:
            last_ack_due, self._last_ack_due = self._last_ack_due, False
            return [self._control_frame(0, HEARTBEAT)] if last_ack_due else []
        frames = [self._control_frame(seq, body) for seq, body in self._control.outgoing(now)]
        while max_chunks > 0 and self.state is State.OPEN and len(self._lanes) > 0:
            chunk = self.transfers.next_chunk(now, background=background, full=full)
            if chunk is None:
                break
            frames.append(self._bulk_frame(*chunk))
            max_chunks -= 1
        self.transfers.track_wait(now)
        return frames

    def next_timer(self) -> float | None:
        """When `handle_timer` is to be called if nothing else happens before; None once closed."""
        if self.state is State.CLOSED:
            return None
        silent_at = self.heard_at + self._timing.liveness_s
        timers = [self._control.next_timer(), self.transfers.next_timer(), self._closes_at, silent_at]
        return min(timer for timer in timers if timer is not None)

    def handle_timer(self, now: float) -> None:
        """Do what is due. A call much later than `next_timer()` asked for means that this process stood still: the time
        is not held against the peer (protocol, Monotonic clocks)."""
        due = self.next_timer()
        if due is None or now < due:
            return
        if now - due > self._timing.jump_s:
            self.heard_at += now - due
            self.transfers.clock_jumped(now - due)
        self._control.handle_timer(now)
        self.transfers.handle_timer(now)
        if self._closes_at is not None and now >= self._closes_at:
            self._close_after_farewell()
        elif now >= self.heard_at + self._timing.liveness_s:
            self.close(Reason.SILENT, f"nothing was heard for {self._timing.liveness_s:g} s")
        elif self.transfers.is_stalled(now):
            self.close(Reason.TAKES_NOTHING, f"none of the blobs sent to it moved for {self._timing.stall_s:g} s")

    def check(self) -> None:
        self._control.check()
        self.transfers.check()
        assert self.state is not State.OPEN or self._handshake.epoch > 0
        assert self.state is not State.CLOSING or self._closes_at is not None

    def _receive_control(self, frame: ControlFrame, message: Message | None, num_bytes: int, now: float) -> None:
        belongs = self._handshake.admit(frame, message)
        if belongs:
            self._control.admit(frame.seq, frame.ack)
            self.heard_at = now
        self.traffic.received_control.add(num_bytes)
        if not belongs:
            return
        self._control.acknowledge(frame.ack, now)
        if not isinstance(message, Heartbeat):
            for ready in self._control.accept(frame.seq, message, len(frame.body), now):
                self._deliver(ready, now)
        if self.state is State.CLOSING and self._control.idle:
            self._close_after_farewell()

    def _deliver(self, message: Message, now: float) -> None:
        """Act on the peer's next message, and pass it on unless it was meant for the session."""
        if self.state is State.CLOSED:
            return
        self._handshake.delivered(message)
        if isinstance(message, Hello | Welcome):
            self.transfers.peer_early = message.early
        self._control.heartbeats = self._handshake.epoch > 0
        if isinstance(message, Credit):
            self.transfers.credited(message, now)
            return self._begin_blobs()
        if isinstance(message, Echo):
            if self.state is State.OPEN:
                self._queue(Echoed(number=message.number))
            return
        if isinstance(message, Echoed):
            if (said_at := self._echoes.pop(message.number, None)) is not None:
                self.round_trips.append(now - said_at)
            return
        if isinstance(message, Stored | Outcome):
            self.transfers.drop(message.blob)  # the peer has decided about it
            self._begin_blobs()
        self._events.append(MessageReceived(message=message))
        if isinstance(message, Leave | Refused):
            self._last_ack_due = isinstance(message, Leave)
            self.close(message.reason, message.detail)

    def _queue(self, message: Message) -> None:
        self._handshake.check_send(message)
        if isinstance(message, Hello | Welcome):
            message = replace(message, early=self.transfers.early_bytes)
        if isinstance(message, Welcome):
            message = replace(message, lanes=self._limits.max_lanes)
        body = encode(message)
        if len(body) > self._limits.max_control_bytes:
            raise LocalProtocolError(f"{type(message).__name__} takes {len(body)} bytes")
        self._control.push(body, newest_of=Progress if isinstance(message, Progress) else None)
        self._handshake.sent(message)
        self._control.heartbeats = self._handshake.epoch > 0

    def _begin_blobs(self) -> None:
        if self.state is State.OPEN:
            self.transfers.begin_next(self._queue)

    def _say(self, credit: Credit) -> None:
        if credit.limit == 0:  # which is heard in any case, and before what may come of the blob later
            self._control.withdraw(credit.blob)
        self._control.push(encode(credit), newest_of=credit.blob if credit.limit else None, bounded=False)

    def _close_after_farewell(self) -> None:
        farewell = self._handshake.farewell
        assert farewell is not None
        self.close(farewell.reason, farewell.detail)

    def _control_frame(self, seq: int, body: bytes) -> tuple[int, list[Buffer]]:
        run, epoch = self._handshake.run, self._handshake.epoch
        parts = ControlFrame(run=run, epoch=epoch, seq=seq, ack=self._control.received, body=body).parts()
        self._sent(parts, self.traffic.sent_control)
        return 0, parts

    def _sent(self, parts: list[Buffer], count: Count) -> None:
        num_bytes = self.traffic.wire_bytes(parts)
        count.add(num_bytes)
        if self._uplink is not None:
            self._uplink.sent(num_bytes)

    def _bulk_frame(self, lane: int, blob: BlobId, offset: int, chunk: memoryview) -> tuple[int, list[Buffer]]:
        run, epoch = self._handshake.run, self._handshake.epoch
        parts = BulkFrame(run=run, epoch=epoch, key=blob_key(blob), offset=offset, chunk=chunk).parts()
        self._sent(parts, self.traffic.sent_blobs[blob.kind])
        return lane, parts
