"""Kernels of the formats that send few elements: `topk` and `randk`. `formats/` defines what they compute.

Both find a threshold that k of n words reach by halving a range, and end as soon as a probe counts k: a probe compares
64 words at a time. Sorting all words, or a heap, would branch on every element.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from farloop.quant.kernels.cpu.primitives import (
    INFINITY,
    MAGNITUDE,
    Kernel,
    Number,
    Numbers,
    addresses_at,
    after,
    as_words,
    bits,
    bytes_at,
    count_ones,
    double_from_bits,
    floats_at,
    from_bits,
    halves_at,
    inlined,
    lowest_one,
    on_parts,
    random_words,
    reaching,
    stack_array,
    store_u16,
    to_scale,
)
from farloop.quant.packing import BF16_LARGEST

_ZERO, _ONE, _TWO, _FOUR = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(4)

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
    i: Number
    split: Number
    across = columns >> _SIDE_BITS
    for chunk in range(begin, end):
        first = start + chunk * length
        pitch = _SIDE
        if columns != _ZERO:
            first = start + (chunk // across) * (_SIDE * columns) + (chunk % across) * _SIDE
            pitch = columns
            for row in range(_SIDE):
                for i in range(_SIDE):
                    magnitudes[row * _SIDE + i] = np.int32(bits(x[first + row * columns + i]) & MAGNITUDE)
        else:
            for i in range(length):
                magnitudes[i] = np.int32(bits(x[first + i]) & MAGNITUDE)
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
                i = _GROUP * group + lowest_one(mask)
                mask = mask & (mask - _ONE)
                equal = np.int64(magnitudes[i] == threshold)
                if equal <= ties:
                    ties -= equal
                    order[found] = np.uint32(i)
                    found += _ONE
        place = after(index, chunk * k)
        value = after(values, chunk * k)
        for j in range(k):
            i = np.uint64(order[j])
            kept[j] = magnitudes[i]
            place[j] = np.uint16(i)
            value[j] = np.uint8(x[first + (i >> _SIDE_BITS) * pitch + (i & (_SIDE - _ONE))] < np.float32(0.0))
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


_THREE, _SIX = np.uint64(3), np.uint64(6)

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
    places, bits2 = torch.empty(6 * count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
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
    places = torch.empty(count, k, dtype=torch.int64)
    loop, how = DRAW.compiled(), (start, length, k, seed & 0xFFFFFFFF, places.data_ptr())
    on_parts(lambda first, last: loop(*how, first, last), num_blocks=count, block=length)
    return places


KERNELS: Final = {"topk": (TOPK, PACK), "randk": (DRAW,)}
"""By the name of the format."""
