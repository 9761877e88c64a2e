"""Events that a node's machine takes, and commands that it gives to the executor.

Commands run in the order they are given, in the training thread. `Encode` is answered by one `DeltaEncoded`, `Apply`
and `Install` by nothing or one `AnchorMismatch`; the rest is fire and forget.
"""

from dataclasses import dataclass

from farloop.algo.spec import BlobId, Lease, WindowTerms
from farloop.wire.messages import Message, Offer
from farloop.wire.reasons import Reason

# --- Events


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The optimizer has stepped (or, without an inner optimizer, the gradients stand)."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapChosen:
    """Another overlap, in inner steps, from the next send on."""

    tau: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A control message of the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobArrived:
    """An update or a snapshot arrived completely."""

    blob: BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The session ended; the link keeps dialling."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEncoded:
    """The answer to `Encode`: the blob is ready."""

    offer: Offer
    offered: bool = False  # the executor has offered it already, if the session was open


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorMismatch:
    """An applied update did not give the announced digest, or a snapshot was not what it said."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """Finish what is in progress, then leave."""


Event = (
    StepDone | OverlapChosen | Received | BlobArrived | Disconnected | DeltaEncoded | AnchorMismatch | DrainRequested
)

# --- Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """The run's spec is known: build or check the model against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Take the delta of a fragment now; encode it in the background. It may be offered as soon as it is encoded."""

    blob: BlobId
    window: int
    codec: str
    steps: int
    tokens: int
    consumed: int | None = None  # samples of its leases that the node has used by now; None for who brings its own
    history: int = 0  # the history that the anchor is of
    measure: bool = True  # whether its offer tells its norm; else the coordinator measures it


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBlob:
    """Offer an encoded delta."""

    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAnchor:
    """Offer the anchor of a fragment as a snapshot: the coordinator has lost it."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetBlob:
    """Drop these bytes: the delta's outcome is known, or a newer anchor came first."""

    blob: BlobId
    merged_in: int | None = None  # of a delta, the version that it became part of; None: it never will


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Decode the arrived update onto the anchor, and compare the digest."""

    fragment: int
    version: int
    anchor_digest: int
    codec: str  # of the version's window


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """Replace the anchor by the arrived snapshot."""

    fragment: int
    version: int
    codec: str  # of the deltas that will be measured from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """local ← mix·local + (1 − mix)·start; the start is the anchor, or, for an eager node, anchor − factor · Σ own."""

    fragment: int
    mix: float
    own: tuple[tuple[BlobId, WindowTerms], ...] = ()
    """Its own deltas that are not in the anchor yet. The next delta is measured from the start."""
    factor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Score the anchors on the fixed evaluation set and tell the coordinator."""

    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSamples:
    """Keep only these of the samples granted before."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UseSamples:
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a control message."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """Another history of the run has begun: drop anchors, residuals and samples. Snapshots follow."""

    history: int  # the one that is followed from now on


@dataclass(frozen=True, slots=True, kw_only=True)
class Renumber:
    """Count the starts on from this one: the coordinator knows of more than the node's folder does."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The node cannot continue; an operator must act."""

    reason: Reason
    detail: str


Command = (
    Adopt
    | Encode
    | SendBlob
    | SendAnchor
    | ForgetBlob
    | Apply
    | Install
    | Merge
    | Evaluate
    | KeepSamples
    | UseSamples
    | Tell
    | Resync
    | Renumber
    | Stop
)
