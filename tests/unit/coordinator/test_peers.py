"""Covers `coordinator/net/sessions.py`: whose first frame begins a session, or joins one (protocol T, U)."""

import os

import pytest
from plain_runs import plain_hello

from farloop.algo.spec import NodeId
from farloop.coordinator.net.sessions import GREETINGS_OF_A_KEY, SESSIONS, Lane, Peer, Peers, RateLimiter, Unread
from farloop.wire.frames import Buffer, ControlFrame, lane_hello
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Hello, Message, Ready, encode
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")


def greeting(name: str = "a", incarnation: int = 1) -> Hello:
    return plain_hello(node=NodeId(name), incarnation=incarnation)


def frame(message: Message) -> list[Buffer]:
    return ControlFrame(run=0, epoch=0, seq=0, ack=0, body=encode(message)).parts()


class Door:
    """Peers, and whom they turned away."""

    def __init__(self) -> None:
        self.away: list[tuple[Reason, str]] = []
        self.peers = Peers(RateLimiter(), Limits(), Timing(), lambda reason, who: self.away.append((reason, who)))
        self.routes = 0

    def meets(
        self, parts: list[Buffer], owner: NodeId | None, *, at: str = "there", now: float = 0.0
    ) -> Lane | Peer | Unread | None:
        self.routes += 1
        return self.peers.meet(self.routes.to_bytes(5), parts, owner, at, now)

    def greeted(self, owner: NodeId | None, now: float = 0.0) -> Peer:
        lane = self.meets(frame(greeting(owner or "a")), owner, now=now)
        assert isinstance(lane, Lane) and lane.number == 0
        return lane.peer


def test_the_token_of_a_session_binds_one_lane_once_and_only_for_its_owner() -> None:
    """T, U: who overhears a token, or guesses one, gets no lane with it."""
    door = Door()
    peer, other = door.greeted(A), door.greeted(B)
    assert door.meets(lane_hello(1, 1, bytes(16)), A) is None
    assert door.meets(lane_hello(1, 1, other.token), A) is None
    assert (list(peer.routes), list(other.routes)) == ([0], [0])
    assert door.meets(lane_hello(1, 1, peer.token), A) is peer
    assert door.meets(lane_hello(1, 1, peer.token), A) is None
    assert list(peer.routes) == [0, 1]
    assert door.meets(lane_hello(1, 1, other.token), B) is other, "who tried before has not used it up"


@pytest.mark.parametrize(
    "parts",
    [[b""], [b"GET / HTTP/1.1"], [os.urandom(300)], [b"", b"", b""], frame(Ready()), [frame(greeting())[0][:-1]]],
)
def test_what_is_no_greeting_begins_nothing_however_often_it_comes(parts: list[Buffer]) -> None:
    """Strangers' lanes once held all sessions that there are, for ten seconds at a time, and kept every node out."""
    door = Door()
    for _ in range(2 * SESSIONS):
        assert door.meets(parts, None) is None
    assert len(door.peers) == 0
    assert set(door.away) == {(Reason.MALFORMED, "there")}
    door.greeted(None)


@pytest.mark.parametrize("owner", [None, A])
def test_who_sends_a_greeting_that_cannot_be_read_hears_why_as_often_as_it_may_greet(owner: NodeId | None) -> None:
    """A node of another version heard nothing, and dialled for ever. No session is begun for it."""
    door = Door()
    met = [door.meets(frame(greeting(incarnation=1 << 63)), owner) for _ in range(2 * int(GREETINGS_OF_A_KEY.burst))]
    assert met[0] == Unread(f"Hello.incarnation is {1 << 63}: a number from 0 to {(1 << 63) - 1} is wanted")
    assert sum(answer is not None for answer in met) == GREETINGS_OF_A_KEY.burst
    assert len(door.peers) == 0 and set(door.away) == {(Reason.MALFORMED, owner or "there")}


def test_a_greeting_that_comes_too_often_is_passed_over_until_there_is_room_again() -> None:
    door = Door()
    for _ in range(int(GREETINGS_OF_A_KEY.burst)):
        door.peers.forget(door.greeted(A))
    assert door.meets(frame(greeting()), A) is None
    assert door.away == [(Reason.TOO_OFTEN, "a")]
    door.greeted(B)
    door.greeted(A, now=1 / GREETINGS_OF_A_KEY.per_s)


def test_of_one_owners_sessions_the_oldest_makes_room() -> None:
    """A node whose old connections still look alive gets in at once; one with many hands has two."""
    door = Door()
    first, second = door.greeted(A), door.greeted(A)
    assert door.peers.too_many_of(second) == []
    third = door.greeted(A)
    assert door.peers.too_many_of(third) == [first]
    assert door.peers.too_many_of(door.greeted(B)) == []


def test_what_is_over_leaves_nothing_behind() -> None:
    door = Door()
    peer = door.greeted(A)
    door.meets(lane_hello(1, 1, peer.token), A)
    door.peers.forget(peer)
    door.peers.forget(peer)
    assert len(door.peers) == 0 and not any(door.peers.lane(route) for route in peer.routes.values())
    assert door.meets(lane_hello(1, 1, peer.token), A) is None
