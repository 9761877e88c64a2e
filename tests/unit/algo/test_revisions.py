"""Which terms may change while a run goes on, in what words, and which a window and a round run under (protocol Z)."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_terms

from farloop.algo.revisions import (
    BELONG_TO_ROUNDS,
    BELONG_TO_WINDOWS,
    LEARNING_RATE_STAYS,
    STAY,
    Change,
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


PEAK = dataclasses.replace(TERMS.schedule.lr, peak=0.005)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("outer_lr", "0.25", {"outer_lr": 0.25}),
        ("h", " 20 ", {"h": 20}),
        ("codec_up", "q8", {"codec_up": "q8"}),
        ("outer_correction", "false", {"outer_correction": False}),
        ("steps", "800", {"steps": 800}),
        ("lr", "0.005", {"lr": PEAK}),
        ("lr.peak", "0.005", {"lr": PEAK}),
        ("min_lr", "0.005", {"lr": dataclasses.replace(TERMS.schedule.lr, minimum=0.005)}),
    ],
)
def test_a_term_is_given_as_text_and_called_as_in_the_terms_or_as_in_a_run_toml(
    key: str, text: str, expected: dict[str, Any]
) -> None:
    assert after({key: text}) == TERMS.replace(**expected)


def test_a_tau_that_is_given_holds_for_all_nodes_unless_they_are_to_choose() -> None:
    open_ = TERMS.replace(own_tau=True)
    assert after({"tau": "4"}, open_) == TERMS.replace(tau=4)
    assert after({"tau": "4", "own_tau": "true"}, open_) == open_.replace(tau=4)
    assert after({"tau": "2"}, open_) == TERMS and after({"own_tau": "true"}) == open_


def test_minus_zero_is_zero() -> None:
    assert str(after({"outer_lr": "-0"}).outer.lr) == "0.0"


def test_none_opens_what_may_be_open_and_some_need_others() -> None:
    assert after({"quorum": "none"}, after({"quorum": "1"})).admission.quorum is None
    growing = TERMS.replace(h_rule="qsr", h_alpha=0.03)
    assert after({"h_max": "30"}, growing) == growing.replace(h_max=30)


def test_what_a_node_has_of_its_own_is_given_for_one_node_or_for_all() -> None:
    first = after({"codec_up_of.rome": "q4r:step=0.7,rounding=nearest", "h_share_of.rome": "0.5"})
    assert first.codecs.up_of == (("rome", "q4r:step=0.7,rounding=nearest"),)
    assert first.schedule.h_share_of == (("rome", 0.5),)
    second = after({"codec_up_of.oslo": "q8", "codec_up_of.rome": "none", "h_share_of.rome": "1"}, first)
    assert (second.codecs.up_of, second.schedule.h_share_of) == ((("oslo", "q8"),), ())
    third = after({"codec_up_of": "rome=q8 a.b=q4", "h_share_of": "rome=0.9 oslo=1.0 a.b=0.2"}, second)
    assert third.codecs.up_of == (("a.b", "q4"), ("rome", "q8"))
    assert third.schedule.h_share_of == (("a.b", 0.2), ("rome", 0.9))
    assert changes(second, third) == [
        Change(key="codec_up_of.oslo", before="q8", after=None),
        Change(key="codec_up_of.a.b", before=None, after="q4"),
        Change(key="codec_up_of.rome", before=None, after="q8"),
        Change(key="h_share_of.a.b", before=None, after=0.2),
        Change(key="h_share_of.rome", before=None, after=0.9),
    ]
    assert [change.of_rounds for change in changes(second, third)] == [False, False, False, True, True]
    assert after({"codec_up_of": "none", "h_share_of": "none"}, third) == TERMS


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "diloco"}, "method stays as the run began: what nodes and coordinator keep"),
        ({"lag": "1"}, "lag stays as the run began"),
        ({"rewarms": "30:1e-3"}, "rewarms stays as the run began: the data that they bring"),
        ({"seed": "3"}, "seed is part of the run's identity, which never changes: begin a new run"),
        ({"model": "own"}, "model is part of the run's identity"),
        ({"outer_lrr": "1"}, "there is no term 'outer_lrr' that can change; did you mean outer_lr?"),
        ({"LR": "0.001"}, "there is no term 'LR' that can change; did you mean lr?"),
        ({"schedule": "WSD"}, "lr.shape: there is no 'WSD'; did you mean wsd?"),
        *(
            ({key: str(2**64 - 1)}, f"{key}: expected at most {2**40}, got {2**64 - 1}")
            for key in ("steps", "h", "min_nodes")
        ),
        ({"outer_lr": "1e308"}, "outer_lr: expected at most 100, got 1e+308"),
        ({"norm_band": "1e308"}, "norm_band is 1e+308; the most is 1e+06, or set screen = off"),
        ({"bytes_goal": "200"}, "bytes_goal chose h when the run began: set h"),
        ({"zebra": "1"}, "there is no term 'zebra' that can change; there are anneal_at, "),
        ({"h": "many"}, "h is a whole number, not 'many'"),
        ({"h": "1_0"}, "h is a whole number, not '1_0'"),
        ({"outer_lr": "٠.٥"}, "outer_lr is a number, not '٠.٥'"),
        ({"lr.drops": "3_0"}, "lr.drops is positions, as 300,450, not '3_0'"),
        ({"h_share_of.rome": "0.2_5"}, "h_share_of.rome: expected a share of a round's steps above 0 and at most 1"),
        ({"quorum": "x"}, "quorum is a whole number, or none, not 'x'"),
        ({"outer_correction": "1"}, "outer_correction is true or false, not '1'"),
        ({"lr.drops": "a"}, "lr.drops is positions, as 300,450, not 'a'"),
        ({"schedule": "wsdd"}, "lr.shape: there is no 'wsdd'; did you mean wsd?"),
        ({"tau": "10"}, "tau: expected 0 to 9 by streaming with h = 10, got 10"),
        ({"h": "1"}, "h is 1, too short for 2 slots of one step or more; the least is 2"),
        ({"mix": "1.0"}, "mix is 0.5 and can be at most 0.99"),
        ({"outer_lr": "0.7"}, "nothing would change: outer_lr is 0.7 already"),
        *(({key: "nan"}, f"{key}: expected a finite number; got nan") for key in ("outer_lr", "lr.drop_factor")),
        ({"decay_share": "-inf"}, "lr.decay_share: expected a finite number; got -inf"),
        ({"floor": "2"}, "floor is 2, but a window can close with 1 contributions: at most 1"),
        # Windows change first, and the first of them lie in rounds of the old length.
        ({"h": "40", "tau": "30"}, "tau: expected 0 to 9 by streaming with h = 10, got 30, until the rounds have"),
        ({"codec_up_of": "rome"}, "codec_up_of: expected NODE=VALUE with blanks between nodes, as rome=q4; got 'ro"),
        ({"codec_up_of": "rome=q4 rome=q8"}, "codec_up_of: rome is given twice"),
        ({"codec_up_of.": "q8"}, "codec_up_of.: expected a node behind the point, as codec_up_of.rome"),
        ({"codec_up_of": "rome="}, "codec_up_of: expected a codec"),
        ({"h_share_of.rome": "43"}, "h_share_of.rome: expected a share of a round's steps above 0 and at most 1"),
        ({"h_share_of.rome": "half"}, "h_share_of.rome: expected a share of a round's steps above 0 and at most 1"),
        ({"h_share_of.rome": "nan"}, "h_share_of.rome: expected a share of a round's steps above 0 and at most 1"),
        ({"h_share_of.rome": "0.1"}, "h_share_of: rome would do 1 of h = 10 steps, too few for 2 slots of one step"),
        ({"h_share_of.rome": "none"}, "nothing would change: h_share_of.rome is that of all nodes already"),
        ({"h_share_of": ""}, "nothing would change: h_share_of is none already"),
        ({"codec_up_off.rome": "q8"}, "there is no term 'codec_up_off.rome' that can change; did you mean codec_up_of"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}"):
        after(given)


def test_stages_do_as_many_steps_as_each_other() -> None:
    one, other = LAYOUT.fragments
    cut = dataclasses.replace(LAYOUT, fragments=(one, dataclasses.replace(other, stage=1)))
    with pytest.raises(ValueError, match="h_share_of: the model is cut in stages"):
        revised(TERMS, cut, {"h_share_of.rome": "0.5"})
    assert revised(TERMS, cut, {"codec_up_of.rome": "q8"}).codecs.up_of == (("rome", "q8"),)


def test_changes_are_listed_by_key_with_what_they_belong_to() -> None:
    listed = changes(TERMS, after({"h": "20", "outer_lr": "0.5", "lr": "0.02"}))
    assert listed == [
        Change(key="h", before=10, after=20),
        Change(key="outer_lr", before=0.7, after=0.5),
        Change(key="lr.peak", before=0.01, after=0.02),
    ]
    assert [change.of_rounds for change in listed] == [True, False, True]


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
