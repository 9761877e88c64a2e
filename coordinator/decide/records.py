"""The records of the journal: every input and every decision, and their bytes. No files.

A record is the msgpack map of its fields; its kind, the number of its class, is in the journal's record header. Bulk
bytes (an encoded delta or update) are attached to a record. A record of an unknown kind is refused: a skipped decision
is a lost decision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from farloop.algo.spec import BlobId, Contribution, Lease, NodeId, Revision, RoundPlan, RunSpec, WindowTerms
from farloop.wire.messages import AnchorRef, Committed, Drop, Offer, Share, pack, unpack, validate
from farloop.wire.reasons import Reason, RemoteProtocolError

_T = TypeVar("_T")
KINDS: dict[type[Any], int] = {}
"""Numbers of record classes on disk: never reused, never 0."""
_CLASSES: dict[int, type[Any]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _record(kind: int) -> Callable[[type[_T]], type[_T]]:
    def declare(cls: type[_T]) -> type[_T]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        KINDS[made], _CLASSES[kind] = kind, made
        return made

    return declare


@_record(1)
class RunStarted:
    """The run began: version 0 of every fragment, with window 1 open."""

    spec: RunSpec
    epoch: int
    rounds: tuple[RoundPlan, ...]
    """The first two: planned once, for another machine's cosine may differ in the last bit."""


@_record(2)
class EpochClaimed:
    """A later start of the coordinator took over; lower epochs are fenced."""

    epoch: int


@_record(14)
class EpochSeen:
    """A node has met this epoch, which this state does not know: a rewind claims a higher one."""

    epoch: int


@_record(15)
class Rewound:
    """A start of the coordinator accepted this state, whatever nodes had seen since.

    The epoch names the history that begins here. Stored deltas are dropped: their nodes begin again from snapshots.
    """

    epoch: int


@_record(21)
class AnchorFetched:
    """A node sent an anchor that this state lacks; it counts once an `Adopted` names it. Attached: a snapshot of it."""

    anchor: AnchorRef
    node: NodeId
    blob_digest: int  # xxh3-64 of the attached bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedAnchor:
    """A version that the run continues from and that this state lacked."""

    fragment: int
    version: int
    digest: int
    node: NodeId  # the node that sent it
    before: int  # version of this state, which may be much older


@_record(22)
class Adopted:
    """A start over an old copy of the state accepted what nodes held.

    The epoch names the history that begins here. Stored deltas are dropped; these fragments' targets are their anchors,
    and their outer optimizers start anew.
    """

    epoch: int
    anchors: tuple[AdoptedAnchor, ...]
    windows: tuple[WindowTerms, ...]  # windows that follow these versions; a fragment without one is final
    rounds: tuple[RoundPlan, ...]
    revisions: tuple[Revision, ...]  # revisions that this state lacked
    frontier: int  # first sample that was never granted, as far as is known
    returned: tuple[Lease, ...]  # samples that are free now, by position
    uncertain: int  # free samples that may have been trained on since the copy
    lost: tuple[AnchorRef, ...] = ()  # newer versions that nodes knew and none could send
    missing: tuple[NodeId, ...] = ()  # nodes of this state that did not come


@_record(3)
class NodeStarted:
    """A node takes part from this round on."""

    node: NodeId
    incarnation: int
    round: int
    holds: tuple[int, ...] | None = None  # stages of the model; None for all of it
    slot: int = 0  # first slot of that round in which it takes part
    frozen: int = 0  # digest of its weights that are not exchanged; 0: there are none
    process: int = 0  # see `Hello`


@_record(4)
class NodeLeft:
    node: NodeId
    reason: Reason
    consumed: int = 0  # samples of its leases that it had used, as far as known
    stored: int = 0  # those in its stored deltas; the rest is free again


@_record(5)
class LeaseGranted:
    """Samples were granted to one start of a node."""

    node: NodeId
    incarnation: int
    lease: Lease
    consumed: int = 0
    """Samples of earlier leases that it had used by then: little is uncertain after a crash of both sides."""
    stored: int = 0  # those in its stored deltas: leases that these use up are forgotten
    since: int | None = None  # samples that it had used when it came back after it had returned everything


@_record(6)
class RoundFixed:
    """A round's place in the schedule and its steps per node."""

    round: RoundPlan


@_record(7)
class InputStored:
    """A delta was verified and accepted. Attached: its bytes, so that a restart can re-open the window."""

    blob: BlobId
    window: int
    contributors: tuple[Contribution, ...]
    digest: int  # xxh3-64 of the attached bytes
    consumed: int | None = None  # samples of its leases that its node had used by then; None where it takes none
    payload: int = 0  # xxh3-64 of the encoded numbers alone, to recognise a copy; 0 if not computed
    ahead: int = 0  # as of `Offer`

    @classmethod
    def of(cls, offer: Offer, payload: int = 0) -> "InputStored":
        """The offer without its size."""
        return cls(
            blob=offer.blob,
            window=offer.window,
            contributors=offer.contributors,
            digest=offer.digest,
            consumed=offer.consumed,
            payload=payload,
            ahead=offer.ahead,
        )

    def offer(self) -> Offer:
        """The offer as announced, with size 0."""
        return Offer(
            blob=self.blob,
            size=0,
            digest=self.digest,
            window=self.window,
            contributors=self.contributors,
            consumed=self.consumed,
            ahead=self.ahead,
        )


@_record(8)
class InputDropped:
    """A stored delta's outcome, decided before its window closed."""

    blob: BlobId
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Addend:
    """One term of a window's weighted sum."""

    blob: BlobId
    weight: float
    consumed: int | None = None  # as of `InputStored`, which is not there where inputs are not spooled
    cosine: float | None = None  # cosine to the mean of the others, if measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A stored delta that its window did not merge."""

    blob: BlobId
    reason: Reason
    detail: str
    strikes: bool = True  # whether it counts against its node
    cosine: float | None = None  # as that of an addend


@_record(9)
class WindowCommitted:
    """A window's decision, and all that its arithmetic needs. Attached: the encoded update."""

    fragment: int
    version: int
    round: int
    merged: tuple[Share, ...]
    drops: tuple[Drop, ...]
    blobs: tuple[Addend, ...]  # in the order of the sum: by the smallest node name in each contributor set
    anchor_digest: int  # digests of the buffers after the commit
    target_digest: int
    momentum_digest: int | None  # over the whole outer-optimizer state; None without one
    next_window: WindowTerms | None  # None once the fragment is final
    update_size: int  # bytes attached
    update_digest: int  # xxh3-64 of the attached bytes
    outer_lr: float
    outer_momentum: float
    why: str  # why the window closed, as one sentence
    delta_scale: float = 1.0  # factor of the merged delta before the outer step
    flush: bool = False  # the fragment's last window: a plain step, whatever optimizer the method has
    reach: float = 0.0  # of the deltas, where the optimizer asks for it (`weights.reach`)
    refused: tuple[Refusal, ...] = ()
    """Stored deltas that no window merges. Without an addend the version holds nothing new."""


def object_key(record: InputStored | WindowCommitted) -> str:
    """Name of the bytes in an object store, below that of the run: written once, and read by the digest in the record.
    They are attached to the record, or there."""
    if isinstance(record, WindowCommitted):
        return f"f{record.fragment}/v{record.version}/update-{record.update_digest:016x}"
    blob = record.blob
    name = f"f{blob.fragment}/v{record.window}/{blob.node}-{blob.incarnation}"
    if record.ahead:  # the node has one such URL for a window, and whoever reads the bytes compares their digest
        return f"{name}-epoch-{record.ahead}"
    return f"{name}-{blob.seq}-{record.digest:016x}"


@_record(10)
class SnapshotTaken:
    """The fragment's full state at this version is durable outside the journal."""

    fragment: int
    version: int


@_record(11)
class EvaluationTaken:
    """The loss of the anchors of these versions on the evaluation set; infinite where it was NaN."""

    loss: float
    versions: tuple[int, ...]
    position: float

    def __post_init__(self) -> None:
        # NaN is not equal to itself: a journal that holds one would differ from what was read of it before.
        if math.isnan(self.loss):
            object.__setattr__(self, "loss", math.inf)


@_record(20)
class TermsChanged:
    """The terms change from these windows and this round on."""

    revision: Revision


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AllowedKey:
    """A public key that may come in as a node, by its fingerprint."""

    node: NodeId
    fingerprint: str


@_record(23)
class KeysChanged:
    """The keys that may come in are others than this state knew: since the last start, or while it ran."""

    time_s: float  # on the coordinator's wall clock, in seconds since 1970
    added: tuple[AllowedKey, ...]
    removed: tuple[AllowedKey, ...]


@_record(12)
class RunFinished:
    """Every fragment is final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesHeld:
    """The grants of one start of a node, in order, and how many of these samples it had used."""

    node: NodeId
    incarnation: int
    leases: tuple[Lease, ...]
    consumed: int
    stored: int = 0  # samples that are in one of its stored deltas
    retired: int = 0  # samples of earlier leases, all of which are


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A delta with an outcome, to compare later ones with: by its numbers, and if merged by its norm."""

    fragment: int
    version: int
    node: NodeId
    norm: float
    steps: int  # 0, with a norm of 0, if it was not merged
    rate: float  # learning rate of its round
    payload: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A node's standing by its recent deltas."""

    node: NodeId
    strikes: int = 0
    against: int = 0  # deltas in a row that point against those of all others
    good: int = 0  # deltas in a row that were good
    why: str = ""  # why it is in quarantine; empty while it is not


@_record(13)
class LedgerSaved:
    """All that the records before this one say. A segment begins with it, so earlier ones can be deleted."""

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
    """Past starts that returned their unused samples. `retired` counts all that they were granted."""
    returned_total: int = 0  # samples that ever came back
    uncertain_total: int = 0  # returned samples that had been trained on
    seen: tuple[Seen, ...] = ()
    standings: tuple[Standing, ...] = ()
    history: int = 0  # epoch of the last `Rewound` or `Adopted`; 0 for none
    epoch_seen: int = 0  # highest of all `EpochSeen`
    revisions: tuple[Revision, ...] = ()
    """Revisions that are still needed, the last that of `spec`; none if the terms never changed."""
    frozen: tuple[NodeStarted, ...] = ()
    """For each part of the model: the start of the first node that had frozen weights."""
    keys: tuple[KeysChanged, ...] = ()
    """Changes of the keys that may come in, of which the journal may have lost the older."""


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
    | KeysChanged
)


def encode(record: Record) -> tuple[int, bytes]:
    return KINDS[type(record)], pack(record)


def decode(kind: int, data: bytes | memoryview) -> Record:
    """The record of these bytes.
    Raises ValueError: the kind is unknown, or the bytes are not a record of it; one sentence."""
    cls = _CLASSES.get(kind)
    if cls is None:
        raise ValueError(f"a record of kind {kind} is unknown here")
    try:
        record: Record = validate(cls, unpack(data))
    except (RemoteProtocolError, TypeError) as error:  # TypeError: a map in it has a list for a key
        raise ValueError(str(error)) from error
    return record
