"""One candidate per layer within a budget of error: both solvers beside brute force (arXiv 2210.17357)."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.bit_allocation import Candidate, Choice, budget, by_dynamic_programme, by_multiplier

Tables = list[list[Candidate]]
Solver = Callable[[Tables, float], Choice]

SOLVERS = pytest.mark.parametrize("solve", [by_dynamic_programme, by_multiplier], ids=["programme", "multiplier"])


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


def check(tables: Tables, most: float, choice: Choice) -> None:
    """A choice is what it says, and within the budget exactly."""
    chosen = [row[index] for row, index in zip(tables, choice.indices, strict=True)]
    assert choice.bits == sum(candidate.bits for candidate in chosen)
    assert choice.error == math.fsum(candidate.error for candidate in chosen)
    assert error_of(tables, choice.indices) <= Fraction(most)


errors = st.one_of(st.integers(0, 30).map(float), st.floats(0.0, 30.0), st.floats(0.0, 1e-300))
any_tables = st.lists(
    st.lists(st.builds(Candidate, bits=st.integers(0, 40), error=errors), min_size=1, max_size=4),
    max_size=5,
)
whole_tables = st.lists(
    st.lists(
        st.builds(Candidate, bits=st.integers(0, 40), error=st.integers(0, 30).map(float)), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=5,
)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Tables, float]:
    """Tables, and a budget that can be met."""
    tables = draw(any_tables)
    tightest = float(least_error(tables))
    most = tightest + draw(st.floats(0.0, 60.0))
    return tables, most if Fraction(most) >= least_error(tables) else math.nextafter(most, math.inf)


@given(instance=instances(), buckets=st.sampled_from([1, 7, 100, 2000]))
def test_the_programme_is_optimal_up_to_its_buckets(instance: tuple[Tables, float], buckets: int) -> None:
    tables, most = instance
    choice = by_dynamic_programme(tables, most, buckets=buckets)
    check(tables, most, choice)
    assert choice.bits >= fewest_bits(tables, Fraction(most))
    slack = Fraction(most) - least_error(tables)
    less = max(Fraction(0), slack * (1 - Fraction(len(tables), buckets)))
    assert choice.bits <= fewest_bits(tables, least_error(tables) + less)


@given(tables=whole_tables, extra=st.integers(1, 100), times=st.integers(1, 3))
def test_the_programme_is_optimal_where_errors_are_whole_buckets(tables: Tables, extra: int, times: int) -> None:
    most = float(least_error(tables)) + extra
    choice = by_dynamic_programme(tables, most, buckets=times * extra)
    check(tables, most, choice)
    assert choice.bits == fewest_bits(tables, Fraction(most))


@given(instance=instances())
def test_the_multiplier_is_within_one_candidate_of_the_optimum(instance: tuple[Tables, float]) -> None:
    tables, most = instance
    choice = by_multiplier(tables, most)
    check(tables, most, choice)
    best = fewest_bits(tables, Fraction(most))
    widest = max((max(c.bits for c in row) - min(c.bits for c in row) for row in tables), default=0)
    assert best <= choice.bits <= best + widest


@given(instance=instances())
def test_nothing_smaller_fits_into_what_is_left(instance: tuple[Tables, float]) -> None:
    tables, most = instance
    for choice in (by_multiplier(tables, most), by_dynamic_programme(tables, most, buckets=3)):
        for layer, row in enumerate(tables):
            for index, candidate in enumerate(row):
                other = (*choice.indices[:layer], index, *choice.indices[layer + 1 :])
                smaller = candidate.bits < row[choice.indices[layer]].bits
                assert not (smaller and error_of(tables, other) <= Fraction(most))


@st.composite
def convex_instances(draw: st.DrawFn) -> tuple[Tables, int, tuple[int, ...]]:
    """Strictly convex curves without two equal slopes, a budget that steps up to some λ use up, and the choice."""
    slopes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=14, unique=True))
    owners = [draw(st.integers(0, 3)) for _ in slopes]
    saved = [draw(st.integers(1, 9)) for _ in slopes]
    taken = draw(st.integers(1, len(slopes)))
    layers = sorted(set(owners))
    cheapest = sorted(zip(slopes, owners, saved, strict=True))
    tables: Tables = []
    for layer in layers:
        bits, error = 200, float(draw(st.integers(0, 5)))
        row = [Candidate(bits=bits, error=error)]
        for slope, owner, count in cheapest:
            if owner == layer:
                bits, error = bits - count, error + slope * count
                row.append(Candidate(bits=bits, error=error))
        tables.append(row)
    indices = tuple(sum(owner == layer for _, owner, _ in cheapest[:taken]) for layer in layers)
    return tables, sum(slope * count for slope, _, count in cheapest[:taken]), indices


@given(instance=convex_instances())
def test_on_convex_curves_both_find_the_choice_that_uses_up_the_budget(
    instance: tuple[Tables, int, tuple[int, ...]],
) -> None:
    tables, extra, indices = instance
    most = float(least_error(tables)) + extra
    choice = by_multiplier(tables, most)
    assert choice.indices == indices
    assert choice.error == most
    assert by_dynamic_programme(tables, most, buckets=extra) == choice


def test_bits_go_where_they_save_most_error() -> None:
    """Two layers of one size, one of them ten times as loud: it keeps more bits than the other."""
    tables = [[Candidate(bits=100 * b, error=variance * 4.0**-b) for b in range(1, 9)] for variance in (1.0, 100.0)]
    most = budget(tables, 3, 1.0)
    for choice in (by_multiplier(tables, most), by_dynamic_programme(tables, most)):
        quiet, loud = choice.indices
        assert quiet < 3 < loud
        assert choice.bits < 800


@SOLVERS
def test_a_generous_budget_gives_every_layer_its_smallest_candidate(solve: Solver) -> None:
    tables = [table((8, 1.0), (4, 2.0), (2, 5.0)), table((1, 7.0), (9, 0.0))]
    assert solve(tables, 1e9) == Choice(indices=(2, 0), bits=3, error=12.0)


@SOLVERS
def test_a_budget_of_the_least_error_gives_every_layer_its_best(solve: Solver) -> None:
    tables = [table((8, 1.0), (4, 2.0), (2, 5.0)), table((1, 7.0), (9, 0.0))]
    assert solve(tables, 1.0) == Choice(indices=(0, 1), bits=17, error=1.0)


@SOLVERS
def test_ties_go_to_the_smaller_error_then_to_the_lower_index(solve: Solver) -> None:
    tables = [table((4, 3.0), (4, 1.0), (4, 1.0), (6, 1.0)), table((2, 0.0), (2, 0.0))]
    assert solve(tables, 100.0).indices == (1, 0)


@SOLVERS
def test_of_two_choices_of_one_size_the_one_of_less_error_is_taken(solve: Solver) -> None:
    assert solve([table((4, 0.0), (2, 3.0)), table((4, 0.0), (2, 1.0))], 3.0).indices == (0, 1)


@SOLVERS
def test_a_budget_between_two_errors_is_not_rounded_up(solve: Solver) -> None:
    assert solve([table((8, 0.0), (4, 3.0))], 2.5).indices == (0,)


@SOLVERS
def test_of_two_equal_layers_the_first_is_made_smaller(solve: Solver) -> None:
    tables = [table((8, 0.0), (4, 1.0))] * 3
    assert solve(tables, 2.0).bits == 16
    assert by_multiplier(tables, 2.0).indices == (1, 1, 0)


def test_a_long_edge_is_walked_in_its_short_steps() -> None:
    """Three points on a line: the middle one fits, the end does not, and the dearer step must wait."""
    assert by_multiplier([table((5, 0.0), (4, 1.0)), table((8, 0.0), (6, 1.0), (4, 2.0))], 1.0).indices == (0, 1)


def test_who_cannot_take_a_step_takes_none_behind_it() -> None:
    """The second step alone would fit, but it begins where the first one ends."""
    assert by_multiplier([table((100, 0.0), (50, 10.0), (48, 11.0))], 5.0).indices == (0,)


def test_what_does_not_fit_leaves_room_for_dearer_steps() -> None:
    """λ = 1/10 does not fit, λ = 1/2 does; and of a curve that is not convex what fits is found at the end."""
    assert by_multiplier([table((100, 0.0), (0, 10.0)), table((8, 0.0), (2, 3.0))], 5.0).indices == (0, 1)
    assert by_multiplier([table((100, 0.0), (99, 4.0), (0, 10.0))], 5.0).indices == (1,)


@SOLVERS
def test_what_cannot_be_met_names_the_least_error_that_can(solve: Solver) -> None:
    tables = [table((8, 1.5), (4, 2.0)), table((1, 7.0))]
    with pytest.raises(ValueError, match=r"at most 8\.0; the least reachable is 8\.5"):
        solve(tables, 8.0)
    assert solve(tables, 8.5).indices == (0, 0)


@SOLVERS
def test_the_least_error_that_is_named_can_be_met(solve: Solver) -> None:
    """Rounded up: a tenth three times is more than the float that their sum rounds to."""
    tables = [table((8, 0.1))] * 3
    with pytest.raises(ValueError) as refused:
        solve(tables, 0.3)
    named = float(str(refused.value).rpartition(" ")[2])
    assert solve(tables, named).indices == (0, 0, 0)


@SOLVERS
def test_no_layers_need_no_bits(solve: Solver) -> None:
    assert solve([], 0.0) == Choice(indices=(), bits=0, error=0.0)


@SOLVERS
def test_a_layer_without_candidates_is_named(solve: Solver) -> None:
    with pytest.raises(ValueError, match="layer 1 has no candidates"):
        solve([table((8, 1.0)), []], 8.0)


@SOLVERS
@pytest.mark.parametrize("wrong", [(-1, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_impossible_candidates_are_named(solve: Solver, wrong: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="candidate 1 of layer 0"):
        solve([table((8, 1.0), wrong)], 8.0)


@SOLVERS
@pytest.mark.parametrize("most", [math.nan, math.inf])
def test_a_budget_is_a_number(solve: Solver, most: float) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        solve([table((8, 1.0))], most)


def test_a_programme_has_a_bucket_at_least() -> None:
    with pytest.raises(ValueError, match="least is 1"):
        by_dynamic_programme([table((8, 1.0))], 8.0, buckets=0)


@SOLVERS
def test_errors_of_all_magnitudes_are_counted_exactly(solve: Solver) -> None:
    """No sum of floats would tell these two budgets apart."""
    tables = [table((9, 5e-324), (8, 1e300)), table((9, 0.0), (8, 1.0))]
    assert solve(tables, 1.0).indices == (0, 0)
    assert solve(tables, math.nextafter(1.0, 2.0)).indices == (0, 1)
    assert solve(tables[:1], 1e300).indices == (1,)


def test_the_budget_is_a_multiple_of_the_defaults_error() -> None:
    tables = [table((8, 1.0), (4, 2.0)), table((8, 0.5), (4, 3.0))]
    assert (budget(tables, 1, 1.0), budget(tables, 0, 2.0), budget([], 0, 1.0)) == (5.0, 3.0, 0.0)


@given(tables=any_tables.filter(bool))
def test_the_default_itself_fits_into_its_budget(tables: Tables) -> None:
    most = Fraction(budget(tables, 0, 1.0))
    exact = error_of(tables, (0,) * len(tables))
    assert exact <= most <= exact + Fraction(math.ulp(float(exact)))


def test_a_budget_needs_a_default_in_every_table_and_a_share() -> None:
    tables = [table((8, 1.0), (4, 2.0)), table((8, 0.5))]
    for index in (1, -1):
        with pytest.raises(ValueError, match="has no candidate"):
            budget(tables, index, 1.0)
    with pytest.raises(ValueError, match="no candidates"):
        budget([[]], 0, 1.0)
    for alpha in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            budget(tables, 0, alpha)
