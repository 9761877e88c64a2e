"""Whether a run can have its optimizers: each impossible choice is answered with one sentence."""

import math
from typing import Final, get_args

from farloop.algo.outer_settings import OuterKind
from farloop.algo.require import require
from farloop.algo.spec import InnerOptimizer, Terms

INNER_OPTIMIZERS: Final[tuple[str, ...]] = get_args(InnerOptimizer)

_ONLY_FOR: Final[dict[str, tuple[OuterKind, object]]] = {
    "outer_clip": ("co2", None),
    "outer_buffer": ("delayed-nesterov", 1),
    "outer_spread": ("delayed-nesterov", 0.0),
}
"""Terms that one outer optimizer alone reads, and their value where it is another."""


def check_outer(terms: Terms, kind: OuterKind) -> None:
    """Raise ValueError unless the method's outer optimizer can run by these terms."""
    for name, value in (("outer_lr", terms.outer_lr), ("weight_decay", terms.weight_decay)):
        require(math.isfinite(value) and value >= 0.0, f"{name} is {value}; it must be a number of at least 0")
    momentum = terms.outer_momentum
    require(0.0 <= momentum < 1.0, f"outer_momentum is {momentum}; it must be in [0, 1), as 0.9 is")
    require(kind != "sgd" or momentum == 0.0, f"outer_momentum is {momentum}; {terms.method} takes 0 alone")
    for name, (reader, neutral) in _ONLY_FOR.items():
        value = getattr(terms, name)
        require(
            kind == reader or value == neutral, f"{name} is for the optimizer {reader}, which {terms.method} has not"
        )
    clip, buffer, spread = terms.outer_clip, terms.outer_buffer, terms.outer_spread
    if clip is not None:
        require(math.isfinite(clip) and clip > 0.0, f"outer_clip is {clip}; it must be above 0, or left out")
    require(buffer >= 1, f"outer_buffer is {buffer}; the least is 1, where every delta steps the momentum")
    most = 1.0 / buffer
    require(0.0 <= spread <= most, f"outer_spread is {spread}; with outer_buffer = {buffer} it is 0 to {most:g}")
    require(terms.outer_restart >= 0, f"outer_restart is {terms.outer_restart}; the least is 0, for never")


def check_inner(terms: Terms, *, has_inner: bool) -> None:
    """Raise ValueError unless nodes can run the inner optimizer; `has_inner`: the method lets them run one at all."""
    name = terms.inner_optimizer
    require(name in INNER_OPTIMIZERS, f"there is no inner_optimizer {name!r}; there are {', '.join(INNER_OPTIMIZERS)}")
    require(
        has_inner or name == "adamw", f"{terms.method} has no inner optimizer: its coordinator runs adamw, not {name}"
    )
