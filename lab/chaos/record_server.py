"""A server that keeps Leases as the API server of Kubernetes does, in memory, and misbehaves as it is told."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

SLOW_S = 2.0

Mode = Literal["well", "away", "slow", "deaf"]
"""`away`: it answers nothing. `deaf`: it does what it is asked, and the answer is lost."""


class RecordServer(ThreadingHTTPServer):
    """Leases by name, with versions and conflicts; all but one name are forbidden."""

    daemon_threads = True

    def __init__(self, allowed: str = "run") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.leases: dict[str, dict[str, Any]] = {}
        self.lock, self.version, self.allowed = threading.Lock(), 100, allowed
        self.mode: Mode = "well"

    @property
    def url(self) -> str:
        """For [coordinator] leads_by."""
        return f"k8s://farloop/{self.allowed}?api=http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        with self.lock:
            found = self.leases.get(name)
            at = {} if found is None else found["metadata"]
            if name != self.allowed:
                return 403, {"message": f"leases {name!r} is forbidden"}
            if method == "GET":
                return (404, {"kind": "Status"}) if found is None else (200, found)
            is_stale = any(body["metadata"].get(key) != at.get(key) for key in ("resourceVersion", "uid"))
            if (method == "POST") != (found is None) or is_stale:
                return 409, {"kind": "Status"}
            self.version += 1
            body["metadata"] |= {"resourceVersion": str(self.version), "uid": at.get("uid", str(self.version))}
            self.leases[name] = body
            return (201 if method == "POST" else 200), body


@contextmanager
def serving() -> Iterator[RecordServer]:
    """A server on a free port of loopback."""
    with RecordServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: RecordServer

    def log_message(self, format: str, *args: object) -> None: ...

    def _do(self) -> None:
        mode = self.server.mode
        if mode == "away":
            return
        if mode == "slow":
            time.sleep(SLOW_S)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        name = body.get("metadata", {}).get("name") or self.path.rpartition("/")[2]
        status, answer = self.server.answer(self.command, name, body)
        if mode == "deaf" and self.command != "GET":
            return
        data = json.dumps(answer, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _do
