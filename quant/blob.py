"""A blob: one encoded fragment that says what it is, a 64-byte header before the payload.

 off  type  field
   0  u32   magic, the bytes "FLBL"
   4  u8    wire version, 1
   5  u8    codec's number
   6  u8    what the fragment's numbers are, 1 = fp32
   7  u8    flags, 0 (bit 0 is kept for a compressed payload)
   8  u16   block of the codec
  10  u16   0
  12  u32   fragment
  16  u64   numel, padding included
  24  u64   version: of a delta, the version that its window's commit will have; else the version it leads to
  32  u64   base: the version it is relative to; of a snapshot, its own version
  40  u32   epoch of the coordinator when the blob was made
  44  u32   0
  48  u64   payload bytes
  56  u64   xxh3-64 of the bytes [0, 56), seeded with the xxh3-64 of the payload

Little-endian. Shapes are not sent: they follow from the fragment and the layout that both ends agreed on.
"""

import struct
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from farloop.quant.codec import Codec
from farloop.quant.errors import BadBlob, BadPayload

HEADER_BYTES = 64
MAGIC = b"FLBL"
WIRE_VERSION = 1
_FP32 = 1

_FIELDS = struct.Struct("<4sBBBBHHIQQQIIQ")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobHeader:
    """What a blob says of itself. The field table above says what each number means."""

    codec: Codec
    fragment: int
    numel: int
    version: int
    base: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The blob that was asked for."""

    codecs: tuple[Codec, ...]
    """Those that its window, or its kind, allows."""
    fragment: int
    numel: int
    """From the layout; a blob's own is compared with it, and never sizes anything."""
    version: int
    base: int
    newest_epoch: int
    """Blobs outlive their coordinator (journal, resumed transfers): an older epoch is good, a newer one is not."""


def blob_bytes(codec: Codec, numel: int) -> int:
    """Size of the blob of `numel` elements, header included."""
    return HEADER_BYTES + codec.payload_bytes(numel)


def pack_blob(header: BlobHeader, payload: Tensor) -> bytearray:
    """A blob of its own from a payload, uint8 on any device."""
    blob = bytearray(blob_bytes(header.codec, header.numel))
    as_tensor(blob)[HEADER_BYTES:].copy_(payload)
    pack_blob_into(header, blob)
    return blob


def pack_blob_into(header: BlobHeader, blob: bytearray | memoryview) -> None:
    """Write the header in front of a payload that was encoded in place, at `blob[HEADER_BYTES:]`.

    Raises:
        ValueError: `blob` is not `blob_bytes` long.
    """
    size = blob_bytes(header.codec, header.numel)
    if len(blob) != size:
        raise ValueError(f"the buffer has {len(blob)} bytes, the blob {size}")
    _FIELDS.pack_into(
        blob,
        0,
        MAGIC,
        WIRE_VERSION,
        header.codec.code,
        _FP32,
        0,
        header.codec.block,
        0,
        header.fragment,
        header.numel,
        header.version,
        header.base,
        header.epoch,
        0,
        size - HEADER_BYTES,
    )
    _CHECKSUM.pack_into(blob, _FIELDS.size, _checksum(memoryview(blob)))


def parse_blob(data: Bytes, expect: Expected) -> tuple[BlobHeader, Tensor]:
    """Believe the bytes of a blob, or raise. Nothing is allocated by what they say.

    Returns:
        The header, and the validated payload: uint8, a view of `data` unless that is read-only.

    Raises:
        BadBlob: they are not the blob that was asked for, whatever the reason.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise BadBlob(f"{len(view)} bytes are no header")
    header = _parse_header(view, expect)
    if _CHECKSUM.unpack_from(view, _FIELDS.size)[0] != _checksum(view):
        raise BadBlob("the checksum is wrong")
    payload = as_tensor(view[HEADER_BYTES:])
    try:
        header.codec.validate(payload, header.numel)
    except BadPayload as error:
        raise BadBlob(f"{header.codec.name} payload: {error}") from error
    return header, payload


def as_tensor(data: Bytes) -> Tensor:
    """Bytes as uint8 [len(data)], at any address. No copy, unless they are read-only: torch cannot keep them so."""
    view = memoryview(data)
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _parse_header(view: memoryview, expect: Expected) -> BlobHeader:
    (magic, wire, code, dtype, flags, block, zero_a, fragment, numel, version, base, epoch, zero_b, size) = (
        _FIELDS.unpack_from(view)
    )
    _require_equal("magic", magic, MAGIC)
    _require_equal("wire version", wire, WIRE_VERSION)
    codec = next((codec for codec in expect.codecs if codec.code == code), None)
    if codec is None:
        raise BadBlob(f"codec {code} is none of {', '.join(f'{c.code} ({c.name})' for c in expect.codecs)}")
    _require_equal("flags", flags, 0)
    _require_equal("reserved fields", (zero_a, zero_b), (0, 0))
    _require_equal("number type", dtype, _FP32)
    _require_equal("fragment", fragment, expect.fragment)
    _require_equal("version", version, expect.version)
    _require_equal("base", base, expect.base)
    if epoch > expect.newest_epoch:
        raise BadBlob(f"epoch {epoch} is newer than {expect.newest_epoch}")
    _require_equal("numel", numel, expect.numel)
    _require_equal("block", block, codec.block)
    _require_equal("payload bytes", size, codec.payload_bytes(expect.numel))
    _require_equal("bytes", len(view), HEADER_BYTES + size)
    return BlobHeader(codec=codec, fragment=fragment, numel=numel, version=version, base=base, epoch=epoch)


def _require_equal(what: str, found: object, right: object) -> None:
    if found != right:
        raise BadBlob(f"{what}: {found!r} instead of {right!r}")


def _checksum(blob: memoryview) -> int:
    payload = xxhash.xxh3_64_intdigest(blob[HEADER_BYTES:])
    digest: int = xxhash.xxh3_64_intdigest(blob[: _FIELDS.size], seed=payload)
    return digest
