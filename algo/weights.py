"""How much each contribution of a window weighs, and in which order they are summed. Standard library only."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final

from farloop.algo.spec import Contribution, NodeId

MOST_TIMES: Final = 4
"""Times the tokens of a step of the other nodes that a step of one node counts at most. What a node says of its tokens
is its own word: with this bound a liar among n honest nodes of equal batches has a weight of 4 / (n + 4) at most."""


def token_weights(contributor_sets: Sequence[Sequence[Contribution]]) -> list[float]:
    """Weight of each blob: its share of the tokens that the window merges. They sum to 1.

    A contribution without steps weighs nothing and dilutes nothing. Equal token counts give exactly equal weights.
    Where no node did a step, as when a run is closed twice in a row, all deltas are zero and weigh the same. Claims are
    checked where they come in; should one below zero have got here all the same, it weighs nothing. A step counts at
    most `MOST_TIMES` the tokens that the steps of the others have: the upper median of all other contributions with a
    token.
    """
    assert contributor_sets
    tokens = [sum(counted for counted, _ in contributors) for contributors in _counted(contributor_sets)]
    total = sum(tokens)
    if total == 0:
        return [1 / len(tokens)] * len(tokens)
    return [count / total for count in tokens]


def quality_weights(contributor_sets: Sequence[Sequence[Contribution]]) -> list[float]:
    """Weight of each blob: its share of tokens · (tokens / steps), quantity times quality (arXiv 2604.21428).

    Of two nodes with equally many tokens the one with the larger batches weighs more: its steps were less noisy. All
    else is as with `token_weights`.
    """
    assert contributor_sets
    worth = [
        # Exactly, so that equal counts weigh the same whatever their sizes, and the others do not show in it.
        sum((Fraction(tokens**2, steps) for tokens, steps in contributors), Fraction(0))
        for contributors in _counted(contributor_sets)
    ]
    total = sum(worth, Fraction(0))
    if total == 0:
        return [1 / len(worth)] * len(worth)
    return [float(share / total) for share in worth]


def _counted(contributor_sets: Sequence[Sequence[Contribution]]) -> list[list[tuple[int, int]]]:
    """(tokens, steps) of each contribution that has both, with the tokens that count."""
    sets = [[(c.tokens, c.steps) for c in cs if c.steps > 0 and c.tokens > 0] for cs in contributor_sets]
    rates = sorted(Fraction(tokens, steps) for counts in sets for tokens, steps in counts)
    if len(rates) < 2:
        return sets
    middle = (len(rates) - 1) // 2  # place of the upper median of all but one; without one below it, one place later
    return [
        [
            (min(tokens, int(MOST_TIMES * steps * rates[middle + (Fraction(tokens, steps) <= rates[middle])])), steps)
            for tokens, steps in counts
        ]
        for counts in sets
    ]


WEIGHT_RULES: Final[dict[str, Callable[[Sequence[Sequence[Contribution]]], list[float]]]] = {
    "tokens": token_weights,
    "quality": quality_weights,
}
"""By the name that methods use."""


def reach(contributor_sets: Sequence[Sequence[Contribution]]) -> float:
    """How far a node came in a whole round: the longest delta, those of fewer steps scaled up to the most steps.

    0 where no node did a step, and for a norm that is none: negative, or not finite. It is what
    `outer_optimizers.staleness_gap` measures by.
    """
    everybody = [c for contributors in contributor_sets for c in contributors if c.steps > 0]
    counted = [c for c in everybody if math.isfinite(c.norm_sq) and c.norm_sq >= 0.0]
    most = max((c.steps for c in everybody), default=0)
    return max((c.norm_sq**0.5 * (most / c.steps) for c in counted), default=0.0)


def sum_key(contributors: Sequence[Contribution]) -> NodeId:
    """Blobs are summed in the order of the smallest node id of their contributor sets (contributions and weights)."""
    return min(contribution.node for contribution in contributors)
