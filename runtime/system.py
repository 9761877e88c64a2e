"""The ports of a real process: timers of an asyncio loop, and threads with a queue."""

import asyncio
import ctypes
import errno
import fcntl
import math
import mmap
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

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
        # uvloop counts whole milliseconds, from the beginning of the present one. It would call up to one too early;
        # who then asks for the rest of it would be called again and again until the time has come.
        return self._loop.call_later(math.ceil(1e3 * delay_s + 1) / 1e3, self._run, action)

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

    def __init__(self, name: str, post: Callable[[Action], object], begin: Callable[[], object] = lambda: None) -> None:
        """`post` may be called from any thread: `loop.call_soon_threadsafe`, or the `put` of an inbox. `begin` is
        called in the thread before its first job."""
        self._post = post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)
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


def yield_cores() -> None:
    """Let the threads of normal priority go first from now on where cores are short (nice 10). Of the calling thread:
    only Linux has a priority for each."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


DIRECT_BYTES: Final = 1 << 20  # what is larger goes to the disk without the page cache
DIRECT_PAGE: Final = 4096
_STAGE_BYTES: Final = 4 << 20
"""Of a write: the most that Linux makes one request of by default. Each write puts the thread to sleep, and where cores
are short it waits for one after that: with a quarter of this the same bytes took nearly twice as long."""
_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})  # the file system has no such call
_staging = threading.Lock()
_stages: list[mmap.mmap] = []  # page-aligned memory, made at first use


def write_direct(descriptor: int, data: memoryview, offset: int) -> int:
    """Write whole pages at `offset`, a multiple of `DIRECT_PAGE`, past the page cache. Returns how many bytes.

    Pages of the cache are new ones for each append, and what fills them is thrown away unread. The bytes need not be
    aligned in memory: they are copied to where they are, piece by piece. Fewer bytes, or none, are written where the
    system or the file system has no direct writes; the rest is to be written as usual. Durable after the next `fsync`,
    as other writes. Raises OSError: some of the bytes may be there.
    """
    if sys.platform != "linux":
        return 0
    import numpy as np  # a tenth of a second, for commands that write nothing

    flags, written = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 0
    try:
        with _staging:
            if not _stages:
                _stages.append(mmap.mmap(-1, _STAGE_BYTES))
            (stage,) = _stages
            while size := min(_STAGE_BYTES, (len(data) - written) // DIRECT_PAGE * DIRECT_PAGE):
                # Not by slices: this copy does not hold the interpreter's lock.
                np.copyto(np.frombuffer(stage, np.uint8, size), np.frombuffer(data, np.uint8, size, written))
                done = os.pwrite(descriptor, memoryview(stage)[:size], offset + written) // DIRECT_PAGE * DIRECT_PAGE
                if not done:
                    break
                written += done
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return written


def hold(descriptor: int) -> None:
    """Mark a file or folder as being written until it is closed, or the process ends; see `remove_abandoned`. Raises
    OSError: another process holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove what processes that were killed have left here: what has a name of this regular expression, and no
    process holds. Raises OSError."""
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
    """Keep freed blocks of up to 32 MiB, the most that glibc allows, for the next ones: up to 256 MiB at the top of a
    heap. Otherwise it gives a payload's memory back with every round, and the next one waits for new pages: 7 ms for 13
    MB, in place of 0.6."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, 32 << 20)
        tune(_M_TRIM_THRESHOLD, 256 << 20)


def trim_heap() -> None:
    """Return memory that was freed to the system. glibc keeps what was freed below the top of a heap, and gives it to
    threads of the same heap alone: hundreds of megabytes of weights that a start has read and dropped. Other C
    libraries have no such call, nor need."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
