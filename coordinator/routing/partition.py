"""How many layers each stage gets: the exact min-max rule, and Holmes' floor rule to compare it with."""

import heapq
import math
from collections.abc import Sequence


def min_max_split(layers: int, speeds: Sequence[float], caps: Sequence[int | None] | None = None) -> tuple[int, ...]:
    """Layers per stage so that the slowest stage, max nᵢ/sᵢ, is as fast as it can be.

    Every stage gets one; each further one goes to the stage that is then the least slow, (nᵢ + 1)/sᵢ, ties to the
    first. That is exact: a stage is only given a layer when no other would take less time with it. `speeds` are layers
    per second, measured; `caps` is what the memory of a stage holds.

    Raises:
        ValueError: fewer layers than stages, a speed that is not above 0, or caps that do not hold all layers.
    """
    _check(layers, speeds)
    room = [layers if cap is None else cap for cap in (caps or [None] * len(speeds))]
    if len(room) != len(speeds):
        raise ValueError(f"there are {len(speeds)} speeds and {len(room)} caps; one of each per stage is wanted")
    if min(room) < 1 or sum(room) < layers:
        raise ValueError(f"the stages hold {sum(room)} layers at most; {layers} have to fit, and one in each")
    counts = [1] * len(speeds)
    heap = [(2 / speed, stage) for stage, speed in enumerate(speeds) if room[stage] > 1]
    heapq.heapify(heap)
    for _ in range(layers - len(speeds)):
        _, stage = heapq.heappop(heap)
        counts[stage] += 1
        if counts[stage] < room[stage]:
            heapq.heappush(heap, ((counts[stage] + 1) / speeds[stage], stage))
    return tuple(counts)


def floor_split(layers: int, speeds: Sequence[float], alpha: float = 1.0) -> tuple[int, ...]:
    """Holmes' rule: stage i gets ⌊α·L·sᵢ/Σs⌋, what is left goes to the last stage.

    α = 1 gives the splits that are published with its code (30 layers at 197 : 160 → 16, 14). A stage may end up
    with no layer, which is this rule's fault and not mended here.

    Raises:
        ValueError: fewer layers than stages, or a speed that is not above 0.
    """
    _check(layers, speeds)
    total = sum(speeds)
    counts = [math.floor(alpha * layers * speed / total) for speed in speeds]
    counts[-1] += layers - sum(counts)
    return tuple(counts)


def slowest_s(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """max nᵢ/sᵢ: what a split is judged by."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """The first layer of each stage."""
    return tuple(sum(counts[:stage]) for stage in range(len(counts)))


def _check(layers: int, speeds: Sequence[float]) -> None:
    if not speeds or layers < len(speeds):
        raise ValueError(
            f"{layers} layers cannot be cut into {len(speeds)} stages; from 1 to {layers} stages are possible"
        )
    if slow := next((speed for speed in speeds if not (math.isfinite(speed) and speed > 0.0)), None):
        raise ValueError(f"a stage has speed {slow}; a number above 0 is wanted")
    if 0.0 in speeds:
        raise ValueError("a stage has speed 0; a number above 0 is wanted")
