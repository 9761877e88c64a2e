"""What each node's rounds take, its steps and the bytes of its deltas, beside those of its own rounds before. Pure.

What is expected of a node is what it did before: the median of its own rounds, by step and by byte, so that H and bits
may change. The measured rate of its link is no such expectation: how many send at once, and what the coordinator's end
carries, is in a round and in no probe; and the rate follows a link that becomes slow within the round. So a node that
was slow from the beginning is as expected, and who has few rounds is not judged.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from farloop.algo.spec import BlobId
from farloop.coordinator.routing.anomalies import Kind, Sample
from farloop.coordinator.routing.rates import Pace

LEAST_ROUNDS: Final = 8
"""Of its own that a node is judged by."""

KEPT_ROUNDS: Final = 30
"""... of the last so many."""

USUAL_AFTER: Final = 60
"""Rounds in a row after which what is not as it was is what it is, and is planned for."""

JUDGED: Final = (Kind.NODE_SLOW, Kind.LINK_SLOW)


@dataclass(slots=True)
class _Own:
    """Of one start of a node."""

    incarnation: int
    unit_s: dict[Kind, deque[float]] = field(
        default_factory=lambda: {kind: deque[float](maxlen=KEPT_ROUNDS) for kind in JUDGED}
    )
    """Seconds of a step, and of a byte: of its rounds ..."""
    latest_s: dict[Kind, float] = field(default_factory=dict[Kind, float])
    """... and of the last one that had any."""
    reported: tuple[float, int] | None = None
    """(seconds without those that it stood still, steps) of its last report; None: what follows measures nothing."""
    units: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(JUDGED, 0))
    """Steps, and bytes, of this round ..."""
    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(JUDGED, 0.0))
    """... and what they took."""
    under_way: dict[BlobId, int] = field(default_factory=dict)
    """Deltas that are coming: bytes of each. While there are any, its link is at work."""
    began_at: float = 0.0
    """When the first of those came to be asked for, that the link has been at work with since."""
    came: int = 0
    """Bytes since then."""

    def rest(self) -> None:
        """What its link was at work with tells nothing."""
        self.under_way.clear()
        self.came = 0

    def expected(self, kind: Kind) -> tuple[float, float]:
        """Seconds of a unit, and the spread of their logarithms; 0 before that is known."""
        known = self.unit_s[kind]
        if len(known) < LEAST_ROUNDS:
            return 0.0, 0.0
        usual = median(known)
        return usual, median(abs(math.log(one / usual)) for one in known)

    def latest(self, kind: Kind) -> float | None:
        """Seconds of a unit in this round; None where it did none."""
        units, seconds = self.units[kind], self.seconds[kind]
        return seconds / units if units and seconds > 0.0 else None


class Pacing:
    """Of one coordinator's nodes. In memory only: after a restart all is learnt again."""

    def __init__(self) -> None:
        self._own: dict[str, _Own] = {}

    def keep(self, incarnations: Mapping[str, int]) -> None:
        """Only these starts of nodes still take part. Another start may be of another machine."""
        for node, incarnation in incarnations.items():
            if node not in self._own or self._own[node].incarnation != incarnation:
                self._own[node] = _Own(incarnation)
        self._own = {node: own for node, own in self._own.items() if node in incarnations}

    # --- what comes

    def reported(self, node: str, blocked_s: float, inner_steps: int, now: float, *, trains: bool = True) -> None:
        """It says how far it is. `trains`: it did nothing but steps; an evaluation is none."""
        if (own := self._own.get(node)) is None:
            return
        before, here = own.reported, (now - blocked_s, inner_steps)
        if not trains:
            own.reported = None
        elif before is None or inner_steps < before[1]:
            own.reported = here
        elif inner_steps > before[1]:
            if here[0] > before[0]:
                own.units[Kind.NODE_SLOW] += inner_steps - before[1]
                own.seconds[Kind.NODE_SLOW] += here[0] - before[0]
            own.reported = here

    def asked(self, blob: BlobId, num_bytes: int, now: float) -> None:
        """So many bytes of a delta are to come from now on."""
        own = self._own.get(blob.node)
        if own is None or blob in own.under_way:
            return
        if any(other.fragment == blob.fragment for other in own.under_way):
            own.rest()  # it takes the place of one that will not come
        if not own.under_way:
            own.began_at = now
        own.under_way[blob] = num_bytes

    def whole(self, blob: BlobId, now: float) -> None:
        """All of a delta's bytes are here. Deltas that come side by side share the link, and its seconds."""
        own = self._own.get(blob.node)
        if own is None or (num_bytes := own.under_way.pop(blob, None)) is None:
            return
        own.came += num_bytes
        if not own.under_way:
            own.units[Kind.LINK_SLOW] += own.came
            own.seconds[Kind.LINK_SLOW] += now - own.began_at
            own.came = 0

    def broken(self, node: str) -> None:
        """Its session ended, or a delta was given up."""
        if (own := self._own.get(node)) is not None:
            own.rest()
            own.reported = None

    def stood_still(self) -> None:
        """This process did: nothing that was going on can be timed."""
        for node in self._own:
            self.broken(node)

    # --- what it comes to

    def close(self, strays: Collection[tuple[Kind, str]]) -> dict[str, Sample]:
        """A round is over: by node what it took and what was expected of it, 0 where nothing is.

        `strays`: whose rounds are none to go by, as (kind, node).
        """
        samples: dict[str, Sample] = {}
        for node, own in self._own.items():
            (step_s, step_spread), (byte_s, byte_spread) = (own.expected(kind) for kind in JUDGED)
            samples[node] = Sample(
                compute_s=own.seconds[Kind.NODE_SLOW],
                expected_compute_s=step_s * own.units[Kind.NODE_SLOW],
                transfer_s=own.seconds[Kind.LINK_SLOW],
                expected_transfer_s=byte_s * own.units[Kind.LINK_SLOW],
                compute_spread=step_spread,
                transfer_spread=byte_spread,
            )
            for kind in JUDGED:
                if (unit_s := own.latest(kind)) is not None:
                    own.latest_s[kind] = unit_s
                    if (kind, node) not in strays:
                        own.unit_s[kind].append(unit_s)
                own.units[kind], own.seconds[kind] = 0, 0.0
        return samples

    def forget(self, kind: Kind, node: str) -> None:
        """It is planned for as it is now: what was usual before is not any more."""
        if node in self._own:
            self._own[node].unit_s[kind].clear()

    def paces(self) -> dict[str, Pace]:
        """Of those whose last rounds told of both, as they are now."""
        return {
            node: Pace(step_s=own.latest_s[Kind.NODE_SLOW], bytes_per_s=1.0 / own.latest_s[Kind.LINK_SLOW])
            for node, own in self._own.items()
            if own.latest_s.keys() >= set(JUDGED)
        }
