"""Inspection of a closed window: what the journal still holds of it, and figures of its deltas. Read-only."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from farloop.algo.spec import BlobId, Contribution
from farloop.coordinator import commits
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.observe.decision_log import own_of
from farloop.coordinator.storage.segment import Entry, Items
from farloop.coordinator.storage.state_reader import attached, with_ledger
from farloop.monitoring.status import OwnOfDelta
from farloop.quant.errors import BadBlob
from farloop.quant.norm import norm_sq


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDelta:
    """One delta against what it was merged into."""

    norm: float
    cosine: float | None  # None where either is zero


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWindow:
    """One commit of the journal, with what was known as it was made."""

    at: Entry
    record: rec.WindowCommitted
    contributors: dict[BlobId, tuple[Contribution, ...]]  # of the deltas that are stored
    drops: tuple[rec.InputDropped, ...]  # of this fragment, since its commit before
    revision: int  # of the terms that the window ran under
    quorum: int | None  # None where all that were expected were waited for
    floor: int
    h: int
    codec_up: str
    codec_down: str
    own: dict[BlobId, OwnOfDelta]  # what the nodes of the merged deltas had of their own
    epoch: int
    measured: dict[BlobId, MeasuredDelta]  # empty where the deltas are not stored


def closed_windows(directory: Path, items: Items, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], ClosedWindow]:
    """The commits of these fragments and versions, as far as the journal has them. Raises StorageError."""
    found: dict[tuple[int, int], ClosedWindow] = {}
    stored: dict[BlobId, Entry] = {}
    drops: dict[int, list[rec.InputDropped]] = {}
    for at, ledger in with_ledger(directory, items):
        match at.record:
            case rec.InputStored(blob=blob):
                stored[blob] = at
            case rec.InputDropped(blob=blob):
                drops.setdefault(blob.fragment, []).append(at.record)
            case rec.WindowCommitted(fragment=fragment, version=version) as record:
                since = tuple(drops.pop(fragment, ()))
                if (fragment, version) in wanted and ledger is not None:
                    found[fragment, version] = _past(directory, ledger, at, record, stored, since)
            case _:
                pass
    return found


def newest_versions(directory: Path, items: Items) -> tuple[list[int], set[int]]:
    """Of every fragment; and the fragments that are final."""
    ledger: Ledger | None = None
    for _, known in with_ledger(directory, items):
        ledger = known or ledger
    if ledger is None:
        return [], set()
    return list(ledger.versions), set(range(len(ledger.versions))) - ledger.windows.keys()


def _past(
    directory: Path,
    ledger: Ledger,
    at: Entry,
    record: rec.WindowCommitted,
    stored: dict[BlobId, Entry],
    drops: tuple[rec.InputDropped, ...],
) -> ClosedWindow:
    places = {addend.blob: stored[addend.blob] for addend in record.blobs if addend.blob in stored}
    terms = ledger.windows[record.fragment]
    of_window = ledger.terms_of(record.fragment, record.version, record.round)
    return ClosedWindow(
        at=at,
        record=record,
        contributors={
            blob: place.record.contributors
            for blob, place in places.items()
            if isinstance(place.record, rec.InputStored)
        },
        drops=drops,
        revision=ledger.revisions.number_of(record.fragment, record.version),
        quorum=None if of_window.admission.max_staleness and terms.final else of_window.admission.quorum,
        floor=of_window.admission.floor,
        h=ledger.rounds[record.round].length,
        codec_up=terms.codec_up,
        codec_down=terms.codec_down,
        own={
            addend.blob: own_of(addend.blob.node, codec, terms, ledger.rounds[record.round])
            for addend, codec in zip(record.blobs, commits.codecs_of(ledger, record).up, strict=True)
        },
        epoch=ledger.epoch,
        measured=_measured(directory, ledger, record, places) if len(places) == len(record.blobs) else {},
    )


def _measured(
    directory: Path, ledger: Ledger, record: rec.WindowCommitted, places: dict[BlobId, Entry]
) -> dict[BlobId, MeasuredDelta]:
    inputs = [attached(directory, places[addend.blob].attachment) for addend in record.blobs]
    try:
        alone, merged = commits.parts(ledger, record, inputs, commits.codecs_of(ledger, record))
    except BadBlob:
        return {}  # `farloop journal verify` says what is wrong with it
    whole = norm_sq(merged)
    return {
        addend.blob: MeasuredDelta(norm=norm_sq(delta) ** 0.5, cosine=_cosine(delta, norm_sq(delta), merged, whole))
        for addend, delta in zip(record.blobs, alone, strict=True)
    }


def _cosine(delta: Tensor, delta_sq: float, merged: Tensor, merged_sq: float) -> float | None:
    size = (delta_sq * merged_sq) ** 0.5
    return float(delta.double() @ merged.double()) / size if size else None
