"""The store of one run: journal, snapshots and the fragments' buffers, kept consistent, and their recovery.

Every call may touch the disk. The daemon calls from one storage thread, `save` and `update_source` from any. A restart
finds exactly what was durable, by repeating the arithmetic of the commits since the snapshots (protocol, Journal).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobId, RunSpec
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers, Pool, Result
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import FolderChanged, NoRoom, ObjectFailed, StateMismatch, StorageError
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.copies import StateCopy
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.follower import Follower
from farloop.coordinator.storage.journal import SEGMENT_BYTES, Claim, Journal, claim_epoch
from farloop.coordinator.storage.recovery import (
    Attachments,
    First,
    Place,
    Recovery,
    UpdateSource,
    as_they_are,
    fetched,
    named_anchors,
    passed_over,
    recovered,
    refuse_a_lost_journal,
)
from farloop.coordinator.storage.segment import Entry, Gap, Segments
from farloop.coordinator.storage.state_reader import attached
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.runtime.ports import T
from farloop.runtime.system import trim_heap

_log = logging.getLogger(__name__)

# A fragment's tail is what a restart repeats: its commits since its last snapshot (protocol, P). A snapshot has as many
# bytes as several commits, so it waits until the tail is long, or all tails together are.
SNAPSHOT_EVERY = 64  # commits of a fragment between two of its snapshots, at most
SNAPSHOT_LEAST = 8  # and at least where the tail is long by its bytes; also before another try
TAIL_RATIO = 6
"""A tail is long with this many times the bytes of a snapshot: snapshots are a seventh of what is written."""
MOST_REPEATED = 2_000_000_000
"""Of all tails together, parameters that a start computes and bytes that it reads: a few seconds."""
COMMITS_A_SNAPSHOT = 16
"""Beyond that there is a snapshot for so many commits: 0.75 bytes a parameter and commit (a third of what is written
with q4 and two nodes), and the tails have half as many commits on average."""

MOST_RESULT_BYTES = 256 << 20
"""Of new buffers that are computed or made durable at a time, beyond one commit's. As many are kept for later ones."""
_LARGE_BYTES = 16 << 20  # of an anchor: below that nothing much is kept
_RETRY_S = 1.0  # between two tries while there is no room, no descriptor, or no answer of an object store
_LOOKS = 3  # at a journal that another coordinator writes to; once the epoch is claimed, that one stops


def read_when_possible(read: Callable[[], T]) -> T:
    """What a start reads. While the disk is full or the object store is away it waits, like a running coordinator.
    Raises StorageError."""
    held = False
    while True:
        try:
            return read()
        except (NoRoom, ObjectFailed) as error:
            if not error.retriable:
                raise
            if not held:
                _log.warning("storage hold begin what='start' why=%r fix=%r", str(error), error.fix)
            held = True
            time.sleep(_RETRY_S)


@dataclass(slots=True)
class _Tail:
    """Commits of a fragment since its last snapshot."""

    commits: int = 0
    num_bytes: int = 0  # of their deltas and updates in the journal
    retry: int = 0  # commits below which no snapshot is tried: there was no room for one


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A snapshot to be saved. No commit changes its buffers, and they are never used again for others."""

    fragment: int
    buffers: Buffers
    segment: int  # that the journal was in
    tail: _Tail


class Store:
    """One run's state directory, opened by one coordinator."""

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        ledger: Ledger,
        buffers: list[Buffers],
        files: Files = DISK,
        place: Place = as_they_are,
    ) -> None:
        """Use `create` or `recover`."""
        self.directory, self._files, self._place = directory, files, place
        self.ledger = ledger  # the ledger of durable records; the machine's own is ahead of the disk
        self.buffers = buffers
        self.alarms: dict[str, str] = {}  # replaced, never changed: other threads read it
        self.unverified: list[int] = []
        """Older segments that the start did not verify, and `verify_older` has not since."""
        self.obsolete: deque[str] = deque()
        """Keys of objects whose records are gone."""
        self._journal = journal
        self._attachments = Attachments()
        self._claimed = 0  # the epoch of an adoption that is not durable yet
        self._restart_from = [(buffers.version, buffers.version) for buffers in buffers]
        """Versions of the last two good snapshots of each fragment."""
        self._lent = set(range(len(buffers)))  # fragments whose present buffers others may have, too
        self._seized = set[int]()  # those whose buffers are ahead of the ledger: a commit is written over them
        self._sharing = threading.Lock()  # of what may be read and what may be written over
        self._sizes = [each.anchor.numel() for each in buffers]
        sizes = [sum(tensor.nbytes for tensor in (each.anchor, *each.tensors)) for each in buffers]
        self.pool = Pool(max(MOST_RESULT_BYTES, *sizes))  # with the sum of the deltas
        self._tails = [_Tail() for _ in buffers]
        self._allowed = 0  # parameters of commits since, less `COMMITS_A_SNAPSHOT` times those of snapshots
        self._saving: Cut | None = None
        self._saved_in: dict[int, int] = {}  # by fragment, the segment in which its last snapshot was taken
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
        place: Place = as_they_are,
    ) -> "Store":
        """Begin a run: an empty journal, snapshots of version 0, then the record that makes them valid. `place` puts
        buffers where they are kept.
        Raises StorageError: as `Journal.open`.
        Raises StateMismatch: the directory already holds a run, or lost its journal."""
        journal, found = Journal.look(directory, segment_bytes=segment_bytes, files=files)
        with journal.closed_on_error():
            if found.items():
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
        place: Place = as_they_are,
        follower: Follower | None = None,
        adopt: bool = False,
        first: First | None = None,
    ) -> "Store | None":
        """Continue what the directory holds, under a new epoch; None where it holds no run.

        What this start does not need of it is verified later (`verify_older`).

        `accept` raises where the run is not the one that is wanted: then nothing is changed, not even the epoch.
        `place` puts buffers where they are kept.
        `follower` has the state in memory, so that nothing is read.
        `adopt`: read all, also anchors of nodes that an earlier start fetched.
        `first` draws or reads version 0, for a fragment whose only snapshots are damaged.
        `rewind` takes this state for the truth, though nodes may have seen what came after it (protocol, Fencing).

        The epoch is claimed before anything else is changed, and what was read is looked at again after that: another
        coordinator, which a lost lock did not keep away, may have written until then, and writes no more.
        Raises StorageError: as `Journal.open`; no good snapshot of a fragment; StateMismatch where journal and
        snapshots do not fit together, or an anchor does not come out as its commit said.
        """
        if follower is not None:
            return cls._led(directory, follower, accept, segment_bytes, files, place)
        journal, found = Journal.look(directory, segment_bytes=segment_bytes, files=files)
        with journal.closed_on_error():
            for _ in range(_LOOKS):
                if not found.hold_anything:
                    refuse_a_lost_journal(directory, files)
                    journal.close()
                    return None
                recovery = recovered(found, place, everything=adopt, first=first)
                store = cls._of(directory, journal, recovery, files, place)
                accept(store.ledger.spec)
                seen = max(store.ledger.epoch, store.ledger.epoch_seen) if rewind else store.ledger.epoch
                epoch = claim_epoch(directory, seen=seen, files=files)
                changed = journal.look_again()
                if changed is None:
                    break
                _log.warning("journal reread cause='another coordinator wrote to it until epoch %d'", epoch)
                found = changed
            else:
                raise FolderChanged(directory, f"another process wrote to its journal during each of {_LOOKS} reads")
            journal.held_by(Claim(directory, epoch, files))
            journal.begin(fresh=True)
            store.append(rec.Rewound(epoch=epoch) if rewind else rec.EpochClaimed(epoch=epoch))
            store.sync()
        return store

    @classmethod
    def _led(
        cls,
        directory: Path,
        follower: Follower,
        accept: Callable[[RunSpec], None],
        segment_bytes: int,
        files: Files,
        place: Place,
    ) -> "Store":
        """The state that a standby has followed. No other process had the folder since it was read."""
        accept(follower.recovery.ledger.spec)
        journal = Journal.after(directory, follower.last, follower.number, segment_bytes=segment_bytes, files=files)
        with journal.closed_on_error():
            store = cls._of(directory, journal, follower.recovery, files, place)
            epoch = claim_epoch(directory, seen=store.ledger.epoch, files=files)
            journal.held_by(Claim(directory, epoch, files))
            journal.begin(fresh=True)
            store.append(rec.EpochClaimed(epoch=epoch))
            store.sync()
        return store

    @classmethod
    def _of(cls, directory: Path, journal: Journal, found: Recovery, files: Files, place: Place) -> "Store":
        store = cls(directory, journal, found.ledger, found.buffers, files, place)
        store._attachments, store._restart_from, store.alarms = found.attachments, found.restart_from, found.alarms
        store.unverified = found.unverified
        for fragment, (_, saved) in enumerate(found.restart_from):
            for version in range(saved + 1, store.ledger.versions[fragment] + 1):
                if store._attachments.has_update(fragment, version):  # else it was adopted
                    store._lengthen(fragment, version)
        return store

    def append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        """Write a record; durable after `sync`. Raises NoRoom: nothing was changed."""
        self._take(self._journal.append(record, attachment))

    def sync(self) -> None:
        """One fsync for all appends so far. Its failure is fatal. Without a free descriptor to check the folder's owner
        it waits: the records are written, and a second try would write them twice."""
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

    def compute(
        self, draft: rec.WindowCommitted, inputs: commits.Inputs, others: Sequence[commits.Delta] = ()
    ) -> Result:
        """As `commits.compute`, for `commit`. Any thread, one at a time. It is written over the fragment's buffers
        where nobody else may have them. Until the commit is durable nothing takes them then but snapshots for nodes,
        which are told later."""
        fragment = draft.fragment
        before, alone = self.buffers[fragment], self._seize(fragment)
        try:
            result = commits.compute(self.ledger, before, draft, inputs, others, self.pool, alone)
            if result.buffers.anchor is before.anchor:
                self.buffers[fragment], alone = result.buffers, False
            return result
        finally:
            if alone:
                self._seized.discard(fragment)

    def release(self, reserved: int) -> None:
        self._journal.release(reserved)

    def commit(
        self, draft: rec.WindowCommitted, result: Result, reserved: int, in_store: bool = False
    ) -> rec.WindowCommitted:
        """Make a commit durable, and only then swap its buffers in. `next_snapshot` may be due then. `in_store`: the
        update is in the object store.

        Raises:
            NoRoom: nothing was changed; the reservation stays.
            Fenced: another coordinator has taken this state over. Nothing was changed.
            StorageFailed: it may be durable or not. Exit and recover.
        """
        record = commits.completed(draft, result)
        self._take(self._journal.append(record, b"" if in_store else result.update, reserved=reserved))
        self.sync()
        self._swap(record.fragment, result.buffers)
        self._attachments.remember(record.fragment, record.version, result.update)
        if record.version == 1 and result.buffers.anchor.nbytes >= _LARGE_BYTES:
            trim_heap()  # of the first buffers, which another thread made
        self._lengthen(record.fragment, record.version)
        return record

    # --- Snapshots
    #
    # A cut is taken and noted between other calls; it is saved beside them, in any thread.

    def next_snapshot(self) -> Cut | None:
        """What to save next: of the fragments whose snapshot is due, the one with the most commits in its tail. None
        while one is being saved. Raises as `require_ours`."""
        if self._saving is not None:
            return None
        together = sum(tail.commits * n + tail.num_bytes for tail, n in zip(self._tails, self._sizes, strict=True))
        for fragment in sorted(range(len(self._tails)), key=lambda fragment: -self._tails[fragment].commits):
            spent = COMMITS_A_SNAPSHOT * self._sizes[fragment]
            if self._is_due(fragment, together > MOST_REPEATED and spent <= self._allowed):
                if (cut := self._cut(fragment)) is not None:
                    self._allowed = max(0, self._allowed - spent)
                    return cut
            elif spent > self._allowed:
                together = 0  # else small fragments would spend it all
        return None

    def save(self, cut: Cut) -> None:
        """Write a snapshot. Any thread. Raises as `snapshots.save`."""
        _save_snapshot(self.directory, self.ledger.spec, cut.fragment, cut.buffers, self._files)

    def saved(self, cut: Cut, refused: NoRoom | None = None) -> None:
        """Note in the journal what was saved, and delete segments that are no longer needed. Once every fragment has a
        snapshot since the current segment began, a new segment begins: it repeats the ledger, so damage in an older one
        does not invalidate later records (`recovery.py`). A full disk is no error here: the next restart has more to
        repeat."""
        self._saving = None
        if refused is not None:
            behind, tail = cut.tail, self._tails[cut.fragment]
            tail.commits += behind.commits
            tail.num_bytes += behind.num_bytes
            tail.retry = tail.commits + SNAPSHOT_LEAST
        fragment, version, what = cut.fragment, cut.buffers.version, f"snapshot of fragment {cut.fragment}"
        try:
            if refused is not None:
                raise refused
            self.append(rec.SnapshotTaken(fragment=fragment, version=version))
            self._restart_from[fragment] = (self._restart_from[fragment][1], version)
            self._saved_in[fragment] = cut.segment
            self._journal.prune(self._attachments.forget(self.ledger, [older for older, _ in self._restart_from]))
            if all(self._saved_in.get(other) == self._journal.segment for other in range(len(self.buffers))):
                self._journal.roll()
            self.obsolete.extend(self._attachments.pruned(self._journal.first_segment))
        except NoRoom as error:
            _log.warning("alarm what=%r why=%r", what, str(error))
            self.alarms = {**self.alarms, what: str(error)}
            return
        self.alarms = {key: why for key, why in self.alarms.items() if key != what}

    # --- The journal before what the start needed

    def verify_older(self) -> StorageError | None:
        """Read and verify the newest segment that was not verified yet: what is wrong with it. Any thread.
        Raises NoRoom: it cannot be opened now."""
        try:
            items = Segments(self.directory, self._files).items_of(self.unverified[-1])
            return next((item.fault for item in items if isinstance(item, Gap)), None)
        except NoRoom:
            raise
        except StorageError as error:
            return error

    def verified(self, fault: StorageError | None) -> None:
        """Note what `verify_older` found of a segment, which may have been deleted meanwhile. A node to which a damaged
        update is sent asks for a snapshot."""
        number = self.unverified.pop()
        if fault is not None and number >= self._journal.first_segment:
            self.alarms = {**self.alarms, "journal": passed_over(fault)}
        if not self.unverified:
            _log.info("journal verified from=%s", self._journal.first_segment)

    def take_snapshots(self) -> None:
        """Save all that are due, here and now."""
        while (cut := self.next_snapshot()) is not None:
            self._save_now(cut)

    @property
    def fetched(self) -> dict[int, rec.AnchorFetched]:
        """Anchors from nodes by fragment: an adoption need not fetch them again."""
        return self._attachments.fetched

    def require_ours(self) -> None:
        """Check that no other coordinator took over. Raises as `Journal.require_ours` and `Files.require_ours`."""
        self._journal.require_ours()
        self._files.require_ours()

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
                self.directory, self.ledger, self._attachments, anchor.fragment, anchor.version, self._files
            )
            for anchor in record.anchors
        }
        self.append(record)
        self.sync()
        for fragment, buffers in brought.items():
            self.buffers[fragment] = self._place(buffers)
            self._lent.add(fragment)
            self._seized.discard(fragment)
            cut = self._cut(fragment)
            assert cut is not None
            self._save_now(cut)
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

    def read_input(self, blob: BlobId) -> bytes | bytearray:
        attachment = self._attachments.input(blob)
        assert attachment is not None
        return attached(self.directory, attachment, self._files)

    def update_source(self, fragment: int, version: int) -> UpdateSource:
        """A reader of an update that the ledger remembers. Any thread."""
        return self._attachments.open_update(self.directory, self._files, fragment, version)

    def update_key(self, fragment: int, version: int) -> str:
        """Of an update that the object store has; empty for one in the journal. Any thread."""
        return self._attachments.update_key(fragment, version)

    def has_at_hand(self, fragment: int, version: int) -> bool:
        """Whether `update_source` reads it without the object store. Any thread."""
        return self._attachments.has_at_hand(fragment, version)

    def named_anchors(self) -> dict[str, Tensor]:
        """The global model: every parameter by name, to be read alone (`recovery.named_anchors`)."""
        return named_anchors(self.ledger.spec.identity.layout, self.buffers)

    def export(self, path: Path) -> None:
        """Write the global model as one file that other tools read. Raises NoRoom: nothing was changed."""
        identity = self.ledger.spec.identity
        metadata = {"run": identity.fingerprint(), "model": identity.model}
        snapshots.export(path, self.named_anchors(), metadata, self._files)

    def cut(self) -> StateCopy | None:
        """None: a commit is being written over a fragment. Try again soon."""
        with self._sharing:
            self._lent |= set(range(len(self.buffers)))
            if self._seized:
                return None
        return StateCopy.of(self.ledger.saved(), self.buffers)

    def close(self) -> None:
        self._journal.close()

    def _take(self, entry: Entry) -> None:
        self._attachments.take(entry)
        self.ledger.apply(entry.record)

    def _swap(self, fragment: int, computed: Buffers) -> None:
        """Let a commit's buffers take the place of the fragment's; what nobody reads any more goes to the pool."""
        old, placed = self.buffers[fragment], self._place(computed)
        shared = self._is_shared(fragment, old)
        kept = {tensor.data_ptr() for tensor in placed.tensors}  # a commit need not change all of them
        left = [tensor for tensor in old.tensors if tensor.data_ptr() not in kept]
        self.buffers[fragment] = placed
        self._seized.discard(fragment)
        if placed is not computed:
            self.pool.give(computed.tensors)
        elif not shared:
            self.pool.give(left)
        if shared and len(left) < len(old.tensors):
            self._lent.add(fragment)  # whoever reads the old ones has some of the new ones
        else:
            self._lent.discard(fragment)

    def _lengthen(self, fragment: int, version: int) -> None:
        tail = self._tails[fragment]
        tail.commits += 1
        tail.num_bytes += self._attachments.commit_bytes(fragment, version)
        self._allowed = min(self._allowed + self._sizes[fragment], COMMITS_A_SNAPSHOT * sum(self._sizes))

    def _is_due(self, fragment: int, may_be_early: bool) -> bool:
        tail, buffers = self._tails[fragment], self.buffers[fragment]
        if tail.commits == 0 or tail.commits < tail.retry:
            return False
        if tail.commits >= SNAPSHOT_EVERY or fragment not in self.ledger.windows:  # the last commit
            return True
        snapshot_bytes = (2 + len(buffers.outer)) * buffers.anchor.nbytes
        return may_be_early or (tail.num_bytes >= TAIL_RATIO * snapshot_bytes and tail.commits >= SNAPSHOT_LEAST)

    def _cut(self, fragment: int) -> Cut | None:
        """None: a commit is being written over the fragment, and its snapshot can wait for it."""
        self.require_ours()
        with self._sharing:
            if fragment in self._seized:
                return None
            tail, self._tails[fragment] = self._tails[fragment], _Tail()
            buffers, segment = self.buffers[fragment], self._journal.segment
            self._saving = Cut(fragment=fragment, buffers=buffers, segment=segment, tail=tail)
        return self._saving

    def _is_shared(self, fragment: int, buffers: Buffers) -> bool:
        """Whether somebody else may read these, which are or were the fragment's."""
        return fragment in self._lent or (self._saving is not None and self._saving.buffers is buffers)

    def _seize(self, fragment: int) -> bool:
        """Whether a commit may be written over the fragment's buffers. Not where its snapshot has waited for long."""
        with self._sharing:
            may = self._place is as_they_are and not self._is_shared(fragment, self.buffers[fragment])
            may = may and self._tails[fragment].commits <= SNAPSHOT_EVERY
            if may:
                self._seized.add(fragment)
        return may

    def _save_now(self, cut: Cut) -> None:
        refused = None
        try:
            self.save(cut)
        except NoRoom as error:
            refused = error
        self.saved(cut, refused)


def _save_snapshot(directory: Path, spec: RunSpec, fragment: int, buffers: Buffers, files: Files) -> None:
    snapshots.save(directory, snapshots.of_buffers(spec.identity.fingerprint(), fragment, buffers), files)
