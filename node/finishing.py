"""How a node's part of a run ends: the last sends, and when it may say good-bye. Pure."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from farloop.node.fragment_state import FragmentState
from farloop.node.turns import Turn
from farloop.wire.reasons import Reason

if TYPE_CHECKING:
    from farloop.node.machine import NodeMachine, Stage


def last_sends(machine: "NodeMachine") -> list[FragmentState]:
    """At the run's end: the fragments of which what is left can be sent, once what was sent before is merged or only
    late.

    A regular window that is still open here had no other node to serve it (this one started late in the run): it is
    sent as well, or the run would never end.
    """
    assert machine.spec is not None
    turn, lag = Turn.of(machine), machine.spec.terms.lag
    return [
        state
        for state in machine.fragments
        if turn.is_free(state) and state.terms and state.final is None and len(state.pending) <= lag
    ]


def farewell(stage: "Stage", fragments: Iterable[FragmentState]) -> tuple["Stage", Reason] | None:
    """How this ends, with the reason to give; None while something is still to come.

    A run ends where its last version of every fragment is held; a drain, once nothing that was sent is undecided.
    """
    undecided = any(state.sent for state in fragments)
    if stage == "finishing" and not undecided and all(state.is_final for state in fragments):
        return "finished", Reason.RUN_FINISHED
    if stage == "draining" and not undecided:
        return "left", Reason.DRAINED
    return None
