"""Seconds of a message, and links that nobody should believe."""

from dataclasses import replace

import pytest
from plan_cases import ACROSS, INSIDE, two_islands, world

from farloop.coordinator.routing.anomalies import UNREACHABLE_S, suspects
from farloop.coordinator.routing.fabric import fabric_of
from farloop.coordinator.routing.inventory import Link


def test_seconds_of_a_message() -> None:
    found = fabric_of(two_islands(h=1))
    assert found.message_s[0][1] == INSIDE.seconds(0.05e9) == 0.041
    assert found.message_s[0][2] == ACROSS.seconds(0.05e9) == pytest.approx(0.85)
    assert found.message_s[0][0] == 0.0


def test_a_link_that_is_slower_than_three_ways_round_is_suspect() -> None:
    assert suspects([[0.0, 9.1, 1.0], [9.1, 0.0, 2.0], [1.0, 2.0, 0.0]]) == ((0, 1), (1, 0))
    assert suspects([[0.0, 8.9, 1.0], [8.9, 0.0, 2.0], [1.0, 2.0, 0.0]]) == ()


def test_one_direction_alone_may_be_suspect() -> None:
    assert suspects([[0.0, 99.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]) == ((0, 1),)


def test_suspects_and_missing_links_are_not_used() -> None:
    inventory = world(12, stages=3, skip=0.0)
    slip = {**inventory.links, ("s0", "s1"): Link(latency_s=0.02, bytes_per_s=1e5)}
    found = fabric_of(replace(inventory, links=slip))
    assert found.suspects == ((0, 1),) and found.message_s[0][1] == UNREACHABLE_S
    none = {ends: link for ends, link in inventory.links.items() if ends != ("s0", "s1")}
    assert fabric_of(replace(inventory, links=none)).message_s[0][1] == UNREACHABLE_S


def test_what_is_said_of_a_node_goes_before_what_is_said_of_its_site() -> None:
    inventory = two_islands(h=1)
    own = {**inventory.links, ("x0", "Y"): INSIDE, ("x0", "y1"): ACROSS}
    found = fabric_of(replace(inventory, links=own)).latency_s
    assert (found[0][2], found[0][3], found[1][2]) == (1e-3, 0.05, 0.05)


def test_a_part_keeps_its_suspects() -> None:
    found = fabric_of(world(12, stages=3, skip=0.0))
    assert found.part([2, 0]).message_s[0][1] == found.message_s[2][0]
