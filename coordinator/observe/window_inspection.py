"""Inspection of a closed window: what the journal still holds of it, and figures of its deltas. Read-only."""

from pathlib import Path
from typing import Any

from torch import Tensor

from farloop.algo.spec import BlobId
from farloop.coordinator import commits
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.observe.decision_log import facts_of, own_of
from farloop.coordinator.storage.segment import Entry, Items
from farloop.coordinator.storage.state_reader import attached, with_ledger
from farloop.quant.errors import BadBlob
from farloop.quant.norm import norm_sq

Facts = dict[str, Any]


def closed_windows(
    directory: Path, items: Items, version: int, chosen: int | None
) -> tuple[dict[int, Facts], Ledger | None]:
    """The commits of this version, of every fragment or a chosen one, as far as the journal has them; and the ledger.

    By fragment, they have the form of a line of `decisions.jsonl`; besides, `record` says where the journal has it, and
    `measured` has by node the norm of each delta and its cosine with their merge, None where either is zero; it is
    empty if the deltas are not stored. Raises StorageError.
    """
    found: dict[int, Facts] = {}
    newest: Ledger | None = None
    stored: dict[BlobId, Entry] = {}
    drops: dict[int, list[rec.InputDropped]] = {}
    for at, ledger in with_ledger(directory, items):
        newest = ledger or newest
        match at.record:
            case rec.InputStored(blob=blob):
                stored[blob] = at
            case rec.InputDropped(blob=blob):
                drops.setdefault(blob.fragment, []).append(at.record)
            case rec.WindowCommitted(fragment=fragment) as record:
                since = drops.pop(fragment, [])
                if record.version == version and chosen in (None, fragment) and ledger is not None:
                    found[fragment] = {
                        "record": at.where,
                        **facts_of(record, ledger),
                        **_facts_of_deltas(directory, ledger, record, stored),
                        "refused": [
                            {"node": drop.blob.node, "after_s": None, "code": drop.reason.code, "detail": drop.detail}
                            for drop in since
                        ],
                    }
            case _:
                pass
    return found, newest


def _facts_of_deltas(
    directory: Path, ledger: Ledger, record: rec.WindowCommitted, stored: dict[BlobId, Entry]
) -> Facts:
    codecs, terms = commits.codecs_of(ledger, record), ledger.windows[record.fragment]
    places = [stored.get(addend.blob) for addend in record.blobs]
    rows = []
    for addend, expect, place in zip(record.blobs, codecs.deltas, places, strict=True):
        node, delta = addend.blob.node, None if place is None else place.record
        shares = delta.contributors if isinstance(delta, rec.InputStored) else ()
        row = {
            "node": node,
            "after_s": None,
            "base": addend.blob.version,
            "window": None,
            "weight": addend.weight,
            "steps": sum(share.steps for share in shares) if shares else None,
            "tokens": sum(share.tokens for share in shares) if shares else None,
            "norm": max(sum(share.norm_sq for share in shares), 0.0) ** 0.5 if shares else None,
        }
        codec = ledger.codec_of_deltas(record.fragment, expect.version, node)
        rows.append({**row, **own_of(node, codec, terms, ledger.rounds[record.round])})
    known = [place for place in places if place is not None]
    measured = _measured(directory, ledger, record, known, codecs) if len(known) == len(places) else {}
    return {"arrived": rows, "measured": measured}


def _measured(
    directory: Path, ledger: Ledger, record: rec.WindowCommitted, places: list[Entry], codecs: commits.Codecs
) -> dict[str, tuple[float, float | None]]:
    try:
        alone, merged = commits.parts(
            ledger, record, [attached(directory, place.attachment) for place in places], codecs
        )
    except BadBlob:
        return {}  # `farloop journal verify` says what is wrong with it
    whole = norm_sq(merged)
    return {
        addend.blob.node: (norm_sq(delta) ** 0.5, _cosine(delta, norm_sq(delta), merged, whole))
        for addend, delta in zip(record.blobs, alone, strict=True)
    }


def _cosine(delta: Tensor, delta_sq: float, merged: Tensor, merged_sq: float) -> float | None:
    size = (delta_sq * merged_sq) ** 0.5
    return float(delta.double() @ merged.double()) / size if size else None
