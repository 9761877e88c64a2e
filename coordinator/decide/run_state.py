"""What all parts of the coordinator machine share: one object, with one writer for each field."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from farloop.algo.spec import NodeId
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.decide.windows import Window


@dataclass(slots=True)
class RunState:
    """The run as one incarnation of the coordinator knows it."""

    ledger: Ledger  # written by `Decisions.record`, and by the machine when a delta or a commit is durable
    now: float  # monotonic seconds. Written by the machine when it is called.
    windows: dict[int, Window] = field(default_factory=dict)
    """The open windows by fragment. The machine adds and removes them, `Closing` closes them."""
    members: dict[NodeId, Member] = field(default_factory=dict)
    """Every node that ever greeted. Written by `Membership`."""
    alarms: dict[str, str] = field(default_factory=dict)  # each part writes under its own prefix
    held: str | None = None  # why nothing is committed until a person decides. Written by `RollbackGuard`.
    stopping: bool = False  # this coordinator ends. Written by the machine.

    @property
    def stands_still(self) -> bool:
        """Whether no window closes and no deadline passes."""
        return self.stopping or self.held is not None


def speeds_of(members: Iterable[Member]) -> dict[NodeId, float]:
    """Inner steps per second of the members that train; 0 where not known yet. Their batches may differ."""
    return {member.name: member.steps_per_s for member in members if member.counts}
