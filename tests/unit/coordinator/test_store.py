"""The state directory: begin, commit, recover, prune; what was durable comes back from any crash (protocol K, O–S).

Syncs are made to return at once: what they are for is shown by `test_durable.py`. `Camera` copies the directory at
each of them, as a crash at that moment would leave it.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from farloop.algo import schedule
from farloop.algo.digest import digest
from farloop.algo.merge_rules import MERGE_RULES
from farloop.algo.methods import METHODS
from farloop.algo.outer_optimizers import state_names
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, OuterKind, RunSpec, WindowTerms
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS
from farloop.coordinator.errors import DiskFull, Fenced, SnapshotCorrupt, StateLocked, StateMismatch
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.epoch import claim_epoch
from farloop.coordinator.storage.files import Files
from farloop.coordinator.storage.journal import Journal
from farloop.coordinator.storage.segment import segment_paths
from farloop.coordinator.storage.snapshots import snapshot_path
from farloop.coordinator.storage.store import SNAPSHOT_EVERY, Store
from farloop.coordinator.storage.verify import verify
from farloop.quant.blob import BlobHeader, blob_bytes, pack_blob
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import AnchorRef

A, B = NodeId("a"), NodeId("b")
SEGMENT_BYTES = 24 << 10
"""So small that the room set aside for a commit always begins another."""


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def anchors(spec: RunSpec) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(fragment.numel, generator=generator) for fragment in spec.identity.layout.fragments]


@pytest.fixture
def long_spec(spec: RunSpec, anchors: list[Tensor]) -> RunSpec:
    """A run of a thousand rounds, with the digests of its first anchors."""
    identity = dataclasses.replace(spec.identity, anchor_digests=tuple(digest(anchor) for anchor in anchors))
    return dataclasses.replace(spec, identity=identity, terms=dataclasses.replace(spec.terms, steps=10_000))


@pytest.fixture
def data_parallel(long_spec: RunSpec, anchors: list[Tensor]) -> RunSpec:
    """One fragment, a commit per step, gradients that are not spooled (protocol K)."""
    layout = dataclasses.replace(long_spec.identity.layout, slots=1, fragments=long_spec.identity.layout.fragments[:1])
    identity = dataclasses.replace(long_spec.identity, layout=layout, anchor_digests=(digest(anchors[0]),))
    terms = dataclasses.replace(
        long_spec.terms, method="data-parallel", h=1, tau=0, mix=0.0, codec_up="fp32", codec_down="fp32"
    )
    return dataclasses.replace(long_spec, identity=identity, terms=terms)


def delta(store: Store, node: NodeId, fragment: int) -> tuple[rec.InputStored, bytearray]:
    """What a node would send for the open window: always the same for the same version."""
    version, terms = store.ledger.versions[fragment] + 1, store.ledger.windows[fragment]
    of, codec = store.ledger.spec.identity.layout.fragments[fragment], codec_named(terms.codec_up)
    generator = torch.Generator().manual_seed(1000 * version + 10 * fragment + ord(node[0]))
    x = torch.randn(of.numel, generator=generator) * 1e-2
    header = BlobHeader(codec=codec, fragment=of, version=version, base=version - 1, epoch=1)
    data = pack_blob(header, codec.encode(x, of, seed=header.seed))
    blob = BlobId(kind=BlobKind.DELTA, fragment=fragment, version=version - 1, node=node, incarnation=1, seq=version)
    contribution = Contribution(node=node, incarnation=1, base=version - 1, steps=10, tokens=10, norm_sq=1.0)
    stored = rec.InputStored(blob=blob, window=version, contributors=(contribution,), digest=blob_digest(data))
    return stored, data


def draft(store: Store, fragment: int, blobs: list[BlobId]) -> rec.WindowCommitted:
    spec, terms = store.ledger.spec, store.ledger.windows[fragment]
    return rec.WindowCommitted(
        fragment=fragment,
        version=terms.window,
        round=terms.round,
        merged=(),
        drops=(),
        blobs=tuple(rec.Addend(blob=blob, weight=1 / len(blobs)) for blob in blobs),
        anchor_digest=0,
        target_digest=0,
        momentum_digest=None,
        next_window=schedule.window_after(spec.terms, spec.identity.layout, terms, store.ledger.rounds),
        update_size=0,
        update_digest=0,
        outer_lr=spec.terms.outer_lr,
        outer_momentum=spec.terms.outer_momentum,
        reach=0.3,
        why="all 2 expected came",
    )


def commit(store: Store, fragment: int, *nodes: NodeId) -> None:
    """A window from its first delta to its commit, as the daemon goes about it."""
    terms = store.ledger.spec.terms
    while plan := store.ledger.next_round_to_fix():
        store.append(rec.RoundFixed(round=plan))
    inputs: list[tuple[BlobId, bytearray]] = []
    for node in nodes or (A, B):
        stored, data = delta(store, node, fragment)
        inputs.append((stored.blob, data))
        if commits.spools_inputs(terms) and stored.blob not in store.ledger.inputs:
            store.append(stored, data)
            store.sync()
    decision = draft(store, fragment, [blob for blob, _ in inputs])
    reserved = store.reserve(fragment, store.ledger.windows[fragment].codec_down)
    addends = [(data, addend.weight) for (_, data), addend in zip(inputs, decision.blobs, strict=True)]
    result = commits.compute(store.ledger, store.buffers[fragment], decision, addends)
    store.commit(decision, result, reserved)


def run_rounds(store: Store, count: int) -> None:
    for _ in range(count):
        for fragment in range(len(store.buffers)):
            commit(store, fragment)


def image(buffers: Buffers) -> dict[str, object]:
    """All bits of a fragment, by name."""
    tensors = {"anchor": buffers.anchor, "target": buffers.target, **buffers.outer}
    return {"version": buffers.version, **{name: digest(tensor) for name, tensor in tensors.items()}}


def images(store: Store) -> list[dict[str, object]]:
    return [image(buffers) for buffers in store.buffers]


def recovered(directory: Path, **options: Any) -> Store:
    store = Store.recover(directory, **options)
    assert store is not None
    return store


@pytest.fixture
def store(tmp_path: Path, long_spec: RunSpec, anchors: list[Tensor]) -> Iterator[Store]:
    opened = Store.create(tmp_path / "state", long_spec, anchors)
    yield opened
    opened.close()


# --- begin


def test_a_new_run_is_at_version_0_of_its_anchors(store: Store, anchors: list[Tensor]) -> None:
    assert (store.ledger.versions, store.ledger.epoch, store.alarms) == ([0, 0], 1, {})
    for buffers, anchor in zip(store.buffers, anchors, strict=True):
        assert torch.equal(buffers.anchor, anchor) and torch.equal(buffers.target, anchor)


def test_a_directory_that_holds_a_run_is_not_begun_again(
    store: Store, long_spec: RunSpec, anchors: list[Tensor]
) -> None:
    store.close()
    with pytest.raises(StateMismatch, match="holds a run already"):
        Store.create(store.directory, long_spec, anchors)
    recovered(store.directory).close()


def test_there_is_nothing_to_recover_in_an_empty_directory(
    tmp_path: Path, long_spec: RunSpec, anchors: list[Tensor]
) -> None:
    assert Store.recover(tmp_path) is None
    Store.create(tmp_path, long_spec, anchors).close()


def test_a_directory_in_use_is_not_recovered(store: Store) -> None:
    with pytest.raises(StateLocked):
        Store.recover(store.directory)


def test_a_start_that_is_refused_changes_nothing(store: Store) -> None:
    """S: not even the epoch, which would fence the coordinator that the run belongs to."""
    store.close()

    def refuse(spec: RunSpec) -> None:
        assert spec == store.ledger.spec
        raise ValueError("another run")

    with pytest.raises(ValueError, match="another run"):
        Store.recover(store.directory, accept=refuse)
    again = recovered(store.directory)
    assert again.ledger.epoch == 2
    again.close()


def test_every_start_has_an_epoch_of_its_own(store: Store) -> None:
    """S: also the one that it announces."""
    store.close()
    for epoch in (2, 3, 4):
        again = recovered(store.directory)
        assert again.ledger.epoch == epoch
        again.close()


def test_a_state_that_another_coordinator_took_over_is_committed_to_no_more(store: Store) -> None:
    """S: on a shared disk whose locks do not hold, two have it open."""
    commit(store, 0)
    before = image(store.buffers[0])
    claim_epoch(store.directory)
    with pytest.raises(Fenced):
        commit(store, 0)
    assert image(store.buffers[0]) == before and store.ledger.versions == [1, 0]
    store.close()
    again = recovered(store.directory)
    assert again.ledger.versions == [1, 0] and again.ledger.epoch == 3
    again.close()


def test_a_rewind_claims_an_epoch_above_all_that_nodes_have_met(store: Store) -> None:
    """S: and begins a history of that name, from the state as it is."""
    commit(store, 0)
    store.append(delta(store, A, 1)[0], delta(store, A, 1)[1])
    store.append(rec.EpochSeen(epoch=7))
    store.sync()
    store.close()
    before = images(store)
    plain = recovered(store.directory)
    assert (plain.ledger.epoch, plain.ledger.history) == (2, 0), "else what proves the copy would be gone"
    assert plain.ledger.inputs
    plain.close()
    rewound = recovered(store.directory, rewind=True)
    assert (rewound.ledger.epoch, rewound.ledger.history, rewound.ledger.inputs) == (8, 8, {})
    assert images(rewound) == before
    commit(rewound, 1)
    rewound.close()
    again = recovered(store.directory)
    assert (again.ledger.epoch, again.ledger.history, again.ledger.versions) == (9, 8, [1, 1])
    again.close()


# --- commit and recover


@pytest.mark.parametrize("rounds", [0, 1, SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY, SNAPSHOT_EVERY + 1, 19])
def test_a_recovery_has_every_bit_of_the_run_that_it_follows(store: Store, anchors: list[Tensor], rounds: int) -> None:
    """B21, P: anchors by decoding updates, targets and momenta by repeating the arithmetic; and they go on alike."""
    run_rounds(store, rounds)
    stored, data = delta(store, A, 1)
    store.append(stored, data)
    store.sync()
    ledger, before = store.ledger.copy(), images(store)
    store.close()

    again = recovered(store.directory)
    assert images(again) == before and again.alarms == {}
    ledger.epoch += 1
    assert again.ledger == ledger
    assert again.read_input(stored.blob) == bytes(data), "the window goes on where it was"
    commit(again, 1)
    again.close()

    uninterrupted = Store.create(store.directory.with_name("uninterrupted"), store.ledger.spec, anchors)
    run_rounds(uninterrupted, rounds)
    commit(uninterrupted, 1)
    uninterrupted.close()
    assert images(uninterrupted) == images(again)


@pytest.mark.parametrize("rounds", [SNAPSHOT_EVERY - 3, SNAPSHOT_EVERY + 3])
@pytest.mark.parametrize("kind", [kind for kind in get_args(OuterKind) if kind != "adamw"])
@pytest.mark.parametrize("rule", MERGE_RULES)
def test_a_recovery_has_every_bit_whatever_the_optimizer_and_the_merge_rule(
    tmp_path: Path,
    long_spec: RunSpec,
    anchors: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    kind: OuterKind,
    rule: str,
    rounds: int,
) -> None:
    """B21, P: their state goes through a snapshot and through the journal; where a buffer stands, the version says."""
    monkeypatch.setitem(METHODS, "streaming", dataclasses.replace(METHODS["streaming"], outer=kind, merge=rule))
    choices: dict[str, Any] = {"outer_clip": 0.01, "outer_buffer": 3, "outer_spread": 0.1, "outer_restart": 5}
    if kind == "sgd":
        choices["outer_momentum"] = 0.0
    run = dataclasses.replace(long_spec, terms=dataclasses.replace(long_spec.terms, **choices))
    store = Store.create(tmp_path / "one", run, anchors)
    assert sorted(store.buffers[0].outer) == sorted(state_names(kind, run.terms.outer_momentum))
    run_rounds(store, rounds)
    before = images(store)
    store.close()
    again = recovered(store.directory)
    assert images(again) == before and again.alarms == {}
    run_rounds(again, 3)
    again.close()

    uninterrupted = Store.create(tmp_path / "other", run, anchors)
    run_rounds(uninterrupted, rounds + 3)
    uninterrupted.close()
    assert images(uninterrupted) == images(again)


def test_a_recovery_reads_every_commit_as_its_window_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """P: the run's terms may have been others then."""
    regular = schedule.window_after

    def window_after(*args: Any, **named: Any) -> WindowTerms | None:
        following = regular(*args, **named)
        other = following is not None and following.window % 2 == 0
        return dataclasses.replace(following, codec_up="q8", codec_down="bf16") if following and other else following

    monkeypatch.setattr(schedule, "window_after", window_after)
    run_rounds(store, SNAPSHOT_EVERY + 3)
    before = images(store)
    store.close()
    again = recovered(store.directory)
    assert images(again) == before
    assert again.alarms == {}
    again.close()


def test_updates_and_inputs_are_read_from_the_journal(store: Store) -> None:
    """R: the downlink is a cursor over it, before and after a restart."""
    run_rounds(store, 2)
    source = store.update_source(1, 2)
    data = bytes(source.read(0, source.size))
    assert blob_digest(bytearray(data)) == store.ledger.commits[1, 2].digest
    assert bytes(source.read(10, 20)) == data[10:30]
    store.close()
    again = recovered(store.directory)
    assert bytes(again.update_source(1, 2).read(0, source.size)) == data
    again.close()


def test_a_snapshot_for_a_node_is_the_anchor_as_it_is(store: Store) -> None:
    run_rounds(store, 1)
    fragment = store.ledger.spec.identity.layout.fragments[1]
    blob, data, digest_of_bytes = commits.snapshot_blob(store.buffers[1], fragment, store.ledger.epoch)
    assert blob == BlobId(kind=BlobKind.SNAPSHOT, fragment=1, version=1)
    assert len(data) == blob_bytes(codec_named("fp32"), fragment) and digest_of_bytes == blob_digest(data)
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32, offset=64), store.buffers[1].anchor)


def test_the_global_model_has_every_parameter_by_name(store: Store) -> None:
    run_rounds(store, 1)
    named = store.named_anchors()
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {"body": (2, 200), "head": (100,)}
    assert torch.equal(named["body"].reshape(-1), store.buffers[0].anchor[:400])
    named["head"].zero_()
    assert store.buffers[1].anchor.any()


def test_room_that_was_set_aside_can_be_given_back(store: Store) -> None:
    """O: a window whose arithmetic failed leaves no room taken."""
    reserved = store.reserve(0, "q4")
    assert reserved == blob_bytes(codec_named("q4"), store.ledger.spec.identity.layout.fragments[0])
    store.release(reserved)
    assert store._journal._reserved_bytes == 0


def test_data_parallel_comes_back_with_exact_anchors_and_an_alarm_for_its_moments(
    tmp_path: Path, data_parallel: RunSpec, anchors: list[Tensor]
) -> None:
    """K, P: gradients are not spooled; the anchors cannot fork, the run goes on, and a person can see why it jumped."""
    store = Store.create(tmp_path, data_parallel, anchors[:1])
    assert not commits.spools_inputs(store.ledger.spec.terms)
    for _ in range(SNAPSHOT_EVERY):
        commit(store, 0)
    at_snapshot = images(store)
    store.close()
    store = recovered(tmp_path)
    assert images(store) == at_snapshot and store.alarms == {}

    commit(store, 0)
    anchor = image(store.buffers[0])["anchor"]
    store.close()
    store = recovered(tmp_path)
    assert image(store.buffers[0])["anchor"] == anchor
    assert torch.equal(store.buffers[0].target, store.buffers[0].anchor)
    assert store.alarms == {"optimizer of fragment 0": "its state of version 9 came out different at the restart"}
    commit(store, 0)
    assert store.ledger.versions == [10]
    store.close()


# --- what does not fit together


def test_a_journal_without_a_begin_is_refused(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    journal.append(rec.EpochClaimed(epoch=1))
    journal.close()
    with pytest.raises(StateMismatch, match="does not begin with a run's start"):
        Store.recover(tmp_path)
    Journal.open(tmp_path)[0].close()  # and was unlocked


def test_a_missing_snapshot_is_named(store: Store) -> None:
    store.close()
    snapshot_path(store.directory, 1, 0).unlink()
    with pytest.raises(StateMismatch, match="no snapshot of fragment 1"):
        Store.recover(store.directory)


def test_a_snapshot_of_another_run_is_refused(
    store: Store, tmp_path: Path, long_spec: RunSpec, anchors: list[Tensor]
) -> None:
    renamed = dataclasses.replace(long_spec, identity=dataclasses.replace(long_spec.identity, name="other"))
    Store.create(tmp_path / "other", renamed, anchors).close()
    store.close()
    shutil.copy(snapshot_path(tmp_path / "other", 0, 0), snapshot_path(store.directory, 0, 0))
    with pytest.raises(SnapshotCorrupt, match="is of run"):
        Store.recover(store.directory)


def test_a_snapshot_that_the_journal_knows_nothing_of_is_refused(store: Store) -> None:
    """S: the journal was restored from an older copy, the snapshots were not."""
    store.close()
    old = store.directory.with_name("old")
    shutil.copytree(store.directory, old)
    store = recovered(store.directory)
    run_rounds(store, SNAPSHOT_EVERY)
    store.close()
    shutil.copytree(store.directory / "snapshots", old / "snapshots", dirs_exist_ok=True)
    with pytest.raises(StateMismatch, match="lead to version 8 of fragment 0, the last commit is 0"):
        Store.recover(old)


def test_an_anchor_that_does_not_come_out_stops_the_run(store: Store) -> None:
    """P: restored anchors are exact, or nothing is."""
    run_rounds(store, 1)
    store.close()
    wrong = torch.zeros(512)
    fingerprint = store.ledger.spec.identity.fingerprint()
    tensors = {name: wrong.clone() for name in ("anchor", "target", "momentum")}
    snapshot = snapshots.Snapshot(fingerprint=fingerprint, fragment=0, version=0, tensors=tensors, digests={})
    snapshots.save(store.directory, snapshot)
    with pytest.raises(StateMismatch, match="fragment 0 does not come out as version 1 said"):
        Store.recover(store.directory)


# --- damage and full disks


@pytest.mark.parametrize("segment_bytes", [SEGMENT_BYTES, 256 << 20])
def test_one_damaged_snapshot_costs_nothing(
    tmp_path: Path, long_spec: RunSpec, anchors: list[Tensor], segment_bytes: int
) -> None:
    """P: the one before it is kept, and so is the journal behind that, whatever was pruned."""
    store = Store.create(tmp_path, long_spec, anchors, segment_bytes=segment_bytes)
    run_rounds(store, 5 * SNAPSHOT_EVERY + 3)
    before = images(store)
    store.close()
    for fragment in range(2):
        path = snapshot_path(tmp_path, fragment, 5 * SNAPSHOT_EVERY)
        path.write_bytes(path.read_bytes()[:-1])
    again = recovered(tmp_path, segment_bytes=segment_bytes)
    assert images(again) == before and again.alarms == {}
    again.close()


def test_a_snapshot_without_room_costs_neither_the_commit_nor_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, snapshot: snapshots.Snapshot, files: Files) -> Path:
        raise DiskFull(directory, 10, 5)

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "save", refuse)
        run_rounds(store, SNAPSHOT_EVERY)
    assert store.ledger.versions == [SNAPSHOT_EVERY] * 2
    assert list(store.alarms) == ["snapshot of fragment 0", "snapshot of fragment 1"]
    assert "10 bytes more are needed" in store.alarms["snapshot of fragment 0"]
    copy = store.directory.with_name("copy")
    shutil.copytree(store.directory, copy)
    again = recovered(copy)
    assert images(again) == images(store)
    again.close()
    run_rounds(store, SNAPSHOT_EVERY)
    assert store.alarms == {}
    assert not snapshot_path(store.directory, 0, SNAPSHOT_EVERY).exists()
    assert snapshot_path(store.directory, 0, 2 * SNAPSHOT_EVERY).exists()


def test_a_long_time_without_room_for_snapshots_leaves_two_ways_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P: the journal is kept back to the last but one snapshot, however old that is."""

    def refuse(directory: Path, snapshot: snapshots.Snapshot, files: Files) -> Path:
        raise DiskFull(directory, 10, 5)

    store = small(store)
    run_rounds(store, SNAPSHOT_EVERY)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "save", refuse)
        run_rounds(store, 4 * SNAPSHOT_EVERY)
    run_rounds(store, SNAPSHOT_EVERY)
    before = images(store)
    store.close()
    for fragment in range(2):
        path = snapshot_path(store.directory, fragment, 6 * SNAPSHOT_EVERY)
        path.write_bytes(path.read_bytes()[:-1])
    again = recovered(store.directory, segment_bytes=SEGMENT_BYTES)
    assert images(again) == before and again.alarms == {}
    again.close()


# --- pruning


def small(store: Store) -> Store:
    """The same run, in small segments."""
    store.close()
    return recovered(store.directory, segment_bytes=SEGMENT_BYTES)


def test_the_journal_does_not_grow_for_ever(store: Store) -> None:
    """P, R"""
    store = small(store)
    sizes = []
    for _ in range(12):
        run_rounds(store, SNAPSHOT_EVERY)
        paths = segment_paths(store.directory)
        sizes.append(sum(path.stat().st_size for number, path in paths.items() if number < max(paths)))
    assert min(segment_paths(store.directory)) > 0
    assert max(sizes[4:]) < 2 * sizes[3]
    before, ledger = images(store), store.ledger.copy()
    store.close()
    again = recovered(store.directory, segment_bytes=SEGMENT_BYTES)
    ledger.epoch += 1
    assert images(again) == before and again.ledger == ledger and again.alarms == {}
    run_rounds(again, SNAPSHOT_EVERY)
    again.close()


def test_all_that_the_ledger_remembers_can_be_read(store: Store) -> None:
    """R: a node that comes back gets these updates; the machine's own ledger may be one commit behind."""
    store = small(store)
    for _ in range(5 * SNAPSHOT_EVERY):
        behind = store.ledger.copy()
        run_rounds(store, 1)
        for fragment, version in {**behind.commits, **store.ledger.commits}:
            source = store.update_source(fragment, version)
            assert len(source.read(0, source.size)) == source.size
    assert min(segment_paths(store.directory)) > 0 and len(store.ledger.commits) == 2 * HISTORY_VERSIONS
    store.close()


def test_an_undecided_delta_keeps_its_segment(store: Store) -> None:
    """P: however long its window is held."""
    store = small(store)
    run_rounds(store, 2 * SNAPSHOT_EVERY)
    stored, data = delta(store, A, 0)
    store.append(stored, data)
    store.sync()
    held_from = max(segment_paths(store.directory))
    for _ in range(6 * SNAPSHOT_EVERY):
        commit(store, 1)
    assert store.read_input(stored.blob) == bytes(data)
    assert min(segment_paths(store.directory)) <= held_from
    store = small(store)
    assert store.read_input(stored.blob) == bytes(data)
    commit(store, 0)
    run_rounds(store, 4 * SNAPSHOT_EVERY)
    assert min(segment_paths(store.directory)) > held_from
    store.close()


def test_an_update_that_is_being_sent_keeps_its_segment(store: Store) -> None:
    """R: a slow node reads on, however far the run has come."""
    store = small(store)
    run_rounds(store, 1)
    source = store.update_source(0, 1)
    data = bytes(source.read(0, source.size))
    run_rounds(store, 7 * SNAPSHOT_EVERY)
    assert bytes(source.read(0, source.size)) == data
    segment = source.attachment.segment
    assert min(segment_paths(store.directory)) == segment
    del source
    run_rounds(store, SNAPSHOT_EVERY)
    assert min(segment_paths(store.directory)) > segment
    store.close()


def test_a_new_segment_begins_with_all_that_is_known(store: Store) -> None:
    """Its summary is what the records before it add up to."""
    store = small(store)
    run_rounds(store, 3 * SNAPSHOT_EVERY)
    store.close()
    journal, found = Journal.open(store.directory)
    journal.close()
    summaries = [entry for entry in found.entries if isinstance(entry.record, rec.LedgerSaved)]
    assert len(summaries) > 2
    assert [entry.attachment.segment for entry in summaries] == sorted(segment_paths(store.directory))[
        -len(summaries) :
    ]


# --- crashes


class Camera:
    """Copies the state directory at every sync, rename and deletion, just before it takes effect."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, seen: Callable[[Path], None]) -> None:
        self.directory, self.seen = directory, seen
        self.shots = 0
        self.busy = False
        replace, unlink = os.replace, Path.unlink

        def photographed_replace(source: Path, target: Path) -> None:
            self.shoot()
            replace(source, target)

        def photographed_unlink(path: Path, missing_ok: bool = False) -> None:
            self.shoot()
            unlink(path, missing_ok=missing_ok)

        patch.setattr(os, "fsync", lambda fd: self.shoot())
        patch.setattr(os, "replace", photographed_replace)
        patch.setattr(Path, "unlink", photographed_unlink)

    def shoot(self) -> None:
        if self.busy:
            return
        self.busy = True
        self.shots += 1
        copy = self.directory.with_name("copy")
        shutil.copytree(self.directory, copy)
        self.seen(copy)
        shutil.rmtree(copy)
        self.busy = False


def test_a_crash_at_any_moment_of_a_begin_leaves_a_run_or_none(
    tmp_path: Path, long_spec: RunSpec, anchors: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S: and the same directory can be used, under a newer epoch."""
    found: list[str] = []

    def see(copy: Path) -> None:
        store = Store.recover(copy)
        found.append("none" if store is None else "run")
        store = store or Store.create(copy, long_spec, anchors)
        assert store.ledger.versions == [0, 0]
        commit(store, 0, A) if store.ledger.next_round_to_fix() else commit(store, 1, A)
        store.close()

    with monkeypatch.context() as patch:
        Camera(tmp_path / "state", patch, see)
        Store.create(tmp_path / "state", long_spec, anchors).close()
    assert found == sorted(found) and set(found) == {"none", "run"}


def test_a_crash_at_any_moment_of_a_run_leaves_what_was_durable(
    tmp_path: Path, long_spec: RunSpec, anchors: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B21, O, P: through commits, snapshots, new segments and the deletion of old ones."""
    reference = Store.create(tmp_path / "reference", long_spec, anchors)
    history = [[image(buffers)] for buffers in reference.buffers]
    for _ in range(4 * SNAPSHOT_EVERY + 2):
        run_rounds(reference, 1)
        for fragment, buffers in enumerate(reference.buffers):
            history[fragment].append(image(buffers))
    reference.close()

    place = tmp_path / "state"
    store = Store.create(place, long_spec, anchors, segment_bytes=SEGMENT_BYTES)
    run_rounds(store, 4 * SNAPSHOT_EVERY - 1)
    oldest = min(segment_paths(place))
    durable = list(store.ledger.versions)
    firsts: set[int] = set()

    def see(copy: Path) -> None:
        again = recovered(copy, segment_bytes=SEGMENT_BYTES)
        versions = again.ledger.versions
        assert all(version - known in (0, 1) for version, known in zip(versions, durable, strict=True))
        assert images(again) == [history[fragment][version] for fragment, version in enumerate(versions)]
        assert again.alarms == {}
        for fragment, version in again.ledger.commits:
            source = again.update_source(fragment, version)
            source.read(0, source.size)
        firsts.add(min(segment_paths(copy)))
        again.close()

    with monkeypatch.context() as patch:
        camera = Camera(place, patch, see)
        for fragment in (0, 1, 0, 1):
            commit(store, fragment)
            durable[:] = store.ledger.versions
    store.close()
    assert camera.shots > 30
    assert min(firsts) == oldest and len(firsts) > 1, "nothing was pruned under the camera"


# --- going on from what nodes held


def bring(store: Store, other: Store, fragment: int, node: NodeId = A) -> rec.AdoptedAnchor:
    """A node brings the anchor of another state, which came after this one."""
    _, data, blob_digest_ = commits.snapshot_blob(
        other.buffers[fragment], store.ledger.spec.identity.layout.fragments[fragment], epoch=9
    )
    version = other.ledger.versions[fragment]
    anchor = AnchorRef(fragment=fragment, version=version, digest=digest(other.buffers[fragment].anchor))
    store.append(rec.AnchorFetched(anchor=anchor, node=node, blob_digest=blob_digest_), data)
    store.sync()
    return rec.AdoptedAnchor(
        fragment=fragment,
        version=version,
        digest=anchor.digest,
        node=node,
        before=store.ledger.versions[fragment],
    )


def adoption(store: Store, other: Store, *fragments: int) -> rec.Adopted:
    anchors = tuple(bring(store, other, fragment) for fragment in fragments)
    return rec.Adopted(
        epoch=store.ledger.epoch + 5,
        anchors=anchors,
        windows=tuple(other.ledger.windows[fragment] for fragment in fragments),
        rounds=tuple(other.ledger.rounds.values()),
        revisions=(),
        frontier=0,
        returned=(),
        uncertain=0,
    )


@pytest.fixture
def newer(tmp_path: Path, long_spec: RunSpec, anchors: list[Tensor]) -> Iterator[Store]:
    """What the run had come to; the copy was taken after its first three rounds."""
    store = Store.create(tmp_path / "newer", long_spec, anchors)
    run_rounds(store, SNAPSHOT_EVERY + 3)
    yield store
    store.close()


def an_old_copy(directory: Path, newer: Store, anchors: list[Tensor]) -> Store:
    store = Store.create(directory, newer.ledger.spec, anchors, segment_bytes=SEGMENT_BYTES)
    run_rounds(store, 3)
    return store


def test_an_adopted_anchor_is_the_nodes_and_its_optimizer_begins_anew(
    tmp_path: Path, newer: Store, anchors: list[Tensor]
) -> None:
    store = an_old_copy(tmp_path / "copy", newer, anchors)
    untouched = image(store.buffers[1])
    store.adopt(adoption(store, newer, 0))
    adopted = store.buffers[0]
    assert torch.equal(adopted.anchor, newer.buffers[0].anchor) and torch.equal(adopted.target, adopted.anchor)
    assert adopted.version == SNAPSHOT_EVERY + 3 and not any(tensor.any() for tensor in adopted.outer.values())
    assert image(store.buffers[1]) == untouched
    commit(store, 0)
    before, epoch = images(store), store.ledger.epoch
    store.close()
    again = recovered(store.directory)
    assert images(again) == before and again.ledger.history == epoch and again.ledger.epoch == epoch + 1
    assert again.ledger.updates_after(0, None) is None
    held = AnchorRef(fragment=0, version=adopted.version, digest=digest(adopted.anchor))
    assert [committed.version for committed in again.ledger.updates_after(0, held) or ()] == [adopted.version + 1]
    again.close()


def test_a_crash_at_any_moment_of_an_adoption_leaves_the_copy_or_what_was_adopted(
    tmp_path: Path, newer: Store, anchors: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S: and what had been fetched is found again; verify finds all of it whole."""
    store = an_old_copy(tmp_path / "copied", newer, anchors)
    copied = images(store)
    found: list[tuple[str, int]] = []

    def see(copy: Path) -> None:
        again = recovered(copy, segment_bytes=SEGMENT_BYTES)
        is_copy = images(again) == copied
        assert is_copy or [image["version"] for image in images(again)] == newer.ledger.versions
        assert is_copy == (again.ledger.history == 0) and again.alarms == {}
        found.append(("copy" if is_copy else "adopted", len(again.fetched)))
        again.close()
        assert not verify(copy).faults

    with monkeypatch.context() as patch:
        Camera(store.directory, patch, see)
        store.adopt(adoption(store, newer, 0, 1))
    run_rounds(store, SNAPSHOT_EVERY)
    assert [what for what, _ in found] == sorted((what for what, _ in found), reverse=True)
    assert {("copy", 1), ("copy", 2), ("adopted", 2)} <= set(found)
    assert not store.fetched, "once two snapshots hold them, they may go"
    store.close()


def full(self: Journal, *args: Any, **options: Any) -> Any:
    """In the place of `Journal.append`."""
    raise DiskFull(Path("disk"), 1, 0)


def test_an_adoption_that_finds_no_room_is_tried_again(
    tmp_path: Path, newer: Store, anchors: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = an_old_copy(tmp_path / "copy", newer, anchors)
    record = adoption(store, newer, 0)
    with monkeypatch.context() as patch, pytest.raises(DiskFull):
        patch.setattr(Journal, "append", full)
        store.adopt(record)
    assert store.ledger.history == 0 and store.buffers[0].version == 3
    store.adopt(record)
    assert store.ledger.history == record.epoch
    store.close()


@pytest.mark.parametrize("before", ["it began", "it is tried again"])
def test_an_old_copy_that_somebody_else_took_over_adopts_nothing(
    tmp_path: Path, newer: Store, anchors: list[Tensor], monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Its next epoch is one that nodes have not met: the other start need not have heard of theirs."""
    store = an_old_copy(tmp_path / "copy", newer, anchors)
    record = adoption(store, newer, 0)
    if before == "it is tried again":
        with monkeypatch.context() as patch, pytest.raises(DiskFull):
            patch.setattr(Journal, "append", full)
            store.adopt(record)
    claim_epoch(store.directory)
    with pytest.raises(Fenced):
        store.adopt(record)
    assert store.ledger.history == 0
    store.close()
