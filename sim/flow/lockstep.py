"""Data parallel on virtual time: all machines take every step together, and a crash stops all of them.

`data-parallel` stops until every machine is back and the run has restarted from its checkpoint. `elastic` continues
after a pause with the remaining machines, and readmits repaired ones at a step boundary at no cost. Between two events
steps are simulated in batches, without an event per step. Not simulated: the overlap of gradients with the backward
pass (gradients leave when the slowest has computed), and a changed batch.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from farloop.sim.flow.outcome import Outcome
from farloop.sim.flow.scenario import FailureTrace, Group, Setting, bytes_per_s

_BATCH = 64  # steps whose durations are drawn at a time

Kind = Literal["chance", "crash", "repair", "outage", "cut", "mend", "lost", "join", "drain", "end"]

_Event = tuple[float, int, Kind, int]  # (time, order of entry, kind, node)

_AT_ONCE = frozenset({"chance", "crash", "outage", "cut", "lost", "end"})
"""What breaks into a step; the rest waits for its boundary."""


@dataclass(slots=True, kw_only=True)
class _Place:
    group: Group
    fate: FailureTrace
    member: bool
    broken: int = 0  # machines of the node that are being repaired
    cuts: int = 0  # outages of its link that hold now
    left_out: bool = False  # the others go on without it while its link is cut

    @property
    def working(self) -> int:
        return 0 if not self.member or self.left_out else max(0, self.group.machines - self.broken)


class LockStep:
    def __init__(self, setting: Setting, *, timeline: bool) -> None:
        self._setting, self._rules, self._scenario = setting, setting.rules, setting.scenario
        self._elastic = setting.rules.method == "elastic"
        groups = [group for group in setting.groups for _ in range(group.count)]
        self._places = [
            _Place(group=group, fate=FailureTrace(group, seed=setting.seed, index=index), member=group.joins_at_s == 0)
            for index, group in enumerate(groups)
        ]
        self._now = 0.0
        self._paused_until = 0.0
        self._breaks: list[_Event] = []  # what breaks into a step, by time
        self._waits: list[_Event] = []  # what waits for a step's end
        self._entered = 0
        self._spans = {"compute": 0.0, "idle": 0.0, "down": 0.0}
        self._useful_s = self._unsaved_s = 0.0
        self._steps = self._unsaved = 0
        self._inner_steps = self._unsaved_inner = 0
        self._lost_steps = 0
        self._crashes = 0
        self._bytes_up = self._bytes_down = self._bytes_state = 0
        self._trace: list[tuple[float, float]] = []
        self._traced = timeline
        self._up_bytes = math.ceil(self._scenario.model.parameters * self._rules.bits_up / 8)
        self._down_bytes = math.ceil(self._scenario.model.parameters * self._rules.bits_down / 8)
        self._drawn: Iterator[tuple[float, float]] = iter(())

    def play(self) -> Outcome:
        self._enter_all()
        self._regroup()
        while self._now < self._setting.seconds and not self._reached:
            if self._stands_still:
                self._wait()
            else:
                self._train()
            while events := [queue for queue in (self._breaks, self._waits) if queue and queue[0][0] <= self._now]:
                _, _, kind, index = heapq.heappop(min(events))
                self._happen(kind, index)
        self._useful_s += self._unsaved_s
        return self._outcome()

    @property
    def _reached(self) -> bool:
        return self._scenario.steps is not None and self._steps >= self._scenario.steps

    @property
    def _stands_still(self) -> bool:
        if self._now < self._paused_until or not any(place.working for place in self._places):
            return True
        if self._elastic:
            return any(place.cuts and not place.left_out and place.member for place in self._places)
        return any(place.member and (place.broken or place.cuts) for place in self._places)

    def _wait(self) -> None:
        """Let time pass until something happens."""
        until = min([self._setting.seconds, *(queue[0][0] for queue in (self._breaks, self._waits) if queue)])
        if self._paused_until > self._now:
            until = min(until, self._paused_until)
        assert until < math.inf, "nothing will ever happen"
        self._trace_at(0.0)
        self._spend(until - self._now, busy=0.0)
        self._now = until

    def _train(self) -> None:
        """Steps up to the next event that breaks into one, or past the next one that waits for a boundary."""
        self._trace_at(float(self._working))
        breaks_at, kind = (self._breaks[0][0], self._breaks[0][2]) if self._breaks else (math.inf, "end")
        waits_until = self._waits[0][0] if self._waits else math.inf
        while not self._reached and self._now < min(breaks_at, waits_until):
            seconds, busy = next(self._drawn)
            if self._now + seconds > breaks_at:
                # An event in the middle of a step: at the end of the case the part counts, else it is lost.
                after_s = breaks_at - self._now
                self._spend(after_s, busy=busy)
                self._now += after_s
                if kind == "end":
                    self._useful_s += after_s * busy * self._working
                return
            count = 1
            if self._regular:  # all steps take the same time: as many at once as fit
                count = math.floor((min(breaks_at, waits_until, self._now + 1e9 * seconds) - self._now) / seconds)
                left = math.inf if self._scenario.steps is None else self._scenario.steps - self._steps
                count = max(1, min(count, int(min(left, 1e9))))
            self._finish(count, seconds, busy)

    def _finish(self, count: int, seconds: float, busy: float) -> None:
        working, nodes = self._working, self._nodes
        self._now += count * seconds
        self._spend(count * seconds, busy=busy)
        done = count * seconds * busy * working
        self._bytes_up += count * self._up_bytes * nodes
        self._bytes_down += count * self._down_bytes * nodes
        self._inner_steps += count * nodes
        self._steps += count
        every = 1 if self._elastic else self._rules.checkpoint_steps
        fresh = (self._unsaved + count) % every
        if self._unsaved + count >= every:  # there was a checkpoint: what came before the fresh steps is safe
            self._useful_s += self._unsaved_s + done * (1.0 - fresh / count)
            self._unsaved_s, self._unsaved_inner = done * fresh / count, fresh * nodes
        else:
            self._unsaved_s += done
            self._unsaved_inner += count * nodes
        self._unsaved = fresh

    def _spend(self, seconds: float, *, busy: float) -> None:
        """Book machine-seconds; `busy` is the share of the time that working machines compute."""
        working = self._working
        up = sum(place.group.machines - place.broken for place in self._places if place.member)
        down = sum(place.broken for place in self._places if place.member)
        self._spans["compute"] += seconds * working * busy
        self._spans["idle"] += seconds * (up - working * busy)
        self._spans["down"] += seconds * down

    def _trace_at(self, working: float) -> None:
        if self._traced and (not self._trace or self._trace[-1][1] != working):
            self._trace.append((self._now, working))

    def _regroup(self) -> None:
        """A node came or went: count again, and draw the steps of those that are there."""
        there = [place for place in self._places if place.working]
        self._working = sum(place.working for place in there)
        self._nodes = len(there)
        self._regular = not any(place.group.step_sigma or place.group.slow_share for place in there)
        self._drawn = self._draw(there, self._exchange_s(there))

    def _draw(self, there: list[_Place], exchange_s: float) -> Iterator[tuple[float, float]]:
        """(seconds, share of them that a machine computes) of one step after the other."""
        machines = np.array([place.working for place in there], dtype=np.float64)
        while there:
            if self._regular:
                drawn = np.array([[place.fate.step_s for place in there]])
            else:
                drawn = np.stack([place.fate.durations(_BATCH) for place in there], axis=1)
            seconds: NDArray[np.float64] = drawn.max(axis=1) + exchange_s
            busy = (drawn @ machines) / (machines.sum() * seconds)
            yield from zip(seconds.tolist(), busy.tolist(), strict=True)

    def _exchange_s(self, there: list[_Place]) -> float:
        """Gradients up and the step's result down, all nodes at once: the busiest link tells, and the farthest node."""
        if not there:
            return 0.0
        total = max(2.0 * place.group.rtt_s + place.group.jitter_s for place in there)
        for size, direction in ((self._up_bytes, "up_gbit_s"), (self._down_bytes, "down_gbit_s")):
            own = max(size / place.group.bytes_per_s(getattr(place.group, direction)) for place in there)
            shared = [
                size * sum(place.group.site == site.name for place in there) / bytes_per_s(getattr(site, direction))
                for site in self._scenario.sites
            ]
            total += max(
                [own, size * len(there) / bytes_per_s(getattr(self._scenario.coordinator, direction)), *shared]
            )
        return total if total > 1e-6 else 0.0

    def _enter_all(self) -> None:
        for index, place in enumerate(self._places):
            group = place.group
            if group.joins_at_s > 0:
                self._enter(group.joins_at_s, "join", index)
            if group.drains_at_s is not None:
                self._enter(group.drains_at_s, "drain", index)
            self._enter(group.joins_at_s + place.fate.next_crash_s(group.machines), "chance", index)
            self._enter(place.fate.next_outage_s(), "outage", index)
            for outage in self._scenario.outages:
                if outage.group == group.name:
                    self._enter(outage.at_s, "cut", index)
                    self._enter(outage.at_s + outage.for_s, "mend", index)
            for crash in self._scenario.crashes:
                if crash.group == group.name:
                    self._enter(crash.at_s, "crash", index)
        self._enter(self._setting.seconds, "end", 0)

    def _enter(self, when: float, kind: Kind, index: int) -> None:
        if when < math.inf:
            self._entered += 1
            queue = self._breaks if kind in _AT_ONCE else self._waits
            heapq.heappush(queue, (when, self._entered, kind, index))

    def _happen(self, kind: Kind, index: int) -> None:
        place = self._places[index]
        match kind:
            case "chance":
                self._crash(place, index)
                # A machine that is down cannot break: the next time counts from its repair.
                group, alone = place.group, place.group.machines == 1
                again_s = (group.repair_s if alone else 0.0) + place.fate.next_crash_s(group.machines)
                self._enter(self._now + again_s, "chance", index)
            case "crash":
                self._crash(place, index)
            case "repair":
                place.broken -= 1
                if not self._elastic and not any(p.broken for p in self._places):
                    self._pause(self._rules.restart_s)
                if place.group.machines == 1:
                    self._fetch_snapshot()
            case "outage":
                self._disconnect(place, index)
                over = self._now + place.group.outage_s
                self._enter(over, "mend", index)
                self._enter(over + place.fate.next_outage_s(), "outage", index)
            case "cut":
                self._disconnect(place, index)
            case "lost":
                if place.cuts and place.member and not place.left_out:
                    place.left_out = True
                    self._pause(self._rules.reconfigure_s)
            case "mend":
                place.cuts -= 1
                if not place.cuts:
                    place.left_out = False
            case "join":
                place.member = True
                self._fetch_snapshot()
            case "drain":
                place.member = False
            case "end":
                pass
        self._regroup()

    def _crash(self, place: _Place, index: int) -> None:
        if not place.member or place.broken == place.group.machines:
            return
        self._crashes += 1
        place.broken += 1
        self._enter(self._now + place.group.repair_s, "repair", index)
        if self._elastic:
            self._pause(self._rules.reconfigure_s)
        else:  # back to the checkpoint
            self._steps -= self._unsaved
            self._lost_steps += self._unsaved_inner
            self._unsaved, self._unsaved_inner, self._unsaved_s = 0, 0, 0.0

    def _disconnect(self, place: _Place, index: int) -> None:
        place.cuts += 1
        if place.cuts == 1 and self._elastic:
            self._enter(self._now + self._rules.liveness_s, "lost", index)

    def _pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._now + seconds)

    def _fetch_snapshot(self) -> None:
        self._bytes_state += math.ceil(self._scenario.model.parameters * self._scenario.model.snapshot_bits / 8)

    def _outcome(self) -> Outcome:
        return Outcome(
            seconds=self._now,
            reached=self._reached,
            outer_steps=self._steps,
            commits=self._steps,
            merged=self._inner_steps - self._lost_steps,
            inner_steps=self._inner_steps,
            lost_steps=float(self._lost_steps),
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down,
            bytes_state=self._bytes_state,
            compute_s=self._spans["compute"],
            idle_s=self._spans["idle"],
            down_s=self._spans["down"],
            useful_s=self._useful_s,
            crashes=self._crashes,
            timeline=tuple(self._trace),
        )
