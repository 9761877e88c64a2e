"""How many files and connections this process may open, and a few that are kept for what must not fail.

The soft limit is what counts, and any process may raise its own to the hard one. A coordinator stays a little below:
connections are opened by whoever reaches its port, and the last descriptors are for its disk.
"""

import errno
import resource
import threading
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

SPARE: Final = 64
"""Descriptors between the soft and the hard limit, for `with_spare`."""

WITHOUT_BOUND: Final = 1 << 20
"""What is asked for where the hard limit is none."""

TRIES: Final = 20
"""Another thread may take the spare descriptors first: it holds them for some seconds at most, and there are many."""

_LOCK = threading.Lock()


def limit() -> int:
    """How many this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WITHOUT_BOUND if soft == resource.RLIM_INFINITY else soft


def hard_limit() -> int:
    """How many it may give itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WITHOUT_BOUND if hard == resource.RLIM_INFINITY else hard


def raise_limit(*, spare: int = 0) -> int:
    """Let this process open as many as it may, but for `spare`; how many that is now. It stays as it is where that
    cannot be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard_limit()
    wanted = most - spare if most > 4 * spare else most
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a system that allows less than it says
        return limit() if soft != resource.RLIM_INFINITY else WITHOUT_BOUND
    return wanted


def with_spare(open_one: Callable[[], _T]) -> _T:
    """Open a file; by one of the spare descriptors where no other is left.

    Raises:
        OSError: it cannot be opened, or there was none to spare either.
    """
    try:
        return open_one()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        failure = error
    with _LOCK:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for _ in range(TRIES if soft != hard else 0):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            try:
                return open_one()
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raise failure
