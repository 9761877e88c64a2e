"""How long a window waits beyond its quorum: as long as deltas have lately been late (protocol F)."""

from collections.abc import Sequence

import pytest
from plain_runs import plain_offer

from farloop.algo.methods import method_named
from farloop.algo.spec import NodeId, RunSpec, WindowTerms
from farloop.coordinator.decide.closing import StragglerGrace
from farloop.coordinator.decide.windows import Window
from farloop.wire.messages import Offer

ROUND_S = 10.0


def offer(node: str, window: int) -> Offer:
    return plain_offer(NodeId(node), window, fragment=0, seq=window, steps=8, tokens=8)


class Arrivals:
    """Windows that open every ten seconds; each closes by itself, when the last delta came or the next begins."""

    def __init__(self, spec: RunSpec, *, method: str = "decoupled", quorum: int | None = 1) -> None:
        self.quorum = quorum
        self.grace = StragglerGrace(enabled=method_named(method).grace)
        self.number = 0
        self.open()

    def open(self) -> Window:
        terms = WindowTerms(
            fragment=0, window=self.number + 1, round=self.number, tau=2, mix=0.5, codec_up="q4", codec_down="q4"
        )
        self.window = Window(terms=terms, max_staleness=4, opened_at=self.number * ROUND_S)
        self.number += 1
        return self.window

    def came(self, node: str, after_s: float, *, number: int | None = None) -> None:
        """A delta for the open window, or for an earlier one, so long after the open one's beginning."""
        arrived, now = offer(node, number or self.number), self.window.opened_at + after_s
        self.grace.came(arrived, now)
        self.window.inputs[arrived.blob] = arrived
        self.grace.look_at(self.window, self.quorum, now)

    def rounds(self, count: int, after_s: Sequence[float]) -> None:
        """In each, nodes a, b, c… come after these times."""
        for _ in range(count):
            for node, late in zip("abcdef", after_s, strict=False):
                self.came(node, late)
            self.open()


def test_where_nothing_was_seen_all_that_are_expected_are_waited_for(spec: RunSpec) -> None:
    arrivals = Arrivals(spec)
    assert arrivals.grace.seconds is None
    arrivals.came("a", 8.0)
    assert arrivals.grace.until(arrivals.window) is None
    assert arrivals.grace.lasts(arrivals.window, 1e9)
    assert arrivals.grace.deadlines([arrivals.window], 8.0) == []


def test_a_window_waits_twice_as_long_as_the_latest_was_late(spec: RunSpec) -> None:
    arrivals = Arrivals(spec)
    arrivals.rounds(3, (8.0, 8.5, 9.0))
    arrivals.came("a", 8.0)
    quorum_at = arrivals.window.opened_at + 8.0
    assert arrivals.grace.seconds == 2.0
    assert arrivals.grace.until(arrivals.window) == quorum_at + 2.0
    assert arrivals.grace.lasts(arrivals.window, quorum_at + 1.9)
    assert not arrivals.grace.lasts(arrivals.window, quorum_at + 2.0)
    assert arrivals.grace.deadlines([arrivals.window], quorum_at) == [quorum_at + 2.0]
    assert arrivals.grace.deadlines([arrivals.window], quorum_at + 2.0) == [], "it has passed, and changed nothing"


def test_never_longer_than_half_of_what_the_quorum_usually_takes(spec: RunSpec) -> None:
    arrivals = Arrivals(spec)
    arrivals.rounds(3, (6.0, 6.0 + 2.5))
    assert arrivals.grace.seconds == 3.0


def test_a_node_that_is_too_slow_is_not_waited_for_and_slows_nobody(spec: RunSpec) -> None:
    """Its deltas are late by two thirds of a round: those of the others decide."""
    arrivals = Arrivals(spec)
    for _ in range(5):
        arrivals.came("a", 6.0)
        arrivals.came("b", 6.25)
        arrivals.open()
        arrivals.came("slow", 2.0, number=arrivals.number - 1)
    assert arrivals.grace.seconds == 0.5
    alone = Arrivals(spec)
    for _ in range(5):
        alone.came("a", 6.0)
        alone.open()
        alone.came("slow", 2.0, number=alone.number - 1)
    assert alone.grace.seconds == 0.0


def test_what_was_seen_is_forgotten_in_time(spec: RunSpec) -> None:
    """A network that got better is not waited for as if it had not."""
    arrivals = Arrivals(spec)
    arrivals.rounds(4, (8.0, 10.0))
    assert arrivals.grace.seconds == 4.0
    arrivals.rounds(40, (8.0, 8.25))
    assert arrivals.grace.seconds == 0.5


def test_a_delta_that_came_for_a_window_that_is_closed_was_late_by_all_of_that(spec: RunSpec) -> None:
    """Else only those that are waited for would show how long to wait."""
    arrivals = Arrivals(spec)
    arrivals.came("a", 8.0)
    arrivals.open()
    arrivals.came("b", 0.5, number=1)
    assert arrivals.grace.seconds == 4.0, "2.5 s late; half of 8 s is the bound"


def test_a_quorum_of_all_and_a_method_without_grace_have_none(spec: RunSpec) -> None:
    everybody = Arrivals(spec, quorum=None)
    everybody.rounds(3, (8.0, 9.0))
    assert everybody.grace.seconds is None and everybody.window.quorum_at is None
    lone = Arrivals(spec, method="async")
    lone.rounds(3, (8.0, 9.0))
    lone.came("a", 8.0)
    assert lone.grace.until(lone.window) is None
    assert not lone.grace.lasts(lone.window, lone.window.opened_at)


def test_a_closing_window_has_no_deadline(spec: RunSpec) -> None:
    arrivals = Arrivals(spec)
    arrivals.rounds(3, (8.0, 9.0))
    arrivals.came("a", 8.0)
    arrivals.window.state = "closing"
    assert arrivals.grace.deadlines([arrivals.window], 0.0) == []


def test_the_time_in_which_the_process_stood_still_is_nobody_s_lateness(spec: RunSpec) -> None:
    """C."""
    arrivals = Arrivals(spec)
    arrivals.rounds(3, (8.0, 8.25))
    arrivals.came("a", 8.0)
    arrivals.grace.clock_jumped(100.0)
    arrivals.grace.came(offer("b", arrivals.number), arrivals.window.opened_at + 108.125)
    assert arrivals.grace.seconds == 0.5


@pytest.mark.parametrize("quorum", [1, 2])
def test_lateness_is_counted_from_the_quorum(spec: RunSpec, quorum: int) -> None:
    arrivals = Arrivals(spec, quorum=quorum)
    arrivals.rounds(3, (6.0, 6.5, 7.5))
    assert arrivals.grace.seconds == {1: 3.0, 2: 2.0}[quorum]
