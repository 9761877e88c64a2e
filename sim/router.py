"""The coordinator's end of all connections: what `coordinator/net/router.py` does with its socket, without one."""

from collections.abc import Callable
from dataclasses import dataclass

from farloop.sim.network import Connection, Frame, Side
from farloop.sim.virtual_time import Process
from farloop.wire.events import SessionEvent
from farloop.wire.frames import parse_control
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Hello, LaneHello, decode
from farloop.wire.reasons import OutOfBounds, Reason, RemoteProtocolError
from farloop.wire.session import Role, Session, State

BAD_FRAMES = 8
"""Frames in a row that break the protocol before the session is ended."""

Route = tuple[Connection, int]
"""A lane of a connection: to the coordinator each is a stranger until its first frame."""


@dataclass(slots=True)
class Peer:
    """One session and its lanes."""

    number: int
    session: Session
    token: bytes
    routes: dict[int, Route]
    bad_frames: int = 0
    timer: float | None = None
    """When its next wake-up is due."""


class Router:
    """All sessions of one start of the coordinator; `on_event` is called for everything that happens."""

    def __init__(
        self, process: Process, on_event: Callable[[Peer, SessionEvent], None], limits: Limits, timing: Timing
    ) -> None:
        self._process, self._on_event, self._limits, self._timing = process, on_event, limits, timing
        self._peers: dict[int, Peer] = {}
        self._lanes: dict[tuple[int, int], tuple[Peer, int]] = {}
        """(id of the connection, lane of the connection) → (peer, lane of the session)."""
        self._tokens: dict[bytes, Peer] = {}
        self._next_peer = 1

    @property
    def _now(self) -> float:
        return self._process.now

    def accept(self, connection: Connection) -> None:
        """A node has connected."""
        connection.deliver[Side.COORDINATOR] = lambda lane, frame: self._take(connection, lane, frame)

    def flush(self, peer: Peer) -> None:
        """Let out what the peer's session wants to send. To be called after every use of it."""
        self._emit(peer)
        while frames := peer.session.outgoing(self._now):
            for lane, parts in frames:
                connection, number = peer.routes[lane]
                if not connection.send(Side.COORDINATOR, number, parts):
                    peer.session.close(Reason.CLOSED, "the node's connection is gone")
        self._emit(peer)
        peer.session.check()
        if peer.session.state is State.CLOSED:
            self._forget(peer)
        else:
            self._arm(peer)

    def closed_by_us(self, peer: Peer, reason: Reason) -> None:
        """End a session without a word."""
        peer.session.close(reason, reason.sentence)
        self.flush(peer)

    # --- inbound

    def _take(self, connection: Connection, number: int, frame: Frame) -> None:
        found = self._lanes.get((id(connection), number)) or self._meet(connection, number, frame)
        if found is None:
            return
        peer, lane = found
        try:
            peer.session.receive(lane, frame, self._now)
        except RemoteProtocolError as error:
            peer.bad_frames += 1
            if peer.bad_frames >= BAD_FRAMES or isinstance(error, OutOfBounds):
                return self.closed_by_us(peer, Reason.MALFORMED)
        else:
            peer.bad_frames = 0
        self.flush(peer)

    def _meet(self, connection: Connection, number: int, frame: Frame) -> tuple[Peer, int] | None:
        """The first frame of a lane: a greeting begins a session, a token joins one, and anything else is nothing."""
        try:
            message = decode(parse_control(frame, self._limits).body)
        except RemoteProtocolError:
            return None
        if isinstance(message, Hello):
            return self._new_session(connection, number)
        peer = self._tokens.pop(message.lane_token, None) if isinstance(message, LaneHello) else None
        if peer is None:
            return None
        lane = max(peer.routes) + 1
        peer.routes[lane] = (connection, number)
        self._lanes[id(connection), number] = (peer, lane)
        peer.session.lane_opened(lane)
        self.flush(peer)
        return None

    def _new_session(self, connection: Connection, number: int) -> tuple[Peer, int]:
        session = Session(Role.COORDINATOR, self._now, limits=self._limits, timing=self._timing)
        token = self._next_peer.to_bytes(16)
        peer = Peer(self._next_peer, session, token, {0: (connection, number)})
        self._next_peer += 1
        self._peers[peer.number] = peer
        self._tokens[token] = peer
        self._lanes[id(connection), number] = (peer, 0)
        return peer, 0

    # --- outbound, and time

    def _emit(self, peer: Peer) -> None:
        for event in peer.session.events():
            self._on_event(peer, event)

    def _forget(self, peer: Peer) -> None:
        self._peers.pop(peer.number, None)
        self._tokens.pop(peer.token, None)
        for connection, number in peer.routes.values():
            self._lanes.pop((id(connection), number), None)

    def _arm(self, peer: Peer) -> None:
        due = peer.session.next_timer()
        if due is None or (peer.timer is not None and peer.timer <= due):
            return
        peer.timer = due
        self._process.after(max(0.0, due - self._now), lambda: self._wake(peer, due))

    def _wake(self, peer: Peer, due: float) -> None:
        if peer.timer != due or peer.session.state is State.CLOSED:
            return
        peer.timer = None
        peer.session.handle_timer(self._now)
        self.flush(peer)
