"""The header, and what it must never let through."""

import dataclasses
import struct
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.quant.blob import (
    HEADER_BYTES,
    BlobHeader,
    Expected,
    as_tensor,
    blob_bytes,
    pack_blob,
    pack_blob_into,
    parse_blob,
)
from farloop.quant.codec import Codec
from farloop.quant.errors import BadBlob, BadPayload
from farloop.quant.registry import CODECS

NUMEL = 130
FORMAT = "<4sBBBBHHIQQQIIQQ"
"""The field table once more, by hand."""
FIELDS = [
    "magic",
    "wire",
    "codec",
    "dtype",
    "flags",
    "block",
    "zero_a",
    "fragment",
    "numel",
    "version",
    "base",
    "epoch",
]
FIELDS += ["zero_b", "size", "checksum"]


def numbers(numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def header(codec: Codec, **changes: int) -> BlobHeader:
    values = {"fragment": 3, "numel": NUMEL, "version": 8, "base": 7, "epoch": 2} | changes
    return BlobHeader(codec=codec, **values)


def expected(*codecs: Codec, **changes: int) -> Expected:
    values = {"fragment": 3, "numel": NUMEL, "version": 8, "base": 7, "newest_epoch": 2} | changes
    return Expected(codecs=codecs, **values)


def blob_of(codec: Codec) -> bytearray:
    return pack_blob(header(codec), codec.encode(numbers()))


def sealed(blob: bytearray) -> bytearray:
    """With the checksum that a sender of these bytes would write."""
    seed = xxhash.xxh3_64_intdigest(bytes(blob[64:]))
    blob[56:64] = xxhash.xxh3_64_intdigest(bytes(blob[:56]), seed=seed).to_bytes(8, "little")
    return blob


def with_field(blob: bytearray, name: str, value: Any) -> bytearray:
    values = list(struct.unpack_from(FORMAT, blob))
    values[FIELDS.index(name)] = value
    return bytearray(struct.pack(FORMAT, *values)) + blob[64:]


every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


@every_codec
def test_a_blob_comes_back_with_its_header(codec: Codec) -> None:
    parsed, payload = parse_blob(blob_of(codec), expected(codec))
    assert parsed == header(codec)
    assert torch.equal(payload, codec.encode(numbers()))


def test_every_field_is_where_the_table_says() -> None:
    codec = CODECS["q4"]
    blob = blob_of(codec)
    assert len(blob) == blob_bytes(codec, NUMEL) == 64 + 64 + 3 * 32
    *fields, checksum = struct.unpack_from(FORMAT, blob)
    assert fields == [b"FLBL", 1, 4, 1, 0, 64, 0, 3, NUMEL, 8, 7, 2, 0, 64 + 3 * 32]
    assert checksum == xxhash.xxh3_64_intdigest(bytes(blob[:56]), seed=xxhash.xxh3_64_intdigest(bytes(blob[64:])))


@every_codec
def test_a_fragment_encoded_in_place_is_the_same_blob(codec: Codec) -> None:
    buffer = bytearray(b"\xa5" * blob_bytes(codec, NUMEL))
    codec.encode_into(numbers(), as_tensor(buffer)[HEADER_BYTES:])
    pack_blob_into(header(codec), buffer)
    assert buffer == blob_of(codec)


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the buffer has"):
        pack_blob_into(header(CODECS["q4"]), bytearray(blob_bytes(CODECS["q4"], NUMEL) + 1))


@every_codec
def test_an_empty_fragment_is_a_header_alone(codec: Codec) -> None:
    blob = pack_blob(header(codec, numel=0), codec.encode(torch.empty(0)))
    assert len(blob) == HEADER_BYTES
    assert not parse_blob(blob, expected(codec, numel=0))[1].numel()


@every_codec
def test_blobs_may_be_read_only_and_at_odd_addresses(codec: Codec) -> None:
    blob = blob_of(codec)
    for offset in range(4):
        shifted = memoryview(bytearray(offset) + blob)[offset:]
        for view in (shifted, shifted.toreadonly()):
            _, payload = parse_blob(view, expected(codec))
            assert torch.equal(codec.decode(payload, NUMEL), codec.decode(codec.encode(numbers()), NUMEL))


def test_a_writable_blob_is_not_copied() -> None:
    blob = blob_of(CODECS["q4"])
    _, payload = parse_blob(blob, expected(CODECS["q4"]))
    blob[-1] ^= 0xFF
    assert int(payload[-1]) == blob[-1]


def test_a_read_only_blob_cannot_be_changed_through_its_payload() -> None:
    blob = bytes(blob_of(CODECS["q4"]))
    parse_blob(blob, expected(CODECS["q4"]))[1].fill_(0)
    assert blob == bytes(blob_of(CODECS["q4"]))


def test_an_older_epoch_is_believed() -> None:
    assert parse_blob(blob_of(CODECS["q4"]), expected(CODECS["q4"], newest_epoch=9))[0].epoch == 2


def test_one_of_several_codecs_may_be_allowed() -> None:
    codecs = CODECS["q8"], CODECS["q4"]
    assert parse_blob(blob_of(CODECS["q4"]), expected(*codecs))[0].codec is CODECS["q4"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("magic", b"FLBM", "magic"),
        ("wire", 2, "wire version"),
        ("codec", 0, "codec 0 is none of 4"),
        ("codec", 5, "codec 5 is none of 4"),
        ("dtype", 2, "number type"),
        ("flags", 1, "flags"),
        ("flags", 0x80, "flags"),
        ("block", 128, "block"),
        ("zero_a", 1, "reserved"),
        ("zero_b", 1, "reserved"),
        ("fragment", 4, "fragment"),
        ("numel", NUMEL + 1, "numel"),
        ("numel", 2**64 - 1, "numel"),
        ("version", 9, "version"),
        ("base", 8, "base"),
        ("epoch", 3, "epoch 3 is newer than 2"),
        ("size", 2**64 - 1, "payload bytes"),
        ("size", 0, "payload bytes"),
    ],
)
def test_a_wrong_field_is_named_even_under_a_right_checksum(field: str, value: Any, reason: str) -> None:
    with pytest.raises(BadBlob, match=reason):
        parse_blob(sealed(with_field(blob_of(CODECS["q4"]), field, value)), expected(CODECS["q4"]))


@pytest.mark.parametrize(
    "change", [{"fragment": 1}, {"numel": 129}, {"version": 7}, {"base": 8}, {"newest_epoch": 1}], ids=str
)
def test_a_good_blob_of_something_else_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(BadBlob, match=next(iter(change)).removeprefix("newest_")):
        parse_blob(blob_of(CODECS["q4"]), expected(CODECS["q4"], **change))


def test_a_wrong_checksum_is_refused() -> None:
    blob = blob_of(CODECS["q4"])
    blob[56] ^= 1
    with pytest.raises(BadBlob, match="checksum"):
        parse_blob(blob, expected(CODECS["q4"]))


@every_codec
def test_a_bad_payload_is_a_bad_blob(codec: Codec) -> None:
    blob = blob_of(codec)
    blob[64:68] = b"\xff\xff\xff\xff"
    with pytest.raises(BadBlob, match=f"{codec.name} payload") as failure:
        parse_blob(sealed(blob), expected(codec))
    assert isinstance(failure.value.__cause__, BadPayload)


@every_codec
def test_every_other_length_is_refused(codec: Codec) -> None:
    blob = blob_of(codec)
    for length in (*range(len(blob)), len(blob) + 1, 2 * len(blob)):
        with pytest.raises(BadBlob, match="bytes"):  # found before anything is hashed
            parse_blob((blob + blob)[:length], expected(codec))


@every_codec
def test_every_flipped_bit_is_found(codec: Codec) -> None:
    blob = blob_of(codec)
    for bit in range(8 * len(blob)):
        blob[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadBlob):
            parse_blob(blob, expected(codec))
        blob[bit // 8] ^= 1 << bit % 8


@given(
    codec=st.sampled_from(list(CODECS.values())),
    edits=st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 3),
    honest_checksum=st.booleans(),
)
@settings(deadline=None, max_examples=400)
def test_a_mutated_blob_is_refused_or_decodes_to_finite_numbers(
    codec: Codec, edits: list[tuple[int, int]], cut: int, honest_checksum: bool
) -> None:
    original = blob_of(codec)
    blob = bytearray(original)
    for position, byte in edits:
        blob[position % len(blob)] = byte
    blob = blob[: len(blob) - cut]
    if honest_checksum:
        blob = sealed(blob)
    try:
        parsed, payload = parse_blob(blob, expected(codec))
    except BadBlob:
        assert blob != original
        return
    assert dataclasses.replace(parsed, epoch=2) == header(codec)
    assert torch.isfinite(codec.decode(payload, NUMEL)).all()
    if not honest_checksum:
        assert blob == original


@given(st.binary(max_size=400))
@settings(deadline=None, max_examples=200)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(BadBlob):
        parse_blob(data, expected(*CODECS.values()))
