"""The node's sockets: one DEALER per lane, in the link's thread."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from farloop.monitoring.tcp_connection import choose_congestion, congestion_of, congestion_refused, host_of, tcp_info
from farloop.node.errors import BadAddress
from farloop.wire.frames import Buffer
from farloop.wire.keys import load_public, load_secret
from farloop.wire.limits import BAD_FRAMES, Limits, Timing
from farloop.wire.link_measurement import INFO_BYTES, parse
from farloop.wire.machine_info import NOTHING, Inventory
from farloop.wire.messages import Connection
from farloop.wire.reasons import Reason, RemoteProtocolError
from farloop.wire.session import Session, State

# --- Where the coordinator is, and with which key to knock: what a node's link is told.


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Settings of a link. Raises ValueError for half a pair of keys, and for a congestion control out of reach."""

    coordinator: str
    """ZeroMQ address, as tcp://host:port."""
    key: Path | None = None
    """This node's secret key file; CURVE is on with it."""
    server_key: Path | None = None
    """The coordinator's public key file; goes with `key`."""
    congestion: str = ""
    """Congestion control of its TCP connections, as `bbr`; the system's unless given."""
    inventory: Inventory = NOTHING
    """What it tells of its machine."""
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        if (self.key is None) != (self.server_key is None):
            raise ValueError("key and server_key go together: with one alone nothing would be encrypted")
        if self.congestion and (refused := congestion_refused(self.congestion)):
            raise ValueError(refused)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://host:port. Raises BadAddress."""
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]*]+):([0-9]{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise BadAddress(f"the coordinator's address is tcp://host:port, as tcp://10.0.0.5:7700, not {address!r}")
    return match[1].strip("[]"), int(match[2])


# --- One session on its sockets: a DEALER for control, and one for bulk, from the dial to the close.
#
# A socket dials once: when its connection breaks the session ends with it, and `node/link.py` begins another on fresh
# sockets. Each lane is written by tasks of its own, so that a full bulk lane never holds up control.


_log = logging.getLogger(__name__)

CHUNKS_AHEAD = 4
"""Chunks handed to ZeroMQ at a time: what is queued there, the session cannot take back."""

DEAD_TCP_MS = 60_000
"""A connection that acknowledges nothing for this long is closed. The session's own time-out is shorter; this one is
for a bulk lane that died alone, behind a firewall that forgot it."""

HANGS_UP = (
    "it hangs up: encryption may be on at one end only, or server_key another coordinator's; check that the node's "
    "server_key holds the .pub that belongs to the coordinator's key, and that both ends have keys or neither has"
)

CONTROL, BULK = 0, 1


class Dealers:
    """Makes the sockets of one node."""

    def __init__(self, config: LinkConfig) -> None:
        """Raises KeyFileError: a key file cannot be used."""
        self._limits, self.congestion = config.limits, config.congestion
        self._secret = load_secret(config.key) if config.key else None
        self._server = load_public(config.server_key) if config.server_key else None

    def open(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """A DEALER that dials once, and never again by itself: a broken connection ends the session (protocol T)."""
        dealer = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 8),
            (zmq.RCVHWM, 64),
            (zmq.RECONNECT_IVL, -1),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.CONNECT_TIMEOUT, 5000),
            (zmq.MAXMSGSIZE, self._limits.max_frame_bytes),
            (zmq.TCP_MAXRT, DEAD_TCP_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 10),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        ):
            dealer.setsockopt(option, value)
        if self._secret is not None and self._server is not None:
            dealer.curve_secretkey = self._secret
            dealer.curve_publickey = zmq.curve_public(self._secret)
            dealer.curve_serverkey = self._server
        return dealer


@dataclass(slots=True)
class _Lane:
    """One DEALER. Frames leave in a task of their own: a full or unconnected socket holds up nothing but its lane."""

    socket: zmq.asyncio.Socket
    monitor: zmq.asyncio.Socket
    free: bool
    """Whether nothing is on its way into the socket."""
    connection: tuple[int, str] | None = None
    """File descriptor of its connection when that opened, and the host at the other end. It may be another socket's by
    now (`monitoring/tcp_connection.py`)."""


class ZmqDialer:
    """One session on its sockets, from the dial to the close. Whatever goes wrong in a task of it ends all of them."""

    def __init__(
        self,
        session: Session,
        address: str,
        dealers: Dealers,
        emit: Callable[[Session], None],
        key_refused: Callable[[], None],
        wake: asyncio.Event,
    ) -> None:
        """`emit` takes the session's events; `wake` is set when there is something to send, or its state changed."""
        self._session, self._address, self._dealers = session, address, dealers
        self._emit, self._key_refused, self._wake = emit, key_refused, wake
        self._lanes: dict[int, _Lane] = {}

    @property
    def opened(self) -> bool:
        """Whether the session was ever open."""
        return BULK in self._lanes

    def connection(self) -> Connection | None:
        """What the kernel says of the connection that carries blobs; None before it is there."""
        lane = self._lanes.get(BULK)
        if lane is None or lane.connection is None:
            return None
        return parse(tcp_info(*lane.connection, INFO_BYTES), congestion_of(*lane.connection))

    async def run(self) -> None:
        """Until the session is closed, by its peer, its own end or a fault of the sockets.

        Raises:
            ExceptionGroup: what else went wrong in a task.
        """
        try:
            await self._run()
        except* zmq.ZMQError as group:
            self._session.close(Reason.CLOSED, f"ZeroMQ: {group.exceptions[0]}")

    async def _run(self) -> None:
        session, context = self._session, zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = self._dial(CONTROL, context, group)
                while session.state is not State.CLOSED:
                    tasks = [task for task in tasks if not task.done()] + self._pump(group)
                    if session.state is State.OPEN and BULK not in self._lanes:
                        tasks += self._dial(BULK, context, group)
                    self._emit(session)
                    await self._sleep()
                for task in tasks:
                    task.cancel()
            self._acknowledge_farewell()
        finally:
            context.destroy(linger=200)

    def _dial(self, number: int, context: zmq.asyncio.Context, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Open one lane; the tasks that serve it."""
        dealer = self._dealers.open(context)
        monitor = dealer.get_monitor_socket(zmq.EVENT_ALL)
        assert isinstance(monitor, zmq.asyncio.Socket)
        lane = self._lanes[number] = _Lane(dealer, monitor, free=number == CONTROL)
        dealer.connect(self._address)
        tasks = [
            group.create_task(self._watch(lane), name=f"watch-{number}"),
            group.create_task(self._read(lane, number), name=f"read-{number}"),
        ]
        if number != CONTROL:
            greeting = self._session.lane_hello()
            tasks.append(group.create_task(self._greet(lane, number, greeting), name=f"greet-{number}"))
        return tasks

    def _pump(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Send what the session wants to, as far as the lanes are free; control never waits for bulk."""
        now = time.monotonic()
        self._session.handle_timer(now)
        if not self._lanes[CONTROL].free:
            return []
        bulk = self._lanes.get(BULK)
        frames = self._session.outgoing(now, max_chunks=CHUNKS_AHEAD if bulk and bulk.free else 0)
        tasks = []
        for number, lane in self._lanes.items():
            if batch := [parts for to, parts in frames if to == number]:
                lane.free = False
                tasks.append(group.create_task(self._send(lane, batch), name=f"send-{number}"))
        return tasks

    async def _sleep(self) -> None:
        due = self._session.next_timer()
        if due is None:
            return
        try:
            async with asyncio.timeout(max(0.0, due - time.monotonic())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _acknowledge_farewell(self) -> None:
        """The coordinator's Leave closes the session; one last frame tells that it came."""
        for _, parts in self._session.outgoing(time.monotonic()):
            sent = self._lanes[CONTROL].socket.send_multipart(parts, flags=zmq.DONTWAIT)
            assert isinstance(sent, asyncio.Future) and sent.done()  # DONTWAIT is decided at once
            sent.exception()  # a full socket is no loss: the coordinator's own linger ends its wait

    # --- tasks of one lane

    async def _send(self, lane: _Lane, frames: list[list[Buffer]]) -> None:
        for parts in frames:
            await lane.socket.send_multipart(parts, copy=False)
        lane.free = True
        self._wake.set()

    async def _greet(self, lane: _Lane, number: int, greeting: list[Buffer]) -> None:
        await self._send(lane, [greeting])
        self._session.lane_opened(number)
        self._wake.set()

    async def _read(self, lane: _Lane, number: int) -> None:
        bad_frames = 0
        while True:
            frames = await lane.socket.recv_multipart(copy=False)
            try:
                self._session.receive(number, [frame.buffer for frame in frames], time.monotonic())
            except RemoteProtocolError as error:
                bad_frames += 1
                _log.warning("bad frame lane=%d reason=%r", number, str(error))
                if bad_frames >= BAD_FRAMES:
                    self._session.close(Reason.MALFORMED, str(error))
            else:
                bad_frames = 0
            self._emit(self._session)
            self._wake.set()

    async def _watch(self, lane: _Lane) -> None:
        """End the session when the lane's connection ends, or the key is refused."""
        why = "cannot connect: is the coordinator running, and its port open from here?"
        while True:
            told = await recv_monitor_message(lane.monitor)
            match told["event"]:
                case zmq.EVENT_CONNECTED:
                    why = HANGS_UP
                    lane.connection = (told["value"], host_of(told["value"]))
                    if chosen := self._dealers.congestion:
                        choose_congestion(*lane.connection, chosen)
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._session.traffic.connected()
                    why = "the connection ended"
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._key_refused()
                    why = Reason.WRONG_KEY.sentence
                    break
                case zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED:
                    break
        self._session.close(Reason.CLOSED, why)
        self._wake.set()


def new_key_pair() -> tuple[bytes, bytes]:
    """(public, secret), each 40 characters of Z85."""
    public, secret = zmq.curve_keypair()
    return public, secret
