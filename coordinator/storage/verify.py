"""Verify a state directory against everything that it promises, and repeat its commits. Read-only."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from farloop.algo.spec import BlobId
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import SnapshotCorrupt, StateMismatch, StorageError, StorageFailed
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.journal import claimed_epoch
from farloop.coordinator.storage.recovery import buffers_of, refusal
from farloop.coordinator.storage.segment import Attachment, Entry, Gap, Items, Segments, segment_numbers, segment_path
from farloop.coordinator.storage.state_reader import attached, journal_folder, ledger_of, steadily, with_ledger
from farloop.quant.digest import digest
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.wire.blobs import blob_digest

# --- Replay: commits repeated from the journal and compared bit for bit
#
# Beginning at a snapshot, every window is summed, stepped and encoded anew from its stored deltas. All of the outcome
# is compared: the update's bytes, the digests of anchor, target and outer state, and the terms that followed from it.


@dataclass(frozen=True, slots=True)
class CommitComparison:
    """A recorded digest and the replayed one."""

    name: str
    recorded: int | None
    found: int | None

    @property
    def same(self) -> bool:
        return self.recorded == self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One replayed commit."""

    where: str
    fragment: int
    version: int
    deltas: int
    from_deltas: bool
    """False if deltas are not stored (data-parallel): then only the anchor is replayed, from the update."""
    compared: tuple[CommitComparison, ...]
    trouble: str = ""  # why it could not be replayed

    @property
    def same(self) -> bool:
        return not self.trouble and all(comparison.same for comparison in self.compared)


def span(directory: Path, items: Items) -> dict[int, tuple[int, int]]:
    """First and last version of every fragment that can be replayed; an empty span has first > last."""
    known: dict[int, list[int]] = {}  # without a gap up to the newest
    newest: dict[int, int] = {}
    for at, ledger in with_ledger(directory, items):
        record = at.record
        if ledger is not None:
            newest |= enumerate(ledger.versions)
        if isinstance(record, rec.WindowCommitted):
            before = known.get(record.fragment, [])
            follows = ledger is not None and (not before or before[-1] == record.version - 1)
            known[record.fragment] = [*(before if follows else []), *([record.version] if ledger is not None else [])]
            newest[record.fragment] = record.version
        for anchor in record.anchors if isinstance(record, rec.Adopted) else ():
            known[anchor.fragment], newest[anchor.fragment] = [], anchor.version  # nothing leads there
    spans: dict[int, tuple[int, int]] = {}
    for fragment, last in newest.items():
        oldest = min(known.get(fragment, []), default=last + 1)
        begins = [v + 1 for v in snapshots.versions_of(directory, fragment) if v + 1 >= oldest]
        spans[fragment] = (min(begins, default=last + 1), last)
    return spans


def replay(directory: Path, items: Items, wanted: dict[int, tuple[int, int]]) -> Iterator[ReplayResult]:
    """Make commits again: of each fragment in `wanted` those from the first to the last version.
    A fragment whose commit does not come out is not followed any further.
    Raises StateMismatch: there is no snapshot to begin from. Raises StorageError: the folder cannot be read."""
    buffers: dict[int, Buffers] | None = None
    inputs: dict[BlobId, Attachment] = {}
    for at, ledger in with_ledger(directory, items):
        if (blob := _spooled(at.record)) is not None:
            inputs[blob] = at.attachment
        if ledger is None or not isinstance(at.record, rec.WindowCommitted):
            continue
        if buffers is None:
            fingerprint = ledger.spec.identity.fingerprint()
            buffers = {f: _begin(directory, f, first, fingerprint) for f, (first, _) in wanted.items()}
        held, (first, last) = buffers.get(at.record.fragment), wanted.get(at.record.fragment, (0, -1))
        if held is not None and at.record.version == held.version + 1 and at.record.version <= last:
            again, following = _again(directory, ledger, held, at, inputs)
            if following is None:
                del buffers[at.record.fragment]
            else:
                buffers[at.record.fragment] = following
            if at.record.version >= first or following is None:
                yield again


def _spooled(record: rec.Record) -> BlobId | None:
    return record.blob if isinstance(record, rec.InputStored) else None


def _begin(directory: Path, fragment: int, first: int, fingerprint: str) -> Buffers:
    """State of the fragment at its newest snapshot before version `first`."""
    found = snapshots.load_latest(directory, fragment, fingerprint=fingerprint, at_most=first - 1)
    if found is None:
        raise StateMismatch(directory, f"no snapshot of fragment {fragment} is older than version {first}")
    return buffers_of(found)


def _again(
    directory: Path, ledger: Ledger, held: Buffers, at: Entry, inputs: dict[BlobId, Attachment]
) -> tuple[ReplayResult, Buffers | None]:
    """Replay the commit at `at`. Returns the buffers after it, None if it differs."""
    record = at.record
    assert isinstance(record, rec.WindowCommitted)
    merged = [addend.blob for addend in record.blobs]
    places = [inputs.get(blob) for blob in (*merged, *commits.apart(record))]
    stored = [attached(directory, place) for place in places if place is not None]
    from_deltas = len(stored) == len(places)
    compared: tuple[CommitComparison, ...] = ()
    following: Buffers | None = None
    trouble = ""
    try:
        if from_deltas:
            addends = [(data, addend.weight) for data, addend in zip(stored, record.blobs, strict=False)]
            result = commits.compute(ledger, held, record, addends, stored[len(merged) :])
            again = commits.completed(record, result)
            compared = (
                CommitComparison("update", record.update_digest, again.update_digest),
                CommitComparison("anchor", record.anchor_digest, again.anchor_digest),
                CommitComparison("target", record.target_digest, again.target_digest),
                CommitComparison("outer state", record.momentum_digest, again.momentum_digest),
            )
            if rec.encode(again) == rec.encode(record):
                following = result.buffers
            elif all(comparison.same for comparison in compared):
                trouble = "the terms of the next window differ after replay"
        else:
            update = attached(directory, at.attachment)
            codecs = commits.codecs_of(ledger, record)
            following, _ = commits.repeat(ledger, held, record, lambda: update, None, codecs)
            compared = (
                CommitComparison("update", record.update_digest, blob_digest(update)),
                CommitComparison("anchor", record.anchor_digest, digest(following.anchor)),
            )
    except (BadBlob, NonFiniteError, commits.WrongAnchor) as error:
        trouble = str(error)
    replayed = ReplayResult(
        where=at.where,
        fragment=record.fragment,
        version=record.version,
        deltas=len(record.blobs),
        from_deltas=from_deltas,
        compared=compared,
        trouble=trouble,
    )
    return replayed, following


# --- Verification
#
# Digests and salts of every segment, record and attachment; sequences without a gap; epochs that rise; the ledger's
# invariants after every record, and its summaries; snapshots by checksum, by the digests of their commits, and as
# beginnings from which a restart would come to the newest version.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    where: str  # a file of the state folder, with a byte of it where that is known
    what: str


@dataclass(slots=True, kw_only=True)
class Report:
    """Counts of what was verified, and the faults."""

    run: str = ""
    segments: int = 0
    records: int = 0
    attached_bytes: int = 0
    deltas: int = 0
    updates: int = 0
    epochs: int = 0
    epoch: int = 0
    versions: list[int] = field(default_factory=list)
    snapshots: int = 0
    objects_missing: int = 0  # that the object store does not give: all of them are one fault
    torn: str = ""  # of a torn tail, which is no damage; empty without one
    faults: list[Fault] = field(default_factory=list)
    refused: str = ""  # why a start would refuse the folder, by the code of a start; empty where it would go on


class _Damaged(StorageError):
    """Faults were found, perhaps because the folder is in use."""


def verify(directory: Path, files: Files = DISK) -> Report:
    """Look at everything, as the disk has it and not the cache, where the system can do that.
    Raises StateMismatch: there is no journal. Raises StorageFailed: the disk refused a read, other than of a damaged
    file."""
    journal_folder(directory, files)
    _forget(directory, files)
    reports: list[Report] = []

    def look() -> Report:
        reports.append(_Verifier(directory, files).look())
        if reports[-1].faults:
            raise _Damaged(directory, "; ".join(f"{fault.where}: {fault.what}" for fault in reports[-1].faults))
        return reports[-1]

    try:
        return steadily(look)
    except _Damaged:
        return reports[-1]


def _forget(directory: Path, files: Files) -> None:
    folder = directory / "snapshots"
    paths = [segment_path(directory, number) for number in segment_numbers(directory, files)]
    paths += [folder / name for name in (files.names(folder) if files.is_directory(folder) else [])]
    for path in paths:
        with suppress(FileNotFoundError):  # a coordinator is at work
            files.forget(path)


class _Verifier:
    def __init__(self, directory: Path, files: Files) -> None:
        self._directory, self._files = directory, files
        self._segments = Segments(directory, files)
        self._report = Report(segments=len(self._segments.numbers))
        self._anchors: dict[tuple[int, int], tuple[int, int]] = {}
        """Digests of anchor and target in the journal's commits, by fragment and version."""
        self._taken: dict[int, int] = {}  # version of the newest snapshot that the journal says there is, by fragment
        self._adopted: dict[int, int] = {}  # by fragment, adopted versions whose bytes are in the journal
        self._asked, self._gone = 0, list[str]()  # objects of records, and those that the store does not give
        self._away = False  # whether it gave no answer
        self._ledger: Ledger | None = None
        self._lost = False  # the ledger is that of before damage, until the next summary

    def look(self) -> Report:
        for item in self._segments.items():
            if isinstance(item, Gap):
                fault, self._lost = item.fault, True
                is_there = self._files.identity(fault.path) is not None
                self._fault(f"{fault.path.name} byte {fault.offset}" if is_there else fault.path.name, fault.detail)
            else:
                self._record(item)
        self._salts()
        if self._gone:
            self._report.objects_missing = len(self._gone)
            self._fault("object store", f"{len(self._gone)} of {self._asked} objects cannot be had, as {self._gone[0]}")
        if self._ledger is not None:
            if not self._lost:
                self._report.versions = list(self._ledger.versions)
                self._report.epoch = self._ledger.epoch
                self._epoch_file(self._ledger.epoch)
            self._snapshots(self._ledger)
        if (refused := refusal(self._directory, self._files)) is not None:
            self._report.refused = str(refused)
            if not self._report.faults:
                where = refused.path.name if refused.path != self._directory else "folder"
                self._fault(where, str(refused).removeprefix(f"{refused.path}: "))
        return self._report

    def _fault(self, where: str, what: str) -> None:
        self._report.faults.append(Fault(where=where, what=what))

    def _salts(self) -> None:
        salts = dict[int, str]()
        for found in map(self._segments.scan, self._segments.numbers):
            if found.salt and (other := salts.get(found.salt)):
                self._fault(found.path.name, f"has the salt of {other}: one is a copy of the other")
            salts[found.salt] = found.path.name
        if self._segments.numbers and (found := self._segments.last).torn_bytes:
            self._report.torn = (
                f"{found.path.name} byte {found.end}: {found.torn_bytes} bytes of a torn tail, or of a record that "
                "is being written; no peer was told of it, and a start removes it"
            )

    def _record(self, at: Entry) -> None:
        report, record = self._report, at.record
        where = f"{segment_path(self._directory, at.attachment.segment).name} byte {at.offset}, record {at.sequence}"
        report.records += 1
        report.attached_bytes += at.attachment.size
        if at.begins_a_journal and (self._lost or self._ledger is None):
            self._ledger, self._lost = ledger_of(self._directory, record), False
            report.run = self._ledger.spec.identity.name
            report.epochs = max(report.epochs, 1)
        elif self._lost:
            pass  # it cannot be compared with those before it
        elif self._ledger is None:
            ledger_of(self._directory, record)  # refuses it
        elif isinstance(record, rec.LedgerSaved) and rec.encode(record) != rec.encode(self._ledger.saved()):
            self._fault(where, "the ledger at the segment's beginning differs from the records before it")
            self._ledger = Ledger.resume(record)
        elif (wrong := self._out_of_turn(record)) is not None:
            self._fault(where, wrong)
            self._lost = True
            return
        match record:
            case rec.EpochClaimed():
                report.epochs += 1
            case rec.AnchorFetched(blob_digest=expected):
                self._attached(at, where, "anchor", expected, None)
            case rec.Adopted(anchors=anchors):
                report.epochs += 1
                self._adopted |= {anchor.fragment: anchor.version for anchor in anchors}
            case rec.InputStored(digest=expected):
                report.deltas += 1
                self._attached(at, where, "delta", expected, None)
            case rec.WindowCommitted(fragment=fragment, version=version, update_digest=expected, update_size=size):
                report.updates += 1
                self._attached(at, where, "update", expected, size)
                self._anchors[fragment, version] = record.anchor_digest, record.target_digest
            case rec.SnapshotTaken(fragment=fragment, version=version):
                self._taken[fragment] = version
            case _:
                pass
        if self._lost or self._ledger is None:
            return
        try:
            self._ledger.apply(record)
            self._ledger.check()
        except (AssertionError, LookupError):
            self._fault(where, "the ledger's invariants fail after this record")
            self._lost = True

    def _out_of_turn(self, record: rec.Record) -> str | None:
        """Why this record cannot follow the ones before it."""
        assert self._ledger is not None
        match record:
            case rec.EpochClaimed(epoch=epoch) if epoch <= self._ledger.epoch:
                return f"epoch {epoch} is claimed after epoch {self._ledger.epoch}"
            case rec.Adopted(epoch=epoch) if epoch <= self._ledger.epoch:
                return f"what nodes held is adopted in epoch {epoch} after epoch {self._ledger.epoch}"
            case rec.Adopted(anchors=anchors) if not all(0 <= a.fragment < len(self._ledger.versions) for a in anchors):
                return "an anchor of an unknown fragment is adopted"
            case rec.WindowCommitted(fragment=fragment, version=version):
                if not 0 <= fragment < len(self._ledger.versions):
                    return f"there is no fragment {fragment}"
                if version != (newest := self._ledger.versions[fragment]) + 1:
                    return f"version {version} of fragment {fragment} follows version {newest}"
                if fragment not in self._ledger.windows:
                    return f"version {version} of fragment {fragment} is committed, and it was final"
            case rec.TermsChanged(revision=revision):
                if (number := revision.number) != (newest := self._ledger.spec.revision) + 1:
                    return f"revision {number} of the terms follows revision {newest}"
                if (given := len(revision.windows)) != (count := len(self._ledger.versions)):
                    return f"revision {number} of the terms is for {given} fragments, and there are {count}"
            case rec.RunStarted():
                return "the run begins in the middle of a journal"
            case _:
                pass
        return None

    def _attached(self, at: Entry, where: str, what: str, expected: int, size: int | None) -> None:
        self._asked += bool(at.attachment.key)
        if at.attachment.key and self._away:  # nor waits for each of many
            return self._gone.append(at.attachment.key)
        try:
            data = attached(self._directory, at.attachment, self._files)
        except StorageFailed as error:
            if not at.attachment.key:
                raise
            self._away = error.retriable
            return self._gone.append(error.detail)
        if size is not None and len(data) != size:
            self._fault(where, f"its {what} has {len(data)} bytes, not {size}")
        elif blob_digest(data) != expected:
            self._fault(where, f"its {what} does not match its recorded digest")

    def _epoch_file(self, epoch: int) -> None:
        try:
            claimed = claimed_epoch(self._directory, self._files)
        except StorageFailed as error:
            return self._fault("epoch", error.detail)
        if claimed < epoch:
            self._fault("epoch", f"the file says {claimed}, the journal {epoch}")

    def _snapshots(self, ledger: Ledger) -> None:
        good: dict[int, list[int]] = {index: [] for index in range(len(ledger.versions))}
        fingerprint = ledger.spec.identity.fingerprint()
        folder = self._directory / "snapshots"
        names = sorted(self._files.names(folder)) if self._files.is_directory(folder) else []
        for path in (folder / name for name in names if name.endswith(".safetensors")):
            self._report.snapshots += 1
            try:
                found = snapshots.load(path, self._files, fingerprint=fingerprint)
            except SnapshotCorrupt as error:
                self._fault(f"snapshots/{path.name}", error.detail)
                continue
            if found.fragment not in good:
                self._fault(f"snapshots/{path.name}", f"there is no fragment {found.fragment}")
            elif wrong := self._unlike_its_commit(found, ledger):
                self._fault(f"snapshots/{path.name}", wrong)
            else:
                good[found.fragment].append(found.version)
        for fragment, version in self._adopted.items():
            good[fragment].append(version)
        for fragment, versions in good.items():
            taken, newest = self._taken.get(fragment), ledger.versions[fragment]
            if taken is not None and taken > max(
                snapshots.versions_of(self._directory, fragment, self._files), default=-1
            ):
                self._fault(f"snapshots/f{fragment}-v{taken}.safetensors", "recorded in the journal, and missing")
            if self._lost:
                continue
            least = max(versions, default=-1) + 1
            if not versions or any((fragment, version) not in self._anchors for version in range(least, newest + 1)):
                self._fault("snapshots", f"no valid snapshot of fragment {fragment} leads to version {newest}")

    def _unlike_its_commit(self, found: snapshots.Snapshot, ledger: Ledger) -> str | None:
        measured = digest(found.tensors["anchor"]), digest(found.tensors["target"])
        recorded = self._anchors.get((found.fragment, found.version))
        known = ledger.anchor_digest(found.fragment, found.version)
        if recorded is None and known is not None:
            recorded = known, measured[1]
        for name, has, should in zip(("anchor", "target"), measured, recorded or measured, strict=True):
            if has != should:
                return f"its {name} has digest {has:016x}, that of the commit is {should:016x}"
        return None
