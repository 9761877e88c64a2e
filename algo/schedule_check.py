"""Whether a run can have its learning rate and its rounds: each impossible choice is answered with one sentence."""

import difflib
import math
from collections.abc import Mapping
from typing import Final, get_args

from farloop.algo.learning_rate import phases
from farloop.algo.require import require
from farloop.algo.schedule import POWERS, initial_h
from farloop.algo.spec import LearningRateShape, RoundRule, Terms

SHAPES: Final[tuple[str, ...]] = get_args(LearningRateShape)
RULES: Final[tuple[str, ...]] = get_args(RoundRule)

_ONLY_FOR: Final[Mapping[str, tuple[str, object]]] = {
    "drops": ("step", ()),
    "cooldown_steps": ("infinite", 0),
    "constant": ("infinite", 0.0),
    "anneal_at": ("infinite", None),
}
"""Fields of a learning rate that one shape alone reads, and their value where it is another."""


def check_learning_rate(terms: Terms) -> None:
    """Raise ValueError unless the learning rate can be followed from the first step to the last."""
    lr, steps = terms.lr, terms.steps
    _known(lr.shape, SHAPES, "lr.shape")
    for name, value in (("lr.peak", lr.peak), ("lr.minimum", lr.minimum)):
        require(math.isfinite(value) and value >= 0.0, f"{name} is {value}; it must be a number of at least 0")
    require(lr.minimum <= lr.peak, f"lr.minimum = {lr.minimum} is above lr.peak; at most {lr.peak}")
    warmup = lr.warmup_steps
    require(0 <= warmup <= steps, f"lr.warmup_steps is {warmup}; the run has {steps} steps, so 0 to that")
    for name, (shape, unset) in _ONLY_FOR.items():
        value, strange = getattr(lr, name), lr.shape != shape and getattr(lr, name) != unset
        require(not strange, f"lr.{name} is {value}, but lr.shape is {lr.shape}: only {shape} has it")
    _check_phases(terms)
    match lr.shape:
        case "step":
            _check_steps(terms)
        case "wsd":
            most = min(1 - warmup / (phase.end - phase.start) for phase in phases(terms))
            require(
                0.0 < lr.decay_share <= most,
                f"lr.decay_share is {lr.decay_share}; above 0, and with the warm-up at most {most:g}",
            )
        case "infinite":
            _check_infinite(terms)
        case _:
            pass


def _check_phases(terms: Terms) -> None:
    lr = terms.lr
    for phase, rewarm in zip(phases(terms), lr.rewarms, strict=False):
        least = phase.start + lr.warmup_steps + 1
        require(
            least <= rewarm.start < terms.steps,
            f"lr.rewarms has one at {rewarm.start}; after the warm-up before it and within the run is "
            f"{least} to {terms.steps - 1}",
        )
        require(
            math.isfinite(rewarm.peak) and rewarm.peak >= max(lr.minimum, lr.constant),
            f"lr.rewarms has a peak of {rewarm.peak}; the least is {max(lr.minimum, lr.constant)}",
        )
        require(
            rewarm.replay is None or 0.0 <= rewarm.replay < 1.0,
            f"lr.rewarms has a replay of {rewarm.replay}; the share of samples from the data before is at least 0 and "
            "below 1, as 0.05 is",
        )
    require(
        0.0 <= terms.rewarm_momentum <= 1.0,
        f"rewarm_momentum is {terms.rewarm_momentum}; it lies between 0 (forget) and 1 (keep)",
    )


def _check_steps(terms: Terms) -> None:
    lr, third = terms.lr, terms.steps // 3
    require(len(lr.drops) > 0, f"lr.drops is empty; lr.shape = step falls there, as at {third},{2 * third}")
    inside = all(0 < drop < terms.steps for drop in lr.drops) and list(lr.drops) == sorted(set(lr.drops))
    require(inside, f"lr.drops is {list(lr.drops)}; positions from 1 to {terms.steps - 1} in rising order are wanted")
    require(0.0 < lr.drop_factor < 1.0, f"lr.drop_factor is {lr.drop_factor}; it is above 0 and below 1, as 0.1 is")


def _check_infinite(terms: Terms) -> None:
    lr, last = terms.lr, phases(terms)[-1]
    require(
        lr.minimum <= lr.constant <= lr.peak,
        f"lr.constant is {lr.constant}; it lies between lr.minimum = {lr.minimum} and lr.peak = {lr.peak}",
    )
    room = min(phase.end - phase.start for phase in phases(terms)) - lr.warmup_steps
    require(0 <= lr.cooldown_steps <= room, f"lr.cooldown_steps is {lr.cooldown_steps}; there is room for 0 to {room}")
    if lr.anneal_at is not None:
        held = last.start + lr.warmup_steps + lr.cooldown_steps
        require(
            held <= lr.anneal_at < terms.steps,
            f"lr.anneal_at is {lr.anneal_at}; from the end of the cool-down it is {held} to {terms.steps - 1}",
        )
        require(lr.minimum > 0.0, "lr.minimum is 0, which an exponential anneal never reaches; a good one is 1e-6")


def check_rounds(terms: Terms, slots: int) -> None:
    """Raise ValueError unless rounds of these lengths are possible, whatever the learning rate does."""
    rule, h = terms.h_rule, terms.h
    _known(rule, RULES, "h_rule")
    if rule in POWERS:
        _check_alpha(terms)
    else:
        require(
            terms.h_alpha == 0.0,
            f"h_alpha is {terms.h_alpha}, but h_rule is {rule}, which does not follow the learning rate; qsr does",
        )
    if rule == "post-local":
        require(
            0 < terms.h_switch < terms.steps,
            f"h_switch is {terms.h_switch}; h_rule = post-local switches to h = {h} at 1 to {terms.steps - 1}",
        )
    else:
        require(terms.h_switch == 0, f"h_switch is {terms.h_switch}, but h_rule is {rule}: only post-local has it")
    if rule == "constant":
        for name in ("h_init", "h_max"):
            value = getattr(terms, name)
            require(value is None, f"{name} is {value}, but with h_rule = constant every round has h = {h}; qsr varies")
        return
    first = initial_h(terms)
    require(first >= slots, f"h_init is {first}, too short for {slots} slots of one step or more; the least is {slots}")
    most = max(h, first)
    require(
        terms.h_max is None or terms.h_max >= most,
        f"h_max is {terms.h_max}, below the {most} steps that a round has anyway; the least is {most}",
    )


def _check_alpha(terms: Terms) -> None:
    rule, h, alpha, lr = terms.h_rule, terms.h, terms.h_alpha, terms.lr
    falls = lr.shape != "constant" and lr.minimum < lr.peak
    require(
        falls,
        f"h_rule is {rule}: rounds grow as the learning rate falls, and here it never does; use constant, "
        "or another lr.shape",
    )
    good = lr.peak * h ** (1 / POWERS[rule])
    require(
        math.isfinite(alpha) and alpha > 0.0,
        f"h_alpha is {alpha or 'missing'}; h_rule = {rule} needs one above 0; {good:.3g} gives rounds of h = {h} at "
        "the peak of the learning rate, and longer ones as it falls",
    )


def _known(name: str, names: tuple[str, ...], what: str) -> None:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    require(name in names, f"{what}: there is no {name!r}; {hint}")
