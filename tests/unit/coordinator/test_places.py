"""Where links became slow, beside what each of them was."""

from farloop.coordinator.net.link_table import COORDINATOR, Ends, LinkTable
from farloop.coordinator.observe.straggler_detector import LEAST_ROUNDS, USUAL_AFTER, SlowLinks
from farloop.wire.meter import Burst

NODES = ["a", "b", "c", "d"]
RATES = {"a": 1e6, "b": 2e6, "c": 8e6, "d": 0.5e6}
"""Unequal from the beginning."""


def measured(slow: dict[Ends, float]) -> LinkTable:
    matrix = LinkTable()
    for node, usual in RATES.items():
        matrix.round_trips(node, COORDINATOR, [0.01])
        for ends in ((node, COORDINATOR), (COORDINATOR, node)):
            rate = usual / slow.get(ends, 1.0)
            burst = Burst(
                num_bytes=int(4 * rate), seconds=4.0, half_bytes=int(2 * rate), half_s=2.0, half_chunks=20,
                third_bytes_per_s=rate, fourth_bytes_per_s=rate,
            )  # fmt: skip
            matrix.burst(ends, burst, 1.0, probe=True)
    return matrix


def places(slow: dict[Ends, float]) -> SlowLinks:
    known = SlowLinks()
    for _ in range(LEAST_ROUNDS):
        known.round_over(measured({}), NODES)
        assert not any(known.of(place) for place in [*NODES, COORDINATOR])
    known.round_over(measured(slow), NODES)
    return known


def test_an_uplink_is_its_nodes_send_side() -> None:
    known = places({("c", COORDINATOR): 8.0})
    assert known.of("c") == "send side, 8.0 times as slow as before"
    assert not any(known.of(place) for place in ("a", "b", "d", COORDINATOR))


def test_both_ways_are_the_host() -> None:
    assert places({("c", COORDINATOR): 8.0, (COORDINATOR, "c"): 8.0}).of("c").startswith("card or host")


def test_all_uplinks_together_are_the_coordinators_own_end() -> None:
    known = places({(node, COORDINATOR): 8.0 for node in NODES})
    assert known.of(COORDINATOR).startswith("receive side")


def test_links_that_were_slow_from_the_beginning_are_not_slow_now() -> None:
    assert not any(places({}).of(place) for place in [*NODES, COORDINATOR])


def test_what_stays_slow_is_usual_one_day_and_so_is_what_became_fast() -> None:
    """As the watch has it of nodes: no place is called slow for ever, nor are links held to what they no longer are."""
    slowed: dict[Ends, float] = {("c", COORDINATOR): 8.0}
    known = places(slowed)
    for _ in range(USUAL_AFTER + LEAST_ROUNDS + 1):
        known.round_over(measured(slowed), NODES)
    assert known.of("c") == "", "the usual by now"
    for _ in range(USUAL_AFTER + LEAST_ROUNDS + 1):
        known.round_over(measured({}), NODES)
    known.round_over(measured({("c", COORDINATOR): 4.0}), NODES)
    assert known.of("c") == "send side, 4.0 times as slow as before", "not as it was when it was slow"
