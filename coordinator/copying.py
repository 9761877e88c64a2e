"""Copies of the run's state every so often, in a thread of its own: no commit waits for one.

A copy that fails is tried again with growing pauses; status, alarm and metric say how old the newest is.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor

from farloop.coordinator.bucket import Bucket, CopyFailed
from farloop.coordinator.copies import KEPT, Cut, write_copy
from farloop.monitoring.status import CopyStatus

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 5.0
"""Before a copy that failed is tried again; twice as long each time, up to the time between two copies."""

_WHAT = "copy of the state"


class Copying:
    """One coordinator's copies to one store."""

    def __init__(
        self,
        url: str,
        every_s: float,
        cut: Callable[[], Awaitable[Cut]],
        alarms: MutableMapping[str, str],
        *,
        kept: int = KEPT,
        open_bucket: Callable[[str], Bucket] = Bucket,
    ) -> None:
        """`cut` takes the state as it is. Raises CopyFailed where the store cannot be used at all."""
        self._bucket, self._every_s, self._kept = open_bucket(url), every_s, kept
        self._cut, self._alarms = cut, alarms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._copied: tuple[tuple[int, ...], int] | None = None
        self._copied_at: float | None = None
        self._began = time.monotonic()
        self.copies = self.failures = self.bytes = 0

    async def run(self) -> None:
        """Copy, until cancelled."""
        pause_s = 0.0
        while True:
            await asyncio.sleep(min(pause_s or self._every_s, self._every_s))
            pause_s = 0.0 if await self.copy() else max(FIRST_PAUSE_S, 2 * pause_s)

    async def copy(self) -> bool:
        """Copy the state as it is now, if it is not the same as in the last copy. Whether the newest copy has it."""
        cut = await self._cut()
        state = (cut.ledger.versions, cut.ledger.epoch)
        if state == self._copied:
            self._copied_at = time.monotonic()
            return True
        try:
            loop = asyncio.get_running_loop()
            written = await loop.run_in_executor(self._thread, lambda: write_copy(self._bucket, cut, kept=self._kept))
        except CopyFailed as error:
            self.failures += 1
            self._alarms[_WHAT] = str(error)
            _log.warning("copy failed why=%r", str(error))
            return False
        self._alarms.pop(_WHAT, None)
        self._copied, self._copied_at = state, time.monotonic()
        self.copies, self.bytes = self.copies + 1, written
        _log.info("copied url=%s versions=%s bytes=%d", self._bucket.url, list(state[0]), written)
        return True

    @property
    def lag_s(self) -> float:
        """How old the newest copy is; how long there has been none, where there is none of this start."""
        return time.monotonic() - (self._began if self._copied_at is None else self._copied_at)

    def status(self) -> CopyStatus:
        """For the status page."""
        return {
            "url": self._bucket.url,
            "lag_s": self.lag_s,
            "copies": self.copies,
            "failures": self.failures,
            "bytes": self.bytes,
            "versions": list(self._copied[0]) if self._copied else [],
        }

    def close(self) -> None:
        """Let go of a copy that is under way: without its manifest it is none."""
        self._thread.shutdown(wait=False, cancel_futures=True)
