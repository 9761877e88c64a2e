"""Hundreds of random runs in which anything goes wrong: all end, and none forks."""

import pytest

from farloop.sim.chaos import random_scenario
from farloop.sim.world import run

RUNS, BATCH = 320, 20


def test_a_seed_is_a_scenario() -> None:
    assert random_scenario(11) == random_scenario(11)
    assert random_scenario(11) != random_scenario(12)


@pytest.mark.parametrize("first", range(0, RUNS, BATCH))
def test_whatever_goes_wrong_every_fragment_ends_final_and_equal_everywhere(first: int) -> None:
    """A–I, L, O–S, U–X: crashes, restarts, cuts, pauses, full disks, late joiners, drains, storms, spoiled anchors.

    Every node that ends the run holds the coordinator's anchors; versions rise by one; no delta is merged twice;
    weights sum to 1; every invariant of every machine and session holds after every event.
    """
    for seed in range(first, first + BATCH):
        try:
            run(random_scenario(seed, faults=seed % 6)).check()
        except Exception as error:
            error.add_note(f"farloop.sim.chaos.random_scenario({seed}, faults={seed % 6})")
            raise
