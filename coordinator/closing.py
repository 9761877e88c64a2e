"""When windows close, with which deltas, and what is tried again: the commits that are decided (protocol D, E, O).

Pure, like the machine whose part it is. A decision stands: once a window is closing, its draft is tried until it is
durable, or until it turns out that no arithmetic can hold it.
"""

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final

from farloop.algo import schedule
from farloop.algo.methods import method_named
from farloop.algo.spec import NodeId, RoundPlan
from farloop.coordinator import events as ev
from farloop.coordinator import records as rec
from farloop.coordinator.deadlines import ALARM as NO_PROGRESS
from farloop.coordinator.deadlines import Deadlines
from farloop.coordinator.decisions import Decisions
from farloop.coordinator.grace import Grace
from farloop.coordinator.guard import ALARM, Guard
from farloop.coordinator.hold import ALARM as STORAGE
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.roster import Member
from farloop.coordinator.windows import Window
from farloop.wire.reasons import Reason

SILENT: Final = "silent "
"""Begin of the alarm that names a node for which no window waits."""

QUARANTINE: Final = "quarantine of "

RETRY_S: Final = 1.0
"""Pause before a failed commit is tried again."""


class Closing:
    """The windows of one machine on their way to a commit."""

    def __init__(
        self,
        ledger: Ledger,
        decisions: Decisions,
        windows: Mapping[int, Window],
        alarms: MutableMapping[str, str],
        *,
        now: float,
        floor_share: float | None,
        members: Callable[[], Mapping[NodeId, Member]],
        drops_silent: bool,
        speeds: Callable[[], Mapping[NodeId, float]],
        stands_still: Callable[[], bool],
    ) -> None:
        """`windows` are the open ones, by fragment. `drops_silent`: whether a window goes on without a node that misses
        its deadline. `speeds`: inner steps a second, of who deals with rounds of their
        own; `stands_still`: whether no window may close now."""
        self._ledger, self._decisions, self._windows, self._alarms = ledger, decisions, windows, alarms
        self._members, self._speeds, self._stands_still = members, speeds, stands_still
        self.grace = Grace(ledger.spec.terms, lambda window: ledger.terms_at(window.terms).quorum)
        self.guard = Guard(ledger, floor_share)
        self.node_deadlines = Deadlines(ledger, members, now=now, drops=drops_silent)
        self.now = now
        """The machine's; whoever changes it calls what follows from it."""
        self._commits: dict[int, ev.Commit] = {}
        """Of the windows that are closing. A decision stands: after a failure it is tried again (protocol O)."""
        self._retry_at: dict[int, float] = {}
        self._ahead: set[int] = set()
        """Fragments whose windows could close, and wait for another stage's."""

    # --- deciding

    def try_all(self) -> None:
        """Close every window that can be closed."""
        for fragment in list(self._windows):
            self.try_one(fragment)

    def try_one(self, fragment: int) -> None:
        """Close the fragment's window, if it can be."""
        if self._stands_still():
            return
        window = self._windows[fragment]
        terms = self._ledger.terms_at(window.terms)
        quorum = None if window.needs_steps and window.terms.final else terms.quorum
        patient = self.grace.lasts(window, self.now)
        why = window.why_close(quorum, terms.floor, patient=patient)
        if why is not None and self._screened(window):
            why = window.why_close(quorum, terms.floor, patient=patient)
        short = f"floor of fragment {fragment}"
        self._alarms.pop(short, None)
        if why is None:
            if lacking := window.short_of(terms.floor):
                self._alarms[short] = lacking
            return
        if self._held(window):
            return
        if self._ledger.is_too_far_ahead(window.terms):
            self._ahead.add(fragment)
            return
        self._ahead.discard(fragment)
        if len(window.contributors) < terms.floor:
            window.make_void(why)
        self.fix_rounds()
        window.state = "closing"
        spec = dataclasses.replace(self._ledger.spec, terms=terms)
        following = self._ledger.terms_of(fragment, window.terms.window + 1, window.terms.round + 1)
        draft = window.draft(spec, self._ledger.rounds, why, self._ledger.served(fragment), following)
        commit = self._commits[fragment] = ev.Commit(draft=draft, codec_down=window.terms.codec_down)
        self._decisions.do(commit)

    def fix_rounds(self) -> None:
        """Fix what the open windows need: the round after the newest of theirs (protocol B).

        A window of round r may close before any of round r − 1 did, and a restart may find a commit whose round is not
        in the journal.
        """
        while plan := self._ledger.next_round_to_fix():
            self._decisions.record(rec.RoundFixed(round=self._dealt(plan)))

    def _dealt(self, plan: RoundPlan) -> RoundPlan:
        """The round with every node's own steps: those of its share, and where the method lets slow nodes do fewer, no
        more than its speed allows. The stages of a cut model do as many as each other."""
        layout, terms = self._ledger.spec.identity.layout, self._ledger.terms_in(plan.index)
        by_speed = method_named(terms.method).per_node_h and layout.num_stages == 1
        rates = self._speeds() if by_speed else {}
        return schedule.dealt(plan, layout.slots, rates=rates, shares=terms.h_share_of)

    def _held(self, window: Window) -> bool:
        """Whether too few of the live nodes would be part of the run, if this window closed now."""
        fragment = self._ledger.fragment(window.terms.fragment)
        about = f"{ALARM} in stage {fragment.stage}" if fragment.stage else ALARM
        self.guard.look(self._members().values())
        self._alarms.pop(about, None)
        if alarm := self.guard.alarm(window.contributors, fragment):
            self._alarms[about] = alarm
        return self.guard.holds_stage(fragment.stage)

    def _screened(self, window: Window) -> bool:
        """Leave out what must not be merged. Whether there was any."""
        ledger, holders = self._ledger, self._ledger.holders(window.terms.fragment)
        refusals = ledger.screening.verdicts(window.terms, list(window.inputs.values()), ledger.rounds, holders)
        for refusal in refusals:
            window.refuse(refusal)
        return bool(refusals)

    # --- what became of it

    def committed(self, record: rec.WindowCommitted, closed: Window) -> None:
        """It is durable; the ledger knows."""
        self.node_deadlines.committed(closed, self.now)
        del self._commits[record.fragment]
        self._alarms.pop(f"commit of fragment {record.fragment}", None)
        self.guard.committed(record)

    @property
    def in_quarantine(self) -> dict[NodeId, str]:
        """Whose deltas are measured and not merged, and why."""
        return self._ledger.screening.in_quarantine(self._ledger.started)

    def show_quarantine(self) -> None:
        """An alarm for each of them."""
        for what in [what for what in self._alarms if what.startswith(QUARANTINE)]:
            del self._alarms[what]
        for node, why in self.in_quarantine.items():
            self._alarms[f"{QUARANTINE}{node}"] = why

    def try_those_ahead(self) -> None:
        """Another stage may have come on."""
        for fragment in sorted(self._ahead & self._windows.keys()):
            self.try_one(fragment)

    def failed(self, event: ev.CommitFailed) -> None:
        """Nothing was changed: the same is tried again soon."""
        self._alarms[f"commit of fragment {event.fragment}"] = event.detail
        self._retry_at[event.fragment] = self.now + RETRY_S

    def too_much(self, event: ev.TooMuch) -> None:
        """A sum that fp32 does not hold will not be held at the next attempt either: the longest delta is left out."""
        window = self._windows[event.fragment]
        if event.longest is None:
            self._alarms[f"commit of fragment {event.fragment}"] = event.detail
            return  # a window without deltas takes no step; what it publishes is finite, or no version ever was
        del self._commits[event.fragment]
        window.refuse(rec.Refusal(blob=event.longest, reason=Reason.TOO_MUCH, detail=event.detail))
        window.open_again(self._ledger.inputs, self._ledger.terms_at(window.terms).quorum)
        self.try_one(event.fragment)

    def look(self) -> None:
        """After any event: it may have mended what the guard holds the run for, and what alarms tell of."""
        self.look_for_progress()
        if not self.guard.holds:
            return
        self.guard.look(self._members().values())
        if not self.guard.left_out():
            self.guard.let_go()
            for about in [about for about in self._alarms if about.startswith(ALARM)]:
                del self._alarms[about]
        self.try_all()

    # --- time

    def deadlines(self) -> list[float]:
        """When `pass_time` has something to do."""
        late = self.node_deadlines.timers(self._windows, self.now)
        return [*self._retry_at.values(), *self.grace.deadlines(self._windows.values(), self.now), *late]

    def pass_time(self) -> None:
        """Try again what failed, and close what has waited long enough."""
        for fragment in [f for f, at in self._retry_at.items() if at <= self.now]:
            del self._retry_at[fragment]
            self._decisions.do(self._commits[fragment])
        self._drop_overdue()
        self.try_all()
        self.look_for_progress()

    def look_for_progress(self) -> None:
        """Say so where nothing is committed for longer than usual, and who owes what; and whom no window waits for."""
        for what in [what for what in self._alarms if what == NO_PROGRESS or what.startswith(SILENT)]:
            del self._alarms[what]
        for node, why in self.node_deadlines.resting(self.now).items():
            self._alarms[f"{SILENT}{node}"] = why
        if self._stands_still() or self.guard.holds or STORAGE in self._alarms:
            return  # that has an alarm of its own
        if alarm := self.node_deadlines.alarm(self._windows, self.now):
            self._alarms[NO_PROGRESS] = alarm

    def _drop_overdue(self) -> None:
        """The windows that are due go on without the nodes that missed their deadline."""
        if self._stands_still() or STORAGE in self._alarms:
            return self.node_deadlines.held(self.now)
        for window, node in self.node_deadlines.overdue(self._windows, self.now):
            if node in window.missing:
                self.node_deadlines.missed(window, node, self.now)
                expects = self.node_deadlines.expects(node, self.now)
                for one in [window] if expects else self._windows.values():
                    if one.state == "open" and node in one.missing:
                        one.removed[node] = Reason.LATE

    def clock_jumped(self, seconds: float) -> None:
        """This process stood still: every deadline moves (protocol C)."""
        for window in self._windows.values():
            window.opened_at += seconds
            window.quorum_at = None if window.quorum_at is None else window.quorum_at + seconds
        self.grace.clock_jumped(seconds)
        self.node_deadlines.clock_jumped(seconds)
