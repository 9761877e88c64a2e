"""What is known of each link, and which link to probe next."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal

from farloop.coordinator.routing.fabric import UNREACHABLE_S
from farloop.coordinator.routing.fabric import suspects as slow_links
from farloop.monitoring.status import LinkStatus
from farloop.wire.messages import Connection, Transfer
from farloop.wire.meter import (
    PROBE_LEAST_S,
    PROBE_PATIENCE,
    PROBE_ROUND_TRIPS,
    Average,
    Burst,
    Insufficient,
    Measured,
    judge,
)

# --- What is known of every link: round trip, rate each way, retransmits, and how old that is.
#
# One entry a direction. Rates are the receiver's and believed only as `wire/meter.py` says; a probe replaces what was
# known, a transfer that had to be made anyway moves it. Nothing is made up: a direction that nobody measured has no
# rate.


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


class LinkTable:
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


# --- Which link is probed next, and whether now is the time. Pure: decides, and moves no byte.
#
# All probes of a star have the coordinator as one end, so there is one at a time: two would measure each other. None
# begins unless all links have been quiet for a while, and whatever anybody waits for calls it off: live traffic is a
# measurement itself, and worth more. What a probe may cost is bounded for each node and hour, and all of them together
# by a share of what the node's link has moved for the run; each direction has one small probe before that.


FRESH_S: Final = 1800.0
"""A rate this old is measured again, if nothing did so in passing."""

QUIET_S: Final = 10.0
"""How long nobody must have waited for bytes: until then downloads are held back (`router.py`), probes with them."""

AGAIN_S: Final = (30.0, 3600.0)
"""After a probe that told nothing, the next of that node waits; twice as long each time, and at most so long."""

HOUR_S: Final = 3600.0

PROBES_AN_HOUR: Final = 6
"""Of one node, in times of the budget of one."""

PROBE_SHARE: Final = 0.01
"""Of the bytes that a node's link has moved for the run, that probes of the link may take."""

FIRST_BYTES: Final = 64 << 10
"""The first probe of a direction, whatever the run has moved: enough for thin links with short round trips."""

GROWTH: Final = 16
"""A probe that told nothing is repeated only with so many times its bytes."""

_FRAMED: Final = 1.02
"""Bytes on the wire for one byte of a probe, at most."""

SLOW_S: Final = 90.0
"""Given on top of a probe's own time: a thin link takes so long for its first chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One direction that could be probed."""

    node: str
    upward: bool
    rtt_s: float
    age_s: float
    """Infinite where it was never measured."""
    changed: bool


@dataclass(slots=True, kw_only=True)
class Running:
    """A probe under way."""

    number: int
    node: str
    upward: bool
    rtt_s: float
    num_bytes: int
    began_at: float
    quiet: bool = True
    """Whether nothing else has moved since it began."""

    @property
    def ends_by(self) -> float:
        """When it is given up."""
        return self.began_at + PROBE_PATIENCE * max(PROBE_LEAST_S, PROBE_ROUND_TRIPS * self.rtt_s) + SLOW_S


class BandwidthProbe:
    """Of one coordinator."""

    def __init__(
        self,
        budget_bytes: int,
        now: float,
        *,
        quiet_s: float = QUIET_S,
        share: float = PROBE_SHARE,
        first: int = FIRST_BYTES,
    ) -> None:
        """`budget_bytes`: of one probe at most; 0 probes nothing. `share`: of what the link moves, for all of them.
        `first`: bytes of the first probe of a direction."""
        self._budget_bytes, self._quiet_s, self._share, self._first = budget_bytes, quiet_s, share, first
        self._moved: dict[str, tuple[int, int]] = {}
        """Node → bytes that its link has moved for the run, and for probes."""
        self._sizes: dict[tuple[str, bool], tuple[int, bool]] = {}
        """(node, upward) → bytes of the last probe, and whether it told the rate."""
        self._busy_at = now
        self._number = 0
        self._pause: dict[str, tuple[float, float]] = {}
        """Node → (not before, how long the next wait is) after probes that told nothing."""
        self._spent: dict[str, deque[tuple[float, int]]] = {}
        self.running: Running | None = None
        self.asked: set[tuple[str, bool]] = set()
        """(node, upward) of directions that somebody wants to know, however fresh they are."""

    @property
    def probes(self) -> bool:
        """Whether it ever does."""
        return self._budget_bytes > 0

    def busy(self, now: float) -> None:
        """Somebody waits for bytes."""
        self._busy_at = now
        if self.running is not None:
            self.running.quiet = False

    def next(self, candidates: Iterable[Candidate], now: float) -> Running | None:
        """Begin a probe if one is due and may be; it is then the running one."""
        if self.running is not None or not self._budget_bytes or now - self._busy_at < self._quiet_s:
            return None
        due = [c for c in candidates if (self._is_asked(c) or c.changed or c.age_s > FRESH_S)]
        due = [c for c in due if self._may_begin(c.node, now) and self._size(c)]
        if not due:
            return None
        chosen = max(due, key=lambda c: (self._is_asked(c), c.age_s, c.changed, c.node))
        num_bytes = self._size(chosen)
        self._number += 1
        self._spent.setdefault(chosen.node, deque()).append((now, num_bytes))
        self.running = Running(
            number=self._number,
            node=chosen.node,
            upward=chosen.upward,
            rtt_s=chosen.rtt_s,
            num_bytes=num_bytes,
            began_at=now,
        )
        return self.running

    def over(self, now: float, *, learned: bool) -> None:
        """The running one has ended; `learned`: it told the rate."""
        running, self.running = self.running, None
        if running is None:
            return
        if running.quiet or learned:
            self._sizes[running.node, running.upward] = (running.num_bytes, learned)
        else:  # it was called off: what it was to cost says nothing
            self._sizes.setdefault((running.node, running.upward), (0, True))
        if learned:
            self._pause.pop(running.node, None)
            self.asked.discard((running.node, running.upward))
            return
        first, longest = AGAIN_S
        _, wait_s = self._pause.get(running.node, (0.0, first))
        self._pause[running.node] = (now + wait_s, min(2 * wait_s, longest))

    def keep(self, nodes: Iterable[str]) -> None:
        """Only these are still known."""
        known = set(nodes)
        self._pause = {node: pause for node, pause in self._pause.items() if node in known}
        self._spent = {node: spent for node, spent in self._spent.items() if node in known}
        self._moved = {node: moved for node, moved in self._moved.items() if node in known}
        self._sizes = {ends: size for ends, size in self._sizes.items() if ends[0] in known}
        self.asked = {(node, upward) for node, upward in self.asked if node in known}

    def has_moved(self, node: str, run_bytes: int, probe_bytes: int) -> None:
        """So many more bytes have crossed a node's link, both ways: for the run, and of probes."""
        before = self._moved.get(node, (0, 0))
        self._moved[node] = (before[0] + run_bytes, before[1] + probe_bytes)

    def _size(self, candidate: Candidate) -> int:
        """How many bytes a probe may have now; 0 where that is too few to be worth it."""
        run_bytes, probe_bytes = self._moved.get(candidate.node, (0, 0))
        allowed = int(min(self._budget_bytes, max(0.0, self._share * run_bytes - probe_bytes) / _FRAMED))
        last, learned = self._sizes.get((candidate.node, candidate.upward), (0, True))
        if (candidate.node, candidate.upward) not in self._sizes:
            return max(allowed, min(self._first, self._budget_bytes))
        least = min(self._budget_bytes, max(self._first, last if learned else GROWTH * last))
        return allowed if allowed >= least else 0

    def _is_asked(self, candidate: Candidate) -> bool:
        return (candidate.node, candidate.upward) in self.asked

    def _may_begin(self, node: str, now: float) -> bool:
        if now < self._pause.get(node, (now, 0.0))[0]:
            return False
        spent = self._spent.get(node, deque())
        while spent and now - spent[0][0] > HOUR_S:
            spent.popleft()
        return sum(num_bytes for _, num_bytes in spent) < PROBES_AN_HOUR * self._budget_bytes
