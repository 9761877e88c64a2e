"""How much each contribution of a window weighs, and in which order they are summed. Standard library only."""

from collections.abc import Sequence

from farloop.algo.spec import Contribution, NodeId


def token_weights(contributor_sets: Sequence[Sequence[Contribution]]) -> list[float]:
    """Weight of each blob: its share of the tokens that the window merges. They sum to 1.

    A contribution without steps weighs nothing and dilutes nothing. Equal token counts give exactly equal weights.
    Where nobody did a step, as when a run is closed twice in a row, all deltas are zero and weigh the same.
    """
    assert contributor_sets
    tokens = [sum(c.tokens for c in contributors if c.steps > 0) for contributors in contributor_sets]
    total = sum(tokens)
    if total == 0:
        return [1 / len(tokens)] * len(tokens)
    return [count / total for count in tokens]


def sum_key(contributors: Sequence[Contribution]) -> NodeId:
    """Blobs are summed in the order of the smallest node id of their contributor sets (protocol H)."""
    return min(contribution.node for contribution in contributors)
