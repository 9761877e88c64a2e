"""A source's microbatches of one step: how many are under way, which trip each is on, what became of each. Pure.

Conservation: every microbatch of a step waits, is under way, is completed or is dropped, and nothing else.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from farloop.node.pipeline.words import Trip


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A microbatch under way."""

    trip: Trip
    path: int
    since: float


@dataclass(slots=True)
class Flights:
    """Of one source."""

    source: str
    start: int
    """Incarnation of the source."""
    credit: int
    """Most microbatches under way at once."""
    attempts: int
    """Trips that a microbatch is given before it is dropped."""
    step: int = -1
    microbatches: int = 0
    flying: dict[int, Flight] = field(default_factory=dict)
    completed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """In this step, by reason."""
    reissued: int = 0
    """Trips of this step that were not the first of their microbatch."""
    _todo: deque[tuple[int, int]] = field(default_factory=deque)

    @property
    def over(self) -> bool:
        """Whether every microbatch is settled."""
        return not self._todo and not self.flying

    @property
    def settled(self) -> int:
        """The newest step in which every microbatch is; −1 before there is one."""
        return self.step if self.over else self.step - 1

    def begin(self, microbatches: int) -> None:
        """The next step."""
        assert self.over, "the last step is not over"
        self.step, self.microbatches = self.step + 1, microbatches
        self._todo = deque((index, 0) for index in range(microbatches))
        self.completed, self.dropped, self.reissued = 0, Counter(), 0

    def next(self, paths: int, now: float) -> Flight | None:
        """One more trip, if there is credit for it; it takes the next of so many paths in turn."""
        if not self._todo or len(self.flying) >= self.credit:
            return None
        index, attempt = self._todo.popleft()
        trip = Trip(source=self.source, start=self.start, step=self.step, index=index, attempt=attempt)
        flight = Flight(trip=trip, path=(index + attempt) % paths, since=now)
        self.flying[index] = flight
        return flight

    def is_flying(self, trip: Trip) -> bool:
        """Whether this very trip is still wanted."""
        flight = self.flying.get(trip.index)
        return flight is not None and flight.trip == trip

    def complete(self, trip: Trip) -> None:
        """It is back, all its gradients are taken."""
        del self.flying[trip.index]
        self.completed += 1

    def lose(self, trip: Trip, reason: str) -> bool:
        """The trip ends early: whether the microbatch goes on another one, or is dropped."""
        del self.flying[trip.index]
        if trip.attempt + 1 < self.attempts:
            self._todo.appendleft((trip.index, trip.attempt + 1))
            self.reissued += 1
            return True
        self.dropped[reason] += 1
        return False

    def overdue(self, now: float, patience_s: float) -> list[Trip]:
        """Trips that take longer than anybody should wait."""
        return [flight.trip for flight in self.flying.values() if now >= flight.since + patience_s]

    def next_overdue(self, patience_s: float) -> float | None:
        """When the first of them will."""
        return min((flight.since + patience_s for flight in self.flying.values()), default=None)

    def check(self) -> None:
        """Every microbatch is in one place."""
        indices = [*(index for index, _ in self._todo), *self.flying]
        assert len(indices) == len(set(indices)), indices
        settled = self.completed + self.dropped.total()
        assert len(indices) + settled == self.microbatches, (indices, settled, self.microbatches)
        assert len(self.flying) <= self.credit
