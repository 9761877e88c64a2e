"""BlockKernels on the CPU, and the table of formats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farloop.quant.kernels.cpu import bf16, e3m0, fp32, q4, q4r, q8
from farloop.quant.kernels.cpu.loops import (
    ADD,
    BLOCK,
    DECODE,
    LOCAL_BF16,
    LOCAL_FP16,
    LOCAL_FP32,
    NO_LOCAL,
    OVERWRITE,
    BlockLoops,
)
from farloop.quant.kernels.cpu.primitives import Kernel, Number, doubles_at, floats_at, on_parts, stack_doubles, warm_up
from farloop.quant.packing import CODES_ALIGN

# --- `quant/norm.py`'s sums of squares, one number for each tile of 4096 elements.


TILE = 4096

_TILE = np.uint64(TILE)
_HALF = np.uint64(TILE // 2)
_ONE = np.uint64(1)


def partial_sums(x_address: Number, partials_address: Number, begin: Number, end: Number) -> Number:
    # Tiles [begin, end). Upper halves onto lower ones, as the definition says: elementwise, so it is vector code.
    x = floats_at(x_address)
    partials = doubles_at(partials_address)
    sums = stack_doubles()
    for tile in range(begin, end):
        first = tile * _TILE
        for i in range(_HALF):
            low, high = np.float64(x[first + i]), np.float64(x[first + _HALF + i])
            sums[i] = low * low + high * high
        width = _HALF >> _ONE
        while width > 0:
            for i in range(width):
                sums[i] = sums[i] + sums[width + i]
            width = width >> _ONE
        partials[tile] = sums[0]
    return np.int64(-1)


NORM = Kernel("norm", "int64(uint64, uint64, uint64, uint64)", partial_sums)


def tile_sums(x: Tensor, *, threads: int | None = None) -> list[float]:
    """Sums of squares of x fp32 [n], fp64: one for each tile of 4096, the last filled up with zeros."""
    whole, missing = x.numel() // TILE, -x.numel() % TILE
    partials = np.empty(whole + (missing > 0), dtype=np.float64)
    loop = NORM.compiled()
    on_parts(
        lambda first, last: loop(x.data_ptr(), partials.ctypes.data, first, last),
        num_blocks=whole,
        block=TILE,
        threads=threads,
    )
    if missing:
        last_tile = np.zeros(TILE, dtype=np.float32)
        last_tile[: TILE - missing] = x[whole * TILE :].numpy()
        loop(last_tile.ctypes.data, partials[whole:].ctypes.data, 0, 1)
    return list(partials.tolist())


# --- A format's fused operations on tensors of the CPU: `kernels/choice.py` says what they are.
#
# Here blocks are dealt to threads, and a last block in which elements are missing goes through a buffer of its own: the
# compiled loops know addresses of whole blocks only, and believe them.


_LOCAL_KINDS = {torch.float32: LOCAL_FP32, torch.bfloat16: LOCAL_BF16, torch.float16: LOCAL_FP16}
_NO_STEPS = torch.zeros(1)
_SEED_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """A format with compiled loops. Tensors are flat, contiguous and on the CPU, and payloads have the right size.

    Everywhere, `threads` limits this call; None leaves it to `kernel_threads`.
    """

    loops: BlockLoops
    block: int
    """Elements that share a scale; 1 where there are no scales."""
    code_bits: int
    mode: int = 0
    """How `q4r` chooses scales and codes."""

    def encode(
        self,
        x: Tensor,
        out: Tensor,
        *,
        numel: int,
        local: Tensor | None = None,
        residual: Tensor | None = None,
        beta: float = 0.0,
        seed: int = 0,
        steps: Tensor | None = None,
        start: int = 0,
        threads: int | None = None,
    ) -> int:
        """As `BlockKernels.encode`."""
        for each in (local, residual):
            assert each is None or each.numel() == x.numel()
        assert start % BLOCK == 0 and start + x.numel() <= numel
        kind = NO_LOCAL if local is None else _LOCAL_KINDS[local.dtype]
        place, whole, present = start // BLOCK, x.numel() // BLOCK, x.numel() % BLOCK
        loop = self.loops.encode.compiled()

        def run(inputs: list[Tensor | None], to: tuple[int, int], at: int, count: int) -> int:
            x_address, local_address, residual_address = map(_address, inputs)
            how = (beta, *to, *self._steps(steps, at, count), seed & _SEED_MASK, self.mode, at)
            return on_parts(
                lambda first, last: loop(x_address, kind, local_address, residual_address, *how, first, last),
                num_blocks=count,
                block=BLOCK,
                threads=threads,
            )

        self._clear_gap(out, numel)
        bad = run([x, local, residual], self._addresses(out, numel, start), place, whole)
        if bad >= 0 or not present:
            return bad
        last = _LastBlock(self, out, numel, start + whole * BLOCK, present)
        inputs = [last.padded(each) for each in (x, local, residual)]
        bad = run(inputs, last.addresses, place + whole, 1)
        last.write_payload()
        last.write(inputs[2], residual)
        return bad if bad < 0 else whole * BLOCK + bad

    def add(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        acc: Tensor,
        *,
        overwrite: bool,
        threads: int | None = None,
    ) -> None:
        """As `BlockKernels.add`."""
        self._read(payloads, weights, OVERWRITE if overwrite else ADD, acc, 0, acc.numel(), threads)

    def decode_into(
        self, payload: Tensor, out: Tensor, *, numel: int, start: int = 0, threads: int | None = None
    ) -> None:
        """out = the decoded elements [start, start + len(out)) of a fragment of `numel`, every bit of them."""
        self._read([payload], [1.0], DECODE, out, start, numel, threads)

    def outer(
        self,
        delta: Tensor,
        target: Tensor,
        momentum: Tensor | None,
        anchor: Tensor,
        *,
        lr: float,
        mu: float,
        out: Tensor,
        new_target: Tensor,
        new_momentum: Tensor | None,
        new_anchor: Tensor,
        seed: int = 0,
        steps: Tensor | None = None,
        threads: int | None = None,
    ) -> int:
        """As `BlockKernels.outer`; without momentum the target becomes fl(t − fl(lr·d))."""
        numel = target.numel()
        old: list[Tensor | None] = [delta, target, momentum, anchor]
        new: list[Tensor | None] = [new_target, new_momentum, new_anchor]
        assert all(each is None or each.numel() == numel for each in old + new)
        assert (momentum is None) == (new_momentum is None)
        whole, present = numel // BLOCK, numel % BLOCK
        loop = self.loops.outer.compiled()

        def run(old: list[Tensor | None], new: list[Tensor | None], to: tuple[int, int], at: int, count: int) -> int:
            read, written = [_address(each) for each in old], [_address(each) for each in new]
            how = (*to, *self._steps(steps, at, count), seed & _SEED_MASK, self.mode, at)
            return on_parts(
                lambda first, last: loop(*read, lr, mu, *written, *how, first, last),
                num_blocks=count,
                block=BLOCK,
                threads=threads,
            )

        self._clear_gap(out, numel)
        bad = run(old, new, self._addresses(out, numel, 0), 0, whole)
        if bad >= 0 or not present:
            return bad
        last = _LastBlock(self, out, numel, whole * BLOCK, present)
        new_last = [last.padded(each) for each in new]
        bad = run([last.padded(each) for each in old], new_last, last.addresses, whole, 1)
        last.write_payload()
        for block, each in zip(new_last, new, strict=True):
            last.write(block, each)
        return bad if bad < 0 else whole * BLOCK + bad

    def scale_bytes(self, numel: int) -> int:
        """Of so many elements."""
        return 2 * -(-numel // self.block) if self.block > 1 else 0

    def code_bytes(self, numel: int) -> int:
        """Of so many elements: codes come in whole blocks."""
        return -(-numel // self.block) * self.block * self.code_bits // 8

    def codes_start(self, numel: int) -> int:
        """Where the codes begin."""
        return -(-self.scale_bytes(numel) // CODES_ALIGN) * CODES_ALIGN

    def _read(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        what: int,
        acc: Tensor,
        start: int,
        numel: int,
        threads: int | None,
    ) -> None:
        assert len(payloads) == len(weights)
        assert start % BLOCK == 0 and start + acc.numel() <= numel
        whole, present = acc.numel() // BLOCK, acc.numel() % BLOCK
        if not payloads:
            if what == OVERWRITE:
                acc.zero_()
            return
        loop = self.loops.add.compiled()
        rounded = torch.tensor(weights, dtype=torch.float32)

        def run(addresses: list[tuple[int, int]], acc: Tensor, count: int) -> None:
            scales, codes = (torch.tensor(each, dtype=torch.int64) for each in zip(*addresses, strict=True))
            tables = (scales.data_ptr(), codes.data_ptr(), rounded.data_ptr(), len(addresses))
            on_parts(
                lambda first, last: loop(*tables, what, acc.data_ptr(), first, last),
                num_blocks=count,
                block=BLOCK,
                threads=threads,
            )

        run([self._addresses(payload, numel, start) for payload in payloads], acc, whole)
        if present:
            lasts = [_LastBlock(self, payload, numel, start + whole * BLOCK, present) for payload in payloads]
            acc_last = lasts[0].padded(acc)
            assert acc_last is not None
            run([last.addresses for last in lasts], acc_last, 1)
            lasts[0].write(acc_last, acc)

    def _addresses(self, payload: Tensor, numel: int, start: int) -> tuple[int, int]:
        """Of scales and codes of the elements from `start` on."""
        assert payload.numel() == self.codes_start(numel) + self.code_bytes(numel)
        codes = payload.data_ptr() + self.codes_start(numel) + self.code_bytes(start)
        return payload.data_ptr() + self.scale_bytes(start), codes

    def _clear_gap(self, out: Tensor, numel: int) -> None:
        """The bytes between scales and codes are zero."""
        out[self.scale_bytes(numel) : self.codes_start(numel)] = 0

    def _steps(self, steps: Tensor | None, at: int, count: int) -> tuple[int, int]:
        """(address of the step of block `at`, how far apart the next ones lie)."""
        if steps is None:
            return _NO_STEPS.data_ptr(), 0
        assert steps.numel() >= at + count
        return steps.data_ptr() + 4 * at, 1


class _LastBlock:
    """A block in which elements are missing, filled up with zeros: its part of a payload, and of other tensors."""

    def __init__(self, kernels: CpuKernels, payload: Tensor, numel: int, start: int, present: int) -> None:
        self._present = present
        written = min(BLOCK, numel - start)  # where a tensor ends, its padding is written too
        scales, codes = kernels.scale_bytes(start), kernels.codes_start(numel) + kernels.code_bytes(start)
        self._theirs = (
            payload[scales : scales + kernels.scale_bytes(written)],
            payload[codes : codes + kernels.code_bytes(written)],
        )
        sizes = kernels.scale_bytes(BLOCK), kernels.code_bytes(BLOCK)
        self._ours = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
        for ours, theirs in zip(self._ours, self._theirs, strict=True):
            ours[: theirs.numel()] = theirs

    @property
    def addresses(self) -> tuple[int, int]:
        """Of its scales and codes."""
        scales, codes = self._ours
        return scales.data_ptr(), codes.data_ptr()

    def padded(self, tensor: Tensor | None) -> Tensor | None:
        """The last elements of a tensor that ends in this block."""
        if tensor is None:
            return None
        block = tensor.new_zeros(BLOCK)
        block[: self._present] = tensor[-self._present :]
        return block

    def write(self, block: Tensor | None, tensor: Tensor | None) -> None:
        """The way back of `padded`."""
        if block is not None and tensor is not None:
            tensor[-self._present :] = block[: self._present]

    def write_payload(self) -> None:
        """What was written at `addresses` goes into the payload."""
        for ours, theirs in zip(self._ours, self._theirs, strict=True):
            theirs.copy_(ours[: theirs.numel()])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# --- Which formats have kernels on the CPU, and how to compile them ahead.


_FORMATS = {
    "fp32": CpuKernels(loops=fp32.FP32, block=1, code_bits=32),
    "bf16": CpuKernels(loops=bf16.BF16, block=1, code_bits=16),
    "q8": CpuKernels(loops=q8.Q8, block=256, code_bits=8),
    "q4": CpuKernels(loops=q4.Q4, block=64, code_bits=4),
    "e3m0": CpuKernels(loops=e3m0.E3M0, block=64, code_bits=4),
}
_Q4R = {
    (stochastic, absolute): CpuKernels(
        loops=q4r.Q4R,
        block=256,
        code_bits=4,
        mode=stochastic * q4r.STOCHASTIC + absolute * q4r.ABSOLUTE,
    )
    for stochastic in (False, True)
    for absolute in (False, True)
}


def cpu_kernels(name: str, *, stochastic: bool = True, absolute: bool = False) -> CpuKernels | None:
    """The kernels of this format, or None; the last two are `q4r`'s rounding and policy."""
    return _Q4R[stochastic, absolute] if name == "q4r" else _FORMATS.get(name)


def warm(names: Iterable[str]) -> float:
    """Compile, or load from disk, all that a run with these formats needs; seconds that it took."""
    kernels: list[Kernel] = [NORM]
    for name in names:
        found = cpu_kernels(name)
        kernels += found.loops if found is not None else ()
    return warm_up(kernels)
