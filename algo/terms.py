"""What a run is trained under: `Terms` in parts, its learning rate, and the flat form that is sent and stored.

Standard library only. Messages, the journal, RUN.toml and `farloop run set` know each term by one flat name
(`outer_lr`); `FLAT` says where it lies (`terms.outer.lr`). The flat form keeps the order of `FLAT`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NewType

NodeId = NewType("NodeId", str)  # a node's name: the owner of its CURVE key, or, without encryption, the name it claims

LateUpdatePolicy = Literal["wait", "continue"]

Screen = Literal["off", "norm", "full"]
"""Off: every finite delta is merged. Norm: no delta that is far too long, replayed or copied. Full: directions too."""

LearningRateShape = Literal["cosine", "linear", "step", "wsd", "infinite", "constant"]
RoundRule = Literal["constant", "qsr", "linear", "cubic", "post-local"]
InnerOptimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarm:
    """New data: the learning rate rises again from its last value, and falls again (arXiv 2403.08763)."""

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
    """step: positions at which the learning rate is multiplied by `drop_factor`."""
    drop_factor: float = 0.1
    decay_share: float = 0.2
    """wsd: share of the run, at its end, in which it falls (arXiv 2405.18392: 20 % does as well as a cosine)."""
    decay: Literal["sqrt", "linear"] = "sqrt"
    """wsd: falls as 1 − √x, or linearly; the same source found the former better."""
    constant: float = 0.0
    """infinite: learning rate after the cool-down."""
    cooldown_steps: int = 0
    """infinite: positions from the peak to `constant`."""
    anneal_at: int | None = None
    """infinite: position from which it falls exponentially to `minimum` at the end of the run."""
    rewarms: tuple[Rewarm, ...] = ()
    """Later phases, in order. Each has a warm-up and the shape of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When nodes step, send and merge, and at which learning rate."""

    steps: int  # schedule positions of the whole run
    h: int
    """Inner steps between two sends of one fragment: the length of a round, or the least where `h_rule` varies it."""
    tau: int  # overlap: inner steps between a send and its merge
    mix: float  # share of the local weights that a merge keeps: local ← mix·local + (1 − mix)·anchor
    lr: LearningRate
    on_late_update: LateUpdatePolicy = "wait"
    max_stale_rounds: int = 1
    evaluate_every_rounds: int = 1
    h_rule: RoundRule = "constant"  # how long rounds are
    h_alpha: float = 0.0  # α of the rules that follow the learning rate η: H = max(h, ⌊(α/η)^power⌋)
    h_init: int | None = None  # h while the learning rate warms up (None: `h`), or before `h_switch` (None: 1)
    h_max: int | None = None  # longest round; None for no bound but the run's end
    h_switch: int = 0  # post-local: position from which H is `h`
    lag: int = 0
    """Rounds between a send and its merge, in addition to τ: 1 gives an update the whole next round to arrive."""
    eager: bool = False  # with a lag: add the own latest delta to the local weights at once
    h_share_of: tuple[tuple[NodeId, float], ...] = ()
    """Shares of a round's steps, below 1, of the nodes that do not run all, ordered by name."""
    own_tau: bool = False
    """A node that was given no overlap of its own chooses one by its link, and begins with `tau`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    batch_sequences: int  # sequences of one inner step of one node, over all of its ranks
    sequence_tokens: int
    clip: float  # largest global norm of an inner gradient
    weight_decay: float
    optimizer: InnerOptimizer = "adamw"  # of the built-in trainer, and of every loop that brings none of its own
    control_variates: bool = False
    """Nodes correct their inner steps for the difference between their data and those of all nodes."""
    variates_rate: float = 0.5
    """Share of the last estimate that a round's replaces: α of SCALLION, β of SCAFCOM; 1 has all of a round's noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """How the coordinator merges deltas and steps the global weights."""

    lr: float
    momentum: float
    correction: bool = True  # where rounds differ in length, ν, μ and the delta are corrected for the work in each
    rewarm_momentum: float = 0.0  # share of the outer momentum that survives a re-warm of the learning rate
    clip: float | None = None  # φ of co2: largest size of an element of the outer momentum; None for no bound
    buffer: int = 1  # n of delayed Nesterov: outer steps between two steps of its momentum
    spread: float = 0.0  # c of delayed Nesterov: share of the momentum in each of its steps, 0 to 1/`buffer`
    restart: int = 0  # outer steps after which the outer momentum restarts from zero; 0 for never
    merge: str | None = None  # a merge rule in place of the method's own (`validation.MERGES`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    up: str
    down: str
    up_of: tuple[tuple[NodeId, str], ...] = ()
    """Codecs of the nodes that do not send by `up`, ordered by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """When windows close, and which deltas count."""

    max_staleness: int = 0  # versions a base may be behind the current one and still be merged
    quorum: int | None = None  # contributions that close a window; None means all that are expected
    floor: int = 1  # fewest merged contributions: below it the coordinator holds the window
    min_nodes: int = 1  # nodes that must be ready before the run starts
    screen: Screen = "norm"  # what is looked for in deltas that are well-formed (docs/admission.md)
    norm_band: float = 8.0  # a delta longer than this many times the recent median is not merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a run is run: owned by the coordinator, sent to the nodes; may change while running (revisions)."""

    method: str
    schedule: Schedule
    inner: Inner
    outer: Outer
    codecs: Codecs
    admission: Admission

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is not finite, whoever gave it: rules compare with numbers, which NaN
        passes, and a record that holds one is not equal to itself."""
        for name in FLAT:
            _require_finite(name, self.value(name))

    @classmethod
    def from_flat(cls, **values: Any) -> "Terms":
        """Terms from values by flat name. Raises TypeError for an unknown or missing one, ValueError for NaN."""
        return cls(**{name: _PARTS[name](**held) if name in _PARTS else held for name, held in nest(values).items()})

    def flat(self) -> dict[str, Any]:
        return {name: self.value(name) for name in FLAT}

    def value(self, name: str) -> Any:
        part, inside = FLAT[name]
        return getattr(getattr(self, part), inside) if part else getattr(self, inside)

    def replace(self, **values: Any) -> "Terms":
        """A copy with these values, by flat name."""
        return Terms.from_flat(**self.flat() | values)

    def codec_of(self, node: NodeId) -> str:
        return dict(self.codecs.up_of).get(node, self.codecs.up)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        """Validators of messages and records read the flat form."""
        nested = dict(handler.resolve_ref_schema(handler(source)))
        ref = nested.pop("ref")  # the whole has the reference: else a second use in a message would skip `nest`
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": nest},
            "schema": nested,
            "ref": ref,
        }


def _require_finite(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number; got {value}")
    for item in value if isinstance(value, tuple) else ():
        _require_finite(name, item)
    for inside in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        _require_finite(f"{name}.{inside.name}", getattr(value, inside.name))


_PARTS: Final[Mapping[str, type]] = {
    "schedule": Schedule,
    "inner": Inner,
    "outer": Outer,
    "codecs": Codecs,
    "admission": Admission,
}
_PREFIXES: Final = {"outer": "outer_", "codecs": "codec_", "inner": "inner_"}
"""What a flat name has before the name inside its part."""

FLAT: Final[Mapping[str, tuple[str, str]]] = {
    name: (part, name.removeprefix(_PREFIXES.get(part, "")))
    for part, names in (
        ("", "method"),
        ("schedule", "steps h tau mix"),
        ("codecs", "codec_up codec_down"),
        ("outer", "outer_lr outer_momentum"),
        ("schedule", "lr"),
        ("inner", "clip weight_decay batch_sequences sequence_tokens"),
        ("schedule", "on_late_update max_stale_rounds"),
        ("admission", "max_staleness quorum floor min_nodes"),
        ("schedule", "evaluate_every_rounds h_rule h_alpha h_init h_max h_switch"),
        ("outer", "outer_correction rewarm_momentum outer_clip outer_buffer outer_spread outer_restart"),
        ("inner", "inner_optimizer"),
        ("schedule", "lag eager"),
        ("admission", "screen norm_band"),
        ("outer", "merge"),
        ("inner", "control_variates"),
        ("codecs", "codec_up_of"),
        ("schedule", "h_share_of own_tau"),
        ("inner", "variates_rate"),
    )
    for name in names.split()
}
"""Flat name → part (empty for `method`) and name inside it, in the order of the bytes."""

_FLAT_NAMES: Final = {place: name for name, place in FLAT.items()}


def field_of(name: str) -> dataclasses.Field[Any]:
    """The dataclass field of a flat name: its default and type."""
    part, inside = FLAT[name]
    fields: dict[str, dataclasses.Field[Any]] = (_PARTS[part] if part else Terms).__dataclass_fields__  # type: ignore[attr-defined]
    return fields[inside]


def nest(plain: Any) -> Any:
    """The flat form as the nested one; unknown names stay where they are, and anything but a mapping as it is."""
    if not isinstance(plain, Mapping):
        return plain
    parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    nested: dict[Any, Any] = {}
    for name, value in plain.items():
        part, inside = FLAT.get(name, ("", name))
        (parts[part] if part else nested)[inside] = value
    return nested | parts


def flat_path(path: Sequence[Any]) -> list[Any]:
    """A path into a message or record (`terms`, `schedule`, `h`) with the flat name in place of part and field."""
    flat: list[Any] = []
    for step in path:
        if len(flat) > 1 and flat[-2] == "terms" and (flat[-1], step) in _FLAT_NAMES:
            flat[-1] = _FLAT_NAMES[flat[-1], step]
        else:
            flat.append(step)
    return flat
