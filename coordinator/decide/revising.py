"""New terms during a run: a request becomes a revision, with the first windows and round that it applies to.

Published terms stay: the first affected window of a fragment is the first whose terms no node knows, the first affected
round the first that is not fixed. A closing window has already published the terms of the next one.
"""

import difflib
import itertools
from collections.abc import Collection, Mapping
from typing import Final

from farloop.algo import schedule
from farloop.algo.revisions import Change, changes, nodes_must_hear, revised
from farloop.algo.spec import NodeId, Revision, RoundPlan
from farloop.algo.terms import Terms
from farloop.algo.validation import OF_NODES
from farloop.coordinator.decide.ledger import Ledger
from farloop.wire.messages import OWN_CODECS_SINCE, SINCE, Revised

REVISED_SINCE: Final = SINCE[Revised]  # protocol version from which nodes can be told of new terms
MOST: Final = 64  # revisions that are kept at a time: all of them are in every Welcome


class NotNow(ValueError):
    """The request is valid, but the state of the run does not allow it; one sentence."""


def revision_of(
    ledger: Ledger, closing: Collection[int], speak: Mapping[NodeId, int], given: Mapping[str, str]
) -> Revision:
    """The revision that sets these values now.

    Raises ValueError: a value is invalid; NotNow: the run cannot change now; one sentence each.

    Args:
        closing: fragments whose open window is being committed.
        speak: protocol versions of the nodes that take part or may return.
        given: text by key, as `revised` takes it.
    """
    before, layout = ledger.spec.terms, ledger.spec.identity.layout
    if not ledger.windows:
        raise NotNow("the run is over: nothing of it can change any more")
    after = revised(before, layout, given)
    differ = changes(before, after)
    _check_follow(before, after, differ, speak)
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


def last_change(ledger: Ledger) -> list[str]:
    """Lines that describe the newest revision; none without one."""
    if len(ledger.revisions.kept) < 2:
        return []
    before, newest = ledger.revisions.kept[-2:]
    told = described(before.terms, newest)
    return [f"{c['key']} {_shown(c['before'])} → {_shown(c['after'])} from {c['from']} on" for c in told]


def not_for_the_deaf(ledger: Ledger) -> str | None:
    """Why a node that cannot be told of new terms must wait, as a sentence: a change that nodes follow is not in effect
    everywhere yet."""
    for before, after in itertools.pairwise(ledger.revisions.kept):
        windows_ahead = any(after.windows[fragment] > ledger.versions[fragment] + 1 for fragment in ledger.windows)
        rounds_ahead = bool(ledger.windows) and after.round > ledger.current_round
        unheard = nodes_must_hear(before.terms, after.terms)
        for change in changes(before.terms, after.terms):
            if change.key in unheard and (rounds_ahead if change.of_rounds else windows_ahead):
                where = f"in round {after.round}" if change.of_rounds else f"from windows {after.windows} on"
                return f"{change.key} changes {where}, and this node speaks a version of the protocol without that"
    return None


def cannot_follow(ledger: Ledger, node: NodeId, protocol: int) -> str | None:
    """Why a node of this protocol version must wait, as a sentence: an open or coming window asks it for a codec of its
    own, and it would use that of all."""
    if protocol >= OWN_CODECS_SINCE:
        return None
    for fragment, window in ledger.windows.items():
        later = ledger.revisions.from_window(fragment, window.window)
        if node in dict(window.codec_up_of) or any(node in dict(terms.codecs.up_of) for terms in later):
            return f"codec_up_of says how {node} sends, and this node speaks a version of the protocol without that"
    return None


def _check_follow(before: Terms, after: Terms, differ: list[Change], speak: Mapping[NodeId, int]) -> None:
    """Raise ValueError unless all nodes can follow and the named ones exist."""
    deaf = sorted(node for node, version in speak.items() if version < REVISED_SINCE)
    keys = nodes_must_hear(before, after)
    if keys and deaf:
        raise ValueError(
            f"nodes follow {keys[0]} by themselves, and {', '.join(deaf)} cannot be told of a change: start "
            "them with a farloop of this version first"
        )
    for change in differ:
        term, _, name = change.key.partition(".")
        if term not in OF_NODES or change.after is None:
            continue
        if (node := NodeId(name)) not in speak:
            near = difflib.get_close_matches(name, speak, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(speak)) or 'none'}"
            raise ValueError(f"{change.key}: there is no node {name} in this run; {hint}")
        if term == "codec_up_of" and speak[node] < OWN_CODECS_SINCE:
            raise ValueError(
                f"{change.key}: {name} speaks a version of the protocol in which nodes have no codec of their own: "
                "start it with a farloop of this version first"
            )


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
