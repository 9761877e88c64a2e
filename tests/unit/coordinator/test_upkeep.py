"""Covers `storage/storage_queue.py` and `decide/hold.py`: what a full disk holds up, and what it does not."""

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from farloop.algo.spec import BlobId, BlobKind, NodeId, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.decide.hold import ALARM, StorageHold
from farloop.coordinator.errors import DiskFull, NoRoom, ReadOnly, StorageFailed
from farloop.coordinator.storage import files
from farloop.coordinator.storage.storage_queue import StorageQueue

BLOB = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1)
STORED = rec.InputStored(blob=BLOB, window=1, contributors=(), digest=1)


class Shelf:
    """A store that says what is done with it, and refuses the first few appends."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.done: list[tuple[Any, ...]] = []
        self.gate: threading.Event | None = None

    def _refuse(self) -> None:
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.refusals:
            raise self.refusals.pop(0)

    def append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        self._refuse()
        self.done.append(("append", record, bytes(attachment)))

    def reserve(self, fragment: int, codec_down: str) -> int:
        self._refuse()
        return 10

    def commit(self, *given: object) -> tuple[object, ...]:
        self._refuse()
        self.done.append(("commit", *given))
        return given

    def sync(self) -> None:
        self.done.append(("sync",))

    def close(self) -> None:
        self.done.append(("close",))


def full() -> DiskFull:
    return DiskFull(Path("disk"), 10, 0)


def test_a_record_is_synced_before_it_counts() -> None:
    shelf = Shelf()

    async def story() -> None:
        upkeep = StorageQueue(shelf, {})  # type: ignore[arg-type]
        await upkeep.append(rec.RunFinished())
        await upkeep.close()

    asyncio.run(story())
    assert shelf.done == [("append", rec.RunFinished(), b""), ("sync",), ("close",)]


def test_deltas_that_come_while_the_disk_is_busy_share_a_sync_and_count_after_it() -> None:
    """P: one that there is no room for is tried again by itself, and holds up none of the others."""
    shelf = Shelf()
    stored = [dataclasses.replace(STORED, blob=dataclasses.replace(BLOB, seq=seq)) for seq in range(5)]

    async def story() -> None:
        upkeep = StorageQueue(shelf, {})  # type: ignore[arg-type]

        async def spool(record: rec.InputStored) -> None:
            await upkeep.spool(record, bytearray(b"data"))
            shelf.done.append(("told", record.blob.seq))

        busy = threading.Event()
        shelf.gate = busy
        first = asyncio.create_task(upkeep.append(rec.RunFinished()))
        await asyncio.sleep(0)
        others = [asyncio.create_task(spool(record)) for record in stored]
        await asyncio.sleep(0)
        busy.set()
        await asyncio.gather(first, *others)
        await upkeep.close()

    asyncio.run(story())
    kinds = [entry[0] for entry in shelf.done]
    assert kinds == ["append", "sync", *["append"] * 5, "sync", *["told"] * 5, "close"]


def test_a_disk_that_fails_fails_every_delta_that_waited_for_it() -> None:
    class Failing(Shelf):
        def sync(self) -> None:
            raise StorageFailed(Path("disk"), "sync: Input/output error")

    shelf = Failing()

    async def story() -> list[BaseException | None]:
        upkeep = StorageQueue(shelf, {})  # type: ignore[arg-type]
        spools = [upkeep.spool(STORED, bytearray(b"data")) for _ in range(3)]
        results = await asyncio.gather(*spools, return_exceptions=True)
        await upkeep.close()
        return results

    assert all(isinstance(result, StorageFailed) for result in asyncio.run(story()))


CALLS: dict[str, Callable[[StorageQueue], Awaitable[object]]] = {
    "record": lambda upkeep: upkeep.append(rec.RunFinished()),
    "delta": lambda upkeep: upkeep.spool(STORED, bytearray(b"data")),
    "commit": lambda upkeep: upkeep.commit(SimpleNamespace(fragment=1), None, 10),  # type: ignore[arg-type]
}
DONE: dict[str, tuple[Any, ...]] = {
    "record": ("append", rec.RunFinished(), b""),
    "delta": ("append", STORED, b"data"),
    "commit": ("commit", SimpleNamespace(fragment=1), None, 10),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("refusal", [full(), ReadOnly(Path("disk"))], ids=["full", "read-only"])
def test_what_does_not_fit_waits_and_says_how_to_mend_it_for_as_long(
    monkeypatch: pytest.MonkeyPatch, what: str, refusal: NoRoom
) -> None:
    shelf, alarms = Shelf(refusal, refusal), dict[str, str]()
    upkeep = StorageQueue(shelf, alarms)  # type: ignore[arg-type]
    seen: list[tuple[bool, str]] = []

    async def nap(seconds: float) -> None:
        assert seconds == RETRY_S and shelf.done == []
        seen.append((bool(upkeep.hold), alarms[ALARM]))

    monkeypatch.setattr(asyncio, "sleep", nap)

    async def story() -> None:
        await CALLS[what](upkeep)
        await upkeep.close()

    asyncio.run(story())
    assert shelf.done[0] == DONE[what]
    assert [held for held, _ in seen] == [True, True]
    assert all(str(refusal) in sentence and refusal.mend in sentence for _, sentence in seen)
    assert alarms == {} and not upkeep.hold


def test_a_reservation_without_room_holds_the_run_until_one_succeeds() -> None:
    """The machine tries again: a decision stands."""
    alarms = dict[str, str]()
    upkeep = StorageQueue(Shelf(full()), alarms)  # type: ignore[arg-type]

    async def story() -> None:
        with pytest.raises(DiskFull):
            await upkeep.reserve(1, "q4")
        assert upkeep.hold and "the update of fragment 1" in alarms[ALARM]
        assert await upkeep.reserve(1, "q4") == 10
        assert not upkeep.hold and alarms == {}
        await upkeep.close()

    asyncio.run(story())


@pytest.mark.parametrize("what", CALLS)
def test_a_failure_of_the_disk_is_not_waited_out(what: str) -> None:
    async def story() -> None:
        upkeep = StorageQueue(Shelf(StorageFailed(Path("disk"), "fsync: it is gone")), {})  # type: ignore[arg-type]
        with pytest.raises(StorageFailed):
            await CALLS[what](upkeep)
        await upkeep.close()

    asyncio.run(story())


def test_who_waits_for_room_does_not_keep_the_coordinator_from_stopping() -> None:
    async def story() -> None:
        shelf = Shelf(*[full()] * 4)
        upkeep = StorageQueue(shelf, {})  # type: ignore[arg-type]
        waits = asyncio.create_task(upkeep.spool(STORED, bytearray(b"data")))
        while not upkeep.hold:  # noqa: ASYNC110 - it is not ours to tell
            await asyncio.sleep(0)
        upkeep.give_up()
        late = asyncio.create_task(upkeep.spool(STORED, bytearray(b"data")))
        await asyncio.wait([waits, late])
        assert waits.cancelled() and late.cancelled()
        await upkeep.close()
        assert shelf.done == [("close",)]

    asyncio.run(story())


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


def test_the_model_is_exported_under_its_names_once_there_is_room(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    frees, alarms = iter([0, 0, 1 << 30]), dict[str, str]()
    seen: list[bool] = []

    def require_free(path: Path, nbytes: int) -> None:
        if nbytes > (free := next(frees)):
            raise DiskFull(path, nbytes, free)

    async def nap(seconds: float) -> None:
        seen.append("the final model" in alarms[ALARM])

    monkeypatch.setattr(files, "require_free", require_free)
    monkeypatch.setattr(asyncio, "sleep", nap)
    model = SimpleNamespace(
        ledger=SimpleNamespace(spec=spec), named_anchors=lambda: {"body": torch.ones(2)}, close=lambda: None
    )

    async def story() -> None:
        upkeep = StorageQueue(model, alarms)  # type: ignore[arg-type]
        await upkeep.export(tmp_path / "model.safetensors")
        await upkeep.close()

    asyncio.run(story())
    assert list(load_file(tmp_path / "model.safetensors")) == ["body"]
    assert seen == [True, True] and alarms == {}
