"""Scenarios and faults, as values."""

import math
from dataclasses import dataclass, field
from typing import Literal

from farloop.algo.spec import NodeId
from farloop.algo.stages import Part
from farloop.algo.terms import Terms
from farloop.coordinator.decide.roster import EXPIRE_S
from farloop.coordinator.net.sessions import UNLIMITED, RateLimits
from farloop.sim.network import LinkConditions
from farloop.sim.problems import Inner, Problem, Toy
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import PROTOCOL_VERSIONS

# --- Further things that go wrong, beside those of `scenario.py`: finer, nastier, or several at a time. Plain values.
#
# `at` is in virtual seconds. How each is done to a world is in `world.py`.


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashAtWrite:
    """SIGKILL of the coordinator at a write of its disk, and a restart from what is durable.

    Writes are counted over all of its starts, so one may fall into the claim of an epoch: a crash in a recovery.
    """

    write: int
    """The how many-th, from 1."""
    durable: bool
    """Just behind it, before anybody hears of it; or just before: of what was torn off nothing is left, for a restart
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


Deceit = Literal["nan", "thousandfold", "overflow", "flipped", "noise", "replayed", "copied", "stale", "claims"]

More = (
    CrashAtWrite
    | ReadOnlyDisk
    | LowDisk
    | ClockJump
    | OneWayCut
    | BadLinkPeriod
    | Rejoin
    | SecondCoordinator
    | SlowLink
    | SlowNode
)


# --- What a simulated run is made of: terms, nodes, weather, and what goes wrong when. Plain values.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """One node of the scenario."""

    name: NodeId
    seed: int = 0  # of its data: nodes with the same seed see the same samples
    step_s: float = 0.1  # seconds of one inner step
    step_wobble: float = 0.0  # standard deviation of their logarithm
    tokens: int | None = None  # of one inner step; the terms' batch unless given
    tau: int | None = None  # its own overlap; the terms' unless given
    joins_at: float = 0.0
    holds: Part = None  # of the model
    protocol: int = PROTOCOL_VERSIONS[1]  # newest version of the protocol that it speaks
    weather: LinkConditions | None = None  # of its link; the scenario's unless given
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
    a node kept out, a person winds the run back. Nothing happens once a node has ended: nobody could bring it back."""

    after_commits: int  # it dies `later_s` after this many windows were committed
    commits_ago: int  # commits that the copy lacks, of those before it died
    later_s: float = 0.2
    down_s: float = 1.0
    decides_s: float = 3.0  # how often the person looks
    adopts: bool = False  # the person goes on from what nodes hold, and winds the run back only where that cannot be


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTerms:
    """Somebody sets other terms, as `farloop set` does; refused where the coordinator is down, or the run cannot have
    them."""

    at: float
    given: tuple[tuple[str, str], ...]  # key and value of each


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
    | More
    | ChangeTerms
)

TWO_NODES = (NodeSetup(name=NodeId("a"), seed=1), NodeSetup(name=NodeId("b"), seed=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run and its fate; equal scenarios give equal outcomes."""

    terms: Terms
    nodes: tuple[NodeSetup, ...] = TWO_NODES
    faults: tuple[Fault, ...] = ()
    weather: LinkConditions = field(default_factory=LinkConditions)
    seed: int = 0  # of everything that varies: latencies, losses, jobs' durations
    problem: Problem | None = None  # what is trained; the toy of the next seven fields unless given
    blocks: int = 2  # of the model
    blocks_per_fragment: int = 1
    stages: tuple[int, ...] = ()  # first block of every stage but the first
    together: bool = False  # all fragments are sent in one slot
    inner: Inner = "adamw"
    noise: float = 0.1  # of the samples
    num_samples: int = 0  # in one data pass, granted by the coordinator; 0 where nodes bring their own
    limits: Limits = field(default_factory=lambda: Limits(chunk_bytes=400))
    """Chunks small enough for a blob to have several."""
    timing: Timing = field(default_factory=Timing)
    rates: RateLimits = UNLIMITED  # how often nodes may ask the coordinator
    background_share: float = 1.0  # share of the coordinator's uplink that downloads get while updates are sent
    lane_buffer_s: float = math.inf  # a lane of the coordinator is full while this much of the link's time waits in it
    floor_share: float | None = None  # the coordinator's; its own default unless given
    adapt: str = "off"  # what it does about nodes that become slow
    drops_silent: bool = True  # whether windows go on without a node that misses its deadline
    expire_s: float = EXPIRE_S  # how long a node may be away before its samples go to others
    job_s: tuple[float, float] = (0.001, 0.02)
    """Shortest and longest duration of an encoding, a commit's arithmetic, a sync."""
    patience_s: float = 60.0  # virtual seconds without any progress after which the world is called stuck
    frugal: bool = False
    """For long runs of models of some size: the weights of every step are not kept, nor are the bytes that a restart of
    the coordinator, or a node that comes late, would need. Nothing may go wrong in it."""

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
