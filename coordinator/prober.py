"""Which link is probed next, and whether now is the time. Pure: decides, and moves no byte.

All probes of a star have the coordinator as one end, so there is one at a time: two would measure each other. None
begins unless all links have been quiet for a while, and whatever anybody waits for calls it off: live traffic is a
measurement itself, and worth more. What a probe may cost is bounded for each node and hour, and all of them together
by a share of what the node's link has moved for the run; each direction has one small probe before that.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from farloop.wire.meter import PROBE_LEAST_S, PROBE_PATIENCE, PROBE_ROUND_TRIPS

FRESH_S: Final = 1800.0
"""A rate this old is measured again, if nothing did so in passing."""

QUIET_S: Final = 10.0
"""How long nobody must have waited for bytes: until then downloads are held back (`egress.py`), probes with them."""

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


class Prober:
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
