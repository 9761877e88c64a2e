"""Signal handlers of this process alone: a child by fork, as of a pool of processes, has those of before.

With ours it would swallow the first SIGTERM, for whose effect its parent waits.
"""

import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Handlers:
    """Of some signals, until they are given back."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._ours: list[Any] = []

    def install(self, handler: Callable[..., object], *signals: signal.Signals) -> None:
        """Have the handler called for these signals. From the main thread."""
        self._ours.append(handler)
        for number in signals:
            if (before := signal.signal(number, handler)) not in self._ours:
                self._before[number] = before or signal.SIG_DFL
        _all.add(self)

    def uninstall(self) -> None:
        """Put those of before back, where no others were set since, if this is the main thread."""
        while self._before and threading.current_thread() is threading.main_thread():
            number, before = self._before.popitem()
            if signal.getsignal(number) in self._ours:
                signal.signal(number, before)


_all: weakref.WeakSet[Handlers] = weakref.WeakSet()
_forking = threading.local()  # its `mask`: the signals that the thread had blocked before


def _block_signals() -> None:
    """Python forgets a signal that comes to a child before its first line of Python."""
    taken = {number for handlers in _all for number in handlers._before}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    for handlers in _all:
        handlers.uninstall()
    _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_begin_child)
