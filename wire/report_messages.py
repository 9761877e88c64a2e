"""What a node reports of itself while it trains: progress, bytes by kind, and the loss of the anchors."""

from dataclasses import dataclass, field
from typing import Literal

from farloop.algo.spec import LATER

NodeState = Literal["joining", "ready", "training", "waiting", "paused", "evaluating", "draining", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesByKind:
    """Bytes that crossed a link one way, by what they were for (protocol, Figures)."""

    delta: int = 0
    update: int = 0
    snapshot: int = 0
    probe: int = 0
    control: int = 0
    """Control messages, greetings of connections, and bulk frames that belong to no blob."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.delta + self.update + self.snapshot + self.probe + self.control

    @property
    def exchanged(self) -> int:
        """All but snapshots and probes."""
        return self.delta + self.update + self.control

    def __add__(self, other: "BytesByKind") -> "BytesByKind":
        return BytesByKind(
            delta=self.delta + other.delta,
            update=self.update + other.update,
            snapshot=self.snapshot + other.snapshot,
            probe=self.probe + other.probe,
            control=self.control + other.control,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
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
    bytes_up: int
    bytes_down: int
    bytes_state: int
    """Snapshots and probes, both directions; not part of the two above."""
    detail: str = ""
    """What it waits for, in words."""
    skipped_turns: int = 0
    """Due sends that did not take place, for too many deltas of the fragment were undecided (protocol D)."""
    samples_left: int | None = None
    """Samples of its leases that it can still use. None where it is not told."""
    sent: BytesByKind | None = field(default=None, metadata=LATER)
    """All bytes that it sent since its start; None where they are not told by kind."""
    received: BytesByKind | None = field(default=None, metadata=LATER)
    """All bytes that it received since its start; None where they are not told by kind."""
    skipped_steps: int = field(default=0, metadata=LATER)
    """Inner steps that stepped nothing, for the gradient held NaN or Inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Node → coordinator: the loss of the anchors on the fixed evaluation set (protocol J)."""

    loss: float
    versions: tuple[int, ...]
    position: float
    seconds: float


def moved_by(progress: Progress) -> tuple[BytesByKind, BytesByKind]:
    """All bytes that a node sent and received. One that does not tell them by kind has its three numbers counted as
    deltas, updates and snapshots: the sum is right."""
    if progress.sent is not None and progress.received is not None:
        return progress.sent, progress.received
    received = BytesByKind(update=progress.bytes_down, snapshot=progress.bytes_state)
    return BytesByKind(delta=progress.bytes_up), received
