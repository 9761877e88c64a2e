"""The revisions of a run's terms that somebody may still need, and which of them a window or a round runs under.

Both daemons ask here, so that the terms of a window are the same on all machines, whenever they heard of a change.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from farloop.algo.spec import Revision, RunSpec, Terms

BELONG_TO_ROUNDS: Final = frozenset(
    {
        "steps",
        "h",
        "h_rule",
        "h_alpha",
        "h_init",
        "h_max",
        "h_switch",
        "lr",
        "max_stale_rounds",
        "evaluate_every_rounds",
        "h_share_of",
    }
)
"""Names of terms that a round has, and all windows in it; the others are those of a window."""


class Revisions:
    """In rising order, each from where the one before it ends. A value: it never changes."""

    __slots__ = ("kept",)

    def __init__(self, kept: tuple[Revision, ...]) -> None:
        """`kept`: one at least; the oldest is taken to hold from the run's start."""
        assert kept
        self.kept: Final = kept

    @classmethod
    def of(cls, spec: RunSpec, kept: Sequence[Revision] = ()) -> "Revisions":
        """Those that came with a spec; without any, its terms alone, from the start."""
        whole = Revision(
            number=spec.revision, terms=spec.terms, windows=(0,) * len(spec.identity.layout.fragments), round=0
        )
        return cls(tuple(kept) or (whole,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Revisions) and self.kept == other.kept

    def __hash__(self) -> int:
        return hash(self.kept)

    @property
    def newest(self) -> Revision:
        """The last that was given, whether anything runs under it yet or not."""
        return self.kept[-1]

    def and_then(self, revision: Revision) -> "Revisions":
        """With a further one; the same where it is known."""
        return self if revision.number <= self.newest.number else Revisions((*self.kept, revision))

    def of_round(self, index: int) -> Terms:
        """What a round runs under; of what belongs to windows, it says what the round's revision does."""
        return self._at_round(index).terms

    def of_window(self, fragment: int, window: int, round_index: int | None = None) -> Terms:
        """What a window of this round runs under.

        Without a round, for who asks only for what belongs to windows.
        """
        ours = self._at_window(fragment, window)
        theirs = ours if round_index is None else self._at_round(round_index)
        return ours.terms if theirs is ours else composed(ours.terms, theirs.terms)

    def number_of(self, fragment: int, window: int) -> int:
        """Of the revision that says what belongs to this window; 0 for the terms that the run began with."""
        return self._at_window(fragment, window).number

    def from_window(self, fragment: int, window: int) -> Iterator[Terms]:
        """What this window of a fragment and those after it run under, as far as it was given; the oldest first."""
        later = [r.terms for r in self.kept if r.windows[fragment] > window]
        yield from (self.of_window(fragment, window), *later)

    def needed(self, versions: Sequence[int], round_index: int) -> "Revisions":
        """Without those that end before these versions and this round. The newest and the one before it stay."""
        kept = list(self.kept)
        while len(kept) > 2:
            following = kept[1]
            over = all(first <= version for first, version in zip(following.windows, versions, strict=True))
            if not over or following.round > round_index:
                break
            del kept[0]
        return Revisions(tuple(kept))

    def _at_window(self, fragment: int, window: int) -> Revision:
        return next((r for r in reversed(self.kept) if r.windows[fragment] <= window), self.kept[0])

    def _at_round(self, index: int) -> Revision:
        return next((r for r in reversed(self.kept) if r.round <= index), self.kept[0])


def composed(of_window: Terms, of_round: Terms) -> Terms:
    """The terms of a window in a round of another revision: each by what belongs to it."""
    return dataclasses.replace(of_window, **{name: getattr(of_round, name) for name in BELONG_TO_ROUNDS})
