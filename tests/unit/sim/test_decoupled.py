"""Whole runs of the methods in which no node waits for an update: `decoupled` and `async` (protocol A, D, E, F)."""

import dataclasses
from collections import Counter
from functools import cache
from typing import Any

import pytest
from simulated_faults import CrashCoordinator, CrashNode, Fault, NodeSetup, PauseCoordinator
from simulated_outcome import Outcome
from simulated_runs import simulate
from slow_cases import mostly_slow, slow

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as coordinator_ev
from farloop.coordinator.decide import records as rec
from farloop.node import events as node_ev
from farloop.wire.messages import Offer

METHODS = ("decoupled", "async")
A, B, C, D = (NodeId(name) for name in "abcd")
FAST = (0.1, 0.1, 0.1)
STEPS, H = 120, 12


def play(method: str, step_s: tuple[float, ...], *faults: Fault, **choices: Any) -> Outcome:
    """Ten rounds of twelve steps; three fragments, or one where the method has one."""
    nodes = tuple(NodeSetup(name=NodeId("abcd"[k]), seed=k, step_s=seconds) for k, seconds in enumerate(step_s))
    rounds = {"steps": STEPS, "h": H, "tau": 2, "min_nodes": len(nodes)}
    return simulate(method, *faults, nodes=nodes, **{**rounds, **choices})


@cache
def clear(method: str, step_s: tuple[float, ...]) -> Outcome:
    """Nothing goes wrong."""
    return play(method, step_s)


def trained_for(outcome: Outcome, node: NodeId) -> float:
    """Seconds from the start of the run to this node's last inner step."""
    return max(when for when, who, what in outcome.tape if who == node and isinstance(what, node_ev.StepDone))


def contributions(outcome: Outcome) -> Counter[NodeId]:
    return Counter(name for commit in outcome.commits for name in commit.contributors)


def stored(outcome: Outcome) -> list[Offer]:
    """All deltas that came."""
    return [what.offer for _, _, what in outcome.tape if isinstance(what, coordinator_ev.InputStored)]


def rounds_of(outcome: Outcome) -> list[int]:
    return [commit.round for commit in outcome.commits if commit.fragment == 0]


@pytest.mark.parametrize("method", METHODS)
def test_equal_nodes_do_every_position_and_lose_no_step(method: str) -> None:
    """A, E: however often others have committed."""
    outcome = clear(method, FAST)
    for (start,) in outcome.nodes.values():
        assert (start.stage, start.inner_steps) == ("finished", STEPS)
        assert (start.lost_steps, start.skipped_positions) == (0, 0)
        assert start.anchor_digests == outcome.anchor_digests


def test_equal_nodes_are_merged_together() -> None:
    """F: the grace covers what they differ by, once it has been seen."""
    outcome = clear("decoupled", FAST)
    assert len(outcome.commits) == 3 * STEPS // H
    assert sum(contributions(outcome).values()) >= 0.95 * 3 * len(outcome.commits)


def test_alone_every_delta_is_a_step_and_all_make_as_many() -> None:
    """The last ones are means: of all flushes, and once more, as those were not all from one base."""
    outcome = clear("async", FAST)
    assert [len(commit.merged) for commit in outcome.commits] == [1] * 27 + [3, 3]
    assert contributions(outcome) == {A: 11, B: 11, C: 11}
    assert rounds_of(outcome) == [*sorted(list(range(9)) * 3), 9, 9]


@pytest.mark.parametrize("seconds", [0.4, 2.0])
def test_a_slow_node_slows_no_other_node(seconds: float) -> None:
    """F: four times slower, or twenty times; its own part is small, and comes late."""
    without, with_it = clear("decoupled", FAST), play("decoupled", (*FAST, seconds))
    for node in (A, B, C):
        assert trained_for(with_it, node) < 1.03 * trained_for(without, node)
        (start,) = with_it.nodes[node]
        assert (start.inner_steps, start.lost_steps, start.skipped_positions) == (STEPS, 0, 0)
    assert contributions(with_it)[D] > 0
    # But for the flush of one whose late delta the last window holds (F).
    assert rounds_of(with_it)[: len(rounds_of(without))] == rounds_of(without), "it uses up no window"
    assert len(rounds_of(with_it)) <= len(rounds_of(without)) + 1


def test_a_slow_node_does_fewer_steps_in_the_time_of_a_round() -> None:
    """A: as soon as it is known to be slow, it keeps up; before, it lost two rounds."""
    outcome = play("decoupled", (*FAST, 0.4), steps=2 * STEPS)
    plans = [record.round for record in outcome.records if isinstance(record, rec.RoundFixed)]
    assert {plan.steps_of(D) for plan in plans[10:]} == {3} and {plan.steps_of(A) for plan in plans} == {H}
    (start,) = outcome.nodes[D]
    assert start.inner_steps == pytest.approx(STEPS / 2, rel=0.1)
    assert start.skipped_positions <= 6 * H
    assert len({commit.round for commit in outcome.commits if D in commit.contributors}) > STEPS / 2 / H


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seconds", [0.4, *slow(0.1)])
def test_without_staleness_a_run_ends_and_no_version_is_made_of_nothing(method: str, seconds: float) -> None:
    """F: nodes that stood still sent deltas without a step as fast as the network carried them, and each was a version:
    whoever did a step meanwhile was late."""
    outcome = play(method, (0.1, 0.1, seconds), max_staleness=0)
    steps = {offer.blob: sum(c.steps for c in offer.contributors) for offer in stored(outcome)}
    for commit in outcome.commits:
        assert any(steps[blob] for blob in commit.blobs) or len(commit.merged) == 3, "all that are expected came"
    assert len(outcome.commits) <= 3 * len({(commit.fragment, commit.round) for commit in outcome.commits})


@pytest.mark.parametrize("method", METHODS)
def test_a_node_that_dies_holds_no_node_up(method: str) -> None:
    outcome = play(method, FAST, CrashNode(node=C, at=4.0))
    without = clear(method, FAST)
    assert trained_for(outcome, A) < trained_for(without, A) + 3.0, "a closed connection is waited for 2 s"
    assert contributions(outcome)[C] < contributions(without)[C]
    assert all(outcome.nodes[name][0].inner_steps == STEPS for name in (A, B))


@pytest.mark.parametrize("at_event", mostly_slow(range(20, 200, 45), 65))
@pytest.mark.parametrize("method", METHODS)
def test_a_coordinator_that_dies_costs_no_step(method: str, at_event: int) -> None:
    """P, Q: what was stored is merged, what was merged is not merged again."""
    outcome = play(method, (0.1, 0.13), CrashCoordinator(at_event=at_event, down_s=0.5))
    assert outcome.alarms == 0
    for (start,) in outcome.nodes.values():
        assert (start.stage, start.lost_steps) == ("finished", 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_coordinator_that_is_away_for_less_than_a_round_stops_no_node(method: str) -> None:
    """F: deltas wait for it, training does not."""
    outcome, without = play(method, FAST, PauseCoordinator(at=5.0, for_s=0.9)), clear(method, FAST)
    assert trained_for(outcome, A) < trained_for(without, A) + 0.05


@pytest.mark.parametrize("mix", [0.0, *slow(1.0)])
@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_in_one_delta(method: str, mix: float) -> None:
    """H: with mix = 1 all of them, with mix = 0 all but those of the overlap; late or not."""
    outcome = play(method, (0.1, 0.13, 0.17), mix=mix, screen="off")  # with mix = 1 async diverges, and that shows
    merged = Counter((blob.node, blob.fragment) for commit in outcome.commits for blob in commit.blobs)
    for name, (start,) in outcome.nodes.items():
        assert start.lost_steps == 0
        for fragment in outcome.layout.fragments:
            sends = [send for send in start.diary.sends if send.fragment == fragment.index]
            merges = [merge for merge in start.diary.merges if merge.fragment == fragment.index and merge.version]
            assert merged[name, fragment.index] == len(sends) == len(merges), "none was dropped, each was merged once"
            overlaps = sum(merge.inner_step - send.inner_step for send, merge in zip(sends, merges, strict=True))
            assert sum(send.steps for send in sends) == start.inner_steps - (0 if mix == 1.0 else overlaps)


@pytest.mark.parametrize(("base", "complaint"), [(0, "holds the same work again"), (-20, "a fresh base")])
def test_a_delta_that_is_too_old_or_holds_what_another_brought_would_be_noticed(base: int, complaint: str) -> None:
    """D, E: the check itself."""
    outcome = clear("async", FAST)
    commits = list(outcome.commits)
    second = next(number for number, commit in enumerate(commits) if commit.round == 1)
    (blob,) = commits[second].blobs
    commits[second] = dataclasses.replace(commits[second], blobs=(dataclasses.replace(blob, version=base),))
    with pytest.raises(AssertionError, match=complaint):
        dataclasses.replace(outcome, commits=tuple(commits)).check()
