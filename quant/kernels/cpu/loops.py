"""The loops that all block formats share, around a format's arithmetic on one block; compiled once per format.

A block is first computed in a small buffer that stays in the cache. Its source (a delta, an anchor and a local copy, a
residual, an outer step) costs a decision per block, not per element, and formats do not see it.

Two rules make LLVM vectorize the loops. Each touches few places in memory, because LLVM gives up where more might
overlap. Each runs over 256 elements, whatever a format's own block is, because LLVM first unrolls loops over 64 into
single instructions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from farloop.quant.kernels.cpu.primitives import (
    INFINITY,
    MAGNITUDE,
    Kernel,
    Number,
    Numbers,
    addresses_at,
    after,
    bits,
    bytes_at,
    cast_to_bf16,
    cast_to_fp16,
    doubles_at,
    floats_at,
    from_fp16,
    from_scale,
    halves_at,
    inlined,
    stack_doubles,
    stack_floats,
    stack_tile,
    stack_words,
)
from farloop.quant.kernels.interface import NORM_TILE
from farloop.quant.packing import Layout

BLOCK = 256  # Elements that go through the buffer at a time. The blocks of every format divide it.

Write = Callable[[Numbers, Number, Numbers, Numbers, Numbers], None]
"""Encode (v fp32 [BLOCK], bits of its largest magnitude, its scales, its codes, how). For `q4r`, `how` is (noise uint32
[BLOCK/2] as scratch memory, index of the first element in the fragment, step, seed, mode)."""

Read = Callable[[Numbers, Numbers, Numbers], None]  # decode (out fp32 [BLOCK], its scales, its codes)

# The number type of the local weights, in `encode`.
NO_LOCAL, LOCAL_FP32, LOCAL_BF16, LOCAL_FP16 = range(4)

# What `add` does with decoded numbers.
ADD, OVERWRITE, DECODE = range(3)

_TILE_BYTES = 1 << 16  # of sums: they stay in the cache while all payloads are added

# Addresses, counts and places are uint64.
_ENCODE = (
    "int64(uint64, int64, uint64, uint64, float32, "  # x, kind of local, local, residual, beta
    "uint64, uint64, uint64, uint64, uint32, int64, "  # scales, codes, steps and their stride, seed, mode
    "uint64, uint64, uint64)"  # place, begin, end
)
_NORM = "int64(uint64, uint64, uint64, uint64, uint64)"
_ADD = "int64(uint64, uint64, uint64, uint64, int64, uint64, uint64, uint64)"
_APPLY = "int64(uint64, uint64, uint64, uint64, uint64, uint64, uint64, uint64, uint64)"
_OUTER = (
    "int64(uint64, uint64, uint64, uint64, uint64, float32, "  # of the deltas as in `add`, or their sum; its scale
    "uint64, uint64, uint64, float32, float32, "  # target, momentum, anchor, lr, mu
    "uint64, uint64, uint64, "  # the new ones
    "uint64, uint64, uint64, uint64, uint32, int64, uint64, "  # as in `encode`
    "uint64, uint64, uint64, uint64, uint64)"  # count, sums of squares, what else is found, begin, end
)

FOUND = 6  # numbers of each tile that `outer` finds: digest, largest magnitude of the new anchor, target and momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoops:
    """One format's compiled loops. They take addresses; 0 stands for none."""

    encode: Kernel
    add: Kernel
    apply: Kernel
    norm: Kernel
    outer: Kernel

    def __iter__(self) -> Iterator[Kernel]:
        yield from (self.encode, self.add, self.apply, self.norm, self.outer)


_HALF_TILE, _WIDTH = np.uint64(NORM_TILE // 2), np.uint64(NORM_TILE // 16)
_0, _ONE, _2, _3, _4, _5, _6, _7 = (np.uint64(k) for k in range(8))


@inlined
def two_squares(x: Numbers, i: Number) -> Number:
    low, high = np.float64(x[i]), np.float64(x[_HALF_TILE + i])
    return low * low + high * high


@inlined
def sum_of_squares(x: Numbers, sums: Numbers) -> Number:
    """Of x[0 … 4095], fp64, halves onto halves: elementwise additions, so LLVM makes vector code of them. The first
    four halvings are done in registers."""
    for i in range(_WIDTH):
        even = two_squares(x, i) + two_squares(x, i + _4 * _WIDTH)
        even += two_squares(x, i + _2 * _WIDTH) + two_squares(x, i + _6 * _WIDTH)
        odd = two_squares(x, i + _WIDTH) + two_squares(x, i + _5 * _WIDTH)
        odd += two_squares(x, i + _3 * _WIDTH) + two_squares(x, i + _7 * _WIDTH)
        sums[i] = even + odd
    width = _WIDTH >> _ONE
    while width > 0:
        for i in range(width):
            sums[i] = sums[i] + sums[width + i]
        width = width >> _ONE
    return sums[0]


_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FIRST_SHIFT, _SECOND_SHIFT, _THIRD_SHIFT = np.uint64(30), np.uint64(27), np.uint64(31)


@inlined
def multiplier_of(index: Number) -> Number:
    """Of an element in the digest that `digest.py` defines."""
    z = (index ^ (index >> _FIRST_SHIFT)) * _FIRST_MULTIPLIER
    z = (z ^ (z >> _SECOND_SHIFT)) * _SECOND_MULTIPLIER
    return (z ^ (z >> _THIRD_SHIFT)) | _ONE


@inlined
def digest_of(x: Numbers, count: Number, index: Number) -> Number:
    """As `digest.py` defines it, of x[0 … count − 1]; `index` is that of x[0]."""
    total = np.uint64(0)
    for i in range(count):
        total += np.uint64(np.uint32(bits(x[i]))) * multiplier_of(index + i)
    return total


@inlined
def note(found: Numbers, x: Numbers, y: Numbers, z: Numbers, count: Number, index: Number) -> None:
    """Add a block's digests and largest magnitudes of x, y and z to those of its tile."""
    of_x, of_y, of_z = found[_0], found[_2], found[_4]
    for i in range(count):
        multiplier = multiplier_of(index + i)
        of_x += np.uint64(np.uint32(bits(x[i]))) * multiplier
        of_y += np.uint64(np.uint32(bits(y[i]))) * multiplier
        of_z += np.uint64(np.uint32(bits(z[i]))) * multiplier
    found[_0], found[_2], found[_4] = of_x, of_y, of_z
    found[_ONE] = max(found[_ONE], np.uint64(largest_magnitude(x, count)))
    found[_3] = max(found[_3], np.uint64(largest_magnitude(y, count)))
    found[_5] = max(found[_5], np.uint64(largest_magnitude(z, count)))


@inlined
def stage(v: Numbers, count: Number, x: Numbers, kind: Number, local_address: Number, first: Number) -> None:
    """v = x, or cast(x) − local; `first` is the block's first element in both."""
    local = floats_at(local_address)
    halves = halves_at(local_address)
    if kind == NO_LOCAL:
        for i in range(count):
            v[i] = x[first + i]
    elif kind == LOCAL_FP32:
        for i in range(count):
            v[i] = x[first + i] - local[first + i]
    elif kind == LOCAL_BF16:
        for i in range(count):
            v[i] = cast_to_bf16(x[first + i]) - from_scale(np.int32(halves[first + i]))
    else:
        for i in range(count):
            v[i] = cast_to_fp16(x[first + i]) - from_fp16(halves[first + i])


@inlined
def largest_magnitude(v: Numbers, count: Number) -> Number:
    """As bits, int32: floating-point comparisons lose NaNs."""
    largest = np.int32(0)
    for i in range(count):
        magnitude = np.int32(bits(v[i]) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@inlined
def first_not_finite(v: Numbers) -> Number:
    """The index of the first NaN or infinity of v, which holds one."""
    i = 0
    while np.int32(bits(v[i]) & MAGNITUDE) < INFINITY:
        i += 1
    return np.int64(i)


def block_loops(name: str, write: Write, read: Read, *, block: int, code_bits: int) -> BlockLoops:
    """The loops of one format, whose layout has this block and these bits of a code."""
    layout = Layout(block=block, code_bits=code_bits)
    B = np.uint64(BLOCK)
    SCALE_BYTES = np.uint64(layout.scale_bytes(BLOCK))
    CODE_BYTES = np.uint64(layout.code_bytes(BLOCK))
    TILE = np.uint64(_TILE_BYTES // (4 * BLOCK))
    NORM_SIZE, NORM_BLOCKS = np.uint64(NORM_TILE), np.uint64(NORM_TILE // BLOCK)
    FOUND_SIZE = np.uint64(FOUND)

    def encode(
        x_address: Number,
        kind: Number,
        local_address: Number,
        residual_address: Number,
        beta: Number,
        scales_address: Number,
        codes_address: Number,
        steps_address: Number,
        step_stride: Number,
        seed: Number,
        mode: Number,
        place: Number,
        begin: Number,
        end: Number,
    ) -> Number:
        # Blocks [begin, end) of x. All addresses belong to x's first block, which is block `place` of the fragment.
        x = floats_at(x_address)
        residual = floats_at(residual_address)
        scales = bytes_at(scales_address)
        codes = bytes_at(codes_address)
        steps = floats_at(steps_address)
        v = stack_floats()
        decoded = stack_floats()
        noise = stack_words()
        for b in range(begin, end):
            first = b * B
            stage(v, B, x, kind, local_address, first)
            if residual_address != 0:
                for i in range(B):
                    v[i] = v[i] + beta * residual[first + i]
            magnitude = largest_magnitude(v, B)
            if magnitude >= INFINITY:
                return np.int64(first) + first_not_finite(v)
            scales_b, codes_b = after(scales, b * SCALE_BYTES), after(codes, b * CODE_BYTES)
            write(v, magnitude, scales_b, codes_b, (noise, (place + b) * B, steps[b * step_stride], seed, mode))
            if residual_address != 0:
                read(decoded, scales_b, codes_b)
                for i in range(B):
                    residual[first + i] = v[i] - decoded[i]
        return np.int64(-1)

    def add(
        scale_addresses_address: Number,
        code_addresses_address: Number,
        weights_address: Number,
        num_payloads: Number,
        what: Number,
        acc_address: Number,
        begin: Number,
        end: Number,
    ) -> Number:
        scale_addresses = addresses_at(scale_addresses_address)
        code_addresses = addresses_at(code_addresses_address)
        weights = floats_at(weights_address)
        acc = floats_at(acc_address)
        decoded = stack_floats()
        for tile in range(begin, end, TILE):
            tile_end = min(tile + TILE, end)
            if what == OVERWRITE:
                for i in range(tile * B, tile_end * B):
                    acc[i] = np.float32(0.0)
            for k in range(num_payloads):
                scales = bytes_at(scale_addresses[k])
                codes = bytes_at(code_addresses[k])
                weight = weights[k]
                for b in range(tile, tile_end):
                    first = b * B
                    read(decoded, after(scales, b * SCALE_BYTES), after(codes, b * CODE_BYTES))
                    if what == DECODE:
                        for i in range(B):
                            acc[first + i] = decoded[i]
                    else:
                        for i in range(B):
                            acc[first + i] = acc[first + i] + weight * decoded[i]
        return np.int64(-1)

    def apply(
        scales_address: Number,
        codes_address: Number,
        base_address: Number,
        out_address: Number,
        place: Number,
        count: Number,
        digests_address: Number,
        begin: Number,
        end: Number,
    ) -> Number:
        # Tiles [begin, end) of `count` elements, as in `outer`.
        scales = bytes_at(scales_address)
        codes = bytes_at(codes_address)
        base = floats_at(base_address)
        out = floats_at(out_address)
        digests = addresses_at(digests_address)
        decoded = stack_floats()
        for tile in range(begin, end):
            total = np.uint64(0)
            for b in range(tile * NORM_BLOCKS, min((tile + _ONE) * NORM_BLOCKS, (count + B - _ONE) // B)):
                first = b * B
                read(decoded, after(scales, b * SCALE_BYTES), after(codes, b * CODE_BYTES))
                for i in range(B):
                    decoded[i] = base[first + i] + decoded[i]
                for i in range(B):
                    out[first + i] = decoded[i]
                total += digest_of(decoded, min(B, count - first), place * B + first)
            digests[tile] = total
        return np.int64(-1)

    def norm(
        scales_address: Number, codes_address: Number, partials_address: Number, begin: Number, end: Number
    ) -> Number:
        # Tiles [begin, end) of a payload: the decoded numbers never leave the cache.
        scales = bytes_at(scales_address)
        codes = bytes_at(codes_address)
        partials = doubles_at(partials_address)
        x = stack_tile()
        sums = stack_doubles()
        for tile in range(begin, end):
            for k in range(NORM_BLOCKS):
                b = tile * NORM_BLOCKS + k
                read(after(x, k * B), after(scales, b * SCALE_BYTES), after(codes, b * CODE_BYTES))
            partials[tile] = sum_of_squares(x, sums)
        return np.int64(-1)

    def outer(
        scale_addresses_address: Number,
        code_addresses_address: Number,
        weights_address: Number,
        num_payloads: Number,
        delta_address: Number,
        delta_scale: Number,
        target_address: Number,
        momentum_address: Number,
        anchor_address: Number,
        lr: Number,
        mu: Number,
        new_target_address: Number,
        new_momentum_address: Number,
        new_anchor_address: Number,
        scales_address: Number,
        codes_address: Number,
        steps_address: Number,
        step_stride: Number,
        seed: Number,
        mode: Number,
        place: Number,
        count: Number,
        norms_address: Number,
        found_address: Number,
        begin: Number,
        end: Number,
    ) -> Number:
        # Tiles [begin, end) of `count` elements; the tensors reach to the end of the last block. Each number is read
        # before the new one is written, because the new tensors may be the old ones. Without `norms` nothing is found.
        scale_addresses = addresses_at(scale_addresses_address)
        code_addresses = addresses_at(code_addresses_address)
        weights = floats_at(weights_address)
        delta = floats_at(delta_address)
        target = floats_at(target_address)
        momentum = floats_at(momentum_address)
        anchor = floats_at(anchor_address)
        new_target = floats_at(new_target_address)
        new_momentum = floats_at(new_momentum_address)
        new_anchor = floats_at(new_anchor_address)
        scales = bytes_at(scales_address)
        codes = bytes_at(codes_address)
        steps = floats_at(steps_address)
        norms = doubles_at(norms_address)
        found = addresses_at(found_address)
        total = stack_tile()
        sums = stack_doubles()
        v = stack_floats()
        moved = stack_floats()
        for i in range(B):
            moved[i] = np.float32(0.0)
        stepped = stack_floats()
        decoded = stack_floats()
        noise = stack_words()
        for tile in range(begin, end):
            first_block = tile * NORM_BLOCKS
            last_block = min(first_block + NORM_BLOCKS, (count + B - _ONE) // B)
            present = min(NORM_SIZE, count - first_block * B)
            if num_payloads == 0:
                for i in range(present):
                    total[i] = delta[first_block * B + i]
            else:
                for i in range(NORM_SIZE):
                    total[i] = np.float32(0.0)
            for k in range(num_payloads):
                theirs, own = bytes_at(scale_addresses[k]), bytes_at(code_addresses[k])
                weight = weights[k]
                for b in range(first_block, last_block):
                    read(decoded, after(theirs, b * SCALE_BYTES), after(own, b * CODE_BYTES))
                    part = after(total, (b - first_block) * B)
                    for i in range(B):
                        part[i] = part[i] + weight * decoded[i]
            for i in range(present, NORM_SIZE):
                total[i] = np.float32(0.0)
            if norms_address != 0:
                norms[tile] = sum_of_squares(total, sums)
            of_tile = after(found, tile * FOUND_SIZE)
            for k in range(FOUND_SIZE):
                of_tile[k] = np.uint64(0)
            for b in range(first_block, last_block):
                first = b * B
                here = min(B, count - first)
                index = place * B + first
                part = after(total, (b - first_block) * B)
                for i in range(B):
                    v[i] = part[i] * delta_scale
                if momentum_address != 0:
                    for i in range(B):
                        moved[i] = mu * momentum[first + i] + v[i]
                    for i in range(B):
                        new_momentum[first + i] = moved[i]
                    for i in range(B):
                        v[i] = mu * moved[i] + v[i]
                for i in range(B):
                    stepped[i] = target[first + i] - v[i] * lr
                for i in range(B):
                    new_target[first + i] = stepped[i]
                for i in range(B):
                    v[i] = stepped[i] - anchor[first + i]
                magnitude = largest_magnitude(v, B)
                if magnitude >= INFINITY:
                    return np.int64(first) + first_not_finite(v)
                scales_b, codes_b = after(scales, b * SCALE_BYTES), after(codes, b * CODE_BYTES)
                write(v, magnitude, scales_b, codes_b, (noise, index, steps[b * step_stride], seed, mode))
                read(decoded, scales_b, codes_b)
                for i in range(B):
                    v[i] = anchor[first + i] + decoded[i]
                for i in range(B):
                    new_anchor[first + i] = v[i]
                if norms_address != 0:
                    note(of_tile, v, stepped, moved, here, index)
        return np.int64(-1)

    return BlockLoops(
        encode=Kernel(f"{name}_encode", _ENCODE, encode),
        add=Kernel(f"{name}_add", _ADD, add),
        apply=Kernel(f"{name}_apply", _APPLY, apply),
        norm=Kernel(f"{name}_norm", _NORM, norm),
        outer=Kernel(f"{name}_outer", _OUTER, outer),
    )
