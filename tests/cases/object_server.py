"""An S3 server on loopback, as slow as a test wants it: what obstore asks of one, in one process."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

BUCKET = "/runs/"
STEP = 16 << 10


class ObjectServer(ThreadingHTTPServer):
    """Objects by path. Set `bytes_per_s` and `stands_still` while it serves."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.parts: dict[int, bytes] = {}
        self.bodies: list[tuple[str, int]] = []
        """Method and bytes of each body, of a request or an answer."""
        self.bytes_per_s = float("inf")
        self.stands_still, self.still_after = "", 0  # the method whose bodies stop half-way, after this many whole ones
        self.ended = threading.Event()
        self.date = ""  # what its clock says, if it is wrong
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        """What goes wrong with a request: a status, "cut" of a body, "spoil" of one that is read, or nothing."""

    def pause(self, method: str, done: int, size: int) -> None:
        before = sum(size > STEP for other, size in self.bodies if other == method)
        if self.stands_still == method and 2 * done > size and (method == "GET" or before >= self.still_after):
            self.ended.wait(60)
        self.ended.wait(STEP / self.bytes_per_s)


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A server, and the environment in which obstore finds it by `s3://runs/PREFIX`."""
    with ObjectServer() as server:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        return self.server.date or super().date_time_string(timestamp)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if (fault := self.server.fault("GET", url.path)).isdecimal():
            return self._answer(int(fault))
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if "list-type" in query:
            keys = sorted(path.removeprefix(BUCKET) for path in self.server.objects)
            found = "".join(
                f"<Contents><Key>{key}</Key><LastModified>2026-11-27T06:45:41.000Z</LastModified><ETag>x</ETag>"
                f"<Size>{len(self.server.objects[BUCKET + key])}</Size></Contents>"
                for key in keys
                if key.startswith(query.get("prefix", ""))
            )
            return self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())
        if (data := self.server.objects.get(url.path)) is None:
            return self._answer(404)
        wanted = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), min(int(wanted[2]), len(data) - 1)) if wanted else (0, len(data) - 1)
        more = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if wanted else {}
        part = data[first : last + 1]
        if fault == "cut":
            part, more = part[: len(part) // 2], more | {"Content-Length": str(len(part))}
            self.close_connection = True
        elif fault == "spoil":
            part = part[:-1] + bytes([part[-1] ^ 1])
        self._answer(206 if wanted else 200, part, more)

    def do_PUT(self) -> None:
        url = urlsplit(self.path)
        if (fault := self.server.fault("PUT", url.path)) == "cut":
            self.close_connection = True
            return
        data = self._body("PUT")
        if fault.isdecimal():
            return self._answer(int(fault))
        if number := parse_qs(url.query).get("partNumber"):
            self.server.parts[int(number[0])] = data
        elif self.headers.get("If-None-Match") == "*":
            if self.server.objects.setdefault(url.path, data) is not data:
                return self._answer(412)
        else:
            self.server.objects[url.path] = data
        self._answer(200)

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = self._body("POST")
        if url.query.startswith("delete"):
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self.server.objects.pop(BUCKET + key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if url.query.startswith("uploads"):
            self.server.parts.clear()
            what = "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            return self._answer(200, what.encode())
        self.server.objects[url.path] = b"".join(self.server.parts[number] for number in sorted(self.server.parts))
        self._answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        self.server.parts.clear()  # of an upload that is given up
        self._answer(204)

    def _body(self, method: str) -> bytes:
        data, size = bytearray(), int(self.headers.get("Content-Length", 0))
        while len(data) < size:
            piece = self.rfile.read(min(STEP, size - len(data)))
            if not piece:
                break
            data += piece
            self.server.pause(method, len(data), size)
        self.server.bodies.append((method, len(data)))
        return bytes(data)

    def _answer(self, status: int, data: bytes = b"", more: dict[str, str] | None = None) -> None:
        with suppress(OSError):
            self.send_response(status)
            headers = {"ETag": '"x"', "Last-Modified": "Fri, 27 Nov 2026 06:45:41 GMT", **(more or {})}
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.server.bodies.append(("GET", len(data)))
            for done in range(0, len(data), STEP):
                self.wfile.write(data[done : done + STEP])
                self.server.pause("GET", done + STEP, len(data))
