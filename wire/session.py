"""The protocol state of one node–coordinator link, without I/O: one control lane, any number of bulk lanes.

A link owns the sockets and turns the crank: it hands in what arrives (`receive`), what its application asks (`send`,
`send_blob`, …) and the passing of time (`handle_timer`); then it drains `events()`, transmits `outgoing(now)` until
that is empty or a socket is full, and sleeps until a socket is readable or `next_timer()` has come. All readable
frames go in before a due timer does (protocol C).
"""

from collections import deque
from collections.abc import Sequence

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BlobSource, Reassembly, blob_key
from farloop.wire.control import HEARTBEAT, ControlStream
from farloop.wire.errors import LocalProtocolError
from farloop.wire.events import MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer, BulkFrame, ControlFrame, lane_hello, parse_bulk, parse_control
from farloop.wire.handshake import Handshake, Role, State
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import (
    Credit,
    Echo,
    Echoed,
    Heartbeat,
    LaneHello,
    Leave,
    Message,
    Offer,
    Outcome,
    Refused,
    Stored,
    decode,
    encode,
)
from farloop.wire.meter import Meter
from farloop.wire.reasons import Reason
from farloop.wire.traffic import Traffic
from farloop.wire.transfer import Transfers

ROUND_TRIPS = 10
"""Echoes that a round trip is known by: one alone may have waited behind something."""


class Session:
    """One end of a link. `now` is monotonic seconds; nothing here blocks or reads a clock.

    Args:
        role: which end this is.
        now: the time of its start; silence is counted from here.
        limits: bounds on memory and sizes.
        timing: intervals.
    """

    def __init__(self, role: Role, now: float, *, limits: Limits | None = None, timing: Timing | None = None) -> None:
        self.traffic = Traffic()
        self._limits = limits or Limits()
        self._timing = timing or Timing()
        self._handshake = Handshake(role)
        self._control = ControlStream(self._limits, self._timing, self.traffic, now)
        self._events: list[SessionEvent] = []
        patience = (self._timing.blob_idle_s, self._timing.stall_s) if role is Role.COORDINATOR else (None, None)
        self._transfers = Transfers(self._limits, self._timing, self.traffic, self._events.append, self._say, *patience)
        self._lanes: list[int] = []
        """Bulk lanes that can be sent on, in the order of their turns."""
        self._heard_at = now
        self._closes_at: float | None = None
        """When this end stops waiting for the acknowledgement of its farewell."""
        self._last_ack_due = False
        """Whether the peer's Leave is still to be acknowledged."""
        self._echoes: dict[int, float] = {}
        """Number → when it was said."""
        self.round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        """The last ones, in seconds, through both daemons and whatever is between them."""

    @property
    def state(self) -> State:
        return self._handshake.state

    def send(self, message: Message, now: float) -> None:
        """Queue a message: Hello first (node), Welcome or Refused first, in answer to Hello (coordinator).

        A node must then wait for Welcome. Nothing may follow a Leave or Refused. Offers go through `send_blob`.

        Raises:
            LimitReached: too many wait already.
            LocalProtocolError: not in this state, not from this end, or too large.
        """
        if isinstance(message, Offer | Credit | Heartbeat | LaneHello):
            raise LocalProtocolError(f"{type(message).__name__} is sent by the session itself")
        self._queue(message)
        if self._handshake.farewell is not None:
            self._closes_at = now + self._timing.linger_s

    @property
    def protocol(self) -> int:
        """The version that both ends speak; 0 before the session is open."""
        return self._handshake.protocol

    @property
    def meter(self) -> Meter:
        """How blobs come in."""
        return self._transfers.meter

    def echo(self, now: float) -> None:
        """Measure the round trip once more; `round_trips` will tell. Not while the peer owes many answers.

        Raises:
            LocalProtocolError: not a coordinator, or the session has no echoes.
        """
        if len(self._echoes) < ROUND_TRIPS:
            number = max(self._echoes, default=0) + 1
            self._queue(Echo(number=number))
            self._echoes[number] = now

    @property
    def live_in_flight(self) -> int:
        """Bytes sent and not yet known to have arrived, of blobs that are not background."""
        return self._transfers.live_in_flight

    @property
    def background_in_flight(self) -> int:
        """... of those that are."""
        return self._transfers.background_in_flight

    def unacknowledged(self, kind: BlobKind) -> dict[BlobId, int]:
        """Blobs of this kind that are being sent, with the bytes of each that have not arrived."""
        return self._transfers.unacknowledged(kind)

    @property
    def bytes_per_s(self) -> float:
        """How fast the peer has lately acknowledged blobs; never less than what is assumed of a thin link."""
        return self._transfers.bytes_per_s

    @property
    def background_waits(self) -> bool:
        """Whether `outgoing` would have a chunk of a background blob, and of no other."""
        return self.state is State.OPEN and bool(self._lanes) and self._transfers.background_waits

    def send_blob(self, offer: Offer, source: BlobSource, *, background: bool = False) -> None:
        """Send the Offer; the bytes follow as the peer's Credit allows: those of a `background` blob when no other has
        any, and `outgoing` is asked for them.

        Ends in BlobSent, in BlobDeclined, or with the peer's Stored or Outcome, which are delivered as messages.

        Raises:
            AlreadyUnderWay, LimitReached: being sent already; too many blobs or messages at once.
            LocalProtocolError: not open, or `source` has another size than offered.
        """
        if source.size != offer.size:
            raise LocalProtocolError(f"{offer.size} bytes offered, {source.size} at hand")
        self._transfers.check_room(offer.blob)
        self._queue(offer)
        self._transfers.begin(offer.blob, source, pushed=False, background=background)

    def push_blob(self, blob: BlobId, source: BlobSource) -> None:
        """Send a blob whose size and digest the application itself announces (Committed).

        Bytes leave at once, within the initial credit, and go on with the peer's Credit. Ends in BlobSent or
        BlobDeclined.

        Raises:
            AlreadyUnderWay, LimitReached: being sent already; too many blobs at once.
            LocalProtocolError: not open.
        """
        self._handshake.check_open()
        self._transfers.check_room(blob, pushed=True)
        self._transfers.begin(blob, source, pushed=True)

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        """Allow the peer to send an announced blob. Ends in BlobReceived or BlobCorrupt.

        A `reassembly` of an earlier session is continued if size and digest are equal (protocol Q), else a new one is
        begun. Keep the one returned to resume after this session.

        Raises:
            AlreadyUnderWay, LimitReached: expected already; too many blobs at once.
            LocalProtocolError: not open, or `size` out of bounds.
        """
        self._handshake.check_open()
        return self._transfers.expect(blob, size, digest, reassembly, now)

    def cancel(self, blob: BlobId) -> None:
        """Stop sending `blob`; or, if it is not being sent, stop or refuse to receive it: the peer gets BlobDeclined.

        Raises:
            LocalProtocolError: not open.
        """
        self._handshake.check_open()
        self._transfers.cancel(blob)

    def speak(self) -> None:
        """Have something to send now, if only a heartbeat: some links notice a broken connection by that alone."""
        self._control.speak()

    def last_word(self, reason: Reason, detail: str, now: float) -> list[tuple[int, list[Buffer]]]:
        """A coordinator's farewell before `close`, with all that is to be transmitted before it; nothing after an end.

        Raises:
            LocalProtocolError: it cannot be said any more, or not yet.
        """
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
        self._lanes.append(lane)

    def lane_closed(self, lane: int) -> None:
        """Bulk lane `lane` is gone; what may have been on it is sent again on the next one open."""
        if lane not in self._lanes:
            raise LocalProtocolError(f"lane {lane} is not open")
        self._lanes.remove(lane)
        self._transfers.lane_lost()

    def lane_hello(self) -> list[Buffer]:
        """The frame with which a node begins a new bulk lane; the coordinator's link reads it with `parse_lane_hello`.

        Raises:
            LocalProtocolError: not a node, or not open.
        """
        self._handshake.check_open()
        if self._handshake.role is not Role.NODE:
            raise LocalProtocolError("nodes open lanes")
        parts = lane_hello(self._handshake.run, self._handshake.epoch, self._handshake.lane_token)
        self.traffic.sent_control.add(self.traffic.wire_bytes(parts))
        return parts

    def receive(self, lane: int, parts: Sequence[Buffer], now: float) -> None:
        """Take in what a lane brought. Chunks are copied, but early ones are kept: do not reuse their memory.

        Raises:
            RemoteProtocolError: the frame is damaged or forbidden. Nothing was changed: count it and go on, and
                `close` with MALFORMED if they keep coming.
        """
        if self.state is State.CLOSED:
            return
        if lane == 0:
            frame = parse_control(parts, self._limits)
            self._receive_control(frame, decode(frame.body), self.traffic.wire_bytes(parts), now)
        else:
            self._receive_bulk(parse_bulk(parts, self._limits), self.traffic.wire_bytes(parts), now)

    def events(self) -> list[SessionEvent]:
        """What has happened since the last call."""
        events = self._events.copy()
        self._events.clear()
        return events

    def outgoing(self, now: float, *, max_chunks: int = 8, background: bool = True) -> list[tuple[int, list[Buffer]]]:
        """(lane, parts) to transmit now: every control frame that is due, and at most `max_chunks` bulk frames.

        Call until it returns nothing. With `max_chunks=0`, while the bulk sockets are full, control still flows. With
        `background=False` blobs of that class wait, for a link that has other things to carry.
        """
        if self.state is State.CLOSED:
            last_ack_due, self._last_ack_due = self._last_ack_due, False
            return [self._control_frame(0, HEARTBEAT)] if last_ack_due else []
        frames = [self._control_frame(seq, body) for seq, body in self._control.outgoing(now)]
        while max_chunks > 0 and self.state is State.OPEN and self._lanes:
            chunk = self._transfers.next_chunk(now, background=background)
            if chunk is None:
                break
            frames.append(self._bulk_frame(*chunk))
            max_chunks -= 1
        self._transfers.look(now)
        return frames

    def next_timer(self) -> float | None:
        """When `handle_timer` is to be called if nothing else happens before; None once closed."""
        if self.state is State.CLOSED:
            return None
        silent_at = self._heard_at + self._timing.liveness_s
        timers = [self._control.next_timer(), self._transfers.next_timer(), self._closes_at, silent_at]
        return min(timer for timer in timers if timer is not None)

    def handle_timer(self, now: float) -> None:
        """Do what is due.

        A call much later than `next_timer()` asked for means that this process stood still: the time is not held
        against the peer (protocol C).
        """
        due = self.next_timer()
        if due is None or now < due:
            return
        if now - due > self._timing.jump_s:
            self._heard_at += now - due
            self._transfers.clock_jumped(now - due)
        self._control.handle_timer(now)
        self._transfers.handle_timer(now)
        if self._closes_at is not None and now >= self._closes_at:
            self._close_after_farewell()
        elif now >= self._heard_at + self._timing.liveness_s:
            self.close(Reason.SILENT, f"nothing was heard for {self._timing.liveness_s:g} s")
        elif self._transfers.is_stalled(now):
            self.close(Reason.TAKES_NOTHING, f"none of the blobs sent to it moved for {self._timing.stall_s:g} s")

    def check(self) -> None:
        """Assert all invariants."""
        self._control.check()
        self._transfers.check()
        assert self.state is not State.OPEN or self._handshake.epoch > 0
        assert self.state is not State.CLOSING or self._closes_at is not None

    def _receive_control(self, frame: ControlFrame, message: Message | None, num_bytes: int, now: float) -> None:
        belongs = self._handshake.admit(frame, message)
        if belongs:
            self._control.admit(frame.seq, frame.ack)
            self._heard_at = now
        self.traffic.received_control.add(num_bytes)
        if not belongs:
            return
        self._control.acknowledge(frame.ack, now)
        if not isinstance(message, Heartbeat):
            for ready in self._control.accept(frame.seq, message, len(frame.body), now):
                self._deliver(ready, now)
        if self.state is State.CLOSING and self._control.idle:
            self._close_after_farewell()

    def _receive_bulk(self, frame: BulkFrame, num_bytes: int, now: float) -> None:
        if self.state is State.OPENING:
            self.traffic.stray.add(num_bytes)
            return
        self._handshake.check_run(frame.run, frame.epoch)
        self._transfers.admit(frame)
        self._heard_at = now
        self._transfers.accept(frame, num_bytes, now)

    def _deliver(self, message: Message, now: float) -> None:
        """Act on the peer's next message, and pass it on unless it was meant for the session."""
        if self.state is State.CLOSED:
            return
        self._handshake.delivered(message)
        self._control.heartbeats = self._handshake.epoch > 0
        if isinstance(message, Credit):
            self._transfers.credited(message, now)
            return
        if isinstance(message, Echo):
            if self.state is State.OPEN:
                self._queue(Echoed(number=message.number))
            return
        if isinstance(message, Echoed):
            if (said_at := self._echoes.pop(message.number, None)) is not None:
                self.round_trips.append(now - said_at)
            return
        if isinstance(message, Stored | Outcome):
            self._transfers.forget_outgoing(message.blob)
        self._events.append(MessageReceived(message=message))
        if isinstance(message, Leave | Refused):
            self._last_ack_due = isinstance(message, Leave)
            self.close(message.reason, message.detail)

    def _queue(self, message: Message) -> None:
        self._handshake.check_send(message)
        body = encode(message)
        if len(body) > self._limits.max_control_bytes:
            raise LocalProtocolError(f"{type(message).__name__} takes {len(body)} bytes")
        self._control.push(body)
        self._handshake.sent(message)
        self._control.heartbeats = self._handshake.epoch > 0

    def _say(self, credit: Credit) -> None:
        self._control.push(encode(credit), bounded=False)

    def _close_after_farewell(self) -> None:
        farewell = self._handshake.farewell
        assert farewell is not None
        self.close(farewell.reason, farewell.detail)

    def _control_frame(self, seq: int, body: bytes) -> tuple[int, list[Buffer]]:
        run, epoch = self._handshake.run, self._handshake.epoch
        parts = ControlFrame(run=run, epoch=epoch, seq=seq, ack=self._control.received, body=body).parts()
        self.traffic.sent_control.add(self.traffic.wire_bytes(parts))
        return 0, parts

    def _bulk_frame(self, blob: BlobId, offset: int, chunk: memoryview) -> tuple[int, list[Buffer]]:
        run, epoch = self._handshake.run, self._handshake.epoch
        parts = BulkFrame(run=run, epoch=epoch, key=blob_key(blob), offset=offset, chunk=chunk).parts()
        self.traffic.sent_blobs[blob.kind].add(self.traffic.wire_bytes(parts))
        lane = self._lanes.pop(0)
        self._lanes.append(lane)
        return lane, parts
