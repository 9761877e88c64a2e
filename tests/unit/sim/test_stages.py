"""Pipelines whose stages are nodes of their own, as far as the coordinator sees them: whole runs (protocol G)."""

import dataclasses

import pytest

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import records as rec
from farloop.sim import scenario as sc
from farloop.sim.outcome import Outcome
from farloop.sim.problems import terms_of
from farloop.sim.world import World, run

A0, B0, A1, B1 = map(NodeId, ("a0", "b0", "a1", "b1"))
PARTS = {A0: (0,), B0: (0,), A1: (1,), B1: (1,)}
NODES = tuple(sc.NodeSetup(name=name, seed=number, holds=holds) for number, (name, holds) in enumerate(PARTS.items()))


def pipelines(method: str = "streaming", **changes: object) -> sc.Scenario:
    """Two nodes for each of two stages of two blocks."""
    fields = {"steps": 36, "h": 6, "tau": 1, "codec_up": "q4", "codec_down": "q4", "min_nodes": 2}
    terms = terms_of(method, **{name: changes.pop(name, value) for name, value in fields.items()})
    return sc.Scenario(terms=terms, nodes=NODES, blocks=4, stages=(2,), **changes)  # type: ignore[arg-type]


def rounds_apart(outcome: Outcome) -> int:
    """How many rounds the last slot of one stage was ever closed before that of the other."""
    newest, apart = [-1, -1], 0
    last = {f.index: f.stage for f in outcome.layout.fragments if f.slot == outcome.layout.slots - 1}
    for commit in outcome.commits:
        if commit.fragment in last:
            newest[last[commit.fragment]] = commit.round
            apart = max(apart, abs(newest[0] - newest[1]))
    return apart


@pytest.mark.parametrize("method", ["streaming", "diloco", "co2", "decoupled", "async"])
def test_the_replicas_of_every_stage_end_equal_by_every_method(method: str) -> None:
    outcome = run(pipelines(method, tau=0 if method == "co2" else 1))
    outcome.check()
    for commit in outcome.commits:
        stage = outcome.layout.fragments[commit.fragment].stage
        assert set(commit.contributors) <= {name for name, holds in PARTS.items() if stage in holds}
    for name, holds in PARTS.items():
        (start,) = outcome.nodes[name]
        held = [f.index for f in outcome.layout.fragments if f.stage in holds]
        assert start.stage == "finished"
        assert start.anchor_digests == tuple(outcome.anchor_digests[index] for index in held)


def test_a_stage_syncs_as_if_it_were_a_model_of_its_own() -> None:
    """The other stage shows in nothing: what is merged, with which weights, into which bits."""
    outcome = run(pipelines())
    elsewhere = dataclasses.replace(pipelines(), nodes=tuple(
        dataclasses.replace(node, seed=node.seed + (7 if node.holds == (1,) else 0)) for node in NODES
    ))  # fmt: skip
    other = run(elsewhere)
    first = [f.index for f in outcome.layout.fragments if f.stage == 0]
    assert [outcome.anchor_digests[f] for f in first] == [other.anchor_digests[f] for f in first]
    assert outcome.anchor_digests != other.anchor_digests


def test_a_fast_stage_waits_for_a_slow_one() -> None:
    """A: without it the fast one would be done when the other has hardly begun."""
    nodes = tuple(dataclasses.replace(node, step_s=0.02 if node.holds == (0,) else 0.4) for node in NODES)
    outcome = run(dataclasses.replace(pipelines(), nodes=nodes))
    outcome.check()
    assert rounds_apart(outcome) <= 2


def test_only_the_first_stage_uses_up_samples() -> None:
    outcome = run(pipelines(num_samples=50))
    outcome.check()
    used = {name: len(starts[0].diary.samples) for name, starts in outcome.nodes.items()}
    assert used == {A0: 72, B0: 72, A1: 0, B1: 0}


def test_one_replica_of_a_stage_dies_and_the_run_goes_on() -> None:
    outcome = run(pipelines(faults=(sc.CrashNode(node=B1, at=2.0),)))
    outcome.check()
    final = {commit.fragment: commit.contributors for commit in outcome.commits}
    stage = {f.index: f.stage for f in outcome.layout.fragments}
    assert all(names == ((A0, B0), (A1,))[stage[index]] for index, names in final.items())


def test_a_stage_that_nobody_holds_stops_the_run_until_somebody_does() -> None:
    """And nothing is lost by that: every window of every fragment is committed, by whoever holds it."""
    dead = tuple(sc.CrashNode(node=name, at=1.5, down_s=30.0 if name == A1 else None) for name in (A1, B1))
    world = World(pipelines(faults=dead))
    seen = list[dict[str, str]]()
    world.agenda.at(25.0, lambda: seen.append(dict(world.coordinator.machine.alarms) if world.coordinator else {}))
    outcome = world.run()
    outcome.check()
    assert "no node that trains holds it" in seen[0]["stage 1"]
    assert outcome.seconds > 31.0 and rounds_apart(outcome) <= 2
    undisturbed = run(pipelines())
    assert outcome.versions == undisturbed.versions


def test_what_nodes_hold_survives_the_coordinator() -> None:
    outcome = run(pipelines(faults=(sc.CrashCoordinator(at=2.0, down_s=1.0),)))
    outcome.check()
    started = [record for record in outcome.records if isinstance(record, rec.NodeStarted)]
    assert {record.node: record.holds for record in started} == PARTS
    assert outcome.anchor_digests == run(pipelines()).anchor_digests, "nothing was lost to it"


def test_a_node_with_all_of_the_model_takes_part_beside_the_pipelines() -> None:
    whole = sc.NodeSetup(name=NodeId("w"), seed=9)
    outcome = run(dataclasses.replace(pipelines(min_nodes=3), nodes=(*NODES, whole)))
    outcome.check()
    assert {commit.contributors for commit in outcome.commits} == {(A0, B0, "w"), (A1, B1, "w")}
    assert outcome.evaluations, "and is the one who can score all of it"
