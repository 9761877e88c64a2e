"""An object store as a few calls: s3://, gs://, az:// and file:// alike. The only place where obstore is used.

Credentials and endpoints come from the environment, as the store's own tools read them (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL and so on).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

CALL_TIMEOUT = "60s"
"""For one request of a transfer; a large object has many."""

SCHEMES = ("s3", "gs", "az", "file")


class CopyFailed(Exception):
    """The object store, or what is in it, does not do. One line, with the URL."""


class Bucket:
    """One prefix of one store. Blocks: to be called from a thread that has nothing else to do."""

    def __init__(self, url: str) -> None:
        """Raises CopyFailed: no such store can be reached, or `obstore` is not installed."""
        self.url = url
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES:
            known = ", ".join(f"{known}://" for known in SCHEMES)
            raise CopyFailed(f"{url}: an address of an object store begins with {known}")
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise CopyFailed(f"{url}: needs the extra 'cloud': pip install 'farloop[cloud]'") from error
        self._obstore: Any = obstore
        try:
            if scheme == "file":
                self._store: Any = LocalStore(Path(unquote(urlsplit(url).path)), mkdir=True)
            else:
                plain = {"allow_http": True, "timeout": CALL_TIMEOUT}
                self._store = from_url(url, client_options=plain, retry_config={"max_retries": 3})
        except Exception as error:
            raise self._failed("open", error) from error

    def put(self, path: str, data: bytes | memoryview) -> None:
        """An object, whole or not there. Raises CopyFailed."""
        try:
            self._obstore.put(self._store, path, data)
        except Exception as error:
            raise self._failed(f"write {path}", error) from error

    def get(self, path: str) -> bytes | None:
        """An object's bytes; None where there is none. Raises CopyFailed."""
        try:
            return bytes(self._obstore.get(self._store, path).bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed(f"read {path}", error) from error

    def paths(self, under: str) -> list[str]:
        """Every object under a folder, sorted. Raises CopyFailed."""
        try:
            return sorted(str(found["path"]) for page in self._obstore.list(self._store, under) for found in page)
        except Exception as error:
            raise self._failed(f"list {under}", error) from error

    def delete(self, paths: Sequence[str]) -> None:
        """Objects; one that is gone already is no error. Raises CopyFailed."""
        try:
            for path in paths:
                self._obstore.delete(self._store, path)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._failed("delete", error) from error

    def _failed(self, what: str, error: Exception) -> CopyFailed:
        lines = str(error).splitlines()
        return CopyFailed(f"{self.url}: {what}: {lines[0] if lines else type(error).__name__}")
