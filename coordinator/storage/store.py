"""The store of one run: journal, snapshots and the fragments' buffers, kept consistent, and their recovery.

Every call may touch the disk. The daemon calls from one storage thread, and `read_update` from any thread. A restart
finds exactly what was durable: anchors are restored by decoding updates onto a snapshot, which is exact on any machine;
target and optimizer state by repeating the arithmetic on the stored inputs (protocol, Journal).
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobId, RunSpec
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers, Result
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import NoRoom, StateLocked, StateMismatch
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.copies import StateCopy
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.journal import SEGMENT_BYTES, Claim, Journal, claim_epoch
from farloop.coordinator.storage.recovery import (
    Attachments,
    Items,
    Place,
    UpdateSource,
    fetched,
    named_anchors,
    recovered,
    refuse_a_lost_journal,
)
from farloop.coordinator.storage.segment import Entry
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.runtime.system import trim_heap

_log = logging.getLogger(__name__)

SNAPSHOT_EVERY = 8
"""Commits of a fragment between two of its snapshots: bounds the tail that a restart repeats (protocol, Journal)."""

_LARGE_BYTES = 16 << 20  # of an anchor: below that nothing much is kept
_RETRY_S = 1.0  # between two tries to open a file while none can be opened
_LOOKS = 3  # at a journal that another coordinator writes to; once the epoch is claimed, that one stops


class Store:
    """One run's state directory, opened by one coordinator."""

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        ledger: Ledger,
        buffers: list[Buffers],
        files: Files = DISK,
        place: Place = lambda buffers: buffers,
    ) -> None:
        """Use `create` or `recover`."""
        self.directory, self._files, self._place = directory, files, place
        self.ledger = ledger  # the ledger of durable records; the machine's own is ahead of the disk
        self.buffers = buffers
        self.alarms: dict[str, str] = {}  # replaced, never changed: other threads read it
        self._journal = journal
        self._attachments = Attachments()
        self._claimed = 0  # the epoch of an adoption that is not durable yet
        self._restart_from = [(buffers.version, buffers.version) for buffers in buffers]
        """Versions of the last two good snapshots of each fragment."""
        self._saved_in: dict[int, int] = {}  # by fragment, the segment of its last snapshot record of this process
        journal.begin_segments_with(ledger.saved)

    @classmethod
    def create(
        cls,
        directory: Path,
        spec: RunSpec,
        anchors: Sequence[Tensor],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        files: Files = DISK,
        place: Place = lambda buffers: buffers,
    ) -> "Store":
        """Begin a run: an empty journal, snapshots of version 0, then the record that makes them valid.

        `place` puts buffers where they are kept.

        Raises StorageError: as `Journal.open`; StateMismatch: the directory already holds a run, or lost its journal.
        """
        journal, found = Journal.look(directory, segment_bytes=segment_bytes, files=files)
        try:
            if found.items:
                raise StateMismatch(directory, "holds a run already; choose another folder, or resume it")
            refuse_a_lost_journal(directory, files)
            epoch = claim_epoch(directory, files=files)
            journal.held_by(Claim(directory, epoch, files))
            journal.begin()  # before the snapshots: those without a journal are what is left of a run
            buffers = [place(Buffers.begin(anchor, spec.terms)) for anchor in anchors]
            for index, fragment_buffers in enumerate(buffers):
                _save_snapshot(directory, spec, index, fragment_buffers, files)
            started = rec.RunStarted(spec=spec, epoch=epoch, rounds=opening_rounds(spec))
            store = cls(directory, journal, Ledger.begin(started), buffers, files, place)
            store.append(started)
            store.sync()
        except BaseException:
            journal.close()
            raise
        return store

    @classmethod
    def recover(
        cls,
        directory: Path,
        *,
        accept: Callable[[RunSpec], None] = lambda spec: None,
        rewind: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        files: Files = DISK,
        place: Place = lambda buffers: buffers,
    ) -> "Store | None":
        """Continue what the directory holds, under a new epoch; None where it holds no run.

        `accept` raises where the run is not the one that is wanted: then nothing is changed, not even the epoch.
        `place` puts buffers where they are kept.
        `rewind` takes this state for the truth, though nodes may have seen what came after it (protocol, Fencing).

        The epoch is claimed before anything else is changed, and what was read is looked at again after that: another
        coordinator, which a lost lock did not keep away, may have written until then, and writes no more.
        Raises StorageError: as `Journal.open`; no good snapshot of a fragment; StateMismatch where journal and
        snapshots do not fit together, or an anchor does not come out as its commit said.
        """
        journal, found = Journal.look(directory, segment_bytes=segment_bytes, files=files)
        try:
            for _ in range(_LOOKS):
                if not found.items:
                    refuse_a_lost_journal(directory, files)
                    journal.close()
                    return None
                store = cls._replay(directory, journal, found.items, files, place)
                accept(store.ledger.spec)
                seen = max(store.ledger.epoch, store.ledger.epoch_seen) if rewind else store.ledger.epoch
                epoch = claim_epoch(directory, seen=seen, files=files)
                changed = journal.look_again()
                if changed is None:
                    break
                _log.warning("journal reread cause='another coordinator wrote to it until epoch %d'", epoch)
                found = changed
            else:
                raise StateLocked(directory)
            journal.held_by(Claim(directory, epoch, files))
            journal.begin(fresh=True)
            store.append(rec.Rewound(epoch=epoch) if rewind else rec.EpochClaimed(epoch=epoch))
            store.sync()
        except BaseException:
            journal.close()
            raise
        return store

    @classmethod
    def _replay(cls, directory: Path, journal: Journal, items: Items, files: Files, place: Place) -> "Store":
        found = recovered(directory, items, journal.whole, files, place)
        store = cls(directory, journal, found.ledger, found.buffers, files, place)
        store._attachments, store._restart_from, store.alarms = found.attachments, found.restart_from, found.alarms
        return store

    def append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        """Write a record; durable after `sync`. Raises NoRoom: nothing was changed."""
        self._take(self._journal.append(record, attachment))

    def sync(self) -> None:
        """One fsync for all appends so far. Its failure is fatal.

        Without a free descriptor to check the folder's owner it waits: the records are written, and a second try would
        write them twice.
        """
        what = "epoch of the state folder"
        while True:
            try:
                self._journal.sync()
            except NoRoom as error:
                if what not in self.alarms:
                    _log.warning("alarm what=%r why=%r fix=%r", what, str(error), error.fix)
                    self.alarms = {**self.alarms, what: str(error)}
                time.sleep(_RETRY_S)
            else:
                break
        if what in self.alarms:
            self.alarms = {key: why for key, why in self.alarms.items() if key != what}

    def reserve(self, fragment: int, codec_down: str) -> int:
        """Reserve room for an update before it is computed. Returns the argument for `commit`."""
        size = blob_bytes(codec_named(codec_down), self.ledger.spec.identity.layout.fragments[fragment])
        self._journal.reserve(size)
        return size

    def release(self, reserved: int) -> None:
        self._journal.release(reserved)

    def commit(self, draft: rec.WindowCommitted, result: Result, reserved: int) -> rec.WindowCommitted:
        """Make a commit durable, and only then swap its buffers in; a snapshot follows every few versions.

        Raises:
            NoRoom: nothing was changed; the reservation stays.
            Fenced: another coordinator has taken this state over. Nothing was changed.
            StorageFailed: it may be durable or not. Exit and recover.
        """
        record = commits.completed(draft, result)
        self._take(self._journal.append(record, result.update, reserved=reserved))
        self.sync()
        self.buffers[record.fragment] = self._place(result.buffers)
        if record.version == 1 and result.buffers.anchor.nbytes >= _LARGE_BYTES:
            trim_heap()  # of the first buffers, which another thread made
        if record.version % SNAPSHOT_EVERY == 0 or record.next_window is None:
            self._snapshot(record.fragment)
        return record

    @property
    def fetched(self) -> dict[int, rec.AnchorFetched]:
        """Anchors from nodes by fragment: an adoption need not fetch them again."""
        return self._attachments.fetched

    def require_ours(self) -> None:
        """Check that no other coordinator took over. Raises as `Journal.require_ours`."""
        self._journal.require_ours()

    def adopt(self, record: rec.Adopted) -> None:
        """Go on from the anchors that were fetched: durable, and then true of the buffers, too.

        Raises:
            NoRoom: nothing was changed but the epoch's file.
            Fenced: another coordinator has taken this state over. Nothing was changed.
            StorageFailed: it may be durable or not. Exit and recover.
        """
        if not self._claimed:  # else there was no room for the record when it was tried before
            self._journal.require_ours()
            self._claimed = claim_epoch(self.directory, seen=record.epoch - 1, files=self._files)
            self._journal.held_by(Claim(self.directory, self._claimed, self._files))
        brought = {
            anchor.fragment: fetched(
                self.directory, self.ledger, self._attachments, anchor.fragment, anchor.version, self._journal.whole
            )
            for anchor in record.anchors
        }
        self.append(record)
        self.sync()
        for fragment, buffers in brought.items():
            self.buffers[fragment] = self._place(buffers)
            self._snapshot(fragment)
        _log.warning(
            "adopted history=%d versions=%s fragments=%d lost=%s missing=%s samples_uncertain=%d "
            "note='nodes resync from here'",
            record.epoch,
            ",".join(str(version) for version in self.ledger.versions),
            len(record.anchors),
            ",".join(f"{ref.fragment}:{ref.version}" for ref in record.lost) or "-",
            ",".join(record.missing) or "-",
            record.uncertain,
        )

    def read_input(self, blob: BlobId) -> bytes:
        attachment = self._attachments.input(blob)
        assert attachment is not None
        return self._journal.whole(attachment)

    def update_source(self, fragment: int, version: int) -> UpdateSource:
        """A reader of an update that the ledger remembers. Any thread."""
        return self._attachments.open_update(self._journal, fragment, version)

    def named_anchors(self) -> dict[str, Tensor]:
        """The global model: every parameter by name, to be read alone (`recovery.named_anchors`)."""
        return named_anchors(self.ledger.spec.identity.layout, self.buffers)

    def export(self, path: Path) -> None:
        """Write the global model as one file that other tools read. Raises NoRoom: nothing was changed."""
        identity = self.ledger.spec.identity
        metadata = {"run": identity.fingerprint(), "model": identity.model}
        snapshots.export(path, self.named_anchors(), metadata, self._files)

    def cut(self) -> StateCopy:
        return StateCopy.of(self.ledger.saved(), self.buffers)

    def close(self) -> None:
        self._journal.close()

    def _take(self, entry: Entry) -> None:
        self._attachments.take(entry)
        self.ledger.apply(entry.record)

    def _snapshot(self, fragment: int) -> None:
        """Save a snapshot, and delete segments that are no longer needed.

        Once every fragment has a snapshot in the current segment, a new segment begins. It repeats the ledger, so
        damage in an older segment does not invalidate later records (`recovery.py`). A full disk is no error here: the
        next restart has more to repeat.
        """
        buffers, what = self.buffers[fragment], f"snapshot of fragment {fragment}"
        try:
            _save_snapshot(self.directory, self.ledger.spec, fragment, buffers, self._files)
            self.append(rec.SnapshotTaken(fragment=fragment, version=buffers.version))
            self._restart_from[fragment] = (self._restart_from[fragment][1], buffers.version)
            self._saved_in[fragment] = self._journal.segment
            self._journal.prune(self._attachments.forget(self.ledger, [older for older, _ in self._restart_from]))
            if all(self._saved_in.get(other) == self._journal.segment for other in range(len(self.buffers))):
                self._journal.roll()
        except NoRoom as error:
            _log.warning("alarm what=%r why=%r", what, str(error))
            self.alarms = {**self.alarms, what: str(error)}
            return
        self.alarms = {key: why for key, why in self.alarms.items() if key != what}


def _save_snapshot(directory: Path, spec: RunSpec, fragment: int, buffers: Buffers, files: Files) -> None:
    snapshots.save(directory, snapshots.of_buffers(spec.identity.fingerprint(), fragment, buffers), files)
