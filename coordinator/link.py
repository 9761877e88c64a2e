"""The coordinator's socket: one ROUTER for all sessions and lanes. Moves frames between it and the sessions, no more.

Each ZeroMQ peer is a lane. A lane's first frame decides: a Hello opens a session, a LaneHello with a session's token
joins it. Identity is the owner of the CURVE key of every single frame (protocol U), or, in the clear, the claimed name.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from farloop.algo.spec import NodeId
from farloop.coordinator.egress import Egress
from farloop.coordinator.gate import Gate
from farloop.coordinator.peers import Lane, Peer, Peers
from farloop.monitoring.connection import choose_congestion
from farloop.wire.errors import RemoteProtocolError
from farloop.wire.events import MessageReceived, SessionEvent
from farloop.wire.frames import Buffer
from farloop.wire.handshake import State
from farloop.wire.keys import AllowList, KeyFileError, load_secret
from farloop.wire.limits import BAD_FRAMES, Limits, Timing
from farloop.wire.messages import Leave
from farloop.wire.reasons import Reason

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

DEAD_TCP_MS = 60_000
"""A connection that acknowledges nothing for this long is closed: its peer is gone without a word (half-open)."""

HEARTBEAT_MS = 30_000
"""ZeroMQ asks each peer this often whether it is there, and hangs up ..."""

HEARTBEAT_TIMEOUT_MS = 120_000
"""... after this: an answer waits behind what a thin link has yet to carry. Sessions have a shorter time-out."""


class BindError(OSError):
    """The port cannot be had; one line for the person who chose it."""


class RouterLink:
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
        self._gate = Gate()
        self._peers = Peers(self._gate, limits, timing, turned_away)
        self._egress = Egress(time.monotonic())
        self._background: OrderedDict[int, Peer] = OrderedDict()
        """Sessions with a download that could go on, in the order of their turns."""
        self._wake = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._allow = AllowList(allow) if allow else None
        self._authenticator: AsyncioAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        assert isinstance(monitor, zmq.asyncio.Socket)
        self._monitor = monitor
        try:
            self._configure(key)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise BindError(explain_bind(endpoint, error)) from error
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

    def flush(self, peer: Peer) -> None:
        """Let out what the peer's session wants to send. To be called after every use of it."""
        self._emit(peer)
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
        self._emit(peer)
        if session.state is State.CLOSED:
            self._peers.forget(peer)
            self._egress.gone(peer.number)
        else:
            self._measure(peer, now)
        self._send_background(now)
        self._wake.set()

    def closed_by_us(self, peer: Peer, reason: Reason) -> None:
        """End a session without a word."""
        peer.session.close(reason, reason.sentence)
        self.flush(peer)

    async def run(self) -> None:
        """Move frames until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="receive")
            group.create_task(self._keep_time(), name="timers")
            group.create_task(self._watch_connections(), name="connections")
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

    # --- inbound

    async def _receive(self) -> None:
        while True:
            self._take(await self._socket.recv_multipart(copy=False))
            with contextlib.suppress(zmq.Again):
                for _ in range(BURST_FRAMES):
                    self._take(await self._socket.recv_multipart(copy=False, flags=zmq.DONTWAIT))
            await asyncio.sleep(0)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        route = bytes(frames[0].bytes)
        parts: list[Buffer] = [frame.buffer for frame in frames[1:]]
        if not parts:
            return
        owner = self._owner(frames[1])
        lane = self._peers.lane(route) or self._meet(route, parts, owner, frames[1])
        if lane is None:
            return
        peer = lane.peer
        if self._allow is not None and owner != peer.owner:
            return self.closed_by_us(peer, Reason.WRONG_KEY)
        try:
            peer.session.receive(lane.number, parts, time.monotonic())
        except RemoteProtocolError as error:
            self._turned_away(Reason.MALFORMED, peer.who)
            peer.bad_frames += 1
            _log.warning("bad frame session=%d lane=%d reason=%r", peer.number, lane.number, str(error))
            if peer.bad_frames >= BAD_FRAMES:
                return self.closed_by_us(peer, Reason.MALFORMED)
        else:
            peer.bad_frames = 0
        self.flush(peer)

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
        if isinstance(met, Peer):
            met.bulk_descriptor = (int(frame.get(zmq.SRCFD)), address)
            if self._congestion:
                choose_congestion(*met.bulk_descriptor, self._congestion)
            self.flush(met)
            return None
        if met is not None:
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
                if not peer.session.background_waits:
                    del self._background[number]
                elif self._egress.allows(number, now) and not self._is_held_up(peer):
                    sent = True
                    self._background.move_to_end(number)
                    for lane, parts in peer.session.outgoing(now, max_chunks=1):
                        self._egress.spent(sum(len(part) for part in parts) if lane > 0 else 0, now)
                        self._transmit(peer, lane, parts)
                    self._measure(peer, now)

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
            for lane in list(peer.routes):
                backlog = self._backlog(peer, lane)
                while backlog and self._try_send(peer, lane, backlog[0]):
                    backlog.popleft()
                left = left or bool(backlog)
            self.flush(peer)
        return left

    def _emit(self, peer: Peer) -> None:
        for event in peer.session.events():
            if isinstance(event, MessageReceived) and peer.session.state is State.OPEN:
                refused = self._gate.says(peer.who, event.message, time.monotonic())
                if refused is not None:
                    self._turned_away(refused, peer.who)
                    return self._dismiss(peer, refused)
            self._on_event(peer, event)

    def _dismiss(self, peer: Peer, reason: Reason) -> None:
        """End a session, and say why."""
        if peer.session.state is State.OPEN:
            peer.session.send(Leave(reason=reason), time.monotonic())
            self.flush(peer)
        self.closed_by_us(peer, reason)

    async def _watch_connections(self) -> None:
        """Notice at once that a node's connection ended, not at its next heartbeat (protocol V).

        The monitor tells that one did, and not whose: whose it was, a frame to each tells.
        """
        while True:
            await recv_monitor_message(self._monitor)
            await asyncio.sleep(PROBE_DELAY_S)
            with contextlib.suppress(zmq.Again):
                while True:
                    await recv_monitor_message(self._monitor, zmq.DONTWAIT)
            for peer in self._peers:
                peer.session.speak()
                self.flush(peer)

    # --- time

    async def _keep_time(self) -> None:
        """Fire the sessions' timers, and retry full pipes."""
        while True:
            due = [t for peer in self._peers if (t := peer.session.next_timer()) is not None]
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
                due_at = peer.session.next_timer()
                if due_at is None or due_at <= now:
                    peer.session.handle_timer(now)
                    self.flush(peer)
            if self._peers.is_held_up:
                self._retry()
            self._send_background(now)

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


def _address(frame: zmq.Frame) -> str:
    """Where a frame came from, as far as the transport knows."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "?"


def explain_bind(endpoint: str, error: Exception) -> str:
    """One line for a person whose coordinator could not take its port."""
    if isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE:
        return f"{endpoint} is in use; stop the other process, or choose another port in [coordinator] bind"
    return f"cannot bind {endpoint}: {error}"
