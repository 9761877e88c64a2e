"""What one start of a simulated node did: its sends, merges and steps, as the tests and the outcome read them."""

from dataclasses import dataclass, field

from torch import Tensor

from farloop.algo.spec import BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A delta was taken."""

    inner_step: int
    position: float
    fragment: int
    window: int
    base: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """An anchor was merged into the local weights."""

    inner_step: int
    fragment: int
    version: int
    mix: float
    sends: int  # deltas that were taken before


@dataclass(slots=True, kw_only=True)
class SendLog:
    """What one start of a node did, for whoever looks at the outcome."""

    sends: list[Send] = field(default_factory=list)
    merges: list[Merged] = field(default_factory=list)
    settled: list[tuple[BlobId, int | None]] = field(default_factory=list)
    """Deltas, and the version that the node believes them to be part of; None for none."""
    applied: list[tuple[int, int]] = field(default_factory=list)
    """(fragment, version) of every update that was decoded onto an anchor."""
    mismatches: int = 0
    weights: list[Tensor] = field(default_factory=list)
    """Local weights before every inner step, and at the end, fp32 [numel]; none in a frugal world."""
    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """Positions of the granted stream that were trained on."""
