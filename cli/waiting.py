"""Tells a person why a node has not started yet: a silent daemon is the first thing that makes people give up."""

import logging
import socket
import threading
from types import TracebackType
from typing import Self

from farloop.cli.address import Address, parse_tcp

_log = logging.getLogger(__name__)

FIRST_S = 5.0
EVERY_S = 30.0


class Waiting:
    """While it is open, says every now and then what is missing."""

    def __init__(self, coordinator: str) -> None:
        self._address = parse_tcp(coordinator)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)

    def over(self) -> None:
        """Training has begun."""
        self._over.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()

    def _watch(self) -> None:
        pause_s = FIRST_S
        while not self._over.wait(pause_s):
            pause_s = EVERY_S
            _log.warning("waiting coordinator=tcp://%s reason=%r", self._address, why(self._address))


def why(address: Address) -> str:
    """What a plain connection to the coordinator's port tells."""
    failure = connect(address)
    if failure is None:
        return "the port answers; unless the link complains above, the run begins once all of its nodes are there"
    return f"cannot connect: {failure}; is the coordinator running, and its port open from here?"


def connect(address: Address, timeout_s: float = 3.0) -> str | None:
    """Connect and hang up; what went wrong, or None."""
    try:
        with socket.create_connection((address.host, address.port), timeout_s):
            return None
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
