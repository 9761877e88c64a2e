"""Late deltas: ride along, wait for the next window, or are refused; and how long a window waits for them (C–F, Q).

The run of `conftest.py` as `decoupled` or `async`; in the machine only fragment 1 is looked at, whose window 1 is of
round 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, C, Run, merged, outcome, published, tell
from plain_runs import plain_offer, plain_progress
from stories import StoryText, all_stories, check_story

from farloop.algo.methods import method_named
from farloop.algo.spec import NodeId, RunSpec, WindowTerms
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import StragglerGrace
from farloop.coordinator.decide.windows import Window
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason


def late_run(spec: RunSpec, method: str = "decoupled", *, hurried: bool = True, **terms: Any) -> Run:
    """Nodes a, b and c train. `hurried`: the first window closes at its quorum, and no later one waits for any node."""
    row = method_named(method)
    choices = {
        "method": method, "on_late_update": "continue", "quorum": row.quorum, "max_staleness": row.max_staleness,
        "max_stale_rounds": row.max_stale_rounds, **terms,
    }  # fmt: skip
    run = Run(spec, "abc", evaluation_set="fixed", **choices)
    if hurried:
        grace = run.machine.grace
        grace.has_quorum(0, -1, opened_at=-1.0, now=-1.0, max_staleness=0)
        grace.on_delta(0, -1, 0.0)
    return run


@all_stories(__file__, "late")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, late_run(spec, **story.settings).told, rewrite=rewrite)


def test_a_held_delta_that_a_commit_makes_useless_is_let_go(spec: RunSpec) -> None:
    """E, Q: what it held is part of that commit; its bytes lie here for nothing."""
    run = late_run(spec)
    run.store(A)
    odd = run.offer(B)
    for ledger in (run.ledger, run.journal):
        ledger.apply(rec.InputStored.of(odd))
    shares = (*run.draft().merged, msg.Share(node=B, weight=0.0))
    assert ev.Forget(blob=odd.blob) in run.durable(merged=shares)


@pytest.mark.parametrize("method", ["decoupled", "async"])
def test_a_delta_without_a_step_does_not_make_a_quorum(spec: RunSpec, method: str) -> None:
    """F: a node that stands still, or has come to the end, would race through the windows of all rounds."""
    run = late_run(spec, method)
    assert merged(run.store(A, steps=0, tokens=0)) == merged(run.store(B, steps=0, tokens=0)) == []
    assert merged(run.store(C, steps=0, tokens=0)) == ["abc"], "no node is left to wait for"


# --- every delta a step of its own


def test_a_round_lasts_until_all_that_are_expected_have_served_it_and_is_evaluated_once(spec: RunSpec) -> None:
    """J. It does not wait for a node that it lost."""
    run = late_run(spec, "async", hurried=False)
    rounds, evaluators = [], []
    for node in (A, B, A, C, A):
        (publish,) = published(run.commit(1, node))
        rounds.append(run.machine.windows[1].terms.round)
        evaluators.append(publish.committed.evaluator)
    assert rounds == [0, 0, 0, 1, 1] and evaluators == [None, None, None, A, None]
    run = late_run(spec, "async", hurried=False)
    run.commit(1, A)
    run.play("c parts SILENT; 0s")
    run.commit(1, B)
    assert run.machine.windows[1].terms.round == 1


def test_after_a_restart_a_stored_late_delta_is_part_of_its_window_and_known(spec: RunSpec) -> None:
    """E, P, Q: as is one that was merged, whose sender did not hear of the commit."""
    run = late_run(spec)
    mine, late = run.offer(A), run.offer(B)
    run.handle(ev.InputStored(offer=mine))
    run.durable()
    run.handle(ev.InputStored(offer=late))
    run.play("restart; a returns; b returns")
    assert run.machine.windows[1].contributors == {B}
    assert run.say(B, late) == [tell(B, msg.Stored(blob=late.blob))], "it is not asked for again"
    assert run.say(A, mine) == [outcome(mine, Reason.OVERLAP)]


# --- slow nodes


@pytest.mark.parametrize(("method", "steps"), [("decoupled", ((B, 5),)), ("streaming", ())])
def test_slow_nodes_do_fewer_steps_in_the_rounds_that_are_fixed_from_then_on(
    spec: RunSpec, method: str, steps: tuple[tuple[NodeId, int], ...]
) -> None:
    """A, B: node b needs twice as long for a step; node c stood still half of the time and has a quarter of the batch,
    and is not slow."""
    run = late_run(spec, method, hurried=False)
    for second in (1, 2):
        run.now += 1.0
        for node, speed, batch, blocked_s in ((A, 4, 1000, 0.0), (B, 2, 1000, 0.0), (C, 2, 250, 0.5)):
            done = second * speed
            run.say(node, plain_progress(inner_steps=done, tokens=done * batch, blocked_s=second * blocked_s))
    for _ in range(2):
        run.commit(1, A, B, C)
    newest = run.ledger.rounds[max(run.ledger.rounds)]
    assert (newest.index, newest.node_steps) == (3, steps)
    assert not run.ledger.rounds[2].node_steps, "it was fixed at the start"


# --- how long a window waits beyond its quorum

ROUND_S = 10.0


class Arrivals:
    """Windows that open every ten seconds; each closes by itself, when the last delta came or the next begins."""

    def __init__(self, *, method: str = "decoupled", quorum: int | None = 1) -> None:
        self.quorum = quorum
        self.grace = StragglerGrace(enabled=method_named(method).grace)
        self.number = 0
        self.open()

    def open(self) -> None:
        terms = WindowTerms(
            fragment=0, window=self.number + 1, round=self.number, tau=2, mix=0.5, codec_up="q4", codec_down="q4"
        )
        self.window = Window(terms=terms, max_staleness=4, opened_at=self.number * ROUND_S)
        self.number += 1

    def came(self, node: str, after_s: float, *, number: int | None = None) -> None:
        """A delta for the open window, or for an earlier one, so long after the open one's beginning."""
        window, now = number or self.number, self.window.opened_at + after_s
        arrived = plain_offer(NodeId(node), window, fragment=0, seq=window)
        self.grace.on_delta(0, window, now)
        self.window.add(arrived)
        self.grace.update(self.window, self.quorum, now)

    def rounds(self, count: int, after_s: Sequence[float]) -> "Arrivals":
        """In each, nodes a, b, c… come after these times."""
        for _ in range(count):
            for node, late in zip("abcdef", after_s, strict=False):
                self.came(node, late)
            self.open()
        return self


@pytest.mark.parametrize(
    ("law", "quorum", "rounds", "seconds"),
    [
        ("nothing was seen: all are waited for", 1, [], None),
        ("twice as long as the latest was late", 1, [(3, (8.0, 8.5, 9.0))], 2.0),
        ("never longer than half of what the quorum usually takes", 1, [(3, (6.0, 8.5))], 3.0),
        ("a network that got better is not waited for as if it had not", 1, [(4, (8.0, 10.0)), (40, (8.0, 8.25))], 0.5),
        ("lateness is counted from the quorum", 1, [(3, (6.0, 6.5, 7.5))], 3.0),
        ("be it of two", 2, [(3, (6.0, 6.5, 7.5))], 2.0),
        ("a quorum of all has none", None, [(3, (8.0, 9.0))], None),
    ],
)
def test_how_long_a_window_waits(
    law: str, quorum: int | None, rounds: list[tuple[int, tuple[float, ...]]], seconds: float | None
) -> None:
    arrivals = Arrivals(quorum=quorum)
    for count, after_s in rounds:
        arrivals.rounds(count, after_s)
    assert arrivals.grace.seconds == seconds, law


def test_where_nothing_was_seen_there_is_no_deadline_and_where_a_method_has_no_grace_no_wait() -> None:
    arrivals = Arrivals()
    arrivals.came("a", 8.0)
    assert arrivals.grace.until(arrivals.window) is None and arrivals.grace.lasts(arrivals.window, 1e9)
    assert arrivals.grace.deadlines([arrivals.window], 8.0) == []
    lone = Arrivals(method="async").rounds(3, (8.0, 9.0))
    lone.came("a", 8.0)
    assert lone.grace.until(lone.window) is None and not lone.grace.lasts(lone.window, lone.window.opened_at)


def test_a_window_waits_twice_as_long_as_the_latest_was_late() -> None:
    arrivals = Arrivals().rounds(3, (8.0, 8.5, 9.0))
    arrivals.came("a", 8.0)
    quorum_at = arrivals.window.opened_at + 8.0
    assert arrivals.grace.until(arrivals.window) == quorum_at + 2.0
    for seconds, lasts, deadlines in ((0.0, True, [quorum_at + 2.0]), (1.9, True, [quorum_at + 2.0]), (2.0, False, [])):
        assert arrivals.grace.lasts(arrivals.window, quorum_at + seconds) is lasts
        assert arrivals.grace.deadlines([arrivals.window], quorum_at + seconds) == deadlines
    arrivals.window.state = "closing"
    assert arrivals.grace.deadlines([arrivals.window], 0.0) == []


@pytest.mark.parametrize(("others", "seconds"), [(("a", "b"), 0.5), (("a",), 0.0)])
def test_a_node_that_is_too_slow_is_not_waited_for_and_slows_no_node(others: tuple[str, ...], seconds: float) -> None:
    """Its deltas are late by two thirds of a round: those of the others decide."""
    arrivals = Arrivals()
    for _ in range(5):
        for number, node in enumerate(others):
            arrivals.came(node, 6.0 + 0.25 * number)
        arrivals.open()
        arrivals.came("slow", 2.0, number=arrivals.number - 1)
    assert arrivals.grace.seconds == seconds


def test_a_delta_that_came_for_a_window_that_is_closed_was_late_by_all_of_that() -> None:
    """Else only those that are waited for would show how long to wait."""
    arrivals = Arrivals().rounds(1, (8.0,))
    arrivals.came("b", 0.5, number=1)
    assert arrivals.grace.seconds == 4.0, "2.5 s late; half of 8 s is the bound"


def test_the_time_in_which_the_process_stood_still_is_no_node_s_lateness() -> None:
    """C."""
    arrivals = Arrivals().rounds(3, (8.0, 8.25))
    arrivals.came("a", 8.0)
    arrivals.grace.clock_jumped(100.0)
    arrivals.came("b", 108.125)
    assert arrivals.grace.seconds == 0.5
