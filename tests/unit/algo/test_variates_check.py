"""Which runs can have control variates, and the sentence that the others get."""

from dataclasses import replace
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.methods import METHODS, method_named
from farloop.algo.spec import Layout, Terms
from farloop.algo.validation import check, check_variates
from farloop.quant.codec import flat

LAYOUT = Layout(slots=1, fragments=(flat(256),))


def terms_of(method: str, **changes: Any) -> Terms:
    """Terms with which control variates are sound, but for what the method brings along."""
    row = METHODS[method]
    terms = plain_terms(
        method=method,
        steps=90,
        h=row.h,
        tau=row.tau,
        mix=row.mix,
        outer_lr=1.0,
        outer_momentum=0.0,
        weight_decay=0.1,
        batch_sequences=8,
        sequence_tokens=128,
        on_late_update=row.on_late_update,
        quorum=row.quorum,
        max_staleness=row.max_staleness,
        min_nodes=4,
        lag=row.lag,
        control_variates=True,
    )
    return replace(terms, **changes)


def refusal(terms: Terms) -> str:
    with pytest.raises(ValueError, match="control_variates") as error:
        check_variates(terms, method_named(terms.method))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize("method", ["diloco", "sparse"])
def test_plain_averages_that_are_waited_for_can_have_them(method: str) -> None:
    check(terms_of(method), LAYOUT)
    check(terms_of(method, outer_lr=0.7, h_rule="post-local", h_switch=30), LAYOUT)  # ν and rounds may be any


def test_fragments_that_are_waited_for_can_have_them() -> None:
    check_variates(terms_of("streaming", tau=0, mix=0.0), METHODS["streaming"])


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
    assert refusal(terms_of("diloco", **changes)).startswith(sentence)
    check_variates(terms_of("diloco", **changes, control_variates=False), METHODS["diloco"])


@pytest.mark.parametrize("method", ["co2", "decoupled", "async"])
def test_a_method_whose_updates_are_no_mean_is_refused(method: str) -> None:
    assert refusal(terms_of(method)).endswith(f"which those of {method} are not; take diloco")


def test_a_method_without_inner_optimizer_is_refused() -> None:
    assert refusal(terms_of("data-parallel")).endswith("with data-parallel nodes make none")


def test_the_check_of_all_terms_asks_for_them() -> None:
    with pytest.raises(ValueError, match=r"outer_momentum is 0\.5; with control_variates"):
        check(terms_of("diloco", outer_momentum=0.5), LAYOUT)
