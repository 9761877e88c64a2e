"""The kernels of block formats on the CPU, and compiled sums of squares.

Blocks are dealt to threads. The compiled loops take addresses of whole blocks only and do not check them, so a last
block with missing elements is copied to a buffer of its own.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farloop.quant.kernels.cpu import sparse
from farloop.quant.kernels.cpu.formats import ABSOLUTE, ENCODERS, LOOPS, STOCHASTIC
from farloop.quant.kernels.cpu.loops import (
    ADD,
    BLOCK,
    DECODE,
    FOUND,
    LOCAL_BF16,
    LOCAL_FP16,
    LOCAL_FP32,
    NO_LOCAL,
    OVERWRITE,
    BlockLoops,
    digest_of,
    largest_magnitude,
    sum_of_squares,
)
from farloop.quant.kernels.cpu.primitives import (
    INFINITY,
    Kernel,
    Number,
    addresses_at,
    after,
    doubles_at,
    floats_at,
    on_parts,
    stack_doubles,
    warm_up,
)
from farloop.quant.kernels.interface import NORM_TILE, BlockKernels, Encode, Found, KernelKey, OuterStep
from farloop.quant.packing import Layout

_LOCAL_KINDS = {torch.float32: LOCAL_FP32, torch.bfloat16: LOCAL_BF16, torch.float16: LOCAL_FP16}
_SEED_MASK = 0xFFFFFFFF

Places = list[tuple[int, int]]  # addresses of scales and codes, of each payload


def cpu_kernels(key: KernelKey, *, only_encode: bool = False) -> "CpuKernels | None":
    """The kernels of this key, or None if its format has none on the CPU; `only_encode` as `fast_path` has it."""
    loops = LOOPS.get(key.name) or (ENCODERS.get(key.name) if only_encode else None)
    mode = key.stochastic * STOCHASTIC + key.absolute * ABSOLUTE
    step = torch.full((1,), math.nan if key.step is None else key.step, dtype=torch.float32, device="cpu")
    return None if loops is None else CpuKernels(loops=loops, layout=key.layout, step=step, mode=mode)


def warm(names: Iterable[str]) -> float:
    """Compile, or load from disk, what a run with these formats needs; returns the seconds it took."""
    formats: Mapping[str, Iterable[Kernel]] = {
        **LOOPS,
        **sparse.KERNELS,
        **{name: (loops.encode,) for name, loops in ENCODERS.items()},
    }
    return warm_up([NORM, DIGEST, *(kernel for name in names for kernel in formats.get(name, ()))])


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels(BlockKernels):
    """Compiled loops. Tensors are flat, contiguous and on the CPU, and payloads have the right size."""

    loops: BlockLoops
    layout: Layout
    step: Tensor  # fp32 [1]: of every block, for a call without steps
    mode: int = 0  # how `q4r` chooses scales and codes

    def encode(self, call: Encode) -> int:
        kind = NO_LOCAL if call.local is None else _LOCAL_KINDS[call.local.dtype]
        loop = self.loops.encode.compiled()

        def run(places: Places, tensors: list[int], place: int, count: int) -> int:
            x, local, residual = tensors
            place += call.ahead // BLOCK
            steps = self._steps(call.steps, place, count)
            how = (call.beta, *places[0], *steps, call.seed & _SEED_MASK, self.mode, place)
            return _on_blocks(lambda first, last: loop(x, kind, local, residual, *how, first, last), count)

        assert call.ahead % BLOCK == 0
        call.out[self.layout.gap(call.numel)] = 0
        tensors = [call.x, call.local, call.residual]
        return self._run(
            run, [call.out], tensors, numel=call.numel, length=call.x.numel(), start=call.start, encodes=True, written=2
        )

    def outer(self, step: OuterStep) -> int | Found:
        assert (step.momentum is None) == (step.new_momentum is None)
        assert (step.delta is None) == bool(step.payloads)
        numel = step.target.numel()
        loop = self.loops.outer.compiled()
        weights = torch.tensor(step.weights, dtype=torch.float32, device="cpu")
        num_tiles = -(-numel // TILE)
        norms, found = np.empty(num_tiles), np.empty((num_tiles, FOUND), dtype=np.uint64)

        def run(places: Places, tensors: list[int], place: int, count: int) -> int:
            own, *others = places
            table = _table(others)
            deltas = (table[0].data_ptr(), table[1].data_ptr(), weights.data_ptr(), len(others), tensors[0], step.scale)
            old, new = tensors[1:4], tensors[4:]
            how = (*own, *self._steps(step.steps, place, count), step.seed & _SEED_MASK, self.mode, place)
            first_tile, present = place * BLOCK // TILE, min(count * BLOCK, numel - place * BLOCK)
            sums = norms[first_tile:].ctypes.data if step.measured else 0
            notes = (present, sums, found[first_tile:].ctypes.data)
            return on_parts(
                lambda first, last: loop(*deltas, *old, step.lr, step.mu, *new, *how, *notes, first, last),
                num_blocks=-(-present // TILE),
                block=TILE,
            )

        step.out[self.layout.gap(numel)] = 0
        old = [step.target, step.momentum, step.anchor]
        new = [step.new_target, step.new_momentum, step.new_anchor]
        tensors, payloads = [step.delta, *old, *new], [step.out, *step.payloads]
        bad = self._run(run, payloads, tensors, numel=numel, length=numel, encodes=True, written=4, unit=TILE)
        if bad >= 0:
            return bad
        if not step.measured:
            return Found(tile_sums=[], anchor_digest=0, target_digest=0, momentum_digest=0, largest=math.inf)
        digests = [int(np.add.reduce(found[:, 2 * k])) for k in range(FOUND // 2)]
        largest = min(found[:, 1::2].max(initial=0), np.uint64(INFINITY))
        return Found(
            tile_sums=norms.tolist(),
            anchor_digest=digests[0],
            target_digest=digests[1],
            momentum_digest=digests[2],
            largest=float(np.uint32(largest).view(np.float32)),
        )

    def add(self, payloads: Sequence[Tensor], weights: Sequence[float], acc: Tensor, *, overwrite: bool) -> None:
        self._read(payloads, weights, OVERWRITE if overwrite else ADD, acc, 0, acc.numel())

    def apply(self, payload: Tensor, base: Tensor, out: Tensor) -> int:
        loop, numel = self.loops.apply.compiled(), out.numel()
        digests = np.empty(-(-numel // TILE), dtype=np.uint64)

        def run(places: Places, tensors: list[int], place: int, count: int) -> int:
            first_tile, present = place * BLOCK // TILE, min(count * BLOCK, numel - place * BLOCK)
            how = (*places[0], *tensors, place, present, digests[first_tile:].ctypes.data)
            return on_parts(lambda first, last: loop(*how, first, last), num_blocks=-(-present // TILE), block=TILE)

        self._run(run, [payload], [base, out], numel=numel, length=numel, encodes=False, written=1, unit=TILE)
        return int(np.add.reduce(digests))

    def decode_into(self, payload: Tensor, out: Tensor, *, numel: int, start: int = 0) -> None:
        self._read([payload], [1.0], DECODE, out, start, numel)

    def _read(
        self, payloads: Sequence[Tensor], weights: Sequence[float], what: int, acc: Tensor, start: int, numel: int
    ) -> None:
        assert len(payloads) == len(weights)
        loop = self.loops.add.compiled()
        rounded = torch.tensor(weights, dtype=torch.float32, device="cpu")

        def run(places: Places, tensors: list[int], place: int, count: int) -> int:
            table = _table(places)
            tables = (table[0].data_ptr(), table[1].data_ptr(), rounded.data_ptr(), len(places))
            return _on_blocks(lambda first, last: loop(*tables, what, tensors[0], first, last), count)

        self._run(run, payloads, [acc], numel=numel, length=acc.numel(), start=start, encodes=False, written=0)

    def tile_sums(self, payload: Tensor, numel: int) -> list[float]:
        assert payload.numel() == self.layout.payload_bytes(numel)
        scales, codes = self.layout.parts(numel, 0, 0)
        whole, missing = numel // TILE, -numel % TILE
        partials = np.empty(whole, dtype=np.float64)
        loop, address = self.loops.norm.compiled(), payload.data_ptr()
        how = (address + scales.start, address + codes.start, partials.ctypes.data)
        on_parts(lambda first, last: loop(*how, first, last), num_blocks=whole, block=TILE)
        sums: list[float] = partials.tolist()
        if missing:
            rest = torch.empty(numel - whole * TILE, dtype=torch.float32, device="cpu")
            self.decode_into(payload, rest, numel=numel, start=whole * TILE)
            sums += tile_sums(rest)
        return sums

    def _run(
        self,
        run: Callable[[Places, list[int], int, int], int],
        payloads: Sequence[Tensor],
        tensors: Sequence[Tensor | None],
        *,
        numel: int,
        length: int,
        start: int = 0,
        encodes: bool,
        written: int,
        unit: int = BLOCK,
    ) -> int:
        """Call run(places, addresses, first block, number of blocks) on the whole units, then on what is left.

        The tensors hold `length` elements from `start` on; those from number `written` on are written.
        """
        assert all(each is None or each.numel() == length for each in tensors)
        assert start % BLOCK == 0 and start + length <= numel
        assert all(payload.numel() == self.layout.payload_bytes(numel) for payload in payloads)
        place, whole, present = start // BLOCK, length // unit * (unit // BLOCK), length % unit
        scales, codes = self.layout.parts(numel, start, 0)
        places = [(payload.data_ptr() + scales.start, payload.data_ptr() + codes.start) for payload in payloads]
        bad = run(places, [0 if each is None else each.data_ptr() for each in tensors], place, whole)
        if bad >= 0 or not present:
            return bad
        # Behind the end of a tensor, its padding is written too.
        first, num_blocks = start + whole * BLOCK, -(-present // BLOCK)
        rest = num_blocks * BLOCK
        parts = self.layout.parts(numel, first, min(rest, numel - first))
        sizes = self.layout.scale_bytes(rest), self.layout.code_bytes(rest)
        lasts = [[_padded(data[part], size) for part, size in zip(parts, sizes, strict=True)] for data in payloads]
        blocks = [None if each is None else _padded(each[-present:], rest) for each in tensors]
        places = [(scales.data_ptr(), codes.data_ptr()) for scales, codes in lasts]
        bad = run(places, [0 if each is None else each.data_ptr() for each in blocks], place + whole, num_blocks)
        if encodes:
            for part, data in zip(parts, lasts[0], strict=True):
                payloads[0][part] = data[: part.stop - part.start]
        for block, tensor in zip(blocks[written:], tensors[written:], strict=True):
            if block is not None and tensor is not None:
                tensor[-present:] = block[:present]
        return bad if bad < 0 else whole * BLOCK + bad

    def _steps(self, steps: Tensor | None, place: int, count: int) -> tuple[int, int]:
        """(address of the step of block `place`, distance of the next ones)."""
        if steps is None:
            return self.step.data_ptr(), 0
        assert steps.numel() >= place + count
        return steps.data_ptr() + 4 * place, 1


def _on_blocks(kernel: Callable[[int, int], int], count: int) -> int:
    return on_parts(kernel, num_blocks=count, block=BLOCK)


def _table(places: Places) -> Tensor:
    """Addresses of scales, then of codes, int64 [2, payloads]."""
    return torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 2).T.contiguous()


def _padded(part: Tensor, length: int) -> Tensor:
    """A copy, with zeros up to this length."""
    block = part.new_zeros(length)
    block[: part.numel()] = part
    return block


# --- Sums of squares, as `norm.py` defines them


TILE = NORM_TILE

_TILE = np.uint64(TILE)


def partial_sums(x_address: Number, partials_address: Number, begin: Number, end: Number) -> Number:
    # Tiles [begin, end).
    x = floats_at(x_address)
    partials = doubles_at(partials_address)
    sums = stack_doubles()
    for tile in range(begin, end):
        partials[tile] = sum_of_squares(after(x, tile * _TILE), sums)
    return np.int64(-1)


NORM = Kernel("norm", "int64(uint64, uint64, uint64, uint64)", partial_sums)


def tile_sums(x: Tensor) -> list[float]:
    """Sums of squares of x fp32 [n] in fp64, one for each tile of 4096; the last tile is filled up with zeros."""
    whole, missing = x.numel() // TILE, -x.numel() % TILE
    partials = np.empty(whole + (missing > 0), dtype=np.float64)
    loop = NORM.compiled()
    on_parts(lambda first, last: loop(x.data_ptr(), partials.ctypes.data, first, last), num_blocks=whole, block=TILE)
    if missing:
        last_tile = _padded(x[whole * TILE :], TILE)
        loop(last_tile.data_ptr(), partials[whole:].ctypes.data, 0, 1)
    return list(partials.tolist())


# --- Digests, as `digest.py` defines them


def partial_digests(
    x_address: Number, partials_address: Number, first_index: Number, begin: Number, end: Number
) -> Number:
    # Tiles [begin, end); returns the first tile with a number that is not finite.
    x = floats_at(x_address)
    partials = addresses_at(partials_address)
    unusable = np.int64(-1)
    for tile in range(begin, end):
        first = tile * _TILE
        part = after(x, first)
        partials[tile] = digest_of(part, _TILE, first_index + first)
        if unusable < 0 and largest_magnitude(part, _TILE) >= INFINITY:
            unusable = np.int64(tile)
    return unusable


DIGEST = Kernel("digest", "int64(uint64, uint64, uint64, uint64, uint64)", partial_digests)


def digest(x: Tensor, first_index: int) -> tuple[int, bool]:
    """The digest of x fp32 [n], whose first element has this index, and whether all of x is finite."""
    whole, missing = x.numel() // TILE, -x.numel() % TILE
    partials = np.empty(whole + (missing > 0), dtype=np.uint64)
    loop, place = DIGEST.compiled(), partials.ctypes.data
    unusable = on_parts(
        lambda first, last: loop(x.data_ptr(), place, first_index, first, last), num_blocks=whole, block=TILE
    )
    if missing:
        last_tile, index = _padded(x[whole * TILE :], TILE), first_index + whole * TILE
        unusable = max(unusable, loop(last_tile.data_ptr(), partials[whole:].ctypes.data, index, 0, 1))
    return int(np.add.reduce(partials)), unusable < 0
