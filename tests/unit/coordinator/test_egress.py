"""Covers `coordinator/net/router.py`: a joiner's download never starves live traffic, and is never starved."""

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


def taken(egress: Egress, start: float, seconds: float, tick_s: float = 0.001) -> int:
    """Background bytes that leave in so many seconds, by chunks, while live bytes keep moving."""
    total = 0
    for i in range(round(seconds / tick_s)):
        now = start + i * tick_s
        egress.live(1, 1000 + i % 2, moved=True, now=now)
        while egress.allows(7, now):
            egress.spent(CHUNK, now)
            total += CHUNK
    return total


def measured(egress: Egress, bytes_per_s: float) -> float:
    """Two seconds of arrivals at this rate; the time after them."""
    for i in range(200):
        egress.arrived(round(bytes_per_s / 100), i / 100)
    return 2.0


def test_while_nobody_waits_for_anything_the_background_has_all() -> None:
    egress = Egress(0.0)
    for _ in range(10_000):
        assert egress.allows(7, 0.0)
        egress.spent(CHUNK, 0.0)


@pytest.mark.parametrize("bytes_per_s", [4e6, 1e8])
def test_while_live_bytes_are_on_their_way_it_has_its_share(bytes_per_s: float) -> None:
    egress = Egress(0.0)
    start = measured(egress, bytes_per_s)
    share = taken(egress, start, 10.0) / 10 / bytes_per_s
    assert 0.7 * SHARE < share < 1.2 * SHARE


def test_what_it_had_while_it_was_alone_is_not_held_against_it() -> None:
    """Nor is it a stock to draw on: the share begins as the first live byte leaves."""
    egress = Egress(0.0)
    start = measured(egress, 4e6)
    for _ in range(1000):
        egress.allows(7, start)
        egress.spent(CHUNK, start)
    assert egress.allows(7, start)
    egress.live(1, 1000, moved=True, now=start)
    assert taken(egress, start, 1.0) < 2 * SHARE * 4e6


def test_it_is_never_starved_on_a_link_of_which_nothing_is_known() -> None:
    egress = Egress(0.0)
    assert taken(egress, 0.0, 20.0) >= 0.8 * 20 * SLOWEST_BYTES_PER_S


def test_a_peer_that_takes_nothing_keeps_nobody_out() -> None:
    egress = Egress(0.0)
    for i in range(100):
        egress.live(1, 1000, moved=i == 0, now=i / 10)
        if i / 10 >= STALE_S:
            assert egress.allows(7, i / 10)
            egress.spent(CHUNK, i / 10)


def test_a_session_that_is_over_or_has_nothing_on_its_way_does_not_count() -> None:
    egress = Egress(0.0)
    for session in (1, 2):
        egress.live(session, 1000, moved=True, now=0.0)
    egress.spent(100 * CHUNK, 0.0)
    assert not egress.allows(7, 0.1) and egress.wait_s(0.1) > 0
    egress.gone(1)
    assert not egress.allows(7, 0.1)
    egress.live(2, 0, moved=True, now=0.1)
    assert egress.allows(7, 0.1)


def test_it_may_go_on_after_the_wait_that_it_names() -> None:
    egress = Egress(0.0)
    egress.live(1, 1000, moved=True, now=0.0)
    egress.spent(3 * CHUNK, 0.0)
    wait_s = egress.wait_s(0.0)
    assert not egress.allows(7, 0.9 * wait_s) and egress.allows(7, 1.001 * wait_s)


def test_beside_updates_it_never_has_more_on_its_way_than_a_moment_of_the_link() -> None:
    """What has left cannot make room when an update comes."""
    for bytes_per_s in (0.0, 1e5, 1e8):
        egress = Egress(0.0)
        now, in_flight = measured(egress, bytes_per_s), 0
        egress.live(2, 1000, moved=True, now=now)
        egress.live(2, 0, moved=True, now=now)
        while egress.allows(1, now):
            in_flight += CHUNK
            egress.spent(CHUNK, now)
            egress.background(1, in_flight, moved=True, now=now)
        assert in_flight <= max(AHEAD_BYTES, 1.02 * AHEAD_S * bytes_per_s) + CHUNK
        assert not egress.allows(7, now)
        assert egress.allows(1, now + NUDGE_S), "it may be acknowledged with the next alone"
        assert egress.allows(7, now + STALE_S), "and a joiner that takes nothing keeps no other out"
        egress.background(1, in_flight, moved=False, now=now + LATELY_S)
        assert egress.allows(1, now + LATELY_S)
