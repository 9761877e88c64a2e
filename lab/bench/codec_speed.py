"""Speed of codecs, compared with a plain copy.

A copy of buffers of the same size is timed before every repetition: other load on the machine slows both, and the copy
leaves none of the operands in the cache. Buffers are made once; the first call, which may compile, is timed by itself.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.lab.bench.codec_quality import SIZE
from farloop.quant.codec import Codec
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.dispatch import fast_path
from farloop.quant.kernels.interface import BlockKernels, OuterStep
from farloop.quant.registry import spelling_of

NODES = 8  # payloads of a weighted sum

MOST_REPETITIONS = 25
SLOW_S = 2.0  # a call longer than this is repeated as rarely as may be

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long one row may take."""

    budget_s: float = 1.0
    least: int = 5  # repetitions even where the budget is used up


STEADY, QUICK = Pace(), Pace(budget_s=0.2, least=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What is used of the machine."""

    device: str  # `cpu` or `cuda`
    threads: int  # of the CPU; on a GPU they only feed it

    def describe(self) -> str:
        if self.device != "cpu":
            return "GPU"
        return f"CPU, {self.threads} thread" + ("s" if self.threads > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One operation of one codec. GB/s are 10⁹ bytes of fp32 numbers, encoded or decoded, a second."""

    codec: str
    op: str
    """`encode`, `decode`, `add` (into a sum), `sum8` (of eight payloads, all counted), `fused` (residual added, encoded
    and renewed), `outer` (Nesterov step, encoded and applied); `copy` for memcpy."""
    device: str
    threads: int
    path: str  # what computes it: `numba`, `triton` or `torch`
    gb_per_s: float  # of the fastest repetition
    memcpy_gb_per_s: float  # of the fastest copy between these repetitions
    ratio_to_memcpy: float  # gb_per_s / memcpy_gb_per_s
    warmup_s: float  # the first call: compilation, or reading what was compiled before, included


class Bench:
    """The buffers that all measurements of one place share, and its clock."""

    def __init__(self, where: Where, elements: int, pace: Pace) -> None:
        """Raises ValueError for no elements."""
        if elements < 1:
            raise ValueError(f"there is nothing to measure on {elements} elements")
        self.where, self.pace = where, pace
        self.fragment = matrices(elements)
        device = torch.device(where.device)
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.empty(elements, device=device, dtype=torch.float32).normal_(generator=generator).mul_(SIZE)
        self.y = torch.zeros(elements, device=device, dtype=torch.float32)
        self.residual = torch.zeros(elements, device=device, dtype=torch.float32)
        self._source, self._target = self.x.clone(), torch.zeros(elements, device=device, dtype=torch.float32)
        # The fastest counts: torch's on all threads, and on a CPU the C library's on one.
        self._copies: list[Call] = [lambda: self._target.copy_(self._source)]
        if where.device == "cpu":
            source, target = self._source.numpy(), self._target.numpy()
            self._copies.append(lambda: np.copyto(target, source))

    def row(self, codec: str, path: str, op: str, call: Call, *, vectors: int = 1) -> SpeedRow:
        """Time a call that works on `vectors` times the elements."""
        warmup_s = self._seconds(call)
        least = min(2, self.pace.least) if warmup_s > SLOW_S else self.pace.least
        calls, copies, began = list[float](), list[float](), time.perf_counter()
        while len(calls) < least or (
            time.perf_counter() - began < self.pace.budget_s and len(calls) < MOST_REPETITIONS
        ):
            copies.append(self._seconds(self._copies[len(copies) % len(self._copies)]))
            calls.append(self._seconds(call))
        size_gb = 4e-9 * self.x.numel()
        best, memcpy = vectors * size_gb / min(calls), size_gb / min(copies)
        return SpeedRow(
            codec=codec,
            op=op,
            device=self.where.device,
            threads=self.where.threads,
            path=path,
            gb_per_s=best,
            memcpy_gb_per_s=memcpy,
            ratio_to_memcpy=best / memcpy,
            warmup_s=warmup_s,
        )

    def memcpy(self) -> SpeedRow:
        """The copy by itself, as a row."""
        row = self.row("memcpy", "torch", "copy", self._copies[0])
        best = max(row.gb_per_s, row.memcpy_gb_per_s)
        return dataclasses.replace(row, gb_per_s=best, memcpy_gb_per_s=best, ratio_to_memcpy=1.0)

    def _seconds(self, call: Call) -> float:
        if self.where.device != "cuda":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self._copies[0]()  # the device works while the host launches the call: that it takes is no time of the call's
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return 1e-3 * float(start.elapsed_time(end))


# --- what is timed


def codec_rows(bench: Bench, codec: Codec, ops: Sequence[str]) -> Iterator[SpeedRow]:
    x, y, fragment, name = bench.x, bench.y, bench.fragment, spelling_of(codec)
    fast = fast_path(codec.kernel_key(), x.device) if isinstance(codec, BlockCodec) else None
    path = "torch" if fast is None else ("triton" if bench.where.device == "cuda" else "numba")
    payload = torch.empty(codec.payload_bytes(fragment), dtype=torch.uint8, device=x.device)
    if "encode" in ops:
        yield _encode_row(bench, codec, path, payload)
    else:
        codec.encode_into(x, payload, fragment, seed=1)
    if "decode" in ops:
        yield bench.row(name, path, "decode", lambda: codec.decode_into(payload, y, fragment, seed=1))
    if "add" in ops:
        yield bench.row(name, path, "add", lambda: codec.decode_add_(payload, y, 0.125, fragment, seed=1))
    if "sum8" in ops:
        # Buffers of their own: reading one of them eight times would be reading the cache.
        payloads, weights, seeds = [payload.clone() for _ in range(NODES)], [1 / NODES] * NODES, [1] * NODES
        add_up = partial(codec.sum_into, payloads, weights, y, fragment, seeds=seeds)
        yield bench.row(name, path, "sum8", add_up, vectors=NODES)
    if "fused" in ops:
        out, residual = torch.empty_like(payload), bench.residual.zero_()
        yield bench.row(name, path, "fused", lambda: codec.encode_feedback_(x, residual, out, fragment, seed=1))
    if "outer" in ops and path == "numba" and fast is not None and codec.traits.exact_decode:
        yield _outer_row(bench, name, path, fast, torch.empty_like(payload))


def _encode_row(bench: Bench, codec: Codec, path: str, out: Tensor) -> SpeedRow:
    last: Tensor | None = None

    def encode() -> None:
        # A sender starts from its last payload, where that is of use.
        nonlocal last
        codec.encode_into(bench.x, out, bench.fragment, seed=1, previous=last)
        if last is None:
            last = out.clone()

    return bench.row(spelling_of(codec), path, "encode", encode)


def _outer_row(bench: Bench, name: str, path: str, fast: BlockKernels, out: Tensor) -> SpeedRow:
    target, momentum, anchor = bench.y.zero_(), bench.residual.zero_(), bench.x.clone()
    step = OuterStep(
        delta=bench.x,
        target=target,
        momentum=momentum,
        anchor=anchor,
        lr=0.7,
        mu=0.9,
        out=out,
        new_target=target,
        new_momentum=momentum,
        new_anchor=anchor,
    )
    return bench.row(name, path, "outer", lambda: fast.outer(step))


def matrices(numel: int) -> Fragment:
    """A fragment of square matrices, 4096² where they fit, and what is left as a vector."""
    side = next((side for side in (4096, 1024, 256) if side * side <= numel), 0)
    count = numel // (side * side) if side else 0
    slots = [TensorSlot(name=f"w{i}", shape=(side, side), offset=i * side * side) for i in range(count)]
    if rest := numel - count * side * side:
        slots.append(TensorSlot(name="v", shape=(rest,), offset=numel - rest))
    return Fragment(index=0, slot=0, numel=numel, tensors=tuple(slots))
