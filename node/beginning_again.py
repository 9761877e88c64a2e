"""A run that was wound back, or went on from what nodes held: what a node drops, so that nothing of the history that
is over is ever merged. Pure.

All fragments begin anew from snapshots, those included whose anchor may be the same in both histories: of one that is
merged while the greeting is on its way, the coordinator could not know. The node joins as one that comes late, under
the same name and incarnation; its own counts of steps and tokens go on.
"""

from typing import TYPE_CHECKING

from farloop.algo.spec import BlobKind
from farloop.node import events as ev
from farloop.node.fragment_state import FragmentState
from farloop.node.holding import Holding
from farloop.node.outcomes import forgotten

if TYPE_CHECKING:
    from farloop.node.machine import NodeMachine


def begin_again(machine: "NodeMachine", history: int) -> list[ev.Command]:
    """Follow `history` from its snapshots on. Returns what the shell is to do."""
    commands = [command for state in machine.fragments for command in _dropped(state)]
    machine.fragments = Holding(
        FragmentState(
            fragment=state.fragment,
            lag=state.lag,
            joined_at=machine.inner_steps,
            merged_at=state.merged_at,
            counted_from=state.counted_from,
            tokens_from=state.tokens_from,
        )
        for state in machine.fragments
    )
    machine.history, machine.rounds = history, {}
    machine.samples_from = machine.inner_steps
    machine.start_round, machine.start_slot, machine.round, machine.step = None, 0, 0, 0
    if machine.stage in ("ready", "training", "finishing"):
        machine.stage = "joining"
    return [*commands, ev.BeginAgain(history=history)]


def _dropped(state: FragmentState) -> list[ev.Command]:
    """Deltas without an outcome, and bytes that came and were not used yet."""
    commands: list[ev.Command] = [ev.ForgetBlob(blob=undecided.blob) for undecided in state.sent]
    commands += [forgotten(state, BlobKind.UPDATE, version) for version in sorted(state.arrived)]
    if state.snapshot is not None:
        commands.append(forgotten(state, BlobKind.SNAPSHOT, state.snapshot))
    return commands
