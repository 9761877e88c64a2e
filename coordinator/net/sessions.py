"""Sessions of connected nodes, and rate limits per key and address."""

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from farloop.algo.spec import NodeId
from farloop.monitoring.addresses import network_of
from farloop.runtime.ports import Route
from farloop.wire import messages as msg
from farloop.wire.frames import Buffer, parse_control
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Hello, LaneHello, Refused, Role, Trial, decode
from farloop.wire.outgoing import LinkKnown
from farloop.wire.reasons import Reason, RemoteProtocolError
from farloop.wire.session import Session
from farloop.wire.uplink import Uplink


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A token bucket: `burst` at once, then `per_s` each second."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """How often one key or address may ask, and how many sessions there may be.

    An honest node never reaches a limit, even when all nodes return at once after an outage. A greeting above the limit
    is ignored; its sender repeats it, and gets in as soon as the bucket has filled.
    """

    greetings_of_a_key: RateLimit = RateLimit(per_s=0.5, burst=10)
    """Sessions that one node may begin. A link that breaks every second is useless anyway."""
    greetings_of_an_address: RateLimit = RateLimit(per_s=32, burst=512)
    """Sessions that all nodes behind one address may begin if they have no keys. A site may have hundreds."""
    sessions_of_a_key: int = 2  # the open session and its successor; the oldest makes room for a third
    sessions_of_an_address: int = 512  # if nodes have no keys
    sessions: int = 1024  # in all
    lanes: int = 4096
    """Bulk lanes in all beyond the first of each session: each is a connection. The more of them there are, the fewer a
    new session is told that it may have."""
    lanes_of_a_session: RateLimit = RateLimit(per_s=1, burst=64)
    """Bulk lanes that a session may open, and open again."""
    messages: Mapping[type[msg.Message], RateLimit] = field(
        default_factory=lambda: MappingProxyType(
            {
                msg.Offer: RateLimit(per_s=500, burst=4096),
                msg.Placed: RateLimit(per_s=500, burst=4096),
                msg.Fetch: RateLimit(per_s=2, burst=1024),
                msg.Evaluation: RateLimit(per_s=2, burst=64),
                msg.Progress: RateLimit(per_s=20, burst=256),
                msg.Observed: RateLimit(per_s=20, burst=256),
                msg.Ready: RateLimit(per_s=2, burst=64),
            }
        )
    )
    """Messages of one node. A burst has room for all fragments; `data-parallel` offers a delta for every inner step."""


UNLIMITED: Final = RateLimits(
    greetings_of_a_key=RateLimit(per_s=1e9, burst=1e9),
    greetings_of_an_address=RateLimit(per_s=1e9, burst=1e9),
    sessions_of_an_address=1024,
    messages={},
)
"""For runs without hostile peers, such as simulations. The number of sessions stays bounded."""

_MAX_BUCKETS: Final = 4096
"""Beyond it, the bucket that was used longest ago is dropped, and counts as full again; and so is what is known of a
link."""


_MAX_ENDED: Final = 4096
"""Routes and tokens that are remembered after their sessions: what comes by them is late, and no stranger's."""

_SHARES: Final = 16
"""A new session may have this part of the lanes that are left, and the first one in any case."""


class Bucket:
    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: RateLimit, now: float) -> None:
        self._rate, self._level, self._at = rate, rate.burst, now

    def acquire(self, now: float) -> bool:
        """Take one token; False if there is none."""
        self._level = min(self._rate.burst, self._level + self._rate.per_s * max(0.0, now - self._at))
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


class RateLimiter:
    """Applies the limits. Peers with a key are counted by its owner, the others by their address (`network_of`)."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()
        self._sessions: Counter[str] = Counter()

    def greets(self, who: str, address: str | None, now: float) -> Reason | None:
        """Whether a new session may begin: None, or the reason why not. `who`: the key's owner, or without keys the
        name in the greeting. `address`: of a peer without a key; None for an owner."""
        limits = self.limits
        if self._sessions.total() >= limits.sessions:
            return Reason.CROWDED
        if address is None:
            return None if self._allows("greeting", who, limits.greetings_of_a_key, now) else Reason.TOO_OFTEN
        address = network_of(address)
        if self._sessions[address] >= limits.sessions_of_an_address:
            return Reason.CROWDED
        if not self._allows("greeting", f"{who} at {address}", limits.greetings_of_a_key, now):
            return Reason.TOO_OFTEN
        return None if self._allows("greetings", address, limits.greetings_of_an_address, now) else Reason.TOO_OFTEN

    def says(self, who: str, message: msg.Message, now: float) -> Reason | None:
        """Whether a message of an open session is accepted: None, or the reason why the session must end."""
        rate = self.limits.messages.get(type(message))
        if rate is None or self._allows(type(message).__name__, who, rate, now):
            return None
        return Reason.TOO_OFTEN

    def opens_lane(self, session: int, now: float) -> bool:
        """Whether a session may open another lane."""
        return self._allows("lane", str(session), self.limits.lanes_of_a_session, now)

    def begun(self, counted_as: str) -> None:
        self._sessions[counted_as] += 1

    def on_session_end(self, counted_as: str) -> None:
        self._sessions[counted_as] -= 1
        if not self._sessions[counted_as]:
            del self._sessions[counted_as]

    def _allows(self, what: str, who: str, rate: RateLimit, now: float) -> bool:
        key = (what, who)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(rate, now)
            if len(self._buckets) > _MAX_BUCKETS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket.acquire(now)


@dataclass(slots=True)
class Lane:
    """One route of the socket that belongs to a session."""

    peer: "Peer"
    number: int
    route: Route
    descriptor: int | None = None  # file descriptor of the connection that its first frame came by
    backlog: deque[Sequence[Buffer]] = field(default_factory=deque)  # frames that the full lane did not take


@dataclass(slots=True)
class Peer:
    number: int
    session: Session
    owner: NodeId | None  # the node whose key it uses; None without keys
    who: str  # the owner; without keys the name that the greeting claims, and the address
    counted_as: str  # what its session is counted by: the owner, or without keys the network of the address
    token: bytes  # what the first frame of a further lane must hold
    lanes: dict[int, Lane] = field(default_factory=dict)  # by number; 0 is control
    address: str = ""  # where it came from, without keys
    max_lanes: int = 1  # bulk lanes that it may have
    node: NodeId | None = None
    """The member whose session this is: set once it is accepted, None again when the session is dropped."""
    due: float | None = None  # when its session's next timer is due
    queued: float | None = None  # when the router looks at that again; no later
    bad_frames: int = 0  # in a row
    ended_by: Reason | None = None  # why its session ended, once that was reported
    connection: tuple[int, str] | None = None
    """File descriptor and host of the newest of its connections, which carries blobs once it has any that does, as of
    its first frame. The descriptor may belong to another socket by now (`monitoring/tcp_connection.py`)."""


class Peers:
    """All sessions of one start of the coordinator. A route belongs to no session until its first frame: a greeting
    begins one, the token of an open session joins the route to it. Anything else leaves only counters."""

    def __init__(
        self,
        rates: RateLimits,
        limits: Limits,
        timing: Timing,
        turned_away: Callable[[Reason, str], None],
        new_token: Callable[[], bytes] | None = None,
        uplink: Uplink | None = None,
    ) -> None:
        """`turned_away` is called with the reason and the sender of every first frame that is rejected."""
        self.rates = RateLimiter(rates)
        self._limits, self._timing, self._turned_away = limits, timing, turned_away
        self._uplink = uplink
        self._new_token = new_token or partial(secrets.token_bytes, 16)
        self._peers: dict[int, Peer] = {}
        self._lanes: dict[Route, Lane] = {}
        self._tokens: dict[bytes, Peer] = {}
        self._ended: OrderedDict[Route, str] = OrderedDict()
        """Whose routes and tokens they were that belong to no session any more."""
        self._descriptors: Counter[int] = Counter()
        """How many sessions use the connection with this descriptor: one, or for a moment its successor, too."""
        self._further_lanes = 0  # that open sessions may have beyond the first of each
        self._next = 1
        self._known: OrderedDict[str, LinkKnown] = OrderedDict()  # what the last session of each saw of its link

    def __iter__(self) -> Iterator[Peer]:
        """As of now: sessions may end during the iteration."""
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def lane(self, route: Route) -> Lane | None:
        return self._lanes.get(route)

    def use(self, lane: Lane, descriptor: int) -> None:
        """The lane is on the connection with this descriptor."""
        if lane.descriptor is None:
            lane.descriptor = descriptor
            self._descriptors[descriptor] += 1

    def is_used(self, descriptor: int) -> bool:
        return descriptor in self._descriptors

    def on_first_frame(
        self, route: Route, parts: Sequence[Buffer], owner: NodeId | None, address: str, now: float
    ) -> Lane | Refused | Trial | None:
        """The control lane of a new session, which must yet receive the frame; the bulk lane of a session that the
        route became; what its sender is told of a frame that begins no session: a trial, or that its message cannot be
        decoded, for it may run another version; or None: the frame is rejected, and the route forgotten."""
        message: msg.Message | None = None
        answer: Refused | Trial | None = None
        try:
            frame = parse_control(parts, self._limits)
            try:
                message = decode(frame.body)
            except RemoteProtocolError as error:
                answer = Refused(reason=Reason.MALFORMED, detail=str(error), retriable=True)
        except RemoteProtocolError:
            pass
        match message:
            case LaneHello(lane_token=token, number=number):
                peer = self._tokens.get(token)
                if peer is not None and peer.owner == owner and self._may_join(peer, number, address):
                    if self.rates.opens_lane(peer.number, now):
                        if number in peer.lanes:
                            self.lane_lost(peer, number)
                        lane = self._add_lane(peer, number, route)
                        peer.session.lane_opened(number)
                        return lane
                    self._turned_away(Reason.TOO_OFTEN, owner or address)
                elif not self._is_late(token):
                    self._turned_away(Reason.MALFORMED, owner or address)
            case Hello(node=name):
                who, where = (owner, None) if owner is not None else (name, address)
                refused = self.rates.greets(who, where, now)
                if refused is None:
                    return self._begin(route, owner, who if where is None else f"{who} at {where}", where, now)
                self._turned_away(refused, owner or f"{name} at {address}")
            case Trial():
                answer = message
            case _ if self._is_late(route):
                return None
            case _:
                self._turned_away(Reason.MALFORMED, owner or address)
        where = address if owner is None else None
        return answer if answer and self.rates.greets(owner or "unread", where, now) is None else None

    def _is_late(self, key: Route) -> bool:
        """Whether a route or token was that of a session that ended lately; then its frame is counted as such."""
        if (who := self._ended.get(key)) is not None:
            self._turned_away(Reason.ENDED, who)
        return who is not None

    def _remember(self, key: Route, peer: Peer) -> None:
        self._ended[key] = peer.who if peer.ended_by is None else f"{peer.who} ({peer.ended_by.code})"
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def too_many_of(self, peer: Peer) -> list[Peer]:
        """The sessions of its owner that must make room for it, the oldest first."""
        if peer.owner is None:
            return []
        same = [other for other in self._peers.values() if other.owner == peer.owner]
        return sorted(same, key=lambda other: other.number)[: -self.rates.limits.sessions_of_a_key]

    def forget(self, peer: Peer) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        self._known[peer.who] = peer.session.transfers.known
        self._known.move_to_end(peer.who)
        if len(self._known) > _MAX_BUCKETS:
            self._known.popitem(last=False)
        self.rates.on_session_end(peer.counted_as)
        self._tokens.pop(peer.token, None)
        self._remember(peer.token, peer)
        self._further_lanes -= peer.max_lanes - 1
        for lane in peer.lanes.values():
            self._forget_lane(lane)

    def lane_lost(self, peer: Peer, number: int) -> None:
        """The connection of a bulk lane is gone; the session goes on without it."""
        self._forget_lane(peer.lanes.pop(number))
        peer.session.lane_lost(number)

    def _add_lane(self, peer: Peer, number: int, route: Route) -> Lane:
        lane = self._lanes[route] = peer.lanes[number] = Lane(peer, number, route)
        return lane

    def _forget_lane(self, lane: Lane) -> None:
        del self._lanes[lane.route]
        self._remember(lane.route, lane.peer)
        if lane.descriptor is not None:
            self._descriptors -= Counter([lane.descriptor])

    def _may_join(self, peer: Peer, number: int, address: str) -> bool:
        """Without keys, bulk lanes come from the address where the session began."""
        return 1 <= number <= peer.max_lanes and (peer.owner is not None or address == peer.address)

    def _begin(self, route: Route, owner: NodeId | None, who: str, address: str | None, now: float) -> Lane:
        max_lanes = min(self._limits.max_lanes, 1 + (self.rates.limits.lanes - self._further_lanes) // _SHARES)
        session = Session(
            Role.COORDINATOR,
            now,
            limits=replace(self._limits, max_lanes=max_lanes),
            timing=self._timing,
            share=lambda: self._limits.early_pool_bytes // max(1, len(self._peers)),
            known=self._known.get(who),
            uplink=self._uplink,
        )
        session.traffic.curve = owner is not None
        token, counted_as = self._new_token(), network_of(address) if address else who
        peer = Peer(self._next, session, owner, who, counted_as, token, address=address or "", max_lanes=max_lanes)
        self._further_lanes += max_lanes - 1
        self._next += 1
        self._peers[peer.number] = self._tokens[token] = peer
        self.rates.begun(counted_as)
        return self._add_lane(peer, 0, route)
