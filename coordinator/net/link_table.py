"""Measurements of each link, and which link to probe next.

Each direction of a link has its own entry. Rates come from the receiver, and only measurements that `wire/meter.py`
accepts count: a probe replaces the rate, a transfer moves it. A direction that was never measured has no rate.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from statistics import median
from typing import Final, Literal

from farloop.coordinator.settings import PROBE_SHARE, QUIET_S
from farloop.monitoring.status import LinkStatus
from farloop.planner.anomalies import UNREACHABLE_S
from farloop.planner.anomalies import suspects as slow_links
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

COORDINATOR: Final = "coordinator"  # name of the coordinator as an end of a link
MOST_LINKS: Final = 4096  # most entries; beyond it the one with the oldest measurement is dropped
Means = Literal["probe", "transfer", ""]  # how a rate was measured: by a probe, or by transfers of the run
Ends = tuple[str, str]  # (from, to)


@dataclass(slots=True)
class _Direction:
    rate: Average = field(default_factory=Average)
    measured_by: Means = ""
    measured_at: float | None = None
    why: str = ""
    changed: bool = False  # the last measurements differ from earlier ones: a probe is due
    connection: Connection | None = None

    def on_transfer(self, bytes_per_s: float, now: float) -> None:
        """A transfer of the run measured the rate."""
        self.changed = self.rate.add(bytes_per_s) or self.changed
        self.measured_by, self.measured_at, self.why = "transfer", now, ""


class LinkTable:
    def __init__(self) -> None:
        self._directions: dict[Ends, _Direction] = {}
        self._round_trips: dict[frozenset[str], tuple[float, float]] = {}  # ends → (least, median), seconds

    def round_trips(self, one: str, other: str, seconds: Sequence[float]) -> None:
        """Round trips of the last echoes between two ends."""
        if seconds:
            self._round_trips[frozenset((one, other))] = (min(seconds), median(seconds))

    def rtt_s(self, one: str, other: str) -> float | None:
        """The shortest of the last round trips: longer ones include queueing. None before the first."""
        found = self._round_trips.get(frozenset((one, other)))
        return None if found is None else found[0]

    def burst(self, ends: Ends, burst: Burst, now: float, *, probe: bool) -> Measured | Insufficient:
        """A burst of bytes arrived over a link. Returns what it measures."""
        direction = self._direction(ends)
        rtt_s = self.rtt_s(*ends)
        if rtt_s is None:
            return Insufficient(why="the round trip is not known yet")
        found = judge(burst, rtt_s)
        if isinstance(found, Insufficient):
            direction.why = found.why
            return found
        if probe:
            direction.rate.set(found.bytes_per_s)
            direction.measured_by, direction.measured_at, direction.why = "probe", now, ""
            direction.changed = False
        else:
            direction.on_transfer(found.bytes_per_s, now)
        return found

    def transfer(self, ends: Ends, transfer: Transfer, now: float) -> None:
        """A node reported how long a message took. Impossible reports are ignored."""
        rate = transfer.num_bytes / transfer.seconds if transfer.seconds > 0.0 else 0.0
        if 0.0 < rate < math.inf:
            self._direction(ends).on_transfer(rate, now)

    def connection(self, ends: Ends, connection: Connection) -> None:
        numbers = (connection.rtt_s, connection.least_rtt_s, connection.delivered_bytes_per_s)
        if all(math.isfinite(number) and number >= 0 for number in numbers) and connection.segments >= 0:
            self._direction(ends).connection = connection

    def age_s(self, ends: Ends, now: float) -> float:
        """Seconds since the last measurement; infinite without one."""
        direction = self._directions.get(ends)
        return math.inf if direction is None or direction.measured_at is None else now - direction.measured_at

    def changed(self, ends: Ends) -> bool:
        """Whether the rate seems to have changed since the last probe."""
        return ends in self._directions and self._directions[ends].changed

    def measured(self) -> list[Ends]:
        """Directions whose rate was measured."""
        return [ends for ends, direction in self._directions.items() if direction.rate.value is not None]

    def rate(self, ends: Ends) -> float | None:
        """Bytes per second; None if it was never measured."""
        direction = self._directions.get(ends)
        return None if direction is None else direction.rate.value

    def retain(self, places: Collection[str]) -> None:
        """Forget all links but those of these ends and the coordinator."""
        here = {*places, COORDINATOR}
        self._directions = {ends: known for ends, known in self._directions.items() if set(ends) <= here}
        self._round_trips = {ends: known for ends, known in self._round_trips.items() if ends <= here}

    def rows(self, now: float) -> list[LinkStatus]:
        doubted = suspects({ends: rate for ends in self.measured() if (rate := self.rate(ends)) is not None})
        named = {ends for pair in self._round_trips for ends in permutations(pair, 2)}
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
    """Share of segments that were sent again; None if none was sent."""
    if connection is None or not connection.segments:
        return None
    return min(1.0, max(0, connection.retransmits) / connection.segments)


def suspects(rates: Mapping[Ends, float]) -> set[Ends]:
    """Directions that are far slower than the best path over one other end: their measurement is doubtful."""
    linked = {place for ends in rates if COORDINATOR not in ends for place in ends}
    if not linked:  # there is no path over a third end; and with hundreds of ends it is long to look for one
        return set()
    rates = {ends: rate for ends, rate in rates.items() if linked.issuperset({*ends} - {COORDINATOR})}
    places = sorted({place for ends in rates for place in ends})
    byte_s = [[1.0 / rates[u, v] if (u, v) in rates else UNREACHABLE_S for v in places] for u in places]
    return {(places[u], places[v]) for u, v in slow_links(byte_s)}


# --- Probes

FRESH_S: Final = 1800.0  # a rate this old is probed again, unless transfers measured it

AGAIN_S: Final = (30.0, 3600.0)
"""First and longest pause after a probe of a node without a result; it doubles each time."""

HOUR_S: Final = 3600.0
PROBES_AN_HOUR: Final = 6  # bytes that probes of one node may take in an hour, as a multiple of the budget of one probe

FIRST_BYTES: Final = 64 << 10
"""Size of the first probe of a direction, whatever the run has moved: enough for thin links with short round trips."""

GROWTH: Final = 16  # a probe without a result is repeated only with this many times its bytes
_FRAMED: Final = 1.02  # most bytes on the wire for one byte of a probe
SLOW_S: Final = 90.0  # added to the time limit of a probe: a thin link may take this long for the first chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A direction that could be probed."""

    node: str
    upward: bool
    rtt_s: float
    age_s: float  # infinite if it was never measured
    changed: bool


@dataclass(slots=True, kw_only=True)
class Running:
    """The current probe."""

    number: int
    node: str
    upward: bool
    rtt_s: float
    num_bytes: int
    began_at: float
    quiet: bool = True  # whether no other transfer was seen since it began

    @property
    def ends_by(self) -> float:
        return self.began_at + PROBE_PATIENCE * max(PROBE_LEAST_S, PROBE_ROUND_TRIPS * self.rtt_s) + SLOW_S


@dataclass(slots=True)
class _Probed:
    run_bytes: int = 0  # that its link has moved for the run, both ways together
    probe_bytes: int = 0  # ... and for probes
    spent: deque[tuple[float, int]] = field(default_factory=deque)  # when its probes of the last hour began; bytes
    sizes: dict[bool, tuple[int, bool]] = field(default_factory=dict)
    """upward → bytes of the last probe, and whether it measured the rate."""
    waits_until: float = -math.inf  # no probe before
    pause_s: float = AGAIN_S[0]  # after the next probe without a result


class BandwidthProbe:
    """Decides which link is probed next, and when.

    All probes have the coordinator as one end, so there is one at a time: two would measure each other. None begins
    before all links were idle for a while, and any waiting transfer cancels it: transfers measure links as well. Bytes
    are bounded for each node and hour, and for all probes of a node by a share of its traffic, after one small probe
    of each direction.
    """

    def __init__(self, budget_bytes: int, now: float, *, quiet_s: float = QUIET_S, share: float = PROBE_SHARE) -> None:
        """`budget_bytes`: most bytes of one probe; 0: there are none. `share`: of a link's traffic for them."""
        self._budget_bytes, self._quiet_s, self._share = budget_bytes, quiet_s, share
        self._nodes = defaultdict[str, _Probed](_Probed)
        self._busy_at = now
        self._number = 0
        self.running: Running | None = None
        self.asked: set[tuple[str, bool]] = set()
        """(node, upward) of directions to probe next, however fresh their rate is."""

    @property
    def probes(self) -> bool:
        return self._budget_bytes > 0

    def busy(self, now: float) -> None:
        self._busy_at = now
        if self.running is not None:
            self.running.quiet = False

    def next(self, candidates: Iterable[Candidate], now: float) -> Running | None:
        """Begin a probe if one is due and allowed; it becomes `running`."""
        if self.running is not None or not self._budget_bytes or now - self._busy_at < self._quiet_s:
            return None
        due = [c for c in candidates if self._is_asked(c) or c.changed or c.age_s > FRESH_S]
        due = [c for c in due if self._may_begin(c.node, now) and self._size(c)]
        if not due:
            return None
        chosen = max(due, key=lambda c: (self._is_asked(c), c.age_s, c.changed, c.node))
        num_bytes = self._size(chosen)
        self._number += 1
        self._nodes[chosen.node].spent.append((now, num_bytes))
        self.running = Running(
            number=self._number,
            node=chosen.node,
            upward=chosen.upward,
            rtt_s=chosen.rtt_s,
            num_bytes=num_bytes,
            began_at=now,
        )
        return self.running

    def finish(self, now: float, *, learned: bool) -> None:
        """The running probe ended; `learned`: it measured the rate."""
        running, self.running = self.running, None
        if running is None:
            return
        node, (first_s, longest_s) = self._nodes[running.node], AGAIN_S
        if running.quiet or learned:
            node.sizes[running.upward] = (running.num_bytes, learned)
        else:  # it was cancelled, which says nothing about its size
            node.sizes.setdefault(running.upward, (0, True))
        if learned:
            node.waits_until, node.pause_s = -math.inf, first_s
            self.asked.discard((running.node, running.upward))
        else:
            node.waits_until, node.pause_s = now + node.pause_s, min(2 * node.pause_s, longest_s)

    def retain(self, nodes: Collection[str]) -> None:
        self._nodes = defaultdict(_Probed, {node: probed for node, probed in self._nodes.items() if node in nodes})
        self.asked = {(node, upward) for node, upward in self.asked if node in nodes}

    def has_moved(self, node: str, run_bytes: int, probe_bytes: int) -> None:
        """A node's link moved this many more bytes, both ways together."""
        self._nodes[node].run_bytes += run_bytes
        self._nodes[node].probe_bytes += probe_bytes

    def _size(self, candidate: Candidate) -> int:
        """Bytes that a probe may take now; 0 if that is too few to measure anything."""
        node = self._nodes[candidate.node]
        allowed = int(min(self._budget_bytes, max(0.0, self._share * node.run_bytes - node.probe_bytes) / _FRAMED))
        if candidate.upward not in node.sizes:
            return max(allowed, min(FIRST_BYTES, self._budget_bytes))
        last, learned = node.sizes[candidate.upward]
        least = min(self._budget_bytes, max(FIRST_BYTES, last if learned else GROWTH * last))
        return allowed if allowed >= least else 0

    def _is_asked(self, candidate: Candidate) -> bool:
        return (candidate.node, candidate.upward) in self.asked

    def _may_begin(self, node: str, now: float) -> bool:
        spent = self._nodes[node].spent
        while spent and now - spent[0][0] > HOUR_S:
            spent.popleft()
        spent_bytes = sum(num_bytes for _, num_bytes in spent)
        return now >= self._nodes[node].waits_until and spent_bytes < PROBES_AN_HOUR * self._budget_bytes
