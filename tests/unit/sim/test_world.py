"""Whole runs in clear weather, and what the world itself promises."""

import dataclasses

import pytest
from faulty_world import World, run
from simulated_faults import TWO_NODES, CrashNode, Fault, Scenario
from simulated_runs import simulate
from slow_cases import slow
from toy_problem import terms_of

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import records as rec
from farloop.quant.digest import digest
from farloop.sim import world
from farloop.sim.network import HOSTILE_LINK
from farloop.sim.world import Stuck
from farloop.wire.uplink import UplinkLimit

METHODS = ("diloco", "streaming", "data-parallel")
A, B = NodeId("a"), NodeId("b")


@pytest.mark.parametrize("method", METHODS)
def test_training_gets_closer_to_what_both_nodes_want(method: str) -> None:
    """The evaluation of the anchors (protocol J) falls."""
    steps = 60 if method == "data-parallel" else 40
    outcome = simulate(method, steps=steps, outer_momentum=0.5)
    assert outcome.evaluations[-1].loss < 0.9 * outcome.evaluations[0].loss


@pytest.mark.parametrize("codec", ["ternary", *slow("q4r", "lattice", "randk", "sign", "lowrank")])
def test_gradients_of_every_step_may_be_quantized(codec: str) -> None:
    """K: TernGrad, QSGD and rand-k send unbiased gradients, 1-bit methods feed the error back; nodes stay equal."""
    outcome = simulate("data-parallel", steps=60, codec_up=codec)
    assert outcome.evaluations[-1].loss < 0.9 * outcome.evaluations[0].loss
    assert outcome.anchor_digests != simulate("data-parallel", steps=60).anchor_digests
    for (start,) in outcome.nodes.values():
        assert start.anchor_digests == outcome.anchor_digests


@pytest.mark.parametrize(
    ("method", "steps", "seed", "faults"),
    [
        ("streaming", 12, 5, (CrashNode(node=B, at=1.5, down_s=1),)),
        ("decoupled", 24, 3, ()),  # grace and speeds are made of times, and times of the scenario
        ("async", 24, 3, ()),
    ],
)
def test_equal_scenarios_give_equal_tapes_even_in_a_storm(
    method: str, steps: int, seed: int, faults: tuple[Fault, ...]
) -> None:
    """Y: nothing in a machine, a session or the world depends on anything but the scenario."""
    scenario = Scenario(terms=terms_of(method, steps=steps), weather=HOSTILE_LINK, seed=seed, faults=faults)
    first, second = run(scenario), run(scenario)
    assert first.tape == second.tape
    assert first.anchor_digests == second.anchor_digests
    assert run(dataclasses.replace(scenario, seed=seed + 1)).tape != first.tape


def test_a_world_that_cannot_go_on_says_who_waits_for_what() -> None:
    scenario = Scenario(terms=terms_of("diloco"), nodes=TWO_NODES[:1], patience_s=20.0)
    with pytest.raises(Stuck, match=r"(?s)node a: ready, waits for the start.*coordinator: versions \[0\]"):
        run(scenario)


def test_a_world_that_notes_nothing_comes_to_the_same() -> None:
    """The plain world is what `farloop lab bench quality` runs."""
    scenario = Scenario(terms=terms_of("streaming", steps=20))
    noted = World(scenario).run()
    noted.check()
    plain = world.World(dataclasses.replace(scenario, problem=scenario.trains()))
    plain.run()
    assert tuple(map(digest, plain.anchors)) == noted.anchor_digests
    assert tuple(plain.evaluations) == noted.evaluations
    for name, host in plain.hosts.items():
        (start,) = noted.nodes[name]
        assert host.actor.link.moved == start.moved
        assert host.actor.sent == [(send.position, send.fragment) for send in start.diary.sends]


def test_the_disk_of_a_long_run_is_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are pruned and old snapshots deleted."""
    monkeypatch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", 8)
    sizes = []
    for steps in (150, 300):
        played = World(Scenario(terms=terms_of("streaming", steps=steps), frugal=True))
        outcome = played.run()
        outcome.check()
        assert sum(isinstance(record, rec.WindowCommitted) for record in outcome.records) == len(outcome.commits)
        sizes.append(played.disk.num_bytes)
    assert sizes[1] < 1.2 * sizes[0]


def test_bytes_are_counted_on_both_ways_of_every_node() -> None:
    """Three deltas and three updates in fp32; apart from them the snapshot of a node whose first weights are others."""
    late = (TWO_NODES[0], dataclasses.replace(TWO_NODES[1], joins_at=1.2))
    terms = terms_of("diloco", codec_up="fp32", codec_down="fp32", min_nodes=1)
    outcome = run(Scenario(terms=terms, nodes=late))
    (start,) = outcome.nodes[A]
    model = 4 * sum(fragment.numel for fragment in outcome.layout.fragments)
    assert 3 * model < start.moved.up.delta < 4 * model, "chunks of 400 bytes have a header each"
    assert 3 * model < start.moved.down.update < 4 * model
    for way in (start.moved.up, start.moved.down):
        assert 0 < way.control < 2 * model, "reports, and the terms of the run"
    assert start.moved.down.snapshot == 0, "it begins with the run's weights"
    assert model < outcome.nodes[B][0].moved.down.snapshot < 1.5 * model


@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_limited_uplinks_and_quiet_hours_is_slower_and_otherwise_the_same(method: str) -> None:
    """What is held back is late, and no error: no session ends, and nothing is dropped. The quiet minute is the
    first of the simulation."""
    terms = terms_of(method, steps=20 if method == "data-parallel" else 60, outer_momentum=0.5)
    limit = UplinkLimit(bytes_per_s=20_000.0, quiet_hours=(0, 1), quiet_bytes_per_s=2_000.0)
    free, limited = (run(Scenario(terms=terms, uplink=uplink)) for uplink in (UplinkLimit(), limit))
    limited.check()
    assert limited.versions == free.versions
    assert limited.seconds > 1.5 * free.seconds and limited.lost == ()
    assert not any(commit.drops for commit in limited.commits)
    assert all(start.stopped_by is None for starts in limited.nodes.values() for start in starts)
