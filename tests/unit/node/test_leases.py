"""Covers `node/sample_cursor.py` (protocol "Data leases")."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.spec import Lease
from farloop.node.sample_cursor import USED_KEPT, LeaseCursor, LeaseExhausted


def test_a_cursor_takes_across_lease_borders_in_the_order_of_the_grants() -> None:
    cursor = LeaseCursor()
    cursor.grant(Lease(start=100, count=3))
    cursor.grant(Lease(start=10, count=2))
    assert cursor.take(2) == [100, 101]
    assert cursor.take(2) == [102, 10]
    assert (cursor.remaining, cursor.watermark) == (1, 4)
    cursor.grant(Lease(start=12, count=4))
    assert cursor.take(5) == [11, 12, 13, 14, 15]
    assert (cursor.remaining, cursor.watermark) == (0, 9)


def test_an_exhausted_cursor_says_so_and_consumes_nothing() -> None:
    cursor = LeaseCursor()
    with pytest.raises(LeaseExhausted):
        cursor.take(1)
    cursor.grant(Lease(start=5, count=3))
    with pytest.raises(LeaseExhausted, match="4 samples wanted, 3 left") as raised:
        cursor.take(4)
    assert (raised.value.wanted, raised.value.remaining) == (4, 3)
    assert cursor.watermark == 0
    assert cursor.take(0) == []
    assert cursor.take(3) == [5, 6, 7]


@pytest.mark.parametrize("lease", [Lease(start=0, count=0), Lease(start=-1, count=5), Lease(start=3, count=-2)])
def test_a_lease_of_nothing_is_refused(lease: Lease) -> None:
    with pytest.raises(ValueError, match="grants nothing"):
        LeaseCursor().grant(lease)


@pytest.mark.parametrize(("start", "count"), [(10, 6), (14, 1), (8, 3), (0, 100), (12, 1)])
def test_a_sample_granted_twice_is_refused_even_when_it_was_consumed(start: int, count: int) -> None:
    cursor = LeaseCursor()
    cursor.grant(Lease(start=10, count=5))
    cursor.take(5)
    with pytest.raises(ValueError, match=r"overlap an earlier lease \[10, 15\)"):
        cursor.grant(Lease(start=start, count=count))
    assert cursor.remaining == 0
    cursor.grant(Lease(start=15, count=1))
    cursor.grant(Lease(start=9, count=1))
    assert cursor.take(2) == [15, 9]


def test_a_lease_that_is_told_again_changes_nothing() -> None:
    """The coordinator repeats grants that a broken session may have lost (protocol Q, Data leases)."""
    cursor = LeaseCursor()
    for _ in range(2):
        cursor.grant(Lease(start=10, count=5))
        cursor.grant(Lease(start=20, count=2))
    assert (cursor.remaining, cursor.take(6)) == (7, [10, 11, 12, 13, 14, 20])
    cursor.grant(Lease(start=10, count=5))
    assert (cursor.remaining, cursor.watermark, cursor.take(1)) == (1, 6, [21])


def test_only_what_is_still_its_own_is_used_on() -> None:
    """Data leases: a node that was away for long is told what it holds; the rest may be others', or its own anew."""
    cursor = LeaseCursor()
    for start in (0, 10, 20):
        cursor.grant(Lease(start=start, count=5))
    cursor.take(7)
    cursor.keep([Lease(start=10, count=5), Lease(start=50, count=5)])
    assert (cursor.watermark, cursor.remaining, cursor.take(3)) == (7, 3, [12, 13, 14])
    cursor.keep([])
    assert (cursor.watermark, cursor.remaining) == (10, 0)
    cursor.grant(Lease(start=13, count=4))
    assert cursor.take(4) == [13, 14, 15, 16]


def test_what_is_remembered_of_used_leases_does_not_grow() -> None:
    cursor = LeaseCursor()
    for number in range(3 * USED_KEPT):
        cursor.grant(Lease(start=2 * number, count=1))
        cursor.take(1)
    assert len(cursor._behind) == USED_KEPT and not cursor._ahead


@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=10),
    gaps=st.lists(st.integers(0, 5), min_size=10, max_size=10),
    takes=st.lists(st.integers(0, 30), max_size=20),
)
def test_every_granted_sample_is_taken_once_in_order_whatever_the_steps(
    counts: list[int], gaps: list[int], takes: list[int]
) -> None:
    cursor, granted, start = LeaseCursor(), list[int](), 0
    for count, gap in zip(counts, gaps, strict=False):
        cursor.grant(Lease(start=start + gap, count=count))
        granted.extend(range(start + gap, start + gap + count))
        start += gap + count
    taken: list[int] = []
    for n in takes:
        if n <= cursor.remaining:
            taken.extend(cursor.take(n))
        assert taken == granted[: cursor.watermark]
        assert cursor.watermark + cursor.remaining == len(granted)
    assert taken + cursor.take(cursor.remaining) == granted


def test_a_lease_that_is_held_already_changes_nothing_even_when_it_was_consumed() -> None:
    cursor = LeaseCursor()
    cursor.grant(Lease(start=10, count=5))
    cursor.take(5)
    cursor.grant(Lease(start=15, count=5))
    cursor.grant(Lease(start=10, count=5))
    cursor.grant(Lease(start=15, count=5))
    assert (cursor.remaining, cursor.watermark) == (5, 5)
    assert cursor.take(5) == [15, 16, 17, 18, 19]
