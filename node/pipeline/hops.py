"""Where a microbatch goes next: the planned hop, another replica of its stage, past the stage, or nowhere. Pure.

The fallback is SWARM's (arXiv 2301.11913): the live replica with the least expected busy time. What may be skipped and
swapped is bounded as in SkipPipe (arXiv 2502.19913, with the numbers of its published code, C2–C4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farloop.algo.layout import Hop, Layout, Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a path may leave the order of the stages."""

    swap: int = 1
    """Largest step back behind the highest stage visited so far."""
    swaps: int = 2
    """Steps back in a path."""
    swapped: int = 2
    """Sum of their sizes."""
    jump: int = 4
    """Largest step forward: one less stages are skipped in a row."""
    least_share: float = 0.5
    """Share of the stages that a microbatch visits at least, unless its path was planned shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Onward:
    """The next visit."""

    hop: Hop | None
    """None: the way out is done, and the source computes the loss."""
    position: int
    """Place in the path of that visit."""
    rerouted: bool
    """Whether another replica takes the place of the planned one."""
    skipped: int
    """Planned visits that are left out before it."""


def is_legal(stages: Sequence[int], limits: Limits) -> bool:
    """Whether a microbatch may visit the stages in this order."""
    if not stages or stages[0] != 0 or len(set(stages)) != len(stages):
        return False
    frontier, back = 0, []
    for stage in stages[1:]:
        if stage < frontier:
            back.append(frontier - stage)
        elif stage - frontier > limits.jump:
            return False
        frontier = max(frontier, stage)
    return len(back) <= limits.swaps and max(back, default=0) <= limits.swap and sum(back) <= limits.swapped


def onward(
    layout: Layout,
    path: Path,
    position: int,
    visited: Sequence[Hop],
    load: Callable[[str], float | None],
    *,
    late_s: float,
    limits: Limits,
) -> Onward | None:
    """The next visit after `visited`, from this position of the path on; None where there is no legal way on.

    `load` tells the seconds until a node would begin, None for one that cannot be reached. A planned hop is left for
    another replica when it would begin later than in `late_s`, and the other one earlier.
    """
    stages = [hop.stage for hop in visited]
    least = min(-(-len(layout.stages) * limits.least_share // 1), len(path.hops))
    for place in range(position, len(path.hops)):
        planned, skipped = path.hops[place], place - position
        waits = {node: wait for node in layout.stages[planned.stage].replicas if (wait := load(node)) is not None}
        if not waits:
            continue
        node = planned.node
        if waits.get(node, late_s + 1.0) > late_s:
            node = min(waits, key=lambda name: (waits[name], name != planned.node, name))
        legal = is_legal([*stages, planned.stage], limits)
        if skipped and not (legal and len(visited) + len(path.hops) - place >= least):
            return None
        hop = Hop(stage=planned.stage, node=node)
        return Onward(hop=hop, position=place, rerouted=node != planned.node, skipped=skipped)
    skipped = len(path.hops) - position
    if skipped and len(visited) < least:
        return None
    return Onward(hop=None, position=len(visited), rerouted=False, skipped=skipped)
