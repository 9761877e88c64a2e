"""What a reader finds in a state folder: all of it, or what is wrong and where; and commits made again (protocol P)."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_runs
import torch

from farloop.algo.spec import RunSpec
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import JournalCorrupt, StateMismatch, StorageFailed
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.journal import Journal
from farloop.coordinator.storage.segment import segment_path, segment_paths
from farloop.coordinator.storage.state_reader import placed, read_journal, steadily
from farloop.coordinator.storage.store import SNAPSHOT_EVERY, Store
from farloop.coordinator.storage.verify import replay, span, verify

ROUNDS = SNAPSHOT_EVERY + 3
GOLDEN = Path(__file__).parent / "golden" / "state-v1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr("farloop.coordinator.storage.state_reader.LOOK_AGAIN_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path, spec: RunSpec) -> Path:
    """A run of a while, whose coordinator has stopped."""
    store = stored_runs.begun(tmp_path / "state", spec, segment_bytes=24 << 10)
    stored_runs.run_rounds(store, ROUNDS)
    store.close()
    return store.directory


def image(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# --- verify


def test_a_whole_folder_is_found_whole_and_not_touched(folder: Path) -> None:
    before = image(folder)
    report = verify(folder)
    assert (report.faults, report.run, report.versions, report.torn) == ([], "small", [ROUNDS, ROUNDS], "")
    assert report.segments == len(segment_paths(folder)) > 1
    assert report.records == sum(len(scan.entries) for scan in read_journal(folder))
    assert report.snapshots == 2 * snapshots.KEEP and report.deltas == 2 * report.updates
    assert image(folder) == before


def test_a_folder_of_the_first_format_is_found_whole() -> None:
    assert verify(GOLDEN).faults == []


def test_a_folder_whose_coordinator_is_at_work_is_found_whole(tmp_path: Path, spec: RunSpec) -> None:
    store = stored_runs.begun(tmp_path / "state", spec, segment_bytes=24 << 10)
    for rounds in range(1, SNAPSHOT_EVERY + 2):
        stored_runs.run_rounds(store, 1)
        stored_runs.spool(store, 0, stored_runs.NODES[0])
        report = verify(store.directory)
        assert (report.faults, report.versions) == ([], [rounds, rounds])
    store.close()


def test_every_start_of_a_coordinator_is_counted(folder: Path) -> None:
    for _ in range(2):
        store = Store.recover(folder)
        assert store is not None
        store.close()
    report = verify(folder)
    assert (report.faults, report.epoch) == ([], 3)


def test_a_flipped_bit_is_found_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    """In each record of each segment: in its header, its body and its attachment."""
    whole = read_journal(folder)
    places = [at for scan in whole for at in placed(scan)]
    durable = [at for at in places if at.entry.sequence + 1 < places[-1].entry.sequence]
    for at in durable[:: len(durable) // 12]:
        end = at.attachment.offset + at.attachment.size
        for offset in (at.offset + 9, at.offset + 60, end - 1):
            copy = Path(shutil.copytree(folder, tmp_path / "copy"))
            path = segment_path(copy, at.segment)
            flip(path, offset)
            (fault, *_) = verify(copy).faults
            assert fault.where == f"{path.name} byte {at.offset}", "exactly there"
            assert f"record {at.entry.sequence} is damaged" in fault.what
            shutil.rmtree(copy)


def test_a_torn_tail_is_told_from_damage(folder: Path) -> None:
    (*_, last) = segment_paths(folder).values()
    end = read_journal(folder)[-1].end
    with last.open("r+b") as file:
        file.seek(end)
        file.write(b"\x89FLR half a record")
    report = verify(folder)
    assert report.faults == []
    assert report.torn.startswith(f"{last.name} byte {end}: 18 bytes of a torn tail")


def test_a_missing_segment_is_named(folder: Path) -> None:
    number = sorted(segment_paths(folder))[1]
    segment_path(folder, number).unlink()
    (fault, *_) = verify(folder).faults
    assert (fault.where, fault.what) == (f"journal-{number:06d}.log", "this segment of the journal is missing")


def test_a_damaged_snapshot_is_named_and_so_is_one_that_is_not_its_commits(folder: Path) -> None:
    newest = snapshots.snapshot_path(folder, 0, SNAPSHOT_EVERY)
    whole = newest.read_bytes()
    flip(newest, len(whole) - 1)
    (fault, *_) = verify(folder).faults
    assert fault.where == f"snapshots/{newest.name}" and "checksum" in fault.what
    newest.write_bytes(whole)
    found = snapshots.load(newest)
    tensors = {**found.tensors, "anchor": found.tensors["anchor"] + torch.eye(1, found.tensors["anchor"].numel())[0]}
    snapshots.save(folder, snapshots.Snapshot(
        fingerprint=found.fingerprint, fragment=0, version=SNAPSHOT_EVERY, tensors=tensors, digests={}
    ))  # fmt: skip
    (fault, *_) = verify(folder).faults
    assert fault.where == f"snapshots/{newest.name}" and fault.what.startswith("its anchor has digest ")


def test_a_fragment_without_a_snapshot_to_begin_from_is_found(folder: Path) -> None:
    for path in (folder / "snapshots").glob("f1-*"):
        path.unlink()
    what = [fault.what for fault in verify(folder).faults]
    assert f"no valid snapshot of fragment 1 leads to version {ROUNDS}" in what


def test_an_epoch_that_does_not_rise_is_found(folder: Path) -> None:
    journal, _ = Journal.open(folder)
    journal.append(rec.EpochClaimed(epoch=1))
    journal.close()
    (fault,) = verify(folder).faults
    assert fault.what == "epoch 1 is claimed after epoch 1"


def test_an_epoch_file_that_lags_behind_the_journal_is_found(folder: Path) -> None:
    store = Store.recover(folder)
    assert store is not None
    store.close()
    (folder / "epoch").write_bytes(b"farloop-epoch 1 1\n")
    (fault,) = verify(folder).faults
    assert (fault.where, fault.what) == ("epoch", "the file says 1, the journal 2")


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (rec.SnapshotTaken(fragment=1, version=ROUNDS + 1), "recorded in the journal, and missing"),
        (
            rec.InputStored(
                blob=stored_runs.BlobId(kind=stored_runs.BlobKind.DELTA, fragment=0, version=0), window=1,
                contributors=(), digest=7,
            ),
            "its delta does not match its recorded digest",
        ),
    ],
)  # fmt: skip
def test_a_record_that_says_what_is_not_so_is_found(folder: Path, record: rec.Record, what: str) -> None:
    journal, _ = Journal.open(folder)
    journal.append(record)
    journal.close()
    (fault,) = verify(folder).faults
    assert fault.what == what


def test_a_version_out_of_turn_is_found(folder: Path) -> None:
    commit = next(
        at.record
        for scan in read_journal(folder)
        for at in placed(scan)
        if isinstance(at.record, rec.WindowCommitted) and at.record.fragment == 1
    )
    journal, _ = Journal.open(folder)
    journal.append(commit)
    journal.close()
    (fault,) = verify(folder).faults
    assert fault.what == f"version {commit.version} of fragment 1 follows version {ROUNDS}"


def test_an_empty_folder_and_one_that_is_not_there_are_no_journals(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StateMismatch):
            verify(path)


# --- reading beside a coordinator


def test_what_is_different_at_the_second_look_was_no_damage() -> None:
    faults: list[Exception] = [
        JournalCorrupt(Path("a"), 1, "half written"),
        StorageFailed(Path("b"), "read: pruned meanwhile"),
    ]

    def look() -> str:
        if faults:
            raise faults.pop(0)
        return "whole"

    pauses: list[float] = []
    assert steadily(look, pauses.append) == "whole" and len(pauses) == 2


def test_what_is_the_same_at_the_second_look_is_damage() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        raise JournalCorrupt(Path("a"), 1, "damaged")

    with pytest.raises(JournalCorrupt):
        steadily(look, lambda seconds: None)
    assert len(looks) == 2


# --- replay


def all_again(folder: Path) -> list[tuple[int, int, bool, bool]]:
    scans = read_journal(folder)
    return [(r.fragment, r.version, r.from_deltas, r.same) for r in replay(folder, scans, span(folder, scans))]


def test_every_commit_behind_a_snapshot_comes_out_again_to_the_bit(folder: Path) -> None:
    """M, O: updates, anchors, targets and momenta, and the terms that followed."""
    before = image(folder)
    scans = read_journal(folder)
    spans = span(folder, scans)
    assert spans[0] == spans[1] and spans[0][1] == ROUNDS and spans[0][0] <= SNAPSHOT_EVERY + 1
    found = all_again(folder)
    assert sorted(found) == [
        (fragment, version, True, True) for fragment in (0, 1) for version in range(spans[0][0], ROUNDS + 1)
    ]
    assert image(folder) == before


def test_a_part_of_a_run_can_be_made_again(folder: Path) -> None:
    scans = read_journal(folder)
    again = list(replay(folder, scans, {1: (ROUNDS - 1, ROUNDS - 1)}))
    assert [(r.fragment, r.version, r.same) for r in again] == [(1, ROUNDS - 1, True)]


def test_deltas_that_are_measured_and_not_merged_are_given_to_the_arithmetic_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of nodes in quarantine, under screen = full."""
    told: list[int] = []
    compute = commits.compute

    def counted(ledger: Ledger, held: Buffers, record: rec.WindowCommitted, inputs: commits.Inputs, others: Any) -> Any:
        told.append(len(others))
        return compute(ledger, held, record, inputs, others)

    monkeypatch.setattr(commits, "compute", counted)
    monkeypatch.setattr(commits, "apart", lambda record: [record.blobs[1].blob])
    again = list(replay(folder, read_journal(folder), {0: (ROUNDS, ROUNDS)}))
    assert [(r.from_deltas, r.same) for r in again] == [(True, True)] and set(told) == {1}


def test_a_run_of_the_first_format_comes_out_again() -> None:
    assert all_again(GOLDEN) == [(1, 3, True, True)]


def test_before_the_oldest_snapshot_there_is_nothing_to_begin_from(folder: Path) -> None:
    with pytest.raises(StateMismatch, match="no snapshot of fragment 0 is older than version 0"):
        list(replay(folder, read_journal(folder), {0: (0, 1)}))


@pytest.mark.parametrize("what", ["anchor", "momentum"])
def test_another_state_to_begin_from_does_not_come_out_and_says_what_differs(folder: Path, what: str) -> None:
    found = snapshots.load(snapshots.snapshot_path(folder, 0, SNAPSHOT_EVERY))
    tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
    tensors[what][3] += 1.0
    snapshots.save(folder, snapshots.Snapshot(
        fingerprint=found.fingerprint, fragment=0, version=SNAPSHOT_EVERY, tensors=tensors, digests={}
    ))  # fmt: skip
    (first,) = replay(folder, read_journal(folder), {0: (SNAPSHOT_EVERY + 1, ROUNDS)})
    differ = {comparison.name for comparison in first.compared if not comparison.same}
    assert first.version == SNAPSHOT_EVERY + 1 and not first.same
    assert what.replace("momentum", "outer state") in differ


def test_without_stored_deltas_the_anchor_alone_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K"""
    hidden: Callable[[object], object] = lambda record: None  # noqa: E731
    monkeypatch.setattr("farloop.coordinator.storage.verify._spooled", hidden)
    again = list(replay(folder, read_journal(folder), {0: (ROUNDS, ROUNDS)}))
    assert [(r.from_deltas, r.same, len(r.compared)) for r in again] == [(False, True, 2)]
