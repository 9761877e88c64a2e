"""Further things that go wrong, beside those of `scenario.py`: finer, nastier, or several at a time. Plain values.

`at` is in virtual seconds. How each is done to a world is in `world.py`.
"""

from dataclasses import dataclass
from typing import Literal

from farloop.algo.spec import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashAtWrite:
    """SIGKILL of the coordinator at a write of its disk, and a restart from what is durable.

    Writes are counted over all of its starts, so one may fall into the claim of an epoch: a crash in a recovery.
    """

    write: int
    """The how many-th, from 1."""
    durable: bool
    """Just behind it, before anybody hears of it; or just before: of what was torn off nothing is left, for a restart
    cuts it (`coordinator/segment.py`)."""
    down_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnlyDisk:
    """The coordinator's file system takes no writes for a while, as Linux makes one that found an error in itself."""

    at: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowDisk:
    """There is room for small records alone: no delta and no update fits."""

    at: float
    for_s: float
    room: int = 64
    """Bytes of an attachment that still fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockJump:
    """A process's clock leaps ahead, while nothing else of it stands still; monotonic clocks never go back."""

    node: NodeId | None
    """None is the coordinator's."""
    at: float
    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWayCut:
    """Frames of one direction wait until the link is whole again, the others come through."""

    node: NodeId
    at: float
    for_s: float
    to: Literal["node", "coordinator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Squall:
    """Frames of a link are lost, doubled, overtaken and damaged, and its connection is reset again and again."""

    node: NodeId
    at: float
    for_s: float
    resets: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ComeAndGo:
    """A node leaves and is started again under the same name, many times."""

    node: NodeId
    at: float
    times: int
    stays_s: float
    """Between a start and the next leaving."""
    gently: bool
    """It drains each time; else it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondCoordinator:
    """Somebody starts another coordinator on the same state while the first one lives: it is refused."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A link carries fewer bytes a second, both ways; whatever is on its way already comes as before."""

    node: NodeId
    at: float
    for_s: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node's inner steps take longer; its link lives on, so with a great factor it hangs."""

    node: NodeId
    at: float
    for_s: float
    factor: float


More = (
    CrashAtWrite
    | ReadOnlyDisk
    | NarrowDisk
    | ClockJump
    | OneWayCut
    | Squall
    | ComeAndGo
    | SecondCoordinator
    | SlowLink
    | SlowNode
)
