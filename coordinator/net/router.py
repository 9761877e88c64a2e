"""The coordinator's sessions on a router socket: lanes, pacing of downloads, and timers. Sans-I/O, over the ports.

Every route of the socket is a lane. Its first frame decides to which session it belongs (`sessions.py`). Frames are
attributed to the node whose key authenticated them, or without keys to the claimed name.

An error in the work for one session ends that session alone; errors of the whole process are raised.
"""

import contextlib
import heapq
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from farloop.algo.spec import NodeId
from farloop.coordinator.errors import MachineBroken, NoRoom, StorageError
from farloop.coordinator.net.sessions import Lane, Peer, Peers, RateLimits
from farloop.runtime.ports import Buffer, Clock, Route, RouterSocket, Sender, Sent, Timer
from farloop.wire.events import MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import ControlFrame
from farloop.wire.limits import BAD_FRAMES, Limits, Timing
from farloop.wire.messages import encode
from farloop.wire.reasons import LimitReached, LocalProtocolError, OutOfBounds, Reason, RemoteProtocolError
from farloop.wire.session import Session, State
from farloop.wire.uplink import Uplink, UplinkLimit

_log = logging.getLogger(__name__)

SHARE: Final = 0.25  # share of the measured rate that background blobs get while live bytes are in flight

SLOWEST_BYTES_PER_S: Final = 256 << 10
"""... and the least that they get, however thin the link is: a joining node must get its snapshot at some time."""

AHEAD_S: Final = 0.1
"""While updates are sent now and then, background bytes in flight take at most this many seconds of the link: bytes in
flight cannot make room for an update. It is enough for their share up to a round trip of 0.4 s."""

AHEAD_BYTES: Final = 256 << 10  # or this much, if that is more

LATELY_S: Final = 10.0
"""After this long without an update the bound does not apply, and background blobs fill a link of any round trip."""

NUDGE_S: Final = 2.0
"""A session whose background bytes did not move for this long gets another chunk: its peer may acknowledge both."""

STALE_S: Final = 5.0
"""Bytes that were not acknowledged for this long do not count: a peer that takes nothing must not delay the others."""

_BIN_S: Final = 0.5  # rates are measured over this interval
_FADES_PER_S: Final = 0.98  # older measurements count less: links change
_BURST_S: Final = 0.5  # the background saves up at most what it gets in this time

MOST_CHUNKS: Final = 8  # of a session at a time

BACKGROUND_S: Final = 0.02
"""A background blob that has to wait is tried again after this, unless something else happens before."""

PROBE_DELAY_S: Final = 0.1
"""From the end of a connection to the probe of all sessions: by then the socket has let go of its route, and of other
connections that ended at the same time."""

OF_THE_PROCESS = (StorageError, MachineBroken)
"""Errors that concern the coordinator as a whole, except `NoRoom`, which a read raises when no file descriptor is free.
Any other error ends one session."""


@dataclass(slots=True)
class _Flight:
    arrived: int = 0  # that were ever acknowledged
    live: int = 0  # in flight
    background: int = 0  # in flight
    live_at: float = -math.inf  # when live bytes in flight last moved
    background_at: float = -math.inf


class Egress:
    """Paces background blobs (snapshots, probes): a share of the uplink while live bytes are in flight, else all of it.

    Within a session background blobs yield to live ones (`wire/transfer.py`). Between sessions nothing else does this:
    they meet on the coordinator's uplink, behind every queue that could be reordered.
    """

    def __init__(self, now: float, share: float = SHARE) -> None:
        """`share` 1 never holds background blobs back."""
        self._share = share
        self._sessions: dict[int, _Flight] = {}
        self._live_at = -math.inf  # when live bytes last moved
        self._best = 0.0  # measured bytes per second, faded
        self._bin, self._bin_bytes = now, 0
        self._tokens, self._filled_at = 0.0, now

    @property
    def bytes_per_s(self) -> float:
        """Rate of the background while live bytes are in flight."""
        return max(self._share * self._best, SLOWEST_BYTES_PER_S)

    def look(self, session: int, now: float, *, arrived: int = 0, live: int = 0, background: int = 0) -> None:
        """So many bytes of a session were ever acknowledged, and so many live and background ones are in flight."""
        was = self._sessions.setdefault(session, _Flight())
        if arrived > was.arrived:
            self._bin_bytes += arrived - was.arrived
            passed = now - self._bin
            if passed >= _BIN_S:
                self._best = max(self._best * _FADES_PER_S**passed, self._bin_bytes / passed)
                self._bin, self._bin_bytes = now, 0
        if not live:
            was.live_at = -math.inf
        elif (arrived, live) != (was.arrived, was.live):
            was.live_at = self._live_at = now
        if background != was.background:
            was.background_at = now
        was.arrived, was.live, was.background = arrived, live, background

    def gone(self, session: int) -> None:
        self._sessions.pop(session, None)

    def allows(self, session: int, now: float) -> bool:
        """Whether a background chunk of this session may leave now."""
        if self._share >= 1.0:
            return True
        ahead = sum(one.background for one in self._sessions.values() if now - one.background_at < STALE_S)
        own = self._sessions.get(session)
        moved_at = own.background_at if own is not None and own.background else now
        lately = now - self._live_at < LATELY_S
        if lately and ahead >= max(AHEAD_S * self._best, AHEAD_BYTES) and now - moved_at < NUDGE_S:
            return False
        if not any(now - one.live_at < STALE_S for one in self._sessions.values()):
            self._tokens, self._filled_at = 0.0, now
            return True
        self._fill(now)
        return self._tokens >= 0

    def spent(self, num_bytes: int, now: float) -> None:
        """A background chunk left. It may be larger than what was saved up; the next one waits for the rest."""
        self._fill(now)
        self._tokens -= num_bytes

    def wait_s(self, now: float) -> float:
        """How long until `allows` may say yes, if nothing else happens."""
        self._fill(now)
        return max(0.0, -self._tokens / self.bytes_per_s)

    def _fill(self, now: float) -> None:
        rate = self.bytes_per_s
        self._tokens = min(self._tokens + rate * (now - self._filled_at), rate * _BURST_S)
        self._filled_at = now


class SessionRouter:
    """All sessions of one coordinator. Calls `on_event` for everything that happens in them."""

    def __init__(
        self,
        socket: RouterSocket,
        clock: Clock,
        *,
        on_event: Callable[[Peer, SessionEvent], None],
        limits: Limits,
        timing: Timing,
        rates: RateLimits | None = None,
        background_share: float = SHARE,
        turned_away: Callable[[Reason, str], None] = lambda reason, who: None,
        new_token: Callable[[], bytes] | None = None,
        uplink: UplinkLimit | None = None,
        check: bool = False,
    ) -> None:
        """`check` asserts the sessions' invariants and raises unexpected errors, for tests and simulations;
        `turned_away` is called for every peer and frame that is rejected: the reason, and the key or address; `uplink`:
        what this end may send, over all sessions."""
        self._socket, self._clock, self._on_event = socket, clock, on_event
        self._turned_away, self._check = turned_away, check
        self.uplink = Uplink(uplink, clock.minute_of_day, clock.now()) if uplink else None
        self._peers = Peers(rates or RateLimits(), limits, timing, turned_away, new_token, self.uplink)
        self._egress = Egress(clock.now(), background_share)
        self._paced: OrderedDict[int, Peer] = OrderedDict()
        """Sessions with a background blob to send, or where the uplink has a limit with any blob, in the order
        of their turns."""
        self._dues: list[tuple[float, int, Peer]] = []
        """Heap of (when, number, session): for each session that has a timer, an entry no later than it is due."""
        self._timer: Timer | None = None
        self._fires_at = 0.0  # when `_timer` is due
        self._probe: Timer | None = None
        self.endpoint = socket.endpoint
        socket.listen(self)

    def close(self) -> None:
        for timer in (self._timer, self._probe):
            if timer is not None:
                timer.cancel()
        self._socket.close()

    # What the executor calls.

    @contextlib.contextmanager
    def working_for(self, peer: Peer) -> Iterator[Session]:
        """Do all work for one session in this context. What the session wants to send leaves at its end. An error
        inside ends this session with a reason; only `OF_THE_PROCESS` is raised. The rest of the block is then skipped:
        leave nothing half done."""
        with self._contained(peer):
            yield peer.session
        self.flush(peer)

    def failed(self, peer: Peer, error: Exception) -> None:
        """Work for this session raised an error: count and log it, and end the session."""
        session = peer.session
        if isinstance(error, LocalProtocolError) and session.state in (State.CLOSING, State.CLOSED):
            return _log.debug("not sent session=%d: it has ended meanwhile", peer.number)
        if isinstance(error, LimitReached):
            reason = Reason.BEHIND
        else:
            reason = Reason.MALFORMED if isinstance(error, RemoteProtocolError) else Reason.FAULT
        if self._check and reason is Reason.FAULT:
            raise error
        self._turned_away(reason, peer.who)
        detail = f"{type(error).__name__}: {error}"
        trace = error if reason is Reason.FAULT else None
        _log.warning(
            "session ended session=%d who=%r reason=%s error=%r",
            peer.number,
            peer.who,
            reason.name,
            detail,
            exc_info=trace,
        )
        self._end(peer, reason, reason.sentence if reason is Reason.FAULT else str(error))

    def flush(self, peer: Peer) -> None:
        """Send what the peer's session wants to send, and report what happened in it."""
        try:
            self._let_out(peer)
            self._arm_for(peer)
        except Exception as error:  # noqa: BLE001 - see there
            self._contain(peer, error)
        if self._check:
            peer.session.check()
        if peer.session.state is State.CLOSED:
            self._part(peer)
        if self._paced:
            self._send_paced(self._clock.now())

    def closed_by_us(self, peer: Peer, reason: Reason, told: str = "") -> None:
        """End a session now. Its node is told why if there is a detail to tell."""
        with self.working_for(peer) as session:
            if told:
                self._end(peer, reason, told)
            else:
                session.close(reason, reason.sentence)

    # What the socket calls.

    def on_frame(self, route: Route, parts: Sequence[Buffer], sender: Sender) -> None:
        try:
            lane = self._peers.lane(route) or self._on_first_frame(route, parts, sender)
        except OF_THE_PROCESS:
            raise
        except Exception:
            if self._check:
                raise
            self._turned_away(Reason.FAULT, "a stranger")
            return _log.warning("first frame ignored reason=%s", Reason.FAULT.name, exc_info=True)
        if lane is None:
            return
        peer = lane.peer
        try:  # as `working_for`, whose contexts cost a frame more than its checksum
            self._receive(peer, lane.number, parts, sender)
        except Exception as error:  # noqa: BLE001 - see there
            self._contain(peer, error)
        self.flush(peer)

    def _receive(self, peer: Peer, lane: int, parts: Sequence[Buffer], sender: Sender) -> None:
        session = peer.session
        if sender.owner != peer.owner:
            return session.close(Reason.WRONG_KEY, Reason.WRONG_KEY.sentence)
        try:
            session.receive(lane, parts, self._clock.now())
        except RemoteProtocolError as error:
            self._turned_away(Reason.MALFORMED, peer.who)
            peer.bad_frames += 1
            _log.warning("bad frame session=%d lane=%d reason=%r", peer.number, lane, str(error))
            if peer.bad_frames >= BAD_FRAMES or isinstance(error, OutOfBounds):
                self._end(peer, Reason.MALFORMED, str(error))
        else:
            peer.bad_frames = 0

    def on_writable(self) -> None:
        for peer in self._peers:
            if any(lane.backlog for lane in peer.lanes.values()):
                with self.working_for(peer):
                    for lane in list(peer.lanes.values()):
                        while lane.backlog and self._try_send(lane, lane.backlog[0]):
                            lane.backlog.popleft()
                            if lane.number not in peer.lanes:  # lost: what waited for it is sent again
                                break

    def on_gone(self) -> None:
        """Find out at once which session lost its connection, not at its next heartbeat: send a frame to each."""

        def probe() -> None:
            self._probe = None
            for peer in self._peers:
                with self.working_for(peer) as session:
                    session.speak()

        if self._probe is None:
            self._probe = self._clock.call_later(PROBE_DELAY_S, probe)

    def on_revoked(self, owners: AbstractSet[str]) -> None:
        for peer in self._peers:
            if peer.owner in owners:
                self._dismiss(peer, Reason.WRONG_KEY)

    def uses(self, descriptor: int) -> bool:
        return self._peers.is_used(descriptor)

    # One session at a time.

    @contextlib.contextmanager
    def _contained(self, peer: Peer) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see there
            self._contain(peer, error)

    def _contain(self, peer: Peer, error: Exception) -> None:
        """The edge of a session: the error becomes its end, with a reason."""
        if isinstance(error, OF_THE_PROCESS) and not isinstance(error, NoRoom):
            raise error
        self.failed(peer, error)

    def _on_first_frame(self, route: Route, parts: Sequence[Buffer], sender: Sender) -> Lane | None:
        """The first frame of a route. Returns the lane of a new session, which must receive the frame."""
        owner, address = sender.owner, sender.address
        if self._socket.authenticates and owner is None:
            self._turned_away(Reason.WRONG_KEY, address)
            return None
        met = self._peers.on_first_frame(
            route, parts, None if owner is None else NodeId(owner), address, self._clock.now()
        )
        if met is None:
            return None
        if not isinstance(met, Lane):
            frame = ControlFrame(run=0, epoch=0, seq=0, ack=1, body=encode(met))
            if self._socket.send(route, frame.parts()) is not Sent.TAKEN:
                _log.debug("first frame not answered address=%s", address)
            return None
        peer, descriptor = met.peer, sender.descriptor
        if descriptor is not None:
            self._peers.use(met, descriptor)
        peer.connection = None if descriptor is None else (descriptor, address)
        if met.number > 0:
            self.flush(peer)
            return None
        for old in self._peers.too_many_of(peer):
            self.closed_by_us(old, Reason.SUPERSEDED)
        return met

    def _let_out(self, peer: Peer) -> None:
        self._report(peer)
        session, now = peer.session, self._clock.now()
        more = True
        while more:
            full = self._full(peer)
            paced = self.uplink is not None or self._is_held_up(peer, full)
            chunks = 0 if paced else MOST_CHUNKS
            frames = session.outgoing(now, max_chunks=chunks, background=False, full=full)
            for lane, parts in frames:
                self._transmit(peer, lane, parts)
            more = chunks > 0 and sum(lane > 0 for lane, _ in frames) == chunks
        self._report(peer)
        if session.state is not State.CLOSED:
            self._measure(peer, now)

    def _report(self, peer: Peer) -> None:
        """Report what happened in a session. An error in one event skips the others, but never the session's end; after
        the end nothing is reported."""
        while events := peer.session.events():
            for event in events:
                if isinstance(event, SessionClosed):
                    self._report_end(peer, event)
                elif peer.ended_by is None:
                    try:
                        self._report_one(peer, event)
                    except Exception as error:  # noqa: BLE001 - see there
                        self._contain(peer, error)

    def _report_one(self, peer: Peer, event: SessionEvent) -> None:
        if isinstance(event, MessageReceived) and peer.session.state is State.OPEN:
            refused = self._peers.rates.says(peer.who, event.message, self._clock.now())
            if refused is not None:
                self._turned_away(refused, peer.who)
                return self._dismiss(peer, refused)
        self._on_event(peer, event)

    def _report_end(self, peer: Peer, event: SessionClosed) -> None:
        if peer.ended_by is None:
            peer.ended_by = event.reason
            with self._contained(peer):
                self._on_event(peer, event)

    def _part(self, peer: Peer) -> None:
        """The session is over: report it whatever failed before, and keep nothing of it."""
        with self._contained(peer):
            self._report(peer)
        self._report_end(peer, SessionClosed(reason=Reason.FAULT, detail=Reason.FAULT.sentence))
        self._peers.forget(peer)
        self._egress.gone(peer.number)
        self._paced.pop(peer.number, None)

    def _end(self, peer: Peer, reason: Reason, detail: str) -> None:
        """End a session now. Its node is told why if possible, without waiting for its acknowledgement."""
        try:
            for lane, parts in peer.session.last_word(reason, detail, self._clock.now()):
                self._transmit(peer, lane, parts)
        except Exception as error:  # noqa: BLE001 - the session ends in any case, and the log has the reason
            _log.debug("farewell not sent session=%d reason=%s error=%r", peer.number, reason.name, str(error))
        peer.session.close(reason, detail if reason is Reason.BEHIND else reason.sentence)

    def _dismiss(self, peer: Peer, reason: Reason) -> None:
        with self.working_for(peer):
            self._end(peer, reason, "")

    # Outbound frames.

    def _full(self, peer: Peer) -> list[int]:
        """The bulk lanes that take nothing now."""
        return [number for number, lane in peer.lanes.items() if number > 0 and lane.backlog]

    def _is_held_up(self, peer: Peer, full: Sequence[int]) -> bool:
        """Whether these `full` ones are all its bulk lanes."""
        return 0 < len(full) == len(peer.lanes) - 1

    def _transmit(self, peer: Peer, number: int, parts: Sequence[Buffer]) -> None:
        lane = peer.lanes.get(number)
        if lane is None:  # lost since the frame was made; its chunk is sent again
            return
        if lane.backlog or not self._try_send(lane, parts):
            lane.backlog.append(parts)

    def _try_send(self, lane: Lane, parts: Sequence[Buffer]) -> bool:
        """False when the lane is full. A session without control or any bulk lane ends: its node dials again."""
        peer = lane.peer
        if peer.session.state is State.CLOSED and lane.number > 0:
            return True
        sent = self._socket.send(lane.route, parts)
        if sent is Sent.GONE and lane.number > 0 and len(peer.lanes) > 2:
            _log.info("lane lost session=%d lane=%d", peer.number, lane.number)
            self._peers.lane_lost(peer, lane.number)
        elif sent is Sent.GONE:
            peer.session.close(Reason.CLOSED, "the node's connection is gone")
        return sent is not Sent.FULL

    # Blobs that are paced.

    def _measure(self, peer: Peer, now: float) -> None:
        """See what the peer has acknowledged, and whether it has paced blobs to send."""
        session, transfers = peer.session, peer.session.transfers
        live, background = transfers.live_in_flight, transfers.background_in_flight
        self._egress.look(peer.number, now, arrived=session.traffic.arrived_bytes, live=live, background=background)
        if self._is_paced(session.blob_waits(now)):
            self._paced.setdefault(peer.number, peer)

    def _is_paced(self, background: bool | None) -> bool:
        """Whether a chunk waits that its session does not send by itself. `background`: see `Session.blob_waits`."""
        return background is True or (background is False and self.uplink is not None)

    def _send_paced(self, now: float) -> None:
        """Send paced chunks as far as the pacing allows, one of each session in turn."""
        sent = bool(self._paced)
        while sent and (self.uplink is None or self.uplink.allows(now)):
            sent = False
            for number, peer in list(self._paced.items()):
                with self._contained(peer):
                    sent = self._send_paced_of(peer, now) or sent
                if peer.session.state is State.CLOSED:
                    self._paced.pop(number, None)
                    self._part(peer)
        if self._paced:
            free_at = now + self._egress.wait_s(now) if self.uplink is None else self.uplink.free_at
            self._arm(max(now + BACKGROUND_S, free_at))

    def _send_paced_of(self, peer: Peer, now: float) -> bool:
        """Send one chunk, if it may leave now. Returns whether it did."""
        background, full = peer.session.blob_waits(now), self._full(peer)
        if not self._is_paced(background):
            self._paced.pop(peer.number, None)
        elif (
            peer.number in self._paced
            and (self.uplink is None or self.uplink.allows(now))
            and (not background or self._egress.allows(peer.number, now))
            and not self._is_held_up(peer, full)
        ):
            self._paced.move_to_end(peer.number)
            for lane, parts in peer.session.outgoing(now, max_chunks=1, full=full):
                if background:
                    self._egress.spent(sum(len(part) for part in parts) if lane > 0 else 0, now)
                self._transmit(peer, lane, parts)
            self._measure(peer, now)
            self._arm_for(peer)
            return True
        return False

    # Timers: one is armed, for the earliest session that is due.

    def _arm_for(self, peer: Peer) -> None:
        peer.due = peer.session.next_timer()
        if peer.due is not None:
            self._queue(peer, peer.due)
            self._arm(peer.due)

    def _queue(self, peer: Peer, due: float) -> None:
        """An entry that is too early is moved when its time has come: most timers are put off many times before."""
        if peer.queued is None or due < peer.queued:
            peer.queued = due
            heapq.heappush(self._dues, (due, peer.number, peer))

    def _first_due(self) -> float | None:
        while self._dues:
            at, _, peer = self._dues[0]
            if at == peer.queued == peer.due:
                return at
            heapq.heappop(self._dues)
            if at == peer.queued:  # else an earlier entry took its place
                peer.queued = None
                if peer.due is not None:
                    self._queue(peer, peer.due)
        return None

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            if self._fires_at <= due:
                return
            self._timer.cancel()
        self._fires_at = due
        self._timer = self._clock.call_later(due - self._clock.now(), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._socket.receive()  # after a pause of this process, what is readable goes in first
        now = self._clock.now()
        found = []
        while (due := self._first_due()) is not None and due <= now:
            _, _, peer = heapq.heappop(self._dues)
            peer.queued = None
            found.append(peer)
        for peer in sorted(found, key=lambda peer: peer.number):
            with self.working_for(peer) as session:
                session.handle_timer(now)
        self._send_paced(now)
        if (due := self._first_due()) is not None:
            self._arm(due)
