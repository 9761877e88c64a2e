"""The run's clock: rounds, slots, due steps, windows and the learning rate, as functions of the schedule position.

The only global clock is the round, owned by the coordinator (protocol A); everything here is pure and without torch,
so that both machines, the simulator and the previews compute the very same numbers.
"""

import math

from farloop.algo.spec import Fragment, Layout, NodeId, RoundPlan, Terms, WindowTerms


def learning_rate(terms: Terms, position: float) -> float:
    """Inner learning rate at a schedule position: linear warm-up from `minimum`, then cosine back to it.

    With W warm-up positions of T in all: η_min + (η_max − η_min)·min(1, (u+1)/W) for u < W, then
    η_min + ½(η_max − η_min)(1 + cos π(u−W)/(T−W)). Positions are real numbers (protocol A), hence the minimum.
    """
    lr, warmup = terms.lr, terms.lr.warmup_steps
    if position < warmup:
        return lr.minimum + (lr.peak - lr.minimum) * min(1.0, (position + 1) / warmup)
    done = min(1.0, (position - warmup) / max(1, terms.steps - warmup))
    return lr.minimum + 0.5 * (lr.peak - lr.minimum) * (1 + math.cos(math.pi * done))


def round_after(terms: Terms, previous: RoundPlan | None) -> RoundPlan | None:
    """The round that follows `previous` (None: the first); None where the run has ended. The last one is cut short."""
    index, start = (previous.index + 1, previous.start + previous.length) if previous else (0, 0)
    length = min(terms.h, terms.steps - start)
    return RoundPlan(index=index, start=start, length=length) if length > 0 else None


def first_rounds(terms: Terms, count: int = 2) -> tuple[RoundPlan, ...]:
    """Rounds 0 … count − 1, as far as the run has them."""
    plans: list[RoundPlan] = []
    while len(plans) < count and (plan := round_after(terms, plans[-1] if plans else None)):
        plans.append(plan)
    return tuple(plans)


def is_last(terms: Terms, plan: RoundPlan) -> bool:
    """Whether the run ends with this round."""
    return plan.start + plan.length >= terms.steps


def position_in(plan: RoundPlan, node: NodeId, step: int) -> float:
    """Schedule position of a node that has done `step` of its own steps of the round (protocol A)."""
    return plan.start + step * plan.length / plan.steps_of(node)


def due_step(slot: int, slots: int, node_steps: int) -> int:
    """Own steps of the round after which slot `slot` is sent: ⌈(slot+1)·H_i / slots⌉ (protocol A)."""
    return -(-(slot + 1) * node_steps // slots)


def due_in(terms: WindowTerms, fragment: Fragment, slots: int, node_steps: int) -> int:
    """Own steps of the window's round after which its delta is due: a final window is due at the round's end."""
    return node_steps if terms.final else due_step(fragment.slot, slots, node_steps)


def first_send_round(start_round: int, slot: int, slots: int) -> int:
    """Round of the first send of a node that starts training with `start_round`.

    No fragment is sent before a full period from its first base (protocol A, I): in its first round a node sends the
    last slot alone. Final windows are exempt.
    """
    return start_round if slot == slots - 1 else start_round + 1


def may_send(terms: WindowTerms, start_round: int, slot: int, slots: int) -> bool:
    """Whether a node that started with `start_round` has a delta for this window."""
    return terms.final or first_send_round(start_round, slot, slots) <= terms.round


def first_windows(terms: Terms, layout: Layout) -> tuple[WindowTerms, ...]:
    """The windows that open at the run's start: version 1 of every fragment."""
    plans = first_rounds(terms)
    return tuple(
        _window(terms, layout, fragment, 1, plans[0], plans[1] if len(plans) > 1 else None, start=True)
        for fragment in layout.fragments
    )


def window_after(
    terms: Terms, layout: Layout, current: WindowTerms, rounds: dict[int, RoundPlan]
) -> WindowTerms | None:
    """The window that opens when `current` commits; None after the final one.

    `rounds` must hold the current window's round, and the one after it where the run has one.
    """
    if current.final:
        return None
    fragment = layout.fragments[current.fragment]
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
        fragment=fragment.index,
        window=window,
        round=served.index,
        tau=terms.tau,
        mix=terms.mix,
        codec_up=terms.codec_up,
        codec_down=terms.codec_down,
        final=final,
    )
