"""How many bits a node sends and how many steps it does between syncs, chosen together so that rounds end alike.

DyLU (arXiv 2401.09135) gives every node steps in proportion to its speed, H·v/v_max. Here the time on the link counts
too: a node that sends slowly first sends fewer bits, and only then does fewer steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WORTH = 0.8
"""Share of its DyLU steps that a node should keep; below it fewer bits are tried."""

HIDDEN = 0.2
"""Share of the round that a transfer may take without more ado."""

MAX_RATIO = 4.0
"""Between the most and the least steps of two nodes, to bound how far they drift apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A node's speed."""

    step_s: float
    """Of one inner step."""
    bytes_per_s: float
    """To the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a node is told."""

    bits: int
    h: int
    round_s: float
    """Its steps and its transfer."""


def dylu_h(h: int, step_s: float, fastest_step_s: float) -> int:
    """⌊H·v/v_max⌋, at least 1."""
    return max(1, math.floor(h * fastest_step_s / step_s))


def choose(
    paces: Sequence[Pace], *, h: int, parameters: float, bits: Sequence[int], min_h: int = 1, overlap: bool = False
) -> tuple[Rate, ...]:
    """Bits and steps per node, so that all rounds take T* = H·τ_fast + comm_fast at the most bits.

    Of the bits, most first, the first that keep WORTH of a node's DyLU steps, or whose transfer takes at most HIDDEN of
    T*; else the fewest, which keep the most steps. `overlap`: a transfer goes on while a node trains, only what is
    longer than its steps counts.
    """
    fast = min(pace.step_s for pace in paces)
    most = max(bits)
    fastest = max((pace for pace in paces if pace.step_s == fast), key=lambda pace: pace.bytes_per_s)
    goal = h * fast + (0.0 if overlap else _seconds(parameters, most, fastest))
    found = [_rate(pace, goal, h, fast, parameters, sorted(bits, reverse=True), min_h, overlap) for pace in paces]
    least = max(min_h, math.ceil(max(rate.h for rate in found) / MAX_RATIO))
    return tuple(
        rate
        if rate.h >= least
        else Rate(bits=rate.bits, h=least, round_s=rate.round_s + (least - rate.h) * pace.step_s)
        for rate, pace in zip(found, paces, strict=True)
    )


def steps_within(pace: Pace, goal_s: float, parameters: float, bits: int, *, overlap: bool = False) -> int:
    """⌊(T* − comm)/τ⌋: the steps that leave time for the transfer; may be below 1."""
    left = goal_s if overlap else goal_s - _seconds(parameters, bits, pace)
    return math.floor(left / pace.step_s + 1e-9)


def _rate(
    pace: Pace, goal: float, h: int, fast: float, parameters: float, bits: Sequence[int], min_h: int, overlap: bool
) -> Rate:
    wanted = WORTH * dylu_h(h, pace.step_s, fast)
    for own in bits:
        comm = _seconds(parameters, own, pace)
        steps = max(min_h, steps_within(pace, goal, parameters, own, overlap=overlap))
        if (comm <= goal and steps >= wanted) or comm <= HIDDEN * goal:
            break
    return Rate(bits=own, h=steps, round_s=round_s(pace, steps, parameters, own, overlap=overlap))


def round_s(pace: Pace, h: int, parameters: float, bits: int, *, overlap: bool = False) -> float:
    """Seconds of h steps and of a transfer, which `overlap` hides as far as there are steps."""
    comm = _seconds(parameters, bits, pace)
    return max(h * pace.step_s, comm) if overlap else h * pace.step_s + comm


def _seconds(parameters: float, bits: int, pace: Pace) -> float:
    return parameters * bits / 8.0 / pace.bytes_per_s


def utilization(h: int, step_s: float, sync_s: float) -> float:
    """Share of a round that is compute when nothing overlaps: H·τ/(H·τ + T)."""
    return h * step_s / (h * step_s + sync_s)
