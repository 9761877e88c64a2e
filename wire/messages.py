"""All control messages, and their bytes (msgpack maps with numbers for kinds)."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from enum import Enum
from typing import Any, Final, Literal, TypeVar, dataclass_transform

import msgpack
from pydantic import TypeAdapter, ValidationError

from farloop.algo.spec import (
    BlobId,
    BlobKind,
    Contribution,
    Lease,
    NodeId,
    Revision,
    RoundPlan,
    RunSpec,
    WindowTerms,
    to_plain,
)
from farloop.algo.terms import flat_path
from farloop.wire.bounds import bounded
from farloop.wire.limits import EARLY_BYTES
from farloop.wire.machine_info import NOTHING, Inventory
from farloop.wire.meter import Burst
from farloop.wire.reasons import Reason, RemoteProtocolError

# --- Declarations: a message states its number and its senders beside its class
#
# To add a message, write its class below with a number above all others and its senders, then its golden bytes
# (`tests/unit/wire/test_golden_frames.py` and `tests/unit/golden/test_full_forms.py` say how). Numbers are never
# reused. Its receiver handles it: `_received` in `node/machine.py`, `_on_message` in `coordinator/decide/machine.py`. A
# node's message also has a rate in `coordinator/net/sessions.py`.


class Role(Enum):
    NODE = "node"
    COORDINATOR = "coordinator"


class Message:
    """A control message; its class is declared by `message`."""

    __slots__ = ()


_M = TypeVar("_M", bound=Message)

NUMBERS: Final[dict[type[Message], int]] = {}

SENT_BY: Final[dict[Role, set[type[Message]]]] = {Role.NODE: set(), Role.COORDINATOR: set()}
"""What each end may send on the control lane. A node's messages are bounded as they are decoded (`bounds.py`)."""

_OPTIONAL: Final[set[type[Message]]] = set()
_CLASSES: Final[dict[int, type[Message]]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(number: int, *senders: Role, optional: bool = False) -> Callable[[type[_M]], type[_M]]:
    """Declare a message class, and make it a frozen dataclass. `number`: on the wire. `senders`: who may send it on the
    control lane. `optional`: whether a peer that does not know it may ignore it."""

    def declare(cls: type[_M]) -> type[_M]:
        assert number not in _CLASSES, f"{cls.__name__} has the number of {_CLASSES[number].__name__}"
        cls = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        NUMBERS[cls], _CLASSES[number] = number, cls
        for sender in senders:
            SENT_BY[sender].add(cls)
        if optional:
            _OPTIONAL.add(cls)
        return cls

    return declare


# --- Progress reports of a node


NodeState = Literal["joining", "ready", "training", "waiting", "draining", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesByKind:
    """Bytes that crossed a link one way, by what they were for (protocol, Figures)."""

    delta: int = 0
    update: int = 0
    snapshot: int = 0
    probe: int = 0
    control: int = 0  # control messages, greetings of connections, and bulk frames that belong to no blob

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @property
    def state(self) -> int:
        """Snapshots and probes."""
        return self.snapshot + self.probe

    def __add__(self, other: "BytesByKind") -> "BytesByKind":
        pairs = zip(fields(self), astuple(self), astuple(other), strict=True)
        return BytesByKind(**{field.name: mine + theirs for field, mine, theirs in pairs})


@message(14, Role.NODE, optional=True)
class Progress(Message):
    """Node → coordinator, every second: the three facts of liveness, and what a person wants to see."""

    state: NodeState
    position: float
    round: int
    inner_steps: int
    tokens: int
    loss: float | None
    tokens_per_s: float
    compute_share: float
    blocked_s: float
    lost_steps: int
    sample_watermark: int
    """Samples consumed of its leases, counted since its start."""
    sent: BytesByKind  # all bytes that it sent since its start
    received: BytesByKind  # ... and received
    detail: str = ""
    """What it waits for, in words."""
    skipped_turns: int = 0
    """Due sends that did not take place, for too many deltas of the fragment were undecided (protocol, Windows)."""
    samples_left: int | None = None
    """Samples of its leases that it can still use. None where it takes none."""
    skipped_steps: int = 0
    """Inner steps that stepped nothing, for the gradient held NaN or Inf."""
    tau: int = 0
    """Its overlap in inner steps, where it chooses that by its link."""


@message(15, Role.NODE, optional=True)
class Evaluation(Message):
    """Node → coordinator: the loss of the anchors on the fixed evaluation set (protocol, Evaluation)."""

    loss: float
    versions: tuple[int, ...]
    position: float
    seconds: float


# --- Adoption (protocol, Adoption)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorRef:
    fragment: int
    version: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAnchors:
    """Anchors on a node's disk, and the run and history that they are of, which need not be the coordinator's."""

    run: str  # fingerprint of its identity
    history: int
    anchors: tuple[AnchorRef, ...]


@message(20, Role.NODE)
class Held(Message):
    """Node → coordinator, in answer to a Welcome that recalls: all that the coordinator's old copy may not know."""

    anchors: tuple[AnchorRef, ...]  # what it holds now; no more changes of it come before the session's end
    windows: tuple[WindowTerms, ...]  # terms of the window after each of these versions, as far as they were told
    final: tuple[int, ...]  # fragments of which no window follows
    rounds: tuple[RoundPlan, ...]
    revisions: tuple[Revision, ...]  # of the run's terms, as of `Welcome`; the last is what it goes by
    unused: tuple[Lease, ...] = ()  # what is left of its samples
    granted_to: int = 0  # one past the last sample that it was ever granted


@message(21, Role.COORDINATOR)
class Recall(Message):
    """Coordinator → node, in such a session: send your anchor of this fragment, as a snapshot."""

    fragment: int


# --- Link measurements
#
# None of it decides anything in a run. A probe's bytes travel as a blob of a kind of its own, in the background:
# whatever is waited for goes first (`link_measurement.py`).


MOST_SEEN = 16  # bursts, and links, of one report


@message(30, Role.COORDINATOR, optional=True)
class Echo(Message):
    """Coordinator → node: say this number back at once. The node's session does, before its handler runs."""

    number: int


@message(31, Role.NODE, optional=True)
class Echoed(Message):
    """Node → coordinator: here it is."""

    number: int


@message(32, Role.COORDINATOR, optional=True)
class Probe(Message):
    """Coordinator → node: the link is to be measured, one way."""

    number: int
    upward: bool
    """Whether the node is to send the bytes; else they come, and the node ends them when it has seen enough."""
    num_bytes: int  # at most; 0: the probe of this number is called off
    rtt_s: float  # round trip of the link, as the coordinator knows it: what "enough" depends on


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What the kernel of one end knows of a TCP connection (TCP_INFO). Of the first hop alone, where something
    in between ends connections: a relay, a mesh, a load balancer."""

    rtt_s: float  # smoothed
    least_rtt_s: float
    retransmits: int  # segments sent again since it was opened ...
    segments: int  # ... of so many.
    delivered_bytes_per_s: float = 0.0
    """Its own estimate of what arrives; 0 where it has none, or was not limited by the link."""
    congestion: str = ""
    large_lost: bool = False  # whether only small packets reach the other end


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A message that came whole, from another node."""

    num_bytes: int
    seconds: float  # that its bytes took: beyond what a message of next to no bytes takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a node saw of one link that ends at it."""

    peer: str = ""  # the other end; empty: the coordinator
    bursts: tuple[Burst, ...] = ()  # what came from there lately, in busy times long enough to tell something
    probe: int = 0  # the probe that they were; 0: whatever had to be sent
    rtt_s: float | None = None  # round trip as the node measured it, where the coordinator cannot
    bulk: Connection | None = None  # the connection that carries blobs, as this node's kernel sees it
    transfer: Transfer | None = None  # the quickest that came from another node lately


@message(33, Role.NODE, optional=True)
class Observed(Message):
    """Node → coordinator, now and then: its links, and of its machine what changes."""

    links: tuple[Seen, ...]
    clock_s: float | None = None  # its wall clock as it sends this, in seconds since 1970
    disk_free: int | None = None  # bytes free where its state folder is
    disk_used: int | None = None  # bytes of the files in that folder


# --- All control messages and their bytes: the only place where msgpack is used
#
# A message is a msgpack array [number, must_understand, fields]. Numbers are never reused. A receiver ignores unknown
# fields, and unknown messages unless `must_understand` is set. Byte-level rules: `wire/README.md`.


_T = TypeVar("_T")

PROTOCOL_VERSION: Final = 1  # the only one


@message(1, Role.NODE)
class Hello(Message):
    """Node → coordinator, first of a session."""

    protocol_min: int
    protocol_max: int
    node: NodeId
    incarnation: int  # grows with every start of the node
    fingerprint: str | None  # the run it was set up for; None takes whatever run the coordinator holds
    layout: str | None  # layout digest of its model, once it has one
    epoch_seen: int  # highest epoch it has met, in the run `epoch_run`; 0 for none
    anchors: tuple[AnchorRef, ...]  # what it holds; empty for a node that must be given everything
    round: int | None  # the round it is training in, or None before it was started
    device: str = ""
    history: int = 0  # the history that its anchors are of (see `Welcome`)
    announced: tuple[AnchorRef, ...] = ()
    """The newest commit of each fragment that it was told of, in this life of it."""
    holds: tuple[int, ...] | None = None
    """The stages of the model that it holds, for as long as it lives; None for all of it."""
    inventory: Inventory = NOTHING  # its machine and network cards
    saved: SavedAnchors | None = None
    """What lies on its disk, until it has started. It holds none of it: see `Welcome.restores`."""
    can_evaluate: bool = True  # whether its loop can measure the loss on the fixed set
    early: int = EARLY_BYTES  # see `Credit`
    process: int = 0
    """Random, of the process: two machines with one name may have the same incarnation."""
    epoch_run: str = ""
    """Fingerprint of the run that `epoch_seen` is of: in another run it means nothing."""


@message(2, Role.COORDINATOR)
class Welcome(Message):
    """Coordinator → node: the session is open."""

    protocol: int
    epoch: int
    spec: RunSpec
    lane_token: bytes
    """Binds bulk lanes to this session."""
    versions: tuple[int, ...]
    """Current version of every fragment."""
    windows: tuple[WindowTerms, ...]
    """Terms of the open windows; a fragment without one is final."""
    rounds: tuple[RoundPlan, ...]
    """The rounds that are fixed so far and may still be needed."""
    leases: tuple[Lease, ...] | None = None
    """The samples that this start of the node still holds; it uses no others that it was granted before. None where it
    takes none."""
    history: int = 0
    """Epoch in which the run was last wound back, or adopted; 0: never. What a node holds of another history it gives
    up."""
    revisions: tuple[Revision, ...] = ()
    """Of the terms, those that may still be needed; the last is that of `spec`. None where they never changed."""
    recalls: bool = False
    """The coordinator's state is an old copy, and it takes from nodes what they hold: the node answers `Held`, stands
    by its anchors for as long as the session lasts, and takes nothing else of what this message says to heart."""
    restores: tuple[int, ...] = ()
    """Fragments of which the node reads the anchor that `Hello.saved` names: the updates after that follow, and no
    snapshot comes unless it asks for one (`Fetch`)."""
    early: int = EARLY_BYTES  # see `Credit`
    lanes: int = 1  # the most bulk lanes of this session


@message(3, Role.COORDINATOR)
class Refused(Message):
    """Coordinator → node: the session ends here."""

    reason: Reason
    detail: str  # one line with the two values that disagree
    retriable: bool
    newest: int = 0
    """The number that another start of the node has: one that has not joined yet goes on behind it."""


@message(4)  # opens a bulk lane; not sent on the control lane
class LaneHello(Message):
    """Node → coordinator, first on a bulk lane."""

    lane_token: bytes
    number: int = 1
    """Which bulk lane of the session it is, from 1; it replaces the one of this number, if there is one."""


@message(34)  # opens a connection that begins no session; not sent in one
class Trial(Message):
    """Either way: the coordinator sends it back. `farloop doctor` asks by it whether packets of every size pass."""

    padding: bytes


@message(5, Role.NODE)
class Ready(Message):
    """Node → coordinator: all anchors are held; start me at the next round boundary."""

    history: int = 0  # the history that they are of
    frozen: int = 0
    """Digest of the weights that are not exchanged: frozen parameters and saved floating-point buffers; 0: none."""
    unsaved: int = 0
    """Digest of the rough mean squares of floating-point buffers that no state dict has; 0: none."""


@message(6, Role.COORDINATOR)
class Start(Message):
    """Coordinator → node: begin training with this round."""

    round: RoundPlan
    lease: Lease | None
    slot: int = 0  # of the round, that the first inner step belongs to


@message(7, Role.NODE, Role.COORDINATOR)
class Offer(Message):
    """Either way: a blob that the sender wants to send. Answered by `Credit`, `Stored` or `Outcome`."""

    blob: BlobId
    size: int  # bytes, header included
    digest: int  # xxh3-64 of all of its bytes
    window: int = 0  # the window a delta is for
    contributors: tuple[Contribution, ...] = ()
    consumed: int | None = None
    """Samples that its node had used of its leases when it took the delta, counted since its start. None where it
    takes none."""
    history: int = 0  # the history that the base of a delta is of
    ahead: int = 0  # that of the `Place` by which a delta is being written already


@message(8, Role.NODE, Role.COORDINATOR)
class Credit(Message):
    """Either way: the blob has arrived without a gap up to `received`; bytes up to `limit` may be sent."""

    blob: BlobId
    received: int
    limit: int
    arrived: int = 0
    """Bytes that have arrived, those beyond a gap included. 0 where there is no gap."""
    early: int = EARLY_BYTES
    """Bytes of all blobs without a Credit that its sender keeps."""
    islands: tuple[int, ...] = ()
    """Start and end of the first ranges beyond a gap, one after the other: they need not be sent again."""


@message(35, Role.COORDINATOR)
class Place(Message):
    """Coordinator → node: the bytes of this blob go by an object store (protocol, Object store). Of an offered delta,
    in place of Credit: write them there. Of an update or snapshot, before its announcement: read them there."""

    blob: BlobId
    url: str  # signed for this one request
    ahead: int = 0
    """Not 0: an epoch. The blob is yet to be taken, and `version` is its window: write it there as it is offered."""


@message(36, Role.NODE)
class Placed(Message):
    """Node → coordinator: the delta is written, or the update or snapshot is read; or the store failed, and the blob
    is to go by the session."""

    blob: BlobId
    detail: str = ""
    """Why the store failed; empty: it did not."""


@message(9, Role.COORDINATOR)
class Stored(Message):
    """Coordinator → node: the whole delta is verified and durable."""

    blob: BlobId


@message(10, Role.COORDINATOR)
class Outcome(Message):
    """Coordinator → node: a delta was dropped before its window closed."""

    blob: BlobId
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One merged contributor and its weight."""

    node: NodeId
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One node that was expected, or came, and was not merged."""

    node: NodeId
    reason: Reason


@message(11, Role.COORDINATOR)
class Committed(Message):
    """Coordinator → node: a durable decision, and the announcement of its update's bytes (protocol, Downlink)."""

    fragment: int
    version: int
    size: int  # bytes of the update's blob
    digest: int  # xxh3-64 of the update's blob
    anchor_digest: int  # digest of the anchor once the update is applied
    merged: tuple[Share, ...]
    drops: tuple[Drop, ...]
    next_window: WindowTerms | None  # terms of the window that opens now; None when the fragment is final
    rounds: tuple[RoundPlan, ...]
    evaluator: NodeId | None = None  # the node that scores its anchors once it holds this version


def update_id(committed: Committed) -> BlobId:
    """The blob whose bytes a commit announces."""
    return BlobId(kind=BlobKind.UPDATE, fragment=committed.fragment, version=committed.version)


@message(12, Role.COORDINATOR)
class Grant(Message):
    """Coordinator → node: more samples."""

    lease: Lease


@message(13, Role.NODE)
class Fetch(Message):
    """Node → coordinator: my anchor of this fragment is lost or wrong, send a snapshot."""

    fragment: int
    first: bool = False
    """It never had one: its own first weights are others than the run's."""


@message(16, Role.NODE, Role.COORDINATOR)
class Leave(Message):
    """Either way: I end this session on purpose."""

    reason: Reason
    detail: str = ""
    anchors: tuple[AnchorRef, ...] = ()
    """What a node holds as it leaves: at the run's end, the proof that all have the same model."""


@message(17, Role.COORDINATOR)
class Finished(Message):
    """Coordinator → node: every fragment is final."""


@message(19, Role.COORDINATOR)
class Revised(Message):
    """Coordinator → node: the run has other terms, from windows and a round that lie ahead of all that was told
    (protocol, Revisions)."""

    revision: Revision


@message(18, Role.NODE, Role.COORDINATOR, optional=True)
class Heartbeat(Message):
    """Either way: nothing to say; the frame around it acknowledges."""


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """The validator of a message or record class: strict but for lists, which msgpack gives where tuples are meant."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def pack(value: Any) -> bytes:
    """Plain values, or a frozen dataclass, as msgpack."""
    packed: bytes = msgpack.packb(to_plain(value), use_bin_type=True)
    return packed


def unpack(data: bytes | memoryview) -> Any:
    """Plain values from msgpack bytes of bounded size.
    Raises RemoteProtocolError: not msgpack, or longer than it says."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a list or map as a key
        raise RemoteProtocolError(f"not msgpack: {error}") from error


def encode(message: Message) -> bytes:
    cls, (last, data) = type(message), _last_commit[0]
    if last is not message:
        data = pack([NUMBERS[cls], cls not in _OPTIONAL, to_plain(message)])
        if cls is Committed:  # one goes to all nodes, and names all of them: it is encoded once
            _last_commit[0] = message, data
    return data


_last_commit: list[tuple[Message | None, bytes]] = [(None, b"")]


def decode(data: bytes | memoryview) -> Message | None:
    """A message from bytes; None for one that a peer may ignore.
    Raises RemoteProtocolError: malformed, of a wrong type, beyond the bounds of what a node may say, or unknown and
    marked as one that must be understood."""
    match unpack(data):
        case [int() as number, bool() as must_understand, dict() as fields]:
            pass
        case _:
            raise RemoteProtocolError("a message is [number, must_understand, fields]")
    cls = _CLASSES.get(number)
    if cls is None:
        if must_understand:
            raise RemoteProtocolError(f"message {number} is unknown here and must be understood")
        return None
    message = validate(cls, fields)
    if cls in SENT_BY[Role.NODE]:
        return bounded(message)
    try:
        encode(message)
    except OverflowError as error:  # a number written as a string of digits gets past validation
        raise RemoteProtocolError(f"{cls.__name__} holds a number beyond 64 bits") from error
    return message


def validate(cls: type[_T], fields: Any) -> _T:
    """`fields` as a checked `cls`."""
    try:
        message: _T = adapter(cls).validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in flat_path(first["loc"]))
        raise RemoteProtocolError(f"{cls.__name__}.{where}: {first['msg']}") from error
    return message
