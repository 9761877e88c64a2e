"""The network between nodes and coordinator: connections of lanes, each a pipe per direction, with the weather on them.

In clear weather a pipe is what TCP gives: late, but whole and in order. In a storm frames are lost, doubled,
overtaken and damaged, which no real link does to its application; the session must bear it all the same.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from farloop.sim.virtual_time import EventQueue, Process
from farloop.wire.frames import Buffer

Frame = list[bytes]
"""One message of one or more parts, with bytes of its own."""

CONNECT_TIMEOUT_S = 5.0
"""A node gives up dialling after this, as its sockets do."""


class Side(IntEnum):
    """An end of a connection."""

    NODE = 0
    COORDINATOR = 1

    @property
    def other(self) -> "Side":
        return Side(1 - self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConditions:
    """What a pipe does to frames."""

    latency_s: float = 0.02
    jitter_s: float = 0.0
    """Added to the latency, evenly between 0 and this."""
    bytes_per_s: float = 10e6
    wobble: float = 0.0
    """Of the seconds that a frame takes at this rate: standard deviation of their logarithm."""
    loss: float = 0.0
    """Share of frames that vanish."""
    duplication: float = 0.0
    """Share of frames that come twice."""
    reordering: float = 0.0
    """Share of frames that are overtaken by what follows within 0.2 s."""
    garbage: float = 0.0
    """Share of frames that come damaged."""


HOSTILE_LINK = LinkConditions(jitter_s=0.03, bytes_per_s=2e5, loss=0.05, duplication=0.05, reordering=0.1, garbage=0.03)
"""Everything at once, and still a link over which a run makes progress."""


class Pipe:
    """One direction of one lane."""

    def __init__(
        self, agenda: EventQueue, weather: LinkConditions, rng: random.Random, deliver: Callable[[Frame], None]
    ) -> None:
        self._agenda, self._weather, self._rng, self._deliver = agenda, weather, rng, deliver
        self._free_at = 0.0
        self._last_arrival = 0.0

    def change(self, weather: LinkConditions) -> None:
        """For the frames from now on."""
        self._weather = weather

    def send(self, parts: Sequence[Buffer], *, gently: bool = False) -> None:
        """Take a frame; its memory may change afterwards. `gently` spares it everything but time."""
        frame = [bytes(part) for part in parts]
        weather, rng = self._weather, self._rng
        link_s = sum(map(len, frame)) / weather.bytes_per_s
        link_s *= rng.lognormvariate(0.0, weather.wobble) if weather.wobble else 1.0
        self._free_at = max(self._free_at, self._agenda.now) + link_s
        if not gently and rng.random() < weather.loss:
            return
        if not gently and rng.random() < weather.garbage:
            frame = damaged(frame, rng)
        self._arrive(frame, overtaken=not gently and rng.random() < weather.reordering)
        if not gently and rng.random() < weather.duplication:
            self._arrive(frame, overtaken=True)

    def _arrive(self, frame: Frame, *, overtaken: bool) -> None:
        arrival = self._free_at + self._weather.latency_s + self._rng.uniform(0.0, self._weather.jitter_s)
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
        self.blocked: set[Side] = set()
        """Ends that nothing reaches, though the other way is whole."""
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
        self._open = {Side.NODE: True, Side.COORDINATOR: True}
        """Whether that side takes this connection for alive."""
        self.deliver: dict[Side, Callable[[int, Frame], None]] = {}
        """(lane, frame) → into that side's process."""
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
                self._cable.through(target, lambda: self._hand_over(target, lane, frame))

            self._pipes[lane, sender] = Pipe(self._agenda, self._weather, self._rng, arrive)
        self._pipes[lane, sender].send(parts, gently=gently)
        return True

    def change(self, weather: LinkConditions) -> None:
        """The weather of all that is sent from now on."""
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

    def _hand_over(self, side: Side, lane: int, frame: Frame) -> None:
        if self._open[side]:
            self._processes[side].deliver(lambda: self.deliver[side](lane, frame))
