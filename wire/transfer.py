"""Blob transfers in chunks, with credit from the receiver."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BlobSource, Reassembly, blob_key
from farloop.wire.events import BlobCorrupt, BlobDeclined, BlobIdle, BlobReceived, BlobSent, SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.limits import (
    EARLY_BYTES,
    EARLY_FRAMES,
    EARLY_S,
    INITIAL_CREDIT,
    INITIAL_FLIGHT,
    LARGEST_CHUNK,
    LEAST_FLIGHT,
    SMALLEST_CHUNK,
    THIN_CHUNK,
    Limits,
    Timing,
)
from farloop.wire.messages import WINDOWS_SINCE, Credit, Offer
from farloop.wire.meter import Meter
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, RemoteProtocolError
from farloop.wire.traffic import Traffic

# --- Flow control: of a session (`Flight`), of a blob's sender (`Outgoing`) and of its receiver (`Incoming`)


_SLOWEST_LINK_BYTES_PER_S = 64 << 10
"""Assumed before anything is known; a link below half of this (256 kbit/s) is served, but with chunks sent twice."""

_LONGEST_TIMEOUT_S = 120.0  # of a blob at first, however much is in flight

_MOST_DOUBLINGS = 3

_RATES = 10  # the flight window follows the highest of so many rates, each of one round trip or two

_DRAIN_S = 50.0
"""A shortest round trip that is older than this is measured anew, with less in flight than fills the link: behind a
window of twice the product every round trip is twice as long, and the window would double each time."""

_FLOOR_S = 1.0  # on a thin link the window holds this much of it: chunks and their Credits are not all there is


@dataclass(frozen=True, slots=True)
class _Mark:
    """A chunk when it left: its acknowledgement is a sample of the link."""

    end: int  # of the chunk in its blob
    arrived: int  # bytes of all blobs that had arrived
    queued: int  # bytes in flight, it included
    at: float
    early: bool  # whether it had no credit: its acknowledgement waits for more than the link


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKnown:
    """What a session has seen of its link, for the next one to begin with. 0: nothing."""

    bytes_per_s: float = 0.0  # of what was sent
    round_trip_s: float = 0.0
    arriving_bytes_per_s: float = 0.0  # of what was received


class Flight:
    """What the link carries, and so how much may be in flight: bytes that were sent and have not arrived.

    The window is twice the product of rate and round trip, so that samples which it limits itself double it. A blob's
    time-out is reckoned from the same samples. On a thin link a chunk takes seconds, and waits for those of all other
    blobs; on a lost one the lane closes. So a time-out is the last resort and must not be short: twice the time that
    all bytes in flight need.
    """

    def __init__(self, timing: Timing, known: LinkKnown | None = None, now: float = 0.0) -> None:
        """`known` sets the first window, never a time-out: the link may have become slow."""
        self._rto_s = timing.rto_s
        self._usual_bytes_per_s: float = _SLOWEST_LINK_BYTES_PER_S
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._rate_at = float("-inf")  # when the last of them was begun
        self._round_trip_s = 0.0  # the shortest
        self._round_trip_at = float("-inf")  # when it was measured
        self._drained = 0  # the last window for measuring it anew
        self._dry_at = float("-inf")  # when there was last nothing to send
        self._known = False  # whether a sample was limited by the link or the window, not by what there was to send
        self.arrived = 0  # bytes of all blobs, as the peer told
        if known is not None and known.bytes_per_s > 0.0 and known.round_trip_s > 0.0:
            self._rates.append(known.bytes_per_s)
            self._round_trip_s, self._round_trip_at, self._known = known.round_trip_s, now, True

    @property
    def bytes_per_s(self) -> float:
        """The highest rate of late; 0 before the first sample."""
        return max(self._rates, default=0.0)

    @property
    def round_trip_s(self) -> float:
        """The shortest; 0 before the first sample."""
        return self._round_trip_s

    @property
    def product(self) -> int:
        """Bytes that fill the link for two round trips; 0 before the first sample."""
        return int(2 * self.bytes_per_s * self.round_trip_s)

    def window(self, peer_early: int, now: float) -> int:
        """Bytes that may be in flight. A receiver that keeps many `peer_early` bytes reports them in larger pieces."""
        if not self._known:
            return max(self.product, INITIAL_FLIGHT)
        floor = int(min(max(LEAST_FLIGHT, peer_early // 4), self.bytes_per_s * _FLOOR_S))
        if now - self._round_trip_at > _DRAIN_S:
            self._drained = max(self.product * 3 // 8, floor // 2, THIN_CHUNK)
            return self._drained
        return max(self.product, floor, 2 * THIN_CHUNK)

    def ran_dry(self, now: float) -> None:
        """There is nothing to send: what is in flight does not show what the link carries."""
        self._dry_at = now

    def measured(self, mark: _Mark, now: float) -> None:
        """A chunk was acknowledged."""
        seconds = max(now - mark.at, 1e-6)
        usual = mark.queued / max(seconds, 1e-3)
        self._usual_bytes_per_s = max((self._usual_bytes_per_s + usual) / 2, _SLOWEST_LINK_BYTES_PER_S)
        drained = mark.at - self._round_trip_at > _DRAIN_S and mark.queued <= self._drained and not mark.early
        if not self._round_trip_s or seconds <= self._round_trip_s or drained:
            self._round_trip_s, self._round_trip_at = seconds, now
        rate = (self.arrived - mark.arrived) / seconds
        queued = seconds > 2 * self._round_trip_s  # behind more than fills the link
        limited = not mark.early and (queued or self._dry_at < mark.at)
        self._known = self._known or limited
        if not limited and rate <= self.bytes_per_s:
            return
        if mark.at >= self._rate_at or now > self._rate_at + 2 * self._round_trip_s:
            self._rates.append(rate)
            self._rate_at = now
        else:
            self._rates[-1] = max(self._rates[-1], rate)

    def timeout_s(self, num_bytes: int) -> float:
        """How long to wait for an acknowledgement with `num_bytes` in flight."""
        return max(self._rto_s, min(2 * num_bytes / self._usual_bytes_per_s, _LONGEST_TIMEOUT_S))


class Outgoing:
    """A blob on its way out: 0 ≤ acked ≤ sent ≤ limit, and everything below `acked` has arrived."""

    def __init__(
        self,
        blob: BlobId,
        source: BlobSource,
        limit: int,
        flight: Flight,
        *,
        pushed: bool = False,
        background: bool = False,
    ) -> None:
        self.blob = blob
        self.source = source
        self.pushed = pushed  # whether it is sent without an Offer
        self.background = background  # whether it yields to every other blob
        self.acked = 0
        self.sent = 0
        self.limit = min(limit, source.size)
        self.credited = False
        """Whether a Credit came. Before, nobody may be expecting this blob: nothing is sent twice."""
        self._arrived = 0  # bytes that have arrived, those beyond a gap included
        self._flight = flight
        self._moved_at = 0.0  # when a chunk last left or an acknowledgement came
        self._queue_bytes = 0  # bytes of all blobs in flight when the last chunk left: it arrives behind them
        self._stalls = 0  # rewinds since the last acknowledgement
        self._rewound_from = 0
        """Bytes below were sent more than once, or may have been: their acknowledgement measures nothing."""
        self._marks: deque[_Mark] = deque()  # of chunks that are not acknowledged

    @property
    def done(self) -> bool:
        """Whether every byte has arrived."""
        return self.acked == self.source.size

    @property
    def early_bytes(self) -> int:
        """Bytes sent ahead of the first Credit."""
        return 0 if self.credited else self.sent

    @property
    def unacknowledged(self) -> int:
        """Bytes sent and not acknowledged: they may have to be sent again."""
        return self.sent - self.acked

    @property
    def in_flight(self) -> int:
        """Bytes sent that have not arrived."""
        return max(0, self.sent - self._arrived)

    def next_chunk(self, num_bytes: int, in_flight: int, now: float) -> tuple[int, memoryview] | None:
        """(offset, bytes) of the next chunk, behind `in_flight` bytes of all blobs; None while there is no credit."""
        num_bytes = min(num_bytes, self.limit - self.sent)
        if num_bytes <= 0:
            return None
        offset = self.sent
        chunk = self.source.read(offset, num_bytes)
        self.sent += num_bytes
        self._moved_at = now
        self._queue_bytes = in_flight + num_bytes
        if offset >= self._rewound_from:
            self._marks.append(_Mark(self.sent, self._flight.arrived, self._queue_bytes, now, not self.credited))
        return offset, chunk

    def credit(self, received: int, limit: int, now: float, *, arrived: int = 0) -> None:
        """The receiver has `received` bytes without a gap, `arrived` in all where that is more, and allows `limit`; a
        claim beyond the blob is cut short."""
        received = min(received, self.source.size)
        if not self.credited:
            self.credited = True
            self._moved_at = now
        arrived = min(max(received, arrived), self.sent)  # the rest came in an earlier session
        self._flight.arrived += max(0, arrived - self._arrived)
        self._arrived = max(self._arrived, arrived, received)
        if received > self.acked:
            self.acked = received
            self.sent = max(self.sent, received)
            self._moved_at = now
            self._stalls = 0
            self._measure(now)
        self.limit = max(self.limit, min(limit, self.source.size), self.sent)

    def deadline(self) -> float:
        """When to give up waiting for an acknowledgement."""
        doublings = min(self._stalls, _MOST_DOUBLINGS)
        return self._moved_at + self._flight.timeout_s(self._queue_bytes) * (1 << doublings)

    def rewind(self) -> None:
        """Send everything from `acked` again."""
        self._rewound_from = max(self._rewound_from, self.sent)
        self.sent = self.acked
        self._stalls += 1
        self._marks.clear()

    def _measure(self, now: float) -> None:
        newest = None
        while self._marks and self._marks[0].end <= self.acked:
            newest = self._marks.popleft()
        if newest is not None:
            self._flight.measured(newest, now)


class Incoming:
    """A blob on its way in. Its credit is its size, or for an older peer a window beyond what has arrived."""

    def __init__(
        self, blob: BlobId, reassembly: Reassembly, now: float, window: int | None, max_window: int, timing: Timing
    ) -> None:
        """`window` is None where the credit is the size."""
        self.blob = blob
        self.reassembly = reassembly
        self._window, self._max_window = window, max_window
        self._timing = timing
        self._told = reassembly.arrived  # with the last Credit
        self._told_at = now
        self.grew_at = now  # when it was last further than before
        self.limit = 0  # no byte at or beyond it may come

    @property
    def due_at(self) -> float | None:
        """When a Credit is due that reports fewer bytes than are worth one; None while there is nothing to report."""
        if self._window is not None or self.reassembly.arrived == self._told:
            return None
        return self._told_at + self._timing.credit_delay_s

    def credit(self, now: float) -> Credit:
        """A Credit for what has arrived; the first answers the announcement of the blob."""
        received, arrived = self.reassembly.received, self.reassembly.arrived
        self._told, self._told_at = arrived, now
        self.limit = min(received + (self._window or self.reassembly.size), self.reassembly.size)
        return Credit(blob=self.blob, received=received, limit=self.limit, arrived=arrived if arrived > received else 0)

    def renewed_credit(self, now: float, worth: int) -> Credit | None:
        """A further Credit if one is due: `worth` bytes have arrived since the last one, or all the rest, or some that
        have waited; for an older peer an eighth of a window, or a chunk."""
        arrived = self.reassembly.arrived - self._told
        if self._window is not None:
            worth = max(self._window // 8, min(SMALLEST_CHUNK, self._window // 2))
        waited = self.due_at is not None and now >= self.due_at
        if not self.reassembly.complete and arrived < worth and not waited:
            return None
        if self._window is not None and arrived * self._timing.window_s > self._window * (now - self._told_at):
            self._window = min(2 * self._window, self._max_window)
        return self.credit(now)


# --- All blobs of a session: outgoing in turns, incoming by key


_FINISHED_KEYS = 1024
"""Blobs remembered as over, so that their late chunks are dropped at once and not kept as early ones."""


class _HighestRate:
    """The highest rate at which bytes came, over at least 50 ms."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._since, self._bytes = float("-inf"), 0

    def add(self, num_bytes: int, now: float) -> None:
        self._bytes += num_bytes
        seconds = now - self._since
        if seconds >= 0.05:
            if seconds <= 1.0:  # else there was a pause
                self.bytes_per_s = max(self.bytes_per_s, self._bytes / seconds)
            self._since, self._bytes = now, 0


PROBE_WINDOW_S = 0.5
"""As `Timing.window_s`, of a probe: what is on its way of one, live bytes must wait for. Above all but satellites'."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A blob that waits for others to end."""

    source: BlobSource
    offer: Offer | None  # None where the application announces it
    background: bool


class Transfers:
    """Blobs in both directions. What follows leaves through `emit` (to the application) and `say` (a Credit)."""

    def __init__(
        self,
        limits: Limits,
        timing: Timing,
        traffic: Traffic,
        emit: Callable[[SessionEvent], None],
        say: Callable[[Credit], None],
        idle_s: float | None = None,
        stall_s: float | None = None,
        share: Callable[[], int] | None = None,
        known: LinkKnown | None = None,
        now: float = 0.0,
    ) -> None:
        """`idle_s`: how long an expected blob may stand still, for each that shares the session; None: for ever.
        `stall_s`: how long the peer may take nothing of what is sent to it; None: for ever.
        `share`: the most bytes to keep of blobs that are not expected yet; None: the whole pool.
        `known`: what an earlier session saw of the link."""
        self._limits, self._idle_s, self._stall_s = limits, idle_s, stall_s
        self._timing = timing
        self._traffic = traffic
        self._emit = emit
        self._say = say
        self._windowed = True  # whether the session has the windows of version 5; see `agreed`
        self._flight = Flight(timing, known, now)
        self._peer_early = EARLY_BYTES  # what the peer keeps of blobs without a Credit
        self._outgoing: OrderedDict[BlobId, Outgoing] = OrderedDict()  # in the order of their turns
        self._queued: dict[bool, OrderedDict[BlobId, _Queued]] = {False: OrderedDict(), True: OrderedDict()}
        """Blobs to be sent after those, by whether they are pushed: these must not keep a snapshot from being offered
        that is to replace them."""
        self._incoming: dict[bytes, Incoming] = {}
        self._early: deque[tuple[BulkFrame, int]] = deque()
        """Chunks that overtook the announcement of their blob, with their bytes on the wire; oldest first."""
        self._early_bytes = 0
        self._finished: OrderedDict[bytes, None] = OrderedDict()
        self._probe_key = b""  # of the last probe that was expected
        self._share = share or (lambda: limits.early_pool_bytes)
        self._arrivals = _HighestRate()
        if known is not None:
            self._arrivals.bytes_per_s = known.arriving_bytes_per_s
        self._tells_early = False  # whether each Credit tells what is kept: from the first other number on
        self._waits_since: float | None = None
        """When the peer last took something, or was first waited for; None while nothing waits for it."""
        self.meter = Meter()  # how what comes in does so

    def agreed(self, protocol: int, peer_early: int) -> None:
        """The session is open, in this version; the peer keeps so many bytes of blobs without a Credit, 0 for 4 MiB."""
        self._windowed = protocol >= WINDOWS_SINCE
        self._peer_early = peer_early or EARLY_BYTES

    @property
    def early_bytes(self) -> int:
        """What is kept of blobs that are not expected yet."""
        if not self._windowed:
            return EARLY_BYTES
        return min(max(EARLY_BYTES, int(EARLY_S * self._arrivals.bytes_per_s)), self._share())

    def told_early(self) -> int:
        """The same as the peer is told it; 0 while it is what every peer assumes."""
        self._tells_early = self._tells_early or self.early_bytes != EARLY_BYTES
        return self.early_bytes if self._tells_early and self._windowed else 0

    def queue(self, blob: BlobId, source: BlobSource, offer: Offer | None = None, *, background: bool = False) -> None:
        """Send `blob` when it is its turn (`begin_next`). Without an `offer` it is pushed.

        Raises:
            AlreadyUnderWay: it is being sent already, or waits.
        """
        if blob in self._outgoing or any(blob in queued for queued in self._queued.values()):
            raise AlreadyUnderWay(f"{blob} is being sent already")
        self._queued[offer is None][blob] = _Queued(source, offer, background)

    def begin_next(self, announce: Callable[[Offer], None]) -> None:
        """Begin with the blobs that wait, as many as there may be at once; `announce` those that are offered."""
        for pushed, queued in self._queued.items():
            active = sum(outgoing.pushed == pushed for outgoing in self._outgoing.values())
            while queued and active < self._limits.max_active:
                blob, found = next(iter(queued.items()))
                if found.offer is not None:
                    announce(found.offer)
                del queued[blob]
                self.begin(blob, found.source, pushed=pushed, background=found.background)
                active += 1

    @property
    def waiting(self) -> list[BlobId]:
        """Blobs that wait for others to end."""
        return [blob for queued in self._queued.values() for blob in queued]

    def unacknowledged(self, kind: BlobKind) -> dict[BlobId, int]:
        """Blobs of this kind that are being sent, or wait, with the bytes of each that have not arrived."""
        waiting = [(blob, found.source.size) for queued in self._queued.values() for blob, found in queued.items()]
        sending = [(blob, outgoing.source.size - outgoing.acked) for blob, outgoing in self._outgoing.items()]
        return {blob: num_bytes for blob, num_bytes in sending + waiting if blob.kind is kind}

    @property
    def bytes_per_s(self) -> float:
        """How fast blobs have lately been acknowledged, at best; 0 before the first was."""
        return self._flight.bytes_per_s

    @property
    def known(self) -> LinkKnown:
        """What was seen of the link."""
        flight, arriving = self._flight, self._arrivals.bytes_per_s
        return LinkKnown(
            bytes_per_s=flight.bytes_per_s, round_trip_s=flight.round_trip_s, arriving_bytes_per_s=arriving
        )

    @property
    def live_in_flight(self) -> int:
        """Bytes on their way of blobs that others may be waiting for."""
        return sum(outgoing.in_flight for outgoing in self._outgoing.values() if not outgoing.background)

    @property
    def background_in_flight(self) -> int:
        """... and of the others."""
        return sum(outgoing.in_flight for outgoing in self._outgoing.values() if outgoing.background)

    def background_waits(self, now: float) -> bool:
        """Whether a background blob could go on now, and no other could."""
        found, _ = self._next(now, background=True)
        return found is not None and found[0].background

    def begin(self, blob: BlobId, source: BlobSource, *, pushed: bool, background: bool = False) -> None:
        """Send `blob`: at once within the early window, but for a `background` one; the rest when a Credit comes."""
        limit = source.size
        if not self._windowed or background:
            limit = INITIAL_CREDIT if pushed else 0
        self._outgoing[blob] = Outgoing(blob, source, limit, self._flight, pushed=pushed, background=background)

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        """Allow the peer to send `blob`; its chunks that are here already count.

        Raises:
            AlreadyUnderWay, LimitReached: expected already; too many at once.
            LocalProtocolError: empty, or too large.
        """
        key = blob_key(blob)
        if key in self._incoming:
            raise AlreadyUnderWay(f"{blob} is expected already")
        if not 0 < size <= self._limits.max_blob_bytes:
            raise LocalProtocolError(f"{blob} of {size} bytes, at most {self._limits.max_blob_bytes} are taken")
        if len(self._incoming) >= self._limits.max_blobs:
            raise LimitReached(f"{len(self._incoming)} blobs are expected")
        if reassembly is None or (reassembly.size, reassembly.digest) != (size, digest):
            reassembly = Reassembly(size, digest)
        timing, window, most = self._timing, None, self._limits.max_window_bytes
        if not self._windowed:
            window = max(self._limits.window_bytes, 2 * (self._limits.chunk_bytes or SMALLEST_CHUNK))
        if blob.kind is BlobKind.PROBE:
            self._probe_key, timing = key, replace(timing, window_s=PROBE_WINDOW_S)
        incoming = Incoming(blob, reassembly, now, window, max(most, window or 0), timing)
        self._incoming[key] = incoming
        self._adopt_early(key, incoming)
        self._say_credit(incoming.credit(now))
        self._finish_if_complete(key, incoming)
        return reassembly

    def cancel(self, blob: BlobId) -> None:
        """Stop sending it; or else stop, or refuse, to receive it, of which the peer hears."""
        if self._drop(blob):
            return
        key = blob_key(blob)
        incoming = self._no_more(key)
        self._take_early(key)
        self._say_credit(Credit(blob=blob, received=incoming.reassembly.received if incoming else 0, limit=0))

    def forget_outgoing(self, blob: BlobId) -> None:
        """The peer has decided about this blob: send no more of it."""
        self._drop(blob)

    def _drop(self, blob: BlobId) -> bool:
        """Send no more of a blob; whether it was being sent, or waited."""
        waited = [queued.pop(blob, None) for queued in self._queued.values()]
        return self._outgoing.pop(blob, None) is not None or any(waited)

    def credited(self, credit: Credit, now: float) -> None:
        """A Credit of the peer; of an unknown blob it is one that crossed our end of it."""
        self._peer_early = credit.early or self._peer_early
        outgoing = self._outgoing.get(credit.blob)
        if outgoing is None:
            return
        if credit.limit == 0:
            del self._outgoing[credit.blob]
            self._emit(BlobDeclined(blob=credit.blob))
            return
        before, was_credited = outgoing.acked, outgoing.credited
        outgoing.credit(credit.received, credit.limit, now, arrived=credit.arrived)
        if outgoing.acked > before or not was_credited:
            self._waits_since = None
        self._traffic.arrived_bytes += outgoing.acked - before
        if outgoing.done:
            del self._outgoing[credit.blob]
            self._emit(BlobSent(blob=credit.blob))

    def admit(self, frame: BulkFrame) -> None:
        """Check a chunk against its blob before anything is changed.

        Raises:
            RemoteProtocolError: it goes beyond the credit that was granted.
        """
        incoming = self._incoming.get(frame.key)
        if incoming is not None and frame.end > incoming.limit:
            raise RemoteProtocolError(f"bytes up to {frame.end} of {incoming.blob}, allowed are {incoming.limit}")

    def accept(self, frame: BulkFrame, num_bytes: int, now: float) -> None:
        """Take in an admitted chunk that took `num_bytes` on the wire."""
        self._arrivals.add(len(frame.chunk), now)
        incoming = self._incoming.get(frame.key)
        if incoming is None and frame.key == self._probe_key:  # ended here, and not there yet
            self._traffic.received_blobs[BlobKind.PROBE].add(num_bytes)
            return
        if incoming is None:
            self._traffic.stray.add(num_bytes)
            self._keep_early(frame, num_bytes)
            return
        self._traffic.received_blobs[incoming.blob.kind].add(num_bytes)
        if self.meter.busy or incoming.blob.kind is not BlobKind.SNAPSHOT:
            self.meter.arrived(len(frame.chunk), now)
        before = incoming.reassembly.received
        incoming.reassembly.add(frame.offset, frame.chunk)
        if incoming.reassembly.received > before:
            incoming.grew_at = now
        self._renew(incoming, now)
        self._finish_if_complete(frame.key, incoming)

    def next_chunk(self, now: float, *, background: bool = True) -> tuple[BlobId, int, memoryview] | None:
        """(blob, offset, bytes) of the chunk whose turn it is, or None while no blob has credit.

        A background blob has its turn, if at all, when no other has credit.
        """
        found, held = self._next(now, background=background)
        if found is None:
            if not held:
                self._flight.ran_dry(now)
            return None
        outgoing, num_bytes = found
        chunk = outgoing.next_chunk(num_bytes, self._in_flight(), now)
        assert chunk is not None
        self._outgoing.move_to_end(outgoing.blob)
        return outgoing.blob, *chunk

    def _next(self, now: float, *, background: bool) -> tuple[tuple[Outgoing, int] | None, bool]:
        """The blob whose turn it is, with the bytes of its next chunk. Where there is none, whether one is held back at
        this end, by the flight window or because it is in the background."""
        blobs, held = self._outgoing.values(), False
        window = self._flight.window(self._peer_early, now)
        chunk_bytes = self._chunk_bytes(window)
        flying = sum(outgoing.in_flight for outgoing in blobs if outgoing.credited)
        early = sum(outgoing.early_bytes for outgoing in blobs)
        offered = sum(outgoing.early_bytes for outgoing in blobs if not outgoing.pushed)
        for outgoing in sorted(blobs, key=lambda outgoing: outgoing.background):
            room = outgoing.limit - outgoing.sent
            if not outgoing.credited:
                room = min(room, self._peer_early - early)
                if self._windowed and not outgoing.pushed:  # it may be declined: no more than fills the time until then
                    room = min(room, max(self._flight.product, chunk_bytes) - offered)
            num_bytes = min(chunk_bytes, room)
            if num_bytes <= 0:
                continue
            full = self._windowed and outgoing.credited and flying > 0 and flying + num_bytes > window
            if full or (outgoing.background and not background):
                held = True
            else:
                return (outgoing, num_bytes), False
        return None, held

    def _chunk_bytes(self, window: int) -> int:
        """Of the chunks that leave: a 64th of the flight window, which blobs share by turns."""
        if self._limits.chunk_bytes is not None:
            return self._limits.chunk_bytes
        if not self._windowed:
            return SMALLEST_CHUNK
        least = SMALLEST_CHUNK if window >= LEAST_FLIGHT else THIN_CHUNK
        return min(max(1 << (window // 64).bit_length() - 1, least), LARGEST_CHUNK)

    def next_timer(self) -> float | None:
        """When the first blob is to be sent again, or given up."""
        rewinds = [deadline for _, deadline in self._deadlines()]
        stalls = [self._stalls_at] if self._stalls_at is not None else []
        credits = [incoming.due_at for incoming in self._incoming.values() if incoming.due_at is not None]
        idle = [self._idle_at(incoming) for incoming in self._patient()]
        return min([*rewinds, *stalls, *credits, *idle], default=None)

    def handle_timer(self, now: float) -> None:
        """Rewind every blob that was sent and whose time is up; decline every expected one that stands still; report
        what has arrived."""
        for incoming in self._incoming.values():
            self._renew(incoming, now)
        for outgoing, deadline in self._deadlines():
            if now >= deadline:
                self._rewind(outgoing)
        for incoming in [incoming for incoming in self._patient() if now >= self._idle_at(incoming)]:
            self.cancel(incoming.blob)
            self._emit(BlobIdle(blob=incoming.blob))

    def is_stalled(self, now: float) -> bool:
        """Whether the peer has taken nothing for too long."""
        return self._stalls_at is not None and now >= self._stalls_at

    def look(self, now: float) -> None:
        """See whether the peer is waited for: for credit, or for the acknowledgement of what was sent. What is held
        back at this end is not the peer's fault."""
        waits = any(not o.credited or o.unacknowledged or o.sent == o.limit for o in self._outgoing.values())
        self._waits_since = None if not waits else now if self._waits_since is None else self._waits_since

    @property
    def _stalls_at(self) -> float | None:
        if self._stall_s is None or self._waits_since is None or not self._outgoing:
            return None
        return self._waits_since + self._stall_s

    def clock_jumped(self, seconds: float) -> None:
        """This process stood still: that is not held against the peer (protocol, Monotonic clocks)."""
        if self._waits_since is not None:
            self._waits_since += seconds
        for incoming in self._incoming.values():
            incoming.grew_at += seconds
        self.meter.forget()

    def check(self) -> None:
        for outgoing in self._outgoing.values():
            assert 0 <= outgoing.acked <= outgoing.sent <= outgoing.limit <= outgoing.source.size
        for incoming in self._incoming.values():
            incoming.reassembly.check()
            assert incoming.reassembly.received <= incoming.limit
            assert not incoming.reassembly.complete
        assert len(self._incoming) <= self._limits.max_blobs
        assert self._early_bytes == sum(len(frame.chunk) for frame, _ in self._early)
        assert len(self._early) <= EARLY_FRAMES
        assert len(self._finished) <= _FINISHED_KEYS

    def _patient(self) -> list[Incoming]:
        """Blobs that are not waited for without end."""
        return [] if self._idle_s is None else list(self._incoming.values())

    def _idle_at(self, incoming: Incoming) -> float:
        assert self._idle_s is not None
        return incoming.grew_at + self._idle_s * len(self._incoming)  # they take turns on one lane

    def _rewind(self, outgoing: Outgoing) -> None:
        outgoing.rewind()
        self._traffic.rewinds += 1

    def _deadlines(self) -> list[tuple[Outgoing, float]]:
        waiting = [outgoing for outgoing in self._outgoing.values() if outgoing.credited and outgoing.unacknowledged]
        return [(outgoing, outgoing.deadline()) for outgoing in waiting]

    def _in_flight(self) -> int:
        return sum(outgoing.in_flight for outgoing in self._outgoing.values())

    def _keep_early(self, frame: BulkFrame, num_bytes: int) -> None:
        """Keep a chunk that may have overtaken its announcement; the oldest make room."""
        if frame.key in self._finished or frame.end > (self.early_bytes if self._windowed else INITIAL_CREDIT):
            return
        self._early.append((frame, num_bytes))
        self._early_bytes += len(frame.chunk)
        while self._early_bytes > self.early_bytes or len(self._early) > EARLY_FRAMES:
            dropped, _ = self._early.popleft()
            self._early_bytes -= len(dropped.chunk)

    def _adopt_early(self, key: bytes, incoming: Incoming) -> None:
        for frame, num_bytes in self._take_early(key):
            if frame.end <= incoming.reassembly.size:
                incoming.reassembly.add(frame.offset, frame.chunk)
                self._traffic.adopt(incoming.blob.kind, num_bytes)

    def _take_early(self, key: bytes) -> list[tuple[BulkFrame, int]]:
        """The chunks that are kept of this blob; no longer kept."""
        found = [(frame, num_bytes) for frame, num_bytes in self._early if frame.key == key]
        if found:
            self._early = deque((frame, num_bytes) for frame, num_bytes in self._early if frame.key != key)
            self._early_bytes -= sum(len(frame.chunk) for frame, _ in found)
        return found

    def _renew(self, incoming: Incoming, now: float) -> None:
        """Say how much has arrived of a blob, if that is worth a Credit. The blobs of a session share its windows, so
        that each has fewer unreported bytes the more there are."""
        credit = incoming.renewed_credit(now, max(SMALLEST_CHUNK, self.early_bytes // (64 * len(self._incoming))))
        if credit is not None:
            self._say_credit(credit)

    def _say_credit(self, credit: Credit) -> None:
        self._say(replace(credit, early=early) if (early := self.told_early()) else credit)

    def _finish_if_complete(self, key: bytes, incoming: Incoming) -> None:
        reassembly = incoming.reassembly
        if not reassembly.complete:
            return
        self._no_more(key)
        if reassembly.verify():
            self._emit(BlobReceived(blob=incoming.blob, data=reassembly.data))
        else:
            reassembly.clear()
            self._emit(BlobCorrupt(blob=incoming.blob))

    def _no_more(self, key: bytes) -> Incoming | None:
        """Nothing more of this blob is expected. Snapshots are held back for others: by themselves they tell nothing of
        the link."""
        incoming = self._incoming.pop(key, None)
        self._remember_finished(key)
        if all(other.blob.kind is BlobKind.SNAPSHOT for other in self._incoming.values()):
            self.meter.over()
        return incoming

    def _remember_finished(self, key: bytes) -> None:
        self._finished[key] = None
        if len(self._finished) > _FINISHED_KEYS:
            self._finished.popitem(last=False)
