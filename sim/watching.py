"""What a simulated coordinator notices of nodes that have become slow, and does: `coordinator/lookout.py` without its
surroundings. On the tape, beside events and commands.
"""

from collections.abc import Callable
from dataclasses import dataclass

from farloop.coordinator.machine import CoordinatorMachine
from farloop.coordinator.matrix import Matrix
from farloop.coordinator.routing.anomalies import Action, Finding
from farloop.coordinator.rungs import Happened, carry_out
from farloop.coordinator.watch import Watch

LOOK_S = 0.25
"""How often it looks, where it looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """An anomaly was found, or is over."""

    finding: Finding
    round: int
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """Something is done about one, or advised."""

    action: Action
    node: str
    carry_out: bool
    why: str


def look(
    watch: Watch,
    machine: CoordinatorMachine,
    now: float,
    *,
    held: bool,
    saw: Callable[[object], None],
    happened: Happened,
) -> None:
    """Look once; `happened` hands an event to the machine."""
    before = set(watch.anomalies)
    rungs = watch.look(machine, Matrix(), now, held=held)  # without rates: nothing probes here
    for anomaly in watch.over:
        saw(Noticed(finding=anomaly.finding, round=watch.round, over=True))
    for key in watch.anomalies.keys() - before:
        saw(Noticed(finding=watch.anomalies[key].finding, round=watch.round))
    for rung in rungs:
        anomaly = rung.anomaly
        if rung.carry_out:
            watch.carried_out(rung, carry_out(rung, machine, happened, probe_next=lambda _: ""))
        saw(Climbed(action=rung.action, node=anomaly.finding.node, carry_out=rung.carry_out, why=anomaly.why))
