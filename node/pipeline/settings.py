"""How a node behaves in a pipeline."""

from dataclasses import dataclass, field

from farloop.node.pipeline.hops import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Bounds and patience of one node."""

    credit: int = 4
    """Microbatches that a source has under way at once."""
    memory: int = 16
    """Inputs kept until their backward pass."""
    attempts: int = 3
    """Trips that a microbatch is given before it is dropped."""
    patience_s: float = 120.0
    """A trip that takes longer is lost."""
    late_s: float = 10.0
    """A planned hop that would begin a job later than this gives way to a replica that would sooner."""
    assemble_s: float = 120.0
    """How long a node waits at its start for those that it has never met."""
    orphan_s: float = 120.0
    """How long it waits for a source, once all that it follows are gone."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("credit", "memory", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; the least is 1")
