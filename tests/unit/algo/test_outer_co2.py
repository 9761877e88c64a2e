"""The outer step of CO2: heavy ball, damped by the gap and clipped (A13)."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo.outer_co2 import co2_step_, staleness_gap
from farloop.algo.outer_optimizers import heavy_ball_step_
from farloop.algo.outer_settings import OuterSettings

lengths = st.floats(1e-6, 1e6)


def numbers(seed: int, count: int = 100) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@hypothesis_settings(deadline=None)  # the first call into torch is slow
@given(drift=lengths, further=lengths, reach=lengths, scale=st.floats(1e-3, 1e3))
def test_the_gap_is_one_or_more_grows_with_the_drift_and_has_no_unit(
    drift: float, further: float, reach: float, scale: float
) -> None:
    gap = staleness_gap(drift, reach)
    assert gap >= 1.0
    assert staleness_gap(drift + further, reach) >= gap
    assert staleness_gap(drift * scale, reach * scale) == pytest.approx(gap)


def test_where_the_target_stood_still_nothing_is_stale() -> None:
    assert staleness_gap(0.0, 3.0) == 1.0
    assert staleness_gap(0.0, 0.0) == 1.0, "as in the first round"
    assert staleness_gap(3.0, 3.0) == 2.0, "a whole round away"


def test_without_gap_and_clip_it_is_heavy_ball_to_the_bit() -> None:
    """A13: Λ = 1, φ = ∞, no delay: the SlowMo step."""
    settings = OuterSettings(kind="co2", lr=0.8, momentum=0.5)
    (one, m), (other, b) = ((torch.zeros(100), torch.zeros(100)) for _ in range(2))
    for seed in range(6):
        co2_step_(one, m, numbers(seed), settings, gap=1.0)
        heavy_ball_step_(other, b, numbers(seed), settings)
    assert torch.equal(one, other) and torch.equal(m, b)


def test_the_clip_really_clips() -> None:
    """A13: max |m| ≤ φ after every step, and the target moves by what is left; the released code forgets the result."""
    settings = OuterSettings(kind="co2", lr=0.8, momentum=0.9, clip=0.25)
    target, momentum = torch.zeros(100), torch.zeros(100)
    for seed in range(6):
        before = target.clone()
        co2_step_(target, momentum, numbers(seed), settings, gap=1.0)
        assert float(momentum.abs().max()) == 0.25
        assert torch.equal(target, before - momentum * 0.8)
        assert float((target - before).abs().max()) <= 0.8 * 0.25 + 1e-6


@hypothesis_settings(deadline=None)  # the first call into torch is slow
@given(gap=st.floats(1.0, 100.0))
def test_a_gap_divides_the_late_delta_and_nothing_else(gap: float) -> None:
    settings = OuterSettings(kind="co2", lr=1.0, momentum=0.5)
    target, momentum = torch.zeros(100), numbers(1)
    expected = momentum * 0.5 + numbers(2) / gap
    co2_step_(target, momentum, numbers(2), settings, gap=gap)
    torch.testing.assert_close(momentum, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(target, -momentum)


def test_a_gap_below_one_would_speed_up_what_is_late() -> None:
    with pytest.raises(AssertionError):
        co2_step_(
            torch.zeros(1), torch.zeros(1), torch.zeros(1), OuterSettings(kind="co2", lr=1.0, momentum=0.0), gap=0.9
        )


@pytest.mark.parametrize(("beta", "gap"), [(0.0, (1 + 5**0.5) / 2), (0.5, 2.0)])
def test_under_a_constant_delta_the_gap_settles(beta: float, gap: float) -> None:
    """One node that always comes as far: Λ = 1 + α|m|/|Δ| and m = βm + Δ/Λ have the fixed point Λ² = Λ + 1/(1 − β)."""
    target, momentum, delta = (torch.zeros(1), torch.zeros(1), torch.ones(1))
    settings = OuterSettings(kind="co2", lr=1.0, momentum=beta)
    seen = 1.0
    for _ in range(60):
        seen = staleness_gap(abs(momentum.item()), 1.0)
        co2_step_(target, momentum, delta, settings, gap=seen)
    assert seen == pytest.approx(gap, rel=1e-4)
