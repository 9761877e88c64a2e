"""The node's link against the coordinator's, over real sockets on loopback (protocol Q, T, U)."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
import zmq.asyncio
from plain_runs import plain_hello, plain_spec

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.net.router import SessionRouter
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.net.zmq_router import ZmqRouter
from farloop.monitoring.tcp_connection import end_of, hang_up
from farloop.node.errors import BadAddress, LinkFailed
from farloop.node.link import LinkConfig, read_known
from farloop.node.settings import NodeConfig
from farloop.node.zmq_dealer import LinkThread, new_key_pair
from farloop.runtime.system import LoopClock
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, blob_digest, blob_key
from farloop.wire.frames import BulkFrame, lane_hello
from farloop.wire.keys import fingerprint, load_public
from farloop.wire.limits import Limits, Timing
from farloop.wire.reasons import Reason

pytestmark = pytest.mark.integration

_T = TypeVar("_T")
Delivered = queue.SimpleQueue[wire_ev.SessionEvent | Exception]

SPEC = plain_spec(batch_sequences=4, sequence_tokens=8)


class Station:
    """The coordinator's link in a thread of its own: it welcomes everybody, and expects every blob offered."""

    def __init__(self, endpoint: str, key: Path | None, allow: Path | None, timing: Timing) -> None:
        self.heard: queue.SimpleQueue[wire_ev.SessionEvent] = queue.SimpleQueue()
        self.turned_away: list[tuple[Reason, str]] = []
        self.errors: list[Exception] = []
        self._endpoint, self._key, self._allow, self._timing = endpoint, key, allow, timing
        self._up = threading.Event()
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._peers: list[Peer] = []
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._up.wait(10)

    async def _serve(self) -> None:
        def turned_away(reason: Reason, who: str) -> None:
            self.turned_away.append((reason, who))

        limits, clock = Limits(), LoopClock(self.errors.append)
        socket = ZmqRouter(
            endpoint=self._endpoint,
            key=self._key,
            allow=self._allow,
            max_frame_bytes=limits.max_frame_bytes,
            turned_away=turned_away,
        )
        self._link = link = SessionRouter(
            socket, clock, on_event=self._on_event, limits=limits, timing=self._timing, turned_away=turned_away
        )
        self._up.set()
        running = asyncio.create_task(socket.run())
        await self._stop.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        link.close()

    def _on_event(self, peer: Peer, event: wire_ev.SessionEvent) -> None:
        now = time.monotonic()
        match event:
            case wire_ev.MessageReceived(message=msg.Hello()):
                self._peers.append(peer)
                welcome = msg.Welcome(
                    protocol=1, epoch=1, spec=SPEC, lane_token=peer.token, versions=(), windows=(), rounds=()
                )
                peer.session.send(welcome, now)
                self._loop.call_soon(self._link.flush, peer)
            case wire_ev.MessageReceived(message=msg.Offer() as offer):
                peer.session.expect(offer.blob, offer.size, offer.digest, None, now)
                self._loop.call_soon(self._link.flush, peer)
            case _:
                pass
        self.heard.put(event)

    def say(self, message: msg.Message) -> None:
        """To the newest session."""

        def send() -> None:
            self._peers[-1].session.send(message, time.monotonic())
            self._link.flush(self._peers[-1])

        self._loop.call_soon_threadsafe(send)

    def push(self, announced: msg.Committed, data: bytes) -> None:
        """To the newest session."""

        def send() -> None:
            with self._link.working_for(self._peers[-1]) as session:
                session.send(announced, time.monotonic())
                session.push_blob(msg.update_id(announced), BytesSource(data))

        self._loop.call_soon_threadsafe(send)

    @property
    def moved(self) -> int:
        """Bytes of blobs of the newest session, both ways."""
        traffic = self._peers[-1].session.traffic
        return sum(
            counted.bytes for counts in (traffic.sent_blobs, traffic.received_blobs) for counted in counts.values()
        )

    def route(self, number: int) -> object:
        """Of one lane of the newest session; None where it is not open."""
        lane = self._peers[-1].lanes.get(number)
        return None if lane is None else lane.route

    @property
    def token(self) -> bytes:
        """Of the newest session."""
        return self._peers[-1].token

    @property
    def run(self) -> tuple[int, int]:
        """The run's number and the epoch of the newest session, as frames carry them."""
        handshake = self._peers[-1].session._handshake
        return handshake.run, handshake.epoch

    def host(self, number: int) -> str:
        """Where one lane of the newest session comes from."""
        return self._end(number)[1]

    def break_lane(self, number: int) -> None:
        """Shut down the connection of one lane."""
        assert hang_up(*self._end(number))

    def _end(self, number: int) -> tuple[int, str, int]:
        lane = self._link._peers.lane(self.route(number))
        assert lane is not None and lane.descriptor is not None
        return lane.descriptor, *end_of(lane.descriptor)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            self._loop.close()
        assert self.errors == []


@contextlib.contextmanager
def station(
    endpoint: str, key: Path | None = None, allow: Path | None = None, timing: Timing | None = None
) -> Iterator[Station]:
    there = Station(endpoint, key, allow, timing or Timing())
    try:
        yield there
    finally:
        there.close()


@contextlib.contextmanager
def linked(config: LinkConfig) -> Iterator[tuple[LinkThread, Delivered]]:
    delivered: Delivered = queue.SimpleQueue()
    link = LinkThread(config)
    link.start(plain_hello, delivered.put)
    try:
        yield link, delivered
    finally:
        link.close()
        assert not any(thread.name == "link" for thread in threading.enumerate())


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def wait_for(events: "queue.SimpleQueue[Any]", kind: type[_T], timeout_s: float = 15.0) -> _T:
    """The next event or message of a kind."""
    deadline = time.monotonic() + timeout_s
    while True:
        event = events.get(timeout=max(0.01, deadline - time.monotonic()))
        inner = event.message if isinstance(event, wire_ev.MessageReceived) else event
        if isinstance(inner, kind):
            return inner


def test_a_node_that_is_started_again_knows_its_link(endpoint: str, tmp_path: Path) -> None:
    config = LinkConfig(coordinator=endpoint, kept=tmp_path / "link.json")
    with station(endpoint), linked(config) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        data = bytearray(1_000_000)
        blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1)
        link.send_blob(msg.Offer(blob=blob, size=len(data), digest=blob_digest(data)), data)
        wait_for(delivered, wire_ev.BlobSent)
    known = read_known(tmp_path / "link.json", endpoint)
    assert known is not None and known.bytes_per_s > 0.0 and known.round_trip_s > 0.0
    with station(endpoint), linked(config) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        assert link._link is not None and link._link._session is not None
        assert link._link._session.transfers.known == known


def test_a_node_may_be_started_before_its_coordinator(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """T. And it says once, not at every attempt, what it waits for."""
    with linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        for _ in range(3):
            closed = wait_for(delivered, wire_ev.SessionClosed)
            assert "is the coordinator running" in closed.detail
        assert link.moved.up.total == 0, "what was not taken was not sent"
        with station(endpoint):
            wait_for(delivered, msg.Welcome)
            assert link.moved.up.total > 0
            told = [record for record in caplog.records if "no link" in record.message]
            assert [record.levelno for record in told] == [logging.WARNING]


def test_the_coordinator_notices_at_once_that_a_connection_ended(endpoint: str) -> None:
    """V: not when it happens to have something to say."""
    with station(endpoint, timing=Timing(heartbeat_s=30.0, liveness_s=60.0)) as there:
        with linked(LinkConfig(coordinator=endpoint)) as (_, delivered):
            wait_for(delivered, msg.Welcome)
        gone_at = time.monotonic()
        closed = wait_for(there.heard, wire_ev.SessionClosed)
        assert closed.reason is Reason.CLOSED
        assert time.monotonic() - gone_at < 1.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15.0
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


@pytest.mark.parametrize("up", [True, False])
def test_blobs_travel_over_several_lanes_and_a_session_outlives_all_but_the_last(endpoint: str, up: bool) -> None:
    """T: a connection that breaks half-way costs no byte of the blob, and is opened again."""
    data = bytearray(random.Random(1).randbytes(24 << 20))
    with station(endpoint) as there, linked(LinkConfig(coordinator=endpoint, lanes=4)) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        until(lambda: link.num_lanes == 4 and there.route(1) is not None)
        if up:
            blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1)
            link.send_blob(msg.Offer(blob=blob, size=len(data), digest=blob_digest(data)), data)
        else:
            announced = msg.Committed(
                fragment=0, version=1, size=len(data), digest=blob_digest(data), anchor_digest=0, merged=(), drops=(),
                next_window=None, rounds=(),
            )  # fmt: skip
            blob = msg.update_id(announced)
            there.push(announced, bytes(data))
        until(lambda: there.moved > 4 << 20)
        broken = there.route(1)
        there.break_lane(1)
        assert wait_for(there.heard if up else delivered, wire_ev.BlobReceived) == wire_ev.BlobReceived(
            blob=blob, data=data
        )
        assert wait_for(delivered if up else there.heard, wire_ev.BlobSent) == wire_ev.BlobSent(blob=blob)
        until(lambda: link.num_lanes == 4 and there.route(1) != broken and None not in map(there.route, range(5)))
        for number in (1, 2, 3, 4):
            there.break_lane(number)
        closed = wait_for(delivered, wire_ev.SessionClosed)
        assert closed.reason is Reason.CLOSED
        wait_for(delivered, msg.Welcome)


def test_who_replays_a_lanes_greeting_from_elsewhere_takes_no_lane_and_delays_no_node(endpoint: str) -> None:
    """T: the token was read from a connection in the clear. A hundred connections say it, and then send bytes."""
    data = bytearray(random.Random(1).randbytes(24 << 20))
    with station(endpoint) as there, linked(LinkConfig(coordinator=endpoint, lanes=4)) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        until(lambda: link.num_lanes == 4 and None not in map(there.route, range(5)))
        routes = [there.route(lane) for lane in range(5)]
        run, epoch = there.run
        blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1)
        with zmq.Context() as context:
            dealers = [context.socket(zmq.DEALER) for _ in range(100)]
            link.send_blob(msg.Offer(blob=blob, size=len(data), digest=blob_digest(data)), data)
            for number, dealer in enumerate(dealers):
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(f"tcp://127.0.0.2:0;{endpoint.removeprefix('tcp://')}")
                dealer.send_multipart(lane_hello(run, epoch, there.token, 1 + number % 17))
                chunk = BulkFrame(run=run, epoch=epoch, key=blob_key(blob), offset=0, chunk=memoryview(bytes(4096)))
                dealer.send_multipart(chunk.parts())
            received = wait_for(there.heard, wire_ev.BlobReceived)
            assert received == wire_ev.BlobReceived(blob=blob, data=data)
            until(lambda: len(there.turned_away) == 2 * len(dealers))
            for dealer in dealers:
                dealer.close()
        assert {reason for reason, _ in there.turned_away} == {Reason.MALFORMED}
        assert [there.route(lane) for lane in range(5)] == routes and link.num_lanes == 4


def test_a_farewell_is_acknowledged_and_nothing_is_dialled_after_it(endpoint: str) -> None:
    """V."""
    with station(endpoint) as there, linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        link.send(msg.Leave(reason=Reason.DRAINED))
        assert link.flushed(5.0)
        wait_for(there.heard, msg.Leave)
        with pytest.raises(queue.Empty):
            wait_for(there.heard, msg.Hello, timeout_s=0.5)


def test_the_coordinators_farewell_is_acknowledged_and_logged_with_its_reason(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """V: its session ends by the acknowledgement, not by waiting for one. The node dials again."""
    with station(endpoint) as there, linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        started, before = time.monotonic(), link.moved
        there.say(msg.Leave(reason=Reason.COORDINATOR_STOPPING))
        wait_for(there.heard, wire_ev.SessionClosed)
        assert time.monotonic() - started < Timing().linger_s / 2
        wait_for(delivered, msg.Welcome)
        assert link.moved.up.total > before.up.total > 0, "bytes of all sessions count"
    told = [record.message for record in caplog.records if "no link" in record.message]
    assert len(told) == 1 and repr(Reason.COORDINATOR_STOPPING.sentence) in told[0]
    assert " for=0s " in told[0], "not -0s"


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dials again at once, and gives up early."""
    monkeypatch.setattr("farloop.node.link.BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr("farloop.node.link.BAD_SESSIONS", 4)


def refused_for_good(delivered: Delivered) -> str:
    """What the node ends with."""
    while True:
        told = wait_for(delivered, msg.Refused)
        if not told.retriable:
            assert told.reason is Reason.MALFORMED
            return told.detail


@pytest.mark.usefixtures("eager")
def test_a_node_whose_greeting_cannot_be_read_is_told_why_and_gives_up(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T: a node of another version heard nothing, said so once a minute, and dialled for ever."""
    delivered: Delivered = queue.SimpleQueue()
    with station(endpoint) as there:
        link = LinkThread(LinkConfig(coordinator=endpoint))
        link.start(lambda: plain_hello(incarnation=1 << 63), delivered.put)
        try:
            detail = refused_for_good(delivered)
        finally:
            link.close()
        assert there.heard.empty(), "no session was begun"
    assert "Hello.incarnation is 9223372036854775808" in detail and endpoint in detail
    assert "4 sessions in a row" in detail and "install the same version of farloop on both" in detail
    lines = [record.getMessage() for record in caplog.records if "session refused" in record.getMessage()]
    assert [line.split()[2] for line in lines] == ["times=1", "times=2", "times=3", "times=4"]


@pytest.mark.usefixtures("eager")
def test_a_node_whose_messages_are_refused_gives_up_unless_its_deltas_are_taken_in(endpoint: str) -> None:
    """T."""
    stored = msg.Stored(blob=BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=1))
    bad = msg.Fetch(fragment=1 << 63)
    with station(endpoint) as there, linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        for _ in range(5):
            wait_for(delivered, msg.Welcome)
            there.say(stored)
            wait_for(delivered, msg.Stored)
            link.send(bad)
            told = wait_for(delivered, msg.Leave)
            assert told.reason is Reason.MALFORMED and "Fetch.fragment is" in told.detail
        for _ in range(3):
            wait_for(delivered, msg.Welcome)
            link.send(bad)
            wait_for(delivered, msg.Leave)
        assert "4 sessions in a row" in refused_for_good(delivered)


def test_flushing_a_link_without_a_session_does_not_wait(endpoint: str) -> None:
    with linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        wait_for(delivered, wire_ev.SessionClosed)
        link.send(msg.Leave(reason=Reason.DRAINED))
        started = time.monotonic()
        assert link.flushed(10.0)
        assert time.monotonic() - started < 5.0


def key_files(folder: Path, name: str) -> tuple[Path, Path]:
    """(secret, public)."""
    public, secret = new_key_pair()
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.key").write_bytes(secret + b"\n")
    (folder / f"{name}.key").chmod(0o600)
    (folder / f"{name}.pub").write_bytes(public + b"\n")
    return folder / f"{name}.key", folder / f"{name}.pub"


def test_a_key_on_the_allow_list_comes_in_and_another_is_refused_for_good(endpoint: str, tmp_path: Path) -> None:
    """U: the owner of the key, not a claimed name; no endless knocking at a closed door."""
    server_key, server_pub = key_files(tmp_path / "server", "coordinator")
    known, known_pub = key_files(tmp_path / "keys", "a")
    stranger, stranger_pub = key_files(tmp_path / "keys", "b")
    (tmp_path / "allow").mkdir()
    (tmp_path / "allow" / "a.pub").write_bytes(known_pub.read_bytes())
    with station(endpoint, key=server_key, allow=tmp_path / "allow") as there:
        with linked(LinkConfig(coordinator=endpoint, key=known, server_key=server_pub)) as (_, delivered):
            wait_for(delivered, msg.Welcome)
        with linked(LinkConfig(coordinator=endpoint, key=stranger, server_key=server_pub)) as (_, delivered):
            refused = wait_for(delivered, msg.Refused)
            assert refused.reason is Reason.WRONG_KEY and not refused.retriable
            assert (Reason.WRONG_KEY, fingerprint(load_public(stranger_pub))) in there.turned_away
            wait_for(delivered, wire_ev.SessionClosed)
            with pytest.raises(queue.Empty):
                delivered.get(timeout=1.0)


def test_blobs_may_leave_from_another_address_than_control(endpoint: str, tmp_path: Path) -> None:
    server_key, server_pub = key_files(tmp_path / "server", "coordinator")
    known, _ = key_files(tmp_path / "allow", "a")
    node = NodeConfig(name="a", coordinator=endpoint, lanes=2, bulk_source="127.0.0.2")
    config = dataclasses.replace(LinkConfig.of(node), key=known, server_key=server_pub)
    listening = station(endpoint, key=server_key, allow=tmp_path / "allow")
    with listening as there, linked(config) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        until(lambda: link.num_lanes == 2 and there.route(2) is not None)
        assert [there.host(lane) for lane in (0, 1, 2)] == ["127.0.0.1", "127.0.0.2", "127.0.0.2"]
    for source, why in (("10.0.0", "is not an IP address"), ("192.0.2.1", "is not an address of this machine")):
        with pytest.raises(ValueError, match=why):
            dataclasses.replace(config, bulk_source=source)
    with pytest.raises(BadAddress, match=r"bulk_source 127\.0\.0\.2 needs key and server_key"):
        LinkThread(LinkConfig(coordinator=endpoint, bulk_source="127.0.0.2"))


def test_a_bulk_source_that_is_lost_is_named_and_no_session_without_lanes_begins(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server_key, server_pub = key_files(tmp_path / "server", "coordinator")
    known, _ = key_files(tmp_path / "allow", "a")
    config = LinkConfig(coordinator=endpoint, key=known, server_key=server_pub, bulk_source="127.0.0.2")
    object.__setattr__(config, "bulk_source", "192.0.2.1")  # as if the card had lost its address since
    with station(endpoint, key=server_key, allow=tmp_path / "allow"), linked(config) as (_, delivered):
        until(lambda: "no lane can be opened from [node] bulk_source: 192.0.2.1 is not an address of" in caplog.text)
        assert delivered.empty()


def test_a_key_that_is_replaced_under_its_name_ends_the_old_ones_session(endpoint: str, tmp_path: Path) -> None:
    """U: no other frame of the old key's holder is needed, and no moment in which the name is missing."""
    server_key, server_pub = key_files(tmp_path / "server", "coordinator")
    old, old_pub = key_files(tmp_path / "old", "a")
    new, new_pub = key_files(tmp_path / "new", "a")
    (tmp_path / "allow").mkdir()
    (tmp_path / "allow" / "a.pub").write_bytes(old_pub.read_bytes())
    with station(endpoint, key=server_key, allow=tmp_path / "allow"):
        with linked(LinkConfig(coordinator=endpoint, key=old, server_key=server_pub)) as (_, delivered):
            wait_for(delivered, msg.Welcome)
            new_pub.replace(tmp_path / "allow" / "a.pub")
            left = wait_for(delivered, msg.Leave, timeout_s=5.0)
            assert left.reason is Reason.WRONG_KEY
        with linked(LinkConfig(coordinator=endpoint, key=new, server_key=server_pub)) as (_, delivered):
            wait_for(delivered, msg.Welcome)


def test_a_session_goes_on_when_the_nodes_other_key_is_revoked(endpoint: str, tmp_path: Path) -> None:
    """That of the revoked one ends with its next frame: unit/coordinator/test_router.py."""
    server_key, server_pub = key_files(tmp_path / "server", "coordinator")
    (_, old_pub), (new, new_pub) = (key_files(tmp_path / name, "a") for name in ("old", "new"))
    (tmp_path / "allow").mkdir()
    (tmp_path / "allow" / "a.pub").write_bytes(old_pub.read_bytes() + new_pub.read_bytes())
    config = LinkConfig(coordinator=endpoint, key=new, server_key=server_pub)
    with station(endpoint, key=server_key, allow=tmp_path / "allow"), linked(config) as (_, delivered):
        wait_for(delivered, msg.Welcome)
        new_pub.replace(tmp_path / "allow" / "a.pub")
        with pytest.raises(queue.Empty):
            delivered.get(timeout=2.5)


def test_a_coordinator_that_hangs_up_after_a_session_is_not_told_as_a_wrong_key(endpoint: str) -> None:
    """As one that is ending does: its port takes connections a little longer."""
    with linked(LinkConfig(coordinator=endpoint)) as (_, delivered):
        with station(endpoint):
            wait_for(delivered, msg.Welcome)
        wait_for(delivered, wire_ev.SessionClosed)
        with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as listener:
            listener.accept()[0].close()
            for _ in range(3):
                closed = wait_for(delivered, wire_ev.SessionClosed)
                if "hangs up" in closed.detail:
                    break
        assert "it is ending" in closed.detail


def test_an_outage_is_told_of_again_once_in_a_while(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who looks at the end of a log must find it, and what to check."""
    monkeypatch.setattr("farloop.node.link.REPEAT_S", 0.5)
    with linked(LinkConfig(coordinator=endpoint)) as (_, delivered):
        deadline = time.monotonic() + 30.0
        while len(told := [r for r in caplog.records if "no link" in r.message]) < 2 and time.monotonic() < deadline:
            wait_for(delivered, wire_ev.SessionClosed)
    assert len(told) >= 2 and all("is the coordinator running" in record.message for record in told)
    assert told[1].created - told[0].created >= 0.5


def test_a_host_without_an_address_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """ZeroMQ would look for it in silence, for ever."""
    with linked(LinkConfig(coordinator="tcp://no-such-host.invalid:7700")):
        deadline = time.monotonic() + 12
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
    [record] = [record for record in caplog.records if "no link" in record.message]
    assert "no-such-host.invalid" in record.message and record.levelno == logging.WARNING


def test_a_socket_that_fails_ends_the_session_and_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a task must not vanish: the session would be deaf until its time-out."""
    with station(endpoint), linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        wait_for(delivered, msg.Welcome)

        send = zmq.asyncio.Socket.send_multipart

        def fail(dealer_or_router: zmq.asyncio.Socket, *arguments: Any, **options: Any) -> Any:
            if dealer_or_router.type == zmq.DEALER:
                raise zmq.ZMQError(errno.ENOTSOCK)
            return send(dealer_or_router, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(zmq.asyncio.Socket, "send_multipart", fail)
            link.send(msg.Ready())
            closed = wait_for(delivered, wire_ev.SessionClosed)
            assert "Socket operation on non-socket" in closed.detail
        wait_for(delivered, msg.Welcome)


def test_a_bug_in_the_thread_reaches_the_one_who_waits_for_it(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the link can still be called and closed."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    with station(endpoint), linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        assert link._link is not None
        monkeypatch.setattr(link._link._session, "outgoing", broken)
        link.send(msg.Ready())
        failed = wait_for(delivered, LinkFailed)
        assert isinstance(failed.error, RuntimeError)
        assert "RuntimeError: a bug" in str(failed)
        monkeypatch.undo()
        link.send(msg.Ready())
        assert link.flushed(1.0)


def test_closing_is_quick_and_calls_after_it_do_nothing(endpoint: str) -> None:
    with station(endpoint), linked(LinkConfig(coordinator=endpoint)) as (link, delivered):
        wait_for(delivered, msg.Welcome)
        started = time.monotonic()
        link.close()
        link.close()
        link.send(msg.Ready())
        assert link.flushed(5.0)
        assert time.monotonic() - started < 4.0
    never_started = LinkThread(LinkConfig(coordinator=endpoint))
    never_started.close()
