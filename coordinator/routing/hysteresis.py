"""When a new plan is worth the switch: made for a reason, not too often, and better by a margin."""

import math
from collections.abc import Mapping

WORTH = 0.10
"""Share by which a new plan has to be faster than the old one is now."""

CHANGED = 1.4
"""Factor by which a link has to change ..."""

FOR_ROUNDS = 3
"""... and for how many rounds in a row, before plans are made anew."""

REST_ROUNDS = 2
"""Between two switches."""


def worth_switching(old_s: float, new_s: float) -> bool:
    """Whether a plan that takes `new_s` replaces one that takes `old_s` on the links as they are now."""
    return new_s < (1.0 - WORTH) * old_s


def due(
    *, members_changed: bool, flagged: bool, link_factors: Mapping[tuple[str, str], tuple[float, ...]], since_last: int
) -> str:
    """Why plans are made anew, a sentence; empty when they are not.

    `link_factors` are the last rounds' measured over planned seconds of each link; `since_last` counts rounds since
    the last switch.
    """
    if since_last < REST_ROUNDS:
        return ""
    if members_changed:
        return "nodes came or left"
    if flagged:
        return "a node or link was found slow"
    for (source, target), factors in sorted(link_factors.items()):
        last = factors[-FOR_ROUNDS:]
        if len(last) == FOR_ROUNDS and min(abs(math.log(factor)) for factor in last) > math.log(CHANGED):
            return f"the link from {source} to {target} changed by {last[-1]:.1f} for {FOR_ROUNDS} rounds"
    return ""
