"""What the journal remembers: every input and every decision, as typed records and their bytes. No files.

A record's bytes are the msgpack map of its fields; its kind is the number below and stands in the journal's record
header. Bulk bytes (an encoded delta, an encoded update) are attached to a record, never inside it. A reader ignores
fields it does not know, so that a field with a default can be added; a record of an unknown kind is refused, because
a decision that was skipped is a decision that was lost.
"""

from dataclasses import dataclass, field
from typing import Any

from farloop.algo.spec import BlobId, Contribution, Lease, NodeId, Revision, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import LATER
from farloop.wire.messages import AnchorRef, Committed, Drop, Offer, Share, pack, unpack, validate
from farloop.wire.reasons import Reason, RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The run began: the commit of version 0 of every fragment, which opens window 1 (protocol, Window terms)."""

    spec: RunSpec
    epoch: int
    rounds: tuple[RoundPlan, ...] = ()
    """The first two: planned once, for another machine's cosine may differ in the last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochClaimed:
    """A later start of the coordinator took over; lower epochs are fenced (protocol, Fencing and old copies)."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeen:
    """A node has met this epoch, which this state knows nothing of: whoever winds the run back claims a higher one."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """A start of the coordinator took this state for the truth, whatever nodes had seen since (fencing and old copies).

    The epoch names the history that begins here. Stored deltas are dropped: their nodes begin again from snapshots, and
    could not tell the outcome of such a delta from that of the next one.
    """

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorFetched:
    """An anchor that this state does not have came from a node that holds it. It counts for nothing before an `Adopted`
    names it. Attached: its bytes, as a snapshot."""

    anchor: AnchorRef
    node: NodeId
    blob_digest: int  # xxh3-64 of the attached bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedAnchor:
    """A version that the run goes on from, and was not in this state."""

    fragment: int
    version: int
    digest: int
    node: NodeId  # who brought it
    before: int  # the version of this state, which may have been many


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A start of the coordinator over an old copy of its state took what nodes held for the truth.

    The epoch names the history that begins here, as that of `Rewound` does. Stored deltas are dropped; the targets of
    these fragments are their anchors, and their outer optimizers begin anew from nothing.
    """

    epoch: int
    anchors: tuple[AdoptedAnchor, ...]
    windows: tuple[WindowTerms, ...]  # that follow these versions; a fragment without one is final
    rounds: tuple[RoundPlan, ...]
    revisions: tuple[Revision, ...]  # of the terms, those that this state did not have
    frontier: int  # first sample that was never granted, as far as is known
    returned: tuple[Lease, ...]  # samples that are free now, by position
    uncertain: int  # those of them that may have been trained on since the copy
    lost: tuple[AnchorRef, ...] = ()  # newer versions that nodes were told of, or held, and that nobody could bring
    missing: tuple[NodeId, ...] = ()  # nodes of this state that nothing was heard of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStarted:
    """A node takes part from this round on."""

    node: NodeId
    incarnation: int
    round: int
    holds: tuple[int, ...] | None = field(default=None, metadata=LATER)  # stages of the model; None for all of it
    slot: int = field(default=0, metadata=LATER)  # first slot of that round in which it takes part


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node is no longer expected."""

    node: NodeId
    reason: Reason
    consumed: int = 0  # samples of its leases that it had used, as far as was known
    stored: int | None = None
    """Those of them that are in one of its stored deltas: the rest are free again. None where it was not told: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted:
    """Samples went to one start of a node: never to another, unless they come back."""

    node: NodeId
    incarnation: int
    lease: Lease
    consumed: int = 0
    """Samples of its earlier leases that it had used by then: what a crash of both sides leaves uncertain is little."""
    stored: int = 0
    """Those of them that are in one of its stored deltas: leases that are used up by then are of no more interest."""
    since: int | None = None
    """Where it had given back all that it held, and lives on: the samples that it had used by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFixed:
    """A round's place in the schedule and its steps per node, decided once (protocol, Window terms)."""

    round: RoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStored:
    """A delta was verified and accepted. Attached: its bytes, so that a restart can re-open the window."""

    blob: BlobId
    window: int
    contributors: tuple[Contribution, ...]
    digest: int  # xxh3-64 of the attached bytes
    consumed: int | None = None  # samples that its node had used of its leases when it took the delta, where it said so
    payload: int = 0  # xxh3-64 of the encoded numbers in them alone, by which a copy is known; 0 where nobody took it

    @classmethod
    def of(cls, offer: Offer, payload: int = 0) -> "InputStored":
        """All that an offer says but the size, which nobody asks for again."""
        return cls(
            blob=offer.blob,
            window=offer.window,
            contributors=offer.contributors,
            digest=offer.digest,
            consumed=offer.consumed,
            payload=payload,
        )

    def offer(self) -> Offer:
        """As the node announced it, but for the size."""
        return Offer(
            blob=self.blob,
            size=0,
            digest=self.digest,
            window=self.window,
            contributors=self.contributors,
            consumed=self.consumed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDropped:
    """A stored delta's outcome, decided before its window closed (protocol, Delta outcomes)."""

    blob: BlobId
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Addend:
    """One term of a window's weighted sum."""

    blob: BlobId
    weight: float
    consumed: int | None = None  # as of `InputStored`, which is not there where inputs are not spooled
    cosine: float | None = None  # to the mean of the others, where that is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A stored delta that its window did not merge."""

    blob: BlobId
    reason: Reason
    detail: str
    strikes: bool = True  # whether it counts against its node
    cosine: float | None = None  # as that of an addend


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCommitted:
    """A window's decision, and all that its arithmetic needs. Attached: the encoded update (journal and recovery)."""

    fragment: int
    version: int
    round: int
    merged: tuple[Share, ...]
    drops: tuple[Drop, ...]
    blobs: tuple[Addend, ...]  # in the order of the sum: by the smallest node name in each contributor set
    anchor_digest: int  # digests (protocol, Tiles, padding and digest) of the buffers after the commit
    target_digest: int
    momentum_digest: int | None  # over the whole outer-optimizer state; None without one
    next_window: WindowTerms | None  # None once the fragment is final
    update_size: int  # bytes attached
    update_digest: int  # xxh3-64 of the attached bytes
    outer_lr: float
    outer_momentum: float
    why: str  # why the window closed, as one sentence
    delta_scale: float = 1.0  # by which the merged delta was multiplied before the outer step
    flush: bool = False  # the fragment's last window: a plain step, whatever optimizer the method has
    reach: float = 0.0  # of the deltas, where the optimizer asks for it (`weights.reach`)
    refused: tuple[Refusal, ...] = ()
    """Stored deltas that are not merged, by this window or another. Without an addend the version holds nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """The fragment's full state at this version is durable outside the journal."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTaken:
    """The loss of the anchors of these versions on the evaluation set (protocol, Evaluation)."""

    loss: float
    versions: tuple[int, ...]
    position: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsChanged:
    """The run has other terms, from these windows and this round on (protocol, Versions and compatibility)."""

    revision: Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """Every fragment is final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesHeld:
    """What one start of a node was granted, in order, and how many of these samples it had used."""

    node: NodeId
    incarnation: int
    leases: tuple[Lease, ...]
    consumed: int
    stored: int = 0  # samples that are in one of its stored deltas
    retired: int = 0  # samples of earlier leases, all of which are


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A delta that had its outcome, as later ones are held against it: by its numbers, and if merged by its length."""

    fragment: int
    version: int
    node: NodeId
    norm: float
    steps: int  # 0, with a norm of 0, where it was not merged
    rate: float  # learning rate of its round
    payload: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a node's deltas of late say of it."""

    node: NodeId
    strikes: int = 0
    against: int = 0  # deltas in a row that point against those of all others
    good: int = 0  # deltas in a row that were good
    why: str = ""  # why it is in quarantine; empty while it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSaved:
    """All that the records before this one say. A segment begins with it, so that those before can be deleted."""

    spec: RunSpec
    epoch: int
    versions: tuple[int, ...]
    windows: tuple[WindowTerms, ...]
    rounds: tuple[RoundPlan, ...]
    commits: tuple[Committed, ...]
    started: tuple[NodeStarted, ...]
    inputs: tuple[InputStored, ...]  # without an outcome, in the order they came
    frontier: int  # first sample that was never granted
    returned: tuple[Lease, ...]
    held: tuple[LeasesHeld, ...]
    evaluations: tuple[EvaluationTaken, ...]
    finished: bool
    ended: tuple[LeasesHeld, ...] = ()
    """The last starts that gave back what they had not used; they hold nothing. `retired` is all that they had been
    granted; 0 where that is not known."""
    returned_total: int = 0  # samples that ever came back
    uncertain_total: int = 0  # those of them that had been trained on
    seen: tuple[Seen, ...] = ()
    standings: tuple[Standing, ...] = ()
    history: int = field(default=0, metadata=LATER)  # epoch of the last `Rewound` or `Adopted`; 0 for none
    epoch_seen: int = field(default=0, metadata=LATER)  # highest of all `EpochSeen`
    revisions: tuple[Revision, ...] = field(default=(), metadata=LATER)
    """Those of the terms that are still needed, the last that of `spec`; none where they never changed."""


Record = (
    RunStarted
    | EpochClaimed
    | NodeStarted
    | NodeLeft
    | LeaseGranted
    | RoundFixed
    | InputStored
    | InputDropped
    | WindowCommitted
    | SnapshotTaken
    | EvaluationTaken
    | RunFinished
    | LedgerSaved
    | EpochSeen
    | Rewound
    | TermsChanged
    | AnchorFetched
    | Adopted
)

KINDS: dict[type[Record], int] = {
    RunStarted: 1,
    EpochClaimed: 2,
    NodeStarted: 3,
    NodeLeft: 4,
    LeaseGranted: 5,
    RoundFixed: 6,
    InputStored: 7,
    InputDropped: 8,
    WindowCommitted: 9,
    SnapshotTaken: 10,
    EvaluationTaken: 11,
    RunFinished: 12,
    LedgerSaved: 13,
    EpochSeen: 14,
    Rewound: 15,
    TermsChanged: 20,
    AnchorFetched: 21,
    Adopted: 22,
}
"""Numbers on disk: never reused, never 0."""

_CLASSES: dict[int, type[Record]] = {kind: cls for cls, kind in KINDS.items()}


def encode(record: Record) -> tuple[int, bytes]:
    """A record's kind and bytes."""
    return KINDS[type(record)], pack(record)


def decode(kind: int, data: bytes | memoryview) -> Record:
    """The record of these bytes.
    Raises ValueError: the kind is unknown, or the bytes are not a record of it; one sentence."""
    cls: type[Any] | None = _CLASSES.get(kind)
    if cls is None:
        raise ValueError(f"a record of kind {kind} is unknown here; a newer farloop may have written it")
    try:
        record: Record = validate(cls, unpack(data))
    except (RemoteProtocolError, TypeError) as error:  # TypeError: a map in it has a list for a key
        raise ValueError(str(error)) from error
    return record
