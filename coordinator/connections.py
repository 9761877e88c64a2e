"""How many TCP connections the coordinator's port has, and which of them must go. Pure: the time is passed in.

ZeroMQ accepts everybody and closes nobody by itself but who does not finish its handshake in time. A connection costs a
descriptor, and a process without one can neither write a file nor let anybody in. So there is a budget: those by which
no session speaks are strangers, which are closed, the oldest first, where there are too many of them at one address or
too many connections in all, and those that stay strangers for long.
"""

import errno
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STRANGERS_OF_AN_ADDRESS: Final = 256
"""Connections from one address by which no session speaks. A node is a stranger for its handshake: some round trips."""

STRANGER_S: Final = 30.0
"""A connection by which no session has spoken for so long is closed: a thin link takes seconds for a greeting."""

DEAD_TCP_MS = 60_000
"""A connection that acknowledges nothing for this long is closed: its peer is gone without a word (half-open)."""

HEARTBEAT_MS = 30_000
"""ZeroMQ asks each peer this often whether it is there, and hangs up ..."""

HEARTBEAT_TIMEOUT_MS = 120_000
"""... after this: an answer waits behind what a thin link has yet to carry. Sessions have a shorter time-out."""

LOOK_S = 5.0
"""Between two looks at connections by which nobody speaks."""

BACKLOG = 1024
"""Connections that the system keeps until ZeroMQ accepts them; it may keep fewer (net.core.somaxconn)."""

MOST: Final = 8192
"""Connections in all: twice those of as many sessions as there may be, and the strangers of some addresses."""

RESERVE: Final = 256
"""Descriptors that are left for files, pages and whatever else opens one."""

FEWEST: Final = 64
"""Connections in all, however few descriptors there are: a budget of none would serve nobody."""


class BindError(OSError):
    """The port cannot be had; one line for the person who chose it."""

    def __init__(self, endpoint: str, error: Exception) -> None:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            super().__init__(
                f"{endpoint} is in use; stop the other process, or choose another port in [coordinator] bind"
            )
        else:
            super().__init__(f"cannot bind {endpoint}: {error}; choose another address in [coordinator] bind")


def most_connections(descriptors: int | None) -> int:
    """The budget in all of a process that may open so many files; None: as many as it likes."""
    return MOST if descriptors is None else max(FEWEST, min(MOST, descriptors - RESERVE))


@dataclass(slots=True)
class Connection:
    """One that ZeroMQ has accepted."""

    descriptor: int
    host: str
    """Of its other end; with `port`, what tells it from another one that has its descriptor later."""
    port: int
    spoken_at: float
    """When a session last spoke by it, or it was accepted."""


class Connections:
    """Of one start of the coordinator."""

    def __init__(self, most: int, is_spoken_by: Callable[[int], bool]) -> None:
        """`is_spoken_by`: whether a session that is open speaks by the connection with this descriptor."""
        self.most, self._is_spoken_by = most, is_spoken_by
        self._open: dict[int, Connection] = {}
        """By descriptor."""
        self._strangers: dict[str, OrderedDict[int, Connection]] = {}
        """Host → those of `_open` by which no session spoke when that was last looked at, the oldest first."""
        self._hung_up: set[int] = set()
        """Told to go: ZeroMQ has yet to say that they have."""

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int, host: str, port: int, now: float) -> Connection | None:
        """ZeroMQ has accepted one. The one that must go for it, if any."""
        self.ended(descriptor)
        self._open[descriptor] = new = Connection(descriptor, host, port, now)
        self._keep_as_stranger(new)
        going = None
        if len(self._strangers[host]) > STRANGERS_OF_AN_ADDRESS:
            going = self._oldest_stranger(host)
        if going is None and len(self._open) - len(self._hung_up) > self.most:
            going = self._oldest_stranger(self._host_of_most())
        if going is not None:
            self._hung_up.add(going.descriptor)
        return going

    def ended(self, descriptor: int) -> None:
        """ZeroMQ has let one go."""
        if connection := self._open.pop(descriptor, None):
            self._no_stranger(connection)
        self._hung_up.discard(descriptor)

    def look(self, now: float) -> list[Connection]:
        """Those by which nobody has spoken for too long. To be called every few seconds."""
        going = []
        for connection in self._open.values():
            if connection.descriptor in self._hung_up:
                continue
            if self._is_spoken_by(connection.descriptor):
                connection.spoken_at = now
                self._no_stranger(connection)
            elif now - connection.spoken_at > STRANGER_S:
                self._no_stranger(connection)
                going.append(connection)
            else:
                self._keep_as_stranger(connection)
        self._hung_up |= {connection.descriptor for connection in going}
        return going

    def check(self) -> None:
        """Assert the invariants."""
        strangers = [descriptor for those in self._strangers.values() for descriptor in those]
        assert len(strangers) == len(set(strangers))
        assert set(strangers) <= self._open.keys() - self._hung_up
        assert self._hung_up <= self._open.keys()
        assert all(self._strangers.values()), "no empty entry is kept"

    def _keep_as_stranger(self, connection: Connection) -> None:
        self._strangers.setdefault(connection.host, OrderedDict())[connection.descriptor] = connection

    def _no_stranger(self, connection: Connection) -> None:
        those = self._strangers.get(connection.host, OrderedDict())
        those.pop(connection.descriptor, None)
        if not those:
            self._strangers.pop(connection.host, None)

    def _oldest_stranger(self, host: str) -> Connection | None:
        """None where sessions speak by all of them by now."""
        self._look_at(host)
        if host not in self._strangers:
            return None
        connection = next(iter(self._strangers[host].values()))
        self._no_stranger(connection)
        return connection

    def _host_of_most(self) -> str:
        """Empty where there are no strangers."""
        while self._strangers:
            host = max(self._strangers, key=lambda host: len(self._strangers[host]))
            num_strangers = len(self._strangers[host])
            self._look_at(host)
            if len(self._strangers.get(host, ())) == num_strangers:
                return host
        return ""

    def _look_at(self, host: str) -> None:
        """Forget those by which sessions speak by now."""
        for connection in list(self._strangers.get(host, OrderedDict()).values()):
            if self._is_spoken_by(connection.descriptor):
                self._no_stranger(connection)
