"""Other terms for a run that goes on: what is asked becomes a revision, with the first windows and round it holds for.

Nothing that was told to a node is touched: a fragment's next window is the first of which nobody knows the terms, a
round the first that is not fixed. A window that is closing has said already what the one after it runs under. Pure.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from farloop.algo import schedule
from farloop.algo.revise import changes, nodes_must_hear, revised
from farloop.algo.spec import NodeId, Revision, RoundPlan, Terms
from farloop.coordinator.ledger import Ledger
from farloop.wire.messages import SINCE, Revised

REVISED_SINCE: Final = SINCE[Revised]
"""Version of the protocol in which nodes can be told of other terms."""

MOST: Final = 64
"""Revisions that are kept at a time: all of them are in every Welcome."""


def revision_of(ledger: Ledger, closing: Collection[int], deaf: Iterable[NodeId], given: Mapping[str, str]) -> Revision:
    """What the run would have if these values were set now.

    Args:
        closing: fragments whose open window is being committed.
        deaf: nodes that take part and cannot be told of other terms.
        given: text by key, as `algo.revise.revised` takes it.

    Raises:
        ValueError: it cannot; one sentence.
    """
    before, layout = ledger.spec.terms, ledger.spec.identity.layout
    if not ledger.windows:
        raise ValueError("the run is over: nothing of it can change any more")
    after = revised(before, layout, given)
    _check_hears(before, after, sorted(deaf))
    newest = ledger.revisions.newest
    # A closing window may be followed by one in the round after the newest: rounds change where all windows have.
    first_round = max(newest.round, max(ledger.rounds) + (2 if closing else 1))
    differ = changes(before, after)
    if any(change.of_rounds for change in differ):
        _check_rounds(ledger, after, first_round)
    if all(window.final for window in ledger.windows.values()) and not all(change.of_rounds for change in differ):
        raise ValueError(f"the run's last windows are open: {differ[0].key} would change in none")
    if len(ledger.revisions.kept) >= MOST:
        raise ValueError(f"the terms changed {MOST} times within the last windows: wait for the next ones")
    return Revision(
        number=newest.number + 1,
        terms=after,
        windows=tuple(
            max(newest.windows[fragment], version + (3 if fragment in closing else 2))
            for fragment, version in enumerate(ledger.versions)
        ),
        round=first_round,
    )


def described(before: Terms, revision: Revision) -> list[dict[str, object]]:
    """What a revision changes, and from where on, as plain values."""
    windows = ", ".join(f"f{fragment}:{window}" for fragment, window in enumerate(revision.windows))
    return [
        {
            "key": change.key,
            "before": change.before,
            "after": change.after,
            "from": f"round {revision.round}" if change.of_rounds else f"windows {windows}",
        }
        for change in changes(before, revision.terms)
    ]


def last_change(ledger: Ledger) -> list[str]:
    """What the newest revision changes, a line each; nothing where the terms are those of the run's start."""
    if len(ledger.revisions.kept) < 2:
        return []
    before, newest = ledger.revisions.kept[-2:]
    return [f"{c['key']} {c['before']} → {c['after']} from {c['from']} on" for c in described(before.terms, newest)]


def not_for_the_deaf(ledger: Ledger) -> str | None:
    """Why a node that cannot be told of other terms must wait with coming in, as a sentence: a change of what nodes
    read is known, and not everything runs under it yet."""
    for before, after in itertools.pairwise(ledger.revisions.kept):
        windows_ahead = any(after.windows[fragment] > ledger.versions[fragment] + 1 for fragment in ledger.windows)
        rounds_ahead = bool(ledger.windows) and after.round > ledger.current_round
        unheard = nodes_must_hear(before.terms, after.terms)
        for change in changes(before.terms, after.terms):
            if change.key in unheard and (rounds_ahead if change.of_rounds else windows_ahead):
                where = f"in round {after.round}" if change.of_rounds else f"from windows {after.windows} on"
                return f"{change.key} changes {where}, and this node speaks a version of the protocol without that"
    return None


def _check_hears(before: Terms, after: Terms, deaf: list[NodeId]) -> None:
    keys = nodes_must_hear(before, after)
    if keys and deaf:
        raise ValueError(
            f"{keys[0]} is what nodes follow by themselves, and {', '.join(deaf)} cannot be told of a change: start "
            "them with a farloop of this version first"
        )


def _check_rounds(ledger: Ledger, after: Terms, first_round: int) -> None:
    """Raise ValueError unless the run goes on for longer than the rounds that are as they are."""
    plan: RoundPlan | None = ledger.rounds[max(ledger.rounds)]
    while plan is not None and plan.index < first_round - 1:
        plan = schedule.round_after(ledger.terms_in(plan.index + 1), plan)
    if plan is None or schedule.is_last(ledger.terms_in(plan.index), plan):
        raise ValueError("the run's last round is fixed: no later one is left to change")
    end = plan.start + plan.length
    if after.steps <= end:
        raise ValueError(f"steps is {after.steps}; the rounds up to position {end} are fixed, so at least {end + 1}")
