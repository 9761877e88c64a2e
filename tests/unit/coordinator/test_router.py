"""Covers `coordinator/net/router.py` over a socket and a clock without network and time."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from interpreter_work import work_of
from plain_runs import plain_hello, plain_spec
from stories import Scripted, StoryText, all_stories, check_story
from virtual_host import VirtualHost

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.errors import MachineBroken, NoDescriptor, StorageError, StorageFailed
from farloop.coordinator.net.router import (
    AHEAD_BYTES,
    AHEAD_S,
    LATELY_S,
    NUDGE_S,
    OF_THE_PROCESS,
    SHARE,
    SLOWEST_BYTES_PER_S,
    STALE_S,
    Egress,
    SessionRouter,
)
from farloop.coordinator.net.sessions import Peer
from farloop.runtime.ports import Action, Route, RouterListener, Sent
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.events import BlobSent, MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer, ControlFrame, lane_hello, parse_control
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Committed, Fetch, Finished, Hello, Leave, Offer, Ready, Refused, Role, Welcome, decode
from farloop.wire.reasons import LimitReached, LocalProtocolError, Reason, RemoteProtocolError
from farloop.wire.session import Session, State
from farloop.wire.uplink import UplinkLimit

DATA = bytes(1000)
WELCOME = Welcome(protocol=1, epoch=3, spec=plain_spec(), lane_token=b"", versions=(0,), windows=(), rounds=())


@dataclass
class From:
    """A sender."""

    owner: str | None = None
    address: str = "10.0.0.1"
    descriptor: int | None = 0


class Wire:
    """The router socket: frames wait for their receiver."""

    endpoint = "wire"
    authenticates = False

    def __init__(self) -> None:
        self.sent: dict[Route, list[Sequence[Buffer]]] = {}
        self.full: set[Route] = set()
        self.gone: set[Route] = set()
        self.readable: list[Action] = []

    def listen(self, listener: RouterListener) -> None:
        self.listener = listener

    def send(self, route: Route, parts: Sequence[Buffer]) -> Sent:
        if route in self.gone:
            return Sent.GONE
        if route in self.full:
            return Sent.FULL
        self.sent.setdefault(route, []).append(parts)
        return Sent.TAKEN

    def receive(self) -> None:
        readable, self.readable = self.readable, []
        for action in readable:
            action()

    def close(self) -> None:
        pass


class Hall(VirtualHost):
    """A router with some nodes, a and b unless others are named, and what their sessions reported."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        names: Sequence[str] = ("a", "b"),
        keys: bool = False,
        uplink: UplinkLimit | None = None,
    ) -> None:
        super().__init__()
        self.wire = Wire()
        self.wire.authenticates = keys
        self.away: list[Reason] = []
        self.link = SessionRouter(
            self.wire,
            self.clock,
            on_event=self.on_event,
            limits=limits or Limits(),
            timing=Timing(),
            uplink=uplink,
            turned_away=lambda reason, who: self.away.append(reason),
        )
        self.peers: dict[str, Peer] = {}
        self.closed: list[tuple[str, SessionClosed]] = []
        self.said: list[tuple[str, object]] = []
        self.sent: list[tuple[str, BlobId]] = []
        self.told_to: list[tuple[str, SessionEvent]] = []
        """What nodes heard."""
        self.refuses: Callable[[str, SessionEvent], bool] = lambda name, event: False
        """Whether the executor raises an error for an event."""
        self.keys = {"a": "a", "b": "b"} if keys else {}
        self.nodes = {name: Session(Role.NODE, 0.0, limits=limits) for name in names}
        for name, node in self.nodes.items():
            node.send(plain_hello(node=NodeId(name)), 0.0)
        self.turn()
        assert set(self.peers) == set(names)

    @property
    def ends(self) -> list[tuple[str, Reason]]:
        return [(name, event.reason) for name, event in self.closed]

    def on_event(self, peer: Peer, event: SessionEvent) -> None:
        """The executor."""
        name = peer.who.split()[0]
        if isinstance(event, SessionClosed):
            self.closed.append((name, event))
        if self.refuses(name, event):
            raise RuntimeError("on purpose")
        match event:
            case MessageReceived(message=Hello()):
                self.peers[name] = peer
                with self.link.working_for(peer) as session:
                    session.send(dataclasses.replace(WELCOME, lane_token=peer.token), 0.0)
            case MessageReceived(message=message):
                self.said.append((name, message))
            case BlobSent(blob=blob):
                self.sent.append((name, blob))

    def pass_time(self, seconds: float, *, stopped: bool = False) -> None:
        """Let timers fire; a process that is stopped fires all of them at the end."""
        if stopped:
            self.process.stop()
        self.run_for(seconds)
        if stopped:
            self.process.resume()

    def turn(self, *names: str) -> None:
        """Carry frames of these nodes, or of all, until no node has anything to send."""
        now, moved = self.process.now, True
        while moved:
            moved = False
            for name in names or self.nodes:
                node = self.nodes[name]
                for lane, parts in node.outgoing(now):
                    moved = True
                    self.arrive(name, lane, parts)
                for lane in (0, 1, 2):
                    for parts in self.wire.sent.pop(f"{name}{lane}", []):
                        moved = True
                        node.receive(lane, parts, now)
                self._act(name, node)

    def arrive(self, name: str, lane: int, parts: Sequence[Buffer]) -> None:
        self.link.on_frame(f"{name}{lane}", parts, From(self.keys.get(name)))

    def _act(self, name: str, node: Session) -> None:
        for event in node.events():
            self.told_to.append((name, event))
            match event:
                case MessageReceived(message=Welcome()):
                    self.arrive(name, 1, node.lane_hello())
                    node.lane_opened(1)
                case MessageReceived(message=Committed(version=version, size=size, digest=digest)) if (
                    node.state is State.OPEN
                ):
                    node.expect(update(version), size, digest, None, 0.0)

    def work(self, name: str, round_: int) -> None:
        """Every kind of work that is done for a session."""
        link, peer, node = self.link, self.peers[name], self.nodes[name]
        if node.state is State.OPEN:
            node.send(Fetch(fragment=round_), 0.0)
        with link.working_for(peer) as session:
            session.send(committed(round_), 0.0)
            session.push_blob(update(round_), BytesSource(DATA))
        offer, expected = Offer(blob=delta(name), size=len(DATA), digest=1), delta(f"{name}{round_}")
        for work in (
            lambda session: session.send_blob(offer, BytesSource(DATA), background=True),
            lambda session: session.expect(expected, 10, 1, None, 0.0),
            lambda session: [session.cancel(blob) for blob in (expected, delta(name))],
            lambda session: session.speak(),
            lambda session: session.handle_timer(0.0),
        ):
            with link.working_for(peer) as session:
                work(session)
        link.on_writable()
        self.turn()

    def assert_only_a_ended(self, *reasons: Reason) -> None:
        """... and nothing of its session is kept, and b goes on."""
        assert len(self.ends) == 1 and self.ends[0][0] == "a" and self.ends[0][1] in reasons
        assert [peer.who.split()[0] for peer in self.link._peers] == ["b"]
        assert self.nodes["b"].state is State.OPEN
        self.work("b", 9)
        assert self.sent[-1] == ("b", update(9)) and self.said[-1] == ("b", Fetch(fragment=9))


@pytest.fixture
def hall() -> Hall:
    return Hall()


def update(version: int) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=0, version=version)


def committed(version: int) -> Committed:
    return Committed(
        fragment=0, version=version, size=len(DATA), digest=blob_digest(DATA), anchor_digest=0, merged=(), drops=(),
        next_window=None, rounds=(),
    )  # fmt: skip


def delta(name: str) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId(name), incarnation=1, seq=1)


CALLS = [
    "receive", "send", "send_blob", "push_blob", "expect", "cancel", "events", "outgoing", "next_timer", "handle_timer",
    "speak", "blob_waits", "live_in_flight", "background_in_flight",
]  # fmt: skip
ERRORS: list[Callable[[str], Exception]] = [
    RuntimeError, KeyError, LocalProtocolError, LimitReached, RemoteProtocolError
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_whatever_raises_in_the_work_for_a_session_ends_that_session_alone(
    hall: Hall, call: str, error: Callable[[str], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **options: object) -> Any:
        raise error("on purpose")

    session = hall.peers["a"].session
    target = session if call in vars(Session) else session.transfers
    is_property = isinstance(vars(type(target))[call], property)
    target.__class__ = type("Spoiled", (type(target),), {call: property(broken) if is_property else broken})
    for round_ in (1, 2):
        for name in ("a", "b"):
            hall.work(name, round_)
    if call == "receive" and error is RemoteProtocolError:  # one bad frame is nothing, eight are enough
        for fragment in range(8):
            hall.nodes["a"].send(Fetch(fragment=fragment), 0.0)
        hall.turn()
    assert [message for name, message in hall.said if name == "b"] == [Fetch(fragment=1), Fetch(fragment=2)]
    assert [blob for name, blob in hall.sent if name == "b"] == [update(1), update(2)]
    hall.assert_only_a_ended(Reason.FAULT, Reason.BEHIND, Reason.MALFORMED)
    assert hall.away and set(hall.away) <= {Reason.FAULT, Reason.BEHIND, Reason.MALFORMED, Reason.ENDED}
    if error is RuntimeError:
        logged = [record for record in caplog.records if "session ended" in record.getMessage()]
        assert logged and logged[0].exc_info, "an unexpected error is logged with its traceback"


@pytest.mark.parametrize("error", [StorageFailed(Path("disk"), "on purpose"), MachineBroken("so")])
def test_an_error_of_the_whole_process_ends_no_session_and_is_raised(hall: Hall, error: Exception) -> None:
    with pytest.raises(type(error)), hall.link.working_for(hall.peers["a"]):
        raise error
    assert hall.ends == [] and (StorageError, MachineBroken) == OF_THE_PROCESS


def test_an_update_that_cannot_be_read_without_a_free_descriptor_ends_one_session(hall: Hall) -> None:
    class Unopened(BytesSource):
        def read(self, offset: int, num_bytes: int) -> memoryview:
            raise NoDescriptor(Path("journal-000000.log"))

    with hall.link.working_for(hall.peers["a"]) as session:
        session.send(committed(1), 0.0)
        session.push_blob(update(1), Unopened(DATA))
    hall.turn()
    hall.assert_only_a_ended(Reason.FAULT)


def test_a_first_frame_that_cannot_be_handled_is_ignored(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hall.link._peers, "on_first_frame", None)
        hall.link.on_frame("stranger", [b"?"], From())
    assert hall.away == [Reason.FAULT] and hall.ends == []


def test_sessions_share_a_limited_uplink_by_turns_and_snapshots_come_last() -> None:
    """Neither is served first because it is the first of the list; and control does not wait for its turn."""
    rate, data = 125_000.0, bytes(120_000)
    hall = Hall(uplink=UplinkLimit(bytes_per_s=rate))
    began = hall.process.now
    for name, peer in hall.peers.items():
        with hall.link.working_for(peer) as session:
            snapshot = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=1)
            session.send_blob(Offer(blob=snapshot, size=len(data), digest=1), BytesSource(data), background=True)
            for version in (1, 2):
                session.send(dataclasses.replace(committed(version), size=len(data), digest=blob_digest(data)), 0.0)
                session.push_blob(update(version), BytesSource(data))
        assert len(hall.wire.sent[f"{name}0"]) == 3, "the Offer and both Committed"
        hall.nodes[name].expect(snapshot, len(data), 1, None, 0.0)
    bulk = dict.fromkeys("ab", 0)
    while len(hall.sent) < 6:
        for name in bulk:
            bulk[name] += sum(len(chunk) for _, chunk in hall.wire.sent.get(f"{name}1", []))
        assert sum(bulk.values()) <= rate * (hall.process.now - began) + 0.1 * rate
        assert abs(bulk["a"] - bulk["b"]) <= 0.1 * rate
        hall.turn()
        hall.pass_time(0.02)
    assert [blob.kind for _, blob in hall.sent] == [BlobKind.UPDATE] * 4 + [BlobKind.SNAPSHOT] * 2
    assert hall.process.now - began == pytest.approx(6 * len(data) / rate, rel=0.1)
    assert hall.link.uplink is not None and hall.link.uplink.held_s > 5.0 and hall.ends == []


def test_a_sessions_timer_looks_at_no_other_session() -> None:
    """Each has acknowledgements and heartbeats at times of its own; per session, many cost what few do."""

    def per_session(count: int) -> float:
        hall = Hall(names=[f"n{number}" for number in range(count)])
        for name, node in hall.nodes.items():
            node.send(Fetch(fragment=1), hall.process.now)
            hall.turn(name)
            hall.pass_time(0.001)
        return work_of(lambda: hall.pass_time(5.0)) / count

    few, many = per_session(16), per_session(96)
    assert many < 1.2 * few


def test_a_greeting_that_cannot_be_read_is_answered(hall: Hall) -> None:
    hall.link.on_frame("old", ControlFrame(run=0, epoch=0, seq=0, ack=0, body=b"?").parts(), From())
    (answer,) = hall.wire.sent["old"]
    refused = decode(parse_control(answer, Limits()).body)
    assert isinstance(refused, Refused) and refused.reason is Reason.MALFORMED and hall.ends == []


class Told(Hall, Scripted):
    """Its stories have these words:

    fetch a 1 | ready a            a says this; `turn` carries what was said, and `turn a` that of a alone
    work a 1 | pushes a 1 | tells a    every kind of work for its session; an update; a message
    closes a OLD_INCARNATION why   its session ends
    cannot_handle a BlobSent       events of this kind of its session cannot be handled
    opens a 2 | full a1 | gone a1 | free | writable | notices      lanes, and what becomes of them
    passes 0.5 | reads 0.8 socket  time; after a pause in which frames wait in the socket, or for the process
    late a | reads | stranger | has_key_of a b | revoked b
    ended | why | turned_away | heard a | messages | updates | sent_on a1 | backlog a1 | lanes a
    only_a                         only the session of a has ended, nothing of it is kept, and b goes on; why
    """

    def __init__(self, *, queued: int = 4096, keys: bool = False) -> None:
        super().__init__(Limits(max_queued_messages=queued), keys=keys)

    def fetch(self, name: str, fragment: int, now: float = 0.0) -> None:
        self.nodes[name].send(Fetch(fragment=fragment), now)

    def ready(self, name: str) -> None:
        self.nodes[name].send(Ready(), 0.0)

    def late(self, name: str) -> None:
        """What it has said arrives at once, the first of it last."""
        first, *others = self.nodes[name].outgoing(0.0)
        for lane, parts in [*others, first]:
            self.arrive(name, lane, parts)

    def tells(self, name: str) -> None:
        with self.link.working_for(self.peers[name]) as session:
            session.send(Finished(), 0.0)

    def pushes(self, name: str, *versions: int, size: int = len(DATA)) -> None:
        with self.link.working_for(self.peers[name]) as session:
            for version in versions:
                if size == len(DATA):
                    session.send(committed(version), 0.0)
                session.push_blob(update(version), BytesSource(bytes(size)))

    def closes(self, name: str, reason: str, *why: str) -> None:
        self.link.closed_by_us(self.peers[name], Reason[reason], " ".join(map(str, why)))

    def cannot_handle(self, name: str, kind: str) -> None:
        self.refuses = lambda who, event: (
            who == name
            and (type(event).__name__ == kind or (event == MessageReceived(message=Ready()) and kind == "Ready"))
        )

    def opens(self, name: str, lane: int, route: str = "") -> None:
        hello = lane_hello(1, 1, self.peers[name].token, lane)
        if route:
            self.link.on_frame(route, hello, From())
        else:
            self.arrive(name, lane, hello)
            self.nodes[name].lane_opened(lane)

    def full(self, *routes: str) -> None:
        self.wire.full = set(routes)

    def gone(self, *routes: str) -> None:
        self.wire.full, self.wire.gone = set(), set(routes)

    def writable(self) -> None:
        self.link.on_writable()

    def notices(self) -> None:
        self.link.on_gone()

    def passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    def reads(self, seconds: float, where: str) -> None:
        def read() -> None:
            for name, node in self.nodes.items():
                node.send(Fetch(fragment=1), 1.0)
                for lane, parts in node.outgoing(1.0):
                    self.arrive(name, lane, parts)

        if where == "socket":
            self.wire.readable = [read]
        else:
            self.agenda.after(0.2, lambda: self.process.deliver(read))
        self.pass_time(seconds, stopped=True)

    def stranger(self) -> None:
        self.link.on_frame("stranger", [b"?"], From())

    def has_key_of(self, name: str, owner: str) -> None:
        self.keys[name] = owner

    def revoked(self, owner: str) -> None:
        self.link.on_revoked({owner})

    def ended(self) -> list[str]:
        return [f"{name} {reason.name}" for name, reason in self.ends]

    def why(self) -> str:
        return self.closed[-1][1].detail

    def turned_away(self) -> dict[str, int]:
        return dict(Counter(reason.name for reason in self.away))

    def heard(self, name: str) -> list[str]:
        leaves = (event.message for who, event in self.told_to if who == name and isinstance(event, MessageReceived))
        return [f"{leave.reason.name} {leave.detail}".strip() for leave in leaves if isinstance(leave, Leave)]

    def messages(self) -> list[str]:
        return [f"{name} {type(message).__name__}" for name, message in self.said]

    def updates(self) -> list[str]:
        """That were acknowledged."""
        return [f"{name} {blob.version}" for name, blob in self.sent]

    def sent_on(self, route: str) -> int:
        """Frames that wait for the node."""
        return len(self.wire.sent.get(route, []))

    def backlog(self, route: str) -> int:
        lane = self.link._peers.lane(route)
        return 0 if lane is None else len(lane.backlog)

    def lanes(self, name: str) -> list[str]:
        return [f"{number} by {lane.route}" for number, lane in sorted(self.peers[name].lanes.items())]

    def only_a(self) -> str:
        self.assert_only_a_ended(self.ends[0][1])
        return self.ends[0][1].name


@all_stories(__file__, "router")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Told(**story.settings).told, rewrite=rewrite)


# --- Egress: a joiner's download starves no live traffic, and is not starved

CHUNK = 256 << 10
START = 2.0


def measured(bytes_per_s: float) -> Egress:
    """After two seconds of arrivals at this rate."""
    egress = Egress(0.0)
    for i in range(200):
        egress.look(0, i / 100, arrived=(i + 1) * round(bytes_per_s / 100))
    return egress


def taken(egress: Egress, seconds: int) -> int:
    """Background bytes that leave in so many seconds, by chunks, while live bytes keep moving."""
    total = 0
    for i in range(1000 * seconds):
        now = START + i / 1000
        egress.look(1, now, live=1000 + i % 2)
        while egress.allows(7, now):
            egress.spent(CHUNK, now)
            total += CHUNK
    return total


def test_while_nothing_else_is_waited_for_the_background_has_all_and_it_is_not_held_against_it() -> None:
    """Nor is it a stock to draw on: the share begins as the first live byte leaves."""
    egress = measured(4e6)
    for _ in range(10_000):
        assert egress.allows(7, START)
        egress.spent(CHUNK, START)
    egress.look(1, START, live=1000)
    assert taken(egress, 1) < 2 * SHARE * 4e6


@pytest.mark.parametrize("bytes_per_s", [0.0, 4e6, 1e8])
def test_while_live_bytes_are_in_flight_it_has_its_share_and_is_never_starved(bytes_per_s: float) -> None:
    share = max(SHARE * bytes_per_s, SLOWEST_BYTES_PER_S)
    assert 0.7 * share < taken(measured(bytes_per_s), 20) / 20 < 1.2 * share


def test_a_peer_that_takes_nothing_is_over_or_has_nothing_in_flight_delays_no_node() -> None:
    egress = Egress(0.0)
    for i in range(100):
        egress.look(1, i / 10, live=1000)
        if i / 10 >= STALE_S:
            assert egress.allows(7, i / 10)
            egress.spent(CHUNK, i / 10)
    egress = Egress(0.0)
    for session in (1, 2):
        egress.look(session, 0.0, live=1000)
    egress.spent(3 * CHUNK, 0.0)
    wait_s = egress.wait_s(0.0)
    assert not egress.allows(7, 0.9 * wait_s) and egress.allows(7, 1.001 * wait_s)
    egress.spent(100 * CHUNK, wait_s)
    egress.gone(1)
    assert not egress.allows(7, wait_s)
    egress.look(2, wait_s)
    assert egress.allows(7, wait_s)


@pytest.mark.parametrize("bytes_per_s", [0.0, 1e5, 1e8])
def test_beside_updates_it_never_has_more_on_its_way_than_a_moment_of_the_link(bytes_per_s: float) -> None:
    """What has left cannot make room when an update comes."""
    egress, in_flight = measured(bytes_per_s), 0
    egress.look(2, START, live=1000)
    egress.look(2, START)
    while egress.allows(1, START):
        in_flight += CHUNK
        egress.spent(CHUNK, START)
        egress.look(1, START, background=in_flight)
    assert in_flight <= max(AHEAD_BYTES, 1.02 * AHEAD_S * bytes_per_s) + CHUNK
    assert not egress.allows(7, START)
    assert egress.allows(1, START + NUDGE_S), "it may be acknowledged with the next alone"
    assert egress.allows(7, START + STALE_S), "and a joiner that takes nothing keeps no other out"
    egress.look(1, START + LATELY_S, background=in_flight + 1)
    assert egress.allows(1, START + LATELY_S)
