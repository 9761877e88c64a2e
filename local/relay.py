"""A TCP relay that emulates a slow link: `throttle`, demo and storms use it."""

import asyncio
import logging
import math
import re
import signal
import socket
import threading
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Self

from farloop.config.exit_codes import CommandError
from farloop.monitoring.addresses import Address, bound_socket, parse_host_port, resolved

# --- Relay
#
# It needs no root and no kernel module, so a laptop can show what a wide-area link does to a run. All connections
# through one relay share its rate, as all traffic of a site shares its access link, and take turns on it. A new
# connection first waits one round trip, as TCP's own handshake would. Loss and congestion control are not imitated.


log = logging.getLogger(__name__)

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"ms": 1e-3, "s": 1.0}
_SPEC = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)/(\d+(?:\.\d+)?)(ms|s)", re.ASCII)

SLICE_S = 0.004
"""Longest time one slice of bytes holds the link: small, so that a heartbeat passes between the slices of a blob."""

MIN_SLICE_BYTES, MAX_SLICE_BYTES = 1500, 64 << 10

BUFFER_BYTES = 64 << 10  # what a relay buffers beyond the bytes that are on their way

CATCH_UP_S = 0.1
"""Late timers are made up for while bytes wait, by at most this: the average rate holds on a busy machine."""

READY_S = 0.001  # bytes that follow within this were waiting for the link


class LinkError(ValueError):
    """A link that cannot be understood; one line with an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One site's access link: the same rate up and down."""

    bits_per_s: float
    rtt_s: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `RATE/RTT`, such as `50mbit/50ms`. Raises `LinkError`."""
        match = _SPEC.fullmatch(text.strip().lower())
        if match is None:
            raise LinkError(f"'{text}' is not a link: write rate/round-trip time, for example 50mbit/50ms "
                            "(units kbit, mbit, gbit and ms, s)")  # fmt: skip
        rate, rate_unit, rtt, rtt_unit = match.groups()
        link = cls(bits_per_s=float(rate) * _RATES[rate_unit], rtt_s=float(rtt) * _TIMES[rtt_unit])
        if not 1e3 <= link.bits_per_s <= 1e11:
            raise LinkError(f"'{text}' has a rate of {rate}{rate_unit}: use 1kbit to 100gbit, for example 50mbit/50ms")
        if link.rtt_s > 60:
            raise LinkError(f"'{text}' has a round trip of {rtt}{rtt_unit}: use at most 60s, for example 50mbit/50ms")
        return link

    @property
    def bytes_per_s(self) -> float:
        return self.bits_per_s / 8

    @property
    def slice_bytes(self) -> int:
        """How much of a stream crosses the link in one turn."""
        return round(min(max(self.bytes_per_s * SLICE_S, MIN_SLICE_BYTES), MAX_SLICE_BYTES))

    @property
    def buffer_bytes(self) -> int:
        """Bound of what one stream has under way: a bandwidth-delay product and a little more."""
        return round(self.bytes_per_s * self.rtt_s) + BUFFER_BYTES

    def __str__(self) -> str:
        unit, size = next(((u, s) for u, s in (("gbit", 1e9), ("mbit", 1e6)) if self.bits_per_s >= s), ("kbit", 1e3))
        return f"{self.bits_per_s / size:.6g}{unit}/{self.rtt_s * 1e3:.6g}ms"


class Relay:
    """Relays `listen_host`:`port` to a target over `link`. "Up" is towards the target.

    Lives on the event loop that ran `start`; `RelayThread` gives it a loop of its own.
    """

    def __init__(
        self, *, target_host: str, target_port: int, link: Link, listen_host: str = "127.0.0.1", listen_port: int = 0
    ) -> None:
        self.link = link
        self._target = (target_host, target_port)
        self._listen_host, self._listen_port = listen_host, listen_port
        self._up, self._down = _Direction(link), _Direction(link)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._is_cut = False

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return self._listen_port

    @property
    def bytes_up(self) -> int:
        """Bytes of the TCP streams that crossed towards the target."""
        return self._up.bytes_crossed

    @property
    def bytes_down(self) -> int:
        """Bytes of the TCP streams that crossed from the target."""
        return self._down.bytes_crossed

    async def start(self) -> None:
        """Listen. Raises `OSError` if the port is taken."""
        listener = _made_small(bound_socket(Address(host=self._listen_host, port=self._listen_port)))
        try:
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=self.link.slice_bytes)
        except OSError:
            listener.close()
            raise
        self._listen_port = listener.getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        connections = tuple(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # lets the aborted transports close their sockets

    def cut(self) -> None:
        """Drop every connection; new ones are reset at once until `heal`."""
        self._is_cut = True
        for task in tuple(self._connections):
            task.cancel()

    def heal(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def change(self, link: Link) -> None:
        """From the next slice of bytes on it is this link, also for connections that stand."""
        self.link = self._up.link = self._down.link = link

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if not self._is_cut:
                await self._connect(reader, writer)
        except asyncio.CancelledError:
            pass  # by `cut` or `close`: the task is the relay's own and ends here
        except OSError:
            log.debug("event=relay_connect_failed target=%s:%d", *self._target, exc_info=True)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.link.rtt_s)
        far_socket = _made_small(socket.socket(Address(host=self._target[0], port=0).family))
        far_socket.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(far_socket, self._target)
        except BaseException:
            far_socket.close()
            raise
        far_reader, far_writer = await asyncio.open_connection(sock=far_socket, limit=self.link.slice_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                _Stream(reader, far_writer, self._up).run_in(group)
                _Stream(far_reader, writer, self._down).run_in(group)
            far_writer.close()
            writer.close()
            await asyncio.gather(far_writer.wait_closed(), writer.wait_closed())  # everything written has been taken
        except* OSError:
            pass  # one end went away; the abort takes the other with it
        finally:
            far_writer.transport.abort()


class RelayThread:
    """Runs relays on an event loop in a thread of its own while the `with` block lasts.

    The relays' ports and counters may be read from any thread; `cut`, `heal` and `change` go through this
    object.
    """

    def __init__(self, *relays: Relay) -> None:
        self._relays = relays
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)

    def __enter__(self) -> tuple[Relay, ...]:
        self._thread.start()
        try:
            for relay in self._relays:
                self._run(relay.start())
        except BaseException:
            self.__exit__()
            raise
        return self._relays

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            self._run(relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, relay: Relay) -> None:
        """`Relay.cut`, from any thread."""
        self._loop.call_soon_threadsafe(relay.cut)

    def heal(self, relay: Relay) -> None:
        """`Relay.heal`, from any thread."""
        self._loop.call_soon_threadsafe(relay.heal)

    def change(self, relay: Relay, link: Link) -> None:
        """`Relay.change`, from any thread."""
        self._loop.call_soon_threadsafe(relay.change, link)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)


class _Direction:
    """One direction of the access link: everything that crosses it takes turns."""

    def __init__(self, link: Link) -> None:
        self.bytes_crossed = 0
        self.link = link
        self._free_at = 0.0
        self._ended_at = -math.inf
        self._turn = asyncio.Lock()  # first come, first served: the streams alternate

    async def cross(self, num_bytes: int) -> float:
        """Hold the link for as long as the bytes take; returns when their last one reaches the far end."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            now = loop.time()
            # An idle link earns no credit; one that has more to send makes up for a timer that fired late.
            went_on = now - self._ended_at < READY_S
            self._free_at = max(self._free_at, now - CATCH_UP_S if went_on else now)
            self._free_at += num_bytes / self.link.bytes_per_s
            crossed_at = max(self._free_at, now)
            await asyncio.sleep(crossed_at - now)
            self._ended_at = loop.time()
            self.bytes_crossed += num_bytes
        return crossed_at + self.link.rtt_s / 2


class _Stream:
    """One direction of one connection: reads, crosses the link, waits out the delay, delivers in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
        self._reader, self._writer, self._direction = reader, writer, direction
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._bytes_under_way = 0
        self._sent, self._delivered = asyncio.Event(), asyncio.Event()

    def run_in(self, group: asyncio.TaskGroup) -> None:
        group.create_task(self._send(), name="relay-send")
        group.create_task(self._deliver(), name="relay-deliver")

    async def _send(self) -> None:
        data = b" "
        while data:  # an empty read is the end of the stream; it crosses the link like any other
            data = await self._reader.read(self._direction.link.slice_bytes)
            arrives_at = await self._direction.cross(len(data))
            self._under_way.append((arrives_at, data))
            self._bytes_under_way += len(data)
            self._sent.set()
            while self._bytes_under_way > self._direction.link.buffer_bytes:
                self._delivered.clear()
                await self._delivered.wait()

    async def _deliver(self) -> None:
        loop, data = asyncio.get_running_loop(), b" "
        while data:
            while not self._under_way:
                self._sent.clear()
                await self._sent.wait()
            arrives_at, data = self._under_way.popleft()
            await asyncio.sleep(max(arrives_at - loop.time(), 0.0))
            self._writer.write(data)
            await self._writer.drain()
            self._bytes_under_way -= len(data)
            self._delivered.set()
        self._writer.write_eof()


def _made_small(small: socket.socket) -> socket.socket:
    """The TCP socket, with kernel buffers that do not hide the back-pressure of a slow link. It sends at once what it
    is given, or small writes would wait for the delayed acknowledgement of those before, 40 ms that no link has.
    (asyncio sets this only where a socket names its protocol.)"""
    small.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    small.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return small


# --- Command `throttle`

REPORT_S = 10.0  # between two lines about what crossed


def throttle(link: str, *, listen: str, to: str) -> None:
    """Relay until the first signal. Raises CommandError: an address or the link is none, or the port is taken."""
    try:
        here, there = parse_host_port(listen, listens=True), resolved(parse_host_port(to))
        thin = Link.parse(link)
    except (LinkError, ValueError) as error:
        raise CommandError(str(error)) from error
    relay = Relay(
        target_host=there.host, target_port=there.port, link=thin, listen_host=here.host, listen_port=here.port
    )
    try:
        asyncio.run(_relay(relay, to))
    except OSError as error:
        raise CommandError(f"cannot listen at {listen}: {error.strerror}; name another with --listen") from error


async def _relay(relay: Relay, to: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await relay.start()
    log.info("relaying port=%d to=%s link=%s", relay.port, to, relay.link)
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), REPORT_S)
        except TimeoutError:
            log.info("relayed up_bytes=%d down_bytes=%d", relay.bytes_up, relay.bytes_down)
    await relay.close()
