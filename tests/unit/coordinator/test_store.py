"""The state directory: begin, commit, recover, prune; what was durable comes back from any crash (protocol K, O–S).

Syncs return at once here: `test_power_loss.py` shows what they are for, with a crash at every call.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from stored_runs import NODES, adopt, begun, commit, fetch, run_rounds, spool

from farloop.algo import schedule
from farloop.algo.digest import digest
from farloop.algo.merge_rules import MERGE_RULES
from farloop.algo.methods import METHODS
from farloop.algo.outer_optimizers import OuterKind, state_names
from farloop.algo.spec import BlobId, BlobKind, RunSpec, WindowTerms
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
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest

A, _ = NODES
SEGMENT_BYTES = 24 << 10
"""So small that the room set aside for a commit always begins another."""


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def data_parallel(spec: RunSpec) -> RunSpec:
    """One fragment, a commit per step, gradients that are not spooled (protocol K)."""
    layout = dataclasses.replace(spec.identity.layout, slots=1, fragments=spec.identity.layout.fragments[:1])
    terms = spec.terms.replace(method="data-parallel", h=1, tau=0, mix=0.0, codec_up="fp32", codec_down="fp32")
    return dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, layout=layout), terms=terms)


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
def store(tmp_path: Path, spec: RunSpec) -> Iterator[Store]:
    opened = begun(tmp_path / "state", spec)
    yield opened
    opened.close()


def test_a_new_run_is_at_version_0_and_is_not_begun_again(tmp_path: Path, spec: RunSpec) -> None:
    assert Store.recover(tmp_path) is None
    store = begun(tmp_path, spec)
    assert (store.ledger.versions, store.ledger.epoch, store.alarms) == ([0, 0], 1, {})
    for buffers, known in zip(store.buffers, store.ledger.spec.identity.anchor_digests, strict=True):
        assert digest(buffers.anchor) == digest(buffers.target) == known
    with pytest.raises(StateLocked):
        Store.recover(tmp_path)
    store.close()
    with pytest.raises(StateMismatch, match="holds a run already"):
        begun(tmp_path, spec)
    recovered(tmp_path).close()


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
    spool(store, 1, A)
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


@pytest.mark.parametrize("rounds", [0, 1, SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY, SNAPSHOT_EVERY + 1, 19])
def test_a_recovery_has_every_bit_of_the_run_that_it_follows(store: Store, spec: RunSpec, rounds: int) -> None:
    """B21, P: anchors by decoding updates, targets and momenta by repeating the arithmetic; and they go on alike."""
    run_rounds(store, rounds)
    stored = spool(store, 1, A)
    data = store.read_input(stored.blob)
    ledger, before = store.ledger.copy(), images(store)
    store.close()

    again = recovered(store.directory)
    assert images(again) == before and again.alarms == {}
    ledger.epoch += 1
    assert again.ledger == ledger
    assert again.read_input(stored.blob) == data, "the window goes on where it was"
    commit(again, 1)
    again.close()

    uninterrupted = begun(store.directory.with_name("uninterrupted"), spec)
    run_rounds(uninterrupted, rounds)
    commit(uninterrupted, 1)
    uninterrupted.close()
    assert images(uninterrupted) == images(again)


@pytest.mark.parametrize("rounds", [SNAPSHOT_EVERY - 3, SNAPSHOT_EVERY + 3])
@pytest.mark.parametrize("kind", [kind for kind in get_args(OuterKind) if kind != "adamw"])
@pytest.mark.parametrize("rule", MERGE_RULES)
def test_a_recovery_has_every_bit_whatever_the_optimizer_and_the_merge_rule(
    tmp_path: Path,
    spec: RunSpec,
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
    run = dataclasses.replace(spec, terms=spec.terms.replace(**choices))
    store = begun(tmp_path / "one", run)
    assert sorted(store.buffers[0].outer) == sorted(state_names(kind, run.terms.outer.momentum))
    run_rounds(store, rounds)
    before = images(store)
    store.close()
    again = recovered(store.directory)
    assert images(again) == before and again.alarms == {}
    run_rounds(again, 3)
    again.close()

    uninterrupted = begun(tmp_path / "other", run)
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
    tmp_path: Path, spec: RunSpec
) -> None:
    """K, P: gradients are not spooled; the anchors cannot fork, the run goes on, and a person can see why it jumped."""
    store = begun(tmp_path, data_parallel(spec))
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
    assert store.alarms == {"optimizer of fragment 0": "its state of version 9 differed when the restart recomputed it"}
    commit(store, 0)
    assert store.ledger.versions == [10]
    store.close()


Damage = Callable[[Path, RunSpec], None]


def only_an_epoch(place: Path, spec: RunSpec) -> None:
    shutil.rmtree(place)
    journal, _ = Journal.open(place)
    journal.append(rec.EpochClaimed(epoch=1))
    journal.close()


def no_snapshot(place: Path, spec: RunSpec) -> None:
    snapshot_path(place, 1, 0).unlink()


def a_snapshot_of_another_run(place: Path, spec: RunSpec) -> None:
    other = place.with_name("other")
    begun(other, dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, name="other"))).close()
    shutil.copy(snapshot_path(other, 0, 0), snapshot_path(place, 0, 0))


def an_older_journal(place: Path, spec: RunSpec) -> None:
    """S: the journal was restored from an older copy, the snapshots were not."""
    newer = place.with_name("newer")
    shutil.copytree(place, newer)
    store = recovered(newer)
    run_rounds(store, SNAPSHOT_EVERY)
    store.close()
    shutil.copytree(newer / "snapshots", place / "snapshots", dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (only_an_epoch, StateMismatch, "does not begin with a run's start"),
        (no_snapshot, StateMismatch, "no snapshot of fragment 1"),
        (a_snapshot_of_another_run, SnapshotCorrupt, "is of run"),
        (an_older_journal, StateMismatch, "lead to version 8 of fragment 0, the last commit is 0"),
    ],
)
def test_a_state_that_does_not_fit_together_is_refused(
    store: Store, spec: RunSpec, damage: Damage, error: type[Exception], words: str
) -> None:
    store.close()
    damage(store.directory, spec)
    with pytest.raises(error, match=words):
        Store.recover(store.directory)
    Journal.open(store.directory)[0].close()  # it was unlocked


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


@pytest.mark.parametrize("segment_bytes", [SEGMENT_BYTES, 256 << 20])
def test_one_damaged_snapshot_costs_nothing(tmp_path: Path, spec: RunSpec, segment_bytes: int) -> None:
    """P: the one before it is kept, and so is the journal behind that, whatever was pruned."""
    store = begun(tmp_path, spec, segment_bytes=segment_bytes)
    run_rounds(store, 5 * SNAPSHOT_EVERY + 3)
    before = images(store)
    store.close()
    for fragment in range(2):
        path = snapshot_path(tmp_path, fragment, 5 * SNAPSHOT_EVERY)
        path.write_bytes(path.read_bytes()[:-1])
    again = recovered(tmp_path, segment_bytes=segment_bytes)
    assert images(again) == before and again.alarms == {}
    again.close()


def refuse_snapshot(directory: Path, snapshot: snapshots.Snapshot, files: Files) -> Path:
    raise DiskFull(directory, 10, 5)


def test_a_snapshot_without_room_costs_neither_the_commit_nor_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "save", refuse_snapshot)
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
    store = small(store)
    run_rounds(store, SNAPSHOT_EVERY)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "save", refuse_snapshot)
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
    with pytest.raises(KeyError):
        store.update_source(0, store.ledger.versions[0] - HISTORY_VERSIONS - 1)  # and no more than that
    store.close()


def test_an_undecided_delta_keeps_its_segment(store: Store) -> None:
    """P: however long its window is held."""
    store = small(store)
    run_rounds(store, 2 * SNAPSHOT_EVERY)
    stored = spool(store, 0, A)
    data = store.read_input(stored.blob)
    held_from = max(segment_paths(store.directory))
    for _ in range(6 * SNAPSHOT_EVERY):
        commit(store, 1)
    assert store.read_input(stored.blob) == data
    assert min(segment_paths(store.directory)) <= held_from
    store = small(store)
    assert store.read_input(stored.blob) == data
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


@pytest.fixture
def copy(tmp_path: Path, spec: RunSpec) -> Iterator[Store]:
    """An old copy of a run, to which a node has brought a later anchor of fragment 0."""
    store = begun(tmp_path / "copy", spec, segment_bytes=SEGMENT_BYTES)
    run_rounds(store, 3)
    fetch(store)
    yield store
    store.close()


def test_an_adopted_anchor_is_the_nodes_and_its_optimizer_begins_anew(copy: Store) -> None:
    store, brought, untouched = copy, copy.fetched[0].anchor, image(copy.buffers[1])
    adopt(store)
    adopted = store.buffers[0]
    assert digest(adopted.anchor) == digest(adopted.target) == brought.digest
    assert adopted.version == brought.version == 6 and not any(tensor.any() for tensor in adopted.outer.values())
    assert image(store.buffers[1]) == untouched
    commit(store, 0)
    before, epoch = images(store), store.ledger.epoch
    store.close()
    again = recovered(store.directory)
    assert images(again) == before and again.ledger.history == epoch and again.ledger.epoch == epoch + 1
    assert again.ledger.updates_after(0, None) is None
    assert [committed.version for committed in again.ledger.updates_after(0, brought) or ()] == [7]
    run_rounds(again, 2 * SNAPSHOT_EVERY)
    assert not again.fetched, "once two snapshots hold them, they may go"
    again.close()


def full(self: Journal, *args: Any, **options: Any) -> Any:
    """In the place of `Journal.append`."""
    raise DiskFull(Path("disk"), 1, 0)


def adopt_without_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(DiskFull):
        patch.setattr(Journal, "append", full)
        adopt(store)
    assert store.ledger.history == 0 and store.buffers[0].version == 3


def test_an_adoption_that_finds_no_room_is_tried_again(copy: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt_without_room(copy, monkeypatch)
    adopt(copy)
    assert copy.ledger.history == copy.ledger.epoch == 6


@pytest.mark.parametrize("tried_before", [False, True])
def test_an_old_copy_that_somebody_else_took_over_adopts_nothing(
    copy: Store, monkeypatch: pytest.MonkeyPatch, tried_before: bool
) -> None:
    """Its next epoch is one that nodes have not met: the other start need not have heard of theirs."""
    if tried_before:
        adopt_without_room(copy, monkeypatch)
    claim_epoch(copy.directory)
    with pytest.raises(Fenced):
        adopt(copy)
    assert copy.ledger.history == 0
