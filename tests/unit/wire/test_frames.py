"""farloop.wire.frames. Covers protocol S (run and epoch in every frame) and T (bulk frames describe themselves)."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from farloop.wire.frames import (
    BULK_HEADER_BYTES,
    CONTROL_HEADER_BYTES,
    BulkFrame,
    ControlFrame,
    lane_hello,
    parse_bulk,
    parse_control,
    parse_lane_hello,
)
from farloop.wire.limits import Limits
from farloop.wire.messages import Ready, encode
from farloop.wire.reasons import RemoteProtocolError

LIMITS = Limits(max_control_bytes=100, chunk_bytes=100, max_chunk_bytes=100, max_blob_bytes=1000)
CONTROL = ControlFrame(run=0xFEDC, epoch=5, seq=6, ack=7, body=b"a body")
BULK = BulkFrame(run=0xFEDC, epoch=5, key=bytes(range(16)), offset=900, chunk=memoryview(b"a chunk"))
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


@given(U64, U32, U64, U64, st.binary(min_size=1, max_size=100))
def test_a_control_frame_survives_the_way(run: int, epoch: int, seq: int, ack: int, body: bytes) -> None:
    frame = ControlFrame(run=run, epoch=epoch, seq=seq, ack=ack, body=body)
    assert parse_control(frame.parts(), LIMITS) == frame


@given(U64, U32, st.binary(min_size=16, max_size=16), st.integers(0, 900), st.binary(min_size=1, max_size=100))
def test_a_bulk_frame_survives_the_way(run: int, epoch: int, key: bytes, offset: int, chunk: bytes) -> None:
    frame = BulkFrame(run=run, epoch=epoch, key=key, offset=offset, chunk=memoryview(chunk))
    assert parse_bulk(frame.parts(), LIMITS) == frame


def test_a_chunk_is_transmitted_and_parsed_without_a_copy() -> None:
    data = bytearray(b"chunk")
    frame = BulkFrame(run=1, epoch=1, key=bytes(16), offset=0, chunk=memoryview(data))
    header, chunk = frame.parts()
    assert chunk is frame.chunk
    assert parse_bulk([header, chunk], LIMITS).chunk.obj is data


def test_a_frame_cut_anywhere_is_refused() -> None:
    [whole] = CONTROL.parts()
    for cut in range(CONTROL_HEADER_BYTES + len(CONTROL.body)):
        with pytest.raises(RemoteProtocolError):
            parse_control([whole[:cut]], LIMITS)
    header, chunk = BULK.parts()
    for cut in range(BULK_HEADER_BYTES + len(BULK.chunk)):
        with pytest.raises(RemoteProtocolError):
            parse_bulk([header[:cut], chunk[: max(0, cut - BULK_HEADER_BYTES)]], LIMITS)


def test_a_frame_with_any_bit_flipped_is_refused() -> None:
    [whole] = CONTROL.parts()
    header, chunk = (bytes(part) for part in BULK.parts())
    for bit in range(8 * len(whole)):
        with pytest.raises(RemoteProtocolError):
            parse_control([_flip(bytes(whole), bit)], LIMITS)
    for bit in range(8 * len(header)):
        with pytest.raises(RemoteProtocolError):
            parse_bulk([_flip(header, bit), chunk], LIMITS)
    for bit in range(8 * len(chunk)):
        with pytest.raises(RemoteProtocolError):
            parse_bulk([header, _flip(chunk, bit)], LIMITS)


@pytest.mark.parametrize(
    ("offset", "field"), [(0, b"FLWQ"), (4, b"\x02"), (5, b"\x02"), (5, b"\x01"), (6, b"\x01"), (20, b"\x05")]
)
def test_wrong_fields_under_a_right_checksum_are_refused(offset: int, field: bytes) -> None:
    for parts, parse in ((CONTROL.parts(), parse_control), (BULK.parts(), parse_bulk)):
        covered = bytearray(parts[0][: 40 if parse is parse_control else 48])
        body = parts[0][48:] if parse is parse_control else parts[1]
        if covered[offset : offset + len(field)] == field:
            continue
        covered[offset : offset + len(field)] = field
        header = bytes(covered) + xxhash.xxh3_64_intdigest(bytes(covered) + bytes(body)).to_bytes(8, "little")
        with pytest.raises(RemoteProtocolError, match=r"version|lane|length"):
            parse([header + body] if parse is parse_control else [header, body], LIMITS)


@pytest.mark.parametrize(
    "parts",
    [
        ControlFrame(run=1, epoch=1, seq=0, ack=0, body=bytes(101)).parts(),
        ControlFrame(run=1, epoch=1, seq=0, ack=0, body=b"").parts(),
        BULK.parts(),
    ],
)
def test_a_control_frame_beyond_the_limits_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_control(parts, LIMITS)


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 0), (0, 101), (901, 100), (2**64 - 1, 1)])
def test_a_bulk_frame_beyond_the_limits_is_refused(offset: int, num_bytes: int) -> None:
    frame = BulkFrame(run=1, epoch=1, key=bytes(16), offset=offset, chunk=memoryview(bytes(num_bytes)))
    with pytest.raises(RemoteProtocolError):
        parse_bulk(frame.parts(), LIMITS)


def test_a_lane_is_bound_by_the_token_of_its_first_frame() -> None:
    assert parse_lane_hello(lane_hello(1, 2, b"token"), LIMITS) == b"token"
    other = ControlFrame(run=1, epoch=2, seq=0, ack=0, body=encode(Ready()))
    with pytest.raises(RemoteProtocolError, match="begins with LaneHello"):
        parse_lane_hello(other.parts(), LIMITS)


def _flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
