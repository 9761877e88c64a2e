"""Shapes of the status JSON and of the lines of metrics.jsonl and decisions.jsonl, and how they are written.

Plain dictionaries, because different processes write and read them as JSON. Standard library only.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

STATUS_FILE = "status.json"  # in the state folder: the last status of a coordinator that ended in order

RunState = Literal["waiting", "training", "held", "holding", "finished"]
"""Held: nothing is committed because the disk is full or too few live nodes are merged. Holding: nothing is committed
while the state looks like an old copy. In both an alarm says what to do."""
WindowState = Literal["open", "closing", "final"]


class RunStatus(TypedDict):
    name: str
    fingerprint: str
    method: str
    codec_up: str
    codec_down: str
    steps: int  # schedule positions of the whole run
    h: int
    tau: int
    mix: float
    fragments: int
    parameters: int
    state: RunState
    epoch: int
    revision: int  # how often the terms changed during the run
    changed: list[str]  # what the last change changed, and from which window or round on
    started_s: float  # seconds since training began, over all starts of the coordinator; 0 before
    uptime_s: float  # seconds since this coordinator process started
    farloop: str  # version that the coordinator runs
    nodes: int  # nodes that the run needs to begin
    stages: NotRequired[list[int]]  # connected nodes per stage, for a model that is cut in stages
    codec_up_of: NotRequired[dict[str, str]]  # codecs of nodes that have their own, by the newest terms
    node_disk_bytes: NotRequired[int]  # most that a node keeps on disk, by the run's plan, of the whole model
    h_share_of: NotRequired[dict[str, float]]  # shares of a round's steps, for nodes that do not do all of them


class PartStatus(TypedDict):
    """The part of the model that a node holds, if not all of it."""

    stages: list[int]
    fragments: list[int]
    parameters: int


class BytesStatus(TypedDict):
    """Bytes of both directions by purpose; their sum is all bytes."""

    delta: int
    update: int
    snapshot: int
    probe: int
    control: int


class NodeStatus(TypedDict):
    """One node, by its last report; a node that left stays in the list."""

    name: str
    state: str
    connected: bool
    incarnation: int
    device: str
    position: float
    round: int
    inner_steps: int
    tokens: int
    loss: float | None  # training loss; None before the first report, and if it is not finite
    tokens_per_s: float
    compute_share: float
    blocked_s: float
    lost_steps: int
    bytes_up: int  # bytes sent since its start
    bytes_down: int  # bytes received since its start
    bytes_state: int  # snapshots and probes, contained in the two above
    bytes_by_kind: BytesStatus
    detail: str  # its activity in words; may be empty
    reason: str  # why it left; empty while it is here
    last_heard_s: float  # seconds since its last message
    skipped_turns: int  # due sends that it skipped because too many deltas of the fragment were undecided
    skipped_steps: int  # inner steps that changed no weight: no gradient, or NaN or Inf in it
    digests: list[str]  # digests of its anchors when it left, in the order of its fragments
    part: NotRequired[PartStatus]
    quarantine: str  # why its deltas are measured but not merged; empty if they are merged
    h: NotRequired[int]  # its H in the current round, if it differs from the run's
    codec_up: NotRequired[str]  # its codec, if it differs from the run's
    tau: NotRequired[int]  # its overlap, if it chooses that by its link
    loss_is: str  # `nan`, `inf` or `-inf` if its newest loss is that: JSON has no such numbers


class WindowStatus(TypedDict):
    """The newest window of one fragment."""

    fragment: int
    window: int
    round: int
    state: WindowState
    expected: list[str]
    arrived: list[str]
    merged: list[str]  # nodes that the previous window merged


class EvaluationStatus(TypedDict):
    """One evaluation of the anchors on the fixed evaluation set."""

    loss: float | None  # None if it is not finite
    position: float
    outer_steps: int


class EventStatus(TypedDict):
    """A refusal, a drop, a loss, a departure, or the begin or end of an alarm."""

    age_s: float  # seconds since the last occurrence
    kind: str
    node: str  # empty if no node is concerned or known
    code: str  # the reason, for programs
    sentence: str  # the reason, for people
    detail: str  # place or values; may be empty
    count: int  # occurrences of the same kind, node and reason


class SamplesStatus(TypedDict):
    """Counts of the samples that the coordinator grants; they only grow."""

    granted: int  # repeated grants included
    trained: int  # used by a node that has stored a delta since; each sample counts once
    returned: int  # returned, to be granted again
    uncertain: int  # returned samples that had been trained on, in no stored delta


class CopyStatus(TypedDict):
    """Copies of the state in an object store, by this start of the coordinator."""

    url: str
    lag_s: float  # age of the newest copy in the store; before the first, time since the start
    copies: int
    failures: int
    bytes: int  # of the newest copy
    versions: list[int]  # of the fragments in the newest copy


class StandbyStatus(TypedDict):
    """Coordinators that stand by for this one."""

    term: int  # of the record of the leader: one more each time it is replaced
    in_sync: list[str]  # those that have all that nodes were told
    joining: list[str]  # those that are being given the state
    farloop: dict[str, str]  # versions that these run, as far as they say
    lag_bytes: int  # most that is sent to one of them and not written there
    bytes: int  # sent to all since the start


class NicStatus(TypedDict):
    """A network card of a node's machine, as its hello describes it."""

    name: str
    kind: str  # `infiniband`, `roce-v2`, `roce-v1`, `iwarp`, `ethernet` or `virtual`
    netdev: str
    bytes_per_s: float | None  # None if unknown
    flow_bytes_per_s: float | None  # limit of one connection; less than the above for a bond
    active: bool
    usable: bool  # active, and usable by the node's process as its kind promises
    why: str  # why it is not usable; empty if it is
    members: list[str]  # of a bond
    addresses: list[str]
    fabric: str
    provenance: str  # source of the rate: `operator`, `sysfs` or `annotation`; empty if unknown
    kind_from: str  # source of the kind
    others: list[str]  # different values of less trusted sources, as `bits_per_s 1e+10 (sysfs)`


class MachineStatus(TypedDict):
    """A node's machine, by its hello and by measurements."""

    name: str
    site: str
    site_from: str
    address: str  # address at which other nodes can reach it; empty if it only dials out
    reachable: bool | None  # whether the coordinator reached it there; None if not tried
    connected: bool
    nics: list[NicStatus]
    devices: int
    memory_bytes: int | None
    cpus: int
    memlock_bytes: int | None  # None if unlimited or unknown
    nofile: int
    congestion: str
    seconds_per_step: float | None  # recent time of an inner step; None if unknown
    labels: list[list[str]]
    unread: list[str]
    farloop: str  # version that the node runs; empty if it does not say
    clock_off_s: float | None  # its wall clock minus the coordinator's; the link's delay is in it
    disk_free_bytes: int | None  # free where its state folder is
    disk_used_bytes: int | None  # of the files in that folder


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
"""One direction of a link; an end is a node's name, or `coordinator`. A rate is measured by the receiver: with its
provenance (`probe` for a measurement; empty if unknown), its age, and the kind of measurement: a `probe`, or a
`transfer` of regular data. `why`: why the last measurement was rejected. Retransmits are a share of the segments that
the sender's kernel sent on the connection. A suspect link is so much slower than the best detour that its measurement
is doubted."""


class InventoryStatus(TypedDict):
    """Machines and links: the planner's input."""

    nodes: list[MachineStatus]
    links: list[LinkStatus]


class AdviceStatus(TypedDict):
    """Advised terms for one node, and their predicted effect."""

    bits: int  # per parameter
    h: int
    round_s: float  # predicted with the present terms
    then_s: float  # and with the advised ones


class AnomalyStatus(TypedDict):
    """A node or link that has become slow, or hangs."""

    kind: str
    """`node slow`, `link slow`, `node hang`, `link hang` or `dead`; a link is that from the node to the coordinator."""
    node: str
    factor: float | None  # measured over expected time; None if it does not end
    since_round: int
    reason: str
    place: str  # location by the link table; empty if unknown
    action: str  # the last mitigation
    done: bool  # and whether it was taken, or is only advised
    why: str  # reason of the mitigation
    advice: NotRequired[AdviceStatus]


class WatchStatus(TypedDict):
    """Nodes and links that became slow during the run."""

    adapt: str  # `off`, `advise`, `drop` or `act`
    why_not: str  # why no node is judged; empty if nodes are
    coordinator: str  # side of the coordinator that became slow for all links; empty for none
    anomalies: list[AnomalyStatus]


class UplinkStatus(TypedDict):
    bytes_per_s: float | None  # that holds now; None for no limit
    quiet: bool  # whether these are the quiet hours
    held_s: float  # time in which blobs waited for it, since this coordinator process started


class StepsStatus(TypedDict):
    """What a node did in all of its starts."""

    inner_steps: int
    lost_steps: int  # per fragment: those that no commit contains
    parameters: int  # that it holds


class TotalsStatus(TypedDict):
    """Of all starts of all nodes, forgotten ones too: what the figures of a run are computed from."""

    tokens: int
    bytes_up: int
    bytes_down: int
    bytes_by_kind: BytesStatus  # both directions; their sum is `bytes_up` + `bytes_down`
    nodes: dict[str, StepsStatus]


class Status(TypedDict):
    """The JSON at `/status`."""

    run: RunStatus
    position: float  # highest schedule position of the live nodes
    round: int
    versions: list[int]  # per fragment
    digests: list[str]  # digests of the anchors of these versions, 16 hex digits each
    outer_steps: int
    commits: int
    totals: TotalsStatus
    nodes: list[NodeStatus]
    windows: list[WindowStatus]
    evaluations: list[EvaluationStatus]
    alarms: list[str]
    recent: list[EventStatus]  # recent events, oldest first
    samples: SamplesStatus
    copy: NotRequired[CopyStatus]
    standby: NotRequired[StandbyStatus]
    inventory: NotRequired[InventoryStatus]
    uplink: NotRequired[UplinkStatus]
    watch: NotRequired[WatchStatus]


class ProgressEvent(TypedDict):
    """A node's counters; all of them only grow within one incarnation."""

    event: Literal["progress"]
    t: float  # seconds since the run's start, as in every event
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
    drops: list[list[str]]  # pairs of a node and the reason why its delta was not merged
    update_bytes: int
    norm: float


class EvaluationEvent(TypedDict):
    """The anchors were scored."""

    event: Literal["evaluation"]
    t: float
    loss: float | None  # None where it is no finite number
    position: float


class NodeEvent(TypedDict):
    """A node joined, left or changed its state."""

    event: Literal["node"]
    t: float
    name: str
    state: str
    reason: str


class TotalsEvent(TypedDict):
    """All totals so far: a coordinator that is started again goes on from the last ones and the progress after them."""

    event: Literal["totals"]
    t: float
    began_at: float | None  # `t` when training began; None before
    totals: TotalsStatus
    nodes: list[dict[str, Any]]  # name and counters of each node's last progress


MetricsEvent = ProgressEvent | CommitEvent | EvaluationEvent | NodeEvent | TotalsEvent


# --- decisions.jsonl: why each window closed. Kept longer than the journal, which forgets decisions it no longer needs.


class OwnOfDelta(TypedDict):
    """Settings of the node that differ from the window's."""

    codec: NotRequired[str]  # codec of the delta, if not the window's `codec_up`
    h: NotRequired[int]  # the node's H in the window's round, if not the round's


class ArrivedDelta(OwnOfDelta):
    """A delta that the window merged."""

    node: str
    after_s: float | None
    """Seconds from the opening until it was durable; negative if before; None if in an earlier start."""
    base: int  # version that it is relative to
    window: int  # window that it named: an earlier one if it was late
    weight: float
    steps: int
    tokens: int
    norm: float  # reported by its node


class RefusedDelta(TypedDict):
    """A delta of the fragment that was refused while the window was open."""

    node: str
    after_s: float
    code: str
    detail: str


class MissingNode(TypedDict):
    """A node that was expected and not merged."""

    node: str
    code: str
    sentence: str


class ClosedWindow(TypedDict):
    """What the journal says of one closed window."""

    epoch: int
    fragment: int
    version: int  # also the window's number
    round: int
    final: bool
    why: str
    quorum: int | None  # contributions that suffice; None if all expected ones are needed
    floor: int
    revision: int  # revision of the window's terms
    stage: NotRequired[int]  # stage of the fragment, for a model cut in stages: its holders were expected
    missing: list[MissingNode]
    h: int  # inner steps of the window's round
    outer_lr: float
    outer_momentum: float
    delta_scale: float
    codec_up: str
    codec_down: str
    update_bytes: int
    anchor_digest: str


class DecisionEvent(ClosedWindow):
    event: Literal["decision"]
    t: float  # seconds since the run's start at which its commit was durable
    open_s: float  # seconds from the opening until it closed
    quorum_s: float | None  # seconds from the opening to the quorum; None without one
    grace_s: float | None  # straggler grace in seconds; None if the method has none
    expected: list[str]
    arrived: list[ArrivedDelta]
    refused: list[RefusedDelta]
    norm: NotRequired[float]  # of the merged delta
    merge_s: NotRequired[float]
    journal_s: NotRequired[float]


def saved_status(folder: Path) -> Status | None:
    """The status in a state folder; None where none can be read."""
    try:
        status = json.loads((folder / STATUS_FILE).read_bytes())
        return cast(Status, status) if "totals" in status and "state" in status["run"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def finished_status(folder: Path) -> Status | None:
    """The status in a state folder, if it is that of a finished run; None otherwise."""
    status = saved_status(folder)
    return status if status and status["run"]["state"] == "finished" else None


# --- JSON


def dumps(value: Any, **style: Any) -> str:
    """A JSON document that every reader takes: numbers that are not finite become null.

    Python would write NaN and Infinity, which browsers and jq refuse. Raises TypeError for values without a JSON form.
    """
    try:
        return json.dumps(value, allow_nan=False, **style)
    except ValueError:  # rare: only then is the document copied
        return json.dumps(_finite(value), allow_nan=False, **style)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def finite_or_none(value: float | None) -> float | None:
    """The number if JSON can hold it: a loss may be NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def not_finite(value: float | None) -> str:
    """`nan`, `inf` or `-inf`; empty for a finite number and for None."""
    return "" if value is None or math.isfinite(value) else f"{value:g}"
