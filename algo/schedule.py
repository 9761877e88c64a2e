"""Rounds, slots, due steps and learning rate, as functions of the position in the schedule."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, assert_never

from farloop.algo.spec import Fragment, Layout, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import LearningRate, RoundRule, Terms

# --- Inner learning rate
#
# A node asks for it at every step and the coordinator at the start of every round (protocol, Round clock).


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """From one warm-up to the next: the positions [start, end)."""

    start: int
    end: int
    peak: float


def learning_rate(terms: Terms, position: float) -> float:
    """η at a schedule position. Positions are real numbers (protocol, Round clock).

    In a phase of length T with W warm-up positions, u of which have passed: η₀ + (η_peak − η₀)·min(1, (u+1)/W) for
    u < W, then the shape. η₀ is `minimum`, in later phases the last η reached (arXiv 2403.08763).
    """
    *before, phase = [phase for phase in phases(terms) if phase.start <= max(position, 0.0)]
    first = terms.schedule.lr.minimum
    for earlier in before:
        first = _within(terms.schedule.lr, earlier, first, earlier.end)
    return _within(terms.schedule.lr, phase, first, position)


def phases(terms: Terms) -> list[Phase]:
    """The run's phases in order; one unless it re-warms."""
    starts = [0, *(rewarm.start for rewarm in terms.schedule.lr.rewarms)]
    peaks = [terms.schedule.lr.peak, *(rewarm.peak for rewarm in terms.schedule.lr.rewarms)]
    ends = [*starts[1:], terms.schedule.steps]
    return [Phase(start=s, end=e, peak=peak) for s, e, peak in zip(starts, ends, peaks, strict=True)]


def warms_up(terms: Terms, position: float) -> bool:
    """Whether the learning rate rises here."""
    return any(phase.start <= position < phase.start + terms.schedule.lr.warmup_steps for phase in phases(terms))


def _within(lr: LearningRate, phase: Phase, first: float, position: float) -> float:
    passed, warmup = position - phase.start, lr.warmup_steps
    if passed < warmup:
        return first + (phase.peak - first) * min(1.0, (passed + 1) / warmup)
    done = min(1.0, (passed - warmup) / max(1, phase.end - phase.start - warmup))
    match lr.shape:
        case "constant":
            return phase.peak
        case "cosine":
            return _cosine(phase.peak, lr.minimum, done)
        case "linear":
            return lr.minimum + (phase.peak - lr.minimum) * (1 - done)
        case "step":
            drops = sum(phase.start < drop <= position for drop in lr.drops)
            return max(lr.minimum, phase.peak * lr.drop_factor**drops)
        case "wsd":
            # The peak, and in the phase's last `decay_share` from there to `minimum` (arXiv 2404.06395, 2405.18392).
            tail = lr.decay_share * (phase.end - phase.start)
            late = min(1.0, max(0.0, 1 - (phase.end - position) / tail))
            return lr.minimum + (phase.peak - lr.minimum) * (1 - (math.sqrt(late) if lr.decay == "sqrt" else late))
        case "infinite":
            return _infinite(lr, phase, position)
        case _:
            assert_never(lr.shape)


def _cosine(high: float, low: float, done: float) -> float:
    """η_min + ½(η_peak − η_min)(1 + cos π·done)"""
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * done))


def _infinite(lr: LearningRate, phase: Phase, position: float) -> float:
    """A cosine down to `constant`, which is held for as long as wanted; then η·(η_min/η)^share (arXiv 2403.08763)."""
    annealed = 0.0
    if lr.anneal_at is not None and position > lr.anneal_at:
        annealed = min(1.0, (position - lr.anneal_at) / (phase.end - lr.anneal_at))
        position = lr.anneal_at
    cooled = min(1.0, (position - phase.start - lr.warmup_steps) / max(1, lr.cooldown_steps))
    held = _cosine(phase.peak, lr.constant, cooled)
    return held * (lr.minimum / held) ** annealed if annealed else held


# --- Rounds, slots, due steps and windows
#
# The only global clock is the round, owned by the coordinator (round clock); everything here is pure and without torch,
# so that both machines, the simulator and the previews compute the very same numbers. The lengths of rounds are the
# coordinator's alone to compute: nodes are told (protocol, Window terms).


POWERS: Final[Mapping[RoundRule, int]] = {"linear": 1, "qsr": 2, "cubic": 3}
"""Rules by which H grows as the learning rate η falls: H ∝ η^−power; qsr is arXiv 2310.14423."""

_GUARD: Final = 1e-9
"""Relative. (α/η)^power, or a round's steps times a share or a ratio of rates, is often a whole number on paper and, in
fp64, a bit less: its floor would be one too low."""

_EQUAL: Final = 0.95  # of the best rate: rates are measured, and of equal nodes one is always the best


def h_at(terms: Terms, position: int) -> int:
    """H of a round that starts here: from η at its first step, once, for the whole round (arXiv 2310.14423).

    max(h, ⌊(α/η)^power⌋), at most `h_max`; `h_init` where α is 0 and in the warm-up, whose small η means no slow drift.
    """
    if terms.schedule.h_rule == "constant":
        return terms.schedule.h
    if terms.schedule.h_rule == "post-local":
        return initial_h(terms) if position < terms.schedule.h_switch else terms.schedule.h
    if terms.schedule.h_alpha == 0.0 or warms_up(terms, position):
        return initial_h(terms)
    most = terms.schedule.steps if terms.schedule.h_max is None else terms.schedule.h_max
    rate = learning_rate(terms, position)
    ratio = min(terms.schedule.h_alpha / rate, most) if rate > 0.0 else most  # bounded first: its power could overflow
    grown = math.floor(ratio ** POWERS[terms.schedule.h_rule] * (1 + _GUARD))
    return max(terms.schedule.h, min(grown, most))


def initial_h(terms: Terms) -> int:
    """H of the rounds in which the learning rate warms up, or that come before the switch."""
    if terms.schedule.h_init is not None:
        return terms.schedule.h_init
    return 1 if terms.schedule.h_rule == "post-local" else terms.schedule.h


def round_after(terms: Terms, previous: RoundPlan | None) -> RoundPlan | None:
    """The round that follows `previous` (None: the first); None where the run has ended.

    The last one is cut short. A round that would run into a re-warm ends where that begins, so that nodes sync there,
    but is never made shorter than `h`.
    """
    index, start = (previous.index + 1, previous.start + previous.length) if previous else (0, 0)
    length = h_at(terms, start)
    if terms.schedule.h_rule != "constant":
        ahead = [phase.start - start for phase in phases(terms) if phase.start > start]
        length = min(length, max(terms.schedule.h, min(ahead, default=length)))
    length = min(length, terms.schedule.steps - start)
    return RoundPlan(index=index, start=start, length=length) if length > 0 else None


def first_rounds(terms: Terms, count: int = 2) -> tuple[RoundPlan, ...]:
    """Rounds 0 … count − 1, as far as the run has them."""
    plans: list[RoundPlan] = []
    while len(plans) < count and (plan := round_after(terms, plans[-1] if plans else None)):
        plans.append(plan)
    return tuple(plans)


def opening_rounds(spec: RunSpec) -> tuple[RoundPlan, ...]:
    """The rounds that a run begins with, before anything is known of its nodes' speeds."""
    slots, shares = spec.identity.layout.slots, spec.terms.schedule.h_share_of
    return tuple(dealt(plan, slots, shares=shares) for plan in first_rounds(spec.terms))


def is_last(terms: Terms, plan: RoundPlan) -> bool:
    return plan.start + plan.length >= terms.schedule.steps


def is_evaluated(spec: RunSpec, terms: WindowTerms) -> bool:
    """Whether the anchors are evaluated at this window's commit: at the last fragment's, every so many rounds."""
    last = terms.fragment == len(spec.identity.layout.fragments) - 1
    if spec.identity.evaluation_set == "none" or not last:
        return False
    return terms.final or (terms.round + 1) % spec.terms.schedule.evaluate_every_rounds == 0


def dealt(
    plan: RoundPlan,
    slots: int,
    *,
    rates: Mapping[NodeId, float] = MappingProxyType({}),
    shares: Sequence[tuple[NodeId, float]] = (),
) -> RoundPlan:
    """The round with the steps of the nodes that do fewer than all of them, and a step per slot at least.

    Slow nodes do H_i = ⌊H · rate ÷ best rate⌋ (DyLU, arXiv 2401.09135); nodes with an unknown rate, or nearly the best,
    all of them. Nodes with a share do ⌊H · share⌋. If both apply, the fewer.
    """
    best, least = max(rates.values(), default=0.0), min(plan.length, slots)
    steps = {name: steps_by_rate(plan.length, rate, best) for name, rate in rates.items() if rate > 0.0}
    for name, share in shares:
        steps[name] = min(steps.get(name, plan.length), steps_by_share(plan.length, share))
    fewer = {name: max(least, count) for name, count in sorted(steps.items())}
    return dataclasses.replace(plan, node_steps=tuple((n, count) for n, count in fewer.items() if count < plan.length))


def steps_by_rate(length: int, rate: float, best: float) -> int:
    """⌊length · rate ÷ best⌋, or all of them where the rate is nearly the best."""
    return steps_by_share(length, rate / best) if rate < _EQUAL * best else length


def steps_by_share(length: int, share: float) -> int:
    """⌊length · share⌋, where a share such as 43/50 may be a bit less in fp64."""
    return math.floor(length * share * (1 + _GUARD))


def position_in(plan: RoundPlan, node: NodeId, step: int) -> float:
    """Schedule position of a node that has done `step` of its own steps of the round (protocol, Round clock)."""
    return plan.start + step * plan.length / plan.steps_of(node)


def due_step(slot: int, slots: int, node_steps: int) -> int:
    """Own steps of the round after which slot `slot` is sent: ⌈(slot+1)·H_i / slots⌉ (protocol, Round clock)."""
    return -(-(slot + 1) * node_steps // slots)


def due_in(terms: WindowTerms, fragment: Fragment, slots: int, node_steps: int) -> int:
    """Own steps of the window's round after which its delta is due: a final window is due at the round's end."""
    return node_steps if terms.final else due_step(fragment.slot, slots, node_steps)


def first_step(slot: int, slots: int, node_steps: int) -> int:
    """Own steps of a round that a node leaves out which starts with this slot: none at its begin."""
    return min(due_step(slot - 1, slots, node_steps), node_steps - 1)


def first_send_round(start_round: int, slot: int, slots: int, start_slot: int = 0) -> int:
    """Round of the first send of a node that starts training with `start_slot` of `start_round`.

    No fragment is sent before a full period from its first base (joining nodes): a node that starts with a round sends
    only the last slot in it. Final windows are exempt.
    """
    return start_round - (slot - start_slot - slots + 1) // slots


def is_expected(terms: WindowTerms, start_round: int, slot: int, slots: int, start_slot: int = 0) -> bool:
    """Whether a window waits for a node that started with `start_slot` of `start_round`.

    The node decides by `may_send` of `node/send_schedule.py`, which has the same rule of the first round and more.
    """
    return terms.final or first_send_round(start_round, slot, slots, start_slot) <= terms.round


def span_of(layout: Layout, window: WindowTerms, rounds: Mapping[int, RoundPlan]) -> tuple[int, int]:
    """Schedule positions [begin, end) that a regular window covers: from the fragment's send before to this one.

    `rounds` must hold the window's round, and the one before it.
    """
    slot, slots = layout.fragments[window.fragment].slot, layout.slots
    begin, end = 0, rounds[window.round].start + due_step(slot, slots, rounds[window.round].length)
    if window.round > first_send_round(0, slot, slots):
        before = rounds[window.round - 1]
        begin = before.start + due_step(slot, slots, before.length)
    return begin, end


def work_ratio(terms: Terms, begin: int, end: int) -> float:
    """Σ η over these positions, divided by Σ η over the `h` positions from `begin` on: 1 for a round of `h` steps.

    A round of H > h steps is worth less than H/h where η falls within it. Where there is no η at all, steps count.
    """
    rates = [learning_rate(terms, position) for position in range(begin, max(end, begin + terms.schedule.h))]
    base = math.fsum(rates[: terms.schedule.h])
    return math.fsum(rates[: end - begin]) / base if base > 0.0 else (end - begin) / terms.schedule.h


def first_windows(terms: Terms, layout: Layout, rounds: tuple[RoundPlan, ...] = ()) -> tuple[WindowTerms, ...]:
    """The windows that open at the run's start: version 1 of every fragment. `rounds`: the first two, where fixed."""
    plans = rounds or first_rounds(terms)
    return tuple(
        _window(terms, layout, fragment, 1, plans[0], plans[1] if len(plans) > 1 else None, start=True)
        for fragment in layout.fragments
    )


def window_after(
    terms: Terms, layout: Layout, current: WindowTerms, rounds: dict[int, RoundPlan], *, stay: bool = False
) -> WindowTerms | None:
    """The window that opens when `current` commits; None after the final one. `terms`: those of that window.
    `stay`: it belongs to the same round.

    `rounds` must hold the current window's round, and the one after it where the run has one.
    """
    fragment = layout.fragments[current.fragment]
    if stay:
        return dataclasses.replace(current, window=current.window + 1, **own_of_window(terms, fragment))
    if current.final:
        return None
    plan = rounds[current.round]
    following = None if is_last(terms, plan) else rounds[current.round + 1]
    return _window(terms, layout, fragment, current.window + 1, plan, following, start=False)


def _window(
    terms: Terms,
    layout: Layout,
    fragment: Fragment,
    window: int,
    plan: RoundPlan,
    following: RoundPlan | None,
    *,
    start: bool,
) -> WindowTerms:
    """The next regular window after `plan`, or the flush at the run's end where no regular send is left."""
    first = start and first_send_round(0, fragment.slot, layout.slots) == 0
    served = plan if first else following
    if served is None:  # no round is left in which the fragment's slot comes up again: flush at the end of this one
        served, final = plan, True
    else:
        due = due_step(fragment.slot, layout.slots, served.length)
        final = is_last(terms, served) and due == served.length  # this send is itself the flush
    return WindowTerms(
        fragment=fragment.index, window=window, round=served.index, final=final, **own_of_window(terms, fragment)
    )


def own_of_window(terms: Terms, fragment: Fragment) -> dict[str, Any]:
    """The terms that a window carries with it, by the names that `WindowTerms` and the flat form share."""
    terms = of_fragment(terms, fragment)
    return {name: terms.value(name) for name in ("tau", "mix", "codec_up", "codec_up_of", "codec_down")}


def of_fragment(terms: Terms, fragment: Fragment) -> Terms:
    """The run's terms for a fragment: running statistics are sent as they are, lest a variance become negative."""
    if not fragment.averaged:
        return terms
    of_nodes = tuple((node, "fp32") for node, _ in terms.codecs.up_of)
    return terms.replace(codec_up="fp32", codec_up_of=of_nodes, codec_down="fp32")
