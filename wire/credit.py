"""Flow control of one blob: what its sender may send (`Outgoing`) and what its receiver allows (`Incoming`)."""

from farloop.algo.spec import BlobId
from farloop.wire.blobs import BlobSource, Reassembly
from farloop.wire.limits import SMALLEST_CHUNK, Limits, Timing
from farloop.wire.messages import Credit

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
        self.pushed = limit > 0
        """Whether it may begin within the initial credit, before the peer grants any."""
        self.background = background
        """Whether it yields to every other blob."""
        self.acked = 0
        self.sent = 0
        self.limit = min(limit, source.size)
        self.credited = False
        """Whether a Credit came. Before, nobody may be expecting this blob: nothing is sent twice."""
        self._pace = pace
        self._moved_at = 0.0
        """When a chunk last left or an acknowledgement came."""
        self._queue_bytes = 0
        """Bytes of all blobs in flight when the last chunk left: it arrives behind them."""
        self._stalls = 0
        """Rewinds since the last acknowledgement."""
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
        self.grew_at = now
        """When it was last further than before."""
        self.limit = 0
        """No byte at or beyond it may come."""

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
