"""farloop.wire.lanes: how many bulk lanes a link needs, and which of them the next chunk leaves on."""

import dataclasses
from pathlib import Path

from stories import StoryText, all_stories, check_story, python

from farloop.wire.lanes import Lanes, lanes_needed
from farloop.wire.limits import MOST_LANES
from farloop.wire.messages import Connection

MBIT = 1e6 / 8
CLEAN = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=100_000, congestion="cubic")
ONE_IN_1000 = dataclasses.replace(CLEAN, retransmits=100)
"""One lane of CUBIC has 3.9 Mbit/s with it (RFC 8312)."""


@all_stories(__file__, "lanes")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)


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
