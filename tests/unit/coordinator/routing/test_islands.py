"""Who shares an island: kinds of cards, what was measured, and the gap in the bandwidths."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import ACROSS, INSIDE, two_islands

from farloop.coordinator.routing.fabric import FALLBACK_BYTES_PER_S, islands_of, threshold
from farloop.coordinator.routing.inventory import Card, CardKind, Inventory, Link, Model, Node


def placed(inventory: Inventory) -> list[tuple[int, ...]]:
    return [island.nodes for island in islands_of(inventory)]


def with_kinds(kinds: list[CardKind], inside: Link) -> Inventory:
    nodes = tuple(Node(name=str(n), site="X", cards=(Card(kind=kind),)) for n, kind in enumerate(kinds))
    return Inventory(nodes=nodes, model=Model(layers=1), links={("X", "X"): inside})


NEAR = Link(latency_s=1e-4, bytes_per_s=12.5e9)


def test_the_worked_example_has_two() -> None:
    assert placed(two_islands(h=1)) == [(0, 1), (2, 3)]


def test_kinds_that_cannot_talk_are_apart() -> None:
    ib, v2, v1 = CardKind.INFINIBAND, CardKind.ROCE_V2, CardKind.ROCE_V1
    assert placed(with_kinds([ib, v2, ib, v1, v2], NEAR)) == [(0, 2), (1, 4), (3,)]


def test_iwarp_and_virtual_cards_are_ethernet_to_each_other() -> None:
    kinds = [CardKind.IWARP, CardKind.VIRTUAL, CardKind.ETHERNET, CardKind.ROCE_V2]
    assert placed(with_kinds(kinds, NEAR)) == [(0, 1, 2), (3,)]


def test_an_inactive_card_does_not_count() -> None:
    inventory = with_kinds([CardKind.INFINIBAND, CardKind.ETHERNET], NEAR)
    down = replace(inventory.nodes[0], cards=(Card(kind=CardKind.INFINIBAND, active=False),))
    assert placed(replace(inventory, nodes=(down, inventory.nodes[1]))) == [(0, 1)]


def test_rdma_has_to_be_nearer_than_ethernet() -> None:
    two_ms = Link(latency_s=1e-3, bytes_per_s=12.5e9)
    assert placed(with_kinds([CardKind.INFINIBAND] * 2, two_ms)) == [(0,), (1,)]
    assert placed(with_kinds([CardKind.ETHERNET] * 2, two_ms)) == [(0, 1)]


def test_both_directions_have_to_be_near() -> None:
    inventory = with_kinds([CardKind.ETHERNET] * 2, NEAR)
    assert placed(replace(inventory, links={("0", "1"): NEAR, ("1", "0"): ACROSS})) == [(0,), (1,)]


def test_what_cannot_be_reached_is_an_island_of_its_own() -> None:
    inventory = two_islands(h=1)
    assert placed(replace(inventory, links={("X", "X"): INSIDE})) == [(0, 1), (2, 3)]  # Y by the assumption of a site


@pytest.mark.parametrize(
    ("bandwidths", "expected"),
    [
        ([1.25e9, 0.0625e9], 1.25e9),
        ([1.25e9, 1.0e9, 0.06e9, 0.05e9], 1.0e9),
        ([1.0e9, 0.9e9], FALLBACK_BYTES_PER_S),
        ([], FALLBACK_BYTES_PER_S),
    ],
)
def test_the_threshold_is_above_the_largest_gap(bandwidths: list[float], expected: float) -> None:
    assert threshold(bandwidths) == expected


@given(st.lists(st.sampled_from(list(CardKind)), min_size=1, max_size=8), st.floats(1e-5, 5e-3), st.floats(1e7, 1e11))
def test_every_node_is_in_one_island_of_one_kind(kinds: list[CardKind], latency_s: float, rate: float) -> None:
    inventory = with_kinds(kinds, Link(latency_s=latency_s, bytes_per_s=rate))
    found = islands_of(inventory)
    assert sorted(node for island in found for node in island.nodes) == list(range(len(kinds)))
    for island in found:
        assert {inventory.nodes[node].fabric for node in island.nodes} == {island.fabric}
