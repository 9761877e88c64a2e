"""What is believed of a link's rate, and what is not, on simulated links."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_start import SlowStart

from farloop.wire.meter import Average, Burst, Insufficient, Measured, Meter, burst_of, enough, judge

MBIT = 1e6 / 8
PROBE_BYTES = 32 << 20


def measured(link: SlowStart, budget: int) -> Measured | Insufficient:
    """As a receiver does it: until it knows enough, or the budget is used."""
    meter, burst = Meter(), None
    for at, num_bytes in link.arrivals(budget):
        meter.arrived(num_bytes, at)
        burst = meter.burst()
        if burst is not None and enough(burst, link.rtt_s):
            break
    return Insufficient(why="nothing") if burst is None else judge(burst, link.rtt_s)


@pytest.mark.parametrize("rtt_ms", [1, 5, 20, 100, 300])
@pytest.mark.parametrize("mbit", [10, 100, 1000, 10_000])
def test_a_probe_finds_the_rate_within_a_tenth_from_a_millisecond_to_300(mbit: int, rtt_ms: int) -> None:
    link = SlowStart(bytes_per_s=mbit * MBIT, rtt_s=rtt_ms / 1e3, jitter=0.3)
    found = measured(link, max(PROBE_BYTES, int(12 * link.bdp_bytes)))
    assert isinstance(found, Measured), found
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.1)


@settings(max_examples=200, deadline=None)
@given(
    mbit=st.floats(10, 10_000), rtt_s=st.floats(0.001, 0.3), budget=st.integers(1 << 18, 64 << 20), seed=st.integers(0)
)
def test_with_any_budget_it_is_right_or_silent(mbit: float, rtt_s: float, budget: int, seed: int) -> None:
    link = SlowStart(bytes_per_s=mbit * MBIT, rtt_s=rtt_s)
    found = measured(link, budget)
    if isinstance(found, Measured):
        assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.1)


@settings(max_examples=100, deadline=None)
@given(mbit=st.floats(10, 10_000), rtt_s=st.floats(0.001, 0.3), share=st.floats(0.01, 1.0), bucket=st.floats(0, 1))
def test_less_than_one_bandwidth_delay_product_is_never_believed(
    mbit: float, rtt_s: float, share: float, bucket: float
) -> None:
    link = SlowStart(bytes_per_s=mbit * MBIT, rtt_s=rtt_s, chunk_bytes=16 << 10)
    link = SlowStart(
        bytes_per_s=link.bytes_per_s, rtt_s=rtt_s, chunk_bytes=16 << 10, bucket_bytes=bucket * link.bdp_bytes
    )
    assert isinstance(measured(link, max(1, int(share * link.bdp_bytes))), Insufficient)


def test_a_burst_that_a_bucket_let_through_is_not_the_links_rate() -> None:
    """A megabyte that comes at ten times the rate, all within one round trip."""
    link = SlowStart(bytes_per_s=100 * MBIT, rtt_s=0.1, chunk_bytes=64 << 10, bucket_bytes=1 << 20)
    points = [(n * 0.005, n * (64 << 10)) for n in range(16)]
    burst = burst_of(points)
    assert burst is not None and burst.half_bytes / burst.half_s > 1.04 * link.bytes_per_s
    assert isinstance(judge(burst, link.rtt_s), Insufficient)


def test_a_probe_that_is_cut_short_in_slow_start_says_why() -> None:
    found = measured(SlowStart(bytes_per_s=200 * MBIT, rtt_s=0.1), 4 << 20)
    assert isinstance(found, Insufficient)
    assert "slow start" in found.why or "not steady" in found.why


def test_a_probe_uses_no_more_time_and_bytes_than_it_needs() -> None:
    link = SlowStart(bytes_per_s=10 * MBIT, rtt_s=0.02)
    meter, used = Meter(), 0
    for at, num_bytes in link.arrivals(PROBE_BYTES):
        meter.arrived(num_bytes, at)
        used += num_bytes
        if (burst := meter.burst()) and enough(burst, link.rtt_s):
            break
    assert used < 4 << 20


def test_a_probe_that_never_gets_steady_ends_all_the_same() -> None:
    at, meter = 0.0, Meter()
    for index in range(10_000):
        at += 0.001 * 1.5 ** (index % 24)
        meter.arrived(1000, at)
        if (burst := meter.burst()) and enough(burst, 0.01):
            break
    assert at < 10.0


def test_a_rate_that_changes_on_the_way_is_not_steady() -> None:
    at, points = 0.0, [(0.0, 0)]
    for index in range(64):
        at += 0.01 if index < 48 else 0.02
        points.append((at, (index + 1) * (256 << 10)))
    burst = burst_of(points)
    assert burst is not None
    assert judge(burst, 0.01) == Insufficient(why="not steady: 210 Mbit/s, then 105")


def test_arrivals_that_come_all_at_once_are_not_timed() -> None:
    points = [(0.0, 0), *((1.0, (index + 1) * 1000) for index in range(8))]
    burst = burst_of(points)
    assert burst is not None and isinstance(judge(burst, 0.001), Insufficient)
    assert burst_of([(0.0, 0), (1.0, 5)]) is None


def test_a_busy_time_of_infinite_rate_is_not_reported() -> None:
    meter = Meter()
    for at in (0.0, *[1.0] * 8):
        meter.arrived(1000, at)
    meter.over()
    assert meter.take() == []


def test_a_long_transfer_is_remembered_in_bounded_memory() -> None:
    meter = Meter()
    for index in range(100_000):
        meter.arrived(1000, index * 0.001)
    assert len(meter._points) <= 513
    burst = meter.burst()
    assert burst is not None
    assert burst.half_bytes / burst.half_s == pytest.approx(1e6, rel=0.01)


def test_busy_times_are_apart_and_what_was_held_up_is_forgotten() -> None:
    meter = Meter()
    for begin in (0.0, 100.0, 200.0):
        for index in range(16):
            meter.arrived(1000, begin + index)
        if begin == 100.0:
            meter.forget()
        else:
            meter.over()
    bursts = meter.take()
    assert [burst.seconds for burst in bursts] == [15.0, 15.0]
    assert all(isinstance(judge(burst, 0.1), Measured) for burst in bursts)
    assert meter.take() == []


def test_the_average_moves_slowly_and_jumps_where_three_in_a_row_agree() -> None:
    average = Average()
    assert [average.add(value) for value in (100.0, 120.0)] == [False, False]
    assert average.value == pytest.approx(106.0)
    assert [average.add(value) for value in (50.0, 106.0, 30.0)] == [False, False, False]
    fresh = Average()
    fresh.add(100.0)
    assert [fresh.add(value) for value in (20.0, 22.0, 21.0)] == [False, False, True]
    assert fresh.value == 21.0


def test_one_that_is_too_high_and_one_too_low_are_no_change() -> None:
    average = Average()
    average.add(100.0)
    assert not any(average.add(value) for value in (300.0, 10.0, 300.0, 10.0))


def test_a_burst_says_how_it_went() -> None:
    burst = burst_of([(float(n), 10 * n) for n in range(9)])
    assert burst == Burst(
        num_bytes=80,
        seconds=8.0,
        half_bytes=40,
        half_s=4.0,
        half_chunks=4,
        third_bytes_per_s=10.0,
        fourth_bytes_per_s=10.0,
    )
