"""Who is connected, and the limits per key and address: requests, connections, sessions."""

import errno
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from farloop.algo.spec import NodeId
from farloop.wire import messages as msg
from farloop.wire.frames import Buffer, ControlFrame, parse_control
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Hello, LaneHello, Refused, decode, encode
from farloop.wire.reasons import Reason, RemoteProtocolError
from farloop.wire.session import Role, Session

# --- How much one key, or one address, may ask of the coordinator, and how often.
#
# A token bucket each: an honest node never meets its bottom, however many of them come back at once after an outage.
# Who does is not punished: a greeting that is passed over is sent again by its session, and is heard once there is
# room.


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """So many at once, and so many a second from then on."""

    per_s: float
    burst: float


GREETINGS_OF_A_KEY: Final = RateLimit(per_s=0.5, burst=10)
"""Sessions that one node may begin. A link that breaks every second is as good as none."""

GREETINGS_OF_AN_ADDRESS: Final = RateLimit(per_s=32, burst=512)
"""... and all nodes behind one address, where nobody has a key. A site of hundreds comes back at once."""

SESSIONS_OF_A_KEY: Final = 2
"""One that is open and one that takes its place; the oldest makes room for a third."""

SESSIONS_OF_AN_ADDRESS: Final = 512
"""... where nobody has a key."""

SESSIONS: Final = 1024
"""Over all."""

_MESSAGES: Final[dict[type[msg.Message], RateLimit]] = {
    msg.Offer: RateLimit(per_s=500, burst=4096),
    msg.Fetch: RateLimit(per_s=2, burst=1024),
    msg.Evaluation: RateLimit(per_s=2, burst=64),
    msg.Progress: RateLimit(per_s=20, burst=256),
    msg.Observed: RateLimit(per_s=20, burst=256),
    msg.Ready: RateLimit(per_s=2, burst=64),
}
"""Of one node. The bursts are for all fragments at once; `data-parallel` offers one delta for every inner step."""

_REMEMBERED: Final = 4096
"""Buckets; beyond it the one that was asked longest ago is taken for full."""


class Bucket:
    """Fills at its rate up to its burst; each thing asked for takes one from it."""

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: RateLimit, now: float) -> None:
        self._rate, self._level, self._at = rate, rate.burst, now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Whether there was enough; nothing is taken otherwise."""
        self._level = min(self._rate.burst, self._level + self._rate.per_s * max(0.0, now - self._at))
        self._at = now
        if self._level < amount:
            return False
        self._level -= amount
        return True


class RateLimiter:
    """Of one coordinator. Whoever is known by a key is counted by it, whoever is not by the address."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()
        self._sessions: Counter[str] = Counter()

    def greets(self, who: str, address: str | None, now: float) -> Reason | None:
        """Whether a new session may be begun: None, or why not yet.

        Args:
            who: the key's owner, or where there are no keys the name in the greeting.
            address: of who has no key; None of an owner.
        """
        if self._sessions.total() >= SESSIONS:
            return Reason.CROWDED
        if address is None:
            return None if self._take("greeting", who, GREETINGS_OF_A_KEY, now) else Reason.TOO_OFTEN
        if self._sessions[address] >= SESSIONS_OF_AN_ADDRESS:
            return Reason.CROWDED
        if not self._take("greeting", f"{who} at {address}", GREETINGS_OF_A_KEY, now):
            return Reason.TOO_OFTEN
        return None if self._take("greetings", address, GREETINGS_OF_AN_ADDRESS, now) else Reason.TOO_OFTEN

    def says(self, who: str, message: msg.Message, now: float) -> Reason | None:
        """Whether a message of an open session is heard: None, or why the session must end."""
        rate = _MESSAGES.get(type(message))
        if rate is None or self._take(type(message).__name__, who, rate, now):
            return None
        return Reason.TOO_OFTEN

    def begun(self, counted_as: str) -> None:
        """A session of this owner or address has begun."""
        self._sessions[counted_as] += 1

    def ended(self, counted_as: str) -> None:
        """It is over."""
        self._sessions[counted_as] -= 1
        if not self._sessions[counted_as]:
            del self._sessions[counted_as]

    def sessions_of(self, counted_as: str) -> int:
        """How many there are."""
        return self._sessions[counted_as]

    def _take(self, what: str, who: str, rate: RateLimit, now: float) -> bool:
        key = (what, who)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(rate, now)
            if len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket.take(now)


# --- How many TCP connections the coordinator's port has, and which of them must go.
#
# ZeroMQ accepts everybody and closes nobody by itself but who does not finish its handshake in time. A connection costs
# a descriptor, and a process without one can neither write a file nor let anybody in. So there is a budget: those by
# which no session speaks are strangers, which are closed, the oldest first, where there are too many of them at one
# address or too many connections in all, and those that stay strangers for long.


STRANGERS_OF_AN_ADDRESS: Final = 256
"""Connections from one address by which no session speaks. A node is a stranger for its handshake: some round trips."""

STRANGER_S: Final = 30.0
"""A connection by which no session has spoken for so long is closed: a thin link takes seconds for a greeting."""

DEAD_TCP_MS = 60_000
"""A connection that acknowledges nothing for this long is closed: its peer is gone without a word (half-open)."""

HEARTBEAT_MS = 30_000
"""ZeroMQ asks each peer this often whether it is there, and hangs up ..."""

HEARTBEAT_TIMEOUT_MS = 120_000
"""... after this: an answer waits behind what a thin link has yet to carry. Sessions have a shorter time-out."""

LOOK_S = 5.0
"""Between two looks at connections by which nobody speaks."""

BACKLOG = 1024
"""Connections that the system keeps until ZeroMQ accepts them; it may keep fewer (net.core.somaxconn)."""

MOST: Final = 8192
"""Connections in all: twice those of as many sessions as there may be, and the strangers of some addresses."""

RESERVE: Final = 256
"""Descriptors that are left for files, pages and whatever else opens one."""

FEWEST: Final = 64
"""Connections in all, however few descriptors there are: a budget of none would serve nobody."""


class BindError(OSError):
    """The port cannot be had; one line for the person who chose it."""

    def __init__(self, endpoint: str, error: Exception) -> None:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            super().__init__(
                f"{endpoint} is in use; stop the other process, or choose another port in [coordinator] bind"
            )
        else:
            super().__init__(f"cannot bind {endpoint}: {error}; choose another address in [coordinator] bind")


def most_connections(descriptors: int | None) -> int:
    """The budget in all of a process that may open so many files; None: as many as it likes."""
    return MOST if descriptors is None else max(FEWEST, min(MOST, descriptors - RESERVE))


@dataclass(slots=True)
class Connection:
    """One that ZeroMQ has accepted."""

    descriptor: int
    host: str
    """Of its other end; with `port`, what tells it from another one that has its descriptor later."""
    port: int
    spoken_at: float
    """When a session last spoke by it, or it was accepted."""


class Connections:
    """Of one start of the coordinator."""

    def __init__(self, most: int, is_spoken_by: Callable[[int], bool]) -> None:
        """`is_spoken_by`: whether a session that is open speaks by the connection with this descriptor."""
        self.most, self._is_spoken_by = most, is_spoken_by
        self._open: dict[int, Connection] = {}
        """By descriptor."""
        self._strangers: dict[str, OrderedDict[int, Connection]] = {}
        """Host → those of `_open` by which no session spoke when that was last looked at, the oldest first."""
        self._hung_up: set[int] = set()
        """Told to go: ZeroMQ has yet to say that they have."""

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int, host: str, port: int, now: float) -> Connection | None:
        """ZeroMQ has accepted one. The one that must go for it, if any."""
        self.ended(descriptor)
        self._open[descriptor] = new = Connection(descriptor, host, port, now)
        self._keep_as_stranger(new)
        going = None
        if len(self._strangers[host]) > STRANGERS_OF_AN_ADDRESS:
            going = self._oldest_stranger(host)
        if going is None and len(self._open) - len(self._hung_up) > self.most:
            going = self._oldest_stranger(self._host_of_most())
        if going is not None:
            self._hung_up.add(going.descriptor)
        return going

    def ended(self, descriptor: int) -> None:
        """ZeroMQ has let one go."""
        if connection := self._open.pop(descriptor, None):
            self._no_stranger(connection)
        self._hung_up.discard(descriptor)

    def look(self, now: float) -> list[Connection]:
        """Those by which nobody has spoken for too long. To be called every few seconds."""
        going = []
        for connection in self._open.values():
            if connection.descriptor in self._hung_up:
                continue
            if self._is_spoken_by(connection.descriptor):
                connection.spoken_at = now
                self._no_stranger(connection)
            elif now - connection.spoken_at > STRANGER_S:
                self._no_stranger(connection)
                going.append(connection)
            else:
                self._keep_as_stranger(connection)
        self._hung_up |= {connection.descriptor for connection in going}
        return going

    def check(self) -> None:
        """Assert the invariants."""
        strangers = [descriptor for those in self._strangers.values() for descriptor in those]
        assert len(strangers) == len(set(strangers))
        assert set(strangers) <= self._open.keys() - self._hung_up
        assert self._hung_up <= self._open.keys()
        assert all(self._strangers.values()), "no empty entry is kept"

    def _keep_as_stranger(self, connection: Connection) -> None:
        self._strangers.setdefault(connection.host, OrderedDict())[connection.descriptor] = connection

    def _no_stranger(self, connection: Connection) -> None:
        those = self._strangers.get(connection.host, OrderedDict())
        those.pop(connection.descriptor, None)
        if not those:
            self._strangers.pop(connection.host, None)

    def _oldest_stranger(self, host: str) -> Connection | None:
        """None where sessions speak by all of them by now."""
        self._look_at(host)
        if host not in self._strangers:
            return None
        connection = next(iter(self._strangers[host].values()))
        self._no_stranger(connection)
        return connection

    def _host_of_most(self) -> str:
        """Empty where there are no strangers."""
        while self._strangers:
            host = max(self._strangers, key=lambda host: len(self._strangers[host]))
            num_strangers = len(self._strangers[host])
            self._look_at(host)
            if len(self._strangers.get(host, ())) == num_strangers:
                return host
        return ""

    def _look_at(self, host: str) -> None:
        """Forget those by which sessions speak by now."""
        for connection in list(self._strangers.get(host, OrderedDict()).values()):
            if self._is_spoken_by(connection.descriptor):
                self._no_stranger(connection)


# --- Who is connected: sessions, the lanes that belong to them, and whose first frame may begin one. No socket here.
#
# A lane is a stranger until its first frame. That is a greeting, which begins a session, or the token of a session that
# is open, which joins it; anything else leaves no trace but a number that is counted up (protocol T, U).


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
    It may be another socket's by now (`monitoring/tcp_connection.py`)."""


class Peers:
    """All sessions of one start of the coordinator."""

    def __init__(
        self, gate: RateLimiter, limits: Limits, timing: Timing, turned_away: Callable[[Reason, str], None]
    ) -> None:
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
