"""The limit of open files and connections of this process, and a reserve for calls that must not fail.

A process may raise its soft limit to the hard one. A coordinator stays a little below: anyone who reaches its port
opens connections, and the last descriptors are for its disk.
"""

import errno
import resource
import threading
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

SPARE: Final = 64  # descriptors between the soft and the hard limit, for `with_spare`
WITHOUT_BOUND: Final = 1 << 20  # the limit to set where the hard one is infinite

TRIES: Final = 20
"""Another thread may take the spare descriptors first; it holds them for seconds at most, and there are many."""

_LOCK = threading.Lock()


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WITHOUT_BOUND if soft == resource.RLIM_INFINITY else soft


def hard_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WITHOUT_BOUND if hard == resource.RLIM_INFINITY else hard


def raise_limit(*, spare: int = 0) -> int:
    """Raise the soft limit to the hard one, less `spare`, and return it; unchanged where the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard_limit()
    wanted = most - spare if most > 4 * spare else most
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a system that allows less than it says
        return limit() if soft != resource.RLIM_INFINITY else WITHOUT_BOUND
    return wanted


def with_spare(open_one: Callable[[], _T]) -> _T:
    """Open a file, with one of the spare descriptors if no other is left.
    Raises OSError: it cannot be opened, or there is no spare descriptor."""
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
