"""The limit on what an end sends: its settings, and the law of its bucket (protocol, Flow control)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.wire.uplink import Uplink, UplinkLimit, parse_hours, parse_rate


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("20mbit", 2.5e6), ("100kbit", 12_500), ("1.5gbit", 187.5e6), ("1000gbit", 125e9)]
)
def test_a_rate_is_written_as_that_of_a_link(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("20", "20mbit"), ("20 Mbit/s", "20mbit"), ("20M", "20mbit"), ("2MB/s", "16mbit"), ("1 GB", "8gbit"),
        ("0", "100kbit"), ("1e6mbit", "1000gbit"), (".5mbit", "0.5mbit"), ("1e5kB", "800000kbit"), ("9e9k", "1000gbit"),
        ("5000000000k", "1000gbit"), ("5e6 k", "5gbit"), ("99kbit", "100kbit"), ("0mbit", "100kbit"),
        ("2000gbit", "1000gbit"), ("fast", "20mbit"), ("-5mbit", "5mbit"),
    ],
)  # fmt: skip
def test_a_bad_rate_is_refused_with_the_nearest_valid_one(text: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"the nearest is {nearest}$"):
        parse_rate(text)
    assert parse_rate(nearest)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("8-18", "08:00-18:00"), ("8:30 to 18", "08:30-18:00"), ("08:00 - 25:00", "08:00-24:00"),
        ("22:00–06:00", "22:00-06:00"), ("08:75-18:00", "08:59-18:00"), ("08.00-18.00", "08:00-18:00"),
        ("0800-1800", "08:00-18:00"), ("800-1800", "08:00-18:00"), ("8h-18h", "08:00-18:00"),
        ("08:00:00-18:00:00", "08:00-18:00"),
    ],
)  # fmt: skip
def test_bad_hours_are_refused_with_the_nearest_valid_ones(text: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"the nearest are {nearest}$"):
        parse_hours(text)
    parse_hours(nearest)
    for nothing in ("08:00-08:00", "00:00-24:00"):
        with pytest.raises(ValueError, match="set max_uplink alone"):
            parse_hours(nothing)
    for senseless in ("at night", "25:00-26:00", "10800-1800"):
        with pytest.raises(ValueError, match="expected a form such as 08:00-18:00"):
            parse_hours(senseless)


def test_quiet_hours_go_over_midnight_as_well_and_the_lower_rate_holds_in_them() -> None:
    day, night = (UplinkLimit.parse("20mbit", hours, "2mbit") for hours in ("08:00-18:00", "22:00-06:00"))
    assert [minute // 60 for minute in range(0, 1440, 60) if day.is_quiet(minute)] == [*range(8, 18)]
    assert [minute // 60 for minute in range(0, 1440, 60) if night.is_quiet(minute)] == [*range(6), 22, 23]
    assert (night.is_quiet(6 * 60 - 1), night.is_quiet(6 * 60)) == (True, False)
    assert (day.rate(9 * 60), day.rate(18 * 60)) == (250_000, 2_500_000)
    assert UplinkLimit.parse("", "22:00-24:00", "2mbit").rate(0) == math.inf
    with pytest.raises(ValueError, match=r"quiet_uplink 2mbit is above max_uplink 1mbit, .*; the nearest is 1mbit$"):
        UplinkLimit.parse("1mbit", "08:00-18:00", "2mbit")
    assert not UplinkLimit.parse("", "", "")
    for half in (("08:00-18:00", ""), ("", "2mbit")):
        with pytest.raises(ValueError, match="go together"):
            UplinkLimit.parse("", *half)


@given(
    st.sampled_from([12_500.0, 250_000.0, 125e6]),
    st.lists(st.tuples(st.floats(0.0, 0.5), st.booleans(), st.integers(40, 3000)), max_size=120),
)
def test_over_any_time_that_a_chunk_ends_all_bytes_are_at_most_the_rate_and_a_tenth_of_a_second(
    rate: float, steps: list[tuple[float, bool, int]]
) -> None:
    """Control messages count, but are not held back. At the slowest rates the least chunk is more than such a time."""
    uplink, now = Uplink(UplinkLimit(bytes_per_s=rate), lambda: 0, 0.0), 0.0
    assert uplink.chunk_bytes is not None
    chunk, sent, chunks = uplink.chunk_bytes, [], []
    assert chunk <= max(0.05 * rate, 4096)
    for wait_s, is_control, num_bytes in steps:
        until = now + wait_s
        while uplink.free_at <= until:
            now = max(now, uplink.free_at)
            while uplink.allows(now):
                chunks.append(len(sent))
                sent.append((now, chunk))
                uplink.sent(chunk)
            assert now < uplink.free_at
        now = until
        if is_control:
            sent.append((now, num_bytes))
            uplink.sent(num_bytes)
    for last in chunks:
        for first in range(last + 1):
            total = sum(num_bytes for _, num_bytes in sent[first : last + 1])
            assert total <= rate * (sent[last][0] - sent[first][0]) + max(0.1 * rate, 0.05 * rate + 4096) + 1
    assert rate * now <= sum(num_bytes for _, num_bytes in sent) + chunk, "while something waits the rate is used"


def test_what_waits_is_counted_and_a_new_rate_holds_from_the_minute_on_which_it_begins() -> None:
    minute = 7 * 60 + 59
    limit = UplinkLimit.parse("", "08:00-18:00", "1mbit")
    uplink = Uplink(limit, lambda: minute, 0.0)
    uplink.sent(10_000_000)
    assert uplink.allows(0.0) and uplink.chunk_bytes is None and uplink.held_s == 0.0
    minute = 8 * 60
    assert uplink.allows(1.0) and uplink.bytes_per_s == 125_000
    uplink.sent(125_000)
    assert not uplink.allows(1.0) and uplink.free_at == pytest.approx(2.0)
    assert not uplink.allows(1.5)
    assert uplink.allows(2.0) and uplink.held_s == pytest.approx(1.0)
    minute = 18 * 60
    assert uplink.allows(100.0) and uplink.bytes_per_s == math.inf and uplink.held_s == pytest.approx(1.0)
