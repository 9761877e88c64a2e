"""The limit on what an end sends: its settings, and the law of its bucket (protocol, Flow control)."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import StoryText, all_stories, check_story, python

from farloop.wire.uplink import Uplink, UplinkLimit, parse_hours, parse_rate


def rate(text: str) -> None:
    """Refuse it with a nearest one that is none itself."""
    with pytest.raises(ValueError) as error:
        parse_rate(text)
    assert parse_rate(str(error.value).rpartition(" ")[2])
    raise error.value


def hours(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_hours(text)
    parse_hours(str(error.value).rpartition(" ")[2])
    raise error.value


@all_stories(__file__, "uplink")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)


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
