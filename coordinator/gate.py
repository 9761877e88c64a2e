"""How much one key, or one address, may ask of the coordinator, and how often. Pure: the time is passed in.

A token bucket each: an honest node never meets its bottom, however many of them come back at once after an outage. Who
does is not punished: a greeting that is passed over is sent again by its session, and is heard once there is room.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from farloop.wire import messages as msg
from farloop.wire.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many at once, and so many a second from then on."""

    per_s: float
    burst: float


GREETINGS_OF_A_KEY: Final = Rate(per_s=0.5, burst=10)
"""Sessions that one node may begin. A link that breaks every second is as good as none."""

GREETINGS_OF_AN_ADDRESS: Final = Rate(per_s=32, burst=512)
"""... and all nodes behind one address, where nobody has a key. A site of hundreds comes back at once."""

SESSIONS_OF_A_KEY: Final = 2
"""One that is open and one that takes its place; the oldest makes room for a third."""

SESSIONS_OF_AN_ADDRESS: Final = 512
"""... where nobody has a key."""

SESSIONS: Final = 1024
"""Over all."""

_MESSAGES: Final[dict[type[msg.Message], Rate]] = {
    msg.Offer: Rate(per_s=500, burst=4096),
    msg.Fetch: Rate(per_s=2, burst=1024),
    msg.Evaluation: Rate(per_s=2, burst=64),
    msg.Progress: Rate(per_s=20, burst=256),
    msg.Observed: Rate(per_s=20, burst=256),
    msg.Ready: Rate(per_s=2, burst=64),
}
"""Of one node. The bursts are for all fragments at once; `data-parallel` offers one delta for every inner step."""

_REMEMBERED: Final = 4096
"""Buckets; beyond it the one that was asked longest ago is taken for full."""


class Bucket:
    """Fills at its rate up to its burst; each thing asked for takes one from it."""

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate, self._level, self._at = rate, rate.burst, now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Whether there was enough; nothing is taken otherwise."""
        self._level = min(self._rate.burst, self._level + self._rate.per_s * max(0.0, now - self._at))
        self._at = now
        if self._level < amount:
            return False
        self._level -= amount
        return True


class Gate:
    """Of one coordinator. Whoever is known by a key is counted by it, whoever is not by the address."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()
        self._sessions: Counter[str] = Counter()

    def greets(self, who: str, address: str | None, now: float) -> Reason | None:
        """Whether a new session may be begun: None, or why not yet.

        Args:
            who: the key's owner, or where there are no keys the name in the greeting.
            address: of who has no key; None of an owner.
        """
        if self._sessions.total() >= SESSIONS:
            return Reason.CROWDED
        if address is None:
            return None if self._take("greeting", who, GREETINGS_OF_A_KEY, now) else Reason.TOO_OFTEN
        if self._sessions[address] >= SESSIONS_OF_AN_ADDRESS:
            return Reason.CROWDED
        if not self._take("greeting", f"{who} at {address}", GREETINGS_OF_A_KEY, now):
            return Reason.TOO_OFTEN
        return None if self._take("greetings", address, GREETINGS_OF_AN_ADDRESS, now) else Reason.TOO_OFTEN

    def says(self, who: str, message: msg.Message, now: float) -> Reason | None:
        """Whether a message of an open session is heard: None, or why the session must end."""
        rate = _MESSAGES.get(type(message))
        if rate is None or self._take(type(message).__name__, who, rate, now):
            return None
        return Reason.TOO_OFTEN

    def begun(self, counted_as: str) -> None:
        """A session of this owner or address has begun."""
        self._sessions[counted_as] += 1

    def ended(self, counted_as: str) -> None:
        """It is over."""
        self._sessions[counted_as] -= 1
        if not self._sessions[counted_as]:
            del self._sessions[counted_as]

    def sessions_of(self, counted_as: str) -> int:
        """How many there are."""
        return self._sessions[counted_as]

    def _take(self, what: str, who: str, rate: Rate, now: float) -> bool:
        key = (what, who)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(rate, now)
            if len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket.take(now)
