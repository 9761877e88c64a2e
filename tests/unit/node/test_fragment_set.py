"""Covers `node/fragment_set.py`: what the machine's tests do not come by (protocol B, D, E, F, H, Q)."""

from pathlib import Path
from typing import Any

import node_story
import pytest
from node_story import A, B, delta, slots
from plain_runs import plain_terms
from stories import StoryText, all_stories, check_story, python

from farloop.algo.spec import NodeId, WindowTerms
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.node import fragment_set
from farloop.node.fragment_set import (
    DueMerge,
    FragmentState,
    PendingDelta,
    merge_command,
    merging_when_going_on,
    merging_when_waiting,
)
from farloop.wire import reasons
from farloop.wire.messages import Committed, Share

FRAGMENT = slots(1).fragments[0]


def terms(**changes: Any) -> Terms:
    return plain_terms(**{"h": 8, "tau": 2, "mix": 0.5, "min_nodes": 4} | changes)


WAITING = terms()
GOING_ON = terms(on_late_update="continue")
LATE = terms(lag=1, tau=0, mix=0.0)
EAGER = terms(lag=1, tau=0, mix=0.0, eager=True)


def window(number: int, gap: float = 1.0) -> WindowTerms:
    return WindowTerms(
        fragment=0, window=number, round=number - 1, tau=2, mix=0.5, codec_up="q4", codec_down="q4", gap=gap
    )


def sent(for_window: int, base: int | None = None, *, incarnation: int = 1, **fields: Any) -> PendingDelta:
    """At inner step 8, from the version before the window's, unless from another base."""
    name = delta(for_window if base is None else base + 1, for_window, incarnation=incarnation)
    return PendingDelta(**{"blob": name, "terms": window(for_window), "sent_at": 8, "tau": 2, "steps": 8, **fields})


def late(*, base: int = 3, **fields: Any) -> PendingDelta:
    """For window 5, where updates come a round late."""
    return sent(5, base, tau=0, **fields)


def commit(version: int, *merged: NodeId, last: bool = False) -> Committed:
    shares = tuple(Share(node=name, weight=1 / len(merged)) for name in merged)
    return Committed(
        fragment=0, version=version, size=1, digest=0, anchor_digest=0, merged=shares, drops=(),
        next_window=None if last else window(version + 1), rounds=(),
    )  # fmt: skip


def state_at(version: int, *versions: int, merged: tuple[NodeId, ...] = (A, B), **fields: Any) -> FragmentState:
    """The anchor at `version`, and the announced `versions` with their bytes."""
    state = FragmentState(fragment=FRAGMENT, version=version, **fields)
    for number in versions:
        state.announce(commit(number, *merged))
        state.terms_of[number] = window(number)
    state.arrived = set(versions)
    return state


def impossible(**fields: object) -> None:
    state = state_at(3)
    for field, value in fields.items():
        setattr(state, field, value)
    with pytest.raises(AssertionError):
        state.check()


def due(under: Terms, state: FragmentState, steps: int) -> DueMerge | None:
    return merging_when_waiting(state, under, steps, training=True)


def going_on(steps: int, **fields: Any) -> DueMerge | None:
    return merging_when_going_on(state_at(3, 4, **fields), GOING_ON, steps, training=True)


def eager(*, share: float | None, gap: float) -> float:
    """The share of the own delta in an eager start."""
    under = terms(method="co2", lag=1, tau=0, mix=0.0, eager=True, outer_lr=1.0, outer_momentum=0.2)
    fresh = late(terms=window(5, gap))
    command = merge_command(state_at(4, sent=[fresh], share=share), under, 0.0)
    assert command == ev.Merge(fragment=0, mix=0.0, own=((fresh.blob, fresh.terms),), factor=command.factor)
    return command.factor


@all_stories(__file__, "merges")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(fragment_set), vars(reasons), vars(node_story), globals()), rewrite=rewrite)
