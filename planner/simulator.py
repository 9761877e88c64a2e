"""Event simulation of microbatches along their paths, in a fraction of a millisecond per chain.

A node does one piece of work at a time, first come first served, and rests `gap_s` after it: forward passes (c), the
loss at the source (c·loss) and backward passes (c·backward). A forward pass is admitted only while the node keeps
fewer microbatches than its slots; a source sends its next microbatch when one of its own has returned.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from farloop.planner.paths import Numbers, Work, latency_s

Kind = Literal["F", "L", "B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    nodes: tuple[int, ...]
    stages: tuple[int, ...]

    @property
    def source(self) -> int:
        return self.nodes[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    node: int
    kind: Kind
    source: int
    microbatch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    makespan_s: float  # until the last backward pass at a source has ended
    source_s: dict[int, float]  # of every source, until its own last one
    stalled: int  # microbatches that never returned, because nodes wait for each other's slots; 0 in a sound plan
    pieces: tuple[Piece, ...] = ()


class _Job:
    """A piece of work on its way: the p-th node of a microbatch's route, forwards or backwards."""

    __slots__ = ("kind", "microbatch", "place", "route")

    def __init__(self, route: Route, microbatch: int, place: int, kind: Kind) -> None:
        self.route, self.microbatch, self.place, self.kind = route, microbatch, place, kind


def simulate(routes: Sequence[Route], work: Work, message_s: Numbers, *, keep: bool = False) -> Outcome:
    """One step: every source sends `work.microbatches` along its routes in turn. With `keep` every piece is told."""
    return _Play(routes, work, message_s, keep).run()


def simulated_s(nodes: Sequence[int], stages: Sequence[int], work: Work, message_s: Numbers) -> float:
    """Seconds of a step of one source along a chain that no other source uses."""
    return simulate([Route(nodes=tuple(nodes), stages=tuple(stages))], work, message_s).makespan_s


class _Play:
    def __init__(self, routes: Sequence[Route], work: Work, message_s: Numbers, keep: bool) -> None:
        self._work, self._message_s, self._keep = work, message_s, keep
        self._ways: dict[int, list[Route]] = {}
        for route in routes:
            self._ways.setdefault(route.source, []).append(route)
        nodes = sorted({node for route in routes for node in route.nodes})
        self._free_at = dict.fromkeys(nodes, 0.0)
        self._kept = dict.fromkeys(nodes, 0)
        self._queue: dict[int, list[_Job]] = {node: [] for node in nodes}
        self._sent = dict.fromkeys(self._ways, 0)
        self._returned = dict.fromkeys(self._ways, 0)
        self._done = dict.fromkeys(self._ways, 0.0)
        self._events: list[tuple[float, int, int, _Job | None]] = []
        """(time, order, node, what arrives; None: the node is free again)"""
        self._order = 0
        self._pieces: list[Piece] = []

    def run(self) -> Outcome:
        for source in self._ways:
            for _ in range(min(self._work.slots[source], self._work.microbatches)):
                self._send(source, 0.0)
        events = self._events
        while events:
            now, _, node, job = heapq.heappop(events)
            if job is not None:
                self._queue[node].append(job)
            if self._free_at[node] <= now:
                self._begin(node, now)
        return Outcome(
            makespan_s=max(self._done.values(), default=0.0),
            source_s=self._done,
            stalled=self._work.microbatches * len(self._ways) - sum(self._returned.values()),
            pieces=tuple(self._pieces),
        )

    def _send(self, source: int, now: float) -> None:
        number = self._sent[source]
        self._sent[source] += 1
        ways = self._ways[source]
        self._arrive(now, source, _Job(ways[number % len(ways)], number, 0, "F"))

    def _arrive(self, at: float, node: int, job: _Job | None) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, node, job))

    def _begin(self, node: int, now: float) -> None:
        queue = self._queue[node]
        full = self._kept[node] >= self._work.slots[node]
        for index, job in enumerate(queue):
            if job.kind == "F" and full:
                continue
            del queue[index]
            self._do(node, job, now)
            return

    def _do(self, node: int, job: _Job, now: float) -> None:
        work, route = self._work, job.route
        seconds = work.forward_s(node, route.stages[job.place])
        if job.kind == "F":
            self._kept[node] += 1
        else:
            seconds *= work.loss if job.kind == "L" else work.backward
        stop = now + seconds
        self._free_at[node] = stop + work.gap_s
        self._arrive(stop + work.gap_s, node, None)
        if self._keep:
            number = job.microbatch
            piece = Piece(node=node, kind=job.kind, source=route.source, microbatch=number, start_s=now, stop_s=stop)
            self._pieces.append(piece)
        if job.kind == "B":
            self._kept[node] -= 1
        if job.kind == "B" and job.place == 0:
            self._returned[route.source] += 1
            self._done[route.source] = max(self._done[route.source], stop)
            if self._sent[route.source] < self._work.microbatches:
                self._send(route.source, stop)
        else:
            self._pass_on(node, job, stop)

    def _pass_on(self, node: int, job: _Job, stop: float) -> None:
        """Go to the next node of the cycle: forwards, to the source for the loss, and back."""
        last = len(job.route.nodes) - 1
        match job.kind:
            case "F":
                place, kind = (job.place + 1, "F") if job.place < last else (0, "L")
            case "L":
                place, kind = last, "B"
            case _:
                place, kind = job.place - 1, "B"
        target = job.route.nodes[place]
        at = stop + (self._message_s[node][target] if target != node else 0.0)
        self._arrive(at, target, _Job(job.route, job.microbatch, place, kind))  # type: ignore[arg-type]


def bounds_s(routes: Sequence[Route], work: Work, message_s: Numbers) -> tuple[float, float]:
    """(longest microbatch that never waits, work of the busiest node): no step of these routes is shorter."""
    ways: dict[int, list[Route]] = {}
    for route in routes:
        ways.setdefault(route.source, []).append(route)
    load: dict[int, float] = {}
    for several in ways.values():
        for number in range(work.microbatches):
            route = several[number % len(several)]
            for place, (node, stage) in enumerate(zip(route.nodes, route.stages, strict=True)):
                factor = 1.0 + work.backward + (work.loss if place == 0 else 0.0)
                load[node] = load.get(node, 0.0) + factor * work.forward_s(node, stage)
    used = [route for several in ways.values() for route in several[: work.microbatches]]
    return max(latency_s(route.nodes, route.stages, work, message_s) for route in used), max(load.values())
