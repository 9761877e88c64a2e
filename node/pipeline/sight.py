"""What a node sees of the link to another stage, without a byte more than has to be sent: round trip and rate. Pure.

Every frame tells when its sender made it, by the sender's own clock; a word says the last time back that came, and how
long ago. So a round trip needs one clock alone; and what a tensor took longer than the quickest word is the time of its
bytes, whatever the two clocks differ by. A tensor is one ZeroMQ message, which arrives whole: its arrival alone would
tell how often its sender has work, and nothing of the link (`wire/meter.py`).
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from farloop.wire.link_messages import Seen, Transfer

LOOKS_BACK_S: Final = 8.0
"""Words and tensors that are older say nothing any more: long beside the half second between words."""

LEAST_S: Final = 1e-3
"""What threads and loops of the two machines take: a tensor that took less took so long, as far as can be told."""

_MOST: Final = 1024
"""Of each kind that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """What the next word to the peer gives back."""

    sent_s: float
    """Of its newest word; 0 before there is one."""
    held_s: float
    """Since that came."""


class Sight:
    """Of one peer. Times of its clock are `sent_s`, of this node's `now`."""

    def __init__(self) -> None:
        self._newest: tuple[float, float] | None = None
        """Of its newest word: (sent_s, when it came)."""
        self._round_trips: deque[tuple[float, float]] = deque(maxlen=_MOST)
        """(when, seconds)"""
        self._offsets: deque[tuple[float, float]] = deque(maxlen=_MOST)
        """(when, now − sent_s) of words: the way here, and what the clocks differ by."""
        self._tensors: deque[tuple[float, int, float]] = deque(maxlen=_MOST)
        """(when, bytes, now − sent_s)"""

    def word(self, sent_s: float, echo: Echo, now: float) -> None:
        """A word came; one of an older node tells no time."""
        if not sent_s:
            return
        self._newest = sent_s, now
        self._offsets.append((now, now - sent_s))
        round_trip_s = now - echo.sent_s - echo.held_s
        if echo.sent_s and round_trip_s > 0.0:
            self._round_trips.append((now, round_trip_s))

    def tensor(self, num_bytes: int, sent_s: float, now: float) -> None:
        """A tensor came."""
        if sent_s:
            self._tensors.append((now, num_bytes, now - sent_s))

    def echo(self, now: float) -> Echo:
        """For the next word to the peer."""
        if self._newest is None:
            return Echo(sent_s=0.0, held_s=0.0)
        sent_s, came_at = self._newest
        return Echo(sent_s=sent_s, held_s=now - came_at)

    def seen(self, peer: str, now: float) -> Seen | None:
        """What to report; None before there is a round trip.

        The shortest of each counts: what takes longer stood in a queue.
        """
        for times in (self._round_trips, self._offsets, self._tensors):
            while times and times[0][0] < now - LOOKS_BACK_S:
                times.popleft()
        if not self._round_trips:
            return None
        return Seen(peer=peer, rtt_s=min(seconds for _, seconds in self._round_trips), transfer=self._transfer())

    def _transfer(self) -> Transfer | None:
        if not self._tensors or not self._offsets:
            return None
        least_s = min(seconds for _, seconds in self._offsets)
        took = [(num_bytes, max(LEAST_S, seconds - least_s)) for _, num_bytes, seconds in self._tensors]
        num_bytes, seconds = max(took, key=lambda one: one[0] / one[1])
        return Transfer(num_bytes=num_bytes, seconds=seconds)
