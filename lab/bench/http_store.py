"""A web server in this process that keeps what is PUT: an object store without signatures, for measurements."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(201 if self.server.objects.setdefault(self.path, data) is data else 412)

    def do_GET(self) -> None:
        data = self.server.objects.get(self.path)
        if data is None:
            return self._answer(404)
        wanted = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(data))
        self._answer(206 if wanted else 200, memoryview(data)[first:end])

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.path, None)
        self._answer(204)

    def _answer(self, status: int, data: bytes | memoryview = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving() -> Iterator[str]:
    """Its URL."""
    with _Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/objects"
        finally:
            server.shutdown()
