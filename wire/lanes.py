"""The bulk lanes of a session: which of them the next chunk leaves on."""

from collections import deque
from collections.abc import Collection
from typing import Final

from farloop.wire.limits import MOST_LANES
from farloop.wire.messages import Connection

_RATES = 10  # a lane's rate is the highest of so many, each of one round trip or more

THIN_BYTES_PER_S: Final = 50e6 / 8
"""Up to this rate one lane is enough, and control waits least behind it."""

FAT_BYTES: Final = 1 << 20
"""... and up to this product of rate and round trip: a connection regains such a window in a few round trips."""

WARM_LANES: Final = 4
"""On other links. One lane's window covers the link until a packet is lost; then only a quarter of it shrinks, where
there are four (docs/network.md has the measurement)."""


LONG_S: Final = 0.02  # from this round trip on, loss costs most congestion controls more than the bytes lost
LEAST_RETRANSMITS: Final = 8  # fewer show no rate of loss
_SEGMENT: Final = 1448  # bytes, of an Ethernet's packet


def lanes_needed(bytes_per_s: float, round_trip_s: float, kernel: Connection | None) -> int:
    """How many bulk lanes fill a link that has carried `bytes_per_s`, with as many lanes as there were. `kernel`: what
    is known of a lane's connection; BBR's does not mind loss.

    Loss bounds the mean window of a CUBIC connection to 1.054 (RTT ÷ p)^¾ segments (RFC 8312, section 5.1). Where lanes
    are bounded so, the rate grows with their number: twice as many are asked for as would carry what there was. Loss
    behind a queue (the round trip has grown by half) is the link's own limit, and more lanes would only make it longer.
    """
    if kernel is not None and kernel.retransmits >= LEAST_RETRANSMITS and not kernel.congestion.startswith("bbr"):
        rtt_s, loss = kernel.least_rtt_s, kernel.retransmits / max(kernel.segments, kernel.retransmits)
        alone: float = 1.054 * (rtt_s / loss) ** 0.75 * _SEGMENT / rtt_s
        if rtt_s >= LONG_S and kernel.rtt_s < 1.5 * rtt_s and bytes_per_s > alone / 2:
            return max(1, min(round(2 * bytes_per_s / alone), MOST_LANES))
    fat = bytes_per_s > THIN_BYTES_PER_S and bytes_per_s * round_trip_s > FAT_BYTES
    return WARM_LANES if fat else 1


_DOUBT = 8.0  # a lane that a time-out befell is thought to be this much slower, until it proves otherwise


class Lane:
    """One bulk lane, as the acknowledgements of what was sent on it show it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.in_flight = 0  # bytes sent on it that are not known to have arrived
        self.arrived = 0  # bytes that are
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._rate_at = float("-inf")  # when the last of them was begun
        self._doubt = 1.0  # how much slower than the others it is thought to be, before it has brought anything

    @property
    def bytes_per_s(self) -> float:
        """The highest rate of late; 0 before the first acknowledgement."""
        return max(self._rates, default=0.0)

    def rate(self, usual: float) -> float:
        """The same, by the `usual` one before the first acknowledgement."""
        return self.bytes_per_s or usual / self._doubt

    def brought(self, num_bytes: int, sent_at: float, arrived: int, now: float) -> None:
        """A chunk is known to have arrived. `arrived`: what had arrived on this lane when it was sent."""
        self.arrived += num_bytes
        rate = (self.arrived - arrived) / max(now - sent_at, 1e-6)
        if sent_at >= self._rate_at:
            self._rates.append(rate)
            self._rate_at = now
        else:
            self._rates[-1] = max(self._rates[-1], rate)

    def doubt(self) -> None:
        """Nothing that was sent on it arrived in time."""
        self._rates = deque((rate / _DOUBT for rate in self._rates), maxlen=_RATES)
        self._doubt *= _DOUBT


class Lanes:
    """All that are open. Of those that take a chunk now, the one that will have brought it first gets it: all end
    together. Only the ratios of the rates matter: a lane that was given too much is seen to be slow, and one that was
    given too little is soon empty, and then the first."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def __contains__(self, number: int) -> bool:
        return number in self._lanes

    @property
    def in_flight(self) -> int:
        return sum(lane.in_flight for lane in self._lanes.values())

    def opened(self, number: int) -> None:
        self._lanes[number] = Lane(number)

    def lost(self, number: int) -> Lane | None:
        """It is gone, and is not used any more. None where it was not open."""
        return self._lanes.pop(number, None)

    def first(self, num_bytes: int, full: Collection[int] = ()) -> Lane | None:
        """The lane that will have brought so many bytes first; none of the `full` ones, which take nothing now."""
        known = [lane.bytes_per_s for lane in self._lanes.values() if lane.bytes_per_s]
        usual = sum(known) / len(known) if known else 1.0
        ready = [lane for number, lane in self._lanes.items() if number not in full]
        return min(ready, key=lambda lane: (lane.in_flight + num_bytes) / lane.rate(usual), default=None)

    def check(self) -> None:
        assert all(lane.in_flight >= 0 for lane in self._lanes.values())
