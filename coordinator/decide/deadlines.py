"""How long a window waits for a node's delta: a multiple of the node's usual time.

The usual time is measured from the node's stored deltas alone, not from its reports: a node may stay connected and
never send. A slow node on a thin link has a long deadline of its own. A node that misses its deadline again and again
is not expected for a while, twice as long each time, so it costs the run less and less. Everything is in memory: a
restart measures again.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median, median_low
from typing import Final

from farloop.algo import schedule
from farloop.algo.spec import NodeId
from farloop.coordinator.decide.roster import SLOW_TASKS, STALL_S
from farloop.coordinator.decide.run_state import RunState
from farloop.coordinator.decide.windows import Window
from farloop.monitoring.units import duration_text
from farloop.wire.messages import Offer

ALARM: Final = "no-progress"

MULTIPLE: Final = 5.0  # times as long as usual a delta may take

FLOOR_S: Final = STALL_S  # shortest deadline: a process may stand still for seconds

FIRST_S: Final = STALL_S * SLOW_TASKS
"""Shortest deadline of a node that sent too few deltas: its first step may compile the model."""

UNKNOWN_S: Final = 3600.0  # the same where no node has done a step yet

THIN_BYTES_PER_S: Final = 125e3  # 1 Mbit/s: assumed speed of the link of a node that sent too few deltas
LEAST: Final = 3  # deltas of a node, or windows of the run, by which their usual time is known
_MEMORY: Final = 8  # recent deltas of a node, and windows, that are remembered
_MOST: Final = 50.0  # bound of a node's usual time, in times that of the faster half of the nodes
MISSES: Final = 2.0  # after so many missed deadlines a node is not expected for a while
_PARDON: Final = 0.25  # but each delta of it that comes in time makes up for so much of one

REST: Final = 10.0  # how long the node is not expected, in times the missed deadline; it doubles each time
_MOST_RESTS: Final = 10  # doublings
ALARM_SHARE: Final = 0.5  # of a deadline, after which it is said that nothing is committed


@dataclass(slots=True)
class _Pace:
    took: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    """(seconds from the window's opening to the delta, own steps in the round) of recent deltas."""
    usual_s: float | None = None  # the median of these, for a round of
    steps: int = 0  # so many own steps; None while too few are known
    misses: float = 0.0
    missed_at: float = 0.0
    rests: int = 0  # how often it was suspended since it was last in good standing
    rests_until: float = 0.0
    why: str = ""  # it is not expected, in a sentence


class Deadlines:
    def __init__(self, run: RunState, *, drops: bool) -> None:
        """`drops`: drop a node that misses its deadline from the window; else only report it."""
        self._ledger, self._run, self._drops = run.ledger, run, drops
        self._paces: dict[NodeId, _Pace] = {}
        self._opened_at: dict[tuple[int, int], float] = {}  # of recent windows, by fragment and number
        self._windows_took: deque[tuple[float, int]] = deque(maxlen=_MEMORY)
        """(seconds from opening to commit, steps of its round)."""
        self._offered: dict[tuple[NodeId, int], int] = {}
        """(node, fragment) → newest window that it offered a delta for."""
        self._middle: float | None = 0.0  # `_middle_s`; None until it is asked for
        self._rested = set[NodeId]()  # nodes that were suspended; some are no longer
        self._moved_at = run.now
        """Of the last commit, which restarts the time of nodes: while they wait for one window they serve no other."""

    # --- what is seen

    def on_opened(self, window: Window) -> None:
        fragment, number = window.terms.fragment, window.terms.window
        oldest = number - window.max_staleness
        self._opened_at = {k: at for k, at in self._opened_at.items() if k[0] != fragment or k[1] >= oldest}
        self._opened_at[fragment, number] = window.opened_at

    def on_offer(self, offer: Offer) -> None:
        key = (offer.blob.node, offer.blob.fragment)
        self._offered[key] = max(offer.window, self._offered.get(key, 0))

    def on_delta(self, offer: Offer, now: float) -> None:
        node = offer.blob.node
        pace = self._paces.setdefault(node, _Pace())
        since = self._opened_at.get((offer.blob.fragment, offer.window))
        if since is not None and any(contribution.steps for contribution in offer.contributors):
            steps = self._steps(self._ledger.round_of(offer.blob.fragment, offer.window), node)
            pace.took.append((now - since, steps))
            if len(pace.took) >= LEAST:
                pace.steps = steps
                pace.usual_s = median(took * _longer(steps, then) for took, then in pace.took)
                self._middle = None
        pace.misses = max(0.0, pace.misses - _PARDON)
        pace.rests_until = 0.0
        if not pace.misses:
            pace.rests = 0

    def on_committed(self, window: Window, now: float) -> None:
        self._windows_took.append((now - window.opened_at, self._steps(window.terms.round, None)))
        self._moved_at = now
        here, _ = self._run.members, self._middle_s  # of those who are here until now
        self._paces = {node: pace for node, pace in self._paces.items() if node in here}
        self._offered = {key: number for key, number in self._offered.items() if key[0] in here}

    def held(self, now: float) -> None:
        """Nothing can be committed: this time counts against no node."""
        self._moved_at = now

    def on_restart(self, node: NodeId) -> None:
        """The node was restarted, perhaps repaired. Its record is cleared for two restarts."""
        pace = self._paces.get(node)
        if pace is not None and pace.rests <= 2:
            pace.rests_until = 0.0

    def clock_jumped(self, seconds: float) -> None:
        self._moved_at += seconds
        self._opened_at = {key: at + seconds for key, at in self._opened_at.items()}
        for pace in self._paces.values():
            pace.missed_at += seconds
            pace.rests_until += seconds if pace.rests_until else 0.0

    # --- what follows

    def has_offered(self, node: NodeId, window: Window) -> bool:
        """Whether the node offered a delta for this window, or a later one."""
        return self._offered.get((node, window.terms.fragment), 0) >= window.terms.window

    def expects(self, node: NodeId, now: float) -> bool:
        pace = self._paces.get(node)
        return pace is None or pace.rests_until <= now

    def resting(self, now: float) -> dict[NodeId, str]:
        """Suspended nodes, with the reason as a sentence."""
        if not self._rested:
            return {}
        self._rested = {node for node in self._rested if node in self._paces and self._paces[node].rests_until > now}
        return {node: pace.why for node, pace in self._paces.items() if node in self._rested}

    def overdue(self, windows: Mapping[int, Window], now: float) -> list[tuple[Window, NodeId]]:
        """Windows with nodes that missed the deadline, to be dropped."""
        found = [
            (window, node)
            for window in self._heads(windows)
            for node, since, allowed in self._awaited(window, now)
            if since + allowed <= now
        ]
        return found if self._drops else []

    def on_missed(self, window: Window, node: NodeId, now: float) -> None:
        """Count a missed deadline, and suspend a node that misses several."""
        pace = self._paces.setdefault(node, _Pace())
        since, allowed = self._since(window, node), self._allowed_s(window, node, partial(self._first_s, window))
        if since < pace.missed_at:
            return  # of windows that it missed at once, one counts
        pace.missed_at = now
        pace.misses += 1.0 if pace.took else MISSES
        if pace.misses < MISSES:
            return
        rest_s = REST * allowed * 2 ** min(pace.rests, _MOST_RESTS)
        pace.misses, pace.rests, pace.rests_until = MISSES - 1.0 + _PARDON, pace.rests + 1, now + rest_s
        self._rested.add(node)
        pace.why = (
            f"it sent no delta within {duration_text(allowed)}; no window waits for it until one of its deltas comes "
            f"in time, or {duration_text(rest_s)} are over"
        )

    def timers(self, windows: Mapping[int, Window], now: float) -> list[float]:
        heads = self._heads(windows)
        times = [
            since + share * allowed
            for window in heads
            for _, since, allowed in self._awaited(window, now)
            for share in (ALARM_SHARE, 1.0)
        ]
        return [at for at in (*times, *map(self._looked_at, heads)) if at > now]

    def alarm(self, windows: Mapping[int, Window], now: float) -> str | None:
        """An alarm that nothing is committed, since when, and which nodes owe what; None in normal operation."""
        late = [
            (window, node)
            for window in self._heads(windows)
            for node, since, allowed in self._awaited(window, now)
            if since + ALARM_SHARE * allowed <= now
        ]
        stands = [
            (window, node)
            for window in windows.values()
            if window.state == "open" and not window.waits
            for node in sorted(set(window.removed) - window.contributors)
        ]
        if not late and not stands:  # as at most events: no need of the usual time
            return None
        quiet_s, usual = now - self._moved_at, self._usual_window_s
        run_s = FIRST_S if usual is None else max(FLOOR_S, MULTIPLE * usual)
        if not late and quiet_s < ALARM_SHARE * run_s:
            return None
        than = f"; a window usually takes {duration_text(usual)}" if usual is not None else ""
        owed: dict[NodeId, list[Window]] = {}
        for window, node in late or stands:
            owed.setdefault(node, []).append(window)
        names = sorted(owed)
        said = "; ".join(self._owes(node, owed[node]) for node in names[:4])
        more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
        return f"nothing was committed for {duration_text(quiet_s)}{than}: {said}{more}"

    # --- how

    def _allowed_s(self, window: Window, node: NodeId, first_s: Callable[[int], float]) -> float:
        """Seconds that a node has for its delta of this window. `first_s` is `_first_s` of the window, by steps."""
        steps = self._steps(window.terms.round, node)
        pace = self._paces.get(node)
        if pace is None or pace.usual_s is None:
            allowed = first_s(steps)
        else:
            usual = min(pace.usual_s, _MOST * self._middle_s)
            allowed = max(FLOOR_S, MULTIPLE * usual * _longer(steps, pace.steps))
        member = self._run.members.get(node)
        return allowed * (SLOW_TASKS if member is not None and member.evaluates else 1.0)

    def _heads(self, windows: Mapping[int, Window]) -> list[Window]:
        """The windows that are due first: nodes wait for their commit. None while a window is being committed."""
        if any(window.state == "closing" for window in windows.values()):
            return []
        waiting = {f: self._due(window) for f, window in windows.items() if window.state == "open" and window.waits}
        first = min(waiting.values(), default=0)
        return [windows[fragment] for fragment, due in waiting.items() if due == first]

    def _due(self, window: Window) -> int:
        layout, terms = self._ledger.spec.identity.layout, window.terms
        plan = self._ledger.rounds.get(terms.round)
        if plan is None:
            return 0
        return plan.start + schedule.due_in(terms, layout.fragments[terms.fragment], layout.slots, plan.length)

    def _looked_at(self, window: Window) -> float:
        """No node of the window is late, nor half of any deadline over, before this. Until then nothing is reckoned:
        that is done at every event, for every node."""
        return max(window.opened_at, self._moved_at) + ALARM_SHARE * FLOOR_S

    def _awaited(self, window: Window, now: float) -> list[tuple[NodeId, float, float]]:
        """(node, since when, seconds allowed) of the nodes that the window waits for; none before `_looked_at`."""
        if now < self._looked_at(window):
            return []
        first_s = cache(partial(self._first_s, window))  # it is the same for all nodes without measurements
        return [
            (node, self._since(window, node), self._allowed_s(window, node, first_s)) for node in sorted(window.missing)
        ]

    def _since(self, window: Window, node: NodeId) -> float:
        member = self._run.members.get(node)
        return max(window.opened_at, self._moved_at, member.awaited_since if member is not None else 0.0)

    def _steps(self, round_index: int, node: NodeId | None) -> int:
        plan = self._ledger.rounds.get(round_index)
        return 0 if plan is None else plan.length if node is None else plan.steps_of(node)

    @property
    def _middle_s(self) -> float:
        """The usual time of the quicker half of the nodes."""
        if self._middle is None:
            self._middle = median_low(one.usual_s for one in self._paces.values() if one.usual_s is not None)
        return self._middle

    @property
    def _usual_window_s(self) -> float | None:
        steps = self._steps(self._ledger.current_round, None)
        if len(self._windows_took) < LEAST:
            return None
        return median(seconds * _longer(steps, then) for seconds, then in self._windows_took)

    def _first_s(self, window: Window, steps: int) -> float:
        """Deadline of a node without measurements: by other nodes' windows, all steps, and a thin link."""
        usual, slots = self._usual_window_s, self._ledger.spec.identity.layout
        known = [s for member in self._run.members.values() if (s := member.seconds_per_step) is not None]
        if usual is None and not known:
            return UNKNOWN_S
        slot = slots.fragments[window.terms.fragment].slot
        num_bytes = sum(fragment.numel for fragment in slots.fragments if fragment.slot == slot)  # at 8 bits
        transfer_s = 2 * num_bytes / THIN_BYTES_PER_S
        step_s = median(known) if known else 0.0
        return max(FIRST_S, 2 * MULTIPLE * (usual or 0.0), 2 * MULTIPLE * steps * step_s) + MULTIPLE * transfer_s

    def _owes(self, node: NodeId, windows: Collection[Window]) -> str:
        window = min(windows, key=lambda one: (one.terms.fragment, one.terms.window))
        more = f" (and of {len(windows) - 1} more fragments)" if len(windows) > 1 else ""
        what = f"{node} owes its delta for window {window.terms.window} of fragment {window.terms.fragment}{more}"
        offered = self.has_offered(node, window)
        member = self._run.members.get(node)
        if member is None or member.session is None:
            state = "it is not connected"
        elif member.progress is None:
            state = "it is connected and has reported nothing"
        else:
            state = f"it reports {member.progress.state!r} at inner step {member.progress.inner_steps}"
        return f"{what}: {state}" + (", and offered the delta without sending it" if offered else "")


def _longer(steps: int, then: int) -> float:
    return max(1.0, steps / then) if steps and then else 1.0
