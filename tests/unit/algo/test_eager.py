"""Eager updates: a late merge with one's own part of it brought up to date (A11)."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo.local_update import eager_start_into
from farloop.algo.outer_optimizers import state_names, step_
from farloop.algo.outer_settings import OuterSettings, step_gain

SETTINGS = [
    OuterSettings(kind="nesterov", lr=0.7, momentum=0.9),
    OuterSettings(kind="heavy-ball", lr=0.7, momentum=0.9),
    OuterSettings(kind="sgd", lr=0.7, momentum=0.0),
    OuterSettings(kind="co2", lr=1.0, momentum=0.2),
]


def numbers(seed: int) -> Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(seed))


def eager_delta(merged: Tensor, fresh: Tensor, stale: Tensor | None, share: float) -> Tensor:
    """The paper's Δ̃: the late merge with a node's own part of it brought up to date."""
    correction = fresh.clone() if stale is None else fresh - stale
    return correction.mul_(share).add_(merged)


def test_alone_a_node_has_its_fresh_delta() -> None:
    """A11: M = 1 means no staleness (fp)."""
    stale, fresh = numbers(1), numbers(2)
    torch.testing.assert_close(eager_delta(stale, fresh, stale, share=1.0), fresh, rtol=1e-6, atol=1e-6)


@hypothesis_settings(deadline=None)  # the first call into torch is slow
@given(weights=st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_the_mean_over_the_nodes_is_mostly_old_and_a_little_new(weights: list[int]) -> None:
    """A11, equal weights: (1 − 1/M)·Δ̄_old + Δ̄_new/M (fp)."""
    count = len(weights)
    old, new = [numbers(i) for i in range(count)], [numbers(10 + i) for i in range(count)]
    merged, latest = torch.stack(old).mean(dim=0), torch.stack(new).mean(dim=0)
    eager = [eager_delta(merged, fresh, stale, share=1 / count) for fresh, stale in zip(new, old, strict=True)]
    torch.testing.assert_close(
        torch.stack(eager).mean(dim=0), merged * (1 - 1 / count) + latest / count, rtol=1e-5, atol=1e-5
    )


def test_who_contributed_nothing_has_nothing_to_take_out() -> None:
    merged, fresh = numbers(1), numbers(2)
    assert torch.equal(eager_delta(merged, fresh, None, share=0.25), fresh * 0.25 + merged)
    assert torch.equal(eager_delta(merged, fresh, torch.zeros(1000), share=0.25), fresh * 0.25 + merged)


def test_nothing_that_is_given_changes() -> None:
    given_ = [numbers(i) for i in range(3)]
    copies = [tensor.clone() for tensor in given_]
    eager_delta(given_[0], given_[1], given_[2], share=0.5)
    eager_start_into(given_[0], given_[1], torch.empty(1000), share=0.5, gain=1.33)
    assert all(torch.equal(a, b) for a, b in zip(given_, copies, strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.kind)
def test_the_start_is_where_the_outer_step_would_have_led_with_the_fresh_part_in_it(settings: OuterSettings) -> None:
    """The step is linear in the delta: correcting its result is correcting its input, whatever the momentum holds."""
    merged, fresh, gap = numbers(1), numbers(3), 1.25 if settings.kind == "co2" else 1.0

    def target_after(delta: Tensor) -> Tensor:
        state = {name: numbers(7) for name in state_names(settings.kind, settings.momentum)}
        target = numbers(8)
        step_(target, state, delta, settings, version=2, gap=gap)
        return target

    start = torch.empty(1000)
    eager_start_into(target_after(merged), fresh, start, share=0.25, gain=step_gain(settings, gap))
    torch.testing.assert_close(start, target_after(merged + 0.25 * fresh), rtol=1e-5, atol=1e-5)


def test_without_outer_momentum_the_starts_are_those_of_the_paper() -> None:
    """Its nodes step by themselves, each from its own weights with its own Δ̃ (arXiv 2502.12996); ours are corrected."""
    settings = OuterSettings(kind="sgd", lr=0.8, momentum=0.0)
    target, papers = torch.zeros(1000), [torch.zeros(1000) for _ in range(3)]
    stale: list[Tensor] = [torch.zeros(1000) for _ in papers]
    for version in range(1, 6):
        fresh = [numbers(10 * version + node) for node in range(3)]
        merged = torch.stack(stale).mean(dim=0)
        step_(target, {}, merged, settings, version=version)
        for node, paper in enumerate(papers):
            step_(paper, {}, eager_delta(merged, fresh[node], stale[node], 1 / 3), settings, version=version)
            start = torch.empty(1000)
            eager_start_into(target, fresh[node], start, share=1 / 3, gain=step_gain(settings))
            torch.testing.assert_close(start, paper, rtol=1e-5, atol=1e-5)
        stale = fresh


def test_the_start_may_take_the_anchors_place() -> None:
    anchor, apart = numbers(1), torch.empty(1000)
    eager_start_into(anchor, numbers(2), apart, share=0.5, gain=1.33)
    assert torch.equal(anchor, numbers(1))
    eager_start_into(anchor, numbers(2), anchor, share=0.5, gain=1.33)
    assert torch.equal(anchor, apart) and torch.equal(apart, numbers(1) - numbers(2) * (0.5 * 1.33))


def test_gains() -> None:
    assert step_gain(OuterSettings(lr=0.7, momentum=0.9)) == pytest.approx(1.33)  # D35
    assert step_gain(OuterSettings(lr=0.7, momentum=0.9, delta_scale=0.5)) == pytest.approx(0.665)
    assert step_gain(OuterSettings(kind="delayed-nesterov", lr=0.8, momentum=0.9, buffer=4)) == pytest.approx(0.2)
    assert step_gain(OuterSettings(kind="co2", lr=1.0, momentum=0.2), gap=2.0) == 0.5
    with pytest.raises(ValueError, match="no multiple"):
        step_gain(OuterSettings(kind="adamw", lr=1.0, momentum=0.0))


def late_by_one(settings: OuterSettings, *, eager: bool, nodes: int = 4, rounds: int = 60) -> list[Tensor]:
    """Targets of a quadratic with its minimum at 0, every merge a round late: as a method of lag 1."""
    generator = torch.Generator().manual_seed(5)
    shrink = (1 - 0.02 - 0.08 * torch.rand(50, generator=generator)) ** 10  # by ten steps of gradient descent
    target, seen = torch.ones(50), []
    state = {name: torch.zeros(50) for name in state_names(settings.kind, settings.momentum)}
    starts, stale = [target.clone() for _ in range(nodes)], [torch.zeros(50) for _ in range(nodes)]
    for version in range(1, rounds + 1):
        fresh = [start - start * shrink for start in starts]
        step_(target, state, torch.stack(stale).mean(dim=0), settings, version=version)
        for node, start in enumerate(starts):
            start.copy_(target)
            if eager:
                eager_start_into(target, fresh[node], start, share=1 / nodes, gain=step_gain(settings))
        stale = fresh
        seen.append(target.clone())
    return seen


def test_alone_and_without_momentum_eager_starts_undo_the_delay() -> None:
    """A11: the sequence is that of a run whose merges come in time, one version on."""
    settings = OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
    targets, in_time = late_by_one(settings, eager=True, nodes=1), torch.ones(50)
    generator = torch.Generator().manual_seed(5)
    shrink = (1 - 0.02 - 0.08 * torch.rand(50, generator=generator)) ** 10
    for late in targets:
        torch.testing.assert_close(late, in_time, rtol=1e-4, atol=1e-6)
        in_time = in_time * shrink


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[3]], ids=lambda settings: settings.kind)
def test_eager_starts_calm_a_momentum_that_is_a_round_late(settings: OuterSettings) -> None:
    naive, eager = late_by_one(settings, eager=False), late_by_one(settings, eager=True)
    assert sum(float(x.norm()) for x in eager) < 0.9 * sum(float(x.norm()) for x in naive)


@pytest.mark.parametrize(
    "settings", [*SETTINGS[2:], OuterSettings(lr=0.4, momentum=0.5)], ids=lambda settings: settings.kind
)
def test_eager_starts_keep_the_minimum_where_it_is(settings: OuterSettings) -> None:
    """No delta is counted twice: in the end the corrections are as small as the deltas."""
    assert float(late_by_one(settings, eager=True, nodes=8, rounds=400)[-1].norm()) < 1e-3
