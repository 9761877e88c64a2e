"""The inner learning rate: warm-up, every shape, re-warms for new data (arXiv 2403.08763, 2404.06395, 2405.18392)."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.schedule import learning_rate, phases, warms_up
from farloop.algo.terms import LearningRate, Rewarm, Terms
from farloop.algo.validation import SHAPES, check_learning_rate

PEAK, LOW = 8e-3, 1e-3


def terms(steps: int = 100, **choices: Any) -> Terms:
    """Ten positions of warm-up, from 1e-3 to 8e-3 and back, unless chosen otherwise."""
    rate = LearningRate(**{"peak": PEAK, "minimum": LOW, "warmup_steps": 10, **choices})
    return plain_terms(
        method="diloco",
        steps=steps,
        h=10,
        outer_lr=0.6,
        lr=rate,
        weight_decay=0.1,
        batch_sequences=8,
        sequence_tokens=128,
    )


CHOICES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "linear": {},
    "step": {"drops": (40, 70), "drop_factor": 0.5},
    "wsd": {},
    "infinite": {"constant": 4e-3, "cooldown_steps": 20, "anneal_at": 60},
    "constant": {},
}


def of_shape(shape: str, steps: int = 100, **choices: Any) -> Terms:
    return terms(steps, shape=shape, **{**CHOICES[shape], **choices})


def test_every_shape_is_tested_here() -> None:
    assert set(CHOICES) == set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_rises_in_a_line_from_the_minimum_to_the_peak(shape: str) -> None:
    run = of_shape(shape)
    rates = [learning_rate(run, position) for position in range(11)]
    assert rates[:10] == pytest.approx([LOW + (PEAK - LOW) * (j + 1) / 10 for j in range(10)])
    assert rates[10] == pytest.approx(PEAK)


@pytest.mark.parametrize("shape", SHAPES)
@given(
    position=st.floats(0, 1e6),
    steps=st.integers(30, 300),
    warmup=st.integers(0, 10),
    rewarms=st.lists(st.tuples(st.integers(1, 299), st.floats(LOW, PEAK)), max_size=3, unique_by=lambda r: r[0]),
)
def test_it_stays_between_its_bounds_at_any_position(
    shape: str, position: float, steps: int, warmup: int, rewarms: list[tuple[int, float]]
) -> None:
    """C34: beyond the end, too, and whatever phases there are."""
    later = tuple(Rewarm(start=start, peak=peak) for start, peak in sorted(rewarms) if start < steps)
    choices = {"constant": LOW, "cooldown_steps": 5, "anneal_at": None if later else 20} if shape == "infinite" else {}
    run = of_shape(shape, steps, warmup_steps=warmup, rewarms=later, **choices)
    assert LOW - 1e-12 <= learning_rate(run, position) <= PEAK + 1e-12


def test_a_cosine_is_half_way_down_in_the_middle_and_at_its_minimum_at_the_end_and_beyond() -> None:
    run = of_shape("cosine")
    assert learning_rate(run, 55) == pytest.approx((PEAK + LOW) / 2)
    assert [learning_rate(run, position) for position in (100, 101, 1e9)] == [pytest.approx(LOW)] * 3
    assert learning_rate(run, 32.5) == pytest.approx(LOW + (PEAK - LOW) * (1 + math.cos(math.pi / 4)) / 2)


def test_a_line_falls_by_the_same_at_every_step() -> None:
    rates = [learning_rate(of_shape("linear"), position) for position in range(10, 101)]
    assert [b - a for a, b in itertools.pairwise(rates)] == pytest.approx([(LOW - PEAK) / 90] * 90)


def test_steps_fall_from_their_positions_on_and_never_below_the_minimum() -> None:
    run = of_shape("step")
    assert [learning_rate(run, position) for position in (39.9, 40, 69, 70, 99)] == pytest.approx(
        [PEAK, PEAK / 2, PEAK / 2, PEAK / 4, PEAK / 4]
    )
    assert learning_rate(of_shape("step", drop_factor=0.01), 40) == LOW


@pytest.mark.parametrize(("decay", "half_way"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_a_held_rate_falls_in_its_tail_alone(decay: str, half_way: float) -> None:
    run = of_shape("wsd", decay=decay)
    assert {learning_rate(run, position) for position in range(10, 81)} == {PEAK}
    assert learning_rate(run, 90) == pytest.approx(LOW + (PEAK - LOW) * half_way)
    assert learning_rate(run, 100) == pytest.approx(LOW)


def test_an_endless_rate_cools_down_is_held_and_anneals_where_it_is_told_to() -> None:
    held = of_shape("infinite", anneal_at=None)
    assert learning_rate(held, 20) == pytest.approx((PEAK + 4e-3) / 2)
    assert {learning_rate(held, position) for position in (30, 60, 99, 1e6)} == {4e-3}
    annealed = of_shape("infinite")
    assert learning_rate(annealed, 60) == 4e-3
    assert learning_rate(annealed, 80) == pytest.approx(math.sqrt(4e-3 * LOW)), "exponential: the geometric mean"
    assert learning_rate(annealed, 100) == pytest.approx(LOW)


def test_a_run_that_anneals_early_is_the_held_one_until_then() -> None:
    """No end need be known: the anneal begins from any position of the same run."""
    held, annealed = of_shape("infinite", anneal_at=None), of_shape("infinite", anneal_at=45)
    assert [learning_rate(held, p) for p in range(46)] == [learning_rate(annealed, p) for p in range(46)]


def test_a_rewarm_starts_from_the_last_rate_and_runs_through_the_shape_again() -> None:
    """arXiv 2403.08763: not from zero."""
    once = of_shape("cosine", 60)
    twice = of_shape("cosine", 100, rewarms=(Rewarm(start=60, peak=5e-3),))
    assert [learning_rate(twice, p) for p in range(60)] == [learning_rate(once, p) for p in range(60)]
    assert learning_rate(twice, 60) == pytest.approx(LOW + (5e-3 - LOW) / 10)
    assert learning_rate(twice, 69) == pytest.approx(5e-3)
    assert learning_rate(twice, 85) == pytest.approx((5e-3 + LOW) / 2)
    assert learning_rate(twice, 100) == pytest.approx(LOW)


def test_a_rewarm_of_a_held_rate_starts_from_what_was_held() -> None:
    run = of_shape("infinite", anneal_at=None, rewarms=(Rewarm(start=60, peak=PEAK),))
    assert learning_rate(run, 60) == pytest.approx(4e-3 + 4e-3 / 10)
    assert learning_rate(run, 99) == 4e-3


def test_a_run_knows_where_its_rate_rises() -> None:
    run = of_shape("cosine", rewarms=(Rewarm(start=60, peak=PEAK),))
    assert [p for p in range(100) if warms_up(run, p)] == [*range(10), *range(60, 70)]
    assert [(phase.start, phase.end) for phase in phases(run)] == [(0, 60), (60, 100)]


def test_the_schedule_gives_the_same_rate() -> None:
    assert schedule.learning_rate is learning_rate


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_can_be_run(shape: str) -> None:
    check_learning_rate(of_shape(shape))
    if shape not in ("infinite", "step"):
        check_learning_rate(of_shape(shape, rewarms=(Rewarm(start=50, peak=PEAK),)))


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"shape": "cosin"}, "lr.shape: there is no 'cosin'; did you mean 'cosine'"),
        ({"shape": "zigzag"}, "there are cosine, linear, step, wsd, infinite, constant"),
        ({"peak": math.nan}, "lr.peak is nan; it must be a number of at least 0"),
        ({"minimum": 1.0}, "lr.minimum = 1.0 is above lr.peak; at most 0.008"),
        ({"warmup_steps": 101}, "lr.warmup_steps is 101; the run has 100 steps, so 0 to that"),
        ({"drops": (3,)}, r"lr.drops is \(3,\), but lr.shape is cosine: only step has it"),
        ({"anneal_at": 3}, "lr.anneal_at is 3, but lr.shape is cosine: only infinite has it"),
        ({"shape": "step"}, "lr.drops is empty; lr.shape = step falls there, as at 33,66"),
        ({"shape": "step", "drops": (70, 40)}, "in rising order"),
        ({"shape": "step", "drops": (100,)}, "positions from 1 to 99"),
        ({"shape": "step", "drops": (40,), "drop_factor": 1.0}, "lr.drop_factor is 1.0; it is above 0 and below 1"),
        ({"shape": "wsd", "decay_share": 0.95}, "lr.decay_share is 0.95; above 0, and with the warm-up at most 0.9"),
        ({"shape": "wsd", "decay_share": 0.0}, "lr.decay_share is 0.0; above 0"),
        ({"shape": "infinite"}, "lr.constant is 0.0; it lies between lr.minimum = 0.001 and lr.peak = 0.008"),
        ({"shape": "infinite", "constant": 4e-3, "cooldown_steps": 91}, "there is room for 0 to 90"),
        ({"shape": "infinite", "constant": 4e-3, "anneal_at": 5}, "from the end of the cool-down it is 10 to 99"),
        (
            {"shape": "infinite", "constant": 4e-3, "anneal_at": 50, "minimum": 0.0},
            "lr.minimum is 0, which an exponential anneal never reaches; a good one is 1e-6",
        ),
        ({"rewarms": (Rewarm(start=10, peak=PEAK),)}, "lr.rewarms has one at 10; .* is 11 to 99"),
        ({"rewarms": (Rewarm(start=100, peak=PEAK),)}, "lr.rewarms has one at 100"),
        ({"rewarms": (Rewarm(start=50, peak=PEAK), Rewarm(start=55, peak=PEAK))}, "one at 55; .* is 61 to 99"),
        ({"rewarms": (Rewarm(start=50, peak=PEAK, replay=1.0),)}, "a replay of 1.0; .* is at least 0 and below 1"),
        ({"rewarms": (Rewarm(start=50, peak=PEAK, replay=-0.1),)}, "a replay of -0.1"),
        ({"rewarms": (Rewarm(start=50, peak=PEAK, replay=math.nan),)}, "a replay of nan"),
        ({"rewarms": (Rewarm(start=50, peak=1e-4),)}, "a peak of 0.0001; the least is 0.001"),
    ],
)
def test_a_rate_that_cannot_be_followed_is_refused_with_the_nearest_that_can(
    choices: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_learning_rate(terms(**choices))


def test_what_survives_a_rewarm_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"rewarm_momentum is 1\.5; it lies between 0 .* and 1"):
        check_learning_rate(terms().replace(rewarm_momentum=1.5))
