"""The header and the entropy stage of a blob, and what they must never let through."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from stories import StoryText, all_stories, check_story, python
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.bit_rates import SAMPLE_ELEMENTS, measure
from farloop.quant.blob import HEADER_BYTES, BlobHeader, Expected, as_tensor, blob_bytes, pack_blob, parse_blob, seal
from farloop.quant.codec import Codec, flat
from farloop.quant.errors import BadBlob, BadPayload
from farloop.quant.registry import CODECS, codec_named

NUMEL = 130
GOLDEN_SEED = 0x20909A8F
FRAGMENT = dataclasses.replace(flat(NUMEL), index=3)
FORMAT = "<4sBBBBHHIQQQIIQQ"
"""The field table once more, by hand."""
FIELDS = [
    "magic", "wire", "codec", "dtype", "flags", "block", "zero_a", "fragment", "numel", "version", "base", "epoch",
    "salt", "size", "checksum",
]  # fmt: skip


def numbers(numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def header(codec: Codec, fragment: Fragment = FRAGMENT, **changes: int) -> BlobHeader:
    return BlobHeader(codec=codec, fragment=fragment, **{"version": 8, "base": 7, "epoch": 2, "salt": 6} | changes)


def expected(*codecs: Codec, fragment: Fragment = FRAGMENT, **changes: int) -> Expected:
    return Expected(codecs=codecs, fragment=fragment, **{"version": 8, "base": 7, "newest_epoch": 2} | changes)


def payload_of(codec: Codec) -> torch.Tensor:
    return codec.encode(numbers(), FRAGMENT, seed=header(codec).seed)


def blob_of(codec: Codec) -> bytearray:
    return pack_blob(header(codec), payload_of(codec))


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


def test_every_field_is_where_the_table_says() -> None:
    codec = CODECS["q4"]
    blob = blob_of(codec)
    assert len(blob) == blob_bytes(codec, FRAGMENT) == 64 + 64 + 3 * 32
    *fields, checksum = struct.unpack_from(FORMAT, blob)
    assert fields == [b"FLBL", 1, 4, 1, 0, 64, 0, 3, NUMEL, 8, 7, 2, 6, 64 + 3 * 32]
    assert checksum == xxhash.xxh3_64_intdigest(bytes(blob[:56]), seed=xxhash.xxh3_64_intdigest(bytes(blob[64:])))


@every_codec
def test_a_fragment_encoded_in_place_is_the_same_blob(codec: Codec) -> None:
    buffer = bytearray(b"\xa5" * blob_bytes(codec, FRAGMENT))
    codec.encode_into(numbers(), as_tensor(buffer)[HEADER_BYTES:], FRAGMENT, seed=header(codec).seed)
    assert seal(header(codec), buffer) == blob_of(codec)


@every_codec
def test_an_empty_fragment_makes_a_blob_too(codec: Codec) -> None:
    blob = pack_blob(header(codec, flat(0)), codec.encode(torch.empty(0), flat(0)))
    assert len(blob) <= blob_bytes(codec, flat(0))
    _, payload, _ = parse_blob(blob, expected(codec, fragment=flat(0)))
    assert not codec.decode(payload, flat(0)).numel()


@every_codec
def test_blobs_may_be_read_only_and_at_odd_addresses(codec: Codec) -> None:
    blob = blob_of(codec)
    for offset in range(4):
        shifted = memoryview(bytearray(offset) + blob)[offset:]
        for view in (shifted, shifted.toreadonly()):
            parsed, payload, _ = parse_blob(view, expected(codec))
            assert parsed == header(codec) and torch.equal(payload, payload_of(codec))


def test_a_writable_blob_is_not_copied() -> None:
    blob = blob_of(CODECS["q4"])
    _, payload, _ = parse_blob(blob, expected(CODECS["q4"]))
    blob[-1] ^= 0xFF
    assert int(payload[-1]) == blob[-1]


def test_what_was_parsed_is_not_read_again() -> None:
    blob = blob_of(CODECS["q4"])
    parsed = parse_blob(blob, expected(CODECS["q4"]))
    assert parsed.digest == xxhash.xxh3_64_intdigest(blob[HEADER_BYTES:])
    blob[-1] ^= 0xFF
    assert parse_blob(parsed, expected(CODECS["q4"])) is parsed
    with pytest.raises(BadBlob, match="checksum"):
        parse_blob(blob, expected(CODECS["q4"]))
    with pytest.raises(AssertionError):
        parse_blob(parsed, expected(CODECS["q4"], version=99))


def test_a_read_only_blob_cannot_be_changed_through_its_payload() -> None:
    blob = bytes(blob_of(CODECS["q4"]))
    parse_blob(blob, expected(CODECS["q4"]))[1].fill_(0)
    assert blob == bytes(blob_of(CODECS["q4"]))


@every_codec
def test_a_bad_payload_is_a_bad_blob(codec: Codec) -> None:
    """Also under a right checksum, and where it was compressed; a payload of ones is none: its scales are NaN."""
    blob = pack_blob(header(codec), torch.full((codec.payload_bytes(FRAGMENT),), 0xFF, dtype=torch.uint8))
    with pytest.raises(BadBlob, match=f"{codec.name} payload") as failure:
        parse_blob(blob, expected(codec))
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
@settings(max_examples=examples(100))
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
        parsed, payload, _ = parse_blob(blob, expected(codec))
    except BadBlob:
        assert blob != original
        return
    assert dataclasses.replace(parsed, epoch=2, salt=6) == header(codec)
    assert torch.isfinite(codec.decode(payload, FRAGMENT, seed=parsed.seed)).all()
    if not honest_checksum:
        assert blob == original


def test_the_seed_follows_from_what_sender_and_receiver_know_and_from_the_salt() -> None:
    """A second implementation: xxh3 of fragment, version, base, salt."""
    codec = CODECS["q4r"]
    fields = struct.pack("<IQQI", 3, 8, 7, 6)
    assert header(codec).seed == xxhash.xxh3_64_intdigest(fields) % 2**32 == GOLDEN_SEED
    assert parse_blob(blob_of(codec), expected(codec))[0].seed == header(codec).seed


def test_every_part_of_a_blobs_identity_changes_its_seed_and_the_epoch_does_not() -> None:
    """A node that offers a delta again after its coordinator's restart must write the same bytes."""
    codec = CODECS["q4r"]
    others = [header(codec, version=9), header(codec, base=6), header(codec, salt=7)]
    others.append(header(codec, dataclasses.replace(FRAGMENT, index=4)))
    assert len({header(codec).seed, *(other.seed for other in others)}) == 5
    assert header(codec, epoch=1).seed == header(codec).seed


# --- the entropy stage: one zstd frame, and what else may pretend to be one, made by hand (RFC 8878)


Q4R = CODECS["q4r"]
CODED = flat(4096)
SIZE = Q4R.payload_bytes(CODED)

RAW, RUN, RESERVED = 0, 1, 3
MAGIC = bytes.fromhex("28b52ffd")

coded = [codec for codec in CODECS.values() if codec.traits.entropy_coded]


def parse(blob: bytes | bytearray, codec: Codec = Q4R, scratch: bytearray | None = None) -> torch.Tensor:
    return parse_blob(blob, expected(codec, fragment=CODED), scratch=scratch)[1]


def coded_payload(codec: Codec = Q4R) -> torch.Tensor:
    return codec.encode(numbers(4096), CODED, seed=header(codec, CODED).seed)


def content() -> bytes:
    """A good payload, so that what is refused is refused for its frame."""
    return bytes(coded_payload().tolist())


def blob_around(frame: bytes, codec: Codec = Q4R) -> bytearray:
    """A blob with any bytes as its compressed payload, under a right header and a right checksum."""
    blob = pack_blob(header(codec, CODED), codec.encode(torch.zeros(4096), CODED))[:HEADER_BYTES] + frame
    return sealed(with_field(with_field(blob, "flags", 1), "size", len(frame)))


def block(kind: int, size: int, data: bytes, *, last: bool) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + data


def frame(
    blocks: bytes, *, says: int | None = SIZE, window_log: int | None = None, dictionary: int = 0, checksum: bytes = b""
) -> bytes:
    """A frame header for these blocks: one segment, or a window; `says` is the content size that it declares."""
    descriptor = (0x80 if says is not None else 0) | (0x20 if window_log is None else 0)
    descriptor |= (0x04 if checksum else 0) | (0x01 if dictionary else 0)
    window = b"" if window_log is None else bytes([(window_log - 10) << 3])
    ident = bytes([dictionary]) if dictionary else b""
    size = b"" if says is None else says.to_bytes(4, "little")
    return MAGIC + bytes([descriptor]) + window + ident + size + blocks + checksum


def raw(data: bytes) -> bytes:
    return block(RAW, len(data), data, last=True)


@every_codec
def test_only_payloads_of_entropy_coded_codecs_are_compressed(codec: Codec) -> None:
    blob = pack_blob(header(codec, CODED), codec.encode(torch.zeros(4096), CODED, seed=header(codec, CODED).seed))
    assert blob[7] == codec.traits.entropy_coded
    assert (len(blob) < HEADER_BYTES + codec.payload_bytes(CODED)) == codec.traits.entropy_coded
    assert len(blob) == HEADER_BYTES + int.from_bytes(blob[48:56], "little")


@pytest.mark.parametrize("codec", coded, ids=lambda codec: codec.name)
def test_what_was_compressed_comes_back(codec: Codec) -> None:
    blob = pack_blob(header(codec, CODED), coded_payload(codec))
    assert blob[7] == 1, "a Gaussian's codes have less entropy than bits"
    assert torch.equal(parse(blob, codec), coded_payload(codec))


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    """Random codes, and as many random scales as leave no gap before them."""
    fragment, generator = flat(32 * 256), torch.Generator().manual_seed(0)
    scales = torch.randint(0x0E00, 0x7D00, (32,), dtype=torch.int16, generator=generator)
    codes = torch.randint(0, 256, (32 * 128,), dtype=torch.uint8, generator=generator)
    payload = torch.cat((scales.view(torch.uint8), codes))
    blob = pack_blob(header(Q4R, fragment), payload)
    assert (len(blob), blob[7]) == (HEADER_BYTES + Q4R.payload_bytes(fragment), 0)
    assert torch.equal(parse_blob(blob, expected(Q4R, fragment=fragment))[1], payload)


def test_a_payload_is_decompressed_into_the_scratch_buffer_time_and_again() -> None:
    scratch, blob = bytearray(b"\xa5" * (SIZE + 7)), pack_blob(header(Q4R, CODED), coded_payload())
    address = torch.frombuffer(scratch, dtype=torch.uint8).data_ptr()
    for _ in range(2):
        payload = parse(blob, scratch=scratch)
        assert payload.data_ptr() == address
        assert torch.equal(payload, coded_payload())
        payload.fill_(0x5A)
    assert scratch[SIZE:] == b"\xa5" * 7


def test_a_scratch_buffer_that_is_too_small_is_left_alone() -> None:
    scratch = bytearray(SIZE - 1)
    assert torch.equal(parse(pack_blob(header(Q4R, CODED), coded_payload()), scratch=scratch), coded_payload())
    assert not any(scratch)


def test_frames_of_another_encoder_are_good_as_well() -> None:
    """Whatever level, with a checksum or without, in one block or several: zstd's format is the wire's."""
    for level in (-5, 1, 9, 19):
        for write_checksum in (False, True):
            made = zstandard.ZstdCompressor(level=level, write_checksum=write_checksum).compress(content())
            if len(made) < SIZE:
                assert torch.equal(parse(blob_around(made)), coded_payload())
    run = block(RUN, SIZE, b"\x00", last=True)
    assert not parse(blob_around(frame(run))).any(), "scales of zero: the codes do not count"
    halves = block(RUN, SIZE // 2, b"\x00", last=False) + block(RUN, SIZE - SIZE // 2, b"\x00", last=True)
    assert not parse(blob_around(frame(halves))).any()
    windowed = frame(run, window_log=17)
    assert not parse(blob_around(windowed)).any()


ZEROS = block(RUN, SIZE, b"\x00", last=True)
GOOD = frame(ZEROS)


def field(name: str, value: Any) -> None:
    """Parse a blob with another value in a field, under a right checksum."""
    parse_blob(sealed(with_field(blob_of(CODECS["q4"]), name, value)), expected(CODECS["q4"]))


def around(frame: bytes) -> None:
    parse(blob_around(frame))


def zstd(frame: bytes) -> None:
    """The library's own words are not the test's."""
    with pytest.raises(BadBlob, match="zstd"):
        around(frame)


@all_stories(__file__, "blobs")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)


def test_a_frame_cut_anywhere_is_refused() -> None:
    made = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content())
    assert torch.equal(parse(blob_around(made)), coded_payload())
    for length in (*range(20), *range(20, len(made) - 20, 7), *range(len(made) - 20, len(made))):
        with pytest.raises(BadBlob):
            parse(blob_around(made[:length]))


@every_codec
def test_the_flag_is_refused_where_the_codec_is_not_entropy_coded(codec: Codec) -> None:
    if not codec.traits.entropy_coded:
        made = zstandard.ZstdCompressor(level=1).compress(bytes(codec.payload_bytes(CODED)))
        with pytest.raises(BadBlob, match="flags"):
            parse(blob_around(made, codec), codec)


def sample(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3


@pytest.mark.parametrize("spelling", ["q4", "q4r:step=0.7", "ternary"])
def test_of_a_small_tensor_it_is_the_blob_itself(spelling: str) -> None:
    codec, x = codec_named(spelling), sample(5000)
    fragment = flat(x.numel())
    payload = codec.encode(x, fragment)
    rate = measure(codec, x)
    assert rate.error == pytest.approx(float((x - codec.decode(payload, fragment)).double().square().sum()), rel=1e-9)
    blob = pack_blob(BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0), payload)
    assert rate.bits >= 8 * (len(blob) - HEADER_BYTES)  # its own header is counted where it is compressed
    assert rate.bits <= 8 * len(blob)


@pytest.mark.parametrize("spelling", ["q4", "q4r:step=0.7"])
def test_of_a_large_one_a_sample_is_enough(spelling: str) -> None:
    x = sample(20 * SAMPLE_ELEMENTS + 77)
    x[: x.numel() // 2] *= 10.0  # a sample from one end would be wrong by far
    codec, fragment = codec_named(spelling), flat(x.numel())
    payload = codec.encode(x, fragment)
    error = float((x - codec.decode(payload, fragment)).double().square().sum())
    size = 8 * len(pack_blob(BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0), payload))
    rate = measure(codec, x)
    assert rate.error == pytest.approx(error, rel=0.05)
    assert rate.bits == pytest.approx(size, rel=0.02)
