"""The node's session with the coordinator: dial, back off, upload, download, measure."""

import contextlib
import dataclasses
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Self

from farloop.algo.spec import BlobId, BlobKind
from farloop.monitoring.addresses import check_source, parse_each_tcp
from farloop.monitoring.tcp_connection import check_congestion
from farloop.monitoring.units import Checked
from farloop.node.errors import Unreachable
from farloop.node.settings import NodeConfig
from farloop.runtime.ports import Buffer, Clock, Connection, Dialer, Moved, Objects, Timer
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, Reassembly, blob_digest
from farloop.wire.lanes import lanes_needed
from farloop.wire.limits import BACKOFF_S, BAD_FRAMES, Limits, Timing, check_lanes
from farloop.wire.link_measurement import DIGEST, LARGE_LOST, MTU_FIX, Noise, Sink, lacks_large, large_lost, parse
from farloop.wire.machine_info import NOTHING, Inventory
from farloop.wire.messages import MOST_SEEN, BytesByKind, Observed, Probe, Role, Seen
from farloop.wire.messages import Connection as ConnectionFacts
from farloop.wire.meter import HALF_LEAST_CHUNKS, enough
from farloop.wire.outgoing import LinkKnown
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, Reason, RemoteProtocolError
from farloop.wire.session import Session, State
from farloop.wire.uplink import Uplink, UplinkLimit

_log = logging.getLogger(__name__)

# --- Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig(Checked):
    """Settings of a link. Raises ValueError for half a pair of keys, too many lanes, and for a congestion control or an
    address out of reach."""

    coordinator: str
    """ZeroMQ address, as tcp://host:port; several with commas between them."""
    key: Path | None = None
    """This node's secret key file; CURVE is on with it."""
    server_key: Path | None = None
    """File of the coordinator's public keys; goes with `key`."""
    congestion: Annotated[str, check_congestion] = ""
    """Congestion control of its TCP connections, as `bbr`; the system's unless given."""
    lanes: Annotated[int, check_lanes] = 0
    """Connections that carry blobs; 0: as many as the link is measured to need."""
    bulk_source: str = ""
    """Address of this machine from which bulk lanes leave; the system's choice unless given. It needs keys."""
    uplink: UplinkLimit = field(default_factory=UplinkLimit)
    """What it may send."""
    inventory: Inventory = NOTHING
    """What it tells of its machine."""
    give_up_s: float = 0.0
    """Seconds without a session after which the link delivers Unreachable; 0: never."""
    kept: Path | None = None
    """File for what is known of the link, so that the first blobs of the next start fill it."""

    @classmethod
    def of(cls, config: NodeConfig) -> Self:
        """By a node's settings. Raises ValueError."""
        return cls(
            coordinator=config.coordinator,
            key=config.key,
            server_key=config.server_key,
            congestion=config.congestion,
            lanes=config.lanes,
            bulk_source=config.bulk_source,
            uplink=config.uplink,
            give_up_s=config.give_up,
        )

    def __post_init__(self) -> None:
        if (self.key is None) != (self.server_key is None):
            raise ValueError("key and server_key go together: with one alone nothing would be encrypted")
        Checked.__post_init__(self)
        if self.bulk_source:
            try:
                for address in parse_each_tcp(self.coordinator):
                    check_source(self.bulk_source, address.host)
            except ValueError as error:
                raise ValueError(f"bulk_source: {error}") from None


# --- Traffic

NONE: Final = BytesByKind()


@dataclass(frozen=True, slots=True)
class Traffic:
    """All bytes, seen from the node."""

    up: BytesByKind = NONE
    down: BytesByKind = NONE

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.up + other.up, self.down + other.down)


# --- Bandwidth measurement
#
# The node sends and ends probes as the coordinator asks, and reports what arrived. Everything that arrives is a
# measurement (`wire/meter.py`). The coordinator judges the reports, because it knows the round trip.

LOOK_S = 5.0  # between two reports on the connection itself


class Probing:
    """Probes of one session."""

    def __init__(self) -> None:
        self._expected: Probe | None = None  # a probe that is coming down, or will
        self._over = False  # whether it has come, or was ended
        self._sending: BlobId | None = None
        self._told_at = float("-inf")

    def on_probe(self, session: Session, probe: Probe) -> None:
        if self._sending is not None:
            session.cancel(self._sending)
        if self._expected is not None:
            session.cancel(_blob(self._expected))
            session.transfers.meter.pop_bursts()
        self._sending, self._expected, self._over = None, None, False
        if probe.num_bytes <= 0:
            return
        if probe.upward:
            blob = self._sending = _blob(probe)
            offer = msg.Offer(blob=blob, size=probe.num_bytes, digest=DIGEST)
            with contextlib.suppress(AlreadyUnderWay, LimitReached):  # too many blobs as it is: none is due
                session.send_blob(offer, Noise(probe.num_bytes, seed=probe.number), background=True)
        else:
            self._expected = probe

    def on_offer(self, session: Session, offer: msg.Offer, now: float) -> None:
        probe = self._expected
        if probe is None or offer.blob.version != probe.number or not 0 < offer.size <= probe.num_bytes:
            return session.cancel(offer.blob)
        with contextlib.suppress(AlreadyUnderWay, LimitReached):  # offered twice; or others come first
            session.expect(offer.blob, offer.size, DIGEST, Sink(offer.size), now)

    def on_blob_end(self, blob: BlobId) -> None:
        """A probe arrived, was sent, or was cancelled."""
        if blob == self._sending:
            self._sending = None
        elif self._expected is not None and blob == _blob(self._expected):
            self._over = True

    def report(self, session: Session) -> Observed | None:
        """End a probe that measured enough. Returns the report, if any."""
        if session.state is not State.OPEN:
            return None
        probe, burst = self._expected, session.transfers.meter.burst()
        if probe is not None and burst is not None and enough(burst, probe.rtt_s):
            session.cancel(_blob(probe))
            self._over = True
        bursts = [burst for burst in session.transfers.meter.pop_bursts() if burst.half_chunks >= HALF_LEAST_CHUNKS]
        if not bursts and not self._over:
            return None
        number = probe.number if probe is not None and self._over else 0
        if self._over:
            self._expected, self._over = None, False
        return Observed(links=(Seen(bursts=tuple(bursts[-MOST_SEEN:]), probe=number),))

    def is_due(self, now: float) -> bool:
        return now - self._told_at >= LOOK_S

    def connection(self, session: Session, told: ConnectionFacts | None, now: float) -> Observed | None:
        """A report from TCP_INFO of the bulk connection."""
        self._told_at = now
        if told is None or session.state is not State.OPEN:
            return None
        return Observed(links=(Seen(bulk=told),))


def _blob(probe: Probe) -> BlobId:
    return BlobId(kind=BlobKind.PROBE, fragment=0, version=probe.number)


# --- Downloads
#
# A transfer that broke off is resumed if the next session announces it again. A snapshot may replace updates, or an
# older snapshot, so not every blob is announced again. What a session did not ask for is dropped at its end.


class Downloads:
    """Blobs that have partly arrived, over all sessions."""

    def __init__(self) -> None:
        self._partial: dict[BlobId, Reassembly] = {}
        self._coming: set[BlobId] = set()  # of those, what the present session brings
        self._waiting: OrderedDict[BlobId, tuple[int, int]] = OrderedDict()
        """Announced while the session took no more at once: their size and digest."""

    def __len__(self) -> int:
        return len(self._partial)

    def announced(self, session: Session, blob: BlobId, size: int, digest: int, now: float) -> bool:
        """Take a blob from this session, from where an earlier one left off, or as soon as the session takes more;
        False where it is coming already.

        Whatever came before it in the order of versions and is not on its way will not come: of a fragment, updates
        are announced in order, and a snapshot stands for all before it, its own version included, on its way or not.
        """
        if session.state is not State.OPEN:  # this end has said good-bye
            return False
        if blob.kind is BlobKind.SNAPSHOT:
            self.give_up_updates(session, blob)
        try:
            reassembly = session.expect(blob, size, digest, self._partial.get(blob), now)
        except AlreadyUnderWay:  # announced twice: once by catch-up, once live
            return False
        except LimitReached:
            self._waiting[blob] = (size, digest)
            return True
        except LocalProtocolError as error:
            _log.warning("announced and not taken blob=%s reason=%r", blob, str(error))
            return False
        self._waiting.pop(blob, None)
        for other in [b for b in self._partial if b.fragment == blob.fragment and b.version < blob.version]:
            if other not in self._coming:
                del self._partial[other]
        self._partial[blob] = reassembly
        self._coming.add(blob)
        return True

    def on_blob_end(self, session: Session, blob: BlobId, now: float) -> None:
        """A blob is complete, good or bad. Waiting ones may start."""
        self._partial.pop(blob, None)
        self._coming.discard(blob)
        for waited, (size, digest) in list(self._waiting.items()):
            self.announced(session, waited, size, digest, now)
            if waited in self._waiting:
                break

    def on_session_end(self) -> None:
        """Keep only what this session was bringing."""
        self._partial = {blob: reassembly for blob, reassembly in self._partial.items() if blob in self._coming}
        self._coming.clear()
        self._waiting.clear()

    def give_up_updates(self, session: Session, snapshot: BlobId) -> None:
        def holds(blob: BlobId) -> bool:
            same = blob.kind is BlobKind.UPDATE and blob.fragment == snapshot.fragment
            return same and blob.version <= snapshot.version

        for blob in [blob for blob in self._waiting if holds(blob)]:
            del self._waiting[blob]
        for blob in [blob for blob in self._coming if holds(blob)]:
            session.cancel(blob)
            self._coming.discard(blob)
            del self._partial[blob]


UNANSWERED = (
    "it takes the connection and does not answer: it is busy, or of another version, or large packets are lost, which "
    "farloop doctor tries"
)
UNREACHABLE = "no answer: is the coordinator running, and its port open from here?"
REPEAT_S = 30.0  # an outage is logged when it begins, and again this often: somebody may have to act

EAGER_S, EAGER_FOR_S = 0.6, 30.0
"""Longest pause between two attempts in the first seconds of an outage, before it is jittered by a half."""

OLD_LEADER_S = 600.0
"""A node that meets only coordinators with an older state, and none that leads, ends after so long."""

BAD_SESSIONS = 8
"""This many sessions in a row that end because one end does not understand the other, without a delta of this node
being stored in between, end the node: the next one would end the same way."""

CHUNKS_AHEAD = 4  # chunks handed to a lane at a time: the session cannot take back what is queued there
AHEAD_S = 540.0  # that a URL for a delta to come is good for: it lives 600
MOST_READS = 8  # objects that are read at a time: each has its memory
CONTROL = 0  # the lane of a session that carries no blobs

REVISE_S = 60.0  # the number of lanes changes at most this often
REOPEN_S = (1.0, 60.0)  # first and longest pause before a lane that was lost is opened again; it doubles


def patience_text(give_up_s: float) -> str:
    """For log lines: after how long without a session a node gives up."""
    return f"{give_up_s:g}s" if give_up_s else "never"


Greeting = Callable[[], msg.Hello]  # the first message of a session
Deliver = Callable[[wire_ev.SessionEvent | Exception], None]


class NodeLink:
    """Keeps a session with the coordinator open: dials, backs off, downloads, uploads, and measures the link.

    A session lives as long as its connection; when that is lost, the link dials again after a jittered pause. All calls
    and all callbacks of the ports come in one thread, in which `hello` and `deliver` are called too.
    """

    def __init__(
        self,
        config: LinkConfig,
        dialer: Dialer,
        clock: Clock,
        uniform: Callable[[float, float], float],
        *,
        limits: Limits | None = None,
        timing: Timing | None = None,
        objects: Objects | None = None,
        check: bool = False,
    ) -> None:
        """`uniform`: a random number between two. `objects`: what reaches an object store, if the coordinator names
        one. `check`: assert the session's invariants after every change."""
        self._config, self._dialer, self._clock, self._uniform = config, dialer, clock, uniform
        self._coordinator, self._give_up_s = config.coordinator.replace(" ", ""), config.give_up_s
        self._limits, self._timing = limits or Limits(), timing
        self.uplink = Uplink(config.uplink, clock.minute_of_day, clock.now()) if config.uplink else None
        self._known = None if config.kept is None else read_known(config.kept, config.coordinator)
        self._check = check
        self._hello: Greeting
        self._deliver: Deliver
        self._session: Session | None = None
        self._connection: Connection | None = None
        self._traffic: tuple[Traffic, Session | None] = (Traffic(), None)
        """Of past sessions, and the present one; replaced as a whole: other threads read it."""
        self._downloads, self._probing = Downloads(), Probing()
        self._objects = objects
        self._writing: dict[BlobId, str] = {}  # deltas that are on their way to the store, and by what URL
        self._wrote_ahead = set[BlobId]()
        """Of this session, deltas whose URL came ahead: no later session asks for that object."""
        self._places: dict[BlobId, str] = {}  # URLs of what is to be announced
        self._ahead: dict[int, tuple[msg.Place, float]] = {}  # by fragment, for the next delta, and when it came
        self._reading: dict[BlobId, bytearray] = {}  # what is on its way from the store
        self._to_read: dict[BlobId, Callable[[], None]] = {}  # what waits for those to end
        self._fixed_lanes, self._wanted_lanes = config.lanes, max(1, config.lanes)
        self._revised_at = float("-inf")  # when the number of lanes last changed
        self._bulk = False  # whether bulk lanes were asked for, as they are once the session is open
        self._greeting: set[int] = set()  # bulk lanes that are being opened
        self._bulk_open: dict[int, float] = {}  # ... and those that take frames, with when each was opened
        self._lost_lanes: dict[int, int] = {}  # bulk lane → how often in a row it was lost
        self._reopens: dict[int, Timer] = {}  # ... and when it is opened again
        self._bad_frames: dict[int, int] = {}  # in a row, of each lane
        self._timer: tuple[float, Timer] | None = None  # the session's next one, and when it is due
        self._advancing = False
        self._attempt = 0  # sessions and attempts in a row that came to nothing
        self._away_since = self._logged_at = float("-inf")
        self._info, self._warned_at = b"", float("-inf")  # TCP_INFO at the last look; when lost packets were logged
        self._ended_by = ""  # why the last session, or attempt, ended
        self._held_by = self._held_logged = ""  # the same where the coordinator holds the run; what was logged of it
        self._old_since: float | None = None  # when a coordinator with an older state was met, and no leader since
        self._misunderstood = 0  # sessions in a row that ended because one end did not understand the other
        self._failed = False  # whether the last session ended by an error: the next one may, too, and the pause grows
        self._over = False  # no further session is wanted
        self.disk: tuple[int, int] | None = None  # bytes free for the state folder, and used by it, once measured

    def start(self, hello: Greeting, deliver: Deliver) -> None:
        """Begin to dial."""
        self._hello, self._deliver = hello, deliver
        self._away()
        self._dial()

    def close(self) -> None:
        self._over = True
        if self._session is not None:
            self._session.close(Reason.CLOSED, "this node stops")
            self._advance()

    @property
    def state(self) -> State | None:
        return None if self._session is None else self._session.state

    @property
    def moved(self) -> Traffic:
        past, session = self._traffic
        if session is None or not session.traffic.connections:
            return past
        return past + Traffic(session.traffic.sent, session.traffic.received)

    @property
    def num_lanes(self) -> int:
        """Bulk lanes that are open."""
        return len(self._bulk_open)

    def send(self, message: msg.Message) -> None:
        """Queue a message; dropped where no session is open: the next handshake tells all that matters."""
        self._send(message)
        self._advance()

    def send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        """Offer a delta; dropped where no session is open: it is offered again after the next Welcome."""
        session = self._session
        if session is None or session.state is not State.OPEN:
            return
        # A newer delta of a fragment takes the place of one that was not offered yet.
        for blob in session.transfers.waiting:
            if (blob.kind, blob.fragment) == (offer.blob.kind, offer.blob.fragment) and blob.seq < offer.blob.seq:
                session.cancel(blob)
        ahead = self._taken_ahead(session, offer)
        if ahead is not None:
            offer = dataclasses.replace(offer, ahead=ahead.ahead)
        try:
            session.send_blob(offer, BytesSource(data))
            if ahead is not None:
                self._wrote_ahead.add(offer.blob)
                self._write(offer.blob, ahead.url, data)
        except AlreadyUnderWay as error:  # offered twice, by a reconnection and by its encoder
            _log.debug("duplicate offer reason=%s", error)
        except LimitReached as error:
            self._behind(session, error)
        except LocalProtocolError as error:
            _log.warning("delta not offered blob=%s reason=%r", offer.blob, str(error))
        self._advance()

    # --- dialing

    def _dial(self) -> None:
        if not self._over:
            self._dialer.dial(self._dialed, self._not_dialed)

    def _dialed(self, connection: Connection) -> None:
        if self._over:
            return connection.close()
        now = self._clock.now()
        session = Session(
            Role.NODE, now, limits=self._limits, timing=self._timing, known=self._known, uplink=self.uplink
        )
        session.traffic.curve = self._config.key is not None
        session.send(dataclasses.replace(self._hello(), inventory=self._config.inventory), now)
        self._session, self._connection, self._traffic = session, connection, (self._traffic[0], session)
        self._bulk, self._bad_frames, self._failed, self._info = False, {}, False, b""
        connection.listen(self)
        self._advance()

    def _not_dialed(self, why: str) -> None:
        self._ended_by, self._held_by, self._failed = why, "", False
        self._dial_again(opened=False)

    def _dial_again(self, *, opened: bool) -> None:
        self._attempt = 0 if opened and not self._failed else self._attempt + 1
        if opened:
            self._away()
            self._logged_at = float("-inf")
        if self._over:
            return
        now = self._clock.now()
        if now - self._logged_at >= REPEAT_S or (self._held_by and self._held_by != self._held_logged):
            self._held_logged = self._held_by
            told = (self._coordinator, self._ended_by, now - self._away_since, patience_text(self._give_up_s))
            _log.warning("no link coordinator=%s reason=%r for=%.0fs give_up=%s", *told)
            self._logged_at = now
        first, longest = BACKOFF_S
        if now - self._away_since < EAGER_FOR_S and not self._failed:
            longest = min(longest, EAGER_S)  # most outages end soon, and each pause makes them longer
        pause_s = min(longest, first * 2.0 ** min(self._attempt, 10)) * self._uniform(0.5, 1.5)
        self._clock.call_later(pause_s, self._dial)

    def _away(self) -> None:
        """There is no session from now on."""
        self._away_since = since = self._clock.now()
        if 0.0 < self._give_up_s < float("inf"):
            self._clock.call_later(self._give_up_s, partial(self._give_up, since))

    def _give_up(self, since: float) -> None:
        if self._over or self._away_since != since or self.state is State.OPEN:
            return
        why = self._ended_by or "no answer yet; is its address right?"
        self.close()
        where = f"no session with the coordinator {self._coordinator} for {self._give_up_s:g} s"
        self._deliver(Unreachable(f"{where}, after which this node gives up (give_up): {why}"))

    # --- a session, as its connection reports

    def on_connected(self, lane: int) -> None:
        assert self._session is not None
        self._session.traffic.connected()

    def on_frame(self, lane: int, parts: Sequence[Buffer]) -> None:
        assert self._session is not None
        try:
            self._session.receive(lane, parts, self._clock.now())
        except RemoteProtocolError as error:
            self._bad_frames[lane] = self._bad_frames.get(lane, 0) + 1
            _log.warning("bad frame lane=%d reason=%r", lane, str(error))
            if self._bad_frames[lane] >= BAD_FRAMES:
                self._session.close(Reason.MALFORMED, str(error))
        except LimitReached as error:
            self._behind(self._session, error)
        else:
            self._bad_frames[lane] = 0
        self._advance()

    def on_ready(self, lane: int) -> None:
        """The lane has sent all it was given; of a bulk lane, its greeting first."""
        assert self._session is not None
        if lane in self._greeting and self._session.state is State.OPEN:
            self._greeting.remove(lane)
            self._bulk_open[lane] = self._clock.now()
            self._session.lane_opened(lane)
        self._advance()

    def on_lost(self, lane: int, why: str, *, key_refused: bool = False) -> None:
        """A session goes on without one of its bulk lanes, if there is another, and opens it again."""
        assert self._session is not None
        self._greeting.discard(lane)
        opened_at = self._bulk_open.pop(lane, None)
        if key_refused:
            self._over = True
            detail = "the coordinator does not know this node's key; add its .pub file to the allow-list"
            refused = msg.Refused(reason=Reason.WRONG_KEY, detail=detail, retriable=False)
            self._deliver(wire_ev.MessageReceived(message=refused))
        elif lane != CONTROL and self._bulk_open:
            self._session.lane_lost(lane)
            lasted = opened_at is not None and self._clock.now() - opened_at > REOPEN_S[1]
            times = self._lost_lanes[lane] = 1 if lasted else self._lost_lanes.get(lane, 0) + 1
            pause_s = min(REOPEN_S[1], REOPEN_S[0] * 2.0 ** min(times - 1, 10)) * self._uniform(0.5, 1.5)
            _log.info("lane lost lane=%d why=%r again_in=%.1fs", lane, why, pause_s)
            self._reopens[lane] = self._clock.call_later(pause_s, partial(self._reopen, lane))
            return self._advance()
        self._session.close(Reason.CLOSED, why)
        self._advance()

    def _reopen(self, lane: int) -> None:
        del self._reopens[lane]
        self._advance()

    # --- what the session wants

    def _advance(self) -> None:
        """Do all that is due: handle events, send, and end with the session. Call it after each use of the session."""
        session, connection = self._session, self._connection
        if session is None or connection is None or self._advancing:
            return
        self._advancing = True
        try:
            session.handle_timer(self._clock.now())
            while self._exchange(session, connection):
                pass
        finally:
            self._advancing = False
        if self._check:
            session.check()
        due = session.next_timer()
        if session.state is State.CLOSED:
            self._end(session, connection)
        elif due is not None and (self._timer is None or due < self._timer[0]):
            if self._timer is not None:
                self._timer[1].cancel()
            self._timer = due, self._clock.call_later(max(0.0, due - self._clock.now()), self._wake)

    def _exchange(self, session: Session, connection: Connection) -> bool:
        """Take the session's events, and send what its lanes take; whether anything was sent."""
        self._emit(session)
        if session.state is State.OPEN:
            self._open_lanes(session, connection)
        if session.state is State.CLOSED or not connection.is_ready(CONTROL):
            return False
        full = [lane for lane in self._bulk_open if not connection.is_ready(lane)]
        chunks = CHUNKS_AHEAD * (len(self._bulk_open) - len(full))
        frames = session.outgoing(self._clock.now(), max_chunks=chunks, full=full)
        for lane in sorted({to for to, _ in frames}):
            connection.send(lane, [parts for to, parts in frames if to == lane])
        return bool(frames)

    def _open_lanes(self, session: Session, connection: Connection) -> None:
        """Open the lanes that are wanted and not there. Those there are stay until the session ends."""
        if not self._bulk:
            self._bulk = True
            self._choose_lanes(session, None)
        for lane in range(1, min(self._wanted_lanes, session.max_lanes) + 1):
            if lane not in self._bulk_open and lane not in self._greeting and lane not in self._reopens:
                self._greeting.add(lane)
                connection.open_lane(lane, session.lane_hello(lane))

    def _choose_lanes(self, session: Session, kernel: ConnectionFacts | None) -> None:
        """Another number at most once a minute, from what the session has seen. Half as many more are worth opening;
        and half are enough if so few are needed when a session begins."""
        known, now = session.transfers.known, self._clock.now()
        rate = max(known.bytes_per_s, known.arriving_bytes_per_s)
        if self._fixed_lanes or rate == 0.0 or now - self._revised_at < REVISE_S:
            return
        needed, before = lanes_needed(rate, known.round_trip_s, kernel), self._wanted_lanes
        if needed >= 1.5 * before or (not self._bulk_open and needed <= before / 2):
            mbit = rate * 8 / 1e6
            _log.info("lanes chosen lanes=%d were=%d mbit=%.0f rtt_s=%.3f", needed, before, mbit, known.round_trip_s)
            self._wanted_lanes, self._revised_at = needed, now

    def _end(self, session: Session, connection: Connection) -> None:
        """The session is closed. One last frame may acknowledge the coordinator's Leave."""
        connection.close([parts for _, parts in session.outgoing(self._clock.now())])
        self._remember_link(session)
        self._downloads.on_session_end()
        for blob in self._wrote_ahead:
            self._writing.pop(blob, None)
        self._probing = Probing()
        self._session, self._connection, self._traffic = None, None, (self.moved, None)
        for timer in (self._timer and self._timer[1], *self._reopens.values()):
            if timer is not None:
                timer.cancel()
        self._timer = None
        for over in (self._places, self._ahead, self._wrote_ahead, self._reading, self._to_read):
            over.clear()
        for forgotten in (self._greeting, self._bulk_open, self._lost_lanes, self._reopens):
            forgotten.clear()
        self._dial_again(opened=self._bulk)

    def _wake(self) -> None:
        self._timer = None
        self._advance()

    def _send(self, message: msg.Message) -> None:
        session = self._session
        if session is None or session.state is not State.OPEN:
            return
        try:
            session.send(message, self._clock.now())
            self._over = self._over or isinstance(message, msg.Leave)
        except LimitReached as error:  # a message that is lost would be missed: the next session derives it again
            self._behind(session, error)
        except LocalProtocolError as error:
            _log.warning("not sent message=%s reason=%r", type(message).__name__, str(error))

    def _behind(self, session: Session, error: LimitReached) -> None:
        session.close(Reason.BEHIND, f"the coordinator takes no messages: {error}")

    # --- events of the session

    def _emit(self, session: Session) -> None:
        now = self._clock.now()
        for event in session.events():
            match event:
                case wire_ev.MessageReceived(message=msg.Probe() as probe):
                    self._probing.on_probe(session, probe)
                    continue
                case wire_ev.MessageReceived(message=msg.Offer(blob=BlobId(kind=BlobKind.PROBE)) as offer):
                    self._probing.on_offer(session, offer, now)
                    continue
                case (
                    wire_ev.BlobReceived(blob=BlobId(kind=BlobKind.PROBE) as blob)
                    | wire_ev.BlobSent(blob=BlobId(kind=BlobKind.PROBE) as blob)
                    | wire_ev.BlobDeclined(blob=BlobId(kind=BlobKind.PROBE) as blob)
                ):
                    self._probing.on_blob_end(blob)
                    continue
                case wire_ev.MessageReceived(message=msg.Place(blob=blob, url=url) as place):
                    if place.ahead:
                        self._ahead[blob.fragment] = place, now
                    elif blob.kind is BlobKind.DELTA:
                        if (source := session.transfers.source_of(blob)) is not None:  # else it is decided
                            self._write(blob, url, source.read(0, source.size))
                    else:
                        self._places[blob] = url
                    continue
                case wire_ev.MessageReceived(message=msg.Offer() as offer):
                    self._announced(session, offer.blob, offer.size, offer.digest, now)
                    continue
                case wire_ev.MessageReceived(message=msg.Committed() as committed):
                    self._announced(session, msg.update_id(committed), committed.size, committed.digest, now)
                case wire_ev.MessageReceived(message=msg.Welcome() as welcome) if self._is_old(welcome, now):
                    self._dialer.turn_away()
                    session.close(Reason.CLOSED, "another coordinator leads this run since")
                    continue
                case wire_ev.MessageReceived(
                    message=msg.Refused(retriable=False, newest=0) | msg.Leave(reason=Reason.OLD_INCARNATION)
                ):
                    self._over = True
                case wire_ev.BlobReceived(blob=blob) | wire_ev.BlobCorrupt(blob=blob):
                    self._downloads.on_blob_end(session, blob, now)
                    self._remember_link(session)
                case wire_ev.BlobSent():
                    self._remember_link(session)
                case wire_ev.MessageReceived(message=msg.Stored()):
                    self._misunderstood = 0
                case wire_ev.SessionClosed(reason=reason, detail=detail):
                    self._on_session_end(session, reason, detail)
                case _:
                    pass
            self._deliver(event)
        self._report(session, now)

    # --- the object store

    def _taken_ahead(self, session: Session, offer: msg.Offer) -> msg.Place | None:
        """Where to write a delta without waiting for the answer to its offer, which leaves at once."""
        place, came_at = self._ahead.get(offer.blob.fragment, (None, 0.0))
        if place is None or offer.blob.kind is not BlobKind.DELTA or place.blob.version != offer.window:
            return None
        del self._ahead[offer.blob.fragment]
        is_good = self._clock.now() - came_at < AHEAD_S
        return place if is_good and len(session.transfers.unacknowledged(BlobKind.DELTA)) < MOST_READS else None

    def _write(self, blob: BlobId, url: str, data: Buffer) -> None:
        """Write an offered delta to the store, and tell: of a failure, too, after which it goes by the session."""
        place = url.partition("?")[0]
        if self._writing.get(blob) == place:  # since an earlier session, and this one is told
            return
        if self._objects is None:
            return self._send(msg.Placed(blob=blob, detail="this node reaches no object store"))

        def over(why: str, moved: Moved) -> None:
            is_last = self._writing.get(blob) == place
            if is_last:
                del self._writing[blob]
            self._moved(BytesByKind(delta=moved[0]), BytesByKind(control=moved[1]))
            if why:
                _log.warning("delta not written to the object store blob=%s why=%r", blob, why)
            if is_last:
                self.send(msg.Placed(blob=blob, detail=why))

        self._writing[blob] = place
        self._objects.put(url, data, over)

    def _announced(self, session: Session, blob: BlobId, size: int, digest: int, now: float) -> None:
        """A blob comes by the session, or is to be read from the store."""
        if session.state is not State.OPEN:  # this end has said good-bye
            return
        if blob.kind is BlobKind.SNAPSHOT:  # it holds these
            for other in [b for b in (*self._reading, *self._to_read) if b.fragment == blob.fragment]:
                if other.version <= blob.version:
                    self._reading.pop(other, None)
                    self._to_read.pop(other, None)
            self._downloads.give_up_updates(session, blob)
        url = self._places.pop(blob, "")
        if not url or self._objects is None or not 0 < size <= self._limits.max_blob_bytes:
            if url:
                self._send(msg.Placed(blob=blob, detail="this node reaches no object store"))
            self._downloads.announced(session, blob, size, digest, now)
        elif blob not in self._reading:
            self._to_read[blob] = partial(self._read, self._objects, session, blob, url, size, digest)
            self._read_next()

    def _read_next(self) -> None:
        while self._to_read and len(self._reading) < MOST_READS:
            self._to_read.pop(next(iter(self._to_read)))()

    def _read(self, objects: Objects, session: Session, blob: BlobId, url: str, size: int, digest: int) -> None:
        into = self._reading[blob] = bytearray(size)

        def over(why: str, moved: Moved) -> None:
            self._moved(BytesByKind(control=moved[0]), BytesByKind(**{blob.kind.name.lower(): moved[1]}))
            if self._reading.get(blob) is not into:  # its session is over, or a snapshot holds it
                return self._read_next()
            del self._reading[blob]
            if session.state is State.OPEN:
                self._send(msg.Placed(blob=blob, detail=why))
            if why:
                _log.warning("not read from the object store blob=%s why=%r", blob, why)
                self._downloads.announced(session, blob, size, digest, self._clock.now())
            else:
                self._deliver(wire_ev.BlobReceived(blob=blob, data=into))
            self._read_next()
            self._advance()

        objects.get(url, into, lambda data: blob_digest(data) == digest, over)

    def _moved(self, up: BytesByKind, down: BytesByKind) -> None:
        past, session = self._traffic
        self._traffic = past + Traffic(up, down), session

    def _is_old(self, welcome: msg.Welcome, now: float) -> bool:
        """Whether it comes from a coordinator that led before, where there are others to try."""
        if not self._dialer.has_others or welcome.recalls or welcome.epoch >= self._hello().epoch_seen:
            self._old_since = None
            return False
        if self._old_since is None:
            self._old_since = now
            told = (self._coordinator, welcome.epoch, self._hello().epoch_seen)
            _log.warning("old leader coordinator=%s epoch=%d seen=%d note='trying the other addresses'", *told)
        return now - self._old_since < OLD_LEADER_S

    def _remember_link(self, session: Session) -> None:
        """Keep what is known of the link, if it has changed by more than measurements do."""
        old, new = self._known or LinkKnown(), session.transfers.known
        pairs = zip(dataclasses.astuple(old), dataclasses.astuple(new), strict=True)
        if any(not 0.7 * before <= after <= 1.4 * before for before, after in pairs):
            self._known = new
            if self._config.kept is not None:
                write_known(self._config.kept, self._config.coordinator, new)

    def _on_session_end(self, session: Session, reason: Reason, detail: str) -> None:
        self._ended_by = detail or reason.sentence
        self._held_by = self._ended_by if reason is Reason.HOLDING else ""
        self._failed = reason in (Reason.MALFORMED, Reason.FAULT)
        if reason is Reason.SILENT and self._dialer.has_others:
            self._dialer.turn_away()  # a process that is stopped still takes connections
        if reason is Reason.SILENT and not session.traffic.connections:
            self._ended_by = UNREACHABLE
        elif reason is Reason.SILENT and not self._bulk:
            info, _ = (self._connection and self._connection.kernel()) or (b"", "")
            self._ended_by += f"; {f'{LARGE_LOST}; {MTU_FIX}' if large_lost(info) or lacks_large(info) else UNANSWERED}"
        if self._over:
            return
        if reason is not Reason.MALFORMED:
            self._misunderstood = 0 if self._bulk else self._misunderstood
            return
        self._misunderstood += 1
        why = f"the coordinator at {self._coordinator} and this node do not understand each other: {detail}"
        fix = "install the same version of farloop on both"
        _log.warning("session refused times=%d of=%d why=%r fix=%r", self._misunderstood, BAD_SESSIONS, why, fix)
        if self._misunderstood >= BAD_SESSIONS:
            self._over = True
            told = f"{why} ({self._misunderstood} sessions in a row ended so). Their versions may differ: {fix}"
            refused = msg.Refused(reason=Reason.MALFORMED, detail=told, retriable=False)
            self._deliver(wire_ev.MessageReceived(message=refused))

    def _report(self, session: Session, now: float) -> None:
        reports = [self._probing.report(session)]
        if self._connection is not None and self._probing.is_due(now):
            before, (self._info, congestion) = self._info, self._connection.kernel() or (b"", "")
            facts = parse(self._info, congestion)
            if facts is not None and large_lost(self._info, before, now - session.heard_at):
                facts = dataclasses.replace(facts, large_lost=True)
                if now - self._warned_at >= REPEAT_S:
                    self._warned_at = now
                    _log.warning("packets lost coordinator=%s why=%r fix=%r", self._coordinator, LARGE_LOST, MTU_FIX)
            told = self._probing.connection(session, facts, now)
            if told is not None and self.disk is not None:
                free, used = self.disk
                clock_s = datetime.now(UTC).timestamp()
                told = dataclasses.replace(told, clock_s=clock_s, disk_free=free, disk_used=used)
            reports.append(told)
            self._choose_lanes(session, facts)
        for report in reports:
            if report is not None:
                self._send(report)


def read_known(path: Path, coordinator: str) -> LinkKnown | None:
    """What the file tells of the link to this coordinator; None for nothing."""
    try:
        kept = json.loads(path.read_text())
        if kept.pop("coordinator") == coordinator:
            known = LinkKnown(**kept)
            if all(isinstance(number, float) and 0.0 <= number < math.inf for number in kept.values()):
                return known
            raise ValueError(f"{known}")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("link not known path=%s reason=%r: it is measured anew", path, str(error))
    return None


def write_known(path: Path, coordinator: str, known: LinkKnown) -> None:
    """Keep it for the next start. A file that cannot be written costs no more than that."""
    try:
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"coordinator": coordinator, **dataclasses.asdict(known)}, allow_nan=False))
        new.replace(path)
    except OSError as error:
        _log.warning("link not kept path=%s reason=%r", path, str(error))
