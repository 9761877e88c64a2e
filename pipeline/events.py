"""Events, commands and errors of a pipeline node."""

from dataclasses import dataclass

from farloop.algo.stages import StageLayout
from farloop.node.errors import NodeError
from farloop.pipeline.messages import Message, MicrobatchRoute, Work

# --- Errors
#
# NodeError
# ├── LayoutError     the layout is invalid, or has no place for this node (do not retry)
# ├── PeerBindError   the address cannot be bound (do not retry)
# └── PipelineBroken  the sources that this stage follows are gone (retry: a new layout, or they come back)


class PeerBindError(NodeError):
    """The address cannot be listened on."""

    exit_code = 2


class PipelineBroken(NodeError):
    """All sources that a stage follows are gone; names them."""

    exit_code = 5
    retriable = True


# --- Events and commands: plain values; the executor holds the tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegan:
    """The executor is ready for the next step."""

    microbatches: int = 0  # of a source: that many, numbered from 0, are there to be sent
    closes_round: bool = True  # whether a new layout may be followed after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Work arrived; the executor keeps its tensor."""

    sender: str
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The work of `Compute` is done; the executor keeps its result."""

    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageArrived:
    sender: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """A peer can be reached, and has spoken."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Down:
    """A peer cannot be reached any more."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Conduct the switch of all nodes to this layout."""

    layout: StageLayout
    addresses: dict[str, str]


Event = StepBegan | Arrived | Computed | MessageArrived | Up | Down | Offered


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Do this work with its tensor; `Computed` is the answer."""

    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send the last result of this trip, as this work."""

    to: str
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a message."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Drop everything of this trip."""

    trip: MicrobatchRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of a step's microbatches."""

    step: int  # of this node, from 0
    microbatches: int  # of all sources that the node follows, or of the source itself
    completed: int = 0  # of a source
    dropped: int = 0  # of a source
    reissued: int = 0  # of a source: trips that took the place of a lost one


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The step is over: divide the gradients, let the optimizer step, then `StepBegan`."""

    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Connect to these nodes, too."""

    addresses: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """The machine follows this layout from here on."""

    layout: StageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """All sources that this node follows have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """This node cannot continue."""

    reason: str


Command = Compute | Send | Tell | Discard | Over | Meet | Adopt | Note | Finish | Stop
