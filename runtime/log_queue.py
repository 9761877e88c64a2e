"""Writes that a daemon does not wait for: a bounded queue, and a thread that writes. What has no room is counted.

Standard error may be a terminal that is stopped, or a pipe without a reader, and a file may lie on a network disk that
hangs: a write to it then takes for ever. Standard library only.
"""

import io
import logging
import os
import queue
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, TextIO, TypeVar

T = TypeVar("T")

MOST_WAITING: Final = 4096  # items, of some hundred bytes each
FLUSH_S: Final = 2.0  # longest wait at the end of a process
_END: Final = object()


class BackgroundWriter(Generic[T]):
    """Hands items to `write` in a daemon thread of its own, in order."""

    def __init__(self, name: str, write: Callable[[T], object], size: int = MOST_WAITING) -> None:
        """`write` must not raise. The thread begins with the first item."""
        self.dropped = 0  # items that had no room
        self._name, self._write, self._size = name, write, size
        self._pid = 0
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> None:
        """Write the item later, or drop it: never waits. One thread at a time."""
        if self._pid != os.getpid():  # the first item, here or in a process that was forked: threads are not inherited
            self._pid, self._queue = os.getpid(), queue.Queue[Any](self._size)
            self._thread = threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Whether all items have been written within this time."""
        if self._pid != os.getpid():
            return True
        end, waiting = time.monotonic() + timeout_s, self._queue
        with waiting.all_tasks_done:
            while waiting.unfinished_tasks and (left_s := end - time.monotonic()) > 0:
                waiting.all_tasks_done.wait(left_s)
        return not waiting.unfinished_tasks

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """As `flush`, and end the thread if that succeeds; the next item begins another."""
        if (written := self.flush(timeout_s)) and self._pid == os.getpid() and self._thread is not None:
            self._queue.put(_END)
            self._thread.join()
            self._pid = 0
        return written

    def _run(self, items: "queue.Queue[Any]") -> None:
        for item in iter(items.get, _END):
            self._write(item)
            items.task_done()


class LogQueue(logging.Handler):
    """Writes log lines to a stream. A gap is told as a line of its own, once there is room again."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.writer = BackgroundWriter[str]("logs", self._write)
        self._stream, self._told, self._failed = stream, 0, 0

    @property
    def dropped(self) -> int:
        return self.writer.dropped + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(self.format(record))
        except Exception as error:  # noqa: BLE001 - a message and arguments that do not fit each other, as logging has it
            self.writer.put(f"{record.pathname}:{record.lineno}: cannot format a log line: {error}")

    def flush(self) -> None:
        self.writer.flush()

    def _write(self, line: str) -> None:
        if (dropped := self.dropped) > self._told:
            what = "log lines dropped count=%d cause='not read in time'"
            gap = logging.LogRecord(__name__, logging.WARNING, "", 0, what, (dropped - self._told,), None)
            line, self._told = f"{self.format(gap)}\n{line}", dropped
        self._failed += not write_all(self._stream, f"{line}\n")


def write_all(stream: TextIO, text: str) -> bool:
    """Write to a stream past its buffer, whose lock a write that hangs would keep. False: its reader is gone."""
    errors = stream.errors if stream.errors not in (None, "strict") else "backslashreplace"
    data = text.encode(stream.encoding or "utf-8", errors)
    try:
        stream.flush()
        while data:
            try:
                data = data[os.write(stream.fileno(), data) :]
            except BlockingIOError:  # another program has made it non-blocking
                select.select([], [stream], [])
    except io.UnsupportedOperation:  # not a file: a test's, or a notebook's
        stream.write(text)
    except (OSError, ValueError):
        return False
    return True


def say(line: str, *, err: bool = False) -> None:
    """Print one line, after the log lines before it. If it is not read, go on without after `FLUSH_S`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogQueue):
            handler.flush()
    stream = sys.stderr if err else sys.stdout
    writer = BackgroundWriter[str]("say", partial(write_all, stream))
    try:
        writer.put(f"{line}\n")
    except RuntimeError:  # no thread can be started
        write_all(stream, f"{line}\n")
    else:
        writer.close()


def dropped_lines() -> int:
    """Log lines of this process that will not be read."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LogQueue))


def stack_of(thread: threading.Thread) -> str:
    """Where a thread of this process is now; the innermost call last."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
