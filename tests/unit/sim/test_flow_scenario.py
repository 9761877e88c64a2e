"""What a scenario may say, what follows from a method, and how cases are spelled out."""

from typing import Any

import pytest

from farloop.algo.methods import METHODS
from farloop.sim.flow.scenario import METHOD_NAMES, Choice, FlowScenario, Group, MethodName, Sweep, Variant, cases


def scenario(**fields: Any) -> FlowScenario:
    return FlowScenario(**{"steps": 100, **fields})


@pytest.mark.parametrize("method", ["diloco", "streaming", "decoupled"])
def test_what_stays_open_is_what_the_table_of_methods_says(method: MethodName) -> None:
    rules, row = Choice(method=method).rules(), METHODS[method]
    for name in ("h", "tau", "quorum", "max_staleness", "max_stale_rounds", "per_node_h"):
        assert getattr(rules, name) == getattr(row, name), name
    assert rules.waits == (row.on_late_update == "wait")


def test_what_is_given_wins() -> None:
    rules = Choice(method="decoupled", h=12, tau=0, quorum=4, per_node_h=False, bits_up=1.5).rules()
    assert (rules.h, rules.tau, rules.quorum, rules.per_node_h, rules.bits_up) == (12, 0, 4, False, 1.5)


def test_cases_are_swept_values_times_variants_times_seeds() -> None:
    variants = tuple(Variant(name=method, choice=Choice(method=method)) for method in METHOD_NAMES[:2])
    found = cases(
        scenario(nodes=(Group(),), variants=variants, sweep=Sweep(key="count", values=(2, 8)), repeats=2, seed=5)
    )
    assert [(case.value, case.variant, case.setting.seed) for case in found] == [
        (value, method, seed) for value in (2, 8) for method in METHOD_NAMES[:2] for seed in (5, 6)
    ]
    assert [case.setting.groups[0].count for case in found] == [2] * 4 + [8] * 4


def test_a_sweep_may_be_of_the_rules() -> None:
    sweep = Sweep(key="h", values=(10, 20))
    assert [case.setting.rules.h for case in cases(scenario(sweep=sweep))] == [10, 20]


def test_machines_are_gathered_into_clusters() -> None:
    variants = (Variant(name="x", choice=Choice(clusters=4)),)
    (case,) = cases(scenario(nodes=(Group(count=12, machines=2),), variants=variants))
    (group,) = case.setting.groups
    assert (group.count, group.machines) == (4, 6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Choice(h=0), "h is 0; the least is 1"),
        (lambda: Choice(h=4, tau=4, fragments=2), "tau is 4; with h = 4 it is 3 at most"),
        (lambda: Choice(h=4, tau=0, fragments=5), "fragments is 5, more than the inner steps of a round"),
        (lambda: Choice(method="elastic", h=30), "h is 30; elastic takes 1 alone"),
        (lambda: Choice(liveness_s=-1.0), "liveness_s is -1.0; the least is 0"),
        (lambda: Group(step_s=0.0), "step_s is 0.0; it must be above 0"),
        (lambda: Group(loss=1.0), "loss is 1.0; it lies between 0 and below 1"),
        (lambda: Group(up_gbit_s=0.0), "up_gbit_s is 0.0; it must be above 0"),
        (lambda: Group(crashes_per_hour=float("nan")), "crashes_per_hour is nan; the least is 0"),
        (lambda: Sweep(key="name", values=(1,)), "key is 'name'; it must be one of"),
        (lambda: FlowScenario(), "steps is missing"),
        (lambda: scenario(nodes=()), "nodes: there are none"),
        (lambda: scenario(nodes=(Group(site="paris"),)), "site 'paris' is not among the sites"),
        (lambda: scenario(nodes=(Group(), Group())), "nodes: the name 'nodes' is there twice"),
        (lambda: scenario(nodes=(Group(joins_at_s=5),)), "joins_at_s: somebody must be there at the start"),
        (lambda: scenario(sweep=Sweep(key="h", values=(3.5,))), "values: h cannot be 3.5: it takes whole numbers"),
        (lambda: scenario(sweep=Sweep(key="h", values=(3,))), "values: h cannot be 3: fragments is 6, more than"),
        (
            lambda: scenario(nodes=(Group(count=5),), variants=(Variant(name="x", choice=Choice(clusters=2)),)),
            "clusters is 2, which does not divide the 5 of 'nodes'",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_that_begins_with_the_key(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(sentence)
