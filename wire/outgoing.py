"""Blobs on their way out: how much may be in flight, and what of each is still to be sent."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from farloop.algo.spec import BlobId
from farloop.wire.blobs import BlobSource, Ranges
from farloop.wire.lanes import Lane
from farloop.wire.limits import INITIAL_FLIGHT, LEAST_FLIGHT, THIN_CHUNK, Timing

_SLOWEST_LINK_BYTES_PER_S = 64 << 10
"""Assumed before anything is known; a link below half of this (256 kbit/s) is served, but with chunks sent twice."""

_LONGEST_TIMEOUT_S = 120.0  # of a blob at first, however much is in flight

_MOST_DOUBLINGS = 3

_RATES = 10  # the flight window follows the highest of so many rates, each of one round trip or two

_DRAIN_S = 50.0
"""A shortest round trip that is older than this is measured anew, with less in flight than fills the link: behind a
window of twice the product every round trip is twice as long, and the window would double each time."""

_FLOOR_S = 0.25
"""On a thin link the window holds this much of it: chunks and their Credits are not all there is. What it holds beyond
rate × round trip stands in the link's queue, where control messages wait behind it."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk that is on its way, as it was when it left: its acknowledgement is a sample of the link."""

    start: int
    end: int
    lane: Lane
    lane_arrived: int  # bytes that this lane had brought
    arrived: int  # bytes of all blobs that had arrived
    queued: int  # bytes in flight, it included
    at: float
    early: bool  # whether it had no credit: its acknowledgement waits for more than the link
    again: bool  # whether its bytes may have been sent before: then its acknowledgement measures nothing


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
        self.round_trip_s = 0.0  # the shortest; 0 before the first sample
        self._round_trip_at = float("-inf")  # when it was measured
        self._drained = 0  # the last window for measuring it anew
        self._dry_at = float("-inf")  # when there was last nothing to send
        self.known = False  # whether a sample was limited by the link or the window, not by what there was to send
        self.arrived = 0  # bytes of all blobs, as the peer told
        if known is not None and known.bytes_per_s > 0.0 and known.round_trip_s > 0.0:
            self._rates.append(known.bytes_per_s)
            self.round_trip_s, self._round_trip_at, self.known = known.round_trip_s, now, True

    @property
    def bytes_per_s(self) -> float:
        """The highest rate of late; 0 before the first sample."""
        return max(self._rates, default=0.0)

    @property
    def product(self) -> int:
        """Bytes that fill the link for two round trips; 0 before the first sample."""
        return int(2 * self.bytes_per_s * self.round_trip_s)

    def window(self, peer_early: int, now: float) -> int:
        """Bytes that may be in flight. A receiver that keeps many `peer_early` bytes reports them in larger pieces."""
        if not self.known:
            return max(self.product, INITIAL_FLIGHT)
        floor = int(min(max(LEAST_FLIGHT, peer_early // 4), self.bytes_per_s * _FLOOR_S))
        if now - self._round_trip_at > _DRAIN_S:
            self._drained = max(self.product * 3 // 8, floor // 2, THIN_CHUNK)
            return self._drained
        return max(self.product, floor, 2 * THIN_CHUNK)

    def ran_dry(self, now: float) -> None:
        """There is nothing to send: what is in flight does not show what the link carries."""
        self._dry_at = now

    def measured(self, mark: _Chunk, now: float) -> None:
        seconds = max(now - mark.at, 1e-6)
        usual = mark.queued / max(seconds, 1e-3)
        self._usual_bytes_per_s = max((self._usual_bytes_per_s + usual) / 2, _SLOWEST_LINK_BYTES_PER_S)
        drained = mark.at - self._round_trip_at > _DRAIN_S and mark.queued <= self._drained and not mark.early
        if not self.round_trip_s or seconds <= self.round_trip_s or drained:
            self.round_trip_s, self._round_trip_at = seconds, now
        rate = (self.arrived - mark.arrived) / seconds
        queued = seconds > 2 * self.round_trip_s  # behind more than fills the link
        limited = not mark.early and (queued or self._dry_at < mark.at)
        self.known = self.known or limited
        if not limited and rate <= self.bytes_per_s:
            return
        if mark.at >= self._rate_at or now > self._rate_at + 2 * self.round_trip_s:
            self._rates.append(rate)
            self._rate_at = now
        else:
            self._rates[-1] = max(self._rates[-1], rate)

    def timeout_s(self, num_bytes: int) -> float:
        """How long to wait for an acknowledgement with `num_bytes` in flight."""
        return max(self._rto_s, min(2 * num_bytes / self._usual_bytes_per_s, _LONGEST_TIMEOUT_S))


class Outgoing:
    """A blob on its way out: some bytes are to be sent, some are on their way, the rest has arrived."""

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
        self.acked = 0  # everything below has arrived
        self.limit = min(limit, source.size)
        self.credited = False
        """Whether a Credit came. Before, the peer may not expect this blob: nothing is sent twice."""
        self._to_send = Ranges((0, source.size))
        self._flying: dict[int, _Chunk] = {}  # chunks on their way, by their start
        self._arrived = 0  # bytes that have arrived, those beyond a gap included
        self._flight = flight
        self._moved_at = 0.0  # when a chunk last left or an acknowledgement came
        self._queue_bytes = 0  # bytes of all blobs in flight when the last chunk left: it arrives behind them
        self._stalls = 0  # time-outs since the last acknowledgement
        self._again_below = 0  # bytes below may have been sent already

    @property
    def done(self) -> bool:
        return self.acked == self.source.size

    @property
    def sent(self) -> int:
        """Bytes that are on their way or have arrived."""
        return self.source.size - self._to_send.num_bytes

    @property
    def early_bytes(self) -> int:
        """Bytes sent ahead of the first Credit."""
        return 0 if self.credited else self.sent

    @property
    def unacknowledged(self) -> int:
        """Bytes sent beyond what has arrived without a gap."""
        return self.sent - self.acked

    @property
    def in_flight(self) -> int:
        """Bytes sent that have not arrived."""
        return max(0, self.sent - self._arrived)

    @property
    def room(self) -> int:
        """Bytes of the largest chunk that may be next."""
        if (found := self._to_send.first) is None:
            return 0
        return max(0, min(found[1], self.limit) - found[0])

    def next_chunk(self, num_bytes: int, in_flight: int, now: float, lane: Lane) -> tuple[int, memoryview] | None:
        """(offset, bytes) of the next chunk, which leaves on `lane` behind `in_flight` bytes; None without credit."""
        found, num_bytes = self._to_send.first, min(num_bytes, self.room)
        if found is None or num_bytes <= 0:
            return None
        start, end = found[0], found[0] + num_bytes
        chunk = self.source.read(start, num_bytes)
        self._to_send.remove(start, end)
        self._moved_at = now
        self._queue_bytes = in_flight + num_bytes
        self._flying[start] = _Chunk(
            start, end, lane, lane.arrived, self._flight.arrived, self._queue_bytes, now, not self.credited,
            start < self._again_below,
        )  # fmt: skip
        lane.in_flight += num_bytes
        return start, chunk

    def credit(
        self, received: int, limit: int, now: float, *, arrived: int = 0, islands: Sequence[tuple[int, int]] = ()
    ) -> None:
        """The receiver has `received` bytes without a gap, `arrived` in all where that is more, some of them in the
        `islands`, and allows `limit`; a claim beyond the blob is cut short."""
        received = min(received, self.source.size)
        first = not self.credited
        if first:
            self.credited = True
            self._moved_at = now
        arrived = min(max(received, arrived), self.sent)  # the rest came in an earlier session
        self._flight.arrived += max(0, arrived - self._arrived)
        self._arrived = max(self._arrived, arrived, received)
        further, self.acked = received > self.acked, max(self.acked, received)
        self.limit = max(self.limit, min(limit, self.source.size), self.acked)
        there = Ranges((0, self.acked)) if self.acked else Ranges()
        for start, end in islands:
            if 0 <= start < end <= self.limit:
                there.add(start, end)
        if self._acknowledge(there, now, first) or further:
            self._moved_at = now
            self._stalls = 0

    def deadline(self) -> float:
        """When to give up waiting for an acknowledgement."""
        doublings = min(self._stalls, _MOST_DOUBLINGS)
        return self._moved_at + self._flight.timeout_s(self._queue_bytes) * (1 << doublings)

    def rewind(self) -> None:
        """Send everything again that is not known to have arrived."""
        if not self._flying and self.acked < self.limit:  # the receiver has not what it told of
            self._to_send.add(self.acked, self.limit)
        for lane in self.give_up():
            lane.doubt()
        self._stalls += 1

    def give_up(self, lane: Lane | None = None) -> list[Lane]:
        """Send everything again that is on its way, or on its way on `lane`. Returns the lanes that it was on."""
        lost = [chunk for chunk in self._flying.values() if lane is None or chunk.lane is lane]
        for chunk in lost:
            self._land(chunk)
            if chunk.end > self.acked:
                self._to_send.add(max(chunk.start, self.acked), chunk.end)
            self._again_below = max(self._again_below, chunk.end)
        return list({chunk.lane.number: chunk.lane for chunk in lost}.values())

    @property
    def flying(self) -> int:
        """Bytes of the chunks that are not known to have arrived."""
        return sum(chunk.end - chunk.start for chunk in self._flying.values())

    def check(self) -> None:
        self._to_send.check()
        assert 0 <= self.acked <= self.sent <= self.limit <= self.source.size
        assert self._to_send.num_bytes + self.flying <= self.source.size

    def _acknowledge(self, there: Ranges, now: float, first: bool) -> bool:
        """These bytes have arrived; whether that is news. The `first` Credit waited until the blob was expected; what
        later ones acknowledge came after that."""
        before = self._to_send.num_bytes
        for start, end in there:
            self._to_send.remove(start, end)
        ranges = list(there)
        newest: _Chunk | None = None
        landed = [chunk for chunk in self._flying.values() if _holds(ranges, chunk)]
        for chunk in landed:
            self._land(chunk)
            chunk.lane.brought(chunk.end - chunk.start, chunk.at, chunk.lane_arrived, now)
            if not chunk.again and (newest is None or chunk.at >= newest.at):
                newest = chunk
        if newest is not None:
            self._flight.measured(replace(newest, early=newest.early and first), now)
        return bool(landed) or self._to_send.num_bytes < before

    def _land(self, chunk: _Chunk) -> None:
        del self._flying[chunk.start]
        chunk.lane.in_flight -= chunk.end - chunk.start


def _holds(ranges: Sequence[tuple[int, int]], chunk: _Chunk) -> bool:
    """Whether one of these ascending ranges has all of the chunk."""
    found = bisect_right(ranges, chunk.start, key=lambda there: there[0]) - 1
    return found >= 0 and chunk.end <= ranges[found][1]
