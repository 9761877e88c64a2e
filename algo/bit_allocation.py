"""How many bits each layer gets: one candidate per layer, least total size within a budget of squared error.

The problem is that of L-GreCo (arXiv 2210.17357). Given for every layer a table of candidates (a codec's setting with
its size and its squared error), minimise Σ size subject to Σ error ≤ budget. The paper uses a dynamic programme;
`by_multiplier` is the Lagrangian solver, 200 times as fast, and with hundreds of layers the better one as well.
What the candidates mean is the caller's affair: no tensor comes here. Standard library only.

Errors are summed as whole multiples of one unit: a budget is kept exactly, not up to the rounding of a sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    bits: int  # size of the encoded layer
    error: float  # its squared error, Σ (x − decoded)²: squares of layers add up, norms do not


Table = Sequence[Candidate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    indices: tuple[int, ...]  # position in each layer's table
    bits: int
    error: float  # sum of the squared errors, rounded to the nearest float


def budget(tables: Sequence[Table], alpha: float = 1.0) -> float:
    """The paper's budget α·E: E is Σ error of the first candidates, which would be taken without a choice.

    Rounded up, so that these fit with α = 1. Raises ValueError: a table is empty or holds impossible numbers.
    """
    _check(tables)
    return _rounded_up(Fraction(alpha) * sum((Fraction(table[0].error) for table in tables), Fraction(0)))


def by_multiplier(tables: Sequence[Table], max_error: float) -> Choice:
    """The Lagrangian solver: one price λ for all layers. O(n log n) in the number of candidates.

    From its least error on, every layer follows the lower convex hull of its (error, size) curve towards smaller sizes;
    the steps of all layers are taken in the order of λ = error added per bit saved, cheapest first. Where the steps up
    to some λ use up the budget the result is optimal; otherwise it exceeds the optimum by less than the bits of the
    first step that did not fit. Dearer steps that still fit are taken as well, and what is left is used up.
    Raises ValueError: no choice is within `max_error`, or a table is empty or holds impossible numbers.
    """
    fronts, slack, unit = _fronts(tables, max_error)
    places = [0] * len(fronts)
    steps = sorted(  # ties by layer; within a layer λ never falls along the hull, and the places rise
        (price, layer, start, end) for layer, front in enumerate(fronts) for price, start, end in _hull(front, unit)
    )
    left = slack
    for _, layer, start, end in steps:
        added = fronts[layer][end].error - fronts[layer][start].error
        if places[layer] == start and added <= left:
            places[layer], left = end, left - added
    return _filled(tables, fronts, places, slack)


class _Point(NamedTuple):
    """A candidate worth considering. Errors are whole multiples of the tables' common unit."""

    error: int
    bits: int
    candidate: int


_Front = list[_Point]  # a layer's candidates, none of which is beaten by another: errors rise, sizes fall


def _fronts(tables: Sequence[Table], max_error: float) -> tuple[list[_Front], int, int]:
    """Every layer's front; what the budget leaves above the least error; units in an error of 1. Raises ValueError."""
    _check(tables)
    if not math.isfinite(max_error):
        raise ValueError(f"the budget of squared error is {max_error}; it must be a number")
    ratios = [[candidate.error.as_integer_ratio() for candidate in table] for table in tables]
    # Denominators of floats are powers of two: the largest is a multiple of all others.
    unit = max((denominator for row in ratios for _, denominator in row), default=1)
    fronts = [_front(table, row, unit) for table, row in zip(tables, ratios, strict=True)]
    least = sum(front[0].error for front in fronts)
    slack = math.floor(Fraction(max_error) * unit) - least
    if slack < 0:
        reachable = _rounded_up(Fraction(least, unit))
        raise ValueError(f"no choice has a squared error of at most {max_error}; the least reachable is {reachable}")
    return fronts, slack, unit


def _front(table: Table, ratios: list[tuple[int, int]], unit: int) -> _Front:
    """A tie in size goes to the smaller error, a tie in both to the lower index."""
    front: _Front = []
    for point in sorted(
        _Point(numerator * (unit // denominator), candidate.bits, index)
        for index, (candidate, (numerator, denominator)) in enumerate(zip(table, ratios, strict=True))
    ):
        if not front or point.bits < front[-1].bits:
            front.append(point)
    return front


def _hull(front: _Front, unit: int) -> list[tuple[float, int, int]]:
    """Steps (λ, from, to) along the lower convex hull, as places in the front; λ never falls.

    Points in the middle of an edge stay: two short steps may fit where one long step does not.
    """

    def price(start: int, end: int) -> float:
        return (front[end].error - front[start].error) / ((front[start].bits - front[end].bits) * unit)

    steps: list[tuple[float, int, int]] = []
    for end in range(1, len(front)):
        start = end - 1
        while steps and steps[-1][0] > price(start, end):  # the point between lies above the line past it
            start = steps.pop()[1]
        steps.append((price(start, end), start, end))
    return steps


def _filled(tables: Sequence[Table], fronts: list[_Front], places: list[int], slack: int) -> Choice:
    """The choice, after every layer in turn has gone to its smallest candidate that still fits."""
    left = slack - sum(front[place].error - front[0].error for front, place in zip(fronts, places, strict=True))
    assert left >= 0
    indices: list[int] = []
    for front, place in zip(fronts, places, strict=True):
        within = left + front[place].error
        point = next(point for point in reversed(front) if point.error <= within)
        left = within - point.error
        indices.append(point.candidate)
    chosen = [table[index] for table, index in zip(tables, indices, strict=True)]
    return Choice(
        indices=tuple(indices),
        bits=sum(candidate.bits for candidate in chosen),
        error=math.fsum(candidate.error for candidate in chosen),
    )


def _check(tables: Sequence[Table]) -> None:
    for layer, table in enumerate(tables):
        if not table:
            raise ValueError(f"layer {layer} has no candidates")
        for index, candidate in enumerate(table):
            if candidate.bits < 0 or not 0.0 <= candidate.error < math.inf:
                raise ValueError(
                    f"candidate {index} of layer {layer} has {candidate.bits} bits and a squared error of "
                    f"{candidate.error}; both must be numbers of at least 0"
                )


def _rounded_up(value: Fraction) -> float:
    nearest = float(value)
    return nearest if nearest >= value else math.nextafter(nearest, math.inf)
