"""What training stands still for, in words that a person reads. Pure."""

from typing import TYPE_CHECKING

from farloop.node.turns import Turn

if TYPE_CHECKING:
    from farloop.node.machine import NodeMachine


def waits_for(machine: "NodeMachine") -> str | None:
    """None where training may go on."""
    if machine.ended:
        return None
    if machine.stage == "joining":
        return "the first snapshot" if machine.connected else "the coordinator"
    if machine.stage == "ready":
        return "the start"
    if machine.stage == "training":
        for state in machine.fragments:
            if state.pending and machine.inner_steps == state.joined_at:
                return f"fragment {state.fragment.index}, version {max(state.pending)}"
    if machine.stage == "training" and machine.round not in machine.rounds:
        return f"the plan of round {machine.round}"
    turn = Turn.of(machine) if machine.stage == "training" else None  # at the end, whatever was sent is waited for
    for state in machine.fragments:
        if state.lost and machine.stage in ("training", "finishing"):
            return f"a snapshot of fragment {state.fragment.index}"
        if turn.holds_up(state, machine.inner_steps) if turn else state.sent:
            return f"fragment {state.fragment.index}, window {state.awaited()}"
    return "the last windows" if machine.stage == "finishing" else None
