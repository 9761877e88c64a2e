"""What the coordinator's machine hears (events) and what it asks its shell to do (commands).

Commands run in order, on the loop. `Receive` is answered by `InputStored` or `InputFailed` (or by the session's end),
`Commit` by `CommitDone` or `CommitFailed`; `Record` must be in the journal before any later command is carried out.
"""

from dataclasses import dataclass

from farloop.algo.spec import BlobId, NodeId, Revision
from farloop.coordinator.decide.records import AnchorFetched, WindowCommitted
from farloop.coordinator.decide.records import Record as JournalRecord
from farloop.wire.messages import AnchorRef, Committed, Hello, Message, Offer, Refused, Welcome
from farloop.wire.reasons import Reason

SessionId = int

# --- Events


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHello:
    """A session's first message; `node` is who the key (or, in the clear, the name) says it is."""

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
    """A delta's bytes were not what they were announced to be."""

    offer: Offer
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDone:
    """The window's commit is durable."""

    record: WindowCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """Nothing was changed; the window stays closing, and is tried again."""

    fragment: int
    version: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOverflow:
    """Nothing was changed: these deltas, finite as they are, give more than fp32 holds, and always will."""

    fragment: int
    version: int
    longest: BlobId | None  # of the deltas; None where the window has none
    detail: str

    @classmethod
    def of(cls, draft: WindowCommitted, longest: BlobId | None, why: Exception) -> "SumOverflow":
        """The draft's arithmetic said why."""
        return cls(
            fragment=draft.fragment,
            version=draft.version,
            longest=longest,
            detail=f"{Reason.TOO_MUCH.sentence} (of the update, {why})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsGiven:
    """Who may has set other terms; the revision is that of `CoordinatorMachine.revision_for`, of this very moment."""

    revision: Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The windows that are open now are not to wait for this node (`straggler_detector.py`); the next ones do."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldReleased:
    """A person says that the nodes by which the run is held are wrong: it goes on without them (`rollback.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorStored:
    """An anchor that a node was asked for is here, is what it should be, and is durable."""

    record: AnchorFetched


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorFailed:
    """It is not, and is not asked for again of that node in this version; or it only stopped coming."""

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
    | LeftOut
    | HoldReleased
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
    """End a session that another took the place of."""

    session: SessionId
    reason: Reason


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
    """Let the anchor come that its sender was asked for: this very one. Answered by `AnchorStored`, `AnchorFailed`, or
    the session's end."""

    offer: Offer
    anchor: AnchorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Announce a commit, and send the bytes of its update from the journal under the node's credit (downlink)."""

    nodes: tuple[NodeId, ...]
    committed: Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSnapshot:
    """Send the anchor as it is now, or is when its turn comes."""

    node: NodeId
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferSnapshot:
    """The shell's own: what `SendSnapshot` asked for is made, and is offered in the order of commands."""

    session: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Sum the inputs in this order with these weights, step, encode, journal (commit order); `draft` lacks digests."""

    draft: WindowCommitted
    codec_down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Append to the journal."""

    record: JournalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """A dropped delta's bytes may go."""

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
