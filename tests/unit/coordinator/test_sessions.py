"""Covers `coordinator/net/sessions.py`: first frames that begin or join a session (protocol T, U), and rate limits."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_hello

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


class Door:
    """Peers, and the reasons of those turned away."""

    def __init__(self, rates: RateLimits = LIMITS) -> None:
        self.away: list[tuple[Reason, str]] = []
        self.peers = Peers(rates, Limits(), Timing(), lambda reason, who: self.away.append((reason, who)))
        self.routes = 0
        self.where = "there"

    def meets(self, parts: list[Buffer], owner: NodeId | None, now: float = 0.0) -> Lane | Refused | Trial | None:
        self.routes += 1
        return self.peers.on_first_frame(self.routes.to_bytes(5), parts, owner, self.where, now)

    def joins(self, parts: list[Buffer], owner: NodeId | None, now: float = 0.0) -> Peer | None:
        """The session whose bulk lane the next route has become."""
        lane = self.meets(parts, owner, now)
        assert lane is None or (isinstance(lane, Lane) and lane.number > 0)
        return None if lane is None else lane.peer

    def greeted(self, owner: NodeId | None, now: float = 0.0) -> Peer:
        lane = self.meets(frame(plain_hello(node=owner or A)), owner, now)
        assert isinstance(lane, Lane) and lane.number == 0
        return lane.peer


@pytest.fixture
def door() -> Door:
    return Door()


def test_the_token_of_a_session_binds_lanes_of_its_owner_alone(door: Door) -> None:
    """T, U: who overhears a token, or guesses one, gets no lane with it."""
    peer, other = door.greeted(A), door.greeted(B)
    assert door.meets(lane_hello(1, 1, bytes(16), 1), A) is None
    assert door.meets(lane_hello(1, 1, other.token, 1), A) is None
    assert (list(peer.lanes), list(other.lanes)) == ([0], [0])
    assert door.joins(lane_hello(1, 1, peer.token, 1), A) is peer
    assert list(peer.lanes) == [0, 1]
    assert door.meets(lane_hello(1, 1, other.token, 0), B) is None, "lanes are numbered from 1"
    assert door.joins(lane_hello(1, 1, other.token, 1), B) is other, "who tried before has not used it up"


def test_a_session_has_at_most_16_bulk_lanes_however_many_are_opened(door: Door) -> None:
    """T: and a lane of a number that is there takes its place, so that a node opens again what it has lost."""
    peer, other = door.greeted(A), door.greeted(B)
    for number in range(1, 65):
        joined = door.joins(lane_hello(1, 1, peer.token, number), A)
        assert joined is (peer if number <= 16 else None)
    assert door.away == [(Reason.MALFORMED, A)] * 48
    assert sorted(peer.lanes) == list(range(17))
    assert door.meets(lane_hello(1, 1, peer.token, 3), B) is None
    before, routes = peer.lanes[3].route, len(door.peers._lanes)
    for _ in range(1000):
        door.meets(lane_hello(1, 1, peer.token, 3), A, 0.0)
    assert peer.lanes[3].route != before and door.peers.lane(before) is None
    assert len(door.peers._lanes) == routes and len(peer.session._lanes) == 16
    assert door.away[-1] == (Reason.TOO_OFTEN, A), "48 more were taken"
    assert door.joins(lane_hello(1, 1, other.token, 2), B) is other, "the other node's are its own"
    assert door.joins(lane_hello(1, 1, peer.token, 3), A, 10.0) is peer


def test_all_sessions_share_the_lanes_that_there_may_be() -> None:
    door = Door(RateLimits(lanes=64))
    peers = [door.greeted(NodeId(f"n{n}"), 1000.0 * n) for n in range(100)]
    assert [peer.max_lanes for peer in peers[:6]] == [5, 4, 4, 4, 4, 4]
    assert peers[-1].max_lanes == 1 and sum(peer.max_lanes - 1 for peer in peers) <= 64
    for peer in peers:
        door.peers.forget(peer)
    assert door.greeted(A, 1e6).max_lanes == 5


def test_without_keys_a_token_opens_further_lanes_from_where_its_session_is_alone(door: Door) -> None:
    peer = door.greeted(None)
    door.where = "elsewhere"
    assert door.meets(lane_hello(1, 1, peer.token, 2), None) is None
    door.where = "there"
    assert door.joins(lane_hello(1, 1, peer.token, 2), None) is peer


@pytest.mark.parametrize(
    "parts", [[b""], [b"GET / HTTP/1.1"], [os.urandom(300)], [b"", b"", b""], frame(Ready()), [GREETING[0][:-1]]]
)
def test_what_is_no_greeting_begins_nothing_however_often_it_comes(door: Door, parts: list[Buffer]) -> None:
    """Strangers' lanes once held all sessions that there are, for ten seconds at a time, and kept every node out."""
    for _ in range(2 * LIMITS.sessions):
        assert door.meets(parts, None) is None
    assert len(door.peers) == 0
    assert set(door.away) == {(Reason.MALFORMED, "there")}
    door.greeted(None)


@pytest.mark.parametrize("owner", [None, A])
def test_who_sends_an_unreadable_greeting_hears_why_as_often_as_it_may_greet(door: Door, owner: NodeId | None) -> None:
    """A node of another version heard nothing, and dialled for ever. No session is begun for it."""
    unreadable, burst = frame(plain_hello(incarnation=1 << 63)), int(LIMITS.greetings_of_a_key.burst)
    met = [door.meets(unreadable, owner) for _ in range(2 * burst)]
    why = f"Hello.incarnation is {1 << 63}: expected a number from 0 to {(1 << 63) - 1}"
    assert met[0] == Refused(reason=Reason.MALFORMED, detail=why, retriable=True)
    assert sum(answer is not None for answer in met) == burst
    assert len(door.peers) == 0 and set(door.away) == {(Reason.MALFORMED, owner or "there")}


@pytest.mark.parametrize("owner", [None, A])
def test_a_trial_comes_back_as_often_as_its_sender_may_greet_without_begin(door: Door, owner: NodeId | None) -> None:
    trial, burst = Trial(padding=b"x" * 16_000), int(LIMITS.greetings_of_a_key.burst)
    met = [door.meets(frame(trial), owner) for _ in range(2 * burst)]
    assert met == [trial] * burst + [None] * burst
    assert len(door.peers) == 0 and door.away == []


def test_a_greeting_that_comes_too_often_is_passed_over_until_there_is_room_again(door: Door) -> None:
    for _ in range(int(LIMITS.greetings_of_a_key.burst)):
        door.peers.forget(door.greeted(A))
    assert door.meets(GREETING, A) is None
    assert door.away == [(Reason.TOO_OFTEN, "a")]
    door.greeted(B)
    door.greeted(A, now=1 / LIMITS.greetings_of_a_key.per_s)


def test_of_one_owners_sessions_the_oldest_makes_room(door: Door) -> None:
    """A node whose old connections still look alive gets in at once; one with many hands has two."""
    first, second = door.greeted(A), door.greeted(A)
    assert door.peers.too_many_of(second) == []
    assert door.peers.too_many_of(door.greeted(A)) == [first]
    assert door.peers.too_many_of(door.greeted(B)) == []


def test_the_next_session_of_a_node_begins_with_what_the_last_one_saw_of_its_link(door: Door) -> None:
    known = LinkKnown(bytes_per_s=25e6, round_trip_s=0.1, arriving_bytes_per_s=1e12)
    peer = door.greeted(A)
    peer.session = Session(Role.COORDINATOR, 0.0, known=known)
    door.peers.forget(peer)
    first, second = door.greeted(A), door.greeted(B)
    assert first.session.transfers.known == known and second.session.transfers.known == LinkKnown()
    assert first.session.transfers.early_bytes == 1 << 29, "and with a share of what all may keep"


def test_what_is_over_leaves_nothing_behind(door: Door) -> None:
    peer = door.greeted(A)
    for number in (1, 2, 2):
        lane = door.meets(lane_hello(1, 1, peer.token, number), A)
        assert isinstance(lane, Lane)
        door.peers.use(lane, 7 + number)
    assert door.peers.is_used(8) and door.peers.is_used(9)
    door.peers.lane_lost(peer, 2)
    assert door.peers.is_used(8) and not door.peers.is_used(9)
    door.peers.forget(peer)
    door.peers.forget(peer)
    assert not door.peers.is_used(8)
    assert len(door.peers) == 0 and not any(door.peers.lane(lane.route) for lane in peer.lanes.values())
    assert door.meets(lane_hello(1, 1, peer.token, 1), A) is None


def test_late_frames_are_of_the_session_that_ended_no_strangers(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cut of 11 s they were counted as malformed, of no node."""
    peer = door.greeted(A)
    for number in (1, 2):
        door.joins(lane_hello(1, 1, peer.token, number), A)
    routes = [lane.route for lane in peer.lanes.values()]
    door.peers.lane_lost(peer, 2)
    peer.ended_by = Reason.SILENT
    door.peers.forget(peer)
    for route in routes:
        assert door.peers.on_first_frame(route, frame(Ready()), A, "there", 1.0) is None
    assert door.meets(lane_hello(1, 1, peer.token, 1), A) is None
    ended = (Reason.ENDED, "a (silent)")
    assert door.away == [ended, ended, (Reason.ENDED, "a"), ended]
    assert isinstance(door.peers.on_first_frame(routes[0], GREETING, A, "there", 1.0), Lane), (
        "a greeting is one by any route"
    )
    monkeypatch.setattr(sessions, "_MAX_ENDED", 4)
    for _ in range(4):
        door.peers.forget(door.greeted(B))
    assert len(door.peers._ended) == 4 and door.peers.on_first_frame(routes[1], frame(Ready()), A, "there", 1.0) is None
    assert door.away[-1] == (Reason.MALFORMED, A)


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


@pytest.fixture
def limiter() -> RateLimiter:
    return RateLimiter(LIMITS)


@pytest.mark.parametrize("address", [None, "10.0.0.1"])
def test_64_nodes_that_come_back_at_once_all_get_in(limiter: RateLimiter, address: str | None) -> None:
    """After an outage, and three times in a row, behind one address or with their keys."""
    for again in range(3):
        for node in range(64):
            assert limiter.greets(f"n{node}", address, now=float(again)) is None


def test_who_greets_all_the_time_alone_is_passed_over(limiter: RateLimiter) -> None:
    """By its key; where there is none, by its address, whatever names it claims."""
    answers = [limiter.greets("thief", None, now=i / 100) for i in range(1000)]
    assert answers.count(None) <= LIMITS.greetings_of_a_key.burst + 10 * LIMITS.greetings_of_a_key.per_s + 1
    assert set(answers) == {None, Reason.TOO_OFTEN}
    assert limiter.greets("honest", None, now=10.0) is None
    answers = [limiter.greets(f"name-{i}", "10.6.6.6", now=10.0) for i in range(2000)]
    assert answers.count(None) == LIMITS.greetings_of_an_address.burst
    assert limiter.greets("honest", "10.0.0.1", now=10.0) is None
    for i in range(20_000):
        limiter.greets(f"name-{i}", f"address-{i}", now=10.0)
    assert len(limiter._buckets) <= 4096, "what is remembered of strangers is bounded"


def test_sessions_are_bounded_by_address_and_over_all(limiter: RateLimiter) -> None:
    for _ in range(LIMITS.sessions_of_an_address):
        limiter.begun("10.6.6.6")
    assert limiter.greets("a", "10.6.6.6", now=0.0) is Reason.CROWDED
    assert limiter.greets("a", "10.0.0.1", now=0.0) is None
    for i in range(LIMITS.sessions - LIMITS.sessions_of_an_address):
        limiter.begun(f"key-{i}")
    assert limiter.greets("a", None, now=0.0) is Reason.CROWDED
    limiter.on_session_end("key-0")
    assert limiter.greets("a", None, now=0.0) is None


def test_messages_of_a_session_have_rates_by_what_they_cost(limiter: RateLimiter) -> None:
    answers = [limiter.says("a", Fetch(fragment=0), now=0.0) for _ in range(5000)]
    assert answers.count(None) >= 512, "a node may have lost every anchor of a model in many fragments"
    assert answers[-1] is Reason.TOO_OFTEN
    assert limiter.says("b", Fetch(fragment=0), now=0.0) is None
    assert all(limiter.says("a", Leave(reason=Reason.DRAINED), now=0.0) is None for _ in range(5000))
