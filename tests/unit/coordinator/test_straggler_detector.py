"""Times of rounds against the node's own earlier rounds, and where links became slow."""

import dataclasses
import random

import pytest

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.net.link_table import COORDINATOR, Ends, LinkTable
from farloop.coordinator.observe.straggler_monitor import LEAST_ROUNDS, USUAL_AFTER, RoundTimes, SlowLinks
from farloop.planner.anomalies import Kind, Samples, slow
from farloop.wire.meter import Burst

A = NodeId("a")


def delta(seq: int, fragment: int = 0) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=fragment, version=seq, node=A, incarnation=1, seq=seq)


class Paced(RoundTimes):
    """The rounds of node a."""

    def __init__(self) -> None:
        super().__init__()
        self.retain({A: 1})

    def round(self, number: int, *, byte_s: float = 0.001, strays: bool = False) -> Samples:
        """Ten steps and a thousand bytes, ten seconds from the round before."""
        begin = 10.0 * number
        self.reported(A, blocked_s=begin, inner_steps=10 * number, now=2 * begin)
        self.reported(A, blocked_s=begin, inner_steps=10 * number + 10, now=2 * begin + 5.0)
        self.asked(delta(number), 1000, begin)
        self.whole(delta(number), begin + 1000 * byte_s)
        return self.close([(Kind.LINK_SLOW, A)] if strays else [])[A]


@pytest.fixture
def paced() -> Paced:
    return Paced()


def test_a_node_is_judged_by_the_median_of_its_own_rounds_once_there_are_enough(paced: Paced) -> None:
    for number in range(LEAST_ROUNDS):
        sample = paced.round(number)
        assert [part.expected_s for part in sample.values()] == [0.0, 0.0], "not yet"
    sample = paced.round(LEAST_ROUNDS, byte_s=0.008)
    assert sample[Kind.LINK_SLOW].expected_s == pytest.approx(1.0) and sample[Kind.LINK_SLOW].taken_s == pytest.approx(
        8.0
    )
    assert sample[Kind.NODE_SLOW].expected_s > 0.0


def test_rounds_that_stray_are_not_learnt_from(paced: Paced) -> None:
    for number in range(LEAST_ROUNDS):
        paced.round(number)
    for number in range(LEAST_ROUNDS, LEAST_ROUNDS + 40):
        sample = paced.round(number, byte_s=0.008, strays=True)
    assert sample[Kind.LINK_SLOW].expected_s == pytest.approx(1.0)
    assert paced.paces()[A].bytes_per_s == pytest.approx(125.0), "its pace is what it is now"
    paced.forget(Kind.LINK_SLOW, A)
    assert paced.round(99)[Kind.LINK_SLOW].expected_s == 0.0, "learnt anew"


def test_another_start_of_a_node_is_another_machine_for_all_one_knows(paced: Paced) -> None:
    for number in range(LEAST_ROUNDS + 1):
        paced.round(number)
    assert A in paced.paces()
    paced.retain({A: 2})
    assert A not in paced.paces()
    assert paced.round(0)[Kind.NODE_SLOW].expected_s == 0.0
    paced.retain({})
    assert paced.close([]) == {}


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        # side by side they share the seconds of the link
        ([("asked", delta(1, 0), 600, 0.0), ("asked", delta(2, 1), 400, 1.0), ("whole", delta(1, 0), 3.0),
          ("whole", delta(2, 1), 4.0)], 4.0),
        # what broke off tells nothing
        ([("asked", delta(1), 1000, 0.0), ("broken", A), ("asked", delta(1), 400, 60.0), ("whole", delta(1), 61.0)],
         1.0),
        # the first was given up for the second
        ([("asked", delta(2), 1000, 70.0), ("asked", delta(3), 1000, 90.0), ("whole", delta(3), 91.0),
          ("whole", delta(2), 99.0)], 1.0),
    ],
)  # fmt: skip
def test_a_transfer_takes_the_links_seconds(paced: Paced, steps: list[tuple[object, ...]], seconds: float) -> None:
    for call, *given in steps:
        getattr(paced, str(call))(*given)
    assert paced.close([])[A][Kind.LINK_SLOW].taken_s == pytest.approx(seconds)


def test_standing_still_and_evaluating_are_no_compute(paced: Paced) -> None:
    paced.reported(A, blocked_s=0.0, inner_steps=0, now=0.0)
    paced.reported(A, blocked_s=7.0, inner_steps=10, now=10.0)
    assert paced.close([])[A][Kind.NODE_SLOW].taken_s == pytest.approx(3.0)
    paced.reported(A, blocked_s=7.0, inner_steps=10, now=60.0, trains=False)
    paced.reported(A, blocked_s=7.0, inner_steps=11, now=61.0)
    paced.reported(A, blocked_s=7.0, inner_steps=13, now=62.0)
    assert paced.close([])[A][Kind.NODE_SLOW].taken_s == pytest.approx(1.0)


def test_no_alarm_in_a_thousand_rounds_that_vary_by_a_fifth() -> None:
    """Four nodes, five runs: fewer than one false alarm in a thousand rounds."""
    nodes = [NodeId(name) for name in "abcd"]
    for seed in range(5):
        rand, pacing, rounds = random.Random(seed), RoundTimes(), list[dict[str, Samples]]()
        pacing.retain(dict.fromkeys(nodes, 1))
        for number in range(200):
            now = 100.0 * number
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
        assert all(part.expected_s for one in rounds[-1].values() for part in one.values())


# --- Slow links

RATES = {"a": 1e6, "b": 2e6, "c": 8e6, "d": 0.5e6}
"""Unequal from the beginning: that is no reason to call any of them slow."""
PLACES = [*RATES, COORDINATOR]
UP, DOWN = ("c", COORDINATOR), (COORDINATOR, "c")


def measured(slow: dict[Ends, float]) -> LinkTable:
    table = LinkTable()
    for node, usual in RATES.items():
        table.round_trips(node, COORDINATOR, [0.01])
        for ends in ((node, COORDINATOR), (COORDINATOR, node)):
            rate = usual / slow.get(ends, 1.0)
            burst = Burst(
                num_bytes=int(4 * rate), seconds=4.0, half_bytes=int(2 * rate), half_s=2.0, half_chunks=20,
                third_bytes_per_s=rate, fourth_bytes_per_s=rate,
            )  # fmt: skip
            table.burst(ends, burst, 1.0, probe=True)
    return table


def slowed(slow: dict[Ends, float]) -> SlowLinks:
    known = SlowLinks()
    for _ in range(LEAST_ROUNDS):
        known.on_round_end(measured({}), list(RATES))
        assert not any(map(known.of, PLACES))
    known.on_round_end(measured(slow), list(RATES))
    return known


@pytest.mark.parametrize(
    ("slow", "place", "told"),
    [
        ({UP: 8.0}, "c", "send side, 8.0 times as slow as before"),
        ({UP: 8.0, DOWN: 8.0}, "c", "card or host"),
        ({}, "c", ""),
    ],
)
def test_where_links_became_slow_is_told(slow: dict[Ends, float], place: str, told: str) -> None:
    known = slowed(slow)
    assert known.of(place).startswith(told)
    assert [one for one in PLACES if known.of(one)] == ([place] if told else [])


def test_all_uplinks_together_are_the_coordinators_own_end() -> None:
    known = slowed({(node, COORDINATOR): 8.0 for node in RATES})
    assert known.of(COORDINATOR).startswith("receive side")


def test_what_stays_slow_is_usual_one_day_and_so_is_what_became_fast() -> None:
    """No place is called slow for ever, nor are links held to what they no longer are."""
    known = slowed({UP: 8.0})
    for _ in range(USUAL_AFTER + LEAST_ROUNDS + 1):
        known.on_round_end(measured({UP: 8.0}), list(RATES))
    assert known.of("c") == "", "the usual by now"
    for _ in range(USUAL_AFTER + LEAST_ROUNDS + 1):
        known.on_round_end(measured({}), list(RATES))
    known.on_round_end(measured({UP: 4.0}), list(RATES))
    assert known.of("c") == "send side, 4.0 times as slow as before", "not as it was when it was slow"
