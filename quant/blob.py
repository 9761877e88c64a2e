"""Blobs: header, checksum, and the packing of deltas and anchors."""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import xxhash
import zstandard
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.codec import Codec, flat
from farloop.quant.errors import BadBlob, BadPayload
from farloop.quant.registry import codec_named

# --- A blob: a 64-byte header that describes one encoded fragment, and its payload
#
#  off  type  field
#    0  u32   magic, the bytes "FLBL"
#    4  u8    wire version, 1
#    5  u8    codec's number
#    6  u8    what the fragment's numbers are, 1 = fp32
#    7  u8    flags: bit 0, the payload is one zstd frame
#    8  u16   block of the codec
#   10  u16   0
#   12  u32   fragment
#   16  u64   numel, padding included
#   24  u64   version: of a delta, the version that its window's commit will have; else the version it leads to
#   32  u64   base: the version it is relative to; of a snapshot, its own version
#   40  u32   epoch of the coordinator when the blob was made
#   44  u32   salt: what sets the sender's random numbers apart
#   48  u64   bytes of the payload as it stands here
#   56  u64   xxh3-64 of the bytes [0, 56), seeded with the xxh3-64 of the payload
#
# Little-endian. Shapes are not sent: they follow from the fragment and the agreed layout.
#
# The payload of an entropy-coded codec becomes a zstd frame, unless that is no shorter.


HEADER_BYTES = 64
MAGIC = b"FLBL"
WIRE_VERSION = 1
_FP32 = 1
_COMPRESSED = 1

_ZSTD_LEVEL: Final = 1
"""On packed codes higher levels find false matches: slower, and larger; negative ones leave the entropy coder out."""
_MAX_WINDOW: Final = 128 << 20

_RUN_LENGTH: Final = 1
_FRAME_CHECKSUM_BYTES: Final = 4
_SMALLEST_BLOCK: Final = 256
"""Least mean number of bytes in a zstd block: no encoder writes smaller ones, and empty blocks would cost time."""

_FIELDS = struct.Struct("<4sBBBBHHIQQQIIQ")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES
_SEEDED_BY = struct.Struct("<IQQI")

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobHeader:
    """The fields of a blob's header; see the table above."""

    codec: Codec
    fragment: Fragment
    version: int
    base: int
    epoch: int
    salt: int = 0

    @property
    def seed(self) -> int:
        """Seed of the codec's random numbers, below 2³²: the same for sender and receiver."""
        fields = _SEEDED_BY.pack(self.fragment.index, self.version, self.base, self.salt)
        return xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the receiver expects of a blob."""

    codecs: tuple[Codec, ...]  # the codecs that are allowed
    fragment: Fragment  # From the layout. The fields of the blob are compared with it, and never used as sizes.
    version: int
    base: int
    newest_epoch: int
    """Blobs outlive their coordinator (journal, resumed transfers): older epochs are accepted, newer ones are not."""


class Parsed(NamedTuple):
    """A blob that `parse_blob` has found to be the expected one."""

    header: BlobHeader
    payload: Tensor  # uint8, decompressed
    digest: int  # xxh3-64 of the payload as it stands in the blob


def blob_bytes(codec: Codec, fragment: Fragment) -> int:
    """Size of a fragment's blob, header included; an upper bound if the codec is entropy coded."""
    return HEADER_BYTES + codec.payload_bytes(fragment)


_SAMPLE: Final = 1 << 16  # numbers


@lru_cache
def _compressed(codec: Codec) -> float:
    """What is left of a blob of Gaussian numbers."""
    fragment = flat(_SAMPLE)
    numbers = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    header = BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0)
    return len(pack_blob(header, codec.encode(numbers, fragment))) / blob_bytes(codec, fragment)


def typical_bytes(codec: Codec, fragment: Fragment) -> int:
    """`blob_bytes`; if the codec is entropy coded, of Gaussian numbers."""
    return round(blob_bytes(codec, fragment) * (_compressed(codec) if codec.traits.entropy_coded else 1.0))


def pack_blob(header: BlobHeader, payload: Tensor) -> bytearray:
    """Copy a payload, uint8 on any device, into a new blob."""
    blob = bytearray(blob_bytes(header.codec, header.fragment))
    as_tensor(blob)[HEADER_BYTES:].copy_(payload)
    return seal(header, blob)


def seal(header: BlobHeader, blob: bytearray) -> bytearray:
    """Finish a blob whose payload was encoded in place, at `blob[HEADER_BYTES:]`: compress it, write its header.

    Returns the same buffer, or a shorter new one. Raises ValueError: `blob` is not `blob_bytes` long.
    """
    size = blob_bytes(header.codec, header.fragment)
    if len(blob) != size:
        raise ValueError(f"the buffer has {len(blob)} bytes, the blob {size}")
    flags = 0
    if header.codec.traits.entropy_coded:
        frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(memoryview(blob)[HEADER_BYTES:])
        if len(frame) < size - HEADER_BYTES:
            flags = _COMPRESSED
            blob = bytearray(HEADER_BYTES) + frame
    _FIELDS.pack_into(
        blob,
        0,
        MAGIC,
        WIRE_VERSION,
        header.codec.code,
        _FP32,
        flags,
        header.codec.block,
        0,
        header.fragment.index,
        header.fragment.numel,
        header.version,
        header.base,
        header.epoch,
        header.salt,
        len(blob) - HEADER_BYTES,
    )
    view = memoryview(blob)
    _CHECKSUM.pack_into(blob, _FIELDS.size, _checksum(view, xxhash.xxh3_64_intdigest(view[HEADER_BYTES:])))
    return blob


def parse_blob(data: Bytes | Parsed, expect: Expected, *, scratch: bytearray | None = None) -> Parsed:
    """Parse and validate an untrusted blob. No size in it decides an allocation.

    What was parsed before, for the same receiver, is returned as it is: its bytes are not read again. `scratch` takes a
    decompressed payload: a buffer of that length or more, reused from blob to blob. The payload is a view of `data`
    unless that is read-only or compressed. Raises BadBlob: the bytes are not the expected blob, for any reason.
    """
    if isinstance(data, Parsed):
        header = data.header
        assert header.codec in expect.codecs and header.fragment.index == expect.fragment.index
        assert (header.version, header.base) == (expect.version, expect.base) and header.epoch <= expect.newest_epoch
        return data
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise BadBlob(f"{len(view)} bytes are no header")
    header, compressed = _parse_header(view, expect)
    digest = xxhash.xxh3_64_intdigest(view[HEADER_BYTES:])
    if _CHECKSUM.unpack_from(view, _FIELDS.size)[0] != _checksum(view, digest):
        raise BadBlob("the checksum is wrong")
    if compressed:
        payload = as_tensor(_decompressed(view[HEADER_BYTES:], header.codec.payload_bytes(header.fragment), scratch))
    else:
        payload = as_tensor(view[HEADER_BYTES:])
    try:
        header.codec.validate(payload, header.fragment)
    except BadPayload as error:
        raise BadBlob(f"{header.codec.name} payload: {error}") from error
    return Parsed(header, payload, digest)


def as_tensor(data: Bytes) -> Tensor:
    """Bytes as uint8 [len(data)], at any address. Copies only read-only bytes, which torch does not support."""
    view = memoryview(data)
    if not len(view):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _parse_header(view: memoryview, expect: Expected) -> tuple[BlobHeader, bool]:
    """The header, and whether the payload is compressed."""
    (magic, wire, code, dtype, flags, block, zero, fragment, numel, version, base, epoch, salt, size) = (
        _FIELDS.unpack_from(view)
    )
    _require_equal("magic", magic, MAGIC)
    _require_equal("wire version", wire, WIRE_VERSION)
    codec = next((codec for codec in expect.codecs if codec.code == code), None)
    if codec is None:
        raise BadBlob(f"codec {code} is none of {', '.join(f'{c.code} ({c.name})' for c in expect.codecs)}")
    compressed = flags == _COMPRESSED and codec.traits.entropy_coded
    if not compressed:
        _require_equal("flags", flags, 0)
    _require_equal("reserved field", zero, 0)
    _require_equal("number type", dtype, _FP32)
    _require_equal("fragment", fragment, expect.fragment.index)
    _require_equal("version", version, expect.version)
    _require_equal("base", base, expect.base)
    if epoch > expect.newest_epoch:
        raise BadBlob(f"epoch {epoch} is newer than {expect.newest_epoch}")
    _require_equal("numel", numel, expect.fragment.numel)
    _require_equal("block", block, codec.block)
    right = codec.payload_bytes(expect.fragment)
    if compressed and size >= right:
        raise BadBlob(f"payload bytes: {size}, compressed, are not fewer than {right}")
    if not compressed:
        _require_equal("payload bytes", size, right)
    _require_equal("bytes", len(view), HEADER_BYTES + size)
    header = BlobHeader(codec=codec, fragment=expect.fragment, version=version, base=base, epoch=epoch, salt=salt)
    return header, compressed


def _decompressed(frame: memoryview, size: int, scratch: bytearray | None) -> memoryview:
    """Decompress one zstd frame of exactly `size` bytes; the sizes that the frame declares are checked first."""
    try:
        says = zstandard.get_frame_parameters(frame)
        start = zstandard.frame_header_size(frame)
    except zstandard.ZstdError as error:
        raise BadBlob(f"no zstd frame: {error}") from error
    if says.content_size != size:
        raise BadBlob(f"a zstd frame of {says.content_size} bytes, {size} are right")
    if says.window_size > _MAX_WINDOW or says.dict_id:
        raise BadBlob(f"a zstd frame with a window of {says.window_size} bytes and the dictionary {says.dict_id}")
    if _blocks_end(frame, start, size) + _FRAME_CHECKSUM_BYTES * says.has_checksum != len(frame):
        raise BadBlob("the zstd frame does not end where the payload ends")
    out = memoryview(scratch if scratch is not None and len(scratch) >= size else bytearray(size))[:size]
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        with decompressor.stream_reader(frame) as reader:
            filled = 0
            while filled < size and (count := reader.readinto(out[filled:])):
                filled += count
            if filled != size or reader.read(1):
                raise BadBlob(f"a zstd frame with other than {size} bytes in it")
    except zstandard.ZstdError as error:
        raise BadBlob(f"zstd: {error}") from error
    return out


def _blocks_end(frame: memoryview, start: int, size: int) -> int:
    """Where the blocks of a zstd frame end, by their headers (RFC 8878, 3.1.1.2); −1 if they do not.

    The stream reader stops at the last byte it can use, so it would accept a truncated frame, or two.
    """
    for _ in range(2 + size // _SMALLEST_BLOCK):
        header = int.from_bytes(frame[start : start + 3], "little")
        start += 3 + (1 if header >> 1 & 3 == _RUN_LENGTH else header >> 3)
        if header & 1 or start > len(frame):
            return start
    return -1


def _require_equal(what: str, found: object, right: object) -> None:
    if found != right:
        raise BadBlob(f"{what}: {found!r} instead of {right!r}")


def _checksum(blob: memoryview, payload: int) -> int:
    """`payload` is the digest of the blob's payload."""
    digest: int = xxhash.xxh3_64_intdigest(blob[: _FIELDS.size], seed=payload)
    return digest


# --- A snapshot: the blob of an anchor, in fp32


_ANY_EPOCH: Final = (1 << 32) - 1  # the largest that a blob's header can name


def pack_anchor(anchor: Tensor, fragment: Fragment, version: int, epoch: int) -> bytearray:
    """The blob of an anchor, fp32 [numel] on any device."""
    codec = codec_named("fp32")
    header = BlobHeader(codec=codec, fragment=fragment, version=version, base=version, epoch=epoch)
    return pack_blob(header, codec.encode(anchor, fragment))


def unpack_anchor(data: bytes | bytearray, fragment: Fragment, version: int) -> Tensor:
    """The anchor in a blob of any epoch, fp32 [numel]. Raises BadBlob."""
    codec, anchor = codec_named("fp32"), torch.zeros(fragment.numel, dtype=torch.float32, device="cpu")
    expect = Expected(codecs=(codec,), fragment=fragment, version=version, base=version, newest_epoch=_ANY_EPOCH)
    codec.decode_into(parse_blob(data, expect)[1], anchor, fragment)
    return anchor
