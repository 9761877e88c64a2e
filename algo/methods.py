"""The training methods that a run can name, each a row of choices.

Imports no torch: state machines and the command line's help read it. `validation.py` checks a run's terms against it.
"""

from dataclasses import dataclass
from typing import Final, Literal

from farloop.algo.outer_optimizers import OuterKind
from farloop.algo.spec import Pattern
from farloop.algo.terms import LateUpdatePolicy, Terms
from farloop.monitoring.units import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method: what it fixes, and the defaults of what it leaves open (fields named as in `Terms`)."""

    name: str
    summary: str
    pattern: Pattern = "whole"  # how the model is cut
    h: int = 15  # twice the rounds of 30 at two bits, for the bytes of four
    tau: int = 0
    mix: float = 0.0  # with as many nodes as it is the share of; with more it is less (`default_mix`)
    codec_up: str = "q4r"
    codec_down: str = "q4r"
    on_late_update: LateUpdatePolicy = "wait"
    quorum: int | None = None
    fixed: frozenset[str] = frozenset()  # names of the terms that must keep the values given here
    merge: str = "mean"  # name of its merge rule
    outer: OuterKind = "nesterov"  # its outer optimizer; below, what that runs with where nothing else is said
    outer_lr: tuple[tuple[int, float], ...] = ((1, 1.0),)  # best known ν, from so many nodes on
    outer_momentum: float = 0.0
    outer_clip: float | None = None
    control_variates: bool = False  # default of the term
    inner: bool = True  # nodes run an optimizer; without one their delta is the gradient (protocol, Data parallel)
    weights: Literal["tokens", "quality", "equal"] = "tokens"  # of a contribution: its tokens, tokens²/steps, or 1
    max_staleness: int = 0  # default of the term; where it is 0, so is the term
    max_stale_rounds: int = 1  # default of the term
    alone: bool = False  # every delta is an outer step of its own; else there is one in a round
    grace: bool = False  # beyond its quorum a window waits as long as deltas have lately been late
    per_node_h: bool = False  # slow nodes do fewer inner steps in a round
    lag: int = 0  # default of the term
    eager: bool = False  # default of the term, where there is a lag
    max_lag: int = 0  # largest value of the term
    in_flight: int | None = 1  # slots that a node may have undecided at once; None for any number


# Best ν at H = 30 for models of 335M parameters and more: Scaling Laws for DiLoCo (arXiv 2503.09799), grid step 0.2. It
# depends on the nodes, hardly on the model.
_BY_NODES: Final = ((1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8))

METHODS: Final = {
    method.name: method
    for method in (
        Method(
            name="diloco",
            summary="All parameters at once, every H inner steps; training waits for the update (arXiv 2311.08105).",
            max_lag=1,
            outer_lr=_BY_NODES,
            outer_momentum=0.9,  # arXiv 2311.08105, and the source of ν
        ),
        Method(
            name="streaming",
            summary="One fragment after the other, each merged τ inner steps after it was sent (arXiv 2501.18512).",
            pattern="strided",
            tau=1,  # the paper's; a slow link lets a node take more (docs/protocol.md)
            # The paper keeps ½ of the local weights in a merge (mix). With Muon and τ = 1, 0 did better with 2 and 4
            # nodes, and was no worse with τ = 5 (docs/quality.md).
            max_lag=1,
            in_flight=None,
            # As diloco. The paper kept 0.4, tuned once at a small size, for 2 nodes mostly, and does not print its μ;
            # with 2 nodes and H = 30 0.6 did better on the built-in GPT.
            outer_lr=_BY_NODES,
            outer_momentum=0.9,
        ),
        Method(
            name="co2",
            summary="Each round's update comes during the next: a late step, damped and clipped (arXiv 2401.16265).",
            fixed=frozenset({"lag"}),
            outer="co2",
            lag=1,
            eager=True,
            max_lag=1,
            # α of the released code, β of its language model (GPT-2 medium). On a delta a round late more momentum
            # hurts: one-round delay with full Nesterov costs 13 % of the loss (arXiv 2502.12996, table 2).
            outer_lr=((1, 1.0),),
            outer_momentum=0.2,
            outer_clip=6.0,  # ours: a steady momentum of Gaussian deltas never reaches it
        ),
        Method(
            name="decoupled",
            summary="No node waits: windows close at a quorum and a grace, late deltas count later (arXiv 2604.21428).",
            pattern="strided",
            tau=1,
            mix=0.5,
            on_late_update="continue",
            quorum=1,
            weights="quality",
            merge="radial",
            max_staleness=4,
            max_stale_rounds=8,
            grace=True,
            per_node_h=True,
            in_flight=None,
            # The radial average is as long with many nodes as with few, so ν does not grow with them. The values are
            # those of the open re-implementations; the paper's own were not to be had.
            outer_lr=((1, 0.7),),
            outer_momentum=0.9,
        ),
        Method(
            name="async",
            summary="Every delta is an outer step of its own, the momentum in every N-th alone (arXiv 2401.09135).",
            tau=1,
            mix=0.5,
            on_late_update="continue",
            quorum=1,
            outer="delayed-nesterov",
            alone=True,
            max_staleness=16,
            max_stale_rounds=8,
            per_node_h=True,
            # Synchronous DiLoCo's ν and μ serve it unchanged; plain Nesterov would want a tenth of that ν.
            outer_lr=((1, 0.7),),
            outer_momentum=0.9,
        ),
        Method(
            name="sparse",
            summary="A 64th of every delta, the rest kept for later, and no outer momentum (arXiv 2508.15706).",
            codec_up="topk",
            outer="sgd",  # error feedback on the nodes takes the place of outer momentum (arXiv 2508.15706)
        ),
        Method(
            name="scafcom",
            summary="Nodes with unlike data send changes of smoothed gradients, by any codec (arXiv 2308.08165).",
            codec_up="topk:beta=0",
            fixed=frozenset({"control_variates"}),
            control_variates=True,
            outer="increments",
            weights="equal",  # in every round, or the sum of a node's increments would not be what its mean is made of
        ),
        Method(
            name="data-parallel",
            summary="The mean gradient of every inner step, in fp32 unless set, stepped by one AdamW: the baseline.",
            h=1,
            codec_up="fp32",
            codec_down="fp32",
            fixed=frozenset({"h", "tau", "mix", "codec_down", "on_late_update", "quorum"}),
            outer="adamw",  # runs by the inner learning rate: ν and μ are not used
            inner=False,
        ),
    )
}


def method_named(name: str) -> Method:
    """The method of that name. Raises ValueError that names the nearest one."""
    if name in METHODS:
        return METHODS[name]
    raise ValueError(f"there is no method {name!r}; {nearest(name, METHODS)}")


def screens_deltas(terms: Terms) -> bool:
    """Whether the coordinator compares deltas, and so measures each of them. It never compares gradients: they are not
    stored, so a restart could not repeat the judgement."""
    return terms.admission.screen != "off" and method_named(terms.method).inner


def default_mix(method: Method, nodes: int) -> float:
    """Share of the local weights that a merge keeps: no more than what a node's own delta weighs in the mean.

    With 4 nodes of `decoupled` ¼ did better than ½ and than 0 (docs/quality.md).
    """
    return min(method.mix, 1 / nodes)


def max_tau(method: Method, h: int, slots: int) -> int:
    """Longest overlap, in inner steps, of a layout with that many slots (protocol, Windows and bases).

    With n slots undecided at a time, the (n+1)-th send must come after the first one's merge. n sends span ⌊n·H/slots⌋
    inner steps or more, and a step encodes before it merges. A lag is an overlap of a whole round in itself.
    """
    undecided = slots if method.in_flight is None else min(method.in_flight, slots)
    return undecided * h // slots - 1
