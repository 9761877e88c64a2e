"""The coordinator's memory: journal, snapshots and the fragments' buffers, kept in step; and their recovery.

Every call may touch the disk: the daemon makes them from one storage thread (and `read_update` from anywhere). What a
restart finds is exactly what was durable: anchors are restored by decoding updates onto a snapshot, exact on any
machine; target and optimizer state by repeating the arithmetic on the spooled inputs (protocol P).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from farloop.algo.fragments import view
from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobId, RunSpec
from farloop.coordinator import commits, snapshots
from farloop.coordinator import records as rec
from farloop.coordinator.aggregator import Buffers, Result
from farloop.coordinator.attachments import Attachments, UpdateSource
from farloop.coordinator.copies import Cut
from farloop.coordinator.epoch import Claim, claim_epoch
from farloop.coordinator.errors import NoRoom, StateLocked, StateMismatch
from farloop.coordinator.files import DISK, Files
from farloop.coordinator.journal import SEGMENT_BYTES, Journal
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.segment import Entry
from farloop.quant.blob import blob_bytes
from farloop.quant.errors import BadBlob
from farloop.quant.registry import codec_named

_log = logging.getLogger(__name__)

SNAPSHOT_EVERY = 8
"""Commits of a fragment between two of its snapshots: bounds the tail that a restart repeats (protocol P)."""


_LOOKS = 3
"""At a journal that another coordinator writes to; once the epoch is claimed, that one stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A commit of the journal, to be repeated if no snapshot holds it."""

    record: rec.WindowCommitted
    codecs: commits.Codecs


class Store:
    """One run's state directory, opened by one coordinator."""

    def __init__(
        self, directory: Path, journal: Journal, ledger: Ledger, buffers: list[Buffers], files: Files = DISK
    ) -> None:
        """Not to be called: `create` and `recover` are the ways in."""
        self.directory, self._files = directory, files
        self.ledger = ledger
        """What the journal says, record by record: the machine, which is ahead of the disk, has its own."""
        self.buffers = buffers
        self.alarms: dict[str, str] = {}
        """Replaced, never changed: other threads read it."""
        self._journal = journal
        self._attachments = Attachments()
        self._adopted: dict[int, int] = {}
        """Versions that a journal which is read back says were adopted, by fragment: they may have no snapshot."""
        self._claimed = 0
        """The epoch of an adoption that is not durable yet."""
        self._restart_from = [(buffers.version, buffers.version) for buffers in buffers]
        """Versions of the last two snapshots of each fragment that are known to be good."""
        journal.begin_segments_with(ledger.saved)

    # --- ways in

    @classmethod
    def create(
        cls,
        directory: Path,
        spec: RunSpec,
        anchors: Sequence[Tensor],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        files: Files = DISK,
    ) -> "Store":
        """Begin a run: an empty journal, snapshots of version 0, then the record that makes them count.

        Raises:
            StorageError: as `Journal.open`; StateMismatch where the directory already holds a run, or lost one.
        """
        journal, found = Journal.look(directory, segment_bytes=segment_bytes, files=files)
        try:
            if found.entries:
                raise StateMismatch(directory, "holds a run already; choose another folder, or resume it")
            refuse_a_lost_journal(directory, journal, files)
            epoch = claim_epoch(directory, files=files)
            journal.held_by(Claim(directory, epoch, files))
            journal.begin()  # before the snapshots: those without a journal are what is left of a run
            buffers = [Buffers.begin(anchor, spec.terms) for anchor in anchors]
            for index, fragment_buffers in enumerate(buffers):
                _save_snapshot(directory, spec, index, fragment_buffers, files)
            started = rec.RunStarted(spec=spec, epoch=epoch, rounds=opening_rounds(spec))
            store = cls(directory, journal, Ledger.begin(started), buffers, files)
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
    ) -> "Store | None":
        """Continue what the directory holds, under a new epoch; None where it holds no run.

        `accept` raises where the run is not the one that is wanted: then nothing is changed, not even the epoch.
        `rewind` takes this state for the truth, though nodes may have seen what came after it (protocol S).

        The epoch is claimed before anything else is changed, and what was read is looked at again after that: another
        coordinator, which a lost lock did not keep away, may have written until then, and writes no more.

        Raises:
            StorageError: as `Journal.open`; no good snapshot of a fragment; StateMismatch where journal and snapshots
                do not fit together, or an anchor does not come out as its commit said.
        """
        journal, found = Journal.look(directory, segment_bytes=segment_bytes, files=files)
        try:
            for _ in range(_LOOKS):
                if not found.entries:
                    refuse_a_lost_journal(directory, journal, files)
                    journal.close()
                    return None
                store = cls._replay(directory, journal, found.entries, files)
                accept(store.ledger.spec)
                seen = max(store.ledger.epoch, store.ledger.epoch_seen) if rewind else store.ledger.epoch
                epoch = claim_epoch(directory, seen=seen, files=files)
                changed = journal.look_again()
                if changed is None:
                    break
                _log.warning("read again cause='another coordinator wrote to the journal until epoch %d'", epoch)
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
    def _replay(cls, directory: Path, journal: Journal, entries: Sequence[Entry], files: Files) -> "Store":
        match entries[0].record:
            case rec.RunStarted() as started:
                ledger = Ledger.begin(started)
            case rec.LedgerSaved() as saved:
                ledger = Ledger.resume(saved)
            case _:
                raise StateMismatch(directory, "its journal does not begin with a run's start")
        store = cls(directory, journal, ledger, [], files)
        done: list[list[_Done]] = [[] for _ in ledger.versions]
        for entry in entries:
            if isinstance(entry.record, rec.WindowCommitted):
                codecs = commits.codecs_of(ledger, entry.record)
                done[entry.record.fragment].append(_Done(record=entry.record, codecs=codecs))
            if isinstance(entry.record, rec.Adopted):
                store._adopted |= {anchor.fragment: anchor.version for anchor in entry.record.anchors}
            store._take(entry)
        for index, of_fragment in enumerate(done):
            store._restore(index, of_fragment)
        return store

    # --- the journal

    def append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        """Write a record; durable after `sync`. Raises NoRoom: nothing was changed."""
        self._take(self._journal.append(record, attachment))

    def sync(self) -> None:
        """One fsync for all appends so far. Its failure is fatal."""
        self._journal.sync()

    def reserve(self, fragment: int, codec_down: str) -> int:
        """Room for an update, before the work of making it (protocol O). Returns what `commit` needs to use it up."""
        size = blob_bytes(codec_named(codec_down), self.ledger.spec.identity.layout.fragments[fragment])
        self._journal.reserve(size)
        return size

    def release(self, reserved: int) -> None:
        """Give the room back."""
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
        self._journal.sync()
        self.buffers[record.fragment] = result.buffers
        if record.version % SNAPSHOT_EVERY == 0 or record.next_window is None:
            self._snapshot(record.fragment)
        return record

    @property
    def fetched(self) -> dict[int, rec.AnchorFetched]:
        """Anchors that came up from nodes, by fragment: an adoption need not fetch them again."""
        return self._attachments.fetched

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
        fetched = {anchor.fragment: self._fetched(anchor.fragment, anchor.version) for anchor in record.anchors}
        self.append(record)
        self.sync()
        for fragment, buffers in fetched.items():
            self.buffers[fragment] = buffers
            self._snapshot(fragment)
        _log.warning(
            "adopted history=%d versions=%s fragments=%d lost=%s missing=%s samples_uncertain=%d "
            "note='nodes begin anew from here'",
            record.epoch,
            ",".join(str(version) for version in self.ledger.versions),
            len(record.anchors),
            ",".join(f"{ref.fragment}:{ref.version}" for ref in record.lost) or "-",
            ",".join(record.missing) or "-",
            record.uncertain,
        )

    def read_input(self, blob: BlobId) -> bytes:
        """A spooled delta."""
        attachment = self._attachments.input(blob)
        assert attachment is not None
        return self._journal.read(attachment, 0, attachment.size)

    def update_source(self, fragment: int, version: int) -> UpdateSource:
        """An update that the ledger remembers, as a cursor over the journal. Any thread."""
        return self._attachments.open_update(self._journal, fragment, version)

    def named_anchors(self) -> dict[str, Tensor]:
        """The global model: every parameter by name."""
        layout = self.ledger.spec.identity.layout
        return {
            tensor.name: view(self.buffers[fragment.index].anchor, tensor).clone()
            for fragment in layout.fragments
            for tensor in fragment.tensors
        }

    def cut(self) -> Cut:
        """The state as it is, for a copy of it."""
        return Cut.of(self.ledger.saved(), self.buffers)

    def close(self) -> None:
        self._journal.close()

    def _take(self, entry: Entry) -> None:
        """A record is in the journal."""
        self._attachments.take(entry)
        self.ledger.apply(entry.record)

    def _snapshot(self, fragment: int) -> None:
        """Save the fragment as it is, and delete the segments that nobody can ask for any more.

        A full disk here costs nothing but time: the next restart has more to repeat.
        """
        buffers, what = self.buffers[fragment], f"snapshot of fragment {fragment}"
        try:
            _save_snapshot(self.directory, self.ledger.spec, fragment, buffers, self._files)
            self.append(rec.SnapshotTaken(fragment=fragment, version=buffers.version))
            self._restart_from[fragment] = (self._restart_from[fragment][1], buffers.version)
            self._journal.prune(self._attachments.forget(self.ledger, [older for older, _ in self._restart_from]))
        except NoRoom as error:
            _log.warning("alarm what=%r why=%r", what, str(error))
            self.alarms = {**self.alarms, what: str(error)}
            return
        self.alarms = {key: why for key, why in self.alarms.items() if key != what}

    # --- recovery

    def _restore(self, index: int, done: Sequence[_Done]) -> None:
        """The fragment's buffers: its newest good snapshot, and every commit behind it once more."""
        spec = self.ledger.spec
        snapshot = snapshots.load_latest(
            self.directory, index, fingerprint=spec.identity.fingerprint(), files=self._files
        )
        if snapshot is None:
            raise StateMismatch(self.directory, f"there is no snapshot of fragment {index}")
        if snapshot.version < self._adopted.get(index, 0):  # it died before there was one
            buffers = self._fetched(index, self._adopted[index])
        else:
            tensors = dict(snapshot.tensors)
            anchor, target = tensors.pop("anchor"), tensors.pop("target")
            buffers = Buffers(version=snapshot.version, anchor=anchor, target=target, outer=tensors)
        for commit in done:
            if commit.record.version == buffers.version + 1:
                buffers = self._repeat(buffers, commit)
        if buffers.version != self.ledger.versions[index]:
            found = f"snapshot and journal lead to version {buffers.version} of fragment {index}"
            raise StateMismatch(self.directory, f"{found}, the last commit is {self.ledger.versions[index]}")
        self.buffers.append(buffers)
        self._restart_from.append((snapshot.version, snapshot.version))

    def _fetched(self, index: int, version: int) -> Buffers:
        """Of an anchor that came up from a node. Raises StateMismatch."""
        record, attachment = self._attachments.anchor(index, version)
        data = self._journal.read(attachment, 0, attachment.size)
        try:
            anchor = commits.fetched_anchor(data, self.ledger.spec.identity.layout.fragments[index], record.anchor)
        except BadBlob as error:
            raise StateMismatch(self.directory, f"the anchor that {record.node} brought: {error}") from error
        return commits.adopted(anchor, record.anchor.version, self.ledger.spec.terms)

    def _repeat(self, buffers: Buffers, commit: _Done) -> Buffers:
        """One commit again: the anchor from the update, the rest from the inputs."""
        record = commit.record
        attachment = self._attachments.update(record.fragment, record.version)
        update = self._journal.read(attachment, 0, attachment.size)
        spooled = all(self._attachments.input(addend.blob) for addend in record.blobs)
        inputs = [(self.read_input(addend.blob), addend.weight) for addend in record.blobs] if spooled else None
        try:
            restored, same = commits.repeat(self.ledger, buffers, record, update, inputs, commit.codecs)
        except commits.WrongAnchor as error:
            raise StateMismatch(self.directory, str(error)) from error
        if not same:
            what = f"optimizer of fragment {record.fragment}"
            why = f"its state of version {record.version} came out different at the restart"
            _log.warning("alarm what=%r why=%r", what, why)
            self.alarms = {**self.alarms, what: why}
        return restored


def refuse_a_lost_journal(directory: Path, journal: Journal, files: Files) -> None:
    """Refuse to begin a new run in a folder whose journal is gone while the snapshots of a run are there.

    Raises:
        StateMismatch: there are snapshots of a run, and not its journal.
    """
    folder = directory / "snapshots"
    found = files.names(folder) if files.is_directory(folder) else []
    versions = [version for name in found if (version := snapshots.version_in(name)) is not None]
    if not versions or (journal.has_segments and not any(versions)):  # a begin that a crash cut short
        return
    raise StateMismatch(
        directory,
        f"holds {len(versions)} snapshots, the newest of version {max(versions)}, but no record of a journal: that "
        "was deleted or lost. Put the files journal-*.log back. Without them: with --restore URL and an empty --state "
        "DIR, the run goes on from the newest copy in an object store; over that copy, or over an old copy of this "
        "folder, --adopt-from-nodes goes on from what the nodes hold, and --rewind discards what they hold and goes on "
        "from the copy. To begin a new run at version 0, give an empty --state DIR",
    )


def _save_snapshot(directory: Path, spec: RunSpec, fragment: int, buffers: Buffers, files: Files) -> None:
    snapshots.save(directory, snapshots.of_buffers(spec.identity.fingerprint(), fragment, buffers), files)
