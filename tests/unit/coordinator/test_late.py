"""Late deltas: ride along, wait for the next window, or are refused; and how long a window waits for them (C–F, Q).

The run of `conftest.py` as `decoupled` or `async`; in the machine only fragment 1 is looked at, whose window 1 is of
round 0.
"""

from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, C, Run, outcome, published, tell
from plain_runs import plain_offer, plain_progress
from stories import Scripted, StoryText, all_stories, check_story

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


class Arrivals(Scripted):
    """Windows that open every ten seconds; each closes by itself, when the last delta came or the next begins.

    came a 8.0 | came b 0.5 1        so long after the open window's beginning; for window 1
    rounds 3 8.0 8.5                 in each of three, nodes a and b come after these times
    opens | state closing | clock_jumped 100
    seconds                          how long a window waits beyond its quorum
    until | lasts 1.9 | deadlines    of the open window, in seconds since its quorum
    """

    def __init__(self, *, method: str = "decoupled", quorum: int | None = 1) -> None:
        self.quorum = quorum
        self.grace = StragglerGrace(enabled=method_named(method).grace)
        self.number = 0
        self.clock_jumped = self.grace.clock_jumped
        self.opens()

    def opens(self) -> None:
        terms = WindowTerms(
            fragment=0, window=self.number + 1, round=self.number, tau=2, mix=0.5, codec_up="q4", codec_down="q4"
        )
        self.window = Window(terms=terms, max_staleness=4, opened_at=self.number * ROUND_S)
        self.number += 1

    def came(self, node: str, after_s: float, number: int | None = None) -> None:
        window, now = number or self.number, self.window.opened_at + after_s
        arrived = plain_offer(NodeId(node), window, fragment=0, seq=window)
        self.grace.on_delta(0, window, now)
        self.window.add(arrived)
        self.grace.update(self.window, self.quorum, now)
        if len(self.window.inputs) == 1:
            self.quorum_at = now

    def rounds(self, count: int, *after_s: float) -> None:
        for _ in range(count):
            for node, late in zip("abcdef", after_s, strict=False):
                self.came(node, late)
            self.opens()

    def state(self, state: Any) -> None:
        self.window.state = state

    def seconds(self) -> str:
        return f"{self.grace.seconds:g}" if self.grace.seconds is not None else "unknown"

    def until(self) -> str:
        until = self.grace.until(self.window)
        return "no deadline" if until is None else f"{until - self.quorum_at:g}"

    def lasts(self, since: float) -> bool:
        return self.grace.lasts(self.window, self.quorum_at + since)

    def deadlines(self, since: float) -> list[float]:
        return [at - self.quorum_at for at in self.grace.deadlines([self.window], self.quorum_at + since)]


@all_stories(__file__, "grace")
def test_grace_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Arrivals(**story.settings).told, rewrite=rewrite)
