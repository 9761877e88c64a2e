"""Covers `storage/storage_queue.py` and `decide/run_state.py`: what a full disk holds up, and what it does not."""

import dataclasses
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stories import Scripted, StoryText, all_stories, check_story
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


class Told(Scripted):
    """Its stories count time in jobs of the disk, and have these words:

    refuses full | refuses gone          what the disk says to the next write: no room, or that it fails
    records | spools 3 | commits | reserves | verifies 3 | due one two | gives_up | closes | looks | works
    after 2.5 | ends                     so many jobs later; once nothing is left to happen
    done | said | alarm | errors | held
    """

    def __init__(self, *, beside: bool = False, failing: bool = False) -> None:
        self.desk = Desk(beside=beside)
        if failing:
            self.desk.shelf.sync = self._fail  # type: ignore[method-assign]
        self.seq = 0

    def _fail(self) -> None:
        raise GONE

    def refuses(self, what: str) -> None:
        self.desk.shelf.refusals.append({"full": full(), "gone": GONE, "taken": TAKEN}[what])

    def records(self) -> None:
        self.desk.queue.append(rec.RunFinished(), lambda: self.desk.note("record"))

    def spools(self, count: int) -> None:
        for _ in range(count):
            self.desk.spool(dataclasses.replace(STORED, blob=dataclasses.replace(BLOB, seq=self.seq)))
            self.seq += 1

    def commits(self) -> None:
        self.desk.queue.commit(DRAFT, DRAFT, 10, lambda record: self.desk.shelf.done.append(("told",)))

    def reserves(self) -> None:
        self.desk.queue.reserve(1, "q4", self.desk.note, lambda error: self.desk.note(type(error).__name__))

    def verifies(self, count: int) -> None:
        self.desk.shelf.unverified = [*range(1, count + 1)]
        self.desk.queue.verify_older()

    def due(self, *snapshots: str) -> None:
        self.desk.shelf.due = [*snapshots]

    def gives_up(self) -> None:
        self.desk.queue.give_up()

    def closes(self) -> None:
        self.desk.queue.close()

    def looks(self) -> None:
        """And so again a quarter of a second later."""
        self.desk.queue.look()
        self.desk.run_for(LOOK_S / 4)

    def works(self) -> None:
        """A delta is stored, by which it looks itself."""
        self.spools(1)
        self.looks()

    def looked(self) -> int:
        return self.desk.shelf.looks

    def after(self, jobs: float) -> None:
        self.desk.run_for(jobs * JOB_S)

    def ends(self) -> None:
        self.desk.run()

    def done(self) -> list[str]:
        words = (("told",) if entry[0] == "told" else entry for entry in self.desk.shelf.done)
        told = [" ".join(str(word) for word in entry[:2] if isinstance(word, str | int)) for entry in words]
        self.desk.shelf.done.clear()
        return told

    def said(self) -> list[str]:
        return [" ".join(map(str, what)) for what in self.desk.told]  # type: ignore[call-overload]

    def alarm(self) -> str:
        return self.desk.alarms.get(ALARM, "none")

    def errors(self) -> list[str]:
        return [str(error) for error in self.desk.errors]

    def held(self) -> bool:
        return bool(self.desk.queue.hold)


TAKEN = FolderChanged(Path("lock"), "it was removed")


@all_stories(__file__, "storage_queue")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Told(**story.settings).told, rewrite=rewrite)


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


@pytest.mark.parametrize("what", CALLS)
def test_a_failure_of_the_disk_is_not_waited_out(what: str) -> None:
    desk = Desk(GONE)
    CALLS[what](desk)
    desk.run()
    assert desk.errors == [GONE] and desk.told == [] and not desk.queue.hold


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
