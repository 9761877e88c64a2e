"""The optimizers that step the coordinator's target: Nesterov for deltas, AdamW for the gradients of `data-parallel`.

All state is flat fp32 of the fragment's length, changed in place. Every rounding is a torch operation of its own, never
`alpha=`, `addcmul` or `lerp`, so that a replay gives the same bits wherever it runs (protocol M, P).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.fragments import tiles
from farloop.algo.outer_settings import PLAIN_AVERAGE as PLAIN_AVERAGE
from farloop.algo.outer_settings import OuterSettings as OuterSettings
from farloop.algo.outer_settings import default_outer as default_outer
from farloop.algo.spec import Fragment


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

    clip: float
    """Largest norm of the mean gradient."""
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
    model's gradient (protocol K: one fragment); the caller computes it the way protocol M computes all norms.
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
