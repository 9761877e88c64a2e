"""Layouts of one-letter nodes, and the worked example of the planners, for tests of pipelines."""

from collections.abc import Sequence

from farloop.algo.stages import Hop, Path, Stage, StageLayout

_FROM_SOURCES = {"0": (1, 5, 2, 6, 4, 3), "1": (4, 1, 5, 2, 2, 6)}
_BETWEEN = {"24": 1, "25": 3, "26": 2, "27": 5, "34": 4, "35": 1, "36": 6, "37": 2, "46": 3, "47": 1, "56": 1, "57": 4}


def layout_of(
    replicas: Sequence[Sequence[str]], paths: Sequence[Sequence[str]], *, layers: int = 0, epoch: int = 1
) -> StageLayout:
    """`layout_of(["a", "bc"], ["ab", "ac"])`: one layer a stage, or `layers` in all, evenly."""
    each = max(1, layers // len(replicas))
    stages = tuple(
        Stage(first=i * each, stop=(i + 1) * each, replicas=tuple(names)) for i, names in enumerate(replicas)
    )
    stage_of = {name: number for number, names in enumerate(replicas) for name in names}
    ways = tuple(Path(hops=tuple(Hop(stage=stage_of[name], node=name) for name in path)) for path in paths)
    return StageLayout(epoch=epoch, stages=stages, paths=ways)


def example_delay(one: str, other: str) -> float:
    """Seconds between two nodes of stages 01, 23, 45, 67, the same both ways. With one job of 1 s each the best chains
    are 024 and 135."""
    low, high = sorted((one, other))
    if low in _FROM_SOURCES and high not in _FROM_SOURCES:
        return float(_FROM_SOURCES[low][int(high) - 2])
    return float(_BETWEEN.get(low + high, 0.0))
