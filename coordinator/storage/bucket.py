"""Object stores (s3://, gs://, az://, file://): the only place where obstore is used.

Credentials and endpoints come from the environment, as the store's own tools read them (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL and so on).
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from farloop.coordinator.settings import check_url
from farloop.monitoring.units import size_text

# A transfer is bounded by its progress, not by its length. A body that arrives may pause for `IDLE_S`. obstore counts a
# body that is sent as a pause (0.12: `read_timeout` runs until the answer), so each part has to be sent within it.

IDLE_S = 60.0
RANGE_BYTES = 16 << 20  # of an object that is read: what a dropped connection repeats
PART_BYTES = 5 << 20  # of an object that is written; S3 takes no smaller ones. In `IDLE_S`: 87 kB/s at least.
MOST_PARTS = 8  # at a time, where the link sends each in a few seconds
_PARTS_S = 10.0
URL_S = 600.0  # that a signed URL lives


class CopyFailed(Exception):
    """The object store or its content cannot be used. One line, with the URL."""


_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT, the path of a key file",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_CREDENTIALS: Final = ("169.254.169.254", "Account must be specified")
"""In errors of obstore: without any it asks the service of a cloud's machine for them."""


class Bucket:
    """One prefix of one store. Blocks: to be called from a thread that has nothing else to do."""

    _folder: Path | None = None  # of a store that is a folder
    _rate = 0.0  # bytes per second of the last large object that was written
    closed = False  # set it, and nothing more is written

    def __init__(self, url: str, patience_s: float = 0.0) -> None:
        """`patience_s`: a request without an answer for so long fails, and is not repeated; 0: as for large objects.
        Raises CopyFailed: the store cannot be reached, or `obstore` is not installed."""
        self.url = url
        try:
            scheme = check_url(url)
        except ValueError as error:
            raise CopyFailed(f"{url}: {error}") from error
        try:
            import obstore
            import obstore.store
        except ImportError as error:
            raise CopyFailed(f"{url}: needs the extra 'cloud': pip install 'farloop[cloud]'") from error
        self._obstore: Any = obstore
        try:
            if scheme == "file":
                self._folder = Path(unquote(urlsplit(url).path))
                self._store: Any = self._obstore.store.LocalStore(self._folder, mkdir=True)
            else:
                idle = timedelta(seconds=IDLE_S)
                # Without a `timeout`, obstore has one of 30 s for a request and its answer.
                client = {"allow_http": True, "read_timeout": idle, "timeout": timedelta(days=365)}
                retry: dict[str, Any] = {"max_retries": 3, "retry_timeout": idle}
                if patience_s:
                    client["timeout"], retry = timedelta(seconds=patience_s), {"max_retries": 0}
                self._store = self._obstore.store.from_url(url, client_options=client, retry_config=retry)
        except Exception as error:
            raise self._failed("open", error) from error

    def put(self, path: str, data: bytes) -> None:
        """Write an object atomically. Raises CopyFailed."""
        size, given, began = len(data), 0, time.monotonic()
        most = max(1, min(MOST_PARTS, int(self._rate * _PARTS_S / PART_BYTES)))

        def parts() -> Iterator[memoryview]:
            nonlocal given
            for given in range(0, size, PART_BYTES):
                if self.closed:
                    raise CopyFailed("the coordinator stops")
                yield memoryview(data)[given : given + PART_BYTES]

        try:
            if size <= PART_BYTES:
                self._obstore.put(self._store, path, b"".join(parts()))
            else:
                self._obstore.put(self._store, path, parts(), chunk_size=PART_BYTES, max_concurrency=most)
                self._rate = size / (time.monotonic() - began)
        except Exception as error:
            self._rate = 0.0
            done = max(0, given - most * PART_BYTES)  # the rest was on its way
            raise self._failed(f"write {path}{_progress(done, size, began)}", error) from error

    def try_out(self) -> None:
        """Write a small object, and delete it. Raises CopyFailed."""
        name = f"trial-{secrets.token_hex(8)}"
        self.put(name, b"farloop")
        self.delete([name])

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object if there is none of this name, atomically; whether it was. Raises CopyFailed."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            self._obstore.put(self._store, path, data, mode="create")
        except (AlreadyExistsError, PreconditionError):
            return False
        except Exception as error:
            raise self._failed(f"create {path}", error) from error
        return True

    def sign(self, method: str, path: str) -> str:
        """A URL by which anybody may make this one request for `URL_S`. Raises CopyFailed."""
        try:
            url: str = self._obstore.sign(self._store, method, path, timedelta(seconds=URL_S))
        except Exception as error:
            raise self._failed(f"sign {path}", error) from error
        return url

    def get(self, path: str) -> bytes | None:
        """An object's bytes; None where there is none. Raises CopyFailed."""
        data, size, began = bytearray(), -1, time.monotonic()
        try:
            while len(data) != size:
                of = {"range": (len(data), len(data) + RANGE_BYTES)}
                found = self._obstore.get(self._store, path, options=of)
                size = found.meta["size"]
                for piece in found.stream(min_chunk_size=1 << 20):
                    data += piece
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed(f"read {path}{_progress(len(data), size, began)}", error) from error
        return bytes(data)

    def paths(self, under: str) -> list[str]:
        """Every object under a folder, sorted. Raises CopyFailed."""
        try:
            return sorted(str(found["path"]) for page in self._obstore.list(self._store, under) for found in page)
        except Exception as error:
            raise self._failed(f"list {under}", error) from error

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored. Also what kills left of `put` in a folder. Raises CopyFailed."""
        try:
            for path in paths:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store, path)
            for left in self._folder.rglob("*#*") if self._folder is not None else ():
                left.unlink(missing_ok=True)
        except Exception as error:
            raise self._failed("delete", error) from error

    def _failed(self, what: str, error: Exception) -> CopyFailed:
        lines = str(error).splitlines()
        if any(sign in str(error) for sign in _NO_CREDENTIALS):
            return CopyFailed(f"{self.url}: no credentials: set {_CREDENTIALS[urlsplit(self.url).scheme]}")
        return CopyFailed(f"{self.url}: {what}: {lines[0] if lines else type(error).__name__}")


def _progress(done: int, size: int, began: float) -> str:
    if size < 0:
        return ""
    seconds = max(1e-9, time.monotonic() - began)
    return f" at {size_text(done)} of {size_text(size)} after {seconds:.0f} s ({size_text(done / seconds)}/s)"
