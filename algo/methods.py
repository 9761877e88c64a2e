"""The training methods that a run can name, each a row of choices, and the check that a run's terms make sense.

Codec names are checked where codecs live; here only what the mathematics demands. Free of torch: state machines read
this table, and so does a command line that only prints help.
"""

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from farloop.algo.admission_check import check_admission
from farloop.algo.of_nodes import check_of_nodes
from farloop.algo.outer_check import check_inner, check_outer
from farloop.algo.require import require
from farloop.algo.schedule import initial_h
from farloop.algo.schedule_check import check_learning_rate, check_rounds
from farloop.algo.spec import LateUpdatePolicy, Layout, Terms
from farloop.algo.variates_check import check_variates

if TYPE_CHECKING:
    from farloop.algo.fragments import Pattern
    from farloop.algo.outer import OuterKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method: what it fixes, and the defaults of what it leaves open (fields named as in `Terms`)."""

    name: str
    summary: str
    pattern: "Pattern"
    """How the model is cut."""
    h: int
    tau: int
    mix: float
    """With as many nodes as it is the share of; with more it is less (`default_mix`)."""
    codec_up: str = "q4"
    codec_down: str = "q4"
    on_late_update: LateUpdatePolicy = "wait"
    quorum: int | None = None
    fixed: frozenset[str] = frozenset()
    """Names of the terms that must keep the values given here."""
    merge: str = "mean"
    """Name of its merge rule."""
    outer: "OuterKind" = "nesterov"
    inner: bool = True
    """Nodes run an optimizer; without one their delta is the gradient (protocol K)."""
    weights: Literal["tokens", "quality"] = "tokens"
    """What a contribution weighs: its tokens, or tokens²/steps."""
    max_staleness: int = 0
    """Default of the term; where it is 0, so is the term."""
    max_stale_rounds: int = 1
    """Default of the term."""
    alone: bool = False
    """Every delta is an outer step of its own; else there is one in a round."""
    grace: bool = False
    """Beyond its quorum a window waits as long as deltas have lately been late."""
    per_node_h: bool = False
    """Slow nodes do fewer inner steps in a round."""
    lag: int = 0
    """Default of the term."""
    max_lag: int = 0
    """Largest value of the term."""
    in_flight: int | None = 1
    """Slots that a node may have undecided at once; None for any number."""


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


_MOST_STALE: Final = 16
"""Versions; as many commits as the coordinator remembers."""


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
    """Longest overlap, in inner steps, of a layout with that many slots (protocol D).

    With n slots undecided at a time, the (n+1)-th send must come after the first one's merge. n sends span ⌊n·H/slots⌋
    inner steps or more, and a step encodes before it merges. A lag is an overlap of a whole round in itself.
    """
    undecided = slots if method.in_flight is None else min(method.in_flight, slots)
    return undecided * h // slots - 1


def check(terms: Terms, layout: Layout) -> None:
    """Raise ValueError, one sentence with the nearest valid value, unless a run of this layout can have these terms."""
    method = method_named(terms.method)
    for name in sorted(method.fixed):
        wanted, value = getattr(method, name), getattr(terms, name)
        require(value == wanted, f"{method.name} runs with {name} = {wanted} only, not {value}")
    _check_layout(method, layout)
    _check_schedule(method, terms, layout.slots)
    _check_optimizers(terms)
    _check_windows(terms)
    check_of_nodes(terms, method, layout)
    check_variates(terms, method)
    check_admission(terms, method)


def _check_layout(method: Method, layout: Layout) -> None:
    if method.pattern == "whole":
        require(layout.slots == 1, f"{method.name} sends the whole model in 1 slot, but the layout has {layout.slots}")
    if method.outer == "adamw":
        count = len(layout.fragments)
        require(count == 1, f"{method.name} needs the model in 1 fragment, but it takes {count}: it is too large")


def _check_schedule(method: Method, terms: Terms, slots: int) -> None:
    for name in ("steps", "h", "batch_sequences", "sequence_tokens", "evaluate_every_rounds"):
        require(getattr(terms, name) >= 1, f"{name} is {getattr(terms, name)}; the least is 1")
    require(slots <= terms.h, f"h is {terms.h}, too short for {slots} slots of one step or more; the least is {slots}")
    check_learning_rate(terms)
    rule, fixed = terms.h_rule, "h" in method.fixed
    require(not fixed or rule == "constant", f"{method.name} runs with h_rule = constant only, not {rule}")
    check_rounds(terms, slots)
    name, shortest = min((terms.h, "h"), (initial_h(terms), "h_init"))[::-1]
    most = max_tau(method, shortest, slots)
    require(0 <= terms.tau <= most, f"tau is {terms.tau}; {method.name} with {name} = {shortest} takes 0 to {most}")
    _check_lag(method, terms)
    require(0.0 <= terms.mix <= 1.0, f"mix is {terms.mix}; it lies between 0 (the anchor) and 1 (the local weights)")


def _check_lag(method: Method, terms: Terms) -> None:
    most = f"at most {method.max_lag}" if method.max_lag else "0 only"
    require(0 <= terms.lag <= method.max_lag, f"lag is {terms.lag}; {method.name} takes {most}")
    require(bool(terms.lag) or not terms.eager, "eager needs an update that is a round late; set lag = 1")
    if not terms.lag:
        return
    # What has been sent must leave the local weights, or the next delta, which has the same base, would hold it again.
    require(terms.mix == 0.0, f"mix is {terms.mix}; with lag = 1 it is 0, for what stayed would be sent twice")
    require(terms.tau == 0, f"tau is {terms.tau}; with lag = 1 it is 0, for the overlap is a whole round")
    require(terms.on_late_update == "wait", "on_late_update is continue; with lag = 1 it is wait")


def _check_optimizers(terms: Terms) -> None:
    method = method_named(terms.method)
    check_outer(terms, method.outer)
    check_inner(terms, has_inner=method.inner)
    require(
        math.isfinite(terms.clip) and terms.clip > 0.0,
        f"clip is {terms.clip}; it must be a number above 0 (a large one switches clipping off)",
    )


def _check_windows(terms: Terms) -> None:
    for name, least in (("max_stale_rounds", 0), ("floor", 1), ("min_nodes", 1)):
        require(getattr(terms, name) >= least, f"{name} is {getattr(terms, name)}; the least is {least}")
    # Elsewhere the sum of a window is over deltas of one base.
    most = _MOST_STALE if method_named(terms.method).max_staleness else 0
    require(
        0 <= terms.max_staleness <= most, f"max_staleness is {terms.max_staleness}; {terms.method} takes 0 to {most}"
    )
    closes_at = terms.min_nodes
    if terms.quorum is not None:
        require(
            1 <= terms.quorum <= terms.min_nodes,
            f"quorum is {terms.quorum}; the run starts with min_nodes = {terms.min_nodes}, so it can be 1 to that",
        )
        closes_at = terms.quorum
    require(
        terms.floor <= closes_at,
        f"floor is {terms.floor}, but a window can close with {closes_at} contributions: at most {closes_at}",
    )
