"""Whether fragments or activations cross between islands: the cost of both layouts, and from which H on it turns.

A: pipelines inside islands, replicas of a stage on different islands. B: a stage's replicas inside one island,
pipelines across (Holmes). By DT-FM's cost DP/H + 2·PP: every step pays for its pipeline, every H-th for its sync.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farloop.coordinator.routing.groups import blocks
from farloop.coordinator.routing.islands import Island
from farloop.coordinator.routing.placement import Groups, Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Two layouts and where they cost the same."""

    inside: Placed
    """Pipelines inside islands (A)."""
    across: Placed
    """Pipelines across islands (B)."""

    @property
    def h_star(self) -> float:
        """H* = (DP_A − DP_B)/(2·(PP_B − PP_A)): above it A is cheaper; 0 where it always is, inf where never."""
        dearer_sync = self.inside.dp_s - self.across.dp_s
        dearer_step = 2.0 * (self.across.pp_s - self.inside.pp_s)
        if dearer_sync <= 0.0:
            return 0.0 if dearer_step >= 0.0 else math.inf
        return dearer_sync / dearer_step if dearer_step > 0.0 else math.inf

    def prefers_inside(self, h: int) -> bool:
        """Whether A is cheaper with H local steps; a tie goes to A."""
        return self.inside.step_s(h) <= self.across.step_s(h)


def inside_groups(islands: Sequence[Island], stages: int) -> Groups:
    """A: every island is cut into all stages, so that whole pipelines fit in it; smaller islands have no part."""
    cut = [blocks(island.nodes, stages) for island in islands if len(island.nodes) >= stages]
    sizes = [min(len(block) for block in parts) for parts in cut]
    return tuple(
        tuple(node for parts, size in zip(cut, sizes, strict=True) for node in parts[stage][:size])
        for stage in range(stages)
    )


def across_groups(islands: Sequence[Island], stages: int) -> Groups:
    """B: nodes in the order of their islands, the kinds of cards together, cut into stages of consecutive ones."""
    kinds = list(dict.fromkeys(island.fabric for island in islands))
    order = sorted(range(len(islands)), key=lambda one: (kinds.index(islands[one].fabric), one))
    return blocks([node for one in order for node in islands[one].nodes], stages)
