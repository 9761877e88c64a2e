"""The words of a run as plain values: what it is (`Identity`), how it is run (`Terms`), what a window runs under.

Standard library only: both daemons, the wire and the simulator speak in these types.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Literal, NewType

LATER: Final = {"later": True}
"""Metadata of a field that came after the first release: at its default it is left out, and released bytes stand."""

NodeId = NewType("NodeId", str)
"""A node's name: the owner of its CURVE key, or, without encryption, the name it claims."""

TILE = 1 << 20
"""Elements of a tile: codec blocks never cross one, and a rank can own a range of them (protocol N)."""

TENSOR_ALIGN = 256
"""Every tensor starts on a multiple of this many elements of its flat fragment (protocol N)."""

MAX_FRAGMENT_ELEMENTS = 256 << 20
"""Largest fragment (protocol G)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """One tensor's place in its flat fragment."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """First element, a multiple of `TENSOR_ALIGN`."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A fixed subset of the parameters, flattened in order and padded per tensor with zeros."""

    index: int
    slot: int
    """Its place in the round (protocol A)."""
    numel: int
    """Padding included: the length of every buffer, payload and digest of this fragment."""
    tensors: tuple[TensorSlot, ...]
    stage: int = field(default=0, metadata=LATER)
    """Of a pipeline, that it lies in: the unit in which nodes hold less than the whole model (protocol G)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the parameters are cut: every trainable tensor in exactly one fragment, tied tensors once."""

    slots: int
    """Sends per round; fragments that share a slot travel together."""
    fragments: tuple[Fragment, ...]

    @property
    def num_stages(self) -> int:
        """Stages that the cut respects; 1 where it knows of none."""
        return 1 + max(fragment.stage for fragment in self.fragments)

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, without padding."""
        return sum(tensor.numel for fragment in self.fragments for tensor in fragment.tensors)

    def digest(self) -> str:
        """16 hex digits that change with any name, shape, order, offset or slot."""
        return _digest(self)


LateUpdatePolicy = Literal["wait", "continue"]

Screen = Literal["off", "norm", "full"]
"""Off: all that is finite is merged. Norm: not what is far too long, replayed or copied. Full: directions as well."""


LearningRateShape = Literal["cosine", "linear", "step", "wsd", "infinite", "constant"]
RoundRule = Literal["constant", "qsr", "linear", "cubic", "post-local"]
InnerOptimizer = Literal["adamw", "muon"]

Pattern = Literal["whole", "sequential", "strided", "balanced"]
"""What decides the fragment of a tensor: nothing, its block's place in the stack, block mod P, or sizes alone."""

OuterKind = Literal["sgd", "nesterov", "heavy-ball", "delayed-nesterov", "co2", "adamw"]
"""What steps a target: one of `outer_optimizers.py`, or the AdamW of `data-parallel`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarm:
    """New data: the learning rate rises once more from where it has got to, and falls again (arXiv 2403.08763)."""

    start: int
    """First schedule position of the phase."""
    peak: float
    replay: float | None = None
    """Share of samples still drawn from the data before; None where the phase brings no data of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Inner learning rate as a function of the schedule position: linear warm-up, then one of the shapes."""

    peak: float = 1e-3
    minimum: float = 1e-4
    warmup_steps: int = 50
    """Schedule positions from `minimum` to `peak`; of a re-warm, from the last learning rate to its own peak."""
    shape: LearningRateShape = "cosine"
    drops: tuple[int, ...] = ()
    """step: positions from which it is `drop_factor` of what it was."""
    drop_factor: float = 0.1
    decay_share: float = 0.2
    """wsd: share of the run in which it falls, at the end (arXiv 2405.18392: 20 % does as well as a cosine)."""
    decay: Literal["sqrt", "linear"] = "sqrt"
    """wsd: 1 − √ of the way, or straight down; the former is the better one (same source)."""
    constant: float = 0.0
    """infinite: what is held after the cool-down."""
    cooldown_steps: int = 0
    """infinite: positions from the peak to `constant`."""
    anneal_at: int | None = None
    """infinite: position from which it falls exponentially to `minimum` at the end of the run."""
    rewarms: tuple[Rewarm, ...] = ()
    """Later phases, in order. Each runs through warm-up and shape anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a run is run: owned by the coordinator, sent to the nodes; may change while running (protocol Z)."""

    method: str
    steps: int
    """Schedule positions of the whole run."""
    h: int
    """Inner steps between two sends of one fragment: the length of a round, or the least where `h_rule` varies it."""
    tau: int
    """Overlap: inner steps between a send and its merge."""
    mix: float
    """Share of the local weights that a merge keeps: local ← mix·local + (1 − mix)·anchor."""
    codec_up: str
    codec_down: str
    outer_lr: float
    outer_momentum: float
    lr: LearningRate
    clip: float
    """Largest global norm of an inner gradient."""
    weight_decay: float
    batch_sequences: int
    """Sequences of one inner step of one node, over all of its ranks."""
    sequence_tokens: int
    on_late_update: LateUpdatePolicy = "wait"
    max_stale_rounds: int = 1
    max_staleness: int = 0
    """Versions a base may be behind the current one and still be merged."""
    quorum: int | None = None
    """Contributions that close a window; None means all that are expected."""
    floor: int = 1
    """Fewest merged contributions: below it the coordinator holds the window."""
    min_nodes: int = 1
    """Nodes that must be ready before the run starts."""
    evaluate_every_rounds: int = 1
    h_rule: RoundRule = "constant"
    """How long rounds are."""
    h_alpha: float = 0.0
    """α of the rules that follow the learning rate η: H = max(h, ⌊(α/η)^power⌋)."""
    h_init: int | None = None
    """H while the learning rate warms up (None: `h`), or before `h_switch` (None: 1)."""
    h_max: int | None = None
    """Longest round; None for no bound but the run's end."""
    h_switch: int = 0
    """post-local: position from which H is `h`."""
    outer_correction: bool = True
    """Where rounds differ in length, ν, μ and the delta are corrected for the work in each."""
    rewarm_momentum: float = 0.0
    """Share of the outer momentum that survives a re-warm of the learning rate."""
    outer_clip: float | None = None
    """φ of co2: largest size of an element of the outer momentum; None for no bound."""
    outer_buffer: int = 1
    """N of delayed Nesterov: outer steps between two steps of its momentum."""
    outer_spread: float = 0.0
    """c of delayed Nesterov: share of the momentum in each of its steps, 0 to 1/`outer_buffer`."""
    outer_restart: int = 0
    """Outer steps after which the outer momentum begins anew from zero; 0 for never."""
    inner_optimizer: InnerOptimizer = "adamw"
    """Of the built-in trainer, and of every loop that brings none of its own."""
    lag: int = 0
    """Rounds between a send and its merge, beside τ: 1 gives an update the whole next round to come (protocol D)."""
    eager: bool = False
    """With a lag: train on as if the own latest delta were merged already."""
    screen: Screen = "norm"
    """What is looked for in deltas that are well-formed (docs/admission.md)."""
    norm_band: float = 8.0
    """Times the median of late that a delta may be long; more is no progress, whatever it is."""
    merge: str | None = None
    """A merge rule for nodes that are not trusted, in the place of the method's own (`algo/merge_rules.py`)."""
    control_variates: bool = False
    """Nodes correct their inner steps for what their data differ from those of all nodes together."""
    codec_up_of: tuple[tuple[NodeId, str], ...] = field(default=(), metadata=LATER)
    """Codecs of the nodes that do not send by `codec_up`, in the order of their names."""
    h_share_of: tuple[tuple[NodeId, float], ...] = field(default=(), metadata=LATER)
    """Shares of a round's steps, below 1, of the nodes that do fewer than all, in the order of their names."""

    def codec_of(self, node: NodeId) -> str:
        """By which `node` sends its deltas."""
        return dict(self.codec_up_of).get(node, self.codec_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a run is: fingerprinted in every handshake, never changed."""

    name: str
    model: str
    """Canonical JSON of the built-in model's sizes, or 'own' for a user's own module."""
    layout: Layout
    anchor_digests: tuple[int, ...]
    """Digest of version 0 of every fragment."""
    data: str
    """What the samples are: digests of the corpus and, after a '+' each, of those that re-warms bring; or 'own' when
    the user's loop brings them."""
    num_samples: int
    """Training samples in one pass over the first corpus; 0 when the user's loop brings them."""
    evaluation_set: str
    """Digest of the fixed evaluation set, or 'none'."""
    seed: int

    def fingerprint(self) -> str:
        """16 hex digits over everything in the identity."""
        return _digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything the nodes must agree on."""

    identity: Identity
    terms: Terms
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """Terms that were given while the run goes on, and from where they hold (protocol Z)."""

    number: int
    """0 for those that the run began with."""
    terms: Terms
    windows: tuple[int, ...]
    """First window of every fragment."""
    round: int
    """First round, for what belongs to rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Round r covers the schedule positions [start, start + length) (protocol A)."""

    index: int
    start: int
    length: int
    node_steps: tuple[tuple[NodeId, int], ...] = ()
    """H of the nodes that do not run `length` steps in it."""

    def steps_of(self, node: NodeId) -> int:
        """Inner steps that `node` does in this round."""
        return dict(self.node_steps).get(node, self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTerms:
    """What the window (fragment, window) runs under; it travels with the commit before (protocol B)."""

    fragment: int
    window: int
    """The version that the window's commit will have."""
    round: int
    tau: int
    mix: float
    codec_up: str
    codec_down: str
    final: bool = False
    """The fragment's last window, sent at the end of the run (its flush)."""
    gap: float = 1.0
    """co2: Λ of the outer step before."""
    codec_up_of: tuple[tuple[NodeId, str], ...] = field(default=(), metadata=LATER)
    """As that of `Terms`."""

    def codec_of(self, node: NodeId) -> str:
        """By which `node` sends its delta for this window."""
        return dict(self.codec_up_of).get(node, self.codec_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Samples [start, start + count) of the endless stream of data passes, granted to one node."""

    start: int
    count: int


class BlobKind(IntEnum):
    """What a blob is: an encoded fragment, or bytes that measure a link and mean nothing."""

    DELTA = 1
    UPDATE = 2
    SNAPSHOT = 3
    PROBE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobId:
    """Identity of an encoded fragment: the idempotency key of a transfer (protocol Q)."""

    kind: BlobKind
    fragment: int
    version: int
    """The base of a delta; the version of an update or a snapshot."""
    node: NodeId = NodeId("")
    """Sender of a delta; empty for what the coordinator sends."""
    incarnation: int = 0
    seq: int = 0
    """Counts a node's deltas, so that a second one of the same base is another blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One contributor of a blob (protocol H)."""

    node: NodeId
    incarnation: int
    base: int
    steps: int
    """Inner steps inside the delta."""
    tokens: int
    norm_sq: float
    """Squared norm of the decoded delta."""


def _digest(value: object) -> str:
    assert dataclasses.is_dataclass(value) and not isinstance(value, type)
    canonical = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def to_plain(value: Any) -> Any:
    """A frozen dataclass as JSON-ready dictionaries and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: to_plain(held) for field, held in values if not field.metadata or held != field.default}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value
