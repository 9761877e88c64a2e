"""When windows close, with which deltas, and what is tried again: quorum, straggler grace, participation check."""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable
from statistics import median
from typing import Final

from farloop.algo import schedule
from farloop.algo.methods import method_named
from farloop.algo.spec import Fragment, NodeId
from farloop.algo.stages import Part, is_in
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.deadlines import ALARM as NO_PROGRESS
from farloop.coordinator.decide.deadlines import Deadlines
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.records import WindowCommitted
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.decide.run_state import ALARM as STORAGE
from farloop.coordinator.decide.run_state import Decisions, RunState
from farloop.coordinator.decide.windows import Window
from farloop.monitoring.units import few_of
from farloop.wire.reasons import Reason

# --- Straggler grace
#
# A fixed time fits one network only. Windows wait as long as deltas have recently been late after the quorum of the
# window that they name, open or not (arXiv 2604.21428 has such a grace window; this rule is our own).

_MEMORY: Final = 64  # recent deltas, and windows, that are remembered
_SHARE: Final = 0.5  # of a window's usual time to its quorum. Waiting longer would slow all nodes down to the slowest.
_HEADROOM: Final = 2.0  # factor on the greatest lateness seen: the next one may be greater


class Lateness:
    """How late deltas came after the quorum of the window that they name, and how long windows wait from that."""

    def __init__(self) -> None:
        self._quorum_at: dict[tuple[int, int], float] = {}  # of recent windows, by fragment and number
        self._lateness_s: deque[float] = deque(maxlen=_MEMORY)
        self._to_quorum_s: deque[float] = deque(maxlen=_MEMORY)

    def on_delta(self, fragment: int, window: int, now: float) -> None:
        """A delta arrived; it is late by the time since the quorum of the window that it names."""
        self._lateness_s.append(now - self._quorum_at.get((fragment, window), now))

    def has_quorum(self, fragment: int, window: int, opened_at: float, now: float, max_staleness: int) -> None:
        self._to_quorum_s.append(now - opened_at)
        self._quorum_at[fragment, window] = now
        oldest = window - max_staleness
        self._quorum_at = {key: at for key, at in self._quorum_at.items() if key[0] != fragment or key[1] >= oldest}

    def clock_jumped(self, seconds: float) -> None:
        self._quorum_at = {key: at + seconds for key, at in self._quorum_at.items()}

    @property
    def seconds(self) -> float | None:
        """Seconds from the quorum to the window's end; None before enough was measured: then windows wait for all."""
        if not self._to_quorum_s or not any(late > 0.0 for late in self._lateness_s):
            return None
        bound = _SHARE * median(self._to_quorum_s)
        # The latest, not most of them: a delta that is left out costs its sender the next turn as well, and training
        # stands still nowhere in the meantime.
        return min(bound, _HEADROOM * max((late for late in self._lateness_s if late <= bound), default=0.0))


class StragglerGrace(Lateness):
    """When open windows stop waiting for stragglers. Forgotten at a restart."""

    def __init__(self, *, enabled: bool) -> None:
        """`enabled`: the method has a grace; without one, windows close at their quorum."""
        super().__init__()
        self._enabled = enabled

    def update(self, window: Window, quorum: int | None, now: float) -> None:
        if window.quorum_at is not None or not window.has_quorum(quorum):
            return
        window.quorum_at = now
        terms = window.terms
        self.has_quorum(terms.fragment, terms.window, window.opened_at, now, window.max_staleness)

    def until(self, window: Window) -> float | None:
        """When an open window with its quorum stops waiting; None: no time limit."""
        seconds = self.seconds
        if not self._enabled or window.quorum_at is None or window.state != "open" or seconds is None:
            return None
        return window.quorum_at + seconds

    def deadlines(self, windows: Iterable[Window], now: float) -> list[float]:
        """Times to look at windows again, without those that passed and changed nothing (below the floor)."""
        untils = [self.until(window) for window in windows]
        return [until for until in untils if until is not None and until > now]

    def lasts(self, window: Window, now: float) -> bool:
        """Whether missing nodes have more time than the quorum took."""
        until = self.until(window)
        return self._enabled and (until is None or now < until)


# --- Participation check
#
# A live node is left out when none of its deltas was merged for some rounds, for any reason: refused, dropped, stalled
# or quarantined. If too large a share of the live nodes is left out, the model would become that of the others. Then
# the coordinator raises an alarm and, where windows wait for all nodes, commits nothing until these nodes are merged
# again or leave. Nodes that leave, drain or disconnect are not live: a run may shrink.

ROUNDS: Final = 3
"""Without a merge, after which a live node is left out: more than a joiner takes to its first send, or a late delta."""

FLOOR_SHARE: Final = 0.5  # least share of the live nodes that are merged, unless said otherwise
ALARM: Final = "participation"

_TAKE_NO_PART: Final = frozenset({"draining", "finished"})
"""States in which a node has a good reason not to send."""


class ParticipationCheck:
    """Raises an alarm, and holds commits, when too few of the live nodes are merged."""

    def __init__(self, ledger: Ledger, floor_share: float | None = None) -> None:
        """`floor_share` 0 holds nothing; None: `FLOOR_SHARE` if windows wait for all nodes, else 0."""
        self._held: set[int] = set()  # stages of the model whose commits are held now
        self._given_share = floor_share
        self._ledger = ledger
        self._merged: dict[NodeId, int] = {}  # the last round that each node was part of
        self._live_since: dict[NodeId, int] = {}
        self._parts: dict[NodeId, Part] = {}
        for (fragment, version), commit in ledger.commits.items():
            for share in commit.merged:
                self._on_merged(share.node, ledger.round_of(fragment, version))

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def holds_stage(self, stage: int) -> bool:
        return stage in self._held

    def let_go(self) -> None:
        self._held.clear()

    def begin_again(self) -> None:
        """An operator has acted: live nodes have `ROUNDS` rounds more, in which the run goes on."""
        self._merged.clear()
        self._live_since.clear()

    @property
    def _floor_share(self) -> float:
        """By the newest terms: setting a quorum accepts that some nodes are left out."""
        if self._given_share is not None:
            return self._given_share
        return FLOOR_SHARE if self._ledger.spec.terms.admission.quorum is None else 0.0

    def on_committed(self, record: WindowCommitted) -> None:
        for share in record.merged:
            self._on_merged(share.node, record.round)

    def update(self, members: Iterable[Member]) -> None:
        now = self._ledger.current_round
        self._parts = {member.name: member.holds for member in members if _is_live(member)}
        self._live_since = {name: self._live_since.get(name, now) for name in self._parts}

    def left_out(self, coming: Collection[NodeId] = ()) -> list[NodeId]:
        """Live nodes without a merge for `ROUNDS` rounds that are not in `coming`, the window about to close."""
        before = self._ledger.current_round - ROUNDS
        return sorted(
            name
            for name, since in self._live_since.items()
            if max(since, self._merged.get(name, since)) < before and name not in coming
        )

    def share(self) -> float:
        """Share of the live nodes that are not left out; 1 without live nodes."""
        return 1.0 - len(self.left_out()) / len(self._live_since) if self._live_since else 1.0

    def alarm(self, coming: Collection[NodeId], fragment: Fragment) -> str | None:
        """What is wrong if this fragment's window closes with these contributors, as a sentence; `holds_stage` says
        whether it must wait. Nodes that do not hold the fragment do not count."""
        least = self._floor_share or FLOOR_SHARE
        able = [name for name, part in self._parts.items() if is_in(fragment, part)]
        out = [name for name in self.left_out(coming) if name in able]
        bad = bool(out) and 1.0 - len(out) / len(able) < least
        self._held.discard(fragment.stage)
        if not bad:
            return None
        count = f"{len(out)} of {len(able)} live nodes"
        what = f"{count} were merged in none of the last {ROUNDS} rounds ({few_of(out, 4)})"
        if not self._floor_share:
            return f"{what}; the run goes on with the others"
        self._held.add(fragment.stage)
        return (
            f"{what}; nothing is committed until you act: farloop status says what is refused, and why; if a setting "
            "causes it, set it right (farloop run set), else start these nodes again or stop them, and it goes on by "
            f"itself; or farloop run release, after which it goes on as it is, for {ROUNDS} rounds at least"
        )

    def _on_merged(self, node: NodeId, round_index: int) -> None:
        self._merged[node] = max(self._merged.get(node, 0), round_index)


def _is_live(member: Member) -> bool:
    if member.session is None or member.stage != "training":
        return False
    return member.progress is None or member.progress.state not in _TAKE_NO_PART


# --- Closing of windows, and retries of their commits
#
# A decision stands: the draft of a closing window is retried until it is durable, or until its sum overflows.

SILENT: Final = "silent "  # prefix of the alarm of a node that no window waits for
QUARANTINE: Final = "quarantine of "

RETRY_S: Final = 1.0


class Closing:
    def __init__(self, run: RunState, decisions: Decisions, *, floor_share: float | None, drops_silent: bool) -> None:
        """`drops_silent`: close windows without a node that misses its deadline."""
        self._run, self._decisions = run, decisions
        self._ledger, self._windows, self._alarms = run.ledger, run.windows, run.alarms
        self.grace = StragglerGrace(enabled=method_named(run.ledger.spec.terms.method).grace)
        self.guard = ParticipationCheck(run.ledger, floor_share)
        self.node_deadlines = Deadlines(run, drops=drops_silent)
        self._commits: dict[int, ev.Commit] = {}
        """Of the windows that are closing. A decision stands: after a failure it is tried again (commit order)."""
        self._retry_at: dict[int, float] = {}
        self._ahead: set[int] = set()  # fragments whose windows could close, and wait for another stage's

    # --- deciding

    def try_all(self) -> None:
        for fragment in list(self._windows):
            self.try_one(fragment)

    def try_one(self, fragment: int) -> None:
        if self._run.stands_still or not self._run.begun:
            return
        window = self._windows[fragment]
        terms = self._ledger.terms_at(window.terms)
        quorum = None if window.needs_steps and window.terms.final else terms.admission.quorum
        patient = self.grace.lasts(window, self._run.now)
        floor = self._ledger.floor_of(window.terms)
        why = window.why_close(quorum, floor, patient=patient)
        if why is not None and self._screened(window):
            why = window.why_close(quorum, floor, patient=patient)
        short = f"floor of fragment {fragment}"
        self._alarms.pop(short, None)
        if why is None:
            if lacking := window.short_of(floor):
                self._alarms[short] = lacking
            return
        if self._held(window):
            return
        if self._ledger.is_too_far_ahead(window.terms):
            self._ahead.add(fragment)
            return
        self._ahead.discard(fragment)
        if len(window.contributors) < floor:
            window.make_void(why)
        self.fix_rounds()
        window.state = "closing"
        spec = dataclasses.replace(self._ledger.spec, terms=terms)
        following = self._ledger.terms_of(fragment, window.terms.window + 1, window.terms.round + 1)
        served, before = self._ledger.served(fragment), self._ledger.made(fragment)
        draft = window.draft(spec, self._ledger.rounds, why, served, following, before)
        commit = self._commits[fragment] = ev.Commit(draft=draft, codec_down=window.terms.codec_down)
        self._decisions.do(commit)

    def fix_rounds(self) -> None:
        """Fix the round after the newest open window's round. A window of round r may close before any of round r − 1,
        and a restart may find a commit whose round is not in the journal."""
        layout = self._ledger.spec.identity.layout
        while plan := self._ledger.next_round_to_fix():
            terms = self._ledger.terms_in(plan.index)
            # Stages of a pipelined model all do the same number of steps.
            by_speed = method_named(terms.method).per_node_h and layout.num_stages == 1
            members = self._run.members.values() if by_speed else ()
            rates = {member.name: member.steps_per_s for member in members if member.counts}
            dealt = schedule.dealt(plan, layout.slots, rates=rates, shares=terms.schedule.h_share_of)
            self._decisions.record(rec.RoundFixed(round=dealt))

    def _held(self, window: Window) -> bool:
        fragment = self._ledger.fragment(window.terms.fragment)
        about = f"{ALARM} in stage {fragment.stage}" if fragment.stage else ALARM
        self.guard.update(self._run.members.values())
        self._alarms.pop(about, None)
        if alarm := self.guard.alarm(window.contributors, fragment):
            self._alarms[about] = alarm
        return self.guard.holds_stage(fragment.stage)

    def _screened(self, window: Window) -> bool:
        """Refuse deltas that must not be merged. Returns whether there were any."""
        ledger, holders = self._ledger, self._ledger.holders(window.terms.fragment)
        refusals = ledger.screening.verdicts(window.terms, list(window.inputs.values()), ledger.rounds, holders)
        for refusal in refusals:
            window.refuse(refusal)
        return bool(refusals)

    # --- outcomes

    def on_committed(self, record: rec.WindowCommitted, closed: Window) -> None:
        self.node_deadlines.on_committed(closed, self._run.now)
        del self._commits[record.fragment]
        self._alarms.pop(f"commit of fragment {record.fragment}", None)
        self.guard.on_committed(record)

    def show_quarantine(self) -> None:
        for what in [what for what in self._alarms if what.startswith(QUARANTINE)]:
            del self._alarms[what]
        for node, why in self._ledger.screening.in_quarantine(self._ledger.started).items():
            self._alarms[f"{QUARANTINE}{node}"] = why

    def try_those_ahead(self) -> None:
        for fragment in sorted(self._ahead & self._windows.keys()):
            self.try_one(fragment)

    def on_commit_failed(self, event: ev.CommitFailed) -> None:
        self._alarms[f"commit of fragment {event.fragment}"] = event.detail
        self._retry_at[event.fragment] = self._run.now + RETRY_S

    def on_overflow(self, event: ev.SumOverflow) -> None:
        """The sum overflows fp32 and would again: leave the longest delta out."""
        window, detail = self._windows[event.fragment], f"{Reason.TOO_MUCH.sentence} (of the update, {event.why})"
        if event.longest is None:
            self._alarms[f"commit of fragment {event.fragment}"] = detail
            return  # a window without deltas takes no step; what it publishes is finite, or no version ever was
        del self._commits[event.fragment]
        window.refuse(rec.Refusal(blob=event.longest, reason=Reason.TOO_MUCH, detail=detail))
        window.open_again(self._ledger.inputs, self._ledger.terms_at(window.terms).admission.quorum)
        self.try_one(event.fragment)

    def poll(self) -> None:
        self.check_progress()
        if not self.guard.holds:
            return
        self.guard.update(self._run.members.values())
        if not self.guard.left_out():
            self.guard.let_go()
            for about in [about for about in self._alarms if about.startswith(ALARM)]:
                del self._alarms[about]
        self.try_all()

    # --- time

    def deadlines(self) -> list[float]:
        late = self.node_deadlines.timers(self._windows, self._run.now)
        return [*self._retry_at.values(), *self.grace.deadlines(self._windows.values(), self._run.now), *late]

    def pass_time(self) -> None:
        for fragment in [f for f, at in self._retry_at.items() if at <= self._run.now]:
            del self._retry_at[fragment]
            self._decisions.do(self._commits[fragment])
        self._drop_overdue()
        self.try_all()
        self.check_progress()

    def check_progress(self) -> None:
        """Raise an alarm when nothing was committed for longer than usual, and for nodes that no window waits for."""
        for what in [what for what in self._alarms if what == NO_PROGRESS or what.startswith(SILENT)]:
            del self._alarms[what]
        for node, why in self.node_deadlines.resting(self._run.now).items():
            self._alarms[f"{SILENT}{node}"] = why
        if self._run.stands_still or self.guard.holds or STORAGE in self._alarms:
            return  # that has an alarm of its own
        if alarm := self.node_deadlines.alarm(self._windows, self._run.now):
            self._alarms[NO_PROGRESS] = alarm

    def _drop_overdue(self) -> None:
        if self._run.stands_still or STORAGE in self._alarms:
            return self.node_deadlines.held(self._run.now)
        for window, node in self.node_deadlines.overdue(self._windows, self._run.now):
            if node in window.missing:
                self.node_deadlines.on_missed(window, node, self._run.now)
                expects = self.node_deadlines.expects(node, self._run.now)
                for one in [window] if expects else self._windows.values():
                    if one.state == "open" and node in one.missing:
                        one.removed[node] = Reason.LATE

    def clock_jumped(self, seconds: float) -> None:
        for window in self._windows.values():
            window.opened_at += seconds
            window.quorum_at = None if window.quorum_at is None else window.quorum_at + seconds
        self.grace.clock_jumped(seconds)
        self.node_deadlines.clock_jumped(seconds)
