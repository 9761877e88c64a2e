"""The coordinator's disk, as its loop sees it: every call of the store in one thread, and what its failures mean.

`DiskFull` changed nothing, and can be waited out: an input is held until there is room, a commit is told of it.
`StorageFailed` is fatal wherever it comes from: nobody knows what is durable, and a restart finds out.
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
from farloop.coordinator.errors import DiskFull
from farloop.coordinator.machine import RETRY_S
from farloop.coordinator.store import Store

_T = TypeVar("_T")


class Upkeep:
    """Keeps one store. All methods are called on the loop, and return when what they say is durable."""

    def __init__(self, store: Store, alarms: MutableMapping[str, str]) -> None:
        """`alarms` is told what is held up, and why, for as long as it is."""
        self._store, self._alarms = store, alarms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")

    async def append(self, record: rec.Record) -> None:
        """A record. Raises StorageError."""
        await self._on_disk(self._append, record)

    async def spool(self, record: rec.InputStored, data: bytearray) -> None:
        """A delta. A full disk is waited out: one that was dropped for it would not be sent again.

        Raises:
            StorageFailed
        """
        while True:
            try:
                await self._on_disk(self._append, record, data)
            except DiskFull as error:
                self._alarms["spool"] = str(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._alarms.pop("spool", None)
                return

    async def reserve(self, fragment: int, codec_down: str) -> int:
        """Room for an update, before the work of making it (protocol O), to be given to `commit` or `release`.

        Raises:
            DiskFull: try again later.
        """
        return await self._on_disk(self._store.reserve, fragment, codec_down)

    async def release(self, reserved: int) -> None:
        """The update will not be."""
        await self._on_disk(self._store.release, reserved)

    async def commit(self, draft: rec.WindowCommitted, result: Result, reserved: int) -> rec.WindowCommitted:
        """A commit, and every few versions a snapshot. Raises StorageFailed."""
        return await self._on_disk(self._store.commit, draft, result, reserved)

    async def export(self, path: Path) -> None:
        """The final model, for other tools. Raises StorageError."""
        await self._on_disk(self._export, path)

    async def close(self) -> None:
        """Close the store, and end the thread."""
        await self._on_disk(self._store.close)
        self._thread.shutdown()

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
