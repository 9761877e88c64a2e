"""What a reader finds in a state folder: all of it, or what is wrong and where; and commits made again (protocol P)."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from stored_runs import SNAPSHOT_EVERY, segment_paths

from farloop.algo.spec import BlobId, BlobKind, RunSpec
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import JournalCorrupt, StateMismatch, StorageFailed
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.journal import Journal
from farloop.coordinator.storage.segment import Entry, Segments, segment_path
from farloop.coordinator.storage.state_reader import read_journal, steadily
from farloop.coordinator.storage.verify import replay, span, verify

ROUNDS = SNAPSHOT_EVERY + 3


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", SNAPSHOT_EVERY)
        patch.setattr("farloop.coordinator.storage.state_reader.LOOK_AGAIN_S", 0.0)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, spec: RunSpec, quick: None) -> Path:
    store = stored_runs.begun(tmp_path_factory.mktemp("run") / "state", spec, segment_bytes=24 << 10)
    stored_runs.run_rounds(store, ROUNDS)
    store.close()
    return store.directory


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    """A run of a while, whose coordinator has stopped."""
    return Path(shutil.copytree(written, tmp_path / "state"))


def image(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def told(folder: Path) -> tuple[str, str]:
    """Where the first fault is, and what it is."""
    fault = verify(folder).faults[0]
    return fault.where, fault.what


def test_terms_with_nan_are_named_by_place(tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("farloop.algo.terms._require_finite", lambda name, value: None)
        lr = dataclasses.replace(spec.terms.schedule.lr, drop_factor=float("nan"))
        stored_runs.begun(tmp_path, dataclasses.replace(spec, terms=spec.terms.replace(lr=lr))).close()
    where, what = told(tmp_path)
    assert where == "journal-000000.log byte 40"
    assert "RunStarted.spec.terms: " in what and "lr.drop_factor: expected a finite number; got nan" in what


def changed_snapshot(folder: Path, name: str) -> Path:
    """A valid snapshot of the last version that has one, with another tensor than its commits made."""
    path = snapshots.snapshot_path(folder, 0, SNAPSHOT_EVERY)
    found = snapshots.load(path)
    tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
    tensors[name][3] += 1.0
    snapshots.save(folder, snapshots.Snapshot(
        fingerprint=found.fingerprint, fragment=0, version=SNAPSHOT_EVERY, tensors=tensors, digests={}
    ))  # fmt: skip
    return path


# --- verify


def test_a_whole_folder_is_found_whole_and_not_touched(folder: Path) -> None:
    before = image(folder)
    report = verify(folder)
    assert (report.faults, report.run, report.versions, report.torn) == ([], "small", [ROUNDS, ROUNDS], "")
    assert report.segments == len(segment_paths(folder)) > 1
    assert report.records == len(read_journal(folder))
    assert report.snapshots == 2 * snapshots.KEEP and report.deltas == 2 * report.updates
    assert image(folder) == before
    for epoch in (2, 3):
        stored_runs.recovered(folder).close()
        report = verify(folder)
        assert (report.faults, report.epoch) == ([], epoch)


def test_a_flipped_bit_is_found_wherever_it_is(folder: Path) -> None:
    """In each record of each segment: in its header, its body and its attachment."""
    places = read_journal(folder)
    durable = [at for at in places if at.sequence + 1 < places[-1].sequence]
    for at in durable[:: len(durable) // 4]:
        path = segment_path(folder, at.attachment.segment)
        whole = path.read_bytes()
        for offset in (at.offset + 9, at.offset + 60, at.attachment.offset + at.attachment.size - 1):
            flip(path, offset)
            where, what = told(folder)
            assert where == f"{path.name} byte {at.offset}" and f"record {at.sequence} is damaged" in what
            path.write_bytes(whole)


def test_a_torn_tail_is_told_from_damage(folder: Path) -> None:
    (*_, last) = segment_paths(folder).values()
    end = Segments(folder).last.end
    with last.open("r+b") as file:
        file.seek(end)
        file.write(b"\x89FLR half a record")
    report = verify(folder)
    assert report.faults == []
    assert report.torn.startswith(f"{last.name} byte {end}: 18 bytes of a torn tail")


def test_files_that_are_missing_damaged_or_do_not_fit_are_named(folder: Path) -> None:
    snapshot = snapshots.snapshot_path(folder, 0, SNAPSHOT_EVERY)
    whole = snapshot.read_bytes()
    flip(snapshot, len(whole) - 1)
    where, what = told(folder)
    assert where == f"snapshots/{snapshot.name}" and "checksum" in what
    snapshot.write_bytes(whole)
    changed_snapshot(folder, "anchor")
    where, what = told(folder)
    assert where == f"snapshots/{snapshot.name}" and what.startswith("its anchor has digest ")
    snapshot.write_bytes(whole)

    stored_runs.recovered(folder).close()
    (folder / "epoch").write_bytes(b"farloop-epoch 1 1\n")
    assert told(folder) == ("epoch", "the file says 1, the journal 2")

    for path in (folder / "snapshots").glob("f1-*"):
        path.unlink()
    faults = [fault.what for fault in verify(folder).faults]
    assert f"no valid snapshot of fragment 1 leads to version {ROUNDS}" in faults

    number = sorted(segment_paths(folder))[1]
    segment_path(folder, number).unlink()
    assert told(folder) == (f"journal-{number:06d}.log", "this segment of the journal is missing")


def test_all_records_beside_damage_are_counted_and_their_snapshots_and_summaries_compared(folder: Path) -> None:
    whole = verify(folder)
    paths = list(segment_paths(folder).values())
    second = next(
        at for at in read_journal(folder) if isinstance(at, Entry) and at.where.startswith(paths[0].name[8:14])
    )
    flip(paths[0], second.end + 60)
    report = verify(folder)
    (fault,) = report.faults
    assert fault.where == f"{paths[0].name} byte {second.end}"
    assert report.records == whole.records - 1 and report.versions == whole.versions and not report.refused


def a_commit_again(folder: Path) -> rec.Record:
    """The first commit of fragment 1 that is left in the journal."""
    records = [at.record for at in read_journal(folder)]
    return next(record for record in records if isinstance(record, rec.WindowCommitted) and record.fragment == 1)


DELTA = BlobId(kind=BlobKind.DELTA, fragment=0, version=0)


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (lambda folder: rec.EpochClaimed(epoch=1), "epoch 1 is claimed after epoch 1"),
        (lambda folder: rec.SnapshotTaken(fragment=1, version=ROUNDS + 1), "recorded in the journal, and missing"),
        (
            lambda folder: rec.InputStored(blob=DELTA, window=1, contributors=(), digest=7),
            "its delta does not match its recorded digest",
        ),
        (a_commit_again, f"of fragment 1 follows version {ROUNDS}"),
    ],
)
def test_a_record_that_is_wrong_is_found(folder: Path, record: Callable[[Path], rec.Record], what: str) -> None:
    added = record(folder)
    journal, _ = Journal.open(folder)
    journal.append(added, b"x" if isinstance(added, rec.InputStored) else b"")
    journal.close()
    (fault,) = verify(folder).faults
    assert fault.what.endswith(what)


def test_an_empty_folder_and_one_that_is_not_there_are_no_journals(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StateMismatch):
            verify(path)


def test_beside_a_coordinator_only_what_is_the_same_at_the_second_look_is_damage() -> None:
    half, pruned = JournalCorrupt(Path("a"), 1, "half written"), StorageFailed(Path("b"), "read: pruned meanwhile")

    def looks(*found: Exception | None) -> tuple[object, int]:
        left, pauses = list(found), list[float]()

        def look() -> str:
            if error := left.pop(0):
                raise error
            return "whole"

        try:
            return steadily(look, pauses.append), len(pauses)
        except JournalCorrupt as error:
            return error, len(pauses)

    assert looks(half, pruned, None) == ("whole", 2)
    assert looks(half, JournalCorrupt(Path("a"), 1, "half written"))[1] == 1


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
    assert sorted(all_again(folder)) == [
        (fragment, version, True, True) for fragment in (0, 1) for version in range(spans[0][0], ROUNDS + 1)
    ]
    again = list(replay(folder, scans, {1: (ROUNDS - 1, ROUNDS - 1)}))
    assert [(r.fragment, r.version, r.same) for r in again] == [(1, ROUNDS - 1, True)]
    assert image(folder) == before
    with pytest.raises(StateMismatch, match="no snapshot of fragment 0 is older than version 0"):
        list(replay(folder, scans, {0: (0, 1)}))


def test_deltas_that_are_only_measured_count_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of nodes in quarantine, under screen = full."""
    given: list[int] = []
    compute = commits.compute

    def counted(ledger: Ledger, held: Buffers, record: rec.WindowCommitted, inputs: commits.Inputs, others: Any) -> Any:
        given.append(len(others))
        return compute(ledger, held, record, inputs, others)

    monkeypatch.setattr(commits, "compute", counted)
    monkeypatch.setattr(commits, "apart", lambda record: [record.blobs[1].blob])
    again = list(replay(folder, read_journal(folder), {0: (ROUNDS, ROUNDS)}))
    assert [(r.from_deltas, r.same) for r in again] == [(True, True)] and set(given) == {1}


@pytest.mark.parametrize(("what", "differs"), [("anchor", "anchor"), ("momentum", "outer state")])
def test_another_state_to_begin_from_says_what_differs(folder: Path, what: str, differs: str) -> None:
    changed_snapshot(folder, what)
    (first,) = replay(folder, read_journal(folder), {0: (SNAPSHOT_EVERY + 1, ROUNDS)})
    assert first.version == SNAPSHOT_EVERY + 1 and not first.same
    assert differs in {comparison.name for comparison in first.compared if not comparison.same}


def test_without_stored_deltas_the_anchor_alone_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K"""
    monkeypatch.setattr("farloop.coordinator.storage.verify._spooled", lambda record: None)
    again = list(replay(folder, read_journal(folder), {0: (ROUNDS, ROUNDS)}))
    assert [(r.from_deltas, r.same, len(r.compared)) for r in again] == [(False, True, 2)]
