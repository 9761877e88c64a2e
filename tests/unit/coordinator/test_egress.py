"""Covers `Egress` in `coordinator/net/router.py`: a joiner's download starves no live traffic, and is not starved."""

import pytest

from farloop.coordinator.net.router import (
    AHEAD_BYTES,
    AHEAD_S,
    LATELY_S,
    NUDGE_S,
    SHARE,
    SLOWEST_BYTES_PER_S,
    STALE_S,
    Egress,
)

CHUNK = 256 << 10
START = 2.0


def measured(bytes_per_s: float) -> Egress:
    """After two seconds of arrivals at this rate."""
    egress = Egress(0.0)
    for i in range(200):
        egress.arrived(round(bytes_per_s / 100), i / 100)
    return egress


def taken(egress: Egress, seconds: int) -> int:
    """Background bytes that leave in so many seconds, by chunks, while live bytes keep moving."""
    total = 0
    for i in range(1000 * seconds):
        now = START + i / 1000
        egress.live(1, 1000 + i % 2, moved=True, now=now)
        while egress.allows(7, now):
            egress.spent(CHUNK, now)
            total += CHUNK
    return total


def test_while_nobody_waits_for_anything_the_background_has_all_and_it_is_not_held_against_it() -> None:
    """Nor is it a stock to draw on: the share begins as the first live byte leaves."""
    egress = measured(4e6)
    for _ in range(10_000):
        assert egress.allows(7, START)
        egress.spent(CHUNK, START)
    egress.live(1, 1000, moved=True, now=START)
    assert taken(egress, 1) < 2 * SHARE * 4e6


@pytest.mark.parametrize("bytes_per_s", [0.0, 4e6, 1e8])
def test_while_live_bytes_are_in_flight_it_has_its_share_and_is_never_starved(bytes_per_s: float) -> None:
    share = max(SHARE * bytes_per_s, SLOWEST_BYTES_PER_S)
    assert 0.7 * share < taken(measured(bytes_per_s), 20) / 20 < 1.2 * share


def test_a_peer_that_takes_nothing_is_over_or_has_nothing_in_flight_delays_nobody() -> None:
    egress = Egress(0.0)
    for i in range(100):
        egress.live(1, 1000, moved=i == 0, now=i / 10)
        if i / 10 >= STALE_S:
            assert egress.allows(7, i / 10)
            egress.spent(CHUNK, i / 10)
    egress = Egress(0.0)
    for session in (1, 2):
        egress.live(session, 1000, moved=True, now=0.0)
    egress.spent(3 * CHUNK, 0.0)
    wait_s = egress.wait_s(0.0)
    assert not egress.allows(7, 0.9 * wait_s) and egress.allows(7, 1.001 * wait_s)
    egress.spent(100 * CHUNK, wait_s)
    egress.gone(1)
    assert not egress.allows(7, wait_s)
    egress.live(2, 0, moved=True, now=wait_s)
    assert egress.allows(7, wait_s)


@pytest.mark.parametrize("bytes_per_s", [0.0, 1e5, 1e8])
def test_beside_updates_it_never_has_more_on_its_way_than_a_moment_of_the_link(bytes_per_s: float) -> None:
    """What has left cannot make room when an update comes."""
    egress, in_flight = measured(bytes_per_s), 0
    egress.live(2, 1000, moved=True, now=START)
    egress.live(2, 0, moved=True, now=START)
    while egress.allows(1, START):
        in_flight += CHUNK
        egress.spent(CHUNK, START)
        egress.background(1, in_flight, moved=True, now=START)
    assert in_flight <= max(AHEAD_BYTES, 1.02 * AHEAD_S * bytes_per_s) + CHUNK
    assert not egress.allows(7, START)
    assert egress.allows(1, START + NUDGE_S), "it may be acknowledged with the next alone"
    assert egress.allows(7, START + STALE_S), "and a joiner that takes nothing keeps no other out"
    egress.background(1, in_flight + 1, moved=True, now=START + LATELY_S)
    assert egress.allows(1, START + LATELY_S)
