"""Shapes of the status JSON, metrics.jsonl and decisions.jsonl."""

from typing import Literal, NotRequired, TypedDict

# --- The shapes of what a coordinator tells about its run: the JSON at `/status` and the lines of `metrics.jsonl`.
#
# Plain dictionaries on purpose: they are written and read as JSON by different processes. Standard library only.


RunState = Literal["waiting", "training", "held", "holding", "finished"]
"""Held: nothing is committed, for the disk takes nothing more or too few live nodes are merged. Holding: nor is
anything while the state looks like an old copy. An alarm says what to do about it."""
WindowState = Literal["open", "closing", "final"]


class RunStatus(TypedDict):
    """What the run is and how far its daemon has come."""

    name: str
    fingerprint: str
    method: str
    codec_up: str
    codec_down: str
    steps: int
    """Schedule positions of the whole run."""
    h: int
    tau: int
    mix: float
    fragments: int
    parameters: int
    state: RunState
    epoch: int
    revision: int
    """Of the terms: how often they changed while the run went on."""
    changed: list[str]
    """What the last change changes, and from where on."""
    started_s: float
    """Seconds since training began; 0 before."""
    uptime_s: float
    """Seconds since this coordinator process started."""
    nodes: NotRequired[int]
    """How many must be there for the run to begin."""
    stages: NotRequired[list[int]]
    """Of a model that is cut in stages: how many nodes are there for each."""
    codec_up_of: NotRequired[dict[str, str]]
    """Codecs of the nodes that have their own, by the newest terms, as `codec_up` is."""
    h_share_of: NotRequired[dict[str, float]]
    """Shares of a round's steps, of the nodes that do not do all."""


class PartStatus(TypedDict):
    """What a node holds of the model, where that is not all of it."""

    stages: list[int]
    fragments: list[int]
    parameters: int


class BytesStatus(TypedDict):
    """Bytes of both directions by what they were for; their sum is all bytes (protocol, Figures)."""

    delta: int
    update: int
    snapshot: int
    probe: int
    control: int


class NodeStatus(TypedDict):
    """One node, as the coordinator last heard of it; a node that left stays in the list."""

    name: str
    state: str
    connected: bool
    incarnation: int
    device: str
    position: float
    round: int
    inner_steps: int
    tokens: int
    loss: float | None
    """Training loss, or None before the first report, and where it is no finite number."""
    tokens_per_s: float
    compute_share: float
    blocked_s: float
    lost_steps: int
    bytes_up: int
    """All bytes that it sent since its start."""
    bytes_down: int
    """All bytes that it received since its start."""
    bytes_state: int
    """Of the two above: snapshots and probes."""
    bytes_by_kind: NotRequired[BytesStatus]
    detail: str
    """What it is doing, in words; may be empty."""
    reason: str
    """Why it left; empty while it is here."""
    last_heard_s: float
    """Seconds since its last message."""
    skipped_turns: NotRequired[int]
    """Due sends that it left out, for too many deltas of the fragment were undecided."""
    skipped_steps: NotRequired[int]
    """Inner steps that stepped nothing, for the gradient held NaN or Inf."""
    digests: NotRequired[list[str]]
    """Of its anchors, in the order of its fragments, as it left with them."""
    part: NotRequired[PartStatus]
    quarantine: NotRequired[str]
    """Why its deltas are measured and not merged; empty where they are."""
    h: NotRequired[int]
    """Its own H in the current round, where it differs from the run's."""
    codec_up: NotRequired[str]
    """Its own, where it differs from the run's."""
    loss_is: NotRequired[str]
    """`nan`, `inf` or `-inf`, where its newest loss is that: JSON has no such numbers."""


class WindowStatus(TypedDict):
    """The newest window of one fragment."""

    fragment: int
    window: int
    round: int
    state: WindowState
    expected: list[str]
    arrived: list[str]
    merged: list[str]
    """Whom the window before this one merged."""


class EvaluationStatus(TypedDict):
    """One score of the anchors on the fixed evaluation set."""

    loss: float | None
    """None where it is no finite number."""
    position: float
    outer_steps: int
    seconds: float
    """Seconds since the run's start."""


class HappeningStatus(TypedDict):
    """Something was refused, dropped, lost or left, or an alarm began or ended."""

    age_s: float
    """Seconds since it happened last."""
    kind: str
    node: str
    """Empty where no node is concerned, or none is known."""
    code: str
    """The reason, for programs."""
    sentence: str
    """The reason, for people."""
    detail: str
    """Where, or with what values; may be empty."""
    count: int
    """How often, of the same kind, node and reason."""


class SamplesStatus(TypedDict):
    """What became of the samples that the coordinator grants, in numbers that only grow."""

    granted: int
    """Again included."""
    trained: int
    """Used by a node that has stored a delta since: each sample once."""
    returned: int
    """Given back, to be granted again."""
    uncertain: int
    """Those of them that had been trained on, in no stored delta."""


class CopyStatus(TypedDict):
    """Copies of the state to an object store, by this start of the coordinator."""

    url: str
    lag_s: float
    """Age of the newest copy; how long there has been none, where there is none yet."""
    copies: int
    failures: int
    bytes: int
    """Of the newest."""
    versions: list[int]
    """Of the fragments in the newest."""


class NicStatus(TypedDict):
    """A network card of a node's machine, as it told in its greeting."""

    name: str
    kind: str
    """`infiniband`, `roce-v2`, `roce-v1`, `iwarp`, `ethernet` or `virtual`."""
    netdev: str
    bytes_per_s: float | None
    """None: nobody knows."""
    flow_bytes_per_s: float | None
    """The most that one connection gets; less than the above for a bond."""
    active: bool
    usable: bool
    """Active, and what its class promises may be used by the node's process."""
    why: str
    """What is in the way; empty where nothing is."""
    members: list[str]
    """Of a bond."""
    addresses: list[str]
    fabric: str
    provenance: str
    """Who is believed in the rate: `operator`, `sysfs` or `annotation`; empty where nobody knows it."""
    kind_from: str
    """Who is believed in the kind."""
    others: list[str]
    """What less trusted ones said differently, as `bits_per_s 1e+10 (sysfs)`."""


class MachineStatus(TypedDict):
    """What a node told of its machine, and what is known of it since."""

    name: str
    site: str
    site_from: str
    address: str
    """Where other nodes are said to reach it; empty: it only dials out."""
    reachable: bool | None
    """Whether the coordinator reached it there; None: not tried."""
    connected: bool
    nics: list[NicStatus]
    devices: int
    memory_bytes: int | None
    cpus: int
    memlock_bytes: int | None
    """None: without bound, or not told."""
    nofile: int
    congestion: str
    seconds_per_step: float | None
    """Of an inner step, lately; None before that is known."""
    labels: list[list[str]]
    unread: list[str]


LinkStatus = TypedDict(
    "LinkStatus",
    {
        "from": str,
        "to": str,
        "rtt_s": float | None,
        "rtt_median_s": float | None,
        "bytes_per_s": float | None,
        "provenance": str,
        "measured_by": str,
        "age_s": float | None,
        "why": str,
        "retransmit_ratio": float | None,
        "congestion": str,
        "suspect": bool,
    },
)
"""One direction of a link; an end is a node's name, or `coordinator`. A rate is the receiver's, with its provenance
(`probe`: it was measured; empty: nobody knows), its age, and what it was measured by: a `probe`, or a `transfer` of
what had to be sent anyway. `why`: what the last measurement was not believed for.
Retransmits are a share of the segments that the sender's kernel sent on the connection. A suspect link is slower than
the best way round by so much that its measurement is doubted."""


class InventoryStatus(TypedDict):
    """What is seen of machines and links: the planner's input."""

    nodes: list[MachineStatus]
    links: list[LinkStatus]


class AdviceStatus(TypedDict):
    """Terms of one node's own, and what they would come to."""

    bits: int
    """Of a parameter."""
    h: int
    round_s: float
    """Predicted as it goes now ..."""
    then_s: float
    """... and with these terms."""


class AnomalyStatus(TypedDict):
    """A node or link that has become slow, or hangs."""

    kind: str
    """`node slow`, `link slow`, `node hang`, `link hang` or `dead`; a link is that from the node to the coordinator."""
    node: str
    factor: float | None
    """How many times as long as expected; None where it does not end."""
    since_round: int
    reason: str
    place: str
    """Where the matrix of links says that it is; empty where it says nothing."""
    action: str
    """The last rung of the ladder ..."""
    done: bool
    """... and whether that was done, or is only advised."""
    why: str
    """Of that rung."""
    advice: NotRequired[AdviceStatus]


class WatchStatus(TypedDict):
    """Who has become slow in the run that goes on."""

    adapt: str
    """`off`, `advise`, `drop` or `act`."""
    why_not: str
    """Why nobody is judged; empty where nodes are."""
    coordinator: str
    """Where its own end became slow for all links; empty for nowhere."""
    anomalies: list[AnomalyStatus]


class Status(TypedDict):
    """The whole answer at `/status`."""

    run: RunStatus
    position: float
    """Highest schedule position of the live nodes."""
    round: int
    versions: list[int]
    """Per fragment."""
    digests: list[str]
    """Of the anchors of these versions, 16 hex digits each."""
    outer_steps: int
    commits: int
    nodes: list[NodeStatus]
    windows: list[WindowStatus]
    evaluations: list[EvaluationStatus]
    alarms: list[str]
    recent: NotRequired[list[HappeningStatus]]
    """The last happenings, oldest first."""
    samples: NotRequired[SamplesStatus]
    copy: NotRequired[CopyStatus]
    inventory: NotRequired[InventoryStatus]
    watch: NotRequired[WatchStatus]


class ProgressEvent(TypedDict):
    """A node's counters; all of them only grow within one incarnation."""

    event: Literal["progress"]
    t: float
    """Seconds since the run's start, as in every event."""
    node: str
    position: float
    inner_steps: int
    tokens: int
    loss: float | None
    bytes_up: int
    bytes_down: int
    bytes_state: int
    bytes_by_kind: BytesStatus
    lost_steps: int


class CommitEvent(TypedDict):
    """A window became a version."""

    event: Literal["commit"]
    t: float
    fragment: int
    version: int
    round: int
    merged: list[str]
    drops: list[list[str]]
    """Pairs of a node and the sentence why its delta was not merged."""
    update_bytes: int
    norm: float


class EvaluationEvent(TypedDict):
    """The anchors were scored."""

    event: Literal["evaluation"]
    t: float
    loss: float | None
    """None where it is no finite number."""
    position: float
    tokens: int
    """Tokens trained on so far, summed over nodes."""


class NodeEvent(TypedDict):
    """A node joined, left or changed its state."""

    event: Literal["node"]
    t: float
    name: str
    state: str
    reason: str


MetricsEvent = ProgressEvent | CommitEvent | EvaluationEvent | NodeEvent


# --- The shape of `decisions.jsonl`: a line for every window that closed, with all that its decision rested on.
#
# The journal says what was decided, and forgets it once it is not needed; this says it for as long as the file is kept,
# with the times that the journal has no business with. Standard library only.


class OwnOfDelta(TypedDict):
    """What its node had of its own."""

    codec: NotRequired[str]
    """By which it was sent, where that is not the window's `codec_up`."""
    h: NotRequired[int]
    """Of its node in the window's round, where that is not the round's."""


class ArrivedDelta(OwnOfDelta):
    """A delta that the window merged."""

    node: str
    after_s: float | None
    """Seconds from the opening until it was durable; negative: before; None: in an earlier start of the coordinator."""
    base: int
    """Version that it was taken from."""
    window: int
    """Which it named: an earlier one than this where it was late."""
    weight: float
    steps: int
    tokens: int
    norm: float
    """As its node reported it."""


class RefusedDelta(TypedDict):
    """A delta of the fragment that was refused while the window was open."""

    node: str
    after_s: float
    code: str
    detail: str


class MissingNode(TypedDict):
    """Who was expected, and is not in it."""

    node: str
    code: str
    sentence: str


class DecisionEvent(TypedDict):
    """One closed window."""

    event: Literal["decision"]
    t: float
    """Seconds since the run's start at which its commit was durable."""
    epoch: int
    fragment: int
    version: int
    """Also the window's number."""
    round: int
    final: bool
    why: str
    open_s: float
    """Seconds from the opening until it closed."""
    quorum: int | None
    """Contributions that were enough; None: of all that were expected."""
    quorum_s: float | None
    """Seconds from the opening until the quorum had come; None where it had not, or is none."""
    grace_s: float | None
    """Seconds that the others were then given; None where that is not how the method waits."""
    floor: int
    revision: int
    """Of the terms that the window ran under."""
    stage: NotRequired[int]
    """Of the model, where that is cut in stages: those who hold it were expected."""
    expected: list[str]
    arrived: list[ArrivedDelta]
    missing: list[MissingNode]
    refused: list[RefusedDelta]
    h: int
    """Inner steps of the window's round."""
    outer_lr: float
    outer_momentum: float
    delta_scale: float
    codec_up: str
    codec_down: str
    update_bytes: int
    anchor_digest: str
    norm: NotRequired[float]
    """Of the merged delta."""
    merge_s: NotRequired[float]
    journal_s: NotRequired[float]
