"""Seconds of a message, links that should not be believed, which nodes share an island, and what its ranks share."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import ACROSS, INSIDE, two_islands, world
from stories import StoryText, all_stories, check_story, python

from farloop.planner import anomalies, fabric, placement
from farloop.planner.anomalies import UNREACHABLE_S
from farloop.planner.fabric import fabric_of, islands_of
from farloop.planner.inventory import Card, CardKind, Inventory, Link, Model, Node

# --- Links


def test_seconds_of_a_message() -> None:
    found = fabric_of(two_islands(h=1))
    assert found.message_s[0][1] == INSIDE.seconds(0.05e9) == 0.041
    assert found.message_s[0][2] == ACROSS.seconds(0.05e9) == pytest.approx(0.85)
    assert found.message_s[0][0] == 0.0


def test_suspects_and_missing_links_are_not_used() -> None:
    inventory, ends = world(12, stages=3, skip=0.0), ("s0", "s1")
    slow = replace(inventory, links={**inventory.links, ends: Link(latency_s=0.02, bytes_per_s=1e5)})
    none = replace(inventory, links={other: link for other, link in inventory.links.items() if other != ends})
    assert fabric_of(slow).suspects == ((0, 1),)
    assert fabric_of(slow).message_s[0][1] == fabric_of(none).message_s[0][1] == UNREACHABLE_S
    found = fabric_of(inventory)
    assert found.part([2, 0]).message_s[0][1] == found.message_s[2][0]


def test_what_is_said_of_a_node_goes_before_what_is_said_of_its_site() -> None:
    inventory = two_islands(h=1)
    own = {**inventory.links, ("x0", "Y"): INSIDE, ("x0", "y1"): ACROSS}
    found = fabric_of(replace(inventory, links=own)).latency_s
    assert (found[0][2], found[0][3], found[1][2]) == (1e-3, 0.05, 0.05)


def test_a_link_is_no_faster_than_the_cards_that_both_ends_have() -> None:
    """RDMA inside a site alone; a card reaches its efficiency's share of its line rate; no card says nothing."""

    def node(name: str, site: str, *cards: tuple[CardKind, float | None, float]) -> Node:
        made = tuple(Card(kind=kind, bytes_per_s=rate, efficiency=share) for kind, rate, share in cards)
        return Node(name=name, site=site, cards=made)

    nodes = (
        node("a", "X", (IB, 25e9, 0.8), (PLAIN, 4e9, 0.5)),
        node("b", "X", (IB, 50e9, 0.8), (PLAIN, 4e9, 1.0)),
        node("c", "Y", (IB, 25e9, 1.0), (PLAIN, 3e9, 1.0)),
        node("d", "Y"),
        node("e", "Y", (PLAIN, None, 0.1)),
    )
    links = {ends: Link(latency_s=1e-4) for ends in itertools.product("XY", repeat=2)}
    inventory = Inventory(nodes=nodes, model=Model(layers=1, activation_bytes=2e9), links=links)
    found = fabric_of(inventory)
    assert found.byte_s[0][1:] == pytest.approx((1 / 20e9, 1 / 2e9, 0.0, 1 / 2e9))
    assert (found.byte_s[1][2], found.byte_s[2][4]) == pytest.approx((1 / 3e9, 1 / 3e9))
    near = {("X", "X"): Link(latency_s=1e-4)}
    assert fabric_of(replace(inventory, nodes=nodes[:2], links=near)).message_s[0][1] == pytest.approx(1e-4 + 0.1)
    slow = fabric_of(replace(inventory, links=links | {("X", "X"): Link(latency_s=1e-4, bytes_per_s=1e9)}))
    assert slow.byte_s[0][1] == pytest.approx(1e-9)


# --- Islands

NEAR, TWO_MS = Link(latency_s=1e-4, bytes_per_s=12.5e9), Link(latency_s=1e-3, bytes_per_s=12.5e9)
IB, ROCE, ROCE_V1, IWARP, PLAIN = (
    CardKind.INFINIBAND, CardKind.ROCE_V2, CardKind.ROCE_V1, CardKind.IWARP, CardKind.ETHERNET
)  # fmt: skip


def placed(inventory: Inventory) -> list[tuple[int, ...]]:
    return [island.nodes for island in islands_of(inventory)]


def with_kinds(kinds: list[CardKind], inside: Link) -> Inventory:
    nodes = tuple(Node(name=str(n), site="X", cards=(Card(kind=kind),)) for n, kind in enumerate(kinds))
    return Inventory(nodes=nodes, model=Model(layers=1), links={("X", "X"): inside})


def test_links_that_are_far_one_way_make_other_islands() -> None:
    both = with_kinds([PLAIN] * 2, NEAR)
    assert placed(replace(both, links={("0", "1"): NEAR, ("1", "0"): ACROSS})) == [(0,), (1,)]
    assert placed(two_islands(h=1)) == [(0, 1), (2, 3)]
    unknown = replace(two_islands(h=1), links={("X", "X"): INSIDE})
    assert placed(unknown) == [(0, 1), (2, 3)]  # Y by the assumption of a site


@given(st.lists(st.sampled_from(list(CardKind)), min_size=1, max_size=8), st.floats(1e-5, 5e-3), st.floats(1e7, 1e11))
def test_every_node_is_in_one_island_of_one_kind(kinds: list[CardKind], latency_s: float, rate: float) -> None:
    inventory = with_kinds(kinds, Link(latency_s=latency_s, bytes_per_s=rate))
    found = islands_of(inventory)
    assert sorted(node for island in found for node in island.nodes) == list(range(len(kinds)))
    for island in found:
        assert {inventory.nodes[node].fabric for node in island.nodes} == {island.fabric}


@all_stories(__file__, "fabric")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(anomalies), vars(fabric), vars(placement), globals()), rewrite=rewrite)
