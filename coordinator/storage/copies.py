"""Copies of the state directory in an object store."""

import asyncio
import base64
import dataclasses
import json
import logging
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import xxhash

from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import more_than_a_snapshot
from farloop.coordinator.errors import StartRefused
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.journal import Journal, claim_epoch
from farloop.coordinator.storage.segment import refuse_half_salvaged, segment_numbers
from farloop.monitoring.status import CopyStatus

# --- Writing and restoring copies
#
# The snapshots on disk are of different versions, and mean nothing without the journal between them. A copy is of one
# moment: all fragments, and what the ledger knows, between two commands of the storage thread. Its objects:
#
#     ckpt/<number>/f<fragment>-v<version>.safetensors   as `snapshots.py` writes them
#     ckpt/<number>/manifest.json                        last: a copy without it is not one
#
# The manifest holds the format version, the run's name and fingerprint, epoch, time, whether the run has finished, the
# versions, size and xxh3-64 of every object, the ledger as a journal record (base64), and a checksum over all that.
# Deltas without an outcome are not in a copy, nor are updates: nodes offer theirs again, and take snapshots. A restored
# folder is an old state of the run (protocol, Fencing), begun by one segment that holds the ledger.

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

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
        """Make it in the storage thread, where both agree. Its ledger lacks what the copy lacks: undecided deltas, and
        updates; of the newest commit only the announcement stays, for the anchor's digest."""
        fragments = ledger.spec.identity.layout.fragments
        newest = tuple(
            dataclasses.replace(c, size=more_than_a_snapshot(fragments[c.fragment]))
            for c in ledger.commits
            if c.version == ledger.versions[c.fragment]
        )
        return cls(ledger=dataclasses.replace(ledger, inputs=(), commits=newest), buffers=tuple(buffers))


def write_copy(bucket: Bucket, cut: StateCopy, *, kept: int = KEPT) -> int:
    """Delete what failed tries left, write a copy, then delete those before the last `kept`. Returns its bytes.
    Raises CopyFailed: there is no new copy; those that were there are."""
    identity, objects, paths = cut.ledger.spec.identity, [], bucket.paths(_FOLDER)
    number = max(_complete(paths), default=0) + 1
    if (newest := read_manifest(bucket)) is not None and newest["fingerprint"] != identity.fingerprint():
        whose = f"holds copies of another run ({newest['name']})"
        raise CopyFailed(f"{bucket.url}: {whose}; give this one a prefix of its own")
    _delete(bucket, [path for path in paths if (found := _OBJECT.fullmatch(path)) and int(found[1]) >= number])
    total = 0
    for fragment, buffers in enumerate(cut.buffers):
        data = snapshots.packed(snapshots.of_buffers(identity.fingerprint(), fragment, buffers))
        name = snapshots.snapshot_path(Path(), fragment, buffers.version).name
        bucket.put(f"{_folder(number)}/{name}", data)
        total += len(data)
        objects.append({"name": name, "bytes": len(data), "xxh3": _digest(data)})
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": identity.name,
        "fingerprint": identity.fingerprint(),
        "epoch": cut.ledger.epoch,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": cut.ledger.finished,
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


def require_no_run(directory: Path, files: Files = DISK) -> None:
    """Raises StartRefused: a copy cannot be restored into this folder."""
    refuse_half_salvaged(directory, files)
    if directory.is_dir() and segment_numbers(directory):
        raise StartRefused(directory, "holds a run already; a copy is restored into an empty folder: --state DIR")


def restore(bucket: Bucket, directory: Path, files: Files = DISK) -> rec.LedgerSaved:
    """Make a state folder of the newest copy. Returns what its ledger says.

    Raises:
        CopyFailed: there is no copy, or it is not whole; the folder holds no run.
        StartRefused: the folder holds a run already.
        StorageError: the disk refused; the folder holds no run.
    """
    require_no_run(directory, files)
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
    _delete(bucket, sorted(old, key=lambda path: not path.endswith("/manifest.json")))


def _delete(bucket: Bucket, paths: Sequence[str]) -> None:
    """Delete objects that no copy needs. A store that keeps them has the copy all the same."""
    try:
        bucket.delete(paths)
    except CopyFailed as error:
        _log.warning("old copies stay objects=%d why=%r", len(paths), str(error))


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
# There is one every `every_s`, also over restarts: the store knows how old the newest is. One more ends a run
# and an orderly stop. A copy that fails is tried again with growing pauses; status, alarm and metric say how old
# the newest is.

FIRST_PAUSE_S = 5.0
"""After a start, and before a copy that failed is tried again; then twice as long each time, up to `every_s`."""
LAST_TRIES = 5  # of the copy at the run's end
STOP_S = 20.0
"""Most that an orderly stop waits for its copy: Kubernetes kills 30 s after it has asked to stop, Docker after 45."""

_WHAT = "copy of the state"


class Copying:
    def __init__(
        self,
        url: str,
        every_s: float,
        cut: Callable[[], Awaitable[StateCopy]],
        alarms: MutableMapping[str, str],
        open_bucket: Callable[[str], Bucket] = Bucket,
    ) -> None:
        """`cut` takes the current state. Raises CopyFailed: the store cannot be used at all."""
        self._bucket, self._every_s = open_bucket(url), every_s
        self._cut, self._alarms = cut, alarms
        self._lock, self._turn = asyncio.Lock(), threading.Lock()
        self._copied: tuple[tuple[int, ...], int | None] | None = None  # versions; epoch, of a run that goes on
        self._copied_at: float | None = None
        self._began = time.monotonic()
        self.copies = self.failures = self.bytes = 0

    async def run(self) -> None:
        async with self._lock:
            pause_s = max(FIRST_PAUSE_S, self._every_s - await self._age_s())
        again_s = FIRST_PAUSE_S
        while True:
            await asyncio.sleep(min(pause_s, self._every_s))
            if await self.copy():
                pause_s, again_s = self._every_s, FIRST_PAUSE_S
            else:
                pause_s, again_s = again_s, min(2 * again_s, self._every_s)

    async def copy(self) -> bool:
        """Copy the current state if it changed. Returns whether the newest copy has it."""
        async with self._lock:
            cut = await self._cut()
            state = (cut.ledger.versions, cut.ledger.epoch if not cut.ledger.finished else None)
            if state != self._copied:
                written = await self._in_thread(lambda: write_copy(self._bucket, cut))
                if written is None:
                    return False
                self._alarms.pop(_WHAT, None)
                self._copied, self.copies, self.bytes = state, self.copies + 1, written
                _log.info("copied url=%s versions=%s bytes=%d", self._bucket.url, ",".join(map(str, state[0])), written)
            self._copied_at = time.monotonic()
            return True

    async def last(self, stopped: Awaitable[None]) -> None:
        """Copy the final state of a run, or that of an orderly stop: once `stopped` returns, that gets `STOP_S` more.
        Raises what `stopped` does."""
        copying, stopping = asyncio.ensure_future(self._try_often()), asyncio.ensure_future(stopped)
        try:
            await asyncio.wait((copying, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                stopping.result()
            await asyncio.wait((copying,), timeout=STOP_S)
            if not copying.done() or not copying.result():
                why = self._alarms.get(_WHAT, f"not done within {STOP_S:g} s")
                _log.error("last copy failed url=%s lag_s=%.0f why=%r", self._bucket.url, self.lag_s, why)
        finally:
            copying.cancel()
            stopping.cancel()

    async def _try_often(self) -> bool:
        for tries in range(LAST_TRIES - 1):
            if await self.copy():
                return True
            await asyncio.sleep(FIRST_PAUSE_S * 2**tries)
        return await self.copy()

    async def _age_s(self) -> float:
        """Of the newest copy in the store; infinite without one."""
        manifest = await self._in_thread(lambda: read_manifest(self._bucket))
        if manifest is None:
            return math.inf
        age_s = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(manifest["written"])).total_seconds())
        epoch = None if manifest["finished"] else manifest["epoch"]
        self._copied, self._copied_at = (tuple(manifest["versions"]), epoch), time.monotonic() - age_s
        return age_s

    async def _in_thread(self, call: Callable[[], _T]) -> _T | None:
        """What it returns; None where it failed, with an alarm. No end of the process waits for the thread: a store
        that takes no bytes would hold it up for `IDLE_S`."""
        done = Future[_T]()
        done.set_running_or_notify_cancel()  # nobody cancels it

        def work() -> None:
            try:
                with self._turn:
                    done.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                done.set_exception(error)

        threading.Thread(target=work, name="copies", daemon=True).start()
        try:
            return await asyncio.wrap_future(done)
        except CopyFailed as error:
            self.failures += 1
            self._alarms[_WHAT] = str(error)
            _log.warning("copy failed why=%r", str(error))
            return None

    @property
    def lag_s(self) -> float:
        """Age of the newest copy in the store; without one, time since the start."""
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
        self._bucket.closed = True
