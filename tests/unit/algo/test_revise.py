"""Which terms may change while a run goes on, in what words they are given, and how each refusal reads (protocol Z)."""

import dataclasses
import re
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.methods import method_named
from farloop.algo.revisions import (
    BELONG_TO_ROUNDS,
    BELONG_TO_WINDOWS,
    LEARNING_RATE_STAYS,
    READ_BY_NODES,
    READ_BY_SOME,
    STAY,
    Change,
    changes,
    nodes_must_hear,
    revised,
)
from farloop.algo.spec import Fragment, Layout
from farloop.algo.terms import FLAT, LearningRate, Terms
from farloop.algo.validation import check_of_nodes

LAYOUT = Layout(slots=2, fragments=tuple(Fragment(index=i, slot=i, numel=256, tensors=()) for i in range(2)))
TERMS = plain_terms(steps=400, h=10, tau=2, mix=0.5, lr=LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=4))


def fields(owner: type) -> set[str]:
    return {field.name for field in dataclasses.fields(owner)}


def refusal(terms: Terms = TERMS, **given: str) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        revised(terms, LAYOUT, {key.replace("__", "."): text for key, text in given.items()})
    return str(refused.value)


def test_every_term_is_in_one_class() -> None:
    """Whoever adds a term says here what a change of it would do: it holds from a window on (`BELONG_TO_WINDOWS`, and
    then all code takes it from the window's own revision), from a round on (`BELONG_TO_ROUNDS`), or stays (`STAY`)."""
    classes = [BELONG_TO_WINDOWS, BELONG_TO_ROUNDS, frozenset(STAY)]
    assert frozenset.union(*classes) == set(FLAT)
    assert sum(len(names) for names in classes) == len(set(FLAT)), "one each"
    assert set(LEARNING_RATE_STAYS) <= fields(LearningRate)
    assert (READ_BY_NODES | READ_BY_SOME) <= BELONG_TO_WINDOWS | BELONG_TO_ROUNDS


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("outer_lr", "0.25", {"outer_lr": 0.25}),
        ("h", " 20 ", {"h": 20}),
        ("codec_up", "q8", {"codec_up": "q8"}),
        ("quorum", "1", {"quorum": 1}),
        ("h_max", "30", {"h_max": 30}),
        ("outer_correction", "false", {"outer_correction": False}),
        ("steps", "800", {"steps": 800}),
    ],
)
def test_a_term_is_given_as_text(key: str, text: str, expected: dict[str, Any]) -> None:
    if key == "h_max":
        terms = TERMS.replace(h_rule="qsr", h_alpha=0.03)
        assert revised(terms, LAYOUT, {key: text}) == terms.replace(**expected)
    else:
        assert revised(TERMS, LAYOUT, {key: text}) == TERMS.replace(**expected)


@pytest.mark.parametrize(("key", "name"), [("lr", "peak"), ("lr.peak", "peak"), ("min_lr", "minimum")])
def test_the_learning_rate_is_called_as_in_the_terms_or_as_in_a_run_toml(key: str, name: str) -> None:
    after = revised(TERMS, LAYOUT, {key: "0.005"})
    assert after == TERMS.replace(lr=dataclasses.replace(TERMS.schedule.lr, **{name: 0.005}))


def test_what_a_node_has_of_its_own_is_given_for_one_node_or_for_all() -> None:
    first = revised(TERMS, LAYOUT, {"codec_up_of.rome": "q4r:step=0.7,rounding=nearest", "h_share_of.rome": "0.5"})
    assert (first.codecs.up_of, first.schedule.h_share_of) == (
        (("rome", "q4r:step=0.7,rounding=nearest"),),
        (("rome", 0.5),),
    )
    second = revised(first, LAYOUT, {"codec_up_of.oslo": "q8", "codec_up_of.rome": "none", "h_share_of.rome": "1"})
    assert (second.codecs.up_of, second.schedule.h_share_of) == ((("oslo", "q8"),), ())
    third = revised(second, LAYOUT, {"codec_up_of": "rome=q8 a.b=q4", "h_share_of": "rome=0.9 oslo=1.0 a.b=0.2"})
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
    assert revised(third, LAYOUT, {"codec_up_of": "none", "h_share_of": "none"}) == TERMS


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("codec_up_of", "rome", "codec_up_of: NODE=VALUE with blanks between nodes is wanted, as rome=q4, not 'rome'"),
        ("codec_up_of", "rome=q4 rome=q8", "codec_up_of: rome is given twice"),
        ("codec_up_of.", "q8", "codec_up_of.: a node is wanted behind the point, as codec_up_of.rome"),
        ("codec_up_of", "rome=", "codec_up_of: a codec is wanted"),
        (
            "h_share_of.rome",
            "43",
            "h_share_of.rome: a share of a round's steps above 0 and at most 1 is wanted",
        ),
        ("h_share_of.rome", "half", "not 'half'"),
        ("h_share_of.rome", "nan", "not 'nan'"),
        ("h_share_of.rome", "0.1", "rome would do 1 of h = 10 steps, too few for 2 slots of one step or more"),
        ("h_share_of.rome", "none", "nothing would change: h_share_of.rome is that of all nodes already"),
        ("h_share_of", "", "nothing would change: h_share_of is none already"),
        ("codec_up_off.rome", "q8", "there is no term 'codec_up_off.rome' that can change; did you mean codec_up_of?"),
    ],
)
def test_of_nodes_a_refusal_says_what_would_do(key: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        revised(TERMS, LAYOUT, {key: text})


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        (
            "data-parallel",
            {"codec_up_of": (("a", "q8"),)},
            "codec_up_of: a cannot have its own, for data-par",
        ),
        (
            "data-parallel",
            {"h_share_of": (("a", 0.5),)},
            "h_share_of: a cannot have its own, for data-par",
        ),
        (
            "diloco",
            {"h_share_of": (("a", 0.5),), "control_variates": True},
            "with control_variates all nodes do",
        ),
        ("diloco", {"h_share_of": (("a", 1.0),)}, "h_share_of: a has 1.0; a share is above 0 and below 1"),
        ("diloco", {"codec_up_of": (("b", "q8"), ("a", "q8"))}, "codec_up_of names a node twice, or not in the order"),
    ],
)
def test_no_run_has_nodes_that_its_method_cannot_have(method: str, given: dict[str, Any], words: str) -> None:
    terms = TERMS.replace(**given)
    with pytest.raises(ValueError, match=re.escape(words)):
        check_of_nodes(terms, method_named(method), LAYOUT)


def test_stages_do_as_many_steps_as_each_other() -> None:
    cut = dataclasses.replace(
        LAYOUT, fragments=(LAYOUT.fragments[0], dataclasses.replace(LAYOUT.fragments[1], stage=1))
    )
    assert cut.num_stages == 2
    with pytest.raises(ValueError, match="h_share_of: the model is cut in stages"):
        revised(TERMS, cut, {"h_share_of.rome": "0.5"})
    assert revised(TERMS, cut, {"codec_up_of.rome": "q8"}).codecs.up_of == (("rome", "q8"),)


def test_none_opens_what_may_be_open() -> None:
    terms = TERMS.replace(quorum=1)
    assert revised(terms, LAYOUT, {"quorum": "none"}).admission.quorum is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "diloco"}, "method stays as the run began: what nodes and coordinator keep"),
        ({"lag": "1"}, "lag stays as the run began"),
        ({"rewarms": "30:1e-3"}, "rewarms stays as the run began: the data that they bring"),
        ({"seed": "3"}, "seed is part of the run's identity, which never changes: begin a new run"),
        ({"model": "own"}, "model is part of the run's identity"),
        ({"outer_lrr": "1"}, "there is no term 'outer_lrr' that can change; did you mean outer_lr?"),
        ({"zebra": "1"}, "there is no term 'zebra' that can change; there are anneal_at, "),
        ({"h": "many"}, "h is a whole number, not 'many'"),
        ({"quorum": "x"}, "quorum is a whole number, or none, not 'x'"),
        ({"outer_correction": "1"}, "outer_correction is true or false, not '1'"),
        ({"lr__drops": "a"}, "lr.drops is positions, as 300,450, not 'a'"),
        ({"schedule": "wsdd"}, "lr.shape is one of cosine, linear, step, wsd, infinite, constant; did you mean wsd?"),
        ({"tau": "10"}, "tau is 10; streaming with h = 10 takes 0 to 9"),
        ({"h": "1"}, "h is 1, too short for 2 slots of one step or more; the least is 2"),
        ({"mix": "1.0"}, "mix is 0.5 and can be at most 0.99"),
        ({"outer_lr": "0.7"}, "nothing would change: outer_lr is 0.7 already"),
        ({"outer_lr": "nan"}, "outer_lr"),
        ({"floor": "2"}, "floor is 2, but a window can close with 1 contributions: at most 1"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(given: dict[str, str], sentence: str) -> None:
    assert refusal(**given).startswith(sentence)


def test_a_longer_overlap_waits_for_the_longer_rounds_that_have_room_for_it() -> None:
    """D: windows change first, and the first of them lie in rounds of the old length."""
    assert refusal(h="40", tau="30").startswith("tau is 30; streaming with h = 10 takes 0 to 9, until the rounds have")
    assert revised(TERMS, LAYOUT, {"h": "40", "tau": "9"}).schedule.tau == 9


def test_a_field_in_no_class_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farloop.algo.revisions.STAY", {k: why for k, why in STAY.items() if k != "clip"})
    assert refusal(clip="2") == "clip stays as the run began: nobody has said what would follow"


def test_changes_are_listed_by_key_with_what_they_belong_to() -> None:
    after = revised(TERMS, LAYOUT, {"h": "20", "outer_lr": "0.5", "lr": "0.02"})
    listed = changes(TERMS, after)
    assert listed == [
        Change(key="h", before=10, after=20),
        Change(key="outer_lr", before=0.7, after=0.5),
        Change(key="lr.peak", before=0.01, after=0.02),
    ]
    assert [change.of_rounds for change in listed] == [True, False, True]


def test_nodes_must_hear_of_what_no_window_and_no_round_tells_them() -> None:
    """Z: an older node follows the rest without a word."""
    silent = revised(TERMS, LAYOUT, {"h": "20", "tau": "1", "mix": "0.25", "codec_up": "q8", "outer_lr": "0.5"})
    assert nodes_must_hear(TERMS, silent) == []
    assert nodes_must_hear(TERMS, revised(TERMS, LAYOUT, {"lr": "0.02", "steps": "500"})) == ["steps", "lr.peak"]
    eager = TERMS.replace(lag=1, eager=True, tau=0, mix=0.0)
    assert nodes_must_hear(eager, revised(eager, LAYOUT, {"outer_lr": "0.5"})) == ["outer_lr"]
