"""Where the search for chains begins: which stages each chain visits, and which nodes stand near each other."""

import math
from collections.abc import Sequence

from farloop.coordinator.routing.chains import Chains
from farloop.coordinator.routing.paths import Limits, Numbers, fault_of


def visits(chains: int, stages: int, length: int, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """The stages of each chain in order, every stage but 0 visited as often as any other, up to one.

    What a chain leaves out goes round the stages from chain to chain, one after the other or in wider strides where
    a run of stages is too long to be jumped over.

    Raises:
        ValueError: so much cannot be skipped within the limits, or there are too few chains to visit every stage.
    """
    if stages == 1:
        return ((0,),) * chains
    if chains * (length - 1) < stages - 1:
        needed = -(-(stages - 1) // max(1, length - 1))
        raise ValueError(
            f"{chains} paths of {length} of {stages} stages leave some stage without a node; "
            f"{needed} paths are needed: {needed * length} nodes, or fewer stages"
        )
    if (found := _visits(chains, stages, length, limits)) is not None:
        return found
    nearest = next(longer for longer in range(length, stages + 1) if _visits(chains, stages, longer, limits))
    raise ValueError(
        f"paths of {length} of {stages} stages would jump over more than {limits.max_jump - 1} stages in a row; "
        f"the nearest skip that can be planned is {(stages - nearest) / stages:.2f}"
    )


def _visits(chains: int, stages: int, length: int, limits: Limits) -> tuple[tuple[int, ...], ...] | None:
    others, skipped = stages - 1, stages - length
    for stride in range(1, others + 1):
        if math.gcd(stride, others) > 1:
            continue
        ring = [1 + step * stride % others for step in range(others)]
        found = []
        for chain in range(chains):
            out = {ring[(chain * skipped + step) % others] for step in range(skipped)}
            found.append(tuple(stage for stage in range(stages) if stage not in out))
        if not any(fault_of(path, limits) for path in found):
            return tuple(found)
    return None


def nearby(message_s: Numbers, groups: int, size: int) -> list[list[int]]:
    """`groups` times `size` nodes that are near each other, and what is left over as a last list.

    Each group begins with the free node that is farthest from all others and takes the nearest free ones.
    """
    count = len(message_s)
    both = [[message_s[u][v] + message_s[v][u] for v in range(count)] for u in range(count)]
    free = list(range(count))
    apart = [sum(row) for row in both]
    found = []
    for _ in range(groups):
        head = max(free, key=lambda node: (apart[node], -node))
        group = [head]
        free.remove(head)
        for _ in range(size - 1):
            near = min(free, key=lambda node: (sum(both[node][one] for one in group), node))
            group.append(near)
            free.remove(near)
        found.append(group)
        for node in free:
            apart[node] -= sum(both[node][one] for one in group)
    return [*found, free]


def free_start(message_s: Numbers, stages: int, length: int, limits: Limits) -> Chains:
    """Chains of nearby nodes whose stages nobody chose yet."""
    count = len(message_s) // length
    *groups, rest = nearby(message_s, count, length)
    return Chains(nodes=tuple(map(tuple, groups)), stages=visits(count, stages, length, limits), rest=tuple(rest))


def pinned_start(stage_of: Sequence[int], length: int, limits: Limits) -> Chains | None:
    """Chains of nodes that keep their stages; None where they cannot be disjoint.

    Each chain takes the stages that have the most free nodes; where the limits forbid that, the nearest order that
    they allow.
    """
    free: dict[int, list[int]] = {}
    for node, stage in enumerate(stage_of):
        free.setdefault(stage, []).append(node)
    sources = free.pop(0)
    nodes, stages = [], []
    for position, source in enumerate(sources):
        picked = _fullest({stage: len(rest) for stage, rest in free.items()}, length - 1, limits)
        if picked is None:
            return None
        stages.append((0, *picked))
        nodes.append((source, *(free[stage].pop(position % len(free[stage])) for stage in picked)))
    rest = sorted(node for several in free.values() for node in several)
    return Chains(nodes=tuple(nodes), stages=tuple(stages), rest=tuple(rest))


def _fullest(free: dict[int, int], wanted: int, limits: Limits) -> tuple[int, ...] | None:
    """`wanted` stages in order with the most free nodes that a path may visit; None where there is no such path.

    Exact, by the highest stage so far: (sum of free nodes, as few as possible of the emptiest first).
    """
    best: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {(0, 0): ((), ())}
    for stage in sorted(free):
        if not free[stage]:
            continue
        for (taken, last), (score, path) in list(best.items()):
            if taken < wanted and stage - last <= limits.max_jump:
                key, value = (taken + 1, stage), (tuple(sorted((*score, free[stage]))), (*path, stage))
                if key not in best or value > best[key]:
                    best[key] = value
    ends = [value for (taken, _), value in best.items() if taken == wanted]
    return max(ends)[1] if ends else None
