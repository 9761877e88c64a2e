"""The rate of a link, measured from arrivals at its receiver, or a reason why it cannot be told.

The first round trips of a transfer say little about its link: TCP's slow start fills them, and a burst shorter than the
bandwidth-delay product shows how packets were spaced, not the link's rate. So only the second half of the bytes counts,
it must last for two round trips, and its two halves must agree. Everything else is `Insufficient`, with the reason.
A sender's clock is not used: what it has handed to its kernel has not arrived.

`Meter` gathers arrivals and makes a `Burst` of each busy time; `judge` needs the round-trip time. Time is an argument.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

HALF_ROUND_TRIPS: Final = 2.0
"""Round trips that the second half must last: then its bytes are at least two bandwidth-delay products."""

HALF_LEAST_S: Final = 0.01  # ... and so many seconds: below it the machine's own scheduling is measured.
HALF_LEAST_CHUNKS: Final = 4  # ... and so many arrivals.
AGREEMENT: Final = 0.15  # by how much of the larger the rates of the last two quarters may differ

PROBE_LEAST_S: Final = 1.5
PROBE_ROUND_TRIPS: Final = 12.0  # a probe lasts at least the longer of both ...

PROBE_PATIENCE: Final = 3.0
"""... and where nothing can be said by then, at most so many times as long: a long, fat link starts slowly."""

ALPHA: Final = 0.3  # weight of the newest measurement (exponentially weighted moving average)
DRIFT: Final = 0.35  # |ln(new / known)| beyond which a link seems to have changed ...
DRIFTS: Final = 3  # ... and measurements in a row that must say so, before the old ones are forgotten.
_MOST_ARRIVALS: Final = 512  # kept of one busy time; beyond it, every second one is

_KEPT_BURSTS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What arrived in one busy time, as far as it tells of the link."""

    num_bytes: int  # all of it, but for what the first arrival brought: when that began is unknown
    seconds: float  # from the first arrival to the last
    half_bytes: int  # of its second half, by bytes
    half_s: float
    half_chunks: int
    third_bytes_per_s: float  # rate of its third quarter ...
    fourth_bytes_per_s: float  # ... and of its last.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A rate that can be believed."""

    bytes_per_s: float
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Insufficient:
    """Nothing can be said of the link's rate, and why."""

    why: str


def judge(burst: Burst, rtt_s: float) -> Measured | Insufficient:
    """The link's rate in bytes a second, if the burst shows it. `rtt_s`: the link's round trip; the shortest that was
    seen, for a long one is a queue."""
    if burst.half_chunks < HALF_LEAST_CHUNKS or not 0.0 < burst.half_s < math.inf:
        return Insufficient(why=f"{burst.num_bytes} bytes came in too few pieces")
    rate = burst.half_bytes / burst.half_s
    if burst.num_bytes < rate * rtt_s:
        return Insufficient(why=f"{burst.num_bytes} bytes are less than one bandwidth-delay product")
    if burst.half_s < HALF_ROUND_TRIPS * rtt_s:
        return Insufficient(why=f"over before slow start could be: {burst.half_s:.3g} s, round trip {rtt_s:.3g} s")
    if burst.half_s < HALF_LEAST_S:
        return Insufficient(why=f"{1000 * burst.half_s:.3g} ms are too short to be timed here")
    third, fourth = burst.third_bytes_per_s, burst.fourth_bytes_per_s
    if not math.isfinite(third + fourth) or abs(fourth - third) > AGREEMENT * max(third, fourth):
        return Insufficient(why=f"not steady: {third * 8e-6:.3g} Mbit/s, then {fourth * 8e-6:.3g}")
    return Measured(bytes_per_s=rate, num_bytes=burst.half_bytes, seconds=burst.half_s)


def enough(burst: Burst, rtt_s: float) -> bool:
    """Whether a probe may end: what has come tells enough, or so much time has passed that more would not help."""
    least_s = max(PROBE_LEAST_S, PROBE_ROUND_TRIPS * rtt_s)
    if burst.seconds < least_s:
        return False
    return burst.seconds >= PROBE_PATIENCE * least_s or isinstance(judge(burst, rtt_s), Measured)


class Meter:
    """Arrivals of one direction of a session."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        """(time, bytes so far) of the present busy time; the bytes of its first arrival are the origin."""
        self._skip = 1
        self._since = 0
        """Arrivals since the last point that was kept."""
        self._bytes = 0
        self._bursts: deque[Burst] = deque(maxlen=_KEPT_BURSTS)

    @property
    def busy(self) -> bool:
        """Whether something has come of what is being measured."""
        return bool(self._points)

    def arrived(self, num_bytes: int, now: float) -> None:
        if not self._points:
            self._points, self._bytes, self._skip, self._since = [(now, 0)], 0, 1, 0
            return
        self._bytes += num_bytes
        self._since += 1
        if self._since >= self._skip:
            self._points.append((now, self._bytes))
            self._since = 0
        if len(self._points) > _MOST_ARRIVALS:
            del self._points[1::2]
            self._skip *= 2

    def end_burst(self) -> None:
        """Nothing more is on its way: the busy time has ended.

        One of which a quarter came in no measurable time tells nothing, and is not kept: a message holds finite numbers
        only, so an infinite rate would end the session of whoever reports it.
        """
        burst = self.burst()
        if burst is not None and math.isfinite(burst.third_bytes_per_s + burst.fourth_bytes_per_s):
            self._bursts.append(burst)
        self._points = []

    def forget(self) -> None:
        """What came was held up by something else than the link: it says nothing of it."""
        self._points = []

    def burst(self) -> Burst | None:
        """The present busy time so far; None before there is anything to tell."""
        return burst_of(self._points)

    @property
    def has_bursts(self) -> bool:
        """Whether `pop_bursts` has any."""
        return bool(self._bursts)

    def pop_bursts(self) -> list[Burst]:
        """Busy times that have ended since the last call."""
        bursts = list(self._bursts)
        self._bursts.clear()
        return bursts


def burst_of(points: list[tuple[float, int]]) -> Burst | None:
    """A busy time from (seconds, bytes since the first) of its arrivals; None for fewer than three."""
    if len(points) < 3:
        return None
    (began, _), (ended, total) = points[0], points[-1]
    half, quarter = _at(points, total / 2), _at(points, 3 * total / 4)
    return Burst(
        num_bytes=total,
        seconds=ended - began,
        half_bytes=total - points[half][1],
        half_s=ended - points[half][0],
        half_chunks=len(points) - 1 - half,
        third_bytes_per_s=_rate(points[half], points[quarter]),
        fourth_bytes_per_s=_rate(points[quarter], points[-1]),
    )


def _at(points: list[tuple[float, int]], num_bytes: float) -> int:
    """The first arrival by which so many bytes had come; never the last of all."""
    return min(next(index for index, (_, so_far) in enumerate(points) if so_far >= num_bytes), len(points) - 2)


def _rate(first: tuple[float, int], last: tuple[float, int]) -> float:
    seconds = last[0] - first[0]
    return (last[1] - first[1]) / seconds if seconds > 0 else math.inf


class Average:
    """A link's rate over its measurements: moves slowly, and at once where the link has changed."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._strange: list[float] = []  # measurements in a row that are all too high, or all too low

    def add(self, value: float) -> bool:
        """Take a measurement in; whether the link has changed, and is worth another look."""
        if self.value is None:
            self.value = value
            return False
        drift = math.log(value / self.value)
        if abs(drift) > DRIFT and all((strange > self.value) == (drift > 0) for strange in self._strange):
            self._strange.append(value)
        elif abs(drift) > DRIFT:
            self._strange = [value]
        else:
            self._strange = []
        if len(self._strange) >= DRIFTS:
            self.value, self._strange = sorted(self._strange)[DRIFTS // 2], []
            return True
        self.value += ALPHA * (value - self.value)
        return False

    def set(self, value: float) -> None:
        """A measurement that was made for its own sake: what was before does not count."""
        self.value, self._strange = value, []
