"""Links share evenly, lose no time, and carry every byte once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.sim.flow.links import SharedLink, Transfer
from farloop.sim.virtual_time import EventQueue


class Log:
    """An agenda with a pipe, and the times at which things end."""

    def __init__(self, bytes_per_s: float = 100.0) -> None:
        self.agenda = EventQueue()
        self.pipe = SharedLink(self.agenda, bytes_per_s)
        self.ends: dict[str, float] = {}

    def note(self, name: str) -> None:
        assert name not in self.ends
        self.ends[name] = self.agenda.now

    def carry(self, name: str, size: int, at: float = 0.0) -> None:
        def begin() -> None:
            self.pipe.carry(size, lambda: self.note(name))

        self.agenda.at(at, begin)

    def play(self) -> dict[str, float]:
        while self.agenda.step():
            pass
        return self.ends


def test_two_at_once_take_twice_as_long_each() -> None:
    log = Log()
    log.carry("a", 1000)
    log.carry("b", 1000)
    assert log.play() == pytest.approx({"a": 20.0, "b": 20.0})


def test_who_comes_later_slows_the_first_only_from_then_on() -> None:
    """a: 500 bytes alone in 5 s, then 500 at half the rate until 15 s; b has 500 by then and 500 left, alone."""
    log = Log()
    log.carry("a", 1000)
    log.carry("b", 1000, at=5.0)
    assert log.play() == pytest.approx({"a": 15.0, "b": 20.0})


def test_what_is_given_up_frees_its_share() -> None:
    log = Log()
    log.carry("a", 1000)
    loads = [log.pipe.carry(1000, lambda: log.note("b"))]
    left: list[float] = []
    log.agenda.at(4.0, lambda: left.append(log.pipe.cancel(loads[0])))
    assert log.play() == pytest.approx({"a": 12.0})
    assert left == pytest.approx([800.0])


def test_a_cut_link_stands_still_and_forgets_nothing() -> None:
    log = Log()
    log.carry("a", 1000)
    log.agenda.at(3.0, lambda: log.pipe.cut(now_cut=True))
    log.agenda.at(50.0, lambda: log.pipe.cut(now_cut=False))
    assert log.play() == pytest.approx({"a": 57.0})


def test_the_slowest_link_on_the_way_tells() -> None:
    log = Log(100.0)
    own = [SharedLink(log.agenda, rate) for rate in (10.0, 1000.0)]
    for name, pipe in zip("ab", own, strict=True):
        Transfer([pipe, log.pipe], 1000, lambda name=name: log.note(name))  # type: ignore[misc]
    assert log.play() == pytest.approx({"a": 100.0, "b": 20.0})


def test_a_way_without_links_takes_no_time() -> None:
    log = Log()
    transfer = Transfer([log.pipe], 1000, lambda: log.note("a"))
    log.agenda.at(2.5, lambda: log.ends.update(carried=float(transfer.cancel())))
    assert log.play() == {"carried": 250.0}


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.0, 50.0)), min_size=1, max_size=20))
def test_a_busy_link_carries_at_its_full_rate_and_never_at_more(jobs: list[tuple[int, float]]) -> None:
    """The time at which everything is through is that of a queue of the same work: sharing wastes nothing."""
    log = Log()
    for number, (size, at) in enumerate(jobs):
        log.carry(str(number), size, at)
    ends = log.play()
    free_at = 0.0
    for size, at in sorted(jobs, key=lambda job: job[1]):
        free_at = max(free_at, at) + size / 100.0
    assert max(ends.values()) == pytest.approx(free_at)
    for number, (size, at) in enumerate(jobs):
        assert ends[str(number)] >= at + size / 100.0 - 1e-6


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=10))
def test_of_those_that_begin_together_the_smaller_ends_first(sizes: list[int]) -> None:
    log = Log()
    for number, size in enumerate(sizes):
        log.carry(str(number), size)
    ends = log.play()
    order = sorted(range(len(sizes)), key=lambda number: sizes[number])
    assert [ends[str(n)] for n in order] == sorted(ends.values())
