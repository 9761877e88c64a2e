"""Where links are slow, from the matrix of links: rates now beside those of the rounds before. Pure.

Links of a star are unequal from the beginning, so each direction is compared with what itself was; what all have in
common is then told from what one has (`anomalies.localise`).
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from farloop.coordinator.matrix import COORDINATOR, Ends, Matrix
from farloop.coordinator.pacing import KEPT_ROUNDS, LEAST_ROUNDS, USUAL_AFTER
from farloop.coordinator.routing.anomalies import Place, localise


class Places:
    """Of one coordinator's links."""

    def __init__(self) -> None:
        self._rates: dict[Ends, deque[float]] = {}
        self._strays: dict[Ends, int] = {}
        """Rounds in a row that a direction has not been what it was."""
        self._found: dict[str, str] = {}

    def round_over(self, matrix: Matrix, nodes: Sequence[str]) -> None:
        """A round is over; the matrix is what it is now."""
        places = [COORDINATOR, *sorted(nodes)]
        delay = [[self._delay(matrix, (u, v)) for v in places] for u in places]
        self._rates = {ends: known for ends, known in self._rates.items() if set(ends) <= set(places)}
        self._strays = {ends: rounds for ends, rounds in self._strays.items() if ends in self._rates}
        self._found = {}
        for one in localise(delay):
            ends = [places[index] for index in (one.source, one.target) if index is not None]
            for name in ends:
                self._found.setdefault(name, f"{one.place}, {one.factor:.1f} times as slow as before")
            if one.place is Place.PATH:
                self._found[ends[0]] = f"path to {ends[1]}, {one.factor:.1f} times as slow as before"

    def of(self, place: str) -> str:
        """Where at this place, in words; empty for none."""
        return self._found.get(place, "")

    def _delay(self, matrix: Matrix, ends: Ends) -> float | None:
        """In times of what was usual; None where too little is known. Directions that stray are not learnt from."""
        rate = matrix.rate(ends)
        if rate is None or rate <= 0.0:
            return None
        known = self._rates.setdefault(ends, deque(maxlen=KEPT_ROUNDS))
        usual = median(known) if len(known) >= LEAST_ROUNDS else None
        if usual is None or 0.5 < usual / rate < 2.0:
            known.append(rate)
            self._strays.pop(ends, None)
        else:
            self._strays[ends] = self._strays.get(ends, 0) + 1
            if self._strays[ends] > USUAL_AFTER:
                known.clear()
                del self._strays[ends]
        return None if usual is None else usual / rate
