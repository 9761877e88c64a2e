"""Covers `coordinator/upkeep.py`: what a full disk holds up, and what it does not (protocol O, P)."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from farloop.algo.spec import BlobId, BlobKind, NodeId, RunSpec
from farloop.coordinator import records as rec
from farloop.coordinator import upkeep as upkeep_module
from farloop.coordinator.errors import DiskFull, StorageFailed
from farloop.coordinator.upkeep import Upkeep

BLOB = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1)
STORED = rec.InputStored(blob=BLOB, window=1, contributors=(), digest=1)


class Shelf:
    """A store that says what is done with it, and refuses the first few appends."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.done: list[tuple[Any, ...]] = []

    def append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.done.append(("append", record, bytes(attachment)))

    def sync(self) -> None:
        self.done.append(("sync",))

    def close(self) -> None:
        self.done.append(("close",))


def full() -> DiskFull:
    return DiskFull(Path("disk"), 10, 0)


def test_a_record_is_synced_before_it_counts() -> None:
    shelf = Shelf()

    async def story() -> None:
        upkeep = Upkeep(shelf, {})  # type: ignore[arg-type]
        await upkeep.append(rec.RunFinished())
        await upkeep.close()

    asyncio.run(story())
    assert shelf.done == [("append", rec.RunFinished(), b""), ("sync",), ("close",)]


def test_a_delta_waits_for_room_and_says_so_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, alarms = Shelf(full(), full()), dict[str, str]()
    seen: list[dict[str, str]] = []

    async def nap(seconds: float) -> None:
        assert seconds == upkeep_module.RETRY_S
        seen.append(dict(alarms))

    monkeypatch.setattr(asyncio, "sleep", nap)

    async def story() -> None:
        upkeep = Upkeep(shelf, alarms)  # type: ignore[arg-type]
        await upkeep.spool(STORED, bytearray(b"data"))
        await upkeep.close()

    asyncio.run(story())
    assert shelf.done[0] == ("append", STORED, b"data")
    assert seen == [{"spool": str(full())}] * 2
    assert alarms == {}


@pytest.mark.parametrize("failure", [full(), StorageFailed(Path("disk"), "fsync: it is gone")], ids=["full", "broken"])
def test_a_record_without_room_and_any_failure_of_the_disk_are_not_waited_out(failure: Exception) -> None:
    async def story() -> None:
        upkeep = Upkeep(Shelf(failure), {})  # type: ignore[arg-type]
        try:
            with pytest.raises(type(failure)):
                await upkeep.append(rec.RunFinished())
        finally:
            await upkeep.close()

    asyncio.run(story())


def test_the_model_is_exported_under_its_names(tmp_path: Path, spec: RunSpec) -> None:
    model = SimpleNamespace(
        ledger=SimpleNamespace(spec=spec), named_anchors=lambda: {"body": torch.ones(2)}, close=lambda: None
    )

    async def story() -> None:
        upkeep = Upkeep(model, {})  # type: ignore[arg-type]
        await upkeep.export(tmp_path / "model.safetensors")
        await upkeep.close()

    asyncio.run(story())
    assert list(load_file(tmp_path / "model.safetensors")) == ["body"]
