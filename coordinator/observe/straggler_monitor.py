"""Runs the straggler detector and carries its mitigations out."""

import logging
import math
from collections.abc import Callable
from typing import assert_never

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.change_terms import lightened
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.net.link_monitor import LinkMonitor
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.observe.straggler_detector import Anomaly, Mitigation, StragglerDetector
from farloop.coordinator.routing.anomalies import Action
from farloop.coordinator.routing.sync_plan import Advice
from farloop.monitoring.status import AnomalyStatus, WatchStatus
from farloop.monitoring.status_summary import named

# --- Carry out a mitigation: what daemon and simulator share.


Happened = Callable[[ev.Event], None]
"""Hands an event to the machine."""


def carry_out(
    rung: Mitigation, machine: CoordinatorMachine, happened: Happened, probe_next: Callable[[str], str]
) -> str:
    """Why it could not be done, in a sentence; empty where it was. `probe_next` has a node's link measured anew."""
    node, advice = rung.anomaly.finding.node, rung.anomaly.advice
    match rung.action:
        case Action.REPROBE:
            return probe_next(node)
        case Action.LIGHTEN:
            return _lighten(advice, machine, happened) if advice else "nothing is to be gained"
        case Action.DROP:
            happened(ev.LeftOut(node=NodeId(node)))
            return ""
        case Action.REROUTE | Action.EVICT:
            return "a person decides that"
        case _:
            assert_never(rung.action)


def _lighten(advice: Advice, machine: CoordinatorMachine, happened: Happened) -> str:
    """Give a node bits and H of its own; they stay until somebody sets others."""
    try:
        revision = lightened(machine, advice)
    except ValueError as error:
        return str(error)
    happened(ev.TermsGiven(revision=revision))
    return ""


# --- Tells who has become slow, and does what is to be done about it: the shell of `straggler_detector.py`.


_log = logging.getLogger(__name__)


class StragglerMonitor:
    """Of one coordinator."""

    def __init__(
        self,
        adapt: str,
        machine: CoordinatorMachine,
        sight: LinkMonitor,
        metrics: Metrics,
        happened: Happened,
    ) -> None:
        """`happened` hands an event to the machine."""
        self.watch = StragglerDetector(adapt)
        self._machine, self._sight, self._metrics = machine, sight, metrics
        self._happened = happened

    # --- what comes

    def asked(self, blob: BlobId, num_bytes: int | None, now: float) -> None:
        """A delta was let in: so many bytes are to come, None where it has to wait."""
        if num_bytes is not None:
            self.watch.pacing.asked(blob, num_bytes, now)

    def whole(self, blob: BlobId, now: float) -> None:
        """A blob is here."""
        if blob.kind is BlobKind.DELTA:
            self.watch.pacing.whole(blob, now)

    # --- some times a second

    def look(self, now: float, *, held: bool) -> None:
        """Find, tell, and do."""
        before = set(self.watch.anomalies)
        rungs = self.watch.look(self._machine, self._sight.matrix, now, held=held)
        for anomaly in self.watch.over:
            kind, node = anomaly.finding.kind, anomaly.finding.node
            _log.info("anomaly over kind=%s node=%s since_round=%d", _word(kind), named(node), anomaly.round)
        for key, anomaly in self.watch.anomalies.items():
            if key not in before:
                self._tell(anomaly)
        for rung in rungs:
            self._climb(rung)
        self._metrics.saw_anomalies([(_word(kind), node) for kind, node in self.watch.anomalies])

    def _tell(self, anomaly: Anomaly) -> None:
        finding = anomaly.finding
        _log.warning(
            "anomaly kind=%s node=%s factor=%.2g round=%d why=%r place=%r",
            _word(finding.kind), named(finding.node), finding.factor, anomaly.round, finding.reason,
            self.watch.place(finding),
        )  # fmt: skip

    def _climb(self, rung: Mitigation) -> None:
        if rung.carry_out:
            failed = carry_out(rung, self._machine, self._happened, self._sight.probe_next)
            self.watch.carried_out(rung, failed)
        anomaly, word = rung.anomaly, rung.action.name.lower()
        how = "done" if anomaly.done else "advised"
        self._metrics.anomaly_actions.labels(word, how).inc()
        node = named(anomaly.finding.node)
        _log.warning("anomaly action=%s node=%s how=%s why=%r", word, node, how, anomaly.why)

    # --- what is told

    def status(self) -> WatchStatus:
        """Who is slow, and what was done."""
        watch = self.watch
        return {
            "adapt": watch.adapt,
            "why_not": watch.why_not,
            "coordinator": watch.coordinator_is_slow,
            "anomalies": [self._row(anomaly) for anomaly in watch.anomalies.values()],
        }

    def _row(self, anomaly: Anomaly) -> AnomalyStatus:
        finding = anomaly.finding
        row: AnomalyStatus = {
            "kind": finding.kind.value,
            "node": finding.node,
            "factor": finding.factor if math.isfinite(finding.factor) else None,
            "since_round": anomaly.round,
            "reason": finding.reason,
            "place": self.watch.place(finding),
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
