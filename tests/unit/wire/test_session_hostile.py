"""Two sessions joined by a pipe that loses, repeats, reorders, delays, cuts and forges frames.

Covers protocol Q and W (blobs arrive whole, and once), T (control in order exactly once, whatever bulk does) and the
bounds on memory. Time is virtual; every run is a function of its seed.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_runs import PLAIN_HELLO
from session_pairs import WELCOME, delta, offer_of, opened, update
from slow_cases import slow

from farloop.algo.spec import BlobId
from farloop.wire.blobs import MAX_ISLANDS, BytesSource, blob_digest, blob_key
from farloop.wire.events import BlobReceived, BlobSent, MessageReceived, SessionEvent
from farloop.wire.frames import Buffer, BulkFrame, ControlFrame
from farloop.wire.limits import AHEAD_FRAMES, EARLY_BYTES, EARLY_FRAMES, Limits, Timing
from farloop.wire.messages import Committed, Credit, Fetch, Message, Offer, Role, pack
from farloop.wire.reasons import RemoteProtocolError
from farloop.wire.session import Session, State

Parts = list[Buffer]

LIMITS = Limits(chunk_bytes=16 << 10, max_ahead_bytes=4000)
TIMING = Timing(liveness_s=300.0, blob_idle_s=2000.0, stall_s=2000.0)
END_S = 2000.0


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What the pipe does to a frame, as probabilities, and its longest delay."""

    loss: float = 0.0
    copy: float = 0.0
    forge: float = 0.0
    delay_s: float = 0.01
    bulk_bytes_per_s: float = float("inf")
    """Rate of each direction's bulk lane, which then keeps the order of its frames."""


@dataclass
class World:
    """Two applications, their sessions, and the pipes between them."""

    seed: int
    weather: Weather
    node: Session
    coordinator: Session
    now: float = 0.0
    refused: int = 0
    received: dict[Role, list[Message]] = field(default_factory=lambda: {role: [] for role in Role})
    blobs: dict[BlobId, bytes] = field(default_factory=dict)
    sent: list[BlobId] = field(default_factory=list)
    deaths: list[tuple[float, int]] = field(default_factory=list)
    """When a lane's connection is lost, and which; another is opened in its place."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._air: list[tuple[float, int, Role, int, Parts]] = []
        self._count = 0
        self._lane_free_at = dict.fromkeys(Role, 0.0)

    def run(self, done: Callable[[], bool]) -> None:
        """Turn both cranks until `done`."""
        while not done():
            assert self.now < END_S, "it never ends"
            for role in Role:
                self._turn(role)
            timers = [self._session(role).next_timer() for role in Role]
            times = [time for time in timers if time is not None] + [frame[0] for frame in self._air[:1]]
            self.now = max(self.now, min(times + [at for at, _ in self.deaths]))
            for at, lane in [death for death in self.deaths if death[0] <= self.now]:
                self.deaths.remove((at, lane))
                self._air = [frame for frame in self._air if frame[3] != lane]
                heapq.heapify(self._air)
                for role in Role:
                    self._session(role).lane_lost(lane)
                    self._session(role).lane_opened(lane + 10)
            while self._air and self._air[0][0] <= self.now:
                _, _, role, lane, parts = heapq.heappop(self._air)
                self._arrive(role, lane, parts)
            for role in Role:
                self._session(role).handle_timer(self.now)

    def has_heard(self, role: Role) -> bool:
        """Whether any message was delivered there."""
        return bool(self.received[role])

    def _session(self, role: Role) -> Session:
        return self.node if role is Role.NODE else self.coordinator

    def _turn(self, role: Role) -> None:
        session = self._session(role)
        for event in session.events():
            self._handle(role, event)
        target = Role.COORDINATOR if role is Role.NODE else Role.NODE
        while frames := session.outgoing(self.now):
            for lane, parts in frames:
                self._transmit(target, lane, parts)
        session.check()

    def _transmit(self, target: Role, lane: int, parts: Parts) -> None:
        copies = 2 if self._rng.random() < self.weather.copy else 1
        for _ in range(copies):
            if self._rng.random() < self.weather.loss:
                continue
            if self._rng.random() < self.weather.forge:
                self._launch(target, lane, self._forged(parts))
            self._launch(target, lane, parts)

    def _launch(self, target: Role, lane: int, parts: Parts) -> None:
        self._count += 1
        at = self.now + self._rng.random() * self.weather.delay_s
        if lane and self.weather.bulk_bytes_per_s < float("inf"):
            start = max(self.now, self._lane_free_at[target])
            self._lane_free_at[target] = start + sum(map(len, parts)) / self.weather.bulk_bytes_per_s
            at = self._lane_free_at[target] + self.weather.delay_s
        heapq.heappush(self._air, (at, self._count, target, lane, parts))

    def _forged(self, parts: Parts) -> Parts:
        forged = [bytearray(part) for part in parts]
        victim = self._rng.choice(forged)
        match self._rng.randrange(4):
            case 0:
                victim[self._rng.randrange(len(victim))] ^= 1 << self._rng.randrange(8)
            case 1:
                del victim[self._rng.randrange(len(victim)) :]
            case 2:
                victim[:] = self._rng.randbytes(self._rng.randrange(200))
            case _:
                forged.append(bytearray(b"one part more"))
        return list(forged)

    def _arrive(self, role: Role, lane: int, parts: Parts) -> None:
        session = self._session(role)
        try:
            session.receive(lane, parts, self.now)
        except RemoteProtocolError:
            self.refused += 1
        session.check()

    def _handle(self, role: Role, event: SessionEvent) -> None:
        session = self._session(role)
        match event:
            case MessageReceived(message=message):
                self.received[role].append(message)
                if isinstance(message, Offer):
                    session.expect(message.blob, message.size, message.digest, None, self.now)
                if isinstance(message, Committed):
                    session.expect(update(message.version), message.size, message.digest, None, self.now)
            case BlobReceived(blob=blob, data=data):
                assert blob not in self.blobs, "a blob arrived twice"
                self.blobs[blob] = bytes(data)
            case BlobSent(blob=blob):
                self.sent.append(blob)
            case _:
                raise AssertionError(event)


def committed(version: int, data: bytes) -> Committed:
    return Committed(
        fragment=0,
        version=version,
        size=len(data),
        digest=blob_digest(data),
        anchor_digest=0,
        merged=(),
        drops=(),
        next_window=None,
        rounds=(),
    )


def exchange(world: World, sizes: list[int], num_messages: int) -> None:
    """Send messages and blobs both ways at once; what must have arrived in the end."""
    contents = {
        blob: bytes(world._rng.randbytes(size)) for n, size in enumerate(sizes) for blob in (delta(n), update(n))
    }
    said: dict[Role, list[Message]] = {role: [] for role in Role}
    for n in range(max(len(sizes), num_messages)):
        if n < num_messages:
            said[Role.NODE].append(Fetch(fragment=n))
            world.node.send(Fetch(fragment=n), world.now)
        if n < len(sizes):
            offer = offer_of(delta(n), contents[delta(n)])
            world.node.send_blob(offer, BytesSource(contents[delta(n)]))
            said[Role.NODE].append(offer)
            announcement = committed(n, contents[update(n)])
            world.coordinator.send(announcement, world.now)
            world.coordinator.push_blob(update(n), BytesSource(contents[update(n)]))
            said[Role.COORDINATOR].append(announcement)

    def done() -> bool:
        return (
            len(world.sent) == len(contents)
            and len(world.received[Role.COORDINATOR]) >= len(said[Role.NODE])
            and len(world.received[Role.NODE]) >= len(said[Role.COORDINATOR])
        )

    world.run(done)
    assert world.received[Role.COORDINATOR] == said[Role.NODE]
    assert world.received[Role.NODE] == said[Role.COORDINATOR]
    assert world.blobs == contents
    assert sorted(map(repr, world.sent)) == sorted(map(repr, contents))


WEATHER = st.builds(
    Weather,
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    copy=st.sampled_from([0.0, 0.2]),
    forge=st.sampled_from([0.0, 0.2]),
    delay_s=st.sampled_from([0.0, 0.1, 3.0]),
)


@settings(max_examples=25)
@given(st.integers(0, 2**32), WEATHER, st.lists(st.integers(1, 1_000_000), max_size=3), st.integers(0, 40))
def test_everything_arrives_once_in_order_and_intact_through_any_weather(
    seed: int, weather: Weather, sizes: list[int], num_messages: int
) -> None:
    node, coordinator = opened(LIMITS, TIMING)
    exchange(World(seed, weather, node, coordinator), sizes, num_messages)


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 6))])
def test_everything_arrives_through_the_worst_weather(seed: int) -> None:
    node, coordinator = opened(LIMITS, TIMING)
    world = World(seed, Weather(loss=0.3, copy=0.3, forge=0.3, delay_s=3.0), node, coordinator)
    exchange(world, [1_500_000, 1, 400_000], 60)
    assert node.traffic.control_resends and coordinator.traffic.rewinds
    assert coordinator.traffic.control_duplicates and world.refused > 40


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    WEATHER,
    st.lists(st.integers(1, 1_000_000), min_size=1, max_size=3),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 3)), max_size=3, unique_by=lambda death: death[1]),
)
def test_everything_arrives_over_several_lanes_whichever_of_them_die(
    seed: int, weather: Weather, sizes: list[int], deaths: list[tuple[float, int]]
) -> None:
    node, coordinator = opened(LIMITS, TIMING)
    for lane in (2, 3):
        node.lane_opened(lane)
        coordinator.lane_opened(lane)
    exchange(World(seed, weather, node, coordinator, deaths=deaths), sizes, 5)


def test_in_fair_weather_nothing_is_sent_twice_even_when_lanes_overtake_each_other() -> None:
    node, coordinator = opened(LIMITS, TIMING)
    world = World(1, Weather(delay_s=0.2), node, coordinator)
    exchange(world, [2_000_000, 700_000], 30)
    for session in (node, coordinator):
        assert session.traffic.rewinds == 0
        assert session.traffic.control_resends == 0
    assert world.now < 5.0


@pytest.mark.parametrize("num_blobs", [1, 8])
@pytest.mark.parametrize("bytes_per_s", [125e3, 125e6])
def test_on_thin_and_fat_links_nothing_is_sent_twice_and_lanes_stay_busy(bytes_per_s: float, num_blobs: int) -> None:
    node, coordinator = opened(None, TIMING)
    world = World(3, Weather(delay_s=0.1, bulk_bytes_per_s=bytes_per_s), node, coordinator)
    size = 8_000_000 // num_blobs
    exchange(world, [size] * num_blobs, 0)
    assert node.traffic.rewinds == coordinator.traffic.rewinds == 0
    assert world.now < 1.1 * 8_000_000 / bytes_per_s + 2.0


def test_a_session_opens_through_bad_weather() -> None:
    for seed in range(10):
        node = Session(Role.NODE, 0.0, timing=TIMING)
        coordinator = Session(Role.COORDINATOR, 0.0, timing=TIMING)
        world = World(seed, Weather(loss=0.4, copy=0.3, forge=0.2, delay_s=3.0), node, coordinator)
        node.send(PLAIN_HELLO, 0.0)
        world.run(partial(world.has_heard, Role.COORDINATOR))
        coordinator.send(WELCOME, world.now)
        world.run(partial(world.has_heard, Role.NODE))
        assert node.state is coordinator.state is State.OPEN
        assert world.received == {Role.NODE: [WELCOME], Role.COORDINATOR: [PLAIN_HELLO]}


# --- a peer that means ill: what it can make the other end hold


def bulk(session: Session, blob: BlobId, offset: int, chunk: bytes) -> Parts:
    handshake = session._handshake
    frame = BulkFrame(
        run=handshake.run, epoch=handshake.epoch, key=blob_key(blob), offset=offset, chunk=memoryview(chunk)
    )
    return frame.parts()


def test_chunks_of_20_000_unexpected_blobs_are_held_within_the_early_window() -> None:
    node, coordinator = opened()
    for seq in range(20_000):
        coordinator.receive(1, bulk(node, delta(seq), 0, bytes(200)), 0.0)
    held = coordinator.transfers
    held.check()
    assert held._early_bytes <= EARLY_BYTES and len(held._early) <= EARLY_FRAMES
    assert coordinator.outgoing(0.0) == [] and coordinator.traffic.stray.frames == 20_000


def test_all_that_a_peer_can_have_held_is_bounded() -> None:
    """E, 4 MiB of control frames ahead, and the blobs that are expected: they were allocated when that was decided."""
    node, coordinator = opened()
    expected = coordinator.expect(delta(0), 8 << 20, 0, None, 0.0)
    coordinator.outgoing(0.0)
    for seq in range(1, 40):
        coordinator.receive(1, bulk(node, delta(seq), seq << 17, bytes(1 << 18)), 0.0)
    for n in range(3000):
        coordinator.receive(1, bulk(node, delta(0), 2 * n + 1, b"x"), 0.0)
    body = pack([9999, False, {"unknown": bytes(100_000)}])
    handshake = node._handshake
    for seq in range(2, AHEAD_FRAMES):
        frame = ControlFrame(run=handshake.run, epoch=handshake.epoch, seq=seq, ack=0, body=body)
        coordinator.receive(0, frame.parts(), 0.0)
    coordinator.check()
    assert 3 << 20 < coordinator._control._ahead_bytes <= 4 << 20
    assert expected.arrived == MAX_ISLANDS and len(expected.data) == 8 << 20
    assert coordinator.transfers._early_bytes <= EARLY_BYTES


def test_a_peer_that_never_gives_credit_is_sent_no_more_than_the_early_window() -> None:
    _, coordinator = opened()
    for version in range(100):
        coordinator.push_blob(update(version), BytesSource(bytes(1 << 20)))
    sent = 0
    while frames := coordinator.outgoing(0.0):
        sent += sum(len(parts[1]) for lane, parts in frames if lane)
    assert sent == EARLY_BYTES


@pytest.mark.parametrize(
    "claims",
    [
        {"received": 0, "limit": 1 << 60, "arrived": 1 << 60, "early": 1 << 60},
        {"received": 1 << 60, "limit": 1 << 60},
        {"received": -1, "limit": -1, "arrived": -1, "early": -1},
    ],
)
def test_a_peer_that_claims_more_than_was_sent_to_it_gets_each_byte_once(claims: dict[str, int]) -> None:
    """And what it claims to have taken, it has to do without."""
    _, coordinator = opened()
    coordinator.push_blob(update(), BytesSource(bytes(20 << 20)))
    sent = 0
    for n in range(200):
        for lane, parts in coordinator.outgoing(0.01 * n):
            sent += len(parts[1]) if lane else 0
        coordinator.transfers.credited(Credit(blob=update(), **claims), 0.01 * n)
        coordinator.check()
    assert sent <= 20 << 20
