"""Predicted seconds of star, shards, relays and rings: the worked example."""

import pytest

from farloop.coordinator.routing.topology import (
    Hub,
    Prediction,
    Site,
    Worker,
    relay_of,
    relays,
    ring,
    ring_of_relays,
    sharded,
    star,
)

WORKERS = [Worker(up=25e6, down=25e6, latency_s=0.04, payload=100e6, reachable=True)] * 16
SITES = [Site(workers=tuple(range(first, first + 4)), rate=1250e6) for first in (0, 4, 8, 12)]
HUB = Hub(down=125e6, up=125e6)


def test_the_worked_example() -> None:
    assert star(WORKERS, HUB).up_s == pytest.approx(12.84)
    assert star(WORKERS, HUB).round_s == pytest.approx(25.68)
    assert sharded(WORKERS, [HUB] * 2).round_s == pytest.approx(12.88)
    assert sharded(WORKERS, [HUB] * 4).round_s == pytest.approx(8.08)
    tree = relays(WORKERS, SITES, HUB)
    assert (tree.up_s, tree.round_s) == pytest.approx((4.28, 8.56))
    assert tree.relays == (0, 4, 8, 12)
    assert relays(WORKERS, SITES, HUB, chunks=64).up_s == pytest.approx(4.04, abs=0.005)
    exact = relays(WORKERS, SITES, HUB, widened=1.5)
    assert (exact.up_s, exact.round_s) == pytest.approx((6.28, 10.56))
    assert ring(100e6, [25e6] * 16, 0.04).round_s == pytest.approx(8.7)
    heads = ring_of_relays(WORKERS, SITES)
    assert heads is not None and heads.round_s == pytest.approx(6.72)


def test_slow_sums_make_a_star_slow() -> None:
    assert star(WORKERS, Hub(down=1e12, up=1e12, sums=10e6)).up_s == 160.0


def test_fragments_overlap_both_ways() -> None:
    assert Prediction(name="", up_s=10.0, down_s=6.0).overlapped_s(8) == 12.0
    assert Prediction(name="", up_s=10.0, down_s=6.0).overlapped_s(1) == 16.0


def test_nobody_relays_who_cannot_be_dialled() -> None:
    quiet = [Worker(up=25e6, down=25e6, latency_s=0.04, payload=100e6)] * 16
    assert relay_of(quiet, SITES[0]) is None and ring_of_relays(quiet, SITES) is None
    plain, tree = star(quiet, HUB), relays(quiet, SITES, HUB)
    assert tree.relays == () and tree.round_s == pytest.approx(plain.round_s)


def test_the_relay_is_the_one_with_the_fastest_way_out() -> None:
    rates = [1e6, 9e6, 9e6, 5e6]
    workers = [Worker(up=rate, down=rate, latency_s=0.0, payload=1e6, reachable=True) for rate in rates]
    assert relay_of(workers, Site(workers=(0, 1, 2, 3))) == 1
