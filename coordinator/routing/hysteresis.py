"""When a new plan is worth the switch: better by a margin; and when a change is one."""

WORTH = 0.10
"""Share by which a new plan has to be faster than the old one is now."""

CHANGED = 1.4
"""Factor by which a node or link has to stray from what is expected ..."""

FOR_ROUNDS = 3
"""... and how many rounds lie between two things that are done about it."""


def worth_switching(old_s: float, new_s: float) -> bool:
    """Whether a plan that takes `new_s` replaces one that takes `old_s` on the links as they are now."""
    return new_s < (1.0 - WORTH) * old_s
