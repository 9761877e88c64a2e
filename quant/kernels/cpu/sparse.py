"""Kernels of the formats that are not made of equal blocks; `formats/` defines what they compute.

`topk` and `randk` find a threshold that k of n words reach by halving a range, and end as soon as a probe counts k: a
probe compares 64 words at a time. Sorting all words, or a heap, would branch on every element.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import neg
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from farloop.quant.kernels.cpu.loops import largest_magnitude as largest_of
from farloop.quant.kernels.cpu.primitives import (
    INFINITY,
    MAGNITUDE,
    Kernel,
    Number,
    Numbers,
    addresses_at,
    after,
    as_halves,
    as_words,
    bits,
    bytes_at,
    count_ones,
    double_from_bits,
    doubles_at,
    equal_to,
    floats_at,
    from_bits,
    halves_at,
    inlined,
    longs_at,
    lowest_one,
    mix,
    mixed,
    on_parts,
    prefetch,
    random_words,
    reaching,
    stack_array,
    store_u16,
    to_scale,
    uniform,
    words_at,
)
from farloop.quant.packing import BF16_LARGEST

_ZERO: Number = np.uint64(0)
_ONE: Number = np.uint64(1)
_TWO, _THREE, _FOUR, _SIX, _EIGHT = np.uint64(2), np.uint64(3), np.uint64(4), np.uint64(6), np.uint64(8)

_GROUP, _GROUP_BITS = np.uint64(64), np.uint64(6)
_LEAST = np.int32(-(2**31))


@inlined
def num_reaching(values: Numbers, groups: Number, threshold: Number) -> Number:
    """How many of int32 [64 · groups] are at least the threshold, int64."""
    count = _ZERO
    for group in range(groups):
        count += count_ones(reaching(after(values, _GROUP * group), np.int32(threshold)))
    return np.int64(count)


@inlined
def fill_group(values: Numbers, length: Number) -> Number:
    """Behind int32 [length], the least number up to a multiple of 64; returns the number of groups of 64."""
    groups = (length + _GROUP - _ONE) >> _GROUP_BITS
    for i in range(length, groups << _GROUP_BITS):
        values[i] = _LEAST
    return groups


@inlined
def copy_magnitudes(magnitudes: Numbers, x: Numbers, count: Number) -> None:
    """Those of fp32 [count], as bits, int32."""
    for i in range(count):
        magnitudes[i] = np.int32(bits(x[i]) & MAGNITUDE)


# --- topk

_SIDE = np.uint64(64)  # of the squares of a matrix
_SIDE_BITS = np.uint64(6)
_LONGEST = 4096  # elements of a chunk
_STEP = np.int64(1 << 23)  # of magnitudes' bits: between a number and its half
_DIGITS = np.uint64(256)
_LARGEST_BF16 = np.int32(BF16_LARGEST)

_magnitudes = stack_array(_LONGEST, "int32")
_words = stack_array(_LONGEST, "uint32")
_doubles = stack_array(_LONGEST, "float64")
_counters = stack_array(256, "uint32")


@inlined
def sort_falling(
    magnitudes: Numbers, count: Number, largest: Number, smallest: Number, order: Numbers, spare: Numbers
) -> Numbers:
    """The order of int32 [count] from largest to smallest, equal ones as they come; `order` or `spare`, uint32."""
    # By digits of 8 bits of what each is smaller than the largest.
    counters = _counters()
    for j in range(count):
        order[j] = np.uint32(j)
    shift, span = np.uint32(0), np.uint32(largest - smallest)
    while span != np.uint32(0):
        for i in range(_DIGITS):
            counters[i] = np.uint32(0)
        for j in range(count):
            counters[digit(largest, magnitudes[j], shift)] += np.uint32(1)
        total = np.uint32(0)
        for i in range(_DIGITS):
            here = counters[i]
            counters[i] = total
            total = np.uint32(total + here)
        for j in range(count):
            i = digit(largest, magnitudes[np.uint64(order[j])], shift)
            spare[np.uint64(counters[i])] = order[j]
            counters[i] += np.uint32(1)
        order, spare = spare, order
        shift = np.uint32(shift + np.uint32(8))
        span = np.uint32(span >> np.uint32(8))
    return order


@inlined
def digit(largest: Number, magnitude: Number, shift: Number) -> Number:
    return np.uint64((np.uint32(largest - magnitude) >> shift) & np.uint32(255))


def topk_chunks(
    x_address: Number,
    start: Number,
    length: Number,
    columns: Number,
    k: Number,
    levels_address: Number,
    index_address: Number,
    values_address: Number,
    begin: Number,
    end: Number,
) -> Number:
    # Chunks [begin, end) of those from element `start` on; squares of a matrix if it has columns. Returns the first
    # chunk with a number that is not finite.
    x = floats_at(x_address)
    levels = bytes_at(levels_address)
    index = halves_at(index_address)
    values = bytes_at(values_address)
    magnitudes, kept, order, spare = _magnitudes(), _magnitudes(), _words(), _words()
    top, score = _doubles(), _doubles()
    across = columns >> _SIDE_BITS
    for chunk in range(begin, end):
        first = start + chunk * length
        pitch = _SIDE
        if columns != _ZERO:
            first = start + (chunk // across) * (_SIDE * columns) + (chunk % across) * _SIDE
            pitch = columns
            for row in range(_SIDE):
                copy_magnitudes(after(magnitudes, row * _SIDE), after(x, first + row * columns), _SIDE)
        else:
            copy_magnitudes(magnitudes, after(x, first), length)
        largest = np.int32(0)
        for i in range(length):
            largest = max(largest, magnitudes[i])
        if largest >= INFINITY:
            return np.int64(chunk)
        groups = fill_group(magnitudes, length)
        # num_reaching(low) ≥ k > num_reaching(high) = above
        low, high, step = np.int64(0), np.int64(largest) + 1, _STEP
        above, at_low = np.int64(0), np.int64(length)
        while high - low > 1 and at_low > np.int64(k):
            middle = max((low + high) >> 1, high - step)
            step = step + step
            count = num_reaching(magnitudes, groups, middle)
            if count >= np.int64(k):
                low, at_low = middle, count
            else:
                high, above = middle, count
        # All above `low`, and the first of those that equal it.
        ties = at_low if at_low == np.int64(k) else np.int64(k) - above
        threshold, found = np.int32(low), _ZERO
        for group in range(groups):
            mask = reaching(after(magnitudes, _GROUP * group), threshold)
            while mask != _ZERO:
                at = _GROUP * group + lowest_one(mask)
                mask = mask & (mask - _ONE)
                equal = np.int64(magnitudes[at] == threshold)
                if equal <= ties:
                    ties -= equal
                    order[found] = np.uint32(at)
                    found += _ONE
        place = after(index, chunk * k)
        value = after(values, chunk * k)
        for j in range(k):
            at = np.uint64(order[j])
            kept[j] = magnitudes[at]
            place[j] = np.uint16(at)
            value[j] = np.uint8(x[first + (at >> _SIDE_BITS) * pitch + (at & (_SIDE - _ONE))] < np.float32(0.0))
        order_of = sort_falling(kept, k, largest, threshold, order, spare)
        # In units of 2⁻²³ of the largest one's power of two: whole numbers up to 2²⁴, with exact sums.
        exponent = np.int64(max(largest >> 23, np.int32(1)))
        unit = power_of_two(np.int64(150) - exponent)
        total = np.float64(0.0)
        for j in range(k):
            total += np.rint(np.float64(from_bits(kept[np.uint64(order_of[j])])) * unit)
            top[j] = total
        for j in range(k):
            rest = total - top[j]
            s = np.float64(np.int64(j) + 1)
            others = max(np.float64(np.int64(k)) - s, np.float64(1.0))
            score[j] = top[j] * top[j] / s + rest * rest / others
        split, best = _ZERO, score[_ZERO]
        for j in range(k):
            if score[j] > best:
                split, best = j, score[j]
        for j in range(split + _ONE):
            value[np.uint64(order_of[j])] |= np.uint8(2)
        s = np.float64(np.int64(split) + 1)
        small = (total - top[split]) / max(np.float64(np.int64(k)) - s, np.float64(1.0))
        back = power_of_two(exponent - np.int64(150))
        store_u16(levels, _FOUR * chunk, np.uint16(to_scale(np.float32(small * back), _LARGEST_BF16)))
        store_u16(levels, _FOUR * chunk + _TWO, np.uint16(to_scale(np.float32(top[split] / s * back), _LARGEST_BF16)))
    return np.int64(-1)


@inlined
def power_of_two(exponent: Number) -> Number:
    """2^exponent, fp64, of an int64."""
    return double_from_bits((exponent + np.int64(1023)) << np.int64(52))


def pack_entries(
    index_address: Number,
    values_address: Number,
    packed_index_address: Number,
    packed_values_address: Number,
    begin: Number,
    end: Number,
) -> Number:
    # Four entries each: six bytes of places, one of values.
    index = halves_at(index_address)
    values = bytes_at(values_address)
    packed_index = bytes_at(packed_index_address)
    packed_values = bytes_at(packed_values_address)
    for four in range(begin, end):
        place, value, out = after(index, _FOUR * four), after(values, _FOUR * four), after(packed_index, _SIX * four)
        for pair in range(_TWO):
            a, b = np.uint32(place[_TWO * pair]), np.uint32(place[_TWO * pair + _ONE])
            out[_THREE * pair] = np.uint8(a)
            out[_THREE * pair + _ONE] = np.uint8((a >> np.uint32(8)) | (b << np.uint32(4)))
            out[_THREE * pair + _TWO] = np.uint8(b >> np.uint32(4))
        packed_values[four] = np.uint8(value[_ZERO] | value[_ONE] << 2 | value[_TWO] << 4 | value[_THREE] << 6)
    return np.int64(-1)


TOPK = Kernel("topk", "int64(" + ", ".join(["uint64"] * 10) + ")", topk_chunks)
PACK = Kernel("topk_pack", "int64(" + ", ".join(["uint64"] * 6) + ")", pack_entries)


def largest(
    x: Tensor, start: int, count: int, length: int, columns: int, levels: Tensor, index: Tensor, values: Tensor
) -> bool:
    """Whether all elements of `count` chunks of x fp32 from element `start` on are finite; if so, of each chunk its
    magnitudes, levels uint8 [4·count], the places, index int16 [k·count], and their values uint8 [k·count].

    `columns` is that of a matrix that is cut into squares, or 0.
    """
    loop, k = TOPK.compiled(), index.numel() // count
    assert start + count * length <= x.numel() and length <= _LONGEST
    how = (x.data_ptr(), start, length, columns, k, levels.data_ptr(), index.data_ptr(), values.data_ptr())
    return on_parts(lambda first, last: loop(*how, first, last), num_blocks=count, block=length) < 0


def packed_entries(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """index int16 [4·n], values uint8 [4·n] → uint8 [6·n] and uint8 [n]."""
    count = values.numel() // 4
    places = torch.empty(6 * count, dtype=torch.uint8, device="cpu")
    bits2 = torch.empty(count, dtype=torch.uint8, device="cpu")
    PACK.compiled()(index.data_ptr(), values.data_ptr(), places.data_ptr(), bits2.data_ptr(), 0, count)
    return places, bits2


# --- randk

_DRAWN_FROM = 256  # elements of a block
_FLIPPED = np.int32(2**31 - 1)
_lots = stack_array(_DRAWN_FROM, "int32")


def draw(
    start: Number, length: Number, k: Number, seed: Number, places_address: Number, begin: Number, end: Number
) -> Number:
    # Of blocks [begin, end) from element `start` on: the k of `length` elements with the smallest words. No two words
    # of a block are equal, because a word is a bijection of the counter.
    places = addresses_at(places_address)
    lots = _lots()
    for block in range(begin, end):
        first = start + block * length
        random_words(as_words(lots), length, first << _ONE, seed)
        for i in range(length):
            lots[i] = np.int32(lots[i] ^ _FLIPPED)  # signed, and from largest to smallest
        groups = fill_group(lots, length)
        # num_reaching(low) ≥ k > num_reaching(high)
        low, high, at_low = np.int64(_LEAST), np.int64(2**31), np.int64(length)
        while at_low > np.int64(k):
            middle = (low + high) >> 1
            count = num_reaching(lots, groups, middle)
            if count >= np.int64(k):
                low, at_low = middle, count
            else:
                high = middle
        found, out = _ZERO, after(places, block * k)
        for group in range(groups):
            mask = reaching(after(lots, _GROUP * group), np.int32(low))
            while mask != _ZERO and found < k:
                out[found] = _GROUP * group + lowest_one(mask)
                found += _ONE
                mask &= mask - _ONE
    return np.int64(-1)


DRAW = Kernel("randk", "int64(uint64, uint64, uint64, uint32, uint64, uint64, uint64)", draw)


def drawn(start: int, count: int, length: int, k: int, seed: int) -> Tensor:
    """Rising places inside each of `count` blocks of `length` elements from `start` on, int64 [count, k]."""
    assert length <= _DRAWN_FROM
    places = torch.empty(count, k, dtype=torch.int64, device="cpu")
    loop, how = DRAW.compiled(), (start, length, k, seed & 0xFFFFFFFF, places.data_ptr())
    on_parts(lambda first, last: loop(*how, first, last), num_blocks=count, block=length)
    return places


# --- sketch

_ROWS = 3
_PIECE_LENGTH = 4096  # elements whose places are collected at a time
_PIECE = np.uint64(_PIECE_LENGTH)
_THREE_ROWS = np.uint64(_ROWS)
_SIGN_BIT, _CELL_BITS = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_ROW_SHIFT, _MEMBER_BITS = np.uint32(30), np.uint32((1 << 30) - 1)


def largest_bits(x_address: Number, length: Number, begin: Number, end: Number) -> Number:
    # Of the magnitudes of pieces [begin, end); the last one may be shorter.
    first = begin * _PIECE
    return np.int64(largest_of(after(floats_at(x_address), first), min(end * _PIECE, length) - first))


def count_in_pieces(
    x_address: Number, length: Number, high: Number, low: Number, counts_address: Number, begin: Number, end: Number
) -> Number:
    # How many magnitudes, as bits, of each piece are at least `high`, and at least `low`.
    x = floats_at(x_address)
    counts = addresses_at(counts_address)
    for piece in range(begin, end):
        above, count = np.int32(0), np.int32(0)
        for i in range(piece * _PIECE, min((piece + _ONE) * _PIECE, length)):
            magnitude = np.int32(bits(x[i]) & MAGNITUDE)
            above = np.int32(above + np.int32(magnitude >= np.int32(high)))
            count = np.int32(count + np.int32(magnitude >= np.int32(low)))
        counts[_TWO * piece], counts[_TWO * piece + _ONE] = np.uint64(above), np.uint64(count)
    return np.int64(-1)


def collect(
    x_address: Number,
    length: Number,
    high: Number,
    low: Number,
    first_address: Number,
    between_address: Number,
    kept_address: Number,
    begin: Number,
    end: Number,
) -> Number:
    # The places of all magnitudes of at least `high`, and in each piece so many of those between that and `low`.
    x = floats_at(x_address)
    firsts, betweens, kept = addresses_at(first_address), addresses_at(between_address), addresses_at(kept_address)
    magnitudes = _magnitudes()
    for piece in range(begin, end):
        start = piece * _PIECE
        count = min(_PIECE, length - start)
        copy_magnitudes(magnitudes, after(x, start), count)
        found, between = firsts[piece], betweens[piece]
        for group in range(fill_group(magnitudes, count)):
            values = after(magnitudes, _GROUP * group)
            mask = reaching(values, np.int32(high))
            rest = reaching(values, np.int32(low)) & ~mask
            if count_ones(rest) <= between:
                between -= count_ones(rest)
                mask = mask | rest
            else:
                while between != _ZERO:
                    mask = mask | (rest & ~(rest - _ONE))
                    rest = rest & (rest - _ONE)
                    between -= _ONE
            while mask != _ZERO:
                kept[found] = start + _GROUP * group + lowest_one(mask)
                found += _ONE
                mask = mask & (mask - _ONE)
    return np.int64(-1)


def hash_cells(
    kept_address: Number, count: Number, width: Number, seeds_address: Number, cells_address: Number, begin: Number,
    end: Number,
) -> Number:  # fmt: skip
    # In each row the cell of every element, below 2³¹, and 2³¹ if its sign is negative.
    kept, cells, seeds = addresses_at(kept_address), words_at(cells_address), words_at(seeds_address)
    for row in range(_THREE_ROWS):
        shift, cell = mix(seeds[row]), after(cells, row * count)
        for i in range(begin, end):
            word = mixed(np.uint32(kept[i]), shift)
            cell[i] = np.uint32(
                ((np.uint64(word & _CELL_BITS) * np.uint64(np.uint32(width))) >> _CELL_SHIFT)
                | np.uint64(word & _SIGN_BIT)
            )
    return np.int64(-1)


_CELL_SHIFT, _CELL_SHIFT_32 = np.uint64(31), np.uint32(31)
_AHEAD = np.uint64(32)  # elements: their cells are fetched while others are worked on, because tables exceed the caches


@inlined
def sign_of(word: Number) -> Number:
    """±1, fp64."""
    return np.float64(1.0) - np.float64(2.0) * np.float64(word >> _CELL_SHIFT_32)


def come_apart(
    cells_address: Number,
    count: Number,
    width: Number,
    rounds: Number,
    elements_address: Number,
    alone_address: Number,
    left_address: Number,
    members_address: Number,
    counters_address: Number,
    numbers_address: Number,
) -> Number:
    # As `sketch._order` and, if there are counters, `sketch._peel_by_reference`. Returns how many elements are left, or
    # −1 if a cell has more than 255: bytes keep the table in the cache. `alone` has a bit for each cell, whether it has
    # one element at the start of a round: that table is small enough to be read three times for every element.
    cells, elements, left = words_at(cells_address), bytes_at(elements_address), words_at(left_address)
    alone, members = addresses_at(alone_address), words_at(members_address)
    counters, numbers = doubles_at(counters_address), doubles_at(numbers_address)
    groups = (width + _GROUP - _ONE) >> _GROUP_BITS  # of a row
    room = groups << _GROUP_BITS
    for row in range(_THREE_ROWS):
        for i in range(count):
            cell = row * room + np.uint64(cells[row * count + i] & _CELL_BITS)
            elements[cell] = np.uint8(elements[cell] + np.uint8(1))
            if elements[cell] == np.uint8(0):
                return np.int64(-1)
    for i in range(count):
        left[i] = np.uint32(i)
    num_left = count
    for _ in range(rounds):
        for group in range(_THREE_ROWS * groups):
            alone[group] = equal_to(after(elements, group << _GROUP_BITS), np.uint8(1))
        found, still = _ZERO, _ZERO
        for j in range(num_left):
            i = left[j]
            rows = _ZERO
            for row in range(_THREE_ROWS):
                cell = np.uint64(cells[row * count + np.uint64(i)] & _CELL_BITS)
                bit = (alone[row * groups + (cell >> _GROUP_BITS)] >> (cell & (_GROUP - _ONE))) & _ONE
                rows = rows | bit << row
            members[found] = np.uint32(i | np.uint32(lowest_one(rows | _EIGHT)) << _ROW_SHIFT)
            left[still] = i
            found += np.uint64(rows != _ZERO)
            still += np.uint64(rows == _ZERO)
        num_left = still
        if found == _ZERO:
            break
        for j in range(found):
            which, later = (
                np.uint64(members[j] & _MEMBER_BITS),
                np.uint64(members[min(j + _AHEAD, found)] & _MEMBER_BITS),
            )
            for row in range(_THREE_ROWS):
                prefetch(elements, row * room + np.uint64(cells[row * count + later] & _CELL_BITS))
                cell = row * room + np.uint64(cells[row * count + which] & _CELL_BITS)
                elements[cell] = np.uint8(elements[cell] - np.uint8(1))
        if counters_address == _ZERO:
            continue
        # One after the other: the order of a cell's fp64 differences shows. Where one is alone, no other is subtracted.
        for j in range(found):
            which, later = (
                np.uint64(members[j] & _MEMBER_BITS),
                np.uint64(members[min(j + _AHEAD, found)] & _MEMBER_BITS),
            )
            for row in range(_THREE_ROWS):
                prefetch(counters, row * width + np.uint64(cells[row * count + later] & _CELL_BITS))
            alone_in = np.uint64(members[j] >> _ROW_SHIFT)
            word = cells[alone_in * count + which]
            number = counters[alone_in * width + np.uint64(word & _CELL_BITS)] * sign_of(word)
            numbers[which] = number
            for row in range(_THREE_ROWS):
                word = cells[row * count + which]
                counters[row * width + np.uint64(word & _CELL_BITS)] += sign_of(word) * -number
    return np.int64(num_left)


def add_up(
    values_address: Number,
    cells_address: Number,
    count: Number,
    width: Number,
    scale: Number,
    largest: Number,
    sums_address: Number,
    counters_address: Number,
) -> Number:
    # Every value up to `largest`, as a whole number of 1/scale, with its sign into its three cells.
    values, cells, sums = floats_at(values_address), words_at(cells_address), longs_at(sums_address)
    counters = floats_at(counters_address)
    for row in range(_THREE_ROWS):
        for i in range(count):
            word = cells[row * count + i]
            value = min(max(np.float64(values[i]), -largest), largest)
            sums[row * width + np.uint64(word & _CELL_BITS)] += np.int64(np.rint(value * (scale * sign_of(word))))
    back = np.float64(1.0) / scale
    for cell in range(_THREE_ROWS * width):
        counters[cell] = np.float32(np.float64(sums[cell]) * back)
    return np.int64(-1)


def list_ones(bitmap_address: Number, num_words: Number, places_address: Number) -> Number:
    # The places of the bits that are 1, if there is somewhere to write them; returns how many.
    bitmap, places = addresses_at(bitmap_address), addresses_at(places_address)
    found = _ZERO
    for i in range(num_words):
        word = bitmap[i]
        if places_address == _ZERO:
            found += count_ones(word)
        else:
            while word != _ZERO:
                places[found] = (i << _GROUP_BITS) + lowest_one(word)
                found += _ONE
                word = word & (word - _ONE)
    return np.int64(found)


def set_ones(bitmap_address: Number, places_address: Number, count: Number) -> Number:
    bitmap, places = bytes_at(bitmap_address), addresses_at(places_address)
    for i in range(count):
        bitmap[places[i] >> _THREE] |= np.uint8(_ONE << (places[i] & np.uint64(7)))
    return np.int64(-1)


def _kernel(name: str, function: Callable[..., Any], types: str) -> Kernel:
    """`types`: a letter for each argument, d for fp64 and otherwise uint64."""
    names = {"u": "uint64", "d": "float64"}
    return Kernel(name, f"int64({', '.join(names[letter] for letter in types)})", function)


LARGEST = _kernel("largest", largest_bits, "uuuu")
COUNT = _kernel("sketch_count", count_in_pieces, "uuuuuuu")
COLLECT = _kernel("sketch_collect", collect, "uuuuuuuuu")
CELLS = _kernel("sketch_cells", hash_cells, "uuuuuuu")
COME_APART = _kernel("sketch_peel", come_apart, "uuuuuuuuuu")
ADD_UP = _kernel("sketch_add", add_up, "uuuudduu")
LIST_ONES = _kernel("sketch_list", list_ones, "uuu")
SET_ONES = _kernel("sketch_set", set_ones, "uuu")


def largest_magnitude(x: Tensor) -> int:
    """Its bits, of x fp32 [n], as `finite_magnitude` compares them; 0 of nothing."""
    loop, found = LARGEST.compiled(), [0]

    def run(first: int, last: int) -> int:
        found.append(loop(x.data_ptr(), x.numel(), first, last))
        return -1

    on_parts(run, num_blocks=-(-x.numel() // _PIECE_LENGTH), block=_PIECE_LENGTH)
    return max(found)


_SAMPLE = 1 << 14


def kept(x: Tensor, thresholds: Sequence[float], budget: int) -> Tensor:
    """As `sketch._kept` of these falling thresholds."""
    pieces = -(-x.numel() // _PIECE_LENGTH)
    patterns = torch.tensor(thresholds, dtype=torch.float32, device="cpu").view(torch.int32).tolist()
    count = COUNT.compiled()

    def reached(fit: int) -> tuple[Tensor, Tensor]:
        """Of each piece, by the threshold before this one, and by this one."""
        high = patterns[fit - 1] if fit else int(INFINITY)
        low = patterns[fit] if fit < len(patterns) else high
        counts = torch.empty(pieces, 2, dtype=torch.int64, device="cpu")
        how = (x.data_ptr(), x.numel(), high, low, counts.data_ptr())
        on_parts(lambda first, last: count(*how, first, last), num_blocks=pieces, block=_PIECE_LENGTH)
        return counts[:, 0], counts[:, 1]

    # Every so many elements tell where the search begins.
    some = x[:: max(1, x.numel() // _SAMPLE)].abs()
    least = some.kthvalue(max(1, some.numel() - budget * some.numel() // x.numel())).values
    fit = bisect_left(patterns, -int(least.view(torch.int32)), key=neg)
    # The first threshold that more elements reach than the budget has, or the number of thresholds.
    while True:
        above, reaching_low = reached(fit)
        if int(above.sum()) > budget:
            fit -= 1
        elif fit < len(patterns) and int(reaching_low.sum()) <= budget:
            fit += 1
        else:
            break
    between = reaching_low - above
    before = between.cumsum(0) - between
    left = budget - int(above.sum())
    firsts = above.cumsum(0) - above + before.clamp(max=left)
    allowed = (left - before).clamp_(min=0).minimum(between)
    found = torch.empty(int((above + allowed).sum()), dtype=torch.int64, device="cpu")
    high = patterns[fit - 1] if fit else int(INFINITY)
    low = patterns[fit] if fit < len(patterns) else high
    loop = COLLECT.compiled()
    how = (x.data_ptr(), x.numel(), high, low, firsts.data_ptr(), allowed.data_ptr(), found.data_ptr())
    on_parts(lambda first, last: loop(*how, first, last), num_blocks=pieces, block=_PIECE_LENGTH)
    return found


def cells_of(places: Tensor, width: int, seeds: Sequence[int]) -> Tensor:
    """As `hash_cells` has them, of places int64 [n]: int32 [3, n]."""
    assert width < 2**31
    cells = torch.empty(_ROWS, places.numel(), dtype=torch.int32, device="cpu")
    rows = torch.tensor(seeds, dtype=torch.int64, device="cpu").to(torch.int32)
    loop = CELLS.compiled()
    how = (places.data_ptr(), places.numel(), width, rows.data_ptr(), cells.data_ptr())
    on_parts(lambda first, last: loop(*how, first, last), num_blocks=places.numel(), block=_ROWS)
    return cells


def left_of(cells: Tensor, width: int, rounds: int, counters: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Which elements of cells int32 [3, n] do not come apart, int64, and what the others are, fp64 [n], by counters
    fp64 [3 · width], which are left as what was not explained. None: there are too many elements in a cell.
    """
    count, groups = cells.shape[1], -(-width // 64)
    assert count < 1 << int(_ROW_SHIFT)
    elements = torch.zeros(_ROWS * groups * 64, dtype=torch.uint8, device="cpu")
    alone = torch.empty(_ROWS * groups, dtype=torch.int64, device="cpu")
    left, members = (torch.zeros(count + 1, dtype=torch.int32, device="cpu") for _ in range(2))
    numbers = torch.zeros(count if counters is not None else 0, dtype=torch.float64, device="cpu")
    arrays = (elements.data_ptr(), alone.data_ptr(), left.data_ptr(), members.data_ptr())
    how = (cells.data_ptr(), count, width, rounds, *arrays, 0 if counters is None else counters.data_ptr())
    num_left = COME_APART.compiled()(*how, numbers.data_ptr())
    return None if num_left < 0 else (left[:num_left].to(torch.int64), numbers)


def counters_of(values: Tensor, cells: Tensor, width: int, scale: float, largest: float) -> Tensor:
    """fp32 [3 · width], the sums of values fp32 [n] up to `largest`, in units of 1/scale, which is a power of two."""
    sums = torch.zeros(_ROWS * width, dtype=torch.int64, device="cpu")
    counters = torch.empty(_ROWS * width, dtype=torch.float32, device="cpu")
    how = (values.data_ptr(), cells.data_ptr(), values.numel(), width, scale, largest)
    ADD_UP.compiled()(*how, sums.data_ptr(), counters.data_ptr())
    return counters


def ones_of(bitmap: Tensor) -> Tensor:
    """Places of the bits of uint8 [n] that are 1, int64."""
    loop, num_words = LIST_ONES.compiled(), -(-bitmap.numel() // 8)
    words = torch.zeros(8 * num_words, dtype=torch.uint8, device="cpu")
    words[: bitmap.numel()] = bitmap
    places = torch.empty(loop(words.data_ptr(), num_words, 0), dtype=torch.int64, device="cpu")
    if places.numel():
        loop(words.data_ptr(), num_words, places.data_ptr())
    return places


def bitmap_of(places: Tensor, numel: int) -> Tensor:
    bitmap = torch.zeros(-(-numel // 8), dtype=torch.uint8, device="cpu")
    SET_ONES.compiled()(bitmap.data_ptr(), places.data_ptr(), places.numel())
    return bitmap


# --- ternary

_TERNARY_LENGTH = 256  # elements whose random bits are made at a time: four groups of 64
_TERNARY = np.uint64(_TERNARY_LENGTH)
_QUARTER = np.uint64(16)
_noise, _codes = stack_array(128, "uint32"), stack_array(_TERNARY_LENGTH, "uint8")


@inlined
def throw_some(codes: Numbers, x: Numbers, count: Number, scale: Number, random: Numbers) -> None:
    for i in range(count):
        chosen = np.int32(abs(x[i]) / scale > uniform(random[i]))
        codes[i] = np.uint8(chosen << np.int32(x[i] < np.float32(0.0)))


def throw(
    x_address: Number,
    count: Number,
    scale: Number,
    seed: Number,
    element: Number,
    codes_address: Number,
    begin: Number,
    end: Number,
) -> Number:
    # Of groups [begin, end), in fours; the first is that of this element of the fragment. There are `count`.
    x, out = floats_at(x_address), bytes_at(codes_address)
    noise, codes = _noise(), _codes()
    halves = as_halves(noise)
    for four in range(begin, end):
        first = four * _TERNARY
        random_words(noise, _HALF_WORDS, element + first, seed)
        groups = min(_FOUR, count - four * _FOUR)
        if groups == _FOUR:
            throw_some(codes, after(x, first), _TERNARY, scale, halves)  # a constant number of them: faster
        else:
            throw_some(codes, after(x, first), groups * _GROUP, scale, halves)
        for group in range(groups):
            code, packed = after(codes, group * _GROUP), after(out, (four * _FOUR + group) * _QUARTER)
            for i in range(_QUARTER):
                packed[i] = np.uint8(
                    code[i]
                    | code[_QUARTER + i] << 2
                    | code[_TWO * _QUARTER + i] << 4
                    | code[_THREE * _QUARTER + i] << 6
                )
    return np.int64(-1)


_HALF_WORDS = np.uint64(_TERNARY_LENGTH // 2)
THROW = Kernel("ternary", "int64(uint64, uint64, float32, uint32, uint64, uint64, uint64, uint64)", throw)


def thrown(x: Tensor, scale: float, seed: int, element: int, codes: Tensor) -> None:
    """Write the codes, uint8 [n/4], of whole groups x fp32 [n], of which the first is this element of the fragment."""
    assert x.numel() % 64 == 0 and codes.numel() * 4 == x.numel()
    if scale == 0:
        codes.zero_()
        return
    loop = THROW.compiled()
    how = (x.data_ptr(), x.numel() // 64, scale, seed & 0xFFFFFFFF, element, codes.data_ptr())
    fours = -(-x.numel() // _TERNARY_LENGTH)
    on_parts(lambda first, last: loop(*how, first, last), num_blocks=fours, block=_TERNARY_LENGTH)


KERNELS: Final = {
    "topk": (TOPK, PACK),
    "randk": (LARGEST, DRAW),
    "sketch": (LARGEST, COUNT, COLLECT, CELLS, COME_APART, ADD_UP, LIST_ONES, SET_ONES),
    "ternary": (LARGEST, THROW),
    "lowrank": (LARGEST,),
}
"""By the name of the format."""
