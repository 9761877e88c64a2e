"""Covers `algo/validation.py`: an impossible choice of terms is refused in one sentence that names a valid value."""

from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.methods import METHODS, max_tau, method_named
from farloop.algo.schedule import POWERS, first_rounds, initial_h
from farloop.algo.spec import Layout, OuterKind
from farloop.algo.terms import LearningRate, Terms
from farloop.algo.validation import (
    RULES,
    check,
    check_inner,
    check_outer,
    check_own_tau,
    check_rounds,
    check_variates,
)
from farloop.quant.codec import flat

OPTIMIZED = plain_terms(method="diloco", weight_decay=0.1)


# --- Optimizers


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("nesterov", {}),
        ("nesterov", {"outer_momentum": 0.0, "outer_restart": 10}),
        ("sgd", {"outer_momentum": 0.0}),
        ("co2", {"outer_clip": 1.0}),
        ("delayed-nesterov", {"outer_buffer": 4, "outer_spread": 0.25}),
    ],
)
def test_possible_outer_optimizers_pass(kind: OuterKind, changes: dict[str, Any]) -> None:
    check_outer(OPTIMIZED.replace(**changes), kind)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("nesterov", {"outer_lr": float("nan")}, "outer_lr is nan"),
        ("nesterov", {"weight_decay": -0.1}, "weight_decay is -0.1"),
        ("nesterov", {"outer_momentum": 1.0}, r"outer_momentum is 1.0; it must be in \[0, 1\)"),
        ("sgd", {}, "outer_momentum is 0.9; diloco takes 0 alone"),
        ("nesterov", {"outer_clip": 1.0}, "outer_clip is for the optimizer co2, which diloco has not"),
        ("co2", {"outer_clip": 0.0}, "outer_clip is 0.0; it must be above 0"),
        ("co2", {"outer_clip": -1.0}, "outer_clip is -1.0"),
        ("co2", {"outer_buffer": 4}, "outer_buffer is for the optimizer delayed-nesterov"),
        ("nesterov", {"outer_spread": 0.1}, "outer_spread is for the optimizer delayed-nesterov"),
        ("delayed-nesterov", {"outer_buffer": 0}, "outer_buffer is 0; the least is 1"),
        ("delayed-nesterov", {"outer_buffer": 4, "outer_spread": 0.3}, "with outer_buffer = 4 it is 0 to 0.25"),
        ("nesterov", {"outer_restart": -1}, "outer_restart is -1; the least is 0"),
    ],
)
def test_impossible_outer_optimizers_are_refused(kind: OuterKind, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_outer(OPTIMIZED.replace(**changes), kind)


def test_an_inner_optimizer_is_one_that_exists_where_there_is_one() -> None:
    check_inner(OPTIMIZED.replace(inner_optimizer="muon"), has_inner=True)
    check_inner(OPTIMIZED, has_inner=False)
    with pytest.raises(ValueError, match="there is no inner_optimizer 'adam'; there are adamw, muon"):
        check_inner(OPTIMIZED.replace(inner_optimizer="adam"), has_inner=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="diloco has no inner optimizer"):
        check_inner(OPTIMIZED.replace(inner_optimizer="muon"), has_inner=False)


# --- Rounds

VARIED = plain_terms(steps=900, h=30, lr=LearningRate(peak=2e-3, minimum=2e-4, warmup_steps=90))
QSR = {"h_rule": "qsr", "h_alpha": 0.011}
LATER = {"h_rule": "post-local", "h_switch": 300, "h_init": 9}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_run(rule: str) -> None:
    choices = {"constant": {}, "post-local": LATER}.get(rule, {"h_rule": rule, "h_alpha": 0.05})
    terms = VARIED.replace(**choices)  # type: ignore[arg-type]
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
        check_rounds(VARIED.replace(**choices), slots=9)


@pytest.mark.parametrize("rule", POWERS)
def test_the_alpha_that_is_named_gives_h_at_the_peak(rule: str) -> None:
    """The nearest good value is one: taken at its word, the first round after the warm-up has h steps."""
    with pytest.raises(ValueError, match="needs one above 0") as refusal:
        check_rounds(VARIED.replace(h_rule=rule), slots=1)  # type: ignore[arg-type]
    alpha = float(str(refusal.value).split("; ")[2].split()[0])
    terms = VARIED.replace(h_rule=rule, h_alpha=alpha)  # type: ignore[arg-type]
    check_rounds(terms, slots=1)
    lengths = [plan.length for plan in first_rounds(terms, 900)]
    assert lengths[:4] == [initial_h(terms)] * 3 + [30] and max(lengths) > 60


# --- Control variates

ONE_SLOT = Layout(slots=1, fragments=(flat(256),))


def corrected(method: str, **changes: Any) -> Terms:
    """Terms with which control variates are sound, but for what the method brings along."""
    row = METHODS[method]
    names = ("h", "tau", "mix", "on_late_update", "quorum", "max_staleness", "lag")
    values = {"steps": 90, "outer_lr": 1.0, "outer_momentum": 0.0, "min_nodes": 4, "control_variates": True}
    return plain_terms(method=method, **{**values, **{name: getattr(row, name) for name in names}, **changes})


def refusal(terms: Terms) -> str:
    with pytest.raises(ValueError, match="control_variates") as error:
        check_variates(terms, method_named(terms.method))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize("method", ["diloco", "sparse"])
def test_plain_averages_that_are_waited_for_can_have_them(method: str) -> None:
    check(corrected(method), ONE_SLOT)
    check(corrected(method, outer_lr=0.7, h_rule="post-local", h_switch=30), ONE_SLOT)  # ν and rounds may be any


def test_fragments_that_are_waited_for_can_have_them() -> None:
    check_variates(corrected("streaming", tau=0, mix=0.0), METHODS["streaming"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"outer_momentum": 0.9}, "outer_momentum is 0.9; with control_variates it must be 0.0, for with momentum"),
        ({"lag": 1}, "lag is 1; with control_variates it must be 0, for a node must know the mean"),
        ({"tau": 1}, "tau is 1; with control_variates it must be 0, "),
        ({"mix": 0.5}, "mix is 0.5; with control_variates it must be 0.0, "),
        ({"quorum": 3}, "quorum is 3; with control_variates it must be left out, for every node"),
        ({"max_staleness": 1}, "max_staleness is 1; with control_variates it must be 0, "),
        ({"on_late_update": "continue"}, "on_late_update is continue; with control_variates it must be wait, "),
        ({"outer_lr": 0.0}, "outer_lr is 0, so updates say nothing"),
    ],
)
def test_each_term_that_would_make_them_unsound_is_named(changes: dict[str, Any], sentence: str) -> None:
    assert refusal(corrected("diloco", **changes)).startswith(sentence)
    check_variates(corrected("diloco", **changes, control_variates=False), METHODS["diloco"])


@pytest.mark.parametrize("method", ["co2", "decoupled", "async"])
def test_a_method_whose_updates_are_no_mean_is_refused(method: str) -> None:
    assert refusal(corrected(method)).endswith(f"which those of {method} are not; take diloco")


def test_a_method_without_inner_optimizer_is_refused() -> None:
    assert refusal(corrected("data-parallel")).endswith("with data-parallel nodes make none")


def test_the_check_of_all_terms_asks_for_them() -> None:
    with pytest.raises(ValueError, match=r"outer_momentum is 0\.5; with control_variates"):
        check(corrected("diloco", outer_momentum=0.5), ONE_SLOT)


# --- A node's own overlap


def terms_of(name: str, **changes: object) -> Terms:
    method = METHODS[name]
    values = {"steps": 900, "h": method.h, "tau": method.tau, "mix": method.mix, "lag": method.lag}
    return plain_terms(method=name, **{**values, **changes})


@pytest.mark.parametrize(("name", "slots"), [("streaming", 8), ("decoupled", 8), ("diloco", 1), ("async", 1)])
def test_what_the_run_could_have_the_node_may_have(name: str, slots: int) -> None:
    terms = terms_of(name)
    most = max_tau(METHODS[name], terms.schedule.h, slots)
    check_own_tau(0, terms, slots)
    check_own_tau(most, terms, slots)
    for tau in (-1, most + 1):
        with pytest.raises(
            ValueError, match=rf"tau is {tau}; {name} with rounds of {terms.schedule.h} steps .* 0 to {most}$"
        ):
            check_own_tau(tau, terms, slots)


def test_rounds_that_begin_short_bound_it() -> None:
    terms = terms_of("streaming", h_rule="qsr", h_alpha=0.01, h_init=10)
    check_own_tau(9, terms, 5)
    with pytest.raises(ValueError, match="rounds of 10 steps and slots = 5 takes 0 to 9"):
        check_own_tau(10, terms, 5)


def test_a_method_that_has_one_for_all_allows_no_other() -> None:
    with pytest.raises(ValueError, match="data-parallel has the same for all nodes, 0: leave the node's open"):
        check_own_tau(0, terms_of("data-parallel"), 1)


@pytest.mark.parametrize("name", ["co2", "streaming"])
def test_where_updates_come_a_round_late_there_is_no_other(name: str) -> None:
    with pytest.raises(ValueError, match="tau is 3, but with lag = 1 the overlap is a whole round"):
        check_own_tau(3, terms_of(name, lag=1), 1)
