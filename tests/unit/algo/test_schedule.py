"""The run's clock: rounds, slots, due steps, windows (protocol A, B; arXiv 2311.08105, 2501.18512, 2310.14423), and the
inner learning rate that it follows (arXiv 2403.08763, 2404.06395, 2405.18392)."""

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plain_runs import plain_spec, plain_terms
from stories import StoryText, all_stories, check_story, python

from farloop.algo import schedule
from farloop.algo.schedule import learning_rate
from farloop.algo.spec import Fragment, Layout, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import LearningRate, Rewarm, Terms
from farloop.algo.validation import SHAPES

A, B = NodeId("a"), NodeId("b")


def terms(**choices: Any) -> Terms:
    lr = LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=4)
    return plain_terms(**{"mix": 0.5, "codec_down": "q8", "lr": lr, **choices})


def layout(*slots: int) -> Layout:
    """A fragment per argument, in that slot."""
    fragments = tuple(Fragment(index=i, slot=slot, numel=256, tensors=()) for i, slot in enumerate(slots))
    return Layout(slots=max(slots) + 1, fragments=fragments)


def spec_of(run: Terms, cut: Layout, evaluation_set: str = "none") -> RunSpec:
    spec = plain_spec()
    identity = dataclasses.replace(spec.identity, layout=cut, evaluation_set=evaluation_set)
    return RunSpec(identity=identity, terms=run)


def all_rounds(run: Terms) -> dict[int, RoundPlan]:
    return {plan.index: plan for plan in schedule.first_rounds(run, sys.maxsize)}


def lengths(**choices: Any) -> list[int]:
    return [plan.length for plan in all_rounds(terms(**choices)).values()]


def all_windows(run: Terms, cut: Layout) -> list[list[WindowTerms]]:
    """Every window of every fragment, in order."""
    rounds = all_rounds(run)
    windows = []
    for first in schedule.first_windows(run, cut):
        chain = [first]
        while following := schedule.window_after(run, cut, chain[-1], rounds):
            chain.append(following)
        windows.append(chain)
    return windows


def due_positions(run: Terms, cut: Layout) -> list[list[int]]:
    """The inner steps after which each fragment is sent by a node that runs H as it is."""
    rounds = all_rounds(run)
    return [
        [
            rounds[window.round].start + schedule.due_in(window, fragment, cut.slots, rounds[window.round].length)
            for window in chain
        ]
        for fragment, chain in zip(cut.fragments, all_windows(run, cut), strict=True)
    ]


# --- Due steps and windows


@given(slots=st.integers(1, 50), steps=st.integers(1, 500))
def test_due_steps_rise_to_the_rounds_last_step(slots: int, steps: int) -> None:
    due = [schedule.due_step(slot, slots, steps) for slot in range(slots)]
    assert due == sorted(due) and due[0] >= 1 and due[-1] == steps
    assert due == [math.ceil((slot + 1) * steps / slots) for slot in range(slots)]


def test_the_window_after_needs_the_round_after() -> None:
    """B: it is fixed by then; that it is missing must not pass for the end of the run."""
    run, cut = terms(steps=40, h=10), layout(0)
    first = {0: RoundPlan(index=0, start=0, length=10)}
    with pytest.raises(KeyError):
        schedule.window_after(run, cut, schedule.first_windows(run, cut)[0], first)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Terms, Layout]:
    slots = draw(st.integers(1, 6))
    h = draw(st.integers(slots, 40))
    shared = draw(st.lists(st.integers(0, slots - 1), max_size=3))
    steps = draw(st.integers(1, 5 * h))
    return terms(steps=steps, h=h, **draw(rules(slots=slots, steps=steps))), layout(*range(slots), *shared)


@st.composite
def rules(draw: st.DrawFn, *, slots: int, steps: int) -> dict[str, Any]:
    """A rule for the lengths of rounds, and a learning rate for it to follow."""
    rule = draw(st.sampled_from(["constant", "post-local", *schedule.POWERS]))
    if rule == "constant":
        return {}
    choices: dict[str, Any] = {"h_rule": rule, "h_init": draw(st.integers(slots, 50))}
    if rule == "post-local":
        return {**choices, "h_switch": draw(st.integers(1, steps))}
    starts = draw(st.lists(st.integers(1, steps), max_size=2, unique=True))
    return {
        **choices,
        "h_alpha": draw(st.floats(1e-4, 1.0)),
        "h_max": draw(st.none() | st.integers(50, 200)),
        "lr": LearningRate(
            peak=1e-2,
            minimum=draw(st.sampled_from([0.0, 1e-3])),
            warmup_steps=draw(st.integers(0, steps)),
            rewarms=tuple(Rewarm(start=start, peak=5e-3) for start in sorted(starts) if start < steps),
        ),
    }


@given(runs())
def test_rounds_cover_the_run_without_gap_or_overlap(run_and_cut: tuple[Terms, Layout]) -> None:
    """C32: Σ H = steps exactly; only the last round may be short, and none has fewer steps than slots but it."""
    run, cut = run_and_cut
    rounds = list(all_rounds(run).values())
    assert [plan.index for plan in rounds] == list(range(len(rounds)))
    starts = [0, *itertools.accumulate(plan.length for plan in rounds)]
    assert [*(plan.start for plan in rounds), run.schedule.steps] == starts
    least = min(run.schedule.h, schedule.initial_h(run))
    most = max(run.schedule.h, schedule.initial_h(run), run.schedule.h_max or run.schedule.steps)
    assert all(max(least, cut.slots) <= plan.length <= most for plan in rounds[:-1])
    assert [schedule.is_last(run, plan) for plan in rounds] == [False] * (len(rounds) - 1) + [True]
    assert schedule.round_after(run, rounds[-1]) is None


@given(runs())
def test_every_slot_has_one_window_a_round_and_every_fragment_one_last_word(
    run_and_cut: tuple[Terms, Layout],
) -> None:
    """A, C30, C32: none is skipped or doubled, the last is final and is sent at the run's last step."""
    run, cut = run_and_cut
    rounds = all_rounds(run)
    for fragment, chain, sends in zip(cut.fragments, all_windows(run, cut), due_positions(run, cut), strict=True):
        assert [window.fragment for window in chain] == [fragment.index] * len(chain)
        assert [window.window for window in chain] == list(range(1, len(chain) + 1))
        assert [window.final for window in chain] == [False] * (len(chain) - 1) + [True]
        assert sends == sorted(set(sends)) and sends[-1] == run.schedule.steps
        first = schedule.first_send_round(0, fragment.slot, cut.slots)
        due_before_the_end = [
            index
            for index, plan in rounds.items()
            if index >= first
            and plan.start + schedule.due_step(fragment.slot, cut.slots, plan.length) < run.schedule.steps
        ]
        assert [window.round for window in chain if not window.final] == due_before_the_end
        assert all(send >= rounds[0].length for send in sends), "nothing before a full period"
        spans = [schedule.span_of(cut, window, rounds) for window in chain if not window.final]
        assert spans == list(itertools.pairwise([0, *sends]))[: len(spans)], "every step is in one window"


# --- Nodes with fewer steps, and nodes that start late


def test_positions_of_nodes_with_different_h_meet_at_the_rounds_ends() -> None:
    """A: S_r + j·H_r/H_{r,i}, a real number."""
    plan = RoundPlan(index=2, start=200, length=100, node_steps=((B, 30),))
    assert [schedule.position_in(plan, A, step) for step in (0, 1, 100)] == [200.0, 201.0, 300.0]
    assert [schedule.position_in(plan, B, step) for step in (0, 15, 30)] == [200.0, 250.0, 300.0]
    assert schedule.position_in(plan, B, 1) == pytest.approx(200 + 10 / 3)


@given(st.integers(1, 8), st.integers(1, 40), st.data())
def test_wherever_a_node_starts_each_slot_first_comes_after_a_full_period_and_before_another(
    slots: int, node_steps: int, data: st.DataObject
) -> None:
    """A, I: counted in slots, of which a period has as many as a round. Of the first it has the steps ahead."""
    start_slot, slot = data.draw(st.integers(0, slots - 1)), data.draw(st.integers(0, slots - 1))
    sent = schedule.first_send_round(4, slot, slots, start_slot) * slots + slot + 1  # at the slot's end
    assert slots <= sent - (4 * slots + start_slot) < 2 * slots
    step = schedule.first_step(slot, slots, node_steps)
    assert 0 <= step < node_steps
    if node_steps >= slots:
        assert schedule.due_step(slot - 1, slots, node_steps) <= step < schedule.due_step(slot, slots, node_steps)


PLAN = RoundPlan(index=3, start=90, length=30)


def dealt(
    slots: int = 1, shares: Mapping[str, float] | None = None, plan: RoundPlan = PLAN, **rates: float
) -> dict[str, int]:
    speeds = {NodeId(name): rate for name, rate in rates.items()}
    own = [(NodeId(name), share) for name, share in (shares or {}).items()]
    found = schedule.dealt(plan, slots, rates=speeds, shares=own)
    assert dataclasses.replace(found, node_steps=()) == plan
    return {str(name): steps for name, steps in found.node_steps}


SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 0.99))


@given(rates=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.0, 1e9)), shares=SHARES, slots=st.integers(1, 40))
def test_every_node_has_a_share_of_every_round(rates: dict[str, float], shares: dict[str, float], slots: int) -> None:
    """By its share and its speed it does the fewer steps of the two."""
    by_speed, by_share, both = dealt(slots, **rates), dealt(slots, shares), dealt(slots, shares, **rates)
    assert all(min(slots, PLAN.length) <= steps < PLAN.length for steps in both.values())
    names = sorted({*by_speed, *by_share})
    assert both == {n: min(by_speed.get(n, PLAN.length), by_share.get(n, PLAN.length)) for n in names}


@given(data=st.data(), length=st.integers(2, 500), best=st.integers(1, 10**6))
def test_a_share_or_rate_that_is_a_step_count_gives_that_count(data: st.DataObject, length: int, best: int) -> None:
    """Though in fp64 it may be a bit less: of 8 steps a node at half of 0.66 was given 3, and not 4."""
    steps = data.draw(st.integers(1, length))
    assert schedule.steps_by_share(length, steps / length) == steps
    if steps < 0.95 * length:
        plan, fastest = dataclasses.replace(PLAN, length=length), best / 1000
        assert dealt(plan=plan, a=fastest, b=fastest * steps / length) == {"b": steps}


# --- Lengths of rounds

QSR: dict[str, Any] = {"h": 4, "h_rule": "qsr", "h_alpha": 0.0175}
"""The published recipe for ViT-B (arXiv 2310.14423): H = 4 at η = 0.008."""

POWERS = st.sampled_from(sorted(schedule.POWERS.items()))


def followed(rate: float, *, steps: int = 10_000, **choices: Any) -> int:
    """H of a round that starts where η is `rate`, as in a run that does nothing but hold it."""
    lr = LearningRate(peak=rate, minimum=0.0, warmup_steps=0, shape="constant")
    return schedule.h_at(terms(steps=steps, lr=lr, **{**QSR, **choices}), 500)


@given(rate=st.integers(1, 9999), ratio=st.integers(1, 300), rule=POWERS)
def test_a_whole_power_is_not_rounded_below_itself(rate: int, ratio: int, rule: tuple[str, int]) -> None:
    """C31: in fp64 one case in nine would come out one too low. Rates and α are decimals, as people write them."""
    lr, alpha = float(f"{rate}e-6"), float(f"{rate * ratio}e-6")
    assert followed(lr, h=1, steps=10**9, h_rule=rule[0], h_alpha=alpha) == ratio ** rule[1]


@given(rate=st.floats(1e-6, 1.0), alpha=st.floats(1e-6, 1.0), rule=POWERS)
def test_the_guard_lengthens_no_round_that_is_clearly_shorter(rate: float, alpha: float, rule: tuple[str, int]) -> None:
    """C31."""
    exact = (alpha / rate) ** rule[1]
    assume(1e-8 < exact % 1 < 1 - 1e-8 and exact < 1e6)
    assume(exact - math.floor(exact) < 1 - 2e-9 * exact)
    assert followed(rate, h=1, steps=10**7, h_rule=rule[0], h_alpha=alpha) == max(1, math.floor(exact))


FLAT = LearningRate(peak=4e-3, minimum=0.0, warmup_steps=0, shape="constant")
LATER = {"h": 30, "h_rule": "post-local", "h_switch": 10}
LOW = LearningRate(peak=8e-3, minimum=8e-3, warmup_steps=0, rewarms=(Rewarm(start=10, peak=8e-3),))


def test_h_is_settled_at_the_first_position_of_a_round() -> None:
    """C33: η falls by half within this round, and its H stays; the next one has another. C32: the last is cut short."""
    run = terms(steps=300, lr=LearningRate(peak=8e-3, minimum=1e-6, warmup_steps=0, shape="linear"), **QSR)
    *whole, last = all_rounds(run).values()
    for plan in whole:
        assert plan.length == max(4, math.floor((0.0175 / learning_rate(run, plan.start)) ** 2))
    assert last.start + last.length == 300 and schedule.h_at(run, last.start) > last.length


@pytest.mark.parametrize("minimum", [0.0, 5e-324, 1e-300])
@pytest.mark.parametrize("rule", schedule.POWERS)
def test_a_learning_rate_of_nothing_gives_a_long_round_and_no_exception(minimum: float, rule: str) -> None:
    """C34: (α/η)^power overflows, or divides by zero."""
    lr = LearningRate(peak=8e-3, minimum=minimum, warmup_steps=0)
    run = terms(steps=1000, lr=lr, **{**QSR, "h_rule": rule})
    assert schedule.h_at(run, 1000) == 1000
    assert schedule.h_at(run.replace(h_max=50), 1000) == 50


def test_no_round_is_longer_than_the_longest() -> None:
    found = lengths(steps=3000, lr=LearningRate(peak=8e-3, minimum=1e-6, warmup_steps=50), h_max=64, **QSR)
    assert max(found) == 64 and found == sorted(found[:-1]) + found[-1:]


def test_a_rewarm_begins_with_a_round_of_its_own_and_rounds_are_short_again() -> None:
    """H shrinks where η rises: also while it is still low, for that is a warm-up."""
    lr = LearningRate(peak=8e-3, minimum=1e-6, warmup_steps=20, rewarms=(Rewarm(start=500, peak=8e-3),))
    rounds = list(all_rounds(terms(steps=1000, lr=lr, **QSR)).values())
    (begins,) = [plan.index for plan in rounds if plan.start == 500]
    assert rounds[begins - 1].length > 20
    assert [plan.length for plan in rounds[begins : begins + 5]] == [4] * 5


@given(start=st.integers(0, 150), h=st.integers(1, 50))
def test_a_round_of_h_steps_is_worth_one_wherever_it_is(start: int, h: int) -> None:
    run = terms(steps=200, h=h, lr=LearningRate(peak=1e-2, minimum=0.0, warmup_steps=20))
    assert schedule.work_ratio(run, start, start + h) == 1.0


def worth(peak: float, shape: Any) -> float:
    """Of forty steps in a run with rounds of ten."""
    lr = LearningRate(peak=peak, minimum=0.0, warmup_steps=0, shape=shape)
    return round(schedule.work_ratio(terms(steps=100, h=10, lr=lr), 20, 60), 12)


def evaluated(every: int, fragment: int, evaluation_set: str) -> list[int]:
    """Rounds of five whose commit of the first or the last fragment is evaluated."""
    run, cut = terms(steps=50, h=10, evaluate_every_rounds=every), layout(0, 1)
    spec = spec_of(run, cut, evaluation_set)
    return [window.round for window in all_windows(run, cut)[fragment] if schedule.is_evaluated(spec, window)]


@all_stories(__file__, "schedule")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)


# --- The inner learning rate

PEAK, LEAST = 8e-3, 1e-3
OF_SHAPE: dict[str, dict[str, Any]] = {
    "step": {"drops": (40, 70), "drop_factor": 0.5},
    "infinite": {"constant": 4e-3, "cooldown_steps": 20, "anneal_at": 60},
}


def of_shape(shape: str, steps: int = 100, **choices: Any) -> Terms:
    """Ten positions of warm-up, from 1e-3 to 8e-3 and back, unless chosen otherwise."""
    fields = {"peak": PEAK, "minimum": LEAST, "warmup_steps": 10, "shape": shape, **OF_SHAPE.get(shape, {}), **choices}
    return terms(steps=steps, lr=LearningRate(**fields))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_rises_in_a_line_from_the_minimum_to_the_peak(shape: str) -> None:
    rates = [learning_rate(of_shape(shape), position) for position in range(11)]
    assert rates == pytest.approx([LEAST + (PEAK - LEAST) * (j + 1) / 10 for j in range(10)] + [PEAK])


@pytest.mark.parametrize("shape", SHAPES)
@given(
    position=st.floats(0, 1e6),
    steps=st.integers(30, 300),
    warmup=st.integers(0, 10),
    rewarms=st.lists(st.tuples(st.integers(1, 299), st.floats(LEAST, PEAK)), max_size=3, unique_by=lambda r: r[0]),
)
def test_it_stays_between_its_bounds_at_any_position(
    shape: str, position: float, steps: int, warmup: int, rewarms: list[tuple[int, float]]
) -> None:
    """C34: beyond the end, too, and whatever phases there are."""
    later = tuple(Rewarm(start=start, peak=peak) for start, peak in sorted(rewarms) if start < steps)
    endless = {"constant": LEAST, "cooldown_steps": 5, "anneal_at": None if later else 20}
    run = of_shape(shape, steps, warmup_steps=warmup, rewarms=later, **(endless if shape == "infinite" else {}))
    assert LEAST - 1e-12 <= learning_rate(run, position) <= PEAK + 1e-12


HELD = {"anneal_at": None}
MIDDLE = LEAST + (PEAK - LEAST) / 2
AGAIN = {"rewarms": (Rewarm(start=60, peak=5e-3),)}


@pytest.mark.parametrize(
    ("shape", "choices", "rates"),
    [
        ("cosine", {}, {55: MIDDLE, 32.5: LEAST + (PEAK - LEAST) * (1 + math.cos(math.pi / 4)) / 2, 1e9: LEAST}),
        ("linear", {}, {p: PEAK + (LEAST - PEAK) * (p - 10) / 90 for p in range(10, 101)}),
        ("step", {}, {39.9: PEAK, 40: PEAK / 2, 69: PEAK / 2, 70: PEAK / 4, 99: PEAK / 4}),
        ("step", {"drop_factor": 0.01}, {40: LEAST}),
        ("wsd", {"decay": "linear"}, {11: PEAK, 80: PEAK, 90: MIDDLE, 100: LEAST}),
        ("wsd", {"decay": "sqrt"}, {11: PEAK, 80: PEAK, 90: LEAST + (PEAK - LEAST) * (1 - 0.5**0.5), 100: LEAST}),
        ("infinite", HELD, {20: (PEAK + 4e-3) / 2, 30: 4e-3, 60: 4e-3, 99: 4e-3, 1e6: 4e-3}),
        ("infinite", {}, {60: 4e-3, 80: math.sqrt(4e-3 * LEAST), 100: LEAST}),  # exponential: the geometric mean
        # A re-warm starts from the last rate, not from zero, and runs through the shape again.
        ("cosine", AGAIN, {60: LEAST + (5e-3 - LEAST) / 10, 69: 5e-3, 85: (5e-3 + LEAST) / 2, 100: LEAST}),
        ("infinite", {**HELD, "rewarms": (Rewarm(start=60, peak=PEAK),)}, {60: 4e-3 + 4e-3 / 10, 99: 4e-3}),
    ],
)
def test_each_shape_falls_in_its_own_way(shape: str, choices: dict[str, Any], rates: dict[float, float]) -> None:
    run = of_shape(shape, **choices)
    assert {position: learning_rate(run, position) for position in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("one", "other", "until"),
    [
        (of_shape("cosine", 60), of_shape("cosine", 100, **AGAIN), 59),
        (of_shape("infinite", **HELD), of_shape("infinite", anneal_at=45), 45),  # no end need be known
    ],
)
def test_what_comes_later_changes_no_rate_before_it(one: Terms, other: Terms, until: int) -> None:
    assert [learning_rate(one, p) for p in range(until + 1)] == [learning_rate(other, p) for p in range(until + 1)]
