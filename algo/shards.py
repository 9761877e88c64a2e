"""Which rank keeps which elements of a fragment, where a node's model is sharded over its ranks, and what moves.

Every rank holds a *box* of a tensor: what its shard covers, the same one on several ranks where they are replicas.
Every element of a fragment lies in one *range*: its rank encodes it and keeps its anchor. Before a rank encodes, the
elements that it keeps and does not hold move to it; a merge moves the new weights back to every rank that holds them.

A pure function of the layout and the boxes, which all ranks know: they need not negotiate. All of it is arithmetic on
numbers; `farloop.node.model.shards` reads the boxes from a module and moves tensors.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from farloop.algo.spec import TENSOR_ALIGN, Fragment, TensorSlot

_SHARED_BLOCKS = 64
"""Blocks of 256 a replica from which replicas share a box. Smaller ones are one rank's: each part costs a call."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of one tensor that one rank holds: its first index and its extent in every dimension."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """The elements [start, stop) of a fragment that one rank keeps, all of one tensor and the padding behind it."""

    rank: int
    tensor: int  # its place in `Fragment.tensors`
    start: int  # a multiple of 256, as `stop`, so that no block of a codec belongs to two ranks
    stop: int


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a fragment's tensor that `holder` holds and `keeper` keeps; they may be one rank.

    It moves to the keeper where `up` is True: of several holders one sends. It moves back to every holder.
    """

    keeper: int
    holder: int
    up: bool
    tensor: int  # its place in `Fragment.tensors`
    offset: tuple[int, ...]  # in that slot, so counted from its first row
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What one rank keeps of a fragment."""

    fragment: Fragment
    """Its ranges one after the other, as a fragment of their own: a tensor is the flat piece of one, with a name of its
    own, and padding is where it is in the whole."""
    runs: tuple[tuple[int, int, int], ...]  # (first element in the whole, first in the part, count), in order


Boxes = Mapping[str, Sequence[Box]]  # by the name of the tensor; ranks that hold nothing of it are left out


def check_cover(name: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raises ValueError unless every element is in a box, and boxes that overlap are equal."""
    distinct = {(box.offset, box.shape): box for box in boxes}
    for (offset, extent), box in distinct.items():
        ends = [first + count for first, count in zip(offset, extent, strict=True)]
        if len(offset) != len(shape) or any(end > whole for end, whole in zip(ends, shape, strict=True)):
            raise ValueError(f"rank {box.rank} holds {_span(box)} of {name!r}, whose shape is {tuple(shape)}")
    for one, other in combinations(distinct.values(), 2):
        if _common(one, other.offset, other.shape) is not None:
            raise ValueError(
                f"ranks {one.rank} and {other.rank} hold overlapping parts of {name!r}: {_span(one)} and {_span(other)}"
            )
    held = sum(math.prod(box.shape) for box in distinct.values())
    if held != math.prod(shape):
        raise ValueError(f"the ranks hold {held} of the {math.prod(shape)} elements of {name!r} together")


def ranges_of(fragments: Iterable[Fragment], boxes: Boxes) -> dict[int, tuple[Range, ...]]:
    """Who keeps what, by fragment, in order.

    Where boxes are contiguous in the flat tensor, a block of 256 belongs to a rank that holds its first element, so
    less than a block moves at a seam; replicas share a large box, and of a small one the rank with least so far has it
    all. Other tensors (columns, two dimensions) are dealt out in equal parts, and what lies elsewhere moves.
    """
    loads: dict[int, int] = {}
    found: dict[int, tuple[Range, ...]] = {}
    for fragment in fragments:
        ranges = list[Range]()
        for number, slot in enumerate(fragment.tensors):
            for rank, first, last in _dealt(slot, boxes_in(slot, boxes[slot.name]), loads):
                start, stop = (slot.offset + block * TENSOR_ALIGN for block in (first, last))
                ranges.append(Range(rank=rank, tensor=number, start=start, stop=stop))
                loads[rank] = loads.get(rank, 0) + stop - start
        found[fragment.index] = tuple(ranges)
    return found


def moves_of(fragment: Fragment, boxes: Boxes, ranges: Iterable[Range], me: int) -> Iterator[Move]:
    """All moves from or to rank `me`, and those that stay on it, in an order that both sides share."""
    ranges = tuple(ranges)
    for number, slot in enumerate(fragment.tensors):
        groups = _groups(boxes_in(slot, boxes[slot.name]))
        for kept in ranges:
            near = [(box, ranks) for box, ranks in groups if kept.rank == me or me in ranks]
            if kept.tensor != number or not near:
                continue
            stop = min(kept.stop - slot.offset, slot.numel)
            for offset, shape in _slabs(slot.shape, kept.start - slot.offset, stop):
                for box, ranks in near:
                    if (common := _common(box, offset, shape)) is None:
                        continue
                    sender = kept.rank if kept.rank in ranks else ranks[kept.rank % len(ranks)]
                    for holder in ranks if kept.rank == me else [me]:
                        yield Move(kept.rank, holder, holder == sender, number, *common)


def part_of(fragment: Fragment, ranges: Iterable[Range], rank: int) -> OwnPart:
    """What `rank` keeps of the fragment."""
    slots, runs = list[TensorSlot](), list[tuple[int, int, int]]()
    at = 0
    for kept in ranges:
        if kept.rank != rank:
            continue
        slot = fragment.tensors[kept.tensor]
        held = min(kept.stop, slot.offset + slot.numel) - kept.start
        slots.append(TensorSlot(name=f"{kept.tensor}:{slot.name}", shape=(held,), offset=at))
        if runs and sum(runs[-1][::2]) == kept.start:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + kept.stop - kept.start)
        else:
            runs.append((kept.start, at, kept.stop - kept.start))
        at += kept.stop - kept.start
    whole = Fragment(index=fragment.index, slot=fragment.slot, numel=at, tensors=tuple(slots), stage=fragment.stage)
    return OwnPart(fragment=whole, runs=tuple(runs))


def boxes_in(slot: TensorSlot, boxes: Iterable[Box]) -> list[Box]:
    """The boxes cut to the rows that the slot covers of its tensor, and counted from its first one."""
    if slot.rows is None:
        return list(boxes)
    first, shape = slot.rows[0], slot.shape
    cut = ((box.rank, _common(box, (first, *(0 for _ in shape[1:])), shape)) for box in boxes)
    return [Box(rank, (common[0][0] - first, *common[0][1:]), common[1]) for rank, common in cut if common is not None]


def _dealt(slot: TensorSlot, boxes: Sequence[Box], loads: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """(rank, first block of 256, the one after its last) over all of the slot."""
    blocks = -(-slot.numel // TENSOR_ALIGN)
    groups = _groups(boxes)
    starts = [_flat_start(slot.shape, box) for box, _ in groups]
    if any(start is None for start in starts):
        yield from _shared(sorted(box.rank for box in boxes), 0, blocks)
        return
    ordered = sorted((start or 0, ranks) for start, (_, ranks) in zip(starts, groups, strict=True))
    cuts = [-(-start // TENSOR_ALIGN) for start, _ in ordered]
    for (first, last), (_, ranks) in zip(pairwise([*cuts, blocks]), ordered, strict=True):
        if last - first < _SHARED_BLOCKS * len(ranks):
            ranks = [min(ranks, key=lambda rank: (loads.get(rank, 0), rank))]
        yield from _shared(ranks, first, last)


def _shared(ranks: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    bounds = [first + (last - first) * number // len(ranks) for number in range(len(ranks) + 1)]
    for rank, (start, stop) in zip(ranks, pairwise(bounds), strict=True):
        if start < stop:
            yield rank, start, stop


def _groups(boxes: Iterable[Box]) -> list[tuple[Box, list[int]]]:
    """Every distinct box with the ranks that hold it, by its offset."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Box, list[int]]] = {}
    for box in sorted(boxes, key=lambda box: (box.offset, box.rank)):
        found.setdefault((box.offset, box.shape), (box, []))[1].append(box.rank)
    return list(found.values())


def _flat_start(shape: Sequence[int], box: Box) -> int | None:
    """The box's first element in the flat tensor; None: its elements are not side by side there."""
    split = next((d for d, (own, whole) in enumerate(zip(box.shape, shape, strict=True)) if own != 1), len(shape))
    if any(own != whole for own, whole in zip(box.shape[split + 1 :], shape[split + 1 :], strict=True)):
        return None
    start = 0
    for first, whole in zip(box.offset, shape, strict=True):
        start = start * whole + first
    return start


def _slabs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements [start, stop) of the flat tensor as boxes, (offset, shape), in order: rows that are there in part,
    and the whole ones between them."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    pieces = [(first, head, tail)] if first == last else [(first, head, row)] if head else []
    for at, low, high in pieces:
        yield from (((at, *offset), (1, *extent)) for offset, extent in _slabs(shape[1:], low, high))
    if first == last:
        return
    if (begin := first + bool(head)) < last:
        yield (begin, *(0 for _ in shape[1:])), (last - begin, *shape[1:])
    yield from (((last, *offset), (1, *extent)) for offset, extent in _slabs(shape[1:], 0, tail))


def _common(box: Box, offset: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and shape of what a box shares with another; None: nothing."""
    first, extent = list[int](), list[int]()
    for a, n, b, m in zip(box.offset, box.shape, offset, shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        first.append(low)
        extent.append(high - low)
    return tuple(first), tuple(extent)


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{first}:{first + count}" for first, count in zip(box.offset, box.shape, strict=True)) + "]"
