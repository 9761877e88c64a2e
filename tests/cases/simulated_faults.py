"""Simulated runs in which something goes wrong: the scenario of such a run, and its faults. Plain values."""

from dataclasses import dataclass, field
from typing import Literal

from forged_deltas import Deceit
from toy_problem import Inner, Toy

from farloop.algo.spec import NodeId
from farloop.sim import scenario
from farloop.sim.scenario import Problem
from farloop.wire.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup(scenario.NodeSetup):
    """One node of the scenario."""

    deceit: Deceit | None = None  # what it sends in the place of its deltas; None for an honest node


# --- faults: `at` is in virtual seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashNode:
    """SIGKILL; with `down_s`, a new incarnation starts that much later, with nothing but its memory of epochs."""

    node: NodeId
    at: float
    down_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashCoordinator:
    """SIGKILL, and a restart from what is durable, under the next epoch. Give a time, or an event's number."""

    at: float | None = None
    at_event: int | None = None
    """Right after the machine has taken this many events, before any of its commands is carried out."""
    down_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLink:
    """Nothing passes between a node and the coordinator for a while."""

    node: NodeId
    at: float
    for_s: float
    reset: bool = False  # the connection breaks at once; else frames wait, and only silence tells


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseNode:
    """SIGSTOP, then SIGCONT."""

    node: NodeId
    at: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseCoordinator:
    """SIGSTOP, then SIGCONT."""

    at: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FillDisk:
    """The coordinator's disk has no room, not even for a small record."""

    at: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNode:
    """SIGTERM: finish what is begun, then leave."""

    node: NodeId
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoilAnchor:
    """A bit flips in a node's memory."""

    node: NodeId
    at: float
    fragment: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCopy:
    """The coordinator dies, and a copy of its state takes the state's place. Where that is seen, and the run is held or
    a node kept out, a person winds the run back. Nothing happens once a node has ended: it cannot come back."""

    after_commits: int  # it dies `later_s` after this many windows were committed
    commits_ago: int  # commits that the copy lacks, of those before it died
    later_s: float = 0.2
    down_s: float = 1.0
    decides_s: float = 3.0  # how often the person looks
    adopts: bool = False  # the person goes on from what nodes hold, and winds the run back only where that cannot be


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTerms:
    """Other terms are set, as by `farloop run set`; refused where the coordinator is down, or the run cannot have
    them."""

    at: float
    given: tuple[tuple[str, str], ...]  # key and value of each


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashAtWrite:
    """SIGKILL of the coordinator at a write of its disk, and a restart from what is durable.

    Writes are counted over all of its starts, so one may fall into the claim of an epoch: a crash in a recovery.
    """

    write: int
    """The how many-th, from 1."""
    durable: bool
    """Just behind it, before any node hears of it; or just before: of what was torn off nothing is left, for a restart
    cuts it (`coordinator/storage/segment.py`)."""
    down_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnlyDisk:
    """The coordinator's file system takes no writes for a while, as Linux makes one that found an error in itself."""

    at: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LowDisk:
    """There is room for small records alone: no delta and no update fits."""

    at: float
    for_s: float
    room: int = 64  # bytes of an attachment that still fit


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockJump:
    """A process's clock leaps ahead, while nothing else of it stands still; monotonic clocks never go back."""

    node: NodeId | None  # None is the coordinator's
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
class BadLinkPeriod:
    """Frames of a link are lost, doubled, overtaken and damaged, and its connection is reset again and again."""

    node: NodeId
    at: float
    for_s: float
    resets: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """A node leaves and is started again under the same name, many times."""

    node: NodeId
    at: float
    times: int
    stays_s: float  # between a start and the next leaving
    gently: bool  # it drains each time; else it is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondCoordinator:
    """An operator starts another coordinator on the same state while the first one lives: it is refused."""

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


Fault = (
    CrashNode
    | CrashCoordinator
    | CutLink
    | PauseNode
    | PauseCoordinator
    | FillDisk
    | DrainNode
    | SpoilAnchor
    | RestoreCopy
    | CrashAtWrite
    | ReadOnlyDisk
    | LowDisk
    | ClockJump
    | OneWayCut
    | BadLinkPeriod
    | Rejoin
    | SecondCoordinator
    | SlowLink
    | SlowNode
    | ChangeTerms
)


TWO_NODES = (NodeSetup(name=NodeId("a"), seed=1), NodeSetup(name=NodeId("b"), seed=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(scenario.Scenario):
    """A run and its fate; equal scenarios give equal outcomes."""

    problem: Problem | None = None  # type: ignore[assignment]  # the toy of the next seven fields unless given
    nodes: tuple[NodeSetup, ...] = TWO_NODES
    faults: tuple[Fault, ...] = ()
    blocks: int = 2  # of the model
    blocks_per_fragment: int = 1
    stages: tuple[int, ...] = ()  # first block of every stage but the first
    together: bool = False  # all fragments are sent in one slot
    inner: Inner = "adamw"
    noise: float = 0.1  # of the samples
    num_samples: int = 0  # in one data pass, granted by the coordinator; 0 where nodes bring their own
    limits: Limits = field(default_factory=lambda: Limits(chunk_bytes=400))
    """Chunks small enough for a blob to have several."""
    frugal: bool = False  # the weights of every step are not kept

    def trains(self) -> Problem:
        """The given problem, or the toy."""
        return self.problem or Toy(
            blocks=self.blocks,
            blocks_per_fragment=self.blocks_per_fragment,
            stages=self.stages,
            together=self.together,
            inner=self.inner,
            noise=self.noise,
            num_samples=self.num_samples,
            seed=self.seed,
        )
