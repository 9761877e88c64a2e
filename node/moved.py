"""What a link moved, split as reports want it (protocol, Figures)."""

from dataclasses import dataclass

from farloop.algo.spec import BlobKind
from farloop.wire.session import Session


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of all frames, headers and control included."""

    up: int = 0
    down: int = 0
    state: int = 0
    """Snapshots, and what measures the link, either way; part of neither of the others."""

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.up + other.up, self.down + other.down, self.state + other.state)


def moved_by(session: Session) -> Moved:
    """So far, seen from the node."""
    traffic = session.traffic
    apart = (BlobKind.SNAPSHOT, BlobKind.PROBE)
    up = sum(traffic.sent_blobs[kind].bytes for kind in apart)
    down = sum(traffic.received_blobs[kind].bytes for kind in apart)
    return Moved(traffic.bytes_sent - up, traffic.bytes_received - down, up + down)
