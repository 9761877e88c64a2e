"""farloop.wire.lanes: how many bulk lanes a link needs, and which of them the next chunk leaves on."""

import dataclasses

import pytest

from farloop.wire.lanes import Lanes, lanes_needed
from farloop.wire.limits import MOST_LANES
from farloop.wire.messages import Connection

MBIT = 1e6 / 8
CLEAN = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=100_000, congestion="cubic")
ONE_IN_1000 = dataclasses.replace(CLEAN, retransmits=100)
"""One lane of CUBIC has 3.9 Mbit/s with it (RFC 8312)."""
BBR = dataclasses.replace(ONE_IN_1000, congestion="bbr")


@pytest.mark.parametrize(
    ("what", "mbit", "rtt_s", "kernel", "lanes"),
    [
        ("nothing is known", 0.0, 0.0, None, 1),
        ("a thin link", 50.0, 0.3, CLEAN, 1),
        ("a near one", 10_000.0, 0.0005, CLEAN, 1),
        ("a long fat one", 200.0, 0.1, CLEAN, 4),
        ("... of which the kernel tells nothing", 200.0, 0.1, None, 4),
        ("... that loses what BBR does not mind", 200.0, 0.1, BBR, 4),
        ("CUBIC that loses: one lane is twice doubled ...", 3.9, 0.1, ONE_IN_1000, 2),
        ("... and again ...", 15.0, 0.1, ONE_IN_1000, 8),
        ("... as far as there may be", 100.0, 0.1, ONE_IN_1000, 16),
        ("less than one lane could have: the link is the bound", 1.5, 0.1, ONE_IN_1000, 1),
        ("loss behind a queue of its own", 10.0, 0.1, dataclasses.replace(ONE_IN_1000, rtt_s=0.2), 1),
        ("... on a fat link", 100.0, 0.1, dataclasses.replace(ONE_IN_1000, rtt_s=0.2), 4),
        ("a few lost segments show no rate", 40.0, 0.1, dataclasses.replace(CLEAN, retransmits=7, segments=900), 1),
        ("loss on a short way", 40.0, 0.004, dataclasses.replace(ONE_IN_1000, rtt_s=0.004, least_rtt_s=0.004), 1),
    ],
)
def test_there_are_several_lanes_where_one_does_not_fill_the_link(
    what: str, mbit: float, rtt_s: float, kernel: Connection | None, lanes: int
) -> None:
    assert lanes_needed(mbit * MBIT, rtt_s, kernel) == lanes, what


def test_under_loss_the_number_doubles_with_the_rate_until_the_link_is_the_bound() -> None:
    alone, lanes, seen = 3.9, 1, []
    for _ in range(6):
        lanes = lanes_needed(min(lanes * alone, 40.0) * MBIT, 0.1, ONE_IN_1000)
        seen.append(lanes)
    assert seen == [2, 4, 8, 16, 16, 16] and lanes == MOST_LANES


def sent(lanes: Lanes, number: int, num_bytes: int) -> None:
    lanes._lanes[number].in_flight += num_bytes


def brought(lanes: Lanes, number: int, num_bytes: int, seconds: float) -> None:
    lane = lanes._lanes[number]
    lane.in_flight -= num_bytes
    lane.brought(num_bytes, 0.0, lane.arrived, seconds)


def test_the_next_chunk_leaves_on_the_lane_that_will_have_brought_it_first() -> None:
    lanes = Lanes()
    assert lanes.first(100) is None
    for number in (1, 2):
        lanes.opened(number)
        sent(lanes, number, 1000)
    brought(lanes, 1, 1000, 1.0)
    brought(lanes, 2, 1000, 4.0)
    order = []
    for _ in range(10):
        lane = lanes.first(100)
        assert lane is not None
        sent(lanes, lane.number, 100)
        order.append(lane.number)
    assert order.count(1) == 8
    lanes.opened(3)
    new = lanes.first(100)
    assert new is not None and new.number == 3, "of which nothing is known: as good as the others are on the whole"
    assert lanes.lost(3) is new and lanes.lost(3) is None


def test_a_lane_that_brought_nothing_in_time_gets_less_until_it_brings_something() -> None:
    lanes = Lanes()
    for number in (1, 2):
        lanes.opened(number)
        sent(lanes, number, 1000)
        brought(lanes, number, 1000, 1.0)
    lanes._lanes[1].doubt()
    first = lanes.first(100)
    assert first is not None and first.number == 2
    sent(lanes, 2, 900)
    behind = lanes.first(100)
    assert behind is not None and behind.number == 1, "it is not given up"
