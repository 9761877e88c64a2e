"""Recovers the ledger, the fragments' buffers and the places of bulk bytes from a state directory. Read-only."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from farloop.algo.fragments import rows_of, view, whole_shapes
from farloop.algo.spec import BlobId, Layout
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers, Pool
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS, Ledger, more_than_a_snapshot
from farloop.coordinator.errors import (
    Inconsistent,
    JournalCorrupt,
    NoRoom,
    SnapshotCorrupt,
    StateMismatch,
    StorageError,
)
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.journal import claimed_epoch
from farloop.coordinator.storage.segment import (
    Attachment,
    Entry,
    Gap,
    Items,
    Segments,
    read_attachment,
    refuse_half_salvaged,
    segment_numbers,
)
from farloop.coordinator.storage.state_reader import attached, journal_folder, ledger_of, steadily
from farloop.quant.digest import digest
from farloop.quant.errors import BadBlob, CodecError

# --- Attachments: where bulk bytes are in the journal, and which of them may still be requested
#
# A restart needs the inputs and updates after a snapshot, a returning node the updates that the ledger remembers, a
# session the rest of what it is sending.


MOST_RECENT_BYTES = 256 << 20  # of updates that are kept in memory as well: the newest ones


class UpdateSource:
    """An update's bytes, from memory or read from the journal while they are sent; kept until released."""

    def __init__(self, directory: Path, files: Files, attachment: Attachment, data: bytes | bytearray | None) -> None:
        self._directory, self._files, self.attachment, self._data = directory, files, attachment, data

    @property
    def size(self) -> int:
        return self.attachment.size

    def read(self, offset: int, num_bytes: int) -> memoryview:
        if self._data is None and self.attachment.key:
            self._data = attached(self._directory, self.attachment, self._files)
        if self._data is not None:
            return memoryview(self._data)[offset : offset + num_bytes]
        return memoryview(read_attachment(self._directory, self.attachment, offset, num_bytes, self._files))


class Attachments:
    """Places of deltas and updates in one journal. One thread owns it; any may call `open_update`."""

    def __init__(self) -> None:
        self._inputs: dict[BlobId, Attachment] = {}
        self._updates: dict[tuple[int, int], Attachment] = {}
        self._recent: dict[int, tuple[int, bytes | bytearray]] = {}
        """By fragment, version and bytes of its newest update."""
        self._addends: dict[tuple[int, int], tuple[BlobId, ...]] = {}  # the inputs of each commit in `_updates`
        self._anchors: dict[tuple[int, int], tuple[rec.AnchorFetched, Attachment]] = {}
        """By fragment and version, anchors from nodes that were adopted or may be."""
        self._keys: dict[str, int] = {}  # of objects, with the segments of their records
        self._sources: weakref.WeakSet[UpdateSource] = weakref.WeakSet()
        self._lock = threading.Lock()  # held while a source is opened, and while `forget` decides

    def take(self, entry: Entry) -> None:
        match entry.record:
            case rec.InputStored(blob=blob):
                self._inputs[blob] = entry.attachment
            case rec.WindowCommitted(fragment=fragment, version=version, blobs=blobs, update_size=size):
                self._updates[fragment, version] = replace(entry.attachment, size=size)
                self._addends[fragment, version] = tuple(addend.blob for addend in blobs)
            case rec.AnchorFetched(anchor=anchor):
                self._anchors[anchor.fragment, anchor.version] = entry.record, entry.attachment
            case _:
                pass
        if entry.attachment.key:
            self._keys[entry.attachment.key] = entry.attachment.segment

    def pruned(self, first_segment: int) -> list[str]:
        """Keys of records in segments before this one; no longer known."""
        gone = [key for key, segment in self._keys.items() if segment < first_segment]
        for key in gone:
            del self._keys[key]
        return gone

    def update_key(self, fragment: int, version: int) -> str:
        with self._lock:
            place = self._updates.get((fragment, version))
        return "" if place is None else place.key

    def has_at_hand(self, fragment: int, version: int) -> bool:
        with self._lock:
            return not self._updates[fragment, version].key or self._recent.get(fragment, (-1,))[0] == version

    def take_older(self, older: "Attachments") -> None:
        """Those of records before."""
        self._inputs = older._inputs | self._inputs
        self._updates = older._updates | self._updates
        self._addends = older._addends | self._addends
        self._anchors = older._anchors | self._anchors
        self._keys = older._keys | self._keys

    @property
    def fetched(self) -> dict[int, rec.AnchorFetched]:
        """By fragment, the newest anchors from nodes in the journal."""
        return {fragment: record for (fragment, _), (record, _) in sorted(self._anchors.items(), key=lambda at: at[0])}

    def anchor(self, fragment: int, version: int) -> tuple[rec.AnchorFetched, Attachment]:
        return self._anchors[fragment, version]

    def input(self, blob: BlobId) -> Attachment | None:
        """Place of a delta; None if it was not stored, or is no longer needed."""
        return self._inputs.get(blob)

    def has_update(self, fragment: int, version: int) -> bool:
        return (fragment, version) in self._updates

    def update(self, fragment: int, version: int) -> Attachment:
        return self._updates[fragment, version]

    def addends(self, fragment: int, version: int) -> tuple[BlobId, ...]:
        return self._addends[fragment, version]

    def commit_bytes(self, fragment: int, version: int) -> int:
        """Of the update of a commit and of its deltas, as far as they are kept."""
        places = [self._inputs.get(blob) for blob in self._addends[fragment, version]]
        size = self._updates[fragment, version].size  # of an object it is about as much
        return size + sum(size if place.key else place.size for place in places if place is not None)

    def open_update(self, directory: Path, files: Files, fragment: int, version: int) -> UpdateSource:
        """A reader of an update, which stays in the journal while the reader exists."""
        with self._lock:
            newest, data = self._recent.get(fragment, (-1, None))
            held = data if newest == version else None
            source = UpdateSource(directory, files, self._updates[fragment, version], held)
            self._sources.add(source)
        return source

    def remember(self, fragment: int, version: int, update: bytes | bytearray) -> None:
        """Keep the newest update of a fragment in memory: all nodes are about to get it."""
        with self._lock:
            self._recent.pop(fragment, None)
            self._recent[fragment] = version, update
            while sum(len(data) for _, data in self._recent.values()) > MOST_RECENT_BYTES:
                del self._recent[next(iter(self._recent))]

    def forget(self, ledger: Ledger, restart_from: Sequence[int]) -> int:
        """Drop places that are no longer needed. Returns the first segment that is.

        Needed are: undecided inputs; commits that a restart may repeat, from version `restart_from` of each fragment
        on, or that a ledger remembers (the machine's may be one commit behind `ledger`), and their inputs; nodes'
        anchors that no snapshot holds yet; and what is being read.
        """
        oldest = [
            min(version - HISTORY_VERSIONS, snapshot + 1)
            for version, snapshot in zip(ledger.versions, restart_from, strict=True)
        ]
        kept = [key for key in self._updates if key[1] >= oldest[key[0]]]
        blobs = {*ledger.inputs, *(blob for key in kept for blob in self._addends[key])}
        self._addends = {key: self._addends[key] for key in kept}
        self._inputs = {blob: attachment for blob, attachment in self._inputs.items() if blob in blobs}
        with self._lock:
            self._updates = {key: self._updates[key] for key in kept}
            read = [source.attachment for source in self._sources]
        self._anchors = {key: found for key, found in self._anchors.items() if key[1] > restart_from[key[0]]}
        anchors = [attachment for _, attachment in self._anchors.values()]
        wanted = [*self._updates.values(), *self._inputs.values(), *anchors, *read]
        return min(attachment.segment for attachment in wanted)


# --- Recovery
#
# Used by a start, `journal verify` and `journal salvage`. A start reads the last segment, which begins with a summary
# of all earlier records, and then the records of older ones as far back as deltas and updates are needed. Of what is
# attached to these it reads the deltas of the commits that it repeats, and compares the outcome. Whatever differs, it
# verifies all of the journal and repeats the commits again. Damage is ignored if nothing needs the damaged part.

_log = logging.getLogger(__name__)

_RESTORED = 4  # fragments at a time: a disk gives one reader half of what it can
MOST_REUSED_BYTES = 256 << 20  # of buffers before a commit, which a later one is written into

Place = Callable[[Buffers], Buffers]  # puts the buffers of a fragment where they are kept
First = Callable[[], Sequence[Tensor]]  # draws or reads the anchors of version 0


def as_they_are(buffers: Buffers) -> Buffers:
    """The place where buffers were made: the only one in which a commit may write over them."""
    return buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A commit that is repeated if no snapshot holds it."""

    record: rec.WindowCommitted
    codecs: commits.Codecs


@dataclass(slots=True, kw_only=True)
class Recovery:
    directory: Path
    files: Files = DISK
    ledger: Ledger
    attachments: Attachments = field(default_factory=Attachments)
    buffers: list[Buffers] = field(default_factory=list)
    restart_from: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the last two snapshots of each fragment that are known to be good."""
    alarms: dict[str, str] = field(default_factory=dict)
    fault: JournalCorrupt | None = None  # the last damage that was passed over
    lost: bool = False  # the ledger is after a gap, and wrong until the next summary
    older: bool = False  # ignore snapshots newer than the ledger: the journal's end was lost
    adopted: dict[int, int] = field(default_factory=dict)  # Adopted versions by fragment: they may have no snapshot
    unread: list[int] = field(default_factory=list)  # older segments that were not looked at
    unverified: list[int] = field(default_factory=list)  # these, and those of which only the records were read
    first: First | None = None
    drawing: threading.Lock = field(default_factory=threading.Lock)  # for its numbers the state of torch is changed
    done: dict[int, dict[int, _Done]] = field(default_factory=dict)
    """Commits that can be repeated, by fragment and version."""
    pool: Pool = field(default_factory=lambda: Pool(MOST_REUSED_BYTES))

    @classmethod
    def begin(cls, directory: Path, items: Items, files: Files = DISK) -> "Recovery":
        """Begin with the first record that allows it. Raises JournalCorrupt, StateMismatch: there is none."""
        gaps = [item for item in items if isinstance(item, Gap)]
        for item in items if gaps else items[:1]:
            if isinstance(item, Entry) and item.begins_a_journal:
                ledger = ledger_of(directory, item.record)
                return cls(directory=directory, files=files, ledger=ledger, lost=item is not items[0])
        if gaps:
            raise gaps[0].fault
        raise Inconsistent(directory, "its journal does not begin with a run's start")

    def take(self, item: Entry | Gap) -> None:
        """Take the next item of the journal. Raises StateMismatch: a record does not fit those before it."""
        if isinstance(item, Gap):
            self.fault, self.lost = item.fault, True
            return
        record = item.record
        if self.lost and item.begins_a_journal:
            self.ledger, self.lost = ledger_of(self.directory, record), False
        if isinstance(record, rec.Adopted):
            self.adopted |= {anchor.fragment: anchor.version for anchor in record.anchors}
        self.attachments.take(item)
        if self.lost:
            return
        try:
            if isinstance(record, rec.WindowCommitted):
                codecs = commits.codecs_of(self.ledger, record)
                self.done.setdefault(record.fragment, {})[record.version] = _Done(record=record, codecs=codecs)
            self.ledger.apply(record)
        except (AssertionError, LookupError) as error:
            what = f"record {item.sequence} ({type(record).__name__}) does not fit the records before it"
            raise Inconsistent(self.directory, what) from error

    def take_older(self, segments: Segments, *, trusting: bool) -> None:
        """Take the newest segment that was not read: where its bulk bytes are, and its commits, which can be repeated.

        Its ledger is its own, from the summary that it begins with.
        """
        older = Recovery(directory=self.directory, files=self.files, ledger=self.ledger, lost=True)
        for item in segments.items_of(self.unread.pop(), trusting=trusting):
            older.take(item)
        self.attachments.take_older(older.attachments)
        for fragment, done in older.done.items():
            self.done[fragment] = done | self.done.get(fragment, {})
        self.adopted = older.adopted | self.adopted
        self.fault = self.fault or older.fault

    def lacks(self, saved: Sequence[int]) -> bool:
        """Whether a start needs something of older segments: updates that a peer can request, commits after the newest
        snapshots, which are of the versions `saved`, and their deltas; and undecided deltas."""
        ledger, found = self.ledger, self.attachments
        fragments = ledger.spec.identity.layout.fragments
        remembered = [
            key for key, known in ledger.commits.items() if known.size < more_than_a_snapshot(fragments[key[0]])
        ]
        repeated = [
            (fragment, version)
            for fragment, newest in enumerate(ledger.versions)
            for version in range(saved[fragment] + 1, newest + 1)
        ]
        if not all(found.has_update(*key) for key in (*remembered, *repeated)):
            return True
        spooled = repeated if commits.spools_inputs(ledger.spec.terms) else ()
        blobs = [*ledger.inputs, *(blob for key in spooled for blob in found.addends(*key))]
        return any(found.input(blob) is None for blob in blobs)

    def restore(self, place: Place = as_they_are, *, trusting: bool = False) -> None:
        """The buffers of every fragment, where `place` puts them. `trusting`: each commit that is repeated is written
        over the buffers before it, and one that differs is an error.

        Raises:
            JournalCorrupt: the damage that was passed over matters.
            SnapshotCorrupt, StateMismatch, StorageFailed
        """

        def restored(index: int) -> tuple[Buffers, int]:
            buffers, saved = self._restore(index, trusting)
            return place(buffers), saved

        with ThreadPoolExecutor(_RESTORED, "restore") as pool:
            found = list(pool.map(restored, range(len(self.ledger.versions))))
        self.buffers, self.restart_from = [buffers for buffers, _ in found], [(saved, saved) for _, saved in found]
        if self.fault is not None:
            self.alarms["journal"] = passed_over(self.fault)

    def leads_on(self, index: int, version: int) -> bool:
        """Whether commits lead from a snapshot of this version to the fragment's newest."""
        newest = self.ledger.versions[index]
        done = self.done.get(index, {})
        return version <= newest and all(following in done for following in range(version + 1, newest + 1))

    def _drawn(self, index: int, fault: SnapshotCorrupt) -> snapshots.Snapshot:
        """Version 0 as it was drawn or read when the run began, where no good snapshot is left and every commit is.
        Raises `fault`."""
        with self.drawing:
            anchors = self.first() if self.first is not None and self.leads_on(index, 0) else ()
        identity = self.ledger.spec.identity
        if index >= len(anchors) or digest(anchors[index]) != identity.anchor_digests[index]:
            raise fault
        what = f"snapshot of fragment {index}"
        self.alarms[what] = f"version 0 was made anew from the run's settings: {fault}"
        _log.warning("alarm what=%r why=%r", what, self.alarms[what])
        first = Buffers.begin(anchors[index], self.ledger.spec.terms)
        return snapshots.of_buffers(identity.fingerprint(), index, first)

    def _restore(self, index: int, trusting: bool) -> tuple[Buffers, int]:
        """The buffers, from the newest good snapshot and every later commit; the snapshot's version. Any thread."""
        newest, fingerprint = self.ledger.versions[index], self.ledger.spec.identity.fingerprint()
        at_most = newest if self.older else None
        try:
            snapshot = snapshots.load_latest(
                self.directory, index, fingerprint=fingerprint, files=self.files, at_most=at_most
            )
        except SnapshotCorrupt as fault:
            snapshot = self._drawn(index, fault)
        if snapshot is None:
            raise Inconsistent(self.directory, f"there is no snapshot of fragment {index}")
        if snapshot.version < self.adopted.get(index, 0):  # it died before there was one
            buffers = fetched(self.directory, self.ledger, self.attachments, index, self.adopted[index], self.files)
        else:
            buffers = buffers_of(snapshot)
        done = self.done.get(index, {})
        while (commit := done.get(buffers.version + 1)) is not None and buffers.version < newest:
            before, buffers = buffers, self._repeat(buffers, commit, trusting)
            kept = {tensor.data_ptr() for tensor in buffers.tensors}
            self.pool.give([tensor for tensor in before.tensors if tensor.data_ptr() not in kept])
        if buffers.version != newest:
            if self.fault is not None:
                raise self.fault
            found = f"snapshot and journal lead to version {buffers.version} of fragment {index}"
            raise Inconsistent(self.directory, f"{found}, the last commit is {newest}")
        return buffers, snapshot.version

    def repeat_next(self, index: int) -> Buffers:
        """The fragment's buffers after the commit that was taken last; they are its buffers before.
        Raises StateMismatch, StorageFailed."""
        buffers = self.buffers[index]
        return self._repeat(buffers, self.done[index].pop(buffers.version + 1))

    def _repeat(self, buffers: Buffers, commit: _Done, trusting: bool = False) -> Buffers:
        """Repeat one commit: the anchor from the update, the rest from the inputs."""
        record, read = commit.record, partial(attached, self.directory, files=self.files)
        update = partial(read, self.attachments.update(record.fragment, record.version))
        places = [self.attachments.input(addend.blob) for addend in record.blobs]
        spooled = [(read(place), addend.weight) for place, addend in zip(places, record.blobs, strict=True) if place]
        inputs = spooled if len(spooled) == len(places) else None
        last = record.version == self.ledger.versions[record.fragment]
        try:
            restored, same = commits.repeat(
                self.ledger, buffers, record, update, inputs, commit.codecs, self.pool, expendable=trusting, last=last
            )
        except (commits.WrongAnchor, BadBlob) as error:
            raise Inconsistent(self.directory, str(error)) from error
        if not same:
            what = f"optimizer of fragment {record.fragment}"
            why = f"its state of version {record.version} differed when the restart recomputed it"
            if trusting and inputs is not None:
                raise Inconsistent(self.directory, f"{what}: {why}")
            _log.warning("alarm what=%r why=%r", what, why)
            self.alarms[what] = why
        return restored


def passed_over(fault: StorageError) -> str:
    """The alarm for damage that did not matter."""
    why = f"damaged where the start did not need the data: {fault}"
    _log.warning("alarm what='journal' why=%r", why)
    return why


def recovered(
    segments: Segments, place: Place = as_they_are, *, everything: bool = False, first: First | None = None
) -> Recovery:
    """The state of a folder, from as much of its journal as that needs, or from `everything`.
    Raises JournalCorrupt: damage that matters, or of the last segment.
    Raises StorageError: no good snapshot of a fragment; journal and snapshots do not fit together."""
    segments.require_end()
    # Of damage, also of a record that still passes for one, and leads anywhere: see what all says.
    damage = (JournalCorrupt, SnapshotCorrupt, StateMismatch, CodecError, ValueError, LookupError, AssertionError)
    try:
        return _recovered(segments, place, first, trusting=True, everything=everything)
    except damage as error:
        _log.info("the whole journal is verified why=%r", str(error) or type(error).__name__)
    return _recovered(segments, place, first, trusting=False, everything=True)


def _recovered(segments: Segments, place: Place, first: First | None, *, trusting: bool, everything: bool) -> Recovery:
    directory, files, numbers = segments.directory, segments.files, list(segments.all_numbers)
    items: list[Entry | Gap] = []
    while numbers and not any(isinstance(item, Entry) and item.begins_a_journal for item in items):
        items[:0] = segments.items_of(numbers.pop())
    recovery = Recovery.begin(directory, items, files)
    recovery.unread, recovery.first = numbers, first
    recovery.unverified = list(numbers) if trusting else []
    for item in items:
        recovery.take(item)
    saved = [
        max(snapshots.versions_of(directory, fragment, files), default=-1)
        for fragment in range(len(recovery.ledger.versions))
    ]
    while recovery.unread and (everything or recovery.lacks(saved)):
        recovery.take_older(segments, trusting=trusting)
    if (recovery.lost or recovery.lacks(saved)) and (recovery.fault is not None or trusting):
        raise recovery.fault or Inconsistent(directory, "a record that is needed is missing")
    for place_of in filter(None, map(recovery.attachments.input, recovery.ledger.inputs)):
        if place_of.segment in recovery.unverified and (fault := segments.scan(place_of.segment).fault) is not None:
            raise fault  # a window may close with this delta as soon as the run goes on
    recovery.restore(place, trusting=trusting)
    return recovery


def named_anchors(layout: Layout, buffers: Sequence[Buffers]) -> dict[str, Tensor]:
    """The global model: every parameter by name, fp32, to be read alone.

    Views of the anchors, which no commit changes in place; a tensor that is split between fragments is a copy.
    """
    shapes, named = whole_shapes(layout.fragments), dict[str, Tensor]()
    for fragment in layout.fragments:
        for tensor in fragment.tensors:
            part = view(buffers[fragment.index].anchor, tensor)
            if tensor.rows is None:
                named[tensor.name] = part
                continue
            if tensor.name not in named:
                named[tensor.name] = torch.empty(shapes[tensor.name], dtype=torch.float32, device="cpu")
            rows_of(named[tensor.name], tensor).copy_(part)
    return named


def newest_model(directory: Path) -> tuple[Ledger, dict[str, Tensor]]:
    """What the folder of a run holds, whether its coordinator runs or not: its ledger and `named_anchors`.

    Raises StorageError: the folder holds no run, or is damaged.
    """
    journal_folder(directory)
    found = steadily(lambda: recovered(Segments(directory)))
    return found.ledger, named_anchors(found.ledger.spec.identity.layout, found.buffers)


def refuse_a_lost_journal(directory: Path, files: Files = DISK) -> None:
    """Refuse to begin a new run in a folder whose journal is gone while the snapshots of a run are there.
    Raises StateMismatch: there are snapshots of a run, and not its journal."""
    folder = directory / "snapshots"
    found = files.names(folder) if files.is_directory(folder) else []
    versions = [version for name in found if (version := snapshots.version_in(name)) is not None]
    if not versions or (segment_numbers(directory, files) and not any(versions)):  # a begin that a crash cut short
        return
    raise StateMismatch(
        directory,
        f"holds {len(versions)} snapshots, the newest of version {max(versions)}, but no record of a journal: that "
        "was deleted or lost. Put the files journal-*.log back. Without them: with --restore URL and an empty --state "
        "DIR, the run goes on from the newest copy in an object store; over that copy, or over an old copy of this "
        "folder, --adopt-from-nodes goes on from what the nodes hold, and --rewind discards what they hold and goes on "
        "from the copy. To begin a new run at version 0, give an empty --state DIR",
    )


def refusal(directory: Path, files: Files = DISK) -> StorageError | None:
    """Why a start would refuse the folder; None if it would not. Uses the code of a start; changes nothing.

    Raises NoRoom: no file can be opened now.
    """
    try:
        refuse_half_salvaged(directory, files)
        segments = Segments(directory, files)
        if segments.hold_anything:
            recovered(segments)
        else:
            refuse_a_lost_journal(directory, files)
        claimed_epoch(directory, files)
    except NoRoom:
        raise
    except StorageError as error:
        return error
    return None


def buffers_of(snapshot: snapshots.Snapshot) -> Buffers:
    tensors = dict(snapshot.tensors)
    anchor, target = tensors.pop("anchor"), tensors.pop("target")
    return Buffers(version=snapshot.version, anchor=anchor, target=target, outer=tensors)


def fetched(
    directory: Path, ledger: Ledger, attachments: Attachments, index: int, version: int, files: Files
) -> Buffers:
    """Buffers of an anchor from a node. Raises StateMismatch, StorageFailed."""
    record, place = attachments.anchor(index, version)
    fragment, data = ledger.spec.identity.layout.fragments[index], attached(directory, place, files)
    try:
        anchor = commits.fetched_anchor(data, fragment, record.anchor)
    except BadBlob as error:
        raise Inconsistent(directory, f"the anchor that {record.node} brought: {error}") from error
    return commits.adopted(anchor, record.anchor.version, ledger.spec.terms)
