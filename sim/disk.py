"""The coordinator's memory without files: the journal as a list that outlives a crash, and its recovery.

The same calls as `coordinator/storage/store.py`, and the same arithmetic: anchors come back by decoding updates,
target and optimizer state by repeating the steps on the spooled inputs (protocol P).
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobId, RunSpec
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers, Result
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import DiskFull, NoRoom, ReadOnly, StateLocked
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.sim.virtual_time import Action, Process
from farloop.wire.blobs import BytesSource


@dataclass(slots=True)
class Disk:
    """What is durable."""

    anchors: Sequence[Tensor]
    """Of version 0."""
    entries: list[tuple[rec.Record, bytes]] = field(default_factory=list)
    """Records and what is attached to them, in the order of their syncs."""
    epoch: int = 0
    frugal: bool = False
    """Attachments are not kept for a restart, and of every fragment the newest update alone."""
    full: bool = False
    """Nothing more goes onto it, but what has its room."""
    read_only: bool = False
    """As well."""
    room: int | None = None
    """Bytes of the largest attachment that fits; None for any."""
    locked: bool = False
    """By a coordinator that lives."""
    writes: int = 0
    """Records that were written, or were to be, over all starts."""
    at_write: list[Callable[[int, bool], None]] = field(default_factory=list)
    """Told of every write: its number, and whether it is durable by now. May raise PowerCut."""
    alarms: int = 0
    """Commits whose optimizer state came out different when a restart repeated them."""

    def refusal(self, nbytes: int) -> NoRoom | None:
        """Why a record with so many bytes attached cannot be written now."""
        if self.read_only:
            return ReadOnly(Path("disk"))
        return full(nbytes) if self.full or (self.room is not None and nbytes > self.room) else None

    def restore(self, commits_ago: int) -> list[rec.WindowCommitted]:
        """Put back what a copy held that was taken before the last `commits_ago` commits; returns those."""
        places = [at for at, (record, _) in enumerate(self.entries) if isinstance(record, rec.WindowCommitted)]
        if commits_ago == 0 or not places:
            return []
        begins = places[-commits_ago:][0]
        lost = [record for record, _ in self.entries[begins:] if isinstance(record, rec.WindowCommitted)]
        del self.entries[begins:]
        claims = rec.RunStarted | rec.EpochClaimed | rec.Rewound | rec.Adopted
        self.epoch = max(record.epoch for record, _ in self.entries if isinstance(record, claims))
        return lost


class PowerCut(Exception):
    """The coordinator died in the middle of a write, and is to be started again after `down_s`."""

    def __init__(self, down_s: float) -> None:
        super().__init__(f"down for {down_s:g} s")
        self.down_s = down_s


class MemoryStore:
    """One start's view of the disk."""

    def __init__(self, disk: Disk, spec: RunSpec, *, rewind: bool = False) -> None:
        """Begin the run, or go on with it under the next epoch; `rewind` whatever nodes have seen since.

        Raises:
            StateLocked: nothing was changed.
        """
        if disk.locked:
            raise StateLocked(Path("disk"))
        self._disk = disk
        self._updates: dict[tuple[int, int], bytes] = {}
        self._inputs: dict[BlobId, bytes] = {}
        self._anchors: dict[int, bytes] = {}
        self.fetched: dict[int, rec.AnchorFetched] = {}
        """Anchors that came up from nodes, by fragment."""
        disk.epoch += 1
        if not disk.entries:
            disk.entries.append((rec.RunStarted(spec=spec, epoch=disk.epoch, rounds=opening_rounds(spec)), b""))
        first = disk.entries[0][0]
        assert isinstance(first, rec.RunStarted)
        self.ledger = Ledger.begin(first)
        """What is durable; the machine works on a copy, and is ahead of it."""
        self.buffers = [Buffers.begin(anchor, first.spec.terms) for anchor in disk.anchors]
        done: list[tuple[rec.WindowCommitted, commits.Codecs] | dict[int, Buffers]] = []
        for record, attachment in disk.entries:
            if isinstance(record, rec.WindowCommitted):
                done.append((record, commits.codecs_of(self.ledger, record)))
            self._note(record, attachment)
            if isinstance(record, rec.Adopted):
                done.append(self._adopted(record))
        for step in done:
            if isinstance(step, dict):
                self._install(step)
            else:
                self.buffers[step[0].fragment] = self._repeat(self.buffers[step[0].fragment], *step)
        if rewind:
            disk.epoch = max(disk.epoch, self.ledger.epoch_seen + 1)
            self._write(rec.Rewound(epoch=disk.epoch), b"")
        elif self.ledger.epoch != disk.epoch:
            # On a full disk, too: a start that ends for want of room, again and again, is no more than a later start.
            self._write(rec.EpochClaimed(epoch=disk.epoch), b"")

    def append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        """Write a record, durably. Raises NoRoom."""
        if refusal := self._disk.refusal(len(attachment)):
            raise refusal
        self._write(record, attachment)

    def reserve(self, fragment: int, codec_down: str) -> int:
        """Room for an update. Raises NoRoom."""
        size = blob_bytes(codec_named(codec_down), self.ledger.spec.identity.layout.fragments[fragment])
        if refusal := self._disk.refusal(size):
            raise refusal
        return size

    def commit(self, draft: rec.WindowCommitted, result: Result) -> rec.WindowCommitted:
        """Make a commit durable, and only then swap its buffers in. Its room was reserved."""
        record = commits.completed(draft, result)
        self._write(record, result.update)
        self.buffers[record.fragment] = result.buffers
        return record

    def adopt(self, record: rec.Adopted) -> None:
        """Go on from the anchors that were fetched. Raises NoRoom."""
        self.append(record)
        self._disk.epoch = record.epoch
        self._install(self._adopted(record))

    def read_input(self, blob: BlobId) -> bytes:
        return self._inputs[blob]

    def update_source(self, fragment: int, version: int) -> BytesSource:
        return BytesSource(self._updates[fragment, version])

    def _write(self, record: rec.Record, attachment: bytes | bytearray) -> None:
        self._disk.writes += 1
        for look in self._disk.at_write:
            look(self._disk.writes, False)
        entry = rec.decode(*rec.encode(record)), bytes(attachment)
        self._disk.entries.append((entry[0], b"") if self._disk.frugal else entry)
        for look in self._disk.at_write:
            look(self._disk.writes, True)
        self._note(*entry)
        if self._disk.frugal:
            self._inputs.clear()
            if isinstance(record, rec.WindowCommitted):
                self._updates.pop((record.fragment, record.version - 1), None)

    def _note(self, record: rec.Record, attachment: bytes) -> None:
        self.ledger.apply(record)
        match record:
            case rec.InputStored(blob=blob):
                self._inputs[blob] = attachment
            case rec.AnchorFetched(anchor=anchor):
                self.fetched[anchor.fragment] = record
                self._anchors[anchor.fragment] = attachment
            case rec.WindowCommitted(fragment=fragment, version=version):
                self._updates[fragment, version] = attachment
            case _:
                pass

    def _adopted(self, record: rec.Adopted) -> dict[int, Buffers]:
        """The fragments that go on from what was fetched last."""
        spec, found = self.ledger.spec, dict[int, Buffers]()
        for fragment in (anchor.fragment for anchor in record.anchors):
            ref = self.fetched[fragment].anchor
            anchor = commits.fetched_anchor(self._anchors[fragment], spec.identity.layout.fragments[fragment], ref)
            found[fragment] = commits.adopted(anchor, ref.version, spec.terms)
        return found

    def _install(self, adopted: dict[int, Buffers]) -> None:
        for fragment, buffers in adopted.items():
            self.buffers[fragment] = buffers

    def _repeat(self, buffers: Buffers, record: rec.WindowCommitted, codecs: commits.Codecs) -> Buffers:
        """One commit again: the anchor from the update, the rest from the inputs."""
        update = self._updates[record.fragment, record.version]
        spooled = all(addend.blob in self._inputs for addend in record.blobs)
        inputs = [(self._inputs[addend.blob], addend.weight) for addend in record.blobs] if spooled else None
        restored, same = commits.repeat(self.ledger, buffers, record, update, inputs, codecs)
        self._disk.alarms += not same
        return restored


def full(nbytes: int) -> DiskFull:
    """What a disk without room says."""
    return DiskFull(Path("disk"), nbytes, 0)


class Worker:
    """A thread with a queue: jobs run one after the other, each takes its time, and a crash may catch one half-way."""

    def __init__(self, process: Process, duration_s: Callable[[], float]) -> None:
        self._process, self._duration_s = process, duration_s
        self._jobs: list[tuple[Action, Action]] = []
        self._working = False

    def submit(self, job: Action, done: Action) -> None:
        """Run `job` when its turn is over, then `done` in the daemon's own thread. `job` may raise PowerCut alone."""
        self._jobs.append((job, done))
        if len(self._jobs) == 1:
            self._process.after(self._duration_s(), self._finish)

    def interrupt(self, *, finished: bool) -> None:
        """The process dies: what was being done is done, or it is not; what waited never was."""
        if self._jobs and finished and not self._working:
            with contextlib.suppress(PowerCut):
                self._jobs[0][0]()
        self._jobs.clear()

    def _finish(self) -> None:
        job, done = self._jobs[0]
        self._working = True
        try:
            job()
        except PowerCut:
            return
        finally:
            self._working = False
        del self._jobs[0]
        if self._jobs:
            self._process.after(self._duration_s(), self._finish)
        done()
