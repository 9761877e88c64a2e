"""farloop.wire.messages. Covers protocol Z: unknown fields and unknown optional messages pass, required ones do not."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire.messages import (
    NUMBERS,
    Credit,
    Evaluation,
    Fetch,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Ready,
    Stored,
    Welcome,
    decode,
    encode,
    pack,
    unpack,
)
from farloop.wire.reasons import RemoteProtocolError

U63 = st.integers(0, 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
BLOBS = st.builds(
    BlobId,
    kind=st.sampled_from(BlobKind),
    fragment=U63,
    version=U63,
    node=st.text(max_size=20).map(NodeId),
    incarnation=U63,
    seq=U63,
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Credit, blob=BLOBS, received=U63, limit=U63),
    st.builds(Offer, blob=BLOBS, size=U63, digest=U64, window=U63),
    st.builds(Stored, blob=BLOBS),
    st.builds(Fetch, fragment=U63),
    st.just(Ready()),
)


@given(MESSAGES)
def test_a_message_survives_the_way(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_field_that_came_later_is_left_out_at_its_default(hello: Hello) -> None:
    """Z: released bytes stand, and an older peer is told nothing new as long as there is nothing."""
    assert not {"history", "holds"} & unpack(encode(hello))[2].keys()
    later = dataclasses.replace(hello, history=8, holds=(1, 2))
    assert unpack(encode(later))[2]["history"] == 8 and decode(encode(later)) == later


def test_nested_records_survive_the_way(hello: Hello, welcome: Welcome) -> None:
    assert decode(encode(hello)) == hello
    assert decode(encode(welcome)) == welcome


def test_numbers_are_unique_and_stay() -> None:
    assert len(set(NUMBERS.values())) == len(NUMBERS)
    assert NUMBERS[Hello] == 1
    assert max(NUMBERS.values()) == 33


def test_unknown_fields_are_ignored() -> None:
    assert decode(pack([NUMBERS[Fetch], True, {"fragment": 3, "of_the_future": [1]}])) == Fetch(fragment=3)


def test_an_unknown_message_passes_unless_it_must_be_understood() -> None:
    assert decode(pack([999, False, {}])) is None
    with pytest.raises(RemoteProtocolError, match="must be understood"):
        decode(pack([999, True, {}]))


def test_only_what_an_older_peer_may_miss_is_marked_as_optional() -> None:
    assert unpack(encode(Heartbeat()))[1] is False
    assert unpack(encode(Evaluation(loss=1.0, versions=(), position=0.0, seconds=0.0)))[1] is False
    assert unpack(encode(Ready()))[1] is True


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack([1]),
        pack({"a": 1}),
        pack([NUMBERS[Fetch], True, {}]),
        pack([NUMBERS[Fetch], True, {"fragment": "three"}]),
        pack([NUMBERS[Fetch], True, {"fragment": "9" * 100}]),
        pack([NUMBERS[Fetch], True, {"fragment": 1}]) + b"\x00",
        pack([NUMBERS[Stored], True, {"blob": {"kind": 99, "fragment": 0, "version": 0}}]),
        b"\x93\x0d\xc3\x81\x91\x01\x02",
        b"\x93\x0d\xc3\x81\x01\x02",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_malformed_bytes_are_a_remote_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data)
