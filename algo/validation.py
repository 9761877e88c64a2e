"""Whether a run can have its terms: each refusal is one sentence that names the nearest valid value.

`check` tests all that follows from the terms, their method and the layout, except codec names: here a codec is a word.
Imports no torch: state machines check the revisions of a run.

Settings of single nodes (the codec of their deltas, their share of a round's steps) are a tuple of (node, value) in the
terms, sorted by node, without nodes that have the common value. As text: `rome=q4 oslo=q4r:step=0.7,rounding=nearest`,
separated by blanks, because codecs contain commas.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from farloop.algo.methods import Method, max_tau, method_named
from farloop.algo.outer_optimizers import OUTER_OPTIMIZERS, OuterKind
from farloop.algo.schedule import POWERS, initial_h, phases, steps_by_share
from farloop.algo.spec import Layout, NodeId
from farloop.algo.terms import Inner, InnerOptimizer, LearningRateShape, RoundRule, Screen, Terms
from farloop.monitoring.units import ascii_number, nearest

INNER_OPTIMIZERS: Final[tuple[str, ...]] = get_args(InnerOptimizer)
RULES: Final[tuple[str, ...]] = get_args(RoundRule)
SCREENS: Final[tuple[str, ...]] = get_args(Screen)
SHAPES: Final[tuple[str, ...]] = get_args(LearningRateShape)

MOST_WHOLE: Final = 1 << 40
"""Of every term that is a whole number: no run has as many steps, and what follows from it fits into a record."""

_MOST_SAMPLES: Final = 1 << 48  # of one node in `steps` or `h`: leases of a thousand nodes fit into a record
_MOST_OUTER_LR: Final = 100.0  # good ones are near 1; with huge ones a step leads beyond what fp32 holds
_MOST_BAND: Final = 1e6  # where nothing is to be too long, the screen can be off
_MOST_STALE: Final = 16  # versions; as many commits as the coordinator remembers


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustRule:
    """A way to merge deltas of which some may be hostile; the arithmetic is in `merge_rules.py`."""

    least: int  # deltas below which it protects from nothing: then they are averaged
    weighted: bool  # it is a weighted mean, by weights that follow from lengths and distances


ROBUST_RULES: Final = {
    "clipped": RobustRule(least=3, weighted=True),  # the mean of deltas cut to the median length
    "median": RobustRule(least=3, weighted=False),  # the median of every coordinate
    "trimmed": RobustRule(least=3, weighted=False),  # the mean of every coordinate but its extremes
    "krum": RobustRule(least=5, weighted=True),  # the mean of the deltas closest to others
}

DISJOINT_SUM: Final = "sum"
"""Merge of nodes that train disjoint parts of the weights: every delta has weight 1."""

MERGES: Final = (*ROBUST_RULES, DISJOINT_SUM)
"""What may replace the merge rule of a method."""


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def check(terms: Terms, layout: Layout) -> None:
    """Raise ValueError, one sentence with the nearest valid value, unless a run of this layout can have these terms."""
    method = method_named(terms.method)
    _check_whole(terms)
    for name in sorted(method.fixed):
        wanted, value = getattr(method, name), terms.value(name)
        require(value == wanted, f"{method.name} runs with {name} = {wanted} only, not {value}")
    _check_statistics(method, terms, layout)
    _check_layout(method, layout)
    _check_schedule(method, terms, layout.slots)
    _check_optimizers(terms)
    _check_windows(terms)
    check_of_nodes(terms, method, layout)
    check_variates(terms, method)
    check_admission(terms, method)


def _check_whole(terms: Terms) -> None:
    for name, value in terms.flat().items():
        require(type(value) is not int or value <= MOST_WHOLE, f"{name}: expected at most {MOST_WHOLE}, got {value}")
    batch = max(1, terms.inner.batch_sequences)
    for name, steps in (("steps", terms.schedule.steps), ("h", terms.schedule.h)):
        most = _MOST_SAMPLES // batch
        require(steps <= most, f"{name} is {steps}; with batch_sequences = {batch} the most is {most}")


def _check_statistics(method: Method, terms: Terms, layout: Layout) -> None:
    """They become the mean of what the nodes have only if all deltas of a window are from the anchor that it moves."""
    if not any(fragment.averaged for fragment in layout.fragments):
        return
    late = terms.schedule.lag or method.max_staleness
    require(
        method.inner and not late and not terms.inner.control_variates,
        "buffers is average, which diloco, streaming and sparse can, with lag = 0 and no control_variates: take own",
    )
    require(terms.outer.merge != DISJOINT_SUM, "buffers is average, but merge = sum would add them up: take own")


def _check_layout(method: Method, layout: Layout) -> None:
    if method.pattern == "whole":
        require(layout.slots == 1, f"{method.name} sends the whole model in 1 slot, but the layout has {layout.slots}")
    if method.outer == "adamw":
        count = len(layout.fragments)
        require(count == 1, f"{method.name} needs the model in 1 fragment, but it takes {count}: it is too large")


def _check_schedule(method: Method, terms: Terms, slots: int) -> None:
    schedule = terms.schedule
    for name in ("steps", "h", "batch_sequences", "sequence_tokens", "evaluate_every_rounds"):
        require(terms.value(name) >= 1, f"{name}: expected 1 or more, got {terms.value(name)}")
    require(
        slots <= schedule.h, f"h is {schedule.h}, too short for {slots} slots of one step or more; the least is {slots}"
    )
    check_learning_rate(terms)
    rule, fixed = schedule.h_rule, "h" in method.fixed
    require(not fixed or rule == "constant", f"{method.name} runs with h_rule = constant only, not {rule}")
    check_rounds(terms, slots)
    name, shortest = min((schedule.h, "h"), (initial_h(terms), "h_init"))[::-1]
    most = max_tau(method, shortest, slots)
    require(
        0 <= schedule.tau <= most,
        f"tau: expected 0 to {most} by {method.name} with {name} = {shortest}, got {schedule.tau}",
    )
    require(not schedule.own_tau or may_own_tau(terms), "own_tau is true, but these terms need one tau for all nodes")
    _check_lag(method, terms)
    require(0.0 <= schedule.mix <= 1.0, f"mix: expected 0 (the anchor) to 1 (the local weights), got {schedule.mix}")


def _check_lag(method: Method, terms: Terms) -> None:
    schedule = terms.schedule
    most = f"at most {method.max_lag}" if method.max_lag else "0 only"
    require(0 <= schedule.lag <= method.max_lag, f"lag is {schedule.lag}; {method.name} takes {most}")
    require(bool(schedule.lag) or not schedule.eager, "eager needs an update that is a round late; set lag = 1")
    if not schedule.lag:
        return
    # What has been sent must leave the local weights, or the next delta, which has the same base, would hold it again.
    require(schedule.mix == 0.0, f"mix is {schedule.mix}; with lag = 1 it is 0, for what stayed would be sent twice")
    require(schedule.tau == 0, f"tau is {schedule.tau}; with lag = 1 it is 0, for the overlap is a whole round")
    require(schedule.on_late_update == "wait", "on_late_update is continue; with lag = 1 it is wait")


def _check_optimizers(terms: Terms) -> None:
    method = method_named(terms.method)
    check_outer(terms, method.outer)
    name = terms.inner.optimizer
    require(name in INNER_OPTIMIZERS, f"there is no inner_optimizer {name!r}; there are {', '.join(INNER_OPTIMIZERS)}")
    runs = method.inner or name == "adamw"
    require(runs, f"{terms.method} has no inner optimizer: its coordinator runs adamw, not {name}")
    require(
        terms.inner.clip > 0.0,
        f"clip is {terms.inner.clip}; it must be a number above 0 (a large one switches clipping off)",
    )


def _check_windows(terms: Terms) -> None:
    admission = terms.admission
    for name, least in (("max_stale_rounds", 0), ("floor", 1), ("min_nodes", 1)):
        require(terms.value(name) >= least, f"{name}: expected {least} or more, got {terms.value(name)}")
    # Elsewhere the sum of a window is over deltas of one base.
    most = _MOST_STALE if method_named(terms.method).max_staleness else 0
    require(
        0 <= admission.max_staleness <= most,
        f"max_staleness is {admission.max_staleness}; {terms.method} takes 0 to {most}",
    )
    closes_at = admission.min_nodes
    if admission.quorum is not None:
        require(
            1 <= admission.quorum <= admission.min_nodes,
            f"quorum is {admission.quorum}; the run starts with min_nodes = {admission.min_nodes}, so it can be 1 to "
            "that",
        )
        closes_at = admission.quorum
    require(
        admission.floor <= closes_at,
        f"floor is {admission.floor}, but a window can close with {closes_at} contributions: at most {closes_at}",
    )


# --- Learning rate and rounds


_SHAPE_ONLY_FOR: Final[Mapping[str, tuple[str, object]]] = {
    "drops": ("step", ()),
    "cooldown_steps": ("infinite", 0),
    "constant": ("infinite", 0.0),
    "anneal_at": ("infinite", None),
}
"""Fields of a learning rate that one shape alone reads, and their value where it is another."""


def check_learning_rate(terms: Terms) -> None:
    """Raise ValueError unless the learning rate can be followed from the first step to the last."""
    lr, steps = terms.schedule.lr, terms.schedule.steps
    _known(lr.shape, SHAPES, "lr.shape")
    for name, value in (("lr.peak", lr.peak), ("lr.minimum", lr.minimum)):
        require(value >= 0.0, f"{name} is {value}; it must be a number of at least 0")
    require(lr.minimum <= lr.peak, f"lr.minimum = {lr.minimum} is above lr.peak; at most {lr.peak}")
    warmup = lr.warmup_steps
    require(0 <= warmup <= steps, f"lr.warmup_steps is {warmup}; the run has {steps} steps, so 0 to that")
    for name, (shape, unset) in _SHAPE_ONLY_FOR.items():
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
    schedule = terms.schedule
    lr = schedule.lr
    for phase, rewarm in zip(phases(terms), lr.rewarms, strict=False):
        least = phase.start + lr.warmup_steps + 1
        require(
            least <= rewarm.start < schedule.steps,
            f"lr.rewarms has one at {rewarm.start}; after the warm-up before it and within the run is "
            f"{least} to {schedule.steps - 1}",
        )
        require(
            rewarm.peak >= max(lr.minimum, lr.constant),
            f"lr.rewarms has a peak of {rewarm.peak}; the least is {max(lr.minimum, lr.constant)}",
        )
        require(
            rewarm.replay is None or 0.0 <= rewarm.replay < 1.0,
            f"lr.rewarms has a replay of {rewarm.replay}; the share of samples from the data before is at least 0 and "
            "below 1, as 0.05 is",
        )
    require(
        0.0 <= terms.outer.rewarm_momentum <= 1.0,
        f"rewarm_momentum: expected 0 (forget) to 1 (keep), got {terms.outer.rewarm_momentum}",
    )


def _check_steps(terms: Terms) -> None:
    schedule = terms.schedule
    lr, third = schedule.lr, schedule.steps // 3
    require(len(lr.drops) > 0, f"lr.drops is empty; lr.shape = step falls there, as at {third},{2 * third}")
    inside = all(0 < drop < schedule.steps for drop in lr.drops) and list(lr.drops) == sorted(set(lr.drops))
    require(inside, f"lr.drops is {list(lr.drops)}; expected rising positions from 1 to {schedule.steps - 1}")
    require(0.0 < lr.drop_factor < 1.0, f"lr.drop_factor is {lr.drop_factor}; it is above 0 and below 1, as 0.1 is")


def _check_infinite(terms: Terms) -> None:
    schedule = terms.schedule
    lr, last = schedule.lr, phases(terms)[-1]
    require(
        lr.minimum <= lr.constant <= lr.peak,
        f"lr.constant is {lr.constant}; it lies between lr.minimum = {lr.minimum} and lr.peak = {lr.peak}",
    )
    room = min(phase.end - phase.start for phase in phases(terms)) - lr.warmup_steps
    require(0 <= lr.cooldown_steps <= room, f"lr.cooldown_steps is {lr.cooldown_steps}; there is room for 0 to {room}")
    if lr.anneal_at is not None:
        held = last.start + lr.warmup_steps + lr.cooldown_steps
        require(
            held <= lr.anneal_at < schedule.steps,
            f"lr.anneal_at is {lr.anneal_at}; from the end of the cool-down it is {held} to {schedule.steps - 1}",
        )
        require(lr.minimum > 0.0, "lr.minimum is 0, which an exponential anneal never reaches; a good one is 1e-6")


def check_rounds(terms: Terms, slots: int) -> None:
    """Raise ValueError unless rounds of these lengths are possible, whatever the learning rate does."""
    schedule = terms.schedule
    rule, h = schedule.h_rule, schedule.h
    _known(rule, RULES, "h_rule")
    if rule in POWERS:
        _check_alpha(terms)
    else:
        require(
            schedule.h_alpha == 0.0,
            f"h_alpha is {schedule.h_alpha}, but h_rule is {rule}, which does not follow the learning rate; qsr does",
        )
    if rule == "post-local":
        require(
            0 < schedule.h_switch < schedule.steps,
            f"h_switch is {schedule.h_switch}; h_rule = post-local switches to h = {h} at 1 to {schedule.steps - 1}",
        )
    else:
        require(
            schedule.h_switch == 0, f"h_switch is {schedule.h_switch}, but h_rule is {rule}: only post-local has it"
        )
    if rule == "constant":
        for name in ("h_init", "h_max"):
            value = terms.value(name)
            require(value is None, f"{name} is {value}, but with h_rule = constant every round has h = {h}; qsr varies")
        return
    first = initial_h(terms)
    require(first >= slots, f"h_init is {first}, too short for {slots} slots of one step or more; the least is {slots}")
    most = max(h, first)
    require(
        schedule.h_max is None or schedule.h_max >= most,
        f"h_max is {schedule.h_max}, below the {most} steps that a round has anyway; the least is {most}",
    )


def _check_alpha(terms: Terms) -> None:
    schedule = terms.schedule
    rule, h, alpha, lr = schedule.h_rule, schedule.h, schedule.h_alpha, schedule.lr
    falls = lr.shape != "constant" and lr.minimum < lr.peak
    require(
        falls,
        f"h_rule is {rule}: rounds grow as the learning rate falls, and here it never does; use constant, "
        "or another lr.shape",
    )
    good = lr.peak * h ** (1 / POWERS[rule])
    require(
        alpha > 0.0,
        f"h_alpha is {alpha or 'missing'}; h_rule = {rule} needs one above 0; {good:.3g} gives rounds of h = {h} at "
        "the peak of the learning rate, and longer ones as it falls",
    )


def _known(name: str, names: tuple[str, ...], what: str) -> None:
    require(name in names, f"{what}: there is no {name!r}; {nearest(name, names)}")


# --- A node's own overlap


def at_most(terms: Terms, slots: int) -> int:
    """Longest overlap that the run's shortest rounds have room for."""
    return max_tau(method_named(terms.method), min(terms.schedule.h, initial_h(terms)), slots)


def may_own_tau(terms: Terms) -> bool:
    """Whether nodes may choose their overlaps: training waits for late updates, and nothing asks for the same one."""
    method, schedule = method_named(terms.method), terms.schedule
    everywhere = "tau" in method.fixed or terms.inner.control_variates or bool(schedule.lag)
    return not everywhere and schedule.on_late_update == "wait"


def check_own_tau(tau: int, terms: Terms, slots: int) -> None:
    """Raise ValueError, one sentence, unless a node of this run can merge `tau` inner steps after it sends.

    `slots`: of the run's layout.
    """
    schedule = terms.schedule
    method = method_named(terms.method)
    own = f"this node's own tau is {tau}"
    if "tau" in method.fixed:
        raise ValueError(f"{own}, but {method.name} has the same for all nodes, {schedule.tau}: leave the node's open")
    if terms.inner.control_variates:
        raise ValueError(f"{own}, but with control_variates it is {schedule.tau}: leave the node's open")
    if schedule.lag:
        raise ValueError(f"{own}, but with lag = {schedule.lag} the overlap is a whole round: leave the node's open")
    shortest, most = min(schedule.h, initial_h(terms)), at_most(terms, slots)
    if not 0 <= tau <= most:
        raise ValueError(f"{own}; {method.name} with rounds of {shortest} steps and slots = {slots} takes 0 to {most}")


# --- Optimizers


_OUTER_ONLY_FOR: Final[dict[str, tuple[OuterKind, object]]] = {
    "outer_clip": ("co2", None),
    "outer_buffer": ("delayed-nesterov", 1),
    "outer_spread": ("delayed-nesterov", 0.0),
}
"""Terms that one outer optimizer alone reads, and their value where it is another."""


def check_outer(terms: Terms, kind: OuterKind) -> None:
    """Raise ValueError unless the method's outer optimizer can run by these terms."""
    outer = terms.outer
    for name, value in (("outer_lr", outer.lr), ("weight_decay", terms.inner.weight_decay)):
        require(value >= 0.0, f"{name} is {value}; it must be a number of at least 0")
    require(outer.lr <= _MOST_OUTER_LR, f"outer_lr: expected at most {_MOST_OUTER_LR:g}, got {outer.lr}")
    momentum = outer.momentum
    require(0.0 <= momentum < 1.0, f"outer_momentum: expected 0 or more and below 1, as 0.9, got {momentum}")
    require(kind != "sgd" or momentum == 0.0, f"outer_momentum is {momentum}; {terms.method} takes only 0")
    for name, (reader, neutral) in _OUTER_ONLY_FOR.items():
        value = terms.value(name)
        require(
            kind == reader or value == neutral,
            f"{name} is for the optimizer {reader}, which {terms.method} does not have",
        )
    clip, buffer, spread = outer.clip, outer.buffer, outer.spread
    if clip is not None:
        require(clip > 0.0, f"outer_clip is {clip}; it must be above 0, or left out")
    require(buffer >= 1, f"outer_buffer: expected 1 or more, got {buffer}; with 1 every delta steps the momentum")
    most = 1.0 / buffer
    require(0.0 <= spread <= most, f"outer_spread is {spread}; with outer_buffer = {buffer} it is 0 to {most:g}")
    require(outer.restart >= 0, f"outer_restart: expected 0 (never) or more, got {outer.restart}")


# --- Control variates


_NEEDED: Final[tuple[tuple[str, object, str], ...]] = (
    ("outer_momentum", 0.0, "with momentum an update does not say what the mean of the deltas was"),
    ("lag", 0, "a node must know the mean of all deltas before it begins the next"),
    ("tau", 0, "a node must know the mean of all deltas before it begins the next"),
    ("mix", 0.0, "the next delta must hold nothing that an earlier one held"),
    ("on_late_update", "wait", "a node must know the mean of all deltas before it begins the next"),
    ("quorum", None, "every node must be part of every merge"),
    ("max_staleness", 0, "all deltas of a merge must have one base"),
    ("merge", None, "updates must be made of the mean of all deltas"),
)
"""Terms, the one value of each, and why."""


def check_variates(terms: Terms, method: Method) -> None:
    """Raise ValueError unless the run can have control variates, or does without; `method` is that of the terms."""
    rate, usual = terms.inner.variates_rate, Inner.__dataclass_fields__["variates_rate"].default
    require(0.0 < rate <= 1.0, f"variates_rate is {rate}; it must be above 0 and at most 1")
    if not terms.inner.control_variates:
        return require(rate == usual, f"variates_rate is {rate}, which only control_variates read: leave it out")
    name = method.name
    require(method.inner, f"control_variates correct the steps of the nodes, and with {name} nodes make none")
    require(
        method.merge == "mean" and not method.alone and not OUTER_OPTIMIZERS[method.outer].has_gap,
        f"control_variates need updates that are made of the mean of all deltas, which those of {name} are not; "
        "take diloco",
    )
    for term, needed, why in _NEEDED:
        value, shown = terms.value(term), "left out" if needed is None else needed
        require(value == needed, f"{term} is {value}; with control_variates it must be {shown}, for {why}")
    require(terms.outer.lr > 0.0, "outer_lr is 0, so updates say nothing of the deltas; control_variates need them to")


# --- Screens and merge rules


def check_admission(terms: Terms, method: Method) -> None:
    """Raise ValueError, one sentence with the nearest valid value."""
    outer = terms.outer
    admission = terms.admission
    if admission.screen not in SCREENS:
        raise ValueError(f"screen is {admission.screen!r}; {nearest(admission.screen, SCREENS)}")
    if admission.norm_band < 2.0:
        raise ValueError(f"norm_band is {admission.norm_band}; the least is 2.0, for honest nodes differ")
    if admission.norm_band > _MOST_BAND:
        raise ValueError(f"norm_band is {admission.norm_band}; the most is {_MOST_BAND:g}, or set screen = off")
    if outer.merge is None:
        return
    if outer.merge == DISJOINT_SUM:
        linear = method.merge == "mean" and method.outer in ("nesterov", "sgd") and not method.alone
        require(linear, f"merge is sum, but {method.name} steps by a mean; take diloco, streaming or sparse")
        return require(not terms.schedule.eager, "merge is sum, but an eager start needs the mean; set eager = false")
    require(outer.merge != "mean", "merge is mean, which is the default: leave it out, or none in `farloop run set`")
    if outer.merge not in ROBUST_RULES:
        raise ValueError(f"merge is {outer.merge!r}; {nearest(outer.merge, MERGES)}")
    rule = ROBUST_RULES[outer.merge]
    if method.alone:
        raise ValueError(
            f"merge is {outer.merge}, but {method.name} makes a step of every delta by itself; leave it out"
        )
    closes_at = admission.min_nodes if admission.quorum is None else admission.quorum
    if closes_at < rule.least:
        what = "min_nodes" if admission.quorum is None else "quorum"
        raise ValueError(
            f"merge is {outer.merge}, which needs {rule.least} deltas in a window to choose from; {what} is {closes_at}"
        )


# --- Values of single nodes


OF_NODES: Final[Mapping[str, str]] = {"codec_up_of": "codec_up", "h_share_of": "h"}
"""Terms of this kind, and the term of all nodes that each stands in the place of."""


def codec(word: str) -> str:
    """A codec's spelling, as far as one can say here. Raises ValueError."""
    if not word:
        raise ValueError("expected a codec")
    return word


def share(word: str) -> float:
    """A share of the steps, above 0 and at most 1. Raises ValueError."""
    try:
        value = float(ascii_number(word))
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise ValueError(f"expected a share of a round's steps above 0 and at most 1, got {word!r}")
    return value


_READ: Final[Mapping[str, tuple[Callable[[str], Any], str]]] = {
    "codec_up_of": (codec, "rome=q4"),
    "h_share_of": (share, "rome=0.5"),
}
"""How the value of a node is read, and an example."""


def given_as(key: str, text: str, held: tuple[tuple[NodeId, Any], ...]) -> tuple[tuple[NodeId, Any], ...]:
    """The term's value where `text` is given: under `codec_up_of` for all nodes, under `codec_up_of.rome` for one, the
    others as `held` has them. `none` gives a node what all have.
    Raises ValueError: one sentence that begins with the key."""
    name, dot, node = key.partition(".")
    none = text.strip().lower() in ("", "none")
    read, example = _READ[name]
    try:
        if dot and not node:
            raise ValueError(f"expected a node behind the point, as {name}.rome")
        texts = {} if none else {NodeId(node): text.strip()} if dot else _pairs(text, example)
        given = {one: read(word) for one, word in texts.items()}
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    others = {one: value for one, value in held if dot and one != node}
    return tuple(sorted((others | {one: value for one, value in given.items() if value != 1.0}).items()))


def check_of_nodes(terms: Terms, method: Method, layout: Layout) -> None:
    """Raise ValueError, one sentence, unless nodes of such a run can have these of their own."""
    schedule = terms.schedule
    for name, of_all in OF_NODES.items():
        pairs = terms.value(name)
        names = [node for node, _ in pairs]
        require(names == sorted(set(names)), f"{name} names a node twice, or not in the order of the names")
        if pairs and of_all in method.fixed:
            kept = getattr(method, of_all)
            raise ValueError(f"{name}: {names[0]} cannot have its own, for {method.name} runs with {of_all} = {kept}")
    slots = layout.slots
    for node, own in schedule.h_share_of:
        require(0.0 < own < 1.0, f"h_share_of: {node} has {own}; a share is above 0 and below 1")
        steps = steps_by_share(schedule.h, own)
        require(
            steps >= slots,
            f"h_share_of: {node} would do {steps} of h = {schedule.h} steps, too few for {slots} slots of one step or "
            f"more; the least is {math.ceil(1000 * slots / schedule.h) / 1000:g}",
        )
    require(
        not schedule.h_share_of or layout.num_stages == 1,
        "h_share_of: the model is cut in stages, whose steps are one another's; leave it out",
    )
    require(
        not (terms.inner.control_variates and schedule.h_share_of),
        "h_share_of: with control_variates all nodes do the same number of steps, or the corrections would not sum to "
        "zero; leave it out",
    )


def _pairs(text: str, example: str) -> dict[NodeId, str]:
    found: dict[NodeId, str] = {}
    for word in text.split():
        node, equals, value = word.partition("=")
        if not node or not equals:
            raise ValueError(f"expected NODE=VALUE with blanks between nodes, as {example}; got {word!r}")
        if node in found:
            raise ValueError(f"{node} is given twice")
        found[NodeId(node)] = value
    return found
