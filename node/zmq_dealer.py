"""The node's link on ZeroMQ: its thread, and the sockets of its connections, one DEALER per lane.

A socket dials once: when its connection breaks the session ends with it, and `node/link.py` dials again.
"""

import asyncio
import contextlib
import random
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from farloop.monitoring.addresses import Address, check_source, look_up, parse_each_tcp
from farloop.monitoring.tcp_connection import choose_congestion, congestion_of, end_of, tcp_info
from farloop.node.errors import BadAddress, LinkFailed
from farloop.node.link import CONTROL, Deliver, Greeting, LinkConfig, NodeLink, Traffic
from farloop.node.state_dir import disk_of
from farloop.runtime import ports
from farloop.runtime.http_objects import HttpObjects
from farloop.runtime.ports import Buffer
from farloop.runtime.system import LoopClock
from farloop.wire import messages as msg
from farloop.wire.frames import ControlFrame
from farloop.wire.keys import load_publics, load_secret
from farloop.wire.limits import Limits, Timing
from farloop.wire.link_measurement import INFO_BYTES
from farloop.wire.reasons import Reason
from farloop.wire.session import State
from farloop.wire.uplink import Uplink

DEAD_TCP_MS = 60_000
"""A connection that acknowledges nothing for this long is closed. The session's own time-out is shorter; this one is
for a bulk lane that died alone, behind a firewall that forgot it."""

DISK_S: Final = 60.0  # between two looks at the disk of the state folder

ANSWER_S: Final = 2.0  # how long an address of several is given to take a connection

ONE_END_ENCRYPTS = "it hangs up: encryption is on at one end only; give both ends keys, or neither"
WRONG_SERVER_KEY = (  # or a coordinator without keys, whose hanging up may look the same
    "it hangs up: wrong server_key, which must hold the .pub of the coordinator's key; or the coordinator has no keys"
)
HANGS_UP = "it hangs up: it is ending, or has other keys than in the last session"


class ZmqDialer:
    """Connections to the coordinator over ZeroMQ, made in a running loop."""

    def __init__(self, config: LinkConfig, failed: Callable[[Exception], None]) -> None:
        """`failed` gets an error of the link's own code. Raises BadAddress, and KeyFileError for an unusable key."""
        if config.bulk_source and config.key is None:
            raise BadAddress(
                f"bulk_source {config.bulk_source} needs key and server_key: without keys the lanes of a session come "
                "from one address"
            )
        try:
            self._coordinators = parse_each_tcp(config.coordinator)
        except ValueError as error:
            raise BadAddress(f"the coordinator's address: {error}") from error
        self.source, self.congestion = config.bulk_source, config.congestion
        self.unreachable = set[Address]()  # addresses of the coordinator that did not answer when last tried
        self._failed = failed
        self._secret = load_secret(config.key) if config.key else None
        self._servers: list[bytes | None] = [*load_publics(config.server_key)] if config.server_key else [None]
        self.has_others = len(self._coordinators) > 1
        self.reached: Address | None = None  # the address at which the last session began
        self._not_leading: Address | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[ZmqConnection] = set()

    def dial(self, opened: Callable[[ports.Connection], None], failed: Callable[[str], None]) -> None:
        self.spawn(self._dial(opened, failed), "dial")

    def turn_away(self) -> None:
        self._not_leading = self.reached

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """A task whose failure ends the link."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def finish(self, timeout_s: float) -> None:
        """Close all connections, and wait until they are gone."""
        for connection in list(self._connections):
            connection.close()
        closing = {task for task in self._tasks if task.get_name() == "close"}
        for task in self._tasks - closing:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), max(timeout_s, 1.0))

    def closed(self, connection: "ZmqConnection") -> None:
        self._connections.discard(connection)

    def socket(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """A DEALER that dials once, and never again by itself: a broken connection ends the session."""
        dealer = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 8),
            (zmq.RCVHWM, 4),  # messages, not bytes: each may have 4 MiB
            (zmq.RECONNECT_IVL, -1),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.CONNECT_TIMEOUT, 5000),
            (zmq.MAXMSGSIZE, Limits().max_frame_bytes),
            (zmq.TCP_MAXRT, DEAD_TCP_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 10),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        ):
            dealer.setsockopt(option, value)
        if self._secret is not None:
            dealer.curve_secretkey = self._secret
            dealer.curve_publickey = zmq.curve_public(self._secret)
        return dealer

    async def _dial(self, opened: Callable[[ports.Connection], None], failed: Callable[[str], None]) -> None:
        """All lanes of a session connect to one address: that which answers first."""
        try:
            found = await self._resolve()
            if self.source:
                found = [address for address in found if address.is_ipv6 == (":" in self.source)]
                if not found:
                    host = self._coordinators[0].host
                    raise ValueError(f"the host {host!r} has no address of the family of {self.source}")
                check_source(self.source, found[0].host)
        except OSError as error:
            failed(str(error))
        except ValueError as error:
            failed(f"no lane can be opened from [node] bulk_source: {error}")
        else:
            found.sort(key=self.unreachable.__contains__)
            if self.has_others:
                found = await _those_that_answer_first(found)
                found.sort(key=lambda address: address == self._not_leading)
            connection = ZmqConnection(self, [End(address, server) for address in found for server in self._servers])
            self._connections.add(connection)
            opened(connection)

    async def _resolve(self) -> list[Address]:
        """Of all coordinators. Raises OSError: none has an address."""
        found, errors = list[Address](), list[OSError]()
        for coordinator in self._coordinators:
            try:
                found += await look_up(coordinator, Timing().liveness_s)
            except OSError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return found

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._failed(error)


async def _those_that_answer_first(addresses: list[Address]) -> list[Address]:
    """All addresses, those at which something listens before the others: a host that is gone answers nothing for long.
    They are tried at the same time, until one answers."""

    async def answers(address: Address) -> Address | None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                _, writer = await asyncio.open_connection(address.host, address.port)
            writer.close()
            return address
        return None

    tries = [asyncio.ensure_future(answers(address)) for address in addresses]
    try:
        for next_done in asyncio.as_completed(tries):
            if (first := await next_done) is not None:
                return sorted(addresses, key=lambda address: address != first)
    finally:
        for one in tries:
            one.cancel()
    return addresses


class End(NamedTuple):
    """Where a coordinator may be reached, and the public key that it may have."""

    address: Address
    key: bytes | None


@dataclass(slots=True)
class _Lane:
    """One DEALER. Frames leave in a task of their own: a full or unconnected socket holds up nothing but its lane."""

    number: int
    socket: zmq.asyncio.Socket
    monitor: zmq.asyncio.Socket
    ready: bool  # whether nothing is on its way into the socket
    lost: bool = False
    connection: tuple[int, str] | None = None
    """File descriptor of its connection when that opened, and the host at the other end. It may be another socket's by
    now (`monitoring/tcp_connection.py`)."""


class ZmqConnection:
    """The sockets of one session: a DEALER per lane, so that a full bulk lane never holds up control."""

    def __init__(self, dialer: ZmqDialer, ends: list[End]) -> None:
        """`ends`: of the coordinator; at least one. They are tried in turn until one answers."""
        self._dialer, self._context = dialer, zmq.asyncio.Context()
        self._ends = ends
        self._listener: ports.ConnectionListener
        self._lanes: dict[int, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def listen(self, listener: ports.ConnectionListener) -> None:
        self._listener = listener
        self._open(CONTROL, ready=True)

    def open_lane(self, lane: int, greeting: Sequence[Buffer]) -> None:
        opened = self._open(lane, ready=False)
        self._spawn(opened, partial(self._send, opened, [greeting]), f"greet-{lane}")

    def is_ready(self, lane: int) -> bool:
        return self._lanes[lane].ready

    def send(self, lane: int, frames: Sequence[Sequence[Buffer]]) -> None:
        found = self._lanes[lane]
        found.ready = False
        self._spawn(found, partial(self._send, found, frames), f"send-{lane}")

    def kernel(self) -> tuple[bytes, str] | None:
        found = [lane for lane in self._lanes.values() if lane.connection and not lane.lost]
        lane = min(found, key=lambda lane: (lane.number == CONTROL, lane.number), default=None)
        if lane is None or lane.connection is None:
            return None
        return tcp_info(*lane.connection, INFO_BYTES), congestion_of(*lane.connection)

    def close(self, last: Sequence[Sequence[Buffer]] = ()) -> None:
        if self._closed:
            return
        self._closed = True
        for parts in last:
            sent = self._lanes[CONTROL].socket.send_multipart(parts, flags=zmq.DONTWAIT)
            assert isinstance(sent, asyncio.Future) and sent.done()  # DONTWAIT is decided at once
            sent.exception()  # a full socket is no loss: the coordinator's own linger ends its wait
        self._dialer.spawn(self._shut(), "close")
        self._dialer.closed(self)

    async def _shut(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=200)

    def _open(self, number: int, *, ready: bool) -> _Lane:
        dealer = self._dialer.socket(self._context)
        monitor = dealer.get_monitor_socket(zmq.EVENT_ALL)
        assert isinstance(monitor, zmq.asyncio.Socket)
        lane = self._lanes[number] = _Lane(number, dealer, monitor, ready)
        self._connect(lane)
        self._spawn(lane, partial(self._watch, lane), f"watch-{number}")
        self._spawn(lane, partial(self._read, lane), f"read-{number}")
        return lane

    def _connect(self, lane: _Lane) -> None:
        (address, key), source = self._ends[0], self._dialer.source
        lane.socket.setsockopt(zmq.IPV6, address.is_ipv6)
        if key is not None:
            lane.socket.curve_serverkey = key
        leaves_from = f"{Address(host=source, port=0)};" if lane.number > CONTROL and source else ""
        lane.socket.connect(f"tcp://{leaves_from}{address}")

    def _try_next(self, lane: _Lane) -> bool:
        """Control could not be opened: connect to the next address, if there is one."""
        if lane.number > CONTROL:
            return False
        self._dialer.unreachable.add(self._ends[0].address)
        if len(self._ends) == 1:
            return False
        del self._ends[0]
        self._connect(lane)
        return True

    def _spawn(self, lane: _Lane, work: Callable[[], Coroutine[None, None, None]], name: str) -> None:
        task = self._dialer.spawn(self._guarded(lane, work), name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, lane: _Lane, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await work()
        except zmq.ZMQError as error:
            self._lost(lane, f"ZeroMQ: {error}")

    def _lost(self, lane: _Lane, why: str, *, key_refused: bool = False) -> None:
        """Once: closing its sockets makes all that waits for them fail."""
        if self._closed or lane.lost:
            return
        lane.lost = True
        if lane.number > CONTROL:
            lane.socket.disable_monitor()
            lane.monitor.close(linger=0)
            lane.socket.close(linger=0)
        self._listener.on_lost(lane.number, why, key_refused=key_refused)

    # --- tasks of one lane

    async def _send(self, lane: _Lane, frames: Sequence[Sequence[Buffer]]) -> None:
        for parts in frames:
            await lane.socket.send_multipart(parts, copy=False)
        lane.ready = True
        if not self._closed and not lane.lost:
            self._listener.on_ready(lane.number)

    async def _read(self, lane: _Lane) -> None:
        while not self._closed and not lane.lost:
            frames = await lane.socket.recv_multipart(copy=False)
            if not self._closed and not lane.lost:
                self._listener.on_frame(lane.number, [frame.buffer for frame in frames])

    async def _watch(self, lane: _Lane) -> None:
        """Report when the lane's connection is made, and when it ends or the key is refused."""
        each = dict.fromkeys(str(end.address) for end in self._ends)
        tried = f" to {', '.join(each)}" if len(each) > 1 else ""
        why = f"cannot connect{tried}: is the coordinator running, and its port open from here?"
        if lane.number > CONTROL and self._dialer.source:
            why = f"no lane can be opened from [node] bulk_source: {self._dialer.source} does not reach the coordinator"
        key_refused = made = False
        while not self._closed and not lane.lost:
            told = await recv_monitor_message(lane.monitor)
            match told["event"]:
                case zmq.EVENT_CONNECTED:
                    is_known = self._dialer.reached == self._ends[0].address
                    why = HANGS_UP if is_known else WRONG_SERVER_KEY if self._ends[0].key else ONE_END_ENCRYPTS
                    lane.connection = (told["value"], end_of(told["value"])[0])
                    if chosen := self._dialer.congestion:
                        choose_congestion(*lane.connection, chosen)
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    why, made = "the connection ended", True
                    self._dialer.reached = self._ends[0].address
                    self._dialer.unreachable.discard(self._ends[0].address)
                    if not self._closed:
                        self._listener.on_connected(lane.number)
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if told["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                    why = ONE_END_ENCRYPTS
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    why, key_refused = Reason.WRONG_KEY.sentence, True
                    break
                case zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED if made or not self._try_next(lane):
                    break
        self._lost(lane, why, key_refused=key_refused)


class _Trial:
    """Listens to a connection that begins no session."""

    def __init__(self, num_bytes: int) -> None:
        self.answer = asyncio.get_running_loop().create_future()
        self._body = msg.encode(msg.Trial(padding=secrets.token_bytes(num_bytes)))

    def opened(self, connection: ports.Connection) -> None:
        connection.listen(self)
        connection.send(CONTROL, [ControlFrame(run=0, epoch=0, seq=0, ack=0, body=self._body).parts()])

    def on_connected(self, lane: int) -> None: ...

    def on_ready(self, lane: int) -> None: ...

    def on_frame(self, lane: int, parts: Sequence[Buffer]) -> None:
        self.finish("")

    def on_lost(self, lane: int, why: str, *, key_refused: bool = False) -> None:
        self.finish(why)

    def finish(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_result(why)


async def try_link(config: LinkConfig, num_bytes: int, limit_s: float) -> str:
    """Connect as a node does, have the coordinator send so many bytes back, and hang up: no session begins. Why that
    failed; empty if it did not. Raises BadAddress, KeyFileError."""
    trial = _Trial(num_bytes)
    dialer = ZmqDialer(config, lambda error: trial.finish(str(error)))
    dialer.dial(trial.opened, trial.finish)
    try:
        async with asyncio.timeout(limit_s):
            return str(await trial.answer)
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    finally:
        await dialer.finish(1.0)


class LinkThread:
    """A node's link in a thread of its own, from `start` to `close`. Every call may be made from any thread."""

    def __init__(self, config: LinkConfig) -> None:
        """
        Raises:
            BadAddress: the coordinator's address is none, or the bulk lanes' has no keys.
            KeyFileError: a key file cannot be used.
        """
        self._config, self._dialer = config, ZmqDialer(config, self._fail)
        self._hello: Greeting
        self._deliver: Deliver
        self._link: NodeLink | None = None  # made in the thread, whose loop gives it its clock
        self._failed = False
        self._closing, self._linger_s = asyncio.Event(), 0.0
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self, hello: Greeting, deliver: Deliver) -> None:
        """Begin to dial. `hello` tells what the node holds when a session begins; `deliver` must not block. Both are
        called in the thread. A fault of the link itself is delivered as LinkFailed: training would wait for ever."""
        self._hello, self._deliver = hello, deliver
        self._thread.start()

    def close(self, linger_s: float = 1.0) -> None:
        """End the session and the thread; sockets have `linger_s` to close. More than once is harmless."""
        if self._thread.is_alive():
            self._linger_s = linger_s
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(linger_s + 5.0)
        elif not self._loop.is_closed():
            self._loop.close()

    @property
    def moved(self) -> Traffic:
        return Traffic() if self._link is None else self._link.moved

    @property
    def num_lanes(self) -> int:
        return 0 if self._link is None else self._link.num_lanes

    @property
    def uplink(self) -> Uplink | None:
        return None if self._link is None else self._link.uplink

    def send(self, message: msg.Message) -> None:
        self._call(lambda link: link.send(message))

    def send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        self._call(lambda link: link.send_blob(offer, data))

    def flushed(self, timeout_s: float) -> bool:
        """Wait until a Leave that was sent is acknowledged, or its session is over."""
        if self._loop.is_closed():
            return True
        future = asyncio.run_coroutine_threadsafe(self._flushed(timeout_s), self._loop)
        try:
            return future.result(timeout_s + 1.0)
        except TimeoutError:
            return False

    async def _flushed(self, timeout_s: float) -> bool:
        deadline = self._loop.time() + timeout_s
        while self._link is not None and self._link.state is State.CLOSING:
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _call(self, action: Callable[[NodeLink], None]) -> None:
        """Have the link's thread do it; nothing happens once the link is closed, or has failed."""

        def act() -> None:
            if self._link is None or self._failed:
                return
            try:
                action(self._link)
            except Exception as error:  # noqa: BLE001 - the edge of the thread
                self._fail(error)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        config = self._config
        clock, limit = LoopClock(self._fail), config.uplink
        objects = HttpObjects(clock.post, lambda: limit.rate(clock.minute_of_day()))
        link = self._link = NodeLink(config, self._dialer, clock, random.uniform, objects=objects)
        link.start(self._hello, self._deliver)
        over = threading.Event()
        measuring = None
        if config.kept:
            arguments = (link, config.kept.parent, over)
            measuring = threading.Thread(target=_measure_disk, args=arguments, name="disk", daemon=True)
            measuring.start()
        await self._closing.wait()
        over.set()
        if not self._failed:
            link.close()
        objects.close()
        await self._dialer.finish(self._linger_s)
        if measuring is not None:
            measuring.join(1.0)  # not longer: its disk may hang

    def _fail(self, error: Exception) -> None:
        """An error of the link itself: the thread runs until `close`, since others may still call."""
        if not self._failed:
            self._failed = True
            self._deliver(LinkFailed(error))


def _measure_disk(link: NodeLink, folder: Path, over: threading.Event) -> None:
    """Keep what the link tells of the disk. In a daemon thread: a disk that hangs holds neither link nor process."""
    while True:
        with contextlib.suppress(OSError):
            link.disk = disk_of(folder)
        if over.wait(DISK_S):
            return


def public_of(secret: bytes) -> bytes:
    """The public key of a secret one, as Z85."""
    return zmq.curve_public(secret)


def new_key_pair() -> tuple[bytes, bytes]:
    """(public, secret), each 40 characters of Z85."""
    return zmq.curve_keypair()
