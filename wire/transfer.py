"""All blobs of one session: taking turns on the way out, sorted by key on the way in."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BlobSource, Reassembly, blob_key
from farloop.wire.credit import Incoming, Outgoing, Pace
from farloop.wire.errors import AlreadyUnderWay, LimitReached, LocalProtocolError, RemoteProtocolError
from farloop.wire.events import BlobCorrupt, BlobDeclined, BlobIdle, BlobReceived, BlobSent, SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.limits import EARLY_BYTES, EARLY_FRAMES, INITIAL_CREDIT, Limits, Timing
from farloop.wire.messages import Credit
from farloop.wire.meter import Meter
from farloop.wire.traffic import Traffic

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
        self._outgoing: OrderedDict[BlobId, Outgoing] = OrderedDict()
        """In the order of their turns."""
        self._incoming: dict[bytes, Incoming] = {}
        self._early: deque[tuple[BulkFrame, int]] = deque()
        """Chunks that overtook the announcement of their blob, with their bytes on the wire; oldest first."""
        self._early_bytes = 0
        self._finished: OrderedDict[bytes, None] = OrderedDict()
        self._probe_key = b""
        """Of the last probe that was expected."""
        self._waits_since: float | None = None
        """When the peer last took something, or was first waited for; None while nothing waits for it."""
        self.meter = Meter()
        """How what comes in does so."""

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
        """This process stood still: that is not held against the peer (protocol C)."""
        if self._waits_since is not None:
            self._waits_since += seconds
        for incoming in self._incoming.values():
            incoming.grew_at += seconds
        self.meter.forget()

    def lane_lost(self) -> None:
        """Whatever was in flight may have been lost with a lane: send it again at once."""
        self.meter.forget()
        for outgoing in self._outgoing.values():
            if outgoing.in_flight:
                self._rewind(outgoing)

    def check(self) -> None:
        """Assert the invariants."""
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
