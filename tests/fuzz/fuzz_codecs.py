"""The doors of the codecs: a blob that came by the wire, for every codec, and what it decodes to."""

from functools import cache, partial
from random import Random

import torch
import xxhash
import zstandard
from codec_cases import of_shapes
from fuzz_mutator import edited
from fuzz_target import Target
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.blob import HEADER_BYTES, BlobHeader, Expected, as_tensor, pack_blob, parse_blob
from farloop.quant.codec import Codec, flat
from farloop.quant.errors import BadBlob, BadPayload
from farloop.quant.registry import CODECS, codec_named

SPELLINGS = [*CODECS, "topk:k=4096", "randk:fraction=1", "sketch:density=0.5,min_numel=4096", "lowrank:rank=1"]


FRAGMENTS = (flat(1), flat(130), of_shapes((3, 5), (300,), ()), of_shapes((64, 64), (70, 60), (9,)))


@cache
def gaussian(fragment: Fragment) -> Tensor:
    """What a delta may look like."""
    x = torch.zeros(fragment.numel)
    generator = torch.Generator().manual_seed(0)
    for slot in fragment.tensors:
        x[slot.offset : slot.offset + slot.numel] = torch.randn(slot.numel, generator=generator)
    return x


def header(codec: Codec, fragment: Fragment) -> BlobHeader:
    return BlobHeader(codec=codec, fragment=fragment, version=8, base=7, epoch=2, salt=5)


def sealed(blob: bytes | bytearray) -> bytearray:
    """With the length and the checksum that a sender of these bytes would write."""
    blob = bytearray(blob)
    if len(blob) < HEADER_BYTES:
        return blob
    blob[48:56] = (len(blob) - HEADER_BYTES).to_bytes(8, "little")
    seed = xxhash.xxh3_64_intdigest(bytes(blob[64:]))
    blob[56:64] = xxhash.xxh3_64_intdigest(bytes(blob[:56]), seed=seed).to_bytes(8, "little")
    return blob


def check_decoded(codec: Codec, fragment: Fragment, payload: Tensor, seed: int) -> None:
    decoded = codec.decode(payload, fragment, seed=seed)
    assert decoded.numel() == fragment.numel and bool(torch.isfinite(decoded).all())


def check_blob(codec: Codec, fragment: Fragment, blob: bytes | bytearray, scratch: bytearray | None = None) -> None:
    """Raises BadBlob, or the blob decodes to finite numbers."""
    expected = Expected(codecs=(codec,), fragment=fragment, version=8, base=7, newest_epoch=2)
    parsed, payload, _ = parse_blob(blob, expected, scratch=scratch)
    check_decoded(codec, fragment, payload, parsed.seed)


# An input: a byte that chooses the fragment and the way, then the blob, or on the way of payloads the payload alone.

_PAYLOAD, _SCRATCH = 4, 8
_COMPRESSED = 1
"""The flags of a blob, its byte 7, whose payload is a zstd frame."""


def check(codec: Codec, data: bytes) -> None:
    """Raises BadBlob or BadPayload, or what came decodes to finite numbers."""
    way, data = (data[0] if data else 0), data[1:]
    fragment = FRAGMENTS[way % len(FRAGMENTS)]
    if way & _PAYLOAD:
        size = codec.payload_bytes(fragment)
        payload = as_tensor(bytearray(data[:size].ljust(size, b"\0")))
        codec.validate(payload, fragment)
        check_decoded(codec, fragment, payload, 77)
    else:
        check_blob(codec, fragment, bytearray(data), bytearray(64 << 10) if way & _SCRATCH else None)


def seal(data: bytes) -> bytes:
    return data if not data or data[0] & _PAYLOAD else data[:1] + bytes(sealed(data[1:]))


def seeds(codec: Codec) -> list[bytes]:
    """Good blobs, and payloads good and bad."""
    made = []
    for way, fragment in enumerate(FRAGMENTS):
        good = header(codec, fragment)
        payload = codec.encode(gaussian(fragment), fragment, seed=good.seed)
        blob = bytes(pack_blob(good, payload))
        made += [bytes([way]) + blob, bytes([way | _SCRATCH]) + blob]
        made.append(bytes([way | _PAYLOAD]) + bytes(payload.tolist()))
        made += [bytes([way | _PAYLOAD]) + bytes([fill]) * payload.numel() for fill in (0xFF, 0x7F, 0x80)]
    return made


def edited_blob(chance: Random, data: bytes) -> bytes:
    """Behind the header for the most part, for a wrong one is soon refused; or inside what is compressed."""
    if not data or data[0] & _PAYLOAD or chance.random() < 0.3:
        return edited(chance, data, 1)
    first = 1 + HEADER_BYTES
    if len(data) > first and data[8] == _COMPRESSED and chance.random() < 0.4:
        try:
            payload = zstandard.ZstdDecompressor().decompress(data[first:], max_output_size=1 << 20)
        except zstandard.ZstdError:
            return edited(chance, data, first)
        return data[:first] + zstandard.ZstdCompressor(level=chance.choice((-1, 1, 9))).compress(
            edited(chance, payload)
        )
    return edited(chance, data, first)


def target(spelling: str) -> Target:
    """The blobs of one codec."""
    codec = codec_named(spelling)
    return Target(
        name=f"blob-{spelling}".replace(":", "-").replace("=", "").replace(",", "-"),
        run=partial(check, codec),
        allowed=(BadBlob, BadPayload),
        seeds=partial(seeds, codec),
        mutate=edited_blob,
        seal=seal,
    )


TARGETS = tuple(target(spelling) for spelling in SPELLINGS)
