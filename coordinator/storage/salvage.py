"""Salvage: a new state directory from the newest consistent state in a damaged one.

Offline, and only on a person's command. Every place in the journal up to which whole records and valid snapshots give
all fragments is a candidate; the newest is taken. The new directory resembles a restored copy: snapshots of that
moment, the epoch, and a journal of one record that holds the ledger. The old files are moved aside, never deleted. An
interrupted salvage leaves the directory unchanged, or is finished when salvage is run again.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from farloop.coordinator.decide import records as rec
from farloop.coordinator.errors import (
    JournalCorrupt,
    NoRoom,
    ReadOnly,
    SnapshotCorrupt,
    StateMismatch,
    StorageError,
    StorageFailed,
)
from farloop.coordinator.leadership import mark, marked
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.copies import StateCopy
from farloop.coordinator.storage.files import DISK, Files, disk_errors
from farloop.coordinator.storage.journal import Journal, claim_epoch, claimed_epoch
from farloop.coordinator.storage.recovery import Recovery
from farloop.coordinator.storage.segment import (
    UNFINISHED,
    Entry,
    Gap,
    Items,
    Segments,
    refuse_half_salvaged,
    segment_path,
)

_log = logging.getLogger(__name__)

_FOLDER = "before-salvage"  # the old files go to a sub-folder of this name and a number
_NEW = "new"  # in that, the folder that takes their place. What is left of it afterwards may be deleted.


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    run: str
    cut: StateCopy
    epoch: int  # highest known epoch
    newest: tuple[int, ...]  # newest version of each fragment mentioned in the folder
    deltas: int  # stored deltas without an outcome: nodes offer theirs again
    damage: tuple[str, ...]  # descriptions of the damage

    @property
    def versions(self) -> tuple[int, ...]:
        return self.cut.ledger.versions

    @property
    def given_up(self) -> tuple[tuple[int, int, int], ...]:
        """Lost commits: fragment, first and last version."""
        pairs = enumerate(zip(self.versions, self.newest, strict=True))
        return tuple((fragment, kept + 1, newest) for fragment, (kept, newest) in pairs if newest > kept)


def salvage(directory: Path, files: Files = DISK) -> Salvage:
    """Find the newest consistent state. Changes nothing.

    A coordinator at work deletes and writes files between two reads: what is whole would look damaged.

    Raises:
        StateLocked: a coordinator is at work here.
        StateMismatch: there is none.
        NoRoom: no file can be opened now.
        StorageFailed: the disk refused a read.
    """
    with suppress(ReadOnly):  # nobody can write there
        if files.identity(directory / "lock") is not None:
            with closing(files.lock(directory / "lock")):
                return _newest_consistent(directory, files)
    return _newest_consistent(directory, files)


def _newest_consistent(directory: Path, files: Files) -> Salvage:
    try:
        items, ends = _candidates(directory, Segments(directory, files).items(), files)
    except (JournalCorrupt, StateMismatch) as error:  # no record says which run it is
        raise _nothing_left(directory, str(error)) from error
    for end in reversed(ends):
        found = Recovery.begin(directory, items[:end], files)
        found.older = True
        for item in items[:end]:
            found.take(item)
        try:
            found.restore()
        except NoRoom:
            raise  # it says nothing of the folder
        except StorageError as error:
            _log.info("salvage skips versions=%s why=%r", ",".join(map(str, found.ledger.versions)), str(error))
            continue
        return Salvage(
            run=found.ledger.spec.identity.name,
            cut=StateCopy.of(found.ledger.saved(), found.buffers),
            epoch=_highest_epoch(directory, items, files),
            newest=_newest(directory, items, len(found.ledger.versions), files),
            deltas=len(found.ledger.inputs),
            damage=tuple(str(item.fault) for item in items if isinstance(item, Gap)),
        )
    why = "at no point of the journal do valid snapshots and whole records give every fragment"
    raise _nothing_left(directory, why)


def _nothing_left(directory: Path, why: str) -> StateMismatch:
    return StateMismatch(
        directory,
        f"it holds no consistent state: {why}. Remaining options: start with --restore URL and an empty --state "
        "DIR, to go on from the newest copy in an object store, or with --state on a copy of this folder; add "
        "--adopt-from-nodes to go on from what the nodes hold",
    )


def carry_out(directory: Path, found: Salvage, files: Files = DISK) -> Path:
    """Write the state that was found, and let it take the place of the old files. Returns where those are.

    The new folder is whole and durable before anything is moved. From then on a file says that the folder is half one
    and half the other, and no start goes on in it: `finish` does the rest, as often as it is interrupted.
    Raises StateLocked: a coordinator is at work here; nothing was changed.
    Raises NoRoom, StorageFailed: the folder is as it was, or to be finished by `finish`.
    """
    with closing(files.lock(directory / "lock")):
        refuse_half_salvaged(directory, files)
        nbytes = sum(tensor.nbytes for b in found.cut.buffers for tensor in (b.anchor, b.target, *b.outer.values()))
        files.require_free(directory, nbytes + (1 << 20))
        aside = _aside(directory, files)
        _write(aside / _NEW, found, files)
        if found.given_up and marked(directory, files) is not None:
            mark(directory, "salvaged", files)  # of no record: it does not lead before a folder that has all
        return _swap(directory, _Step(_OUT, aside.name), files)


def is_unfinished(directory: Path, files: Files = DISK) -> bool:
    """Whether `carry_out` was interrupted after it had begun to move files."""
    return files.identity(directory / UNFINISHED) is not None


def finish(directory: Path, files: Files = DISK) -> Path:
    """Go on with a salvage that was interrupted, where it stopped. Returns where the old files are.
    Raises StateLocked, NoRoom, StorageFailed: as `carry_out`. Raises StateMismatch: the file that
    says how far it came is damaged."""
    with closing(files.lock(directory / "lock")):
        return _swap(directory, _step(directory, files), files)


@dataclass(frozen=True, slots=True)
class _Step:
    """Progress of a salvage: the content of the file `UNFINISHED`."""

    what: str  # `_OUT`: the old files go aside. `_IN`: all are there, the new ones come in.
    aside: str

    @property
    def text(self) -> bytes:
        return f"farloop-salvage 1 {self.what} {self.aside}\n".encode()


_OUT, _IN = "out", "in"

_STEP = re.compile(rb"farloop-salvage 1 (out|in) (" + _FOLDER.encode() + rb"-[0-9]+)\n")


def _step(directory: Path, files: Files) -> _Step:
    path = directory / UNFINISHED
    with disk_errors(path, "read"):
        found = _STEP.fullmatch(files.read_bytes(path))
    if found is None:
        raise StateMismatch(path, "is no salvage file; the unfinished result is in the newest before-salvage-N/new")
    return _Step(found[1].decode(), found[2].decode())


def _note(directory: Path, step: _Step, files: Files) -> None:
    path = directory / UNFINISHED
    with files.replacing(path) as temporary, disk_errors(path, "write", room=True):
        files.write_bytes(temporary, step.text)


def _swap(directory: Path, step: _Step, files: Files) -> Path:
    """Replace the old files. Every part may be repeated: moved files are no longer there."""
    aside = directory / step.aside
    if step.what == _OUT:
        _note(directory, step, files)
        _move_state(directory, aside, files)
        _note(directory, _Step(_IN, step.aside), files)
    _move_state(aside / _NEW, directory, files)
    files.delete(directory / UNFINISHED)
    return aside


def _move_state(source: Path, target: Path, files: Files) -> None:
    """Move journal, epoch and snapshots, unfinished files included."""
    for name in sorted(files.names(source)):
        if name == "epoch" or name.startswith("journal-"):
            files.move(source / name, target / name)
    folder = source / "snapshots"
    for name in sorted(files.names(folder)) if files.is_directory(folder) else []:
        files.move(folder / name, target / "snapshots" / name)


def _write(directory: Path, found: Salvage, files: Files) -> None:
    fingerprint = found.cut.ledger.spec.identity.fingerprint()
    for fragment, buffers in enumerate(found.cut.buffers):
        snapshots.save(directory, snapshots.of_buffers(fingerprint, fragment, buffers), files)
    claim_epoch(directory, seen=found.epoch - 1, files=files)
    journal, _ = Journal.open(directory, files=files)
    with journal:
        journal.append(found.cut.ledger)
        journal.sync()


def _candidates(directory: Path, items: Items, files: Files) -> tuple[list[Entry | Gap], list[int]]:
    """The journal with a gap for every record that does not fit, and the ends up to which all can be restored."""
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
    """Versions of intact snapshots, by fragment."""
    fingerprint = found.ledger.spec.identity.fingerprint()
    good: list[list[int]] = [[] for _ in found.ledger.versions]
    for fragment, versions in enumerate(good):
        for version in snapshots.versions_of(found.directory, fragment, found.files):
            path = snapshots.snapshot_path(found.directory, fragment, version)
            with suppress(SnapshotCorrupt):
                snapshots.load(path, found.files, fingerprint=fingerprint)
                versions.append(version)
    return good


def _highest_epoch(directory: Path, items: Items, files: Files) -> int:
    records = [item.record for item in items if isinstance(item, Entry)]
    claims = rec.RunStarted | rec.EpochClaimed | rec.Rewound | rec.Adopted | rec.LedgerSaved
    known = [record.epoch for record in records if isinstance(record, claims)]
    try:
        return max([*known, claimed_epoch(directory, files)])
    except StorageFailed as error:
        _log.warning("epoch file ignored why=%r", str(error))
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
    """A folder for the old files: a new one, or one that a salvage left before it moved any."""
    for number in count(1):
        aside = directory / f"{_FOLDER}-{number}"
        if not files.is_directory(aside):
            return aside
        if set(files.names(aside)) <= {_NEW}:
            for folder in (aside / _NEW / "snapshots", aside / _NEW):
                for name in files.names(folder) if files.is_directory(folder) else []:
                    if not files.is_directory(folder / name):
                        files.delete(folder / name)
            return aside
    raise AssertionError("numbers do not end")
