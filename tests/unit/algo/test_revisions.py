"""Which terms may change while a run goes on, in what words, and which a window and a round run under (protocol Z)."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_terms
from stories import StoryText, all_stories, check_story, python

from farloop.algo.revisions import (
    BELONG_TO_ROUNDS,
    BELONG_TO_WINDOWS,
    LEARNING_RATE_STAYS,
    STAY,
    Revisions,
    changes,
    composed,
    revised,
)
from farloop.algo.spec import Fragment, Layout, Revision
from farloop.algo.terms import FLAT, LearningRate, Terms

LAYOUT = Layout(slots=2, fragments=tuple(Fragment(index=i, slot=i, numel=256, tensors=()) for i in range(2)))
TERMS = plain_terms(steps=400, h=10, tau=2, mix=0.5, lr=LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=4))


def after(given: dict[str, str], terms: Terms = TERMS) -> Terms:
    return revised(terms, LAYOUT, given)


def listed(before: Terms, then: Terms) -> str:
    """What changes, and what each change belongs to."""
    found = changes(before, then)
    return "; ".join(
        f"{one.key} {one.before} → {one.after} of {'rounds' if one.of_rounds else 'windows'}" for one in found
    )


def changed(given: dict[str, str], terms: Terms = TERMS) -> str:
    return listed(terms, after(given, terms))


def own(terms: Terms) -> object:
    return terms.codecs.up_of + terms.schedule.h_share_of


@all_stories(__file__, "revisions")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)


# --- How a change is given


def test_every_term_is_in_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds a term says here what a change of it would do: it holds from a window on (`BELONG_TO_WINDOWS`, and
    then all code takes it from the window's own revision), from a round on (`BELONG_TO_ROUNDS`), or stays (`STAY`)."""
    classes = [BELONG_TO_WINDOWS, BELONG_TO_ROUNDS, frozenset(STAY)]
    assert frozenset.union(*classes) == set(FLAT)
    assert sum(len(names) for names in classes) == len(set(FLAT)), "one each"
    assert set(LEARNING_RATE_STAYS) <= {field.name for field in dataclasses.fields(LearningRate)}
    monkeypatch.setattr("farloop.algo.revisions.STAY", {k: why for k, why in STAY.items() if k != "clip"})
    with pytest.raises(ValueError, match="clip stays as the run began: the effect of a change is not defined"):
        after({"clip": "2"})


# --- Which terms a window and a round run under

OLD = plain_terms(h=4, outer_lr=0.7)
NEW = OLD.replace(h=8, outer_lr=0.5, codec_up="q8")
NEWER = NEW.replace(outer_lr=0.25)


def revision(number: int, terms: Terms, windows: tuple[int, ...], round_index: int) -> Revision:
    return Revision(number=number, terms=terms, windows=windows, round=round_index)


TWO = Revisions((revision(0, OLD, (0, 0), 0), revision(1, NEW, (5, 6), 7)))
THREE = TWO.and_then(revision(2, NEWER, (9, 9), 12))


def test_windows_and_rounds_run_under_the_last_revision_that_begins_with_them_or_before() -> None:
    windows = [(0, 4), (0, 5), (0, 8), (0, 9), (1, 5), (1, 6)]
    assert [THREE.of_window(*at) for at in windows] == [OLD, NEW, NEW, NEWER, OLD, NEW]
    assert [THREE.of_round(index).schedule.h for index in (0, 6, 7, 11, 12)] == [4, 4, 8, 8, 8]


def test_a_window_in_a_round_of_the_old_length_has_the_rest_of_the_new_terms() -> None:
    between = TWO.of_window(0, 5, 6)
    assert (between.schedule.h, between.outer.lr, between.codecs.up) == (OLD.schedule.h, NEW.outer.lr, NEW.codecs.up)
    assert between == composed(NEW, OLD)
    assert TWO.of_window(0, 5, 7) is NEW


def test_what_is_known_is_not_taken_again() -> None:
    assert THREE.and_then(revision(1, OLD, (1, 1), 1)) is THREE
    assert THREE != TWO and TWO.and_then(THREE.newest) == THREE and hash(TWO.and_then(THREE.newest)) == hash(THREE)


@given(
    versions=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    current=st.integers(0, 20),
    ahead=st.integers(0, 9),
    fragment=st.integers(0, 1),
    later=st.integers(0, 9),
)
def test_forgetting_what_is_over_changes_no_answer(
    versions: tuple[int, int], current: int, ahead: int, fragment: int, later: int
) -> None:
    kept = THREE.needed(versions, current)
    assert kept.newest is THREE.newest and len(kept.kept) >= 2
    window, index = versions[fragment] + ahead, current + later
    assert kept.of_window(fragment, window, index) == THREE.of_window(fragment, window, index)
    assert all(kept.of_round(index).value(n) == THREE.of_round(index).value(n) for n in BELONG_TO_ROUNDS)
