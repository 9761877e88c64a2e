"""The objects of `ports.py` over HTTP and HTTPS: the standard library's client in threads, with proxies and resume."""

import http.client
import re
import select
import ssl
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from farloop.runtime.ports import Action, Buffer, Moved

THREADS: Final = 4  # requests at a time; so many ranges of one object are read at once
RANGE_BYTES: Final = 4 << 20  # the least that is worth a request of its own
PIECE_BYTES: Final = 1 << 18  # of a body that is sent
TIMEOUT_S: Final = 10.0  # for a connection, an answer to begin, and each piece of a body: as the liveness of a session
LONGEST_S: Final = 600.0  # of one object: as long as its URL lives
LEAST_BYTES_PER_S: Final = 16 << 10  # a transfer that is slower than this, beyond its first 30 s, has failed
PAUSES_S: Final = (0.1, 0.4)  # before a request that moved nothing is tried again: the blob has another way
_T = TypeVar("_T")
_Job = Callable[[Any], None]  # of a client
_AGAIN: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_HINTS: Final = {
    ("PUT", 301): "; the bucket is in another region, or the URL at another place",
    ("PUT", 404): "; is there such a bucket?",
    ("PUT", 405): "; nginx takes PUT with: dav_methods PUT DELETE",
    ("PUT", 413): "; nginx takes large bodies with: client_max_body_size 0",
    ("GET", 404): "; it was deleted, perhaps by a lifecycle rule",
}
_MOST_TOLD: Final = 4096  # bytes of the page that comes with an error


class Failed(Exception):
    """The store did not do it. One line, without the URL: that is a key to the object."""

    away = False  # whether it gave no answer, as it will give none to others
    passes = False  # whether the same request may succeed later, without anybody's doing


class _Connection(http.client.HTTPConnection):
    """Counts what it sends."""

    sent = 0

    def send(self, data: object) -> None:
        self.sent += len(data)  # type: ignore[arg-type]  # bytes and memoryviews
        super().send(data)  # type: ignore[arg-type]


class _Secure(_Connection, http.client.HTTPSConnection):
    pass


def _connection(parts: SplitResult, proxy: SplitResult | None) -> _Connection:
    at, secure = proxy or parts, parts.scheme == "https"
    port = at.port or (443 if secure and proxy is None else 80)
    made = (_Secure if secure else _Connection)(at.hostname or "", port, timeout=TIMEOUT_S)
    if secure and proxy is not None:
        made.set_tunnel(parts.hostname or "", parts.port or 443, headers=_authorization(proxy))
    return made


def proxy_of(parts: SplitResult) -> SplitResult | None:
    """The proxy for a URL, as HTTPS_PROXY, HTTP_PROXY and NO_PROXY name it. Raises Failed: it is none."""
    found = urllib.request.getproxies().get(parts.scheme)
    if not found or urllib.request.proxy_bypass(parts.netloc):
        return None
    try:
        proxy = urlsplit(found if "://" in found else f"http://{found}")
        if proxy.scheme == "http" and proxy.hostname and proxy.port != 0:
            return proxy
    except ValueError:
        pass  # the port is no number, or a bracket is missing
    raise Failed(f"{parts.scheme.upper()}_PROXY names no proxy: expected http://HOST:PORT")


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {b64encode(pair).decode()}"}


class Client:
    """One thread's requests. Counts their bytes and those of their answers, headers included. All raise Failed."""

    def __init__(self, pace: Callable[[int], object] = lambda num_bytes: None) -> None:
        """`pace` is called before so many bytes of a body are sent."""
        self._pace = pace
        self.sent = self.received = 0
        self.date = ""  # of the last answer
        self._open: dict[str, _Connection] = {}  # by scheme and host
        self._way = ""  # of the last request: the host, and the proxy that it is asked by

    def put(self, url: str, data: memoryview) -> None:
        """Write an object, if there is none of its name."""
        headers = {"Content-Length": str(len(data)), "Content-Type": "application/octet-stream", "If-None-Match": "*"}
        if "&sig=" in url:  # of Azure
            headers["x-ms-blob-type"] = "BlockBlob"
        self._patiently(lambda: self._done("PUT", url, headers, data, (200, 201, 204, 412)))  # 412: it is there already

    def delete(self, url: str) -> None:
        """Delete an object; one that is not there is none."""
        self._patiently(lambda: self._done("DELETE", url, {}, None, (200, 202, 204, 404)))

    def get(self, url: str, view: memoryview, start: int, end: int) -> None:
        """Read bytes [start, end) of an object; a transfer that is cut goes on where it was."""
        at, until = start, time.monotonic() + _patience_s(end - start)

        def receive() -> None:
            nonlocal at
            answer = self.ask("GET", url, {"Range": f"bytes={at}-{end - 1}"}, None, (200, 206))
            skipped = at if answer.status == 200 else 0  # by a server that knows no ranges
            while at < end and (data := answer.read1(min(1 << 20, skipped or end - at))):
                self.received += len(data)
                if skipped:
                    skipped -= len(data)
                    continue
                view[at : at + len(data)] = data
                at += len(data)
                if time.monotonic() > until:
                    raise Failed(f"too slow: {at - start} of {end - start} bytes")
            if at < end:
                raise http.client.IncompleteRead(b"", end - at)
            if answer.read(1):
                self.close()
                if end == len(view):
                    raise Failed("it has more bytes than were announced")

        self._patiently(receive, lambda: at)

    def fetch(self, url: str) -> bytearray:
        """An object of unknown size, by one request; a transfer that is cut goes on where it was."""
        data, begun = bytearray(), time.monotonic()

        def receive() -> None:
            answer = self.ask("GET", url, {"Range": f"bytes={len(data)}-"}, None, (200, 206))
            if answer.status == 200:  # by a server that knows no ranges
                data.clear()
            while piece := answer.read1(1 << 20):
                self.received += len(piece)
                data.extend(piece)
                if time.monotonic() > begun + _patience_s(len(data)):
                    raise Failed(f"too slow: {len(data)} bytes")
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            answer.close()  # or the connection takes no other request

        self._patiently(receive, lambda: len(data))
        return data

    def ask(
        self, method: str, url: str, headers: dict[str, str], body: memoryview | None, wanted: tuple[int, ...]
    ) -> http.client.HTTPResponse:
        """One request, tried once: its answer, whose body is yet to be read. Raises Failed, OSError, HTTPException."""
        parts = urlsplit(url)
        where, until = f"{parts.scheme}://{parts.netloc}", time.monotonic() + _patience_s(len(body or b""))
        proxy, target = proxy_of(parts), url.removeprefix(where)
        connection = self._open.setdefault(where, self._open.get(where) or _connection(parts, proxy))
        self._way = parts.netloc + (f" by the proxy {proxy.hostname}:{proxy.port}" if proxy else "")
        if proxy is not None and parts.scheme == "http":
            target, headers = url, headers | _authorization(proxy)
        if connection.sock is not None:
            (silent := select.poll()).register(connection.sock, select.POLLIN)
            if silent.poll(0):  # the server has closed it meanwhile: the request opens another
                connection.close()
        before = connection.sent
        try:
            connection.putrequest(method, target, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            with suppress(BrokenPipeError):  # by a server that refuses it before its end, and says why
                for start in range(0, len(body or b""), PIECE_BYTES):
                    assert body is not None
                    piece = body[start : start + PIECE_BYTES]
                    self._pace(len(piece))
                    connection.send(piece)
                    if time.monotonic() > until:
                        raise Failed("too slow")
            answer = connection.getresponse()
        finally:
            self.sent += connection.sent - before
        head = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{k}: {v}" for k, v in answer.getheaders()), "", ""]
        self.received += len("\r\n".join(head))
        self.date = answer.getheader("Date", "")
        if answer.status not in wanted:
            told = re.findall(rb"<(?:Code|Message)>([^<]*)<", answer.read(_MOST_TOLD))  # by S3, Google and Azure
            words = [" ".join(line.decode(errors="replace").split())[:200] for line in told]
            said = ": ".join([f"{answer.status} {answer.reason}", *words])
            raise OSError(said) if answer.status in _AGAIN else Failed(said + _HINTS.get((method, answer.status), ""))
        return answer

    def close(self) -> None:
        """Close its connections: what is left of an answer is not wanted."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    def _done(
        self, method: str, url: str, headers: dict[str, str], body: memoryview | None, wanted: tuple[int, ...]
    ) -> None:
        self.received += len(self.ask(method, url, headers, body, wanted).read())

    def _patiently(self, call: Callable[[], _T], progress: Callable[[], int] = lambda: 0) -> _T:
        """Until it succeeds, or fails twice more at the same place; what got no answer in time is not tried again."""
        tries, before = 0, progress()
        while True:
            try:
                return call()
            except Failed:
                self.close()
                raise
            except (OSError, http.client.HTTPException) as error:
                self.close()
                tries, before = (tries if progress() == before else 0), progress()
                untrusted = isinstance(error, ssl.SSLCertVerificationError)
                if tries == len(PAUSES_S) or isinstance(error, TimeoutError) or untrusted:
                    fix = "; SSL_CERT_FILE names the file of your own authority's certificate" if untrusted else ""
                    failed = Failed(f"{self._way}: {error or type(error).__name__}{fix}")
                    failed.away, failed.passes = isinstance(error, (TimeoutError, ConnectionError)), not untrusted
                    raise failed from error
            time.sleep(PAUSES_S[tries])
            tries += 1


def _patience_s(num_bytes: int) -> float:
    return min(LONGEST_S, 30.0 + num_bytes / LEAST_BYTES_PER_S)


class HttpObjects:
    def __init__(
        self, post: Callable[[Action], object], bytes_per_s: Callable[[], float] = lambda: float("inf")
    ) -> None:
        """`post` runs an action in the executor's thread. `bytes_per_s`: the most that may be sent now."""
        self._post, self._rate = post, bytes_per_s
        self._lock, self._free_at = threading.Lock(), 0.0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads = self._unfinished = 0
        self._closed, self._away_at = False, float("-inf")

    def put(self, url: str, data: Buffer, over: Callable[[str, Moved], None]) -> None:
        view = memoryview(data).cast("B")
        self._submit([lambda client: client.put(url, view)], lambda: True, over)

    def get(
        self, url: str, into: bytearray, right: Callable[[bytearray], bool], over: Callable[[str, Moved], None]
    ) -> None:
        view, size = memoryview(into), len(into)
        step = max(RANGE_BYTES, -(-size // THREADS))
        ranges = [(start, min(size, start + step)) for start in range(0, size, step)]
        self._submit(
            [partial(Client.get, url=url, view=view, start=a, end=b) for a, b in ranges], lambda: right(into), over
        )

    def delete(self, urls: Sequence[str]) -> None:
        for url in urls:
            self._submit([partial(Client.delete, url=url)], lambda: True, lambda why, moved: None)

    def close(self) -> None:
        self._closed = True
        for _ in range(self._threads):
            self._jobs.put(lambda client: None)

    def _pace(self, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            wait_s = max(0.0, self._free_at - now)
            self._free_at = max(now, self._free_at) + num_bytes / self._rate()
        time.sleep(wait_s)

    def _submit(self, jobs: Sequence[_Job], right: Callable[[], bool], over: Callable[[str, Moved], None]) -> None:
        """Do the jobs; `over` once all have ended."""
        left, whys, moved, begun = len(jobs), list[str](), [0, 0], time.monotonic()

        def run(job: _Job, client: Client) -> None:
            nonlocal left
            before = client.sent, client.received
            why = ""
            try:
                if self._away_at > begun:  # nor waits each of many for a store that is gone
                    why = "no answer to another request"
                else:
                    job(client)
            except Failed as error:
                why = str(error)
                self._away_at = time.monotonic() if error.away else self._away_at
            except Exception as error:  # noqa: BLE001 - the edge of the thread; the blob goes another way
                why = f"{type(error).__name__}: {error}"
            with self._lock:
                moved[0] += client.sent - before[0]
                moved[1] += client.received - before[1]
                whys.extend([why] if why else [])
                self._unfinished -= 1
                left -= 1
                last = not left
            if last:
                if not whys and not right():
                    whys.append("its bytes are not those that were announced")
                with suppress(RuntimeError):  # the loop is closed
                    self._post(lambda: over("".join(whys[:1]), (moved[0], moved[1])))

        with self._lock:
            self._unfinished += len(jobs)
        for job in jobs:
            self._jobs.put(partial(run, job))
        # No more than have work, so that their connections stay in use. Daemons: a store that answers nothing holds up
        # no end of the process.
        while self._threads < min(THREADS, self._unfinished):
            self._threads += 1
            threading.Thread(target=self._work, name="objects", daemon=True).start()

    def _work(self) -> None:
        with closing(Client(self._pace)) as client:
            while not self._closed:
                self._jobs.get()(client)
