"""The coordinator's memory: journal, snapshots and the fragments' buffers, kept in step; and their recovery.

Every call may touch the disk: the daemon makes them from one storage thread (and `read_update` from anywhere). What a
restart finds is exactly what was durable: anchors are restored by decoding updates onto a snapshot, exact on any
machine; target and optimizer state by repeating the arithmetic on the spooled inputs (protocol P).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from farloop.algo.digest import digest
from farloop.algo.fragments import view
from farloop.algo.methods import method_named
from farloop.algo.outer import OuterSettings
from farloop.algo.spec import BlobId, BlobKind, RunSpec
from farloop.coordinator import aggregator, snapshots
from farloop.coordinator import records as rec
from farloop.coordinator.aggregator import Buffers, Result, Step
from farloop.coordinator.epoch import claim_epoch
from farloop.coordinator.errors import StateMismatch
from farloop.coordinator.journal import Journal
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.segment import Attachment, Entry
from farloop.quant.blob import BlobHeader, blob_bytes, pack_blob
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest

_log = logging.getLogger(__name__)

SNAPSHOT_EVERY = 8
"""Commits of a fragment between two of its snapshots: bounds the tail that a restart repeats (protocol P)."""


class UpdateSource:
    """An update's bytes, read from the journal as the downlink goes on (protocol R)."""

    def __init__(self, journal: Journal, attachment: Attachment) -> None:
        self._journal, self._attachment = journal, attachment

    @property
    def size(self) -> int:
        return self._attachment.size

    def read(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._journal.read(self._attachment, offset, num_bytes))


class Store:
    """One run's state directory, opened by one coordinator."""

    def __init__(self, directory: Path, journal: Journal, ledger: Ledger, buffers: list[Buffers]) -> None:
        """Not to be called: `create` and `recover` are the ways in."""
        self.directory = directory
        self.ledger = ledger
        self.buffers = buffers
        self.alarms: list[str] = []
        self._journal = journal
        self._inputs: dict[BlobId, Attachment] = {}
        self._updates: dict[tuple[int, int], Attachment] = {}

    # --- ways in

    @classmethod
    def create(cls, directory: Path, spec: RunSpec, anchors: Sequence[Tensor]) -> "Store":
        """Begin a run: snapshots of version 0, then the record that makes them count.

        Raises:
            StorageError: as `Journal.open`; StateMismatch where the directory already holds a run.
        """
        journal, found = Journal.open(directory)
        try:
            if found.entries:
                raise StateMismatch(directory, "holds a run already; choose another folder, or resume it")
            epoch = claim_epoch(directory)
            buffers = [Buffers.begin(anchor, spec.terms) for anchor in anchors]
            for index, fragment_buffers in enumerate(buffers):
                _save_snapshot(directory, spec, index, fragment_buffers)
            started = rec.RunStarted(spec=spec, epoch=epoch)
            store = cls(directory, journal, Ledger.begin(started), buffers)
            store._journal.append(started)
            store._journal.sync()
        except BaseException:
            journal.close()
            raise
        return store

    @classmethod
    def recover(cls, directory: Path) -> "Store | None":
        """Continue what the directory holds, under a new epoch; None where it holds no run.

        Raises:
            StorageError: as `Journal.open`, or an anchor that does not come out as its commit said.
        """
        journal, found = Journal.open(directory)
        try:
            if not found.entries:
                journal.close()
                return None
            store = cls._replay(directory, journal, found.entries)
            epoch = claim_epoch(directory, seen=store.ledger.epoch)
            store.append(rec.EpochClaimed(epoch=epoch))
            store.sync()
        except BaseException:
            journal.close()
            raise
        return store

    @classmethod
    def _replay(cls, directory: Path, journal: Journal, entries: Sequence[Entry]) -> "Store":
        first = entries[0].record
        if not isinstance(first, rec.RunStarted):
            raise StateMismatch(directory, "its journal does not begin with a run's start")
        store = cls(directory, journal, Ledger.begin(first), [])
        commits: dict[int, list[rec.WindowCommitted]] = {}
        for entry in entries:
            store._note(entry)
            store.ledger.apply(entry.record)
            if isinstance(entry.record, rec.WindowCommitted):
                commits.setdefault(entry.record.fragment, []).append(entry.record)
        for index in range(len(store.ledger.versions)):
            store.buffers.append(store._restore(index, commits.get(index, [])))
        return store

    # --- the journal

    def append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        """Write a record; durable after `sync`."""
        self._note(self._journal.append(record, attachment))

    def sync(self) -> None:
        """One fsync for all appends so far. Its failure is fatal."""
        self._journal.sync()

    def reserve(self, fragment: int, codec_down: str) -> int:
        """Room for an update, before the work of making it (protocol O). Returns what `commit` needs to use it up."""
        size = blob_bytes(codec_named(codec_down), self.buffers[fragment].anchor.numel())
        self._journal.reserve(size)
        return size

    def release(self, reserved: int) -> None:
        """Give the room back."""
        self._journal.release(reserved)

    def commit(self, draft: rec.WindowCommitted, result: Result, reserved: int) -> rec.WindowCommitted:
        """Make a commit durable, and only then swap its buffers in; a snapshot follows every few versions."""
        record = replace(
            draft,
            anchor_digest=result.anchor_digest,
            target_digest=result.target_digest,
            momentum_digest=result.outer_digest,
            update_size=len(result.update),
            update_digest=blob_digest(result.update),
        )
        self._note(self._journal.append(record, result.update, reserved=reserved))
        self._journal.sync()
        self.buffers[record.fragment] = result.buffers
        if record.version % SNAPSHOT_EVERY == 0 or record.next_window is None:
            _save_snapshot(self.directory, self.ledger.spec, record.fragment, result.buffers)
            self._journal.append(rec.SnapshotTaken(fragment=record.fragment, version=record.version))
        return record

    def read_input(self, blob: BlobId) -> bytes:
        """A spooled delta."""
        attachment = self._inputs[blob]
        return self._journal.read(attachment, 0, attachment.size)

    def update_source(self, fragment: int, version: int) -> UpdateSource:
        """An update, as a cursor over the journal. Any thread."""
        return UpdateSource(self._journal, self._updates[fragment, version])

    def snapshot_blob(self, fragment: int) -> tuple[BlobId, bytearray, int]:
        """The anchor in fp32 for a node that cannot follow the updates, and the digest of its bytes. Any thread."""
        buffers, codec = self.buffers[fragment], codec_named("fp32")
        header = BlobHeader(
            codec=codec,
            fragment=fragment,
            numel=buffers.anchor.numel(),
            version=buffers.version,
            base=buffers.version,
            epoch=self.ledger.epoch,
        )
        blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=buffers.version)
        data = pack_blob(header, codec.encode(buffers.anchor))
        return blob, data, blob_digest(data)

    def named_anchors(self) -> dict[str, Tensor]:
        """The global model: every parameter by name."""
        layout = self.ledger.spec.identity.layout
        return {
            tensor.name: view(self.buffers[fragment.index].anchor, tensor).clone()
            for fragment in layout.fragments
            for tensor in fragment.tensors
        }

    def close(self) -> None:
        self._journal.close()

    # --- recovery

    def _note(self, entry: Entry) -> None:
        match entry.record:
            case rec.InputStored(blob=blob):
                self._inputs[blob] = entry.attachment
            case rec.WindowCommitted(fragment=fragment, version=version):
                self._updates[fragment, version] = entry.attachment
            case _:
                pass

    def _restore(self, index: int, commits: Sequence[rec.WindowCommitted]) -> Buffers:
        spec = self.ledger.spec
        snapshot = snapshots.load_latest(self.directory, index, fingerprint=spec.identity.fingerprint())
        if snapshot is None:
            raise StateMismatch(self.directory, f"there is no snapshot of fragment {index}")
        tensors = dict(snapshot.tensors)
        anchor, target = tensors.pop("anchor"), tensors.pop("target")
        buffers = Buffers(version=snapshot.version, anchor=anchor, target=target, outer=tensors)
        for record in commits:
            if record.version > snapshot.version:
                buffers = self._repeat(buffers, record)
        return buffers

    def _repeat(self, buffers: Buffers, record: rec.WindowCommitted) -> Buffers:
        """One commit again: the anchor from the update, the rest from the inputs."""
        spec, attachment = self.ledger.spec, self._updates[record.fragment, record.version]
        step = self.step(record)
        anchor = buffers.anchor.clone()
        update = self._journal.read(attachment, 0, attachment.size)
        aggregator.apply_update_(anchor, update, step, spec.terms.codec_down)
        if digest(anchor) != record.anchor_digest:
            raise StateMismatch(
                self.directory, f"fragment {record.fragment} does not come out as version {record.version} said"
            )
        stepped = buffers
        if all(addend.blob in self._inputs for addend in record.blobs):
            inputs = [(self.read_input(addend.blob), addend.weight) for addend in record.blobs]
            delta = aggregator.merge(inputs, step, spec.terms.codec_up, record.blobs[0].blob.version)
            stepped = aggregator.advance(buffers, delta, step, spec.terms)
        else:  # gradients of data-parallel are not spooled: its moments restart from the snapshot (protocol K)
            stepped = replace(buffers, target=anchor.clone())
        restored = replace(stepped, version=record.version, anchor=anchor)
        if (digest(restored.target), restored.outer_digest()) != (record.target_digest, record.momentum_digest):
            alarm = f"fragment {record.fragment}: the optimizer's state of version {record.version} came out different"
            self.alarms.append(alarm)
            _log.warning("recovery alarm=%r", alarm)
        return restored

    def step(self, record: rec.WindowCommitted) -> Step:
        """What the arithmetic of this commit needs to know."""
        return Step(
            fragment=self.ledger.spec.identity.layout.fragments[record.fragment],
            version=record.version,
            round=self.ledger.rounds[record.round],
            outer=OuterSettings(lr=record.outer_lr, momentum=record.outer_momentum),
            epoch=self.ledger.epoch,
        )

    @property
    def spools_inputs(self) -> bool:
        """Whether deltas are journaled on arrival. Gradients of data-parallel are sent again instead (protocol K)."""
        return method_named(self.ledger.spec.terms.method).inner


def _save_snapshot(directory: Path, spec: RunSpec, fragment: int, buffers: Buffers) -> None:
    snapshots.save(
        directory,
        snapshots.Snapshot(
            fingerprint=spec.identity.fingerprint(),
            fragment=fragment,
            version=buffers.version,
            tensors={"anchor": buffers.anchor, "target": buffers.target, **buffers.outer},
            digests={"anchor": digest(buffers.anchor), "target": digest(buffers.target)},
        ),
    )
