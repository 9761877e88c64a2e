"""The outer optimizers against torch's own, and the exact cases that the protocol leans on."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farloop.algo.fragments import flatten_into, partition, view
from farloop.algo.outer_optimizers import (
    PLAIN_AVERAGE,
    AdamWSettings,
    AdamWState,
    OuterSettings,
    adamw_step_,
    default_outer,
    is_decayed,
    outer_step_,
)
from farloop.algo.spec import Fragment


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(scale=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
def test_plain_averaging_subtracts_the_delta_exactly(scale: float, seed: int) -> None:
    target, delta = numbers(100, seed=seed), numbers(100, seed=seed + 1) * scale
    expected = target - delta
    with_buffer = target.clone()
    outer_step_(with_buffer, torch.zeros(100), delta, PLAIN_AVERAGE)
    outer_step_(target, None, delta, PLAIN_AVERAGE)
    assert torch.equal(target, expected) and torch.equal(with_buffer, expected)


def test_nesterov_is_that_of_torch() -> None:
    target, momentum = numbers(1000, seed=0), torch.zeros(1000)
    parameter = nn.Parameter(target.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(10):
        delta = numbers(1000, seed=step + 1)
        parameter.grad = delta.clone()
        reference.step()
        outer_step_(target, momentum, delta, OuterSettings(lr=0.7, momentum=0.9))
    torch.testing.assert_close(target, parameter.detach(), rtol=1e-6, atol=2e-6)


def test_every_operation_of_nesterov_is_rounded_by_itself() -> None:
    target, momentum, delta = (numbers(4096, seed=seed) for seed in range(3))
    lr, mu = torch.tensor(0.6), torch.tensor(0.9)

    def rounded(exact: Tensor) -> Tensor:  # of fp32 operands, so fp64 holds a product exactly
        return exact.float().double()

    b = rounded(rounded(mu.double() * momentum.double()) + delta.double())
    step = rounded(lr.double() * rounded(delta.double() + rounded(mu.double() * b)))
    expected = (target.double() - step).float()
    outer_step_(target, momentum, delta, OuterSettings(lr=0.6, momentum=0.9))
    assert torch.equal(target, expected) and torch.equal(momentum, b.float())


def test_the_delta_is_not_consumed() -> None:
    delta = numbers(100, seed=1)
    before = delta.clone()
    outer_step_(torch.zeros(100), torch.zeros(100), delta, OuterSettings(lr=0.7, momentum=0.9))
    assert torch.equal(delta, before)


@pytest.mark.parametrize(("num_nodes", "lr"), [(1, 0.4), (2, 0.6), (3, 0.6), (4, 0.6), (7, 0.6), (8, 0.8), (64, 0.8)])
def test_the_default_outer_rate_grows_with_the_nodes(num_nodes: int, lr: float) -> None:
    assert default_outer(num_nodes, h=30, outer_steps=20) == OuterSettings(lr=lr, momentum=0.9)


def test_short_runs_and_a_sync_at_every_step_are_plainly_averaged() -> None:
    assert default_outer(4, h=30, outer_steps=19) == PLAIN_AVERAGE
    assert default_outer(4, h=1, outer_steps=1000) == PLAIN_AVERAGE


@pytest.mark.parametrize(("num_nodes", "h"), [(0, 30), (2, 0)])
def test_defaults_for_no_run_are_refused(num_nodes: int, h: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        default_outer(num_nodes, h=h, outer_steps=100)


def model() -> nn.Module:
    layers = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    for seed, parameter in enumerate(layers.parameters()):
        nn.init.constant_(parameter, 0.0)
        parameter.data.add_(numbers(*parameter.shape, seed=seed), alpha=0.3)
    return layers


def gradients(layers: nn.Module, seed: int) -> dict[str, Tensor]:
    """Of quite different sizes, so that some steps are clipped and some are not."""
    scale = 10.0 ** (seed % 3 - 2)
    return {
        name: scale * numbers(*parameter.shape, seed=100 * seed + number)
        for number, (name, parameter) in enumerate(layers.named_parameters())
    }


def whole(layers: nn.Module) -> Fragment:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layers.named_parameters()]
    return partition(shapes, pattern="whole").fragments[0]


def adamw_runs(settings: AdamWSettings, steps: int, device: str = "cpu") -> Iterator[tuple[Tensor, Tensor, bool]]:
    """(farloop's flat target, torch's flat parameters, whether the gradient was clipped) after each step."""
    layers = model().to(device)
    fragment = whole(layers)
    groups = [
        {"params": [p for p in layers.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in layers.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(
        groups, lr=0.0, betas=(settings.beta1, settings.beta2), eps=settings.eps, foreach=False
    )
    target, grad, expected = (torch.zeros(fragment.numel, device=device) for _ in range(3))
    flatten_into(fragment, dict(layers.named_parameters()), target)
    state = AdamWState.zeros_like(target)
    for step in range(1, steps + 1):
        lr = 1e-2 / step
        named = {name: tensor.to(device) for name, tensor in gradients(layers, step).items()}
        flatten_into(fragment, named, grad)
        norm = float(grad.double().square().sum().sqrt())
        for name, parameter in layers.named_parameters():
            parameter.grad = named[name].clone()
        nn.utils.clip_grad_norm_(layers.parameters(), settings.clip)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        adamw_step_(target, state, grad, fragment=fragment, step=step, lr=lr, grad_norm=norm, settings=settings)
        flatten_into(fragment, dict(layers.named_parameters()), expected)
        yield target, expected, norm > settings.clip


@pytest.mark.parametrize(
    "settings", [AdamWSettings(clip=1.0, weight_decay=0.1), AdamWSettings(clip=1e9, weight_decay=0.0)]
)
def test_adamw_with_clipping_is_that_of_torch(settings: AdamWSettings) -> None:
    clipped = set()
    for target, expected, was_clipped in adamw_runs(settings, steps=12):
        torch.testing.assert_close(target, expected, rtol=1e-6, atol=1e-6)
        clipped.add(was_clipped)
    assert clipped == ({True, False} if settings.clip == 1.0 else {False})


def test_adamw_leaves_the_padding_at_zero() -> None:
    *_, (target, _, _) = adamw_runs(AdamWSettings(clip=1.0, weight_decay=0.1), steps=3)
    fragment = whole(model())
    for tensor in fragment.tensors:
        view(target, tensor).zero_()
    assert not target.any()


def test_weight_decay_is_for_matrices_alone() -> None:
    layers = model()
    fragment = whole(layers)
    target = torch.zeros(fragment.numel)
    flatten_into(fragment, dict(layers.named_parameters()), target)
    before = target.clone()
    adamw_step_(
        target,
        AdamWState.zeros_like(target),
        torch.zeros_like(target),
        fragment=fragment,
        step=1,
        lr=0.5,
        grad_norm=0.0,
        settings=AdamWSettings(clip=1.0, weight_decay=0.5),
    )
    for tensor in fragment.tensors:
        factor = 0.75 if is_decayed(tensor.shape) else 1.0
        assert torch.equal(view(target, tensor), view(before, tensor) * factor)
    assert [is_decayed(shape) for shape in ((), (4,), (4, 4), (4, 4, 3))] == [False, False, True, True]


def test_the_state_goes_to_a_snapshot_and_back() -> None:
    state = AdamWState.zeros_like(torch.ones(3))
    again = AdamWState(**state.tensors())
    assert again.exp_avg is state.exp_avg and again.exp_avg_sq is state.exp_avg_sq


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_gpu_take_the_same_steps_to_the_bit() -> None:
    settings = OuterSettings(lr=0.6, momentum=0.9)
    target, momentum = numbers(1 << 20, seed=0), torch.zeros(1 << 20)
    on_gpu = target.cuda(), momentum.cuda()
    for step in range(5):
        delta = numbers(1 << 20, seed=step + 1)
        outer_step_(target, momentum, delta, settings)
        outer_step_(*on_gpu, delta.cuda(), settings)
    assert torch.equal(on_gpu[0].cpu(), target) and torch.equal(on_gpu[1].cpu(), momentum)

    adamw = AdamWSettings(clip=1.0, weight_decay=0.1)
    for (cpu, _, _), (gpu, _, _) in zip(adamw_runs(adamw, 5), adamw_runs(adamw, 5, device="cuda"), strict=True):
        assert torch.equal(gpu.cpu(), cpu)
