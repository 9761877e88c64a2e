"""A small read-only HTTP endpoint: metrics, health, status. Standard library only.

It serves GET and HEAD, one request per connection, each with a deadline. One thread reads all requests and sends all
answers, so a slow client costs only its place: of `MAX_CONNECTIONS`, the slowest client makes room for a new one. Each
page is made in a thread of its own, once for all requests that wait for it, so health answers under any load of the
other pages.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Self

from farloop.monitoring.addresses import Address, bound_socket

log = logging.getLogger(__name__)

REQUEST_LIMIT_S = 5.0
"""Longest time from accepting a connection to having read its request, and again for sending the answer."""

MAX_CONNECTIONS = 64  # open connections. One more closes the slowest client of the address that has most of them.
MAX_WAITING = 32  # requests that wait for a page, health excluded: the other connections stay free for health
TOLD_EVERY_S = 60.0  # between two log lines about all connections being taken
MAX_HEAD_BYTES = 16_384  # first line and headers of a request


PAGE, METRICS, HEALTH, READY, STATUS = "/", "/metrics", "/healthz", "/readyz", "/status"
"""The pages. A node has no status: its coordinator has."""

PROBES: Final = frozenset({HEALTH, READY})
"""Pages without private data, which must answer under any host name and any load."""

PRIVATE_SUFFIXES: Final = (".internal", ".local", ".localhost", ".svc")
"""Suffixes that no public name server resolves, such as those of Kubernetes services."""


class EndpointError(Exception):
    """The endpoint cannot listen on its address; the message is one line and says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()  # in addition to those of every answer


Handler = Callable[[], Response]


class Endpoint:
    """Serves `routes` (path → handler) from a daemon thread until closed.

    Port 0 takes a free one; `port` says which. It is unauthenticated, and warns when it listens beyond loopback.
    `names`: more host names to answer to (`answers_to`). Raises `EndpointError` if the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Handler],
        *,
        names: str = "",
        request_limit_s: float = REQUEST_LIMIT_S,
    ) -> None:
        self._socket = _listen(host, port)
        self._routes, self._names, self._request_limit_s = dict(routes), names, request_limit_s
        bound: str
        self._port: int
        bound, self._port = self._socket.getsockname()[:2]
        self._on_loopback = ipaddress.ip_address(bound.partition("%")[0]).is_loopback
        if not self._on_loopback:
            log.warning(
                "pages open to others host=%s port=%d cause='anyone who reaches this port can read them, unencrypted; "
                "keep http on 127.0.0.1 and look through a tunnel, or let a firewall decide'",
                bound,
                self.port,
            )
        self._open: list[_Connection] = []
        self._told_at = float("-inf")
        self._waiting = 0
        self._made: dict[str, asyncio.Future[Response]] = {}  # pages in the making, by path
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        """Stop listening, and end all connections. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=MAX_HEAD_BYTES)
        await self._closing.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer = writer.get_extra_info("peername") or ("?",)
        connection = _Connection(task=task, client=str(peer[0]), since=time.monotonic())
        try:
            if self._has_room():
                self._open.append(connection)
                await self._talk(connection, reader, writer)
        except (OSError, EOFError, asyncio.CancelledError) as error:  # a client that is slow, or went away
            log.debug("event=request_failed client=%s reason=%r", connection.client, error)
        finally:
            self._leave(connection)
            writer.transport.abort()

    def _has_room(self) -> bool:
        """Whether there is a free place, if necessary by closing a slow client."""
        if len(self._open) < MAX_CONNECTIONS:
            return True
        crowd = Counter(connection.client for connection in self._open)
        if (now := time.monotonic()) - self._told_at >= TOLD_EVERY_S:
            self._told_at = now
            client, count = crowd.most_common(1)[0]
            log.warning("pages crowded connections=%d most_from=%s count=%d", len(self._open), client, count)
        slow = [connection for connection in self._open if connection.is_slow]
        if not slow:
            return False
        slowest = max(slow, key=lambda connection: (crowd[connection.client], -connection.since))
        self._leave(slowest)
        slowest.task.cancel()
        return True

    def _leave(self, connection: "_Connection") -> None:
        if connection in self._open:
            self._open.remove(connection)

    async def _talk(
        self, connection: "_Connection", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(self._request_limit_s):
            request = await read_request(reader)
        connection.is_slow = False
        response = await self._answer(request)
        connection.is_slow, connection.since = True, time.monotonic()
        async with asyncio.timeout(self._request_limit_s):
            writer.write(_head(response))
            if request.method != "HEAD":
                writer.write(response.body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        log.debug(
            "event=request client=%s method=%s path=%s status=%d",
            connection.client,
            request.method,
            request.path,
            response.status,
        )

    async def _answer(self, request: "Request") -> Response:
        path = request.path
        if request.fault:
            return Response(status=400, body=f"{request.fault}\n".encode())
        if path not in PROBES and not answers_to(request.host, on_loopback=self._on_loopback, names=self._names):
            what = f"not asked under the name {request.host!r}: take an IP address, or add the name to http_names\n"
            return Response(status=421, body=what.encode())
        if request.method not in ("GET", "HEAD"):
            allowed = (("Allow", "GET, HEAD"),)
            return Response(status=405, body=b"this endpoint only reads: use GET\n", headers=allowed)
        if path not in self._routes:
            known = "\n".join(sorted(self._routes))
            return Response(status=404, body=f"no such page; these exist:\n{known}\n".encode())
        if path in PROBES:
            return await self._page(path)
        if self._waiting >= MAX_WAITING:
            return Response(status=503, body=b"too many requests wait for a page: ask again later\n")
        self._waiting += 1
        try:
            return await self._page(path)
        finally:
            self._waiting -= 1

    async def _page(self, path: str) -> Response:
        """The page as it is now; requests that come while it is being made share it."""
        made = self._made.get(path)
        if made is None:
            made = self._loop.create_future()
            threading.Thread(target=self._make, args=(path, made), name=f"page {path}", daemon=True).start()
            self._made[path] = made
        return await asyncio.shield(made)

    def _make(self, path: str, made: "asyncio.Future[Response]") -> None:
        """Runs in a thread of its own."""
        try:
            response = self._routes[path]()
        except Exception as error:  # the edge of the daemon: a broken page is an answer, not silence
            log.exception("event=page_failed path=%s", path)
            what = f"{path} failed: {type(error).__name__}; the log has the details\n"
            response = Response(status=500, body=what.encode())
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._has_made, path, made, response)

    def _has_made(self, path: str, made: "asyncio.Future[Response]", response: Response) -> None:
        del self._made[path]
        made.set_result(response)


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    task: "asyncio.Task[None]"
    client: str  # its IP address
    since: float  # start of reading the request, or of sending the answer
    is_slow: bool = True  # whether it waits for its client, not for a page


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str = ""
    path: str = ""  # without the query
    host: str | None = None  # the Host header; None without one
    fault: str = ""  # what is wrong with the request; empty for a valid one


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request's head. Raises EOFError: the client closed the connection first."""
    try:
        first = (await _line(reader)).split()
        size, hosts = 0, list[str]()
        while line := await _line(reader):
            size += len(line)
            name, colon, value = line.partition(":")
            if not colon or size > MAX_HEAD_BYTES:
                return Request(fault="the head of a request is a line, and headers of at most 16 KiB")
            if name.strip().lower() == "host":
                hosts.append(value.strip())
    except ValueError:  # a line beyond the reader's limit
        return Request(fault="the head of a request is at most 16 KiB")
    if len(first) != 3 or not first[2].startswith("HTTP/1.") or not first[1].startswith("/"):
        return Request(fault="a request begins as GET /status HTTP/1.1")
    if len(hosts) > 1:
        return Request(fault="a request has one Host header")
    return Request(method=first[0], path=first[1].partition("?")[0], host=hosts[0] if hosts else None)


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the client ended before its request did")
    return line.decode("latin-1").rstrip("\r\n")


def answers_to(host: str | None, *, on_loopback: bool, names: str = "") -> bool:
    """Whether a request with this `Host` header is answered. `names`: further ones, separated by commas; * accepts any.

    A web page elsewhere can make its own name resolve to this address (DNS rebinding), and a browser then lets it read
    the answers. That does not work with an IP address, with `localhost`, or with a name that is not public. On loopback
    only the first two are accepted.
    """
    if host is None:  # no browser
        return True
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    given = {each.strip().lower() for each in names.split(",")} - {""}
    if name == "localhost" or name in given or "*" in given:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return not on_loopback and name != "" and ("." not in name or name.endswith(PRIVATE_SUFFIXES))
    return True


def _head(response: Response) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        "Server: farloop",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(f"{name}: {value}" for name, value in response.headers),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def check_listen(host: str, port: int) -> None:
    """Raises EndpointError where an endpoint could not listen now."""
    _listen(host, port).close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = bound_socket(Address(host=host, port=port))
        listener.listen(MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise EndpointError(_explain(host, port, error)) from error
    return listener


def _explain(host: str, port: int, error: OSError | OverflowError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program: choose another port, or 0 for any free one"
    if number == errno.EACCES:
        return f"port {port} on {host} is not allowed for this user: choose one above 1023, or 0 for any free one"
    if number == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: listen on 127.0.0.1 (this machine only) or * (all)"
    if isinstance(error, OverflowError):
        return f"{port} is not a port: choose one from 1 to 65535, or 0 for any free one"
    return f"cannot listen on {host} port {port}: {error}"
