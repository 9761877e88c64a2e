"""Runs the straggler detector, reports what it finds, and carries its mitigations out."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.change_terms import lightened
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.net.link_monitor import LinkMonitor
from farloop.coordinator.net.link_table import LinkTable
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.observe.straggler_detector import Anomaly, Mitigation, StragglerDetector
from farloop.coordinator.routing.anomalies import Action, Finding
from farloop.coordinator.routing.sync_plan import Advice
from farloop.monitoring.status import AnomalyStatus, WatchStatus
from farloop.monitoring.status_summary import named

_log = logging.getLogger(__name__)

Happened = Callable[[ev.Event], None]  # gives an event to the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalySeen:
    """An anomaly was found, or ended."""

    finding: Finding
    round: int
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MitigationTaken:
    """A mitigation was taken, or advised."""

    action: Action
    node: str
    carry_out: bool
    why: str


class StragglerMonitor:
    """Runs the detector of one coordinator."""

    def __init__(
        self,
        adapt: str,
        machine: CoordinatorMachine,
        happened: Happened,
        *,
        links: LinkMonitor | None,
        metrics: Metrics | None,
        saw: Callable[[object], None],
    ) -> None:
        """Without `links` no link is measured. `saw` is told of every AnomalySeen and MitigationTaken."""
        self.watch = StragglerDetector(adapt)
        self._machine, self._happened = machine, happened
        self._links, self._metrics, self._saw = links, metrics, saw
        self._table = LinkTable() if links is None else links.matrix

    def asked(self, blob: BlobId, num_bytes: int | None, now: float) -> None:
        """A delta was accepted with this many bytes to come; None if it has to wait."""
        if num_bytes is not None:
            self.watch.pacing.asked(blob, num_bytes, now)

    def whole(self, blob: BlobId, now: float) -> None:
        if blob.kind is BlobKind.DELTA:
            self.watch.pacing.whole(blob, now)

    def look(self, now: float, *, held: bool) -> None:
        before = set(self.watch.anomalies)
        rungs = self.watch.look(self._machine, self._table, now, held=held)
        for anomaly in self.watch.over:
            kind, node = anomaly.finding.kind, anomaly.finding.node
            _log.info("anomaly end kind=%s node=%s since_round=%d", _word(kind), named(node), anomaly.round)
            self._saw(AnomalySeen(finding=anomaly.finding, round=self.watch.round, over=True))
        for key in self.watch.anomalies.keys() - before:
            self._tell(self.watch.anomalies[key])
        for rung in rungs:
            self._climb(rung)
        if self._metrics is not None:
            self._metrics.saw_anomalies([(_word(kind), node) for kind, node in self.watch.anomalies])

    def _tell(self, anomaly: Anomaly) -> None:
        finding = anomaly.finding
        _log.warning(
            "anomaly kind=%s node=%s factor=%.2g round=%d why=%r place=%r",
            _word(finding.kind), named(finding.node), finding.factor, anomaly.round, finding.reason,
            self.watch.place(finding),
        )  # fmt: skip
        self._saw(AnomalySeen(finding=finding, round=self.watch.round))

    def _climb(self, rung: Mitigation) -> None:
        if rung.carry_out:
            self.watch.carried_out(rung, self._carry_out(rung))
        anomaly, word = rung.anomaly, rung.action.name.lower()
        how, node = "done" if anomaly.done else "advised", anomaly.finding.node
        if self._metrics is not None:
            self._metrics.anomaly_actions.labels(word, how).inc()
        _log.warning("anomaly action=%s node=%s how=%s why=%r", word, named(node), how, anomaly.why)
        self._saw(MitigationTaken(action=rung.action, node=node, carry_out=rung.carry_out, why=anomaly.why))

    def _carry_out(self, rung: Mitigation) -> str:
        """Carry a mitigation out. Returns why not, as a sentence; empty if done."""
        node, advice = rung.anomaly.finding.node, rung.anomaly.advice
        match rung.action:
            case Action.REPROBE:
                return "" if self._links is None else self._links.probe_next(node)
            case Action.LIGHTEN:
                return self._lighten(advice) if advice else "no gain is expected"
            case Action.DROP:
                self._happened(ev.LeftOut(node=NodeId(node)))
                return ""
            case Action.REROUTE | Action.EVICT:
                return "a person decides that"
            case _:
                assert_never(rung.action)

    def _lighten(self, advice: Advice) -> str:
        """Give a node bits and H of its own, until other terms are set."""
        try:
            revision = lightened(self._machine, advice)
        except ValueError as error:
            return str(error)
        self._happened(ev.TermsGiven(revision=revision))
        return ""

    def status(self) -> WatchStatus:
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
