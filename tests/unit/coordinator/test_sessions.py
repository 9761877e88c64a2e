"""Covers `coordinator/net/sessions.py`: first frames that begin or join a session (protocol T, U), and rate limits."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_hello
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo.spec import NodeId
from farloop.coordinator.net import sessions
from farloop.coordinator.net.sessions import Bucket, Lane, Peer, Peers, RateLimit, RateLimiter, RateLimits
from farloop.wire.frames import Buffer, ControlFrame, lane_hello
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Fetch, Leave, Message, Ready, Refused, Role, Trial, encode
from farloop.wire.outgoing import LinkKnown
from farloop.wire.reasons import Reason
from farloop.wire.session import Session

A, B = NodeId("a"), NodeId("b")
LIMITS = RateLimits()


def frame(message: Message) -> list[Buffer]:
    return ControlFrame(run=0, epoch=0, seq=0, ack=0, body=encode(message)).parts()


GREETING = frame(plain_hello())


class Door(Scripted):
    """Peers, and the reasons of those turned away. `-` is an owner without a key.

    greets a 3.0 | cannot_say a | tries a     a greeting, one that cannot be read and a trial of the link, at 3 s
    lane 1 3 a                                a lane of this number, with the token of session 1 (0 for another), by a
    most 1 | lanes 1 | too_many 3             lanes that a session may have; has; sessions that make room for it
    comes_from elsewhere | away | forgets 1 | sessions
    """

    def __init__(self, **rates: Any) -> None:
        self.turned_away: list[tuple[Reason, str]] = []
        self.peers = Peers(
            RateLimits(**rates), Limits(), Timing(), lambda reason, who: self.turned_away.append((reason, who))
        )
        self.begun: list[Peer] = []
        self.routes = 0
        self.where = "there"

    def meets(self, parts: list[Buffer], owner: str | None, now: float = 0.0) -> Lane | Refused | Trial | None:
        self.routes += 1
        key = NodeId(owner) if owner not in (None, "-") else None
        return self.peers.on_first_frame(self.routes.to_bytes(5), parts, key, self.where, now)

    def greeted(self, owner: str | None, now: float = 0.0) -> Peer:
        lane = self.meets(frame(plain_hello(node=NodeId(owner or "a"))), owner, now)
        assert isinstance(lane, Lane) and lane.number == 0
        return lane.peer

    def greets(self, owner: str, now: float = 0.0) -> str:
        lane = self.meets(frame(plain_hello(node=NodeId("a" if owner == "-" else owner))), owner, now)
        if not isinstance(lane, Lane):
            return "none"
        assert lane.number == 0
        self.begun.append(lane.peer)
        return f"session {len(self.begun)}"

    def cannot_say(self, owner: str) -> str:
        told = self.meets(frame(plain_hello(incarnation=1 << 63)), owner)
        return f"{told.reason.name}, retriable {told.retriable}: {told.detail}" if isinstance(told, Refused) else "none"

    def tries(self, owner: str) -> str:
        trial = Trial(padding=b"x" * 16_000)
        return "the same" if self.meets(frame(trial), owner) == trial else "none"

    def lane(self, session: int, number: int, owner: str, now: float = 0.0) -> str:
        token = self.begun[session - 1].token if session else bytes(16)
        lane = self.meets(lane_hello(1, 1, token, number), owner, now)
        assert lane is None or (isinstance(lane, Lane) and lane.number == number > 0)
        return "none" if lane is None else f"session {self.begun.index(lane.peer) + 1}"

    def lanes(self, session: int) -> list[int]:
        peer = self.begun[session - 1]
        assert len(peer.session._lanes) <= 16
        return sorted(peer.lanes)

    def routes_known(self) -> int:
        return len(self.peers._lanes)

    def most(self, session: int) -> int:
        return self.begun[session - 1].max_lanes

    def shared(self) -> int:
        """Lanes of all sessions beyond the first of each."""
        return sum(peer.max_lanes - 1 for peer in self.begun)

    def too_many(self, session: int) -> list[str]:
        found = self.peers.too_many_of(self.begun[session - 1])
        return [f"session {self.begun.index(peer) + 1}" for peer in found]

    def comes_from(self, where: str) -> None:
        self.where = where

    def uses(self, session: int, number: int, descriptor: int) -> None:
        self.peers.use(self.begun[session - 1].lanes[number], descriptor)

    def is_used(self, descriptor: int) -> bool:
        return self.peers.is_used(descriptor)

    def loses(self, session: int, number: int) -> None:
        self.peers.lane_lost(self.begun[session - 1], number)

    def forgets(self, session: int) -> None:
        peer = self.begun[session - 1]
        self.peers.forget(peer)
        assert not any(self.peers.lane(lane.route) for lane in peer.lanes.values())

    def sessions(self) -> int:
        return len(self.peers)

    def away(self) -> list[str]:
        """How often, since this was asked last."""
        found, self.turned_away = Counter(self.turned_away), []
        return [f"{reason.name} of {who} {count} times" for (reason, who), count in found.items()]


@pytest.fixture
def door() -> Door:
    return Door()


@all_stories(__file__, "sessions")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Door(**story.settings).told, rewrite=rewrite)


@pytest.mark.parametrize(
    "parts", [[b""], [b"GET / HTTP/1.1"], [os.urandom(300)], [b"", b"", b""], frame(Ready()), [GREETING[0][:-1]]]
)
def test_what_is_no_greeting_begins_nothing_however_often_it_comes(door: Door, parts: list[Buffer]) -> None:
    """Strangers' lanes once held all sessions that there are, for ten seconds at a time, and kept every node out."""
    for _ in range(2 * LIMITS.sessions):
        assert door.meets(parts, None) is None
    assert len(door.peers) == 0
    assert set(door.turned_away) == {(Reason.MALFORMED, "there")}
    door.greeted(None)


def test_the_next_session_of_a_node_begins_with_what_the_last_one_saw_of_its_link(door: Door) -> None:
    known = LinkKnown(bytes_per_s=25e6, round_trip_s=0.1, arriving_bytes_per_s=1e12)
    peer = door.greeted(A)
    peer.session = Session(Role.COORDINATOR, 0.0, known=known)
    door.peers.forget(peer)
    first, second = door.greeted(A), door.greeted(B)
    assert first.session.transfers.known == known and second.session.transfers.known == LinkKnown()
    assert first.session.transfers.early_bytes == 1 << 29, "and with a share of what all may keep"


def test_late_frames_are_of_the_session_that_ended_no_strangers(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cut of 11 s they were counted as malformed, of no node."""
    peer = door.greeted(A)
    for number in (1, 2):
        door.meets(lane_hello(1, 1, peer.token, number), A)
    routes = [lane.route for lane in peer.lanes.values()]
    door.peers.lane_lost(peer, 2)
    peer.ended_by = Reason.SILENT
    door.peers.forget(peer)
    for route in routes:
        assert door.peers.on_first_frame(route, frame(Ready()), A, "there", 1.0) is None
    assert door.meets(lane_hello(1, 1, peer.token, 1), A) is None
    ended = (Reason.ENDED, "a (silent)")
    assert door.turned_away == [ended, ended, (Reason.ENDED, "a"), ended]
    assert isinstance(door.peers.on_first_frame(routes[0], GREETING, A, "there", 1.0), Lane), (
        "a greeting is one by any route"
    )
    monkeypatch.setattr(sessions, "_MAX_ENDED", 4)
    for _ in range(4):
        door.peers.forget(door.greeted(B))
    assert len(door.peers._ended) == 4 and door.peers.on_first_frame(routes[1], frame(Ready()), A, "there", 1.0) is None
    assert door.turned_away[-1] == (Reason.MALFORMED, A)


# --- Rates


@given(per_s=st.floats(0.1, 100), burst=st.floats(1, 100), gaps=st.lists(st.floats(0, 10), min_size=1, max_size=200))
def test_a_bucket_gives_its_burst_and_its_rate_and_no_more(per_s: float, burst: float, gaps: list[float]) -> None:
    bucket, slow = Bucket(RateLimit(per_s=per_s, burst=burst), 0.0), Bucket(RateLimit(per_s=1.0, burst=1.0), 0.0)
    now, taken = 0.0, 0
    for number, gap in enumerate(gaps, start=1):
        now += gap
        taken += bucket.acquire(now)
        assert taken <= burst + per_s * now + 1e-6
        assert slow.acquire(now + 1.001 * number), "asking more slowly than the rate always succeeds"


class Limited(Scripted):
    """`greets n# 10.0.0.1 0.5`: how many of these may, counted from `now`; what is kept of all is bounded."""

    def __init__(self) -> None:
        self.limiter = RateLimiter(LIMITS)
        self.answers: Counter[str] = Counter()

    def greets(self, node: str, address: str, now: float) -> None:
        answer = self.limiter.greets(node, None if address == "-" else address, now=now)
        self.answers[answer.name if answer else "in"] += 1

    def says(self, node: str, what: str) -> None:
        message = Fetch(fragment=0) if what == "fetch" else Leave(reason=Reason.DRAINED)
        answer = self.limiter.says(node, message, now=0.0)
        self.answers[answer.name if answer else "in"] += 1

    def begun(self, who: str) -> None:
        self.limiter.begun(who)

    def ends(self, who: str) -> None:
        self.limiter.on_session_end(who)

    def told_so(self) -> dict[str, int]:
        found, self.answers = self.answers, Counter()
        return dict(found)

    def kept(self) -> bool:
        return len(self.limiter._buckets) <= 4096


@all_stories(__file__, "rate_limits")
def test_rate_limits(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Limited().told, rewrite=rewrite)
