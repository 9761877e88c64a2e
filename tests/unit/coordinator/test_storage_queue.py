"""Covers `storage/storage_queue.py` and `decide/run_state.py`: what a full disk holds up, and what it does not."""

import dataclasses
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_host import JOB_S, VirtualHost

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.decide.run_state import ALARM, StorageHold
from farloop.coordinator.errors import DiskFull, FolderChanged, NoRoom, ReadOnly, StorageFailed
from farloop.coordinator.storage.storage_queue import LOOK_S, StorageQueue
from farloop.sim.virtual_time import VirtualWorker

BLOB = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1)
STORED = rec.InputStored(blob=BLOB, window=1, contributors=(), digest=1)
DRAFT: Any = SimpleNamespace(fragment=1)
DATA = bytearray(b"data")
GONE = StorageFailed(Path("disk"), "sync: Input/output error")


class Shelf:
    """A store that says what is done with it, and refuses the first few writes."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.done: list[tuple[Any, ...]] = []
        self.due: list[str] = []  # snapshots
        self.looks = 0
        self.unverified = list[int]()

    def _do(self, *what: Any) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        self.done.append(what)
        return what

    append = partialmethod(_do, "append")
    commit = partialmethod(_do, "commit")
    export = partialmethod(_do, "export")

    def reserve(self, fragment: int, codec_down: str) -> int:
        self._do("reserve")
        return 10

    def sync(self) -> None:
        self.done.append(("sync",))

    def take_snapshots(self) -> None:
        self.done.append(("snapshots",))

    def next_snapshot(self) -> str | None:
        return self.due.pop(0) if self.due else None

    def save(self, cut: str) -> None:
        self._do("save", cut)

    def saved(self, cut: str, refused: Exception | None) -> None:
        self.done.append(("saved", cut, refused))

    def verify_older(self) -> None:
        self._do("verify", self.unverified[-1])

    def verified(self, fault: Exception | None) -> None:
        self.unverified.pop()

    def require_ours(self) -> None:
        self.looks += 1
        if self.refusals:
            raise self.refusals.pop(0)

    def close(self) -> None:
        self.done.append(("close",))


class Desk(VirtualHost):
    """A queue over a shelf, and what it says."""

    def __init__(self, *refusals: Exception, shelf: type[Shelf] = Shelf, beside: bool = False) -> None:
        super().__init__()
        snapshots = VirtualWorker(self.process, lambda: 4.5 * JOB_S) if beside else None
        self.shelf, self.alarms, self.told = shelf(*refusals), dict[str, str](), list[object]()
        store: Any = self.shelf
        self.queue = StorageQueue(store, self.storage, self.clock, self.alarms, self.fatal, snapshots)

    def note(self, *what: object) -> None:
        self.told.append(what)

    def spool(self, record: rec.InputStored = STORED) -> None:
        self.queue.spool(record, DATA, lambda: self.note(record.blob.seq), self.fatal)


def full() -> DiskFull:
    return DiskFull(Path("disk"), 10, 0)


def test_a_record_is_synced_before_it_counts() -> None:
    desk = Desk()
    desk.queue.append(rec.RunFinished(), lambda: desk.shelf.done.append(("told",)))
    desk.run()
    desk.queue.close()
    assert desk.shelf.done == [("append", rec.RunFinished(), b""), ("sync",), ("told",), ("close",)]


def spool(desk: Desk, count: int) -> None:
    for seq in range(count):
        desk.spool(dataclasses.replace(STORED, blob=dataclasses.replace(BLOB, seq=seq)))


def test_deltas_that_come_while_the_disk_is_busy_share_a_sync_and_count_after_it() -> None:
    """P: a delta that there is no room for is tried again, and holds up none of the others."""
    desk = Desk()
    desk.queue.append(rec.RunFinished(), lambda: None)
    spool(desk, 5)
    desk.run_for(2.5 * JOB_S)
    assert [entry[0] for entry in desk.shelf.done] == ["append", "sync", *["append"] * 5, "sync"]
    desk.run()
    assert len(desk.shelf.done) == 8 and desk.told == [(seq,) for seq in range(5)]
    desk = Desk(full())
    spool(desk, 3)
    desk.run_for(RETRY_S / 2)
    assert desk.told == [(1,), (2,)]
    desk.run()
    assert desk.told == [(1,), (2,), (0,)]


def test_a_disk_that_fails_fails_every_delta_that_waited_for_it() -> None:
    class Failing(Shelf):
        def sync(self) -> None:
            raise GONE

    desk = Desk(shelf=Failing)
    for _ in range(3):
        desk.spool()
    desk.run()
    assert desk.errors == [GONE] * 3 and desk.told == []


CALLS: dict[str, Callable[[Desk], None]] = {
    "record": lambda desk: desk.queue.append(rec.RunFinished(), lambda: desk.note("done")),
    "delta": lambda desk: desk.spool(),
    "commit": lambda desk: desk.queue.commit(DRAFT, DRAFT, 10, desk.note),
    "model": lambda desk: desk.queue.export(Path("model"), lambda: desk.note("done")),
}
DONE: dict[str, tuple[Any, ...]] = {
    "record": ("append", rec.RunFinished(), b""),
    "delta": ("append", STORED, DATA),
    "commit": ("commit", DRAFT, DRAFT, 10, False),
    "model": ("export", Path("model")),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("refusal", [full(), ReadOnly(Path("disk"))], ids=["full", "read-only"])
def test_what_does_not_fit_waits_and_says_how_to_fix_it_for_as_long(what: str, refusal: NoRoom) -> None:
    desk = Desk(refusal, refusal)
    CALLS[what](desk)
    for _ in range(2):
        desk.run_for(RETRY_S)
        assert desk.queue.hold and desk.told == desk.shelf.done == []
        assert str(refusal) in desk.alarms[ALARM] and refusal.fix in desk.alarms[ALARM]
    desk.run()
    assert desk.shelf.done[0] == DONE[what] and len(desk.told) == 1
    assert desk.alarms == {} and not desk.queue.hold and desk.errors == []


def test_snapshots_are_written_beside_deltas_one_at_a_time_after_their_commit_is_told() -> None:
    desk = Desk(beside=True)
    desk.shelf.due = ["one", "two"]
    desk.queue.commit(DRAFT, DRAFT, 10, lambda record: desk.shelf.done.append(("told",)))
    desk.run_for(3 * JOB_S)  # "one" is being written
    spool(desk, 1)
    desk.run()
    did = [entry[:2] if entry[0] in ("save", "saved") else entry[0] for entry in desk.shelf.done]
    assert did == [
        "commit", "told", "append", "sync", ("save", "one"), ("saved", "one"), ("save", "two"), ("saved", "two")
    ]  # fmt: skip


def test_what_a_start_did_not_read_is_verified_beside_all_else_and_a_snapshot_waits_for_one_segment_at_most() -> None:
    desk = Desk(full(), beside=True)
    desk.shelf.unverified, desk.shelf.due = [1, 2, 3], ["first"]
    desk.queue.verify_older()
    desk.run()  # no descriptor is left at first
    assert desk.shelf.done == [("verify", 3), ("verify", 2), ("verify", 1)] and desk.shelf.unverified == []
    desk.shelf.unverified, desk.shelf.done = [1, 2, 3], []
    desk.queue.verify_older()
    desk.queue.commit(DRAFT, DRAFT, 10, lambda _: None)
    desk.run()
    work = [what for what in desk.shelf.done if what[0] in ("verify", "save")]
    assert work == [("verify", 3), ("save", "first"), ("verify", 2), ("verify", 1)]
    desk = Desk(GONE, beside=True)
    desk.shelf.unverified = [1]
    desk.queue.verify_older()
    desk.run()
    assert desk.errors == [GONE]


@pytest.mark.parametrize(("error", "ends"), [(full(), []), (GONE, [GONE])])
def test_a_snapshot_without_room_is_told_to_the_store_and_a_failing_disk_ends_the_process(
    error: Exception, ends: list[Exception]
) -> None:
    desk = Desk(beside=True)
    desk.shelf.due = ["one"]
    desk.queue.commit(DRAFT, DRAFT, 10, desk.note)
    desk.run_for(2.5 * JOB_S)
    desk.shelf.refusals = [error]
    desk.run()
    assert desk.errors == ends and (("saved", "one", error) in desk.shelf.done) == (not ends)


def test_a_reservation_without_room_holds_the_run_until_one_succeeds() -> None:
    """The machine tries again: a decision stands."""
    desk = Desk(full())
    desk.queue.reserve(1, "q4", desk.note, lambda error: desk.note(type(error)))
    desk.run()
    assert desk.told == [(DiskFull,)] and desk.queue.hold and "the update of fragment 1" in desk.alarms[ALARM]
    desk.queue.reserve(1, "q4", desk.note, desk.fatal)
    desk.run()
    assert desk.told[1:] == [(10,)] and not desk.queue.hold and desk.alarms == {}


@pytest.mark.parametrize("what", CALLS)
def test_a_failure_of_the_disk_is_not_waited_out(what: str) -> None:
    desk = Desk(GONE)
    CALLS[what](desk)
    desk.run()
    assert desk.errors == [GONE] and desk.told == [] and not desk.queue.hold


def test_who_waits_for_room_does_not_keep_the_coordinator_from_stopping() -> None:
    desk = Desk(*[full()] * 4)
    desk.spool()
    desk.run_for(RETRY_S / 2)
    assert desk.queue.hold
    desk.queue.give_up()
    desk.spool()
    desk.run()
    desk.queue.close()
    assert desk.told == [] and desk.shelf.done == [("close",)] and len(desk.shelf.refusals) == 2


def test_a_hold_lasts_until_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    alarms = dict[str, str]()
    hold = StorageHold(alarms)
    for what in ("a record", "a delta of a", "a record"):
        hold.begin(what, full())
    assert "a record, a delta of a must wait" in alarms[ALARM]
    hold.end("a record")
    assert hold and "a record" not in alarms[ALARM]
    hold.end("the final model")
    assert hold
    hold.end("a delta of a")
    assert not hold and alarms == {}
    assert len(caplog.records) == 1, "an outage is said once"


def test_a_queue_that_writes_nothing_looks_every_second_who_owns_the_directory() -> None:
    desk = Desk()
    for _ in range(40):
        desk.queue.look()
        desk.run_for(LOOK_S / 4)
    assert desk.shelf.looks == 9
    for _ in range(40):
        desk.spool()  # which looks by itself
        desk.queue.look()
        desk.run_for(LOOK_S / 4)
    assert desk.shelf.looks == 9
    desk.shelf.refusals.append(taken := FolderChanged(Path("lock"), "it was removed"))
    desk.run_for(LOOK_S)
    desk.queue.look()
    desk.run()
    assert desk.errors == [taken]
