"""Who has become slow or hangs, the next mitigation, and carrying it out."""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, assert_never

from farloop.algo.spec import BlobId, NodeId
from farloop.algo.stages import fragments_of
from farloop.coordinator.change_terms import lightened
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.net.link_monitor import LinkMonitor
from farloop.coordinator.net.link_table import COORDINATOR, Ends, LinkTable
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.settings import ADAPTS
from farloop.monitoring.status import AnomalyStatus, WatchStatus
from farloop.monitoring.status_summary import named
from farloop.planner.anomalies import (
    LEAST_NODES,
    OF_ROUNDS,
    Action,
    Finding,
    Kind,
    Place,
    Progress,
    Sample,
    Samples,
    deadline_s,
    hung,
    localise,
    next_step,
    slow,
)
from farloop.planner.sync_plan import CHANGED, FOR_ROUNDS, Advice, Pace, lighter
from farloop.wire import messages as msg

_log = logging.getLogger(__name__)

# --- Round times of each node: duration, steps and bytes of deltas, now and before
#
# The expectation of a node is the median of its own earlier rounds, per step and per byte, so that H and bits may
# change. The measured rate of its link would not do: a probe does not show how many nodes send at once, and the rate
# follows a link that becomes slow. So a node that was always slow is as expected; one with few rounds is not judged.

LEAST_ROUNDS: Final = 8  # own rounds that a node is judged by
KEPT_ROUNDS: Final = 30  # of these last rounds
USUAL_AFTER: Final = 60  # unusual rounds in a row after which they are the usual ones
JUDGED: Final = (Kind.NODE_SLOW, Kind.LINK_SLOW)


@dataclass(slots=True)
class _Own:
    incarnation: int
    unit_s: dict[Kind, deque[float]] = field(
        default_factory=lambda: {kind: deque[float](maxlen=KEPT_ROUNDS) for kind in JUDGED}
    )
    """Seconds per step and per byte of its rounds ..."""
    latest_s: dict[Kind, float] = field(default_factory=dict[Kind, float])  # and of the last round with any
    reported: tuple[float, int] | None = None
    """(seconds without waiting, steps) of its last report; None: the next interval measures nothing."""
    units: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(JUDGED, 0))  # steps and bytes of this round
    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(JUDGED, 0.0))  # seconds that they took
    under_way: dict[BlobId, int] = field(default_factory=dict)
    """Bytes of each delta on its way. While there are any, the link is busy."""
    began_at: float = 0.0  # when the link became busy
    received: int = 0  # bytes since then

    def rest(self) -> None:
        self.under_way.clear()
        self.received = 0

    def sample(self, kind: Kind) -> Sample:
        known = self.unit_s[kind]
        if len(known) < LEAST_ROUNDS:
            return Sample(taken_s=self.seconds[kind], expected_s=0.0)
        usual = median(known)
        spread = median(abs(math.log(one / usual)) for one in known)
        return Sample(taken_s=self.seconds[kind], expected_s=usual * self.units[kind], spread=spread)

    def latest(self, kind: Kind) -> float | None:
        """Seconds per unit in this round; None without any."""
        units, seconds = self.units[kind], self.seconds[kind]
        return seconds / units if units and seconds > 0.0 else None


class RoundTimes:
    """Times of one coordinator's nodes. In memory only: a restart measures again."""

    def __init__(self) -> None:
        self._own: dict[str, _Own] = {}

    def retain(self, incarnations: Mapping[str, int]) -> None:
        """Forget other starts of nodes: another start may run on another machine."""
        for node, incarnation in incarnations.items():
            if node not in self._own or self._own[node].incarnation != incarnation:
                self._own[node] = _Own(incarnation)
        self._own = {node: own for node, own in self._own.items() if node in incarnations}

    def reported(self, node: str, blocked_s: float, inner_steps: int, now: float, *, trains: bool = True) -> None:
        """Handle a report. `trains`: it only did steps, no evaluation."""
        if (own := self._own.get(node)) is None:
            return
        before, here = own.reported, (now - blocked_s, inner_steps)
        if not trains:
            own.reported = None
        elif before is None or inner_steps < before[1]:
            own.reported = here
        elif inner_steps > before[1]:
            if here[0] > before[0]:
                own.units[Kind.NODE_SLOW] += inner_steps - before[1]
                own.seconds[Kind.NODE_SLOW] += here[0] - before[0]
            own.reported = here

    def asked(self, blob: BlobId, num_bytes: int, now: float) -> None:
        own = self._own.get(blob.node)
        if own is None or blob in own.under_way:
            return
        if any(other.fragment == blob.fragment for other in own.under_way):
            own.rest()  # it takes the place of one that will not come
        if not own.under_way:
            own.began_at = now
        own.under_way[blob] = num_bytes

    def whole(self, blob: BlobId, now: float) -> None:
        """A delta is complete. Deltas in parallel share the link and its seconds."""
        own = self._own.get(blob.node)
        if own is None or (num_bytes := own.under_way.pop(blob, None)) is None:
            return
        own.received += num_bytes
        if not own.under_way:
            own.units[Kind.LINK_SLOW] += own.received
            own.seconds[Kind.LINK_SLOW] += now - own.began_at
            own.received = 0

    def broken(self, node: str) -> None:
        if (own := self._own.get(node)) is not None:
            own.rest()
            own.reported = None

    def stood_still(self) -> None:
        for node in self._own:
            self.broken(node)

    def close(self, strays: Collection[tuple[Kind, str]]) -> dict[str, Samples]:
        """A round is over. Returns the samples by node. `strays`: (kind, node) whose rounds are not learnt from."""
        samples: dict[str, Samples] = {}
        for node, own in self._own.items():
            samples[node] = {kind: own.sample(kind) for kind in JUDGED}
            for kind in JUDGED:
                if (unit_s := own.latest(kind)) is not None:
                    own.latest_s[kind] = unit_s
                    if (kind, node) not in strays:
                        own.unit_s[kind].append(unit_s)
                own.units[kind], own.seconds[kind] = 0, 0.0
        return samples

    def forget(self, kind: Kind, node: str) -> None:
        if node in self._own:
            self._own[node].unit_s[kind].clear()

    def paces(self) -> dict[str, Pace]:
        """Current paces of nodes with both times."""
        return {
            node: Pace(step_s=own.latest_s[Kind.NODE_SLOW], bytes_per_s=1.0 / own.latest_s[Kind.LINK_SLOW])
            for node, own in self._own.items()
            if own.latest_s.keys() >= set(JUDGED)
        }


# --- Slow links: rates of the link table, now and before
#
# Links of a star are unequal from the beginning, so each direction is compared with what itself was; what all have in
# common is then told from what one has (`anomalies.localise`).


class SlowLinks:
    def __init__(self) -> None:
        self._rates: dict[Ends, deque[float]] = {}
        self._strays: dict[Ends, int] = {}  # rounds in a row in which a direction was unusual
        self._found: dict[str, str] = {}

    def on_round_end(self, matrix: LinkTable, nodes: Sequence[str]) -> None:
        places = [COORDINATOR, *sorted(nodes)]
        number = {place: index for index, place in enumerate(places)}
        here = [ends for ends in matrix.measured() if ends[0] in number and ends[1] in number]
        delays = {(number[u], number[v]): self._delay(matrix, (u, v)) for u, v in here}
        self._rates = {ends: known for ends, known in self._rates.items() if ends[0] in number and ends[1] in number}
        self._strays = {ends: rounds for ends, rounds in self._strays.items() if ends in self._rates}
        self._found = {}
        for one in localise({cell: delay for cell, delay in delays.items() if delay is not None}):
            ends = [places[index] for index in (one.source, one.target) if index is not None]
            for name in ends:
                self._found.setdefault(name, f"{one.place}, {one.factor:.1f} times as slow as before")
            if one.place is Place.PATH:
                self._found[ends[0]] = f"path to {ends[1]}, {one.factor:.1f} times as slow as before"

    def of(self, place: str) -> str:
        """The slow side at this place, in words; empty for none."""
        return self._found.get(place, "")

    def _delay(self, matrix: LinkTable, ends: Ends) -> float | None:
        """Delay relative to the usual one; None if unknown. Unusual directions are not learnt from."""
        rate = matrix.rate(ends)
        if rate is None or rate <= 0.0:
            return None
        known = self._rates.setdefault(ends, deque(maxlen=KEPT_ROUNDS))
        usual = median(known) if len(known) >= LEAST_ROUNDS else None
        if usual is None or 0.5 < usual / rate < 2.0:
            known.append(rate)
            self._strays.pop(ends, None)
        else:
            self._strays[ends] = self._strays.get(ends, 0) + 1
            if self._strays[ends] > USUAL_AFTER:
                known.clear()
                del self._strays[ends]
        return None if usual is None else usual / rate


# --- The monitor: anomalies and their mitigations, one at a time
#
# `planner/anomalies.py` has the rules. This class gives them the measurements, tracks and reports anomalies, and takes
# or advises the next mitigation, no sooner than `REST_ROUNDS` judged rounds after the last one. All is in memory.


LEAST_S: Final = 2.0  # shorter rounds are judged together: nodes report once a second
REST_ROUNDS: Final = FOR_ROUNDS  # judged rounds between two mitigations of the same fault
REMEMBERED: Final = 20  # judged rounds for which past mitigations of a fault are remembered
LEAST_WINDOWS: Final = 5  # timed windows needed before one can be past its deadline
SLACK_S: Final = 5.0  # added to the time that windows take
_KEPT_WINDOWS: Final = 64

Happened = Callable[[ev.Event], None]  # gives an event to the machine


@dataclass(slots=True, kw_only=True)
class Anomaly:
    finding: Finding
    round: int  # round in which it was found
    judged: int = 0  # rounds since then
    rested: float = 0.0  # since the last mitigation: judged rounds if slow, seconds if hanging
    taken: list[Action] = field(default_factory=list)  # mitigations taken
    action: Action | None = None  # the last mitigation, taken or only advised
    carry_out: bool = False  # whether to take it
    done: bool = False  # whether it was taken
    why: str = ""  # reason of the mitigation, a sentence
    advice: Advice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalySeen:
    finding: Finding
    round: int
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MitigationTaken:
    action: Action
    node: str
    carry_out: bool
    why: str


class StragglerMonitor:
    """Detects the stragglers of one coordinator, and mitigates them. `on_event` gets events before the machine does;
    call `poll` a few times a second."""

    def __init__(
        self,
        adapt: str,
        machine: CoordinatorMachine,
        happened: Happened,
        *,
        links: LinkMonitor | None,
        metrics: Metrics | None,
        report: Callable[[object], None],
    ) -> None:
        """Without `links` no link is measured. `report` is called with every AnomalySeen and MitigationTaken."""
        assert adapt in ADAPTS, adapt
        self._adapt, self._machine, self._happened = adapt, machine, happened
        self._links, self._metrics, self._report = links, metrics, report
        self._table = LinkTable() if links is None else links.matrix
        self.pacing, self._places = RoundTimes(), SlowLinks()
        self._anomalies: dict[tuple[Kind, str], Anomaly] = {}  # current anomalies
        self._before: dict[tuple[Kind, str], tuple[int, list[Action]]] = {}
        """Mitigations of past faults, and the judged round in which they ended."""
        self._rounds: deque[Mapping[str, Samples]] = deque(maxlen=OF_ROUNDS)
        self._judged = 0
        self._round = 0  # the run's round at the last `poll`
        self._closed_at: float | None = None
        self._window_s: deque[float] = deque(maxlen=_KEPT_WINDOWS)
        self._done: dict[tuple[str, int], int] = {}  # (node, fragment) → newest window with a stored delta
        self._bits: dict[str, float] = {}  # bits per parameter of each node's newest delta
        self._timed_from = 0.0  # time before this does not count: nothing could close
        self._looked_at = 0.0
        self._why_not = "no round is over yet"  # why no node is judged; empty if nodes are

    def on_event(self, event: ev.Event, now: float) -> None:
        if self._adapt == "off":
            return
        machine = self._machine
        match event:
            case ev.NodeMessage(node=node, message=msg.Progress() as progress):
                member = machine.members.get(node)
                if member is not None and machine.believes(node, progress):
                    trains = member.counts and not member.evaluates
                    self.pacing.reported(node, progress.blocked_s, progress.inner_steps, now, trains=trains)
            case ev.InputStored(offer=offer):
                key = (offer.blob.node, offer.blob.fragment)
                self._done[key] = max(offer.window, self._done.get(key, 0))
                self._bits[offer.blob.node] = 8 * offer.size / machine.ledger.fragment(offer.blob.fragment).numel
            case ev.InputFailed(offer=offer):
                self.pacing.broken(offer.blob.node)
            case ev.NodeDisconnected(node=node):
                self.pacing.broken(node)
            case ev.CommitDone(record=record):
                closed = machine.windows[record.fragment]
                if not closed.terms.final:
                    self._window_s.append(now - closed.opened_at)
            case _:
                pass

    def poll(self, now: float, *, held: bool = False) -> None:
        """Look for anomalies, and take the mitigations that are due. `held`: nothing can be committed."""
        if self._adapt == "off":
            return
        machine = self._machine
        self.pacing.retain({m.name: m.incarnation for m in machine.members.values() if m.stage == "training"})
        if held or machine.holding is not None or machine.guard.holds:
            self._timed_from = now
        due = self._find_hangs(now)
        if self._begins_round(now):
            due += self._judge()
        self._looked_at = now
        for anomaly in due:
            self._mitigate(anomaly)
        if self._metrics is not None:
            self._metrics.set_anomalies([(_word(kind), node) for kind, node in self._anomalies])

    # --- detecting

    def _begins_round(self, now: float) -> bool:
        current = self._machine.ledger.current_round
        if self._closed_at is None:
            self._round, self._closed_at = current, now
        if current <= self._round or now - self._closed_at < LEAST_S:
            return False
        self._round, self._closed_at = current, now
        return True

    def _judge(self) -> list[Anomaly]:
        """Judge the last rounds. Returns the anomalies with a mitigation that is due."""
        self._judged += 1
        self._rounds.append(self.pacing.close(self._anomalies.keys()))
        counting = [member.name for member in self._machine.members.values() if member.counts]
        self._places.on_round_end(self._table, counting)
        judged = sum(one[Kind.NODE_SLOW].expected_s > 0.0 for one in self._rounds[-1].values())
        self._why_not = ""
        if len(counting) < LEAST_NODES:
            self._why_not = f"{len(counting)} nodes train; slow nodes are reported from {LEAST_NODES} nodes on"
        elif judged < LEAST_NODES:
            self._why_not = f"{judged} nodes have done enough rounds for a comparison; it takes {LEAST_NODES}"
        here = self._machine.members.keys()  # the others are gone
        self._done = {key: window for key, window in self._done.items() if key[0] in here}
        self._bits = {node: bits for node, bits in self._bits.items() if node in here}
        found = {(one.kind, one.node): one for one in slow(list(self._rounds)) if one.factor >= CHANGED}
        for key in [key for key in self._anomalies if key[0] in JUDGED and key not in found]:
            self._end(key)
        due = []
        for key, finding in found.items():
            anomaly = self._note(key, finding)
            anomaly.judged, anomaly.rested = anomaly.judged + 1, anomaly.rested + 1.0
            if anomaly.judged > USUAL_AFTER:
                self._plan_for(*key)
                self._end(key)
            elif (not anomaly.action or anomaly.rested > REST_ROUNDS) and self._climb(anomaly):
                due.append(anomaly)
        return due

    def _find_hangs(self, now: float) -> list[Anomaly]:
        """Find one hang at a time: other nodes may merely wait for it. Returns it if a mitigation is due."""
        late = self._past_deadline(now)
        finding = None if late is None else hung(self._progress(late))  # None where all merely evaluate
        for key in [key for key in self._anomalies if key[0] not in JUDGED]:
            if finding is None or key != (finding.kind, finding.node):
                self._end(key)
        if finding is None:
            return []
        anomaly = self._note((finding.kind, finding.node), finding)
        anomaly.rested += now - self._looked_at if anomaly.action else 0.0
        rests = anomaly.action and anomaly.rested < deadline_s(self._window_s, SLACK_S)
        return [anomaly] if not rests and self._climb(anomaly) else []

    def _past_deadline(self, now: float) -> Window | None:
        if len(self._window_s) < LEAST_WINDOWS:
            return None
        least = now - deadline_s(self._window_s, SLACK_S)
        late = [
            window
            for window in self._machine.windows.values()
            if window.state == "open" and window.missing and max(window.opened_at, self._timed_from) < least
        ]
        return min(late, key=lambda window: (window.opened_at, window.terms.fragment), default=None)

    def _progress(self, window: Window) -> dict[str, Progress]:
        found: dict[str, Progress] = {}
        for node in sorted(window.missing):
            member = self._machine.members.get(node)
            if member is not None and member.evaluates:
                continue
            found[node] = Progress(
                last_done=self._done.get((node, window.terms.fragment), window.terms.window - 1),
                entered=self._machine.deadlines.has_offered(node, window),
                heard=member is not None and member.session is not None,
            )
        return found

    def _note(self, key: tuple[Kind, str], finding: Finding) -> Anomaly:
        if (anomaly := self._anomalies.get(key)) is not None:
            anomaly.finding = finding
            return anomaly
        judged, taken = self._before.pop(key, (0, []))
        known = list(taken) if self._judged - judged <= REMEMBERED else []
        anomaly = self._anomalies[key] = Anomaly(finding=finding, round=self._round, taken=known)
        _log.warning(
            "anomaly kind=%s node=%s factor=%.2g round=%d why=%r place=%r",
            _word(finding.kind), named(finding.node), finding.factor, anomaly.round, finding.reason,
            self._places.of(finding.node),
        )  # fmt: skip
        self._report(AnomalySeen(finding=finding, round=self._round))
        return anomaly

    def _end(self, key: tuple[Kind, str]) -> None:
        anomaly, (kind, node) = self._anomalies.pop(key), key
        self._before[key] = (self._judged, anomaly.taken)
        self._before = {k: known for k, known in self._before.items() if self._judged - known[0] <= REMEMBERED}
        _log.info("anomaly end kind=%s node=%s since_round=%d", _word(kind), named(node), anomaly.round)
        self._report(AnomalySeen(finding=anomaly.finding, round=self._round, over=True))

    # --- mitigating

    def _climb(self, anomaly: Anomaly) -> bool:
        """Choose the next mitigation; False: there is none now. One that is only advised is not followed by another:
        nothing was tried that could have failed."""
        finding, few = anomaly.finding, sum(member.counts for member in self._machine.members.values()) < LEAST_NODES
        acts = self._adapt == "act" and not few
        stays = anomaly.action is not None and anomaly.action not in anomaly.taken and not acts
        if stays or anomaly.action is Action.EVICT:
            return False
        another_way = self._machine.ledger.spec.identity.layout.num_stages > 1
        step = next_step(finding, anomaly.taken, another_way=another_way)
        advice = None
        if step.action is Action.LIGHTEN:
            advice = self._advice(finding.node)
            if advice is None:
                anomaly.taken.append(Action.LIGHTEN)
                step = next_step(finding, anomaly.taken, another_way=another_way)
        if step.action is Action.REROUTE and acts:
            anomaly.taken.append(step.action)  # a layout is a person's to change
        anomaly.carry_out = step.action is Action.REPROBE or (acts and step.action in (Action.LIGHTEN, Action.DROP))
        anomaly.action, anomaly.advice, anomaly.done, anomaly.rested = step.action, advice, False, 0.0
        anomaly.why = step.reason if advice is None else f"{step.reason}; {advice.reason}"
        return True

    def _mitigate(self, anomaly: Anomaly) -> None:
        """Take the mitigation that was chosen, or advise it."""
        action, node = anomaly.action, anomaly.finding.node
        assert action is not None
        if anomaly.carry_out:
            failed = self._carry_out(action, node, anomaly.advice)
            anomaly.taken.append(action)
            anomaly.done = not failed
            anomaly.why += f"; not done: {failed}" if failed else ""
            if action is Action.LIGHTEN and not failed:
                for kind in JUDGED:
                    self._plan_for(kind, node)
        word, how = action.name.lower(), "done" if anomaly.done else "advised"
        if self._metrics is not None:
            self._metrics.anomaly_actions.labels(word, how).inc()
        _log.warning("anomaly action=%s node=%s how=%s why=%r", word, named(node), how, anomaly.why)
        self._report(MitigationTaken(action=action, node=node, carry_out=anomaly.carry_out, why=anomaly.why))

    def _carry_out(self, action: Action, node: str, advice: Advice | None) -> str:
        """Carry a mitigation out. Returns why not, as a sentence; empty if done."""
        match action:
            case Action.REPROBE:
                return "" if self._links is None else self._links.probe_next(node)
            case Action.LIGHTEN:  # bits and H of its own, until other terms are set
                assert advice is not None
                try:
                    revision = lightened(self._machine, advice)
                except ValueError as error:
                    return str(error)
                self._happened(ev.TermsGiven(revision=revision))
            case Action.DROP:
                self._happened(ev.LeftOut(node=NodeId(node)))
            case Action.REROUTE | Action.EVICT:
                return "a person decides that"
            case _:
                assert_never(action)
        return ""

    def _plan_for(self, kind: Kind, node: str) -> None:
        """Accept the node's current times: forget what was usual, and its unusual rounds."""
        self.pacing.forget(kind, node)
        for index, samples in enumerate(self._rounds):
            if (own := samples.get(node)) is not None:
                self._rounds[index] = {**samples, node: {**own, kind: replace(own[kind], expected_s=0.0)}}

    def _advice(self, node: str) -> Advice | None:
        """Fewer bits or other steps for a node; None if rounds gain too little."""
        member, ledger = self._machine.members.get(NodeId(node)), self._machine.ledger
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
            overlap=ledger.spec.terms.schedule.tau > 0,
        )

    # --- the status

    def status(self) -> WatchStatus:
        return {
            "adapt": self._adapt,
            "why_not": self._why_not,
            "coordinator": self._places.of(COORDINATOR),
            "anomalies": [self._row(anomaly) for anomaly in self._anomalies.values()],
        }

    def _row(self, anomaly: Anomaly) -> AnomalyStatus:
        finding = anomaly.finding
        row: AnomalyStatus = {
            "kind": finding.kind.value,
            "node": finding.node,
            "factor": finding.factor if math.isfinite(finding.factor) else None,
            "since_round": anomaly.round,
            "reason": finding.reason,
            "place": self._places.of(finding.node),
            "action": anomaly.action.value if anomaly.action else "",
            "done": anomaly.done,
            "why": anomaly.why,
        }
        if (advice := anomaly.advice) is not None:
            row["advice"] = {
                "bits": advice.bits, "h": advice.h, "round_s": advice.round_s, "then_s": advice.then_s,
            }  # fmt: skip
        return row


def _word(kind: str) -> str:
    return kind.replace(" ", "_")
