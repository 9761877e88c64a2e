"""Fewer bits or fewer steps for one node that has become slow, where that makes the run's rounds shorter. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farloop.coordinator.routing.hysteresis import worth_switching
from farloop.coordinator.routing.rates import Pace, choose, round_s

BITS = (8, 4, 2)
"""Of a parameter, that a node may send at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Terms of one node, and what they would come to."""

    node: str
    bits: int
    h: int
    """Its own steps between two syncs."""
    round_s: float
    """Of the run as it goes now, predicted from what nodes take: the slowest one's."""
    then_s: float
    """... and with these terms."""
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
    """What `rates.choose` gives this node while the others stay as they are; None where rounds gain too little by it.

    Args:
        h: inner steps of a round.
        parameters: that each sends in a round.
        bits: of a parameter, as it is sent now.
        least_h: steps that a node does at least.
        overlap: a transfer goes on while a node trains.
    """
    if node not in paces or len(paces) < 2:
        return None
    names, menu = sorted(paces), _menu(bits)
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


def _menu(bits: float) -> Sequence[int]:
    """What it sends now, and less; the most first."""
    now = max(1, round(bits))
    return [now, *(fewer for fewer in BITS if fewer < now)]
