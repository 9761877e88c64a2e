"""The coordinator's ROUTER socket on ZeroMQ: CURVE keys, the allow list, and a budget of TCP connections.

ZeroMQ accepts every connection and closes only those that do not finish its handshake in time. A connection costs a
file descriptor, and a process without a free descriptor can neither write a file nor accept a node. `Connections` keeps
the budget: a connection that no session uses belongs to a stranger. Strangers are disconnected, the oldest first, when
one address has too many of them, when there are too many connections in all, and when they stay strangers for long.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.auth import Authenticator
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from farloop.algo.spec import NodeId
from farloop.coordinator.errors import BindError
from farloop.monitoring import descriptors
from farloop.monitoring.addresses import bound_socket, network_of, parse_tcp, plain_host, resolved
from farloop.monitoring.tcp_connection import choose_congestion, end_of, hang_up
from farloop.runtime.ports import Buffer, Route, RouterListener, Sent
from farloop.wire.keys import AllowList, KeyFileError, fingerprint, load_secret
from farloop.wire.reasons import Reason

_log = logging.getLogger(__name__)

ZAP_DOMAIN: Final = "farloop"  # pyzmq compares it literally; a client of an unknown domain waits without an error
BURST_FRAMES: Final = 256  # frames that are received before timers and other tasks run
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)  # enums cost as much as the call that they are for

RETRY_SEND_S: Final = 0.005
"""Pause before a full lane is tried again: ROUTER does not report which of its peers became writable."""

WATCH_KEYS_S: Final = 1.0
"""Interval of the checks of the allow-list folder: the longest time for which a revoked key is still accepted."""

DEAD_TCP_MS: Final = 60_000  # a connection whose peer acknowledges nothing for this long is closed (half-open TCP)
HEARTBEAT_MS: Final = 30_000  # interval of ZeroMQ's heartbeats

HEARTBEAT_TIMEOUT_MS: Final = 120_000
"""ZeroMQ closes a connection that leaves a heartbeat unanswered for this long. The answer waits behind what a thin link
still has to carry. Sessions have a shorter time-out."""

BACKLOG: Final = 1024  # connections that wait in the kernel until ZeroMQ accepts them; net.core.somaxconn may lower it
LOOK_S: Final = 5.0  # interval of the checks for connections that no session uses

STRANGERS_OF_AN_ADDRESS: Final = 256
"""Most strangers of one address. A node is a stranger during its handshake, for a few round trips."""

STRANGER_S: Final = 30.0
"""A connection that no session uses for this long is closed. A greeting over a thin link takes seconds."""

MOST: Final = 8192  # most connections in all: two for each of the most sessions, and room for strangers
RESERVE: Final = 256  # file descriptors that are kept free for files and HTTP
FEWEST: Final = 64  # least budget of connections, whatever the limit of file descriptors


def check_bind(endpoint: str, setting: str = "bind") -> None:
    """Raises BindError where the endpoint cannot be bound now."""
    try:
        bound_socket(parse_tcp(endpoint, listens=True)).close()
    except OSError as error:
        raise BindError(endpoint, error, setting) from error


def require_keys(
    socket: "zmq.Socket[bytes]", secret: bytes, authenticator: Authenticator, accepts: Callable[[bytes], bool]
) -> None:
    """Encrypt a socket's connections under the coordinator's secret key, and take only those with a Z85 key that
    `accepts` takes. Starts the authenticator."""
    authenticator.start()
    provider = SimpleNamespace(callback=lambda domain, key: accepts(key))
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=provider)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
    socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
    socket.curve_server = True


class ZmqRouter:
    """The router port on ZeroMQ, in a running asyncio loop."""

    def __init__(
        self,
        *,
        endpoint: str,
        key: Path | None,
        allow: Path | None,
        max_frame_bytes: int,
        congestion: str = "",
        turned_away: Callable[[Reason, str], None] = lambda reason, who: None,
        allowed: Callable[[Mapping[NodeId, tuple[bytes, ...]]], None] = lambda keys: None,
    ) -> None:
        """Bind the endpoint.

        Args:
            key, allow: secret key, and folder of the nodes' public keys, for CURVE. Without them frames travel in the
                clear.
            congestion: congestion control of the connections; the system's if empty.
            turned_away: called with the reason and the key's fingerprint or the address of every peer that is rejected.
            allowed: called with the keys that may come in, once it runs and whenever they have changed.

        Raises KeyFileError: a key file cannot be used. Raises BindError: the endpoint cannot be bound.
        """
        self._allowed = allowed
        self._turned_away, self._congestion = turned_away, congestion
        self._allow = AllowList(allow) if allow else None
        self.authenticates = self._allow is not None
        self._authenticator: AsyncioAuthenticator | None = None
        self._context = zmq.asyncio.Context()
        # Not one of asyncio's: those make a future of every frame.
        self._socket = zmq.Socket(self._context, zmq.ROUTER)
        self._readable = asyncio.Event()  # there may be frames to receive
        self._full = asyncio.Event()  # a lane did not take a frame
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # otherwise ZeroMQ stops until the events are read
        events = f"inproc://connections-{id(self)}"
        self._socket.monitor(events, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor.connect(events)
        try:
            self._configure(key, max_frame_bytes)
            here = resolved(parse_tcp(endpoint, listens=True))
            self._socket.setsockopt(zmq.IPV6, here.is_ipv6)
            self._socket.bind(f"tcp://{here}")
        except zmq.ZMQError as error:
            self.close()
            raise BindError(endpoint, error) from error
        except BaseException:
            self.close()
            raise
        self.endpoint = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def _configure(self, key: Path | None, max_frame_bytes: int) -> None:
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, 200),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 4),  # messages, not bytes: each may have 4 MiB
            (zmq.BACKLOG, BACKLOG),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.MAXMSGSIZE, max_frame_bytes),
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
        require_keys(self._socket, load_secret(key), self._authenticator, self._accepts)

    def _accepts(self, key: bytes) -> bool:
        assert self._allow is not None
        owner = self._allow.owner(key)
        if owner is None:
            self._turned_away(Reason.WRONG_KEY, fingerprint(key))
        return owner is not None

    def listen(self, listener: RouterListener) -> None:
        self._listener = listener
        self._connections = Connections(most_connections(descriptors.limit()), listener.uses)

    async def run(self) -> None:
        """Receive frames and watch connections and keys until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="receive")
            group.create_task(self._retry_sends(), name="retry-sends")
            group.create_task(self._watch_connections(), name="connections")
            group.create_task(self._disconnect_strangers(), name="strangers")
            if self._allow is not None:
                group.create_task(self._watch_keys(self._allow), name="keys")

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def send(self, route: Route, parts: Sequence[Buffer]) -> Sent:
        assert isinstance(route, bytes)
        self._readable.set()  # sending takes in what the descriptor has to say of frames to read
        try:
            self._socket.send_multipart([route, *parts], flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            self._full.set()
            return Sent.FULL
        except zmq.ZMQError:
            return Sent.GONE
        return Sent.TAKEN

    def receive(self) -> None:
        """Report the frames that can be read now, at most `BURST_FRAMES`."""
        for _ in range(BURST_FRAMES):
            # Asked first: an exception for each time that nothing is there costs more than the frames.
            if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
                return self._readable.clear()
            route, frames = self._socket.recv(zmq.DONTWAIT), [self._socket.recv(copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(copy=False))
            self._listener.on_frame(route, [frame.buffer for frame in frames], _Sender(frames[0], self._allow))

    async def _receive(self) -> None:
        loop, descriptor = asyncio.get_running_loop(), int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._readable.set)
        try:
            self._readable.set()  # the descriptor tells of changes only
            while True:
                await self._readable.wait()
                self.receive()
                await asyncio.sleep(0)
        finally:
            loop.remove_reader(descriptor)

    async def _retry_sends(self) -> None:
        while True:
            await self._full.wait()
            await asyncio.sleep(RETRY_SEND_S)
            self._full.clear()
            self._listener.on_writable()

    # Connections.

    async def _watch_connections(self) -> None:
        while True:
            self._connection_changed(await recv_monitor_message(self._monitor))
            with contextlib.suppress(zmq.Again):
                for _ in range(BURST_FRAMES):
                    self._connection_changed(await recv_monitor_message(self._monitor, zmq.DONTWAIT))
            await asyncio.sleep(0)

    def _connection_changed(self, event: Mapping[str, Any]) -> None:
        descriptor = int(event["value"])
        if event["event"] == zmq.EVENT_ACCEPTED:
            host, port = end_of(descriptor)
            going = self._connections.accepted(descriptor, host, port, time.monotonic())
            if going is not None:
                self._disconnect(going, Reason.CROWDED)
            if self._congestion:
                choose_congestion(descriptor, host, self._congestion)
            return
        self._connections.on_closed(descriptor)
        if self._listener.uses(descriptor):
            self._listener.on_gone()

    async def _disconnect_strangers(self) -> None:
        """ZeroMQ keeps a connection for as long as its heartbeats are answered."""
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in self._connections.find_idle(time.monotonic()):
                self._disconnect(connection, Reason.SILENT)

    def _disconnect(self, connection: "Connection", reason: Reason) -> None:
        if hang_up(connection.descriptor, connection.host, connection.port):
            self._turned_away(reason, connection.host)

    async def _watch_keys(self, allow: AllowList) -> None:
        """Follow the allow-list folder: keys are revoked without a restart."""
        trouble = ""
        self._allowed(allow.keys)
        while True:
            await asyncio.sleep(WATCH_KEYS_S)
            before, said, trouble = allow.keys, trouble, ""
            try:
                allow.refresh()
            except KeyFileError as error:
                trouble = str(error)
                if trouble != said:
                    _log.warning("allow list unreadable reason=%r", trouble)
            after = allow.keys
            for name in sorted(before.keys() | after.keys()):
                old, new = before.get(name, ()), after.get(name, ())
                for what, keys in (("revoked", set(old) - set(new)), ("authorized", set(new) - set(old))):
                    for key in sorted(keys):
                        _log.info("key %s node=%s key=%s", what, name, fingerprint(key))
            if after != before:
                self._allowed(after)
            # A key that was replaced under its name is revoked, too. Of two keys of a node, the session that uses the
            # revoked one ends with its next frame, and that of the other goes on.
            revoked = {name for name in before if not set(before[name]) & set(after.get(name, ()))}
            if revoked:
                self._listener.on_revoked(revoked)


class _Sender:
    """Where a ZeroMQ frame came from; looked up when asked, for most frames are not."""

    __slots__ = ("_allow", "_frame")

    def __init__(self, frame: zmq.Frame, allow: AllowList | None) -> None:
        self._frame, self._allow = frame, allow

    @property
    def owner(self) -> NodeId | None:
        key = self._get("User-Id")
        return None if self._allow is None or key is None else self._allow.owner(str(key).encode())

    @property
    def address(self) -> str:
        host = self._get("Peer-Address")
        return "?" if host is None else plain_host(str(host))

    @property
    def descriptor(self) -> int | None:
        descriptor = self._get(zmq.SRCFD)
        return None if descriptor is None else int(descriptor)

    def _get(self, fact: int | str) -> int | str | None:
        try:
            return self._frame.get(fact)
        except zmq.ZMQError:
            return None


def most_connections(descriptors: int | None) -> int:
    """The budget of connections, from the limit of file descriptors; None for no limit."""
    return MOST if descriptors is None else max(FEWEST, min(MOST, descriptors - RESERVE))


@dataclass(slots=True)
class Connection:
    descriptor: int
    host: str  # address of the peer; with `port` it tells this connection from a later one with the same descriptor
    port: int
    used_at: float  # when it was accepted, or last seen in use by a session
    network: str  # what it is counted by: the host, or the network of an IPv6 host


class Connections:
    """All TCP connections of the port, and which of them must be closed. A stranger is one that no session uses."""

    def __init__(self, most: int, is_used: Callable[[int], bool]) -> None:
        """`is_used`: whether an open session uses the connection with this descriptor."""
        self.most, self._is_used = most, is_used
        self._open: dict[int, Connection] = {}  # by descriptor
        self._of_network = Counter[str]()  # how many of them each network has
        self._closing: set[int] = set()  # told to go; ZeroMQ has yet to report their end

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int, host: str, port: int, now: float) -> Connection | None:
        """ZeroMQ accepted a connection. Returns the connection to close for it, if any."""
        self.on_closed(descriptor)
        self._open[descriptor] = new = Connection(descriptor, host, port, now, network_of(host))
        self._of_network[new.network] += 1
        crowd: list[Connection] = []
        if self._of_network[new.network] > STRANGERS_OF_AN_ADDRESS:
            strangers = self._strangers()[new.network]
            crowd = strangers if len(strangers) > STRANGERS_OF_AN_ADDRESS else []
        if not crowd and len(self._open) - len(self._closing) > self.most:
            crowd = max(self._strangers().values(), key=len, default=[])
        going = min(crowd, key=lambda connection: connection.used_at, default=None)
        if going is not None:
            self._closing.add(going.descriptor)
        return going

    def on_closed(self, descriptor: int) -> None:
        if connection := self._open.pop(descriptor, None):
            self._of_network[connection.network] -= 1
            if not self._of_network[connection.network]:
                del self._of_network[connection.network]
        self._closing.discard(descriptor)

    def find_idle(self, now: float) -> list[Connection]:
        """Connections that no session has used for too long, each once. Call it every few seconds."""
        for connection in self._open.values():
            if self._is_used(connection.descriptor):
                connection.used_at = now
        strangers = [one for of_network in self._strangers().values() for one in of_network]
        going = [connection for connection in strangers if now - connection.used_at > STRANGER_S]
        self._closing |= {connection.descriptor for connection in going}
        return going

    def check(self) -> None:
        assert self._closing <= self._open.keys()
        assert self._of_network == Counter(connection.network for connection in self._open.values())

    def _strangers(self) -> dict[str, list[Connection]]:
        """By network; without those that were told to go."""
        found = defaultdict[str, list[Connection]](list)
        for descriptor, connection in self._open.items():
            if descriptor not in self._closing and not self._is_used(descriptor):
                found[connection.network].append(connection)
        return found
