"""Covers node/signals.py."""

import os
import signal
from collections.abc import Iterator
from signal import SIGTERM, SIGUSR1

import pytest

from farloop.node.signals import Handlers


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(SIGTERM)
    yield
    signal.signal(SIGTERM, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 on, where a process has threads
def test_a_forked_child_ends_by_a_signal_that_its_parent_takes() -> None:
    """Also by one that comes before the child has run a line of Python."""
    signal.signal(SIGTERM, signal.SIG_DFL)
    seen, handlers = list[int](), Handlers()
    handlers.install(lambda number, _: seen.append(number), SIGTERM)
    for _ in range(20):
        if (child := os.fork()) == 0:
            signal.sigtimedwait([], 30.0)
            os._exit(0)
        os.kill(child, SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -SIGTERM
    os.kill(os.getpid(), SIGTERM)
    assert seen == [SIGTERM] and SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers.uninstall()
    assert signal.getsignal(SIGTERM) == signal.SIG_DFL


def test_handlers_that_others_have_set_since_stay() -> None:
    handlers, others = Handlers(), lambda *_: None
    before = signal.getsignal(SIGUSR1)
    handlers.install(lambda *_: None, SIGTERM, SIGUSR1)
    handlers.install(lambda *_: None, SIGUSR1)
    signal.signal(SIGTERM, others)
    handlers.uninstall()
    assert (signal.getsignal(SIGTERM), signal.getsignal(SIGUSR1)) == (others, before)
