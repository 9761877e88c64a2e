"""The work of one node: what waits, what is done now, what came too early, and the inputs that are kept. Pure."""

from collections import deque
from collections.abc import Callable

from farloop.algo.layout import Hop
from farloop.node.pipeline.arrivals import Held
from farloop.node.pipeline.words import Kind, Trip, Work

GONE = 256
"""Trips that ended early and are remembered: far more than are on their way at any time."""


class Desk:
    """One job at a time, first come first served; forward work waits while too many inputs are kept."""

    def __init__(self) -> None:
        self.queue: list[Work] = []
        self.running: Work | None = None
        self.held: dict[Trip, Held] = {}
        """Trips whose input is kept here."""
        self.early: list[tuple[str, Work]] = []
        """Work of a step or layout to come, and who sent it."""
        self.gone: deque[Trip] = deque(maxlen=GONE)
        """Trips that ended early, the newest last: work of them may still be on its way."""

    def next(self, *, full: bool, here: Hop) -> Work | None:
        """Begin the next job; None while one runs or none can begin. `full`: no further input can be kept."""
        if self.running is not None:
            return None
        for place, work in enumerate(self.queue):
            if work.kind is not Kind.FORWARD or not full:
                self.running = self.queue.pop(place)
                if work.kind is Kind.FORWARD:
                    self.held.setdefault(work.trip, Held(visited=(*work.visited, here)))
                return work
        return None

    def knows(self, trip: Trip) -> bool:
        """Whether work of this trip came already."""
        return trip in self.held or self.waits(trip)

    def waits(self, trip: Trip) -> bool:
        return any(work.trip == trip for work in self.queue) or any(work.trip == trip for _, work in self.early)

    def runs(self, trip: Trip) -> bool:
        return self.running is not None and self.running.trip == trip

    def forget(self, trip: Trip) -> bool:
        """Nothing of it is wanted any more; whether nothing of it is under way either."""
        self.held.pop(trip, None)
        self.gone.append(trip)
        self.queue = [work for work in self.queue if work.trip != trip]
        self.early = [(sender, work) for sender, work in self.early if work.trip != trip]
        return not self.runs(trip)

    def trips(self, of: Callable[[Trip], bool]) -> list[Trip]:
        """All such trips that it knows of, in order."""
        known = {*self.held, *(work.trip for work in self.queue), *(work.trip for _, work in self.early)}
        return sorted(trip for trip in known if of(trip))

    def check(self, epoch: int) -> None:
        """A trip has one job at a time, of the present layout, and its input is kept until the last."""
        trips = [work.trip for work in self.queue]
        assert len(trips) == len(set(trips)), "a trip waits twice"
        assert self.running is None or self.running.trip not in trips, "a trip waits while it is computed"
        for work in self.queue:
            assert work.epoch == epoch and (work.kind is Kind.FORWARD or work.trip in self.held)
