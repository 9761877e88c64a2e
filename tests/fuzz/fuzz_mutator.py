"""Makes bad inputs of good ones, without looking at what they do: of bytes, of plain values, of sequences of items."""

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from farloop.wire.messages import pack, unpack
from farloop.wire.reasons import RemoteProtocolError

_BREAKERS = (
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x00" * 8,
    b"\x00\x00\x80\x7f",
    b"\x80\x7f\x80\x7f",
    b"\x00\x00\xc0\x7f",
    b"\x7f",
)
_NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    1 << 16,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 53,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan"), 2.0**63, 0.5)
_LENGTH = struct.Struct("<BI")


def edited(chance: Random, data: bytes, first: int = 0) -> bytes:
    """Some bytes from `first` on changed, doubled, moved, taken out, or set to what numbers are broken by."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        if len(made) <= first:
            made += chance.randbytes(chance.randint(1, 80))
            continue
        place = chance.randrange(first, len(made))
        match chance.randrange(9):
            case 0:
                made[place] = chance.randrange(256)
            case 1:
                made[place] ^= 1 << chance.randrange(8)
            case 2:
                breaker = chance.choice(_BREAKERS)
                made[place : place + len(breaker)] = breaker
            case 3:
                del made[place : place + chance.choice((1, 2, 4, 9, 64))]
            case 4:
                made[place:place] = chance.randbytes(chance.randint(1, 9))
            case 5:
                made[place : place + 64] = bytes(64)
            case 6:
                at = chance.randrange(first, len(made))
                made[place : place + 32] = made[at : at + chance.choice((4, 32))]
            case 7:
                made[place] = (made[place] + chance.choice((1, -1))) % 256
            case 8:
                del made[place:]
    return bytes(made)


def replaced(chance: Random, plain: Any) -> Any:
    """A value that may stand where `plain` stood, of its own kind or of another."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: chance.choice(_NUMBERS),
        lambda: plain + chance.choice((1, -1, 2, -2)) if isinstance(plain, int) else chance.choice(_NUMBERS),
        lambda: chance.choice(_FLOATS),
        lambda: chance.choice(("", "a", "b", "q4", "fp32:", "topk:fraction=1e-300", "é" * 9, "\0", "x" * 70_000)),
        lambda: chance.choice(("9" * 25, "9" * 5000, "-1", "1e400", "nan", "0x10", " 1 ", "1_0")),
        lambda: chance.choice((None, True, False, b"", b"\xff" * 16, [], {})),
        lambda: [plain] * chance.choice((1, 2, 300)),
        lambda: chance.choice(({"a": 1}, {1: plain}, {"kind": plain}, {b"": None})),
        lambda: nested(chance.choice((3, 60, 400))),
    )
    weights = (6, 6, 3, 3, 2, 2, 1, 1, 1)
    return chance.choices(kinds, weights)[0]()


def nested(depth: int) -> Any:
    """Lists in lists."""
    plain: Any = 0
    for _ in range(depth):
        plain = [plain]
    return plain


DEEPEST: Final = 64
"""Levels that are looked into: the ways to all values of one that is nested deeper take more memory than there is."""


def places(plain: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside, one above all others."""
    found = [at]
    if len(at) == DEEPEST:
        return found
    if isinstance(plain, dict):
        for key, value in plain.items():
            found += places(value, (*at, key))
    elif isinstance(plain, list):
        for index, value in enumerate(plain[:50]):
            found += places(value, (*at, index))
    return found


def bent(chance: Random, plain: Any) -> Any:
    """Plain values with one of them replaced, left out or doubled."""
    ways = places(plain)[1:]
    if not ways:
        return replaced(chance, plain)
    *path, last = chance.choice(ways)
    parent = plain
    for step in path:
        parent = parent[step]
    match chance.randrange(12):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, list):
            parent.insert(chance.randrange(len(parent) + 1), parent[last])
        case 2 if isinstance(parent, dict):
            parent[chance.choice(("unknown", 3, "", last))] = parent[last]
        case _:
            parent[last] = replaced(chance, parent[last])
    return plain


LARGEST_BENT = 256 << 10
"""Bytes of a packed value: as plain values it takes up to eighty times as much, and here the mutator unpacks it."""


def packed_edit(chance: Random, data: bytes) -> bytes:
    """A packed value, bent here and there; now and then its bytes are edited as any others are."""
    if chance.random() < 0.15 or len(data) > LARGEST_BENT:
        return edited(chance, data)
    try:
        plain = unpack(data)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            plain = bent(chance, plain)
        return pack(plain)
    except (RemoteProtocolError, ValueError, TypeError, OverflowError, RecursionError):
        return edited(chance, data)


# --- sequences: of frames, of records, of things that happen

Item = tuple[int, bytes]
"""A kind of 0 to 255, and its bytes."""


def join(items: Sequence[Item]) -> bytes:
    """A sequence as one input."""
    return b"".join(_LENGTH.pack(kind, len(body)) + body for kind, body in items)


def split(data: bytes) -> list[Item]:
    """The sequence in an input; what is cut off at its end counts as far as it goes."""
    items, at = list[Item](), 0
    while at + _LENGTH.size <= len(data):
        kind, size = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        items.append((kind, data[at : at + size]))
        at += size
    return items


def shuffled(edit: Callable[[Random, bytes], bytes]) -> Callable[[Random, bytes], bytes]:
    """Mutations of a sequence: items edited by `edit`, doubled, moved, left out, or of another kind."""

    def mutate(chance: Random, data: bytes) -> bytes:
        items = split(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            if not items:
                return edited(chance, data)
            place = chance.randrange(len(items))
            kind, body = items[place]
            match chance.randrange(10):
                case 0:
                    del items[place]
                case 1:
                    items.insert(chance.randrange(len(items) + 1), items[place])
                case 2:
                    items.append(items.pop(place))
                case 3:
                    items[place] = (chance.choice((kind ^ (1 << chance.randrange(8)), items[-1][0])), body)
                case 4:
                    items[place:place] = [(kind, edit(chance, body)) for _ in range(chance.choice((1, 3, 20)))]
                case _:
                    items[place] = (kind, edit(chance, body))
        return join(items[:200])

    return mutate
