"""The run's clock: rounds, slots, due steps, windows, learning rate (protocol A, B; arXiv 2311.08105, 2501.18512)."""

import dataclasses
import itertools
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo import schedule
from farloop.algo.spec import Fragment, Layout, LearningRate, NodeId, RoundPlan, Terms, WindowTerms

A, B = NodeId("a"), NodeId("b")


def terms(*, steps: int, h: int, tau: int = 0) -> Terms:
    return Terms(
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
    return terms(steps=draw(st.integers(1, 5 * h)), h=h), layout(*range(slots), *shared)


@given(runs())
def test_rounds_cover_the_run_without_gap_or_overlap(run_and_cut: tuple[Terms, Layout]) -> None:
    """C32: Σ H = steps exactly; only the last round may be short."""
    run, _ = run_and_cut
    rounds = all_rounds(run)
    assert list(rounds) == list(range(len(rounds)))
    assert sum(plan.length for plan in rounds.values()) == run.steps
    assert all(plan.start == plan.index * run.h for plan in rounds.values())
    assert all(plan.length == run.h for plan in rounds.values() if not schedule.is_last(run, plan))
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
        assert sends == sorted(set(sends)) and sends[-1] == run.steps

        regular = [window.round for window in chain if not window.final]
        first = schedule.first_send_round(0, fragment.slot, cut.slots)
        due_before_the_end = [
            index
            for index, plan in rounds.items()
            if index >= first and plan.start + schedule.due_step(fragment.slot, cut.slots, plan.length) < run.steps
        ]
        assert regular == due_before_the_end
        assert all(send >= min(run.h, run.steps) for send in sends), "nothing before a full period"


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


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_minimum() -> None:
    run = terms(steps=104, h=10)
    rates = [schedule.learning_rate(run, position) for position in range(105)]
    assert rates[:4] == pytest.approx([3.25e-3, 5.5e-3, 7.75e-3, 1e-2])
    assert rates[4] == pytest.approx(1e-2)
    assert rates[54] == pytest.approx((1e-2 + 1e-3) / 2)
    assert rates[104] == pytest.approx(1e-3)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[3:]))


@given(position=st.floats(0, 1e6), steps=st.integers(1, 1000), warmup=st.integers(0, 1000))
def test_the_learning_rate_stays_between_its_bounds_also_beyond_the_end(
    position: float, steps: int, warmup: int
) -> None:
    """C34: at any position, a flush's included, and for a run that is all warm-up."""
    run = dataclasses.replace(
        terms(steps=steps, h=1), lr=LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=min(warmup, steps))
    )
    assert 1e-3 - 1e-12 <= schedule.learning_rate(run, position) <= 1e-2 + 1e-12
