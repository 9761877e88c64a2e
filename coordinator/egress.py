"""How much of the way out downloads may take: a share while others wait for bytes, all of it when nobody does.

Pure: the time is passed in. Snapshots are background blobs (`wire/transfer.py`): within a session they yield to every
update. Between sessions nothing but this keeps them apart, for they meet on the coordinator's own link, behind every
queue that could be reordered.
"""

from typing import Final

SHARE: Final = 0.25
"""Of the measured rate, for background bytes while live ones are on their way."""

SLOWEST_BYTES_PER_S: Final = 256 << 10
"""The background's own while live bytes are on their way, however thin the link: a joiner gets in at last."""

AHEAD_S: Final = 0.1
"""While there are updates now and then, the background has no more than so much of the link on its way: what has left
cannot make room any more when one comes. Up to a round trip of 0.4 s that is enough for its share."""

AHEAD_BYTES: Final = 256 << 10
"""... or this much, where that is more."""

LATELY_S: Final = 10.0
"""Without an update for this long the background has no such bound, and fills a link of any round trip."""

NUDGE_S: Final = 2.0
"""A session whose bytes have stood still for this long gets another chunk: its peer may acknowledge them together."""

STALE_S: Final = 5.0
"""Bytes that nobody acknowledged for this long do not count: who does not take them keeps nobody else waiting."""

_BIN_S: Final = 0.5
"""Rates are measured over this."""

_FADES_PER_S: Final = 0.98
"""What was once measured counts less with time: links change."""

_BURST_S: Final = 0.5
"""The background may save up what it gets in so much time."""


class Egress:
    """Of one coordinator, over all sessions."""

    def __init__(self, now: float) -> None:
        self._live: dict[int, float] = {}
        """Session → when its live bytes in flight last moved."""
        self._ahead: dict[int, tuple[int, float]] = {}
        """Session → background bytes in flight, and when they last moved."""
        self._live_at = float("-inf")
        """When live bytes last moved."""
        self._best = 0.0
        """Bytes a second, faded."""
        self._bin, self._bin_bytes = now, 0
        self._tokens, self._filled_at = 0.0, now

    @property
    def bytes_per_s(self) -> float:
        """What the background gets while live bytes are on their way."""
        return max(SHARE * self._best, SLOWEST_BYTES_PER_S)

    def arrived(self, num_bytes: int, now: float) -> None:
        """A peer acknowledged bytes: the only ones of which it is known how fast they went."""
        self._bin_bytes += num_bytes
        passed = now - self._bin
        if passed >= _BIN_S:
            self._best = max(self._best * _FADES_PER_S**passed, self._bin_bytes / passed)
            self._bin, self._bin_bytes = now, 0

    def live(self, session: int, in_flight: int, *, moved: bool, now: float) -> None:
        """A session has so many live bytes on their way; `moved`: some more, or fewer, than when that was last said."""
        if not in_flight:
            self._live.pop(session, None)
        elif moved or session not in self._live:
            self._live[session] = self._live_at = now

    def background(self, session: int, in_flight: int, *, moved: bool, now: float) -> None:
        """The same of its background bytes."""
        if not in_flight:
            self._ahead.pop(session, None)
        elif moved or session not in self._ahead:
            self._ahead[session] = (in_flight, now)

    def gone(self, session: int) -> None:
        """It is over."""
        self._live.pop(session, None)
        self._ahead.pop(session, None)

    def allows(self, session: int, now: float) -> bool:
        """Whether a background chunk of this session may leave now."""
        ahead = sum(in_flight for in_flight, moved_at in self._ahead.values() if now - moved_at < STALE_S)
        _, moved_at = self._ahead.get(session, (0, now))
        lately = now - self._live_at < LATELY_S
        if lately and ahead >= max(AHEAD_S * self._best, AHEAD_BYTES) and now - moved_at < NUDGE_S:
            return False
        if not any(now - moved_at < STALE_S for moved_at in self._live.values()):
            self._tokens, self._filled_at = 0.0, now
            return True
        self._fill(now)
        return self._tokens >= 0

    def spent(self, num_bytes: int, now: float) -> None:
        """A background chunk has left; it may be more than was there, and is paid for afterwards."""
        self._fill(now)
        self._tokens -= num_bytes

    def wait_s(self, now: float) -> float:
        """How long until `allows` may say yes, if nothing else happens."""
        self._fill(now)
        return max(0.0, -self._tokens / self.bytes_per_s)

    def _fill(self, now: float) -> None:
        rate = self.bytes_per_s
        self._tokens = min(self._tokens + rate * (now - self._filled_at), rate * _BURST_S)
        self._filled_at = now
