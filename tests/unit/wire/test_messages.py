"""farloop.wire.messages. Covers protocol Z: unknown fields and unknown optional messages pass, required ones do not."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire import messages
from farloop.wire.messages import (
    NUMBERS,
    PROTOCOL_VERSIONS,
    SENT_BY,
    SINCE,
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


def test_every_message_class_is_declared() -> None:
    """Its number is in its golden frame."""
    classes = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)}
    assert classes - {Message} == NUMBERS.keys() == SINCE.keys()
    assert all(since in range(PROTOCOL_VERSIONS[0], PROTOCOL_VERSIONS[1] + 1) for since in SINCE.values())


def test_the_specification_names_the_senders_and_the_version_of_every_message() -> None:
    lines = (Path(messages.__file__).parent / "README.md").read_text().splitlines()
    told: dict[str, tuple[str, int]] = {}
    for line in lines[lines.index("| | from node | from coordinator | from either |") + 2 :]:
        if not line.startswith("|"):
            break
        for column, cell in zip(("node", "coordinator", "either"), line.split("|")[2:5], strict=True):
            for name, since in re.findall(r"(\w+)(?: \((\d)\))?", cell):
                told[name] = (column, int(since or 1))
    either = set.intersection(*SENT_BY.values())
    sender = {kind: role.value for role, kinds in SENT_BY.items() for kind in kinds} | dict.fromkeys(either, "either")
    sender[messages.LaneHello] = "node"  # on a bulk lane
    assert told == {kind.__name__: (sender[kind], SINCE[kind]) for kind in NUMBERS}


def test_a_number_is_given_once() -> None:
    with pytest.raises(AssertionError, match="Ready has the number of Hello"):
        messages.message(NUMBERS[Hello])(Ready)


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
