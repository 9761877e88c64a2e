"""Commits made again from what the journal holds of them, and compared with what was recorded, bit for bit. Read-only.

Beginning at a snapshot, every window is summed, stepped and encoded anew from its stored deltas. All of the outcome is
compared: the update's bytes, the digests of anchor, target and outer state, and the terms that followed from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farloop.algo.digest import digest
from farloop.algo.spec import BlobId
from farloop.coordinator import commits, snapshots
from farloop.coordinator import records as rec
from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.errors import SnapshotCorrupt, StateMismatch
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.reading import Placed, attached, ledger_of, placed
from farloop.coordinator.segment import Attachment, Scan
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.wire.blobs import blob_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One digest, as recorded and as it came out."""

    name: str
    recorded: int | None
    found: int | None

    @property
    def same(self) -> bool:
        return self.recorded == self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One commit made again."""

    where: str
    fragment: int
    version: int
    deltas: int
    from_deltas: bool
    """False where deltas are not stored (data-parallel): then the anchor alone is made, from the update."""
    compared: tuple[Comparison, ...]
    trouble: str = ""
    """Why it could not be made again at all."""

    @property
    def same(self) -> bool:
        return not self.trouble and all(comparison.same for comparison in self.compared)


def span(directory: Path, scans: list[Scan]) -> dict[int, tuple[int, int]]:
    """First and last version of every fragment that can be made again; an empty span has first > last."""
    first = next((record for scan in scans for record in placed(scan)), None)
    if first is None:
        return {}
    ledger = ledger_of(directory, first.record)
    known: dict[int, list[int]] = {fragment: [] for fragment in range(len(ledger.versions))}
    newest = dict(enumerate(ledger.versions))
    for scan in scans:
        for record in placed(scan):
            if isinstance(record.record, rec.WindowCommitted):
                known[record.record.fragment].append(record.record.version)
                newest[record.record.fragment] = record.record.version
            for anchor in record.record.anchors if isinstance(record.record, rec.Adopted) else ():
                known[anchor.fragment], newest[anchor.fragment] = [], anchor.version  # nothing leads there
    spans: dict[int, tuple[int, int]] = {}
    for fragment, versions in known.items():
        oldest = min(versions, default=newest[fragment] + 1)
        begins = [v + 1 for v in snapshots.versions_of(directory, fragment) if v + 1 >= oldest]
        spans[fragment] = (min(begins, default=newest[fragment] + 1), newest[fragment])
    return spans


def replay(directory: Path, scans: list[Scan], wanted: dict[int, tuple[int, int]]) -> Iterator[Replayed]:
    """Make commits again: of each fragment in `wanted` those from the first to the last version.

    A fragment whose commit does not come out is not followed any further.

    Raises:
        StateMismatch: there is no snapshot to begin from.
        StorageError: the folder cannot be read.
    """
    buffers: dict[int, Buffers] = {}
    inputs: dict[BlobId, Attachment] = {}
    ledger: Ledger | None = None
    for scan in scans:
        for at in placed(scan):
            if ledger is None:
                ledger = ledger_of(directory, at.record)
                fingerprint = ledger.spec.identity.fingerprint()
                buffers = {f: _begin(directory, f, first, fingerprint) for f, (first, _) in wanted.items()}
            if (blob := _spooled(at.record)) is not None:
                inputs[blob] = at.attachment
            if isinstance(at.record, rec.WindowCommitted):
                held, (first, last) = buffers.get(at.record.fragment), wanted.get(at.record.fragment, (0, -1))
                if held is not None and at.record.version == held.version + 1 and at.record.version <= last:
                    again, following = _again(directory, ledger, held, at, inputs)
                    if following is None:
                        del buffers[at.record.fragment]
                    else:
                        buffers[at.record.fragment] = following
                    if at.record.version >= first or following is None:
                        yield again
            ledger.apply(at.record)


def _spooled(record: rec.Record) -> BlobId | None:
    return record.blob if isinstance(record, rec.InputStored) else None


def _begin(directory: Path, fragment: int, first: int, fingerprint: str) -> Buffers:
    """The state of the fragment at the newest snapshot before version `first`."""
    fault = None
    for version in reversed([v for v in snapshots.versions_of(directory, fragment) if v < first]):
        try:
            found = snapshots.load(snapshots.snapshot_path(directory, fragment, version))
        except SnapshotCorrupt as error:
            fault = fault or error
            continue
        if found.fingerprint == fingerprint:
            tensors = dict(found.tensors)
            anchor, target = tensors.pop("anchor"), tensors.pop("target")
            return Buffers(version=version, anchor=anchor, target=target, outer=tensors)
    if fault is not None:
        raise fault
    raise StateMismatch(directory, f"no snapshot of fragment {fragment} is older than version {first}")


def _again(
    directory: Path, ledger: Ledger, held: Buffers, at: Placed, inputs: dict[BlobId, Attachment]
) -> tuple[Replayed, Buffers | None]:
    """The commit at `at`, made again, and the buffers after it; None where it did not come out."""
    record = at.record
    assert isinstance(record, rec.WindowCommitted)
    merged = [addend.blob for addend in record.blobs]
    places = [inputs.get(blob) for blob in (*merged, *commits.apart(record))]
    stored = [attached(directory, place) for place in places if place is not None]
    from_deltas = len(stored) == len(places)
    compared: tuple[Comparison, ...] = ()
    following: Buffers | None = None
    trouble = ""
    try:
        if from_deltas:
            addends = [(data, addend.weight) for data, addend in zip(stored, record.blobs, strict=False)]
            result = commits.compute(ledger, held, record, addends, stored[len(merged) :])
            again = commits.completed(record, result)
            compared = (
                _compare("update", record.update_digest, again.update_digest),
                _compare("anchor", record.anchor_digest, again.anchor_digest),
                _compare("target", record.target_digest, again.target_digest),
                _compare("outer state", record.momentum_digest, again.momentum_digest),
            )
            if again == record:
                following = result.buffers
            elif all(comparison.same for comparison in compared):
                trouble = "the terms of the next window came out different"
        else:
            update = attached(directory, at.attachment)
            codecs = commits.codecs_of(ledger, record)
            following, _ = commits.repeat(ledger, held, record, update, None, codecs)
            compared = (
                _compare("update", record.update_digest, blob_digest(update)),
                _compare("anchor", record.anchor_digest, digest(following.anchor)),
            )
    except (BadBlob, NonFiniteError, commits.WrongAnchor) as error:
        trouble = str(error)
    replayed = Replayed(
        where=at.where,
        fragment=record.fragment,
        version=record.version,
        deltas=len(record.blobs),
        from_deltas=from_deltas,
        compared=compared,
        trouble=trouble,
    )
    return replayed, following


def _compare(name: str, recorded: int | None, found: int | None) -> Comparison:
    return Comparison(name=name, recorded=recorded, found=found)
