"""A coordinator over an old copy of its state asks what this node holds (protocol, Adoption). Pure.

The node tells it, and stands by its anchors for as long as the session lasts: what it said it held, it can send. What
it follows does not change by that: only the Welcome of a coordinator that goes on can do this.
"""

from typing import TYPE_CHECKING

from farloop.node import events as ev
from farloop.wire.messages import Held

if TYPE_CHECKING:
    from farloop.node.machine import NodeMachine


def recalled(machine: "NodeMachine") -> list[ev.Command]:
    """The answer. Anchors and samples are the shell's to fill in: it has them."""
    if machine.revisions is None:  # it holds nothing
        return []
    machine.connected, machine.stands_by = False, True  # nothing but this is wanted of it
    windows = (state.terms_of.get(state.version + 1) for state in machine.fragments)
    held = Held(
        anchors=(),
        windows=tuple(terms for terms in windows if terms is not None),
        final=tuple(state.fragment.index for state in machine.fragments if state.is_final),
        rounds=tuple(machine.rounds.values()),
        revisions=machine.revisions.kept,
    )
    return [ev.Tell(message=held)]


def asked(machine: "NodeMachine", fragment: int) -> list[ev.Command]:
    """An anchor is to be sent."""
    known = machine.stands_by and fragment in machine.fragments and machine.fragments[fragment].version >= 0
    return [ev.SendAnchor(fragment=fragment)] if known else []
