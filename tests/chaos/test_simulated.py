"""Random runs in which anything goes wrong: all end, and none forks.

With `-m slow` thousands of others, which `make test-slow` plays. A failure names its scenario:
`faulty_world.run(random_scenario(SEED, faults=N)).check()` plays it again.
"""

from collections.abc import Callable
from typing import Any

import pytest
import simulated_faults as ft
import simulated_faults as sc
import toy_problem as problems
from faulty_world import run
from random_scenarios import parted_scenario, random_scenario
from simulated_outcome import Outcome
from slow_cases import slow

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import records as rec

RUNS, PARTED_RUNS, BATCH = 300, 200, 10
BY_DEFAULT = BATCH
SLOW_RUNS, SLOW_BATCH = 5000, 250


def play(make: Callable[..., sc.Scenario], first: int, count: int = BATCH) -> None:
    for seed in range(first, first + count):
        try:
            run(make(seed, faults=seed % 6)).check()
        except Exception as error:
            error.add_note(f"{make.__name__}({seed}, faults={seed % 6})")
            raise


def batches(runs: int) -> list[Any]:
    """First seeds; those that are not played by default are marked slow."""
    marks = {first: () if first < BY_DEFAULT else pytest.mark.slow for first in range(0, runs, BATCH)}
    return [pytest.param(first, marks=mark) for first, mark in marks.items()]


def test_a_seed_is_a_scenario() -> None:
    assert random_scenario(11) == random_scenario(11) != random_scenario(12)


@pytest.mark.parametrize("first", batches(RUNS))
def test_whatever_goes_wrong_every_fragment_ends_final_and_equal_everywhere(first: int) -> None:
    """Crashes at any write, restarts, cuts of either way, squalls, pauses, clocks that leap, disks that are full,
    narrow or read-only, late joiners, drains, nodes that come and go, spoiled anchors; two at once.

    Every node that ends the run holds the coordinator's anchors, and so does another start from its disk; versions rise
    by one; no delta is merged twice; weights sum to 1; every invariant of every machine and session holds after every
    event.
    """
    play(random_scenario, first)


@pytest.mark.parametrize("seed", [323, *slow(2057, 3679)])
def test_scenarios_that_found_a_fault(seed: int) -> None:
    """Weights told after a clipped merge; a share taken for that of the next delta; who was late for a window that had
    to open again."""
    play(random_scenario, seed, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(RUNS, RUNS + SLOW_RUNS, SLOW_BATCH))
def test_thousands_of_further_runs_end_final_and_equal_everywhere(first: int) -> None:
    play(random_scenario, first, SLOW_BATCH)


@pytest.mark.parametrize("first", batches(PARTED_RUNS))
def test_whatever_goes_wrong_among_nodes_that_hold_a_part_each_the_same_is_true(first: int) -> None:
    """The same faults, in runs of two or three stages that have nodes of their own."""
    play(parted_scenario, first)


# --- one fault at a time: that it happens, and what becomes of the run


def calm(*faults: sc.Fault, steps: int = 24) -> sc.Scenario:
    terms = problems.terms_of("streaming", steps=steps, h=6, tau=1, mix=0.5, min_nodes=2)
    return sc.Scenario(terms=terms, faults=faults, patience_s=120.0)


def starts(outcome: Outcome) -> int:
    """Of the coordinator."""
    return 1 + sum(isinstance(record, rec.EpochClaimed) for record in outcome.records)


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    return run(calm())


@pytest.mark.parametrize("durable", [True, *slow(False)])
def test_a_crash_at_any_write_of_a_run_changes_nothing_that_was_told(undisturbed: Outcome, durable: bool) -> None:
    """Before the write or behind it; all nodes' deltas are merged, for both wait for the coordinator."""
    writes = len(undisturbed.records) - 1
    assert writes > 20
    for write in range(1, writes + 1):
        outcome = run(calm(ft.CrashAtWrite(write=write, durable=durable)))
        outcome.check()
        assert starts(outcome) == 2, f"no crash at write {write}"
        assert outcome.versions == undisturbed.versions


def test_a_crash_in_a_recovery_is_recovered_from() -> None:
    claims = 6
    crashes = [ft.CrashAtWrite(write=write, durable=write % 2 == 0) for write in range(5, 5 + claims)]
    outcome = run(calm(*crashes))
    outcome.check()
    epochs = [record.epoch for record in outcome.records if isinstance(record, rec.EpochClaimed)]
    assert len(epochs) < claims, "a claim that was torn off leaves nothing"
    assert epochs == sorted(set(epochs)) and epochs[-1] == 1 + claims, "no epoch is given out twice"


@pytest.mark.parametrize(
    "fault", [ft.ReadOnlyDisk(at=1.0, for_s=20.0), ft.LowDisk(at=1.0, for_s=20.0, room=10)], ids=["read-only", "narrow"]
)
def test_a_disk_that_takes_nothing_holds_the_run_and_loses_nothing(undisturbed: Outcome, fault: sc.Fault) -> None:
    """What could not be written is written once it can be, with the result of a run that was never held."""
    outcome = run(calm(fault))
    outcome.check()
    assert outcome.seconds > undisturbed.seconds + 15.0
    assert not any(commit.drops for commit in outcome.commits)
    assert outcome.anchor_digests == undisturbed.anchor_digests


@pytest.mark.parametrize("who", [None, sc.TWO_NODES[0].name], ids=["coordinator", "node"])
@pytest.mark.parametrize("by_s", [0.5, 60.0, 86400.0])
def test_a_clock_that_leaps_ahead_costs_no_node_its_place(who: NodeId | None, by_s: float) -> None:
    """The time in which nothing was heard because the clock leapt is no node's silence."""
    outcome = run(calm(ft.ClockJump(node=who, at=2.0, by_s=by_s)))
    outcome.check()
    assert not any(commit.drops for commit in outcome.commits)


@pytest.mark.parametrize("to", ["node", "coordinator"])
def test_a_link_that_is_cut_one_way_is_given_up_and_healed(to: str) -> None:
    """Whoever hears nothing gives the session up, and the node comes back when the way is free."""
    outcome = run(calm(ft.OneWayCut(node=sc.TWO_NODES[0].name, at=2.0, for_s=25.0, to=to)))  # type: ignore[arg-type]
    outcome.check()
    assert any(drop.node == sc.TWO_NODES[0].name for commit in outcome.commits for drop in commit.drops)
    assert outcome.nodes[sc.TWO_NODES[0].name][-1].versions == outcome.versions


def test_a_node_that_heard_nothing_for_rounds_of_a_run_that_does_not_wait_goes_on_with_the_run() -> None:
    """It stood before a round of which the coordinator tells no more."""
    nodes = tuple(sc.NodeSetup(name=NodeId(name), seed=ord(name), step_s=0.3) for name in "abc")
    terms = problems.terms_of("decoupled", steps=56, h=5, tau=2, quorum=1, min_nodes=3)
    fault = ft.OneWayCut(node=nodes[0].name, at=1.16, for_s=15.0, to="node")
    outcome = run(sc.Scenario(terms=terms, nodes=nodes, faults=(fault,), patience_s=60.0))
    outcome.check()
    assert outcome.nodes[nodes[0].name][-1].skipped_positions > 0


def test_a_link_in_a_squall_that_is_reset_again_and_again_brings_everything_once(undisturbed: Outcome) -> None:
    """Doubled, overtaken, damaged and cut off, and still the result of a quiet run."""
    outcome = run(calm(ft.BadLinkPeriod(node=sc.TWO_NODES[0].name, at=0.5, for_s=6.0, resets=12)))
    outcome.check()
    assert len({blob for commit in outcome.commits for blob in commit.blobs}) == sum(
        len(c.blobs) for c in outcome.commits
    )
    assert outcome.versions == undisturbed.versions


@pytest.mark.parametrize("gently", [True, *slow(False)])
def test_a_node_may_come_and_go_a_dozen_times_under_one_name(gently: bool) -> None:
    """Every start is another incarnation that begins from what it received."""
    fault = ft.Rejoin(node=sc.TWO_NODES[0].name, at=0.5, times=12, stays_s=0.2, gently=gently)
    outcome = run(calm(fault, steps=720))  # a node that is told to leave while snapshots come takes seconds for it
    outcome.check()
    assert len(outcome.nodes[sc.TWO_NODES[0].name]) >= 10


def test_a_second_coordinator_on_one_state_is_refused_and_the_run_goes_on(undisturbed: Outcome) -> None:
    outcome = run(calm(*(ft.SecondCoordinator(at=0.5 * number) for number in range(6))))
    outcome.check()
    assert outcome.anchor_digests == undisturbed.anchor_digests
