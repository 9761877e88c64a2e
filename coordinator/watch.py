"""Who has become slow or hangs in the run that goes on, and what is done about it, one rung at a time. Pure.

The rules are those of `routing/anomalies.py`, what they compare is `pacing.py`'s to know; here rounds end, findings
begin and are over, and the ladder is climbed: its next rung waits until there were `REST_ROUNDS` rounds to judge the
last one by. Sees what the machine sees, and changes nothing itself: what is to be done is told to the shell. In memory
only.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from farloop.algo.parts import fragments_of
from farloop.coordinator import events as ev
from farloop.coordinator.machine import CoordinatorMachine
from farloop.coordinator.matrix import COORDINATOR, Matrix
from farloop.coordinator.pacing import JUDGED, USUAL_AFTER, Pacing
from farloop.coordinator.places import Places
from farloop.coordinator.routing.anomalies import (
    LEAST_NODES,
    OF_ROUNDS,
    Action,
    Finding,
    Kind,
    Progress,
    Sample,
    deadline_s,
    hung,
    next_step,
    slow,
)
from farloop.coordinator.routing.hysteresis import CHANGED, FOR_ROUNDS
from farloop.coordinator.routing.lightening import Advice, lighter
from farloop.coordinator.windows import Window
from farloop.wire import messages as msg

ADAPTS: Final = ("off", "advise", "drop", "act")
"""What is done: nothing is looked at; only links are measured anew; and a node that misses its deadline is dropped from
the window (`deadlines.py`); all that can be done."""

LEAST_S: Final = 2.0
"""Rounds that are shorter are judged together: nodes tell of their steps once a second."""

REST_ROUNDS: Final = FOR_ROUNDS
"""Judged ones, between two rungs for the same fault."""

REMEMBERED: Final = 20
"""Judged rounds for which it is known what was done about a fault that is over."""

LEAST_WINDOWS: Final = 5
"""That were timed, before one can be past its deadline."""

SLACK_S: Final = 5.0
"""On top of what windows take."""

_KEPT_WINDOWS: Final = 64


@dataclass(slots=True, kw_only=True)
class Anomaly:
    """A fault, since when it is known, and what was done."""

    finding: Finding
    round: int
    """In which it was named."""
    judged: int = 0
    """Rounds since then."""
    rested: float = 0.0
    """Since the last rung: judged rounds of what is slow, seconds of what hangs."""
    taken: list[Action] = field(default_factory=list)
    """Rungs that were climbed."""
    action: Action | None = None
    """The last rung, climbed or not ..."""
    done: bool = False
    """... and whether it was carried out."""
    why: str = ""
    """Of that rung, in a sentence."""
    advice: Advice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Something to be done about an anomaly now. Where `carry_out` is not set it is only said."""

    action: Action
    anomaly: Anomaly
    carry_out: bool


class Watch:
    """Of one coordinator. `saw` hears events before the machine does, `look` is called some times a second."""

    def __init__(self, adapt: str = "drop") -> None:
        assert adapt in ADAPTS, adapt
        self.adapt = adapt
        self.pacing, self._places = Pacing(), Places()
        self.anomalies: dict[tuple[Kind, str], Anomaly] = {}
        """What is found now."""
        self.over: list[Anomaly] = []
        """What is not found any more, since the last look."""
        self._before: dict[tuple[Kind, str], tuple[int, list[Action]]] = {}
        """What was done about faults that are over, and in which judged round they were."""
        self._rounds: deque[Mapping[str, Sample]] = deque(maxlen=OF_ROUNDS)
        self._judged = 0
        self.round = 0
        """The run's, as it was looked at last."""
        self._closed_at: float | None = None
        self._window_s: deque[float] = deque(maxlen=_KEPT_WINDOWS)
        self._done: dict[tuple[str, int], int] = {}
        """(node, fragment) → newest window that it has a delta in."""
        self._offered: dict[tuple[str, int], int] = {}
        """... and that it offered one for."""
        self._bits: dict[str, float] = {}
        """Of a parameter, in each node's newest delta."""
        self._timed_from = 0.0
        """No window is past its deadline for what was before: nothing could close."""
        self._looked_at = 0.0
        self.why_not = "no round is over yet"
        """Why nobody is judged; empty where somebody is."""

    # --- what comes

    def saw(self, event: ev.Event, machine: CoordinatorMachine, now: float) -> None:
        """An event on its way to the machine."""
        if self.adapt == "off":
            return
        match event:
            case ev.Heard(node=node, message=msg.Progress() as progress):
                member = machine.members.get(node)
                if member is not None and machine.believes(node, progress):
                    trains = member.counts and not member.evaluates
                    self.pacing.reported(node, progress.blocked_s, progress.inner_steps, now, trains=trains)
            case ev.Heard(node=node, message=msg.Offer(blob=blob, window=window)) if blob.fragment in machine.windows:
                self._offered[node, blob.fragment] = max(window, self._offered.get((node, blob.fragment), 0))
            case ev.InputStored(offer=offer):
                key = (offer.blob.node, offer.blob.fragment)
                self._done[key] = max(offer.window, self._done.get(key, 0))
                self._bits[offer.blob.node] = 8 * offer.size / machine.ledger.fragment(offer.blob.fragment).numel
            case ev.InputFailed(offer=offer):
                self.pacing.broken(offer.blob.node)
            case ev.Parted(node=node):
                self.pacing.broken(node)
            case ev.CommitDone(record=record):
                closed = machine.windows[record.fragment]
                if not closed.terms.final:
                    self._window_s.append(now - closed.opened_at)
            case _:
                pass

    def clock_jumped(self) -> None:
        """This process stood still."""
        self.pacing.stood_still()

    # --- what is found

    def look(self, machine: CoordinatorMachine, matrix: Matrix, now: float, *, held: bool = False) -> list[Rung]:
        """What is to be done now. `held`: nothing can be committed, whatever nodes do."""
        if self.adapt == "off":
            return []
        self.over.clear()
        self.pacing.keep({m.name: m.incarnation for m in machine.members.values() if m.stage == "training"})
        if held or machine.holding is not None or machine.guard.holds:
            self._timed_from = now
        rungs = self._look_for_hangs(machine, now)
        if self._round_is_over(machine, now):
            rungs += self._judge(machine, matrix)
        self._looked_at = now
        return rungs

    def _round_is_over(self, machine: CoordinatorMachine, now: float) -> bool:
        current = machine.ledger.current_round
        if self._closed_at is None:
            self.round, self._closed_at = current, now
        if current <= self.round or now - self._closed_at < LEAST_S:
            return False
        self.round, self._closed_at = current, now
        return True

    def _judge(self, machine: CoordinatorMachine, matrix: Matrix) -> list[Rung]:
        self._judged += 1
        self._rounds.append(self.pacing.close(self.anomalies.keys()))
        self._places.round_over(matrix, [m.name for m in machine.members.values() if m.counts])
        judged = sum(one.expected_compute_s > 0.0 for one in self._rounds[-1].values())
        counts = sum(member.counts for member in machine.members.values())
        self.why_not = _why_not(judged, counts)
        self._forget_who_is_gone(machine)
        found = {(one.kind, one.node): one for one in slow(list(self._rounds)) if one.factor >= CHANGED}
        for key in [key for key in self.anomalies if key[0] in JUDGED and key not in found]:
            self._end(key)
        rungs = []
        for key, finding in found.items():
            anomaly = self._note(key, finding)
            anomaly.judged, anomaly.rested = anomaly.judged + 1, anomaly.rested + 1.0
            if anomaly.judged > USUAL_AFTER:
                self._plan_for(*key)
                self._end(key)
            elif not anomaly.action or anomaly.rested > REST_ROUNDS:
                rungs += self._climb(anomaly, machine)
        return rungs

    def _look_for_hangs(self, machine: CoordinatorMachine, now: float) -> list[Rung]:
        """One hang at a time: all others may merely wait for it."""
        late = self._past_deadline(machine, now)
        finding = None if late is None else hung(self._progress(late, machine))  # None where all merely evaluate
        for key in [key for key in self.anomalies if key[0] not in JUDGED]:
            if finding is None or key != (finding.kind, finding.node):
                self._end(key)
        if finding is None:
            return []
        anomaly = self._note((finding.kind, finding.node), finding)
        anomaly.rested += now - self._looked_at if anomaly.action else 0.0
        if anomaly.action and anomaly.rested < self._deadline_s:
            return []
        return self._climb(anomaly, machine)

    @property
    def _deadline_s(self) -> float:
        return deadline_s(self._window_s, SLACK_S)

    def _past_deadline(self, machine: CoordinatorMachine, now: float) -> Window | None:
        if len(self._window_s) < LEAST_WINDOWS:
            return None
        least = now - self._deadline_s
        late = [
            window
            for window in machine.windows.values()
            if window.state == "open" and window.missing and max(window.opened_at, self._timed_from) < least
        ]
        return min(late, key=lambda window: (window.opened_at, window.terms.fragment), default=None)

    def _progress(self, window: Window, machine: CoordinatorMachine) -> dict[str, Progress]:
        fragment, number = window.terms.fragment, window.terms.window
        found: dict[str, Progress] = {}
        for node in sorted(window.missing):
            member = machine.members.get(node)
            if member is not None and member.evaluates:
                continue
            found[node] = Progress(
                last_done=self._done.get((node, fragment), number - 1),
                entered=self._offered.get((node, fragment), 0) >= number,
                heard=member is not None and member.session is not None,
            )
        return found

    # --- what is done

    def _note(self, key: tuple[Kind, str], finding: Finding) -> Anomaly:
        if key not in self.anomalies:
            judged, taken = self._before.pop(key, (0, []))
            known = list(taken) if self._judged - judged <= REMEMBERED else []
            self.anomalies[key] = Anomaly(finding=finding, round=self.round, taken=known)
        self.anomalies[key].finding = finding
        return self.anomalies[key]

    def _end(self, key: tuple[Kind, str]) -> None:
        anomaly = self.anomalies.pop(key)
        self._before[key] = (self._judged, anomaly.taken)
        self._before = {k: known for k, known in self._before.items() if self._judged - known[0] <= REMEMBERED}
        self.over.append(anomaly)

    def _climb(self, anomaly: Anomaly, machine: CoordinatorMachine) -> list[Rung]:
        """The next rung. One that is only advised stays where it is: nothing was tried that could have failed."""
        finding, few = anomaly.finding, sum(member.counts for member in machine.members.values()) < LEAST_NODES
        acts = self.adapt == "act" and not few
        stays = anomaly.action is not None and anomaly.action not in anomaly.taken and not acts
        if stays or anomaly.action is Action.EVICT:
            return []
        another_way = machine.ledger.spec.identity.layout.num_stages > 1
        step = next_step(finding, anomaly.taken, another_way=another_way)
        advice = None
        if step.action is Action.LIGHTEN:
            advice = self._advice(finding.node, machine)
            if advice is None:
                anomaly.taken.append(Action.LIGHTEN)
                step = next_step(finding, anomaly.taken, another_way=another_way)
        if step.action is Action.REROUTE and acts:
            anomaly.taken.append(step.action)  # a layout is a person's to change
        can = step.action is Action.REPROBE or (acts and step.action in (Action.LIGHTEN, Action.DROP))
        anomaly.action, anomaly.advice, anomaly.done, anomaly.rested = step.action, advice, False, 0.0
        anomaly.why = step.reason if advice is None else f"{step.reason}; {advice.reason}"
        return [Rung(action=step.action, anomaly=anomaly, carry_out=can)]

    def carried_out(self, rung: Rung, failed: str = "") -> None:
        """The shell did it, or could not: `failed` says why, in a sentence."""
        anomaly = rung.anomaly
        anomaly.taken.append(rung.action)
        anomaly.done = not failed
        anomaly.why += f"; not done: {failed}" if failed else ""
        if rung.action is Action.LIGHTEN and not failed:
            for kind in JUDGED:
                self._plan_for(kind, anomaly.finding.node)

    def _plan_for(self, kind: Kind, node: str) -> None:
        """It is as it is now: neither what was usual before, nor the rounds that strayed from that, count any more."""
        self.pacing.forget(kind, node)
        unjudged = {"expected_compute_s": 0.0} if kind is Kind.NODE_SLOW else {"expected_transfer_s": 0.0}
        for index, samples in enumerate(self._rounds):
            if node in samples:
                self._rounds[index] = {**samples, node: replace(samples[node], **unjudged)}

    def _forget_who_is_gone(self, machine: CoordinatorMachine) -> None:
        here = {str(name) for name in machine.members}
        self._done = {key: window for key, window in self._done.items() if key[0] in here}
        self._offered = {key: window for key, window in self._offered.items() if key[0] in here}
        self._bits = {node: bits for node, bits in self._bits.items() if node in here}

    def _advice(self, node: str, machine: CoordinatorMachine) -> Advice | None:
        """Fewer bits, or other steps, for a node; None where rounds gain too little."""
        member, ledger = next((m for m in machine.members.values() if m.name == node), None), machine.ledger
        if member is None or node not in self._bits:
            return None
        layout = ledger.spec.identity.layout
        return lighter(
            node,
            self.pacing.paces(),
            h=ledger.h,
            parameters=sum(fragment.numel for fragment in fragments_of(member.holds, layout)),
            bits=self._bits[node],
            least_h=layout.slots,
            overlap=ledger.spec.terms.tau > 0,
        )

    def place(self, finding: Finding) -> str:
        """Where the matrix of links says that it is; empty where it says nothing."""
        return self._places.of(finding.node)

    @property
    def coordinator_is_slow(self) -> str:
        """Where on the coordinator's own end, if all links became slow together."""
        return self._places.of(COORDINATOR)


def _why_not(judged: int, counts: int) -> str:
    if counts < LEAST_NODES:
        return f"{counts} nodes train; who is slow is told from {LEAST_NODES} on"
    if judged < LEAST_NODES:
        return f"{judged} nodes have done enough rounds to be judged by; it takes {LEAST_NODES}"
    return ""
