"""Which outer optimizer steps a target: each kind's state by name, and one step of it.

Nesterov's step is in `outer.py`, that of CO2 in `outer_co2.py`; the simpler ones are here. State and target are flat
fp32 of the fragment's length, changed in place, and every rounding is a torch operation of its own (see `outer.py`).
AdamW, which steps by gradients, is not among them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from farloop.algo.fragments import tiles
from farloop.algo.outer import outer_step_
from farloop.algo.outer_co2 import co2_step_
from farloop.algo.outer_settings import OuterSettings
from farloop.algo.spec import OuterKind


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
