"""Control variates, on least squares whose nodes disagree in minimum and curvature."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo.local_update import correct_, learn_, merged_by_plain_step

DIM, NODES, STEPS, LR = 10, 4, 20, 0.05


class Problem:
    """f_i(θ) = ½ (θ − m_i)ᵀ A_i (θ − m_i), A_i diagonal: each node steep where others are flat."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.curvatures = [0.1 + 3.0 * torch.rand(DIM, generator=generator) ** 3 for _ in range(NODES)]
        self.minima = [torch.randn(DIM, generator=generator) for _ in range(NODES)]
        total = torch.stack(self.curvatures).sum(dim=0)
        self.minimum = sum((a * m for a, m in zip(self.curvatures, self.minima, strict=True)), torch.zeros(DIM)) / total

    def gradient(self, node: int, theta: Tensor) -> Tensor:
        return self.curvatures[node] * (theta - self.minima[node])


def distance(
    rounds: int,
    *,
    variates: bool,
    steps: int = STEPS,
    codec: Callable[[Tensor], Tensor] = lambda delta: delta,
) -> float:
    """From the minimum of all data, after plain averaging of local gradient descent; mean over the last 20 rounds."""
    problem = Problem()
    anchor, drifts = torch.zeros(DIM), [torch.zeros(DIM) for _ in range(NODES)]
    seen = []
    for _ in range(rounds):
        deltas = []
        for node in range(NODES):
            local = anchor.clone()
            for _ in range(steps):
                local = local - LR * problem.gradient(node, local)
                if variates:
                    correct_(local, drifts[node], LR)
            deltas.append(codec(anchor - local))
        before = anchor
        anchor = anchor - torch.stack(deltas).mean(dim=0)
        merged = merged_by_plain_step(anchor - before, outer_lr=1.0)
        for drift, delta in zip(drifts, deltas, strict=True):
            learn_(drift, delta, merged, lr_sum=LR * steps)
        seen.append(float((anchor - problem.minimum).norm()))
    return sum(seen[-20:]) / len(seen[-20:])


def test_local_steps_on_different_data_lead_plain_averaging_astray() -> None:
    """The bias is of the method, not of too few rounds; with one step between merges it is not there."""
    biased = distance(300, variates=False)
    assert biased > 0.1 and distance(600, variates=False) == pytest.approx(biased, rel=1e-3)
    assert distance(3000, variates=False, steps=1) < 1e-4


def test_variates_lead_to_the_minimum_of_all_data() -> None:
    assert distance(300, variates=True) < 1e-4


def test_with_one_step_between_merges_variates_change_nothing_that_matters() -> None:
    """There is no drift in one step: the corrections cancel in the mean."""
    assert distance(50, variates=True, steps=1) == pytest.approx(distance(50, variates=False, steps=1), rel=1e-3)


def test_variates_bear_a_lossy_codec() -> None:
    """Deltas rounded to bf16: what remains is the codec's rounding, not the drift."""
    assert distance(300, variates=True, codec=lambda delta: delta.bfloat16().float()) < 0.02


def test_a_smaller_alpha_averages_noise_out() -> None:
    """On data that agree there is nothing to correct: what is learned is noise, the less the smaller α."""

    def learned(alpha: float) -> float:
        generator = torch.Generator().manual_seed(1)
        drifts = [torch.zeros(1000) for _ in range(NODES)]
        for _ in range(100):
            deltas = [0.5 * (torch.randn(1000, generator=generator) + drift) for drift in drifts]
            merged = torch.stack(deltas).mean(dim=0)
            for drift, delta in zip(drifts, deltas, strict=True):
                learn_(drift, delta, merged, lr_sum=0.5, alpha=alpha)
        return float(drifts[0].std())

    # An exponential mean of α has √(α/(2 − α)) of the noise of one sample.
    assert learned(0.1) == pytest.approx(learned(1.0) * (0.1 / 1.9) ** 0.5, rel=0.2)


@hypothesis_settings(deadline=None)  # the first call into torch is slow
@given(rounds=st.integers(1, 6), alpha=st.floats(0.05, 1.0))
def test_the_drifts_of_all_nodes_sum_to_zero(rounds: int, alpha: float) -> None:
    """So that their mean step is the mean of the local steps, as ever."""
    generator = torch.Generator().manual_seed(rounds)
    drifts = [torch.zeros(50) for _ in range(3)]
    for _ in range(rounds):
        deltas = [torch.randn(50, generator=generator) for _ in drifts]
        merged = torch.stack(deltas).mean(dim=0)
        for drift, delta in zip(drifts, deltas, strict=True):
            learn_(drift, delta, merged, lr_sum=0.5, alpha=alpha)
    assert float(torch.stack(drifts).sum(dim=0).abs().max()) < 1e-4
    assert float(drifts[0].abs().max()) > 0.1


def test_it_is_scallion_without_a_codec() -> None:
    """The published recursion with c and c_i, and ours with their difference alone (arXiv 2308.08165)."""
    problem, alpha, lr_sum = Problem(), 0.5, LR * STEPS
    x, c, own = torch.zeros(DIM), torch.zeros(DIM), [torch.zeros(DIM) for _ in range(NODES)]
    anchor, drifts = torch.zeros(DIM), [torch.zeros(DIM) for _ in range(NODES)]
    for _ in range(8):
        ends = []
        for node in range(NODES):
            y = x.clone()
            for _ in range(STEPS):
                y = y - LR * (problem.gradient(node, y) - own[node] + c)
            ends.append(y)
        increments = [alpha * ((x - y) / lr_sum - c) for y in ends]
        own = [c_i + increment for c_i, increment in zip(own, increments, strict=True)]
        c = c + torch.stack(increments).mean(dim=0)
        x = torch.stack(ends).mean(dim=0)  # a plain outer step, as ours; the paper's is by c and the increments

        deltas = []
        for node in range(NODES):
            local = anchor.clone()
            for _ in range(STEPS):
                local = local - LR * problem.gradient(node, local)
                correct_(local, drifts[node], LR)
            deltas.append(anchor - local)
        merged = torch.stack(deltas).mean(dim=0)
        anchor = anchor - merged
        for drift, delta in zip(drifts, deltas, strict=True):
            learn_(drift, delta, merged, lr_sum=lr_sum, alpha=alpha)
        torch.testing.assert_close(anchor, x, rtol=1e-4, atol=1e-5)
        for drift, c_i in zip(drifts, own, strict=True):
            torch.testing.assert_close(drift, c - c_i, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("lr_sum", "alpha"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, 1.5)])
def test_what_teaches_nothing_is_refused(lr_sum: float, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"learn|alpha"):
        learn_(torch.zeros(1), torch.zeros(1), torch.zeros(1), lr_sum=lr_sum, alpha=alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_weights_of_any_type_and_strides_are_corrected(dtype: torch.dtype, strided: bool) -> None:
    shape = (3, 5)
    local = torch.zeros(shape[::-1], dtype=dtype).t() if strided else torch.zeros(shape, dtype=dtype)
    assert local.is_contiguous() != strided
    drift = torch.arange(15.0)
    correct_(local, drift, 0.5)
    assert torch.equal(local.float(), -0.5 * drift.view(shape)) and local.dtype == dtype


def test_a_lossy_downlink_moves_the_mean_of_the_drifts_by_its_loss() -> None:
    """α·e/(ν·Ση), e being target − anchor: so of the downlink's own feedback of e only 1 − α is left."""
    generator = torch.Generator().manual_seed(2)
    outer_lr, lr_sum, alpha = 0.7, 0.4, 0.3
    target, anchor, drifts = torch.zeros(50), torch.zeros(50), [torch.zeros(50) for _ in range(3)]
    for _ in range(5):
        deltas = [torch.randn(50, generator=generator) for _ in drifts]
        target = target - outer_lr * torch.stack(deltas).mean(dim=0)
        update = (target - anchor).bfloat16().float()
        anchor = anchor + update
        for drift, delta in zip(drifts, deltas, strict=True):
            learn_(drift, delta, merged_by_plain_step(update, outer_lr), lr_sum=lr_sum, alpha=alpha)
    loss = target - anchor
    assert float(loss.abs().max()) > 1e-4
    expected = alpha * loss / (outer_lr * lr_sum)
    torch.testing.assert_close(torch.stack(drifts).mean(dim=0), expected, rtol=1e-2, atol=1e-5)
