"""Does what a rung of the ladder says, in the run: what daemon and simulator share of `watch.py`'s surroundings."""

from collections.abc import Callable
from typing import assert_never

from farloop.algo.spec import NodeId
from farloop.coordinator import events as ev
from farloop.coordinator.machine import CoordinatorMachine
from farloop.coordinator.routing.anomalies import Action
from farloop.coordinator.routing.lightening import Advice
from farloop.coordinator.setting import lightened
from farloop.coordinator.watch import Rung

Happened = Callable[[ev.Event], None]
"""Hands an event to the machine."""


def carry_out(rung: Rung, machine: CoordinatorMachine, happened: Happened, probe_next: Callable[[str], str]) -> str:
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
