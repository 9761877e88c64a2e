"""Pipes, cables and connections, in every weather."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from faulty_world import World
from simulated_faults import BadLinkPeriod, CrashNode, NodeSetup, Scenario
from simulated_outcome import Outcome
from stories import Scripted, StoryText, all_stories, check_story
from toy_problem import terms_of

from farloop.algo.spec import NodeId
from farloop.coordinator.net import router
from farloop.coordinator.net.router import SHARE, Egress
from farloop.coordinator.net.sessions import RateLimit, RateLimiter, RateLimits
from farloop.runtime.ports import Sent
from farloop.sim.network import (
    HOSTILE_LINK,
    Connection,
    Frame,
    LinkConditions,
    PhysicalLink,
    Pipe,
    Side,
    VirtualRouterSocket,
)
from farloop.sim.virtual_time import EventQueue, Process
from farloop.wire.reasons import Reason

NUMBERED = [[number.to_bytes(4), bytes(50)] for number in range(400)]


def sent_through(weather: LinkConditions, *, gently: bool = False) -> list[tuple[float, Frame]]:
    """(time of arrival, frame) of what comes of `NUMBERED`, one every 10 ms."""
    agenda, arrived = EventQueue(), list[tuple[float, Frame]]()
    pipe = Pipe(agenda, weather, random.Random(7), lambda frame: arrived.append((agenda.now, frame)))
    for number, frame in enumerate(NUMBERED):
        agenda.at(0.01 * number, lambda frame=frame: pipe.send(frame, gently=gently))  # type: ignore[misc]
    while agenda.step():
        pass
    return arrived


def test_in_clear_weather_every_frame_comes_once_in_order_and_late() -> None:
    arrived = sent_through(LinkConditions(latency_s=0.5, jitter_s=0.3, bytes_per_s=5400.0))
    assert [frame for _, frame in arrived] == NUMBERED
    assert arrived[0][0] >= 0.51
    assert arrived[-1][0] >= 400 * 54 / 5400.0 + 0.5


@pytest.mark.parametrize("fault", ["loss", "duplication", "reordering", "garbage"])
def test_each_fault_shows(fault: str) -> None:
    frames = [frame for _, frame in sent_through(dataclasses.replace(LinkConditions(), **{fault: 0.2}))]
    whole = [frame for frame in frames if frame in NUMBERED]
    assert (len(frames) < 400) == (fault == "loss")
    assert (len(frames) > 400) == (fault == "duplication")
    assert (len(whole) < len(frames)) == (fault == "garbage")
    assert (frames != sorted(frames)) == (fault in ("reordering", "duplication", "garbage"))


def test_a_frame_sent_gently_is_spared() -> None:
    assert [frame for _, frame in sent_through(HOSTILE_LINK, gently=True)] == NUMBERED


def test_a_frame_is_a_copy() -> None:
    agenda, arrived = EventQueue(), list[Frame]()
    pipe, buffer = Pipe(agenda, LinkConditions(), random.Random(0), arrived.append), bytearray(b"abc")
    pipe.send([buffer])
    buffer[:] = b"xyz"
    agenda.step()
    assert arrived == [[b"abc"]]


class Wire(Scripted):
    """A connection, its cable and its two processes; `at 2.0 WORD …` does that at 2 s, and `plays` all of it.

    sends NODE 0 first | closes NODE | resets | cuts | mends
    kills | stops | resumes | timer | frame             of the node's process: what comes to it
    notes a
    """

    def __init__(self) -> None:
        self.agenda = EventQueue()
        self.cable, self.process = PhysicalLink(self.agenda), Process(self.agenda)
        self.heard: list[str] = []
        self.made = Connection(
            self.agenda, self.cable, LinkConditions(), random.Random(0), self.process, Process(self.agenda)
        )
        for side in Side:
            self.made.deliver[side] = lambda lane, frame, side=side: self.heard.append(
                f"{side.name} {lane} {frame[0].decode()}"
            )
        self.made.lost = lambda: self.heard.append("lost")

    def at(self, when: float, word: str, *given: Any) -> None:
        self.agenda.at(when, lambda: getattr(self, word)(*given))

    def plays(self) -> list[str]:
        while self.agenda.step():
            pass
        found, self.heard = self.heard, []
        return found

    def sends(self, side: str, lane: int, frame: str) -> bool:
        return self.made.send(Side[side], lane, [frame.encode()])

    def closes(self, side: str) -> None:
        self.made.close(Side[side])

    def is_open(self, side: str) -> bool:
        return self.made.is_open(Side[side])

    def resets(self) -> None:
        self.made.reset()

    def cuts(self) -> None:
        self.cable.cut = True

    def mends(self) -> None:
        self.cable.mend()

    def kills(self) -> None:
        self.process.kill()

    def stops(self) -> None:
        self.process.stop()

    def resumes(self) -> None:
        self.process.resume()

    def timer(self) -> None:
        self.process.after(1.0, lambda: self.heard.append("timer"))

    def frame(self) -> None:
        self.process.deliver(lambda: self.heard.append("frame"))

    def notes(self, name: str) -> None:
        self.heard.append(f"{name} at {self.agenda.now:g}")


@all_stories(__file__, "network")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Wire().told, rewrite=rewrite)


THIN = LinkConditions(bytes_per_s=20_000.0)
NODES = (
    NodeSetup(name=NodeId("a"), seed=1),
    NodeSetup(name=NodeId("b"), seed=2),
    NodeSetup(name=NodeId("late"), seed=3, joins_at=3.0),
)
USUAL = Scenario(terms=terms_of("streaming", steps=24, min_nodes=2), nodes=NODES, weather=THIN, patience_s=120.0)


def results_of(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> list[object]:
    """What every call of this method returned."""
    call, results = getattr(kind, method), list[object]()

    def spy(*args: Any, **kwargs: Any) -> Any:
        results.append(call(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(kind, method, spy)
    return results


def outcome_of(scenario: Scenario) -> Outcome:
    outcome = World(scenario).run()
    outcome.check()
    return outcome


@pytest.mark.parametrize("lane_buffer_s", [0.04, 0.08])
def test_a_run_over_lanes_that_are_often_full_ends_with_the_same_anchors_everywhere(
    lane_buffer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost or sent out of order, or the run would stall."""
    sent = results_of(monkeypatch, VirtualRouterSocket, "send")
    long = terms_of("streaming", steps=40, min_nodes=2)  # enough for who joins late
    outcome = outcome_of(dataclasses.replace(USUAL, terms=long, lane_buffer_s=lane_buffer_s))
    assert Sent.FULL in sent
    assert all(node[-1].anchor_digests == outcome.anchor_digests for node in outcome.nodes.values())


def test_a_node_that_joins_gets_its_snapshots_while_updates_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its downloads yield to updates, and are never starved."""
    monkeypatch.setattr(router, "SLOWEST_BYTES_PER_S", 4000)  # the fragments are small
    monkeypatch.setattr(router, "AHEAD_BYTES", 2000)
    allowed = results_of(monkeypatch, Egress, "allows")
    outcome = outcome_of(dataclasses.replace(USUAL, terms=terms_of("streaming", steps=80), background_share=SHARE))
    assert {True, False} == set(allowed)
    assert any(NodeId("late") in commit.contributors for commit in outcome.commits)


def test_a_node_that_returns_too_often_is_let_in_when_its_bucket_has_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = RateLimits(greetings_of_a_key=RateLimit(per_s=0.5, burst=2))
    faults = (
        BadLinkPeriod(node=NodeId("a"), at=2.0, for_s=2.0, resets=6),
        CrashNode(node=NodeId("b"), at=3.0, down_s=0.5),
    )
    greeted = results_of(monkeypatch, RateLimiter, "greets")
    outcome = outcome_of(dataclasses.replace(USUAL, weather=LinkConditions(), rates=rates, faults=faults))
    assert {None, Reason.TOO_OFTEN} == set(greeted)
    assert outcome.nodes[NodeId("a")][-1].stage == "finished"
