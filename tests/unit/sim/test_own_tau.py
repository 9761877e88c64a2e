"""A node's own overlap in whole runs: workers need not have the same τ (arXiv 2501.18512)."""

import dataclasses

import pytest

from farloop.algo.spec import NodeId
from farloop.sim.outcome import NodeOutcome, Outcome
from farloop.sim.problems import terms_of
from farloop.sim.scenario import TWO_NODES, Scenario
from farloop.sim.world import run

A, B = NodeId("a"), NodeId("b")
H, STEPS = 8, 40
REGULAR = STEPS - H
"""Sends of the last round are flushes, merged when they can be."""


def play(method: str, own: dict[NodeId, int], **choices: object) -> Outcome:
    nodes = tuple(dataclasses.replace(setup, tau=own.get(setup.name)) for setup in TWO_NODES)
    outcome = run(Scenario(terms=terms_of(method, h=H, steps=STEPS, **choices), nodes=nodes))
    outcome.check()
    return outcome


def overlaps(start: NodeOutcome) -> set[int]:
    """Inner steps between a send and the merge that follows it."""
    found = set()
    for number, send in enumerate(start.diary.sends):
        if send.inner_step < REGULAR:
            merged = [m for m in start.diary.merges if m.fragment == send.fragment and m.sends > number]
            found.add(merged[0].inner_step - send.inner_step)
    return found


@pytest.mark.parametrize(("method", "tau"), [("streaming", 0), ("streaming", 5), ("streaming", 7), ("diloco", 3)])
def test_a_node_merges_after_its_own_overlap_and_the_others_after_the_run_s(method: str, tau: int) -> None:
    """D: exactly τ inner steps after the send, and the same anchors everywhere."""
    outcome = play(method, {B: tau}, tau=1)
    (ours,), (other,) = outcome.nodes[B], outcome.nodes[A]
    assert (overlaps(other), overlaps(ours)) == ({1}, {tau})
    assert all(commit.contributors == (A, B) for commit in outcome.commits)
    for start in (ours, other):
        assert (start.stage, start.inner_steps, start.lost_steps) == ("finished", STEPS, 0)
        assert start.anchor_digests == outcome.anchor_digests


def test_where_updates_are_not_waited_for_a_node_has_its_own_overlap_too() -> None:
    outcome = play("decoupled", {B: 5}, quorum=2)
    """The other one merges when its delta is decided, which is after its τ."""
    assert overlaps(outcome.nodes[B][0]) == {5}
    assert max(overlaps(outcome.nodes[A][0])) < 5


@pytest.mark.parametrize("method", ["streaming", "decoupled"])
def test_an_own_overlap_that_is_the_run_s_changes_nothing(method: str) -> None:
    assert play(method, {B: 1}).tape == play(method, {}).tape
