"""A run's state folder as a coordinator writes it, without one: windows of two nodes, committed one after the other."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from farloop.algo import schedule
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec
from farloop.coordinator import commits
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.segment import segment_numbers, segment_path
from farloop.coordinator.storage.store import Store
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.digest import digest
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import AnchorRef, Drop, Share
from farloop.wire.reasons import Reason

NODES = (NodeId("bergen"), NodeId("oslo"))

GOLDEN = Path(__file__).parent.parent / "unit" / "coordinator" / "golden"
STORED = rec.InputStored(
    blob=BlobId(kind=BlobKind.DELTA, fragment=0, version=3, node=NodeId("oslo"), incarnation=1, seq=4),
    window=4,
    contributors=(),
    digest=5,
)
"""A record with an attachment."""
RECORDS: dict[str, bytes] = {
    name.removeprefix("record."): bytes.fromhex(data)
    for name, data in map(str.split, (GOLDEN.parents[1] / "golden" / "full_forms.txt").read_text().splitlines())
    if name.startswith("record.")
}
"""One of each kind with all of its fields, behind the number of the kind."""
SUMMARY = cast(rec.LedgerSaved, rec.decode(RECORDS["LedgerSaved"][0], RECORDS["LedgerSaved"][1:]))
"""A record that a segment begins with."""


SNAPSHOT_EVERY = 4
"""For the tests that count with it."""


def shorten(patch: pytest.MonkeyPatch, *, snapshot_every: int, history: int) -> None:
    """Snapshots, new segments and pruning within a few commits, where segments are small; and no waiting."""
    storage = "farloop.coordinator.storage"
    patch.setattr(f"{storage}.store.SNAPSHOT_EVERY", snapshot_every)
    patch.setattr(f"{storage}.recovery.HISTORY_VERSIONS", history)
    patch.setattr("farloop.coordinator.decide.ledger.HISTORY_VERSIONS", history)
    patch.setattr(f"{storage}.journal.RECORD_ROOM", 4096)
    patch.setattr(f"{storage}.state_reader.LOOK_AGAIN_S", 0.0)


def segment_paths(directory: Path) -> dict[int, Path]:
    """The files of its journal, in order."""
    return {number: segment_path(directory, number) for number in sorted(segment_numbers(directory))}


def begun(directory: Path, spec: RunSpec, *, segment_bytes: int = 256 << 20, files: Files = DISK) -> Store:
    """A run of a thousand rounds, at version 0 of random anchors."""
    generator = torch.Generator().manual_seed(1)
    anchors = [torch.randn(fragment.numel, generator=generator) for fragment in spec.identity.layout.fragments]
    identity = dataclasses.replace(spec.identity, anchor_digests=tuple(digest(anchor) for anchor in anchors))
    terms = spec.terms.replace(steps=10_000)
    return Store.create(
        directory,
        dataclasses.replace(spec, identity=identity, terms=terms),
        anchors,
        segment_bytes=segment_bytes,
        files=files,
    )


def recovered(directory: Path, **options: Any) -> Store:
    """A coordinator's start on a folder that holds a run."""
    store = Store.recover(directory, **options)
    assert store is not None
    return store


def run_rounds(store: Store, count: int) -> None:
    """Commit a version of every fragment, `count` times."""
    for _ in range(count):
        for fragment in range(len(store.buffers)):
            commit(store, fragment)


def spool(store: Store, fragment: int, node: NodeId, *, durable: bool = True) -> rec.InputStored:
    """A node's delta for the open window, durable unless said otherwise."""
    stored, data = delta(store, node, fragment)
    store.append(stored, data)
    if durable:
        store.sync()
    return stored


def commit(store: Store, fragment: int, blobs: Sequence[BlobId] = (), *, snapshots: bool = True) -> rec.WindowCommitted:
    """A window, from its first delta to its commit; or of deltas that are stored. Then the snapshots that are due."""
    fix_rounds(store)
    inputs: dict[BlobId, bytes] = {}
    for node in NODES if not blobs else ():
        stored, data = delta(store, node, fragment)
        inputs[stored.blob] = bytes(data)
        if commits.spools_inputs(store.ledger.spec.terms):
            spool(store, fragment, node)
    inputs = inputs or {blob: bytes(store.read_input(blob)) for blob in blobs}
    drafted = draft(store, fragment, tuple(inputs))
    reserved = store.reserve(fragment, store.ledger.windows[fragment].codec_down)
    addends = [(data, 0.5) for data in inputs.values()]
    result = store.compute(drafted, addends)
    record = store.commit(drafted, result, reserved)
    if snapshots:
        store.take_snapshots()
    return record


def fix_rounds(store: Store) -> None:
    """The rounds that have to be fixed before a window of the open one closes."""
    while plan := store.ledger.next_round_to_fix():
        store.append(rec.RoundFixed(round=plan))


def draft(store: Store, fragment: int, blobs: Sequence[BlobId]) -> rec.WindowCommitted:
    """What a machine decides on the open window, with these deltas of both nodes."""
    spec, terms = store.ledger.spec, store.ledger.windows[fragment]
    return rec.WindowCommitted(
        fragment=fragment,
        version=terms.window,
        round=terms.round,
        merged=tuple(Share(node=node, weight=0.5) for node in NODES),
        drops=(Drop(node=NodeId("tromso"), reason=Reason.SILENT),),
        blobs=tuple(rec.Addend(blob=blob, weight=0.5) for blob in blobs),
        anchor_digest=0,
        target_digest=0,
        momentum_digest=None,
        next_window=schedule.window_after(spec.terms, spec.identity.layout, terms, store.ledger.rounds),
        update_size=0,
        update_digest=0,
        outer_lr=spec.terms.outer.lr,
        outer_momentum=spec.terms.outer.momentum,
        reach=0.3,
        why="all 2 expected came, 1 removed",
    )


def fetch(store: Store, fragment: int = 0) -> rec.AnchorFetched:
    """A node brings what a later state of the run held of a fragment."""
    of = store.ledger.spec.identity.layout.fragments[fragment]
    later = commits.adopted(
        store.buffers[fragment].anchor * 2, store.ledger.versions[fragment] + 3, store.ledger.spec.terms
    )
    _, data, digest_of_blob = commits.snapshot_blob(later, of, epoch=9)
    anchor = AnchorRef(fragment=fragment, version=later.version, digest=digest(later.anchor))
    fetched = rec.AnchorFetched(anchor=anchor, node=NODES[0], blob_digest=digest_of_blob)
    store.append(fetched, data)
    store.sync()
    return fetched


def adopt(store: Store) -> None:
    """The run goes on from what `fetch` brought."""
    ledger = store.ledger
    adopted, windows = [], []
    for fragment, fetched in sorted(store.fetched.items()):
        anchor = fetched.anchor
        adopted.append(
            rec.AdoptedAnchor(
                fragment=fragment, version=anchor.version, digest=anchor.digest, node=NODES[0],
                before=ledger.versions[fragment],
            )
        )  # fmt: skip
        windows.append(dataclasses.replace(ledger.windows[fragment], window=anchor.version + 1))
    store.adopt(
        rec.Adopted(
            epoch=ledger.epoch + 5, anchors=tuple(adopted), windows=tuple(windows),
            rounds=tuple(ledger.rounds.values()), revisions=(), frontier=0, returned=(), uncertain=0,
        )
    )  # fmt: skip


def delta(store: Store, node: NodeId, fragment: int) -> tuple[rec.InputStored, bytearray]:
    version, terms = store.ledger.versions[fragment] + 1, store.ledger.windows[fragment]
    of, codec = store.ledger.spec.identity.layout.fragments[fragment], codec_named(terms.codec_up)
    generator = torch.Generator().manual_seed(1000 * version + 10 * fragment + ord(node[0]))
    header = BlobHeader(codec=codec, fragment=of, version=version, base=version - 1, epoch=1)
    data = pack_blob(header, codec.encode(torch.randn(of.numel, generator=generator) * 1e-2, of, seed=header.seed))
    blob = BlobId(kind=BlobKind.DELTA, fragment=fragment, version=version - 1, node=node, incarnation=1, seq=version)
    contribution = Contribution(node=node, incarnation=1, base=version - 1, steps=10, tokens=10, norm_sq=1.0)
    stored = rec.InputStored(blob=blob, window=version, contributors=(contribution,), digest=blob_digest(data))
    return stored, data
