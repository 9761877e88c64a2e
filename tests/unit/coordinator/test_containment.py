"""An error while the coordinator works for a session ends that session alone (`coordinator/net/router.py`)."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from plain_runs import plain_hello, plain_spec

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.errors import MachineBroken, NoDescriptor, StorageError, StorageFailed
from farloop.coordinator.net.router import OF_THE_PROCESS, SessionRouter
from farloop.coordinator.net.sessions import Peer
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.events import BlobSent, MessageReceived, SessionClosed, SessionEvent
from farloop.wire.frames import Buffer
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Committed, Fetch, Finished, Hello, Leave, Offer, Ready, Welcome
from farloop.wire.reasons import LimitReached, LocalProtocolError, Reason, RemoteProtocolError
from farloop.wire.session import Role, Session, State

DATA = bytes(1000)
WELCOME = Welcome(protocol=1, epoch=3, spec=plain_spec(), lane_token=b"", versions=(0,), windows=(), rounds=())


class Frame:
    """As ZeroMQ hands one in."""

    def __init__(self, content: Buffer) -> None:
        self.bytes = self.buffer = bytes(content)

    def get(self, what: object) -> object:
        return 0 if what == zmq.SRCFD else "10.0.0.1"


class Wire:
    """The ROUTER socket: what is sent waits for who it is for."""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[list[Buffer]]] = {}

    def send_multipart(self, parts: list[Buffer], **options: object) -> "asyncio.Future[None]":
        self.sent.setdefault(bytes(parts[0]), []).append(parts[1:])
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


class Hall:
    """A link with two nodes, a and b, and what the coordinator heard of them."""

    def __init__(self, link: SessionRouter, limits: Limits | None = None) -> None:
        self.link, self.wire = link, Wire()
        setattr(link, "_socket", self.wire)  # noqa: B010 - not the type's
        self.peers: dict[str, Peer] = {}
        self.ends: list[tuple[str, SessionClosed]] = []
        self.said: list[tuple[str, object]] = []
        self.sent: list[tuple[str, BlobId]] = []
        self.away: list[Reason] = []
        self.on_event: Callable[[str, SessionEvent], None] = lambda name, event: None
        self.on_node_event: Callable[[str, SessionEvent], None] = lambda name, event: None
        self.nodes = {name: Session(Role.NODE, 0.0, limits=limits) for name in ("a", "b")}
        for name, node in self.nodes.items():
            node.send(plain_hello(node=NodeId(name)), 0.0)

    def heard(self, peer: Peer, event: SessionEvent) -> None:
        """What the daemon would be called with."""
        name = peer.who.split()[0]
        if isinstance(event, SessionClosed):
            self.ends.append((name, event))
        self.on_event(name, event)
        match event:
            case MessageReceived(message=Hello()):
                self.peers[name] = peer
                with self.link.working_for(peer) as session:
                    session.send(dataclasses.replace(WELCOME, lane_token=peer.token), 0.0)
            case MessageReceived(message=message):
                self.said.append((name, message))
            case BlobSent(blob=blob):
                self.sent.append((name, blob))
            case _:
                pass

    def turn(self) -> None:
        """Carry frames until nobody has anything to say."""
        moved = True
        while moved:
            moved = False
            for name, node in self.nodes.items():
                for lane, parts in node.outgoing(0.0):
                    moved = True
                    self.link._take([Frame(f"{name}{lane}".encode()), *map(Frame, parts)])  # type: ignore[arg-type,list-item]
                for lane in (0, 1):
                    for parts in self.wire.sent.pop(f"{name}{lane}".encode(), []):
                        moved = True
                        node.receive(lane, parts, 0.0)
                self._act(name, node)

    def _act(self, name: str, node: Session) -> None:
        for event in node.events():
            self.on_node_event(name, event)
            match event:
                case MessageReceived(message=Welcome()):
                    self.link._take([Frame(f"{name}1".encode()), *map(Frame, node.lane_hello())])  # type: ignore[arg-type,list-item]
                    node.lane_opened(1)
                case MessageReceived(message=Committed(version=version, size=size, digest=digest)) if (
                    node.state is State.OPEN
                ):
                    node.expect(update(version), size, digest, None, 0.0)
                case _:
                    pass


def update(version: int) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=0, version=version)


def committed(version: int) -> Committed:
    return Committed(
        fragment=0,
        version=version,
        size=len(DATA),
        digest=blob_digest(DATA),
        anchor_digest=0,
        merged=(),
        drops=(),
        next_window=None,
        rounds=(),
    )


def delta(name: str) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId(name), incarnation=1, seq=1)


async def in_hall(story: Callable[[Hall], None], limits: Limits | None = None) -> None:
    halls: list[Hall] = []
    link = SessionRouter(
        endpoint="inproc://hall",
        key=None,
        allow=None,
        on_event=lambda peer, event: halls[0].heard(peer, event),
        limits=limits or Limits(),
        timing=Timing(),
        turned_away=lambda reason, who: halls[0].away.append(reason),
    )
    socket = link._socket
    halls.append(Hall(link))
    try:
        halls[0].turn()
        assert set(halls[0].peers) == {"a", "b"}
        story(halls[0])
    finally:
        setattr(link, "_socket", socket)  # noqa: B010 - as it was
        link.close()


def all_work(hall: Hall, name: str, round_: int) -> None:
    """Every kind of work that is done for a session."""
    link, peer, node = hall.link, hall.peers[name], hall.nodes[name]
    if node.state is State.OPEN:
        node.send(Fetch(fragment=round_), 0.0)
    with link.working_for(peer) as session:
        session.send(committed(round_), 0.0)
        session.push_blob(update(round_), BytesSource(DATA))
    with link.working_for(peer) as session:
        session.send_blob(Offer(blob=delta(name), size=len(DATA), digest=1), BytesSource(DATA), background=True)
    with link.working_for(peer) as session:
        session.expect(delta(f"{name}{round_}"), 10, 1, None, 0.0)
    with link.working_for(peer) as session:
        session.cancel(delta(f"{name}{round_}"))
        session.cancel(delta(name))
    with link.working_for(peer) as session:
        session.speak()
    link._due(peer)
    with link.working_for(peer) as session:
        session.handle_timer(0.0)
    link._retry()
    hall.turn()


CALLS = [
    "receive",
    "send",
    "send_blob",
    "push_blob",
    "expect",
    "cancel",
    "events",
    "outgoing",
    "next_timer",
    "handle_timer",
    "speak",
    "background_waits",
    "live_in_flight",
    "background_in_flight",
]
ERRORS: list[Callable[[str], Exception]] = [
    RuntimeError,
    KeyError,
    LocalProtocolError,
    LimitReached,
    RemoteProtocolError,
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_whatever_raises_in_the_work_for_a_session_ends_that_session_alone(
    call: str, error: Callable[[str], Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def story(hall: Hall) -> None:
        def broken(*args: object, **options: object) -> Any:
            raise error("on purpose")

        is_property = isinstance(vars(Session)[call], property)
        spoiled = type("Spoiled", (Session,), {call: property(broken) if is_property else broken})
        hall.peers["a"].session.__class__ = spoiled
        for round_ in (1, 2):
            for name in ("a", "b"):
                all_work(hall, name, round_)
        if call == "receive" and error is RemoteProtocolError:  # one bad frame is nothing, eight are enough
            for fragment in range(8):
                hall.nodes["a"].send(Fetch(fragment=fragment), 0.0)
            hall.turn()
        assert [name for name, _ in hall.ends] == ["a"], "its end is told once, and nobody else's"
        assert hall.ends[0][1].reason in (Reason.FAULT, Reason.BEHIND, Reason.MALFORMED)
        assert hall.away and set(hall.away) <= {Reason.FAULT, Reason.BEHIND, Reason.MALFORMED}, "it is counted"
        assert [peer.who.split()[0] for peer in hall.link._peers] == ["b"], "nothing of it is kept"
        assert [message for name, message in hall.said if name == "b"] == [Fetch(fragment=1), Fetch(fragment=2)]
        assert [blob for name, blob in hall.sent if name == "b"] == [update(1), update(2)]
        assert hall.nodes["b"].state is State.OPEN

    with caplog.at_level(logging.WARNING):
        asyncio.run(in_hall(story))
    lines = [record for record in caplog.records if "session ended" in record.getMessage()]
    if error is RuntimeError:
        assert lines and lines[0].exc_info, "an unexpected error is told with its traceback"


def test_a_node_whose_message_is_refused_hears_which_and_why() -> None:
    """It heard nothing for ten seconds, and never why."""

    def story(hall: Hall) -> None:
        heard: list[object] = []
        hall.on_node_event = lambda name, event: heard.append(event) if name == "a" else None
        hall.nodes["a"].send(Fetch(fragment=1 << 63), 0.0)
        hall.turn()
        why = f"Fetch.fragment is {1 << 63}: a number from 0 to {(1 << 63) - 1} is wanted"
        assert MessageReceived(message=Leave(reason=Reason.MALFORMED, detail=why)) in heard
        assert hall.nodes["a"].state is State.CLOSED and hall.nodes["b"].state is State.OPEN
        assert [(name, end.reason) for name, end in hall.ends] == [("a", Reason.MALFORMED)]

    asyncio.run(in_hall(story))


@pytest.mark.parametrize("kind", [MessageReceived, BlobSent])
def test_an_event_that_cannot_be_handled_ends_the_session_whose_it_is(kind: type) -> None:
    def story(hall: Hall) -> None:
        def refuse(name: str, event: SessionEvent) -> None:
            if name == "a" and isinstance(event, kind):
                raise RuntimeError("on purpose")

        hall.on_event = refuse
        for name in ("a", "b"):
            all_work(hall, name, 1)
        assert [(name, end.reason) for name, end in hall.ends] == [("a", Reason.FAULT)]
        assert [blob for _, blob in hall.sent] == [update(1)]

    asyncio.run(in_hall(story))


def test_an_end_that_cannot_be_handled_leaves_nothing_behind() -> None:
    def story(hall: Hall) -> None:
        def refuse(name: str, event: SessionEvent) -> None:
            if isinstance(event, SessionClosed):
                raise RuntimeError("on purpose")

        hall.on_event = refuse
        hall.link.closed_by_us(hall.peers["a"], Reason.SUPERSEDED)
        assert len(hall.ends) == 1
        assert len(hall.link._peers) == 1
        all_work(hall, "b", 1)
        assert [blob for _, blob in hall.sent] == [update(1)]

    asyncio.run(in_hall(story))


def test_what_follows_an_event_that_cannot_be_handled_is_not_heard_but_the_end_is() -> None:
    def story(hall: Hall) -> None:
        def refuse(name: str, event: SessionEvent) -> None:
            if event == MessageReceived(message=Ready()):
                raise RuntimeError("on purpose")

        hall.on_event = refuse
        for message in (Fetch(fragment=1), Ready(), Fetch(fragment=2)):
            hall.nodes["a"].send(message, 0.0)
        hall.turn()
        assert [message for _, message in hall.said] == [Fetch(fragment=1)]
        assert [name for name, _ in hall.ends] == ["a"]

    asyncio.run(in_hall(story))


@pytest.mark.parametrize("error", [StorageFailed(Path("disk"), "on purpose"), MachineBroken("so")])
def test_what_concerns_the_process_is_not_taken_for_one_sessions_fault(error: Exception) -> None:
    def story(hall: Hall) -> None:
        with pytest.raises(type(error)), hall.link.working_for(hall.peers["a"]):
            raise error
        assert hall.ends == []

    asyncio.run(in_hall(story))
    assert (StorageError, MachineBroken) == OF_THE_PROCESS


def test_an_update_that_cannot_be_read_for_want_of_a_descriptor_ends_one_session() -> None:
    class Unopened(BytesSource):
        def read(self, offset: int, num_bytes: int) -> memoryview:
            raise NoDescriptor(Path("journal-000000.log"))

    def story(hall: Hall) -> None:
        with hall.link.working_for(hall.peers["a"]) as session:
            session.send(committed(1), 0.0)
            session.push_blob(update(1), Unopened(DATA))
        hall.turn()
        assert [name for name, _ in hall.ends] == ["a"]
        all_work(hall, "b", 1)
        assert [blob for _, blob in hall.sent] == [update(1)]

    asyncio.run(in_hall(story))


def test_control_that_is_never_acknowledged_ends_the_session_with_a_reason() -> None:
    """4096 outcomes of nonsense offers ended the coordinator."""
    limits = Limits(max_queued_messages=50)

    def story(hall: Hall) -> None:
        for _ in range(60):
            with hall.link.working_for(hall.peers["a"]) as session:
                session.send(Finished(), 0.0)
        (end,) = hall.ends
        assert end[0] == "a" and end[1].reason is Reason.BEHIND and "50 messages" in end[1].detail
        assert hall.away == [Reason.BEHIND]
        all_work(hall, "b", 1)
        assert [blob for _, blob in hall.sent] == [update(1)]

    asyncio.run(in_hall(story, limits))


def test_a_first_frame_that_cannot_be_handled_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(hall: Hall) -> None:
        def broken(*args: object) -> Any:
            raise RuntimeError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(hall.link._peers, "meet", broken)
            hall.link._take([Frame(b"stranger"), Frame(b"?")])  # type: ignore[list-item]
        assert hall.away == [Reason.FAULT]
        all_work(hall, "b", 1)
        assert [blob for _, blob in hall.sent] == [update(1)]

    asyncio.run(in_hall(story))
