"""When a link is probed, and when not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.coordinator.net.link_table import (
    AGAIN_S,
    FIRST_BYTES,
    FRESH_S,
    PROBES_AN_HOUR,
    QUIET_S,
    BandwidthProbe,
    Candidate,
)

BUDGET = 32 << 20


def candidate(
    node: str = "oslo", *, upward: bool = True, age_s: float = math.inf, changed: bool = False, rtt_s: float = 0.05
) -> Candidate:
    return Candidate(node=node, upward=upward, rtt_s=rtt_s, age_s=age_s, changed=changed)


def quiet(budget: int = BUDGET) -> tuple[BandwidthProbe, float]:
    """A prober and a time at which it may begin."""
    return rich(budget), QUIET_S + 1.0


def rich(budget: int = BUDGET, *, run_bytes: int = 1 << 50) -> BandwidthProbe:
    """The run has moved more than any probe costs."""
    prober = BandwidthProbe(budget, 0.0)
    for node in ("oslo", "rome", "a", "b", "c"):
        prober.has_moved(node, run_bytes, 0)
    return prober


def test_it_waits_until_nobody_has_waited_for_a_while() -> None:
    prober = rich()
    assert prober.next([candidate()], QUIET_S - 0.1) is None
    prober.busy(5.0)
    assert prober.next([candidate()], QUIET_S + 1.0) is None
    assert prober.next([candidate()], QUIET_S + 6.0) is not None


def test_there_is_one_at_a_time() -> None:
    prober, now = quiet()
    running = prober.next([candidate("a"), candidate("b")], now)
    assert running is not None and prober.next([candidate("a"), candidate("b")], now) is None
    prober.over(now + 2.0, learned=True)
    assert prober.next([candidate("a")], now + 2.0) is not None


def test_what_was_never_measured_goes_first_then_the_oldest() -> None:
    prober, now = quiet()
    due = [candidate("a", age_s=FRESH_S + 1), candidate("b"), candidate("c", age_s=FRESH_S + 50)]
    first = prober.next(due, now)
    prober.over(now, learned=True)
    second = prober.next([due[0], due[2]], now)
    assert first is not None and second is not None
    assert (first.node, second.node) == ("b", "c")


def test_a_fresh_rate_is_left_alone_unless_the_link_has_changed() -> None:
    prober, now = quiet()
    assert prober.next([candidate(age_s=FRESH_S - 1)], now) is None
    assert prober.next([candidate(age_s=1.0, changed=True)], now) is not None


def test_a_budget_of_nothing_probes_nothing() -> None:
    prober, now = quiet(0)
    assert prober.next([candidate()], now) is None


def test_live_traffic_marks_the_running_one() -> None:
    prober, now = quiet()
    running = prober.next([candidate()], now)
    assert running is not None and running.quiet
    prober.busy(now + 0.1)
    assert not running.quiet


def test_after_one_that_told_nothing_it_waits_longer_each_time() -> None:
    prober, now = quiet()
    waits, at = [], now
    for _ in range(9):
        assert prober.next([candidate()], at) is not None
        prober.over(at, learned=False)
        begun = at
        while prober._may_begin("oslo", at) is False:
            at += 1.0
        waits.append(at - begun)
        prober._spent.clear()
    assert waits[:3] == [AGAIN_S[0], 2 * AGAIN_S[0], 4 * AGAIN_S[0]]
    assert waits[-1] == AGAIN_S[1]


def test_an_hour_costs_a_node_no_more_than_its_budget() -> None:
    prober, now = quiet()
    begun = 0
    for second in range(3600):
        if prober.next([candidate(changed=True)], now + second) is not None:
            begun += 1
            prober.over(now + second, learned=True)
    assert begun == PROBES_AN_HOUR


@pytest.mark.parametrize(("rtt_s", "at_least"), [(0.001, 1.5), (0.3, 3.6)])
def test_it_is_given_up_only_after_it_could_have_told(rtt_s: float, at_least: float) -> None:
    prober, now = quiet()
    running = prober.next([candidate(rtt_s=rtt_s)], now)
    assert running is not None and running.ends_by - now > 3 * at_least


def test_what_somebody_asks_for_is_next_however_fresh_until_it_is_known() -> None:
    prober, now = quiet()
    prober.asked.add(("oslo", True))
    fresh = candidate(age_s=1.0)
    for learned in (False, True):
        now += AGAIN_S[0]
        running = prober.next([candidate(node="rome", age_s=FRESH_S + 1.0), fresh], now)
        assert running is not None and running.node == "oslo"
        prober.over(now, learned=learned)
    assert prober.next([fresh], now + 1.0) is None
    prober.asked.add(("oslo", True))
    prober.keep(["rome"])
    assert prober.asked == set()


def test_each_direction_has_one_small_probe_before_the_run_has_moved_anything() -> None:
    prober, now = BandwidthProbe(BUDGET, 0.0), QUIET_S + 1.0
    sizes = []
    for second in range(1000):
        running = prober.next([candidate(upward=True), candidate(upward=False)], now + 100 * second)
        if running is not None:
            sizes.append((running.upward, running.num_bytes))
            prober.has_moved("oslo", 0, running.num_bytes)
            prober.over(now + 100 * second, learned=False)
    assert sorted(sizes) == [(False, FIRST_BYTES), (True, FIRST_BYTES)]


@given(
    steps=st.lists(st.tuples(st.integers(0, 40 << 20), st.booleans(), st.booleans()), max_size=60),
    budget=st.integers(1, BUDGET),
)
def test_probes_take_at_most_one_percent_of_what_the_run_moves(
    steps: list[tuple[int, bool, bool]], budget: int
) -> None:
    """But for the first of each direction."""
    prober, now, moved, probed = BandwidthProbe(budget, 0.0), QUIET_S + 1.0, 0, 0
    for run_bytes, learned, called_off in steps:
        now += 2 * AGAIN_S[1]
        moved += run_bytes
        prober.has_moved("oslo", run_bytes, 0)
        running = prober.next([candidate(upward=True), candidate(upward=False)], now)
        if running is None:
            continue
        if called_off:
            prober.busy(now - QUIET_S)
        probed += round(1.01 * running.num_bytes)
        prober.has_moved("oslo", 0, round(1.01 * running.num_bytes))
        prober.over(now, learned=learned)
        assert probed <= 0.01 * moved + 1.02 * 2 * FIRST_BYTES


def test_a_probe_that_told_nothing_is_repeated_only_with_more_bytes() -> None:
    prober, now = BandwidthProbe(BUDGET, 0.0), QUIET_S + 1.0
    first = prober.next([candidate()], now)
    assert first is not None
    prober.over(now, learned=False)
    prober.has_moved("oslo", 15 * FIRST_BYTES * 100, 0)
    assert prober.next([candidate()], now + AGAIN_S[1]) is None
    prober.has_moved("oslo", 3 * FIRST_BYTES * 100, 0)
    second = prober.next([candidate()], now + AGAIN_S[1])
    assert second is not None and 16 * FIRST_BYTES <= second.num_bytes <= 18 * FIRST_BYTES
