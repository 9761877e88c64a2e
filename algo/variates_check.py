"""Whether a run can have control variates (`variates.py`): each impossible choice is answered with one sentence.

Free of torch, as all that checks terms.
"""

from typing import TYPE_CHECKING, Final

from farloop.algo.require import require
from farloop.algo.spec import Terms

if TYPE_CHECKING:
    from farloop.algo.methods import Method

_NEEDED: Final[tuple[tuple[str, object, str], ...]] = (
    ("outer_momentum", 0.0, "with momentum an update does not say what the mean of the deltas was"),
    ("lag", 0, "a node must know the mean of all deltas before it begins the next"),
    ("tau", 0, "a node must know the mean of all deltas before it begins the next"),
    ("mix", 0.0, "the next delta must hold nothing that an earlier one held"),
    ("on_late_update", "wait", "a node must know the mean of all deltas before it begins the next"),
    ("quorum", None, "every node must be part of every merge"),
    ("max_staleness", 0, "all deltas of a merge must have one base"),
)
"""Terms, the one value of each, and why."""


def check_variates(terms: Terms, method: "Method") -> None:
    """Raise ValueError unless the run can have control variates, or does without; `method` is that of the terms."""
    if not terms.control_variates:
        return
    name = method.name
    require(method.inner, f"control_variates correct the steps of the nodes, and with {name} nodes make none")
    require(
        method.merge == "mean" and not method.alone and method.outer != "co2",
        f"control_variates need updates that are made of the mean of all deltas, which those of {name} are not; "
        "take diloco",
    )
    for term, needed, why in _NEEDED:
        value, shown = getattr(terms, term), "left out" if needed is None else needed
        require(value == needed, f"{term} is {value}; with control_variates it must be {shown}, for {why}")
    require(terms.outer_lr > 0.0, "outer_lr is 0, so updates say nothing of the deltas; control_variates need them to")
