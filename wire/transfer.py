"""Blob transfers in chunks, with credit from the receiver."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import chain, islice

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import BlobSource, Reassembly, blob_key
from farloop.wire.events import BlobCorrupt, BlobDeclined, BlobIdle, BlobReceived, BlobSent, SessionEvent
from farloop.wire.frames import BulkFrame
from farloop.wire.lanes import Lanes
from farloop.wire.limits import (
    CHUNK_S,
    EARLY_BYTES,
    EARLY_FRAMES,
    EARLY_S,
    LARGEST_CHUNK,
    LEAST_FLIGHT,
    SHARED_CHUNK,
    SMALLEST_CHUNK,
    THIN_CHUNK,
    Limits,
    Timing,
)
from farloop.wire.messages import Credit, Offer
from farloop.wire.meter import Meter
from farloop.wire.outgoing import Flight, LinkKnown, Outgoing
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, RemoteProtocolError
from farloop.wire.traffic import Traffic
from farloop.wire.uplink import Uplink

# --- The receiver of a blob


_ISLANDS_TOLD = 128  # of the ranges beyond a gap, with each Credit: about a kilobyte


class Incoming:
    """A blob on its way in. Its credit is its size."""

    def __init__(self, blob: BlobId, reassembly: Reassembly, now: float, credit_delay_s: float) -> None:
        self.blob = blob
        self.reassembly = reassembly
        self._credit_delay_s = credit_delay_s
        self._told = reassembly.arrived  # with the last Credit
        self._told_at = now
        self.grew_at = now  # when it was last further than before

    @property
    def due_at(self) -> float | None:
        """When a Credit is due that reports fewer bytes than are worth one; None while there is nothing to report."""
        return None if self.reassembly.arrived == self._told else self._told_at + self._credit_delay_s

    def credit(self, now: float) -> Credit:
        """A Credit for what has arrived; the first answers the announcement of the blob."""
        here = self.reassembly
        self._told, self._told_at = here.arrived, now
        islands = tuple(chain.from_iterable(islice(here.islands, _ISLANDS_TOLD)))
        beyond = here.arrived if islands else 0
        return Credit(blob=self.blob, received=here.received, limit=here.size, arrived=beyond, islands=islands)

    def renewed_credit(self, now: float, worth: int) -> Credit | None:
        """A further Credit if one is due: `worth` bytes have arrived since the last one, or all the rest, or
        some that have waited."""
        arrived = self.reassembly.arrived - self._told
        waited = self.due_at is not None and now >= self.due_at
        return self.credit(now) if self.reassembly.complete or arrived >= worth or waited else None


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


@dataclass(frozen=True, slots=True)
class _Queued:
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
        uplink: Uplink | None = None,
        now: float = 0.0,
    ) -> None:
        """`idle_s`: how long an expected blob may stand still, for each that shares the session; None: for ever.
        `stall_s`: how long the peer may take nothing of what is sent to it; None: for ever.
        `share`, `known`, `uplink`: as for `Session`."""
        self._limits, self._idle_s, self._stall_s = limits, idle_s, stall_s
        self._timing = timing
        self._traffic = traffic
        self._emit = emit
        self._say = say
        self._uplink = uplink
        self._held_until: float | None = None  # when the uplink takes the chunk that waits for it
        self._flight = Flight(timing, known, now)
        self.peer_early = EARLY_BYTES  # what the peer keeps of blobs without a Credit
        self.lanes = Lanes()
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
        self._waits_since: float | None = None
        """When the peer last took something, or was first waited for; None while nothing waits for it."""
        self.meter = Meter()  # how what comes in does so

    @property
    def early_bytes(self) -> int:
        """What is kept of blobs that are not expected yet."""
        return min(max(EARLY_BYTES, int(EARLY_S * self._arrivals.bytes_per_s)), self._share())

    def queue(self, blob: BlobId, source: BlobSource, offer: Offer | None = None, *, background: bool = False) -> None:
        """Send `blob` when it is its turn (`begin_next`). Without an `offer` it is pushed.
        Raises AlreadyUnderWay: it is being sent already, or waits."""
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

    def source_of(self, blob: BlobId) -> BlobSource | None:
        outgoing = self._outgoing.get(blob)
        return None if outgoing is None else outgoing.source

    @property
    def waiting(self) -> list[BlobId]:
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

    def waits(self, now: float) -> bool | None:
        """Whether a blob could go on now: True for a background one while no other could, False for one that is not,
        None for none."""
        found = self._next(now, background=True)
        return None if found is None else found[0].background

    def begin(self, blob: BlobId, source: BlobSource, *, pushed: bool, background: bool = False) -> None:
        """Send `blob`: at once within the early window, but for a `background` one; the rest when a Credit comes."""
        limit = 0 if background else source.size
        self._outgoing[blob] = Outgoing(blob, source, limit, self._flight, pushed=pushed, background=background)

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        """Allow the peer to send `blob`; its chunks that are here already count.
        Raises AlreadyUnderWay: expected already. Raises LimitReached: too many at once. Raises LocalProtocolError:
        empty, or too large."""
        key = blob_key(blob)
        if key in self._incoming:
            raise AlreadyUnderWay(f"{blob} is expected already")
        if not 0 < size <= self._limits.max_blob_bytes:
            raise LocalProtocolError(f"{blob} of {size} bytes, at most {self._limits.max_blob_bytes} are taken")
        if len(self._incoming) >= self._limits.max_blobs:
            raise LimitReached(f"{len(self._incoming)} blobs are expected")
        if reassembly is None or (reassembly.size, reassembly.digest) != (size, digest):
            reassembly = Reassembly(size, digest)
        if blob.kind is BlobKind.PROBE:
            self._probe_key = key
        incoming = self._incoming[key] = Incoming(blob, reassembly, now, self._timing.credit_delay_s)
        for frame, num_bytes in self._pop_early(key):
            if frame.end <= size:
                reassembly.add(frame.offset, frame.chunk)
                self._traffic.adopt(blob.kind, num_bytes)
        self._say_credit(incoming.credit(now))
        self._finish_if_complete(key, incoming)
        return reassembly

    def cancel(self, blob: BlobId) -> None:
        """Stop sending it; or else stop, or refuse, to receive it, of which the peer hears."""
        if self.drop(blob):
            return
        key = blob_key(blob)
        incoming = self._no_more(key)
        self._pop_early(key)
        self._say_credit(Credit(blob=blob, received=incoming.reassembly.received if incoming else 0, limit=0))

    def drop(self, blob: BlobId) -> bool:
        """Send no more of a blob; whether it was being sent, or waited."""
        waited = [queued.pop(blob, None) for queued in self._queued.values()]
        if (outgoing := self._outgoing.pop(blob, None)) is not None:
            outgoing.give_up()
        return outgoing is not None or any(waited)

    def credited(self, credit: Credit, now: float) -> None:
        """A Credit of the peer; of an unknown blob it is one that crossed our end of it."""
        self.peer_early = credit.early
        outgoing = self._outgoing.get(credit.blob)
        if outgoing is None:
            return
        if credit.limit == 0:
            self.drop(credit.blob)
            self._emit(BlobDeclined(blob=credit.blob))
            return
        before, was_credited = outgoing.acked, outgoing.credited
        islands = list(zip(credit.islands[::2], credit.islands[1::2], strict=False))
        outgoing.credit(credit.received, credit.limit, now, arrived=credit.arrived, islands=islands)
        if outgoing.acked > before or not was_credited:
            self._waits_since = None
        self._traffic.arrived_bytes += outgoing.acked - before
        if outgoing.done:
            del self._outgoing[credit.blob]
            self._emit(BlobSent(blob=credit.blob))

    def admit(self, frame: BulkFrame) -> None:
        """Check a chunk against its blob before anything is changed.
        Raises RemoteProtocolError: it goes beyond the credit that was granted."""
        incoming = self._incoming.get(frame.key)
        if incoming is not None and frame.end > (size := incoming.reassembly.size):
            raise RemoteProtocolError(f"bytes up to {frame.end} of {incoming.blob}, allowed are {size}")

    def accept(self, frame: BulkFrame, num_bytes: int, now: float) -> None:
        """Take in an admitted chunk that took `num_bytes` on the wire."""
        self._arrivals.add(len(frame.chunk), now)
        incoming = self._incoming.get(frame.key)
        if incoming is None and frame.key == self._probe_key:  # ended here, and not there yet
            self._traffic.received_blobs[BlobKind.PROBE].add(num_bytes)
            return
        if incoming is None:
            self._traffic.stray.add(num_bytes)
            self._store_early(frame, num_bytes)
            return
        self._traffic.received_blobs[incoming.blob.kind].add(num_bytes)
        if self.meter.busy or incoming.blob.kind is not BlobKind.SNAPSHOT:
            self.meter.arrived(len(frame.chunk), now)
        before = incoming.reassembly.received
        incoming.reassembly.add(frame.offset, frame.chunk)
        if incoming.reassembly.received > before:
            incoming.grew_at = now
        self._renew(incoming, now, THIN_CHUNK if len(frame.chunk) == THIN_CHUNK else SMALLEST_CHUNK)
        self._finish_if_complete(frame.key, incoming)

    def lane_lost(self, number: int) -> None:
        """What was sent on this lane and is not known to have arrived is sent again, before anything else."""
        if (lane := self.lanes.lost(number)) is not None:
            for outgoing in self._outgoing.values():
                outgoing.give_up(lane)

    def next_chunk(
        self, now: float, *, background: bool = True, full: Collection[int] = ()
    ) -> tuple[int, BlobId, int, memoryview] | None:
        """(lane, blob, offset, bytes) of the chunk whose turn it is, or None while no blob has credit, or no lane takes
        one but those that are `full`.

        A background blob has its turn, if at all, when no other has credit.
        """
        found, self._held_until = self._next(now, background=background), None
        if found is not None and self._uplink is not None and not self._uplink.allows(now):
            self._held_until = self._uplink.free_at
            return None
        if found is None:
            return None
        outgoing, num_bytes = found
        lane = self.lanes.first(num_bytes, full)
        if lane is None:
            return None
        in_flight = self.live_in_flight + self.background_in_flight
        chunk = outgoing.next_chunk(num_bytes, in_flight, now, lane)
        assert chunk is not None
        self._outgoing.move_to_end(outgoing.blob)
        return lane.number, outgoing.blob, *chunk

    def _next(self, now: float, *, background: bool) -> tuple[Outgoing, int] | None:
        """The blob whose turn it is, with the bytes of its next chunk."""
        if not self._outgoing:
            self._flight.ran_dry(now)
            return None
        blobs, held = self._outgoing.values(), False
        window = self._flight.window(self.peer_early, now)
        chunk_bytes = self._chunk_bytes(window)
        flying = sum(outgoing.in_flight for outgoing in blobs if outgoing.credited)
        early = sum(outgoing.early_bytes for outgoing in blobs)
        offered = sum(outgoing.early_bytes for outgoing in blobs if not outgoing.pushed)
        for outgoing in sorted(blobs, key=lambda outgoing: outgoing.background):
            room = outgoing.room
            if not outgoing.credited:
                room = min(room, self.peer_early - early)
                if self._flight.known:
                    room = min(room, max(window - flying - early, chunk_bytes if flying + early == 0 else 0))
                if not outgoing.pushed:  # it may be declined: no more than fills the time until then
                    room = min(room, max(self._flight.product, chunk_bytes) - offered)
            num_bytes = min(chunk_bytes, room)
            if num_bytes <= 0:
                continue
            full = outgoing.credited and flying > 0 and flying + num_bytes > window
            if full or (outgoing.background and not background):
                held = True
            else:
                return outgoing, num_bytes
        if not held:  # at this end, by the flight window or because it is in the background
            self._flight.ran_dry(now)
        return None

    def _chunk_bytes(self, window: int) -> int:
        """Of the chunks that leave: a 64th of a lane's share of the flight window, which blobs share by turns, or what
        a lane carries in `CHUNK_S`. A limit of the uplink makes them smaller."""
        num_lanes, num_bytes = max(1, len(self.lanes)), self._limits.chunk_bytes
        if num_bytes is None:
            least = (SMALLEST_CHUNK if num_lanes == 1 else SHARED_CHUNK) if window >= LEAST_FLIGHT else THIN_CHUNK
            share = max(1, window // (64 * num_lanes), int(CHUNK_S * self._flight.bytes_per_s) // num_lanes)
            num_bytes = min(max(1 << share.bit_length() - 1, least), LARGEST_CHUNK)
        most = None if self._uplink is None else self._uplink.chunk_bytes
        return num_bytes if most is None else min(num_bytes, most)

    def next_timer(self) -> float | None:
        """When the first blob is to be sent again, or given up."""
        if not (self._outgoing or self._incoming):
            return self._held_until
        rewinds = [deadline for _, deadline in self._deadlines()]
        stalls = [self._stalls_at] if self._stalls_at is not None else []
        credits = [incoming.due_at for incoming in self._incoming.values() if incoming.due_at is not None]
        idle = [self._idle_at(incoming) for incoming in self._patient()]
        held = [self._held_until] if self._held_until is not None else []
        return min([*rewinds, *stalls, *credits, *idle, *held], default=None)

    def handle_timer(self, now: float) -> None:
        """Rewind every sent blob whose time is up; decline every expected one that stands still; report arrivals."""
        for incoming in self._incoming.values():
            self._renew(incoming, now)
        for outgoing, deadline in self._deadlines():
            if now >= deadline:
                outgoing.rewind()
                self._traffic.rewinds += 1
        for incoming in [incoming for incoming in self._patient() if now >= self._idle_at(incoming)]:
            self.cancel(incoming.blob)
            self._emit(BlobIdle(blob=incoming.blob))

    def is_stalled(self, now: float) -> bool:
        return self._stalls_at is not None and now >= self._stalls_at

    def track_wait(self, now: float) -> None:
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
            outgoing.check()
        self.lanes.check()
        assert self.lanes.in_flight == sum(outgoing.flying for outgoing in self._outgoing.values())
        for incoming in self._incoming.values():
            incoming.reassembly.check()
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

    def _deadlines(self) -> list[tuple[Outgoing, float]]:
        waiting = [outgoing for outgoing in self._outgoing.values() if outgoing.credited and outgoing.unacknowledged]
        return [(outgoing, outgoing.deadline()) for outgoing in waiting]

    def _store_early(self, frame: BulkFrame, num_bytes: int) -> None:
        """Keep a chunk that may have overtaken its announcement; the oldest make room."""
        if frame.key in self._finished or frame.end > self.early_bytes:
            return
        self._early.append((frame, num_bytes))
        self._early_bytes += len(frame.chunk)
        while self._early_bytes > self.early_bytes or len(self._early) > EARLY_FRAMES:
            dropped, _ = self._early.popleft()
            self._early_bytes -= len(dropped.chunk)

    def _pop_early(self, key: bytes) -> list[tuple[BulkFrame, int]]:
        """The chunks that are kept of this blob; no longer kept."""
        found = [(frame, num_bytes) for frame, num_bytes in self._early if frame.key == key]
        if found:
            self._early = deque((frame, num_bytes) for frame, num_bytes in self._early if frame.key != key)
            self._early_bytes -= sum(len(frame.chunk) for frame, _ in found)
        return found

    def _renew(self, incoming: Incoming, now: float, least: int = SMALLEST_CHUNK) -> None:
        """Say how much has arrived of a blob, if that is worth a Credit: `least` bytes, which are a chunk of a thin
        link. The blobs of a session share its windows, so that each has fewer unreported bytes the more there are."""
        shared = self.early_bytes // (64 * len(self._incoming))
        credit = incoming.renewed_credit(now, max(least, shared))
        if credit is not None:
            self._say_credit(credit)

    def _say_credit(self, credit: Credit) -> None:
        self._say(replace(credit, early=self.early_bytes))

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
        self._finished[key] = None
        if len(self._finished) > _FINISHED_KEYS:
            self._finished.popitem(last=False)
        if all(other.blob.kind is BlobKind.SNAPSHOT for other in self._incoming.values()):
            self.meter.end_burst()
        return incoming
