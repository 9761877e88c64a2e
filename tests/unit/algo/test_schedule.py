"""The run's clock: rounds, slots, due steps, windows (protocol A, B; arXiv 2311.08105, 2501.18512, 2310.14423)."""

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from farloop.algo import schedule
from farloop.algo.spec import Fragment, Identity, Layout, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import LearningRate, Rewarm, Terms

A, B = NodeId("a"), NodeId("b")


def terms(*, steps: int, h: int, tau: int = 0, **choices: Any) -> Terms:
    fields = dict[str, Any](
        method="streaming",
        steps=steps,
        h=h,
        tau=tau,
        mix=0.5,
        codec_up="q4",
        codec_down="q8",
        outer_lr=0.6,
        outer_momentum=0.9,
        lr=LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=4),
        clip=1.0,
        weight_decay=0.1,
        batch_sequences=8,
        sequence_tokens=128,
    )
    return Terms.from_flat(**{**fields, **choices})


def layout(*slots: int) -> Layout:
    """A fragment per argument, in that slot."""
    fragments = tuple(Fragment(index=i, slot=slot, numel=256, tensors=()) for i, slot in enumerate(slots))
    return Layout(slots=max(slots) + 1, fragments=fragments)


def all_rounds(run: Terms) -> dict[int, RoundPlan]:
    return {plan.index: plan for plan in schedule.first_rounds(run, sys.maxsize)}


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


def test_two_fragments_are_sent_half_a_round_apart_and_none_before_a_full_period() -> None:
    """C26: H = 100, P = 2: 150, 250, … and 100, 200, …; at the end the first one is flushed."""
    assert due_positions(terms(steps=400, h=100), layout(0, 1)) == [[150, 250, 350, 400], [100, 200, 300, 400]]


def test_one_fragment_is_sent_every_h_steps() -> None:
    """C26: plain DiLoCo."""
    assert due_positions(terms(steps=350, h=100), layout(0)) == [[100, 200, 300, 350]]


@pytest.mark.parametrize(("slots", "smallest"), [(9, 11), (17, 5), (37, 2)])
def test_slots_are_spread_evenly_over_a_round(slots: int, smallest: int) -> None:
    """C27 (arXiv 2501.18512, Fig. 17): 24, 48 and 108 layers, three per fragment, and a slot for the embeddings."""
    due = [schedule.due_step(slot, slots, 100) for slot in range(slots)]
    gaps = [later - earlier for earlier, later in itertools.pairwise([0, *due])]
    assert due[-1] == 100
    assert min(gaps) == smallest and max(gaps) - min(gaps) <= 1


def test_consecutive_sends_of_a_fragment_are_h_steps_apart() -> None:
    """C30, but for the flush at the end."""
    for sends in due_positions(terms(steps=500, h=50, tau=5), layout(0, 1, 2, 3)):
        gaps = [later - earlier for earlier, later in itertools.pairwise(sends)]
        assert set(gaps[:-1]) == {50} and gaps[-1] <= 50


def test_every_window_carries_the_overlap_of_the_run() -> None:
    """C29: τ is a term of the window; the node merges that many steps after the send."""
    for window in itertools.chain(*all_windows(terms(steps=100, h=20, tau=7), layout(0, 1))):
        assert (window.tau, window.mix, window.codec_up, window.codec_down) == (7, 0.5, "q4", "q8")


def test_a_window_names_its_fragment_its_version_and_its_round() -> None:
    first, last = schedule.first_windows(terms(steps=40, h=10), layout(0, 1))
    assert (first.fragment, first.window, first.round, first.final) == (0, 1, 1, False)
    assert (last.fragment, last.window, last.round, last.final) == (1, 1, 0, False)


def test_a_run_shorter_than_a_round_is_one_flush() -> None:
    """A: the final windows are exempt from the first period."""
    run, cut = terms(steps=7, h=10), layout(0, 1, 1)
    assert all_rounds(run) == {0: RoundPlan(index=0, start=0, length=7)}
    assert [[(w.round, w.final) for w in chain] for chain in all_windows(run, cut)] == [[(0, True)]] * 3
    assert due_positions(run, cut) == [[7], [7], [7]]


def test_a_truncated_last_round_may_have_fewer_steps_than_slots() -> None:
    """A: several slots fall on one step, and those that fall on the last are their own flush."""
    run, cut = terms(steps=22, h=10), layout(0, 1, 2, 3)
    assert all_rounds(run)[2] == RoundPlan(index=2, start=20, length=2)
    assert due_positions(run, cut) == [[13, 21, 22], [15, 21, 22], [18, 22], [10, 20, 22]]


def test_the_windows_of_fragments_that_share_a_slot_travel_together() -> None:
    one, other = all_windows(terms(steps=45, h=10), layout(0, 0))
    assert [dataclasses.replace(window, fragment=0) for window in other] == one


def test_the_window_after_needs_the_round_after() -> None:
    """B: it is fixed by then; that it is missing must not pass for the end of the run."""
    run, cut = terms(steps=40, h=10), layout(0)
    with pytest.raises(KeyError):
        schedule.window_after(
            run, cut, schedule.first_windows(run, cut)[0], {0: RoundPlan(index=0, start=0, length=10)}
        )


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
    rounds = all_rounds(run)
    assert list(rounds) == list(range(len(rounds)))
    assert sum(plan.length for plan in rounds.values()) == run.schedule.steps
    assert [plan.start for plan in rounds.values()] == [0, *itertools.accumulate(p.length for p in rounds.values())][
        :-1
    ]
    whole = [plan for plan in rounds.values() if not schedule.is_last(run, plan)]
    most = max(run.schedule.h, schedule.initial_h(run), run.schedule.h_max or run.schedule.steps)
    assert all(min(run.schedule.h, schedule.initial_h(run)) <= plan.length <= most for plan in whole)
    assert all(plan.length >= cut.slots for plan in whole)
    assert schedule.num_rounds(run) == len(rounds)
    assert [index for index, plan in rounds.items() if schedule.is_last(run, plan)] == [len(rounds) - 1]
    assert schedule.round_after(run, rounds[len(rounds) - 1]) is None


@given(runs())
def test_every_slot_has_one_window_per_round_and_every_fragment_one_last_word(
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

        regular = [window.round for window in chain if not window.final]
        first = schedule.first_send_round(0, fragment.slot, cut.slots)
        due_before_the_end = [
            index
            for index, plan in rounds.items()
            if index >= first
            and plan.start + schedule.due_step(fragment.slot, cut.slots, plan.length) < run.schedule.steps
        ]
        assert regular == due_before_the_end
        assert all(send >= rounds[0].length for send in sends), "nothing before a full period"
        spans = [schedule.span_of(cut, window, rounds) for window in chain if not window.final]
        assert spans == list(itertools.pairwise([0, *sends]))[: len(spans)], "every step is in one window"


@given(slots=st.integers(1, 50), steps=st.integers(1, 500))
def test_due_steps_rise_to_the_rounds_last_step(slots: int, steps: int) -> None:
    due = [schedule.due_step(slot, slots, steps) for slot in range(slots)]
    assert due == sorted(due) and due[0] >= 1 and due[-1] == steps
    assert due == [math.ceil((slot + 1) * steps / slots) for slot in range(slots)]


def test_a_slow_node_has_the_same_slots_at_its_own_steps() -> None:
    """A: slot k is due when ⌈(k+1)·H_i/slots⌉ own steps are done, and a final window at the round's end."""
    plan = RoundPlan(index=0, start=0, length=100, node_steps=((B, 30),))
    window = all_windows(terms(steps=400, h=100), layout(0, 1, 2))[1][0]
    fragment = layout(0, 1, 2).fragments[1]
    assert schedule.due_in(window, fragment, 3, plan.steps_of(A)) == 67
    assert schedule.due_in(window, fragment, 3, plan.steps_of(B)) == 20
    assert schedule.due_in(dataclasses.replace(window, final=True), fragment, 3, plan.steps_of(B)) == 30


def test_positions_of_nodes_with_different_h_meet_at_the_rounds_ends() -> None:
    """A: S_r + j·H_r/H_{r,i}, a real number."""
    plan = RoundPlan(index=2, start=200, length=100, node_steps=((B, 30),))
    assert [schedule.position_in(plan, A, step) for step in (0, 1, 100)] == [200.0, 201.0, 300.0]
    assert [schedule.position_in(plan, B, step) for step in (0, 15, 30)] == [200.0, 250.0, 300.0]
    assert schedule.position_in(plan, B, 1) == pytest.approx(200 + 10 / 3)


@pytest.mark.parametrize(("slot", "round_index"), [(0, 5), (1, 5), (2, 4)])
def test_a_node_that_starts_sends_only_the_last_slot_in_its_first_round(slot: int, round_index: int) -> None:
    """A, I: a full period from its first base."""
    assert schedule.first_send_round(4, slot, 3) == round_index
    window = WindowTerms(fragment=0, window=9, round=4, tau=0, mix=0.0, codec_up="q4", codec_down="q4")
    assert schedule.may_send(window, 4, slot, 3) == (slot == 2)
    assert schedule.may_send(dataclasses.replace(window, round=5), 4, slot, 3)
    assert schedule.may_send(dataclasses.replace(window, final=True), 4, slot, 3)


@given(st.integers(1, 8), st.data())
def test_wherever_a_node_starts_each_slot_first_comes_after_a_full_period_and_before_another(
    slots: int, data: st.DataObject
) -> None:
    """A, I: counted in slots, of which a period has as many as a round."""
    start_slot, slot = data.draw(st.integers(0, slots - 1)), data.draw(st.integers(0, slots - 1))
    sent = schedule.first_send_round(4, slot, slots, start_slot) * slots + slot + 1  # at the slot's end
    assert slots <= sent - (4 * slots + start_slot) < 2 * slots


@given(st.integers(1, 8), st.integers(1, 40), st.data())
def test_who_starts_with_a_slot_has_its_steps_ahead_and_those_before_it_behind(
    slots: int, node_steps: int, data: st.DataObject
) -> None:
    slot = data.draw(st.integers(0, slots - 1))
    step = schedule.first_step(slot, slots, node_steps)
    assert 0 <= step < node_steps
    if node_steps >= slots:
        assert schedule.due_step(slot - 1, slots, node_steps) <= step < schedule.due_step(slot, slots, node_steps)


QSR: dict[str, Any] = {"h_rule": "qsr", "h_alpha": 0.0175}
"""The published recipe for ViT-B (arXiv 2310.14423): H = 4 at η = 0.008."""


def followed(rate: float, *, h: int = 4, steps: int = 10_000, **choices: Any) -> int:
    """H of a round that starts where η is `rate`, as in a run that does nothing but hold it."""
    lr = LearningRate(peak=rate, minimum=0.0, warmup_steps=0, shape="constant")
    return schedule.h_at(terms(steps=steps, h=h, lr=lr, **{**QSR, **choices}), 500)


@pytest.mark.parametrize(("rate", "h"), [(0.008, 4), (0.004, 19), (0.002, 76), (0.001, 306)])
def test_rounds_grow_with_the_square_of_the_inverse_learning_rate(rate: float, h: int) -> None:
    """C31: H_base = 4, η_max = 0.008, α = 0.0175: (α/η)² = 4.785, …"""
    assert followed(rate) == h


@given(
    rate=st.integers(1, 9999),
    ratio=st.integers(1, 300),
    rule=st.sampled_from([("linear", 1), ("qsr", 2), ("cubic", 3)]),
)
def test_a_whole_power_is_not_rounded_below_itself(rate: int, ratio: int, rule: tuple[str, int]) -> None:
    """C31: in fp64 one case in nine would come out one too low. Rates and α are decimals, as people write them."""
    name, power = rule
    lr, alpha = float(f"{rate}e-6"), float(f"{rate * ratio}e-6")
    assert followed(lr, h=1, steps=10**9, h_rule=name, h_alpha=alpha) == ratio**power


@given(
    rate=st.floats(1e-6, 1.0),
    alpha=st.floats(1e-6, 1.0),
    power=st.sampled_from([("linear", 1), ("qsr", 2), ("cubic", 3)]),
)
def test_the_guard_lengthens_no_round_that_is_clearly_shorter(
    rate: float, alpha: float, power: tuple[str, int]
) -> None:
    """C31."""
    exact = (alpha / rate) ** power[1]
    assume(1e-8 < exact % 1 < 1 - 1e-8 and exact < 1e6)
    assume(exact - math.floor(exact) < 1 - 2e-9 * exact)
    assert followed(rate, h=1, steps=10**7, h_rule=power[0], h_alpha=alpha) == max(1, math.floor(exact))


@pytest.mark.parametrize(("rule", "h"), [("linear", 20), ("qsr", 400), ("cubic", 8000)])
def test_the_linear_and_the_cubic_rule_are_the_same_with_another_power(rule: str, h: int) -> None:
    """A14: one code path."""
    assert followed(1e-3, h_rule=rule, h_alpha=0.02) == h


def test_without_alpha_all_rounds_are_those_of_the_warm_up() -> None:
    """A14: α = 0."""
    run = terms(steps=1000, h=30, h_rule="qsr", h_alpha=0.0, h_init=7)
    assert {plan.length for plan in all_rounds(run).values()} == {7, 1000 % 7}


def test_a_constant_learning_rate_gives_constant_rounds() -> None:
    """A14."""
    lr = LearningRate(peak=4e-3, minimum=0.0, warmup_steps=0, shape="constant")
    lengths = [plan.length for plan in all_rounds(terms(steps=190, h=4, lr=lr, **QSR)).values()]
    assert lengths == [19] * 10


def test_while_the_learning_rate_warms_up_rounds_have_their_first_length() -> None:
    lr = LearningRate(peak=8e-3, minimum=0.0, warmup_steps=20)
    run = terms(steps=400, h=4, lr=lr, h_init=6, **QSR)
    rounds = all_rounds(run)
    assert [plan.length for plan in rounds.values() if plan.start < 20] == [6] * 4
    assert rounds[4].start == 24 and rounds[4].length == 4


def test_post_local_syncs_often_before_its_switch_and_every_h_steps_after() -> None:
    run = terms(steps=100, h=30, h_rule="post-local", h_switch=10)
    assert [plan.length for plan in all_rounds(run).values()] == [1] * 10 + [30, 30, 30]
    often = terms(steps=100, h=30, h_rule="post-local", h_switch=10, h_init=4)
    assert [plan.length for plan in all_rounds(often).values()] == [4, 4, 4, 30, 30, 28]


def test_the_last_round_ends_with_the_run_and_the_run_with_a_sync() -> None:
    """C32."""
    run = terms(steps=1000, h=4, lr=LearningRate(peak=8e-3, minimum=1e-6, warmup_steps=50), **QSR)
    *_, last = all_rounds(run).values()
    assert last.start + last.length == 1000
    assert schedule.h_at(run, last.start) > last.length, "it would have been longer"


def test_h_is_settled_at_the_first_position_of_a_round() -> None:
    """C33: η falls by half within this round, and its H stays; the next one has another."""
    lr = LearningRate(peak=8e-3, minimum=1e-6, warmup_steps=0, shape="linear")
    run = terms(steps=300, h=4, lr=lr, **QSR)
    for plan in all_rounds(run).values():
        if not schedule.is_last(run, plan):
            rate = schedule.learning_rate(run, plan.start)
            assert plan.length == max(4, math.floor((0.0175 / rate) ** 2))


@pytest.mark.parametrize("minimum", [0.0, 5e-324, 1e-300])
def test_a_learning_rate_of_nothing_gives_a_long_round_and_no_exception(minimum: float) -> None:
    """C34: (α/η)^power overflows, or divides by zero."""
    lr = LearningRate(peak=8e-3, minimum=minimum, warmup_steps=0)
    for rule in schedule.POWERS:
        run = terms(steps=1000, h=4, lr=lr, h_rule=rule, h_alpha=0.0175)
        assert schedule.h_at(run, 1000) == 1000
        assert schedule.h_at(run.replace(h_max=50), 1000) == 50


def test_no_round_is_longer_than_the_longest() -> None:
    lr = LearningRate(peak=8e-3, minimum=1e-6, warmup_steps=50)
    lengths = [plan.length for plan in all_rounds(terms(steps=3000, h=4, lr=lr, h_max=64, **QSR)).values()]
    assert max(lengths) == 64 and lengths == sorted(lengths[:-1]) + lengths[-1:]


def test_a_rewarm_begins_with_a_round_of_its_own_and_rounds_are_short_again() -> None:
    """H shrinks where η rises: also while it is still low, for that is a warm-up."""
    lr = LearningRate(peak=8e-3, minimum=1e-6, warmup_steps=20, rewarms=(Rewarm(start=500, peak=8e-3),))
    run = terms(steps=1000, h=4, lr=lr, **QSR)
    rounds = list(all_rounds(run).values())
    (begins,) = [plan.index for plan in rounds if plan.start == 500]
    assert rounds[begins - 1].length > 20
    assert [plan.length for plan in rounds[begins : begins + 5]] == [4] * 5


def test_a_round_that_begins_just_before_a_rewarm_is_not_cut_below_h() -> None:
    """Or it had fewer steps than slots."""
    lr = LearningRate(peak=8e-3, minimum=8e-3, warmup_steps=0, rewarms=(Rewarm(start=10, peak=8e-3),))
    run = terms(steps=40, h=4, lr=lr, **QSR)
    assert [plan.length for plan in all_rounds(run).values()] == [4] * 10
    longer = terms(steps=40, h=8, lr=lr, **QSR)
    assert [plan.start for plan in all_rounds(longer).values()] == [0, 8, 16, 24, 32]


@given(start=st.integers(0, 150), h=st.integers(1, 50))
def test_a_round_of_h_steps_is_worth_one_wherever_it_is(start: int, h: int) -> None:
    run = terms(steps=200, h=h, lr=LearningRate(peak=1e-2, minimum=0.0, warmup_steps=20))
    assert schedule.work_ratio(run, start, start + h) == 1.0


def test_a_longer_round_is_worth_its_learning_rates() -> None:
    flat = terms(steps=100, h=10, lr=LearningRate(warmup_steps=0, shape="constant"))
    assert schedule.work_ratio(flat, 20, 60) == pytest.approx(4.0)
    falling = terms(steps=100, h=10, lr=LearningRate(peak=1e-2, minimum=0.0, warmup_steps=0, shape="linear"))
    assert schedule.work_ratio(falling, 20, 60) == pytest.approx(sum(range(41, 81)) / sum(range(71, 81)))


def test_without_any_learning_rate_steps_count() -> None:
    nothing = terms(steps=100, h=10, lr=LearningRate(peak=0.0, minimum=0.0, warmup_steps=0, shape="constant"))
    assert schedule.work_ratio(nothing, 20, 60) == 4.0


# --- rounds of slow nodes, and what is evaluated

PLAN = RoundPlan(index=3, start=90, length=30)


def dealt(slots: int = 1, shares: Mapping[str, float] | None = None, **rates: float) -> dict[str, int]:
    speeds = {NodeId(name): rate for name, rate in rates.items()}
    own = [(NodeId(name), share) for name, share in (shares or {}).items()]
    plan = schedule.dealt(PLAN, slots, rates=speeds, shares=own)
    assert dataclasses.replace(plan, node_steps=()) == PLAN
    return {str(name): steps for name, steps in plan.node_steps}


def test_slow_nodes_do_as_many_steps_as_they_can_in_the_time_of_the_fastest() -> None:
    """arXiv 2401.09135: ⌊H · v / max v⌋."""
    assert dealt(a=100.0, b=50.0, c=34.0) == {"b": 15, "c": 10}
    assert PLAN.steps_of(A) == 30


def test_nobody_does_fewer_steps_than_it_has_sends() -> None:
    assert dealt(a=100.0, b=1.0) == {"b": 1}
    assert dealt(4, a=100.0, b=1.0) == {"b": 4}
    assert dealt(40, a=100.0, b=1.0) == {}, "a truncated round has fewer steps than slots"


def test_a_node_of_which_nothing_is_known_does_all_of_them() -> None:
    assert dealt() == dealt(a=0.0, b=0.0) == {}
    assert dealt(a=100.0, b=0.0, c=50.0) == {"c": 15}


def test_equal_nodes_do_equally_many_whatever_was_measured() -> None:
    """Of noisy rates one is always the best."""
    assert dealt(a=100.0, b=97.0, c=95.0) == {}
    assert dealt(a=100.0, b=94.0) == {"b": 28}


SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 0.99))


@given(rates=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.0, 1e9)), shares=SHARES, slots=st.integers(1, 40))
def test_every_node_has_a_share_of_every_round(rates: dict[str, float], shares: dict[str, float], slots: int) -> None:
    """By its share and its speed it does the fewer steps of the two."""
    by_speed, by_share, both = dealt(slots, **rates), dealt(slots, shares), dealt(slots, shares, **rates)
    for steps in both.values():
        assert min(slots, PLAN.length) <= steps < PLAN.length
    all_of_them = PLAN.length
    names = {*by_speed, *by_share}
    assert both == {n: min(by_speed.get(n, all_of_them), by_share.get(n, all_of_them)) for n in sorted(names)}


@given(steps=st.integers(1, 500), length=st.integers(2, 500))
def test_a_share_that_is_a_number_of_steps_gives_that_number(steps: int, length: int) -> None:
    assert schedule.steps_by_share(length, min(1.0, steps / length)) == min(steps, length)


def test_a_run_begins_with_rounds_that_are_dealt_by_share() -> None:
    run, cut = terms(steps=50, h=10, h_share_of=((B, 0.5),)), layout(0, 1)
    identity = Identity(
        name="run", model="own", layout=cut, anchor_digests=(0, 0), data="own", num_samples=0, evaluation_set="none",
        seed=0,
    )  # fmt: skip
    opening = schedule.opening_rounds(RunSpec(identity=identity, terms=run))
    assert [(plan.steps_of(A), plan.steps_of(B)) for plan in opening] == [(10, 5), (10, 5)]


@pytest.mark.parametrize(("every", "rounds"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (9, [4])])
def test_the_last_fragment_s_commits_are_evaluated_every_so_many_rounds_and_at_the_end(
    every: int, rounds: list[int]
) -> None:
    """J."""
    run, cut = terms(steps=50, h=10, evaluate_every_rounds=every), layout(0, 1)
    identity = Identity(
        name="run", model="own", layout=cut, anchor_digests=(0, 0), data="own", num_samples=0, evaluation_set="some",
        seed=0,
    )  # fmt: skip
    spec = RunSpec(identity=identity, terms=run)
    first, last = all_windows(run, cut)
    assert [window.round for window in last if schedule.is_evaluated(spec, window)] == rounds
    assert not any(schedule.is_evaluated(spec, window) for window in first)
    without = dataclasses.replace(spec, identity=dataclasses.replace(identity, evaluation_set="none"))
    assert not any(schedule.is_evaluated(without, window) for window in last)
