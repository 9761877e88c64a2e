"""Covers `coordinator/net/link_table.py`: what is measured of links, and which link is probed when."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.coordinator.net.link_table import (
    AGAIN_S,
    COORDINATOR,
    FIRST_BYTES,
    FRESH_S,
    MOST_LINKS,
    PROBES_AN_HOUR,
    BandwidthProbe,
    Candidate,
    LinkTable,
    retransmit_ratio,
    suspects,
)
from farloop.coordinator.settings import QUIET_S
from farloop.wire.messages import Connection, Transfer
from farloop.wire.meter import Burst, Insufficient, Measured

UP, DOWN = ("oslo", COORDINATOR), (COORDINATOR, "oslo")
BUDGET, NOW = 32 << 20, QUIET_S + 1.0


def burst(bytes_per_s: float, seconds: float = 4.0) -> Burst:
    half = int(bytes_per_s * seconds / 2)
    return Burst(
        num_bytes=2 * half, seconds=seconds, half_bytes=half, half_s=seconds / 2, half_chunks=16,
        third_bytes_per_s=bytes_per_s, fourth_bytes_per_s=bytes_per_s,
    )  # fmt: skip


@pytest.fixture
def table() -> LinkTable:
    """The round trip to oslo is known."""
    table = LinkTable()
    table.round_trips("oslo", COORDINATOR, [0.05, 0.04, 0.09])
    return table


def test_each_direction_has_its_own_rate_and_both_one_round_trip(table: LinkTable) -> None:
    (down, up) = table.rows(0.0)
    assert down["bytes_per_s"] is up["bytes_per_s"] is up["age_s"] is None and up["provenance"] == ""
    assert math.isinf(table.age_s(UP, 0.0)) and table.rate(UP) is None
    assert isinstance(table.burst(UP, burst(1e6), 10.0, probe=True), Measured)
    table.burst(DOWN, burst(5e6), 20.0, probe=False)
    down, up = table.rows(30.0)
    assert (up["from"], up["to"], up["bytes_per_s"], up["measured_by"], up["age_s"]) == (*UP, 1e6, "probe", 20.0)
    assert (down["bytes_per_s"], down["measured_by"], down["age_s"]) == (5e6, "transfer", 10.0)
    assert up["provenance"] == down["provenance"] == "probe"  # measured, not declared
    assert (up["rtt_s"], up["rtt_median_s"]) == (down["rtt_s"], down["rtt_median_s"]) == (0.04, 0.05)


def test_a_measurement_that_is_not_accepted_leaves_its_reason_and_the_rate_as_it_was(table: LinkTable) -> None:
    unknown = Insufficient(why="the round trip is not known yet")
    assert table.burst(("rome", COORDINATOR), burst(1e6), 0.0, probe=False) == unknown
    table.burst(UP, burst(1e6), 0.0, probe=True)
    assert isinstance(table.burst(UP, burst(9e6, seconds=0.05), 5.0, probe=False), Insufficient)
    (up,) = [row for row in table.rows(6.0) if row["from"] == "oslo"]
    assert up["bytes_per_s"] == 1e6 and up["age_s"] == 6.0 and "slow start" in up["why"]
    table.burst(UP, burst(1e6), 7.0, probe=False)
    assert all(row["why"] == "" for row in table.rows(7.0))


def test_transfers_move_a_rate_until_it_seems_changed_and_a_probe_replaces_it(table: LinkTable) -> None:
    table.burst(UP, burst(1e6), 0.0, probe=True)
    table.burst(UP, burst(1.2e6), 1.0, probe=False)
    assert table.rate(UP) == pytest.approx(1.06e6)
    for now, rate in enumerate((4e6, 1e6, 1e6, 1e6)):
        assert not table.changed(DOWN)
        table.burst(DOWN, burst(rate), float(now), probe=False)
    assert table.changed(DOWN) and table.rate(DOWN) == 1e6
    table.burst(DOWN, burst(2e6), 9.0, probe=True)
    assert not table.changed(DOWN) and table.rate(DOWN) == 2e6


def test_links_of_forgotten_nodes_are_dropped_and_entries_are_bounded(table: LinkTable) -> None:
    for node in ("oslo", "bergen"):
        table.round_trips(node, COORDINATOR, [0.01])
        table.burst((node, COORDINATOR), burst(1e6), 0.0, probe=False)
    table.retain(["bergen"])
    assert {row["from"] for row in table.rows(0.0)} == {"bergen", COORDINATOR}
    for index in range(MOST_LINKS + 100):
        table.connection((f"n{index}", COORDINATOR), Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=1))
    assert len(table._directions) == MOST_LINKS


def test_retransmits_are_a_share_of_what_was_sent() -> None:
    table = LinkTable()
    connection = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=25, segments=1000, congestion="bbr")
    assert (retransmit_ratio(connection), retransmit_ratio(None)) == (0.025, None)
    table.connection(UP, connection)
    table.connection(DOWN, Connection(rtt_s=math.nan, least_rtt_s=0.1, retransmits=0, segments=1))
    assert [(row["retransmit_ratio"], row["congestion"]) for row in table.rows(0.0)] == [(0.025, "bbr")]


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")).filter(lambda ends: ends[0] != ends[1]),
        st.floats(1e3, 1e10),
        max_size=12,
    )
)
def test_a_link_far_slower_than_the_way_round_is_suspect(rates: dict[tuple[str, str], float]) -> None:
    """As the entry of SkipPipe's published table that is a thousandth of its neighbours."""
    skip_pipe = {("nl", "uk"): 0.000237e9, ("nl", "be"): 0.2425e9, ("be", "uk"): 0.2e9, ("uk", "nl"): 0.1e9}
    assert suspects(skip_pipe) == {("nl", "uk")}
    for ends in set(rates) - suspects(rates):
        assert ends not in suspects({**rates, ends: 10 * rates[ends]}), "a higher rate is never more suspect"
    assert suspects({ends: 1e6 for ends in rates}) == set()
    apart = {(COORDINATOR, "rome"): 1e6, ("rome", COORDINATOR): 1.0}
    assert suspects({**rates, **apart}) == suspects(rates), "no other node has a link with it"


def test_the_time_that_a_message_took_between_two_nodes_is_a_rate() -> None:
    table, ends = LinkTable(), ("oslo", "bergen")
    impossible = [(0, 1.0), (-1, 1.0), (9, 0.0), (9, -1.0), (9, math.nan), (9, math.inf), (2**63, 1e-308)]
    for num_bytes, seconds in impossible:
        table.transfer(ends, Transfer(num_bytes=num_bytes, seconds=seconds), 10.0)
    assert table.rows(15.0) == []
    for _ in range(3):
        table.transfer(ends, Transfer(num_bytes=4_000_000, seconds=0.5), 10.0)
    (row,) = table.rows(15.0)
    assert (row["from"], row["to"], row["bytes_per_s"], row["measured_by"]) == (*ends, 8e6, "transfer")
    assert row["age_s"] == 5.0


def candidate(
    node: str = "oslo", *, upward: bool = True, age_s: float = math.inf, changed: bool = False, rtt_s: float = 0.05
) -> Candidate:
    return Candidate(node=node, upward=upward, rtt_s=rtt_s, age_s=age_s, changed=changed)


def prober(budget: int = BUDGET, run_bytes: int = 1 << 50) -> BandwidthProbe:
    """By default the run has moved more than any probe costs."""
    made = BandwidthProbe(budget, 0.0)
    for node in ("oslo", "rome", "a", "b", "c"):
        made.has_moved(node, run_bytes, 0)
    return made


def test_one_probe_at_a_time_begins_after_a_quiet_while() -> None:
    probe = prober()
    assert probe.next([candidate("a")], QUIET_S - 0.1) is None
    probe.busy(5.0)
    assert probe.next([candidate("a")], NOW) is None
    running = probe.next([candidate("a")], NOW + 5.0)
    assert running is not None and running.quiet
    assert probe.next([candidate("b")], NOW + 5.0) is None
    probe.busy(NOW + 5.1)
    assert not running.quiet
    probe.finish(NOW + 20.0, learned=True)
    assert probe.next([candidate("b")], NOW + 20.0) is not None
    assert prober(budget=0).next([candidate()], NOW) is None


def test_unmeasured_links_go_first_then_the_oldest_and_fresh_rates_only_if_the_link_changed() -> None:
    probe = prober()
    assert probe.next([candidate(age_s=FRESH_S - 1)], NOW) is None
    due = [candidate("a", age_s=FRESH_S + 1), candidate("b"), candidate("c", age_s=FRESH_S + 50)]
    first = probe.next(due, NOW)
    probe.finish(NOW, learned=True)
    second = probe.next([due[0], due[2]], NOW)
    probe.finish(NOW, learned=True)
    assert first is not None and second is not None and (first.node, second.node) == ("b", "c")
    assert probe.next([candidate(age_s=1.0, changed=True)], NOW) is not None


def test_after_a_probe_without_a_result_the_pause_doubles() -> None:
    waits, at, probe = list[float](), NOW, prober(1 << 40)
    for _ in range(9):
        begun = at
        while (running := probe.next([candidate()], at)) is None:
            at += 1.0
        waits.append(at - begun)
        probe.finish(at, learned=False)
        probe.has_moved("oslo", 1 << 60, 0)
        probe._nodes["oslo"].spent.clear()
        assert running.ends_by > at
    assert waits[1:4] == [AGAIN_S[0], 2 * AGAIN_S[0], 4 * AGAIN_S[0]] and waits[-1] == AGAIN_S[1]


def test_an_hour_costs_a_node_no_more_than_its_budget() -> None:
    probe, begun = prober(), 0
    for second in range(3600):
        if probe.next([candidate(changed=True)], NOW + second) is not None:
            begun += 1
            probe.finish(NOW + second, learned=True)
    assert begun == PROBES_AN_HOUR


@pytest.mark.parametrize(("rtt_s", "at_least"), [(0.001, 1.5), (0.3, 3.6)])
def test_a_probe_is_given_up_only_after_it_could_have_a_result(rtt_s: float, at_least: float) -> None:
    running = prober().next([candidate(rtt_s=rtt_s)], NOW)
    assert running is not None and running.ends_by - NOW > 3 * at_least


def test_a_direction_that_was_asked_for_is_next_however_fresh_until_it_is_known() -> None:
    probe, now, fresh = prober(), NOW, candidate(age_s=1.0)
    probe.asked.add(("oslo", True))
    for learned in (False, True):
        now += AGAIN_S[0]
        running = probe.next([candidate(node="rome", age_s=FRESH_S + 1.0), fresh], now)
        assert running is not None and running.node == "oslo"
        probe.finish(now, learned=learned)
    assert probe.next([fresh], now + 1.0) is None
    probe.asked.add(("oslo", True))
    probe.retain(["rome"])
    assert probe.asked == set()


@given(
    steps=st.lists(st.tuples(st.integers(0, 40 << 20), st.booleans(), st.booleans()), max_size=60),
    budget=st.integers(1, BUDGET),
)
def test_probes_take_one_percent_of_the_runs_bytes_after_one_small_probe_of_each_direction(
    steps: list[tuple[int, bool, bool]], budget: int
) -> None:
    probe, now, moved, probed = BandwidthProbe(budget, 0.0), NOW, 0, 0
    for run_bytes, learned, cancelled in steps:
        now += 2 * AGAIN_S[1]
        moved += run_bytes
        probe.has_moved("oslo", run_bytes, 0)
        running = probe.next([candidate(upward=True), candidate(upward=False)], now)
        if running is None:
            continue
        if cancelled:
            probe.busy(now - QUIET_S)
        probed += round(1.01 * running.num_bytes)
        probe.has_moved("oslo", 0, round(1.01 * running.num_bytes))
        probe.finish(now, learned=learned)
        assert probed <= 0.01 * moved + 1.02 * 2 * FIRST_BYTES


def test_a_probe_without_a_result_is_repeated_only_with_more_bytes() -> None:
    probe = prober(run_bytes=0)
    first = probe.next([candidate()], NOW)
    assert first is not None and first.num_bytes == FIRST_BYTES
    probe.finish(NOW, learned=False)
    probe.has_moved("oslo", 15 * FIRST_BYTES * 100, 0)
    assert probe.next([candidate()], NOW + AGAIN_S[1]) is None
    probe.has_moved("oslo", 3 * FIRST_BYTES * 100, 0)
    second = probe.next([candidate()], NOW + AGAIN_S[1])
    assert second is not None and 16 * FIRST_BYTES <= second.num_bytes <= 18 * FIRST_BYTES
