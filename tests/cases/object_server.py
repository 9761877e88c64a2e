"""An S3 server on loopback, as slow as a test wants it: what obstore asks of one, in one process."""

import hashlib
import hmac
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from farloop.lab.bench import http_store

BUCKET = "/runs/"
SECRET = "test"


def signature(secret: str, method: str, host: str, path: str, query: str) -> str:
    """The one that a signed URL must have, by the text of AWS ("Authenticating requests: query parameters")."""
    pairs = sorted(pair for pair in query.split("&") if not pair.startswith("X-Amz-Signature="))
    given = {key: values[0] for key, values in parse_qs(query).items()}
    request = "\n".join([method, path, "&".join(pairs), f"host:{host}", "", "host", "UNSIGNED-PAYLOAD"])
    scope = given["X-Amz-Credential"].partition("/")[2]
    text = f"AWS4-HMAC-SHA256\n{given['X-Amz-Date']}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()


class ObjectServer(http_store.ObjectServer):
    """Set `bytes_per_s` and `stands_still` while it serves."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.parts: dict[int, bytes] = {}
        self.bodies: list[tuple[str, int]] = []
        """Method and bytes of each body, of a request or an answer."""
        self.moved: Counter[tuple[str, str, str]] = Counter()
        """Method, path and "received" or "sent" → bytes at the socket, of requests that have ended."""
        self.stands_still, self.still_after = "", 0  # the method whose bodies stop half-way, after this many whole ones
        self.date = ""  # what its clock says, if it is wrong
        self.life_s = 604800.0  # the longest that it lets a URL live

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        return _Counting(fileno=connection.detach()), address

    def pause(self, method: str, done: int, size: int) -> None:
        before = sum(size > http_store.Handler.step_bytes for other, size in self.bodies if other == method)
        if self.stands_still == method and 2 * done > size and (method == "GET" or before >= self.still_after):
            self.ended.wait(60)
        super().pause(method, done, size)


class _Counting(socket.socket):
    received = sent = 0

    def recv_into(self, *args: Any) -> int:
        count = super().recv_into(*args)
        self.received += count
        return count

    def sendall(self, data: Any, *args: Any) -> None:
        super().sendall(data, *args)
        self.sent += len(data)


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A server, and the environment in which obstore finds it by `s3://runs/PREFIX`."""
    with ObjectServer().serving() as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        yield server


class _Handler(http_store.Handler):
    server: ObjectServer
    connection: _Counting

    def date_time_string(self, timestamp: float | None = None) -> str:
        return self.server.date or super().date_time_string(timestamp)  # type: ignore[arg-type]

    def handle_one_request(self) -> None:
        at = self.connection
        before = at.received, at.sent
        super().handle_one_request()
        for what, count in (("received", at.received - before[0]), ("sent", at.sent - before[1])):
            self.server.moved[self.command or "", urlsplit(self.path).path if self.command else "", what] += count

    def do_GET(self) -> None:
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        if "list-type" not in query:
            return super().do_GET()
        self.fault = ""
        keys = sorted(path.removeprefix(BUCKET) for path in self.server.objects)
        found = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-11-27T06:45:41.000Z</LastModified><ETag>x</ETag>"
            f"<Size>{len(self.server.objects[BUCKET + key])}</Size></Contents>"
            for key in keys
            if key.startswith(query.get("prefix", ""))
        )
        self.answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        number = parse_qs(urlsplit(self.path).query).get("partNumber")
        if self.headers.get("If-None-Match") == "*" and not number:
            return super().do_PUT()
        if (data := self.begun("PUT")) is not None:
            if number:
                self.server.parts[int(number[0])] = data
            else:
                self.server.objects[self.place] = data
            self.answer(200)

    def do_POST(self) -> None:
        query = urlsplit(self.path).query
        if (body := self.begun("POST")) is None:
            return
        if query.startswith("delete"):
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self.server.objects.pop(BUCKET + key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if query.startswith("uploads"):
            self.server.parts.clear()
            what = "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            return self.answer(200, what.encode())
        self.server.objects[self.place] = b"".join(self.server.parts[number] for number in sorted(self.server.parts))
        self.answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        if "uploadId" in self.path:  # of an upload that is given up
            self.server.parts.clear()
        super().do_DELETE()

    def begun(self, method: str) -> bytes | None:
        data = super().begun(method)
        self.server.bodies.append((method, len(data or b"")))
        if data is not None and not self._signed(method):
            said = "<Code>SignatureDoesNotMatch</Code>\n<Message>The signature is not\nthe calculated one</Message>"
            self.answer(403, f"<Error>{said}<StringToSign>secret</StringToSign></Error>".encode())
            return None
        return data

    def _signed(self, method: str) -> bool:
        """Whether its URL is signed for this request, and lives; requests with a header are taken as they are."""
        url = urlsplit(self.path)
        given = {key: values[0] for key, values in parse_qs(url.query).items()}
        if "X-Amz-Signature" not in given:
            return "Authorization" in self.headers
        begun = datetime.strptime(given["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        age_s = (datetime.now(UTC) - begun).total_seconds()
        right = signature(SECRET, method, self.headers["Host"], url.path, url.query)
        return age_s < min(self.server.life_s, float(given["X-Amz-Expires"])) and right == given["X-Amz-Signature"]

    def answer(self, status: int, data: bytes = b"", more: dict[str, str] | None = None) -> None:
        self.server.bodies.append(("GET", len(data)))
        super().answer(status, data, {"ETag": '"x"', "Last-Modified": "Fri, 27 Nov 2026 06:45:41 GMT", **(more or {})})
