"""Blobs that an object store has in place of the journal: where a run's are, and the URLs of single requests."""

import json
import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import xxhash

from farloop.coordinator.errors import ObjectFailed, StorageFailed
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.files import DISK, Files
from farloop.runtime.http_objects import Client, Failed

_FILE: Final = "objects"  # of the state folder: whoever reads the folder finds them

Sign = Callable[[str, str], str]  # method and key → the URL of one request. Raises CopyFailed.


@lru_cache(maxsize=4)
def signer(url: str) -> Sign:
    """URLs of a store. Those of a plain web server are not signed: who reaches it may write. Raises CopyFailed."""
    if urlsplit(url).scheme in ("http", "https"):
        return lambda method, key: f"{url}/{quote(key)}"
    return Bucket(url).sign


def try_store(sign: Sign) -> None:
    """Write a small object, and delete it. Raises CopyFailed, Failed."""
    key = f"trial/{secrets.token_hex(16)}"
    with closing(Client()) as client:
        client.put(sign("PUT", key), memoryview(b"farloop"))
        client.delete(sign("DELETE", key))


def note_objects(directory: Path, url: str, files: Files = DISK) -> None:
    """Remember where a run's objects are. Raises StorageError."""
    text = json.dumps({"url": url}, allow_nan=False).encode()
    with suppress(OSError):
        if files.read_bytes(directory / _FILE) == text:
            return
    files.make_directory(directory)
    with files.replacing(directory / _FILE) as temporary:
        files.write_bytes(temporary, text)


def read_object(directory: Path, key: str, files: Files = DISK) -> bytes:
    """The bytes of a record that has a key. Raises StorageFailed."""
    path = directory / _FILE
    try:
        url = json.loads(files.read_bytes(path))["url"]
        with closing(Client()) as client:
            data = client.fetch(signer(url)("GET", key))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageFailed(path, f"does not say where {key} is: {error}") from error
    except (CopyFailed, Failed) as error:
        raise ObjectFailed(path, f"{key} cannot be read: {error}") from error
    if xxhash.xxh3_64(data).hexdigest() != key[-16:]:
        raise ObjectFailed(path, f"{key} does not have the digest in its name")
    return bytes(data)
