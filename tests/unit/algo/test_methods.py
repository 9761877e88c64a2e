"""The table of methods, and the sentence that each impossible choice of terms earns."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.fragments import NamedShape, partition
from farloop.algo.merge_rules import MERGE_RULES
from farloop.algo.methods import METHODS, Method, default_mix, max_tau, method_named
from farloop.algo.schedule import due_step
from farloop.algo.spec import MAX_FRAGMENT_ELEMENTS, Layout
from farloop.algo.terms import FLAT, LearningRate, Terms
from farloop.algo.validation import check


def terms_of(method: Method, /, **changes: Any) -> Terms:
    terms = plain_terms(
        method=method.name,
        steps=900,
        h=method.h,
        tau=method.tau,
        mix=method.mix,
        lag=method.lag,
        codec_up=method.codec_up,
        codec_down=method.codec_down,
        outer_lr=0.6,
        outer_momentum=0.0 if method.outer == "sgd" else 0.9,
        weight_decay=0.1,
        batch_sequences=8,
        sequence_tokens=128,
        on_late_update=method.on_late_update,
        quorum=method.quorum,
        min_nodes=4,
    )
    return terms.replace(**changes)


def layout_of(method: Method, num_blocks: int = 24) -> Layout:
    tensors: list[NamedShape] = [(f"blocks.{i}.weight", (16, 16)) for i in range(num_blocks)]
    return partition([*tensors, ("embed.weight", (256, 16))], pattern=method.pattern)


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_every_method_can_run_with_its_own_defaults(method: Method) -> None:
    check(terms_of(method), layout_of(method))
    assert METHODS[method.name] is method_named(method.name) is method
    assert method.merge in MERGE_RULES
    assert method.summary.endswith(".") and method.summary.count(".") >= 1


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_a_method_fixes_only_terms_that_exist(method: Method) -> None:
    assert all(name in FLAT and hasattr(method, name) for name in method.fixed)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("dilocco", "did you mean 'diloco'"), ("streeming", "did you mean 'streaming'"), ("xyz", "there are diloco, ")],
)
def test_an_unknown_method_is_answered_with_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        method_named(name)
    with pytest.raises(ValueError, match=sentence):
        check(terms_of(METHODS["diloco"], method=name), layout_of(METHODS["diloco"]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 0}, "steps is 0; the least is 1"),
        ({"h": 0}, "h is 0; the least is 1"),
        ({"batch_sequences": 0}, "batch_sequences is 0; the least is 1"),
        ({"sequence_tokens": 0}, "sequence_tokens is 0; the least is 1"),
        ({"evaluate_every_rounds": 0}, "evaluate_every_rounds is 0; the least is 1"),
        ({"h": 8}, "h is 8, too short for 9 slots of one step or more; the least is 9"),
        ({"tau": 30}, "tau is 30; streaming with h = 30 takes 0 to 29"),
        ({"tau": -1}, "tau is -1; streaming with h = 30 takes 0 to 29"),
        ({"mix": 1.01}, "mix is 1.01; it lies between 0"),
        ({"mix": -0.01}, "mix is -0.01; it lies between 0"),
        ({"mix": math.nan}, "mix is nan; it lies between 0"),
        ({"outer_lr": -0.1}, "outer_lr is -0.1; it must be a number of at least 0"),
        ({"outer_lr": math.inf}, "outer_lr is inf"),
        ({"outer_momentum": 1.0}, r"outer_momentum is 1.0; it must be in \[0, 1\)"),
        ({"outer_momentum": -0.1}, r"outer_momentum is -0.1; it must be in \[0, 1\)"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"lr": LearningRate(peak=-1.0, minimum=-2.0)}, "lr.peak is -1.0"),
        ({"lr": LearningRate(minimum=-1.0)}, "lr.minimum is -1.0"),
        ({"lr": LearningRate(peak=1e-3, minimum=2e-3)}, "lr.minimum = 0.002 is above lr.peak; at most 0.001"),
        ({"lr": LearningRate(warmup_steps=901)}, "lr.warmup_steps is 901; the run has 900 steps"),
        ({"lr": LearningRate(warmup_steps=-1)}, "lr.warmup_steps is -1"),
        ({"clip": 0.0}, "clip is 0.0; it must be a number above 0"),
        ({"clip": math.nan}, "clip is nan; it must be a number above 0"),
        ({"max_stale_rounds": -1}, "max_stale_rounds is -1; the least is 0"),
        ({"max_staleness": 1}, "max_staleness is 1; streaming takes 0 to 0"),
        ({"min_nodes": 0}, "min_nodes is 0; the least is 1"),
        ({"quorum": 0}, "quorum is 0; the run starts with min_nodes = 4, so it can be 1 to that"),
        ({"quorum": 5}, "quorum is 5; the run starts with min_nodes = 4, so it can be 1 to that"),
        ({"floor": 0}, "floor is 0; the least is 1"),
        ({"floor": 5}, "floor is 5, but a window can close with 4 contributions: at most 4"),
        ({"quorum": 2, "floor": 3}, "floor is 3, but a window can close with 2 contributions: at most 2"),
        ({"lag": 2}, "lag is 2; streaming takes at most 1"),
        ({"lag": -1}, "lag is -1; streaming takes at most 1"),
        ({"lag": 1}, "mix is 0.5; with lag = 1 it is 0, for what stayed would be sent twice"),
        ({"lag": 1, "mix": 0.0}, "tau is 5; with lag = 1 it is 0, for the overlap is a whole round"),
        ({"lag": 1, "mix": 0.0, "tau": 0, "on_late_update": "continue"}, "on_late_update is continue; with lag = 1"),
        ({"eager": True}, "eager needs an update that is a round late; set lag = 1"),
    ],
)
def test_impossible_terms_are_refused_with_the_nearest_possible_value(changes: dict[str, Any], sentence: str) -> None:
    streaming = METHODS["streaming"]
    with pytest.raises(ValueError, match=sentence):
        check(terms_of(streaming, **changes), layout_of(streaming))


@pytest.mark.parametrize(
    "changes",
    [
        {"h": 9, "tau": 8},
        {"tau": 0, "mix": 0.0},
        {"tau": 29, "mix": 1.0},
        {"outer_lr": 1.0, "outer_momentum": 0.0},
        {"steps": 1, "lr": LearningRate(warmup_steps=1)},
        {"lr": LearningRate(minimum=1e-3)},
        {"quorum": 4, "floor": 4},
        {"min_nodes": 1, "quorum": 1},
    ],
)
def test_terms_at_the_edge_of_what_is_possible_pass(changes: dict[str, Any]) -> None:
    streaming = METHODS["streaming"]
    check(terms_of(streaming, **changes), layout_of(streaming))


@pytest.mark.parametrize(
    ("name", "value"),
    [("h", 2), ("tau", 1), ("mix", 0.5), ("codec_up", "q4"), ("codec_down", "q8"), ("quorum", 3)],
)
def test_data_parallel_leaves_no_choice_of_schedule_or_codec(name: str, value: object) -> None:
    method = METHODS["data-parallel"]
    with pytest.raises(ValueError, match=f"data-parallel runs with {name} = .* only, not {value}"):
        check(terms_of(method, **{name: value}), layout_of(method))


def test_methods_of_one_slot_refuse_a_layout_of_many() -> None:
    with pytest.raises(ValueError, match="1 slot, but the layout has 9"):
        check(terms_of(METHODS["diloco"]), layout_of(METHODS["streaming"]))


def test_data_parallel_refuses_a_model_that_is_too_large_for_one_fragment() -> None:
    """Its gradient is clipped by one norm (protocol K)."""
    layout = partition([("a", (MAX_FRAGMENT_ELEMENTS,)), ("b", (1,))], pattern="whole")
    with pytest.raises(ValueError, match="in 1 fragment, but it takes 2"):
        check(terms_of(METHODS["data-parallel"]), layout)
    check(terms_of(METHODS["diloco"]), layout)


@pytest.mark.parametrize("in_flight", [1, 2, 3, 9, None])
@pytest.mark.parametrize("h", [9, 30, 100])
def test_the_longest_overlap_is_the_last_that_keeps_the_slots_undecided_at_a_time(
    h: int, in_flight: int | None
) -> None:
    """Protocol D, by counting: within a step all that is due is encoded before anything is merged."""
    method, slots = replace(METHODS["streaming"], in_flight=in_flight), 9
    sends = [round_ * h + due_step(slot, slots, h) for round_ in range(3) for slot in range(slots)]

    def undecided(tau: int) -> int:
        return max(sum(send <= step <= send + tau for send in sends) for step in sends)

    longest = max_tau(method, h, slots)
    allowed = slots if in_flight is None else in_flight
    assert undecided(longest) <= allowed < undecided(longest + 1)


def test_the_table_is_read_without_torch() -> None:
    program = "import sys, farloop.algo.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_method_that_lags_a_version_may_overlap_a_whole_round() -> None:
    assert max_tau(METHODS["diloco"], 30, 1) == 29


@pytest.mark.parametrize(
    ("method", "lag", "sentence"), [("co2", 0, "co2 runs with lag = 1 only"), ("async", 1, "0 only")]
)
def test_who_can_be_late_by_a_round(method: str, lag: int, sentence: str) -> None:
    row = METHODS[method]
    with pytest.raises(ValueError, match=sentence):
        check(terms_of(row, lag=lag), layout_of(row))


def test_a_merge_keeps_no_more_than_a_nodes_share() -> None:
    streaming, diloco = METHODS["streaming"], METHODS["diloco"]
    assert [default_mix(streaming, nodes) for nodes in (1, 2, 4, 8)] == [0.5, 0.5, 0.25, 0.125]
    assert default_mix(diloco, 2) == 0.0
