"""Runs of the coordinator's session router with tight limits: rates, paced downloads, and lanes that fill up."""

import dataclasses
from typing import Any

import pytest

from farloop.algo.spec import NodeId
from farloop.coordinator.net import router
from farloop.coordinator.net.router import SHARE, Egress
from farloop.coordinator.net.sessions import RateLimit, RateLimiter, RateLimits
from farloop.runtime.ports import Sent
from farloop.sim.network import LinkConditions, VirtualRouterSocket
from farloop.sim.outcome import Outcome
from farloop.sim.problems import terms_of
from farloop.sim.scenario import BadLinkPeriod, CrashNode, NodeSetup, Scenario
from farloop.sim.world import World
from farloop.wire.reasons import Reason

THIN = LinkConditions(bytes_per_s=20_000.0)
NODES = (
    NodeSetup(name=NodeId("a"), seed=1),
    NodeSetup(name=NodeId("b"), seed=2),
    NodeSetup(name=NodeId("late"), seed=3, joins_at=3.0),
)
USUAL = Scenario(terms=terms_of("streaming", steps=24, min_nodes=2), nodes=NODES, weather=THIN, patience_s=120.0)


def results_of(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> list[object]:
    """What every call of this method returned."""
    call, results = getattr(kind, method), list[object]()

    def spy(*args: Any, **kwargs: Any) -> Any:
        results.append(call(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(kind, method, spy)
    return results


def outcome_of(scenario: Scenario) -> Outcome:
    outcome = World(scenario).run()
    outcome.check()
    return outcome


@pytest.mark.parametrize("lane_buffer_s", [0.04, 0.08])
def test_a_run_over_lanes_that_are_often_full_ends_with_the_same_anchors_everywhere(
    lane_buffer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost or sent out of order, or the run would stall."""
    sent = results_of(monkeypatch, VirtualRouterSocket, "send")
    outcome = outcome_of(dataclasses.replace(USUAL, lane_buffer_s=lane_buffer_s))
    assert Sent.FULL in sent
    assert all(node[-1].anchor_digests == outcome.anchor_digests for node in outcome.nodes.values())


def test_a_node_that_joins_gets_its_snapshots_while_updates_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its downloads yield to updates, and are never starved."""
    monkeypatch.setattr(router, "SLOWEST_BYTES_PER_S", 4000)  # the fragments are small
    monkeypatch.setattr(router, "AHEAD_BYTES", 2000)
    allowed = results_of(monkeypatch, Egress, "allows")
    outcome = outcome_of(dataclasses.replace(USUAL, terms=terms_of("streaming", steps=80), background_share=SHARE))
    assert {True, False} == set(allowed)
    assert any(NodeId("late") in commit.contributors for commit in outcome.commits)


def test_a_node_that_returns_too_often_is_let_in_when_its_bucket_has_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = RateLimits(greetings_of_a_key=RateLimit(per_s=0.5, burst=2))
    faults = (
        BadLinkPeriod(node=NodeId("a"), at=2.0, for_s=2.0, resets=6),
        CrashNode(node=NodeId("b"), at=3.0, down_s=0.5),
    )
    greeted = results_of(monkeypatch, RateLimiter, "greets")
    outcome = outcome_of(dataclasses.replace(USUAL, weather=LinkConditions(), rates=rates, faults=faults))
    assert {None, Reason.TOO_OFTEN} == set(greeted)
    assert outcome.nodes[NodeId("a")][-1].stage == "finished"
