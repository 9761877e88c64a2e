"""Numbers as text with three digits and a unit, for pages, terminals and reports; curves of a bounded length; and how
what people write is read."""

import difflib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

_T = TypeVar("_T")

NOTHING = "–"  # stands where there is no number yet
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def size_text(num_bytes: float) -> str:
    """Bytes in decimal units: `834 B`, `1.20 kB`, `12.3 MB`."""
    return _scaled(num_bytes, _SIZES) if num_bytes >= 999.5 else f"{num_bytes:.0f} B"


def rate_text(bits_per_s: float) -> str:
    """`25 Gbit/s`."""
    units = (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6))
    unit, size = next(((u, s) for u, s in units if bits_per_s >= 0.9995 * s), ("kbit/s", 1e3))
    return f"{bits_per_s / size:.3g} {unit}"


def count_text(count: float) -> str:
    """A number of things: `1,240` up to ten thousand, then `12.4 k`, `3.10 M`."""
    return _scaled(count, _COUNTS) if count >= 9_999.5 else f"{count:,.0f}"


def speed_text(per_s: float) -> str:
    """Things a second, without the unit: `834`, `12.4 k`; a dash for none."""
    return count_text(per_s) if per_s > 0 else NOTHING


def duration_text(seconds: float) -> str:
    """Two units at most: `0.4s`, `42s`, `1m 22s`, `2h 05m`, `3d 04h`."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    for size, unit, below, below_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // below:02d}{below_unit}"
    return f"{whole}s"


def seconds_text(seconds: float) -> str:
    """Three digits: `1.03 s`, `33.4 s`, `15.2 ms`, `2 h 5 min`."""
    if seconds >= 3600.0:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 600.0:
        return f"{seconds / 60.0:.1f} min"
    if seconds >= 1.0:
        return f"{seconds:#.3g}".rstrip(".") + " s"
    return "0 s" if seconds == 0.0 else f"{1e3 * seconds:.3g} ms"


def percent_text(share: float) -> str:
    """A share of one: `97.4%`; whole numbers at the ends. Never rounds up to 100."""
    if share >= 1 or share <= 0:
        return f"{100 * share:.0f}%"
    return f"{math.floor(1000 * share) / 10:.1f}%"


def factor_text(factor: float) -> str:
    """A ratio: `226×`, `12.4×`, `1.03×`."""
    if not math.isfinite(factor):
        return NOTHING
    return f"{_three_digits(factor)}×"


def loss_text(loss: float | None) -> str:
    """Three decimals, a dash for none."""
    return NOTHING if loss is None else f"{loss:.3f}"


def plural(count: int, thing: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def ascii_number(text: str) -> str:
    """For `float` and `int`, which would read 1_000 and the digits of other scripts, too. Raises ValueError."""
    if "_" in text or not text.isascii():
        raise ValueError(f"{text!r} is not a number in the digits 0 to 9, as 1000")
    return text


def is_digits(text: str) -> bool:
    """Whether it is a whole number of 0 or more, in the digits 0 to 9."""
    return text.isascii() and text.isdecimal()


def nearest(word: str, words: Iterable[str]) -> str:
    """`did you mean steps?`, or a list of all words."""
    known = list(words)
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"


def few_of(words: Sequence[str], most: int) -> str:
    """`a, b and 7 more`."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def range_text(least: float | None, most: float | None) -> str:
    """`1 to 64`, `1 or more`, `at most 64`."""
    if least is None:
        return f"at most {most}"
    return f"{least} or more" if most in (None, math.inf) else f"{least} to {most}"


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A rule of a setting's values, beside its type: `Annotated[int, AtLeast(1)]`. Called, it raises ValueError."""

    least: float
    most: float = math.inf
    wanted: str = ""  # in words, as "0 to 1, as 0.5"

    def __call__(self, value: float) -> None:
        if not self.least <= value <= self.most:
            raise ValueError(f"expected {self.wanted or range_text(self.least, self.most)}, got {value}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """A rule as `AtLeast`: the words that a setting can have."""

    words: Collection[str]

    def __call__(self, word: str) -> None:
        if word not in self.words:
            raise ValueError(f"there is no {word!r}; {nearest(word, self.words)}")


def filled(values: Sized) -> None:
    """A rule as `AtLeast`: something is there."""
    if not len(values):
        raise ValueError("there are none; name at least one")


def check_duration(seconds: float) -> None:
    """Raises ValueError unless it is above 0."""
    if seconds <= 0.0:
        raise ValueError(f"expected seconds above 0, as 600, got {seconds:g}")


TIME = AtLeast(0.0, wanted="0 seconds or more, as 60")

# Of numbers that are finite.
LEAST_0 = AtLeast(0.0, most=sys.float_info.max, wanted="0 or more")
LEAST_1 = AtLeast(1.0, most=sys.float_info.max, wanted="1 or more")
ABOVE_0 = AtLeast(math.ulp(0.0), most=sys.float_info.max, wanted="a number above 0")
BELOW_1 = AtLeast(0.0, most=math.nextafter(1.0, 0.0), wanted="0 or more and below 1")
Count = Annotated[int, LEAST_1]
NotNegative = Annotated[float, LEAST_0]
Positive = Annotated[float, ABOVE_0]


class Checked:
    """Base of a dataclass whose fields have rules beside their types; a field that is None is open."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # where a file is read as one

    def __post_init__(self) -> None:
        """Raise ValueError, a sentence that begins with the field."""
        for name, rule in _rules_of(type(self)):  # type: ignore[arg-type]  # a class is hashable
            try:
                if (value := getattr(self, name)) is not None:
                    rule(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


@cache
def _rules_of(kind: type[Checked]) -> list[tuple[str, Callable[[Any], None]]]:
    """(field, rule) in the order of the fields."""
    hints = get_type_hints(kind, include_extras=True)
    return [(name, rule) for name, hint in hints.items() for rule in getattr(hint, "__metadata__", ())]


def thinned(points: Sequence[_T], most: int) -> Sequence[_T]:
    """At most so many of them, evenly spread; the first and the last are kept."""
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    # Half a digit below a unit already rounds up to it: 999,996 bytes are 1.00 MB, not 1000 kB.
    size, unit = next((unit for unit in units if value >= unit[0] * 0.9995), units[-1])
    return f"{_three_digits(value / size)} {unit}"


def _three_digits(value: float) -> str:
    """Three significant digits, without an exponent, however large."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
