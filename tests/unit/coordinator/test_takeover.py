"""Two coordinators on one state folder although locks should keep them apart: the lock was deleted, or does not hold.

Protocol S: the later start claims the epoch before it changes anything else; the earlier one notices before its next
write, and stops. The folder stays whole. And a folder that lost its journal.
"""

import errno
import math
import os
from pathlib import Path

import pytest
import stored_runs
from disk_faults import refuse

from farloop.algo.spec import RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.errors import Fenced, FolderChanged, NoDescriptor, StateMismatch, StorageFailed
from farloop.coordinator.storage.files import Lock, OsFiles
from farloop.coordinator.storage.journal import Claim, Journal, claim_epoch
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify

A, _ = stored_runs.NODES


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def first(tmp_path: Path, spec: RunSpec) -> Store:
    """A coordinator at work; its lock was deleted."""
    store = stored_runs.begun(tmp_path / "state", spec)
    stored_runs.run_rounds(store, 2)
    (store.directory / "lock").unlink()
    return store


def image(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


def whole_at(directory: Path, versions: list[int]) -> None:
    assert verify(directory).faults == []
    store = stored_runs.recovered(directory)
    assert (store.ledger.versions, store.alarms) == (versions, {})
    store.close()


def test_the_first_stops_before_its_next_write_and_the_folder_stays_whole(first: Store) -> None:
    second = stored_runs.recovered(first.directory)
    with pytest.raises(Fenced, match="epoch 2 was claimed after ours, 1"):
        stored_runs.spool(first, 0, A)
    stored_runs.run_rounds(second, 1)
    before = image(first.directory)
    with pytest.raises(Fenced):
        first.reserve(0, "q4")
    first.close()
    assert image(first.directory) == before, "its end does not give back room in a file that is not its own"
    stored_runs.run_rounds(second, 1)
    second.close()
    whole_at(first.directory, [4, 4])


def test_a_start_changes_nothing_before_it_has_claimed_the_epoch(first: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (first.directory / "journal-000009.log.tmp").write_bytes(b"a segment that the first is about to begin")
    before = image(first.directory)
    monkeypatch.setattr("farloop.coordinator.storage.store.claim_epoch", refuse())
    with pytest.raises(OSError, match="Input/output error"):
        Store.recover(first.directory)
    assert image(first.directory) == before


class Unlocked(OsFiles):
    """A share whose locks keep no process out."""

    def lock(self, path: Path) -> Lock:
        return super().lock(path.with_name("lock-of-another-host"))


def test_what_the_first_commits_while_the_second_reads_is_not_lost(tmp_path: Path, spec: RunSpec) -> None:
    first = stored_runs.begun(tmp_path / "state", spec)
    fragments = iter([0])

    def meanwhile(_: RunSpec) -> None:
        for fragment in fragments:
            stored_runs.commit(first, fragment)

    second = stored_runs.recovered(first.directory, accept=meanwhile, files=Unlocked())
    assert second.ledger.versions == [1, 0]
    with pytest.raises(Fenced):
        stored_runs.spool(first, 1, A)
    second.close()
    first.close()
    whole_at(first.directory, [1, 0])


def test_a_journal_that_changes_during_every_read_is_not_said_to_be_locked(tmp_path: Path, spec: RunSpec) -> None:
    stored_runs.begun(tmp_path, spec).close()

    def meanwhile(_: RunSpec) -> None:
        with stored_runs.segment_paths(tmp_path)[0].open("ab") as journal:
            journal.write(b"a record that")

    with pytest.raises(FolderChanged, match=r"another process wrote to its journal during each of 3 reads;"):
        Store.recover(tmp_path, accept=meanwhile)


def test_a_record_that_is_not_equal_to_itself_keeps_no_start_out(tmp_path: Path, spec: RunSpec) -> None:
    """Segments are compared by digests, and summaries by bytes."""
    store = stored_runs.begun(tmp_path / "state", spec, segment_bytes=8 << 10)
    store.append(rec.EvaluationTaken(loss=1.0, versions=(0, 0), position=math.nan))
    stored_runs.run_rounds(store, 4)
    store.close()
    for epoch in (2, 3):
        again = stored_runs.recovered(store.directory)
        assert again.ledger.epoch == epoch and math.isnan(again.ledger.evaluations[0].position)
        again.close()
    assert len(stored_runs.segment_paths(store.directory)) > 1
    whole_at(store.directory, [4, 4])


def test_what_the_first_still_writes_after_the_second_has_begun_does_no_harm(first: Store) -> None:
    """It had looked at the epoch before the second claimed the next, and stood still since: its records are whole."""
    second = stored_runs.recovered(first.directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "require_ours", lambda self: None)
        stored = stored_runs.spool(first, 0, A, durable=False)
    with pytest.raises(Fenced):
        first._journal.sync()
    stored_runs.run_rounds(second, 2)
    second.close()
    first.close()
    again = stored_runs.recovered(first.directory)
    assert stored.blob not in again.ledger.inputs
    again.close()
    whole_at(first.directory, [4, 4])


def test_who_finds_its_lock_gone_stops(first: Store) -> None:
    with pytest.raises(FolderChanged, match="lock was removed or replaced"):
        stored_runs.spool(first, 0, A)
    with pytest.raises(FolderChanged):
        first.sync()
    first.close()
    whole_at(first.directory, [2, 2])


@pytest.mark.parametrize("change", ["cut", "longer", "replaced", "gone"])
def test_who_finds_its_journal_changed_stops(tmp_path: Path, spec: RunSpec, change: str) -> None:
    store = stored_runs.begun(tmp_path / "state", spec)
    (path,) = stored_runs.segment_paths(store.directory).values()
    data = path.read_bytes()
    if change in ("replaced", "gone"):
        path.unlink()
        if change == "replaced":
            path.write_bytes(data)
    else:
        os.truncate(path, len(data) + (-1 if change == "cut" else 1))
    with pytest.raises(FolderChanged, match=r"journal-000000\.log: (was removed or replaced|has \d+ bytes)"):
        stored_runs.spool(store, 0, A)
    store.close()


# --- The epoch's file


def test_epochs_only_grow_whatever_happens_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "epoch"
    assert [claim_epoch(tmp_path) for _ in range(2)] == [1, 2]
    Claim(tmp_path, 2).require()
    with pytest.raises(Fenced, match="epoch 2 was claimed after ours, 1: another coordinator"):
        Claim(tmp_path, 1).require()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse())
        with pytest.raises(StorageFailed):
            claim_epoch(tmp_path)
    assert claim_epoch(tmp_path) == 3, "the failed one claimed nothing"
    path.unlink()
    Claim(tmp_path, 3).require()
    assert [claim_epoch(tmp_path, seen=seen) for seen in (7, 2)] == [8, 9]
    path.write_bytes(b"farloop-epoch 1 41\n")
    assert claim_epoch(tmp_path) == 42 and path.read_bytes() == b"farloop-epoch 1 42\n"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"41", b"farloop-epoch 2 41\n", b"farloop-epoch 1 41", b"farloop-epoch 1 -1\n", bytes(30)),
        b"farloop-epoch 1 9223372036854775807\n",  # the next epoch went into the journal, and no message could hold it
    ],
)
def test_an_epochs_file_with_another_content_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "epoch").write_bytes(content)
    with pytest.raises(StorageFailed, match="not an epoch file"):
        claim_epoch(tmp_path, seen=5)
    assert (tmp_path / "epoch").read_bytes() == content


def test_a_folder_in_the_place_of_the_epoch_s_file_is_no_epoch_file(tmp_path: Path) -> None:
    (tmp_path / "epoch").mkdir()
    with pytest.raises(StorageFailed, match="not an epoch file of format version 1; restore it, or delete it"):
        claim_epoch(tmp_path)


def test_without_a_descriptor_the_epoch_is_looked_at_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens no file while nothing changed, and too many open files are no reason to stop."""
    claim = Claim(tmp_path, claim_epoch(tmp_path))
    claim.require()
    with monkeypatch.context() as patch:
        patch.setattr(OsFiles, "read_bytes", refuse(errno.EMFILE))
        claim.require()
        os.utime(tmp_path / "epoch", ns=(1, 1))
        with pytest.raises(NoDescriptor, match="too many open files"):
            claim.require()
    claim.require()


# --- A lost journal


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_folder_whose_journal_was_deleted_is_refused_and_says_what_can_be_done(
    tmp_path: Path, spec: RunSpec, rounds: int
) -> None:
    store = stored_runs.begun(tmp_path / "state", spec)
    stored_runs.run_rounds(store, rounds)
    store.close()
    for path in stored_runs.segment_paths(store.directory).values():
        path.unlink()
    before = image(store.directory)
    for start in (lambda: Store.recover(store.directory), lambda: stored_runs.begun(store.directory, spec)):
        with pytest.raises(StateMismatch, match=r"(?s)no record of a journal.*--restore.*--adopt-from-nodes.*--rewind"):
            start()
    assert image(store.directory) == before
