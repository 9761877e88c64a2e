"""The node's sockets: a background thread that keeps a session with the coordinator alive, whatever the link does.

Two DEALER sockets a session: control, and one bulk lane. A session lives as long as its connections; when one breaks,
the link dials again with fresh sockets after a jittered pause. Nothing here decides: what the session reports goes to
the training thread through `deliver`, what that wants to send comes back through thread-safe calls.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, Reassembly
from farloop.wire.errors import LocalProtocolError, RemoteProtocolError
from farloop.wire.frames import Buffer
from farloop.wire.handshake import Role, State
from farloop.wire.keys import load_public, load_secret
from farloop.wire.limits import Limits, Timing
from farloop.wire.reasons import Reason
from farloop.wire.session import Session

_log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 5.0)
"""First and longest pause between two attempts; the second to tenth double, each is jittered by a half."""

CONTROL, BULK = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Where the coordinator is, and with which key to knock."""

    coordinator: str
    """ZeroMQ address, as tcp://host:port."""
    key: Path | None = None
    """This node's secret key file; CURVE is on with it."""
    server_key: Path | None = None
    """The coordinator's public key file."""
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class Bytes:
    """What the link moved, over all its sessions (protocol, Figures)."""

    up: int = 0
    down: int = 0
    state: int = 0
    """Snapshots, either way."""


@dataclass(slots=True)
class _Wires:
    """The sockets of one session."""

    context: zmq.asyncio.Context
    control: zmq.asyncio.Socket
    monitor: zmq.asyncio.Socket
    bulk: zmq.asyncio.Socket | None = None
    bulk_free: asyncio.Event = field(default_factory=asyncio.Event)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Link:
    """Runs from `start` to `close`. Every public call may be made from any thread."""

    def __init__(
        self, config: LinkConfig, hello: Callable[[], msg.Hello], deliver: Callable[[wire_ev.SessionEvent], None]
    ) -> None:
        """`hello` tells what the node holds when a session begins; `deliver` must not block.

        Raises:
            KeyFileError: a key file cannot be used.
        """
        self._config, self._hello, self._deliver = config, hello, deliver
        self._secret = load_secret(config.key) if config.key else None
        self._server = load_public(config.server_key) if config.server_key else None
        self._moved = Bytes()
        self._session: Session | None = None
        self._wires: _Wires | None = None
        self._partial: dict[BlobId, Reassembly] = {}
        self._fatal = False
        self._loop = uvloop.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def close(self, linger_s: float = 1.0) -> None:
        """End the session and the thread; what is queued has `linger_s` to leave."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end, linger_s)
            self._thread.join(linger_s + 5.0)

    @property
    def moved(self) -> Bytes:
        """Bytes of all frames so far."""
        past, session = self._moved, self._session
        if session is None:
            return Bytes(past.up, past.down, past.state)
        now = _moved(session)
        return Bytes(past.up + now.up, past.down + now.down, past.state + now.state)

    def send(self, message: msg.Message) -> None:
        """Queue a message; dropped where no session is open: the next handshake tells all that matters."""
        self._loop.call_soon_threadsafe(self._send, message)

    def send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        """Offer a delta; dropped where no session is open: it is offered again after the next Welcome."""
        self._loop.call_soon_threadsafe(self._send_blob, offer, data)

    def flushed(self, timeout_s: float) -> bool:
        """Wait until a Leave has been acknowledged, or the session is over."""
        future: Future[bool] = asyncio.run_coroutine_threadsafe(self._flushed(timeout_s), self._loop)
        return future.result(timeout_s + 1.0)

    # --- on the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._keep_connected())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    def _end(self, linger_s: float) -> None:
        self._fatal = True
        if self._session and self._session.state is not State.CLOSED:
            self._session.close(Reason.CLOSED, "this node stops")
        if self._wires:
            self._wires.wake.set()
        if self._main:
            self._loop.call_later(linger_s if self._wires else 0.0, self._main.cancel)

    async def _flushed(self, timeout_s: float) -> bool:
        deadline = self._loop.time() + timeout_s
        while (session := self._session) and session.state is not State.CLOSED:
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _send(self, message: msg.Message) -> None:
        if self._session and self._wires and self._session.state is State.OPEN:
            self._session.send(message, time.monotonic())
            self._wires.wake.set()

    def _send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        if self._session and self._wires and self._session.state is State.OPEN:
            try:
                self._session.send_blob(offer, BytesSource(data))
            except LocalProtocolError as error:  # offered twice, by a reconnection and by its encoder
                _log.debug("offer skipped reason=%s", error)
            self._wires.wake.set()

    async def _keep_connected(self) -> None:
        attempt = 0
        while not self._fatal:
            opened = await self._one_session()
            attempt = 0 if opened else attempt + 1
            if not self._fatal:
                first, longest = BACKOFF_S
                await asyncio.sleep(min(longest, first * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.5))

    async def _one_session(self) -> bool:
        """Dial, talk until the session is over; whether it was ever open."""
        context = zmq.asyncio.Context()
        control = self._dealer(context)
        monitor = control.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        assert isinstance(monitor, zmq.asyncio.Socket)
        wires = self._wires = _Wires(context, control, monitor)
        wires.bulk_free.set()
        timing = self._config.timing
        session = Session(Role.NODE, time.monotonic(), limits=self._config.limits, timing=timing)
        session.send(self._hello(), time.monotonic())
        self._session = session
        control.connect(self._config.coordinator)
        tasks = [
            asyncio.create_task(self._read(session, control, CONTROL), name="control"),
            asyncio.create_task(self._watch(session, monitor, wires), name="monitor"),
        ]
        opened = False
        try:
            while session.state is not State.CLOSED:
                await self._pump(session, wires)
                if session.state is State.OPEN and wires.bulk is None:
                    opened = True
                    wires.bulk = self._dealer(context)
                    wires.bulk.connect(self._config.coordinator)
                    await wires.bulk.send_multipart(session.lane_hello())
                    session.lane_opened(BULK)
                    tasks.append(asyncio.create_task(self._read(session, wires.bulk, BULK), name="bulk"))
                self._emit(session)
                await self._sleep(session, wires)
            await self._pump(session, wires)
        finally:
            self._emit(session)
            moved = _moved(session)
            self._moved = Bytes(
                self._moved.up + moved.up, self._moved.down + moved.down, self._moved.state + moved.state
            )
            self._session = self._wires = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            control.disable_monitor()
            for socket in (control, monitor, wires.bulk):
                if socket is not None:
                    socket.close(linger=200)
            context.term()
        return opened

    def _dealer(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """A DEALER that dials once, and never again by itself: a broken connection ends the session (protocol T)."""
        limits, socket = self._config.limits, context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 8),
            (zmq.RCVHWM, 64),
            (zmq.RECONNECT_IVL, -1),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.CONNECT_TIMEOUT, 5000),
            (zmq.MAXMSGSIZE, max(limits.max_control_bytes, limits.max_chunk_bytes) + 4096),
        ):
            socket.setsockopt(option, value)
        if self._secret is not None and self._server is not None:
            socket.curve_secretkey = self._secret
            socket.curve_publickey = zmq.curve_public(self._secret)
            socket.curve_serverkey = self._server
        return socket

    async def _pump(self, session: Session, wires: _Wires) -> None:
        """Send what the session wants to; control never waits for bulk."""
        session.handle_timer(time.monotonic())
        while True:
            chunks = 4 if wires.bulk_free.is_set() else 0
            frames = session.outgoing(time.monotonic(), max_chunks=chunks)
            if not frames:
                return
            bulk = [parts for lane, parts in frames if lane == BULK]
            for lane, parts in frames:
                if lane == CONTROL:
                    await wires.control.send_multipart(parts)
            if bulk:
                wires.bulk_free.clear()
                task = asyncio.create_task(self._send_bulk(wires, bulk), name="bulk-send")
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _send_bulk(self, wires: _Wires, frames: list[list[Buffer]]) -> None:
        assert wires.bulk is not None
        try:
            for parts in frames:
                await wires.bulk.send_multipart(parts, copy=False)
        finally:
            wires.bulk_free.set()
            wires.wake.set()

    async def _sleep(self, session: Session, wires: _Wires) -> None:
        due = session.next_timer()
        if due is None:
            return
        try:
            async with asyncio.timeout(max(0.0, due - time.monotonic())):
                await wires.wake.wait()
        except TimeoutError:
            pass
        wires.wake.clear()

    async def _read(self, session: Session, socket: zmq.asyncio.Socket, lane: int) -> None:
        while True:
            frames = await socket.recv_multipart(copy=False)
            try:
                session.receive(lane, [frame.buffer for frame in frames], time.monotonic())
            except RemoteProtocolError as error:
                _log.warning("bad frame lane=%d reason=%r", lane, str(error))
            self._emit(session)
            if self._wires:
                self._wires.wake.set()

    async def _watch(self, session: Session, monitor: zmq.asyncio.Socket, wires: _Wires) -> None:
        """End the session when its connection ends, or the key is refused."""
        event = await recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._fatal = True
            detail = "the coordinator does not know this node's key; add its .pub file to the allow-list"
            refused = msg.Refused(reason=Reason.WRONG_KEY, detail=detail, retriable=False)
            self._deliver(wire_ev.MessageReceived(message=refused))
        session.close(Reason.CLOSED, f"connection to {self._config.coordinator} ended")
        wires.wake.set()

    def _emit(self, session: Session) -> None:
        for event in session.events():
            match event:
                case wire_ev.MessageReceived(message=msg.Offer() as offer):
                    self._expect(session, offer.blob, offer.size, offer.digest)
                    continue
                case wire_ev.MessageReceived(message=msg.Committed() as committed):
                    self._expect(session, msg.update_id(committed), committed.size, committed.digest)
                case wire_ev.MessageReceived(message=msg.Refused(retriable=False)):
                    self._fatal = True
                case wire_ev.BlobReceived(blob=blob) | wire_ev.BlobCorrupt(blob=blob):
                    self._partial.pop(blob, None)
                case _:
                    pass
            self._deliver(event)

    def _expect(self, session: Session, blob: BlobId, size: int, digest: int) -> None:
        """The coordinator announced a blob: take it, from where an earlier session left off."""
        if session.state is not State.OPEN:
            return
        try:
            kept = self._partial.get(blob)
            self._partial[blob] = session.expect(blob, size, digest, kept, time.monotonic())
        except LocalProtocolError as error:  # announced twice: once by catch-up, once live
            _log.debug("announcement skipped reason=%s", error)


def new_key_pair() -> tuple[bytes, bytes]:
    """(public, secret), each 40 characters of Z85."""
    public, secret = zmq.curve_keypair()
    return public, secret


def _moved(session: Session) -> Bytes:
    traffic = session.traffic
    state = traffic.sent_blobs[BlobKind.SNAPSHOT].bytes + traffic.received_blobs[BlobKind.SNAPSHOT].bytes
    down = traffic.bytes_received - traffic.received_blobs[BlobKind.SNAPSHOT].bytes
    return Bytes(traffic.bytes_sent - traffic.sent_blobs[BlobKind.SNAPSHOT].bytes, down, state)
