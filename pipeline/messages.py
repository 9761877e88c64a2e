"""Messages between pipeline nodes, and their bytes."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from farloop.algo.spec import TENSOR_ALIGN, Fragment, TensorSlot, to_plain
from farloop.algo.stages import Hop, StageLayout
from farloop.wire.blobs import blob_digest
from farloop.wire.frames import Buffer, checksum_of
from farloop.wire.messages import pack, unpack, validate
from farloop.wire.reasons import RemoteProtocolError

MAX_HOPS = 64
MAX_NAME = 63
_MOST = 2**53  # largest number in a header

Count = Annotated[int, Field(ge=0, le=_MOST)]
Seconds = Annotated[float, Field(ge=0.0, le=_MOST, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


def _possible(visited: tuple[Hop, ...]) -> tuple[Hop, ...]:
    if not all(0 <= hop.stage <= _MOST and 0 < len(hop.node) <= MAX_NAME for hop in visited):
        raise ValueError("a visit that cannot be")
    return visited


def _numbered(layout: StageLayout) -> StageLayout:
    if not 0 <= layout.epoch <= _MOST:
        raise ValueError(f"the epoch {layout.epoch} cannot be")
    return layout


# --- Messages
#
# A *trip* is one attempt of a microbatch: forward along its path, back to its source for the loss, and backward through
# the same nodes. A lost trip is followed by another, or the microbatch is dropped and counted.


class Kind(IntEnum):
    """The kind of work; the number is on the wire."""

    FORWARD = 1  # activations for the next stage
    LOSS = 2  # activations of the last stage, for the source: its norm, head and loss (SkipPipe's C0)
    BACKWARD = 3  # the gradient of what a node sent forward


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MicrobatchRoute:
    """One attempt of one microbatch. Unique among all trips of a run."""

    source: Name
    start: Count  # incarnation of the source: steps are counted from 0 in each
    step: Count
    index: Count  # of the microbatch in the step
    attempt: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work on a tensor, its past visits and its path."""

    kind: Kind
    epoch: Count  # of the layout
    trip: MicrobatchRoute
    path: Count  # which of the source's paths is followed
    position: Annotated[int, Field(ge=0, le=MAX_HOPS)]
    """Forward: place in the path of the visit that is asked for. Backward: place in `visited`. Loss: hops visited."""
    visited: Annotated[tuple[Hop, ...], Field(max_length=MAX_HOPS), AfterValidator(_possible)]
    """Visits so far; of a backward, all: the actual ones, not those planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The raw bytes of a tensor."""

    shape: Annotated[tuple[Annotated[int, Field(gt=0, le=_MOST)], ...], Field(min_length=1, max_length=4)]
    dtype: str  # of the tensor, as torch calls it: float32, bfloat16 or float16
    codec: str
    """Spelling of the codec that wrote the bytes; an empty text where they are the tensor's own, little-endian."""
    size: int  # bytes
    checksum: int  # xxh3-64 of the bytes
    sent_s: Seconds = 0.0  # sender's clock when it was given to the link; 0 before


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMessage:
    """A heartbeat with the load, to every peer about twice a second and first on every connection."""

    incarnation: Count
    epoch: Count
    ready: bool  # whether it has met all nodes that it may send to
    queued: Count  # jobs that wait
    job_s: Seconds  # recent seconds per job
    age_s: Seconds  # seconds since it last began or finished a job, which grow if it hangs
    over: int = -1  # of a source: the newest of its steps in which every microbatch is settled
    sent_s: Seconds = 0.0  # sender's clock, which the link sets
    echo_s: Seconds = 0.0  # `sent_s` of the receiver's newest message; 0 without one
    held_s: Seconds = 0.0  # how long ago that came


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """To a source: its trip ended here, with the reason."""

    trip: MicrobatchRoute
    epoch: Count  # of the layout that the sender has
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """From a source: drop this trip."""

    trip: MicrobatchRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """From a source: all microbatches of this step are settled."""

    start: Count
    step: Count
    microbatches: Count
    next_epoch: Count  # of the layout that its next step follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Phase one of a switch: prepare a new layout, do not follow it yet."""

    layout: Annotated[StageLayout, AfterValidator(_numbered)]
    addresses: dict[str, str]  # where its nodes can be reached, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The answer to `Prepare`; a `refusal`, in words, cancels the switch."""

    epoch: Count
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Phase two: each source follows the prepared layout from the end of its round on."""

    epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The sender leaves for good."""

    start: Count


Message = Leave | PipelineMessage | Lost | Forget | Ended | Prepare | Prepared | Switch


# --- Frames; every failure to read one is `RemoteProtocolError`
#
# A frame is one ZeroMQ message: a header part, and for a `Work` one more part with the tensor's bytes. Little-endian.
#
#     | off | type    | field    |                                                             |
#     |-----|---------|----------|-------------------------------------------------------------|
#     | 0   | 4 bytes | magic    | "FLPP"                                                      |
#     | 4   | u8      | version  | 1                                                           |
#     | 5   | u8      | number   | of the message, as below; never reused                      |
#     | 6   | u16     | reserved | 0                                                           |
#     | 8   | u64     | run      | the run's fingerprint; 0 without a coordinator              |
#     | 16  | u64     | checksum | xxh3-64 of the 16 bytes before it and the body              |
#     | 24  |         | body     | msgpack: the message's fields; of a Work [work, tensor info] |
#
# Sizes are bounded before parsing: a header by `MAX_HEADER_BYTES`, a tensor by what the receiver expects. Nothing is
# pickled.

MAGIC = b"FLPP"
VERSION = 1
MAX_HEADER_BYTES = 1 << 20  # a layout of a thousand nodes is a tenth of this
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_PREFIX = struct.Struct("<4sBBHQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size

_WORK = 1
_NUMBERS: dict[type[Message], int] = {
    PipelineMessage: 2,
    Lost: 3,
    Forget: 4,
    Ended: 5,
    Prepare: 6,
    Prepared: 7,
    Switch: 8,
    Leave: 9,
}
_CLASSES = dict(zip(_NUMBERS.values(), _NUMBERS, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedMessage:
    """A work and its tensor as bytes."""

    work: Work
    info: TensorInfo
    data: Buffer


def parcel(work: Work, info: TensorInfo, data: Buffer, run: int) -> list[Buffer]:
    """Parts to transmit; the second is the tensor's bytes, not a copy."""
    return [_header(_WORK, run, pack([to_plain(work), to_plain(info)])), data]


def message(message: Message, run: int) -> list[Buffer]:
    """The one part to transmit."""
    return [_header(_NUMBERS[type(message)], run, pack(message))]


def parse(parts: Sequence[Buffer], run: int, max_tensor_bytes: int) -> FramedMessage | Message:
    """Decode a frame. Raises RemoteProtocolError: it is not an intact frame of this run within the bounds."""
    if not 1 <= len(parts) <= 2:
        raise RemoteProtocolError(f"a frame of {len(parts)} parts")
    header = memoryview(parts[0]).cast("B")
    if not HEADER_BYTES < len(header) <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header of {len(header)} bytes")
    magic, version, number, reserved, found_run = _PREFIX.unpack_from(header)
    if (magic, version, reserved) != (MAGIC, VERSION, 0):
        raise RemoteProtocolError(f"not a frame of version {VERSION}: {bytes(header[:8])!r}")
    body = header[HEADER_BYTES:]
    if _CHECKSUM.unpack_from(header, _PREFIX.size)[0] != checksum_of(header[: _PREFIX.size], body):
        raise RemoteProtocolError("wrong checksum of a header")
    if found_run != run:
        raise RemoteProtocolError(f"a frame of run {found_run:016x}, this one is {run:016x}")
    if number == _WORK:
        return _parse_work(body, parts, max_tensor_bytes)
    if number not in _CLASSES or len(parts) != 1:
        raise RemoteProtocolError(f"message {number} in {len(parts)} parts")
    told: Message = validate(_CLASSES[number], unpack(body))
    return told


def as_fragment(shape: Sequence[int]) -> Fragment:
    """A fragment of this one tensor, for codecs: padded to a multiple of their alignment."""
    numel = -(-math.prod(shape) // TENSOR_ALIGN) * TENSOR_ALIGN
    return Fragment(index=0, slot=0, numel=numel, tensors=(TensorSlot(name="x", shape=tuple(shape), offset=0),))


def _parse_work(body: memoryview, parts: Sequence[Buffer], max_tensor_bytes: int) -> FramedMessage:
    match unpack(body):
        case [dict() as work_fields, dict() as info_fields] if len(parts) == 2:
            work, info = validate(Work, work_fields), validate(TensorInfo, info_fields)
        case _:
            raise RemoteProtocolError("a work is [work, tensor info] and a tensor beside it")
    data = memoryview(parts[1]).cast("B")
    if info.dtype not in ITEM_BYTES or not 0 < info.size == len(data) <= max_tensor_bytes:
        raise RemoteProtocolError(f"{len(data)} bytes of {info.dtype!r}, {info.size} are announced")
    if not info.codec and info.size != math.prod(info.shape) * ITEM_BYTES[info.dtype]:
        raise RemoteProtocolError(f"{info.size} bytes for {info.dtype} of shape {info.shape}")
    if blob_digest(data) != info.checksum:
        raise RemoteProtocolError("wrong checksum of a tensor")
    return FramedMessage(work=work, info=info, data=data)


def _header(number: int, run: int, body: bytes) -> bytes:
    prefix = _PREFIX.pack(MAGIC, VERSION, number, 0, run)
    return prefix + _CHECKSUM.pack(checksum_of(prefix, body)) + body
