"""Which terms a window and a round run under once they changed (protocol Z)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_runs import plain_terms

from farloop.algo.revisions import BELONG_TO_ROUNDS, Revisions, composed
from farloop.algo.spec import Revision
from farloop.algo.terms import Terms

OLD = plain_terms(h=4, outer_lr=0.7)
NEW = OLD.replace(h=8, outer_lr=0.5, codec_up="q8")
NEWER = NEW.replace(outer_lr=0.25)


def revision(number: int, terms: Terms, windows: tuple[int, ...], round_index: int) -> Revision:
    return Revision(number=number, terms=terms, windows=windows, round=round_index)


TWO = Revisions((revision(0, OLD, (0, 0), 0), revision(1, NEW, (5, 6), 7)))
THREE = TWO.and_then(revision(2, NEWER, (9, 9), 12))


@pytest.mark.parametrize(
    ("fragment", "window", "terms"), [(0, 4, OLD), (0, 5, NEW), (0, 8, NEW), (0, 9, NEWER), (1, 5, OLD), (1, 6, NEW)]
)
def test_a_window_runs_under_the_last_revision_that_begins_at_it_or_before(
    fragment: int, window: int, terms: Terms
) -> None:
    assert THREE.of_window(fragment, window) == terms


@pytest.mark.parametrize(("index", "terms"), [(0, OLD), (6, OLD), (7, NEW), (11, NEW), (12, NEWER)])
def test_a_round_has_what_belongs_to_it_from_the_last_revision_that_begins_with_it_or_before(
    index: int, terms: Terms
) -> None:
    assert THREE.of_round(index).schedule.h == terms.schedule.h


def test_a_window_in_a_round_of_the_old_length_has_the_rest_of_the_new_terms() -> None:
    between = TWO.of_window(0, 5, 6)
    assert (between.schedule.h, between.outer.lr, between.codecs.up) == (OLD.schedule.h, NEW.outer.lr, NEW.codecs.up)
    assert between == composed(NEW, OLD)
    assert TWO.of_window(0, 5, 7) is NEW


def test_what_is_known_is_not_taken_again() -> None:
    assert THREE.and_then(revision(1, OLD, (1, 1), 1)) is THREE
    assert THREE != TWO and TWO.and_then(THREE.newest) == THREE and hash(TWO.and_then(THREE.newest)) == hash(THREE)


@settings(deadline=None)
@given(
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
    st.integers(0, 20),
    st.integers(0, 9),
    st.integers(0, 1),
    st.integers(0, 9),
)
def test_forgetting_what_is_over_changes_no_answer(
    versions: tuple[int, int], current: int, ahead: int, fragment: int, later: int
) -> None:
    kept = THREE.needed(versions, current)
    assert kept.newest is THREE.newest and len(kept.kept) >= 2
    window, index = versions[fragment] + ahead, current + later
    assert kept.of_window(fragment, window, index) == THREE.of_window(fragment, window, index)
    assert all(kept.of_round(index).value(n) == THREE.of_round(index).value(n) for n in BELONG_TO_ROUNDS)
