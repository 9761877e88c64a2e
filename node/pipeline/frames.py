"""Bytes of the frames between the nodes of a pipeline. Every failure to read one is `RemoteProtocolError`.

A frame is one ZeroMQ message: a header part, and beside a `Work` one part with the tensor's bytes. Little-endian.

    | off | type    | field    |                                                             |
    |-----|---------|----------|-------------------------------------------------------------|
    | 0   | 4 bytes | magic    | "FLPP"                                                      |
    | 4   | u8      | version  | 1                                                           |
    | 5   | u8      | number   | of the message, as below; never reused                      |
    | 6   | u16     | reserved | 0                                                           |
    | 8   | u64     | run      | the run's fingerprint; 0 without a coordinator              |
    | 16  | u64     | checksum | xxh3-64 of the 16 bytes before it and the body              |
    | 24  |         | body     | msgpack: the message's fields; of a Work [work, tensor info] |

Sizes are bounded before anything is believed: a header by `MAX_HEADER_BYTES`, a tensor by what the receiver expects.
Nothing is pickled.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from farloop.algo.spec import TENSOR_ALIGN, Fragment, TensorSlot, to_plain
from farloop.node.pipeline import words
from farloop.node.pipeline.words import Message, TensorInfo, Trip, Word, Work
from farloop.wire.errors import RemoteProtocolError
from farloop.wire.frames import Buffer
from farloop.wire.messages import pack, unpack, validate

MAGIC = b"FLPP"
VERSION = 1
MAX_HEADER_BYTES = 1 << 20
"""A layout of a thousand nodes is a tenth of this."""
MAX_HOPS = 64
MAX_NAME = 63
_MOST = 2**53
"""Largest number in a header."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_PREFIX = struct.Struct("<4sBBHQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size

_WORK = 1
_NUMBERS: dict[type[Message], int] = {
    words.Word: 2,
    words.Lost: 3,
    words.Forget: 4,
    words.Ended: 5,
    words.Prepare: 6,
    words.Prepared: 7,
    words.Switch: 8,
    words.Leave: 9,
}
_CLASSES = {number: cls for cls, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A work and its tensor as bytes."""

    work: Work
    info: TensorInfo
    data: Buffer


def parcel(work: Work, info: TensorInfo, data: Buffer, run: int) -> list[Buffer]:
    """The parts to transmit; the second is the tensor's bytes themselves, not a copy."""
    return [_header(_WORK, run, pack([to_plain(work), to_plain(info)])), data]


def message(message: Message, run: int) -> list[Buffer]:
    """The one part to transmit."""
    return [_header(_NUMBERS[type(message)], run, pack(message))]


def parse(parts: Sequence[Buffer], run: int, max_tensor_bytes: int) -> Parcel | Message:
    """What a peer sent.

    Raises:
        RemoteProtocolError: not an intact frame of this run within the bounds.
    """
    if not 1 <= len(parts) <= 2:
        raise RemoteProtocolError(f"a frame of {len(parts)} parts")
    header = memoryview(parts[0]).cast("B")
    if not HEADER_BYTES < len(header) <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header of {len(header)} bytes")
    magic, version, number, reserved, found_run = _PREFIX.unpack_from(header)
    if (magic, version, reserved) != (MAGIC, VERSION, 0):
        raise RemoteProtocolError(f"not a frame of version {VERSION}: {bytes(header[:8])!r}")
    body = header[HEADER_BYTES:]
    if _CHECKSUM.unpack_from(header, _PREFIX.size)[0] != _checksum(header[: _PREFIX.size], body):
        raise RemoteProtocolError("wrong checksum of a header")
    if found_run != run:
        raise RemoteProtocolError(f"a frame of run {found_run:016x}, this one is {run:016x}")
    if number == _WORK:
        return _parse_work(body, parts, max_tensor_bytes)
    if number not in _CLASSES or len(parts) != 1:
        raise RemoteProtocolError(f"message {number} in {len(parts)} parts")
    told: Message = validate(_CLASSES[number], unpack(body))
    _check_numbers(told)
    return told


def as_fragment(shape: Sequence[int]) -> Fragment:
    """A tensor as the only one of a fragment, which codecs take: padded to a multiple of their alignment."""
    numel = -(-math.prod(shape) // TENSOR_ALIGN) * TENSOR_ALIGN
    return Fragment(index=0, slot=0, numel=numel, tensors=(TensorSlot(name="x", shape=tuple(shape), offset=0),))


def checksum(data: Buffer) -> int:
    """xxh3-64."""
    digest: int = xxhash.xxh3_64_intdigest(data)
    return digest


def _parse_work(body: memoryview, parts: Sequence[Buffer], max_tensor_bytes: int) -> Parcel:
    match unpack(body):
        case [dict() as work_fields, dict() as info_fields] if len(parts) == 2:
            work, info = validate(Work, work_fields), validate(TensorInfo, info_fields)
        case _:
            raise RemoteProtocolError("a work is [work, tensor info] and a tensor beside it")
    data = memoryview(parts[1]).cast("B")
    if len(work.visited) > MAX_HOPS or not 0 <= work.position <= MAX_HOPS:
        raise RemoteProtocolError(f"a work at hop {work.position} after {len(work.visited)}")
    if not 1 <= len(info.shape) <= 4 or not all(0 < size <= _MOST for size in info.shape):
        raise RemoteProtocolError(f"a tensor of shape {info.shape}")
    if info.dtype not in ITEM_BYTES or not 0 < info.size == len(data) <= max_tensor_bytes:
        raise RemoteProtocolError(f"{len(data)} bytes of {info.dtype!r}, {info.size} are announced")
    if not info.codec and info.size != math.prod(info.shape) * ITEM_BYTES[info.dtype]:
        raise RemoteProtocolError(f"{info.size} bytes for {info.dtype} of shape {info.shape}")
    if not 0.0 <= info.sent_s <= _MOST:  # false for NaN as well
        raise RemoteProtocolError(f"a tensor that was sent at {info.sent_s}")
    if checksum(data) != info.checksum:
        raise RemoteProtocolError("wrong checksum of a tensor")
    _check_numbers(work)
    return Parcel(work=work, info=info, data=data)


def _check_numbers(told: Message | Work) -> None:
    """Numbers that later arithmetic may trust, and names that a person can read."""
    for value in _numbers(told):
        if not 0 <= value <= _MOST:  # false for NaN as well
            raise RemoteProtocolError(f"{type(told).__name__} holds {value}")
    names = [hop.node for hop in told.visited] if isinstance(told, Work) else []
    if isinstance(told, Work | words.Lost | words.Forget):
        names.append(told.trip.source)
    if any(not 0 < len(name) <= MAX_NAME for name in names):
        raise RemoteProtocolError(f"{type(told).__name__} names {max(names, key=len)[:80]!r}")


def _numbers(told: Message | Work) -> Iterator[float]:
    match told:
        case Work():
            yield from (told.epoch, told.path, *_of_trip(told.trip), *(hop.stage for hop in told.visited))
        case Word():
            yield from (told.incarnation, told.epoch, told.queued, told.job_s, told.age_s)
            yield from (told.sent_s, told.echo_s, told.held_s)
        case words.Lost():
            yield from (told.epoch, *_of_trip(told.trip))
        case words.Forget():
            yield from _of_trip(told.trip)
        case words.Leave():
            yield told.start
        case words.Ended():
            yield from (told.start, told.step, told.microbatches, told.next_epoch)
        case words.Prepare():
            yield told.layout.epoch
        case words.Prepared() | words.Switch():
            yield told.epoch


def _of_trip(trip: Trip) -> tuple[int, ...]:
    return trip.start, trip.step, trip.index, trip.attempt


def _header(number: int, run: int, body: bytes) -> bytes:
    prefix = _PREFIX.pack(MAGIC, VERSION, number, 0, run)
    return prefix + _CHECKSUM.pack(_checksum(prefix, body)) + body


def _checksum(prefix: Buffer, body: Buffer) -> int:
    hasher = xxhash.xxh3_64(prefix)
    hasher.update(body)
    digest: int = hasher.intdigest()
    return digest
