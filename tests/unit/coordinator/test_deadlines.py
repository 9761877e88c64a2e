"""A window has a deadline that is learnt from what its nodes usually take: no node holds the run (protocol, Deadlines).

The run of `conftest.py`, two fragments whose windows are due in turn. Time goes on in ticks; honest nodes send their
delta so many seconds after the last commit, liars say and do what they like.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import B, Commands, Run, brief
from plain_runs import plain_progress
from stories import StoryText, all_stories, check_story

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.deadlines import FIRST_S
from farloop.coordinator.decide.run_state import ALARM as STORAGE
from farloop.wire.reasons import Reason

REPORT = plain_progress(position=0.0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0, compute_share=0.0)


class World(Run):
    """Nodes with a pace in seconds a window; one without a pace is a liar. Every commit is durable at once.

    60s | 60s every 5s       time goes on, in ticks of a second or of five
    a takes 2                from now on
    b says waiting           it sends no delta any more, and does this in each tick: see the functions `says_…`
    allowed b?               how long the first window may wait for it

    Behind a line stand the commits since the one before, and how many of them left which node out.
    """

    def __init__(
        self, spec: RunSpec, *, drops: bool = True, floor: int = 1, numel: int = 0, **paces: float | str
    ) -> None:
        """`numel`: of fragment 1."""
        nodes = {NodeId(node): None if pace == "lies" else float(pace) for node, pace in paces.items()}
        self.paces, self.ticks, self.freed_at = nodes, 0, 0.0
        self.lies: dict[NodeId, Callable[[World, NodeId], Any]] = {}
        self.reports = True
        self.commits: list[rec.WindowCommitted] = []
        if numel:
            first, second = spec.identity.layout.fragments
            layout = dataclasses.replace(
                spec.identity.layout, fragments=(first, dataclasses.replace(second, numel=numel))
            )
            spec = dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, layout=layout))
        super().__init__(spec, nodes, now=0.0, at_once=True, machine={"drops_silent": drops}, steps=10**6, floor=floor)

    def durable(self, fragment: int = 1, **changes: Any) -> Commands:
        self.commits.append(self.draft(fragment))
        self.freed_at = self.now
        return super().durable(fragment, **changes)

    @property
    def head(self) -> int:
        """The fragment whose window is due first."""
        windows = self.machine.windows
        return min(windows, key=lambda f: (windows[f].terms.round, -f) if f else (windows[f].terms.round - 0.5, 0))

    def deliver(self, node: NodeId, **changes: Any) -> None:
        window = self.machine.windows[self.head]
        if window.state == "open" and node not in window.contributors:
            self.store(node, self.head, **changes)

    def report(self, node: NodeId, **changes: Any) -> None:
        self.say(node, dataclasses.replace(REPORT, **changes))

    def tick(self, seconds: float) -> None:
        self.pass_time(seconds)
        self.ticks += 1
        for node, pace in self.paces.items():
            if pace is None or self.machine.members[node].session is None:
                continue
            if self.reports:
                fixed = 10 * (self.ledger.current_round + 1)
                self.report(
                    node, state="training" if self.ticks < fixed else "waiting", inner_steps=min(self.ticks, fixed)
                )
            if self.now - self.freed_at >= pace:
                self.deliver(node)
        for node, lie in self.lies.items():
            lie(self, node)

    def told(self, line: str) -> str:
        count = len(self.commits)
        after = super().told(line)
        since = self.commits[count:]
        dropped = Counter(f"{drop.node} {drop.reason.name}" for record in since for drop in record.drops)
        lost = [f"{drop} {number} times" for drop, number in sorted(dropped.items())]
        told = ", ".join([f"{len(since)} commits", *lost]) if since else ""
        return "\n".join(filter(None, [told, after]))

    def gist(self, alarm: str) -> str:
        return alarm.partition("; no window waits")[0].partition("; start a node")[0]

    def _answer(self, question: str) -> str:
        match question.split():
            case "allowed", node:
                window, deadlines = self.machine.windows[self.head], self.machine.deadlines
                seconds = deadlines._allowed_s(window, NodeId(node), partial(deadlines._first_s, window))
                return f"{seconds:.1f} s"
            case ["expected"]:
                windows = self.machine.windows
                return ", ".join(f"{f}: {''.join(sorted(windows[f].expected))}" for f in sorted(windows))
        return super()._answer(question)

    def _happens(self, who: str, does: str = "", *words: str) -> Commands:
        node = NodeId(who)
        match does, *words:
            case "takes", pace:
                self.paces[node] = float(pace)
                self.lies.pop(node, None)
            case "says", lie:
                self.paces[node], self.lies[node] = None, globals()[f"says_{lie}"]
            case "jumps", seconds:
                self.freed_at += float(seconds)
                return super()._happens(who, does, *words)
            case ("delivers",):
                self.deliver(node)
            case "fills", _:
                self.alarms[STORAGE] = "the disk is full"
            case "empties", _:
                del self.alarms[STORAGE]
            case "lasts", length:  # a round of so many steps
                rounds, index = self.ledger.rounds, self.machine.windows[self.head].terms.round
                rounds[index] = dataclasses.replace(rounds[index], length=int(length))
            case ("",) | ("every", _) if who.endswith("s"):
                tick = float(words[0].removesuffix("s")) if words else 1.0
                end = self.now + float(who.removesuffix("s"))
                while self.now < end:
                    self.tick(tick)
            case _:
                return super()._happens(who, does, *words)
        return []


def says_nothing(world: World, node: NodeId) -> None:
    pass


def says_alternating(world: World, node: NodeId) -> None:
    """5, 6, 5, 6, … steps."""
    world.report(node, inner_steps=5 + world.ticks % 2)


def says_waiting(world: World, node: NodeId) -> None:
    world.report(node, state="waiting", inner_steps=5)


def says_offering(world: World, node: NodeId) -> None:
    """A new delta each time; none of them ever comes."""
    says_waiting(world, node)
    world.say(node, world.offer(node, world.head))


def says_empty(world: World, node: NodeId) -> None:
    """Deltas without a step."""
    world.deliver(node, steps=0, tokens=0)


def says_anything(world: World, node: NodeId) -> None:
    """It comes as another start again and again, or sends a good delta now and then."""
    if world.ticks % 300 == 0:
        world.join(node, incarnation=world.incarnations[node] + 1)
    elif world.ticks % 20:
        says_alternating(world, node)


@all_stories(__file__, "deadlines")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, World(spec, **story.settings).told, rewrite=rewrite)


@pytest.mark.parametrize(("lie", "late"), [("waiting", Reason.LATE), ("nothing", Reason.STALLED)])
def test_a_delta_that_fails_once_it_is_not_waited_for_ends_its_window(spec: RunSpec, lie: str, late: Reason) -> None:
    """The node sends no other one: a window that needs it would be held for good."""
    world = World(spec, a=2, b=2, floor=2)
    world.told(f"60s; b says {lie}")
    head, offer = world.head, world.offer(B, world.head)
    world.say(B, offer)
    world.reports = late is Reason.LATE
    while world.machine.windows[head].removed != {B: late}:
        world.tick(1.0)
        assert world.now < 60.0 + 2 * FIRST_S
    idle = ev.InputFailed(offer=offer, reason=Reason.IDLE, detail="")
    assert brief(world.handle(idle)[:3]) == f"dropped {head} of b IDLE; forget {head} of b; b: IDLE"
    record = world.commits[-1]
    assert record.version == offer.window and not record.merged and record.drops[-1].reason is Reason.IDLE
