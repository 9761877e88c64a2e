"""What is known of every link: round trip, rate each way, retransmits, and how old that is. Pure.

One entry a direction. Rates are the receiver's and believed only as `wire/meter.py` says; a probe replaces what was
known, a transfer that had to be made anyway moves it. Nothing is made up: a direction that nobody measured has no rate.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal

from farloop.coordinator.routing.fabric import UNREACHABLE_S
from farloop.coordinator.routing.fabric import suspects as slow_links
from farloop.monitoring.status import LinkStatus
from farloop.wire.link_messages import Connection, Transfer
from farloop.wire.meter import Average, Burst, Insufficient, Measured, judge

COORDINATOR: Final = "coordinator"
"""The coordinator's name as an end of a link."""

MOST_LINKS: Final = 4096
"""Directions that are remembered; beyond it the one that was measured longest ago is forgotten."""

Means = Literal["probe", "transfer", ""]
"""A probe, or whatever had to be sent anyway."""

Ends = tuple[str, str]
"""(from, to)."""


@dataclass(slots=True)
class _Direction:
    """One direction of a link."""

    rate: Average = field(default_factory=Average)
    measured_by: Means = ""
    measured_at: float | None = None
    why: str = ""
    changed: bool = False
    """The last measurements say something else than those before: worth a probe."""
    connection: Connection | None = None


class Matrix:
    """All links of one coordinator's run."""

    def __init__(self) -> None:
        self._directions: dict[Ends, _Direction] = {}
        self._round_trips: dict[frozenset[str], tuple[float, float]] = {}
        """Ends → (least, median), seconds."""

    def round_trips(self, one: str, other: str, seconds: Sequence[float]) -> None:
        """The last echoes between two places."""
        if seconds:
            self._round_trips[frozenset((one, other))] = (min(seconds), median(seconds))

    def rtt_s(self, one: str, other: str) -> float | None:
        """The least of the last round trips; None before there was one. What is longer stood in a queue."""
        found = self._round_trips.get(frozenset((one, other)))
        return None if found is None else found[0]

    def burst(self, ends: Ends, burst: Burst, now: float, *, probe: bool) -> Measured | Insufficient:
        """Something came over a link; what it tells of it."""
        direction = self._direction(ends)
        rtt_s = self.rtt_s(*ends)
        if rtt_s is None:
            return Insufficient(why="the round trip is not known yet")
        found = judge(burst, rtt_s)
        if isinstance(found, Insufficient):
            direction.why = found.why
            return found
        direction.why, direction.measured_at = "", now
        if probe:
            direction.rate.set(found.bytes_per_s)
            direction.measured_by, direction.changed = "probe", False
        else:
            direction.changed = direction.rate.add(found.bytes_per_s) or direction.changed
            direction.measured_by = "transfer"
        return found

    def transfer(self, ends: Ends, transfer: Transfer, now: float) -> None:
        """A node told how long a message took; what cannot be is passed over."""
        rate = transfer.num_bytes / transfer.seconds if transfer.seconds > 0.0 else 0.0
        if 0.0 < rate < math.inf:
            direction = self._direction(ends)
            direction.changed = direction.rate.add(rate) or direction.changed
            direction.measured_by, direction.measured_at, direction.why = "transfer", now, ""

    def connection(self, ends: Ends, connection: Connection) -> None:
        """What the sender's kernel says of the connection."""
        numbers = (connection.rtt_s, connection.least_rtt_s, connection.delivered_bytes_per_s)
        if all(math.isfinite(number) and number >= 0 for number in numbers) and connection.segments >= 0:
            self._direction(ends).connection = connection

    def age_s(self, ends: Ends, now: float) -> float:
        """Since the rate was measured last; infinite where it never was."""
        direction = self._directions.get(ends)
        return math.inf if direction is None or direction.measured_at is None else now - direction.measured_at

    def changed(self, ends: Ends) -> bool:
        """Whether the link seems to have changed since the last probe."""
        return ends in self._directions and self._directions[ends].changed

    def rate(self, ends: Ends) -> float | None:
        """Bytes a second; None where nobody measured it."""
        direction = self._directions.get(ends)
        return None if direction is None else direction.rate.value

    def keep(self, places: Collection[str]) -> None:
        """Only these are still somebody."""
        here = {*places, COORDINATOR}
        self._directions = {ends: known for ends, known in self._directions.items() if set(ends) <= here}
        self._round_trips = {ends: known for ends, known in self._round_trips.items() if ends <= here}

    def rows(self, now: float) -> list[LinkStatus]:
        """Everything, as it is told: by ends."""
        doubted = suspects({ends: rate for ends in self._directions if (rate := self.rate(ends)) is not None})
        named = {ends for pair in self._round_trips for ends in _both(pair)}
        return [self._row(ends, now, ends in doubted) for ends in sorted(self._directions.keys() | named)]

    def _row(self, ends: Ends, now: float, suspect: bool) -> LinkStatus:
        known = self._directions.get(ends) or _Direction()
        least, usual = self._round_trips.get(frozenset(ends), (None, None))
        connection, age_s = known.connection, self.age_s(ends, now)
        return {
            "from": ends[0],
            "to": ends[1],
            "rtt_s": least,
            "rtt_median_s": usual,
            "bytes_per_s": known.rate.value,
            "provenance": "probe" if known.measured_by else "",
            "measured_by": known.measured_by,
            "age_s": age_s if math.isfinite(age_s) else None,
            "why": known.why,
            "retransmit_ratio": retransmit_ratio(connection),
            "congestion": connection.congestion if connection else "",
            "suspect": suspect,
        }

    def _direction(self, ends: Ends) -> _Direction:
        if ends not in self._directions and len(self._directions) >= MOST_LINKS:
            oldest = min(self._directions, key=lambda known: self._directions[known].measured_at or -math.inf)
            del self._directions[oldest]
        return self._directions.setdefault(ends, _Direction())


def retransmit_ratio(connection: Connection | None) -> float | None:
    """Segments sent again, as a share of all; None where nothing was sent."""
    if connection is None or not connection.segments:
        return None
    return min(1.0, max(0, connection.retransmits) / connection.segments)


def suspects(rates: Mapping[Ends, float]) -> set[Ends]:
    """Directions that take a byte far longer than the best way over one other place, as a planner doubts them too."""
    places = sorted({place for ends in rates for place in ends})
    byte_s = [[1.0 / rates[u, v] if (u, v) in rates else UNREACHABLE_S for v in places] for u in places]
    return {(places[u], places[v]) for u, v in slow_links(byte_s)}


def _both(pair: frozenset[str]) -> list[Ends]:
    one, other = sorted(pair)
    return [(one, other), (other, one)]
