"""What a node's link moved, by direction and kind (protocol, Figures)."""

from dataclasses import dataclass
from typing import Final

from farloop.wire.report_messages import BytesByKind
from farloop.wire.session import Session

NONE: Final = BytesByKind()


@dataclass(frozen=True, slots=True)
class Moved:
    """All bytes, seen from the node."""

    up: BytesByKind = NONE
    down: BytesByKind = NONE

    @property
    def state(self) -> int:
        """Snapshots and probes, both directions."""
        return self.up.snapshot + self.up.probe + self.down.snapshot + self.down.probe

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.up + other.up, self.down + other.down)


def moved_by(session: Session) -> Moved:
    """So far, seen from the node."""
    return Moved(session.traffic.sent, session.traffic.received)
