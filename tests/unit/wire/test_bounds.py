"""farloop.wire.bounds: what a node may say at most, of every field of every message (protocol U)."""

import dataclasses
import math
from typing import Any

import pytest
from plain_runs import plain_hello

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId
from farloop.wire.bounds import MOST_CHARACTERS, MOST_DIGEST, MOST_ITEMS, MOST_NUMBER, MOST_WORDS
from farloop.wire.machine_info import LONGEST, MOST_NICS, Inventory, Nic
from farloop.wire.messages import AnchorRef, Evaluation, Fetch, Leave, Message, Offer, Progress, decode, encode
from farloop.wire.reasons import Reason, RemoteProtocolError

PROGRESS = Progress(
    state="training",
    position=1.0,
    round=0,
    inner_steps=1,
    tokens=1,
    loss=2.5,
    tokens_per_s=1.0,
    compute_share=1.0,
    blocked_s=0.0,
    lost_steps=0,
    sample_watermark=1,
    bytes_up=0,
    bytes_down=0,
    bytes_state=0,
    samples_left=0,
)
OFFER = Offer(
    blob=BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1),
    size=9,
    digest=9,
    window=1,
    contributors=(Contribution(node=NodeId("a"), incarnation=1, base=0, steps=4, tokens=4, norm_sq=1.0),),
    consumed=4,
)
GREETING = plain_hello(anchors=(AnchorRef(fragment=0, version=0, digest=1),), fingerprint="f", layout="l", round=1)


def beyond(value: Any, name: str) -> list[Any]:
    """Values of the same type that nobody can mean; none for what has no bound, or is only cut."""
    match value:
        case bool() | None | BlobKind() | Reason():
            return []
        case int():
            return [(MOST_DIGEST if name == "digest" else MOST_NUMBER) + 1]
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


@pytest.mark.parametrize("message", [PROGRESS, OFFER, GREETING, Fetch(fragment=1)], ids=lambda m: type(m).__name__)
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


def test_a_name_of_900_kb_is_refused_in_one_line() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^Hello\.node has 900000 characters: at most 128 are allowed$"):
        decode(encode(plain_hello(node=NodeId("x" * 900_000))))


def test_lists_have_an_end() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^Hello\.holds has 65537 items"):
        decode(encode(plain_hello(holds=tuple(range(MOST_ITEMS + 1)))))


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
