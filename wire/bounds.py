"""Bounds of every number, text and list in a node's messages, checked before anything else reads them.

The rules go by the type of a field, so a new field is bounded too; the few exceptions go by its name. Bounds that
depend on the run (granted samples, possible inner steps) are checked by `coordinator/decide/admission.py`.
"""

import dataclasses
import math
from enum import Enum
from typing import Any, Final, TypeVar

from farloop.algo.spec import fields_of
from farloop.algo.terms import Terms
from farloop.wire.machine_info import Inventory, printable, trimmed
from farloop.wire.reasons import OutOfBounds

MOST_NUMBER: Final = (1 << 63) - 1
"""Of all whole numbers but digests. Sums of many fit into the 64 bits of a record only because each was checked."""

LEAST_NUMBER: Final = -(1 << 63)
"""What is below 0 and cannot be is refused with a reason by who knows what the number means."""

MOST_DIGEST: Final = (1 << 64) - 1

MOST_TOKENS: Final = 1 << 32
"""Of one inner step of one node, where the coordinator does not grant the samples: a hundred times the largest batch
in use. How much of a claim counts depends on the other nodes (`algo/weights.py`)."""

MOST_CHARACTERS: Final = 128  # of a text that means something: a name, a codec, a fingerprint
MOST_WORDS: Final = 1000  # characters of a text that is only shown; what is longer is cut
MOST_ITEMS: Final = 1 << 16  # Of one list. No model has as many fragments.

_DIGESTS: Final = frozenset({"digest", "frozen", "unsaved"})
_SHOWN: Final = frozenset({"detail", "device"})
_MAY_BE_NAN: Final = frozenset({"loss"})  # a loss that is not finite is what the node measured

_T = TypeVar("_T")


def bounded(message: _T) -> _T:
    """The message, with the texts that are only shown cut to their length.
    Raises OutOfBounds: something in it is out of bounds; names the field and the nearest value that is not."""
    found: _T = _checked_fields(message, type(message).__name__)
    return found


def _checked(value: Any, parent: str, name: str) -> Any:
    """The value of a field. `parent`: where that is; made into a text only where one is needed."""
    match value:
        case None | bool() | bytes() | Enum():
            return value
        case int():
            most = MOST_DIGEST if name in _DIGESTS else MOST_NUMBER
            if not LEAST_NUMBER <= value <= most:
                raise OutOfBounds(f"{parent}.{name} is {value}: expected a number from 0 to {most}")
            return value
        case float():
            if not math.isfinite(value) and name not in _MAY_BE_NAN:
                raise OutOfBounds(f"{parent}.{name} is {value}: expected a finite number")
            return value
        case str() if name in _SHOWN:
            return printable(value, MOST_WORDS)
        case str():
            if len(value) > MOST_CHARACTERS:
                raise OutOfBounds(f"{parent}.{name} has {len(value)} characters: at most {MOST_CHARACTERS} are allowed")
            return value
        case tuple():
            if len(value) > MOST_ITEMS:
                raise OutOfBounds(f"{parent}.{name} has {len(value)} items: at most {MOST_ITEMS} are allowed")
            return tuple(_checked(item, parent, name) for item in value)
        case Inventory():
            return _checked_fields(trimmed(value), f"{parent}.{name}")
        case Terms():
            flat = value.flat()
            where = f"{parent}.{name}"
            return value.replace(**{flat_name: _checked(flat[flat_name], where, flat_name) for flat_name in flat})
        case _:
            return _checked_fields(value, f"{parent}.{name}")


def _checked_fields(value: Any, where: str) -> Any:
    fields, changed = fields_of(value.__class__), {}
    assert fields is not None, where
    for field in fields:
        held = getattr(value, field.name)
        found = _checked(held, where, field.name)
        if found is not held and found != held:
            changed[field.name] = found
    return dataclasses.replace(value, **changed) if changed else value
