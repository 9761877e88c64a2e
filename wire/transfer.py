"""Blob transfers in chunks, with credit from the receiver."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BlobSource, Reassembly, blob_key
from farloop.wire.events import BlobCorrupt, BlobDeclined, BlobIdle, BlobReceived, BlobSent, SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.limits import EARLY_BYTES, EARLY_FRAMES, INITIAL_CREDIT, SMALLEST_CHUNK, Limits, Timing
from farloop.wire.messages import Credit
from farloop.wire.meter import Meter
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, RemoteProtocolError
from farloop.wire.traffic import Traffic

# --- Flow control of one blob: its sender (`Outgoing`) and its receiver (`Incoming`)


_SLOWEST_LINK_BYTES_PER_S = 64 << 10
"""Assumed before anything is known; a link below half of this (256 kbit/s) is served, but with chunks sent twice."""

_MOST_DOUBLINGS = 3


class Pace:
    """How fast the bulk lanes of a session drain: what a blob's time-out is reckoned from.

    On a thin link a chunk takes seconds, and waits for those of all other blobs; on a lost one the lane closes. So a
    time-out is the last resort and must not be short: twice the time that all bytes in flight need.
    """

    def __init__(self, timing: Timing) -> None:
        self._rto_s = timing.rto_s
        self._bytes_per_s: float = _SLOWEST_LINK_BYTES_PER_S

    @property
    def bytes_per_s(self) -> float:
        """Lately; at least what is assumed of a thin link."""
        return self._bytes_per_s

    def measured(self, num_bytes: int, seconds: float) -> None:
        """A chunk was acknowledged `seconds` after it left as the last of `num_bytes` in flight."""
        sample = num_bytes / max(seconds, 1e-3)
        self._bytes_per_s = max((self._bytes_per_s + sample) / 2, _SLOWEST_LINK_BYTES_PER_S)

    def timeout_s(self, num_bytes: int) -> float:
        """How long to wait for an acknowledgement with `num_bytes` in flight."""
        return max(self._rto_s, 2 * num_bytes / self._bytes_per_s)


class Outgoing:
    """A blob on its way out: 0 ≤ acked ≤ sent ≤ limit, and everything below `acked` has arrived."""

    def __init__(self, blob: BlobId, source: BlobSource, limit: int, pace: Pace, *, background: bool = False) -> None:
        self.blob = blob
        self.source = source
        self.pushed = limit > 0  # whether it may begin within the initial credit, before the peer grants any
        self.background = background  # whether it yields to every other blob
        self.acked = 0
        self.sent = 0
        self.limit = min(limit, source.size)
        self.credited = False
        """Whether a Credit came. Before, nobody may be expecting this blob: nothing is sent twice."""
        self._pace = pace
        self._moved_at = 0.0  # when a chunk last left or an acknowledgement came
        self._queue_bytes = 0  # bytes of all blobs in flight when the last chunk left: it arrives behind them
        self._stalls = 0  # rewinds since the last acknowledgement
        self._rewound_from = 0
        """Bytes below were sent more than once, or may have been: their acknowledgement measures nothing."""
        self._probe: tuple[int, int, float] | None = None
        """(end, bytes in flight, time) of one chunk when it left, to measure the pace by."""

    @property
    def done(self) -> bool:
        """Whether every byte has arrived."""
        return self.acked == self.source.size

    @property
    def early_bytes(self) -> int:
        """Bytes sent ahead of the first Credit."""
        return 0 if self.credited else self.sent

    @property
    def has_credit(self) -> bool:
        """Whether a chunk may leave now."""
        return self.sent < self.limit

    @property
    def in_flight(self) -> int:
        """Bytes sent and not acknowledged."""
        return self.sent - self.acked

    def next_chunk(self, chunk_bytes: int, in_flight: int, now: float) -> tuple[int, memoryview] | None:
        """(offset, bytes) of the next chunk, behind `in_flight` bytes of all blobs; None while there is no credit."""
        num_bytes = min(chunk_bytes, self.limit - self.sent)
        if num_bytes <= 0:
            return None
        offset = self.sent
        chunk = self.source.read(offset, num_bytes)
        self.sent += num_bytes
        self._moved_at = now
        self._queue_bytes = in_flight + num_bytes
        if self._probe is None and offset >= self._rewound_from:
            self._probe = (self.sent, self._queue_bytes, now)
        return offset, chunk

    def credit(self, received: int, limit: int, now: float) -> None:
        """The receiver has `received` bytes without a gap and allows `limit`; a claim beyond the blob is cut short."""
        received = min(received, self.source.size)
        if not self.credited:
            self.credited = True
            self._moved_at = now
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
        return self._moved_at + self._pace.timeout_s(self._queue_bytes) * (1 << doublings)

    def rewind(self) -> None:
        """Send everything from `acked` again."""
        self._rewound_from = max(self._rewound_from, self.sent)
        self.sent = self.acked
        self._stalls += 1
        self._probe = None

    def _measure(self, now: float) -> None:
        if self._probe is not None and self.acked >= self._probe[0]:
            _, in_flight, left_at = self._probe
            self._pace.measured(in_flight, now - left_at)
            self._probe = None


class Incoming:
    """A blob on its way in: grants a window beyond what has arrived, renewed as it fills."""

    def __init__(self, blob: BlobId, reassembly: Reassembly, limits: Limits, timing: Timing, now: float) -> None:
        self.blob = blob
        self.reassembly = reassembly
        self._window = max(limits.window_bytes, 2 * limits.chunk_bytes)
        self._max_window = max(limits.max_window_bytes, self._window)
        self._timing = timing
        self._credited = reassembly.received
        self._credited_at = now
        self.grew_at = now  # when it was last further than before
        self.limit = 0  # no byte at or beyond it may come

    def first_credit(self) -> Credit:
        """What answers the announcement of the blob; chunks that came before it are counted in."""
        return self._grant()

    def renewed_credit(self, now: float) -> Credit | None:
        """A further Credit if one is due: an eighth of a window has arrived since the last, or a chunk, or the rest."""
        arrived = self.reassembly.received - self._credited
        if not self.reassembly.complete and arrived < max(self._window // 8, min(SMALLEST_CHUNK, self._window // 2)):
            return None
        if arrived * self._timing.window_s > self._window * (now - self._credited_at):
            self._window = min(2 * self._window, self._max_window)
        self._credited_at = now
        return self._grant()

    def _grant(self) -> Credit:
        self._credited = self.reassembly.received
        self.limit = min(self._credited + self._window, self.reassembly.size)
        return Credit(blob=self.blob, received=self._credited, limit=self.limit)


# --- All blobs of a session: outgoing in turns, incoming by key


_FINISHED_KEYS = 1024
"""Blobs remembered as over, so that their late chunks are dropped at once and not kept as early ones."""


PROBE_WINDOW_S = 0.5
"""As `Timing.window_s`, of a probe: what is on its way of one, live bytes must wait for. Above all but satellites'."""


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
    ) -> None:
        """`idle_s`: how long an expected blob may stand still, for each that shares the session; None: for ever.
        `stall_s`: how long the peer may take nothing of what is sent to it; None: for ever."""
        self._limits, self._idle_s, self._stall_s = limits, idle_s, stall_s
        self._timing = timing
        self._traffic = traffic
        self._emit = emit
        self._say = say
        self._pace = Pace(timing)
        self._outgoing: OrderedDict[BlobId, Outgoing] = OrderedDict()  # in the order of their turns
        self._incoming: dict[bytes, Incoming] = {}
        self._early: deque[tuple[BulkFrame, int]] = deque()
        """Chunks that overtook the announcement of their blob, with their bytes on the wire; oldest first."""
        self._early_bytes = 0
        self._finished: OrderedDict[bytes, None] = OrderedDict()
        self._probe_key = b""  # of the last probe that was expected
        self._waits_since: float | None = None
        """When the peer last took something, or was first waited for; None while nothing waits for it."""
        self.meter = Meter()  # how what comes in does so

    def check_room(self, blob: BlobId, *, pushed: bool = False) -> None:
        """Raise AlreadyUnderWay or LimitReached if `blob` cannot be sent now."""
        if blob in self._outgoing:
            raise AlreadyUnderWay(f"{blob} is being sent already")
        sending = sum(outgoing.pushed == pushed for outgoing in self._outgoing.values())
        if sending >= (self._limits.max_pushed_blobs if pushed else self._limits.max_blobs):
            raise LimitReached(f"{sending} blobs are being sent")

    def unacknowledged(self, kind: BlobKind) -> dict[BlobId, int]:
        """Blobs of this kind that are being sent, with the bytes of each that have not arrived."""
        sending = ((blob, outgoing) for blob, outgoing in self._outgoing.items() if blob.kind is kind)
        return {blob: outgoing.source.size - outgoing.acked for blob, outgoing in sending}

    @property
    def bytes_per_s(self) -> float:
        """How fast blobs have lately been acknowledged."""
        return self._pace.bytes_per_s

    @property
    def live_in_flight(self) -> int:
        """Bytes on their way of blobs that others may be waiting for."""
        return sum(outgoing.in_flight for outgoing in self._outgoing.values() if not outgoing.background)

    @property
    def background_in_flight(self) -> int:
        """... and of the others."""
        return sum(outgoing.in_flight for outgoing in self._outgoing.values() if outgoing.background)

    @property
    def background_waits(self) -> bool:
        """Whether a background blob could go on now, and no other could."""
        ready = [outgoing.background for outgoing in self._outgoing.values() if outgoing.has_credit]
        return bool(ready) and all(ready)

    def begin(self, blob: BlobId, source: BlobSource, *, pushed: bool, background: bool = False) -> None:
        """Send `blob`: at once within the initial credit if `pushed`, else when a Credit comes."""
        limit = INITIAL_CREDIT if pushed else 0
        self._outgoing[blob] = Outgoing(blob, source, limit, self._pace, background=background)

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
        timing = self._timing
        if blob.kind is BlobKind.PROBE:
            self._probe_key, timing = key, replace(timing, window_s=PROBE_WINDOW_S)
        incoming = Incoming(blob, reassembly, self._limits, timing, now)
        self._incoming[key] = incoming
        self._adopt_early(key, incoming)
        self._say(incoming.first_credit())
        self._finish_if_complete(key, incoming)
        return reassembly

    def cancel(self, blob: BlobId) -> None:
        """Stop sending it; or else stop, or refuse, to receive it, of which the peer hears."""
        if self._outgoing.pop(blob, None) is not None:
            return
        key = blob_key(blob)
        incoming = self._no_more(key)
        self._say(Credit(blob=blob, received=incoming.reassembly.received if incoming else 0, limit=0))

    def forget_outgoing(self, blob: BlobId) -> None:
        """The peer has decided about this blob: send no more of it."""
        self._outgoing.pop(blob, None)

    def credited(self, credit: Credit, now: float) -> None:
        """A Credit of the peer; of an unknown blob it is one that crossed our end of it."""
        outgoing = self._outgoing.get(credit.blob)
        if outgoing is None:
            return
        if credit.limit == 0:
            del self._outgoing[credit.blob]
            self._emit(BlobDeclined(blob=credit.blob))
            return
        before, was_credited = outgoing.acked, outgoing.credited
        outgoing.credit(credit.received, credit.limit, now)
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
        credit = incoming.renewed_credit(now)
        if credit is not None:
            self._say(credit)
        self._finish_if_complete(frame.key, incoming)

    def next_chunk(self, now: float, *, background: bool = True) -> tuple[BlobId, int, memoryview] | None:
        """(blob, offset, bytes) of the chunk whose turn it is, or None while no blob has credit.

        A background blob has its turn, if at all, when no other has credit.
        """
        room = EARLY_BYTES - sum(outgoing.early_bytes for outgoing in self._outgoing.values())
        live = [(blob, outgoing) for blob, outgoing in self._outgoing.items() if not outgoing.background]
        others = [(blob, outgoing) for blob, outgoing in self._outgoing.items() if outgoing.background]
        for blob, outgoing in [*live, *(others if background else ())]:
            chunk_bytes = self._limits.chunk_bytes if outgoing.credited else min(self._limits.chunk_bytes, room)
            chunk = outgoing.next_chunk(chunk_bytes, self._in_flight(), now)
            if chunk is not None:
                self._outgoing.move_to_end(blob)
                return blob, *chunk
        return None

    def next_timer(self) -> float | None:
        """When the first blob is to be sent again, or given up."""
        rewinds = [deadline for _, deadline in self._deadlines()]
        stalls = [self._stalls_at] if self._stalls_at is not None else []
        return min([*rewinds, *stalls, *(self._idle_at(incoming) for incoming in self._patient())], default=None)

    def handle_timer(self, now: float) -> None:
        """Rewind every blob that was sent and whose time is up; decline every expected one that stands still."""
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
        waits = any(not o.credited or o.in_flight or not o.has_credit for o in self._outgoing.values())
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
        assert len(self._outgoing) <= self._limits.max_pushed_blobs + self._limits.max_blobs
        assert len(self._incoming) <= self._limits.max_blobs
        assert self._early_bytes == sum(len(frame.chunk) for frame, _ in self._early) <= EARLY_BYTES
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
        waiting = [outgoing for outgoing in self._outgoing.values() if outgoing.credited and outgoing.in_flight]
        return [(outgoing, outgoing.deadline()) for outgoing in waiting]

    def _in_flight(self) -> int:
        return sum(outgoing.in_flight for outgoing in self._outgoing.values())

    def _keep_early(self, frame: BulkFrame, num_bytes: int) -> None:
        """Keep a chunk that may have overtaken its announcement; the oldest make room."""
        if frame.key in self._finished or frame.end > INITIAL_CREDIT:
            return
        self._early.append((frame, num_bytes))
        self._early_bytes += len(frame.chunk)
        while self._early_bytes > EARLY_BYTES or len(self._early) > EARLY_FRAMES:
            dropped, _ = self._early.popleft()
            self._early_bytes -= len(dropped.chunk)

    def _adopt_early(self, key: bytes, incoming: Incoming) -> None:
        others: deque[tuple[BulkFrame, int]] = deque()
        for frame, num_bytes in self._early:
            if frame.key != key:
                others.append((frame, num_bytes))
                continue
            self._early_bytes -= len(frame.chunk)
            if frame.end <= incoming.reassembly.size:
                incoming.reassembly.add(frame.offset, frame.chunk)
                self._traffic.adopt(incoming.blob.kind, num_bytes)
        self._early = others

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
