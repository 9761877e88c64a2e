"""The outer optimizers: steps, state, defaults and restart, and the correction for rounds that differ in length."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_terms
from stories import StoryText, all_stories, check_story, python
from torch import Tensor, nn

from farloop.algo import outer_optimizers, outer_settings
from farloop.algo.adamw import AdamWSettings, adamw_step_, is_decayed
from farloop.algo.fragments import flatten_into, partition, view
from farloop.algo.outer_optimizers import (
    OuterKind,
    OuterSettings,
    staleness_gap,
    state_names,
    step_,
    step_gain,
)
from farloop.algo.outer_settings import PLAIN_AVERAGE, corrected, default_outer, settings_of
from farloop.algo.schedule import first_rounds, first_windows, learning_rate, window_after
from farloop.algo.spec import Fragment, Layout, WindowTerms
from farloop.algo.terms import LearningRate, Rewarm, Terms

KINDS: tuple[OuterKind, ...] = tuple(kind for kind in get_args(OuterKind) if kind != "adamw")
NESTEROV = OuterSettings(lr=0.7, momentum=0.9)
HEAVY_BALL = OuterSettings(kind="heavy-ball", lr=0.7, momentum=0.9)
DELAYED = OuterSettings(kind="delayed-nesterov", lr=0.7, momentum=0.9, buffer=4)
ONES = [torch.ones(1)] * 200

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def deltas_of(count: int, *, size: int = 100) -> list[Tensor]:
    return [numbers(size, seed=seed) for seed in range(1, count + 1)]


def run(
    settings: OuterSettings, deltas: list[Tensor], start: Tensor | None = None, *, gap: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The target and the state after a step by each delta."""
    target = torch.zeros_like(deltas[0]) if start is None else start.clone()
    state = {name: torch.zeros_like(target) for name in state_names(settings.kind, settings.momentum)}
    for version, delta in enumerate(deltas, start=1):
        step_(target, state, delta, settings, version=version, gap=gap)
    return target, state


# --- Steps of every kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_gain_of_a_kind_is_the_length_of_its_first_step(kind: OuterKind) -> None:
    settings = OuterSettings(kind=kind, lr=0.7, momentum=0.9, buffer=2)
    target, _ = run(settings, [torch.ones(100)], gap=1.25)
    torch.testing.assert_close(target, torch.full((100,), -step_gain(settings, 1.25)))
    assert step_gain(dataclasses.replace(NESTEROV, delta_scale=0.5)) == pytest.approx(0.665)
    with pytest.raises(ValueError, match="no multiple"):
        step_gain(OuterSettings(kind="adamw", lr=1.0, momentum=0.0))


@pytest.mark.parametrize("kind", KINDS)
@given(scale=st.floats(1e-6, 1e6), seed=st.integers(1, 1000))
def test_without_momentum_at_rate_one_every_kind_is_the_average(kind: OuterKind, scale: float, seed: int) -> None:
    """A6 (bit), with a momentum buffer or without."""
    start, delta = numbers(100, seed=0), numbers(100, seed=seed) * scale
    assert torch.equal(run(dataclasses.replace(PLAIN_AVERAGE, kind=kind), [delta], start)[0], start - delta)
    with_buffer = start.clone()
    step_(with_buffer, {"momentum": torch.zeros(100)}, delta, PLAIN_AVERAGE, version=1)
    assert torch.equal(with_buffer, start - delta)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_consume_its_delta_and_gives_the_same_bits_again(kind: OuterKind) -> None:
    settings = OuterSettings(kind=kind, lr=0.7, momentum=0.9, clip=0.5, buffer=2, spread=0.1, restart=3)
    deltas = deltas_of(7)
    (first, one), (second, other) = run(settings, deltas), run(settings, deltas)
    assert torch.equal(first, second) and all(torch.equal(one[name], other[name]) for name in one)
    assert all(map(torch.equal, deltas, deltas_of(7)))


@pytest.mark.parametrize("settings", [NESTEROV, HEAVY_BALL], ids=lambda settings: settings.kind)
def test_momentum_is_that_of_torch(settings: OuterSettings) -> None:
    parameter = nn.Parameter(numbers(1000, seed=0))
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=settings is NESTEROV)
    target, _ = run(settings, deltas_of(10, size=1000), parameter.detach())
    for delta in deltas_of(10, size=1000):
        parameter.grad = delta
        reference.step()
    torch.testing.assert_close(target, parameter.detach(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("settings", [NESTEROV, HEAVY_BALL], ids=lambda settings: settings.kind)
def test_every_operation_is_rounded_by_itself(settings: OuterSettings) -> None:
    target, momentum, delta = (numbers(4096, seed=seed) for seed in range(3))
    lr, mu = torch.tensor(0.7).double(), torch.tensor(0.9).double()

    def rounded(exact: Tensor) -> Tensor:  # of fp32 operands, so fp64 holds a product exactly
        return exact.float().double()

    b = rounded(rounded(mu * momentum.double()) + delta.double())
    ahead = rounded(delta.double() + rounded(mu * b)) if settings is NESTEROV else b
    expected = (target.double() - rounded(lr * ahead)).float()
    step_(target, {"momentum": momentum}, delta, settings, version=1)
    assert torch.equal(target, expected) and torch.equal(momentum, b.float())


@pytest.mark.parametrize(("settings", "moves"), [(NESTEROV, (1.33, 1.897, 7.0)), (HEAVY_BALL, (0.7, 1.33, 7.0))])
def test_gains_at_first_then_and_in_the_limit(settings: OuterSettings, moves: tuple[float, ...]) -> None:
    """D35: how far a delta of one moves the target, at (0.7, 0.9)."""
    after = {count: -run(settings, ONES[:count])[0].item() for count in (1, 2, 199, 200)}
    assert (after[1], after[2] - after[1], after[200] - after[199]) == pytest.approx(moves, rel=1e-4)


def test_the_deltas_of_a_window_are_averaged_and_not_applied_one_by_one() -> None:
    """D36 (arXiv 2401.09135, eq. 5): four equal deltas in turn gain 12.1441 at μ = 0.9; their mean, or delayed, 1.9."""
    nesterov, delayed = OuterSettings(lr=1.0, momentum=0.9), dataclasses.replace(DELAYED, lr=1.0)
    moved = [run(nesterov, ONES[:4]), run(nesterov, ONES[:1]), run(delayed, ONES[:4])]
    assert [target.item() for target, _ in moved] == pytest.approx([-12.1441, -1.9, -1.9])


@pytest.mark.parametrize("kind", ["nesterov", "heavy-ball", "co2"])
def test_after_a_restart_the_run_is_as_if_it_began_there(kind: OuterKind) -> None:
    settings = OuterSettings(kind=kind, lr=0.7, momentum=0.9, restart=3)
    deltas = deltas_of(6)
    target, state = run(settings, deltas)
    again, state_again = run(settings, deltas[3:], run(settings, deltas[:3])[0])
    assert torch.equal(target, again) and torch.equal(state["momentum"], state_again["momentum"])
    assert not torch.equal(target, run(dataclasses.replace(settings, restart=0), deltas)[0])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_and_gpu_take_the_same_steps_to_the_bit(kind: OuterKind) -> None:
    settings = OuterSettings(kind=kind, lr=0.6, momentum=0.9, clip=0.3, buffer=2, spread=0.2, restart=4)
    deltas = deltas_of(6, size=1 << 20)
    target, state = run(settings, deltas, gap=1.3)
    on_gpu, state_on_gpu = run(settings, [delta.cuda() for delta in deltas], gap=1.3)
    assert torch.equal(on_gpu.cpu(), target)
    assert all(torch.equal(state_on_gpu[name].cpu(), tensor) for name, tensor in state.items())


# --- Delayed Nesterov


def paper(deltas: list[Tensor], *, lr: float, beta: float, every: int, c: float) -> Tensor:
    """Delayed Nesterov as arXiv 2401.09135 prints it, in fp64; t counts from 0."""
    theta, m, acc = (torch.zeros_like(deltas[0], dtype=torch.float64) for _ in range(3))
    for t, delta in enumerate(deltas):
        g = delta.double()
        acc = acc + g
        if (t + 1) % every == 0:
            m = beta * m + acc / every
            theta = theta - lr * ((1 - c * every + c) * beta * m + g / every)
            acc = torch.zeros_like(acc)
        else:
            theta = theta - lr * (c * beta * m + g / every)
    return theta


@given(every=st.integers(1, 6), share=st.floats(0.0, 1.0), count=st.integers(1, 15))
def test_delayed_nesterov_is_that_of_the_paper(every: int, share: float, count: int) -> None:
    settings = dataclasses.replace(DELAYED, buffer=every, spread=share / every)
    expected = paper(deltas_of(count), lr=0.7, beta=0.9, every=every, c=share / every)
    torch.testing.assert_close(run(settings, deltas_of(count))[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_deltas_of_a_full_buffer_move_the_target_as_nesterov_by_their_mean() -> None:
    """A12: c = 0, N deltas of one base; again and again, momentum included (fp)."""
    deltas = deltas_of(20)
    means = [torch.stack(deltas[k : k + 4]).mean(dim=0) for k in range(0, 20, 4)]
    delayed, state = run(DELAYED, deltas)
    torch.testing.assert_close(delayed, run(NESTEROV, means)[0], rtol=1e-5, atol=1e-5)
    assert not state["accumulated"].any()


def test_with_a_buffer_of_one_it_is_nesterov_to_the_bit() -> None:
    """A12: N = 1."""
    one = dataclasses.replace(DELAYED, buffer=1)
    assert torch.equal(run(one, deltas_of(6))[0], run(NESTEROV, deltas_of(6))[0])


# --- CO2

lengths = st.floats(1e-6, 1e6)


@given(drift=lengths, further=lengths, reach=lengths, scale=st.floats(1e-3, 1e3))
def test_the_gap_is_one_or_more_grows_with_the_drift_and_has_no_unit(
    drift: float, further: float, reach: float, scale: float
) -> None:
    gap = staleness_gap(drift, reach)
    assert 1.0 <= gap <= staleness_gap(drift + further, reach)
    assert staleness_gap(drift * scale, reach * scale) == pytest.approx(gap)
    assert staleness_gap(0.0, reach) == staleness_gap(0.0, 0.0) == 1.0, "where the target stood still nothing is stale"
    assert staleness_gap(reach, reach) == 2.0, "a whole round away"


def test_without_gap_and_clip_co2_is_heavy_ball_to_the_bit() -> None:
    """A13: Λ = 1, φ = ∞, no delay: the SlowMo step."""
    one, state = run(dataclasses.replace(HEAVY_BALL, kind="co2"), deltas_of(6))
    other, expected = run(HEAVY_BALL, deltas_of(6))
    assert torch.equal(one, other) and torch.equal(state["momentum"], expected["momentum"])


def test_the_clip_really_clips() -> None:
    """A13: max |m| ≤ φ after every step, and the target moves by what is left; the released code forgets the result."""
    settings = OuterSettings(kind="co2", lr=0.8, momentum=0.9, clip=0.25)
    target, momentum = torch.zeros(100), torch.zeros(100)
    for delta in deltas_of(6):
        before = target.clone()
        step_(target, {"momentum": momentum}, delta, settings, version=1, gap=1.0)
        assert float(momentum.abs().max()) == 0.25
        assert torch.equal(target, before - momentum * 0.8)


@given(gap=st.floats(1.0, 100.0))
def test_a_gap_divides_the_late_delta_and_nothing_else(gap: float) -> None:
    settings = OuterSettings(kind="co2", lr=1.0, momentum=0.5)
    target, momentum = torch.zeros(100), numbers(100, seed=1)
    expected = momentum * 0.5 + numbers(100, seed=2) / gap
    step_(target, {"momentum": momentum}, numbers(100, seed=2), settings, version=1, gap=gap)
    torch.testing.assert_close(momentum, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(target, -momentum)
    with pytest.raises(AssertionError):
        step_(target, {"momentum": momentum}, target, settings, version=1, gap=0.9)


# --- AdamW


def model() -> nn.Module:
    layers = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    for seed, parameter in enumerate(layers.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=seed) * 0.3)
    return layers


def flattened(layers: nn.Module) -> tuple[Fragment, Tensor]:
    named = dict(layers.named_parameters())
    fragment = partition([(name, tuple(p.shape)) for name, p in named.items()], pattern="whole").fragments[0]
    flat = torch.zeros(fragment.numel, device=next(layers.parameters()).device)
    flatten_into(fragment, named, flat)
    return fragment, flat


def adamw_runs(settings: AdamWSettings, steps: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """(farloop's flat target, torch's flat parameters, whether the gradient was clipped) after each step."""
    layers = model()
    fragment, target = flattened(layers)
    groups = [
        {"params": [p for p in layers.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in layers.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    reference = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.eps, foreach=False)
    grad, state = torch.zeros_like(target), {name: torch.zeros_like(target) for name in state_names("adamw", 0.0)}
    for step in range(1, steps + 1):
        lr, scale = 1e-2 / step, 10.0 ** (step % 3 - 2)  # so that some steps are clipped and some are not
        for number, parameter in enumerate(layers.parameters()):
            parameter.grad = scale * numbers(*parameter.shape, seed=100 * step + number)
        flatten_into(fragment, {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}, grad)
        norm = float(grad.double().square().sum().sqrt())
        nn.utils.clip_grad_norm_(layers.parameters(), settings.clip)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        adamw_step_(target, state, grad, fragment=fragment, step=step, lr=lr, grad_norm=norm, settings=settings)
        yield target, flattened(layers)[1], norm > settings.clip


@pytest.mark.parametrize(("clip", "decay", "clips"), [(1.0, 0.1, {True, False}), (1e9, 0.0, {False})])
def test_adamw_with_clipping_is_that_of_torch(clip: float, decay: float, clips: set[bool]) -> None:
    seen = set()
    for target, expected, was_clipped in adamw_runs(AdamWSettings(clip=clip, weight_decay=decay), steps=12):
        torch.testing.assert_close(target, expected, rtol=1e-6, atol=1e-6)
        seen.add(was_clipped)
    assert seen == clips


def test_weight_decay_is_for_matrices_alone_and_leaves_the_padding_at_zero() -> None:
    fragment, target = flattened(model())
    before, none = target.clone(), torch.zeros_like(target)
    settings = AdamWSettings(clip=1.0, weight_decay=0.5)
    state = {name: none.clone() for name in state_names("adamw", 0.0)}
    adamw_step_(target, state, none, fragment=fragment, step=1, lr=0.5, grad_norm=0.0, settings=settings)
    for tensor in fragment.tensors:
        assert torch.equal(view(target, tensor), view(before, tensor) * (0.75 if is_decayed(tensor.shape) else 1.0))
        view(target, tensor).zero_()
    assert not target.any()
    assert [is_decayed(shape) for shape in ((), (4,), (4, 4), (4, 4, 3))] == [False, False, True, True]


# --- Defaults


@pytest.mark.parametrize(("nodes", "momentum"), [(1, 0.6), (2, 0.6), (3, 0.65), (4, 0.7), (8, 0.7)])
def test_momentum_for_muon_grows_with_the_outer_steps_without_a_jump(nodes: int, momentum: float) -> None:
    """From the plain average of one or two outer steps to ν = 0.8 and μ = 0.6 to 0.7."""
    found = [default_outer(nodes, h=15, outer_steps=steps, inner="muon") for steps in (1, 2, 3, 4, 5, 6, 7, 10**6)]
    assert found[0] == found[1] == PLAIN_AVERAGE and found[-2] == found[-1]
    assert found[-1].momentum == momentum and found[-1].lr == pytest.approx(0.8)
    for fewer, more in itertools.pairwise(found):
        assert 0 <= more.momentum - fewer.momentum < 0.34 and 0 <= fewer.lr - more.lr < 0.12
    assert default_outer(nodes, h=1, outer_steps=99, inner="muon") == PLAIN_AVERAGE
    for method in ("decoupled", "async", "co2", "sparse"):
        assert default_outer(nodes, 15, 99, method, "muon") == default_outer(nodes, 15, 99, method)


def default_of(method: str, outer_steps: int) -> tuple[float, float]:
    """Rate and momentum."""
    found = default_outer(2, h=30, outer_steps=outer_steps, method=method)
    return found.lr, found.momentum


# --- Where rounds differ in length: ν, μ and the scale of a delta, and what a re-warm leaves of the momentum

ONE = Layout(slots=1, fragments=(Fragment(index=0, slot=0, numel=256, tensors=()),))
TWO = Layout(slots=2, fragments=(*ONE.fragments, Fragment(index=1, slot=1, numel=256, tensors=())))


def terms(**choices: Any) -> Terms:
    lr = LearningRate(peak=8e-3, minimum=1e-5, warmup_steps=20)
    return plain_terms(**{"steps": 400, "lr": lr, "h_rule": "qsr", "h_alpha": 0.0175, **choices})


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


@given(work=st.floats(0.01, 50), more=st.floats(0.1, 5))
def test_a_delta_moves_the_target_by_the_same_whatever_it_is_worth_and_momentum_fades_by_the_work_done(
    work: float, more: float
) -> None:
    """D35: the first step is ν(1+μ)Δ = 1.33 Δ, for a short round as for a long one."""
    settings = corrected(NESTEROV, work)
    assert run(settings, [torch.ones(4) * settings.delta_scale])[0].tolist() == pytest.approx([-1.33] * 4)
    assert settings.delta_scale * work == pytest.approx(1.0), "a round that is worth p brings p times the delta"
    together = settings.momentum * corrected(NESTEROV, more).momentum
    assert together == pytest.approx(corrected(NESTEROV, work + more).momentum)
    plain = corrected(OuterSettings(lr=0.7, momentum=0.0), work)
    assert plain.lr * plain.delta_scale == pytest.approx(0.7) and plain.momentum == 0.0


def test_every_window_is_corrected_for_the_steps_between_its_sends() -> None:
    """In several slots a window covers the end of one round and the beginning of the next."""
    run = terms()

    def worth(begin: int, end: int) -> float:
        """Σ η of these positions beside that of the first four of them."""
        rates = [learning_rate(run, position) for position in range(begin, max(end, begin + 4))]
        return sum(rates[: end - begin]) / sum(rates[:4])

    rounds = first_rounds(run, run.schedule.steps)
    found = {(w.fragment, w.round): settings for w, settings in windows(run, TWO) if not w.final}
    for before, plan in itertools.pairwise(rounds[:-1]):
        assert found[1, plan.index].momentum == pytest.approx(0.9 ** worth(plan.start, plan.start + plan.length))
        middle, end = before.start + -(-before.length // 2), plan.start + -(-plan.length // 2)
        begin = middle if plan.index > 1 else 0  # the first send covers all that came before it
        assert found[0, plan.index].momentum == pytest.approx(0.9 ** worth(begin, end))
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


@all_stories(__file__, "outer")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(outer_optimizers), vars(outer_settings), globals()), rewrite=rewrite)
