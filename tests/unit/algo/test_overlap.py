"""Covers `algo/validation.py`: the τ that a node may choose for itself (arXiv 2501.18512)."""

import pytest
from plain_runs import plain_terms

from farloop.algo.methods import METHODS, max_tau
from farloop.algo.spec import Terms
from farloop.algo.validation import check_own_tau


def terms_of(name: str, **changes: object) -> Terms:
    method = METHODS[name]
    values = {"steps": 900, "h": method.h, "tau": method.tau, "mix": method.mix, "lag": method.lag}
    return plain_terms(method=name, **{**values, **changes})


@pytest.mark.parametrize(("name", "slots"), [("streaming", 8), ("decoupled", 8), ("diloco", 1), ("async", 1)])
def test_what_the_run_could_have_the_node_may_have(name: str, slots: int) -> None:
    terms = terms_of(name)
    most = max_tau(METHODS[name], terms.h, slots)
    check_own_tau(0, terms, slots)
    check_own_tau(most, terms, slots)
    for tau in (-1, most + 1):
        with pytest.raises(ValueError, match=rf"tau is {tau}; {name} with rounds of {terms.h} steps .* 0 to {most}$"):
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
