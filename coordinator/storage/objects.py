"""Blobs that an object store has in place of the journal: where a run's are, and the URLs of single requests."""

import email.utils
import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import xxhash

from farloop.coordinator.errors import ObjectFailed, StorageFailed
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.files import DISK, Files
from farloop.monitoring.units import duration_text
from farloop.runtime.http_objects import Client, Failed

_log = logging.getLogger(__name__)

TRIAL_BYTES: Final = (1 << 20) + 1  # more than nginx takes unless it is told to
_LIFE: Final = "a signature fails where clocks differ by 15 minutes: set this machine's by NTP"
_FILE: Final = "objects"  # of the state folder: whoever reads the folder finds them

Sign = Callable[[str, str], str]  # method and key → the URL of one request. Raises CopyFailed.


@lru_cache(maxsize=4)
def signer(url: str) -> Sign:
    """URLs of a store. Those of a plain web server are not signed: who reaches it may write. Raises CopyFailed."""
    if urlsplit(url).scheme in ("http", "https"):
        return lambda method, key: f"{url}/{quote(key)}"
    return Bucket(url).sign


def try_store(sign: Sign) -> list[str]:
    """Write, read and delete an object as coordinator and nodes do; what is wrong besides. Raises CopyFailed."""
    data, key, step = os.urandom(TRIAL_BYTES), f"trial/{secrets.token_hex(16)}", "PUT"
    with closing(Client()) as client:
        try:
            client.put(sign("PUT", key), memoryview(data))
            client.put(sign("PUT", key), memoryview(b"other"))
            step = "GET"
            once = client.fetch(sign("GET", key)) == data
            ranges = client.ask("GET", sign("GET", key), {"Range": "bytes=0-0"}, None, (200, 206)).status == 206
            client.close()
            step = "DELETE"
            client.delete(sign("DELETE", key))
        except (Failed, OSError, HTTPException) as error:
            raise CopyFailed("; ".join([f"{step}: {error}", *skew(client)])) from error
        lacks = [*([] if ranges else ["no ranges: a cut read begins anew"]), *([] if once else ["no If-None-Match"])]
        return [*(f"it has {what}" for what in lacks), *skew(client)]


def skew(client: Client) -> list[str]:
    """How far the clock of the store that answered is from this machine's, if that matters."""
    try:
        apart_s = abs((datetime.now(UTC) - email.utils.parsedate_to_datetime(client.date)).total_seconds())
    except (TypeError, ValueError):
        return []
    return [f"its clock is {duration_text(apart_s)} from this one ({_LIFE})"] if apart_s > 60.0 else []


def note_objects(directory: Path, url: str, files: Files = DISK) -> None:
    """Remember where a run's objects are. Raises StorageError."""
    text = json.dumps({"url": url}, allow_nan=False).encode()
    with suppress(OSError):
        if (before := files.read_bytes(directory / _FILE)) == text:
            return
        fix = "copy its objects there, or put it back"
        _log.warning("bulk_url changed to=%s was=%r fix=%r", url, before.decode(errors="replace"), fix)
    files.make_directory(directory)
    with files.replacing(directory / _FILE) as temporary:
        files.write_bytes(temporary, text)


def read_object(directory: Path, key: str, digest: int, files: Files = DISK) -> bytes:
    """The bytes of a record that has a key. Raises StorageFailed."""
    path = directory / _FILE
    try:
        url = json.loads(files.read_bytes(path))["url"]
        with closing(Client()) as client:
            data = client.fetch(signer(url)("GET", key))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageFailed(path, f"does not say where {key} is: {error}") from error
    except (CopyFailed, Failed) as error:
        passes = isinstance(error, Failed) and error.passes
        raise ObjectFailed(path, f"{url}/{key} cannot be read: {error}", passes=passes) from error
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise ObjectFailed(path, f"{key} does not have the digest that its record names")
    return bytes(data)
