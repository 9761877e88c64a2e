"""The protocols between a daemon's executor and the process that it runs in.

An executor never waits. Whatever takes time is submitted to a port, which calls back in the executor's own thread. In a
real process the ports are asyncio timers and threads (`system.py`), in a simulation they are virtual time
(`sim/virtual_time.py`): the same executor runs in both.
"""

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Protocol, TypeVar

T = TypeVar("T")

Action = Callable[[], None]

Buffer = bytes | bytearray | memoryview


class Timer(Protocol):
    def cancel(self) -> None:
        """Do not run it. Harmless after it has run."""


class Clock(Protocol):
    """The time of one process: monotonic, but for `minute_of_day`."""

    def now(self) -> float:
        """Seconds, from an arbitrary origin."""

    def minute_of_day(self) -> int:
        """Of the clock on the wall, from 0 to 1439, in local time."""

    def call_later(self, delay_s: float, action: Action) -> Timer:
        """Run `action` in the executor's thread after `delay_s` seconds, unless the process ends before."""


class Worker(Protocol):
    """Runs jobs one after the other, in the order in which they were submitted."""

    seconds: float  # that jobs have taken so far

    def submit(self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """Run `job` outside the executor's thread, then `done` with its result or `failed` with its exception inside.

        Jobs that are submitted while another one runs see all that was done until their own turn.
        """

    def close(self) -> None:
        """Finish the jobs that were submitted, and stop. What they report may be lost."""


Moved = tuple[int, int]  # bytes that were sent, and received


class Objects(Protocol):
    """Carries blobs to and from an object store, by URLs that are signed for one request.

    `over` is called in the executor's thread once nothing of a request goes on, with the bytes that it moved.
    """

    def put(self, url: str, data: Buffer, over: Callable[[str, Moved], None]) -> None:
        """Write an object once; one that is there stays. `over` gets why it failed; empty: it is there."""

    def get(
        self, url: str, into: bytearray, right: Callable[[bytearray], bool], over: Callable[[str, Moved], None]
    ) -> None:
        """Read an object that fills `into`. `over` gets why it failed; empty: it is there, and `right`."""

    def delete(self, urls: Sequence[str]) -> None:
        """Delete objects at some time, if the store does so."""

    def close(self) -> None:
        """Begin no request any more."""


class ConnectionListener(Protocol):
    """What a node's connection reports to. All calls come in the link's thread, and none after `close`."""

    def on_connected(self, lane: int) -> None:
        """The lane's two ends have exchanged greetings."""

    def on_frame(self, lane: int, parts: Sequence[Buffer]) -> None:
        """A frame arrived."""

    def on_ready(self, lane: int) -> None:
        """The lane has sent what it was given, and takes more."""

    def on_lost(self, lane: int, why: str, *, key_refused: bool = False) -> None:
        """The lane's connection failed, or could not be made."""


class Connection(Protocol):
    """The node's end of one session: lanes that carry frames. Lane 0, for control, is open from the start."""

    def listen(self, listener: ConnectionListener) -> None:
        """Report to `listener` from now on. Called once."""

    def open_lane(self, lane: int, greeting: Sequence[Buffer]) -> None:
        """Open another lane, or one that was lost. Its first frame is `greeting`; `on_ready` tells when that left."""

    def is_ready(self, lane: int) -> bool:
        """Whether the lane takes frames now."""

    def send(self, lane: int, frames: Sequence[Sequence[Buffer]]) -> None:
        """Send frames on a lane that is ready. It is ready again after `on_ready`."""

    def kernel(self) -> tuple[bytes, str] | None:
        """TCP_INFO and congestion control of the first connection that carries blobs, or of that for control before
        there is one; None where there is none."""

    def close(self, last: Sequence[Sequence[Buffer]] = ()) -> None:
        """Send these frames on lane 0 if they can leave at once, and end all lanes."""


class Dialer(Protocol):
    has_others: bool  # whether there are several coordinators, of which one leads

    def turn_away(self) -> None:
        """The coordinator that was reached last is not the leader: try it last from now on."""

    def dial(self, opened: Callable[[Connection], None], failed: Callable[[str], None]) -> None:
        """Report a connection that is being made to `opened`, or to `failed` why there can be none."""


class Sent(Enum):
    """What became of a frame that was given to a socket."""

    TAKEN = "taken"
    FULL = "full"  # the lane takes no more for now
    GONE = "gone"  # the lane's connection has ended


Route = Hashable  # a lane, as the coordinator's socket knows it: one connection of a node


class Sender(Protocol):
    """Where a frame came from."""

    @property
    def owner(self) -> str | None:
        """The node whose key authenticated the frame. None without keys, and for a key that was revoked."""

    @property
    def address(self) -> str:
        """The host that sent it; ? if the transport cannot tell."""

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the connection, if it has one."""


class RouterListener(Protocol):
    """What a router socket reports to. All calls come in the executor's thread."""

    def on_frame(self, route: Route, parts: Sequence[Buffer], sender: Sender) -> None:
        """A frame arrived."""

    def on_writable(self) -> None:
        """Lanes that were full may take frames again."""

    def on_gone(self) -> None:
        """A connection that a session uses has ended; sending tells which one."""

    def on_revoked(self, owners: AbstractSet[str]) -> None:
        """The keys of these nodes were withdrawn or replaced."""

    def uses(self, descriptor: int) -> bool:
        """Whether an open session uses the connection with this file descriptor."""


class RouterSocket(Protocol):
    """The coordinator's end of all connections."""

    endpoint: str  # where it listens
    authenticates: bool  # whether every frame must come under a key that is known

    def listen(self, listener: RouterListener) -> None:
        """Report to `listener` from now on. Called once."""

    def send(self, route: Route, parts: Sequence[Buffer]) -> Sent:
        """Send one frame. The socket keeps `parts` until the frame has left."""

    def receive(self) -> None:
        """Report the frames that can be read now. Called before timers fire, so that a pause of this process is not
        taken for silence of its peers."""

    def close(self) -> None:
        """Close all connections."""
