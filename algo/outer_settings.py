"""Learning rate and momentum of one outer step, corrections included."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

from farloop.algo.methods import method_named
from farloop.algo.outer_optimizers import OuterSettings
from farloop.algo.schedule import learning_rate, span_of, work_ratio
from farloop.algo.spec import Layout, RoundPlan, WindowTerms
from farloop.algo.terms import InnerOptimizer, Terms

# --- Learning rate ν and momentum μ of an outer step, and their defaults, which are in the row of the method
#
# Free of torch: the coordinator's machine settles these numbers when it closes a window, and journals them, so that a
# replay repeats the step without asking anew. The steps themselves are in `outer_optimizers.py`.


PLAIN_AVERAGE: Final = OuterSettings(lr=1.0, momentum=0.0)  # the target becomes the mean of the local weights: FedAvg
_MUON_MOMENTUM: Final = {1: 0.6, 3: 0.65, 4: 0.7}  # from so many nodes on
_MUON_LR: Final = 0.8


def default_outer(
    num_nodes: int, h: int, outer_steps: int, method: str = "diloco", inner: InnerOptimizer = "adamw"
) -> OuterSettings:
    """Settings for a run of `outer_steps` outer steps of each fragment, one every `h` inner steps.

    The best ν grows slowly with H, but the sources are for H = 30 and 50 and serve every H but 1: there an outer
    optimizer does worse than at any other H (arXiv 2503.09799), so the plain average is taken.

    Deltas of Muon that are averaged want less momentum: 0.6 (arXiv 2505.23725, for one node), or 0.7 with four nodes
    (docs/quality.md), and at most 1 − 2/R in runs of R outer steps: short ones would end with much of it in the buffer.
    ν falls from 1, that of the plain average, to 0.8.
    """
    if num_nodes < 1 or h < 1:
        raise ValueError(f"a run has at least 1 node and h of at least 1, not {num_nodes} and {h}")
    row = method_named(method)
    lr, momentum = _of_nodes(dict(row.outer_lr), num_nodes), row.outer_momentum
    if h > 1 and inner == "muon" and (row.outer, row.merge) == ("nesterov", "mean"):
        most = _of_nodes(_MUON_MOMENTUM, num_nodes)
        momentum = min(most, max(0.0, 1 - 2 / max(1, outer_steps)))
        lr = 1 - (1 - _MUON_LR) * momentum / most
    elif h == 1 or outer_steps < fewest_outer_steps(row.name):
        lr, momentum = PLAIN_AVERAGE.lr, PLAIN_AVERAGE.momentum
    # One delta of every node to a step of the momentum: as many as synchronous DiLoCo averages.
    buffer = num_nodes if row.outer == "delayed-nesterov" else 1
    return OuterSettings(kind=row.outer, lr=lr, momentum=momentum, clip=row.outer_clip, buffer=buffer)


def _of_nodes(table: Mapping[int, float], num_nodes: int) -> float:
    return table[max(least for least in table if least <= num_nodes)]


def fewest_outer_steps(method: str) -> int:
    """Of a run with momentum, which delivers a delta over about 1/(1 − μ) of them: a run that is not twice as long
    ends with much of its progress still in the buffer."""
    return round(2 / (1 - method_named(method).outer_momentum))


# --- ν and μ of one window, corrected for rounds of other lengths and for new data
#
# The coordinator settles them once, when a window closes, and journals them: a replay reads them there.


LEAST_WORK: Final = 1e-3  # a window that is worth less counts as this much: nothing can be divided by no work at all


def corrected(settings: OuterSettings, work: float) -> OuterSettings:
    """Nesterov's settings for a delta that is worth p = `work` ordinary ones: Δ/p, μ^p and ν·p·(1+μ)/(1+μ^p).

    From AutoLoCo (arXiv 2609.36662): the delta is divided by p, so that the buffer holds progress per unit of work and
    fades with the work done; ν is rescaled. Ours: the factor of ν, by which a delta moves the target at once by
    ν(1+μ)Δ whatever p, and the unit of p (`work_ratio`), h steps at the same place: a constant H needs no correction.
    """
    p, mu = max(work, LEAST_WORK), settings.momentum
    return dataclasses.replace(
        settings, lr=settings.lr * p * (1 + mu) / (1 + mu**p), momentum=mu**p, delta_scale=settings.delta_scale / p
    )


def is_corrected(terms: Terms) -> bool:
    """Whether the run's outer steps are corrected for their work: only where rounds differ and momentum spans them."""
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


def sums_increments(terms: Terms) -> bool:
    """Whether deltas are changes of what a node sent before: then even the last step of a run needs their sum."""
    return method_named(terms.method).outer == "increments"


def settings_of(
    terms: Terms, layout: Layout, window: WindowTerms, rounds: Mapping[int, RoundPlan], *, same_nodes: bool = False
) -> OuterSettings:
    """What a window's outer step runs under. `rounds` must hold its round, and the one before it.

    `same_nodes`: those of this window made the version before. Increments add up only then: c ← c + mean of C(δ_i);
    x ← x − ν·Ση·c, Ση over the window's steps.
    """
    if sums_increments(terms):
        begin, end = span_of(layout, window, rounds)
        lr_sum = math.fsum(learning_rate(terms, position) for position in range(begin, end))
        return dataclasses.replace(usual(terms), lr=terms.outer.lr * lr_sum, momentum=1.0 if same_nodes else 0.0)
    # Momentum pays off in later rounds, and a flush has none: the mean of what the nodes hold.
    if window.final or layout.fragments[window.fragment].averaged:
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
