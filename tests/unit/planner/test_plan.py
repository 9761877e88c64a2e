"""Whole plans: modes, what lost, the sync, and what holds for all of them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import four_sites, two_islands, world

from farloop.planner.inventory import COORDINATOR, Card, CardKind, Hub, Inventory, Link, Mode, Model, Node, PlanRequest
from farloop.planner.placement import Transport
from farloop.planner.plan import Plan, make_plan


@pytest.mark.parametrize(("h", "mode"), [(1, Mode.B), (3, Mode.B), (4, Mode.A), (50, Mode.A)])
def test_the_mode_follows_h_star_unless_one_is_asked_for(h: int, mode: Mode) -> None:
    """E1's prediction: 2.022 against 6.582 s at H = 1, turning at 3.82."""
    inventory = two_islands(h=h)
    plan = make_plan(inventory)
    assert plan.mode is mode and plan.h_star == pytest.approx(3.82, abs=0.005)
    if mode is Mode.B:
        assert [set(stage.replicas) for stage in plan.layout.stages] == [{"x0", "x1"}, {"y0", "y1"}]
    else:
        assert all(len({hop.node[0] for hop in path.hops}) == 1 for path in plan.layout.paths)
    (other,) = plan.alternatives
    assert other.factor >= 1.0
    assert h > 1 or (other.seconds, other.chosen_s) == pytest.approx((6.582, 2.022))
    for wanted in Mode:
        plan = make_plan(replace(inventory, wish=replace(inventory.wish, mode=wanted)))
        assert (plan.mode, plan.why) == (wanted, "asked for")


def test_groups_inside_an_island_of_one_kind_may_use_rdma() -> None:
    inventory = two_islands(h=1)
    near = {ends: replace(link, latency_s=link.latency_s / 5) for ends, link in inventory.links.items()}
    kinds = [CardKind.INFINIBAND] * 2 + [CardKind.ROCE_V2] * 2
    nodes = tuple(replace(n, cards=(Card(kind=kind),)) for n, kind in zip(inventory.nodes, kinds, strict=True))
    across = make_plan(replace(inventory, nodes=nodes, links=near))
    assert [group.transport for group in across.groups] == [Transport.INFINIBAND, Transport.ROCE]
    wish = replace(inventory.wish, h=50)
    inside = make_plan(replace(inventory, nodes=nodes, links=near, wish=wish))
    assert {group.transport for group in inside.groups} == {Transport.SOCKET}


def test_nodes_that_hold_the_model_only_sync() -> None:
    """The worked example: 25.7 s by the star."""
    plan = make_plan(four_sites())
    assert (plan.mode, len(plan.layout.stages), len(plan.islands)) == (Mode.A, 1, 4)
    assert plan.sync is not None and plan.sync.star.round_s == pytest.approx(25.68)
    assert plan.compute_share == pytest.approx(plan.compute_s / (plan.compute_s + 25.68))
    assert plan.sync.fragments == 8 and plan.sync.predicted == (plan.sync.star,)


@pytest.mark.parametrize(("sync_bytes", "seconds"), [(None, 3.456), (0.5, 0.864)])
def test_a_sync_inside_an_island_is_counted_as_an_all_reduce(sync_bytes: float | None, seconds: float) -> None:
    """Four nodes at 25 Gbit/s, 2 bytes of 3.6 B parameters: 18.4 s through a coordinator as fast, 3.5 by a ring."""
    link = Link(latency_s=0.0, bytes_per_s=3.125e9)
    inventory = Inventory(
        nodes=tuple(Node(name=name, site="X", layer_s=0.01) for name in "abcd"),
        model=Model(layers=8, parameters=3.6e9, sync_bytes=sync_bytes),
        links={ends: link for ends in (("X", "X"), ("X", COORDINATOR), (COORDINATOR, "X"))},
        hub=Hub(in_bytes_per_s=3.125e9, out_bytes_per_s=3.125e9),
        wish=PlanRequest(bits=(16,)),
    )
    plan = make_plan(inventory)
    assert plan.sync is not None and plan.sync.star.round_s == pytest.approx(18.432)
    assert plan.sync_s == plan.sync.priced.round_s == pytest.approx(seconds)
    assert plan.streamed_round_s == plan.compute_s and plan.round_s == pytest.approx(plan.compute_s + seconds)
    star = next(one for one in plan.alternatives if one.name == "star")
    assert (star.seconds, star.of) == (plan.sync.star.round_s, "sync, against the all-reduce inside islands")
    assert any("through the coordinator, as the daemons do it, it takes 18.4 s" in note for note in plan.notes)
    fast = make_plan(replace(inventory, hub=None, links=inventory.links | {("X", "X"): replace(link, bytes_per_s=1e9)}))
    without = {ends: link for ends, link in inventory.links.items() if ends != ("X", "X")}
    assumed = make_plan(replace(inventory, links=without)).sync
    assert assumed is not None and assumed.priced is assumed.star, "a rate that was not given decides nothing"
    assert fast.sync is not None and (fast.sync.priced is fast.sync.star) == (sync_bytes is None)


# Holmes (arXiv 2312.03549), parameter group 1 on 4 nodes of 8 A100: 3.6 B parameters in 30 layers of width 3072, 768
# sequences of 2048 tokens in microbatches of 4 for each of 16 replicas, 2 stages. Cards: InfiniBand or RoCE of 200
# Gbit/s, Ethernet of 25 Gbit/s. TFLOPS of a GPU: 197 on InfiniBand, 160 on RoCE, 122 on Ethernet, and 149 where two
# nodes have InfiniBand and two RoCE with Ethernet between ("hybrid").
#
# Three numbers are fitted to the first three: the seconds of a layer and what RoCE and Ethernet reach of their line
# rates. A ring of 16 GPUs sends 15/16 of fp32 gradients and of bf16 parameters over each card. farloop's paths
# go back to their source for the loss, so that they cross twice as often as the paper's, here with half the bytes.
IB, ROCE, PLAIN = CardKind.INFINIBAND, CardKind.ROCE_V2, CardKind.ETHERNET
REACHED = {IB: (25e9, 1.0), ROCE: (25e9, 0.19), PLAIN: (3.125e9, 0.648)}
HOLMES_LAYER_S = 0.01256


def holmes_s(*kinds: CardKind) -> float:
    """Seconds of a step of four nodes with these cards, and Ethernet."""
    cards = {kind: Card(kind=kind, bytes_per_s=rate, efficiency=share) for kind, (rate, share) in REACHED.items()}
    inventory = Inventory(
        nodes=tuple(
            Node(name=f"n{k}", site=kind, cards=(cards[kind], cards[PLAIN]), layer_s=HOLMES_LAYER_S, slots=12)
            for k, kind in enumerate(kinds)
        ),
        model=Model(
            layers=30, parameters=3.6e9, sync_bytes=(4 + 2) * 15 / 16, microbatches=12,
            activation_bytes=32 * 2048 * 3072 * 2 / 2, backward=2.0, loss=0.0,
        ),
        links={(a, b): Link(latency_s=1e-5) for a in kinds for b in kinds},
        wish=PlanRequest(stages=2, h=1),
    )  # fmt: skip
    plan = make_plan(inventory)
    assert plan.round_s is not None and plan.mode is (Mode.A if len(set(kinds)) == 1 else Mode.B)
    return plan.round_s


def test_holmes_hybrid_ratio_is_met_within_a_tenth() -> None:
    """0.756 in the paper, and fitted to nothing here; 0.52 with a star at line rate, 0.9 with a ring at line rate."""
    infiniband_s = holmes_s(IB, IB, IB, IB)
    assert infiniband_s / holmes_s(ROCE, ROCE, ROCE, ROCE) == pytest.approx(160 / 197, rel=0.01)
    assert infiniband_s / holmes_s(PLAIN, PLAIN, PLAIN, PLAIN) == pytest.approx(122 / 197, rel=0.01)
    assert infiniband_s / holmes_s(IB, IB, ROCE, ROCE) == pytest.approx(149 / 197, rel=0.1)


def test_nodes_too_small_for_the_model_are_piped_inside_their_islands() -> None:
    inventory = four_sites()
    small = tuple(replace(node, max_layers=5) for node in inventory.nodes)
    plan = make_plan(replace(inventory, nodes=small, model=replace(inventory.model, activation_bytes=4e6)))
    assert plan.mode is Mode.A and [stage.layers for stage in plan.layout.stages] == [4, 4, 4]
    assert all(len({hop.node[0] for hop in path.hops}) == 1 for path in plan.layout.paths)
    assert plan.sync is not None and plan.sync.payload_bytes["A0"] == pytest.approx(100e6 / 3)


def test_islands_too_small_for_the_model_are_joined_by_paths() -> None:
    inventory = four_sites()
    links = dict(inventory.links)
    links |= {(a, b): links[a, "coordinator"] for a in "ABCD" for b in "ABCD" if a != b}
    small = tuple(replace(node, max_layers=2) for node in inventory.nodes)
    plan = make_plan(replace(inventory, nodes=small, links=links))
    assert plan.mode is Mode.C and plan.why == "no island holds 6 stages"
    assert all(stage.layers <= 2 for stage in plan.layout.stages)


def test_slow_links_get_fewer_bits_and_slow_nodes_fewer_steps() -> None:
    inventory = four_sites()
    links = {
        ends: replace(link, bytes_per_s=link.bytes_per_s / 20) if "D" in ends and "coordinator" in ends else link
        for ends, link in inventory.links.items()
    }
    slow = tuple(replace(node, layer_s=0.08) if node.site == "B" else node for node in inventory.nodes)
    plan = make_plan(replace(inventory, nodes=slow, links=links, wish=PlanRequest(h=100, bits=(8, 4, 2))))
    assert plan.sync is not None
    rates = plan.sync.rates
    assert rates["A0"].bits == 8 and rates["D0"].bits < 8
    assert rates["A0"].h == 100 and rates["B0"].h < 70


def test_a_source_far_slower_than_the_others_is_named() -> None:
    inventory = four_sites()
    slow = tuple(replace(node, layer_s=100 * node.layer_s) if node.name == "B0" else node for node in inventory.nodes)
    (note,) = (note for note in make_plan(replace(inventory, nodes=slow)).notes if "source" in note)
    assert note.startswith("a step of source B0 takes ") and "leave it out of the inventory" in note
    assert not any("source" in note for note in make_plan(inventory).notes)


def test_paths_that_skip_are_compared_with_full_and_random_ones() -> None:
    plan = make_plan(world(20, stages=6, skip=1 / 3))
    assert plan.mode is Mode.C and {len(path.hops) for path in plan.layout.paths} == {4}
    names = [one.name for one in plan.alternatives if one.of == "step"]
    assert names == ["full pipelines, nothing skipped", "paths dealt at random"]
    assert all(one.factor > 1.0 for one in plan.alternatives if one.of == "step")


def sound(inventory: Inventory, plan: Plan) -> None:
    """What holds for every plan."""
    assert list(plan.layout.faults()) == []
    assert plan.layout.stages[-1].stop == inventory.model.layers
    assert plan.step_s >= plan.bound_s * (1 - 1e-12)
    names = {node.name for node in inventory.nodes}
    placed = [name for stage in plan.layout.stages for name in stage.replicas]
    assert sorted([*placed, *plan.idle]) == sorted(names)
    assert sorted(name for island in plan.islands for name in island) == sorted(names)
    suspects = set(plan.suspects)
    by_name = {node.name: node for node in inventory.nodes}
    for path in plan.layout.paths:
        nodes = [hop.node for hop in path.hops]
        for source, target in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            if source != target:
                assert inventory.link(by_name[source], by_name[target]) is not None
                assert {(source, target), (target, source)}.isdisjoint(suspects)


@settings(max_examples=10)
@given(st.integers(8, 26), st.sampled_from([(3, 0.0), (4, 0.25), (5, 0.2), (6, 1 / 3)]), st.integers(0, 99))
def test_every_plan_is_sound(count: int, cut: tuple[int, float], seed: int) -> None:
    stages, skip = cut
    inventory = world(max(count, 2 * stages), stages=stages, skip=skip, seed=seed)
    inventory = replace(inventory, wish=replace(inventory.wish, effort=0.1))
    sound(inventory, make_plan(inventory))


def test_the_same_inventory_gives_the_same_plan_whatever_its_nodes_are_called() -> None:
    inventory = world(16, stages=4, skip=0.25)
    names = {node.name: f"node-{random.Random(1).random():.3f}-{k}" for k, node in enumerate(inventory.nodes)}
    renamed = replace(inventory, nodes=tuple(replace(node, name=names[node.name]) for node in inventory.nodes))
    before = make_plan(inventory)
    assert make_plan(inventory) == before
    assert [[names[hop.node] for hop in path.hops] for path in before.layout.paths] == [
        [hop.node for hop in path.hops] for path in make_plan(renamed).layout.paths
    ]


def test_a_faster_network_does_not_give_a_slower_step() -> None:
    inventory = world(20, stages=6, skip=1 / 3)
    fast = {ends: replace(link, latency_s=link.latency_s / 2) for ends, link in inventory.links.items()}
    assert make_plan(replace(inventory, links=fast)).step_s < make_plan(inventory).step_s
