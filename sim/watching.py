"""What a simulated coordinator notices of slow nodes, and does: `coordinator/observe/straggler_monitor.py` without the
process around it. On the tape, next to events and commands.
"""

from collections.abc import Callable
from dataclasses import dataclass

from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.net.link_table import LinkTable
from farloop.coordinator.observe.straggler_detector import StragglerDetector
from farloop.coordinator.observe.straggler_monitor import Happened, carry_out
from farloop.coordinator.routing.anomalies import Action, Finding

LOOK_S = 0.25
"""How often it looks, where it looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalySeen:
    """An anomaly was found, or is over."""

    finding: Finding
    round: int
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MitigationTaken:
    """Something is done about one, or advised."""

    action: Action
    node: str
    carry_out: bool
    why: str


def look(
    watch: StragglerDetector,
    machine: CoordinatorMachine,
    now: float,
    *,
    held: bool,
    saw: Callable[[object], None],
    happened: Happened,
) -> None:
    """Look once; `happened` hands an event to the machine."""
    before = set(watch.anomalies)
    rungs = watch.look(machine, LinkTable(), now, held=held)  # without rates: nothing probes here
    for anomaly in watch.over:
        saw(AnomalySeen(finding=anomaly.finding, round=watch.round, over=True))
    for key in watch.anomalies.keys() - before:
        saw(AnomalySeen(finding=watch.anomalies[key].finding, round=watch.round))
    for rung in rungs:
        anomaly = rung.anomaly
        if rung.carry_out:
            watch.carried_out(rung, carry_out(rung, machine, happened, probe_next=lambda _: ""))
        saw(MitigationTaken(action=rung.action, node=anomaly.finding.node, carry_out=rung.carry_out, why=anomaly.why))
