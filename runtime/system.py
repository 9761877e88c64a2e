"""The ports of a real process: timers of an asyncio loop, and threads with a queue."""

import asyncio
import ctypes
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from farloop.runtime.ports import Action, T, Timer


class LoopClock:
    """`time.monotonic`, and the timers of the running loop."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        """`failed` gets what an action raises: a loop would only log it."""
        self._loop, self._failed = asyncio.get_running_loop(), failed

    def now(self) -> float:
        return time.monotonic()

    def minute_of_day(self) -> int:
        local = time.localtime()
        return 60 * local.tm_hour + local.tm_min

    def call_later(self, delay_s: float, action: Action) -> Timer:
        if delay_s <= 0:
            return self._loop.call_soon(self._run, action)
        return self._loop.call_later(delay_s, self._run, action)

    def post(self, action: Action) -> None:
        """Run `action` on the loop. Any thread."""
        self._loop.call_soon_threadsafe(self._run, action)

    def _run(self, action: Action) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the edge of the process
            self._failed(error)


class ThreadWorker:
    """One thread. What became of a job is handed to `post`, which runs it in the executor's thread."""

    def __init__(self, name: str, post: Callable[[Action], object]) -> None:
        """`post` may be called from any thread: `loop.call_soon_threadsafe`, or the `put` of an inbox."""
        self._post = post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.seconds = 0.0  # that the thread has worked; written by it alone

    def submit(self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        def report(future: "Future[Any]") -> None:
            error = future.exception()
            if error is None:
                self._post(lambda: done(future.result()))
            elif isinstance(error, Exception):
                self._post(lambda: failed(error))

        self._pool.submit(self._timed, job).add_done_callback(report)

    def close(self) -> None:
        self._pool.shutdown()

    def _timed(self, job: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return job()
        finally:
            self.seconds += time.perf_counter() - started


def hold(descriptor: int) -> None:
    """Mark a file or folder as being written until it is closed, or the process ends; see `remove_abandoned`. Raises
    OSError: another process holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove what processes that were killed have left here: what has a name of this regular expression, and nobody
    holds. Raises OSError."""
    for path in folder.iterdir():
        if not re.fullmatch(pattern, path.name):
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with suppress(BlockingIOError):  # it is being written
                hold(descriptor)
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def keep_freed_blocks() -> None:
    """Keep freed blocks of up to 32 MiB, which is the most that glibc allows, for the next ones: up to 256 MiB at the
    top of a heap.

    Otherwise it gives the memory of a payload back with every round, and the next one waits for new pages: 7 ms for
    13 MB, in place of 0.6.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, 32 << 20)
        tune(_M_TRIM_THRESHOLD, 256 << 20)


def trim_heap() -> None:
    """Return memory that was freed to the system.

    glibc keeps what was freed below the top of a heap, and gives it to threads of the same heap alone: hundreds of
    megabytes of weights that a start has read and dropped. Other C libraries have no such call, nor need.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
