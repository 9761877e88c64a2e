"""Learning rate and momentum of one outer step, corrections included."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from farloop.algo.methods import method_named
from farloop.algo.schedule import span_of, work_ratio
from farloop.algo.spec import Layout, OuterKind, RoundPlan, WindowTerms
from farloop.algo.terms import Terms

# --- Learning rate ν and momentum μ of an outer step, and their defaults
#
# Free of torch: the coordinator's machine settles these numbers when it closes a window, and journals them, so that a
# replay repeats the step without asking anew. The steps themselves are in `outer_optimizers.py`.


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Outer SGD with momentum. There is no outer weight decay: the inner one is inside the delta."""

    lr: float  # ν
    momentum: float  # μ
    kind: OuterKind = "nesterov"
    """What is done with them; without momentum and without what only one kind has, all are SGD."""
    clip: float | None = None  # φ of co2: largest size of an element of its momentum; None: as large as it likes
    buffer: int = 1  # n of delayed-nesterov: deltas between two steps of its momentum
    spread: float = 0.0  # c of delayed-nesterov: the share of the momentum in each of these N steps, 0 to 1/N
    restart: int = 0  # outer steps after which the momentum begins anew from zero; 0: never
    delta_scale: float = 1.0
    """The merged delta is multiplied by it before the step: 1/p where the round is worth p rounds."""


PLAIN_AVERAGE: Final = OuterSettings(lr=1.0, momentum=0.0)  # the target becomes the mean of the local weights: FedAvg


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What a method's outer optimizer runs with where nothing else is said."""

    kind: OuterKind
    lr_by_nodes: Mapping[int, float]  # best known ν, by number of nodes; between two of them the lower one decides
    momentum: float
    clip: float | None = None


# Best ν at H = 30 for models of 335M parameters and more: Scaling Laws for DiLoCo (arXiv 2503.09799), grid step 0.2. It
# depends on the nodes, hardly on the model.
_BY_NODES: Final = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}

_DEFAULTS: Final[Mapping[str, _Defaults]] = {
    # μ: arXiv 2311.08105, and the source of ν.
    "diloco": _Defaults(kind="nesterov", lr_by_nodes=_BY_NODES, momentum=0.9),
    # As diloco. The paper (arXiv 2501.18512) kept 0.4, tuned once at a small size, for 2 nodes mostly, and does not
    # print its μ; with 2 nodes and H = 30 0.6 did better on the built-in GPT.
    "streaming": _Defaults(kind="nesterov", lr_by_nodes=_BY_NODES, momentum=0.9),
    # The radial average is as long with many nodes as with few, so ν does not grow with them. The values are those of
    # the open re-implementations of arXiv 2604.21428; the paper's own were not to be had.
    "decoupled": _Defaults(kind="nesterov", lr_by_nodes={1: 0.7}, momentum=0.9),
    # Synchronous DiLoCo's ν and μ serve it unchanged (arXiv 2401.09135); plain Nesterov would want a tenth of that ν.
    "async": _Defaults(kind="delayed-nesterov", lr_by_nodes={1: 0.7}, momentum=0.9),
    # α and φ of the released code, β of its language model (GPT-2 medium). On a delta a round late more momentum hurts:
    # one-round delay with full Nesterov costs 13 % of the loss (arXiv 2502.12996, table 2).
    "co2": _Defaults(kind="co2", lr_by_nodes={1: 1.0}, momentum=0.2, clip=1.0),
    # Error feedback on the nodes takes the place of outer momentum (SparseLoCo, arXiv 2508.15706).
    "sparse": _Defaults(kind="sgd", lr_by_nodes={1: 1.0}, momentum=0.0),
    # ν and μ are not used: its AdamW runs by the inner learning rate.
    "data-parallel": _Defaults(kind="adamw", lr_by_nodes={1: 1.0}, momentum=0.0),
}


def step_gain(settings: OuterSettings, gap: float = 1.0) -> float:
    """How far a delta moves the target in the very step that merges it: ν(1 + μ) for Nesterov, α/Λ for co2.

    A clipped momentum of co2 moves less: the gain is then more than what comes.
    """
    match settings.kind:
        case "nesterov":
            return settings.lr * (1.0 + settings.momentum) * settings.delta_scale
        case "delayed-nesterov":
            return settings.lr / settings.buffer
        case "co2":
            return settings.lr / gap
        case "sgd" | "heavy-ball":
            return settings.lr
        case "adamw":
            raise ValueError("an AdamW step is no multiple of its gradient")


def default_outer(num_nodes: int, h: int, outer_steps: int, method: str = "diloco") -> OuterSettings:
    """Settings for a run of `outer_steps` outer steps of each fragment, one every `h` inner steps.

    The best ν grows slowly with H, but the sources are for H = 30 and 50 and serve every H but 1: there an outer
    optimizer does worse than at any other H (arXiv 2503.09799), so the plain average is taken.
    """
    if num_nodes < 1 or h < 1:
        raise ValueError(f"a run has at least 1 node and h of at least 1, not {num_nodes} and {h}")
    row = _DEFAULTS[method]
    lr, momentum = row.lr_by_nodes[max(n for n in row.lr_by_nodes if n <= num_nodes)], row.momentum
    # Momentum delivers a delta over about 1/(1 − μ) outer steps. A run that is not twice as long ends with much of its
    # progress still in the buffer.
    if h == 1 or outer_steps < round(2 / (1 - momentum)):
        lr, momentum = PLAIN_AVERAGE.lr, PLAIN_AVERAGE.momentum
    # One delta of every node to a step of the momentum: as many as synchronous DiLoCo averages.
    buffer = num_nodes if row.kind == "delayed-nesterov" else 1
    return OuterSettings(kind=row.kind, lr=lr, momentum=momentum, clip=row.clip, buffer=buffer)


# --- ν and μ of one window, corrected for rounds of other lengths and for new data
#
# The coordinator settles them once, when a window closes, and journals them: a replay reads them there.


LEAST_WORK: Final = 1e-3  # a window that is worth less counts as this much: nothing can be divided by no work at all


def corrected(settings: OuterSettings, work: float) -> OuterSettings:
    """Nesterov's settings for a delta that is worth p = `work` ordinary ones: Δ/p, μ^p and ν·p·(1+μ)/(1+μ^p).

    From AutoLoCo (arXiv 2609.36662) is that the delta is divided by p, so that the buffer holds progress per unit of
    work; that what it holds fades by the work done, not by the number of steps; and that ν is rescaled. The factor is
    ours: whatever p, a delta moves the target at once by ν(1+μ)Δ, as it does without a correction. Ours is also what p
    is measured by (`work_ratio`): h steps at the same place, so that a run of constant H is left alone.
    """
    p, mu = max(work, LEAST_WORK), settings.momentum
    return dataclasses.replace(
        settings, lr=settings.lr * p * (1 + mu) / (1 + mu**p), momentum=mu**p, delta_scale=settings.delta_scale / p
    )


def is_corrected(terms: Terms) -> bool:
    """Whether the run's outer steps are corrected for the work in them: where rounds differ, and momentum spans them.

    Without momentum there is nothing to correct: ν·Δ is as it should be, however long it took.
    """
    varies = terms.schedule.h_rule != "constant" and terms.outer.momentum > 0.0
    return terms.outer.correction and varies and method_named(terms.method).outer == "nesterov"


def usual(terms: Terms) -> OuterSettings:
    """What an outer step runs under where nothing is special about its window."""
    return OuterSettings(
        kind=method_named(terms.method).outer,
        lr=terms.outer.lr,
        momentum=terms.outer.momentum,
        clip=terms.outer.clip,
        buffer=terms.outer.buffer,
        spread=terms.outer.spread,
        restart=terms.outer.restart,
    )


def settings_of(terms: Terms, layout: Layout, window: WindowTerms, rounds: Mapping[int, RoundPlan]) -> OuterSettings:
    """What a window's outer step runs under. `rounds` must hold its round, and the one before it."""
    if window.final:  # momentum pays off in later rounds, and a flush has none: the mean of what the nodes hold
        return PLAIN_AVERAGE
    settings = usual(terms)
    if not is_corrected(terms) and not terms.schedule.lr.rewarms:
        return settings
    begin, end = span_of(layout, window, rounds)
    if is_corrected(terms):
        settings = corrected(settings, work_ratio(terms, begin, end))
    if any(
        begin <= rewarm.start < end for rewarm in terms.schedule.lr.rewarms
    ):  # what was learned before leads elsewhere now
        settings = dataclasses.replace(settings, momentum=settings.momentum * terms.outer.rewarm_momentum)
    return settings
