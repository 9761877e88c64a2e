"""The coordinator's socket: one ROUTER for all sessions and lanes, and how fast it may send."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from farloop.algo.spec import NodeId
from farloop.coordinator.errors import MachineBroken, NoRoom, StorageError
from farloop.coordinator.net.sessions import (
    BACKLOG,
    DEAD_TCP_MS,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    LOOK_S,
    BindError,
    Connection,
    Connections,
    Lane,
    Peer,
    Peers,
    RateLimiter,
    Unread,
    most_connections,
)
from farloop.monitoring import descriptors
from farloop.monitoring.tcp_connection import choose_congestion, end_of, hang_up
from farloop.wire.events import MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer
from farloop.wire.keys import AllowList, KeyFileError, load_secret
from farloop.wire.limits import BAD_FRAMES, Limits, Timing
from farloop.wire.reasons import LimitReached, LocalProtocolError, OutOfBounds, Reason, RemoteProtocolError
from farloop.wire.session import Session, State

# --- How much of the way out downloads may take: a share while others wait for bytes, all of it when nobody does.
#
# Pure: the time is passed in. Snapshots are background blobs (`wire/transfer.py`): within a session they yield to every
# update. Between sessions nothing but this keeps them apart, for they meet on the coordinator's own link, behind every
# queue that could be reordered.


SHARE: Final = 0.25
"""Of the measured rate, for background bytes while live ones are on their way."""

SLOWEST_BYTES_PER_S: Final = 256 << 10
"""The background's own while live bytes are on their way, however thin the link: a joiner gets in at last."""

AHEAD_S: Final = 0.1
"""While there are updates now and then, the background has no more than so much of the link on its way: what has left
cannot make room any more when one comes. Up to a round trip of 0.4 s that is enough for its share."""

AHEAD_BYTES: Final = 256 << 10
"""... or this much, where that is more."""

LATELY_S: Final = 10.0
"""Without an update for this long the background has no such bound, and fills a link of any round trip."""

NUDGE_S: Final = 2.0
"""A session whose bytes have stood still for this long gets another chunk: its peer may acknowledge them together."""

STALE_S: Final = 5.0
"""Bytes that nobody acknowledged for this long do not count: who does not take them keeps nobody else waiting."""

_BIN_S: Final = 0.5
"""Rates are measured over this."""

_FADES_PER_S: Final = 0.98
"""What was once measured counts less with time: links change."""

_BURST_S: Final = 0.5
"""The background may save up what it gets in so much time."""


class Egress:
    """Of one coordinator, over all sessions."""

    def __init__(self, now: float) -> None:
        self._live: dict[int, float] = {}
        """Session → when its live bytes in flight last moved."""
        self._ahead: dict[int, tuple[int, float]] = {}
        """Session → background bytes in flight, and when they last moved."""
        self._live_at = float("-inf")
        """When live bytes last moved."""
        self._best = 0.0
        """Bytes a second, faded."""
        self._bin, self._bin_bytes = now, 0
        self._tokens, self._filled_at = 0.0, now

    @property
    def bytes_per_s(self) -> float:
        """What the background gets while live bytes are on their way."""
        return max(SHARE * self._best, SLOWEST_BYTES_PER_S)

    def arrived(self, num_bytes: int, now: float) -> None:
        """A peer acknowledged bytes: the only ones of which it is known how fast they went."""
        self._bin_bytes += num_bytes
        passed = now - self._bin
        if passed >= _BIN_S:
            self._best = max(self._best * _FADES_PER_S**passed, self._bin_bytes / passed)
            self._bin, self._bin_bytes = now, 0

    def live(self, session: int, in_flight: int, *, moved: bool, now: float) -> None:
        """A session has so many live bytes on their way; `moved`: some more, or fewer, than when that was last said."""
        if not in_flight:
            self._live.pop(session, None)
        elif moved or session not in self._live:
            self._live[session] = self._live_at = now

    def background(self, session: int, in_flight: int, *, moved: bool, now: float) -> None:
        """The same of its background bytes."""
        if not in_flight:
            self._ahead.pop(session, None)
        elif moved or session not in self._ahead:
            self._ahead[session] = (in_flight, now)

    def gone(self, session: int) -> None:
        """It is over."""
        self._live.pop(session, None)
        self._ahead.pop(session, None)

    def allows(self, session: int, now: float) -> bool:
        """Whether a background chunk of this session may leave now."""
        ahead = sum(in_flight for in_flight, moved_at in self._ahead.values() if now - moved_at < STALE_S)
        _, moved_at = self._ahead.get(session, (0, now))
        lately = now - self._live_at < LATELY_S
        if lately and ahead >= max(AHEAD_S * self._best, AHEAD_BYTES) and now - moved_at < NUDGE_S:
            return False
        if not any(now - moved_at < STALE_S for moved_at in self._live.values()):
            self._tokens, self._filled_at = 0.0, now
            return True
        self._fill(now)
        return self._tokens >= 0

    def spent(self, num_bytes: int, now: float) -> None:
        """A background chunk has left; it may be more than was there, and is paid for afterwards."""
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


# --- The coordinator's socket: one ROUTER for all sessions and lanes. Moves frames between it and the sessions, no
# more.
#
# Each ZeroMQ peer is a lane. A lane's first frame decides: a Hello opens a session, a LaneHello with a session's token
# joins it. Identity is the owner of the CURVE key of every single frame (protocol U), or, in the clear, the claimed
# name.


_log = logging.getLogger(__name__)

ZAP_DOMAIN = "farloop"
"""Matched literally by pyzmq; a domain it does not know leaves the client hanging (protocol U)."""

BURST_FRAMES = 256
"""Frames taken in before timers and senders get their turn: all that is readable, within reason (protocol C)."""

RETRY_SEND_S = 0.005
"""A full pipe is tried again after this."""

WATCH_KEYS_S = 1.0
"""The allow-list's folder is looked at this often: how long a revoked key may still be heard."""

BACKGROUND_S = 0.02
"""A download that has to wait looks again after this, if nothing happens before."""

PROBE_DELAY_S = 0.1
"""From a connection's end to the probe of all sessions: ROUTER has let go of its lane by then, and of others that ended
at once with it."""

OF_THE_PROCESS = (StorageError, MachineBroken)
"""Errors that concern the coordinator as a whole, whoever's work they came up in, but for `NoRoom`, which a read has
for want of a descriptor. Any other ends one session."""


class SessionRouter:
    """All sessions of one coordinator. Runs on the loop; `on_event` is called there for everything that happens."""

    def __init__(
        self,
        *,
        endpoint: str,
        key: Path | None,
        allow: Path | None,
        on_event: Callable[[Peer, SessionEvent], None],
        limits: Limits,
        timing: Timing,
        congestion: str = "",
        turned_away: Callable[[Reason, str], None] = lambda reason, who: None,
    ) -> None:
        """`key` and `allow` switch CURVE on; without them everything travels in the clear.

        `turned_away` is called for everybody and everything that is not heard: why, and whose it was.

        Raises:
            KeyFileError: a key file cannot be used.
            BindError: the endpoint cannot be bound.
        """
        self._on_event, self._limits, self._timing = on_event, limits, timing
        self._turned_away, self._congestion = turned_away, congestion
        self._gate = RateLimiter()
        self._peers = Peers(self._gate, limits, timing, turned_away)
        self._egress = Egress(time.monotonic())
        self._background: OrderedDict[int, Peer] = OrderedDict()
        """Sessions with a download that could go on, in the order of their turns."""
        self._wake = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._allow = AllowList(allow) if allow else None
        self._authenticator: AsyncioAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._connections = Connections(most_connections(descriptors.limit()), self._peers.is_spoken_by)
        self._some_left = asyncio.Event()
        """A connection by which a session spoke has ended."""
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # else ZeroMQ waits until somebody reads, and moves nothing meanwhile
        at = f"inproc://connections-{id(self)}"
        self._socket.monitor(at, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor.connect(at)
        try:
            self._configure(key)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise BindError(endpoint, error) from error
        except BaseException:
            self.close()
            raise
        self.endpoint = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def _configure(self, key: Path | None) -> None:
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, 200),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 64),
            (zmq.BACKLOG, BACKLOG),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.MAXMSGSIZE, self._limits.max_frame_bytes),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.TCP_MAXRT, DEAD_TCP_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 10),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        ):
            self._socket.setsockopt(option, value)
        if key is None:
            return
        assert self._allow is not None
        self._allow.refresh()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        secret = load_secret(key)
        self._socket.curve_secretkey = secret
        self._socket.curve_publickey = zmq.curve_public(secret)
        self._socket.curve_server = True

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP asks whether this Z85 key may come in."""
        assert self._allow is not None
        owner = self._allow.owner(key)
        if owner is None:
            self._turned_away(Reason.WRONG_KEY, key.decode())
        return owner is not None

    # --- what the daemon asks

    @contextlib.contextmanager
    def working_for(self, peer: Peer) -> Iterator[Session]:
        """All work on behalf of one session is done in here, and what it wants to send leaves at the end.

        Whatever goes wrong inside ends this session with a reason, and no other: `OF_THE_PROCESS` alone goes on. So a
        caller changes nothing inside that must not be left half done; what follows in the block is skipped.
        """
        with self._contained(peer):
            yield peer.session
        self.flush(peer)

    def failed(self, peer: Peer, error: Exception) -> None:
        """Work for this session went wrong: end the session, count it and say why."""
        session = peer.session
        if isinstance(error, LocalProtocolError) and session.state in (State.CLOSING, State.CLOSED):
            return _log.debug("not sent session=%d: it has ended meanwhile", peer.number)
        if isinstance(error, LimitReached):
            reason = Reason.BEHIND
        else:
            reason = Reason.MALFORMED if isinstance(error, RemoteProtocolError) else Reason.FAULT
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
        told = reason.sentence if reason is Reason.FAULT else str(error)
        self._end(peer, reason, told)

    def flush(self, peer: Peer) -> None:
        """Let out what the peer's session wants to send, and hand on what has happened in it."""
        with self._contained(peer):
            self._let_out(peer)
        if peer.session.state is State.CLOSED:
            self._part(peer)
        now = time.monotonic()
        self._send_background(now)
        self._wake.set()

    def closed_by_us(self, peer: Peer, reason: Reason) -> None:
        """End a session without a word."""
        with self.working_for(peer) as session:
            session.close(reason, reason.sentence)

    async def run(self) -> None:
        """Move frames until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="receive")
            group.create_task(self._keep_time(), name="timers")
            group.create_task(self._watch_connections(), name="connections")
            group.create_task(self._look_at_connections(), name="strangers")
            group.create_task(self._ask_who_left(), name="who-left")
            if self._allow is not None:
                group.create_task(self._watch_keys(self._allow), name="keys")

    def close(self) -> None:
        """Give the sockets back."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    # --- one session at a time

    @contextlib.contextmanager
    def _contained(self, peer: Peer) -> Iterator[None]:
        try:
            yield
        except NoRoom as error:
            self.failed(peer, error)
        except OF_THE_PROCESS:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of a session: it becomes the session's end, with a reason
            self.failed(peer, error)

    def _let_out(self, peer: Peer) -> None:
        self._hand_on(peer)
        session, now = peer.session, time.monotonic()
        while not self._is_held_up(peer):
            frames = session.outgoing(now, background=False)
            for lane, parts in frames:
                self._transmit(peer, lane, parts)
            if not frames or not any(lane > 0 for lane, _ in frames):
                break
        else:
            for lane, parts in session.outgoing(now, max_chunks=0):
                self._transmit(peer, lane, parts)
        self._hand_on(peer)
        if session.state is not State.CLOSED:
            self._measure(peer, now)

    def _hand_on(self, peer: Peer) -> None:
        """Tell what has happened in a session. What goes wrong with one event loses no other: its end is told in any
        case, and after its end nothing but that."""
        while events := peer.session.events():
            for event in events:
                if isinstance(event, SessionClosed):
                    self._tell_end(peer, event)
                elif not peer.parted:
                    with self._contained(peer):
                        self._hand_on_one(peer, event)

    def _hand_on_one(self, peer: Peer, event: SessionEvent) -> None:
        if isinstance(event, MessageReceived) and peer.session.state is State.OPEN:
            refused = self._gate.says(peer.who, event.message, time.monotonic())
            if refused is not None:
                self._turned_away(refused, peer.who)
                peer.dismissed = True
                return self._dismiss(peer, refused)
        if not peer.dismissed:
            self._on_event(peer, event)

    def _tell_end(self, peer: Peer, event: SessionClosed) -> None:
        if not peer.parted:
            peer.parted = True
            with self._contained(peer):
                self._on_event(peer, event)

    def _part(self, peer: Peer) -> None:
        """Its session is over: everybody hears of it, whatever went wrong before, and nothing of it is kept."""
        with self._contained(peer):
            self._hand_on(peer)
        self._tell_end(peer, SessionClosed(reason=Reason.FAULT, detail=Reason.FAULT.sentence))
        self._peers.forget(peer)
        self._egress.gone(peer.number)
        self._background.pop(peer.number, None)

    # --- inbound

    async def _receive(self) -> None:
        while True:
            self._take(await self._socket.recv_multipart(copy=False))
            with contextlib.suppress(zmq.Again):
                for _ in range(BURST_FRAMES):
                    self._take(await self._socket.recv_multipart(copy=False, flags=zmq.DONTWAIT))
            await asyncio.sleep(0)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            lane = self._lane_of(frames)
        except OF_THE_PROCESS:
            raise
        except Exception:  # noqa: BLE001 - the edge: whoever sent it has no session that could end
            self._turned_away(Reason.FAULT, "a stranger")
            return _log.warning("a first frame was passed over reason=%s", Reason.FAULT.name, exc_info=True)
        if lane is None:
            return
        peer = lane.peer
        with self.working_for(peer) as session:
            if self._allow is not None and self._owner(frames[1]) != peer.owner:
                return session.close(Reason.WRONG_KEY, Reason.WRONG_KEY.sentence)
            try:
                session.receive(lane.number, [frame.buffer for frame in frames[1:]], time.monotonic())
            except RemoteProtocolError as error:
                self._turned_away(Reason.MALFORMED, peer.who)
                peer.bad_frames += 1
                _log.warning("bad frame session=%d lane=%d reason=%r", peer.number, lane.number, str(error))
                if peer.bad_frames >= BAD_FRAMES or isinstance(error, OutOfBounds):
                    self._end(peer, Reason.MALFORMED, str(error))
            else:
                peer.bad_frames = 0

    def _lane_of(self, frames: Sequence[zmq.Frame]) -> Lane | None:
        """The lane of a session that these frames came by; None where they came to nothing, or were for here alone."""
        route = bytes(frames[0].bytes)
        if len(frames) < 2:
            return None
        if lane := self._peers.lane(route):
            return lane
        return self._meet(route, [frame.buffer for frame in frames[1:]], self._owner(frames[1]), frames[1])

    def _owner(self, frame: zmq.Frame) -> NodeId | None:
        """Whose key sent this frame; None in the clear, and for one that was revoked."""
        if self._allow is None:
            return None
        try:
            return self._allow.owner(str(frame.get("User-Id")).encode())
        except zmq.ZMQError:
            return None

    def _meet(self, route: bytes, parts: list[Buffer], owner: NodeId | None, frame: zmq.Frame) -> Lane | None:
        """The first frame of a lane; the lane where it is for its session to receive."""
        address = _address(frame)
        if self._allow is not None and owner is None:
            self._turned_away(Reason.WRONG_KEY, address)
            return None
        met = self._peers.meet(route, parts, owner, address, time.monotonic())
        if isinstance(met, Unread):
            self._answer(route, met)
        if met is None or isinstance(met, Unread):
            return None
        descriptor = _descriptor(frame)
        self._peers.speaks_by(met if isinstance(met, Peer) else met.peer, descriptor)
        if isinstance(met, Peer):
            met.bulk_descriptor = (descriptor, address)
            if self._congestion:
                choose_congestion(*met.bulk_descriptor, self._congestion)
            self.flush(met)
            return None
        for old in self._peers.too_many_of(met.peer):
            self.closed_by_us(old, Reason.SUPERSEDED)
        return met

    # --- outbound

    def _backlog(self, peer: Peer, lane: int) -> deque[list[Buffer]]:
        found = self._peers.lane(peer.routes[lane])
        return found.backlog if found is not None else deque()

    def _is_held_up(self, peer: Peer) -> bool:
        return any(self._backlog(peer, lane) for lane in peer.routes if lane > 0)

    def _measure(self, peer: Peer, now: float) -> None:
        """See how far what was sent to a peer has come, and whether it has something to send in the background."""
        session, arrived, live = peer.session, peer.session.traffic.arrived_bytes, peer.session.live_in_flight
        if arrived > peer.arrived_bytes:
            self._egress.arrived(arrived - peer.arrived_bytes, now)
        moved = (arrived, live) != (peer.arrived_bytes, peer.live_bytes)
        self._egress.live(peer.number, live, moved=moved, now=now)
        background = session.background_in_flight
        if background or peer.background_bytes:
            self._egress.background(peer.number, background, moved=background != peer.background_bytes, now=now)
        peer.arrived_bytes, peer.live_bytes, peer.background_bytes = arrived, live, background
        if session.background_waits:
            self._background.setdefault(peer.number, peer)

    def _send_background(self, now: float) -> None:
        """Downloads of all sessions take turns by chunk, while nobody waits for other bytes or as far as their share
        goes."""
        sent = True
        while sent:
            sent = False
            for number, peer in list(self._background.items()):
                with self._contained(peer):
                    sent = self._send_background_of(peer, now) or sent
                if peer.session.state is State.CLOSED:
                    self._background.pop(number, None)
                    self._part(peer)

    def _send_background_of(self, peer: Peer, now: float) -> bool:
        """One chunk, if it may leave now; whether it did."""
        if not peer.session.background_waits:
            self._background.pop(peer.number, None)
        elif peer.number in self._background and self._egress.allows(peer.number, now) and not self._is_held_up(peer):
            self._background.move_to_end(peer.number)
            for lane, parts in peer.session.outgoing(now, max_chunks=1):
                self._egress.spent(sum(len(part) for part in parts) if lane > 0 else 0, now)
                self._transmit(peer, lane, parts)
            self._measure(peer, now)
            return True
        return False

    def _transmit(self, peer: Peer, lane: int, parts: list[Buffer]) -> None:
        backlog = self._backlog(peer, lane)
        if backlog or not self._try_send(peer, lane, parts):
            backlog.append(parts)

    def _try_send(self, peer: Peer, lane: int, parts: list[Buffer]) -> bool:
        """False when the lane's pipe is full. A lane that is gone ends the session: its node dials again."""
        if peer.session.state is State.CLOSED and lane > 0:
            return True
        sent = self._socket.send_multipart([peer.routes[lane], *parts], flags=zmq.DONTWAIT, copy=False)
        assert isinstance(sent, asyncio.Future) and sent.done()  # DONTWAIT is decided at once
        error = sent.exception()
        if error is None:
            return True
        if isinstance(error, zmq.Again):
            return False
        peer.session.close(Reason.CLOSED, "the node's connection is gone")
        return True

    def _retry(self) -> bool:
        """Send what full pipes held back; whether some is left."""
        left = False
        for peer in self._peers:
            with self.working_for(peer):
                for lane in list(peer.routes):
                    backlog = self._backlog(peer, lane)
                    while backlog and self._try_send(peer, lane, backlog[0]):
                        backlog.popleft()
                    left = left or bool(backlog)
        return left

    def _end(self, peer: Peer, reason: Reason, detail: str) -> None:
        """End a session now. Its node is told why, if it can be told: nobody waits for the acknowledgement."""
        try:
            for lane, parts in peer.session.last_word(reason, detail, time.monotonic()):
                self._transmit(peer, lane, parts)
        except Exception as error:  # noqa: BLE001 - the session ends in any case, and the log has the reason
            _log.debug("not told session=%d reason=%s error=%r", peer.number, reason.name, str(error))
        peer.session.close(reason, detail if reason is Reason.BEHIND else reason.sentence)

    def _answer(self, route: bytes, unread: Unread) -> None:
        """Tell a node that its greeting cannot be read: there is no session that could."""
        sent = self._socket.send_multipart([route, *unread.answer()], flags=zmq.DONTWAIT)
        assert isinstance(sent, asyncio.Future) and sent.done()  # DONTWAIT is decided at once
        if error := sent.exception():
            _log.debug("not told route=%s reason=%s error=%r", route.hex(), Reason.MALFORMED.name, str(error))

    def _dismiss(self, peer: Peer, reason: Reason) -> None:
        """End a session, and say why."""
        with self.working_for(peer):
            self._end(peer, reason, "")

    # --- connections

    async def _watch_connections(self) -> None:
        """Count connections as ZeroMQ accepts them and lets them go: there is a budget (`sessions.py`)."""
        while True:
            self._told_of_connection(await recv_monitor_message(self._monitor))
            with contextlib.suppress(zmq.Again):
                for _ in range(BURST_FRAMES):
                    self._told_of_connection(await recv_monitor_message(self._monitor, zmq.DONTWAIT))
            await asyncio.sleep(0)

    def _told_of_connection(self, told: Mapping[str, Any]) -> None:
        descriptor, now = int(told["value"]), time.monotonic()
        if told["event"] == zmq.EVENT_ACCEPTED:
            going = self._connections.accepted(descriptor, *end_of(descriptor), now)
            if going is not None:
                self._hang_up(going, Reason.CROWDED)
            return
        self._connections.ended(descriptor)
        if self._peers.is_spoken_by(descriptor):
            self._some_left.set()

    def _hang_up(self, connection: Connection, reason: Reason) -> None:
        if hang_up(connection.descriptor, connection.host, connection.port):
            self._turned_away(reason, connection.host)

    async def _look_at_connections(self) -> None:
        """End those by which nobody speaks: ZeroMQ keeps a connection for as long as its heartbeats are answered."""
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in self._connections.look(time.monotonic()):
                self._hang_up(connection, Reason.SILENT)

    async def _ask_who_left(self) -> None:
        """Notice at once that a node's connection ended, not at its next heartbeat (protocol V).

        The monitor tells that one did; whose lane it was, a frame to each tells.
        """
        while True:
            await self._some_left.wait()
            await asyncio.sleep(PROBE_DELAY_S)
            self._some_left.clear()
            for peer in self._peers:
                with self.working_for(peer) as session:
                    session.speak()

    # --- time

    async def _keep_time(self) -> None:
        """Fire the sessions' timers, and retry full pipes."""
        while True:
            due = [t for peer in self._peers if (t := self._due(peer)) is not None]
            pause = max(0.0, min(due) - time.monotonic()) if due else 1.0
            if self._peers.is_held_up:
                pause = min(pause, RETRY_SEND_S)
            if self._background:
                pause = min(pause, max(BACKGROUND_S, self._egress.wait_s(time.monotonic())))
            try:
                self._wake.clear()
                async with asyncio.timeout(pause):
                    await self._wake.wait()
                await asyncio.sleep(0)
                continue
            except TimeoutError:
                pass
            await asyncio.sleep(0)  # what is readable goes in first (protocol C)
            now = time.monotonic()
            for peer in self._peers:
                due_at = self._due(peer)
                if due_at is None or due_at <= now:
                    with self.working_for(peer) as session:
                        session.handle_timer(now)
            if self._peers.is_held_up:
                self._retry()
            self._send_background(now)

    def _due(self, peer: Peer) -> float | None:
        with self._contained(peer):
            return peer.session.next_timer()
        self.flush(peer)
        return None

    async def _watch_keys(self, allow: AllowList) -> None:
        """Revocation without restart: a session whose key left the list ends (protocol U)."""
        trouble = ""
        while True:
            await asyncio.sleep(WATCH_KEYS_S)
            before, said, trouble = allow.keys, trouble, ""
            try:
                allow.refresh()
            except KeyFileError as error:
                trouble = str(error)
                if trouble != said:
                    _log.warning("nobody new is let in until this is mended reason=%r", trouble)
            after = allow.keys
            # Another key under the same name is another key: who holds the old one hears no more.
            revoked = {name for name in before if after.get(name) != before[name]}
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    _log.info("%s node=%s", "key revoked" if name in revoked else "key authorized", name)
            for peer in self._peers:
                if peer.owner in revoked:
                    self._dismiss(peer, Reason.WRONG_KEY)


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection that a frame came by; −1 where the transport has none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _address(frame: zmq.Frame) -> str:
    """Where a frame came from, as far as the transport knows."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "?"
