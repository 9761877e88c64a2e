"""Ranks, and who shares a collective with whom: Holmes' layout (arXiv 2312.03549).

Ranks are sorted by the kind of their network card and cut into a mesh of p pipeline stages, d replicas and t tensor
shards, tensor fastest. A stage is d·t consecutive ranks, so that its data-parallel groups have one kind of card
wherever every kind has a multiple of d·t ranks; only pipeline edges cross kinds.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from farloop.coordinator.routing.inventory import CardKind

Kind = TypeVar("Kind", bound=Hashable)


class Transport(StrEnum):
    """What the collectives of a group may use."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    SOCKET = "socket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Groups of physical ranks; every rank stands in one of each sort."""

    tensor: tuple[tuple[int, ...], ...]
    data: tuple[tuple[int, ...], ...]
    pipeline: tuple[tuple[int, ...], ...]


def logical_order(kinds: Sequence[Kind], preference: Sequence[Kind]) -> tuple[int, ...]:
    """Physical ranks by (place of their kind in `preference`, rank): the logical rank is the place in this order.

    Raises:
        ValueError: a kind that `preference` does not name.
    """
    place = {kind: index for index, kind in enumerate(preference)}
    if unknown := next((kind for kind in kinds if kind not in place), None):
        raise ValueError(f"there is no {unknown!r} in the order of kinds; it has {', '.join(map(str, preference))}")
    return tuple(sorted(range(len(kinds)), key=lambda rank: (place[kinds[rank]], rank)))


def mesh(kinds: Sequence[Kind], preference: Sequence[Kind], *, t: int, p: int, d: int) -> Mesh:
    """The groups of t·p·d ranks.

    Logical rank r has the coordinates pp = r // (d·t), dp = (r // t) mod d, tp = r mod t.

    Raises:
        ValueError: t·p·d is not the number of ranks.
    """
    if min(t, p, d) < 1 or t * p * d != len(kinds):
        raise ValueError(f"t·p·d = {t}·{p}·{d} = {t * p * d}; there are {len(kinds)} ranks, it has to be as many")
    at = logical_order(kinds, preference)
    block = d * t
    return Mesh(
        tensor=tuple(tuple(at[first : first + t]) for first in range(0, len(at), t)),
        data=tuple(
            tuple(at[stage * block + k * t + shard] for k in range(d)) for stage in range(p) for shard in range(t)
        ),
        pipeline=tuple(
            tuple(at[stage * block + replica * t + shard] for stage in range(p))
            for replica in range(d)
            for shard in range(t)
        ),
    )


def transport(kinds: Sequence[CardKind]) -> Transport:
    """RDMA when all ranks of a group have the same RDMA fabric, sockets otherwise."""
    fabrics = {kind.fabric for kind in kinds}
    if len(fabrics) > 1 or not fabrics:
        return Transport.SOCKET
    match fabrics.pop():
        case CardKind.INFINIBAND:
            return Transport.INFINIBAND
        case CardKind.ROCE_V2 | CardKind.ROCE_V1:
            return Transport.ROCE
        case _:
            return Transport.SOCKET


def blocks(order: Sequence[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Logical ranks cut into stages of consecutive ones; where they do not divide, the first stages get one more."""
    size, more = divmod(len(order), stages)
    found, first = [], 0
    for stage in range(stages):
        last = first + size + (stage < more)
        found.append(tuple(order[first:last]))
        first = last
    return tuple(found)
