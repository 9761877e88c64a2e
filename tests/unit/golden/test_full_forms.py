"""Every message, every record and a run's specification with every field set: their bytes.

The golden frames and records beside the modules have one sample each, most fields at their defaults. Here every field
has another value. `full_forms.txt` names each class with its bytes: what they are decoded to must be encoded to the
same bytes, whatever the classes look like inside.

`numbers.txt` has the numbers of reasons, blob kinds and codecs, which stand on the wire and in the journal.

After an intended change, write them again and say in the commit why: python tests/unit/golden/test_full_forms.py
"""

import dataclasses
import enum
import types
import typing
import zlib
from pathlib import Path
from typing import Any, Literal, NewType, get_args, get_origin

import pytest

from farloop.algo.spec import BlobKind, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.quant.registry import CODECS
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

GOLDEN = Path(__file__).with_name("full_forms.txt")
NUMBERS = Path(__file__).with_name("numbers.txt")

CLASSES: dict[str, type[Any]] = {
    "RunSpec": RunSpec,
    **{f"message.{cls.__name__}": cls for cls in msg.NUMBERS},
    **{f"record.{cls.__name__}": cls for cls in rec.KINDS},
}

WORDS = {"kind": "ethernet", "source": "sysfs"}
"""Text fields of which a reader takes some words alone."""


def encoded(value: Any) -> bytes:
    """The bytes that are sent or written; a record's kind stands before them."""
    if type(value) in rec.KINDS:
        kind, data = rec.encode(value)
        return bytes([kind]) + data
    return msg.encode(value) if type(value) in msg.NUMBERS else msg.pack(value)


def decoded(name: str, data: bytes) -> Any:
    match name.partition("."):
        case ("RunSpec", *_):
            return msg.validate(RunSpec, msg.unpack(data))
        case ("record", *_):
            return rec.decode(data[0], data[1:])
        case _:
            return msg.decode(data)


def filled(kind: Any, name: str = "") -> Any:
    """A value of this type that is no default, found by the name of its field alone."""
    number = 2 + zlib.crc32(name.encode()) % 100
    if isinstance(kind, NewType):
        return filled(kind.__supertype__, name)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        return kind(**{f.name: f.default is not True and filled(hints[f.name], f.name) for f in fields})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[-1]
    if kind in (int, float, str, bytes, bool):
        return {
            int: number,
            float: number / 128,
            str: WORDS.get(name, name) or "name",
            bytes: bytes(range(8)),
            bool: True,
        }[kind]
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    if get_origin(kind) in (typing.Union, types.UnionType):
        return filled(next(option for option in get_args(kind) if option is not type(None)), name)
    if get_origin(kind) is tuple:
        options = get_args(kind)
        return tuple(filled(option, name) for option in options if option is not Ellipsis)
    raise TypeError(f"{name}: no value for {kind}")


def fields_of(value: Any, prefix: str = "") -> set[str]:
    """The names in plain values, as `terms.lr.peak`."""
    if isinstance(value, dict):
        return {prefix}.union(*(fields_of(item, f"{prefix}.{key}") for key, item in value.items()))
    return {prefix}.union(*(fields_of(item, prefix) for item in value)) if isinstance(value, list) else {prefix}


def golden() -> dict[str, bytes]:
    """The bytes of the file, by the name of the class."""
    lines = GOLDEN.read_text().splitlines()
    return {name: bytes.fromhex(digits) for name, digits in (line.split() for line in lines)}


@pytest.mark.parametrize("name", CLASSES)
def test_golden_bytes_are_decoded_and_encoded_to_the_same_bytes_and_have_every_field(name: str) -> None:
    data = golden()[name]
    value = decoded(name, data)
    assert encoded(value).hex() == data.hex()
    assert fields_of(msg.unpack(msg.pack(value))) == fields_of(msg.unpack(msg.pack(filled(CLASSES[name]))))


def test_the_golden_specification_has_its_fingerprint() -> None:
    spec = decoded("RunSpec", golden()["RunSpec"])
    assert spec.identity.fingerprint() == "ab1d862182b071a5"
    assert spec.identity.layout.digest() == "887ca195484c6801"


def numbers() -> list[str]:
    """The numbers of today."""
    of_enums = [f"{kind.__name__}.{member.name} {member.value}" for kind in (Reason, BlobKind) for member in kind]
    return of_enums + [f"Codec.{codec.name} {codec.code}" for codec in CODECS.values()]


def test_a_number_keeps_its_meaning() -> None:
    assert NUMBERS.read_text().splitlines() == numbers()


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{name} {encoded(filled(cls)).hex()}\n" for name, cls in CLASSES.items()))
    NUMBERS.write_text("".join(f"{line}\n" for line in numbers()))
