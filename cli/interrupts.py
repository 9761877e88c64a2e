"""SIGTERM and SIGINT of a command, from its first moment to its last. Imports little: what comes before goes wrong."""

import _thread
import atexit
import os
import signal
from collections.abc import Callable
from types import FrameType


def install_handlers() -> None:
    """From now on a signal ends this process at once, with 130."""
    on_signals(end_at_once)
    # Python gives up handlers of its own before it takes modules apart, which takes long where torch is loaded.
    atexit.register(on_signals, signal.SIG_IGN)


def on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Set the handler of both. From the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def end_at_once(*_: object) -> None:
    """From another thread: this one may hold a lock of the log lines, which are written first."""
    _thread.start_new_thread(_end, ())


def _end() -> None:
    from farloop.runtime.log_queue import say

    say("farloop: interrupted", err=True)
    os._exit(130)  # ExitCode.INTERRUPTED


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, so that what the command has started is ended. The next signal ends it at once."""
    on_signals(end_at_once)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return end_at_once()  # native code that is loaded, as torch's, loses the exception or aborts the process
        frame = frame.f_back
    raise KeyboardInterrupt
