"""Bytes and frames of a session as ZeroMQ sends them: the source of `bytes_up` and `bytes_down`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farloop.algo.spec import BlobKind
from farloop.wire.frames import Buffer
from farloop.wire.messages import BytesByKind

GREETING_BYTES = 64 + 43
"""Of a connection in the clear, each way: ZMTP 3.1's greeting, and READY with socket type and an empty identity."""

CURVE_SENT_BYTES = 64 + 202 + 301
CURVE_RECEIVED_BYTES = 64 + 170 + 67
"""... and under CURVE, from the node: greeting, HELLO, INITIATE; and to it: greeting, WELCOME, READY."""

CURVE_PART_BYTES = 8 + 8 + 16 + 1
"""What CURVE adds to each part of a message: the name of the command, a nonce, the authenticator and a flag byte."""


@dataclass(slots=True)
class Count:
    """Frames and their bytes, ZeroMQ's own framing included."""

    frames: int = 0
    bytes: int = 0

    def add(self, num_bytes: int) -> None:
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
    control_resends: int = 0  # control frames sent again because no acknowledgement came
    control_duplicates: int = 0  # control frames received again
    arrived_bytes: int = 0  # of blobs sent, as the peer has acknowledged them
    rewinds: int = 0  # times a blob was sent again from its acknowledged prefix
    connections: int = 0  # Of a node: those that were greeted. Without one, what was sent went nowhere.
    curve: bool = False  # whether the connections are encrypted: to be set before the first frame

    @property
    def sent(self) -> BytesByKind:
        return _by_kind(self.sent_blobs, self.sent_control.bytes)

    @property
    def received(self) -> BytesByKind:
        return _by_kind(self.received_blobs, self.received_control.bytes + self.stray.bytes)

    def connected(self) -> None:
        """A node's connection is there: its greetings have been exchanged."""
        self.connections += 1
        self.sent_control.bytes += CURVE_SENT_BYTES if self.curve else GREETING_BYTES
        self.received_control.bytes += CURVE_RECEIVED_BYTES if self.curve else GREETING_BYTES

    def wire_bytes(self, parts: Sequence[Buffer]) -> int:
        """Bytes of a message on the wire of this session."""
        return wire_bytes(parts, curve=self.curve)

    def adopt(self, kind: BlobKind, num_bytes: int) -> None:
        """A stray frame has found its blob."""
        self.stray.frames -= 1
        self.stray.bytes -= num_bytes
        self.received_blobs[kind].add(num_bytes)


def wire_bytes(parts: Sequence[Buffer], *, curve: bool = False) -> int:
    """Bytes of a message on the wire: ZMTP 3.1 puts a flag byte and a length of 1 or 8 bytes before each part, and
    CURVE makes a command of it."""
    sizes = [len(part) + (CURVE_PART_BYTES if curve else 0) for part in parts]
    return sum(size + (2 if size <= 255 else 9) for size in sizes)


def _by_kind(blobs: Mapping[BlobKind, Count], control: int) -> BytesByKind:
    return BytesByKind(control=control, **{kind.name.lower(): blobs[kind].bytes for kind in BlobKind})
