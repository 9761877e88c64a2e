"""The state directory: begin, commit, recover, prune; what was durable comes back from any crash (protocol K, O–S).

Syncs return at once here: `test_power_loss.py` shows what they are for, with a crash at every call.
"""

import dataclasses
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from disk_faults import refuse_room
from safetensors.torch import load_file
from stored_runs import NODES, SNAPSHOT_EVERY, adopt, begun, commit, fetch, recovered, run_rounds, segment_paths, spool

from farloop.algo.merge_rules import MERGE_RULES
from farloop.algo.methods import METHODS
from farloop.algo.outer_optimizers import OuterKind, state_names
from farloop.algo.spec import BlobId, BlobKind, RunSpec
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers, Pool, Result
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS
from farloop.coordinator.errors import DiskFull, Fenced, SnapshotCorrupt, StateLocked, StateMismatch
from farloop.coordinator.storage import recovery, snapshots
from farloop.coordinator.storage.journal import Journal, claim_epoch
from farloop.coordinator.storage.snapshots import snapshot_path, versions_of
from farloop.coordinator.storage.store import Store
from farloop.quant.blob import as_tensor, blob_bytes
from farloop.quant.digest import digest
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest

A, _ = NODES
SEGMENT_BYTES = 24 << 10
"""So small that the room set aside for a commit always begins another."""


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", SNAPSHOT_EVERY)


@pytest.fixture
def store(tmp_path: Path, spec: RunSpec) -> Iterator[Store]:
    opened = begun(tmp_path / "state", spec)
    yield opened
    opened.close()


def image(buffers: Buffers) -> dict[str, object]:
    """All bits of a fragment, by name."""
    tensors = {"anchor": buffers.anchor, "target": buffers.target, **buffers.outer}
    return {"version": buffers.version, **{name: digest(tensor) for name, tensor in tensors.items()}}


def images(store: Store) -> list[dict[str, object]]:
    return [image(buffers) for buffers in store.buffers]


def restarted(store: Store, segment_bytes: int = 256 << 20) -> Store:
    """The same bits after a restart, without an alarm."""
    before = images(store)
    store.close()
    again = recovered(store.directory, segment_bytes=segment_bytes)
    assert images(again) == before and again.alarms == {}
    return again


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


def test_every_start_has_an_epoch_of_its_own(store: Store) -> None:
    """S: one that is refused has none, for it would fence the coordinator that the run belongs to."""

    def refuse(spec: RunSpec) -> None:
        assert spec == store.ledger.spec
        raise ValueError("another run")

    store.close()
    for epoch in (2, 3, 4):
        with pytest.raises(ValueError, match="another run"):
            Store.recover(store.directory, accept=refuse)
        again = recovered(store.directory)
        assert again.ledger.epoch == epoch
        again.close()


def test_a_rewind_claims_an_epoch_above_all_that_nodes_have_met(store: Store) -> None:
    """S: and begins a history of that name, from the state as it is."""
    commit(store, 0)
    spool(store, 1, A)
    store.append(rec.EpochSeen(epoch=7))
    store.sync()
    plain = restarted(store)
    assert (plain.ledger.epoch, plain.ledger.history) == (2, 0), "else what proves the copy would be gone"
    assert plain.ledger.inputs
    plain.close()
    rewound = recovered(store.directory, rewind=True)
    assert (rewound.ledger.epoch, rewound.ledger.history, rewound.ledger.inputs) == (8, 8, {})
    assert images(rewound) == images(plain)
    commit(rewound, 1)
    again = restarted(rewound)
    assert (again.ledger.epoch, again.ledger.history, again.ledger.versions) == (9, 8, [1, 1])
    again.close()


# --- Recovery


@pytest.mark.parametrize("rounds", [0, SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY, 2 * SNAPSHOT_EVERY + 3])
def test_a_recovery_has_every_bit_of_the_run_that_it_follows(store: Store, spec: RunSpec, rounds: int) -> None:
    """B21, P: anchors by decoding updates, targets and momenta by repeating the arithmetic; and they go on alike."""
    run_rounds(store, rounds)
    stored = spool(store, 1, A)
    data, ledger = store.read_input(stored.blob), store.ledger.copy()
    again = restarted(store)
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
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *((kind, "mean") for kind in get_args(OuterKind) if kind != "adamw"),
        *(("nesterov", rule) for rule in MERGE_RULES if rule != "mean"),
    ],
)
def test_a_recovery_has_every_bit_whatever_the_optimizer_and_the_merge_rule(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch, kind: OuterKind, rule: str, rounds: int
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
    again = restarted(store)
    run_rounds(again, 3)
    again.close()
    uninterrupted = begun(tmp_path / "other", run)
    run_rounds(uninterrupted, rounds + 3)
    uninterrupted.close()
    assert images(uninterrupted) == images(again)


def test_a_recovery_has_every_bit_of_statistics_that_are_averaged(tmp_path: Path, spec: RunSpec) -> None:
    body, head = spec.identity.layout.fragments
    head = dataclasses.replace(head, tensors=(dataclasses.replace(head.tensors[0], name="0.running_var"),))
    layout = dataclasses.replace(spec.identity.layout, fragments=(body, head))
    store = begun(tmp_path, dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, layout=layout)))
    run_rounds(store, SNAPSHOT_EVERY + 3)
    assert [window.codec_down for window in store.ledger.windows.values()] == ["q4", "fp32"]
    restarted(store).close()


def test_data_parallel_comes_back_with_exact_anchors_and_an_alarm(tmp_path: Path, spec: RunSpec) -> None:
    """K, P: gradients are not spooled; the anchors cannot fork, the run goes on, and a person can see why it jumped."""
    layout = dataclasses.replace(spec.identity.layout, slots=1, fragments=spec.identity.layout.fragments[:1])
    terms = spec.terms.replace(method="data-parallel", h=1, tau=0, mix=0.0, codec_up="fp32", codec_down="fp32")
    store = begun(tmp_path, dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, layout=layout),
                                                terms=terms))  # fmt: skip
    assert not commits.spools_inputs(store.ledger.spec.terms)
    for _ in range(SNAPSHOT_EVERY):
        commit(store, 0)
    store = restarted(store)
    commit(store, 0)
    anchor = image(store.buffers[0])["anchor"]
    store.close()
    store = recovered(tmp_path)
    assert image(store.buffers[0])["anchor"] == anchor
    assert torch.equal(store.buffers[0].target, store.buffers[0].anchor)
    assert store.alarms == {
        "optimizer of fragment 0": f"its state of version {SNAPSHOT_EVERY + 1} differed when the restart recomputed it"
    }
    commit(store, 0)
    assert store.ledger.versions == [SNAPSHOT_EVERY + 2]
    store.close()


def test_an_outer_state_that_differs_is_an_alarm_and_the_anchor_is_exact(store: Store) -> None:
    """P: what was written over before it was found to differ is read again."""
    first = snapshots.of_buffers(store.ledger.spec.identity.fingerprint(), 0, store.buffers[0])
    run_rounds(store, 2)
    anchors = [image(buffers)["anchor"] for buffers in store.buffers]
    store.close()
    moved = {**first.tensors, "momentum": torch.ones(512)}
    snapshots.save(store.directory, dataclasses.replace(first, tensors=moved))
    store = recovered(store.directory)
    assert [image(buffers)["anchor"] for buffers in store.buffers] == anchors
    assert list(store.alarms) == ["optimizer of fragment 0"]
    store.close()


def test_version_0_is_made_again_where_its_only_snapshot_is_damaged_and_the_run_knows_how(store: Store) -> None:
    first = [buffers.anchor.clone() for buffers in store.buffers]
    run_rounds(store, 2)
    before = image(store.buffers[0])
    store.close()
    path = snapshot_path(store.directory, 0, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for others in (None, lambda: [anchor + 1 for anchor in first], lambda: first[:0]):
        with pytest.raises(SnapshotCorrupt):
            recovered(store.directory, first=others)
    again = recovered(store.directory, first=lambda: first)
    assert image(again.buffers[0]) == before and again.alarms.keys() == {"snapshot of fragment 0"}
    again.close()


def only_an_epoch(place: Path) -> None:
    shutil.rmtree(place)
    journal, _ = Journal.open(place)
    journal.append(rec.EpochClaimed(epoch=1))
    journal.close()


def an_older_journal(place: Path) -> None:
    """S: the journal was restored from an older copy, the snapshots were not."""
    newer = Path(shutil.copytree(place, place.with_name("newer")))
    store = recovered(newer)
    run_rounds(store, SNAPSHOT_EVERY)
    store.close()
    shutil.copytree(newer / "snapshots", place / "snapshots", dirs_exist_ok=True)


def another_anchor(place: Path) -> None:
    """P: restored anchors are exact, or nothing is."""
    store = recovered(place)
    commit(store, 0)
    store.close()
    tensors = {name: torch.zeros(512) for name in ("anchor", "target", "momentum")}
    fingerprint = store.ledger.spec.identity.fingerprint()
    snapshots.save(place, snapshots.Snapshot(fingerprint=fingerprint, fragment=0, version=0, tensors=tensors,
                                             digests={}))  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (only_an_epoch, "does not begin with a run's start"),
        (lambda place: snapshot_path(place, 1, 0).unlink(), "no snapshot of fragment 1"),
        (an_older_journal, f"lead to version {SNAPSHOT_EVERY} of fragment 0, the last commit is 0"),
        (another_anchor, "fragment 0 does not come out as version 1 said"),
    ],
)
def test_what_does_not_fit_together_is_refused(store: Store, damage: Callable[[Path], None], words: str) -> None:
    store.close()
    damage(store.directory)
    with pytest.raises(StateMismatch, match=words):
        Store.recover(store.directory)
    Journal.open(store.directory)[0].close()  # it was unlocked


# --- Snapshots and pruning


def spoil_snapshots(directory: Path, version: int) -> None:
    """The last byte is missing of both fragments' snapshots of this version."""
    for fragment in range(2):
        path = snapshot_path(directory, fragment, version)
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("segment_bytes", [SEGMENT_BYTES, 256 << 20])
def test_one_damaged_snapshot_costs_nothing(tmp_path: Path, spec: RunSpec, segment_bytes: int) -> None:
    """P: the one before it is kept, and so is the journal behind that, whatever was pruned."""
    store = begun(tmp_path, spec, segment_bytes=segment_bytes)
    run_rounds(store, 5 * SNAPSHOT_EVERY + 3)
    spoil_snapshots(tmp_path, 5 * SNAPSHOT_EVERY)
    restarted(store, segment_bytes).close()


@pytest.fixture
def small(tmp_path: Path, spec: RunSpec) -> Iterator[Store]:
    """A run in small segments."""
    opened = begun(tmp_path / "small", spec, segment_bytes=SEGMENT_BYTES)
    yield opened
    opened.close()


def test_snapshots_without_room_cost_nothing(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """P: the journal is kept back to the last but one snapshot, however old that is."""
    run_rounds(small, SNAPSHOT_EVERY)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "save", refuse_room)
        run_rounds(small, 4 * SNAPSHOT_EVERY)
    assert list(small.alarms) == ["snapshot of fragment 0", "snapshot of fragment 1"]
    assert "10 bytes more are needed" in small.alarms["snapshot of fragment 0"]
    copy = recovered(Path(shutil.copytree(small.directory, small.directory.with_name("copy"))))
    assert images(copy) == images(small)
    copy.close()
    run_rounds(small, SNAPSHOT_EVERY)
    assert small.alarms == {} and small.ledger.versions == [6 * SNAPSHOT_EVERY] * 2
    found = {snapshot_path(small.directory, 0, number * SNAPSHOT_EVERY).exists() for number in (2, 3, 4, 5)}
    assert found == {False} and snapshot_path(small.directory, 0, 6 * SNAPSHOT_EVERY).exists()
    spoil_snapshots(small.directory, 6 * SNAPSHOT_EVERY)
    restarted(small, SEGMENT_BYTES).close()


def test_the_journal_does_not_grow_for_ever(small: Store) -> None:
    """P, R"""
    sizes = []
    for _ in range(12):
        run_rounds(small, SNAPSHOT_EVERY)
        paths = segment_paths(small.directory)
        sizes.append(sum(path.stat().st_size for number, path in paths.items() if number < max(paths)))
    assert min(segment_paths(small.directory)) > 0
    assert max(sizes[4:]) < 2 * sizes[3]
    ledger = small.ledger.copy()
    again = restarted(small, SEGMENT_BYTES)
    ledger.epoch += 1
    assert again.ledger == ledger
    run_rounds(again, SNAPSHOT_EVERY)
    again.close()


@pytest.mark.parametrize("most_rounds", [0, 12])
def test_what_a_start_repeats_is_bounded_over_all_fragments(
    store: Store, monkeypatch: pytest.MonkeyPatch, most_rounds: int
) -> None:
    """P: whatever the order of the commits; snapshots stay a small part of what is written."""
    monkeypatch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", 1000)
    monkeypatch.setattr("farloop.coordinator.storage.store.COMMITS_A_SNAPSHOT", 6)
    sizes = [buffers.anchor.numel() for buffers in store.buffers]
    commit(store, 0)
    bytes_a_parameter = store.ledger.commits[0, 1].size * 3 / sizes[0]  # two deltas and an update
    monkeypatch.setattr(
        "farloop.coordinator.storage.store.MOST_REPEATED", int(most_rounds * (1 + bytes_a_parameter) * sum(sizes))
    )
    saved, snapshots_written, dice = [0, 0], 0, random.Random(5)
    for number in range(150):
        commit(store, int(dice.random() < (0.5, 0.95, 0.0)[number // 50]))
        newest = [max(versions_of(store.directory, fragment)) for fragment in (0, 1)]
        snapshots_written += sum(size for before, now, size in zip(saved, newest, sizes, strict=True) if now > before)
        saved = newest
        repeated = [version - at for version, at in zip(store.ledger.versions, saved, strict=True)]
        total = sum(commits * size for commits, size in zip(repeated, sizes, strict=True))
        assert total <= (max(most_rounds, 6) + 1) * sum(sizes), repeated
        done = sum(version * size for version, size in zip(store.ledger.versions, sizes, strict=True))
        assert 6 * snapshots_written <= done
    restarted(store).close()


def test_all_that_the_ledger_remembers_can_be_read(small: Store) -> None:
    """R: a node that comes back gets these updates; the machine's own ledger may be one commit behind."""
    for _ in range(5 * SNAPSHOT_EVERY):
        behind = small.ledger.copy()
        run_rounds(small, 1)
        for key, known in {**behind.commits, **small.ledger.commits}.items():
            source = small.update_source(*key)
            assert blob_digest(bytearray(source.read(0, source.size))) == known.digest
    assert min(segment_paths(small.directory)) > 0 and len(small.ledger.commits) == 2 * HISTORY_VERSIONS
    with pytest.raises(KeyError):
        small.update_source(0, small.ledger.versions[0] - HISTORY_VERSIONS - 1)  # and no more than that


def test_the_newest_update_is_read_from_memory_and_no_more_than_fits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_rounds(store, 2)
    told = {key: known.digest for key, known in store.ledger.commits.items()}
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "read_attachment", lambda *what: b"the file's")
        for key, digest_of_bytes in told.items():
            source = store.update_source(*key)
            data = bytearray(source.read(0, source.size))
            assert blob_digest(data) == digest_of_bytes if key[1] == 2 else data == b"the file's"
    monkeypatch.setattr("farloop.coordinator.storage.recovery.MOST_RECENT_BYTES", 500)
    run_rounds(store, 1)  # the update of fragment 1 pushes out that of fragment 0
    monkeypatch.setattr(recovery, "read_attachment", lambda *what: b"the file's")
    assert [bytes(store.update_source(f, 3).read(0, 10)) == b"the file's" for f in (0, 1)] == [True, False]


def test_an_undecided_delta_keeps_its_segment(small: Store) -> None:
    """P: however long its window is held."""
    run_rounds(small, 2 * SNAPSHOT_EVERY)
    stored = spool(small, 0, A)
    data = small.read_input(stored.blob)
    held_from = max(segment_paths(small.directory))
    for _ in range(6 * SNAPSHOT_EVERY):
        commit(small, 1)
    assert small.read_input(stored.blob) == data
    assert min(segment_paths(small.directory)) <= held_from
    again = restarted(small, SEGMENT_BYTES)
    assert again.read_input(stored.blob) == data
    commit(again, 0)
    run_rounds(again, 4 * SNAPSHOT_EVERY)
    assert min(segment_paths(again.directory)) > held_from
    again.close()


def test_an_update_that_is_being_sent_keeps_its_segment(small: Store) -> None:
    """R: a slow node reads on, however far the run has come."""
    run_rounds(small, 1)
    source = small.update_source(0, 1)
    data = bytes(source.read(0, source.size))
    run_rounds(small, 7 * SNAPSHOT_EVERY)
    assert bytes(source.read(0, source.size)) == data and bytes(source.read(10, 20)) == data[10:30]
    segment = source.attachment.segment
    assert min(segment_paths(small.directory)) == segment
    del source
    run_rounds(small, SNAPSHOT_EVERY)
    assert min(segment_paths(small.directory)) > segment


# --- Memory that is used again


def test_commits_take_turns_with_buffers_without_readers_and_leave_those_alone_that_others_have(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot or a copy that is being written keeps what it was cut from."""
    made: list[int] = []
    new = torch.empty

    def noted(*size: Any, **how: Any) -> torch.Tensor:
        if how == {"dtype": torch.float32, "device": "cpu"}:  # as the pool asks
            made.append(size[0])
        return new(*size, **how)

    monkeypatch.setattr(torch, "empty", noted)
    run_rounds(store, 2)
    made.clear()
    run_rounds(store, SNAPSHOT_EVERY - 3)
    assert not made, "nothing new, from the third round on"
    cut = store.cut()
    assert cut is not None
    before = [image(buffers) for buffers in cut.buffers]
    run_rounds(store, 3 * SNAPSHOT_EVERY)
    assert [image(buffers) for buffers in cut.buffers] == before
    assert 0 < len(made) <= 3 * 2 * 4, "one set of buffers for each that was lent"
    restarted(store).close()


def test_a_commit_is_written_over_what_has_no_other_owner_and_is_not_taken_before_it_is_durable(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_rounds(store, 2)
    places = [[tensor.data_ptr() for tensor in buffers.tensors] for buffers in store.buffers]
    make_durable, taken = store.commit, []

    def between(draft: rec.WindowCommitted, result: Result, reserved: int) -> rec.WindowCommitted:
        if taken:  # then others have all of them
            return make_durable(draft, result, reserved)
        assert store.buffers[draft.fragment].version == draft.version > store.ledger.versions[draft.fragment]
        with monkeypatch.context() as due:
            due.setattr(store, "_is_due", lambda fragment, _: fragment == draft.fragment)
            assert store.next_snapshot() is None
        if draft.version == 4:
            taken.append(store.cut())
        return make_durable(draft, result, reserved)

    monkeypatch.setattr(store, "commit", between)
    for _ in range(2):
        run_rounds(store, 1)
        if not taken:
            assert [[tensor.data_ptr() for tensor in buffers.tensors] for buffers in store.buffers] == places
    assert taken[0] is None
    assert store.cut() is not None
    restarted(store).close()


def test_what_a_commit_leaves_in_place_is_not_written_over_while_others_read_it(store: Store) -> None:
    """A commit without a change of target and momentum: a copy of the version before has them, too."""
    run_rounds(store, 1)
    cut = store.cut()
    assert cut is not None
    before = [image(buffers) for buffers in cut.buffers]
    compute, now = store.compute, store.buffers[0]
    same = dataclasses.replace(now, version=now.version + 1, anchor=now.anchor.clone(), largest=1.0)
    store.compute = lambda *args: dataclasses.replace(compute(*args), buffers=same)  # type: ignore[method-assign]
    commit(store, 0, snapshots=False)
    store.compute = compute  # type: ignore[method-assign]
    commit(store, 0, snapshots=False)
    assert [image(buffers) for buffers in cut.buffers] == before


def test_a_pool_keeps_no_more_than_it_may_and_frees_as_much_as_it_has_to_make() -> None:
    pool = Pool(100 * 4)
    small, large, other = torch.empty(30), torch.empty(60), torch.empty(40)
    pool.give([small, large])
    assert pool.empty(60) is large
    pool.give([large, other])  # 130 elements: the oldest goes
    assert pool.empty(40) is other and pool.empty(30) is not small
    assert pool.empty(50).numel() == 50 and pool.empty(60) is not large, "both together were too much"


def test_a_pool_hands_a_buffer_out_again_once_it_can_not_be_read_any_more() -> None:
    size = 32 << 20
    pool = Pool(2 * size)
    buffer = pool.buffer(size)
    buffer[0], where = 1, id(buffer)
    payload, view = as_tensor(memoryview(buffer)[64:]), memoryview(buffer)
    del buffer
    assert id(pool.buffer(size)) != where and view[0] == 1
    del view
    assert id(pool.buffer(size)) != where and payload.numel() == size - 64
    del payload
    assert id(pool.buffer(size)) == where


def test_a_pool_keeps_no_more_free_buffers_than_it_may_and_no_small_ones() -> None:
    size = 32 << 20
    pool = Pool(2 * size)
    held = [pool.buffer(size) for _ in range(4)]
    for buffer in held:
        buffer[0] = 1
    assert len({id(buffer) for buffer in held}) == 4, "those in use are not counted"
    del held, buffer
    assert pool.buffer(size + 1)[0] == 0  # no more of the four are kept than there is room for beside it: none
    again = [pool.buffer(size) for _ in range(4)]
    assert [buffer[0] for buffer in again] == [0, 0, 0, 0]
    for num_bytes in (5, 3 * size):
        assert pool.buffer(num_bytes) is not pool.buffer(num_bytes)


# --- What others take from it


def test_a_node_gets_the_anchor_as_it_is_and_others_every_parameter_by_name(store: Store) -> None:
    run_rounds(store, 1)
    fragment, anchor = store.ledger.spec.identity.layout.fragments[1], store.buffers[1].anchor
    blob, data, digest_of_bytes = commits.snapshot_blob(store.buffers[1], fragment, store.ledger.epoch)
    assert blob == BlobId(kind=BlobKind.SNAPSHOT, fragment=1, version=1)
    assert len(data) == blob_bytes(codec_named("fp32"), fragment) and digest_of_bytes == blob_digest(data)
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32, offset=64), anchor)
    named = store.named_anchors()
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {"body": (2, 200), "head": (100,)}
    assert torch.equal(named["body"].reshape(-1), store.buffers[0].anchor[:400])
    assert named["head"].data_ptr() == anchor.data_ptr(), "the export of a model needs no second one"
    store.export(store.directory / "model.safetensors")
    assert torch.equal(load_file(store.directory / "model.safetensors")["body"], named["body"])


# --- Adoption of what nodes hold


@pytest.fixture
def copy(small: Store) -> Store:
    """An old copy of a run, to which a node has brought a later anchor of fragment 0."""
    run_rounds(small, 3)
    fetch(small)
    return small


def test_an_adopted_anchor_is_the_nodes_and_its_optimizer_begins_anew(copy: Store) -> None:
    brought, untouched = copy.fetched[0].anchor, image(copy.buffers[1])
    adopt(copy)
    adopted = copy.buffers[0]
    assert digest(adopted.anchor) == digest(adopted.target) == brought.digest
    assert adopted.version == brought.version == 6 and not any(tensor.any() for tensor in adopted.outer.values())
    assert image(copy.buffers[1]) == untouched
    commit(copy, 0)
    epoch = copy.ledger.epoch
    again = restarted(copy)
    assert again.ledger.history == epoch and again.ledger.epoch == epoch + 1
    assert again.ledger.updates_after(0, None) is None
    assert [committed.version for committed in again.ledger.updates_after(0, brought) or ()] == [7]
    run_rounds(again, 2 * SNAPSHOT_EVERY)
    assert not again.fetched, "once two snapshots hold them, they may go"
    again.close()


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("fenced", [True, False])
def test_an_adoption_that_finds_no_room_is_tried_again_and_one_by_another_process_ends_it(
    copy: Store, monkeypatch: pytest.MonkeyPatch, room: bool, fenced: bool
) -> None:
    """Its next epoch is one that nodes have not met: the other start need not have heard of theirs."""
    if not room:
        with monkeypatch.context() as patch, pytest.raises(DiskFull):
            patch.setattr(Journal, "append", refuse_room)
            adopt(copy)
        assert copy.ledger.history == 0 and copy.buffers[0].version == 3
    if fenced:
        claim_epoch(copy.directory)
        with pytest.raises(Fenced):
            adopt(copy)
        assert copy.ledger.history == 0
    else:
        adopt(copy)
        assert copy.ledger.history == copy.ledger.epoch == 6
