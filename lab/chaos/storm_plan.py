"""The faults of a storm and their times, drawn from a seed before the storm begins."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

Kind = Literal[
    "kill_node",
    "kill_coordinator",
    "stop_node",
    "stop_coordinator",
    "cut_link",
    "slow_link",
    "fill_disk",
    "slow_joiner",
    "silent_peer",
    "lying_peer",
    "descriptor_flood",
    "second_start",
    "truncate_file",
    "store_away",
    "store_slow",
    "store_refuses",
    "store_cuts",
    "store_silent",
    "store_spoils",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

COORDINATOR: Final = "coordinator"
DISK: Final = "disk"
JOINER: Final = "joiner"
STRANGER: Final = "stranger"
FLOOD: Final = "flood"
STORE: Final = "store"

OF_STORE: Final[dict[Kind, str]] = {
    "store_away": "away",
    "store_slow": "",
    "store_refuses": "403",
    "store_cuts": "cut",
    "store_silent": "lost",
    "store_spoils": "spoil",
}
"""What `bench/http_store.py` does to every request, in a storm whose deltas and updates go by it."""

OF_NODES: Final[frozenset[Kind]] = frozenset({"kill_node", "stop_node", "cut_link", "slow_link"})
"""Kinds whose target is a node, or its link."""

_OTHERS: Final[dict[Kind, str]] = {
    "fill_disk": DISK,
    "slow_joiner": JOINER,
    "silent_peer": STRANGER,
    "lying_peer": STRANGER,
    "descriptor_flood": FLOOD,
    **dict.fromkeys(OF_STORE, STORE),
}
"""Targets of the kinds that hit neither a node nor the coordinator's process."""

EVERY_S: Final = (3.0, 7.0)  # between two faults
SETTLE_S: Final = 6.0  # after a fault its target is left alone for this long: about what a process takes to start

_DECK: Final[dict[Kind, tuple[int, tuple[float, float]]]] = {
    "kill_node": (4, (0.5, 6.0)),
    "kill_coordinator": (2, (0.5, 4.0)),
    "stop_node": (2, (1.0, 14.0)),  # on both sides of the liveness time-out of 10 s, as are the next two
    "stop_coordinator": (1, (1.0, 14.0)),
    "cut_link": (2, (1.0, 14.0)),
    "slow_link": (1, (5.0, 15.0)),
    "fill_disk": (1, (3.0, 10.0)),
    "slow_joiner": (1, (15.0, 30.0)),
    "silent_peer": (2, (8.0, 20.0)),
    "lying_peer": (2, (8.0, 20.0)),
    "descriptor_flood": (1, (8.0, 20.0)),
    "second_start": (1, (10.0, 16.0)),
    "truncate_file": (1, (0.5, 4.0)),
    **dict.fromkeys(OF_STORE, (1, (3.0, 15.0))),
}
"""How often each kind comes in a deck, which is dealt to its end before the next is shuffled, so that all come soon;
and the least and the most seconds from a fault to its end, when a killed process is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, in seconds from the storm's begin."""

    at_s: float
    kind: Kind
    target: str
    lasts_s: float


def plan(seed: int, *, seconds: float, nodes: Sequence[str], kinds: Collection[Kind] = KINDS) -> list[Fault]:
    """The faults of a storm, in the order of their begin; all end within it.

    No target has two at a time, and one node at least is left alone at any time: there are always survivors.
    """
    dice = random.Random(f"farloop storm {seed}")
    free_at = dict.fromkeys([*nodes, COORDINATOR, *_OTHERS.values()], 0.0)
    faults: list[Fault] = []
    deck: list[Kind] = []
    at = 0.0
    while True:
        at += dice.uniform(*EVERY_S)
        if at >= seconds - 1.0:
            return faults
        if not deck:
            deck = [kind for kind in KINDS if kind in kinds for _ in range(_DECK[kind][0])]
            dice.shuffle(deck)
        card = next((i for i, kind in enumerate(deck) if _targets(kind, nodes, free_at, at)), None)
        if card is None:
            continue
        kind = deck.pop(card)
        target = dice.choice(_targets(kind, nodes, free_at, at))
        lasts = min(dice.uniform(*_DECK[kind][1]), seconds - at)
        faults.append(Fault(at_s=at, kind=kind, target=target, lasts_s=lasts))
        free_at[target] = at + lasts + SETTLE_S


def _targets(kind: Kind, nodes: Sequence[str], free_at: dict[str, float], at: float) -> list[str]:
    """The targets that this fault may hit now."""
    if kind in OF_NODES:
        free = [name for name in nodes if free_at[name] <= at]
        return free if len(free) > 1 else []
    name = _OTHERS.get(kind, COORDINATOR)
    return [name] if free_at[name] <= at else []
