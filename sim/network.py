"""The network between nodes and coordinator: connections of lanes, each a pipe per direction, with the weather on them.

In clear weather a pipe is what TCP gives: late, but whole and in order. In a storm frames are lost, doubled,
overtaken and damaged, which no real link does to its application; the session must bear it all the same.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from farloop.runtime.ports import Buffer, ConnectionListener, Route, RouterListener, Sent
from farloop.sim.virtual_time import EventQueue, Process

Frame = list[bytes]  # one message of one or more parts, with bytes of its own
CONNECT_TIMEOUT_S = 5.0  # a node gives up dialling after this, as its sockets do


class Side(IntEnum):
    NODE = 0
    COORDINATOR = 1

    @property
    def other(self) -> "Side":
        return Side(1 - self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConditions:
    latency_s: float = 0.02
    jitter_s: float = 0.0  # added to the latency, evenly between 0 and this
    bytes_per_s: float = 10e6
    wobble: float = 0.0  # of the seconds that a frame takes at this rate: standard deviation of their logarithm
    loss: float = 0.0  # share of frames that vanish
    duplication: float = 0.0  # share of frames that come twice
    reordering: float = 0.0  # share of frames that are overtaken by what follows within 0.2 s
    garbage: float = 0.0  # share of frames that come damaged


HOSTILE_LINK = LinkConditions(jitter_s=0.03, bytes_per_s=2e5, loss=0.05, duplication=0.05, reordering=0.1, garbage=0.03)
"""Everything at once, and still a link over which a run makes progress."""


class Pipe:
    def __init__(
        self, agenda: EventQueue, weather: LinkConditions, rng: random.Random, deliver: Callable[[Frame], None]
    ) -> None:
        self._agenda, self._weather, self._rng, self._deliver = agenda, weather, rng, deliver
        self.free_at = 0.0  # when the link has carried all that was sent
        self._last_arrival = 0.0

    def change(self, weather: LinkConditions) -> None:
        self._weather = weather

    def send(self, parts: Sequence[Buffer], *, gently: bool = False) -> None:
        """Take a frame; its memory may change afterwards. `gently` spares it everything but time."""
        frame = [bytes(part) for part in parts]
        weather, rng = self._weather, self._rng
        link_s = sum(map(len, frame)) / weather.bytes_per_s
        link_s *= rng.lognormvariate(0.0, weather.wobble) if weather.wobble else 1.0
        self.free_at = max(self.free_at, self._agenda.now) + link_s
        if not gently and rng.random() < weather.loss:
            return
        if not gently and rng.random() < weather.garbage:
            frame = damaged(frame, rng)
        self._arrive(frame, overtaken=not gently and rng.random() < weather.reordering)
        if not gently and rng.random() < weather.duplication:
            self._arrive(frame, overtaken=True)

    def _arrive(self, frame: Frame, *, overtaken: bool) -> None:
        arrival = self.free_at + self._weather.latency_s + self._rng.uniform(0.0, self._weather.jitter_s)
        if overtaken:
            arrival += self._rng.uniform(0.0, 0.2)
        else:
            arrival = self._last_arrival = max(arrival, self._last_arrival)
        self._agenda.at(arrival, lambda: self._deliver(frame))


def damaged(frame: Frame, rng: random.Random) -> Frame:
    """The frame with a bit flipped, cut short, grown, without a part, or replaced by noise."""
    part = rng.randrange(len(frame))
    data = frame[part]
    match rng.randrange(5):
        case 0:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            data = data[: rng.randrange(len(data))]
        case 2:
            data += rng.randbytes(rng.randint(1, 16))
        case 3:
            return frame[:part] + frame[part + 1 :] or [b""]
        case _:
            data = rng.randbytes(rng.randint(0, 200))
    return [*frame[:part], data, *frame[part + 1 :]]


class PhysicalLink:
    """The way between one node and the coordinator; while it is cut, frames wait for it to be mended, as TCP's do."""

    def __init__(self, agenda: EventQueue) -> None:
        self._agenda = agenda
        self.cut = False
        self.blocked: set[Side] = set()  # ends that nothing reaches, though the other way is whole
        self._waiting: list[Callable[[], None]] = []

    @property
    def whole(self) -> bool:
        return not self.cut and not self.blocked

    def through(self, to: Side, action: Callable[[], None]) -> None:
        """Do it now, or once the cable is whole again."""
        if self.cut or to in self.blocked:
            self._waiting.append(action)
        else:
            action()

    def mend(self) -> None:
        self.cut = False
        self.blocked.clear()
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self._agenda.after(0.0, action)


class Connection:
    """The sockets of one session: a control lane, a bulk lane once it is opened, and two ends that can let go."""

    def __init__(
        self,
        agenda: EventQueue,
        cable: PhysicalLink,
        weather: LinkConditions,
        rng: random.Random,
        node: Process,
        coordinator: Process,
    ) -> None:
        self._agenda, self._cable, self._weather, self._rng = agenda, cable, weather, rng
        self._processes = {Side.NODE: node, Side.COORDINATOR: coordinator}
        self._pipes: dict[tuple[int, Side], Pipe] = {}
        self._open = {Side.NODE: True, Side.COORDINATOR: True}  # whether that side takes this connection for alive
        self.deliver: dict[Side, Callable[[int, Frame], None]] = {}  # (lane, frame) → into that side's process
        self.lost: Callable[[], None] = lambda: None
        """Tells the node's process that the connection is gone. The coordinator notices when it sends."""

    def is_open(self, side: Side) -> bool:
        return self._open[side]

    def send(self, sender: Side, lane: int, parts: Sequence[Buffer], *, gently: bool = False) -> bool:
        """Transmit a frame; False where the sender's socket is closed."""
        if not self._open[sender] or not self._processes[sender].alive:
            return False
        if (lane, sender) not in self._pipes:
            target = sender.other

            def arrive(frame: Frame) -> None:
                self._cable.through(target, lambda: self._deliver(target, lane, frame))

            self._pipes[lane, sender] = Pipe(self._agenda, self._weather, self._rng, arrive)
        self._pipes[lane, sender].send(parts, gently=gently)
        return True

    def queued_s(self, sender: Side, lane: int) -> float:
        """How long the link still needs for the frames that were sent on this lane."""
        pipe = self._pipes.get((lane, sender))
        return 0.0 if pipe is None else max(0.0, pipe.free_at - self._agenda.now)

    def change(self, weather: LinkConditions) -> None:
        self._weather = weather
        for pipe in self._pipes.values():
            pipe.change(weather)

    def close(self, side: Side) -> None:
        """One end closes its sockets, or dies; the other learns of it once the news has come through."""
        if not self._open[side]:
            return
        self._open[side] = False
        self._agenda.after(
            self._weather.latency_s, lambda: self._cable.through(side.other, lambda: self._hear(side.other))
        )

    def reset(self) -> None:
        """Something between the ends breaks the connection: both hear at once."""
        for side in Side:
            self._hear(side)

    def _hear(self, side: Side) -> None:
        if self._open[side]:
            self._open[side] = False
            if side is Side.NODE:
                self._processes[side].deliver(self.lost)

    def _deliver(self, side: Side, lane: int, frame: Frame) -> None:
        if self._open[side]:
            self._processes[side].deliver(lambda: self.deliver[side](lane, frame))


Dial = Callable[[Callable[[Connection | None], None]], None]
"""Ask the network for a connection; the answer comes later, None if there is none."""


class VirtualDialer:
    has_others = False

    def __init__(self, dial: Dial) -> None:
        self._dial = dial

    def turn_away(self) -> None: ...

    def dial(self, opened: Callable[["NodeEnd"], None], failed: Callable[[str], None]) -> None:
        self._dial(lambda connection: opened(NodeEnd(connection)) if connection else failed("no answer"))


class NodeEnd:
    """The node's end of a connection, which takes whatever it is given."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._closed = connection, False

    def listen(self, listener: ConnectionListener) -> None:
        self._listener = listener
        self._connection.deliver[Side.NODE] = self._arrived
        self._connection.lost = self._lost
        listener.on_connected(0)

    def open_lane(self, lane: int, greeting: Sequence[Buffer]) -> None:
        self._connection.send(Side.NODE, lane, greeting, gently=True)
        self._listener.on_connected(lane)
        self._listener.on_ready(lane)

    def is_ready(self, lane: int) -> bool:
        return True

    def send(self, lane: int, frames: Sequence[Sequence[Buffer]]) -> None:
        for parts in frames:
            self._connection.send(Side.NODE, lane, parts)

    def kernel(self) -> None:
        return None

    def close(self, last: Sequence[Sequence[Buffer]] = ()) -> None:
        self._closed = True
        self.send(0, last)
        self._connection.close(Side.NODE)

    def _arrived(self, lane: int, frame: Frame) -> None:
        if not self._closed:
            self._listener.on_frame(lane, frame)

    def _lost(self) -> None:
        if not self._closed:
            self._listener.on_lost(0, "the connection ended")


@dataclass(frozen=True, slots=True)
class VirtualSender:
    """Where a frame came from: nodes have no keys, addresses or file descriptors."""

    owner: str | None = None
    address: str = "?"
    descriptor: int | None = None


class VirtualRouterSocket:
    """The coordinator's end of all connections. A route is a connection and its lane."""

    endpoint = "virtual"
    authenticates = False

    def __init__(self, process: Process, lane_buffer_s: float = math.inf) -> None:
        """`lane_buffer_s`: a lane that holds more than the link carries in this time takes no further frame."""
        self._process, self._lane_buffer_s = process, lane_buffer_s
        self._retries = False

    def listen(self, listener: RouterListener) -> None:
        self._listener = listener

    def accept(self, connection: Connection) -> None:
        sender = VirtualSender()
        connection.deliver[Side.COORDINATOR] = lambda lane, frame: self._listener.on_frame(
            (connection, lane), frame, sender
        )

    def send(self, route: Route, parts: Sequence[Buffer]) -> Sent:
        connection, lane = cast(tuple[Connection, int], route)
        full_s = connection.queued_s(Side.COORDINATOR, lane) - self._lane_buffer_s
        if full_s > 0.0:
            if not self._retries:
                self._retries = True
                self._process.after(full_s + 1e-6, self._retry)  # beyond the rounding of the sum
            return Sent.FULL
        return Sent.TAKEN if connection.send(Side.COORDINATOR, lane, parts) else Sent.GONE

    def receive(self) -> None:
        """Nothing is left to read: a process that was stopped gets its frames before its timers."""

    def close(self) -> None: ...

    def _retry(self) -> None:
        self._retries = False
        self._listener.on_writable()
