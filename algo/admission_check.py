"""Which merge rules there are for nodes that nobody vouches for, and which runs they make sense in. No torch."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, get_args

from farloop.algo.spec import Screen, Terms

if TYPE_CHECKING:
    from farloop.algo.methods import Method

SCREENS: Final[tuple[str, ...]] = get_args(Screen)


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustRule:
    """A way to merge deltas of which some may be hostile; the arithmetic is in `robust.py`."""

    name: str
    summary: str
    least: int
    """Deltas below which it protects from nothing: then they are averaged."""
    weighted: bool
    """It is a weighted mean, by weights that follow from lengths and distances."""


ROBUST_RULES: Final = {
    rule.name: rule
    for rule in (
        RobustRule(name="clipped", summary="The mean of deltas cut to the median length.", least=3, weighted=True),
        RobustRule(name="median", summary="The median of every coordinate.", least=3, weighted=False),
        RobustRule(name="trimmed", summary="The mean of every coordinate but its extremes.", least=3, weighted=False),
        RobustRule(name="krum", summary="The mean of the deltas closest to others.", least=5, weighted=True),
    )
}


def check_admission(terms: Terms, method: "Method") -> None:
    """Raise ValueError, one sentence with the nearest valid value."""
    if terms.screen not in SCREENS:
        near = get_close_matches(terms.screen, SCREENS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(SCREENS)}"
        raise ValueError(f"screen is {terms.screen!r}; {hint}")
    if not 2.0 <= terms.norm_band < float("inf"):
        raise ValueError(f"norm_band is {terms.norm_band}; the least is 2.0, for honest nodes differ")
    if terms.merge is None:
        return
    if terms.merge not in ROBUST_RULES:
        near = get_close_matches(terms.merge, ROBUST_RULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(ROBUST_RULES)}"
        raise ValueError(f"merge is {terms.merge!r}; {hint}")
    rule = ROBUST_RULES[terms.merge]
    if method.alone:
        raise ValueError(f"merge is {rule.name}, but {method.name} makes a step of every delta by itself; leave it out")
    closes_at = terms.min_nodes if terms.quorum is None else terms.quorum
    if closes_at < rule.least:
        what = "min_nodes" if terms.quorum is None else "quorum"
        raise ValueError(
            f"merge is {rule.name}, which needs {rule.least} deltas in a window to choose from; {what} is {closes_at}"
        )
