"""Events and commands of the coordinator's machine.

Commands run in order, on the loop. `Receive` is answered by `InputStored` or `InputFailed` (or by the session's end),
`Commit` by `CommitDone` or `CommitFailed`; `Record` must be in the journal before any later command runs.
"""

from dataclasses import dataclass

from farloop.algo.spec import BlobId, NodeId, Revision
from farloop.coordinator.decide.records import AllowedKey, AnchorFetched, WindowCommitted
from farloop.coordinator.decide.records import Record as JournalRecord
from farloop.wire.messages import AnchorRef, Committed, Hello, Message, Offer, Refused, Welcome
from farloop.wire.reasons import Reason

SessionId = int

# --- Events


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHello:
    """A session's first message; `node` is named by the key, or without keys by the message."""

    session: SessionId
    node: NodeId
    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage:
    """A control message of an accepted session."""

    session: SessionId
    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDisconnected:
    """A session ended."""

    session: SessionId
    node: NodeId
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStored:
    """A delta is whole, verified and durable."""

    offer: Offer
    payload: int = 0  # as in its record


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFailed:
    """A delta's bytes are not as announced."""

    offer: Offer
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDone:
    """The window's commit is durable."""

    record: WindowCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """Nothing was changed; the commit is tried again."""

    fragment: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOverflow:
    """Nothing was changed: these deltas overflow fp32, and would again."""

    fragment: int
    longest: BlobId | None  # of the deltas; None where the window has none
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsGiven:
    """An operator set new terms; the revision was made by `CoordinatorMachine.revision_for` just before."""

    revision: Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysAllowed:
    """These keys may come in, and no others: at a start, and whenever the allow list has changed."""

    keys: frozenset[AllowedKey]
    time_s: float  # on the wall clock, in seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Open windows must not wait for this node (`straggler_monitor.py`); later ones do."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldReleased:
    """An operator says that the nodes that hold the run are wrong (`rollback.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgotten:
    """An operator says that a node that is not connected does not come back."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorStored:
    """A requested anchor arrived, matches, and is durable."""

    record: AnchorFetched


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorFailed:
    """A requested anchor does not match, and is not requested from this node again; or it stopped coming."""

    node: NodeId
    anchor: AnchorRef
    spoiled: bool


Event = (
    NodeHello
    | NodeMessage
    | NodeDisconnected
    | InputStored
    | InputFailed
    | CommitDone
    | CommitFailed
    | SumOverflow
    | TermsGiven
    | KeysAllowed
    | LeftOut
    | HoldReleased
    | NodeForgotten
    | AnchorStored
    | AnchorFailed
)


# --- Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Open the session."""

    session: SessionId
    node: NodeId
    welcome: Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """End the session with a reason."""

    session: SessionId
    refused: Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """End a session that another replaced."""

    session: SessionId
    reason: Reason
    told: str = ""  # the detail with which its node is told, so that it does not dial again; empty: it is not told


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a control message."""

    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Let the offered delta come."""

    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveAnchor:
    """Receive an anchor that was asked for. Answered by `AnchorStored`, `AnchorFailed`, or the session's end."""

    offer: Offer
    anchor: AnchorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Announce a commit, and send its update from the journal."""

    nodes: tuple[NodeId, ...]
    committed: Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSnapshot:
    """Send the fragment's anchor when its turn comes."""

    node: NodeId
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferSnapshot:
    """From the executor itself: a snapshot is encoded and can be offered, in the order of commands."""

    session: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Sum the inputs in this order with these weights, step, encode, journal; `draft` lacks digests."""

    draft: WindowCommitted
    codec_down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Append to the journal."""

    record: JournalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Free a dropped delta's bytes."""

    blob: BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Every fragment is final: export the model."""


Command = (
    Accept
    | Refuse
    | CloseSession
    | Tell
    | Receive
    | ReceiveAnchor
    | Publish
    | SendSnapshot
    | OfferSnapshot
    | Commit
    | Record
    | Forget
    | Finish
)
