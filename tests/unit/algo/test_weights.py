"""How much each contribution of a window weighs, and in which order they are summed (protocol H)."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.spec import Contribution, NodeId
from farloop.algo.weights import MOST_TIMES, WEIGHT_RULES, quality_weights, reach, sum_key, token_weights

WeightRule = Callable[[Sequence[Sequence[Contribution]]], list[float]]

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def contribution(node: NodeId, tokens: int, steps: int = 10) -> Contribution:
    return Contribution(node=node, incarnation=1, base=0, steps=steps, tokens=tokens, norm_sq=1.0)


def test_a_weight_is_the_share_of_the_tokens() -> None:
    assert token_weights([[contribution(A, 100)], [contribution(B, 300)]]) == [0.25, 0.75]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_equal_counters_give_a_uniform_mean(count: int) -> None:
    """A16: exactly equal, not nearly."""
    assert token_weights([[contribution(A, 12345)]] * count) == [1 / count] * count


def test_who_did_no_step_weighs_nothing_and_dilutes_nothing() -> None:
    """A16, B23: a zero delta of a joiner is not a vote."""
    sets = [[contribution(A, 100)], [contribution(B, 100, steps=0)], [contribution(C, 300)]]
    assert token_weights(sets) == [0.25, 0.0, 0.75]


def test_where_nobody_did_a_step_all_weigh_the_same() -> None:
    """A16: never a division by zero; the deltas are zero anyway."""
    assert token_weights([[contribution(A, 5, steps=0)], [contribution(B, 0)]]) == [0.5, 0.5]


def test_a_relayed_blob_weighs_as_much_as_all_in_it() -> None:
    relayed = [contribution(A, 100), contribution(B, 200), contribution(C, 700, steps=0)]
    assert token_weights([relayed, [contribution(NodeId("d"), 300)]]) == [0.5, 0.5]


def test_a_window_without_contributions_has_no_weights() -> None:
    with pytest.raises(AssertionError):
        token_weights([])


def test_quality_is_the_share_of_tokens_times_tokens_a_step() -> None:
    """Equal tokens in half the steps weigh twice as much (arXiv 2604.21428)."""
    assert quality_weights([[contribution(A, 100, steps=10)], [contribution(B, 100, steps=5)]]) == [1 / 3, 2 / 3]
    assert quality_weights([[contribution(A, 100)], [contribution(B, 300)]]) == [0.1, 0.9]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("rule", WEIGHT_RULES.values())
def test_equal_counters_weigh_the_same_by_every_rule(count: int, rule: WeightRule) -> None:
    """A16: exactly."""
    assert rule([[contribution(A, 12345, steps=7)]] * count) == [1 / count] * count


@pytest.mark.parametrize("rule", WEIGHT_RULES.values())
def test_without_steps_there_is_no_weight_and_never_a_division(rule: WeightRule) -> None:
    """A16."""
    sets = [[contribution(A, 100)], [contribution(B, 100, steps=0)], [contribution(C, 100)]]
    assert rule(sets) == [0.5, 0.0, 0.5]
    assert rule([[contribution(A, 5, steps=0)], [contribution(B, 0)]]) == [0.5, 0.5]


counters = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 62)), min_size=1, max_size=20)


@pytest.mark.parametrize("rule", WEIGHT_RULES.values())
@given(reports=counters)
def test_weights_of_every_rule_sum_to_one(rule: WeightRule, reports: list[tuple[int, int]]) -> None:
    """B23."""
    weights = rule([[contribution(A, tokens, steps=steps)] for steps, tokens in reports])
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    assert all(0.0 <= weight <= 1.0 for weight in weights)


@pytest.mark.parametrize("rule", WEIGHT_RULES.values())
@pytest.mark.parametrize("honest", [1, 2, 3, 4, 9])
def test_a_node_that_claims_any_number_of_tokens_has_a_bounded_weight(rule: WeightRule, honest: int) -> None:
    """Where nobody grants samples a claim of 2^40 tokens a step was a weight of 1."""
    others = [[contribution(A, 640)] for _ in range(honest)]
    weights = rule([*others, [contribution(B, 10 << 40)]])
    times = MOST_TIMES if rule is token_weights else MOST_TIMES**2
    assert weights[-1] == pytest.approx(times / (honest + times))
    assert len(set(weights[:-1])) == 1


def test_up_to_the_bound_a_larger_batch_weighs_what_it_is() -> None:
    assert token_weights([[contribution(A, 100)], [contribution(B, 400)]]) == [0.2, 0.8]
    assert token_weights([[contribution(A, 100)], [contribution(B, 200)], [contribution(C, 800)]])[2] == 8 / 11


def test_a_node_that_claims_next_to_nothing_does_not_take_the_others_down() -> None:
    weights = token_weights([[contribution(A, 1)], [contribution(B, 640)], [contribution(C, 640)]])
    assert weights == [1 / 1281, 640 / 1281, 640 / 1281]


def moved(norm: float, steps: int) -> Contribution:
    return Contribution(node=A, incarnation=1, base=0, steps=steps, tokens=1, norm_sq=norm * norm)


def test_the_reach_is_the_longest_delta_at_the_most_steps() -> None:
    assert reach([[moved(3.0, 10)], [moved(2.0, 5)]]) == 4.0, "in 10 steps the second would have come to 4"
    assert reach([[moved(3.0, 10), moved(5.0, 10)]]) == 5.0
    assert reach([[moved(3.0, 0)]]) == reach([]) == 0.0


@pytest.mark.parametrize("norm_sq", [-1.0, math.nan, math.inf])
def test_a_norm_that_is_none_is_nobodys_reach(norm_sq: float) -> None:
    """A delta that says so may be in a journal from before it was refused: a restart must get past it."""
    odd = dataclasses.replace(moved(1.0, 10), norm_sq=norm_sq)
    assert reach([[odd], [moved(2.0, 5)]]) == 4.0
    assert reach([[odd]]) == 0.0


@pytest.mark.parametrize("rule", WEIGHT_RULES.values())
def test_tokens_below_zero_weigh_nothing(rule: WeightRule) -> None:
    assert rule([[contribution(A, -5)], [contribution(B, 10)]]) == [0.0, 1.0]
    assert rule([[contribution(A, -5)], [contribution(B, -5)]]) == [0.5, 0.5]


@given(tokens=st.lists(st.integers(0, 1 << 62), min_size=1, max_size=40))
def test_weights_sum_to_one_and_are_in_the_order_of_the_tokens(tokens: list[int]) -> None:
    """B23"""
    weights = token_weights([[contribution(A, count)] for count in tokens])
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    assert all(0.0 <= weight <= 1.0 for weight in weights)
    by_tokens = [weight for _, weight in sorted(zip(tokens, weights, strict=True))]
    assert by_tokens == sorted(weights)


def test_the_smallest_node_id_of_a_set_is_its_place_in_the_sum() -> None:
    """H: ids are compared as text, so that every machine sorts alike."""
    assert sum_key([contribution(C, 1), contribution(A, 1), contribution(B, 1)]) == A
    assert sum_key([contribution(NodeId("node-10"), 1), contribution(NodeId("node-9"), 1)]) == "node-10"
