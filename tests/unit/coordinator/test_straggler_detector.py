"""Times of rounds against the node's own earlier rounds, and where links became slow."""

import dataclasses
import random

import pytest

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.net.link_table import COORDINATOR, Ends, LinkTable
from farloop.coordinator.observe.straggler_detector import LEAST_ROUNDS, USUAL_AFTER, RoundTimes, SlowLinks
from farloop.coordinator.routing.anomalies import Kind, Sample, slow
from farloop.wire.meter import Burst

A = NodeId("a")


def delta(seq: int, fragment: int = 0) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=fragment, version=seq, node=A, incarnation=1, seq=seq)


def paced() -> RoundTimes:
    pacing = RoundTimes()
    pacing.keep({A: 1})
    return pacing


def a_round(pacing: RoundTimes, number: int, *, step_s: float = 0.5, byte_s: float = 0.001) -> None:
    """Ten steps and a thousand bytes, ten seconds from the round before."""
    begin = 10.0 * number
    pacing.reported(A, blocked_s=10.0 * number, inner_steps=10 * number, now=2 * begin)
    pacing.reported(A, blocked_s=10.0 * number, inner_steps=10 * number + 10, now=2 * begin + 10 * step_s)
    pacing.asked(delta(number), 1000, begin)
    pacing.whole(delta(number), begin + 1000 * byte_s)


def test_a_node_is_judged_by_the_median_of_its_own_rounds_once_there_are_enough() -> None:
    pacing = paced()
    for number in range(LEAST_ROUNDS):
        a_round(pacing, number)
        sample = pacing.close([])[A]
        assert sample.expected_compute_s == 0.0 and sample.expected_transfer_s == 0.0, "not yet"
    a_round(pacing, LEAST_ROUNDS, byte_s=0.008)
    sample = pacing.close([])[A]
    assert sample.expected_transfer_s == pytest.approx(1.0) and sample.transfer_s == pytest.approx(8.0)
    assert sample.expected_compute_s > 0.0


def test_rounds_that_stray_are_not_learnt_from() -> None:
    pacing = paced()
    for number in range(LEAST_ROUNDS + 40):
        a_round(pacing, number, byte_s=0.001 if number < LEAST_ROUNDS else 0.008)
        sample = pacing.close([(Kind.LINK_SLOW, A)] if number >= LEAST_ROUNDS else [])[A]
    assert sample.expected_transfer_s == pytest.approx(1.0)
    assert pacing.paces()[A].bytes_per_s == pytest.approx(125.0), "its pace is what it is now"
    pacing.forget(Kind.LINK_SLOW, A)
    a_round(pacing, 99)
    assert pacing.close([])[A].expected_transfer_s == 0.0, "learnt anew"


def test_another_start_of_a_node_has_no_pace_of_the_one_before() -> None:
    """It may be another machine; and of a node that is gone nothing is kept."""
    pacing = paced()
    a_round(pacing, 0)
    pacing.close([])
    assert A in pacing.paces()
    pacing.keep({A: 2})
    assert A not in pacing.paces(), "as fast as the start before, of which nothing is known any more"


def test_deltas_that_come_side_by_side_share_the_seconds_of_the_link() -> None:
    pacing = paced()
    pacing.asked(delta(1, fragment=0), 600, 0.0)
    pacing.asked(delta(2, fragment=1), 400, 1.0)
    pacing.whole(delta(1, fragment=0), 3.0)
    pacing.whole(delta(2, fragment=1), 4.0)
    assert pacing.close([])[A].transfer_s == pytest.approx(4.0)


def test_what_broke_off_tells_nothing() -> None:
    pacing = paced()
    pacing.asked(delta(1), 1000, 0.0)
    pacing.broken(A)
    pacing.asked(delta(1), 400, 60.0)
    pacing.whole(delta(1), 61.0)
    assert pacing.close([])[A].transfer_s == pytest.approx(1.0)
    pacing.asked(delta(2), 1000, 70.0)
    pacing.asked(delta(3), 1000, 90.0)
    pacing.whole(delta(3), 91.0)
    pacing.whole(delta(2), 99.0)
    assert pacing.close([])[A].transfer_s == pytest.approx(1.0), "the first was given up for the second"


def test_standing_still_and_evaluating_are_no_compute() -> None:
    pacing = paced()
    pacing.reported(A, blocked_s=0.0, inner_steps=0, now=0.0)
    pacing.reported(A, blocked_s=7.0, inner_steps=10, now=10.0)
    assert pacing.close([])[A].compute_s == pytest.approx(3.0)
    pacing.reported(A, blocked_s=7.0, inner_steps=10, now=60.0, trains=False)
    pacing.reported(A, blocked_s=7.0, inner_steps=11, now=61.0)
    pacing.reported(A, blocked_s=7.0, inner_steps=13, now=62.0)
    assert pacing.close([])[A].compute_s == pytest.approx(1.0)


def test_another_start_of_a_node_is_another_machine_for_all_one_knows() -> None:
    pacing = paced()
    for number in range(LEAST_ROUNDS + 1):
        a_round(pacing, number)
        pacing.close([])
    pacing.keep({A: 2})
    a_round(pacing, 0)
    assert pacing.close([])[A].expected_compute_s == 0.0
    pacing.keep({})
    assert pacing.close([]) == {}


def test_no_alarm_in_a_thousand_rounds_that_vary_by_a_fifth() -> None:
    """Four nodes, five runs: fewer than one false alarm in a thousand rounds."""
    nodes = [NodeId(name) for name in "abcd"]
    for seed in range(5):
        rand, pacing, rounds = random.Random(seed), RoundTimes(), list[dict[str, Sample]]()
        pacing.keep(dict.fromkeys(nodes, 1))
        now = 0.0
        for number in range(200):
            for node in nodes:
                blob = dataclasses.replace(delta(number), node=node)
                compute_s, transfer_s = (mean * rand.lognormvariate(0.0, 0.2) for mean in (10.0, 5.0))
                pacing.reported(node, 0.0, 0, now, trains=False)
                pacing.reported(node, 0.0, 10 * number, now)
                pacing.reported(node, 0.0, 10 * number + 10, now + compute_s)
                pacing.asked(blob, 1000, now + compute_s)
                pacing.whole(blob, now + compute_s + transfer_s)
            rounds.append(pacing.close([]))
            assert slow(rounds[-5:]) == ()
            now += 100.0
        assert all(one.expected_compute_s and one.expected_transfer_s for one in rounds[-1].values())


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
