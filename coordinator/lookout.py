"""Tells who has become slow, and does what is to be done about it: the shell of `watch.py`."""

import logging
import math

from farloop.algo.spec import BlobId, BlobKind
from farloop.coordinator.machine import CoordinatorMachine
from farloop.coordinator.metrics import Metrics
from farloop.coordinator.rungs import Happened, carry_out
from farloop.coordinator.sight import Sight
from farloop.coordinator.watch import Anomaly, Rung, Watch
from farloop.monitoring.gist import named
from farloop.monitoring.status import AnomalyStatus, WatchStatus

_log = logging.getLogger(__name__)


class Lookout:
    """Of one coordinator."""

    def __init__(
        self,
        adapt: str,
        machine: CoordinatorMachine,
        sight: Sight,
        metrics: Metrics,
        happened: Happened,
    ) -> None:
        """`happened` hands an event to the machine."""
        self.watch = Watch(adapt)
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

    def _climb(self, rung: Rung) -> None:
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
