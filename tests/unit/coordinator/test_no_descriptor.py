"""Too many open files, of this process or of the machine (EMFILE, ENFILE): whatever needs one is tried again, and the
coordinator goes on. At every place that opens a file it is refused, in a run of the store over the real disk.
"""

import errno
import os
import shutil
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from disk_faults import refuse

from farloop.algo.spec import RunSpec
from farloop.coordinator.errors import Fenced, NoDescriptor, NoRoom, StorageError
from farloop.coordinator.storage import files, snapshots
from farloop.coordinator.storage.journal import claim_epoch
from farloop.coordinator.storage.recovery import refusal
from farloop.coordinator.storage.salvage import salvage
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify
from farloop.quant.digest import digest

SEGMENT_BYTES = 12 << 10
_COORDINATOR = str(Path(files.__file__).parent)


@dataclass
class Refusals:
    """Stands in for `with_spare`: what it refuses is not opened."""

    asked: int = 0
    refused: int = 0
    at: int = -1
    """Which call is refused."""
    for_good: bool = False
    """All are."""
    once_each: set[tuple[str, ...]] | None = None
    """The first of every chain of functions is that is not in here yet."""
    code: int = errno.EMFILE

    def __call__(self, open_one: Callable[[], Any]) -> Any:
        self.asked += 1
        new = self.once_each is not None and (chain := _chain()) not in self.once_each
        if new:
            self.once_each.add(chain)
        if self.for_good or new or self.asked == self.at:
            self.refused += 1
            refuse(self.code)()
        return open_one()


def _chain() -> tuple[str, ...]:
    frames = traceback.extract_stack()
    return tuple(f"{Path(f.filename).name}:{f.lineno}" for f in frames if f.filename.startswith(_COORDINATOR))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr("farloop.coordinator.storage.files.File.allocation_step", 4096)
    stored_runs.shorten(monkeypatch, snapshot_every=2, history=1)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    found = Refusals()
    monkeypatch.setattr("farloop.coordinator.storage.files.with_spare", found)
    return found


def patiently(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As the coordinator calls its store: what finds no room is tried again."""
    while True:
        try:
            return call(*args, **kwargs)
        except NoRoom as error:
            assert isinstance(error, NoDescriptor) and "too many open files" in str(error)


class Patient:
    """A store whose every call is made patiently."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        return partial(patiently, found) if callable(found) else found


def story(directory: Path) -> tuple[int, ...]:
    """A restart, commits, new segments, snapshots, an update that is read, an adoption, an export; what came of it."""
    store: Any = Patient(patiently(Store.recover, directory, segment_bytes=SEGMENT_BYTES))
    stored_runs.run_rounds(store, 3)
    newest = store.ledger.versions[0]
    source = store.update_source(0, newest)
    update = bytes(patiently(source.read, 0, source.size))
    assert len(update) == source.size
    stored_runs.fetch(store)
    stored_runs.adopt(store)
    stored_runs.run_rounds(store, 2)
    patiently(snapshots.export, directory / "model.safetensors", store.named_anchors())
    patiently(store.store.close)
    return tuple(part for b in store.buffers for part in (b.version, digest(b.anchor), digest(b.target)))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_whatever_opens_a_file_is_tried_again_and_loses_nothing(
    tmp_path: Path, spec: RunSpec, refusals: Refusals, code: int
) -> None:
    store = stored_runs.begun(tmp_path / "begun", spec, segment_bytes=SEGMENT_BYTES)
    stored_runs.run_rounds(store, 3)
    store.close()
    refusals.code = code
    places: set[tuple[str, ...]] = set()
    shutil.copytree(store.directory, tmp_path / "0")
    expected = story(tmp_path / "0")
    for number in count(1):
        directory = tmp_path / str(number)
        shutil.copytree(store.directory, directory)
        refusals.refused, refusals.once_each = 0, places
        assert story(directory) == expected
        refusals.once_each = None
        report = verify(directory)
        assert (report.faults, report.refused) == ([], "")
        if not refusals.refused:
            break
    assert len(places) > 25


@pytest.mark.parametrize("fenced", [False, True])
def test_a_record_that_is_on_the_disk_is_not_written_twice_for_want_of_a_descriptor(
    tmp_path: Path, spec: RunSpec, refusals: Refusals, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    """No node is told of it before it is known whose the folder is; the wait for that is an alarm."""
    store = stored_runs.begun(tmp_path / "state", spec)
    real, naps = files.OsFile.sync, list[list[str]]()

    def sync(file: files.OsFile) -> None:
        """Between the look at the epoch before a write and the one after its sync, the file changes."""
        real(file)
        if file.path.name.startswith("journal"):
            monkeypatch.setattr(files.OsFile, "sync", real)
            os.utime(store.directory / "epoch", ns=(1, 1))
            refusals.for_good = True

    def nap(seconds: float) -> None:
        naps.append(list(store.alarms))
        refusals.for_good = len(naps) < 3
        if fenced and len(naps) == 3:
            claim_epoch(store.directory)

    monkeypatch.setattr(files.OsFile, "sync", sync)
    monkeypatch.setattr("farloop.coordinator.storage.store.time.sleep", nap)
    with pytest.raises(Fenced) if fenced else nullcontext():
        stored_runs.spool(store, 0, stored_runs.NODES[0])
    assert naps == [["epoch of the state folder"]] * 3
    store.close()
    if not fenced:
        report = verify(store.directory)
        assert (report.faults, report.deltas, store.alarms) == ([], 1, {})


def test_want_of_a_descriptor_is_not_taken_for_damage(tmp_path: Path, spec: RunSpec, refusals: Refusals) -> None:
    """A start would go back to an older snapshot, verify call a good folder bad, salvage give up good versions."""
    store = stored_runs.begun(tmp_path / "state", spec)
    stored_runs.run_rounds(store, 5)
    store.close()
    looks: list[Callable[[], Any]] = [
        lambda: snapshots.load_latest(store.directory, 0, fingerprint=spec.identity.fingerprint()),
        lambda: refusal(store.directory),
        lambda: salvage(store.directory).given_up,
        lambda: verify(store.directory).faults,
    ]
    for look in looks[1:]:
        refusals.asked = 0
        assert not look()
        for at in range(1, refusals.asked + 1):
            refusals.asked, refusals.at = 0, at
            try:
                found = look()
            except StorageError as error:
                assert isinstance(error, NoDescriptor)
            else:
                assert not found, "it was looked at again"
            refusals.at = -1
    refusals.for_good = True
    for look in looks:
        with pytest.raises(NoDescriptor):
            look()
