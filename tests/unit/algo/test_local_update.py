"""What a node does with its weights: delta and merge (protocol L), eager starts (A11), control variates."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farloop.algo import local_update
from farloop.algo.fragments import partition, view
from farloop.algo.local_update import (
    correct_,
    delta_into,
    eager_start_into,
    fragment_delta_into,
    increment_,
    learn_,
    learn_increment_,
    merged_by_plain_step,
    mix_fragment_into,
    mix_into,
)
from farloop.algo.outer_optimizers import OuterSettings, state_names, step_, step_gain

EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(dim=0)


# --- Delta and merge


def delta_of(anchor: Tensor, local: Tensor) -> Tensor:
    out = torch.full((local.numel(),), torch.nan)
    delta_into(anchor, local, out)
    return out


@EVERY_DTYPE
def test_the_delta_is_the_cast_anchor_minus_the_local_weights_in_fp32(dtype: torch.dtype) -> None:
    """Of a node that has not moved it is zero: the rounding of the anchor to the local type never enters it."""
    anchor, local = numbers(42, seed=1), numbers(6, 7, seed=2).to(dtype)
    assert torch.equal(delta_of(anchor, local), anchor.to(dtype).float() - local.float().flatten())
    mix_into(local, anchor, 0.0)
    assert not delta_of(anchor, local).any()


@EVERY_DTYPE
def test_mixing_at_the_ends_copies_the_anchor_or_changes_nothing(dtype: torch.dtype) -> None:
    anchor, local = numbers(64, seed=1), numbers(8, 8, seed=2).to(dtype)
    before = local.clone()
    mix_into(local, torch.full((64,), torch.inf), 1.0)
    assert torch.equal(local, before)
    mix_into(local, anchor, 0.0)
    assert torch.equal(local.flatten(), anchor.to(dtype))


@given(a=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))
def test_mixing_rounds_each_product_and_the_sum_once(a: float) -> None:
    anchor, local = numbers(64, seed=1), numbers(64, seed=2)
    expected = local * a + anchor * (1.0 - a)
    mix_into(local, anchor, a)
    assert torch.equal(local, expected)


def test_bf16_weights_are_mixed_in_fp32_and_rounded_once() -> None:
    anchor, local = numbers(4096, seed=1), numbers(4096, seed=2).bfloat16()
    once = (local.float() * 0.3 + anchor * 0.7).bfloat16()
    thrice = local * 0.3 + anchor.bfloat16() * 0.7
    mix_into(local, anchor, 0.3)
    assert torch.equal(local, once) and not torch.equal(once, thrice)


@pytest.mark.parametrize("a", [0.0, 0.25])
@pytest.mark.parametrize("chunk", [None, 7])
def test_neither_strides_nor_chunks_show(a: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor, plain = numbers(24, seed=1), numbers(4, 6, seed=2)
    transposed = plain.t().contiguous().t()
    assert not transposed.is_contiguous()
    delta = delta_of(anchor, plain)
    mix_into(plain, anchor, a)
    if chunk is not None:
        monkeypatch.setattr(local_update, "_CPU_CHUNK", chunk)
    assert torch.equal(delta_of(anchor, transposed), delta)
    mix_into(transposed, anchor, a)
    assert torch.equal(transposed, plain)


def test_a_parameter_that_requires_grad_is_changed_in_place_without_a_graph() -> None:
    weight = nn.Parameter(numbers(16))
    mix_into(weight, numbers(16, seed=1), 0.5)
    assert weight.is_leaf and weight.grad_fn is None
    assert not delta_of(numbers(16, seed=1), weight).requires_grad


def test_a_fragment_is_measured_and_merged_tensor_by_tensor_with_its_padding_at_zero() -> None:
    (fragment,) = partition([("a", (3, 5)), ("b", (300,))], pattern="whole").fragments
    local = {"a": numbers(3, 5, seed=1), "b": numbers(300, seed=2).bfloat16()}
    anchor, out = torch.zeros(fragment.numel), torch.full((fragment.numel,), torch.nan)
    for tensor in fragment.tensors:
        view(anchor, tensor).copy_(numbers(*tensor.shape, seed=3))
    fragment_delta_into(fragment, anchor, local, out)
    cast = {tensor.name: view(anchor, tensor).to(local[tensor.name].dtype) for tensor in fragment.tensors}
    for tensor in fragment.tensors:
        assert torch.equal(view(out, tensor), cast[tensor.name].float() - local[tensor.name].float())
    assert int(out.count_nonzero()) == 15 + 300
    mix_fragment_into(fragment, local, anchor, 0.0)
    assert all(torch.equal(local[name], cast[name]) for name in cast)


# --- Eager starts: a late merge with one's own part of it brought up to date

NESTEROV = OuterSettings(kind="nesterov", lr=0.7, momentum=0.9)
CO2 = OuterSettings(kind="co2", lr=1.0, momentum=0.2)
SGD = OuterSettings(kind="sgd", lr=0.7, momentum=0.0)
HEAVY_BALL = OuterSettings(kind="heavy-ball", lr=0.7, momentum=0.9)


@pytest.mark.parametrize("settings", [NESTEROV, HEAVY_BALL, SGD, CO2], ids=lambda settings: settings.kind)
def test_the_start_is_where_the_outer_step_would_have_led_with_the_fresh_part_in_it(settings: OuterSettings) -> None:
    """The step is linear in the delta: correcting its result is correcting its input, whatever the momentum holds."""
    merged, fresh, gap = numbers(1000, seed=1), numbers(1000, seed=3), 1.25 if settings.kind == "co2" else 1.0

    def target_after(delta: Tensor) -> Tensor:
        state = {name: numbers(1000, seed=7) for name in state_names(settings.kind, settings.momentum)}
        target = numbers(1000, seed=8)
        step_(target, state, delta, settings, version=2, gap=gap)
        return target

    start = torch.empty(1000)
    eager_start_into(target_after(merged), fresh, start, factor=0.25 * step_gain(settings, gap))
    torch.testing.assert_close(start, target_after(merged + 0.25 * fresh), rtol=1e-5, atol=1e-5)


def test_without_outer_momentum_the_starts_are_those_of_the_paper() -> None:
    """Its nodes step by themselves, each from its own weights with its own Δ̃ (arXiv 2502.12996); ours are corrected."""
    settings = OuterSettings(kind="sgd", lr=0.8, momentum=0.0)
    target, papers = torch.zeros(1000), [torch.zeros(1000) for _ in range(3)]
    stale: list[Tensor] = [torch.zeros(1000) for _ in papers]
    for version in range(1, 6):
        fresh = [numbers(1000, seed=10 * version + node) for node in range(3)]
        merged = mean(stale)
        step_(target, {}, merged, settings, version=version)
        for node, paper in enumerate(papers):
            step_(paper, {}, merged + (fresh[node] - stale[node]) / 3, settings, version=version)
            start = torch.empty(1000)
            eager_start_into(target, fresh[node], start, factor=step_gain(settings) / 3)
            torch.testing.assert_close(start, paper, rtol=1e-5, atol=1e-5)
        stale = fresh


def test_the_start_may_take_the_anchors_place_and_changes_nothing_else() -> None:
    anchor, fresh, apart = numbers(1000, seed=1), numbers(1000, seed=2), torch.empty(1000)
    eager_start_into(anchor, fresh, apart, factor=0.665)
    assert torch.equal(anchor, numbers(1000, seed=1)) and torch.equal(fresh, numbers(1000, seed=2))
    eager_start_into(anchor, fresh, anchor, factor=0.665)
    assert torch.equal(anchor, apart) and torch.equal(apart, numbers(1000, seed=1) - fresh * 0.665)


def test_alone_and_without_momentum_eager_starts_undo_the_delay() -> None:
    """A11: the targets are those of a run whose merges come in time, one version on; on a quadratic."""
    settings, shrink = OuterSettings(kind="sgd", lr=1.0, momentum=0.0), torch.linspace(0.35, 0.82, 50)
    target, start, stale, in_time = torch.ones(50), torch.ones(50), torch.zeros(50), torch.ones(50)
    for version in range(1, 61):
        fresh = start - start * shrink
        step_(target, {}, stale, settings, version=version)
        torch.testing.assert_close(target, in_time, rtol=1e-4, atol=1e-6)
        eager_start_into(target, fresh, start, factor=step_gain(settings))
        stale, in_time = fresh, in_time * shrink


# --- Control variates, on least squares whose nodes disagree in minimum and curvature

DIM, NODES, STEPS, LR = 10, 4, 20, 0.05


class Problem:
    """f_i(θ) = ½ (θ − m_i)ᵀ A_i (θ − m_i), A_i diagonal: each node steep where others are flat."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.curvatures = [0.1 + 3.0 * torch.rand(DIM, generator=generator) ** 3 for _ in range(NODES)]
        self.minima = [torch.randn(DIM, generator=generator) for _ in range(NODES)]
        weighted = [a * m for a, m in zip(self.curvatures, self.minima, strict=True)]
        self.minimum = mean(weighted) / mean(self.curvatures)

    def steps(self, node: int, theta: Tensor, count: int, correct: Callable[[Tensor], None]) -> Tensor:
        for _ in range(count):
            theta = theta - LR * self.curvatures[node] * (theta - self.minima[node])
            correct(theta)
        return theta


def learn_all(drifts: list[Tensor], deltas: list[Tensor], merged: Tensor, lr_sum: float, alpha: float = 1.0) -> None:
    for drift, delta in zip(drifts, deltas, strict=True):
        learn_(drift, delta, merged, lr_sum=lr_sum, alpha=alpha)


def distance(
    rounds: int, *, variates: bool, steps: int = STEPS, codec: Callable[[Tensor], Tensor] = lambda delta: delta
) -> float:
    """From the minimum of all data, after plain averaging of local gradient descent; mean over the last 20 rounds."""
    problem = Problem()
    anchor, drifts, seen = torch.zeros(DIM), [torch.zeros(DIM) for _ in range(NODES)], []
    for _ in range(rounds):
        deltas = []
        for node, drift in enumerate(drifts):
            correct = (lambda local, drift=drift: correct_(local, drift, LR)) if variates else (lambda local: None)
            deltas.append(codec(anchor - problem.steps(node, anchor, steps, correct)))
        before, anchor = anchor, anchor - mean(deltas)
        learn_all(drifts, deltas, merged_by_plain_step(anchor - before, outer_lr=1.0), LR * steps)
        seen.append(float((anchor - problem.minimum).norm()))
    return sum(seen[-20:]) / len(seen[-20:])


@pytest.mark.slow
def test_local_steps_on_different_data_lead_plain_averaging_astray_and_variates_to_the_minimum_of_all() -> None:
    """The bias is of the method, not of too few rounds; of a lossy codec the rounding remains, not the drift."""
    biased = distance(300, variates=False)
    assert biased > 0.1 and distance(600, variates=False) == pytest.approx(biased, rel=1e-3)
    assert distance(300, variates=True) < 1e-4
    assert distance(300, variates=True, codec=lambda delta: delta.bfloat16().float()) < 0.02


@given(rounds=st.integers(1, 6), alpha=st.floats(0.05, 1.0))
def test_the_drifts_of_all_nodes_sum_to_zero(rounds: int, alpha: float) -> None:
    """So that their mean step is the mean of the local steps, as ever."""
    drifts = [torch.zeros(50) for _ in range(3)]
    for round_ in range(rounds):
        deltas = [numbers(50, seed=10 * round_ + node) for node in range(3)]
        learn_all(drifts, deltas, mean(deltas), 0.5, alpha)
    assert float(mean(drifts).abs().max()) < 1e-4 and float(drifts[0].abs().max()) > 0.05


def test_it_is_scallion_without_a_codec() -> None:
    """The published recursion with c and c_i, and ours with their difference alone (arXiv 2308.08165)."""
    problem, alpha, lr_sum = Problem(), 0.5, LR * STEPS
    x, c, own = torch.zeros(DIM), torch.zeros(DIM), [torch.zeros(DIM) for _ in range(NODES)]
    anchor, drifts = torch.zeros(DIM), [torch.zeros(DIM) for _ in range(NODES)]
    for _ in range(8):
        ends = [
            problem.steps(node, x, STEPS, lambda y, drift=c - c_i: y.sub_(LR * drift)) for node, c_i in enumerate(own)
        ]
        increments = [alpha * ((x - y) / lr_sum - c) for y in ends]
        own = [c_i + increment for c_i, increment in zip(own, increments, strict=True)]
        c = c + mean(increments)
        x = mean(ends)  # a plain outer step, as ours; the paper's is by c and the increments

        deltas = [
            anchor - problem.steps(node, anchor, STEPS, lambda local, drift=drift: correct_(local, drift, LR))
            for node, drift in enumerate(drifts)
        ]
        anchor = anchor - mean(deltas)
        learn_all(drifts, deltas, mean(deltas), lr_sum, alpha)
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
    local = torch.zeros((5, 3), dtype=dtype).t() if strided else torch.zeros((3, 5), dtype=dtype)
    drift = torch.arange(15.0)
    correct_(local, drift, 0.5)
    assert torch.equal(local.float(), -0.5 * drift.view(3, 5)) and local.dtype == dtype


def test_an_increment_is_what_the_smoothed_gradient_has_beyond_all_that_was_sent() -> None:
    """SCAFCOM by hand: two rounds of one element, of which the codec halves what it is given."""
    smoothed, sent, drift = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    delta = torch.tensor([1.0])
    increment_(delta, smoothed, sent, None, lr_sum=0.5, rate=1.0)
    assert (float(smoothed), float(delta)) == (2.0, 2.0)
    learn_increment_(drift, sent, delta / 2, torch.tensor([1.5]), lr_sum=0.5)
    assert (float(sent), float(drift)) == (1.0, 2.0)  # c = 1.5 / 0.5
    delta = torch.tensor([3.0])  # a gradient of 4, and the drift of 2
    increment_(delta, smoothed, sent, drift, lr_sum=0.5, rate=0.25)
    assert (float(smoothed), float(delta)) == (2.5, 1.5)
    increment_(delta, smoothed, sent, drift, lr_sum=0.0, rate=0.25)
    assert (float(smoothed), float(delta)) == (2.5, 1.5)
