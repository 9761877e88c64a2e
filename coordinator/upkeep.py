"""The coordinator's disk, as its loop sees it: every call of the store in one thread, and what its failures mean.

`NoRoom` changed nothing, and is waited out, with the run held meanwhile (`hold.py`): a record, a delta and the final
model are tried again here until there is room, the machine is told of a commit and does the same. `StorageFailed` is
fatal wherever it comes from: nobody knows what is durable, and a restart finds out.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from farloop.coordinator import records as rec
from farloop.coordinator import snapshots
from farloop.coordinator.aggregator import Result
from farloop.coordinator.copies import Cut
from farloop.coordinator.errors import NoRoom
from farloop.coordinator.hold import Hold
from farloop.coordinator.machine import RETRY_S
from farloop.coordinator.store import Store

_T = TypeVar("_T")


class Upkeep:
    """Keeps one store. All methods are called on the loop, and return when what they say is durable."""

    def __init__(self, store: Store, alarms: MutableMapping[str, str]) -> None:
        """`alarms` is told what is held up, and why, for as long as it is."""
        self.hold = Hold(alarms)
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._waiting: set[asyncio.Task[Any]] = set()
        self._given_up = False

    async def append(self, record: rec.Record) -> None:
        """A record, once there is room: what follows from it must not be told before. Raises StorageFailed."""
        await self._once_there_is_room("a record", self._append, record)

    async def spool(self, record: rec.InputStored, data: bytearray) -> None:
        """A delta, once there is room: one that was dropped for want of it would not be sent again.

        Raises:
            StorageFailed
        """
        await self._once_there_is_room(f"a delta of {record.blob.node}", self._append, record, data)

    async def reserve(self, fragment: int, codec_down: str) -> int:
        """Room for an update, before the work of making it (protocol O), to be given to `commit` or `release`.

        Raises:
            NoRoom: try again later; the run is held until it succeeds.
        """
        what = _update(fragment)
        try:
            reserved = await self._on_disk(self._store.reserve, fragment, codec_down)
        except NoRoom as error:
            self.hold.begin(what, error)
            raise
        self.hold.end(what)
        return reserved

    async def release(self, reserved: int) -> None:
        """The update will not be."""
        await self._on_disk(self._store.release, reserved)

    async def commit(self, draft: rec.WindowCommitted, result: Result, reserved: int) -> rec.WindowCommitted:
        """A commit, and every few versions a snapshot. Raises StorageFailed."""
        return await self._once_there_is_room(_update(draft.fragment), self._store.commit, draft, result, reserved)

    async def export(self, path: Path) -> None:
        """The final model, for other tools, once there is room. Raises StorageFailed."""
        await self._once_there_is_room("the final model", self._export, path)

    async def cut(self) -> Cut:
        """The state between two of the calls above, for a copy of it."""
        return await self._on_disk(self._store.cut)

    def give_up(self) -> None:
        """Cancel every task that waits for room: nobody was told of what it has, and a restart asks for it again."""
        self._given_up = True
        for task in self._waiting:
            task.cancel()

    async def close(self) -> None:
        """Close the store, and end the thread."""
        await self._on_disk(self._store.close)
        self._thread.shutdown()

    async def _once_there_is_room(self, what: str, call: Callable[..., _T], *args: Any) -> _T:
        while True:
            try:
                done = await self._on_disk(call, *args)
            except NoRoom as error:
                self.hold.begin(what, error)
                await self._pause()
            else:
                self.hold.end(what)
                return done

    async def _pause(self) -> None:
        if self._given_up:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            await asyncio.sleep(RETRY_S)
        finally:
            self._waiting.discard(task)

    # --- in the thread

    async def _on_disk(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args))

    def _append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        self._store.append(record, attachment)
        self._store.sync()

    def _export(self, path: Path) -> None:
        identity = self._store.ledger.spec.identity
        metadata = {"run": identity.fingerprint(), "model": identity.model}
        snapshots.export(path, self._store.named_anchors(), metadata)


def _update(fragment: int) -> str:
    return f"the update of fragment {fragment}"
