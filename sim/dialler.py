"""A node's end of its connection: what `node/link.py` does in its thread, without sockets. It dials until told to stop.

What the training thread asks for is done a moment later, as it is between real threads: a session may have ended and
another begun in between.
"""

import random
from collections.abc import Callable

from farloop.node.link import Downloads, Traffic, Uploads, moved_by
from farloop.sim.network import Connection, Side
from farloop.sim.virtual_time import Process
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.limits import Limits, Timing
from farloop.wire.reasons import Reason, RemoteProtocolError
from farloop.wire.session import Role, Session, State

BACKOFF_S = (0.1, 5.0)
"""First and longest pause between two attempts."""

HOP_S = 0.0005
"""From the training thread to the link's."""

BAD_FRAMES = 8
"""Frames in a row that break the protocol before the session is ended."""

BULK = 1

Dial = Callable[[Callable[[Connection | None], None]], None]
"""Ask the network for a connection; the answer comes later, None where there is nobody or no way."""


class Dialler:
    """Keeps a session with the coordinator alive, whatever the link does."""

    def __init__(
        self,
        process: Process,
        dial: Dial,
        hello: Callable[[], msg.Hello],
        deliver: Callable[[wire_ev.SessionEvent], None],
        rng: random.Random,
        limits: Limits,
        timing: Timing,
    ) -> None:
        self._process, self._dial_network, self._hello, self._deliver = process, dial, hello, deliver
        self._rng, self._limits, self._timing = rng, limits, timing
        self._session: Session | None = None
        self._connection: Connection | None = None
        self._downloads, self._uploads = Downloads(), Uploads()
        self._bulk = False
        self._attempt = 0
        self._bad_frames = 0
        """In a row."""
        self._moved = Traffic()
        """By earlier sessions."""
        self._over = False
        """No further session is wanted."""
        self._timer: float | None = None

    def start(self) -> None:
        self._dial()

    def close(self) -> None:
        """No more."""
        self._over = True
        if self._session is not None:
            self._session.close(Reason.CLOSED, "this node stops")
            self._pump()

    def send(self, message: msg.Message) -> None:
        """Queue a message; dropped where no session is open: the next handshake tells all that matters."""
        self._process.after(HOP_S, lambda: self._send(message))

    def send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        """Offer a delta; dropped where no session is open: it is offered again after the next Welcome."""
        self._process.after(HOP_S, lambda: self._send_blob(offer, data))

    @property
    def flushed(self) -> bool:
        """Whether a Leave has been acknowledged, or the session is over."""
        return self._session is None or self._session.state is State.CLOSED

    @property
    def moved(self) -> Traffic:
        """By all sessions so far."""
        return self._moved if self._session is None else self._moved + moved_by(self._session)

    # --- a session's life

    @property
    def _now(self) -> float:
        return self._process.now

    def _dial(self) -> None:
        if not self._over:
            self._dial_network(self._connected)

    def _connected(self, connection: Connection | None) -> None:
        if connection is None or self._over:
            return self._dial_again(opened=False)
        self._connection, self._bulk, self._timer, self._bad_frames = connection, False, None, 0
        session = self._session = Session(Role.NODE, self._now, limits=self._limits, timing=self._timing)
        connection.deliver[Side.NODE] = lambda lane, frame: self._take(session, lane, frame)
        connection.lost = lambda: self._lost(session)
        session.send(self._hello(), self._now)
        self._pump()

    def _dial_again(self, *, opened: bool) -> None:
        self._attempt = 0 if opened else self._attempt + 1
        if not self._over:
            first, longest = BACKOFF_S
            pause = min(longest, first * 2.0 ** min(self._attempt, 10)) * self._rng.uniform(0.5, 1.5)
            self._process.after(pause, self._dial)

    def _take(self, session: Session, lane: int, frame: list[bytes]) -> None:
        if session is not self._session:
            return
        try:
            session.receive(lane, frame, self._now)
        except RemoteProtocolError as error:
            self._bad_frames += 1
            if self._bad_frames >= BAD_FRAMES:
                session.close(Reason.MALFORMED, str(error))
        else:
            self._bad_frames = 0
        self._emit(session)
        self._pump()

    def _lost(self, session: Session) -> None:
        if session is self._session:
            session.close(Reason.CLOSED, "the connection ended")
            self._pump()

    def _send(self, message: msg.Message) -> None:
        if self._session and self._session.state is State.OPEN:
            self._session.send(message, self._now)
            self._over = self._over or isinstance(message, msg.Leave)
            self._pump()

    def _send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        if self._session and self._session.state is State.OPEN:
            self._uploads.offer(self._session, offer, data)
            self._pump()

    def _pump(self) -> None:
        """Send what the session wants to, open the bulk lane when it may be, and end with the session."""
        session, connection = self._session, self._connection
        if session is None or connection is None:
            return
        if session.state is State.OPEN and not self._bulk:
            self._bulk = True
            connection.send(Side.NODE, BULK, session.lane_hello(), gently=True)
            session.lane_opened(BULK)
        while frames := session.outgoing(self._now, max_chunks=4):
            for lane, parts in frames:
                connection.send(Side.NODE, lane, parts)
        self._emit(session)
        session.check()
        if session.state is State.CLOSED:
            self._moved = self.moved
            self._downloads.session_over()
            self._uploads.session_over()
            self._session = self._connection = None
            connection.close(Side.NODE)
            self._dial_again(opened=self._bulk)
        else:
            self._arm(session)

    def _arm(self, session: Session) -> None:
        due = session.next_timer()
        if due is None or (self._timer is not None and self._timer <= due):
            return
        self._timer = due
        self._process.after(max(0.0, due - self._now), lambda: self._wake(session, due))

    def _wake(self, session: Session, due: float) -> None:
        if session is self._session and self._timer == due:
            self._timer = None
            session.handle_timer(self._now)
            self._pump()

    def _emit(self, session: Session) -> None:
        for event in session.events():
            match event:
                case wire_ev.MessageReceived(message=msg.Offer() as offer):
                    self._downloads.announced(session, offer.blob, offer.size, offer.digest, self._now)
                    continue
                case wire_ev.MessageReceived(message=msg.Committed() as committed):
                    blob = msg.update_id(committed)
                    self._downloads.announced(session, blob, committed.size, committed.digest, self._now)
                case wire_ev.MessageReceived(message=msg.Refused(retriable=False)):
                    self._over = True
                case wire_ev.BlobReceived(blob=blob) | wire_ev.BlobCorrupt(blob=blob):
                    self._downloads.ended(session, blob, self._now)
                case _:
                    pass
            self._deliver(event)
        self._uploads.go_on(session)
