"""The optimizers that step the coordinator's target: Nesterov for deltas, AdamW for the gradients of `data-parallel`.

All state is flat fp32 of the fragment's length, changed in place. Every rounding is a torch operation of its own, never
`alpha=`, `addcmul` or `lerp`, so that a replay gives the same bits wherever it runs (protocol M, P).
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from farloop.algo.fragments import tiles
from farloop.algo.spec import Fragment

OuterKind = Literal["nesterov", "adamw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Outer SGD with Nesterov momentum. There is no outer weight decay: the inner one is inside the delta."""

    lr: float
    """ν"""
    momentum: float
    """μ"""


PLAIN_AVERAGE: Final = OuterSettings(lr=1.0, momentum=0.0)
"""The target becomes the mean of the local weights: FedAvg."""

# Best ν at H = 30, μ = 0.9 for models of 335M parameters and more, by number of nodes: Scaling Laws for DiLoCo
# (arXiv 2503.09799), grid step 0.2. It depends on the nodes, hardly on the model.
_LR_BY_NODES: Final = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
_MOMENTUM: Final = 0.9  # arXiv 2311.08105, and the table's source

# Momentum delivers a delta over about 1/(1 − μ) = 10 outer steps. A run that is not twice as long ends with much of its
# progress still in the buffer.
_FEWEST_STEPS_FOR_MOMENTUM: Final = 20


def default_outer(num_nodes: int, h: int, outer_steps: int) -> OuterSettings:
    """Settings for a run of `outer_steps` outer steps of each fragment, one every `h` inner steps.

    Between the published node counts the next lower one decides. The best ν grows slowly with H, but the table is for
    H = 30 alone and serves every H but 1: there an outer optimizer does worse than at any other H (same source), so the
    plain average is taken.
    """
    if num_nodes < 1 or h < 1:
        raise ValueError(f"a run has at least 1 node and h of at least 1, not {num_nodes} and {h}")
    if h == 1 or outer_steps < _FEWEST_STEPS_FOR_MOMENTUM:
        return PLAIN_AVERAGE
    return OuterSettings(lr=_LR_BY_NODES[max(n for n in _LR_BY_NODES if n <= num_nodes)], momentum=_MOMENTUM)


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
