"""One candidate per layer within a budget of error, beside all choices there are (arXiv 2210.17357)."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from stories import StoryText, all_stories, check_story, python

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


TWO = [table((8, 1.0), (4, 2.0), (2, 5.0)), table((1, 7.0), (9, 0.0))]
FAR_APART = [table((9, 5e-324), (8, 1e300)), table((9, 0.0), (8, 1.0))]


GOOD = table((8, 1.0), (4, 2.0))


def chosen(tables: Tables, most: float) -> tuple[int, ...]:
    """The choice is what its candidates add up to."""
    choice = by_multiplier(tables, most)
    found = [row[index] for row, index in zip(tables, choice.indices, strict=True)]
    bits, error = sum(candidate.bits for candidate in found), math.fsum(candidate.error for candidate in found)
    assert choice == Choice(indices=choice.indices, bits=bits, error=error)
    return choice.indices


@all_stories(__file__, "bits")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)


@given(tables=any_tables.filter(bool))
def test_the_default_itself_fits_into_its_budget(tables: Tables) -> None:
    most = Fraction(budget(tables))
    exact = error_of(tables, (0,) * len(tables))
    assert exact <= most <= exact + Fraction(math.ulp(float(exact)))
