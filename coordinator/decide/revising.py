"""New terms during a run: a request becomes a revision, with the first windows and round that it applies to.

Published terms stay: the first affected window of a fragment is the first whose terms no node knows, the first affected
round the first that is not fixed. A closing window has already published the terms of the next one.
"""

from collections.abc import Collection, Mapping
from typing import Final

from farloop.algo import schedule
from farloop.algo.revisions import changes, revised
from farloop.algo.spec import NodeId, Revision, RoundPlan
from farloop.algo.terms import Terms
from farloop.algo.validation import OF_NODES
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.errors import NotNow
from farloop.monitoring.units import nearest

MOST: Final = 64  # revisions that are kept at a time: all of them are in every Welcome


def revision_of(
    ledger: Ledger, closing: Collection[int], names: Collection[NodeId], given: Mapping[str, str]
) -> Revision:
    """The revision that sets these values now. `closing`: fragments whose open window is being committed. `names`:
    nodes that take part or may return. `given`: text by key, as `revised` takes it.
    Raises ValueError: a value is invalid.
    Raises NotNow: the run cannot change now; one sentence each."""
    before, layout = ledger.spec.terms, ledger.spec.identity.layout
    if not ledger.windows:
        raise NotNow("the run is over: nothing of it can change any more")
    after = revised(before, layout, given)
    differ = changes(before, after)
    for change in differ:
        term, _, name = change.key.partition(".")
        if term in OF_NODES and change.after is not None and name not in names:
            raise ValueError(f"{change.key}: there is no node {name} in this run; {nearest(name, sorted(names))}")
    newest = ledger.revisions.newest
    # A closing window may be followed by one in the round after the newest: rounds change where all windows have.
    first_round = max(newest.round, max(ledger.rounds) + (2 if closing else 1))
    if any(change.of_rounds for change in differ):
        _check_rounds(ledger, after, first_round)
    if all(window.final for window in ledger.windows.values()) and not all(change.of_rounds for change in differ):
        raise NotNow(f"the run's last windows are open: {differ[0].key} would change in none")
    if len(ledger.revisions.kept) >= MOST:
        raise NotNow(f"the terms changed {MOST} times within the last windows: wait for the next ones")
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
    """What a revision changes, and from which window or round, as plain values."""
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


def changes_text(before: Terms, revision: Revision) -> str:
    return ", ".join(f"{c.key} {_shown(c.before)} → {_shown(c.after)}" for c in changes(before, revision.terms))


def last_change(ledger: Ledger) -> list[str]:
    """Lines that describe the newest revision; none without one."""
    if len(ledger.revisions.kept) < 2:
        return []
    before, newest = ledger.revisions.kept[-2:]
    told = described(before.terms, newest)
    return [f"{c['key']} {_shown(c['before'])} → {_shown(c['after'])} from {c['from']} on" for c in told]


def _shown(value: object) -> object:
    return "none" if value is None else value


def _check_rounds(ledger: Ledger, after: Terms, first_round: int) -> None:
    """Raise ValueError unless the run outlasts the rounds that are fixed."""
    plan: RoundPlan | None = ledger.rounds[max(ledger.rounds)]
    while plan is not None and plan.index < first_round - 1:
        plan = schedule.round_after(ledger.terms_in(plan.index + 1), plan)
    if plan is None or schedule.is_last(ledger.terms_in(plan.index), plan):
        raise NotNow("the run's last round is fixed: no later one is left to change")
    end = plan.start + plan.length
    if after.schedule.steps <= end:
        raise ValueError(
            f"steps is {after.schedule.steps}; the rounds up to position {end} are fixed, so at least {end + 1}"
        )
