"""Bits and steps per node, chosen by how fast it computes and sends; terms for the run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from farloop.algo.schedule import steps_by_share
from farloop.algo.spec import NodeId
from farloop.algo.terms import Terms

# --- Hysteresis: when a new plan is worth the switch

WORTH = 0.10  # share by which a new plan has to be faster than the old one is now
CHANGED = 1.4  # factor by which a node or link must stray from the expected time
FOR_ROUNDS = 3  # least rounds between two mitigations


def worth_switching(old_s: float, new_s: float) -> bool:
    """Whether a plan that takes `new_s` replaces one that takes `old_s` on the links as they are now."""
    return new_s < (1.0 - WORTH) * old_s


# --- Bits and steps of each node, chosen together so that rounds end at the same time
#
# DyLU (arXiv 2401.09135) gives every node steps in proportion to its speed, H·v/v_max. Here the time on the link counts
# too: a node that sends slowly first sends fewer bits, and only then does fewer steps.

WORTH_A_CHANGE = 0.8  # share of its DyLU steps that a node should keep; else fewer bits are tried
HIDDEN = 0.2  # share of the round that a transfer may always take
MAX_RATIO = 4.0  # between the most and the least steps of two nodes, to bound how far they drift apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    step_s: float  # of one inner step
    bytes_per_s: float  # to the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    bits: int
    h: int
    round_s: float  # its steps and its transfer


def dylu_h(h: int, step_s: float, fastest_step_s: float) -> int:
    """⌊H·v/v_max⌋, at least 1."""
    return max(1, math.floor(h * fastest_step_s / step_s))


def choose(
    paces: Sequence[Pace], *, h: int, parameters: float, bits: Sequence[int], min_h: int = 1, overlap: bool = False
) -> tuple[Rate, ...]:
    """Bits and steps per node, so that all rounds take T* = H·τ_fast + comm_fast at the most bits.

    Takes the most bits that keep WORTH_A_CHANGE of a node's DyLU steps, or whose transfer takes at most HIDDEN of T*;
    else the fewest, which keep the most steps. `overlap`: nodes train during a transfer, so only its excess over their
    steps counts.
    """
    fast = min(pace.step_s for pace in paces)
    most = max(bits)
    fastest = max((pace for pace in paces if pace.step_s == fast), key=lambda pace: pace.bytes_per_s)
    goal = h * fast + (0.0 if overlap else _seconds(parameters, most, fastest))
    found = []
    for pace in paces:
        wanted = WORTH_A_CHANGE * dylu_h(h, pace.step_s, fast)
        for own in sorted(bits, reverse=True):
            comm = _seconds(parameters, own, pace)
            steps = max(min_h, steps_within(pace, goal, parameters, own, overlap=overlap))
            if (comm <= goal and steps >= wanted) or comm <= HIDDEN * goal:
                break
        found.append(Rate(bits=own, h=steps, round_s=round_s(pace, steps, parameters, own, overlap=overlap)))
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


def round_s(pace: Pace, h: int, parameters: float, bits: int, *, overlap: bool = False) -> float:
    """Seconds of h steps and of a transfer, which `overlap` hides as far as there are steps."""
    comm = _seconds(parameters, bits, pace)
    return max(h * pace.step_s, comm) if overlap else h * pace.step_s + comm


def _seconds(parameters: float, bits: int, pace: Pace) -> float:
    return parameters * bits / 8.0 / pace.bytes_per_s


# --- Fewer bits or steps for a slow node

BITS = (8, 4, 2)  # bits per parameter that a node may send


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    node: str
    bits: int
    h: int  # its own steps between two syncs
    round_s: float  # predicted round with the present terms: that of the slowest node
    then_s: float  # predicted round with the advised terms
    reason: str


def lighter(
    node: str,
    paces: Mapping[str, Pace],
    *,
    h: int,
    parameters: float,
    bits: float,
    least_h: int = 1,
    overlap: bool = False,
) -> Advice | None:
    """What `choose` gives this node while the others stay as they are; None where rounds gain too little by it.

    `h`: inner steps of a round. `parameters`: that each sends in a round. `bits`: of a parameter, as it is sent now.
    `least_h`: steps that a node does at least. `overlap`: a transfer goes on while a node trains.
    """
    if node not in paces or len(paces) < 2:
        return None
    now = max(1, round(bits))
    names, menu = sorted(paces), [now, *(fewer for fewer in BITS if fewer < now)]
    chosen = choose([paces[n] for n in names], h=h, parameters=parameters, bits=menu, min_h=least_h, overlap=overlap)
    rate = chosen[names.index(node)]
    rounds = {name: round_s(pace, h, parameters, menu[0], overlap=overlap) for name, pace in paces.items()}
    own_s = round_s(paces[node], rate.h, parameters, rate.bits, overlap=overlap)
    now_s, then_s = max(rounds.values()), max({**rounds, node: own_s}.values())
    if not worth_switching(now_s, then_s):
        return None
    return Advice(
        node=node, bits=rate.bits, h=rate.h, round_s=now_s, then_s=then_s,
        reason=f"{node} at {rate.bits} bits and H = {rate.h}: rounds of {then_s:.3g} s in place of {now_s:.3g}",
    )  # fmt: skip


# --- Terms of a plan, as for `farloop run set`
#
# The run's codec has the bits of the nodes with the most; other nodes have a codec of their own. H is the run's; nodes
# that do fewer steps have a share of it.

CODEC_OF: Final[Mapping[int, str]] = {32: "fp32", 16: "bf16", 8: "q8", 4: "q4", 2: "q4r"}  # by bits of a parameter

BITS_OF: Final[Mapping[str, int]] = {
    **{"fp32": 32, "bf16": 16, "q8": 8, "q4": 4, "q4r": 2},
    **{"e3m0": 4, "e2m1": 4, "nf4": 4, "lattice": 4},
}
"""Nominal bits per parameter of the codecs that have as many for every tensor: a plan deals in no others. The planner
loads no torch and cannot ask the codecs."""


class NotInPlace(Exception):
    """Why these rates cannot be set, as a sentence."""


def settings(run: Mapping[str, Any], rates: Mapping[str, Rate], h: int) -> dict[str, str]:
    """Keys and values for `farloop run set`, in the order of a line; empty where the run has these rates. `run`: of a
    coordinator's status. `rates`: by node. `h`: inner steps between two syncs that they were chosen for.
    Raises NotInPlace: the run has no such codecs, or cannot have rounds of unequal nodes."""
    if not rates:
        return {}
    if run["method"] == "data-parallel":
        raise NotInPlace("data-parallel runs with fp32 and a step per round: these rates are for another method")
    if bits_of(run["codec_up"]) is None:
        *others, last = CODEC_OF.values()
        known = f"{', '.join(others)} or {last}"
        raise NotInPlace(f"the run sends by {run['codec_up']}, whose bits no plan chooses: take {known}")
    if odd := sorted({rate.bits for rate in rates.values()} - CODEC_OF.keys()):
        raise NotInPlace(f"there is no codec of {odd[0]} bits; [plan] bits can be {', '.join(map(str, CODEC_OF))}")
    words: dict[str, str] = {}
    most = max(rate.bits for rate in rates.values())
    codec_up = run["codec_up"] if bits_of(run["codec_up"]) == most else CODEC_OF[most]
    if codec_up != run["codec_up"]:
        words["codec_up"] = codec_up
    if h != run["h"]:
        words["h"] = str(h)
    own_codecs, own_shares = run.get("codec_up_of", {}), run.get("h_share_of", {})
    for node, rate in sorted(rates.items()):
        if bits_of(own_codecs.get(node, codec_up)) != rate.bits:
            words[f"codec_up_of.{node}"] = "none" if rate.bits == most else CODEC_OF[rate.bits]
        steps = h if "stages" in run else min(rate.h, h)  # those of a cut model are one another's
        if steps_by_share(h, own_shares.get(node, 1.0)) != steps:
            words[f"h_share_of.{node}"] = "none" if steps == h else share_text(steps, h)
    return words


def settings_of(advice: Advice, terms: Terms, h: int, *, in_stages: bool) -> dict[str, str]:
    """As `settings` for one node's advice, in rounds of h steps; bits alone if the model is cut into stages.

    Raises NotInPlace: no other codec than the node's own has these bits.
    """
    words: dict[str, str] = {}
    node, codec = advice.node, terms.codec_of(NodeId(advice.node))
    own = bits_of(codec)
    if own is not None and own != advice.bits:
        if advice.bits not in CODEC_OF:
            raise NotInPlace(f"there is no codec of {advice.bits} bits")
        words[f"codec_up_of.{node}"] = CODEC_OF[advice.bits]
    if not in_stages and steps_by_share(h, dict(terms.schedule.h_share_of).get(NodeId(node), 1.0)) != advice.h:
        words[f"h_share_of.{node}"] = share_text(advice.h, h)
    if not words:
        raise NotInPlace(f"{node} sends by {codec}, and no other codec or share of the steps is to be had for it")
    return words


def bits_of(codec: str) -> int | None:
    """Nominal bits per parameter; None for codecs that are not chosen by bits."""
    return BITS_OF.get(codec.partition(":")[0])


def share_text(steps: int, h: int) -> str:
    """The shortest share that gives this many of h steps."""
    rounded_up = (f"{-(-steps * 10**digits // h) / 10**digits:.{digits}f}" for digits in range(1, 17))
    return next(text for text in rounded_up if float(text) < 1.0 and steps_by_share(h, float(text)) == steps)
