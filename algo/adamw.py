"""AdamW on the coordinator, which steps by the mean gradient of `data-parallel`.

State and target are flat fp32 of the fragment's length, changed in place, and every rounding is a torch operation of
its own, so that a replay gives the same bits wherever it runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.fragments import tiles
from farloop.algo.spec import Fragment


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """AdamW with decoupled weight decay, after clipping by the norm of the whole gradient."""

    clip: float  # largest norm of the mean gradient
    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.95  # with β1 the values of arXiv 2407.07852 (OpenDiLoCo)
    eps: float = 1e-8


def is_decayed(shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases. For the inner optimizers of nodes too."""
    return len(shape) >= 2


@torch.no_grad()
def adamw_step_(
    target: Tensor,
    state: Mapping[str, Tensor],
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
    `state` holds the moments `exp_avg` and `exp_avg_sq`, fp32 [n] each.
    """
    assert step >= 1
    # 1e-6 is torch's guard against a zero norm; it is kept so that one torch process is the same run.
    clip = min(1.0, settings.clip / (grad_norm + 1e-6))
    step_size = lr / (1.0 - settings.beta1**step)
    root_correction = math.sqrt(1.0 - settings.beta2**step)
    for tensor in fragment.tensors:
        if is_decayed(tensor.shape):
            target[tensor.offset : tensor.offset + tensor.numel].mul_(1.0 - lr * settings.weight_decay)
    for target_part, grad_part, m, v in tiles(target, grad, state["exp_avg"], state["exp_avg_sq"]):
        clipped = grad_part * clip
        m.mul_(settings.beta1)
        m.add_(clipped * (1.0 - settings.beta1))
        v.mul_(settings.beta2)
        v.add_(clipped.mul_(clipped).mul_(1.0 - settings.beta2))
        denominator = v.sqrt().div_(root_correction).add_(settings.eps)
        target_part.sub_((m / denominator).mul_(step_size))
