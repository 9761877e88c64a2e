"""A web server in this process that keeps what is PUT: an object store without signatures."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit


class ObjectServer(ThreadingHTTPServer):
    """Objects by path."""

    daemon_threads = True

    def __init__(self, handler: "type[Handler] | None" = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        """What goes wrong with a request: a status, "cut" of a body, "spoil" of one that is read, "lost" of the answer,
        "away" of all of it, or nothing."""
        self.cut_at = 0.5  # the share of a body after which it is cut
        self.ended = threading.Event()
        self.bytes_per_s = float("inf")
        self.requests = self.failed = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def pause(self, method: str, done: int, size: int) -> None:
        """Called after each step of a body."""
        self.ended.wait(Handler.step_bytes / self.bytes_per_s)

    @contextmanager
    def serving(self) -> Iterator[Self]:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self.ended.set()
            self.shutdown()
            self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    step_bytes = 16 << 10
    server: ObjectServer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle_one_request(self) -> None:
        with suppress(OSError):  # the client is gone
            super().handle_one_request()
            return
        self.close_connection = True

    def do_PUT(self) -> None:
        if (data := self.begun("PUT")) is not None:
            self.answer(200 if self.server.objects.setdefault(self.place, data) is data else 412)

    def do_GET(self) -> None:
        if self.begun("GET") is None:
            return
        if (data := self.server.objects.get(self.place)) is None:
            return self.answer(404)
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), int(wanted[2] or len(data))) if wanted else (0, len(data))
        end = min(last + 1, len(data))
        part, more = data[first:end], {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"} if wanted else {}
        if self.fault == "spoil":
            part = part[:-1] + bytes([part[-1] ^ 1])
        self.answer(206 if wanted else 200, part, more)

    def do_DELETE(self) -> None:
        if self.begun("DELETE") is not None:
            self.server.objects.pop(self.place, None)
            self.answer(204)

    def begun(self, method: str) -> bytes | None:
        """The body of a request; None: it goes wrong before it does anything."""
        self.place = urlsplit(self.path).path
        self.fault = self.server.fault(method, self.place)
        self.server.requests += 1
        self.server.failed += bool(self.fault)
        data, size = bytearray(), int(self.headers.get("Content-Length", 0))
        if self.fault == "away" or (self.fault == "cut" and method == "PUT"):
            self.rfile.read(int(self.server.cut_at * size))
            self.close_connection = True
            return None
        while len(data) < size and (piece := self.rfile.read(min(self.step_bytes, size - len(data)))):
            data += piece
            self.server.pause(method, len(data), size)
        if self.fault.isdecimal():
            self.answer(int(self.fault))
            return None
        return bytes(data)

    def answer(self, status: int, data: bytes = b"", more: dict[str, str] | None = None) -> None:
        if self.fault == "lost":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.fault == "cut":
            self.close_connection, data = True, data[: int(self.server.cut_at * len(data))]
        for done in range(0, len(data), self.step_bytes):
            self.wfile.write(data[done : done + self.step_bytes])
            self.server.pause(self.command, done + self.step_bytes, len(data))
