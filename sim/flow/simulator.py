"""The flow simulator: thousands of nodes and a coordinator on virtual time, as sizes and durations; no tensors.

Loosely coupled methods are simulated event by event with models of both machines; `node.py` says which rules of the
real machines it keeps. Where a window takes all expected deltas, a test finds the same commits from the same nodes in
the frame simulator, crashes included. Elsewhere milliseconds decide who is in time, and only counts agree. Also left
out: a node's own H is assigned once, by its mean pace, and the coordinator never fails. Methods that step together are
in `lockstep.py`.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from farloop.algo.schedule import first_send_round
from farloop.coordinator.decide.closing import Lateness
from farloop.sim.flow.links import FlowHost, Transfer, lay_out
from farloop.sim.flow.lockstep import LockStep
from farloop.sim.flow.node import Delta, Window, round_of
from farloop.sim.flow.outcome import Merge, Outcome
from farloop.sim.flow.scenario import LOCK_STEP, Case, FlowScenario, Setting, cases
from farloop.sim.virtual_time import EventQueue

_DIAL_TRIPS = 2.0
"""Round trips from a start to the first byte of a snapshot: a connection, then a greeting and its answer."""


class Stuck(RuntimeError):
    """Nothing will ever happen any more, and the case is not over."""


def play(setting: Setting, *, timeline: bool = False) -> Outcome:
    """Play one case to its end; with its course in time if wanted. Raises Stuck where a run stands still for good."""
    if setting.rules.method in LOCK_STEP:
        return LockStep(setting, timeline=timeline).play()
    return _World(setting, timeline=timeline).run()


@dataclass(slots=True, kw_only=True)
class _Tally:
    commits: int = 0
    merged: int = 0
    stale: int = 0
    dropped: int = 0
    skipped: int = 0
    lost_steps: float = 0.0
    useful_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_state: int = 0


class _World:
    def __init__(self, setting: Setting, *, timeline: bool) -> None:
        self._setting, self._rules, self._scenario = setting, setting.rules, setting.scenario
        self._agenda = EventQueue()
        self._tally = _Tally()
        self._over = self._reached = False
        self._merges: list[Merge] = []
        self._working = 0
        self._trace: list[tuple[float, float]] | None = [] if timeline else None
        fragments = self._rules.fragments
        whole, rest = divmod(self._scenario.model.parameters, fragments)
        sizes = [whole + (fragment < rest) for fragment in range(fragments)]
        self._up_bytes = [math.ceil(numel * self._rules.bits_up / 8) for numel in sizes]
        self._down_bytes = [math.ceil(numel * self._rules.bits_down / 8) for numel in sizes]
        self._snapshot_bytes = [math.ceil(numel * self._scenario.model.snapshot_bits / 8) for numel in sizes]
        self._outer_steps = (
            math.inf if self._scenario.steps is None else math.ceil(self._scenario.steps / self._rules.h)
        )
        self._places = lay_out(setting, self._agenda, self)
        self._lateness = Lateness()
        self._versions = [0] * fragments
        self._windows: list[Window] = []
        self._patient: list[Window] = []
        """Have their quorum, and wait for all while it is not known how late the others usually are."""
        self._late: list[list[Delta]] = [[] for _ in range(fragments)]
        """Deltas that came while their fragment's window was closing: the next begins with them."""

    def run(self) -> Outcome:
        agenda = self._agenda
        for place in self._places:
            self._enter(place)
        self._windows = [self._opened(fragment, 1) for fragment in range(self._rules.fragments)]
        for outage in self._scenario.outages:
            for place in self._places:
                if place.group.name == outage.group:
                    agenda.at(outage.at_s, partial(self._disconnect, place))
                    agenda.at(outage.at_s + outage.for_s, partial(self._mend, place))
        for crash in self._scenario.crashes:
            for place in self._places:
                if place.group.name == crash.group:
                    agenda.at(crash.at_s, partial(self._crash, place))
        if self._setting.seconds < math.inf:
            agenda.at(self._setting.seconds, self._end)
        while not self._over:
            if not agenda.step():
                raise Stuck(f"after {agenda.now:g} s no node computes, and nothing is under way")
        return self._outcome()

    def _enter(self, place: FlowHost) -> None:
        """Its first start, and its fate from then on."""
        group, agenda = place.group, self._agenda
        if group.joins_at_s > 0.0:
            agenda.at(group.joins_at_s, partial(self._join, place))
            agenda.at(group.joins_at_s, partial(self._await_crash, place))
        else:  # the clock starts when training does: those who are there at the start have the anchors
            place.node.start(0)
            self._await_crash(place)
        self._await_outage(place)
        if group.drains_at_s is not None:
            agenda.at(group.drains_at_s, partial(self._drain, place))

    def _await_crash(self, place: FlowHost) -> None:
        after_s = place.node.fate.next_crash_s(place.node.machines)
        if after_s < math.inf:
            self._agenda.after(after_s, partial(self._crash_by_chance, place))

    def _crash_by_chance(self, place: FlowHost) -> None:
        alone = place.node.machines == 1
        self._crash(place)
        # A machine that is down cannot break: the next time counts from its repair.
        self._agenda.after(place.group.repair_s if alone else 0.0, partial(self._await_crash, place))

    def _crash(self, place: FlowHost) -> None:
        """One machine breaks. A node of one is away until it is repaired; a cluster starts again without it."""
        node, agenda, group = place.node, self._agenda, place.group
        if node.stage == "left" or (node.stage == "away" and node.machines == 1):
            return
        place.crashes += 1
        place.life += 1
        life = place.life
        self._cancel_downloads(place)
        was_counted, place.silent = node.counts, False
        node.crash()
        if was_counted:
            agenda.after(self._rules.liveness_s, lambda: self._not_back(place, life))
        back_s = group.repair_s
        if node.machines > 1:
            back_s = self._rules.reconfigure_s
            node.miss(1)
            agenda.after(group.repair_s, lambda: node.miss(-1))
        agenda.after(back_s, lambda: self._back(place, life))

    def _not_back(self, place: FlowHost, life: int) -> None:
        if place.life == life and place.node.stage == "away":
            self._remove(place)

    def _back(self, place: FlowHost, life: int) -> None:
        if place.life != life or place.node.stage == "left":
            return
        self._remove(place)  # no window waits for the incarnation that died
        self._join(place)

    def _join(self, place: FlowHost) -> None:
        """Fetch a snapshot, then wait for a slot's boundary."""
        place.life += 1
        place.node.join()
        versions = list(self._versions)

        def fetched() -> None:
            place.node.ready(versions)
            if not any(other.node.counts for other in self._places):
                self._start_ready()
                for window in self._windows:
                    if self._may_serve(place, window.fragment, window.number):
                        window.expect(place.node.index)

        self._download(place, sum(self._snapshot_bytes), fetched, state=True, trips=_DIAL_TRIPS)

    def _drain(self, place: FlowHost) -> None:
        place.life += 1
        self._remove(place)
        place.node.drain()

    def _await_outage(self, place: FlowHost) -> None:
        after_s = place.node.fate.next_outage_s()
        if after_s < math.inf:
            self._agenda.after(after_s, partial(self._outage, place))

    def _outage(self, place: FlowHost) -> None:
        self._disconnect(place)
        self._agenda.after(place.group.outage_s, partial(self._end_outage, place))

    def _end_outage(self, place: FlowHost) -> None:
        self._mend(place)
        self._await_outage(place)

    def _disconnect(self, place: FlowHost) -> None:
        place.cut += 1
        if place.cut == 1:
            place.up[0].set_cut(now_cut=True)
            place.down[0].set_cut(now_cut=True)
            place.cuts += 1
            life, cuts = place.life, place.cuts
            self._agenda.after(self._rules.liveness_s, lambda: self._silent(place, life, cuts))

    def _silent(self, place: FlowHost, life: int, cuts: int) -> None:
        """Its link has been cut for so long that the others go on."""
        if place.cut and place.cuts == cuts and place.life == life and place.node.counts:
            place.silent = True
            self._cancel_downloads(place)
            self._remove(place)

    def _mend(self, place: FlowHost) -> None:
        place.cut -= 1
        if place.cut:
            return
        place.up[0].set_cut(now_cut=False)
        place.down[0].set_cut(now_cut=False)
        if not place.silent:
            return
        place.silent = False
        if not place.node.counts:
            return
        for window in self._windows:
            window.welcome_back(place.node.index)
        # The updates that it missed, or the fragment itself, whichever is fewer bytes (protocol, Downlink).
        for fragment, (held, version) in enumerate(zip(place.node.versions, self._versions, strict=True)):
            if version > held:
                size = min((version - held) * self._down_bytes[fragment], self._snapshot_bytes[fragment])
                self._download(place, size, partial(place.node.updated, fragment, version), state=True)

    def upload(self, delta: Delta) -> None:
        """An offer, its credit, the bytes: one and a half round trips beside the bytes themselves."""
        place, size = self._places[delta.node], self._up_bytes[delta.fragment]
        late_s = 1.5 * place.group.rtt_s + place.node.fate.jitter_s()

        def through() -> None:
            place.uploads.pop(delta, None)
            self._tally.bytes_up += size
            self._agenda.after(late_s, lambda: self._on_delta(delta))

        if place.up:
            place.uploads[delta] = Transfer(place.up, size, through)
        else:
            through()

    def forget(self, delta: Delta) -> None:
        transfer = self._places[delta.node].uploads.pop(delta, None)
        if transfer:
            self._tally.bytes_up += transfer.cancel()

    def lost(self, steps: int) -> None:
        self._tally.lost_steps += steps / self._rules.fragments

    def skipped(self) -> None:
        self._tally.skipped += 1

    def turned(self, machines: int) -> None:
        self._working += machines
        if self._trace is not None:
            self._trace.append((self._agenda.now, float(self._working)))

    def gone(self, node: int) -> None:
        self._remove(self._places[node])

    # --- Windows

    def _opened(self, fragment: int, number: int) -> Window:
        expected = {place.node.index for place in self._places if self._may_serve(place, fragment, number)}
        return Window(fragment, number, expected, self._agenda.now)

    def _may_serve(self, place: FlowHost, fragment: int, number: int) -> bool:
        node, slots = place.node, self._rules.fragments
        if node.start_round is None or place.silent or not node.counts:
            return False
        return first_send_round(node.start_round, fragment, slots, node.start_slot) <= round_of(number, fragment, slots)

    def _on_delta(self, delta: Delta) -> None:
        """A delta is durable, unless it is of no use any more."""
        window, staleness = self._windows[delta.fragment], self._rules.max_staleness
        if delta.settled:  # its node died while the last of it was on its way, or has learnt that it comes too late
            self._tally.dropped += 1
            return
        admitted = window.number - staleness <= delta.window <= window.number
        if not admitted or delta.node in window.came or (window.closing and not staleness):
            delta.settled = True
            self._tally.dropped += 1
            self.lost(delta.steps)
            node = self._places[delta.node].node
            return self._agenda.after(0.5 * self._places[delta.node].group.rtt_s, lambda: node.refused(delta))
        delta.stored = True
        self._lateness.on_delta(delta.fragment, delta.window, self._agenda.now)
        if window.closing:
            self._late[delta.fragment].append(delta)
        else:
            window.add(delta)
            self._try_close(window)

    def _remove(self, place: FlowHost) -> None:
        for window in self._windows:
            window.remove(place.node.index)
            self._try_close(window)

    def _try_close(self, window: Window) -> None:
        if window.closing or not window.came:
            return
        quorum, now = self._rules.quorum, self._agenda.now
        if quorum is not None and window.quorum_at is None and window.timely >= quorum:
            window.quorum_at, staleness = now, self._rules.max_staleness
            self._lateness.has_quorum(window.fragment, window.number, window.opened_at, now, staleness)
            self._patient.append(window)
        if window.all_arrived:
            self._close(window)
        if self._patient and (grace_s := self._lateness.seconds) is not None:
            for waiting in self._patient:
                self._end_grace(waiting, grace_s)
            self._patient.clear()

    def _end_grace(self, window: Window, grace_s: float) -> None:
        """Close a window that has its quorum once its grace, as it is then, is over."""
        assert window.quorum_at is not None
        if window.closing:
            return
        if window.quorum_at + grace_s <= self._agenda.now:
            return self._close(window)
        self._agenda.at(window.quorum_at + grace_s, lambda: self._end_grace(window, self._lateness.seconds or 0.0))

    def _close(self, window: Window) -> None:
        if not window.closing:
            window.closing = True
            self._agenda.after(self._rules.commit_s, lambda: self._commit(window))

    def _commit(self, window: Window) -> None:
        fragment, tally, fragments = window.fragment, self._tally, self._rules.fragments
        self._versions[fragment] = window.number
        tally.commits += 1
        tally.merged += len(window.came)
        if self._trace is not None:
            self._merges.append(Merge(self._agenda.now, fragment, window.number, tuple(sorted(window.came))))
        for delta in window.came.values():
            delta.merged_in, delta.settled = window.number, True
            tally.stale += delta.window < window.number
            tally.useful_s += delta.seconds / fragments
        if fragment == fragments - 1 and window.number >= self._outer_steps:
            self._reached = True
            return self._end()
        self._start_ready(after=fragment)
        self._publish(fragment, window.number)
        following = self._windows[fragment] = self._opened(fragment, window.number + 1)
        for delta in self._late[fragment]:
            following.add(delta)
        self._late[fragment].clear()
        self._try_close(following)

    def _start_ready(self, after: int | None = None) -> None:
        """Newcomers start where the others are: with the round, or within it with the first slot that is not committed
        (protocol, Joining nodes); `after` the commit of a fragment."""
        round_index, slots = self._versions[-1], self._rules.fragments
        slot = 0
        if after is not None and after < slots - 1 and not (slot := self._slot_at(round_index)):
            return
        for place in self._places:
            if place.node.stage == "ready":
                place.node.start(round_index, slot)

    def _slot_at(self, round_index: int) -> int:
        slots = self._rules.fragments
        done = (version for version in self._versions[:-1])
        ahead = [slot for slot, version in enumerate(done) if round_of(version + 1, slot, slots) <= round_index]
        return min(ahead, default=slots - 1) if round_index else 0

    def _publish(self, fragment: int, version: int) -> None:
        size = self._down_bytes[fragment]
        for place in self._places:
            if place.node.stage not in ("away", "left") and not place.silent:
                if self._rules.lag:  # the message goes ahead of the bytes
                    self._agenda.after(0.5 * place.group.rtt_s, partial(place.node.announced, fragment, version))
                self._download(place, size, partial(place.node.updated, fragment, version))

    def _download(
        self, place: FlowHost, size: int, done: Callable[[], None], *, state: bool = False, trips: float = 0.5
    ) -> None:
        life = place.life
        late_s = trips * place.group.rtt_s + place.node.fate.jitter_s()

        def through() -> None:
            self._count_down(size, state=state)
            self._agenda.after(late_s, lambda: done() if place.life == life else None)

        if not place.down:
            return through()
        number = place.next_download = place.next_download + 1

        def carried() -> None:
            place.downloads.pop(number, None)
            through()

        place.downloads[number] = Transfer(place.down, size, carried), state

    def _cancel_downloads(self, place: FlowHost) -> None:
        for transfer, state in place.downloads.values():
            self._count_down(transfer.cancel(), state=state)
        place.downloads.clear()

    def _count_down(self, size: int, *, state: bool) -> None:
        if state:
            self._tally.bytes_state += size
        else:
            self._tally.bytes_down += size

    def _end(self) -> None:
        self._over = True

    def _outcome(self) -> Outcome:
        tally, nodes = self._tally, [place.node for place in self._places]
        # What a real run would flush at its end counts as merged: else a short case would seem worse than a long one.
        stored = [d for window in self._windows for d in window.came.values()] + [
            d for late in self._late for d in late
        ]
        owed_s = sum(node.flush() for node in nodes) + sum(d.seconds for d in stored if not d.settled)
        return Outcome(
            seconds=self._agenda.now,
            reached=self._reached,
            outer_steps=self._versions[-1],
            **asdict(replace(tally, useful_s=tally.useful_s + owed_s / self._rules.fragments)),
            inner_steps=sum(node.steps for node in nodes),
            compute_s=sum(node.clock.spans["compute"] for node in nodes),
            idle_s=sum(node.clock.spans["idle"] for node in nodes),
            down_s=sum(node.clock.spans["down"] for node in nodes),
            crashes=sum(place.crashes for place in self._places),
            timeline=tuple(self._trace or ()),
            windows=tuple(self._merges),
        )


# --- Sweeps of flow scenarios: a row for each variant at each swept value, with means over the seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant at one value of the swept key."""

    variant: str
    value: float | None
    outcomes: tuple[Outcome, ...]  # one for each seed
    published: float | None  # goodput that others report for it

    def mean(self, figure: Callable[[Outcome], float]) -> float:
        """Of a figure, over the seeds."""
        return statistics.fmean(map(figure, self.outcomes))

    @property
    def goodputs(self) -> list[float]:
        return [outcome.goodput for outcome in self.outcomes]

    @property
    def time_to_steps_s(self) -> float | None:
        """Clock seconds to the wanted steps; None unless every seed got there."""
        if not all(outcome.reached for outcome in self.outcomes):
            return None
        return self.mean(lambda outcome: outcome.seconds)

    def figures(self) -> dict[str, Any]:
        """For programs: means over the seeds; what the daemons count too is below `metrics`, under their names."""
        return {
            "variant": self.variant,
            "value": self.value,
            "goodput": self.mean(lambda o: o.goodput),
            "goodput_least": min(self.goodputs),
            "goodput_most": max(self.goodputs),
            "goodput_published": self.published,
            "idle_share": self.mean(lambda o: o.share(o.idle_s)),
            "down_share": self.mean(lambda o: o.share(o.down_s)),
            "lost_share": self.mean(lambda o: o.share(o.lost_s)),
            "stale_share": self.mean(lambda o: o.stale_share),
            "outer_steps": self.mean(lambda o: o.outer_steps),
            "seconds": self.mean(lambda o: o.seconds),
            "time_to_steps_s": self.time_to_steps_s,
            "lost_steps": self.mean(lambda o: o.lost_steps),
            "bytes_up": self.mean(lambda o: o.bytes_up),
            "bytes_down": self.mean(lambda o: o.bytes_down),
            "bytes_state": self.mean(lambda o: o.bytes_state),
            "machine_seconds": self.mean(lambda o: o.machine_s),
            "crashes": self.mean(lambda o: o.crashes),
            "skipped_sends": self.mean(lambda o: o.skipped),
            "metrics": _mean_of([outcome.metrics() for outcome in self.outcomes]),
        }


def run_all(
    scenario: FlowScenario, *, timeline: bool = False, watch: Callable[[Case], None] = lambda case: None
) -> list[Row]:
    """Play every case; `watch` hears of each before it is played. Raises as `play`."""
    rows = []
    reported = {(one.variant, one.value): one.goodput for one in scenario.published}
    for (variant, value), seeds in itertools.groupby(cases(scenario), key=lambda case: (case.variant, case.value)):
        outcomes = []
        for case in seeds:
            watch(case)
            outcomes.append(play(case.setting, timeline=timeline))
        published = reported.get((variant, value))
        rows.append(Row(variant=variant, value=value, outcomes=tuple(outcomes), published=published))
    return rows


def _mean_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _mean_of([one[name] for one in found])
        if isinstance(value, dict)
        else statistics.fmean(one[name] for one in found)
        for name, value in found[0].items()
    }
