"""The sentence that each impossible choice of round lengths earns; those about the learning rate are beside it."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.schedule import POWERS, first_rounds, initial_h
from farloop.algo.spec import LearningRate
from farloop.algo.validation import RULES, check_rounds

TERMS = plain_terms(
    steps=900,
    h=30,
    tau=5,
    mix=0.5,
    outer_lr=0.6,
    lr=LearningRate(peak=2e-3, minimum=2e-4, warmup_steps=90),
    weight_decay=0.1,
    batch_sequences=8,
    sequence_tokens=128,
)
QSR = {"h_rule": "qsr", "h_alpha": 0.011}
LATER = {"h_rule": "post-local", "h_switch": 300, "h_init": 9}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_run(rule: str) -> None:
    choices = {"constant": {}, "post-local": LATER}.get(rule, {"h_rule": rule, "h_alpha": 0.05})
    terms = dataclasses.replace(TERMS, **choices)  # type: ignore[arg-type]
    check_rounds(terms, slots=9)
    assert sum(plan.length for plan in first_rounds(terms, 900)) == 900


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"h_rule": "qrs"}, "h_rule: there is no 'qrs'; did you mean 'qsr'"),
        ({"h_rule": "qsr"}, r"h_alpha is missing; h_rule = qsr needs one above 0; 0\.011 gives rounds of h = 30"),
        ({"h_rule": "linear", "h_alpha": -1.0}, r"h_alpha is -1\.0; .* 0\.06 gives rounds of h = 30"),
        ({"h_rule": "cubic", "h_alpha": float("inf")}, r"h_alpha is inf; .* 0\.00621 gives rounds of h = 30"),
        ({"h_alpha": 0.01}, r"h_alpha is 0\.01, but h_rule is constant, which does not follow the learning rate"),
        ({**LATER, "h_alpha": 0.01}, r"h_alpha is 0\.01, but h_rule is post-local"),
        ({**QSR, "lr": LearningRate(shape="constant")}, "rounds grow as the learning rate falls, and here it never"),
        ({**QSR, "lr": LearningRate(peak=1e-3, minimum=1e-3)}, "use constant, or another lr.shape"),
        ({"h_init": 10}, "h_init is 10, but with h_rule = constant every round has h = 30"),
        ({"h_max": 100}, "h_max is 100, but with h_rule = constant every round has h = 30"),
        ({**QSR, "h_init": 8}, "h_init is 8, too short for 9 slots of one step or more; the least is 9"),
        ({**LATER, "h_init": None}, "h_init is 1, too short for 9 slots"),
        ({**QSR, "h_max": 29}, "h_max is 29, below the 30 steps that a round has anyway; the least is 30"),
        ({**QSR, "h_init": 50, "h_max": 40}, "h_max is 40, below the 50 steps"),
        ({**QSR, "h_switch": 5}, "h_switch is 5, but h_rule is qsr: only post-local has it"),
        ({**LATER, "h_switch": 0}, "h_switch is 0; h_rule = post-local switches to h = 30 at 1 to 899"),
        ({**LATER, "h_switch": 900}, "h_switch is 900"),
    ],
)
def test_impossible_rounds_are_refused_with_the_nearest_possible_value(choices: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_rounds(dataclasses.replace(TERMS, **choices), slots=9)


@pytest.mark.parametrize("rule", POWERS)
def test_the_alpha_that_is_named_gives_h_at_the_peak(rule: str) -> None:
    """The nearest good value is one: taken at its word, the first round after the warm-up has h steps."""
    with pytest.raises(ValueError, match="needs one above 0") as refusal:
        check_rounds(dataclasses.replace(TERMS, h_rule=rule), slots=1)  # type: ignore[arg-type]
    alpha = float(str(refusal.value).split("; ")[2].split()[0])
    terms = dataclasses.replace(TERMS, h_rule=rule, h_alpha=alpha)  # type: ignore[arg-type]
    check_rounds(terms, slots=1)
    lengths = [plan.length for plan in first_rounds(terms, 900)]
    assert lengths[:4] == [initial_h(terms)] * 3 + [30] and max(lengths) > 60
