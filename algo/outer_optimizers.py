"""Outer optimizers: Nesterov momentum, AdamW and the others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.fragments import tiles
from farloop.algo.outer_co2 import co2_step_
from farloop.algo.outer_settings import PLAIN_AVERAGE as PLAIN_AVERAGE
from farloop.algo.outer_settings import OuterSettings as OuterSettings
from farloop.algo.outer_settings import default_outer as default_outer
from farloop.algo.spec import Fragment, OuterKind

# --- The optimizers that step the coordinator's target: Nesterov for deltas, AdamW for the gradients of
# `data-parallel`.
#
# All state is flat fp32 of the fragment's length, changed in place. Every rounding is a torch operation of its own,
# never `alpha=`, `addcmul` or `lerp`, so that a replay gives the same bits wherever it runs.


@torch.no_grad()
def outer_step_(target: Tensor, momentum: Tensor | None, delta: Tensor, settings: OuterSettings) -> None:
    """b ← μ·b + Δ; target ← target − ν·(Δ + μ·b), all fp32 [n] (arXiv 2311.08105, Nesterov in torch's form).

    ν = 1 and μ = 0 give target − Δ exactly. Without momentum (μ = 0) no buffer is needed.
    """
    assert momentum is not None or settings.momentum == 0.0
    if momentum is None:
        for target_part, delta_part in tiles(target, delta):
            target_part.sub_(delta_part * settings.lr)
        return
    for target_part, delta_part, momentum_part in tiles(target, delta, momentum):
        momentum_part.mul_(settings.momentum)
        momentum_part.add_(delta_part)
        step = momentum_part * settings.momentum
        step.add_(delta_part)
        step.mul_(settings.lr)
        target_part.sub_(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """AdamW with decoupled weight decay, after clipping by the norm of the whole gradient."""

    clip: float  # largest norm of the mean gradient
    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.95  # with β1 the values of arXiv 2407.07852 (OpenDiLoCo)
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWState:
    """The moments, fp32 [n] each; how often they were stepped is the fragment's version."""

    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def zeros_like(cls, target: Tensor) -> "AdamWState":
        return cls(exp_avg=torch.zeros_like(target), exp_avg_sq=torch.zeros_like(target))

    def tensors(self) -> dict[str, Tensor]:
        """By name, as snapshots hold them; `AdamWState(**tensors)` is the way back."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def is_decayed(shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases. For the inner optimizers of nodes too."""
    return len(shape) >= 2


@torch.no_grad()
def adamw_step_(
    target: Tensor,
    state: AdamWState,
    grad: Tensor,
    *,
    fragment: Fragment,
    step: int,
    lr: float,
    grad_norm: float,
    settings: AdamWSettings,
) -> None:
    """One step of torch.optim.AdamW after torch's clip_grad_norm_, on the flat model; target and grad are fp32 [n].

    `step` counts from 1: the version that the commit will have. `grad_norm` is the norm of `grad`, which is the whole
    model's gradient (data parallel: one fragment); the caller computes it as all norms are computed (exact arithmetic).
    """
    assert step >= 1
    # 1e-6 is torch's guard against a zero norm; it is kept so that one torch process is the same run.
    clip = min(1.0, settings.clip / (grad_norm + 1e-6))
    step_size = lr / (1.0 - settings.beta1**step)
    root_correction = math.sqrt(1.0 - settings.beta2**step)
    for tensor in fragment.tensors:
        if is_decayed(tensor.shape):
            target[tensor.offset : tensor.offset + tensor.numel].mul_(1.0 - lr * settings.weight_decay)
    for target_part, grad_part, m, v in tiles(target, grad, state.exp_avg, state.exp_avg_sq):
        clipped = grad_part * clip
        m.mul_(settings.beta1)
        m.add_(clipped * (1.0 - settings.beta1))
        v.mul_(settings.beta2)
        v.add_(clipped.mul_(clipped).mul_(1.0 - settings.beta2))
        denominator = v.sqrt().div_(root_correction).add_(settings.eps)
        target_part.sub_((m / denominator).mul_(step_size))


# --- Outer optimizers by kind: names of their state, and one step
#
# Nesterov's step is `outer_step_`, that of CO2 is in `outer_co2.py`. State and target are flat fp32 of the fragment's
# length, changed in place, and every rounding is a torch operation of its own.
# AdamW, which steps by gradients, is not among them.


def state_names(kind: OuterKind, momentum: float) -> tuple[str, ...]:
    """The buffers that a kind keeps between its steps; how often it stepped is the fragment's version.

    Without momentum there are none, but for co2: its gap is measured on its last step, which is in the buffer.
    """
    match kind:
        case "adamw":
            return ("exp_avg", "exp_avg_sq")
        case "co2":
            return ("momentum",)
        case "nesterov" | "heavy-ball" if momentum:
            return ("momentum",)
        case "delayed-nesterov" if momentum:
            return ("accumulated", "momentum")
        case _:
            return ()


def restarts(settings: OuterSettings, version: int) -> bool:
    """Whether the momentum begins anew with the step to this version (Outer-Momentum Restarting, arXiv 2605.28585)."""
    return settings.restart > 0 and version > 1 and (version - 1) % settings.restart == 0


@torch.no_grad()
def step_(
    target: Tensor,
    state: Mapping[str, Tensor],
    delta: Tensor,
    settings: OuterSettings,
    *,
    version: int,
    gap: float = 1.0,
) -> None:
    """One outer step to `version`, all tensors fp32 [n]; `gap` is co2's Λ. The delta is not consumed."""
    momentum = state.get("momentum")
    if momentum is not None and restarts(settings, version):
        momentum.zero_()
    match settings.kind:
        case "sgd":
            sgd_step_(target, delta, settings)
        case "nesterov":
            outer_step_(target, momentum, delta, settings)
        case "heavy-ball":
            heavy_ball_step_(target, momentum, delta, settings)
        case "delayed-nesterov":
            delayed_nesterov_step_(target, momentum, state.get("accumulated"), delta, settings, version=version)
        case "co2":
            co2_step_(target, state["momentum"], delta, settings, gap=gap)
        case "adamw":
            raise AssertionError("its step takes more than a delta: `adamw_step_`")


@torch.no_grad()
def sgd_step_(target: Tensor, delta: Tensor, settings: OuterSettings) -> None:
    """target ← target − ν·Δ, fp32 [n]: FedAvg at ν = 1, and the step of SparseLoCo (arXiv 2508.15706)."""
    for target_part, delta_part in tiles(target, delta):
        target_part.sub_(delta_part * settings.lr)


@torch.no_grad()
def heavy_ball_step_(target: Tensor, momentum: Tensor | None, delta: Tensor, settings: OuterSettings) -> None:
    """b ← μ·b + Δ; target ← target − ν·b, all fp32 [n]: Nesterov's step without the look ahead.

    A constant delta moves the target by ν/(1 − μ) in the end, as Nesterov's does, but by ν alone at first.
    """
    if momentum is None:
        assert settings.momentum == 0.0
        return sgd_step_(target, delta, settings)
    for target_part, delta_part, momentum_part in tiles(target, delta, momentum):
        momentum_part.mul_(settings.momentum)
        momentum_part.add_(delta_part)
        target_part.sub_(momentum_part * settings.lr)


@torch.no_grad()
def delayed_nesterov_step_(
    target: Tensor,
    momentum: Tensor | None,
    accumulated: Tensor | None,
    delta: Tensor,
    settings: OuterSettings,
    *,
    version: int,
) -> None:
    """Delayed Nesterov (arXiv 2401.09135) for deltas that come one at a time; all tensors fp32 [n].

    Each is a plain step with 1/N of its weight and goes into D; with every N-th, where N divides the version,

        m ← μ·m + D/N;  D ← 0;  target ← target − ν·((1 − c·N + c)·μ·m + Δ/N)

    and with the others, m being as it is: target ← target − ν·(c·μ·m + Δ/N). N deltas of one anchor move the target as
    Nesterov moves it by their mean. Each through Nesterov on its own would move it more than six times as far (N = 4,
    μ = 0.9), which is why asynchronous runs do badly with that.
    """
    every, spread = settings.buffer, settings.spread
    share = 1.0 / every
    if momentum is None or accumulated is None:
        assert settings.momentum == 0.0
        for target_part, delta_part in tiles(target, delta):
            target_part.sub_((delta_part * share).mul_(settings.lr))
        return
    is_full = version % every == 0
    of_momentum = settings.momentum * ((1.0 - spread * every + spread) if is_full else spread)
    for target_part, delta_part, momentum_part, sum_part in tiles(target, delta, momentum, accumulated):
        sum_part.add_(delta_part)
        if is_full:
            momentum_part.mul_(settings.momentum)
            momentum_part.add_(sum_part * share)
            sum_part.zero_()
        step = momentum_part * of_momentum
        step.add_(delta_part * share)
        step.mul_(settings.lr)
        target_part.sub_(step)
