"""How fast an end sends: a rate of which blobs wait for their part, and control messages take theirs at once."""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

LEAST_BITS_PER_S: Final = 100e3
"""Below it a chunk takes so long that its receiver may give the blob up (`Timing.blob_idle_s`)."""

MOST_BITS_PER_S: Final = 1e12
DEPTH_S: Final = 0.05  # what the bucket holds, in time at its rate; a chunk takes as much, or is the least one

_LEAST_CHUNK = 4 << 10
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_DAY = 24 * 60
_CLOCK = r"\s*(\d{1,2})(?:[:.h](\d{1,2})|(\d\d))?(?::\d\d)?\s*h?\s*"  # 08:00, 8.00, 8h, 0800 or 08:00:00

_log = logging.getLogger(__name__)


def parse_rate(text: str) -> float:
    """Bytes a second of `20mbit`. Raises ValueError, with the nearest valid value."""
    if (exact := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit", text)) is None:
        what = "is not a rate with its unit kbit, mbit or gbit"
        raise ValueError(f"{text!r} {what}; the nearest is {nearest_rate(text)}")
    bits_per_s = float(exact[1]) * _UNITS[exact[2]]
    if not LEAST_BITS_PER_S <= bits_per_s <= MOST_BITS_PER_S:
        raise ValueError(f"{text} is not from 100kbit to 1000gbit; the nearest is {nearest_rate(text)}")
    return bits_per_s / 8


def nearest_rate(text: str) -> str:
    """The valid rate that a text may mean: a number without a unit is in Mbit/s."""
    meant = re.search(r"((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([kKmMgG]?)(B|[bB]yte)?", text)
    number, unit, of_bytes = meant.groups() if meant is not None else ("20", "m", None)
    unit = unit.lower() or "m"
    bits_per_s = float(number) * _UNITS[unit] * (8 if of_bytes else 1)
    if bits_per_s <= LEAST_BITS_PER_S:
        return "100kbit"
    if bits_per_s >= MOST_BITS_PER_S:
        return "1000gbit"
    if bits_per_s >= 1e6 * _UNITS[unit]:  # six digits are written without an exponent
        unit = "g"
    return f"{bits_per_s / _UNITS[unit]:.6g}{unit}bit"


def parse_hours(text: str) -> tuple[int, int]:
    """(from, until) in minutes of the day, of `08:00-18:00`. Raises ValueError, with the nearest valid value."""
    if (found := re.fullmatch(rf"\s*{_CLOCK}(?:-|–|to){_CLOCK}", text)) is None:
        raise ValueError(f"{text!r} are not hours of the day; expected a form such as 08:00-18:00")
    hours = [int(part or 0) for part in found.groups()]
    begin, end = (min(60 * hour + min(minute or digits, 59), _DAY) for hour, minute, digits in (hours[:3], hours[3:]))
    near = f"{_clock(begin)}-{_clock(end)}"
    if begin == end and max(hours[0], hours[3]) > 24:
        raise ValueError(f"{text!r} are not hours of the day, which ends at 24:00; expected a form such as 08:00-18:00")
    if begin % _DAY == end % _DAY:
        raise ValueError(f"{text!r} is the whole day or nothing of it; for the whole day set max_uplink alone")
    if text != near:
        raise ValueError(f"{text!r} are not hours of the day; the nearest are {near}")
    return begin % _DAY, end


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkLimit:
    """What an end may send in a second, and in some hours of the day."""

    bytes_per_s: float = math.inf
    quiet_hours: tuple[int, int] | None = None  # from, until: minutes of the day in local time, over midnight as well
    quiet_bytes_per_s: float = math.inf

    @classmethod
    def parse(cls, max_uplink: str, quiet_hours: str, quiet_uplink: str) -> Self:
        """Of the settings; an empty text is none. Raises ValueError."""
        if bool(quiet_hours) != bool(quiet_uplink):
            raise ValueError("quiet_hours and quiet_uplink go together, as 08:00-18:00 and 2mbit")
        limit = cls(
            bytes_per_s=parse_rate(max_uplink) if max_uplink else math.inf,
            quiet_hours=parse_hours(quiet_hours) if quiet_hours else None,
            quiet_bytes_per_s=parse_rate(quiet_uplink) if quiet_uplink else math.inf,
        )
        if quiet_uplink and limit.quiet_bytes_per_s > limit.bytes_per_s:
            what = f"quiet_uplink {quiet_uplink} is above max_uplink {max_uplink}, which holds at any time"
            raise ValueError(f"{what}; the nearest is {max_uplink}")
        return limit

    @property
    def quiet_text(self) -> str:
        """The quiet hours as they are set; empty for none."""
        return "-".join(map(_clock, self.quiet_hours)) if self.quiet_hours else ""

    def __bool__(self) -> bool:
        return self != UplinkLimit()

    def is_quiet(self, minute: int) -> bool:
        """Whether this minute of the day belongs to the quiet hours. They begin and end by the clock on the wall: on
        the day on which it is put forward or back they are shorter or longer."""
        if self.quiet_hours is None:
            return False
        begin, end = self.quiet_hours
        return begin <= minute < end if begin < end else minute >= begin or minute < end

    def rate(self, minute: int) -> float:
        """Bytes a second. In quiet hours the lower rate holds."""
        return min(self.bytes_per_s, self.quiet_bytes_per_s) if self.is_quiet(minute) else self.bytes_per_s


class Uplink:
    """What all sessions of an end may send together. Chunks of blobs leave while the bucket is not in debt. Control
    messages leave at once and are counted, so that blobs make room for them: by what ZeroMQ sends, without TCP/IP
    headers."""

    def __init__(self, limit: UplinkLimit, minute: Callable[[], int], now: float) -> None:
        """`minute`: of the day, in local time."""
        self._limit, self._minute = limit, minute
        self._rate = math.inf  # bytes a second, at the last look
        self._level, self._filled_at = 0.0, now
        self._held_since: float | None = None
        self.held_s = 0.0  # seconds in which blobs had bytes to send, and waited for this
        self._fill(now)
        self._level = self._depth

    @property
    def bytes_per_s(self) -> float:
        """The rate that holds now. Any thread."""
        return self._limit.rate(self._minute())

    @property
    def is_quiet(self) -> bool:
        """Whether these are the quiet hours. Any thread."""
        return self._limit.is_quiet(self._minute())

    @property
    def chunk_bytes(self) -> int | None:
        """The largest chunk that may leave; None for any."""
        if math.isinf(self._rate):
            return None
        return max(1 << int(self._depth).bit_length() - 1, _LEAST_CHUNK)

    @property
    def free_at(self) -> float:
        """When the next chunk may leave, if nothing else is sent before."""
        return self._filled_at + max(0.0, -self._level) / self._rate

    def allows(self, now: float) -> bool:
        self._fill(now)
        allowed = self._level > -1.0  # a byte: rounding must not make it wait for nothing
        if self._held_since is not None:
            self.held_s += now - self._held_since
        self._held_since = None if allowed else now
        return allowed

    def sent(self, num_bytes: int) -> None:
        if not math.isinf(self._rate):
            self._level -= num_bytes

    @property
    def _depth(self) -> float:
        return self._rate * DEPTH_S

    def _fill(self, now: float) -> None:
        minute = self._minute() if self._limit.quiet_hours else 0
        rate = self._limit.rate(minute)
        if rate != self._rate:
            _log.info("uplink limit mbit=%g quiet_hours=%d", rate * 8e-6, self._limit.is_quiet(minute))
            self._rate, self._level = rate, 0.0
        elif not math.isinf(rate):
            self._level = min(self._level + rate * (now - self._filled_at), self._depth)
        self._filled_at = now
