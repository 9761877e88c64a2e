"""The methods, and their terms: an impossible choice is refused in one sentence that names a valid value."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo.fragments import NamedShape, partition
from farloop.algo.merge_rules import MERGE_RULES
from farloop.algo.methods import METHODS, default_mix, max_tau, method_named, screens_deltas
from farloop.algo.schedule import POWERS, due_step, first_rounds, initial_h
from farloop.algo.spec import MAX_FRAGMENT_ELEMENTS, Layout, NodeId
from farloop.algo.terms import FLAT, LearningRate, Rewarm, Terms
from farloop.algo.validation import RULES, SHAPES, check, check_own_tau

OF_THE_METHOD = ("h", "tau", "mix", "lag", "codec_up", "codec_down", "on_late_update", "quorum", "control_variates")


def terms_of(name: str, /, **changes: Any) -> Terms:
    """The method's own defaults, but for these fields and rounds of 30 steps where it leaves that open."""
    method = METHODS[name]
    values = {field: getattr(method, field) for field in OF_THE_METHOD} | ({} if "h" in method.fixed else {"h": 30})
    lr = LearningRate(peak=2e-3, minimum=2e-4, warmup_steps=90)
    common = {
        "steps": 900,
        "min_nodes": 4,
        "lr": lr,
        "outer_momentum": 0.0 if method.outer in ("sgd", "increments") else 0.9,
    }
    return plain_terms(**{"method": name, **values, **common, **changes})


def layout_of(name: str) -> Layout:
    """24 blocks: 9 slots where the model is cut at all."""
    tensors: list[NamedShape] = [(f"blocks.{i}.weight", (16, 16)) for i in range(24)]
    return partition([*tensors, ("embed.weight", (256, 16))], pattern=METHODS[name].pattern)


def rate(**choices: Any) -> dict[str, Any]:
    """A run of 100 steps with this learning rate."""
    lr = LearningRate(**{"peak": 8e-3, "minimum": 1e-3, "warmup_steps": 10, **choices})
    return {"steps": 100, "h": 10, "lr": lr}


def again(*starts: int, peak: float = 8e-3, **choices: Any) -> dict[str, Any]:
    return rate(rewarms=tuple(Rewarm(start=start, peak=peak, **choices) for start in starts))


ENDLESS = {"shape": "infinite", "constant": 4e-3}
QSR = {"h_rule": "qsr", "h_alpha": 0.011}
LATER = {"h_rule": "post-local", "h_switch": 300, "h_init": 9}
VARIATES = {"control_variates": True, "outer_lr": 1.0, "outer_momentum": 0.0}
LAGS = {"lag": 1, "mix": 0.0, "tau": 0}

POSSIBLE: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS),
    ("streaming", {"h": 9, "tau": 8}),
    ("streaming", {"h": 2**40, "steps": 2**40, "batch_sequences": 256, "outer_lr": 100.0, "norm_band": 1e6}),
    ("streaming", {"tau": 0, "mix": 0.0}),
    ("streaming", {"own_tau": True}),
    ("streaming", {"tau": 29, "mix": 1.0}),
    ("streaming", {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_restart": 10}),
    ("streaming", {"steps": 1, "lr": LearningRate(warmup_steps=1)}),
    ("streaming", {"quorum": 4, "floor": 4}),
    ("streaming", {"min_nodes": 1, "quorum": 1}),
    ("streaming", {**LAGS, "eager": True}),
    ("co2", {"outer_clip": 1.0}),
    ("async", {"outer_buffer": 4, "outer_spread": 0.25}),
    ("diloco", {"inner_optimizer": "muon"}),
    ("diloco", rate(**ENDLESS, cooldown_steps=20, anneal_at=60)),
    ("diloco", rate(shape="step", drops=(40, 70))),
    *(("diloco", rate(shape=shape)) for shape in SHAPES if shape not in ("infinite", "step")),
    *(("diloco", {**again(50), "lr": replace(again(50)["lr"], shape=shape)}) for shape in ("cosine", "wsd")),
    *(("streaming", {"tau": 0, "h_rule": rule, "h_alpha": 0.05}) for rule in POWERS),
    ("streaming", {**LATER, "tau": 0}),
    *((name, VARIATES) for name in ("diloco", "sparse")),
    ("diloco", {**VARIATES, "outer_lr": 0.7, "h_rule": "post-local", "h_switch": 30}),
    ("streaming", {**VARIATES, "tau": 0, "mix": 0.0}),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_of_the_terms_is_other_than_finite(value: float) -> None:
    """Whether a rule reads it or not: a record with NaN in it is not equal to itself."""
    terms = terms_of("streaming", **again(50, replay=0.5), h_share_of=((NodeId("rome"), 0.5),), outer_clip=1.0)
    places: list[tuple[str, Callable[[], Terms]]] = [
        (name, partial(terms.replace, **{name: value})) for name, held in terms.flat().items() if type(held) is float
    ]
    lr = terms.schedule.lr
    for field, held in ((field.name, getattr(lr, field.name)) for field in fields(lr)):
        if type(held) is float:
            places.append((f"lr.{field}", partial(terms.replace, lr=replace(lr, **{field: value}))))
    for field in ("peak", "replay"):
        one = replace(lr.rewarms[0], **{field: value})
        places.append((f"lr.rewarms.{field}", partial(terms.replace, lr=replace(lr, rewarms=(one,)))))
    places.append(("h_share_of", partial(terms.replace, h_share_of=((NodeId("rome"), value),))))
    assert {"mix", "lr.drop_factor", "lr.decay_share", "rewarm_momentum"} <= {name for name, _ in places}
    for name, made in places:
        with pytest.raises(ValueError, match=f"^{name}: expected a finite number; got {value}$"):
            made()


@pytest.mark.parametrize(("name", "changes"), POSSIBLE)
def test_terms_that_a_run_can_have_pass(name: str, changes: dict[str, Any]) -> None:
    terms = terms_of(name, **changes)
    check(terms, layout_of(name))
    assert sum(plan.length for plan in first_rounds(terms, 900)) == terms.schedule.steps


NEED_A_MEAN = ("co2", "decoupled", "async", "data-parallel")

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("streaming", {name: 0}, f"{name}: expected 1 or more, got 0")
        for name in ("steps", "h", "batch_sequences", "sequence_tokens", "evaluate_every_rounds", "min_nodes", "floor")
    ),
    ("streaming", {"h": 8}, "h is 8, too short for 9 slots of one step or more; the least is 9"),
    ("streaming", {"tau": 30}, "tau: expected 0 to 29 by streaming with h = 30, got 30"),
    ("streaming", {"tau": -1}, "tau: expected 0 to 29 by streaming with h = 30, got -1"),
    ("streaming", {"mix": 1.01}, r"mix: expected 0 .* to 1 .*, got 1\.01"),
    ("streaming", {"mix": -0.01}, r"mix: expected 0 .* to 1 .*, got -0\.01"),
    ("streaming", {"clip": 0.0}, "clip is 0.0; it must be a number above 0"),
    ("streaming", {"max_stale_rounds": -1}, "max_stale_rounds: expected 0 or more, got -1"),
    ("streaming", {"max_staleness": 1}, "max_staleness is 1; streaming takes 0 to 0"),
    ("streaming", {"quorum": 0}, "quorum is 0; the run starts with min_nodes = 4, so it can be 1 to that"),
    ("streaming", {"quorum": 5}, "quorum is 5; the run starts with min_nodes = 4, so it can be 1 to that"),
    ("streaming", {"floor": 5}, "floor is 5, but a window can close with 4 contributions: at most 4"),
    ("streaming", {"quorum": 2, "floor": 3}, "floor is 3, but a window can close with 2 contributions: at most 2"),
    ("streaming", {"lag": 2}, "lag is 2; streaming takes at most 1"),
    ("streaming", {"lag": -1}, "lag is -1; streaming takes at most 1"),
    ("streaming", {**LAGS, "mix": 0.5}, "mix is 0.5; with lag = 1 it is 0, for what stayed would be sent twice"),
    ("streaming", {**LAGS, "tau": 5}, "tau is 5; with lag = 1 it is 0, for the overlap is a whole round"),
    ("streaming", {**LAGS, "on_late_update": "continue"}, "on_late_update is continue; with lag = 1"),
    ("streaming", {"eager": True}, "eager needs an update that is a round late; set lag = 1"),
    ("co2", {"lag": 0}, "co2 runs with lag = 1 only"),
    ("async", {"lag": 1}, "0 only"),
    *(
        ("data-parallel", {name: value}, f"data-parallel runs with {name} = .* only, not {value}")
        for name, value in [("h", 2), ("tau", 1), ("mix", 0.5), ("codec_down", "q8"), ("quorum", 3)]
    ),
    # the outer and the inner optimizer
    ("streaming", {"outer_lr": -0.1}, "outer_lr is -0.1; it must be a number of at least 0"),
    ("streaming", {"outer_lr": 100.1}, "outer_lr: expected at most 100, got 100.1"),
    ("streaming", {"norm_band": 1.1e6}, r"norm_band is 1100000.0; the most is 1e\+06, or set screen = off"),
    *(
        (
            "async" if key == "outer_buffer" else "streaming",
            {key: 2**40 + 1},
            f"{key}: expected at most {2**40}, got {2**40 + 1}",
        )
        for key in ("steps", "h", "batch_sequences", "sequence_tokens", "min_nodes", "outer_restart", "outer_buffer")
    ),
    ("streaming", {"steps": 2**40, "batch_sequences": 512}, f"steps is {2**40}; with batch_sequences = 512 .* {2**39}"),
    (
        "streaming",
        {"h": 2**40, "batch_sequences": 512},
        f"h is {2**40}; with batch_sequences = 512 the most is {2**39}",
    ),
    ("streaming", {"outer_momentum": 1.0}, "outer_momentum: expected 0 or more and below 1, as 0.9, got 1.0"),
    ("streaming", {"outer_momentum": -0.1}, "outer_momentum: expected 0 or more and below 1, as 0.9, got -0.1"),
    ("streaming", {"weight_decay": -0.1}, "weight_decay is -0.1"),
    ("streaming", {"outer_restart": -1}, "outer_restart: expected 0 .never. or more, got -1"),
    ("streaming", {"rewarm_momentum": 1.5}, r"rewarm_momentum: expected 0 .* to 1 .*, got 1\.5"),
    ("sparse", {"outer_momentum": 0.9}, "outer_momentum is 0.9; sparse takes only 0"),
    ("diloco", {"outer_clip": 1.0}, "outer_clip is for the optimizer co2, which diloco does not have"),
    ("diloco", {"outer_spread": 0.1}, "outer_spread is for the optimizer delayed-nesterov"),
    ("co2", {"outer_clip": 0.0}, "outer_clip is 0.0; it must be above 0"),
    ("co2", {"outer_clip": -1.0}, "outer_clip is -1.0"),
    ("co2", {"outer_buffer": 4}, "outer_buffer is for the optimizer delayed-nesterov"),
    ("async", {"outer_buffer": 0}, "outer_buffer: expected 1 or more, got 0"),
    ("async", {"outer_buffer": 4, "outer_spread": 0.3}, "with outer_buffer = 4 it is 0 to 0.25"),
    ("diloco", {"inner_optimizer": "adam"}, "there is no inner_optimizer 'adam'; there are adamw, muon"),
    ("data-parallel", {"inner_optimizer": "muon"}, "data-parallel has no inner optimizer"),
    # the learning rate
    ("diloco", rate(shape="cosin"), "lr.shape: there is no 'cosin'; did you mean cosine"),
    ("diloco", rate(shape="zigzag"), "there are cosine, linear, step, wsd, infinite, constant"),
    ("diloco", rate(minimum=-1.0), "lr.minimum is -1.0"),
    ("diloco", rate(minimum=1.0), "lr.minimum = 1.0 is above lr.peak; at most 0.008"),
    ("diloco", rate(warmup_steps=101), "lr.warmup_steps is 101; the run has 100 steps, so 0 to that"),
    ("diloco", rate(warmup_steps=-1), "lr.warmup_steps is -1"),
    ("diloco", rate(drops=(3,)), r"lr.drops is \(3,\), but lr.shape is cosine: only step has it"),
    ("diloco", rate(anneal_at=3), "lr.anneal_at is 3, but lr.shape is cosine: only infinite has it"),
    ("diloco", rate(shape="step"), "lr.drops is empty; lr.shape = step falls there, as at 33,66"),
    ("diloco", rate(shape="step", drops=(70, 40)), "expected rising positions"),
    ("diloco", rate(shape="step", drops=(100,)), "positions from 1 to 99"),
    ("diloco", rate(shape="step", drops=(4,), drop_factor=1.0), "lr.drop_factor is 1.0; it is above 0 and below 1"),
    ("diloco", rate(shape="wsd", decay_share=0.95), "decay_share is 0.95; above 0, and with the warm-up at most 0.9"),
    ("diloco", rate(shape="wsd", decay_share=0.0), "lr.decay_share is 0.0; above 0"),
    ("diloco", rate(shape="infinite"), "constant is 0.0; it lies between lr.minimum = 0.001 and lr.peak = 0.008"),
    ("diloco", rate(**ENDLESS, cooldown_steps=91), "there is room for 0 to 90"),
    ("diloco", rate(**ENDLESS, anneal_at=5), "from the end of the cool-down it is 10 to 99"),
    ("diloco", rate(**ENDLESS, anneal_at=50, minimum=0.0), "is 0, which an exponential anneal never reaches; .* 1e-6"),
    ("diloco", again(10), "lr.rewarms has one at 10; .* is 11 to 99"),
    ("diloco", again(100), "lr.rewarms has one at 100"),
    ("diloco", again(50, 55), "one at 55; .* is 61 to 99"),
    ("diloco", again(50, replay=1.0), "a replay of 1.0; .* is at least 0 and below 1"),
    ("diloco", again(50, replay=-0.1), "a replay of -0.1"),
    ("diloco", again(50, peak=1e-4), "a peak of 0.0001; the least is 0.001"),
    # the rounds
    ("streaming", {"h_rule": "qrs"}, "h_rule: there is no 'qrs'; did you mean qsr"),
    ("streaming", {"h_rule": "linear", "h_alpha": -1.0}, r"h_alpha is -1\.0; .* 0\.06 gives rounds of h = 30"),
    ("streaming", {"h_rule": "cubic", "h_alpha": -1.0}, r"h_alpha is -1.0; .* 0\.00621 gives rounds of h = 30"),
    ("streaming", {"h_alpha": 0.01}, r"h_alpha is 0\.01, but h_rule is constant, which does not follow the learning"),
    ("streaming", {**LATER, "h_alpha": 0.01}, r"h_alpha is 0\.01, but h_rule is post-local"),
    ("streaming", {**QSR, "lr": LearningRate(shape="constant")}, "rounds grow as the learning rate falls, and here it"),
    ("streaming", {**QSR, "lr": LearningRate(peak=1e-3, minimum=1e-3)}, "use constant, or another lr.shape"),
    ("streaming", {"h_init": 10}, "h_init is 10, but with h_rule = constant every round has h = 30"),
    ("streaming", {"h_max": 100}, "h_max is 100, but with h_rule = constant every round has h = 30"),
    ("streaming", {**QSR, "h_init": 8}, "h_init is 8, too short for 9 slots of one step or more; the least is 9"),
    ("streaming", {**LATER, "h_init": None}, "h_init is 1, too short for 9 slots"),
    ("streaming", {**QSR, "h_max": 29}, "h_max is 29, below the 30 steps that a round has anyway; the least is 30"),
    ("streaming", {**QSR, "h_init": 50, "h_max": 40}, "h_max is 40, below the 50 steps"),
    ("streaming", {**QSR, "h_switch": 5}, "h_switch is 5, but h_rule is qsr: only post-local has it"),
    ("streaming", {**LATER, "h_switch": 0}, "h_switch is 0; h_rule = post-local switches to h = 30 at 1 to 899"),
    ("streaming", {**LATER, "h_switch": 900}, "h_switch is 900"),
    # control variates
    ("diloco", {**VARIATES, "outer_momentum": 0.9}, "outer_momentum is 0.9; with control_variates it must be 0.0, "),
    ("diloco", {**VARIATES, "lag": 1}, "lag is 1; with control_variates it must be 0, for a node must know the mean"),
    ("diloco", {**VARIATES, "tau": 1}, "tau is 1; with control_variates it must be 0, "),
    ("diloco", {**VARIATES, "mix": 0.5}, "mix is 0.5; with control_variates it must be 0.0, "),
    ("diloco", {**VARIATES, "quorum": 3}, "quorum is 3; with control_variates it must be left out, for every node"),
    ("diloco", {**VARIATES, "on_late_update": "continue"}, "is continue; with control_variates it must be wait, "),
    ("diloco", {**VARIATES, "outer_lr": 0.0}, "outer_lr is 0, so updates say nothing"),
    *(
        (name, {**VARIATES, "max_staleness": 0}, f"which those of {name} are not; take diloco")
        for name in ("co2", "decoupled", "async")
    ),
    ("data-parallel", VARIATES, "with data-parallel nodes make none"),
    ("diloco", {**VARIATES, "variates_rate": 0.0}, "variates_rate is 0.0; it must be above 0 and at most 1"),
    ("scafcom", {"variates_rate": 1.01}, "variates_rate is 1.01; it must be above 0 and at most 1"),
    ("diloco", {"variates_rate": 0.25}, "variates_rate is 0.25, which only control_variates read: leave it out"),
    ("scafcom", {"control_variates": False}, "scafcom runs with control_variates = True only, not False"),
    # a sum of disjoint parts
    *((name, {"merge": "sum"}, f"merge is sum, but {name} steps by a mean") for name in NEED_A_MEAN),
    ("streaming", {"merge": "sum", **LAGS, "eager": True}, "merge is sum, but an eager start needs the mean"),
    ("streaming", {"merge": "summ"}, "merge is 'summ'; .* sum"),
    ("streaming", {"merge": "mean"}, "merge is mean, which is the default: leave it out"),
    ("diloco", {**VARIATES, "merge": "sum"}, "merge is sum; with control_variates it must be left out, for updates"),
    # what a node has of its own
    ("data-parallel", {"h_share_of": (("a", 0.5),)}, "h_share_of: a cannot have its own, for data-par"),
    ("diloco", {**VARIATES, "h_share_of": (("a", 0.5),)}, "with control_variates all nodes do"),
    ("diloco", {"h_share_of": (("a", 1.0),)}, "h_share_of: a has 1.0; a share is above 0 and below 1"),
    *(
        (name, {**changes, "own_tau": True}, "own_tau is true, but these terms need one tau for all nodes")
        for name, changes in (("data-parallel", {}), ("diloco", VARIATES), ("streaming", LAGS), ("decoupled", {}))
    ),
    ("diloco", {"codec_up_of": (("b", "q8"), ("a", "q8"))}, "codec_up_of names a node twice, or not in the order"),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED)
def test_impossible_terms_are_refused_with_the_nearest_value(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        check(terms_of(name, **changes), layout_of(name))
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("dilocco", "did you mean diloco"), ("streeming", "did you mean streaming"), ("xyz", "there are diloco, ")],
)
def test_an_unknown_method_is_answered_with_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check(terms_of("diloco").replace(method=name), layout_of("diloco"))


def test_a_layout_is_one_that_the_method_can_send() -> None:
    with pytest.raises(ValueError, match="1 slot, but the layout has 9"):
        check(terms_of("diloco"), layout_of("streaming"))
    too_large = partition([("a", (MAX_FRAGMENT_ELEMENTS,)), ("b", (1,))], pattern="whole")
    check(terms_of("diloco"), too_large)
    with pytest.raises(ValueError, match="in 1 fragment, but it takes 2"):  # its gradient is clipped by one norm
        check(terms_of("data-parallel"), too_large)


@pytest.mark.parametrize("rule", POWERS)
def test_the_alpha_that_is_named_gives_h_at_the_peak(rule: str) -> None:
    """The nearest good value is one: taken at its word, the first round after the warm-up has h steps."""
    with pytest.raises(ValueError, match=r"h_alpha is missing; .* needs one above 0") as refusal:
        check(terms_of("diloco", h_rule=rule), layout_of("diloco"))
    alpha = float(str(refusal.value).split("; ")[2].split()[0])
    terms = terms_of("diloco", h_rule=rule, h_alpha=alpha)
    check(terms, layout_of("diloco"))
    lengths = [plan.length for plan in first_rounds(terms, 900)]
    assert lengths[:4] == [initial_h(terms)] * 3 + [30] and max(lengths) > 60


# --- The table of methods


def test_rows_are_found_by_name_and_refer_to_what_exists() -> None:
    assert {"constant", "post-local", *POWERS} == set(RULES)
    for name, method in METHODS.items():
        assert method is method_named(name) and method.name == name and method.merge in MERGE_RULES
        assert all(field in FLAT and hasattr(method, field) for field in method.fixed)


def test_gradients_are_not_screened_whatever_the_terms_say() -> None:
    assert screens_deltas(terms_of("diloco")) and not screens_deltas(terms_of("diloco", screen="off"))
    assert not screens_deltas(terms_of("data-parallel"))


def test_the_table_is_read_without_torch() -> None:
    program = "import sys, farloop.algo.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_merge_keeps_no_more_than_a_nodes_share() -> None:
    assert [default_mix(METHODS["decoupled"], nodes) for nodes in (1, 2, 4, 8)] == [0.5, 0.5, 0.25, 0.125]
    assert default_mix(METHODS["streaming"], 2) == 0.0


# --- How long an overlap may be


@pytest.mark.parametrize("in_flight", [1, 2, 3, 9, None])
@pytest.mark.parametrize("h", [9, 30, 100])
def test_the_longest_overlap_is_the_last_that_keeps_the_slots_undecided_at_once(h: int, in_flight: int | None) -> None:
    """Protocol D, by counting: within a step all that is due is encoded before anything is merged."""
    method, slots = replace(METHODS["streaming"], in_flight=in_flight), 9
    sends = [round_ * h + due_step(slot, slots, h) for round_ in range(3) for slot in range(slots)]

    def undecided(tau: int) -> int:
        return max(sum(send <= step <= send + tau for send in sends) for step in sends)

    longest = max_tau(method, h, slots)
    allowed = slots if in_flight is None else in_flight
    assert undecided(longest) <= allowed < undecided(longest + 1)


@pytest.mark.parametrize(
    ("name", "slots", "changes", "most"),
    [
        ("streaming", 8, {}, 29),
        ("decoupled", 8, {}, 29),
        ("diloco", 1, {}, 29),
        ("async", 1, {}, 29),
        ("streaming", 5, {**QSR, "h_init": 10}, 9),
    ],
)
def test_a_node_may_have_the_overlap_a_run_may_have(name: str, slots: int, changes: dict[str, Any], most: int) -> None:
    terms = terms_of(name, **changes)
    check_own_tau(0, terms, slots)
    check_own_tau(most, terms, slots)
    for tau in (-1, most + 1):
        with pytest.raises(ValueError, match=rf"tau is {tau}; {name} with rounds of {most + 1} steps .* 0 to {most}$"):
            check_own_tau(tau, terms, slots)


@pytest.mark.parametrize(
    ("name", "lag", "sentence"),
    [
        ("data-parallel", 0, "data-parallel has the same for all nodes, 0: leave the node's open"),
        ("co2", 1, "tau is 3, but with lag = 1 the overlap is a whole round"),
        ("streaming", 1, "tau is 3, but with lag = 1 the overlap is a whole round"),
    ],
)
def test_where_there_is_one_overlap_for_all_a_node_has_no_other(name: str, lag: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_own_tau(3, terms_of(name, lag=lag), 1)


@pytest.mark.parametrize(
    ("name", "terms", "possible"),
    [
        *((name, {}, True) for name in ("diloco", "streaming", "sparse")),
        *((name, {}, False) for name in ("co2", "decoupled", "async", "data-parallel")),
        ("diloco", LAGS, False),
        ("diloco", VARIATES, False),
    ],
)
def test_statistics_are_averaged_where_all_deltas_of_a_window_have_its_base(
    name: str, terms: dict[str, Any], possible: bool
) -> None:
    """Two late deltas from one anchor, each down to a tenth of a variance, would leave less than nothing of it."""
    statistics: list[NamedShape] = [("blocks.0.running_var", (16,))]
    layout = partition([("blocks.0.weight", (16, 16)), *statistics], pattern=METHODS[name].pattern)
    given = terms_of(name, **terms)
    if possible:
        return check(given, layout)
    with pytest.raises(ValueError, match=r"^buffers is average, which diloco, streaming and sparse can, with lag = 0"):
        check(given, layout)
