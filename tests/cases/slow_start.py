"""A link with TCP on it, as its receiver sees it: slow start, a bottleneck, and a bucket that lets bursts through."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_WINDOW = 14_500
"""Bytes in the first round trip: ten segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """Arrivals of one transfer on a fresh connection."""

    bytes_per_s: float
    rtt_s: float
    chunk_bytes: int = 256 << 10
    bucket_bytes: float = 0.0
    """What passes at ten times the rate whenever the link has rested for long enough."""
    jitter: float = 0.0
    """Of each arrival, as a share of a chunk's time on the link."""

    @property
    def bdp_bytes(self) -> float:
        return self.bytes_per_s * self.rtt_s

    def arrivals(self, num_bytes: int, seed: int = 0) -> Iterator[tuple[float, int]]:
        """(time, bytes) of every chunk. Windows double each round trip, and one window follows the other without a
        pause once it is larger than the bandwidth-delay product."""
        rng = random.Random(seed)
        sent, due, starts_at, window = 0, 0, 0.0, float(FIRST_WINDOW)
        free_at, tokens, filled_at, last = 0.0, self.bucket_bytes, 0.0, 0.0
        while sent < num_bytes:
            part = min(window, num_bytes - sent)
            begins = max(starts_at, free_at)
            tokens = min(self.bucket_bytes, tokens + self.bytes_per_s * (begins - filled_at))
            fast = min(part, tokens)
            tokens, crossed = tokens - fast, 0.0
            while due < sent + part:
                chunk = min(self.chunk_bytes, num_bytes - due)
                if due + chunk > sent + part:
                    break
                crossed = due + chunk - sent
                late = self.jitter * rng.random() * chunk / self.bytes_per_s
                last = max(last, begins + self._seconds(crossed, fast) + late)
                due += chunk
                yield last, chunk
            free_at = filled_at = begins + self._seconds(part, fast)
            sent += int(part)
            starts_at, window = begins + self.rtt_s, min(2 * window, 4 * self.bdp_bytes + FIRST_WINDOW)

    def _seconds(self, num_bytes: float, fast: float) -> float:
        return min(num_bytes, fast) / (10 * self.bytes_per_s) + max(0.0, num_bytes - fast) / self.bytes_per_s
