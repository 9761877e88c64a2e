"""Covers `node/fragment_set.py`: what the machine's tests do not come by (protocol B, D, E, F, H, Q)."""

from typing import Any

import pytest
from node_story import A, B, delta, forgotten, slots
from plain_runs import plain_terms

from farloop.algo.spec import NodeId, WindowTerms
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.node.fragment_set import (
    DueMerge,
    FragmentState,
    PendingDelta,
    merge_command,
    merging_when_going_on,
    merging_when_waiting,
    outcomes_up_to,
)
from farloop.wire.messages import Committed, Offer, Share
from farloop.wire.reasons import Reason

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


# --- versions, and the terms of windows


def test_holding_a_version_means_holding_the_terms_of_the_next() -> None:
    """B: of windows of the past nothing is kept."""
    state = state_at(3)
    assert state.terms is None
    state.learn_terms(window(3))
    state.announce(commit(2))
    assert state == state_at(3)
    state.learn_terms(window(4))
    state.announce(commit(4))
    assert state.terms == window(4), "those of version 5 are known, but not current yet"
    state.advance(4, 10, 100, mixed=True)
    assert state.terms == window(5)


def test_a_window_whose_terms_did_not_come_runs_under_those_of_the_run() -> None:
    """B: a snapshot may overtake the announcement of its version, and then the link may break."""
    state = state_at(3)
    state.learn_terms(window(4))
    own = state.terms_for(5, terms(codec_down="q8"))
    assert state.terms_for(4, WAITING) == window(4)
    assert (own.window, own.tau, own.mix, own.codec_up, own.codec_down) == (5, 2, 0.5, "q4", "q8")


@pytest.mark.parametrize(("lag", "number"), [(0, 4), (1, 5)])
def test_with_a_lag_the_next_delta_is_for_the_window_that_is_open(lag: int, number: int) -> None:
    """D: version 4 is announced and not here yet; base 3 serves window 5 then, and would come too late for window 4."""
    assert state_at(3, 4, lag=lag).terms == window(number)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pending", {3: commit(3)}),
        ("arrived", {2}),
        ("terms_of", {1: window(1)}),
        ("sent", [sent(5), sent(4)]),
        ("sent", [sent(4), sent(5)]),  # the first of them is not merged
        ("snapshot", -1),
    ],
)
def test_check_notices_what_cannot_be(field: str, value: object) -> None:
    state = state_at(3)
    state.check()
    setattr(state, field, value)
    with pytest.raises(AssertionError):
        state.check()


@pytest.mark.parametrize(("lag", "lost"), [(0, 0), (1, 8)])
def test_a_merge_settles_what_was_sent_for_it(lag: int, lost: int) -> None:
    """H: with a lag no other node counts the work that is in no version."""
    assert outcomes_up_to(state_at(3, 4, merged=(B,), sent=[sent(4)]), 4, A, lag) == ([forgotten(4, 4)], lost)
    state = state_at(3, 4, sent=[sent(4)])
    assert outcomes_up_to(state, 3, A, lag) == ([], 0)
    assert outcomes_up_to(state, 4, A, lag) == ([forgotten(4, 4, merged_in=4)], 0)
    assert state.sent == [] and state.share == 0.5


# --- what is merged when

ANCHOR = DueMerge(versions=[4], mix=0.0)


@pytest.mark.parametrize(
    ("under", "state", "steps", "due"),
    [
        # At the end of the overlap, with its own version.
        (WAITING, state_at(3, 4, sent=[sent(4)]), 9, None),
        (WAITING, state_at(3, 4, sent=[sent(4)]), 10, DueMerge(versions=[4], mix=0.5)),
        (WAITING, state_at(3, sent=[sent(4)]), 10, None),
        (WAITING, state_at(3, 4, sent=[sent(4)], merged=(B,)), 10, DueMerge(versions=[4], mix=0.0, loses_steps=True)),
        # Who sent nothing merges what comes.
        (WAITING, state_at(3, 4), 5, DueMerge(versions=[4], mix=0.5, loses_steps=True)),
        (WAITING, state_at(-1, 0), 0, DueMerge(versions=[0], mix=0.0, loses_steps=True)),
        # With a lag: the version of the round before, in the first round the anchor that it began from.
        (LATE, state_at(0, sent=[sent(1, tau=0)]), 8, DueMerge(versions=[], mix=0.0)),
        (LATE, state_at(3, 4, sent=[late()]), 8, ANCHOR),
        (LATE, state_at(3, sent=[late()]), 8, None),
        (LATE, state_at(3, 4, 5, sent=[late()]), 8, ANCHOR),  # its own is for the next round's end
        # It goes on while the own version is there until the next send, unless no window takes its base.
        (LATE, state_at(4, 5, sent=[late(merged=True)]), 12, None),
        (LATE, state_at(4, 5, 6, 7, sent=[late(merged=True)]), 12, DueMerge(versions=[5, 6, 7], mix=0.5, loses_steps=True)),  # noqa: E501
        # Work that can still be sent is not thrown away.
        (LATE, state_at(3, 4, counted_from=12), 12, DueMerge(versions=[4], mix=0.5, loses_steps=True)),
        (LATE, state_at(3, 4, counted_from=12), 14, None),
        (LATE, state_at(3, 4, 5, counted_from=12), 14, DueMerge(versions=[4, 5], mix=0.5, loses_steps=True)),
        # An eager node goes on once its own delta is encoded.
        (EAGER, state_at(3, 4, sent=[late()]), 8, None),
        (EAGER, state_at(3, 4, sent=[late(offer=Offer(blob=delta(4, 5), size=1, digest=0))]), 8, ANCHOR),
    ],
)  # fmt: skip
def test_where_training_waits_a_merge_is_due_once_after_every_send(
    under: Terms, state: FragmentState, steps: int, due: DueMerge | None
) -> None:
    assert merging_when_waiting(state, under, steps, training=True) == due


def test_at_the_end_nothing_is_waited_for() -> None:
    overlapping, own = state_at(3, 4, sent=[sent(4)]), state_at(4, 5, sent=[late(merged=True)])
    assert merging_when_waiting(overlapping, WAITING, 9, training=False) == DueMerge(versions=[4], mix=0.5)
    at_the_end = DueMerge(versions=[5], mix=0.5, loses_steps=True)
    assert merging_when_waiting(own, LATE, 12, training=False) == at_the_end


@pytest.mark.parametrize(
    ("fields", "steps", "due"),
    [
        ({"sent": [sent(4)], "merge_at": 10}, 11, None),
        ({"owed": 4, "merge_at": 10}, 9, None),
        ({"owed": 4, "merge_at": 10}, 10, DueMerge(versions=[4], mix=0.5)),
        ({"owed": 4, "merge_at": 10, "discard": True}, 10, DueMerge(versions=[4], mix=0.0, loses_steps=True)),
    ],
)
def test_where_training_goes_on_a_merge_is_due_when_the_delta_is_decided(
    fields: dict[str, Any], steps: int, due: DueMerge | None
) -> None:
    assert merging_when_going_on(state_at(3, 4, **fields), GOING_ON, steps, training=True) == due


@pytest.mark.parametrize(("share", "gap", "expected"), [(None, 1.0, 0.25), (0.5, 1.0, 0.5), (0.5, 2.0, 0.25)])
def test_an_eager_start_holds_the_own_delta_as_the_step_will(share: float | None, gap: float, expected: float) -> None:
    """Its likely weight, times the gain of the step; unknown at first: one of as many as the run waits for."""
    under = terms(method="co2", lag=1, tau=0, mix=0.0, eager=True, outer_lr=1.0, outer_momentum=0.2)
    fresh = late(terms=window(5, gap))
    command = merge_command(state_at(4, sent=[fresh], share=share), under, 0.0)
    assert command == ev.Merge(fragment=0, mix=0.0, own=((fresh.blob, fresh.terms),), factor=expected)
    assert merge_command(state_at(4, sent=[fresh], share=0.5), EAGER, 0.0).factor == pytest.approx(0.5 * 0.7 * 1.9)


@pytest.mark.parametrize(("under", "fields"), [(EAGER, {"dropped": Reason.LATE}), (LATE, {})])
def test_what_will_not_be_merged_or_is_not_eager_is_not_in_the_start(under: Terms, fields: dict[str, Any]) -> None:
    assert merge_command(state_at(4, sent=[late(**fields)], share=0.5), under, 0.0) == ev.Merge(fragment=0, mix=0.0)
