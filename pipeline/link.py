"""Sockets between pipeline nodes, and passive link measurement."""

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import uvloop
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from farloop.monitoring.addresses import Address, look_up, parse_tcp, resolved
from farloop.pipeline import messages
from farloop.pipeline.events import PeerBindError
from farloop.pipeline.messages import FramedMessage, Message, PipelineMessage
from farloop.wire.frames import Buffer
from farloop.wire.keys import AllowList, KeyFileError, load_public, load_secret
from farloop.wire.messages import Seen, Transfer
from farloop.wire.reasons import RemoteProtocolError

# --- Passive link measurement: round trip and rate
#
# Every frame carries its sender's clock; a message also echoes the last time that came back, and how long ago. So a
# round trip needs one clock alone, and the extra time of a tensor over the quickest message is the time of its bytes,
# whatever the offset of the two clocks. A tensor is one ZeroMQ message and arrives whole, so its arrival alone says
# nothing about the link.

LOOKS_BACK_S: Final = 8.0  # older heartbeats and tensors do not count; heartbeats come every half second

LEAST_S: Final = 1e-3
"""Delay of the two machines' threads and loops: a tensor that took less is taken to have taken this long."""

_MOST: Final = 1024  # of each kind that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The echo in the next heartbeat to a peer."""

    sent_s: float  # clock of its newest heartbeat; 0 without one
    held_s: float  # seconds since it came


class LinkEstimate:
    """The link to one peer. `sent_s` are times of its clock, `now` of this node's."""

    def __init__(self) -> None:
        self._newest: tuple[float, float] | None = None  # newest heartbeat: (sent_s, when it came)
        self._round_trips: deque[tuple[float, float]] = deque(maxlen=_MOST)  # (when, seconds)
        self._offsets: deque[tuple[float, float]] = deque(maxlen=_MOST)
        """(when, now − sent_s) of heartbeats: latency plus the difference of the clocks."""
        self._tensors: deque[tuple[float, int, float]] = deque(maxlen=_MOST)  # (when, bytes, now − sent_s)

    def word(self, sent_s: float, echo: Echo, now: float) -> None:
        """Handle a heartbeat."""
        self._newest = sent_s, now
        self._offsets.append((now, now - sent_s))
        round_trip_s = now - echo.sent_s - echo.held_s
        if echo.sent_s and round_trip_s > 0.0:
            self._round_trips.append((now, round_trip_s))

    def tensor(self, num_bytes: int, sent_s: float, now: float) -> None:
        self._tensors.append((now, num_bytes, now - sent_s))

    def echo(self, now: float) -> Echo:
        if self._newest is None:
            return Echo(sent_s=0.0, held_s=0.0)
        sent_s, came_at = self._newest
        return Echo(sent_s=sent_s, held_s=now - came_at)

    def seen(self, peer: str, now: float) -> Seen | None:
        """The measurement; None before the first round trip.

        The shortest times count: longer ones include queueing.
        """
        for times in (self._round_trips, self._offsets, self._tensors):
            while times and times[0][0] < now - LOOKS_BACK_S:
                times.popleft()
        if not self._round_trips:
            return None
        return Seen(peer=peer, rtt_s=min(seconds for _, seconds in self._round_trips), transfer=self._transfer())

    def _transfer(self) -> Transfer | None:
        if not self._tensors or not self._offsets:
            return None
        least_s = min(seconds for _, seconds in self._offsets)
        took = [(num_bytes, max(LEAST_S, seconds - least_s)) for _, num_bytes, seconds in self._tensors]
        num_bytes, seconds = max(took, key=lambda one: one[0] / one[1])
        return Transfer(num_bytes=num_bytes, seconds=seconds)


# --- Sockets: one ROUTER that all others dial, one DEALER to each of them
#
# A background thread with its own loop. Frames go to the training thread through `deliver`; calls from it are
# thread-safe. A peer is up while its messages arrive and the connection stands; a broken connection is noticed at once
# and dialed again, a silent one after `liveness_s`.

_log = logging.getLogger(__name__)

BEAT_S = 0.5  # interval of heartbeats to each peer
WATCH_KEYS_S = 1.0  # interval of checks of the folder of keys
LOOKUP_S = 10.0  # longest wait for a name server
BACKOFF_S = (0.1, 2.0)  # first and longest pause before a peer is dialled again

MOST_QUEUED = 4096  # most frames that wait for one peer; beyond it the connection is given up
ZAP_DOMAIN = "farloop"

Come = Callable[[str, FramedMessage | Message | bool], None]  # peer, and work, a message, or whether it can be reached


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Addresses and keys of a node's links to other stages."""

    name: str
    bind: str  # where it listens, as tcp://host:port
    key: Path | None = None  # its secret key file; CURVE is on with it
    peers: Path | None = None  # folder of the others' .pub files, required with `key`
    liveness_s: float = 5.0  # silence after which a peer is given up
    max_tensor_bytes: int = 1 << 30  # largest tensor that is believed


@dataclass(slots=True)
class _Peer:
    address: str
    queue: deque[list[Buffer]] = field(default_factory=deque)  # frames to send
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    connected: bool = False
    heard_at: float | None = None
    incarnation: int | None = None
    up: bool = False
    sight: LinkEstimate = field(default_factory=LinkEstimate)


class PeerLink:
    """Runs from `start` to `close`. Every public call may be made from any thread."""

    def __init__(self, config: PeerConfig, run: int, deliver: Come, word: Callable[[], PipelineMessage]) -> None:
        """`run`: the run's fingerprint. `deliver` must not block; it and `word` are called in the link's thread.
        Raises KeyFileError: a key file cannot be used."""
        if (config.key is None) != (config.peers is None):
            raise ValueError("key and peers go together: with one alone nothing would be encrypted")
        self._config, self._run, self._deliver, self._word = config, run, deliver, word
        self._secret = load_secret(config.key) if config.key else None
        self._allow = AllowList(config.peers) if config.peers else None
        self._peers: dict[str, _Peer] = {}
        self._group: asyncio.TaskGroup | None = None
        self.seen: tuple[Seen, ...] = ()  # measurements of connected peers, replaced as a whole now and then
        self.endpoint = ""  # its address, once it listens
        self._loop = uvloop.new_event_loop()
        self._started: Future[str] = Future()
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._live, name="peer-link", daemon=True)

    def start(self) -> None:
        """Begin to listen. Raises PeerBindError."""
        self._thread.start()
        self.endpoint = self._started.result()

    def close(self) -> None:
        """End the thread after a moment for queued frames. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join(5.0)

    def dial(self, addresses: Mapping[str, str]) -> None:
        """Dial these; known addresses stay connected."""
        self._call(self._dial, dict(addresses))

    def send(self, to: str, parts: list[Buffer]) -> None:
        """Queue a frame; dropped while the peer cannot be reached."""
        self._call(self._send, to, parts)

    # --- on the loop

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - the edge of the thread: who starts it is told, or the log
            if self._started.done():
                _log.error("peer link failed error=%r", str(error), exc_info=True)
            else:
                self._started.set_exception(error)
        finally:
            self._loop.close()

    def _end(self) -> None:
        assert self._main is not None
        self._loop.call_later(0.2, self._main.cancel)

    async def _serve(self) -> None:
        context = zmq.asyncio.Context()
        authenticator = self._authenticator(context) if self._allow is not None else None
        try:
            router = self._listen(context)
            async with asyncio.TaskGroup() as group:
                self._group, self._context = group, context
                group.create_task(self._receive(router), name="receive")
                group.create_task(self._beat(), name="beat")
                if self._allow is not None:
                    group.create_task(self._watch_keys(self._allow), name="keys")
                self._started.set_result(bytes(router.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))
        finally:
            if authenticator is not None:
                authenticator.stop()
            context.destroy(linger=200)

    def _authenticator(self, context: zmq.asyncio.Context) -> AsyncioAuthenticator:
        assert self._allow is not None
        self._allow.refresh()
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP: whether a connection with this Z85 key is accepted."""
        return self._allow is not None and self._allow.owner(key) is not None

    def _listen(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        router = self._socket(context, zmq.ROUTER)
        if self._secret is not None:
            router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
            router.curve_server = True
        try:
            here = resolved(parse_tcp(self._config.bind, listens=True))
            router.setsockopt(zmq.IPV6, here.is_ipv6)
            router.bind(f"tcp://{here}")
        except (zmq.ZMQError, ValueError) as error:
            raise PeerBindError(f"cannot listen for the other stages at {self._config.bind}: {error}") from error
        return router

    def _socket(self, context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 256),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.MAXMSGSIZE, max(self._config.max_tensor_bytes, messages.MAX_HEADER_BYTES)),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            socket.setsockopt(option, value)
        if self._secret is not None:
            socket.curve_secretkey = self._secret
            socket.curve_publickey = zmq.curve_public(self._secret)
        return socket

    # --- what comes

    async def _receive(self, router: zmq.asyncio.Socket) -> None:
        while True:
            parts = await router.recv_multipart(copy=False)
            try:
                self._on_frame(parts)
            except RemoteProtocolError as error:
                _log.warning("bad frame from peer reason=%r", str(error))

    def _on_frame(self, parts: list[zmq.Frame]) -> None:
        name = parts[0].bytes.partition(b"/")[0].decode(errors="replace")[: messages.MAX_NAME]
        if len(parts) < 2 or (self._allow is not None and self._owner(parts[1]) != name):
            raise RemoteProtocolError(f"{name!r} is not who sent it")
        if (peer := self._peers.get(name)) is None:
            raise RemoteProtocolError(f"no node {name!r} is expected")
        now = time.monotonic()
        come = messages.parse([part.buffer for part in parts[1:]], self._run, self._config.max_tensor_bytes)
        peer.heard_at = now
        if isinstance(come, FramedMessage):
            peer.sight.tensor(come.info.size, come.info.sent_s, now)
        if isinstance(come, PipelineMessage):
            if peer.incarnation not in (None, come.incarnation):
                self._is_up(name, peer, up=False)
                peer.sight = LinkEstimate()
            peer.incarnation = come.incarnation
            peer.sight.word(come.sent_s, Echo(sent_s=come.echo_s, held_s=come.held_s), now)
            self._judge(name, peer)
        if peer.up:
            self._deliver(name, come)

    def _owner(self, frame: zmq.Frame) -> str | None:
        assert self._allow is not None
        try:
            return self._allow.owner(str(frame.get("User-Id")).encode())
        except zmq.ZMQError:
            return None

    def _judge(self, name: str, peer: _Peer) -> None:
        """Report changes of whether the peer can be reached."""
        heard = peer.heard_at is not None and time.monotonic() - peer.heard_at < self._config.liveness_s
        self._is_up(name, peer, up=heard and peer.connected and peer.incarnation is not None)

    def _is_up(self, name: str, peer: _Peer, *, up: bool) -> None:
        if up != peer.up:
            peer.up = up
            if not up:
                peer.incarnation, peer.sight = None, LinkEstimate()  # another start has another clock
                peer.queue.clear()
            _log.info("peer %s name=%s", "up" if up else "down", name)
            self._deliver(name, up)

    # --- what goes

    def _dial(self, addresses: dict[str, str]) -> None:
        for name, address in addresses.items():
            known = self._peers.get(name)
            if known is not None:
                known.address = address  # from the next dial on
            elif self._group is not None and name != self._config.name:
                self._peers[name] = peer = _Peer(address)
                self._group.create_task(self._keep_dialling(name, peer), name=f"to-{name}")

    def _send(self, to: str, parts: list[Buffer]) -> None:
        peer = self._peers.get(to)
        if peer is None or not peer.connected:
            return
        if len(peer.queue) >= MOST_QUEUED:
            _log.warning("peer dropped name=%s cause='%d frames queued'", to, len(peer.queue))
            return self._is_up(to, peer, up=False)
        peer.queue.append(parts)
        peer.wake.set()

    async def _keep_dialling(self, name: str, peer: _Peer) -> None:
        attempt = 0
        while True:
            connected = False
            try:
                for address in await look_up(parse_tcp(peer.address), LOOKUP_S):
                    if connected := await self._connection(name, peer, address):
                        break
            except (zmq.ZMQError, KeyFileError, OSError, ValueError) as error:
                _log.warning("cannot reach name=%s reason=%r", name, str(error))
            peer.connected = False
            self._judge(name, peer)
            attempt = 0 if connected else attempt + 1
            first, longest = BACKOFF_S
            await asyncio.sleep(min(longest, first * 2 ** min(attempt, 10)))

    async def _connection(self, name: str, peer: _Peer, address: Address) -> bool:
        """One connection from dial to end. Returns whether it was ever made."""
        dealer = self._socket(self._context, zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
        dealer.setsockopt(zmq.ROUTING_ID, f"{self._config.name}/{secrets.token_hex(4)}".encode())
        if self._config.peers is not None:
            dealer.curve_serverkey = load_public(self._config.peers / f"{name}.pub")
        monitor = dealer.get_monitor_socket(zmq.EVENT_ALL)
        assert isinstance(monitor, zmq.asyncio.Socket)
        sender: asyncio.Task[None] | None = None
        try:
            dealer.setsockopt(zmq.IPV6, address.is_ipv6)
            dealer.connect(f"tcp://{address}")
            while True:
                match (await recv_monitor_message(monitor))["event"]:
                    case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        peer.connected = True
                        peer.queue.clear()
                        self._say(name, peer)
                        sender = asyncio.create_task(self._send_all(dealer, peer), name=f"send-{name}")
                        self._judge(name, peer)
                    case zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                        return sender is not None
        finally:
            if sender is not None:
                sender.cancel()
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=0)

    async def _send_all(self, dealer: zmq.asyncio.Socket, peer: _Peer) -> None:
        while True:
            while not peer.queue:
                peer.wake.clear()
                await peer.wake.wait()
            await dealer.send_multipart(peer.queue.popleft(), copy=False)

    async def _beat(self) -> None:
        while True:
            for name, peer in self._peers.items():
                self._say(name, peer)
                self._judge(name, peer)
            now, up = time.monotonic(), {name: peer for name, peer in self._peers.items() if peer.up}
            self.seen = tuple(seen for name, peer in up.items() if (seen := peer.sight.seen(name, now)) is not None)
            await asyncio.sleep(BEAT_S)

    def _say(self, name: str, peer: _Peer) -> None:
        now = time.monotonic()
        echo = peer.sight.echo(now)
        word = replace(self._word(), sent_s=now, echo_s=echo.sent_s, held_s=echo.held_s)
        self._send(name, messages.message(word, self._run))

    async def _watch_keys(self, allow: AllowList) -> None:
        """Follow the folder of keys: removed keys are rejected from then on."""
        while True:
            await asyncio.sleep(WATCH_KEYS_S)
            try:
                allow.refresh()
            except KeyFileError as error:
                _log.warning("allow list unreadable reason=%r", str(error))
