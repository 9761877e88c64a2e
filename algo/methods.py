"""The training methods that a run can name, each a row of choices.

Free of torch: state machines read this table, and so does a command line that only prints help. Whether a run's terms
fit its method, `validation.py` checks.
"""

import difflib
from dataclasses import dataclass
from typing import Final, Literal

from farloop.algo.spec import OuterKind, Pattern
from farloop.algo.terms import LateUpdatePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method: what it fixes, and the defaults of what it leaves open (fields named as in `Terms`)."""

    name: str
    summary: str
    pattern: Pattern  # how the model is cut
    h: int
    tau: int
    mix: float  # with as many nodes as it is the share of; with more it is less (`default_mix`)
    codec_up: str = "q4"
    codec_down: str = "q4"
    on_late_update: LateUpdatePolicy = "wait"
    quorum: int | None = None
    fixed: frozenset[str] = frozenset()  # names of the terms that must keep the values given here
    merge: str = "mean"  # name of its merge rule
    outer: OuterKind = "nesterov"
    inner: bool = True  # nodes run an optimizer; without one their delta is the gradient (protocol, Data parallel)
    weights: Literal["tokens", "quality"] = "tokens"  # what a contribution weighs: its tokens, or tokens²/steps
    max_staleness: int = 0  # default of the term; where it is 0, so is the term
    max_stale_rounds: int = 1  # default of the term
    alone: bool = False  # every delta is an outer step of its own; else there is one in a round
    grace: bool = False  # beyond its quorum a window waits as long as deltas have lately been late
    per_node_h: bool = False  # slow nodes do fewer inner steps in a round
    lag: int = 0  # default of the term
    max_lag: int = 0  # largest value of the term
    in_flight: int | None = 1  # slots that a node may have undecided at once; None for any number


METHODS: Final = {
    method.name: method
    for method in (
        Method(
            name="diloco",
            summary="All parameters at once, every H inner steps; training waits for the update (arXiv 2311.08105).",
            pattern="whole",
            h=30,
            tau=0,
            mix=0.0,
            max_lag=1,
        ),
        Method(
            name="streaming",
            summary="One fragment after the other, each merged τ inner steps after it was sent (arXiv 2501.18512).",
            pattern="strided",
            h=30,
            tau=5,  # largest overlap that the paper advises
            mix=0.5,
            max_lag=1,
            in_flight=None,
        ),
        Method(
            name="co2",
            summary="Each round's update comes during the next: a late step, damped and clipped (arXiv 2401.16265).",
            pattern="whole",
            h=30,
            tau=0,
            mix=0.0,
            fixed=frozenset({"lag"}),
            outer="co2",
            lag=1,
            max_lag=1,
        ),
        Method(
            name="decoupled",
            summary="Nobody waits: windows close at a quorum and a grace, late deltas count later (arXiv 2604.21428).",
            pattern="strided",
            h=30,
            tau=5,
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
        ),
        Method(
            name="async",
            summary="Every delta is an outer step of its own, the momentum in every N-th alone (arXiv 2401.09135).",
            pattern="whole",
            h=30,
            tau=1,
            mix=0.5,
            on_late_update="continue",
            quorum=1,
            outer="delayed-nesterov",
            alone=True,
            max_staleness=16,
            max_stale_rounds=8,
            per_node_h=True,
        ),
        Method(
            name="sparse",
            summary="A 64th of every delta, the rest kept for later, and no outer momentum (arXiv 2508.15706).",
            pattern="whole",
            h=30,
            tau=0,
            mix=0.0,
            codec_up="topk",
            outer="sgd",
        ),
        Method(
            name="data-parallel",
            summary="The mean fp32 gradient of every inner step, stepped by one AdamW: the baseline.",
            pattern="whole",
            h=1,
            tau=0,
            mix=0.0,
            codec_up="fp32",
            codec_down="fp32",
            fixed=frozenset({"h", "tau", "mix", "codec_up", "codec_down", "on_late_update", "quorum"}),
            outer="adamw",
            inner=False,
        ),
    )
}


def method_named(name: str) -> Method:
    """The method of that name. Raises ValueError that names the nearest one."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}"
    raise ValueError(f"there is no method {name!r}; {hint}")


def default_mix(method: Method, nodes: int) -> float:
    """Share of the local weights that a merge keeps: no more than what a node's own delta weighs in the mean.

    The paper has ½ for 2 nodes (arXiv 2501.18512). With 4 nodes ¼ did better than ½ and than 0 (docs/quality.md).
    """
    return min(method.mix, 1 / nodes)


def max_tau(method: Method, h: int, slots: int) -> int:
    """Longest overlap, in inner steps, of a layout with that many slots (protocol, Windows and bases).

    With n slots undecided at a time, the (n+1)-th send must come after the first one's merge. n sends span ⌊n·H/slots⌋
    inner steps or more, and a step encodes before it merges. A lag is an overlap of a whole round in itself.
    """
    undecided = slots if method.in_flight is None else min(method.in_flight, slots)
    return undecided * h // slots - 1
