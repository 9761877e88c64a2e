"""From one round to the next: a node's own place in the run's clock (protocol A). Pure."""

from typing import TYPE_CHECKING, Final

from farloop.algo import schedule
from farloop.node.turns import newest_round

if TYPE_CHECKING:
    from farloop.node.machine import NodeMachine

ROUNDS_KEPT: Final = 4
"""Rounds that are over and remembered: windows of them may be open, and a coordinator may have to be told (S)."""


def end_round(machine: "NodeMachine") -> None:
    """Begin the next round where this one is over; the run's, where this node is behind."""
    assert machine.spec is not None
    plan = machine.rounds[machine.round]
    if machine.step < plan.steps_of(machine.name):
        return
    if schedule.is_last(machine.spec.terms, plan):
        machine.stage = "finishing"
        return
    machine.reached, slots = float(plan.start + plan.length), machine.spec.identity.layout.slots
    following = max(machine.round + 1, newest_round(machine.fragments, slots))
    skipped = sum(p.length for r, p in machine.rounds.items() if machine.round < r < following)
    machine.skipped_positions += skipped
    machine.reached += skipped
    machine.round, machine.step = following, 0
    machine.rounds = {r: p for r, p in machine.rounds.items() if r >= following - ROUNDS_KEPT}


def jump(machine: "NodeMachine") -> None:
    """Leave a round whose plan will not come any more: the run went on and this node heard nothing (protocol A)."""
    if machine.spec is None or machine.stage != "training" or machine.round in machine.rounds:
        return
    newest = newest_round(machine.fragments, machine.spec.identity.layout.slots)
    if newest > machine.round and (plan := machine.rounds.get(newest)):
        machine.skipped_positions += plan.start - int(machine.reached)
        machine.round = newest
