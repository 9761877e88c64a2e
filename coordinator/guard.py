"""That a run does not go on with the work of a few while many are connected: who is live has to be merged. Pure.

A node that is live and of which nothing was merged for some rounds is left out: refused, dropped, stalled, quarantined,
whatever the reasons say. Where too large a share of the live nodes is, a window may be about to make the model that of
the rest. Then the coordinator says so; and, where windows wait for all, it commits nothing until that is mended: until
they are merged again, or leave. Who leaves, drains, pauses or loses its connection is not live: a run may shrink.
"""

from collections.abc import Collection, Iterable
from typing import Final

from farloop.algo.parts import Part, is_in
from farloop.algo.spec import Fragment, NodeId
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.records import WindowCommitted
from farloop.coordinator.roster import Member

ROUNDS: Final = 3
"""Without a merge, after which a live node is left out: more than a joiner takes to its first send, or a late delta."""

FLOOR_SHARE: Final = 0.5
"""Least share of the live nodes that are merged, unless said otherwise."""

ALARM: Final = "participation"

_TAKE_NO_PART: Final = frozenset({"draining", "paused", "finished"})
"""What a node reports that has good reason not to send."""


class Guard:
    """Of one coordinator."""

    def __init__(self, ledger: Ledger, floor_share: float | None = None) -> None:
        """`floor_share` 0 holds nothing; None is `FLOOR_SHARE` where windows wait for all, and 0 where they do not."""
        self._held: set[int] = set()
        """Stages of the model whose commits are held now."""
        self._given_share = floor_share
        self._ledger = ledger
        self._merged: dict[NodeId, int] = {}
        """The last round that each node was part of."""
        self._live_since: dict[NodeId, int] = {}
        self._parts: dict[NodeId, Part] = {}
        for (fragment, version), commit in ledger.commits.items():
            for share in commit.merged:
                self._saw(share.node, ledger.round_of(fragment, version))

    @property
    def holds(self) -> bool:
        """Whether commits are held now."""
        return bool(self._held)

    def holds_stage(self, stage: int) -> bool:
        """Whether those of one stage are."""
        return stage in self._held

    def let_go(self) -> None:
        """Nobody is left out any more."""
        self._held.clear()

    @property
    def _floor_share(self) -> float:
        """By the newest terms, whether a window has them yet or not: who sets a quorum says that some may be left."""
        if self._given_share is not None:
            return self._given_share
        return FLOOR_SHARE if self._ledger.spec.terms.quorum is None else 0.0

    def committed(self, record: WindowCommitted) -> None:
        """A commit is durable."""
        for share in record.merged:
            self._saw(share.node, record.round)

    def look(self, members: Iterable[Member]) -> None:
        """See who is live now."""
        now = self._ledger.current_round
        self._parts = {member.name: member.holds for member in members if _is_live(member)}
        self._live_since = {name: self._live_since.get(name, now) for name in self._parts}

    def left_out(self, coming: Collection[NodeId] = ()) -> list[NodeId]:
        """Live nodes of which nothing was merged for `ROUNDS`, and that are not in the window that `coming` are in."""
        before = self._ledger.current_round - ROUNDS
        return sorted(
            name
            for name, since in self._live_since.items()
            if max(since, self._merged.get(name, since)) < before and name not in coming
        )

    def share(self) -> float:
        """Of the live nodes, those that are not left out; 1 where nobody is live."""
        return 1.0 - len(self.left_out()) / len(self._live_since) if self._live_since else 1.0

    def alarm(self, coming: Collection[NodeId], fragment: Fragment) -> str | None:
        """What is wrong, if this fragment's window closed now with these contributors, in a sentence; `holds_stage`
        says what follows. Nodes that do not hold the fragment can neither be in it nor be missed."""
        least = self._floor_share or FLOOR_SHARE
        able = [name for name, part in self._parts.items() if is_in(fragment, part)]
        out = [name for name in self.left_out(coming) if name in able]
        bad = bool(out) and 1.0 - len(out) / len(able) < least
        self._held.discard(fragment.stage)
        if not bad:
            return None
        names = ", ".join(out[:4]) + (f" and {len(out) - 4} more" if len(out) > 4 else "")
        count = f"{len(out)} of {len(able)} live nodes"
        what = f"{count} were merged in none of the last {ROUNDS} rounds ({names})"
        if not self._floor_share:
            return f"{what}; the run goes on with the others"
        self._held.add(fragment.stage)
        return (
            f"{what}; nothing is committed until they are merged or leave: farloop status says what is refused, and why"
        )

    def _saw(self, node: NodeId, round_index: int) -> None:
        self._merged[node] = max(self._merged.get(node, 0), round_index)


def _is_live(member: Member) -> bool:
    if member.session is None or member.stage != "training":
        return False
    return member.progress is None or member.progress.state not in _TAKE_NO_PART
