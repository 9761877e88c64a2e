"""Who is connected: sessions, the lanes that belong to them, and whose first frame may begin one. No socket here.

A lane is a stranger until its first frame. That is a greeting, which begins a session, or the token of a session that
is open, which joins it; anything else leaves no trace but a number that is counted up (protocol T, U).
"""

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from farloop.algo.spec import NodeId
from farloop.coordinator.gate import SESSIONS_OF_A_KEY, Gate
from farloop.wire.errors import RemoteProtocolError
from farloop.wire.frames import Buffer, ControlFrame, parse_control
from farloop.wire.handshake import Role
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Hello, LaneHello, Refused, decode, encode
from farloop.wire.reasons import Reason
from farloop.wire.session import Session


@dataclass(frozen=True, slots=True)
class Unread:
    """An intact first frame whose message cannot be read here: its sender's version of farloop may be another."""

    why: str

    def answer(self) -> list[Buffer]:
        """The frame that tells its sender: there is no session that could."""
        refused = Refused(reason=Reason.MALFORMED, detail=self.why, retriable=True)
        return ControlFrame(run=0, epoch=0, seq=0, ack=1, body=encode(refused)).parts()


@dataclass(slots=True)
class Lane:
    """One ZeroMQ peer."""

    peer: "Peer"
    number: int
    backlog: deque[list[Buffer]] = field(default_factory=deque)
    """Frames that its full pipe did not take."""


@dataclass(slots=True)
class Peer:
    """One session and its lanes."""

    number: int
    session: Session
    owner: NodeId | None
    """Whose key it is; None in the clear."""
    who: str
    """The owner; in the clear the name that the greeting claims, and the address."""
    counted_as: str
    """Against whose number of sessions it counts: the owner's, or in the clear the address's."""
    token: bytes
    routes: dict[int, bytes]
    """Lane number → ROUTER's id of it."""
    descriptors: set[int] = field(default_factory=set)
    """Of the connections that its lanes' first frames came by."""
    bad_frames: int = 0
    """In a row."""
    dismissed: bool = False
    """Whether nothing that it says is heard any more."""
    parted: bool = False
    """Whether the end of its session was handed on."""
    arrived_bytes: int = 0
    """Of what was sent to it, when that was last looked at ..."""
    live_bytes: int = 0
    """... those on their way that it may be waiting for ..."""
    background_bytes: int = 0
    """... and the others."""
    bulk_descriptor: tuple[int, str] | None = None
    """File descriptor of the connection that carries its blobs, as of its first frame, and the host at its other end.
    It may be another socket's by now (`monitoring/connection.py`)."""


class Peers:
    """All sessions of one start of the coordinator."""

    def __init__(self, gate: Gate, limits: Limits, timing: Timing, turned_away: Callable[[Reason, str], None]) -> None:
        """`turned_away` hears of every first frame that led nowhere: why, and whose it was."""
        self._gate, self._limits, self._timing, self._turned_away = gate, limits, timing, turned_away
        self._peers: dict[int, Peer] = {}
        self._lanes: dict[bytes, Lane] = {}
        self._tokens: dict[bytes, Peer] = {}
        self._descriptors: Counter[int] = Counter()
        """How many sessions speak by the connection with this descriptor: one, or for a moment the next one, too."""
        self._next = 1

    def __iter__(self) -> Iterator[Peer]:
        """As they are now: sessions may end while they are gone through."""
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def lane(self, route: bytes) -> Lane | None:
        """The lane of a session that this ROUTER id stands for."""
        return self._lanes.get(route)

    def speaks_by(self, peer: Peer, descriptor: int) -> None:
        """A lane of the session is on the connection with this descriptor."""
        if descriptor not in peer.descriptors:
            peer.descriptors.add(descriptor)
            self._descriptors[descriptor] += 1

    def is_spoken_by(self, descriptor: int) -> bool:
        """Whether a session speaks by the connection with this descriptor."""
        return descriptor in self._descriptors

    @property
    def is_held_up(self) -> bool:
        """Whether a full pipe did not take some frame."""
        return any(lane.backlog for lane in self._lanes.values())

    def meet(
        self, route: bytes, parts: Sequence[Buffer], owner: NodeId | None, address: str, now: float
    ) -> Lane | Peer | Unread | None:
        """The first frame of a lane.

        Returns:
            The control lane of a new session, which must yet receive the frame; the session that the lane has joined;
            what cannot be read, where its sender is to hear of that; or None: it came to nothing, and is forgotten.
        """
        message, unread = None, None
        try:
            frame = parse_control(parts, self._limits)
            try:
                message = decode(frame.body)
            except RemoteProtocolError as error:
                unread = Unread(str(error))
        except RemoteProtocolError:
            pass
        match message:
            case LaneHello(lane_token=token):
                peer = self._tokens.get(token)
                if peer is not None and peer.owner == owner:
                    return self._join(route, peer)
                self._turned_away(Reason.MALFORMED, owner or address)
            case Hello(node=name):
                who, where = (owner, None) if owner is not None else (name, address)
                refused = self._gate.greets(who, where, now)
                if refused is None:
                    return self._begin(route, owner, who if where is None else f"{who} at {where}", where, now)
                self._turned_away(refused, owner or f"{name} at {address}")
            case _:
                self._turned_away(Reason.MALFORMED, owner or address)
                where = address if owner is None else None
                if unread is not None and self._gate.greets(owner or "unread", where, now) is None:
                    return unread
        return None

    def too_many_of(self, peer: Peer) -> list[Peer]:
        """The sessions of its owner that must make room for it, the oldest first."""
        if peer.owner is None:
            return []
        same = [other for other in self._peers.values() if other.owner == peer.owner]
        return sorted(same, key=lambda other: other.number)[:-SESSIONS_OF_A_KEY]

    def forget(self, peer: Peer) -> None:
        """Its session is over."""
        if self._peers.pop(peer.number, None) is None:
            return
        self._gate.ended(peer.counted_as)
        self._descriptors -= Counter(peer.descriptors)
        self._tokens.pop(peer.token, None)
        for route in peer.routes.values():
            self._lanes.pop(route, None)

    def _join(self, route: bytes, peer: Peer) -> Peer:
        del self._tokens[peer.token]  # each token binds once
        number = max(peer.routes) + 1
        peer.routes[number] = route
        self._lanes[route] = Lane(peer, number)
        peer.session.lane_opened(number)
        return peer

    def _begin(self, route: bytes, owner: NodeId | None, who: str, address: str | None, now: float) -> Lane:
        session = Session(Role.COORDINATOR, now, limits=self._limits, timing=self._timing)
        session.traffic.curve = owner is not None
        token, counted_as = secrets.token_bytes(16), address or who
        peer = Peer(self._next, session, owner, who, counted_as, token, {0: route})
        self._next += 1
        self._peers[peer.number] = self._tokens[token] = peer
        self._gate.begun(counted_as)
        lane = self._lanes[route] = Lane(peer, 0)
        return lane
