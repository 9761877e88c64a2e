"""Copies of the state directory in an object store."""

import asyncio
import base64
import dataclasses
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import xxhash

from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import more_than_a_snapshot
from farloop.coordinator.errors import StateMismatch
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.journal import Journal, claim_epoch
from farloop.coordinator.storage.segment import refuse_half_salvaged, segment_paths
from farloop.monitoring.status import CopyStatus

# --- Object store (s3://, gs://, az://, file://): the only place where obstore is used
#
# Credentials and endpoints come from the environment, as the store's own tools read them (AWS_ACCESS_KEY_ID,
# AWS_ENDPOINT_URL and so on).

CALL_TIMEOUT = "60s"  # for one request of a transfer; a large object has many
SCHEMES = ("s3", "gs", "az", "file")


class CopyFailed(Exception):
    """The object store or its content cannot be used. One line, with the URL."""


def check_url(url: str) -> str:
    """The scheme of an object store's URL. Raises ValueError, one sentence: farloop cannot copy there."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"the URL of an object store begins with {', '.join(f'{known}://' for known in SCHEMES)}")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError(
            f"a folder is written with three slashes, as file:///{(parts.netloc + parts.path) or 'backup'}"
        )
    if parts.scheme != "file" and not parts.netloc:
        raise ValueError(f"the name of the bucket is missing, as {parts.scheme}://BUCKET/PREFIX")
    return parts.scheme


class Bucket:
    """One prefix of one store. Blocks: to be called from a thread that has nothing else to do."""

    def __init__(self, url: str) -> None:
        """Raises CopyFailed: the store cannot be reached, or `obstore` is not installed."""
        self.url = url
        try:
            scheme = check_url(url)
        except ValueError as error:
            raise CopyFailed(f"{url}: {error}") from error
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
        """Write an object atomically. Raises CopyFailed."""
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
        """Delete objects; missing ones are ignored. Raises CopyFailed."""
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


# --- Writing and restoring copies
#
# The snapshots on disk are of different versions, and mean nothing without the journal between them. A copy is of one
# moment: all fragments, and what the ledger knows, between two commands of the storage thread. Its objects:
#
#     ckpt/<number>/f<fragment>-v<version>.safetensors   as `snapshots.py` writes them
#     ckpt/<number>/manifest.json                        last: a copy without it is not one
#
# The manifest holds the format version, the run's name and fingerprint, the epoch, the versions, size and xxh3-64 of
# every object, the ledger as a journal record (base64), and a checksum over all that. Deltas without an outcome are not
# in a copy, nor are updates: nodes offer theirs again, and take snapshots. A restored folder is an old state of the run
# (protocol, Fencing), begun by one segment that holds the ledger.

_log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1

KEPT: Final = 3  # copies that are kept
_FOLDER = "ckpt"
_OBJECT = re.compile(r"ckpt/([0-9]{8,})/[^/]+")
_MANIFEST = re.compile(r"ckpt/([0-9]{8,})/manifest\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """A run's state at one moment. It shares the buffers, which are replaced, never changed."""

    ledger: rec.LedgerSaved
    buffers: tuple[Buffers, ...]

    @classmethod
    def of(cls, ledger: rec.LedgerSaved, buffers: Sequence[Buffers]) -> "StateCopy":
        """Make it in the storage thread, where both agree.

        Its ledger lacks what the copy lacks: undecided deltas, and updates; of the newest commit only the announcement
        stays, for the anchor's digest.
        """
        fragments = ledger.spec.identity.layout.fragments
        newest = tuple(
            dataclasses.replace(c, size=more_than_a_snapshot(fragments[c.fragment]))
            for c in ledger.commits
            if c.version == ledger.versions[c.fragment]
        )
        return cls(ledger=dataclasses.replace(ledger, inputs=(), commits=newest), buffers=tuple(buffers))


def write_copy(bucket: Bucket, cut: StateCopy, *, kept: int = KEPT) -> int:
    """Write a copy, then delete those before the last `kept`. Returns its bytes.
    Raises CopyFailed: there is no new copy; those that were there are."""
    identity, objects = cut.ledger.spec.identity, []
    number = max([int(found[1]) for path in bucket.paths(_FOLDER) if (found := _OBJECT.fullmatch(path))], default=0) + 1
    if (newest := read_manifest(bucket)) is not None and newest["fingerprint"] != identity.fingerprint():
        whose = f"holds copies of another run ({newest['name']})"
        raise CopyFailed(f"{bucket.url}: {whose}; give this one a prefix of its own")
    total = 0
    for fragment, buffers in enumerate(cut.buffers):
        snapshot = snapshots.of_buffers(identity.fingerprint(), fragment, buffers)
        data = snapshots.packed(snapshot)
        name = snapshots.snapshot_path(Path(), fragment, buffers.version).name
        bucket.put(f"{_folder(number)}/{name}", data)
        total += len(data)
        objects.append({"name": name, "bytes": len(data), "xxh3": _digest(data)})
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": identity.name,
        "fingerprint": identity.fingerprint(),
        "epoch": cut.ledger.epoch,
        "versions": list(cut.ledger.versions),
        "objects": objects,
        "ledger": base64.b64encode(rec.encode(cut.ledger)[1]).decode(),
    }
    text = json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1, allow_nan=False).encode()
    bucket.put(f"{_folder(number)}/manifest.json", text)
    _delete_old(bucket, kept)
    return total + len(text)


def read_manifest(bucket: Bucket) -> dict[str, Any] | None:
    """The newest copy's, with its folder as `folder`; None where there is no copy.
    Raises CopyFailed: it is damaged, or of a newer farloop."""
    numbers = _complete(bucket.paths(_FOLDER))
    if not numbers:
        return None
    path = f"{_folder(numbers[-1])}/manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(bucket.get(path) or b"")
        checksum = manifest.pop("checksum")
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CopyFailed(f"{bucket.url}: {path} is not a manifest") from error
    if manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version")
        raise CopyFailed(f"{bucket.url}: {path} has format {found}; this farloop knows {FORMAT_VERSION}")
    if checksum != _checksum(manifest):
        raise CopyFailed(f"{bucket.url}: {path} does not match its checksum")
    return {**manifest, "folder": _folder(numbers[-1])}


def restore(bucket: Bucket, directory: Path, files: Files = DISK) -> rec.LedgerSaved:
    """Make a state folder of the newest copy. Returns what its ledger says.

    Raises:
        CopyFailed: there is no copy, or it is not whole; the folder holds no run.
        StateMismatch: the folder holds a run already.
        StorageError: the disk refused; the folder holds no run.
    """
    refuse_half_salvaged(directory, files)
    if directory.is_dir() and segment_paths(directory):
        raise StateMismatch(directory, "holds a run already; a copy is restored into an empty folder: --state DIR")
    manifest = read_manifest(bucket)
    if manifest is None:
        raise CopyFailed(f"{bucket.url}: there is no copy of a run")
    try:
        ledger = rec.decode(rec.KINDS[rec.LedgerSaved], base64.b64decode(manifest["ledger"], validate=True))
    except ValueError as error:
        raise CopyFailed(f"{bucket.url}: the ledger of {manifest['folder']} cannot be read: {error}") from error
    assert isinstance(ledger, rec.LedgerSaved)
    if len(manifest["objects"]) != len(ledger.versions):
        raise CopyFailed(f"{bucket.url}: {manifest['folder']} has not one object for each fragment")
    for fragment, (entry, version) in enumerate(zip(manifest["objects"], ledger.versions, strict=True)):
        path = snapshots.snapshot_path(directory, fragment, version)
        data = bucket.get(f"{manifest['folder']}/{path.name}")
        if data is None or len(data) != entry["bytes"] or _digest(data) != entry["xxh3"]:
            raise CopyFailed(f"{bucket.url}: {manifest['folder']}/{path.name} is not what its manifest says")
        files.make_directory(path.parent)
        with files.replacing(path) as temporary:
            files.write_bytes(temporary, data)
        if snapshots.load(path, files).fingerprint != ledger.spec.identity.fingerprint():
            raise CopyFailed(f"{bucket.url}: {manifest['folder']}/{path.name} is of another run")
    claim_epoch(directory, seen=ledger.epoch - 1, files=files)
    journal, _ = Journal.open(directory, files=files)  # last: without it the folder holds no run
    with journal:
        journal.append(ledger)
        journal.sync()
    _log.info("restored url=%s copy=%s epoch=%d", bucket.url, manifest["folder"], ledger.epoch)
    return ledger


def _delete_old(bucket: Bucket, kept: int) -> None:
    """Delete manifests before their objects, so that a copy is whole or none, and leftovers of failed copies."""
    paths = bucket.paths(_FOLDER)
    numbers = _complete(paths)[-kept:]
    old = [p for p in paths if (found := _OBJECT.fullmatch(p)) and int(found[1]) < numbers[-1]]
    old = [p for p in old if int(p.split("/")[1]) not in numbers]
    bucket.delete(sorted(old, key=lambda path: not path.endswith("/manifest.json")))


def _complete(paths: Sequence[str]) -> list[int]:
    return sorted(int(found[1]) for path in paths if (found := _MANIFEST.fullmatch(path)))


def _folder(number: int) -> str:
    return f"{_FOLDER}/{number:08d}"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def _checksum(manifest: dict[str, Any]) -> str:
    return _digest(json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


# --- Periodic copies, in a thread of their own: no commit waits for one
#
# A copy that fails is tried again with growing pauses; status, alarm and metric say how old the newest is.

FIRST_PAUSE_S = 5.0
"""Before a copy that failed is tried again; twice as long each time, up to the time between two copies."""

_WHAT = "copy of the state"


class Copying:
    """One coordinator's copies to one store."""

    def __init__(
        self,
        url: str,
        every_s: float,
        cut: Callable[[], Awaitable[StateCopy]],
        alarms: MutableMapping[str, str],
        *,
        kept: int = KEPT,
        open_bucket: Callable[[str], Bucket] = Bucket,
    ) -> None:
        """`cut` takes the current state. Raises CopyFailed: the store cannot be used at all."""
        self._bucket, self._every_s, self._kept = open_bucket(url), every_s, kept
        self._cut, self._alarms = cut, alarms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._copied: tuple[tuple[int, ...], int] | None = None
        self._copied_at: float | None = None
        self._began = time.monotonic()
        self.copies = self.failures = self.bytes = 0

    async def run(self) -> None:
        pause_s = 0.0
        while True:
            await asyncio.sleep(min(pause_s or self._every_s, self._every_s))
            pause_s = 0.0 if await self.copy() else max(FIRST_PAUSE_S, 2 * pause_s)

    async def copy(self) -> bool:
        """Copy the current state if it changed. Returns whether the newest copy has it."""
        cut = await self._cut()
        state = (cut.ledger.versions, cut.ledger.epoch)
        if state == self._copied:
            self._copied_at = time.monotonic()
            return True
        try:
            loop = asyncio.get_running_loop()
            written = await loop.run_in_executor(self._thread, lambda: write_copy(self._bucket, cut, kept=self._kept))
        except CopyFailed as error:
            self.failures += 1
            self._alarms[_WHAT] = str(error)
            _log.warning("copy failed why=%r", str(error))
            return False
        self._alarms.pop(_WHAT, None)
        self._copied, self._copied_at = state, time.monotonic()
        self.copies, self.bytes = self.copies + 1, written
        _log.info("copied url=%s versions=%s bytes=%d", self._bucket.url, ",".join(map(str, state[0])), written)
        return True

    @property
    def lag_s(self) -> float:
        """Age of the newest copy; before the first, time since the start."""
        return time.monotonic() - (self._began if self._copied_at is None else self._copied_at)

    def status(self) -> CopyStatus:
        return {
            "url": self._bucket.url,
            "lag_s": self.lag_s,
            "copies": self.copies,
            "failures": self.failures,
            "bytes": self.bytes,
            "versions": list(self._copied[0]) if self._copied else [],
        }

    def close(self) -> None:
        """Abandon a copy in progress: without its manifest it does not count."""
        self._thread.shutdown(wait=False, cancel_futures=True)
