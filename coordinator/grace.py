"""How long a window waits for those who are later than its quorum: as long as they have lately been late. Pure.

A guessed constant is wrong on every network but one. What counts is how late deltas came after the quorum of the window
they name, whether it was still open or not (arXiv 2604.21428 has a grace window of this kind; the rule is ours).
"""

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Final

from farloop.algo.methods import method_named
from farloop.algo.spec import Terms
from farloop.coordinator.windows import Window
from farloop.wire.messages import Offer

_MEMORY: Final = 64
"""Recent deltas, and windows, that are remembered."""

_SHARE: Final = 0.5
"""Of a window's usual time to its quorum: who is later than that is not waited for, or all would run at its pace."""

_HEADROOM: Final = 2.0
"""Times the greatest lateness seen: the next one may well be greater."""


class Grace:
    """What was seen of arrivals, and what follows for open windows. Forgotten at a restart."""

    def __init__(self, terms: Terms, quorum_of: Callable[[Window], int | None] | None = None) -> None:
        """`quorum_of`: a window's own quorum; that of `terms` unless given."""
        self._enabled = method_named(terms.method).grace
        self._quorum_of = quorum_of or (lambda window: terms.quorum)
        self._quorum_at: dict[tuple[int, int], float] = {}
        """Of recent windows, by fragment and number."""
        self._lateness_s: deque[float] = deque(maxlen=_MEMORY)
        self._to_quorum_s: deque[float] = deque(maxlen=_MEMORY)

    def came(self, offer: Offer, now: float) -> None:
        """A delta is here; it is late by the time since the quorum of the window it names."""
        self._lateness_s.append(now - self._quorum_at.get((offer.blob.fragment, offer.window), now))

    def look_at(self, window: Window, now: float) -> None:
        """Remember when an open window has its quorum."""
        quorum = self._quorum_of(window)
        if quorum is None or window.quorum_at is not None or window.toward_quorum < quorum:
            return
        window.quorum_at = now
        self._to_quorum_s.append(now - window.opened_at)
        fragment, number = window.terms.fragment, window.terms.window
        self._quorum_at[fragment, number] = now
        oldest = number - window.max_staleness
        self._quorum_at = {key: at for key, at in self._quorum_at.items() if key[0] != fragment or key[1] >= oldest}

    def clock_jumped(self, seconds: float) -> None:
        """This process stood still: nobody was late by that."""
        self._quorum_at = {key: at + seconds for key, at in self._quorum_at.items()}

    @property
    def seconds(self) -> float | None:
        """From the quorum to the window's end; None while too little was seen: all that are expected are waited for."""
        if not self._to_quorum_s or not any(late > 0.0 for late in self._lateness_s):
            return None
        bound = _SHARE * median(self._to_quorum_s)
        # The latest, not most of them: a delta that is left out costs its sender the next turn as well, and training
        # stands still nowhere in the meantime.
        return min(bound, _HEADROOM * max((late for late in self._lateness_s if late <= bound), default=0.0))

    def until(self, window: Window) -> float | None:
        """When an open window that has its quorum stops waiting for the others; None: by no clock."""
        seconds = self.seconds
        if not self._enabled or window.quorum_at is None or window.state != "open" or seconds is None:
            return None
        return window.quorum_at + seconds

    def deadlines(self, windows: Iterable[Window], now: float) -> list[float]:
        """When to look at windows again; not those that have passed and changed nothing, as below the floor."""
        untils = [self.until(window) for window in windows]
        return [until for until in untils if until is not None and until > now]

    def lasts(self, window: Window, now: float) -> bool:
        """Whether those who are missing have more time than the quorum took."""
        until = self.until(window)
        return self._enabled and (until is None or now < until)
