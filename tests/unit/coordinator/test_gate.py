"""Covers `coordinator/net/sessions.py`: how often is too often, and that nobody honest ever is."""

from hypothesis import given
from hypothesis import strategies as st

from farloop.coordinator.net.sessions import (
    GREETINGS_OF_A_KEY,
    GREETINGS_OF_AN_ADDRESS,
    SESSIONS,
    SESSIONS_OF_AN_ADDRESS,
    Bucket,
    RateLimit,
    RateLimiter,
)
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

FETCH = msg.Fetch(fragment=0)


@given(
    per_s=st.floats(0.1, 100),
    burst=st.floats(1, 100),
    gaps=st.lists(st.floats(0, 10), min_size=1, max_size=200),
)
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate(per_s: float, burst: float, gaps: list[float]) -> None:
    bucket, now, taken = Bucket(RateLimit(per_s=per_s, burst=burst), 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        taken += bucket.take(now)
        assert taken <= burst + per_s * now + 1e-6


@given(st.lists(st.floats(0, 10), max_size=50))
def test_who_asks_more_slowly_than_the_rate_always_gets(gaps: list[float]) -> None:
    bucket, now = Bucket(RateLimit(per_s=1.0, burst=1.0), 0.0), 0.0
    for gap in gaps:
        now += 1.001 + gap
        assert bucket.take(now)


def test_64_nodes_that_come_back_at_once_all_get_in() -> None:
    """After an outage, and three times in a row, behind one address or with their keys."""
    for address in (None, "10.0.0.1"):
        gate = RateLimiter()
        for again in range(3):
            for node in range(64):
                assert gate.greets(f"n{node}", address, now=float(again)) is None


def test_one_key_that_greets_all_the_time_is_passed_over_and_nobody_else() -> None:
    gate = RateLimiter()
    answers = [gate.greets("thief", None, now=i / 100) for i in range(1000)]
    let_in = answers.count(None)
    assert let_in <= GREETINGS_OF_A_KEY.burst + 10 * GREETINGS_OF_A_KEY.per_s + 1
    assert set(answers) == {None, Reason.TOO_OFTEN}
    assert gate.greets("honest", None, now=10.0) is None


def test_where_nobody_has_a_key_an_address_is_counted_whatever_names_it_claims() -> None:
    gate = RateLimiter()
    answers = [gate.greets(f"name-{i}", "10.6.6.6", now=0.0) for i in range(2000)]
    assert answers.count(None) == GREETINGS_OF_AN_ADDRESS.burst
    assert gate.greets("honest", "10.0.0.1", now=0.0) is None


def test_sessions_are_bounded_by_address_and_over_all() -> None:
    gate = RateLimiter()
    for _ in range(SESSIONS_OF_AN_ADDRESS):
        gate.begun("10.6.6.6")
    assert gate.greets("a", "10.6.6.6", now=0.0) is Reason.CROWDED
    assert gate.greets("a", "10.0.0.1", now=0.0) is None
    for i in range(SESSIONS - SESSIONS_OF_AN_ADDRESS):
        gate.begun(f"key-{i}")
    assert gate.greets("a", None, now=0.0) is Reason.CROWDED
    gate.ended("key-0")
    assert gate.greets("a", None, now=0.0) is None


def test_messages_of_a_session_have_rates_by_what_they_cost() -> None:
    gate = RateLimiter()
    answers = [gate.says("a", FETCH, now=0.0) for _ in range(5000)]
    assert answers.count(None) >= 512, "a node may have lost every anchor of a model in many fragments"
    assert answers[-1] is Reason.TOO_OFTEN
    assert gate.says("b", FETCH, now=0.0) is None
    leave = msg.Leave(reason=Reason.DRAINED)
    assert all(gate.says("a", leave, now=0.0) is None for _ in range(5000))


def test_what_is_remembered_of_strangers_is_bounded() -> None:
    gate = RateLimiter()
    for i in range(20_000):
        gate.greets(f"name-{i}", f"address-{i}", now=0.0)
    assert len(gate._buckets) <= 4096
