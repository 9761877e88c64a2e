"""ν, μ and the scale of a delta where rounds differ in length, and what a re-warm leaves of the momentum."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_terms

from farloop.algo.outer_optimizers import outer_step_
from farloop.algo.outer_settings import LEAST_WORK, PLAIN_AVERAGE, OuterSettings, corrected, is_corrected, settings_of
from farloop.algo.schedule import first_rounds, first_windows, learning_rate, window_after
from farloop.algo.spec import Fragment, Layout, WindowTerms
from farloop.algo.terms import LearningRate, Rewarm, Terms

BASE = OuterSettings(lr=0.7, momentum=0.9)
ONE = Layout(slots=1, fragments=(Fragment(index=0, slot=0, numel=256, tensors=()),))
TWO = Layout(slots=2, fragments=(*ONE.fragments, Fragment(index=1, slot=1, numel=256, tensors=())))


def terms(**choices: Any) -> Terms:
    fields: dict[str, Any] = {
        "steps": 400,
        "lr": LearningRate(peak=8e-3, minimum=1e-5, warmup_steps=20),
        "h_rule": "qsr",
        "h_alpha": 0.0175,
    }
    return plain_terms(**{**fields, **choices})


def windows(run: Terms, layout: Layout = ONE) -> list[tuple[WindowTerms, OuterSettings]]:
    """Every window of every fragment with what its outer step runs under."""
    rounds = {plan.index: plan for plan in first_rounds(run, run.schedule.steps)}
    found = []
    for first in first_windows(run, layout):
        window: WindowTerms | None = first
        while window is not None:
            found.append((window, settings_of(run, layout, window, rounds)))
            window = window_after(run, layout, window, rounds)
    return found


def test_a_delta_that_is_worth_one_is_stepped_as_ever() -> None:
    assert corrected(BASE, 1.0) == BASE


def test_without_momentum_a_delta_counts_in_full_however_much_it_is_worth() -> None:
    settings = corrected(OuterSettings(lr=0.7, momentum=0.0), 5.0)
    assert settings.lr * settings.delta_scale == pytest.approx(0.7) and settings.momentum == 0.0


@given(work=st.floats(0.01, 50))
def test_a_delta_moves_the_target_by_the_same_whatever_it_is_worth(work: float) -> None:
    """D35: the first step is ν(1+μ)Δ = 1.33 Δ, for a short round as for a long one."""
    settings = corrected(BASE, work)
    target, momentum = torch.zeros(4), torch.zeros(4)
    outer_step_(target, momentum, torch.ones(4) * settings.delta_scale, settings)
    assert target.tolist() == pytest.approx([-1.33] * 4)


@given(first=st.floats(0.1, 5), second=st.floats(0.1, 5))
def test_what_momentum_remembers_fades_by_the_work_done_and_not_by_the_number_of_rounds(
    first: float, second: float
) -> None:
    together = corrected(BASE, first).momentum * corrected(BASE, second).momentum
    assert together == pytest.approx(corrected(BASE, first + second).momentum)


@given(work=st.floats(0.1, 10))
def test_steady_progress_is_remembered_per_unit_of_work(work: float) -> None:
    """A round that is worth p brings p times the delta: scaled, it adds what an ordinary one does."""
    assert corrected(BASE, work).delta_scale * work == pytest.approx(1.0)


@pytest.mark.parametrize("work", [0.0, 1e-30])
def test_nothing_is_divided_by_no_work_at_all(work: float) -> None:
    assert corrected(BASE, work) == corrected(BASE, LEAST_WORK)


def test_only_runs_whose_rounds_differ_are_corrected_and_only_where_momentum_spans_them() -> None:
    assert is_corrected(terms())
    assert not is_corrected(terms(h_rule="constant", h_alpha=0.0))
    assert not is_corrected(terms(outer_momentum=0.0))
    assert not is_corrected(terms(outer_correction=False))
    assert not is_corrected(terms(method="data-parallel"))


def test_a_constant_run_has_the_settings_of_its_terms_to_the_bit() -> None:
    *regular, flush = windows(terms(h_rule="constant", h_alpha=0.0))
    assert {settings for _, settings in regular} == {OuterSettings(lr=0.7, momentum=0.9)}
    assert flush[0].final and flush[1] == PLAIN_AVERAGE


def worth(run: Terms, begin: int, end: int) -> float:
    """Σ η of these positions beside that of the first four of them."""
    return sum(learning_rate(run, p) for p in range(begin, end)) / sum(learning_rate(run, begin + j) for j in range(4))


def test_every_window_is_corrected_for_the_steps_between_its_sends() -> None:
    """In several slots a window covers the end of one round and the beginning of the next."""
    run = terms()
    rounds = first_rounds(run, run.schedule.steps)
    found = {(w.fragment, w.round): settings for w, settings in windows(run, TWO) if not w.final}
    for before, plan in itertools.pairwise(rounds[:-1]):
        work = worth(run, plan.start, plan.start + plan.length)
        assert found[1, plan.index].momentum == pytest.approx(0.9**work)
        middle, end = before.start + -(-before.length // 2), plan.start + -(-plan.length // 2)
        begin = middle if plan.index > 1 else 0  # the first send covers all that came before it
        assert found[0, plan.index].momentum == pytest.approx(0.9 ** worth(run, begin, end))
    assert min(settings.delta_scale for settings in found.values()) < 0.2


@pytest.mark.parametrize(("share", "rule"), [(0.0, "constant"), (0.5, "constant"), (0.5, "qsr")])
def test_a_rewarm_damps_the_momentum_of_every_fragment_once(share: float, rule: str) -> None:
    lr = LearningRate(peak=8e-3, minimum=1e-5, warmup_steps=20, rewarms=(Rewarm(start=202, peak=8e-3),))
    alpha = 0.0175 if rule == "qsr" else 0.0
    run = terms(lr=lr, h_rule=rule, h_alpha=alpha, rewarm_momentum=share)
    kept = windows(run.replace(rewarm_momentum=1.0), TWO)
    damped = [(w, s, k) for (w, s), (_, k) in zip(windows(run, TWO), kept, strict=True) if s != k]
    assert sorted(window.fragment for window, _, _ in damped) == [0, 1]
    for _, settings, before in damped:
        assert settings == dataclasses.replace(before, momentum=before.momentum * share)
