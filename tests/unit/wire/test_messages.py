"""farloop.wire.frames, .messages and .bounds: frames describe themselves (protocol S, T); unknown fields and unknown
optional messages pass, required ones do not (Z); what a node may say at most, of every field of every message (U)."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_hello, plain_offer, plain_progress
from stories import StoryText, all_stories, check_story, python

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire import bounds, messages
from farloop.wire.bounds import MOST_CHARACTERS, MOST_DIGEST, MOST_NUMBER, MOST_WORDS
from farloop.wire.frames import BULK_HEADER_BYTES, BulkFrame, ControlFrame, parse_bulk, parse_control
from farloop.wire.limits import Limits
from farloop.wire.machine_info import LONGEST, MOST_NICS, Inventory, Nic
from farloop.wire.messages import (
    NUMBERS,
    SENT_BY,
    AnchorRef,
    Credit,
    Evaluation,
    Fetch,
    Hello,
    Leave,
    Message,
    Offer,
    Ready,
    Stored,
    decode,
    encode,
)
from farloop.wire.reasons import Reason, RemoteProtocolError

# --- Frames

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


def flipped(data: bytes, bit: int) -> bytes:
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    return bytes(other)


def test_a_frame_cut_anywhere_or_with_any_bit_flipped_is_refused() -> None:
    [whole] = (bytes(part) for part in CONTROL.parts())
    header, chunk = (bytes(part) for part in BULK.parts())
    control = [whole[:cut] for cut in range(len(whole))] + [flipped(whole, bit) for bit in range(8 * len(whole))]
    bulk = [(header[:cut], chunk[: max(0, cut - BULK_HEADER_BYTES)]) for cut in range(len(header + chunk))]
    bulk += [(flipped(header, bit), chunk) for bit in range(8 * len(header))]
    bulk += [(header, flipped(chunk, bit)) for bit in range(8 * len(chunk))]
    for bad in control:
        with pytest.raises(RemoteProtocolError):
            parse_control([bad], LIMITS)
    for parts in bulk:
        with pytest.raises(RemoteProtocolError):
            parse_bulk(parts, LIMITS)


def bulk(offset: int, num_bytes: int) -> None:
    frame = BulkFrame(run=1, epoch=1, key=bytes(16), offset=offset, chunk=memoryview(bytes(num_bytes)))
    parse_bulk(frame.parts(), LIMITS)


def forged(frame: ControlFrame | BulkFrame, offset: int, field: bytes) -> None:
    """Parse it with another field in its header, under a right checksum."""
    head, *rest = frame.parts()
    covered = bytearray(head[: 48 if rest else 40])
    body = bytes(rest[0] if rest else head[48:])
    covered[offset : offset + len(field)] = field
    header = bytes(covered) + xxhash.xxh3_64_intdigest(bytes(covered) + body).to_bytes(8, "little")
    if rest:
        parse_bulk([header, body], LIMITS)
    else:
        parse_control([header + body], LIMITS)


def malformed(data: bytes) -> None:
    """The words of msgpack and pydantic are not the test's."""
    with pytest.raises(RemoteProtocolError):
        decode(data)


@all_stories(__file__, "messages")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(messages), vars(bounds), globals()), rewrite=rewrite)


# --- Messages

U63 = st.integers(0, 2**63 - 1)
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


def test_every_message_class_is_declared() -> None:
    """Its number is in its golden frame."""
    classes = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)}
    assert classes - {Message} == NUMBERS.keys()


def test_the_specification_names_the_senders_of_every_message() -> None:
    lines = (Path(messages.__file__).parent / "README.md").read_text().splitlines()
    told: dict[str, str] = {}
    for line in lines[lines.index("| | from node | from coordinator | from either |") + 2 :]:
        if not line.startswith("|"):
            break
        for column, cell in zip(("node", "coordinator", "either"), line.split("|")[2:5], strict=True):
            told |= dict.fromkeys(re.findall(r"\w+", cell), column)
    either = set.intersection(*SENT_BY.values())
    sender = {kind: role.value for role, kinds in SENT_BY.items() for kind in kinds} | dict.fromkeys(either, "either")
    sender |= {messages.LaneHello: "node", messages.Trial: "either"}  # on connections of their own
    assert told == {kind.__name__: sender[kind] for kind in NUMBERS}


def test_a_number_is_given_once() -> None:
    with pytest.raises(AssertionError, match="Ready has the number of Hello"):
        messages.message(NUMBERS[Hello])(Ready)


# --- Bounds

GREETING = plain_hello(anchors=(AnchorRef(fragment=0, version=0, digest=1),), fingerprint="f", layout="l", round=1)
SAID = (plain_progress(samples_left=0), plain_offer(NodeId("a"), consumed=4), GREETING, Fetch(fragment=1))


def beyond(value: Any, name: str) -> list[Any]:
    """Values of the same type that make no sense; none for what has no bound, or is only cut."""
    match value:
        case bool() | None | BlobKind() | Reason():
            return []
        case int():
            return [(MOST_DIGEST if name in ("digest", "frozen", "unsaved") else MOST_NUMBER) + 1]
        case float():
            return [] if name == "loss" else [math.nan, math.inf]
        case str():
            return [] if name in ("state", "detail", "device") else ["x" * (MOST_CHARACTERS + 1)]
        case _:
            return []


def bent(message: Any) -> list[tuple[str, Any]]:
    """The message with one field out of bounds, once for each, and the field's name."""
    found = []
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        found += [(field.name, dataclasses.replace(message, **{field.name: b})) for b in beyond(value, field.name)]
        inner = value[0] if isinstance(value, tuple) and value else value
        if dataclasses.is_dataclass(inner) and not isinstance(inner, Inventory):
            for name, other in bent(inner):
                replaced = (other,) if isinstance(value, tuple) else other
                found.append((name, dataclasses.replace(message, **{field.name: replaced})))
    return found


@pytest.mark.parametrize("message", SAID, ids=lambda m: type(m).__name__)
def test_every_field_of_what_a_node_says_is_bounded(message: Message) -> None:
    assert decode(encode(message)) == message
    cases = bent(message)
    assert cases
    for name, wrong in cases:
        try:
            data = encode(wrong)
        except OverflowError:
            continue  # no bytes say that
        with pytest.raises(RemoteProtocolError, match=name):
            decode(data)


def test_the_largest_numbers_that_are_allowed_survive_the_way() -> None:
    ref = AnchorRef(fragment=MOST_NUMBER, version=MOST_NUMBER, digest=MOST_DIGEST)
    assert decode(encode(plain_hello(anchors=(ref,)))) == plain_hello(anchors=(ref,))


def test_a_loss_that_is_not_finite_is_what_the_node_measured() -> None:
    evaluation = Evaluation(loss=math.inf, versions=(1,), position=1.0, seconds=1.0)
    assert decode(encode(evaluation)) == evaluation


def test_texts_that_are_only_shown_are_cut_and_printable() -> None:
    assert decode(encode(Leave(reason=Reason.DRAINED, detail="a\nb" + "x" * 5000))) == Leave(
        reason=Reason.DRAINED, detail="a?b" + "x" * (MOST_WORDS - 3)
    )
    cards = tuple(Nic(name="n" * 1000) for _ in range(2 * MOST_NICS))
    hello = decode(encode(plain_hello(device="d" * 5000, inventory=Inventory(nics=cards))))
    assert hello == plain_hello(
        device="d" * MOST_WORDS, inventory=Inventory(nics=(Nic(name="n" * LONGEST),) * MOST_NICS)
    )
