"""The outer optimizers: what each keeps, its step, and how far its step moves the target.

To add one, write its step here, a row in `OUTER_OPTIMIZERS` and its name in `OuterKind`. A method selects it by `outer`
(`methods.py`): add a method, because the journal of a run has the method's name alone. The tests demand that ν = 1 and
μ = 0 give the plain average, and that a first step is as long as `gain` says. A restart clears the buffer `momentum`.
What ν and μ a window's step runs with is in `outer_settings.py`.

Loads no torch, because the state machines read the table: the steps need only the methods of their tensors. State and
target are flat fp32 of the fragment's length, changed in place. Every rounding is a torch operation of its own, never
`alpha=`, `addcmul` or `lerp`, so that a replay gives the same bits wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from farloop.algo.spec import TILE

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor]  # a kind's buffers, by name

OuterKind = Literal["sgd", "nesterov", "heavy-ball", "delayed-nesterov", "co2", "increments", "adamw"]
"""What steps a target. `adamw` steps by gradients and by the inner learning rate: `adamw.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Outer SGD with momentum. There is no outer weight decay: the inner one is inside the delta."""

    lr: float  # ν
    momentum: float  # μ
    kind: OuterKind = "nesterov"
    """What is done with them; without momentum and without what only one kind has, all are SGD."""
    clip: float | None = None  # φ of co2, in root mean squares of the damped delta (a size, in a step); None: no clip
    buffer: int = 1  # n of delayed-nesterov: deltas between two steps of its momentum
    spread: float = 0.0  # c of delayed-nesterov: the share of the momentum in each of these N steps, 0 to 1/N
    restart: int = 0  # outer steps after which the momentum begins anew from zero; 0: never
    delta_scale: float = 1.0
    """The merged delta is multiplied by it before the step: 1/p where the round is worth p rounds."""


# --- Steps
#
# Each step is elementwise, so `step_` applies it tile by tile: to a target with its state and a delta, all fp32 [n], to
# a version, with co2's Λ. Without momentum (μ = 0) most kinds keep no state. The delta is not consumed.


def sgd_step_(target: Tensor, state: State, delta: Tensor, settings: OuterSettings, version: int, gap: float) -> None:
    """target ← target − ν·Δ, fp32 [n]: FedAvg at ν = 1, and the step of SparseLoCo (arXiv 2508.15706)."""
    target.sub_(delta * settings.lr)


def nesterov_step_(
    target: Tensor, state: State, delta: Tensor, settings: OuterSettings, version: int, gap: float
) -> None:
    """b ← μ·b + Δ; target ← target − ν·(Δ + μ·b), all fp32 [n] (arXiv 2311.08105, Nesterov in torch's form).

    ν = 1 and μ = 0 give target − Δ exactly.
    """
    if (momentum := state.get("momentum")) is None:
        assert settings.momentum == 0.0
        return sgd_step_(target, state, delta, settings, version, gap)
    momentum.mul_(settings.momentum)
    momentum.add_(delta)
    step = momentum * settings.momentum
    step.add_(delta)
    step.mul_(settings.lr)
    target.sub_(step)


def heavy_ball_step_(
    target: Tensor, state: State, delta: Tensor, settings: OuterSettings, version: int, gap: float
) -> None:
    """b ← μ·b + Δ; target ← target − ν·b, all fp32 [n]: Nesterov's step without the look ahead.

    A constant delta moves the target by ν/(1 − μ) in the end, as Nesterov's does, but by ν alone at first.
    """
    if (momentum := state.get("momentum")) is None:
        assert settings.momentum == 0.0
        return sgd_step_(target, state, delta, settings, version, gap)
    momentum.mul_(settings.momentum)
    momentum.add_(delta)
    target.sub_(momentum * settings.lr)


def delayed_nesterov_step_(
    target: Tensor, state: State, delta: Tensor, settings: OuterSettings, version: int, gap: float
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
    momentum, accumulated = state.get("momentum"), state.get("accumulated")
    if momentum is None or accumulated is None:
        assert settings.momentum == 0.0
        target.sub_((delta * share).mul_(settings.lr))
        return
    is_full = version % every == 0
    of_momentum = settings.momentum * ((1.0 - spread * every + spread) if is_full else spread)
    accumulated.add_(delta)
    if is_full:
        momentum.mul_(settings.momentum)
        momentum.add_(accumulated * share)
        accumulated.zero_()
    step = momentum * of_momentum
    step.add_(delta * share)
    step.mul_(settings.lr)
    target.sub_(step)


# --- CO2 (arXiv 2401.16265): heavy ball on a delta that is a round late, damped by a gap, and clipped
#
# From the paper: the result of round t − 1 is applied at the end of round t, by a momentum like SlowMo's; the late
# delta is divided by a *staleness gap* Λ_t; the momentum is clipped to a threshold φ. Its formula of the gap (eq. 3)
# was not to be had. Ours: the gap below, in the manner of gap-aware training (arXiv 1909.10802), and its measurement
# on what a coordinator knows. The delta is not divided by the inner learning rate, as in SlowMo's code; so φ, a bound
# of the momentum, is in root mean squares of the damped delta. An ordinary run never meets it. Where nodes are eager
# (arXiv 2502.12996) Λ is 1.
#
# The released code (fairscale-CO2) does otherwise: its clip throws the clipped momentum away, its gap is a constant
# 1.0, and with its memory-efficient momentum the average is not even late. Nothing here follows it.


def staleness_gap(drift: float, reach: float) -> float:
    """Λ = 1 + drift / reach: how far the target has moved since a late delta's base, in rounds of local progress.

    Where it stands still the delta is as good as fresh: 1. Both lengths scale with the model, so the gap does not.
    `drift`: ‖x_t − x_{t−1}‖, the length of the target's last step. It is α‖m‖: the momentum that is kept says it.
    `reach`: how far a node came in the round of the delta. The design asks for τ·s_max, s_max the longest inner step; a
    coordinator sees no inner steps, but the triangle inequality gives it a lower bound, the length of the delta
    (`weights.reach`). The gap is so never smaller than asked for, and the step never longer.
    """
    return 1.0 + drift / reach if reach > 0.0 else 1.0


def co2_step_(target: Tensor, state: State, delta: Tensor, settings: OuterSettings, version: int, gap: float) -> None:
    """m ← clip(β·m + Δ/Λ, −φ, φ); target ← target − α·m, element by element, all fp32 [n].

    α and β are the settings' `lr` and `momentum`, φ is `clip`, Λ is `gap`. With Λ = 1 and no clip: heavy ball.
    """
    assert gap >= 1.0
    momentum = state["momentum"]
    # A product, because a division by a scalar is rounded in one way on a CPU and in another on a GPU.
    damping = 1.0 / gap
    momentum.mul_(settings.momentum)
    momentum.add_(delta * damping)
    if settings.clip is not None:
        momentum.clamp_(-settings.clip, settings.clip)
    target.sub_(momentum * settings.lr)


# --- The table


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    state: tuple[str, ...] = ()
    """Buffers that it keeps between its steps; how often it stepped is the fragment's version."""
    keeps_without_momentum: bool = False  # whether it keeps them where μ is 0 too
    has_gap: bool = False  # whether its step depends on the staleness gap Λ (`staleness_gap`)
    step: Callable[[Tensor, State, Tensor, OuterSettings, int, float], None]
    gain: Callable[[OuterSettings, float], float]
    """How far a delta moves the target in the very step that merges it, by the settings and Λ."""


def _by_gradients(*_: object) -> NoReturn:
    raise ValueError("an AdamW step is no multiple of its gradient, and takes more than it: `adamw_step_`")


OUTER_OPTIMIZERS: Final[Mapping[OuterKind, OuterOptimizer]] = {
    "sgd": OuterOptimizer(
        step=sgd_step_,
        gain=lambda settings, gap: settings.lr,
    ),
    "nesterov": OuterOptimizer(
        state=("momentum",),
        step=nesterov_step_,
        gain=lambda settings, gap: settings.lr * (1.0 + settings.momentum) * settings.delta_scale,
    ),
    "heavy-ball": OuterOptimizer(
        state=("momentum",),
        step=heavy_ball_step_,
        gain=lambda settings, gap: settings.lr,
    ),
    "delayed-nesterov": OuterOptimizer(
        state=("accumulated", "momentum"),
        step=delayed_nesterov_step_,
        gain=lambda settings, gap: settings.lr / settings.buffer,
    ),
    "co2": OuterOptimizer(
        state=("momentum",),
        keeps_without_momentum=True,  # the gap is measured on its last step, which is in the buffer
        has_gap=True,
        step=co2_step_,
        gain=lambda settings, gap: settings.lr / gap,  # more than what comes, where the momentum is clipped
    ),
    # Heavy ball whose μ is 1, or 0 where the sum begins anew, and whose ν is in units of gradients: the deltas are
    # changes of gradients, and the buffer is their sum, c of SCAFCOM (`outer_settings.settings_of`).
    "increments": OuterOptimizer(
        state=("momentum",),
        keeps_without_momentum=True,
        step=heavy_ball_step_,
        gain=lambda settings, gap: settings.lr,
    ),
    "adamw": OuterOptimizer(
        state=("exp_avg", "exp_avg_sq"), keeps_without_momentum=True, step=_by_gradients, gain=_by_gradients
    ),
}


def state_names(kind: OuterKind, momentum: float) -> tuple[str, ...]:
    """The buffers that a kind keeps between its steps."""
    optimizer = OUTER_OPTIMIZERS[kind]
    return optimizer.state if momentum or optimizer.keeps_without_momentum else ()


def step_gain(settings: OuterSettings, gap: float = 1.0) -> float:
    """How far a delta moves the target in the very step that merges it: ν(1 + μ) for Nesterov, α/Λ for co2."""
    return OUTER_OPTIMIZERS[settings.kind].gain(settings, gap)


def restarts(settings: OuterSettings, version: int) -> bool:
    """Whether the momentum begins anew with the step to this version (Outer-Momentum Restarting, arXiv 2605.28585)."""
    return settings.restart > 0 and version > 1 and (version - 1) % settings.restart == 0


def step_(
    target: Tensor,
    state: State,
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
    step = OUTER_OPTIMIZERS[settings.kind].step
    for start in range(0, target.numel(), TILE):  # tile by tile, so that the temporaries are small
        tile = slice(start, start + TILE)
        step(target[tile], {name: held[tile] for name, held in state.items()}, delta[tile], settings, version, gap)
