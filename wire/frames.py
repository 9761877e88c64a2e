"""Frames: what one lane transmits. Bytes in, checked values out; every failure is `RemoteProtocolError`.

A control frame is one ZeroMQ part, header and body. A bulk frame is two parts, header and chunk, so that neither end
ever copies a chunk to frame it. Little-endian.

    | off | type     | field    |                                                        |
    |-----|----------|----------|--------------------------------------------------------|
    | 0   | 4 bytes  | magic    | "FLWP"                                                 |
    | 4   | u8       | version  | 1                                                      |
    | 5   | u8       | kind     | 1 control, 2 bulk                                      |
    | 6   | u16      | reserved | 0                                                      |
    | 8   | u64      | run      | the run's fingerprint; 0 in Hello and Refused          |
    | 16  | u32      | epoch    | the coordinator's epoch; 0 in Hello and Refused        |
    | 20  | u32      | length   | bytes of body or chunk                                 |
    |     |          |          | *control*                                              |
    | 24  | u64      | seq      | number of this frame; 0 in a Heartbeat, which has none |
    | 32  | u64      | ack      | frames received without a gap                          |
    | 40  | u64      | checksum | xxh3-64 of the 40 bytes before it and the body         |
    |     |          |          | *bulk*                                                 |
    | 24  | 16 bytes | key      | `blob_key`                                             |
    | 40  | u64      | offset   | of the chunk in its blob                               |
    | 48  | u64      | checksum | xxh3-64 of the 48 bytes before it and the chunk        |

The checksum finds damage, not malice: that is CURVE's task.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from farloop.wire.limits import Limits
from farloop.wire.messages import LaneHello, encode
from farloop.wire.reasons import RemoteProtocolError

Buffer = bytes | bytearray | memoryview

MAGIC = b"FLWP"
VERSION = 1

_PREFIX = struct.Struct("<4sBBHQII")
_CONTROL = struct.Struct("<QQ")
_BULK = struct.Struct("<16sQ")
_CHECKSUM = struct.Struct("<Q")

CONTROL_HEADER_BYTES = _PREFIX.size + _CONTROL.size + _CHECKSUM.size
BULK_HEADER_BYTES = _PREFIX.size + _BULK.size + _CHECKSUM.size


class FrameKind(IntEnum):
    CONTROL = 1
    BULK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFrame:
    """One message, numbered."""

    run: int
    epoch: int
    seq: int
    ack: int
    body: bytes | memoryview  # the encoded message

    def parts(self) -> list[Buffer]:
        fields = _CONTROL.pack(self.seq, self.ack)
        return [_header(FrameKind.CONTROL, self.run, self.epoch, fields, self.body) + self.body]


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkFrame:
    """One chunk of a blob. It describes itself, so any lane may carry it (protocol, Sessions)."""

    run: int
    epoch: int
    key: bytes
    offset: int
    chunk: memoryview

    @property
    def end(self) -> int:
        """Offset of the first byte after the chunk."""
        return self.offset + len(self.chunk)

    def parts(self) -> list[Buffer]:
        """The bytes to transmit; the second part is the chunk itself, not a copy."""
        fields = _BULK.pack(self.key, self.offset)
        return [_header(FrameKind.BULK, self.run, self.epoch, fields, self.chunk), self.chunk]


def parse_control(parts: Sequence[Buffer], limits: Limits) -> ControlFrame:
    """The control frame in what a control lane brought.
    Raises RemoteProtocolError: not an intact control frame within `limits`."""
    if len(parts) != 1:
        raise RemoteProtocolError(f"a control frame has 1 part, not {len(parts)}")
    data = _flat(parts[0])
    if not CONTROL_HEADER_BYTES < len(data) <= CONTROL_HEADER_BYTES + limits.max_control_bytes:
        raise RemoteProtocolError(f"a control frame of {len(data)} bytes")
    header, body = data[:CONTROL_HEADER_BYTES], data[CONTROL_HEADER_BYTES:]
    run, epoch = _parse_prefix(header, FrameKind.CONTROL, body)
    seq, ack = _CONTROL.unpack_from(header, _PREFIX.size)
    return ControlFrame(run=run, epoch=epoch, seq=seq, ack=ack, body=body)


def parse_bulk(parts: Sequence[Buffer], limits: Limits) -> BulkFrame:
    """The bulk frame in what a bulk lane brought; its chunk is a view of the second part.
    Raises RemoteProtocolError: not an intact bulk frame within `limits`."""
    if len(parts) != 2:
        raise RemoteProtocolError(f"a bulk frame has 2 parts, not {len(parts)}")
    header, chunk = _flat(parts[0]), _flat(parts[1])
    if len(header) != BULK_HEADER_BYTES:
        raise RemoteProtocolError(f"a bulk header of {len(header)} bytes")
    if not 0 < len(chunk) <= limits.max_chunk_bytes:
        raise RemoteProtocolError(f"a chunk of {len(chunk)} bytes")
    run, epoch = _parse_prefix(header, FrameKind.BULK, chunk)
    key, offset = _BULK.unpack_from(header, _PREFIX.size)
    if offset + len(chunk) > limits.max_blob_bytes:
        raise RemoteProtocolError(f"a chunk at offset {offset}")
    return BulkFrame(run=run, epoch=epoch, key=key, offset=offset, chunk=chunk)


def lane_hello(run: int, epoch: int, token: bytes, number: int) -> list[Buffer]:
    """The first frame of a bulk lane, node → coordinator: binds the lane to the session that was given `token`."""
    hello = LaneHello(lane_token=token, number=number)
    return ControlFrame(run=run, epoch=epoch, seq=0, ack=0, body=encode(hello)).parts()


def _header(kind: FrameKind, run: int, epoch: int, fields: bytes, body: Buffer) -> bytes:
    """Prefix, the kind's own fields, and the checksum over both and the body."""
    covered = _PREFIX.pack(MAGIC, VERSION, kind, 0, run, epoch, len(body)) + fields
    return covered + _CHECKSUM.pack(checksum_of(covered, body))


def _parse_prefix(header: memoryview, kind: FrameKind, body: memoryview) -> tuple[int, int]:
    """Run and epoch of a frame whose size is already bounded; the checksum comes last, as it costs most."""
    magic, version, found_kind, reserved, run, epoch, length = _PREFIX.unpack_from(header)
    if magic != MAGIC or version != VERSION:
        raise RemoteProtocolError(f"not a frame of version {VERSION}: {bytes(header[:5])!r}")
    if found_kind != kind or reserved != 0:
        raise RemoteProtocolError(f"kind {found_kind}, reserved {reserved} on a lane for {kind.name.lower()}")
    if length != len(body):
        raise RemoteProtocolError(f"{len(body)} bytes in a frame of length {length}")
    (checksum,) = _CHECKSUM.unpack_from(header, len(header) - _CHECKSUM.size)
    if checksum != checksum_of(header[: -_CHECKSUM.size], body):
        raise RemoteProtocolError("wrong checksum")
    return run, epoch


def checksum_of(covered: Buffer, body: Buffer) -> int:
    hasher = xxhash.xxh3_64(covered)
    hasher.update(body)
    digest: int = hasher.intdigest()
    return digest


def _flat(part: Buffer) -> memoryview:
    """A part as a plain view of bytes, whatever the socket library made of it."""
    return memoryview(part).cast("B")
