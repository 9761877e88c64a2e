"""A state folder that no start accepts: the newest consistent state that is still in it, and a folder made of that.

Offline, and by a person's command alone. Every place in the journal up to which whole records and good snapshots give
all fragments is a candidate; the newest is taken. The new folder is like a restored copy: snapshots of that moment, the
epoch, and a journal of one record that holds the ledger. The old files are moved aside, never deleted.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from farloop.coordinator import records as rec
from farloop.coordinator import snapshots
from farloop.coordinator.copies import Cut
from farloop.coordinator.damage import Gap, read_damaged
from farloop.coordinator.epoch import claim_epoch, claimed_epoch
from farloop.coordinator.errors import JournalCorrupt, SnapshotCorrupt, StateMismatch, StorageError, StorageFailed
from farloop.coordinator.files import DISK, Files
from farloop.coordinator.journal import Journal
from farloop.coordinator.recovery import Items, Recovery, reader
from farloop.coordinator.segment import Entry, segment_numbers, segment_path

_log = logging.getLogger(__name__)

_FOLDER = "before-salvage"
"""The old files go to a sub-folder of this name and a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """What can be made of a folder."""

    run: str
    cut: Cut
    epoch: int
    """The highest that is known."""
    newest: tuple[int, ...]
    """The newest version of each fragment that anything in the folder speaks of."""
    deltas: int
    """Stored deltas without an outcome: nodes offer theirs again."""
    damage: tuple[str, ...]
    """Where, and what is there."""

    @property
    def versions(self) -> tuple[int, ...]:
        """That the run goes on from."""
        return self.cut.ledger.versions

    @property
    def given_up(self) -> tuple[tuple[int, int, int], ...]:
        """Fragment, first and last version, of what was committed and is lost."""
        pairs = enumerate(zip(self.versions, self.newest, strict=True))
        return tuple((fragment, kept + 1, newest) for fragment, (kept, newest) in pairs if newest > kept)


def salvage(directory: Path, files: Files = DISK) -> Salvage:
    """Find the newest consistent state. Changes nothing.

    Raises:
        StateMismatch: there is none.
        StorageFailed: the disk refused a read.
    """
    items, ends = _candidates(directory, read_damaged(directory, files), files)
    for end in reversed(ends):
        found = _taken(directory, items[:end], files)
        try:
            found.restore(reader(directory, files))
        except StorageError as error:
            _log.info("salvage passes over versions=%s why=%r", list(found.ledger.versions), str(error))
            continue
        return Salvage(
            run=found.ledger.spec.identity.name,
            cut=Cut.of(found.ledger.saved(), found.buffers),
            epoch=_highest_epoch(directory, items, files),
            newest=_newest(directory, items, len(found.ledger.versions), files),
            deltas=len(found.ledger.inputs),
            damage=tuple(str(item.fault) for item in items if isinstance(item, Gap)),
        )
    raise StateMismatch(
        directory,
        "no consistent state can be found in it: there is no place in the journal up to which good snapshots and whole "
        "records give every fragment. Use a copy of the folder, or --restore URL",
    )


def carry_out(directory: Path, found: Salvage, files: Files = DISK) -> Path:
    """Move the old files into a sub-folder, and write the state that was found. Returns the sub-folder.

    Raises:
        StateLocked: a coordinator is at work here; nothing was changed.
        NoRoom: nothing was changed.
        StorageFailed: the disk refused; the old files are here or in the sub-folder.
    """
    lock = files.lock(directory / "lock")
    try:
        nbytes = sum(tensor.nbytes for b in found.cut.buffers for tensor in (b.anchor, b.target, *b.outer.values()))
        files.require_free(directory, nbytes + (1 << 20))
        aside = _aside(directory, files)
        for number in sorted(segment_numbers(directory, files)):  # first: without a journal no start goes on
            files.move(segment_path(directory, number), aside / segment_path(directory, number).name)
        if "epoch" in files.names(directory):
            files.move(directory / "epoch", aside / "epoch")
        folder = directory / "snapshots"
        for name in files.names(folder) if files.is_directory(folder) else []:
            files.move(folder / name, aside / "snapshots" / name)
        fingerprint = found.cut.ledger.spec.identity.fingerprint()
        for fragment, buffers in enumerate(found.cut.buffers):
            snapshots.save(directory, snapshots.of_buffers(fingerprint, fragment, buffers), files)
        claim_epoch(directory, seen=found.epoch - 1, files=files)
    finally:
        lock.close()
    journal, _ = Journal.open(directory, files=files)
    with journal:
        journal.append(found.cut.ledger)
        journal.sync()
    return aside


def _taken(directory: Path, items: Items, files: Files) -> Recovery:
    found = Recovery.begin(directory, items, files)
    found.older = True
    for item in items:
        found.take(item)
    return found


def _candidates(directory: Path, items: Items, files: Files) -> tuple[list[Entry | Gap], list[int]]:
    """The journal, with a gap for every record that does not fit; and up to where in it all fragments can be had."""
    found = Recovery.begin(directory, items, files)
    good = _good_snapshots(found)
    understood: list[Entry | Gap] = []
    ends: list[int] = []
    whole = False
    for item in items:
        try:
            found.take(item)
        except StateMismatch as error:
            assert isinstance(item, Entry)
            path = segment_path(directory, item.attachment.segment)
            item = Gap(fault=JournalCorrupt(path, item.attachment.offset, error.detail))
            found.take(item)
        understood.append(item)
        if isinstance(item, Gap) or isinstance(item.record, _MOVES):
            whole = not found.lost and all(_can_be_had(found, f, good[f]) for f in range(len(found.ledger.versions)))
        if whole:
            ends.append(len(understood))
    return understood, ends


_MOVES = (rec.RunStarted, rec.LedgerSaved, rec.WindowCommitted, rec.Adopted)
"""Records after which other versions are the newest."""


def _can_be_had(found: Recovery, fragment: int, good: Sequence[int]) -> bool:
    begins = [*good, found.adopted[fragment]] if fragment in found.adopted else good
    return any(found.leads_on(fragment, version) for version in begins)


def _good_snapshots(found: Recovery) -> list[list[int]]:
    """Versions by fragment."""
    fingerprint = found.ledger.spec.identity.fingerprint()
    good: list[list[int]] = [[] for _ in found.ledger.versions]
    for fragment, versions in enumerate(good):
        for version in snapshots.versions_of(found.directory, fragment, found.files):
            path = snapshots.snapshot_path(found.directory, fragment, version)
            with suppress(SnapshotCorrupt):
                if snapshots.load(path, found.files).fingerprint == fingerprint:
                    versions.append(version)
    return good


def _highest_epoch(directory: Path, items: Items, files: Files) -> int:
    records = [item.record for item in items if isinstance(item, Entry)]
    claims = rec.RunStarted | rec.EpochClaimed | rec.Rewound | rec.Adopted | rec.LedgerSaved
    known = [record.epoch for record in records if isinstance(record, claims)]
    try:
        return max([*known, claimed_epoch(directory, files)])
    except StorageFailed as error:
        _log.warning("the file of the epoch is not used why=%r", str(error))
        return max(known)


def _newest(directory: Path, items: Items, count: int, files: Files) -> tuple[int, ...]:
    newest = [max(snapshots.versions_of(directory, fragment, files), default=0) for fragment in range(count)]

    def saw(fragment: int, version: int) -> None:
        newest[fragment] = max(newest[fragment], version)

    for item in items:
        match item:
            case Entry(record=rec.WindowCommitted(fragment=fragment, version=version)):
                saw(fragment, version)
            case Entry(record=rec.LedgerSaved(versions=versions)):
                for fragment, version in enumerate(versions):
                    saw(fragment, version)
            case Entry(record=rec.Adopted(anchors=anchors)):
                for anchor in anchors:
                    saw(anchor.fragment, anchor.version)
            case _:
                pass
    return tuple(newest)


def _aside(directory: Path, files: Files) -> Path:
    used = {name for name in files.names(directory) if name.startswith(_FOLDER)}
    return directory / next(name for n in count(1) if (name := f"{_FOLDER}-{n}") not in used)
