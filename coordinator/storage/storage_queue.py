"""The coordinator's disk, as its loop sees it: every call of the store in one thread, and what its failures mean.

`NoRoom` changed nothing, and is waited out, with the run held meanwhile (`hold.py`): a record, a delta and the final
model are tried again here until there is room, the machine is told of a commit and does the same. `StorageFailed` is
fatal wherever it comes from: nobody knows what is durable, and a restart finds out.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from farloop.coordinator.aggregator import Result
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.decide.hold import StorageHold
from farloop.coordinator.errors import NoRoom
from farloop.coordinator.storage import snapshots
from farloop.coordinator.storage.copies import StateCopy
from farloop.coordinator.storage.store import Store

_T = TypeVar("_T")
_Input = tuple[rec.InputStored, bytearray, Future[None]]

LOOK_S = 1.0
"""Between two looks at who owns the state directory."""


class StorageQueue:
    """Keeps one store. All methods are called on the loop, and return when what they say is durable."""

    def __init__(self, store: Store, alarms: MutableMapping[str, str]) -> None:
        """`alarms` is told what is held up, and why, for as long as it is."""
        self.hold = StorageHold(alarms)
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._gathered: SimpleQueue[_Input] = SimpleQueue()
        """Deltas that wait for their turn on the disk."""
        self._waiting: set[asyncio.Task[Any]] = set()
        self._given_up = False

    async def append(self, record: rec.Record) -> None:
        """A record, once there is room: what follows from it must not be told before. Raises StorageFailed."""
        await self._once_there_is_room("a record", self._append, record)

    async def adopt(self, record: rec.Adopted) -> None:
        """All that was fetched from nodes, once there is room. Raises StorageFailed."""
        await self._once_there_is_room("what nodes hold", self._store.adopt, record)

    async def keep(self, record: rec.AnchorFetched, data: bytearray) -> None:
        """An anchor that came up from a node, once there is room. Raises StorageFailed."""
        await self._once_there_is_room(f"an anchor of {record.node}", self._append, record, data)

    async def spool(self, record: rec.InputStored, data: bytearray) -> None:
        """A delta, once there is room: one that was dropped for want of it would not be sent again.

        Those that come while the disk is busy are appended together, with one sync for all.

        Raises:
            StorageFailed
        """
        what, done = f"a delta of {record.blob.node}", Future[None]()
        self._gathered.put((record, data, done))
        await self._on_disk(self._append_gathered)  # by now this job or one before it has had its turn with it
        try:
            done.result()
        except NoRoom as error:
            self.hold.begin(what, error)
            await self._pause()
            await self._once_there_is_room(what, self._append, record, data)
        else:
            self.hold.end(what)

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

    async def cut(self) -> StateCopy:
        """The state between two of the calls above, for a copy of it."""
        return await self._on_disk(self._store.cut)

    async def keep_watch(self) -> None:
        """Look every second whether the state directory is still ours, for as long as this task lives.

        Every write looks by itself. A coordinator that writes nothing, because its run is held or it waits for nodes,
        would otherwise serve a directory that another one has taken over.

        Raises:
            Fenced, FolderChanged, StorageFailed: exit.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(NoRoom):  # no descriptor is free: the next look tells
                await self._on_disk(self._store.require_ours)

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

    def _append_gathered(self) -> None:
        """All that has come until now; durable, and said to be, with one sync."""
        batch: list[_Input] = []
        with suppress(Empty):
            while True:
                batch.append(self._gathered.get_nowait())
        if not batch:
            return
        refused: dict[int, NoRoom] = {}
        try:
            for number, (record, data, _) in enumerate(batch):
                try:
                    self._store.append(record, data)
                except NoRoom as error:
                    refused[number] = error
            if len(refused) < len(batch):
                self._store.sync()
        except Exception as error:
            for _, _, done in batch:
                done.set_exception(error)
            raise
        for number, (_, _, done) in enumerate(batch):
            if number in refused:
                done.set_exception(refused[number])
            else:
                done.set_result(None)

    def _export(self, path: Path) -> None:
        identity = self._store.ledger.spec.identity
        metadata = {"run": identity.fingerprint(), "model": identity.model}
        snapshots.export(path, self._store.named_anchors(), metadata)


def _update(fragment: int) -> str:
    return f"the update of fragment {fragment}"
