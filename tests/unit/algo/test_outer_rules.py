"""The outer optimizers by kind: each against torch's or a plain transcription, its state, and the restart."""

import dataclasses
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farloop.algo.outer_optimizers import (
    delayed_nesterov_step_,
    heavy_ball_step_,
    outer_step_,
    restarts,
    state_names,
    step_,
)
from farloop.algo.outer_settings import PLAIN_AVERAGE, OuterSettings
from farloop.algo.spec import OuterKind

KINDS: tuple[OuterKind, ...] = tuple(kind for kind in get_args(OuterKind) if kind != "adamw")


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def state_of(settings: OuterSettings, count: int = 100) -> dict[str, Tensor]:
    return {name: torch.zeros(count) for name in state_names(settings.kind, settings.momentum)}


def run(
    settings: OuterSettings, deltas: list[Tensor], target: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    target = torch.zeros_like(deltas[0]) if target is None else target.clone()
    state = state_of(settings, target.numel())
    for version, delta in enumerate(deltas, start=1):
        step_(target, state, delta, settings, version=version)
    return target, state


@pytest.mark.parametrize(
    ("kind", "momentum", "names"),
    [
        ("sgd", 0.0, ()),
        ("nesterov", 0.9, ("momentum",)),
        ("nesterov", 0.0, ()),
        ("heavy-ball", 0.9, ("momentum",)),
        ("heavy-ball", 0.0, ()),
        ("delayed-nesterov", 0.9, ("accumulated", "momentum")),
        ("delayed-nesterov", 0.0, ()),
        ("co2", 0.2, ("momentum",)),
        ("co2", 0.0, ("momentum",)),
        ("adamw", 0.0, ("exp_avg", "exp_avg_sq")),
    ],
)
def test_a_kind_keeps_what_it_needs(kind: OuterKind, momentum: float, names: tuple[str, ...]) -> None:
    assert state_names(kind, momentum) == names


@pytest.mark.parametrize("kind", KINDS)
def test_without_momentum_at_a_rate_of_one_every_kind_is_the_plain_average(kind: OuterKind) -> None:
    """A6 (bit)."""
    start, delta = numbers(100, 1), numbers(100, 2)
    target, _ = run(dataclasses.replace(PLAIN_AVERAGE, kind=kind), [delta], start)
    assert torch.equal(target, start - delta)


@pytest.mark.parametrize("kind", KINDS)
def test_the_delta_is_not_consumed(kind: OuterKind) -> None:
    delta = numbers(100, 1)
    before = delta.clone()
    run(OuterSettings(kind=kind, lr=0.7, momentum=0.9, clip=0.5, buffer=2), [delta, delta])
    assert torch.equal(delta, before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_deltas_give_the_same_bits(kind: OuterKind) -> None:
    settings = OuterSettings(kind=kind, lr=0.7, momentum=0.9, clip=0.5, buffer=2, spread=0.1, restart=3)
    deltas = [numbers(100, seed) for seed in range(7)]
    (first, one), (second, other) = run(settings, deltas), run(settings, deltas)
    assert torch.equal(first, second)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nesterov_by_its_kind_is_nesterov() -> None:
    settings = OuterSettings(lr=0.7, momentum=0.9)
    target, momentum = torch.zeros(100), torch.zeros(100)
    deltas = [numbers(100, seed) for seed in range(5)]
    for delta in deltas:
        outer_step_(target, momentum, delta, settings)
    assert torch.equal(run(settings, deltas)[0], target)


def test_heavy_ball_is_that_of_torch() -> None:
    parameter = nn.Parameter(numbers(1000, 0))
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9)
    deltas = [numbers(1000, seed) for seed in range(1, 11)]
    target, _ = run(OuterSettings(kind="heavy-ball", lr=0.7, momentum=0.9), deltas, parameter.detach())
    for delta in deltas:
        parameter.grad = delta.clone()
        reference.step()
    torch.testing.assert_close(target, parameter.detach(), rtol=1e-6, atol=2e-6)


def test_every_operation_of_heavy_ball_is_rounded_by_itself() -> None:
    target, momentum, delta = (numbers(4096, seed) for seed in range(3))
    lr, mu = torch.tensor(0.6), torch.tensor(0.9)

    def rounded(exact: Tensor) -> Tensor:  # of fp32 operands, so fp64 holds a product exactly
        return exact.float().double()

    b = rounded(rounded(mu.double() * momentum.double()) + delta.double())
    expected = (target.double() - rounded(lr.double() * b)).float()
    heavy_ball_step_(target, momentum, delta, OuterSettings(kind="heavy-ball", lr=0.6, momentum=0.9))
    assert torch.equal(target, expected) and torch.equal(momentum, b.float())


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


@hypothesis_settings(deadline=None)  # the first call into torch is slow
@given(every=st.integers(1, 6), share=st.floats(0.0, 1.0), count=st.integers(1, 15))
def test_delayed_nesterov_is_that_of_the_paper(every: int, share: float, count: int) -> None:
    settings = OuterSettings(kind="delayed-nesterov", lr=0.7, momentum=0.9, buffer=every, spread=share / every)
    deltas = [numbers(20, seed) for seed in range(count)]
    expected = paper(deltas, lr=0.7, beta=0.9, every=every, c=share / every)
    torch.testing.assert_close(run(settings, deltas)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_deltas_of_a_full_buffer_move_the_target_as_nesterov_by_their_mean() -> None:
    """A12: c = 0, N deltas of one base; again and again, momentum included (fp)."""
    nesterov, delayed = torch.zeros(50), torch.zeros(50)
    b, m, acc = torch.zeros(50), torch.zeros(50), torch.zeros(50)
    settings = OuterSettings(kind="delayed-nesterov", lr=0.7, momentum=0.9, buffer=4)
    for round_ in range(5):
        deltas = [numbers(50, 10 * round_ + node) for node in range(4)]
        outer_step_(nesterov, b, torch.stack(deltas).mean(dim=0), settings)
        for node, delta in enumerate(deltas, start=1):
            delayed_nesterov_step_(delayed, m, acc, delta, settings, version=4 * round_ + node)
        torch.testing.assert_close(delayed, nesterov, rtol=1e-5, atol=1e-5)
        assert not acc.any()


def test_with_a_buffer_of_one_it_is_nesterov_to_the_bit() -> None:
    """A12: N = 1."""
    deltas = [numbers(100, seed) for seed in range(6)]
    delayed, _ = run(OuterSettings(kind="delayed-nesterov", lr=0.7, momentum=0.9), deltas)
    assert torch.equal(delayed, run(OuterSettings(lr=0.7, momentum=0.9), deltas)[0])


def test_where_in_the_buffer_a_delta_stands_follows_from_the_version() -> None:
    """A restart needs no counter: version 8 ends a buffer of 4, whoever steps it."""
    settings = OuterSettings(kind="delayed-nesterov", lr=0.7, momentum=0.9, buffer=4)
    deltas = [numbers(50, seed) for seed in range(8)]
    whole, _ = run(settings, deltas)
    target, state = run(settings, deltas[:6])
    saved = {name: tensor.clone() for name, tensor in state.items()}
    for version in (7, 8):
        step_(target, saved, deltas[version - 1], settings, version=version)
    assert torch.equal(target, whole)


def test_one_by_one_delayed_nesterov_does_not_overshoot() -> None:
    """D36's other half: four equal deltas in turn move it by 1.9, where Nesterov would go 12.1441."""
    ones = [torch.ones(1)] * 4
    assert run(OuterSettings(kind="delayed-nesterov", lr=1.0, momentum=0.9, buffer=4), ones)[0].item() == pytest.approx(
        -1.9
    )
    assert run(OuterSettings(lr=1.0, momentum=0.9), ones)[0].item() == pytest.approx(-12.1441)


def test_first_steps_and_limits_of_the_kinds() -> None:
    """At (0.7, 0.9): Nesterov begins with 1.33, heavy ball with 0.7; both end at 7."""
    moves = {}
    for kind in ("nesterov", "heavy-ball"):
        settings = OuterSettings(kind=kind, lr=0.7, momentum=0.9)
        targets = [run(settings, [torch.ones(1)] * count)[0].item() for count in (1, 199, 200)]
        moves[kind] = (-targets[0], targets[1] - targets[2])
    assert moves["nesterov"] == pytest.approx((1.33, 7.0), rel=1e-4)
    assert moves["heavy-ball"] == pytest.approx((0.7, 7.0), rel=1e-4)


def test_momentum_restarts_after_so_many_steps() -> None:
    settings = OuterSettings(lr=0.7, momentum=0.9, restart=3)
    assert [version for version in range(1, 11) if restarts(settings, version)] == [4, 7, 10]
    assert not any(restarts(dataclasses.replace(settings, restart=0), version) for version in range(1, 11))


@pytest.mark.parametrize("kind", ["nesterov", "heavy-ball", "co2"])
def test_after_a_restart_the_run_is_as_if_it_began_there(kind: OuterKind) -> None:
    settings = OuterSettings(kind=kind, lr=0.7, momentum=0.9, restart=3)
    deltas = [numbers(50, seed) for seed in range(6)]
    target, state = run(settings, deltas)
    middle, _ = run(settings, deltas[:3])
    again, state_again = run(settings, deltas[3:], middle)
    assert torch.equal(target, again) and torch.equal(state["momentum"], state_again["momentum"])
    assert not torch.equal(target, run(dataclasses.replace(settings, restart=0), deltas)[0])


def test_adamw_is_not_stepped_by_a_delta_alone() -> None:
    with pytest.raises(AssertionError, match="adamw_step_"):
        step_(torch.zeros(1), {}, torch.zeros(1), OuterSettings(kind="adamw", lr=1.0, momentum=0.0), version=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_and_gpu_take_the_same_steps_to_the_bit(kind: OuterKind) -> None:
    settings = OuterSettings(kind=kind, lr=0.6, momentum=0.9, clip=0.3, buffer=2, spread=0.2, restart=4)
    target = numbers(1 << 20, 0)
    state = state_of(settings, 1 << 20)
    on_gpu, state_on_gpu = target.cuda(), {name: tensor.cuda() for name, tensor in state.items()}
    for version in range(1, 7):
        delta = numbers(1 << 20, version)
        step_(target, state, delta, settings, version=version, gap=1.3)
        step_(on_gpu, state_on_gpu, delta.cuda(), settings, version=version, gap=1.3)
    assert torch.equal(on_gpu.cpu(), target)
    assert all(torch.equal(state_on_gpu[name].cpu(), tensor) for name, tensor in state.items())
