"""A run as plain values: its identity, its spec and revisions, its rounds, windows, leases and blob ids.

Standard library only.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, Literal

from farloop.algo.terms import NodeId as NodeId
from farloop.algo.terms import Terms

TILE = 1 << 20
"""Elements of a tile: codec blocks never cross one, and a rank can own a range of them (tiles, padding and digest)."""

TENSOR_ALIGN = 256
"""Every tensor starts on a multiple of this many elements of its flat fragment (tiles, padding and digest)."""

MAX_FRAGMENT_ELEMENTS = 256 << 20  # largest fragment (protocol, Fragments and stages)

_STATISTICS = ("running_mean", "running_var")  # buffers of torch's normalisations


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running statistic: computed in the forward pass, not trained."""
    return name.rpartition(".")[2] in _STATISTICS


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """The place of one tensor, or of consecutive rows of a large one, in its flat fragment."""

    name: str
    shape: tuple[int, ...]
    offset: int  # first element, a multiple of `TENSOR_ALIGN`
    rows: tuple[int, int] | None = None
    """First row of the tensor and the one after the last; `shape` counts these alone. None: the whole tensor."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A fixed subset of the parameters, flattened in order and padded per tensor with zeros."""

    index: int
    slot: int  # its place in the round (protocol, Round clock)
    numel: int  # padding included: the length of every buffer, payload and digest of this fragment
    tensors: tuple[TensorSlot, ...]
    stage: int = 0
    """Of a pipeline, that it lies in: the unit in which nodes hold less than the whole model (fragments and stages)."""

    @property
    def averaged(self) -> bool:
        """Whether it holds running statistics, and nothing else: they become the mean of the nodes', in fp32."""
        return any(is_statistic(tensor.name) for tensor in self.tensors[:1])

    def tensor_at(self, element: int) -> str:
        """Name of the tensor that an element belongs to; padding belongs to the tensor before it."""
        return next((t.name for t in reversed(self.tensors) if t.offset <= element), self.tensors[0].name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the parameters are cut: every trainable tensor in exactly one fragment, tied tensors once; statistics,
    if the run averages them, in fragments of their own."""

    slots: int  # sends per round; fragments that share a slot travel together
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


Pattern = Literal["whole", "sequential", "strided", "balanced"]
"""What decides the fragment of a tensor: nothing, its block's place in the stack, block mod P, or sizes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a run is: fingerprinted in every handshake, never changed."""

    name: str
    model: str  # canonical JSON of a built-in model's sizes, 'hf:' and that of a config.json, or 'own' (the nodes' own)
    layout: Layout
    anchor_digests: tuple[int, ...]  # digest of version 0 of every fragment
    data: str
    """What the samples are: digests of the corpus and, after a '+' each, of those that re-warms bring; or 'own' when
    the user's loop brings them."""
    num_samples: int  # training samples in one pass over the first corpus; 0 when the user's loop brings them
    evaluation_set: str  # digest of the fixed evaluation set, or 'none'
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
    """Terms that were given while the run goes on, and from where they hold (protocol, Revisions)."""

    number: int  # 0 for those that the run began with
    terms: Terms
    windows: tuple[int, ...]  # first window of every fragment
    round: int  # first round, for what belongs to rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Round r covers the schedule positions [start, start + length) (protocol, Round clock)."""

    index: int
    start: int
    length: int
    node_steps: tuple[tuple[NodeId, int], ...] = ()  # h of the nodes that do not run `length` steps in it

    def steps_of(self, node: NodeId) -> int:
        return dict(self.node_steps).get(node, self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTerms:
    """What the window (fragment, window) runs under; it travels with the commit before (protocol, Window terms)."""

    fragment: int
    window: int  # the version that the window's commit will have
    round: int
    tau: int
    mix: float
    codec_up: str
    codec_down: str
    final: bool = False  # the fragment's last window, sent at the end of the run (its flush)
    gap: float = 1.0  # co2: Λ of the outer step before
    codec_up_of: tuple[tuple[NodeId, str], ...] = ()  # as that of `Terms`

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
    """Identity of an encoded fragment: the idempotency key of a transfer (protocol, Acknowledgements)."""

    kind: BlobKind
    fragment: int
    version: int  # the base of a delta; the version of an update or a snapshot
    node: NodeId = NodeId("")  # noqa: RUF009
    """Sender of a delta; empty for what the coordinator sends."""
    incarnation: int = 0
    seq: int = 0  # counts a node's deltas, so that a second one of the same base is another blob

    def __str__(self) -> str:
        """As logs have it, one word: `delta:f1/v19:a/1/60`, `update:f0/v3`."""
        sender = f":{self.node}/{self.incarnation}/{self.seq}" if self.node else ""
        return f"{self.kind.name.lower()}:f{self.fragment}/v{self.version}{sender}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One contributor of a blob (protocol, Contributions and weights)."""

    node: NodeId
    incarnation: int
    base: int
    steps: int  # inner steps inside the delta
    tokens: int
    norm_sq: float  # squared norm of the decoded delta; 0 where the node leaves it to the coordinator to measure


def _digest(value: object) -> str:
    assert dataclasses.is_dataclass(value) and not isinstance(value, type)
    canonical = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@cache
def fields_of(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...] | None:
    """The fields of a dataclass, None of another type; looked up once, for messages are walked field by field."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else None


def to_plain(value: Any) -> Any:
    """A frozen dataclass as JSON-ready dictionaries and lists; `Terms` in their flat form."""
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Terms):
        return {name: to_plain(held) for name, held in value.flat().items()}
    if (fields := fields_of(value.__class__)) is None:
        return value
    return {field.name: to_plain(getattr(value, field.name)) for field in fields}
