"""Copies of a run's state in an object store, here one in memory (protocol P, S). Real stores: `integration/`."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest
import torch
from stored_runs import NODES, begun, commit, recovered, spool

from farloop.algo.spec import RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.errors import StateMismatch
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.copies import Copying, StateCopy, read_manifest, restore, write_copy
from farloop.coordinator.storage.store import Store
from farloop.quant.digest import digest
from farloop.wire.messages import AnchorRef


class Shelf(Bucket):
    """A store in memory, which can be told to fail."""

    def __init__(self) -> None:
        self.url = "memory://shelf"
        self.objects: dict[str, bytes] = {}
        self.puts_left = 1000
        self.gate: threading.Event | None = None

    def put(self, path: str, data: bytes) -> None:
        if self.gate is not None:
            assert self.gate.wait(20)
        if not self.puts_left:
            raise CopyFailed(f"{self.url}: write {path}: no route to host")
        self.puts_left -= 1
        self.objects[path] = bytes(data)

    def get(self, path: str) -> bytes | None:
        return self.objects.get(path)

    def paths(self, under: str) -> list[str]:
        return sorted(path for path in self.objects if path.startswith(under + "/"))

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.objects.pop(path, None)


@pytest.fixture
def store(tmp_path: Path, spec: RunSpec) -> Store:
    """A run in its third round."""
    store = begun(
        tmp_path / "state", dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, num_samples=1000))
    )
    for fragment in (0, 1, 0):
        commit(store, fragment)
    return store


@pytest.fixture
def shelf(store: Store) -> Shelf:
    """It has a copy of the run."""
    shelf = Shelf()
    write_copy(shelf, store.cut())
    return shelf


def test_a_restored_run_goes_on_where_the_copy_was_taken_bit_for_bit(store: Store, tmp_path: Path) -> None:
    """Whatever the snapshots on disk were: none of them is newer than version 0."""
    shelf = Shelf()
    spool(store, 1, NODES[0])
    store.append(rec.LeaseGranted(node=NODES[0], incarnation=1, lease=store.ledger.leases.propose(40)[0]))
    write_copy(shelf, store.cut())
    restore(shelf, tmp_path / "new")
    new = recovered(tmp_path / "new")
    assert new.ledger.epoch == 2 and not new.ledger.inputs, "who had a delta under way offers it again"
    assert new.ledger.versions == [2, 1] and new.ledger.windows == store.ledger.windows
    assert new.ledger.leases == store.ledger.leases and new.ledger.rounds == store.ledger.rounds
    for old, restored in zip(store.buffers, new.buffers, strict=True):
        assert torch.equal(old.anchor, restored.anchor) and torch.equal(old.target, restored.target)
        assert old.outer_digest() == restored.outer_digest()
    assert [new.ledger.anchor_digest(f, v) for f, v in ((0, 2), (1, 1))] == [digest(b.anchor) for b in new.buffers]
    first, second = commit(store, 0), commit(new, 0)
    assert (first.anchor_digest, first.target_digest) == (second.anchor_digest, second.target_digest)
    new.close()
    again = recovered(tmp_path / "new")
    assert (again.ledger.epoch, again.ledger.versions) == (3, [3, 1])


def test_who_holds_what_the_copy_holds_needs_nothing(store: Store, shelf: Shelf, tmp_path: Path) -> None:
    """R: updates before the copy are in no journal any more."""
    restore(shelf, tmp_path / "new")
    new = recovered(tmp_path / "new")
    for fragment, version, updates in ((0, 2, []), (0, 1, None), (0, 0, None), (1, 0, None)):
        held = AnchorRef(fragment=fragment, version=version, digest=store.ledger.anchor_digest(fragment, version) or 0)
        assert new.ledger.updates_after(fragment, held) == updates
    assert new.ledger.versions == [2, 1]


def test_the_last_copies_stay_and_what_a_failed_one_left_goes(store: Store) -> None:
    shelf = Shelf()
    for puts in (1000, 1, 1000, 1000, 1000):
        shelf.puts_left = puts
        with pytest.raises(CopyFailed, match="no route to host") if puts == 1 else nullcontext():
            write_copy(shelf, store.cut(), kept=2)
    assert sorted({path.split("/")[1] for path in shelf.objects}) == ["00000003", "00000004"]
    assert len(shelf.objects) == 2 * 3
    for _ in range(5):
        commit(store, 0)
        shelf.puts_left = 2
        with pytest.raises(CopyFailed):
            write_copy(shelf, store.cut())
    assert len(shelf.objects) == 2 * 3 + 2, "of the last failed try alone"


def test_a_store_that_deletes_nothing_has_the_copy_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Shelf, paths: Sequence[str]) -> None:
        raise CopyFailed("access denied")

    shelf = Shelf()
    monkeypatch.setattr(Shelf, "delete", refuse)
    assert write_copy(shelf, store.cut()) and read_manifest(shelf) is not None
    assert "old copies stay objects=0 why='access denied'" in caplog.messages


def test_a_copy_without_its_manifest_is_none(store: Store, shelf: Shelf, tmp_path: Path) -> None:
    commit(store, 0)
    shelf.puts_left = 2
    with pytest.raises(CopyFailed):
        write_copy(shelf, store.cut())
    assert restore(shelf, tmp_path / "new").versions == (2, 1)


def test_a_prefix_holds_copies_of_one_run(store: Store, shelf: Shelf) -> None:
    cut = store.cut()
    other = dataclasses.replace(cut.ledger.spec.identity, name="other", seed=9)
    changed = dataclasses.replace(cut.ledger, spec=dataclasses.replace(cut.ledger.spec, identity=other))
    with pytest.raises(CopyFailed, match=r"another run \(small\)"):
        write_copy(shelf, dataclasses.replace(cut, ledger=changed))


MANIFEST = "ckpt/00000001/manifest.json"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda text: text.replace(b'"epoch": 1', b'"epoch": 7'), "does not match its checksum"),
        (lambda text: text[: len(text) // 2], "is not a manifest"),
        (lambda text: b"[]", "is not a manifest"),
        (lambda text: text.replace(b'"format_version": 1', b'"format_version": 2'), "has format 2"),
    ],
)
def test_bad_manifests_restore_nothing(shelf: Shelf, tmp_path: Path, spoil: Callable[[bytes], bytes], why: str) -> None:
    shelf.objects[MANIFEST] = spoil(shelf.objects[MANIFEST])
    with pytest.raises(CopyFailed, match=why):
        restore(shelf, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_object_restores_nothing(shelf: Shelf, tmp_path: Path, damage: str) -> None:
    path = next(path for path in shelf.objects if "/f1-" in path)
    data = shelf.objects.pop(path)
    if damage != "gone":
        shelf.objects[path] = data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CopyFailed, match="is not what its manifest says"):
        restore(shelf, tmp_path / "new")
    with pytest.raises(StateMismatch, match="no record of a journal"):
        Store.recover(tmp_path / "new")
    with pytest.raises(CopyFailed):
        restore(shelf, tmp_path / "new")


def test_nothing_is_restored_over_a_run_or_from_nothing(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(CopyFailed, match="there is no copy"):
        restore(Shelf(), tmp_path / "new")
    assert read_manifest(Shelf()) is None
    with pytest.raises(StateMismatch, match="holds a run already"):
        restore(shelf, tmp_path / "state")


def copying(store: Store, shelf: Shelf, alarms: dict[str, str]) -> Copying:
    async def cut() -> StateCopy:
        return store.cut()

    return Copying("file:///nowhere", 600.0, cut, alarms, open_bucket=lambda url: shelf)


def clock_at(time: datetime) -> type[datetime]:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(time.timestamp(), tz)

    return Stopped


def write_at(time: datetime, shelf: Shelf, store: Store) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farloop.coordinator.storage.copies.datetime", clock_at(time))
        write_copy(shelf, store.cut())


@pytest.mark.parametrize(
    ("old_s", "first_s"), [(None, 5.0), (10_000.0, 5.0), (200.0, 400.0), (598.0, 5.0), (0.0, 600.0)]
)
def test_the_first_copy_follows_a_start_by_what_the_store_holds(
    store: Store, monkeypatch: pytest.MonkeyPatch, old_s: float | None, first_s: float
) -> None:
    """Else a machine that restarts more often than `copy_every_s` would never make one."""
    shelf, pauses, now = Shelf(), list[float](), datetime.now(UTC)
    if old_s is not None:
        write_at(now - timedelta(seconds=old_s), shelf, store)
    monkeypatch.setattr("farloop.coordinator.storage.copies.datetime", clock_at(now))

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError
        shelf.puts_left = 0 if len(pauses) == 1 else 1000

    async def play() -> Copying:
        made = copying(store, shelf, {})
        monkeypatch.setattr("farloop.coordinator.storage.copies.asyncio.sleep", sleep)
        commit(store, 0)
        with suppress(asyncio.CancelledError):
            await made.run()
        return made

    made = asyncio.run(play())
    assert pauses == [pytest.approx(first_s, abs=1), 5.0, 600.0, 600.0] and (made.copies, made.failures) == (1, 1)


def test_the_lag_is_the_age_of_what_the_store_holds(store: Store) -> None:
    shelf = Shelf()
    write_at(datetime.now(UTC) - timedelta(seconds=7200), shelf, store)

    async def play() -> Copying:
        made = copying(store, shelf, {})
        running = asyncio.create_task(made.run())
        async with asyncio.timeout(30):
            while made.lag_s < 60:  # noqa: ASYNC110 - a thread looks
                await asyncio.sleep(0.01)
        running.cancel()
        return made

    made = asyncio.run(play())
    assert made.lag_s == pytest.approx(7200.0, abs=60) and made.status()["versions"] == [2, 1]


@pytest.mark.parametrize("ends", ["at once", "after failures", "never"])
def test_the_last_copy_has_what_came_last_unless_a_stop_has_no_more_time(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """Also while another copy is under way."""
    monkeypatch.setattr("farloop.coordinator.storage.copies.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("farloop.coordinator.storage.copies.STOP_S", 0.2)
    shelf, gate, stop = Shelf(), threading.Event(), asyncio.Event()
    shelf.gate = gate

    async def stopped() -> None:
        await stop.wait()

    async def play() -> None:
        made = copying(store, shelf, {})
        before = asyncio.create_task(made.copy())
        await asyncio.sleep(0)
        commit(store, 0)
        last = asyncio.create_task(made.last(stopped()))
        if ends == "never":
            stop.set()
            await last
        elif ends == "after failures":
            shelf.puts_left = 0
            gate.set()
            async with asyncio.timeout(30):
                while made.failures < 2:  # noqa: ASYNC110 - a thread writes
                    await asyncio.sleep(0.001)
            shelf.puts_left = 1000
        gate.set()
        await asyncio.gather(before, last)

    asyncio.run(play())
    manifest = read_manifest(shelf)
    assert manifest is not None and manifest["versions"] == ([2, 1] if ends == "never" else [3, 1])
    assert ("last copy failed" in caplog.text) == (ends == "never")


def test_a_process_may_end_while_the_store_takes_no_bytes(store: Store) -> None:
    shelf, gate = Shelf(), threading.Event()
    shelf.gate = gate

    async def play() -> list[threading.Thread]:
        made = copying(store, shelf, {})
        under_way = asyncio.create_task(made.copy())
        await asyncio.sleep(0.01)
        under_way.cancel()
        made.close()
        return [thread for thread in threading.enumerate() if thread.name.startswith("copies")]

    threads = asyncio.run(play())
    assert threads and all(thread.daemon for thread in threads)
    gate.set()
    for thread in threads:
        thread.join()


def test_a_copy_delays_no_commit(store: Store) -> None:
    """P: while the object store stands still, windows commit; the copy is of the moment at which it began."""
    shelf, alarms = Shelf(), dict[str, str]()
    shelf.gate = threading.Event()

    async def play() -> Copying:
        made = copying(store, shelf, alarms)
        under_way = asyncio.create_task(made.copy())
        await asyncio.sleep(0)
        for fragment in (0, 1, 0, 1):
            commit(store, fragment)
        assert not shelf.objects and store.ledger.versions == [4, 3]
        assert shelf.gate is not None
        shelf.gate.set()
        assert await under_way
        return made

    made = asyncio.run(play())
    manifest = read_manifest(shelf)
    assert manifest is not None and manifest["versions"] == [2, 1]
    assert made.status()["versions"] == [2, 1] and made.status()["copies"] == 1 and made.lag_s < 60


def test_what_has_not_changed_is_not_copied_again_and_a_failure_is_shown_until_it_is_mended(store: Store) -> None:
    shelf, alarms = Shelf(), dict[str, str]()

    async def play() -> Copying:
        made = copying(store, shelf, alarms)
        shelf.puts_left = 0
        assert not await made.copy()
        assert "no route to host" in alarms["copy of the state"]
        shelf.puts_left = 100
        assert await made.copy() and not alarms
        assert await made.copy()
        return made

    made = asyncio.run(play())
    assert (made.copies, made.failures) == (1, 1)
    assert made.status()["bytes"] == sum(len(data) for data in shelf.objects.values())
