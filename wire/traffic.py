"""What a session moved, counted as ZeroMQ puts it on the wire: the figures behind `bytes_up` and `bytes_down`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from farloop.algo.spec import BlobKind
from farloop.wire.frames import Buffer


@dataclass(slots=True)
class Count:
    """Frames and their bytes, ZeroMQ's own framing included."""

    frames: int = 0
    bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """One more frame of `num_bytes`."""
        self.frames += 1
        self.bytes += num_bytes


@dataclass(slots=True)
class Traffic:
    """Counters of one session; they only grow, but for `stray`, which loses what turns out to have been early."""

    sent_control: Count = field(default_factory=Count)
    received_control: Count = field(default_factory=Count)
    sent_blobs: dict[BlobKind, Count] = field(default_factory=lambda: {kind: Count() for kind in BlobKind})
    received_blobs: dict[BlobKind, Count] = field(default_factory=lambda: {kind: Count() for kind in BlobKind})
    stray: Count = field(default_factory=Count)
    """Bulk frames received of blobs that are not, or not yet, or no longer expected."""
    control_resends: int = 0
    """Control frames sent again because no acknowledgement came."""
    control_duplicates: int = 0
    """Control frames received again."""
    arrived_bytes: int = 0
    """Of blobs sent, as the peer has acknowledged them."""
    rewinds: int = 0
    """Times a blob was sent again from its acknowledged prefix."""

    @property
    def bytes_sent(self) -> int:
        return self.sent_control.bytes + sum(count.bytes for count in self.sent_blobs.values())

    @property
    def bytes_received(self) -> int:
        received = sum(count.bytes for count in self.received_blobs.values())
        return self.received_control.bytes + received + self.stray.bytes

    def adopt(self, kind: BlobKind, num_bytes: int) -> None:
        """A stray frame has found its blob."""
        self.stray.frames -= 1
        self.stray.bytes -= num_bytes
        self.received_blobs[kind].add(num_bytes)


def wire_bytes(parts: Sequence[Buffer]) -> int:
    """Bytes of a message on the wire: ZMTP 3.1 puts a flag byte and a length of 1 or 8 bytes before each part."""
    return sum(len(part) + (2 if len(part) <= 255 else 9) for part in parts)
