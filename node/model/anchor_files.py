"""Anchors on a node's disk, with which a restarted node needs the updates that it missed and no snapshots.

    3-17.anchor   fragment 3 at version 17: fp32, in the order of the fragment
    3-18.update   what makes it version 18: the blob as it came
    3-17.optimizer   what the inner optimizer had of its parameters then (`node/model/moments.py`)

Each file begins with a head, one line of JSON and its checksum, which is written last: a file without one does not
count. An update has an eighth of the bytes where the codec has 4 bits, so whole anchors are written seldom, and every
update is.

Where a model is sharded, every rank writes its own elements of an anchor to their place in the file, and reads those
that it keeps after the restart, whatever the number of ranks. Nothing here is trusted: the digest of what was read,
over all ranks, is compared with the head's.
"""

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from farloop.node.state_dir import sync_folder
from farloop.runtime.system import DIRECT_BYTES, DIRECT_PAGE, write_direct, yield_cores

_log = logging.getLogger(__name__)

_HEAD: Final = 4096  # bytes: a page, so that what follows is aligned
_CHUNK: Final = 1 << 22  # elements between two looks at whether the anchor has changed

Kind = Literal["anchor", "update", "optimizer"]
_NAME = re.compile(rf"\d+-\d+\.({'|'.join(get_args(Kind))})")  # of a file; what else lies there is left alone
Runs = Sequence[tuple[int, int, int]]  # as `algo.shards.OwnPart.runs`
Submit = Callable[[Callable[[], bool]], "Future[bool]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a file holds."""

    run: str  # fingerprint of the run's identity
    history: int
    fragment: int
    version: int
    digest: int  # of the whole anchor at that version
    size: int  # bytes behind the head
    kind: Kind = "anchor"
    codec: str = ""  # of an update, as its window's terms spell it
    more: dict[str, Any] = field(default_factory=dict)  # of an optimizer: what its numbers are


class AnchorFiles:
    """The anchors of one node; where its model is sharded, every rank has such an object for the same folder.

    What is saved is one anchor at a time: `begin` and `finish`. All writing is done in a thread.
    """

    def __init__(self, folder: Path, submit: Submit | None = None) -> None:
        """`submit` runs a job outside the training thread, after those before it; in a thread unless given."""
        self._folder = folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="anchors", initializer=yield_cores)
        self._submit = submit or self._pool.submit
        self._anchors: dict[int, Head] = {}  # newest complete file of each fragment
        self._updates: dict[int, list[Head]] = {}  # that follow it without a gap
        self._optimizers: dict[int, Head] = {}  # newest of each fragment
        self._saving: Future[bool] | None = None
        self._failing = False  # whether the last write failed, so that a full disk is told once

    def close(self) -> None:
        """Finish what is being written."""
        self._pool.shutdown()

    # --- After a start

    def find(self) -> dict[int, Head]:
        """What there is of the run and history that was written last: by fragment, the newest version."""
        heads = {path: head for path in self._paths() if (head := _read_head(path))}
        bases = [(path.stat().st_mtime, path) for path in heads if path.suffix == ".anchor"]
        if not bases:
            return {}
        last = heads[max(bases)[1]]
        for path, head in sorted(heads.items(), key=lambda each: (each[1].version, each[0].suffix)):
            if (head.run, head.history) != (last.run, last.history):
                continue
            if path.suffix == ".optimizer":
                self._optimizers[head.fragment] = head
            elif path.suffix == ".anchor":
                self._anchors[head.fragment], self._updates[head.fragment] = head, []
            elif (before := self._newest(head.fragment)) and head.version == before.version + 1:
                self._updates[head.fragment].append(head)
        return {index: head for index in self._anchors if (head := self._newest(index))}

    def read(self, index: int, version: int, runs: Runs, flat: Tensor, kind: Kind = "anchor") -> None:
        """Read the own part of an anchor into `flat`, fp32 [numel of the own part]; what is missing stays as it is."""
        try:
            with self._path(index, version, kind).open("rb", buffering=0) as file:
                for first, at, count in _chunks(runs):
                    data = os.pread(file.fileno(), 4 * count, _HEAD + 4 * first)
                    if len(data) == 4 * count:
                        flat[at : at + count].copy_(torch.frombuffer(bytearray(data), dtype=torch.float32))
        except OSError as error:
            _log.warning("anchor on disk not read fragment=%d: %s", index, error)

    def base(self, index: int) -> Head | None:
        """Of the anchor that is there."""
        return self._anchors.get(index)

    def optimizer(self, index: int) -> Head | None:
        """Of the optimizer's state that is there."""
        return self._optimizers.get(index)

    def updates(self, index: int) -> Iterator[tuple[Head, bytearray]]:
        """Those that follow it, in order."""
        for head in list(self._updates.get(index, ())):
            try:
                data = bytearray(self._path(index, head.version, "update").read_bytes()[_HEAD:])
            except OSError as error:
                data = bytearray()  # not a blob: the fragment comes as a snapshot
                _log.warning("update on disk not read fragment=%d: %s", index, error)
            yield head, data

    # --- Updates, on the lead

    def add(self, head: Head, blob: bytes | bytearray) -> None:
        """Keep an update that was applied; nothing where the version before it is not here."""
        before = self._newest(head.fragment)
        if before is None or (before.run, before.history, before.version + 1) != (head.run, head.history, head.version):
            return
        self._updates[head.fragment].append(head)
        path = self._path(head.fragment, head.version, "update")

        def write() -> bool:
            try:
                with path.open("wb", buffering=0) as file:
                    _write_all(file.fileno(), memoryview(blob), _HEAD)
                    _write_all(file.fileno(), _as_bytes(head), 0)
            except OSError as error:
                self._failed(head.fragment, error)
                self._updates[head.fragment] = []
                self._anchors.pop(head.fragment, None)  # a gap: what follows has to begin with an anchor
                path.unlink(missing_ok=True)
                return False
            return True

        self._submit(write)

    # --- Anchors, on all ranks

    def is_due(self, index: int, version: int, every: int) -> bool:
        """Whether the anchor at this version should be saved: after `every` updates, or because one is missing."""
        base, newest = self._anchors.get(index), self._newest(index)
        return base is None or newest is None or newest.version != version or version - base.version >= every

    def begin(
        self,
        index: int,
        version: int,
        runs: Runs,
        flat: Callable[[], Tensor],
        changes: Callable[[], int] = lambda: 0,
        kind: Kind = "anchor",
        beside: Callable[[Callable[[], bool]], Callable[[], bool]] = lambda job: job,
    ) -> None:
        """Write the own part of an anchor; it is dropped if `changes` gives another number before all is written.
        `flat`: fp32 [numel of the own part], asked for in the thread, which `beside` prepares the job for."""
        path, before = self._path(index, version, kind), changes()

        def write() -> bool:
            try:
                numbers = flat()
                path.parent.mkdir(parents=True, exist_ok=True)
                # Never truncated: other ranks may have written their parts already.
                with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
                    _write_all(file.fileno(), bytes(_HEAD), 0)
                    for first, at, count in _chunks(runs):
                        part = numbers[at : at + count].cpu().view(torch.uint8).numpy().data
                        if changes() != before:
                            break
                        _write_all(file.fileno(), part, _HEAD + 4 * first)
                    os.fsync(file.fileno())
                if changes() == before:
                    return True
            except OSError as error:
                self._failed(index, error)
            path.unlink(missing_ok=True)
            return False

        self._saving = self._submit(beside(write))

    @property
    def is_busy(self) -> bool:
        """Whether an anchor was begun and not ended."""
        return self._saving is not None

    @property
    def is_written(self) -> bool:
        """Whether what was begun is done, well or not."""
        return self._saving is not None and self._saving.done()

    def finish_save(self) -> bool:
        """Wait for what was begun; whether all of the own part is on disk."""
        assert self._saving is not None
        saving, self._saving = self._saving, None
        return saving.result()

    def finish(self, head: Head) -> None:
        """All ranks have written their parts: the file counts from here on, and what it replaces is deleted."""
        path = self._path(head.fragment, head.version, head.kind)
        if head.kind == "anchor":
            newest = self._updates.get(head.fragment, [])
            self._anchors[head.fragment] = head
            self._updates[head.fragment] = [update for update in newest if update.version > head.version]
        else:
            self._optimizers[head.fragment] = head

        def write() -> bool:
            try:
                with path.open("r+b", buffering=0) as file:
                    os.ftruncate(file.fileno(), _HEAD + head.size)
                    _write_all(file.fileno(), _as_bytes(head), 0)
                    os.fsync(file.fileno())
                sync_folder(self._folder)
                self._delete_before(head)
            except OSError as error:
                self._failed(head.fragment, error)
                (self._anchors if head.kind == "anchor" else self._optimizers).pop(head.fragment, None)
                return False
            self._failing = False
            return True

        self._submit(write)

    def forget(self, indices: Iterable[int]) -> None:
        """What is here of these fragments is damaged, or of a history that is over: they are saved anew."""
        for index in indices:
            for kept in (self._anchors, self._updates, self._optimizers):
                kept.pop(index, None)

    # --- Files

    def _newest(self, index: int) -> Head | None:
        updates = self._updates.get(index)
        return updates[-1] if updates else self._anchors.get(index)

    def _delete_before(self, head: Head) -> None:
        """Delete what this file replaces, and what is of other runs and histories."""
        for path in self._paths():
            fragment, version = _numbers(path)
            alike = (path.suffix == ".optimizer") == (head.kind == "optimizer")
            is_replaced = alike and fragment == head.fragment and version <= head.version
            other = _read_head(path)
            is_foreign = other is not None and (other.run, other.history) != (head.run, head.history)
            if (is_replaced or is_foreign) and other != head:
                path.unlink(missing_ok=True)

    def _failed(self, index: int, error: OSError) -> None:
        if not self._failing:
            _log.warning("anchor not saved fragment=%d: %s; a restart takes snapshots until it is", index, error)
        self._failing = True

    def _path(self, index: int, version: int, kind: Kind) -> Path:
        return self._folder / f"{index}-{version}.{kind}"

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]


def _numbers(path: Path) -> tuple[int, int]:
    fragment, _, version = path.stem.partition("-")
    return int(fragment), int(version)


def _chunks(runs: Runs) -> Iterator[tuple[int, int, int]]:
    for first, at, count in runs:
        for done in range(0, count, _CHUNK):
            yield first + done, at + done, min(_CHUNK, count - done)


def _as_bytes(head: Head) -> bytes:
    fields = json.dumps({**asdict(head), "digest": f"{head.digest:016x}"}, allow_nan=False).encode()
    line = fields + b" " + _checksum(fields)
    assert len(line) < _HEAD, "what it has of other lengths is bounded"
    return line.ljust(_HEAD - 1) + b"\n"


def _checksum(fields: bytes) -> bytes:
    return b"%08x" % zlib.crc32(fields)


def _read_head(path: Path) -> Head | None:
    """None: it is not complete, or damaged."""
    try:
        with path.open("rb") as file:
            fields, _, checksum = file.read(_HEAD).rstrip().rpartition(b" ")
        if checksum != _checksum(fields):
            return None
        kept = json.loads(fields)
        head = Head(**{**kept, "digest": int(kept["digest"], 16)})
        whole = path.stat().st_size == _HEAD + head.size and _numbers(path) == (head.fragment, head.version)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return head if whole else None


def _write_all(file: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    if len(view) >= DIRECT_BYTES and at % DIRECT_PAGE == 0:
        written = write_direct(file, view, at)
        view, at = view[written:], at + written
    while len(view):
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
