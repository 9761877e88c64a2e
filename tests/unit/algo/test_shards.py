"""Who keeps what of a sharded model: ranges cover a fragment once, and every element moves to its keeper and back."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from torch import Tensor

from farloop.algo.fragments import partition
from farloop.algo.shards import Box, Boxes, boxes_in, check_cover, moves_of, part_of, ranges_of
from farloop.algo.spec import Fragment, Layout, TensorSlot

Cut = tuple[tuple[int, int], ...]  # per dimension of a mesh: the tensor's dimension that it splits, or −1; ranks in it


def boxes_of(shape: Sequence[int], cut: Cut) -> list[Box]:
    """What each rank holds where every dimension of a mesh splits one of the tensor as `torch.chunk` does, or none."""
    found = []
    for rank, coordinate in enumerate(product(*(range(size) for _, size in cut))):
        offset, extent = [0] * len(shape), list(shape)
        for (dimension, size), place in zip(cut, coordinate, strict=True):
            if dimension < 0 or dimension >= len(shape):
                continue
            chunk = -(-extent[dimension] // size)
            low, high = (min(extent[dimension], chunk * i) for i in (place, place + 1))
            offset[dimension] += low
            extent[dimension] = high - low
        if math.prod(extent):
            found.append(Box(rank, tuple(offset), tuple(extent)))
    return found


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Layout, Boxes, int]:
    """A layout of a few tensors, large ones in parts of rows, the boxes of its tensors, and the number of ranks."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2)]))
    shapes = draw(st.lists(st.lists(st.integers(1, 14), max_size=3).map(tuple), min_size=1, max_size=4))
    if draw(st.booleans()):
        shapes.append((draw(st.integers(100, 200)), draw(st.integers(200, 400))))  # blocks enough to be shared
    named = [(f"t{number}", shape) for number, shape in enumerate(shapes)]
    layout = partition(named, pattern="whole")
    if draw(st.booleans()):
        layout = Layout(slots=1, fragments=tuple(split(layout.fragments[0], draw(st.integers(1, 9)))))
    boxes = {name: boxes_of(shape, tuple((draw(st.integers(-1, 2)), n) for n in sizes)) for name, shape in named}
    return layout, boxes, math.prod(sizes)


def split(fragment: Fragment, rows: int) -> Iterator[Fragment]:
    """One fragment with all tensors whole but the first, which lies in parts of `rows` rows, as `partition` splits."""
    slots, offset = list[TensorSlot](), 0
    for slot in fragment.tensors:
        whole = slot is not fragment.tensors[0] or not slot.shape
        for first in [0] if whole else range(0, slot.shape[0], rows):
            last = slot.shape[0] if whole and slot.shape else min(first + rows, (slot.shape or (0,))[0])
            shape = slot.shape if whole else (last - first, *slot.shape[1:])
            part = TensorSlot(name=slot.name, shape=shape, offset=offset, rows=None if whole else (first, last))
            slots.append(part)
            offset += -(-math.prod(shape) // 256) * 256
    yield Fragment(index=0, slot=0, numel=offset, tensors=tuple(slots))


def indices(slot: TensorSlot, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Of the elements of a box, in the fragment, int64."""
    every = torch.arange(slot.offset, slot.offset + slot.numel).view(slot.shape)
    for dimension, (first, count) in enumerate(zip(offset, shape, strict=True)):
        every = every.narrow(dimension, first, count)
    return every.flatten()


@given(sharded())
@settings(max_examples=examples(20))
def test_ranges_cover_a_fragment_once_in_whole_blocks(case: tuple[Layout, Boxes, int]) -> None:
    """I1."""
    layout, boxes, _ = case
    found = ranges_of(layout.fragments, boxes)
    for fragment in layout.fragments:
        ranges = found[fragment.index]
        assert [kept.start for kept in ranges] == [0, *(kept.stop for kept in ranges)][:-1]
        assert ranges[-1].stop == fragment.numel
        assert all(kept.start % 256 == kept.stop % 256 == 0 and kept.start < kept.stop for kept in ranges)
        for kept in ranges:
            slot = fragment.tensors[kept.tensor]
            assert slot.offset <= kept.start < slot.offset + slot.numel, "a range begins with an element, not padding"


@given(sharded())
@settings(max_examples=examples(20))
def test_every_element_moves_once_to_its_keeper_and_back_to_every_holder(case: tuple[Layout, Boxes, int]) -> None:
    """I2, and I3: padding is in a range and moves nowhere."""
    layout, boxes, size = case
    found = ranges_of(layout.fragments, boxes)
    for fragment in layout.fragments:
        ranges = found[fragment.index]
        keeper = torch.empty(fragment.numel, dtype=torch.int64)
        for kept in ranges:
            keeper[kept.start : kept.stop] = kept.rank
        of = [list(moves_of(fragment, boxes, ranges, me)) for me in range(size)]
        for me, other in product(range(size), repeat=2):
            pair = [[move for move in of[side] if (move.keeper, move.holder) == (me, other)] for side in (me, other)]
            assert pair[0] == pair[1], "both sides know the same moves, in the same order"
        up, back, held = (torch.zeros(size, fragment.numel, dtype=torch.int64) for _ in range(3))
        for move in (move for me in range(size) for move in of[me] if move.keeper == me):
            at = indices(fragment.tensors[move.tensor], move.offset, move.shape)
            assert bool((keeper[at] == move.keeper).all())
            up[0][at] += move.up
            back[move.holder][at] += 1
        for slot in fragment.tensors:
            for box in boxes_in(slot, boxes[slot.name]):
                held[box.rank][indices(slot, box.offset, box.shape)] += 1
        assert torch.equal(back, held), "once back to every holder, replicas too"
        assert torch.equal(up[0], (held.sum(dim=0) > 0).to(torch.int64)), "once to the keeper"


@given(sharded())
@settings(max_examples=examples(20))
def test_the_parts_of_all_ranks_are_the_fragment(case: tuple[Layout, Boxes, int]) -> None:
    """Padding is where it was (I3)."""
    layout, boxes, size = case
    found = ranges_of(layout.fragments, boxes)
    for fragment in layout.fragments:
        parts = [part_of(fragment, found[fragment.index], rank) for rank in range(size)]
        assert sum(part.fragment.numel for part in parts) == fragment.numel
        real = {i for slot in fragment.tensors for i in range(slot.offset, slot.offset + slot.numel)}
        seen = set[int]()
        for part in parts:
            place = {at + i: start + i for start, at, count in part.runs for i in range(count)}
            assert list(place) == list(range(part.fragment.numel))
            assert len({slot.name for slot in part.fragment.tensors}) == len(part.fragment.tensors)
            own = {place[i] for slot in part.fragment.tensors for i in range(slot.offset, slot.offset + slot.numel)}
            assert own == real.intersection(place.values()) and not own & seen
            seen |= own
        assert seen == real


@given(sharded())
@settings(max_examples=examples(20))
def test_one_rank_keeps_all_and_nothing_moves(case: tuple[Layout, Boxes, int]) -> None:
    """I4."""
    layout, _, _ = case
    slots = [slot for fragment in layout.fragments for slot in fragment.tensors]
    shapes = {slot.name: slot.shape if slot.rows is None else (slot.rows[1], *slot.shape[1:]) for slot in slots}
    boxes = {name: [Box(0, (0,) * len(shape), shape)] for name, shape in shapes.items()}
    for fragment in layout.fragments:
        ranges = ranges_of(layout.fragments, boxes)[fragment.index]
        assert part_of(fragment, ranges, 0).runs == ((0, 0, fragment.numel),)
        assert {(move.keeper, move.holder) for move in moves_of(fragment, boxes, ranges, 0)} == {(0, 0)}


def test_rows_move_less_than_a_block_at_a_seam_and_replicas_share_what_is_large() -> None:
    layout = partition([("rows", (331, 100)), ("copies", (512, 256)), ("bias", (7,)), ("scale", (7,))], pattern="whole")
    fragment = layout.fragments[0]
    boxes = {
        "rows": boxes_of((331, 100), ((0, 4),)),
        "copies": boxes_of((512, 256), ((-1, 4),)),
        "bias": boxes_of((7,), ((-1, 4),)),
        "scale": boxes_of((7,), ((-1, 4),)),
    }
    ranges = ranges_of(layout.fragments, boxes)[0]
    kept = [Counter[int]() for _ in fragment.tensors]
    for own in ranges:
        kept[own.tensor][own.rank] += own.stop - own.start
    assert kept[0] == {0: 8448, 1: 8192, 2: 8448, 3: 8192}
    assert kept[1] == dict.fromkeys(range(4), 512 * 64)
    assert (kept[2], kept[3]) == ({1: 256}, {3: 256}), "the ranks with least"
    moved = [move for me in range(4) for move in moves_of(fragment, boxes, ranges, me) if move.keeper == me and move.up]
    assert sum(math.prod(move.shape) for move in moved if move.keeper != move.holder) < 3 * 256


def test_columns_are_dealt_out_in_equal_parts() -> None:
    layout = partition([("columns", (64, 96))], pattern="whole")
    boxes = {"columns": boxes_of((64, 96), ((1, 3),))}
    ranges = ranges_of(layout.fragments, boxes)[0]
    assert [(own.rank, own.start, own.stop) for own in ranges] == [(0, 0, 2048), (1, 2048, 4096), (2, 4096, 6144)]
    moved = [move for move in moves_of(layout.fragments[0], boxes, ranges, 1) if move.keeper == 1 and move.up]
    assert sum(math.prod(move.shape) for move in moved) == 2048


@pytest.mark.parametrize(
    ("boxes", "error"),
    [
        (
            [Box(0, (0, 0), (3, 4)), Box(1, (2, 0), (4, 4))],
            r"ranks 0 and 1 hold overlapping parts of 'w': \[0:3, 0:4\]",
        ),
        ([Box(0, (0, 0), (3, 4))], "hold 12 of the 24 elements of 'w'"),
        ([Box(0, (0, 0), (7, 4))], r"rank 0 holds \[0:7, 0:4\] of 'w', whose shape is \(6, 4\)"),
        ([Box(0, (0,), (24,))], "whose shape is"),
        ([], "hold 0 of the 24"),
    ],
)
def test_boxes_that_do_not_make_the_tensor_are_refused(boxes: list[Box], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_cover("w", (6, 4), boxes)


def test_replicas_are_no_overlap() -> None:
    check_cover("w", (6, 4), boxes_of((6, 4), ((-1, 2), (0, 3))))
