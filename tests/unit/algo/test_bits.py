"""One candidate per layer within a budget of error, beside all choices there are (arXiv 2210.17357)."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.bit_allocation import Candidate, Choice, budget, by_multiplier

Tables = list[list[Candidate]]


def table(*costs: tuple[int, float]) -> list[Candidate]:
    return [Candidate(bits=bits, error=error) for bits, error in costs]


def error_of(tables: Tables, indices: tuple[int, ...]) -> Fraction:
    return sum((Fraction(row[index].error) for row, index in zip(tables, indices, strict=True)), Fraction(0))


def fewest_bits(tables: Tables, most: Fraction) -> int:
    """By trying all choices."""
    every = itertools.product(*(range(len(row)) for row in tables))
    return min(
        sum(row[index].bits for row, index in zip(tables, indices, strict=True))
        for indices in every
        if error_of(tables, indices) <= most
    )


def least_error(tables: Tables) -> Fraction:
    return sum((Fraction(min(candidate.error for candidate in row)) for row in tables), Fraction(0))


errors = st.one_of(st.integers(0, 30).map(float), st.floats(0.0, 30.0), st.floats(0.0, 1e-300))
candidates = st.builds(Candidate, bits=st.integers(0, 40), error=errors)
any_tables = st.lists(st.lists(candidates, min_size=1, max_size=4), max_size=5)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Tables, float]:
    """Tables, and a budget that can be met."""
    tables = draw(any_tables)
    most = float(least_error(tables)) + draw(st.floats(0.0, 60.0))
    return tables, most if Fraction(most) >= least_error(tables) else math.nextafter(most, math.inf)


@given(instance=instances())
def test_a_choice_is_within_the_budget_and_within_one_candidate_of_the_optimum(instance: tuple[Tables, float]) -> None:
    """Exactly within it; and nothing smaller fits into what is left."""
    tables, most = instance
    choice = by_multiplier(tables, most)
    chosen = [row[index] for row, index in zip(tables, choice.indices, strict=True)]
    assert choice.bits == sum(candidate.bits for candidate in chosen)
    assert choice.error == math.fsum(candidate.error for candidate in chosen)
    assert error_of(tables, choice.indices) <= Fraction(most)

    best = fewest_bits(tables, Fraction(most))
    widest = max((max(c.bits for c in row) - min(c.bits for c in row) for row in tables), default=0)
    assert best <= choice.bits <= best + widest
    for layer, row in enumerate(tables):
        for index, candidate in enumerate(row):
            other = (*choice.indices[:layer], index, *choice.indices[layer + 1 :])
            assert candidate.bits >= chosen[layer].bits or error_of(tables, other) > Fraction(most)


@st.composite
def convex_instances(draw: st.DrawFn) -> tuple[Tables, int, tuple[int, ...]]:
    """Strictly convex curves without two equal slopes, a budget that steps up to some λ use up, and the choice."""
    slopes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=14, unique=True))
    cheapest = sorted((slope, draw(st.integers(0, 3)), draw(st.integers(1, 9))) for slope in slopes)
    taken = draw(st.integers(1, len(slopes)))
    layers = sorted({owner for _, owner, _ in cheapest})
    tables: Tables = []
    for layer in layers:
        bits, error = 200, float(draw(st.integers(0, 5)))
        row = [Candidate(bits=bits, error=error)]
        for slope, owner, saved in cheapest:
            if owner == layer:
                bits, error = bits - saved, error + slope * saved
                row.append(Candidate(bits=bits, error=error))
        tables.append(row)
    indices = tuple(sum(owner == layer for _, owner, _ in cheapest[:taken]) for layer in layers)
    return tables, sum(slope * saved for slope, _, saved in cheapest[:taken]), indices


@given(instance=convex_instances())
def test_on_convex_curves_the_choice_uses_up_the_budget(
    instance: tuple[Tables, int, tuple[int, ...]],
) -> None:
    tables, extra, indices = instance
    most = float(least_error(tables)) + extra
    choice = by_multiplier(tables, most)
    assert (choice.indices, choice.error) == (indices, most)


def test_bits_go_where_they_save_most_error() -> None:
    """Two layers of one size, one of them ten times as loud: it keeps more bits than the other."""
    tables = [[Candidate(bits=100 * b, error=variance * 4.0**-b) for b in range(1, 9)] for variance in (1.0, 100.0)]
    choice = by_multiplier(tables, sum(row[3].error for row in tables))
    quiet, loud = choice.indices
    assert quiet < 3 < loud and choice.bits < 800


TWO = [table((8, 1.0), (4, 2.0), (2, 5.0)), table((1, 7.0), (9, 0.0))]
FAR_APART = [table((9, 5e-324), (8, 1e300)), table((9, 0.0), (8, 1.0))]


@pytest.mark.parametrize(
    ("tables", "most", "indices"),
    [
        ([], 0.0, ()),
        (TWO, 1e9, (2, 0)),  # a generous budget gives every layer its smallest candidate
        (TWO, 1.0, (0, 1)),  # one of the least error gives every layer its best
        # Ties go to the smaller error, then to the lower index; of two choices of one size, to that of less error.
        ([table((4, 3.0), (4, 1.0), (4, 1.0), (6, 1.0)), table((2, 0.0), (2, 0.0))], 100.0, (1, 0)),
        ([table((4, 0.0), (2, 3.0)), table((4, 0.0), (2, 1.0))], 3.0, (0, 1)),
        ([table((8, 0.0), (4, 1.0))] * 3, 2.0, (1, 1, 0)),  # of equal layers the first is made smaller
        ([table((8, 0.0), (4, 3.0))], 2.5, (0,)),  # a budget between two errors is not rounded up
        # No sum of floats would tell these two budgets apart.
        (FAR_APART, 1.0, (0, 0)),
        (FAR_APART, math.nextafter(1.0, 2.0), (0, 1)),
        (FAR_APART[:1], 1e300, (1,)),
        # Three points on a line: the middle one fits, the end does not, and the dearer step must wait.
        ([table((5, 0.0), (4, 1.0)), table((8, 0.0), (6, 1.0), (4, 2.0))], 1.0, (0, 1)),
        # The second step alone would fit, but it begins where the first one ends.
        ([table((100, 0.0), (50, 10.0), (48, 11.0))], 5.0, (0,)),
        # λ = 1/10 does not fit, λ = 1/2 does; of a curve that is not convex what fits is found at the end.
        ([table((100, 0.0), (0, 10.0)), table((8, 0.0), (2, 3.0))], 5.0, (0, 1)),
        ([table((100, 0.0), (99, 4.0), (0, 10.0))], 5.0, (1,)),
    ],
)
def test_what_is_chosen(tables: Tables, most: float, indices: tuple[int, ...]) -> None:
    chosen = [row[index] for row, index in zip(tables, indices, strict=True)]
    bits, error = sum(candidate.bits for candidate in chosen), math.fsum(candidate.error for candidate in chosen)
    assert by_multiplier(tables, most) == Choice(indices=indices, bits=bits, error=error)


def test_what_cannot_be_met_names_the_least_error_that_can() -> None:
    """Rounded up: a tenth three times is more than the float that their sum rounds to."""
    with pytest.raises(ValueError, match=r"at most 8\.0; the least reachable is 8\.5"):
        by_multiplier([table((8, 1.5), (4, 2.0)), table((1, 7.0))], 8.0)
    tables = [table((8, 0.1))] * 3
    with pytest.raises(ValueError) as refused:
        by_multiplier(tables, 0.3)
    assert by_multiplier(tables, float(str(refused.value).rpartition(" ")[2])).indices == (0, 0, 0)


GOOD = table((8, 1.0), (4, 2.0))


@pytest.mark.parametrize(
    ("tables", "most", "words"),
    [
        ([GOOD, []], 8.0, "layer 1 has no candidates"),
        *(([table((8, 1.0), wrong)], 8.0, "candidate 1 of layer 0") for wrong in [(-1, 1.0), (1, -1.0)]),
        *(([table((8, 1.0), (1, wrong))], 8.0, "candidate 1 of layer 0") for wrong in [math.nan, math.inf]),
        *(([GOOD], most, "must be a number") for most in [math.nan, math.inf]),
    ],
)
def test_impossible_numbers_are_named(tables: Tables, most: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        by_multiplier(tables, most)


@given(tables=any_tables.filter(bool))
def test_the_default_itself_fits_into_its_budget(tables: Tables) -> None:
    most = Fraction(budget(tables))
    exact = error_of(tables, (0,) * len(tables))
    assert exact <= most <= exact + Fraction(math.ulp(float(exact)))


def test_a_budget_needs_a_candidate_in_every_table() -> None:
    assert (budget([GOOD, table((8, 0.5), (4, 3.0))]), budget([])) == (1.5, 0.0)
    with pytest.raises(ValueError, match="no candidates"):
        budget([[]])
