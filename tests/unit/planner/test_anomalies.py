"""Faults from periodic syncs: who hangs, who is slow, where a matrix is slow; few false alarms."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from stories import StoryText, all_stories, check_story, python

from farloop.planner import anomalies
from farloop.planner.anomalies import (
    Action,
    Finding,
    Kind,
    Place,
    Progress,
    Sample,
    Samples,
    hung,
    localise,
    next_step,
    slow,
)

BASE: list[list[float | None]] = [
    [None, 11.0, 10.0, 12.0], [10.5, None, 11.5, 11.0], [12.0, 10.0, None, 11.0], [11.0, 10.5, 12.0, None]
]  # fmt: skip


def changed(cell: Callable[[int, int, float], float]) -> list[list[float | None]]:
    return [[None if value is None else cell(u, v, value) for v, value in enumerate(row)] for u, row in enumerate(BASE)]


def cells_of(rows: list[list[float | None]]) -> dict[tuple[int, int], float]:
    return {(u, v): value for u, row in enumerate(rows) for v, value in enumerate(row) if value is not None}


def places(rows: list[list[float | None]]) -> list[tuple[str, int | None, int | None, float]]:
    return [(one.place.name, one.source, one.target, round(one.factor, 2)) for one in localise(cells_of(rows))]


def culprit(*, entered: bool, heard: bool) -> str:
    """Of three nodes, of which b is behind."""
    waiting = Progress(last_done=41, entered=True, heard=True)
    found = hung({"a": waiting, "b": Progress(last_done=40, entered=entered, heard=heard), "c": waiting})
    return "" if found is None else f"{found.kind.name} of {found.node}: {found.reason}"


def climbed(finding: Finding, steps: int) -> list[str]:
    taken: list[Action] = []
    for _ in range(steps):
        taken.append(next_step(finding, taken, another_way=True).action)
    return [action.name for action in taken]


@all_stories(__file__, "planner")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(anomalies), globals()), rewrite=rewrite)


@pytest.mark.parametrize("kind", ["row", "column", "cell"])
def test_factor_two_is_found_in_20_percent_noise(kind: str) -> None:
    """Three rounds of a matrix of 8, averaged, as a report does before it accuses."""
    rand, hits, tries = random.Random(kind), 0, 200
    for _ in range(tries):
        u, v = rand.sample(range(8), 2)

        def cell(a: int, b: int, u: int = u, v: int = v) -> float | None:
            hit = (kind == "row" and a == u) or (kind == "column" and b == v) or (kind == "cell" and (a, b) == (u, v))
            factor = (3.0 if kind == "cell" else 2.0) if hit else 1.0
            noisy = sum(10.0 * factor * rand.lognormvariate(0.0, 0.2) for _ in range(3)) / 3
            return None if a == b else noisy

        found = localise(cells_of([[cell(a, b) for b in range(8)] for a in range(8)]))
        wanted = {"row": (Place.SEND, u, None), "column": (Place.RECEIVE, None, v), "cell": (Place.PATH, u, v)}[kind]
        hits += [(one.place, one.source, one.target) for one in found] == [wanted]
    assert hits >= 0.95 * tries


def rounds(count: int, *, seed: int, noise: float, factor: float = 1.0, nodes: int = 8) -> list[dict[str, Samples]]:
    """Of node n3 the transfers take `factor` times as long as predicted."""
    rand = random.Random(seed)

    def sample(name: str) -> Samples:
        own = factor if name == "n3" else 1.0
        return {
            Kind.NODE_SLOW: Sample(taken_s=10.0 * rand.lognormvariate(0.0, noise), expected_s=10.0),
            Kind.LINK_SLOW: Sample(taken_s=5.0 * own * rand.lognormvariate(0.0, noise), expected_s=5.0),
        }

    return [{f"n{n}": sample(f"n{n}") for n in range(nodes)} for _ in range(count)]


def test_no_flag_in_a_thousand_clean_rounds() -> None:
    played = rounds(1000, seed=1, noise=0.05)
    assert [slow(played[: end + 1][-5:]) for end in range(1000)] == [()] * 1000


def test_a_slow_link_is_named_within_three_rounds() -> None:
    for seed in range(50):
        played = rounds(5, seed=seed, noise=0.05) + rounds(3, seed=seed + 99, noise=0.05, factor=2.5)
        (found,) = slow(played)
        assert (found.kind, found.node) == (Kind.LINK_SLOW, "n3") and found.factor > 1.6


def test_no_node_is_slow_by_what_was_predicted_of_it_nor_among_three() -> None:
    """Different H and bits are compared by that; three are too few to compare."""
    usual = {Kind.NODE_SLOW: 10.0, Kind.LINK_SLOW: 1.0}
    own: dict[str, Samples] = {
        f"n{n}": {kind: Sample(taken_s=s * n, expected_s=s * n) for kind, s in usual.items()} for n in range(1, 9)
    }
    assert slow([own] * 5) == slow(rounds(5, seed=0, noise=0.01, factor=9.0, nodes=3)) == ()
