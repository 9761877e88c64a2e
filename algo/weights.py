"""How much each contribution of a window weighs, and in which order they are summed. Standard library only."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final

from farloop.algo.spec import Contribution, NodeId


def token_weights(contributor_sets: Sequence[Sequence[Contribution]]) -> list[float]:
    """Weight of each blob: its share of the tokens that the window merges. They sum to 1.

    A contribution without steps weighs nothing and dilutes nothing. Equal token counts give exactly equal weights.
    Where nobody did a step, as when a run is closed twice in a row, all deltas are zero and weigh the same. Claims are
    checked where they come in; should one below zero have got here all the same, it weighs nothing.
    """
    assert contributor_sets
    tokens = [sum(max(c.tokens, 0) for c in contributors if c.steps > 0) for contributors in contributor_sets]
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
        sum((Fraction(max(c.tokens, 0) ** 2, c.steps) for c in contributors if c.steps > 0), Fraction(0))
        for contributors in contributor_sets
    ]
    total = sum(worth, Fraction(0))
    if total == 0:
        return [1 / len(worth)] * len(worth)
    return [float(share / total) for share in worth]


WEIGHT_RULES: Final[dict[str, Callable[[Sequence[Sequence[Contribution]]], list[float]]]] = {
    "tokens": token_weights,
    "quality": quality_weights,
}
"""By the name that methods use."""


def reach(contributor_sets: Sequence[Sequence[Contribution]]) -> float:
    """How far a node came in a whole round: the longest delta, those of fewer steps scaled up to the most steps.

    0 where nobody did a step, and for a norm that is none: negative, or not finite. It is what
    `outer_co2.staleness_gap` measures by.
    """
    everybody = [c for contributors in contributor_sets for c in contributors if c.steps > 0]
    counted = [c for c in everybody if math.isfinite(c.norm_sq) and c.norm_sq >= 0.0]
    most = max((c.steps for c in everybody), default=0)
    return max((c.norm_sq**0.5 * (most / c.steps) for c in counted), default=0.0)


def sum_key(contributors: Sequence[Contribution]) -> NodeId:
    """Blobs are summed in the order of the smallest node id of their contributor sets (protocol H)."""
    return min(contribution.node for contribution in contributors)
