"""A small HTTP endpoint for the eyes of people and Prometheus: metrics, health, status. Standard library only.

It only reads: GET and HEAD, one request a connection, each bounded in time. Handlers run in the request's own
thread and should answer from memory.
"""

import errno
import io
import ipaddress
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)

REQUEST_LIMIT_S = 5.0
"""Longest time from accepting a connection to having read its request, and again for sending the answer."""

MAX_REQUESTS = 32
"""Requests served at once: scrapers and people are few, so more is a mistake or an attack."""


PAGE, METRICS, HEALTH, READY, STATUS = "/", "/metrics", "/healthz", "/readyz", "/status"
"""The pages. A node has no status, nor a page of it: its coordinator tells it."""


class EndpointError(Exception):
    """The endpoint cannot listen where it was told to; the message is one line and says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a route answers."""

    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    """Besides those that every answer has."""


Handler = Callable[[], Response]


class Endpoint:
    """Serves `routes` (path → handler) from a daemon thread until closed.

    Port 0 takes any free one; `port` says which. Beyond loopback it warns: nobody is asked who he is.
    Raises `EndpointError` if the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, routes: Mapping[str, Handler], *, request_limit_s: float = REQUEST_LIMIT_S
    ) -> None:
        self._server = _listen(host, port, dict(routes), request_limit_s)
        bound = str(self._server.server_address[0])
        if not ipaddress.ip_address(bound.partition("%")[0]).is_loopback:
            log.warning(
                "pages open to others host=%s port=%d cause='whoever reaches this port can read them, unencrypted; "
                "keep http on 127.0.0.1 and look through a tunnel, or let a firewall decide'",
                bound,
                self.port,
            )
        # The poll interval only bounds how long `close` takes: requests wake the loop at once.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="endpoint", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening. Requests under way end by themselves, at the latest after their time limit."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _listen(host: str, port: int, routes: dict[str, Handler], request_limit_s: float) -> "_Server":
    try:
        return _Server(host, port, routes, request_limit_s)
    except (OSError, OverflowError) as error:
        raise EndpointError(_explain(host, port, error)) from error


def _explain(host: str, port: int, error: OSError | OverflowError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program: choose another port, or 0 for any free one"
    if number == errno.EACCES:
        return f"port {port} on {host} is not allowed for this user: choose one above 1023, or 0 for any free one"
    if number == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: listen on 127.0.0.1 (this machine only) or 0.0.0.0 (all)"
    if isinstance(error, OverflowError):
        return f"{port} is not a port: choose one from 1 to 65535, or 0 for any free one"
    return f"cannot listen on {host} port {port}: {error}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, routes: dict[str, Handler], request_limit_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes = routes
        self.request_limit_s = request_limit_s
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        """Bind without the base class's look-up of the host's full name: it may wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the request a thread, or close it when too many have one."""
        if not self._free.acquire(blocking=False):
            log.warning("event=request_refused client=%s cause=too_many_requests", client_address[0])
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The request's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event of ours; the base class would print a traceback."""
        log.debug("event=request_failed client=%s", client_address[0], exc_info=True)


class _DeadlineReader(io.RawIOBase):
    """Reads a socket until a deadline, however slowly the bytes drip in: a time-out alone bounds only each read."""

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(remaining_s)
        return self._connection.recv_into(buffer)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    connection: socket.socket
    server_version = "farloop"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection, self.server.request_limit_s))

    def do_GET(self) -> None:
        self._send(self._answer())

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._send(Response(status=405, body=b"this endpoint only reads: use GET\n"))

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _answer(self) -> Response:
        path = self.path.partition("?")[0]
        handler = self.server.routes.get(path)
        if handler is None:
            known = "\n".join(sorted(self.server.routes))
            return Response(status=404, body=f"no such page; these exist:\n{known}\n".encode())
        try:
            return handler()
        except Exception as error:  # the edge of the daemon: a broken page is an answer, not silence
            log.exception("event=page_failed path=%s", path)
            return Response(
                status=500, body=f"{path} failed: {type(error).__name__}; the log has the details\n".encode()
            )

    def _send(self, response: Response) -> None:
        self.connection.settimeout(self.server.request_limit_s)
        self.send_response(HTTPStatus(response.status))
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in response.headers:
            self.send_header(name, value)
        if response.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:
        """One line a request at debug level: a scraper comes every few seconds."""
        log.debug("event=request client=%s " + format, self.client_address[0], *args)
