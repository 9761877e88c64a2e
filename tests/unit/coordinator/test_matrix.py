"""What is kept of links: rates each way, round trips, ages, doubts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.coordinator.net.link_table import COORDINATOR, MOST_LINKS, LinkTable, retransmit_ratio, suspects
from farloop.wire.messages import Connection, Transfer
from farloop.wire.meter import Burst, Insufficient, Measured

UP, DOWN = ("oslo", COORDINATOR), (COORDINATOR, "oslo")


def burst(bytes_per_s: float, seconds: float = 4.0) -> Burst:
    """A steady one."""
    half = int(bytes_per_s * seconds / 2)
    return Burst(
        num_bytes=2 * half,
        seconds=seconds,
        half_bytes=half,
        half_s=seconds / 2,
        half_chunks=16,
        third_bytes_per_s=bytes_per_s,
        fourth_bytes_per_s=bytes_per_s,
    )


def test_each_direction_has_its_own_rate_and_both_one_round_trip() -> None:
    matrix = LinkTable()
    matrix.round_trips("oslo", COORDINATOR, [0.05, 0.04, 0.09])
    assert isinstance(matrix.burst(UP, burst(1e6), 10.0, probe=True), Measured)
    matrix.burst(DOWN, burst(5e6), 20.0, probe=False)
    down, up = matrix.rows(30.0)
    assert (up["from"], up["to"], up["bytes_per_s"], up["measured_by"], up["age_s"]) == (*UP, 1e6, "probe", 20.0)
    assert (down["bytes_per_s"], down["measured_by"], down["age_s"]) == (5e6, "transfer", 10.0)
    assert up["provenance"] == down["provenance"] == "probe"  # as opposed to what somebody says
    assert (up["rtt_s"], up["rtt_median_s"]) == (down["rtt_s"], down["rtt_median_s"]) == (0.04, 0.05)


def test_nothing_is_made_up() -> None:
    matrix = LinkTable()
    assert matrix.burst(UP, burst(1e6), 0.0, probe=False) == Insufficient(why="the round trip is not known yet")
    matrix.round_trips("oslo", COORDINATOR, [0.04])
    (down, up) = matrix.rows(0.0)
    assert down["bytes_per_s"] is up["bytes_per_s"] is None
    assert up["age_s"] is None and up["provenance"] == "" and math.isinf(matrix.age_s(UP, 0.0))


def test_a_measurement_that_is_not_believed_leaves_its_reason_and_the_rate_as_it_was() -> None:
    matrix = LinkTable()
    matrix.round_trips("oslo", COORDINATOR, [0.04])
    matrix.burst(UP, burst(1e6), 0.0, probe=True)
    assert isinstance(matrix.burst(UP, burst(9e6, seconds=0.05), 5.0, probe=False), Insufficient)
    (up,) = [row for row in matrix.rows(6.0) if row["from"] == "oslo"]
    assert up["bytes_per_s"] == 1e6 and up["age_s"] == 6.0 and "slow start" in up["why"]
    matrix.burst(UP, burst(1e6), 7.0, probe=False)
    assert all(row["why"] == "" for row in matrix.rows(7.0))


def test_transfers_move_a_rate_and_a_probe_replaces_it() -> None:
    matrix = LinkTable()
    matrix.round_trips("oslo", COORDINATOR, [0.01])
    matrix.burst(UP, burst(1e6), 0.0, probe=True)
    matrix.burst(UP, burst(1.2e6), 1.0, probe=False)
    assert matrix.rate(UP) == pytest.approx(1.06e6)
    matrix.burst(UP, burst(2e6), 2.0, probe=True)
    assert matrix.rate(UP) == 2e6


def test_a_link_that_changed_is_worth_a_probe_until_it_had_one() -> None:
    matrix = LinkTable()
    matrix.round_trips("oslo", COORDINATOR, [0.01])
    for now, rate in enumerate((4e6, 1e6, 1e6, 1e6)):
        assert not matrix.changed(UP)
        matrix.burst(UP, burst(rate), float(now), probe=False)
    assert matrix.changed(UP) and matrix.rate(UP) == 1e6
    matrix.burst(UP, burst(1e6), 9.0, probe=True)
    assert not matrix.changed(UP)


def test_who_is_forgotten_leaves_no_link() -> None:
    matrix = LinkTable()
    for node in ("oslo", "bergen"):
        matrix.round_trips(node, COORDINATOR, [0.01])
        matrix.burst((node, COORDINATOR), burst(1e6), 0.0, probe=False)
    matrix.keep(["bergen"])
    assert {row["from"] for row in matrix.rows(0.0)} == {"bergen", COORDINATOR}


def test_what_is_remembered_is_bounded() -> None:
    matrix = LinkTable()
    for index in range(MOST_LINKS + 100):
        matrix.connection((f"n{index}", COORDINATOR), Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=1))
    assert len(matrix.rows(0.0)) == MOST_LINKS


def test_retransmits_are_a_share_of_what_was_sent() -> None:
    connection = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=25, segments=1000, congestion="bbr")
    assert retransmit_ratio(connection) == 0.025
    assert retransmit_ratio(None) is None
    matrix = LinkTable()
    matrix.connection(UP, connection)
    assert [(row["retransmit_ratio"], row["congestion"]) for row in matrix.rows(0.0)] == [(0.025, "bbr")]
    matrix.connection(DOWN, Connection(rtt_s=math.nan, least_rtt_s=0.1, retransmits=0, segments=1))
    assert len(matrix.rows(0.0)) == 1


def test_a_link_slower_than_three_times_the_way_round_is_suspect() -> None:
    """As the one entry of SkipPipe's published table that is a thousandth of its neighbours."""
    rates = {("nl", "uk"): 0.000237e9, ("nl", "be"): 0.2425e9, ("be", "uk"): 0.2e9, ("uk", "nl"): 0.1e9}
    assert suspects(rates) == {("nl", "uk")}


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")).filter(lambda ends: ends[0] != ends[1]),
        st.floats(1e3, 1e10),
        max_size=12,
    )
)
def test_raising_a_rate_never_makes_it_more_suspect(rates: dict[tuple[str, str], float]) -> None:
    for ends in set(rates) - suspects(rates):
        assert ends not in suspects({**rates, ends: 10 * rates[ends]})
    assert suspects({ends: 1e6 for ends in rates}) == set()


def test_what_a_message_took_between_two_nodes_is_a_rate() -> None:
    matrix, ends = LinkTable(), ("oslo", "bergen")
    for _ in range(3):
        matrix.transfer(ends, Transfer(num_bytes=4_000_000, seconds=0.5), 10.0)
    (row,) = matrix.rows(15.0)
    assert (row["from"], row["to"], row["bytes_per_s"], row["measured_by"]) == (*ends, 8e6, "transfer")
    assert row["age_s"] == 5.0


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 1.0), (-1, 1.0), (9, 0.0), (9, -1.0), (9, math.nan), (9, math.inf), (2**63, 1e-308)]
)
def test_what_no_message_can_have_taken_is_passed_over(num_bytes: int, seconds: float) -> None:
    matrix = LinkTable()
    matrix.transfer(("oslo", "bergen"), Transfer(num_bytes=num_bytes, seconds=seconds), 10.0)
    assert matrix.rows(15.0) == []
